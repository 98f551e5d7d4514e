"""A time limit for work of a handler in this thread.

When the time is over, another thread interrupts the work, by every way there is: it has PostgreSQL cancel the statement at
work, cancels the task of an async handler, and raises `_TimeUp` in Python code. What stays in C code for ever (a socket
without a time-out, say) cannot be interrupted; then `overdue` is called, and decides.

That exception may strike between any two steps of Python code, so three things must be seen to. It must never strike after the
work: who comes first, the end or the time, is decided in one step (`dict.setdefault`); if it is the time, `Watch.run` does not
return before the other thread lets go, and then takes back what has not struck. And it must leave nothing half done that outlives the work: where a thread is taking or giving back a
lock, or within the database driver, SQLAlchemy, asyncio or an import, it waits until that is done. A thread is at rest while
we look where it is, and until the exception is sent, as long as we hold the interpreter's lock; we may lose it in between on a
busy machine, seldom. Half a statement costs the connection then, no more; the locks of `logging`, which every thread needs,
are given back in any case. And Python throws it away where it strikes a finalizer or a callback of the garbage collector: it
waits for the end of a ``__del__``, and strikes again while the work goes on.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus

from outbox.errors import HandlerTimeout

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: How often the work is interrupted again, as long as it goes on.
_TICK_SECONDS = 0.02
#: When the exception is raised again, unless the work is tidying up because of it: it may have been thrown away.
_AGAIN_SECONDS = 1.0
#: How often the worker's thread looks whether it is left alone.
_LET_GO_SECONDS = 0.001
#: How long PostgreSQL may take to hear that it is to cancel a statement.
_CANCEL_SECONDS = 2.0
#: How long a handler may take to end after its time, at least.
_GRACE_SECONDS = 5.0
#: How many exceptions that led to another are looked at.
_CHAIN = 100
#: Where no exception may come from nowhere: code that would be left half done.
_DELICATE_FILES = (
    __file__,
    *(str(Path(str(module.__file__)).parent) + os.sep for module in (psycopg, sqlalchemy)),
    str(Path(os.__file__).parent / "asyncio") + os.sep,
    str(Path(os.__file__).parent / "selectors.py"),
    "<frozen importlib",
)
_DELICATE_FUNCTIONS = frozenset(
    ["acquire", "release", "__enter__", "__exit__", "_acquire_restore", "_release_save", "_acquireLock", "_releaseLock"]
)


class _TimeUp(BaseException):
    """Raised in the handler's thread when its time is over; not an Exception, so that few catch it."""


@dataclass(slots=True)
class _Limit:
    """One piece of work and its time.

    Attributes:
        due: when its time is over, by `time.monotonic`.
        verdict: has ``first``: who was first, the worker's thread with its end or the other with its time. Whoever finds
            himself second there leaves the word to the first.
        ended: the work goes on no more; said by the worker's thread.
        let_go: nothing more is done to the work; said by the other thread.
    """

    seconds: float
    due: float
    raw: psycopg.Connection[Any]
    time_up: Callable[[], object]
    overdue: Callable[[], object]
    verdict: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    let_go: bool = False


class Watch:
    """Runs work in the thread that makes it, each for so long; the thread beside it is started when it is needed first."""

    def __init__(self) -> None:
        self._worker = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._limit: _Limit | None = None
        # The other thread sleeps until the time of a limit that it has seen is over, and then looks for the next: to set
        # a limit need not wake it, unless it comes before that.
        self._wakes_at = math.inf
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(
        self,
        work: Callable[[], T],
        seconds: float,
        raw: psycopg.Connection[Any],
        time_up: Callable[[], object],
        overdue: Callable[[], object],
    ) -> T:
        """The result of work.

        Args:
            seconds: how long it may take.
            raw: the connection that it works on.
            time_up: called from another thread when the time is over, to end what is no Python code.
            overdue: called from another thread if the work goes on all the same, for as long again and 5 s at least.

        Raises:
            HandlerTimeout: it took too long, whatever it then returned or raised.
            BaseException: what it raised.
        """
        if self._thread is None or not self._thread.is_alive():  # none yet; or this is a fork
            self._thread = threading.Thread(target=self._watched, name="time limits of handlers", daemon=True)
            self._thread.start()
        limit = _Limit(seconds, time.monotonic() + seconds, raw, time_up, overdue)
        # _TimeUp may strike anywhere within the try, but seldom, and not after an _end that went through.
        try:
            try:
                self._limit = limit
                if limit.due < self._wakes_at:
                    self._wake.put(True)
                result = work()
            finally:
                self._end(limit)
        except KeyboardInterrupt:
            self._surely_end(limit)
            raise
        except BaseException as error:
            self._surely_end(limit)
            if "time" in limit.verdict.values():
                raise _timeout(limit) from error
            raise
        if "time" in limit.verdict.values():
            raise _timeout(limit)
        return result

    def close(self) -> None:
        """End the other thread."""
        if self._thread is not None:
            self._wake.put(False)
            self._thread = None

    def _end(self, limit: _Limit) -> None:
        """Say that the work has ended, and see that it is left alone from now on. Twice is as good as once."""
        limit.ended = True
        self._limit = None
        if limit.verdict.setdefault("first", "end") == "time":
            self._wake.put(True)
            while not limit.let_go:
                time.sleep(_LET_GO_SECONDS)
            _raise_in(self._worker, None)
            _give_back_logging()

    def _surely_end(self, limit: _Limit) -> None:
        while True:
            try:
                return self._end(limit)
            except _TimeUp:
                pass

    # --- in the other thread ---

    def _watched(self) -> None:
        while True:
            limit = self._limit
            self._wakes_at = limit.due if limit else math.inf
            if self._limit is not limit:
                continue  # it may have been set when it was not known yet when we wake
            pause = limit.due - time.monotonic() if limit else None
            if pause is None or pause > 0:
                if not self._sleep(pause):
                    return
            elif limit is not None:
                self._enforce(limit)
                if self._limit is limit:
                    self._limit = None

    def _sleep(self, seconds: float | None) -> bool:
        """Sleep for so long at most; False: the watch is closed."""
        try:
            return self._wake.get(timeout=seconds)
        except queue.Empty:
            return True

    def _enforce(self, limit: _Limit) -> None:
        if limit.verdict.setdefault("first", "time") == "end":
            return
        try:
            _guarded(limit.time_up)
            overdue_at, strike_at = time.monotonic() + max(limit.seconds, _GRACE_SECONDS), 0.0
            while not limit.ended:
                time.sleep(0)  # we hold the interpreter's lock anew, for long enough
                if time.monotonic() >= strike_at and self._strike():
                    strike_at = time.monotonic() + _AGAIN_SECONDS
                _cancel_statement(limit.raw)
                self._sleep(_TICK_SECONDS)
                if time.monotonic() >= overdue_at and not limit.ended:
                    overdue_at = math.inf
                    _guarded(limit.overdue)
        finally:
            limit.let_go = True

    def _strike(self) -> bool:
        """Raise _TimeUp in the worker's thread if that does no harm there just now."""
        frame = sys._current_frames().get(self._worker)
        if frame is None or _is_delicate(frame) or _is_tidying_up(self._worker):
            return False
        _raise_in(self._worker, _TimeUp)
        return True


def _guarded(hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:
        _log.exception("the end of a handler's time")


def _timeout(limit: _Limit) -> HandlerTimeout:
    return HandlerTimeout(f"the handler took longer than its timeout_seconds, {limit.seconds:g}")


def _cancel_statement(raw: psycopg.Connection[Any]) -> None:
    """Have PostgreSQL cancel the handler's statement; nothing of ours runs on the connection meanwhile."""
    try:
        if raw.info.transaction_status == TransactionStatus.ACTIVE:
            raw.cancel_safe(timeout=_CANCEL_SECONDS)
    except psycopg.Error:
        pass  # the connection is lost: then the statement ends by that


def _is_delicate(frame: FrameType) -> bool:
    """Whether an exception that comes from nowhere could leave something half done where a thread is, or would be thrown away."""
    if frame.f_code.co_name in _DELICATE_FUNCTIONS or frame.f_code.co_filename.startswith(_DELICATE_FILES):
        return True
    at: FrameType | None = frame
    while at is not None and at.f_code.co_name != "__del__":
        at = at.f_back
    return at is not None


def _is_tidying_up(thread: int) -> bool:
    """Whether a thread is in a ``finally`` or ``except`` block on account of _TimeUp."""
    active: Any = sys._current_exceptions().get(thread)
    error = active[1] if isinstance(active, tuple) else active  # until Python 3.11
    for _ in range(_CHAIN):
        if error is None or isinstance(error, _TimeUp):
            break
        error = error.__context__
    return isinstance(error, _TimeUp)


def _give_back_logging() -> None:
    """Give back the locks of logging that this thread has taken; handlers are called with none."""
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]
    for lock in (logging._lock, *(handler.lock for handler in handlers if handler)):  # type: ignore[attr-defined]
        while lock is not None and lock._is_owned():
            lock.release()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread when it next runs Python code; None: take back what has not been raised yet."""
    wanted = ctypes.py_object(kind) if kind else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), wanted)
