"""A worker that is slower than the visibility time-out: another one takes its delivery, and then the first goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from examples.failures.place import GROUP, STREAM, Place, payments, wait_for
from examples.failures.stage import Failure, Scene, ended

WAITS = """
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    AND query LIKE '%INSERT INTO %processed_messages%'
"""


def naive_time_out(scene: Scene) -> str:
    """The time-out says that the first worker is dead. It was only slow."""
    place = scene.place
    place.make_group()
    place.add(payments(1))
    with frozen_at_work(scene, slow_naive):
        taken: dict[str, str] = {}
        wait_for("the time-out", lambda: taken.update(place.take_over("w2")) or taken)
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
        wait_for("another worker waits with its ledger row", lambda: database.execute(WAITS).rowcount)
    ended(other)
    return place.outcome(1)


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
        "time-out", "a visibility time-out that is shorter than the work",
        naive_time_out, "1 of 1 twice", our_time_out, "all 1 once",
    ),
)  # fmt: skip
