"""The worker is killed, and another one goes on: five payments, of which the third kills its worker by a real SIGKILL."""

from __future__ import annotations

from collections.abc import Callable

from examples.failures.place import GROUP, STREAM, Place, payments, wait_for
from examples.failures.stage import Failure, Scene, die
from outbox.telemetry import Outcomes

QUEUE, UNLUCKY = "queue", "payment-3"


def naive_brpop(scene: Scene) -> str:
    """What BRPOP has handed out is nowhere but in the worker's memory."""
    place = scene.place
    place.redis.lpush(QUEUE, *payments(5))
    scene.killed(brpop, place, die_at_unlucky)
    brpop(place)
    return place.outcome(5)


def brpop(place: Place, before_commit: Callable[[str], None] = lambda name: None) -> None:
    """A worker: take, handle, until nothing is left."""
    while popped := place.redis.brpop(QUEUE, timeout=0.1):
        name = popped[1]
        before_commit(name)
        place.apply([name])


def naive_ack_first(scene: Scene) -> str:
    """What is acknowledged is forgotten, done or not: "at most once"."""
    place = scene.place
    place.make_group()
    place.add(payments(5))
    scene.killed(ack_first, place, die_at_unlucky)
    ack_first(place)
    return place.outcome(5)


def ack_first(place: Place, before_commit: Callable[[str], None] = lambda name: None) -> None:
    """A worker: read, acknowledge, handle."""
    while entries := place.read(1):
        place.redis.xack(STREAM, GROUP, *entries)
        for name in entries.values():
            before_commit(name)
        place.apply(entries.values())


def naive_dedup_mark(scene: Scene) -> str:
    """A mark "seen" in Redis and the effect in PostgreSQL are two writes, and it is the mark that survives."""
    place = scene.place
    place.make_group()
    place.add(payments(5))
    scene.killed(dedup_mark, place, die_at_unlucky)

    def handled_by_another() -> bool:
        dedup_mark(place)
        return place.settled()

    wait_for("what the dead worker had is taken over", handled_by_another)
    return place.outcome(5)


def dedup_mark(place: Place, before_commit: Callable[[str], None] = lambda name: None) -> None:
    """A worker: take over or read, mark, handle, acknowledge."""
    while entries := place.take_over("w2") or place.read(1):
        for entry, name in entries.items():
            if place.redis.set(f"seen:{name}", 1, nx=True, ex=86_400):  # else somebody has seen it; but is it done?
                before_commit(name)
                place.apply([name])
            place.redis.xack(STREAM, GROUP, entry)


def our_crash_in_the_handler(scene: Scene) -> str:
    """Not committed is not done: the transaction rolls back with the ledger row in it, and the delivery stays pending."""
    return our_crash(scene.place, scene, dying_in_the_handler)


def our_crash_before_the_ack(scene: Scene) -> str:
    """Committed, not acknowledged: it comes again, and the ledger knows it."""
    return our_crash(scene.place, scene, dying_before_the_ack)


def our_crash(place: Place, scene: Scene, dying: Callable[[Place], None]) -> str:
    place.record(payments(5))
    with place.relay() as publish:
        publish()
    scene.killed(dying, place)
    place.consume()
    return place.outcome(5)


def dying_in_the_handler(place: Place) -> None:
    place.consume(meanwhile=die_at_unlucky, batch_size=1)


def dying_before_the_ack(place: Place) -> None:
    applied = 0

    def observe(measurement: object) -> None:
        nonlocal applied
        if isinstance(measurement, Outcomes):  # measured after COMMIT, before XACK
            applied += measurement.counts["applied"]
            if applied == 3:
                die()

    place.consume(observer=observe, batch_size=1)


def die_at_unlucky(name: str) -> None:
    if name == UNLUCKY:
        die()


EXHIBITS = (
    Failure(
        "brpop", "BRPOP, and the worker is killed at its work",
        naive_brpop, "1 of 5 lost", our_crash_in_the_handler, "all 5 once",
    ),
    Failure(
        "ack-first", "acknowledged before the commit, killed in between",
        naive_ack_first, "1 of 5 lost", our_crash_before_the_ack, "all 5 once",
    ),
    Failure(
        "dedup-mark", "marked as seen in Redis before the transaction, killed in between",
        naive_dedup_mark, "1 of 5 lost", our_crash_in_the_handler, "all 5 once",
    ),
)  # fmt: skip
