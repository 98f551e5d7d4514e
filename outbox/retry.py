"""The retry policy of both sides' loops: what PostgreSQL or Redis fails to do is tried until it succeeds or we are stopped."""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import psycopg
import tenacity

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 0.05
_REMIND_SECONDS: Final = 30.0
#: SQLSTATEs (or their classes) that say something about the server, not about the statement: connection (08), resources
#: (53), operator's intervention and shutdown (57P), system (58), and a server that has become a read-only replica.
_AWAY: Final = ("08", "53", "57P", "58", "25006")


class Stop:
    """A request to stop that a signal handler may make: unlike `threading.Event`, whose lock the interrupted thread may hold.

    For one thread that waits.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Ask to stop."""
        self._stopped = True
        self._wake.put(None)  # reentrant, as its documentation promises

    def is_set(self) -> bool:
        """Whether somebody has asked."""
        return self._stopped

    def wait(self, seconds: float) -> bool:
        """Pause for so long, or until somebody asks; whether somebody has."""
        if not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self._stopped


def database_away(error: BaseException | None) -> bool:
    """Whether a psycopg error, or SQLAlchemy's around one, means that PostgreSQL cannot be reached or cannot work now."""
    error = getattr(error, "orig", None) or error
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:  # from the client's side: refused, timed out, reset
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_AWAY)


def until_done(
    call: Callable[[], T],
    *,
    worth_retrying: Callable[[BaseException], bool],
    longest_pause_seconds: float,
    stopping: Stop,
    failed: Callable[[BaseException], None],
    log: logging.Logger,
    who: str,
) -> T | None:
    """The call's result, however often it takes; None if `stopping` was set meanwhile.

    Pauses double from 0.05 seconds up to `longest_pause_seconds`; each is shortened by up to a quarter, so that many
    processes do not come back at the same moment. An outage is logged when it begins, about every half minute while it
    lasts, and when it ends.

    Args:
        failed: called after each failure, before the pause.
        who: begins the log messages and names their action, e.g. ``relay``.

    Raises:
        BaseException: what `worth_retrying` says no to.
    """

    began, told, action = 0.0, 0.0, who.partition(" ")[0]

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None
        nonlocal began, told
        now = time.monotonic()
        began, notable = began or now, state.attempt_number == 1 or now - told >= _REMIND_SECONDS
        told = now if notable else told
        log.log(
            logging.WARNING if notable else logging.DEBUG,
            "%s waits, try %d: %s", who, state.attempt_number, " ".join(str(error).split()),
            extra={"action": f"{action}_waits", "error": type(error).__name__},
        )  # fmt: skip
        failed(error)

    def pause(seconds: float) -> None:
        stopping.wait(seconds)

    grow = tenacity.wait_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=longest_pause_seconds)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(worth_retrying),
        wait=lambda state: grow(state) * random.uniform(0.75, 1),
        stop=lambda state: stopping.is_set(),
        sleep=pause,
        before_sleep=before_sleep,
    )
    try:
        result = retrying(call)
    except tenacity.RetryError:
        return None
    if began:
        log.warning(
            "%s goes on after %.1f s", who, time.monotonic() - began, extra={"action": f"{action}_goes_on"}
        )  # fmt: skip
    return result
