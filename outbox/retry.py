"""The retry policy of both sides' loops: what PostgreSQL or Redis fails to do is tried until it succeeds or we are stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import tenacity

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.05


def until_done(
    call: Callable[[], T],
    *,
    worth_retrying: Callable[[BaseException], bool],
    longest_pause_seconds: float,
    stopping: threading.Event,
    failed: Callable[[BaseException], None],
    log: logging.Logger,
    who: str,
) -> T | None:
    """The call's result, however often it takes; None if `stopping` was set meanwhile.

    Pauses double from 0.05 seconds up to `longest_pause_seconds`, with up to a quarter of that as jitter. The 1st, the
    10th and then every 100th failure is a warning, so that an outage does not fill the log.

    Args:
        failed: called after each failure, before the pause.
        who: begins the log messages and names their action, e.g. ``relay``.

    Raises:
        BaseException: what `worth_retrying` says no to.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None
        notable = state.attempt_number in (1, 10) or state.attempt_number % 100 == 0
        log.log(
            logging.WARNING if notable else logging.DEBUG,
            "%s waits, try %d: %s", who, state.attempt_number, " ".join(str(error).split()),
            extra={"action": f"{who.partition(' ')[0]}_waits", "error": type(error).__name__},
        )  # fmt: skip
        failed(error)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(worth_retrying),
        wait=tenacity.wait_exponential(multiplier=_FIRST_PAUSE_SECONDS, max=longest_pause_seconds)
        + tenacity.wait_random(0, longest_pause_seconds / 4),
        stop=tenacity.stop_when_event_set(stopping),
        sleep=tenacity.sleep_using_event(stopping),
        before_sleep=before_sleep,
    )
    try:
        return retrying(call)
    except tenacity.RetryError:
        return None
