"""How a consumer's process ends when it is asked to: when its handler has returned, or by itself after ``CONSUMER_DRAIN_SECONDS``.

A handler cannot be interrupted while it is in C (a statement, a request, a sleep), so another thread does it: it cuts the
connection to PostgreSQL, which rolls the open transaction back, hands back what the process holds, and ends the process.
Should the COMMIT have been on its way in that instant, whoever gets the events next finds them in the ledger.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from consumer.crew import Crew
from consumer.worker import Worker

_log = logging.getLogger(__name__)

#: Exit code of a process whose handler did not return in time: EX_TEMPFAIL of sysexits.h.
EXIT_CODE: Final = 75
#: How long the handing back may take then.
_LAST_SECONDS = 5.0


@contextlib.contextmanager
def draining(worker: Worker | Crew, seconds: float) -> Iterator[Callable[[], None]]:
    """Gives what stops the worker: safe in a signal handler. The block must end within `seconds` of it, or the process does."""
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    ended, expired = threading.Event(), threading.Event()

    def stop() -> None:
        worker.stop()
        asked.put(None)  # reentrant, as its documentation promises

    def watch() -> None:
        asked.get()
        deadline = time.monotonic() + seconds
        if ended.is_set():
            return
        # In a thread of its own: a server that hangs must not keep us from looking at the time.
        early = threading.Thread(target=_handed_back, args=(worker.hand_back_unstarted,), name="hand-back", daemon=True)
        early.start()
        if ended.wait(max(0.0, deadline - time.monotonic())):
            return
        expired.set()
        _log.error(
            "not done within CONSUMER_DRAIN_SECONDS (%g): what is in work is rolled back and handed back; exit code %d",
            seconds, EXIT_CODE, extra={"action": "drain_expired"},
        )  # fmt: skip
        last = threading.Timer(_LAST_SECONDS, os._exit, [EXIT_CODE])
        last.daemon = True
        last.start()
        _handed_back(worker.abandon)
        os._exit(EXIT_CODE)

    watching = threading.Thread(target=watch, name="drain", daemon=True)
    watching.start()
    try:
        yield stop
    finally:
        ended.set()
        asked.put(None)
        if expired.is_set():
            watching.join()  # it is its exit code


def _handed_back(hand_back: Callable[[], None]) -> None:
    try:
        hand_back()
    except Exception as error:  # the process ends all the same
        _log.warning(
            "could not hand back everything, others take it over later: %s: %s", type(error).__name__, error,
            extra={"action": "not_handed_back"},
        )  # fmt: skip
