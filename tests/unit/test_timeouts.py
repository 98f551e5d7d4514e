"""Time limits of Python code: what interrupts a handler never strikes anywhere else, however narrow the time."""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from consumer import timeouts
from consumer.timeouts import Watch, _TimeUp
from outbox.errors import HandlerTimeout


class Info:
    transaction_status = TransactionStatus.INTRANS


class Connection:
    """With no statement at work."""

    info = Info()


RAW: psycopg.Connection[Any] = Connection()  # type: ignore[assignment]


def nothing() -> None: ...


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.close()


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as can be, so that one comes between any two steps of another."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def spin(seconds: float) -> str:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return "done"


def limited(
    watch: Watch, work: Callable[[], object], seconds: float, overdue: Callable[[], object] = nothing
) -> object:
    return watch.run(work, seconds, RAW, nothing, overdue)


def _race(watch: Watch, rounds: int) -> Counter[str]:
    """Work of many kinds that ends about when its time does; what ours does after it must never be struck."""
    chance, ended = random.Random(80), Counter[str]()
    seconds = 0.0005

    def plain() -> str:
        return spin(duration)

    def swallow() -> str:
        with suppress(BaseException):
            spin(duration)
        return "done"

    def fail() -> None:
        spin(duration)
        raise LookupError

    def clean_up() -> str:
        try:
            return spin(duration)
        finally:
            spin(0.0001)

    def in_pieces() -> str:
        while time.perf_counter() < end:
            with lock:
                sum(range(20))
        return "done"

    lock = threading.RLock()
    struck_ours = 0
    for _ in range(rounds):
        duration = chance.uniform(0, 2 * seconds)
        end = time.perf_counter() + duration
        work = chance.choice([plain, swallow, fail, clean_up, in_pieces])
        try:
            try:
                ended[str(limited(watch, work, seconds))] += 1
            except HandlerTimeout as error:
                ended["timeout"] += 1
                ended["struck"] += isinstance(error.__cause__, _TimeUp)
            except LookupError:
                ended["its own"] += 1
            for _ in range(50):  # what is ours
                sum(range(5))
        except _TimeUp:
            struck_ours += 1
        assert lock.acquire(blocking=False)
        lock.release()
    assert struck_ours == 0
    return ended


@pytest.mark.usefixtures("restless")
def test_the_time_strikes_the_work_or_nothing(watch: Watch) -> None:
    ended = _race(watch, 1000)
    assert min(ended["done"], ended["timeout"], ended["struck"]) > 0


@pytest.mark.long
@pytest.mark.usefixtures("restless")
def test_the_time_strikes_the_work_or_nothing_ten_thousand_times(watch: Watch) -> None:
    ended = _race(watch, 10_000)
    assert min(ended[how] for how in ("done", "timeout", "struck", "its own")) > 50


def test_nobody_is_struck_while_he_takes_a_lock(watch: Watch) -> None:
    class Lock:
        taken = False

        def acquire(self) -> None:
            self.taken = True
            end = time.perf_counter() + 0.1
            while time.perf_counter() < end:
                pass

        def release(self) -> None:
            self.taken = False

    lock = Lock()

    def work() -> None:
        lock.acquire()
        try:
            spin(60)
        finally:
            lock.release()

    with pytest.raises(HandlerTimeout):
        limited(watch, work, 0.02)
    assert not lock.taken


def test_locks_of_logging_are_never_left_taken(watch: Watch) -> None:
    """As when it strikes between two steps where a lock is taken, after all; another thread wants to log then."""
    handler = logging.Handler()

    def work() -> None:
        handler.acquire()
        handler.acquire()
        logging._lock.acquire()  # type: ignore[attr-defined]
        spin(60)

    with pytest.raises(HandlerTimeout):
        limited(watch, work, 0.01)
    taken: list[bool] = []

    def take() -> None:
        for lock in (handler.lock, logging._lock):  # type: ignore[attr-defined]
            taken.append(lock.acquire(timeout=10))
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join(30)
    assert taken == [True, True]


@pytest.mark.usefixtures("restless")
def test_who_logs_without_end_stops_nobody_elses_log(watch: Watch) -> None:
    log = logging.getLogger("tests.time_limits")

    def chatter() -> None:
        while True:
            log.warning("still there")

    for _ in range(30):
        with pytest.raises(HandlerTimeout):
            limited(watch, chatter, 0.005)
    other = threading.Thread(
        target=lambda: logging.getLogger("tests.time_limits.other").warning("from another thread"), daemon=True
    )
    other.start()
    other.join(30)
    assert not other.is_alive()


def test_what_is_sent_late_strikes_nothing_of_ours(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread beside us decides to strike, and gets to it only when the work has ended."""
    raise_in, late = timeouts._raise_in, 0

    def slowly(thread: int, kind: type[BaseException] | None) -> None:
        if kind is not None:
            time.sleep(0.03)
        raise_in(thread, kind)

    monkeypatch.setattr(timeouts, "_raise_in", slowly)
    for _ in range(20):
        try:
            limited(watch, lambda: spin(0.02), 0.01)
        except HandlerTimeout:
            late += 1
        spin(0.04)
    assert late > 0


@pytest.fixture
def thrown_away() -> Iterator[list[object]]:
    """The kinds of exceptions that Python has thrown away."""
    kinds: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda raised: kinds.append(raised.exc_type)
    yield kinds
    sys.unraisablehook = before


def test_a_finalizer_is_not_struck(watch: Watch, thrown_away: list[object]) -> None:
    class Slow:
        def __del__(self) -> None:
            spin(0.01)

    def work() -> None:
        while True:
            Slow()
            spin(0.01)

    for _ in range(10):
        with pytest.raises(HandlerTimeout):
            limited(watch, work, 0.005)
    assert len(thrown_away) <= 5  # about none; without care every second


def test_what_python_throws_away_is_raised_again(watch: Watch, thrown_away: list[object]) -> None:
    """An exception in a callback of the garbage collector ends nothing."""

    def slow(phase: str, info: dict[str, int]) -> None:
        spin(0.01)

    def work() -> None:
        while True:
            gc.collect(0)
            spin(0.005)

    gc.callbacks.append(slow)
    try:
        for _ in range(20):
            with pytest.raises(HandlerTimeout):
                limited(watch, work, 0.005)
            if _TimeUp in thrown_away:
                break
    finally:
        gc.callbacks.remove(slow)
    assert _TimeUp in thrown_away


def test_who_tidies_up_is_left_in_peace(watch: Watch) -> None:
    tidied: list[str] = []

    def work() -> None:
        try:
            spin(60)
        finally:
            try:
                raise LookupError
            except LookupError:
                spin(0.7)
            spin(0.7)
            tidied.append("up")

    with pytest.raises(HandlerTimeout):
        limited(watch, work, 0.01)
    assert tidied == ["up"]


def test_what_returns_late_is_late(watch: Watch) -> None:
    """It may have swallowed what interrupted it, and so have done a part only."""

    def swallow() -> str:
        with suppress(BaseException):
            spin(60)
        return "done"

    with pytest.raises(HandlerTimeout, match=r"longer than its timeout_seconds, 0\.01"):
        limited(watch, swallow, 0.01)


def test_a_short_limit_after_a_long_one(watch: Watch) -> None:
    """The other thread is asleep until the long one's time."""
    assert limited(watch, lambda: "done", 3600) == "done"
    started = time.monotonic()
    with pytest.raises(HandlerTimeout):
        limited(watch, lambda: spin(60), 0.05)
    assert time.monotonic() - started < 30


def test_a_limit_is_not_the_one_before(watch: Watch) -> None:
    with suppress(HandlerTimeout):  # on a machine that stands still
        limited(watch, lambda: spin(0.01), 0.05)
    assert limited(watch, lambda: spin(0.08), 30) == "done"


def test_work_takes_little_longer_with_a_limit(watch: Watch) -> None:
    """No thread is started or woken for each."""
    threads = {thread.ident for thread in threading.enumerate()}
    for _ in range(1000):
        limited(watch, nothing, 30)
    assert len({thread.ident for thread in threading.enumerate()} - threads) == 1


def test_a_broken_hook_breaks_no_limit(watch: Watch) -> None:
    def broken() -> None:
        raise RuntimeError("hook")

    with pytest.raises(HandlerTimeout):
        watch.run(lambda: spin(60), 0.01, RAW, broken, nothing)
    with pytest.raises(HandlerTimeout):
        limited(watch, lambda: spin(60), 0.01)


def test_a_closed_watch_has_no_thread(watch: Watch) -> None:
    before = set(threading.enumerate())
    limited(watch, nothing, 30)
    (thread,) = set(threading.enumerate()) - before
    watch.close()
    thread.join(30)
    assert not thread.is_alive()
    assert limited(watch, lambda: "done", 30) == "done"
