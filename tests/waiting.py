"""Waiting for a condition with a deadline, never for a time; and for the end of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_POLL_SECONDS = 0.02


def eventually(
    condition: Callable[[], _T],
    timeout_seconds: float = 30,
    message: str = "",
    *,
    ignoring: tuple[type[Exception], ...] = (),
) -> _T:
    """Call `condition` until its value is true, and return that value.

    Args:
        ignoring: errors that count as "not yet", as of a server that is being restarted.

    Raises:
        AssertionError: it was not true in time; shows the last value, or the last error.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        expired = time.monotonic() > deadline  # looked at first, so that the condition has the last word
        error: Exception | None = None
        try:
            if value := condition():
                return value
            last = repr(value)
        except ignoring as caught:
            error = caught
            last = repr(caught)
        if expired:
            name = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout_seconds} s: {name}; last seen: {last}") from error
        time.sleep(_POLL_SECONDS)


def stops_within(limit_seconds: float, started: Callable[[], subprocess.Popen[bytes]], tries: int = 3) -> bool:
    """Whether a process ends well within the time after SIGTERM.

    The machine may be busy with something else just then: what cannot be done in time is not done at any of the tries.
    """
    for _ in range(tries):
        process, begun = started(), time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        if time.monotonic() - begun < limit_seconds:
            return True
    return False


def in_time(limit_seconds: float, turn: Callable[[], float], tries: int = 3) -> bool:
    """Whether `turn`, which says how many seconds something took, stays within the limit at one of the tries; as above."""
    return any(turn() < limit_seconds for _ in range(tries))


def lasting(seconds: float, case_seconds: float) -> float:
    """How long an outage or a load lasts: shortened, or as the acceptance case says where TEST_CASE_TIMES=1 is set."""
    return case_seconds if os.environ.get("TEST_CASE_TIMES") == "1" else seconds
