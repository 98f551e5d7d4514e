"""Somebody trims the stream, and what the servers' own figures say afterwards."""

from __future__ import annotations

from collections.abc import Callable

import redis

from examples.failures.place import GROUP, STREAM, Place, payments
from examples.failures.stage import Failure, Scene, die
from outbox.operations import status

# --- 1,006 payments, of which 3 are handled when the consumers go down ------------------------------------------------

BEFORE, MEANWHILE = payments(3), payments(1003, first=4)


def naive_maxlen(scene: Scene) -> str:
    """XADD … MAXLEN = 100 keeps the newest 100, read or not."""
    place = scene.place
    down_after_three(place, maxlen=100, approximate=False)
    place.work_through()
    return place.outcome(1006)


def down_after_three(place: Place, **options: object) -> None:
    place.add(BEFORE, **options)
    place.work_through()
    place.add(MEANWHILE, **options)


def our_trimming(scene: Scene) -> str:
    """The relay trims what every group has acknowledged, and nothing else; here in every round."""
    place = scene.place
    with place.relay(stream_keep_seconds=0) as publish:
        our_down_after_three(place, publish)
        place.consume()
    return place.outcome(1006)


def our_down_after_three(place: Place, publish: Callable[[], None]) -> None:
    place.record(BEFORE)
    publish()
    place.consume()
    place.record(MEANWHILE)
    publish()


def naive_lag(scene: Scene) -> str:
    """How far behind is the group? The server says so in XINFO GROUPS; but 1,003 payments have not been handled."""
    lags = []
    for trim in (by_xtrim, by_xdel):
        place = scene.at(scene.start())
        down_after_three(place)
        trim(place)
        lags.append(place.redis.xinfo_groups(STREAM)[0]["lag"])
    return "{} / {}".format(*("null" if lag is None else f"{lag:,}" for lag in lags))


def our_lag(scene: Scene) -> str:
    """Sealed batches are counted in PostgreSQL, so what is not acknowledged is known whatever became of the stream."""
    lags = []
    place = scene.place
    with place.relay() as publish:
        our_down_after_three(place, publish)
        for trim in (by_xtrim, by_xdel):
            trim(place)
            lags.append(f"{unacknowledged(place):,}")
            publish()  # what was taken is published again
    return " / ".join(lags)


def unacknowledged(place: Place) -> int:
    """As `outbox status` says."""
    (stream,) = status(place.relay_settings()).streams
    (group,) = stream.groups
    return group.unacknowledged


def by_xtrim(place: Place) -> None:
    """Keep the newest 100."""
    place.redis.xtrim(STREAM, maxlen=100, approximate=False)


def by_xdel(place: Place) -> None:
    """Delete 903 in the middle, which nobody has read."""
    place.redis.xdel(STREAM, *[entry for entry, _ in place.redis.xrange(STREAM, count=956)][53:])


# --- 10 payments, of which 6 are acknowledged and 4 still with a worker ----------------------------------------------


def naive_acked(scene: Scene) -> str:
    """Only Redis, from 8.2 on, knows XTRIM … ACKED (and XACKDEL), which spares what some group has not acknowledged.
    Without it one trims up to what the group has read, and so what its workers still have."""
    place = scene.place
    place.make_group()
    place.add(payments(10))
    done, left = place.read(6), place.read(4)
    place.apply(done.values())
    place.redis.xack(STREAM, GROUP, *done)
    how = "ACKED: "
    try:
        place.redis.execute_command("XTRIM", STREAM, "MAXLEN", "=", 0, "ACKED")
    except redis.ResponseError:  # Valkey, and older Redis
        how = ""
        place.redis.xtrim(STREAM, minid=list(left)[-1], approximate=False)
    taken = place.redis.xclaim(STREAM, GROUP, "w2", min_idle_time=0, message_ids=list(left))
    place.apply(fields["name"] for _, fields in taken if fields)
    return how + place.outcome(10)


def our_minid(scene: Scene) -> str:
    """The relay computes what is acknowledged by itself, and says XTRIM MINID, which all servers know."""
    place = scene.place
    place.record(payments(10))
    with place.relay(stream_keep_seconds=0) as publish:
        publish()
        scene.killed(dying_at_the_seventh, place)
        publish()
        left = place.redis.xlen(STREAM)
    place.consume()
    return place.outcome(10) if left == 4 else f"{left} left"


def dying_at_the_seventh(place: Place) -> None:
    place.consume(meanwhile=lambda name: die() if name == "payment-7" else None, batch_size=1)


EXHIBITS = (
    Failure(
        "maxlen", "XADD MAXLEN = 100, and 1,003 payments while the consumers are down",
        naive_maxlen, "903 of 1,006 lost", our_trimming, "all 1,006 once",
    ),
    Failure(
        "acked", "trimming the 6 of 10 that are acknowledged: Redis 8.2 has XTRIM ACKED, Valkey has not",
        naive_acked, {"redis8": "ACKED: all 10 once", "else": "3 of 10 lost"}, our_minid, "all 10 once",
    ),
    Failure(
        "lag", "how far the group is behind (1,003) after XTRIM / XDEL of 903 that it has not read",
        naive_lag, {"redis8": "100 / null", "else": "1,003 / null"}, our_lag, "1,003 / 1,003",
    ),
)  # fmt: skip
