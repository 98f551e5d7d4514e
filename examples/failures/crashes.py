"""The worker dies, or is so slow that it seems dead. Each is a process of its own that gets a real SIGKILL or SIGSTOP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from examples.failures.stage import GROUP, STREAM, Failure, Place, Scene, die, ended, payments, wait_for
from outbox.telemetry import Outcomes

QUEUE, UNLUCKY = "queue", "payment-3"

# --- five payments, of which the third kills its worker; another worker then goes on -------------------------------


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
    while entries := take_over(place, "w2") or place.read(1):
        for entry, name in entries.items():
            if place.redis.set(f"seen:{name}", 1, nx=True, ex=86_400):  # else somebody has seen it; but is it done?
                before_commit(name)
                place.apply([name])
            place.redis.xack(STREAM, GROUP, entry)


def our_crash_in_the_handler(scene: Scene) -> str:
    """Not committed is not done: the transaction rolls back with the ledger row in it, and the delivery stays pending."""
    place = scene.place
    place.record(payments(5))
    with place.relay() as publish:
        publish()
    scene.killed(dying_in_the_handler, place)
    place.consume()
    return place.outcome(5)


def our_crash_before_the_ack(scene: Scene) -> str:
    """Committed, not acknowledged: it comes again, and the ledger knows it."""
    place = scene.place
    place.record(payments(5))
    with place.relay() as publish:
        publish()
    scene.killed(dying_before_the_ack, place)
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


# --- a worker that is slower than the time-out: another one takes its delivery, and then the first goes on ----------


def naive_time_out(scene: Scene) -> str:
    """The time-out says that the first worker is dead. It was only slow."""
    place = scene.place
    place.make_group()
    place.add(payments(1))
    with frozen_at_work(scene, slow_naive):
        taken: dict[str, str] = {}
        wait_for("the time-out", lambda: taken.update(take_over(place, "w2")) or taken)
        place.apply(taken.values())
    return place.outcome(1)


def our_time_out(scene: Scene) -> str:
    """Both work on it, but the ledger has room for one: the second waits for the first one's COMMIT, and stands back."""
    place = scene.place
    place.record(payments(1))
    with place.relay() as publish:
        publish()
    with frozen_at_work(scene, slow_ours), place.database() as database:
        other = scene.run(Place.consume, place)
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_for("another worker takes over", lambda: database.execute(waits).fetchone())
    ended(other)
    return place.outcome(1)


def take_over(place: Place, worker: str) -> dict[str, str]:
    """Names of what some worker has had for longer than 50 ms, now given to another, by the id of their entry."""
    _, entries, *_ = place.redis.xautoclaim(STREAM, GROUP, worker, 50)
    return {entry: fields["name"] for entry, fields in entries}


def slow_naive(place: Place) -> None:
    entries = place.read(1)
    slow_work(place)
    place.apply(entries.values())
    place.redis.xack(STREAM, GROUP, *entries)


def slow_ours(place: Place) -> None:
    place.consume(meanwhile=lambda name: slow_work(place))


def slow_work(place: Place) -> None:
    """Takes until it is told to end."""
    place.redis.lpush("at work", 1)
    place.redis.blpop("end", timeout=0)


@contextmanager
def frozen_at_work(scene: Scene, worker: Callable[[Place], None]) -> Iterator[None]:
    """A worker whose whole process stands still meanwhile, as in a virtual machine that is moved; then it goes on."""
    process = scene.run(worker, scene.place)
    assert process.pid is not None
    scene.place.redis.blpop("at work", timeout=0)
    os.kill(process.pid, signal.SIGSTOP)
    yield
    os.kill(process.pid, signal.SIGCONT)
    scene.place.redis.lpush("end", 1)
    ended(process)


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
    Failure(
        "time-out", "a visibility time-out that is shorter than the work",
        naive_time_out, "1 of 1 twice", our_time_out, "all 1 once",
    ),
)  # fmt: skip
