"""An outbox that is read by its last id. Ids are handed out before the commit, and not everyone commits in their order."""

from __future__ import annotations

from examples.failures.place import payments
from examples.failures.stage import Failure, Scene

EARLY, LATE = payments(2)


def naive_last_id(scene: Scene) -> str:
    """The poller sees id 2, remembers it, and never looks at id 1, which commits later."""
    place, last = scene.place, 0
    with place.database() as slow, place.database() as quick:
        quick.execute("CREATE TABLE naive_outbox (id bigint GENERATED ALWAYS AS IDENTITY, name text NOT NULL)")

        def poll() -> None:
            nonlocal last
            rows = quick.execute("SELECT id, name FROM naive_outbox WHERE id > %s ORDER BY id", (last,)).fetchall()
            place.add(name for _, name in rows)
            last = max((id for id, _ in rows), default=last)

        with slow.transaction():
            slow.execute("INSERT INTO naive_outbox (name) VALUES (%s)", (EARLY,))  # id 1, not committed yet
            quick.execute("INSERT INTO naive_outbox (name) VALUES (%s)", (LATE,))  # id 2
            poll()
        poll()
    place.work_through()
    return place.outcome(2)


def our_windows(scene: Scene) -> str:
    """The relay asks what has become visible since its last look, whatever the ids are."""
    place = scene.place
    with place.relay() as publish:
        with place.database() as slow, slow.transaction():
            place.record([EARLY], slow)
            place.record([LATE])
            publish()
        publish()
    place.consume()
    return place.outcome(2)


EXHIBITS = (
    Failure(
        "last-id", "an outbox polled by its last id; ids 1 and 2 commit in the order 2, 1",
        naive_last_id, "1 of 2 lost", our_windows, "all 2 once",
    ),
)  # fmt: skip
