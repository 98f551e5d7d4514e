"""Several processes under one parent, which forks them, replaces those that end, and remembers what they died of.

The parent opens no connection and starts no thread, so that it has nothing that a child could share by mistake. It waits in
one place, for a byte: a signal's (by the wakeup descriptor), and there its children's ends show, too. Signals are blocked from
before a fork until the child has its own ways with them, so that none gets lost or meets the parent's.

A child learns that its parent is gone by a pipe of which the parent alone has the other end; then it ends as by SIGTERM. The
terminal's Ctrl-C reaches the parent and the children alike: they leave it to him.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from consumer.crew import Crew, touch
from consumer.drain import draining
from consumer.handlers import Consumer
from consumer.notes import Note, Will, notes, wills
from consumer.settings import ConsumerSettings
from outbox import schema as schemas
from outbox.errors import OutboxError

_log = logging.getLogger(__name__)

#: Pauses before a child is replaced that ended before it had done anything: the first, and the longest.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
#: A child that has lived for so long was of use, even if nothing came.
_OF_USE_SECONDS = 10.0
_BEAT_SECONDS = 1.0
#: How long after their drain children may take to end, before they are killed.
_GRACE_SECONDS = 15.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(slots=True)
class _Place:
    """A child, and after it the next one: they share memory, and inherit from each other."""

    notes: list[Note]
    wills: list[Will] = field(default_factory=list)
    pid: int | None = None
    began: float = 0.0
    due: float = 0.0
    pause: float = 0.0


class Supervisor:
    """Runs ``settings.processes`` children with ``settings.threads`` workers each.

    Args:
        consumer: the handlers.
        settings: see `consumer.settings.ConsumerSettings`.
        look: the look for danger at the start, made by a child of its own; its exit code. Where settings are strict, nothing
            is started before it has ended with 0.
    """

    def __init__(self, consumer: Consumer, settings: ConsumerSettings, look: Callable[[], int]) -> None:
        self._consumer, self._settings, self._look = consumer, settings, look
        self._places = [_Place(notes(settings.threads)) for _ in range(settings.processes)]
        self._looking: int | None = None
        self._asked = 0  # how often we were asked to stop
        self._kill_at = float("inf")
        self._worst = 0
        self._wake = self._alive = (-1, -1)

    def run(self) -> int:
        """Work until SIGTERM or SIGINT, or until a child says that none can work; a second signal kills them.

        Returns:
            The worst exit code of a child that was not replaced; 128 and the signal's number for one that was killed.
        """
        schemas.head("consumer")  # read once, for all
        gc.collect()
        gc.freeze()  # or each child would copy what is only looked at to be found in use
        if threading.active_count() > 1:
            _log.warning(
                "the consumer's module has started threads, which its processes will not have: start them in a handler",
                extra={"action": "threads_before_fork"},
            )
        with self._listening():
            if not self._looked():
                return self._worst
            for place in self._places:
                self._start(place)
            _log.info(
                "consumer %s started, %d processes of %d threads",
                self._consumer.name, self._settings.processes, self._settings.threads,
                extra={"action": "consumer_started"},
            )  # fmt: skip
            while self._at_work():
                self._wait()
                self._reap()
                for place in self._places:
                    if place.pid is None and not self._asked and time.monotonic() >= place.due:
                        self._start(place)
                if self._settings.heartbeat_file:
                    touch(Path(self._settings.heartbeat_file), [note for place in self._places for note in place.notes])
        return self._worst

    # --- children ---

    def _start(self, place: _Place) -> None:
        for note in place.notes:
            note.clear()
        place.began = time.monotonic()
        try:
            place.pid = self._fork(lambda unblock: self._work(place, unblock))
        except OSError as error:  # no memory, too many processes
            self._put_off(place)
            _log.error("cannot start a process now: %s", error, extra={"action": "fork_failed"})

    def _fork(self, work: Callable[[Callable[[], None]], int]) -> int:
        """A child that does this; it is given what lets signals through, once it has its ways with them."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for descriptor in (*self._wake, self._alive[1]):
                os.close(descriptor)
            code = work(lambda: (signal.pthread_sigmask(signal.SIG_SETMASK, before), None)[1])
        except BaseException:
            traceback.print_exc()
        finally:  # not the parent's way to end: its atexit, its buffers
            with suppress(Exception):
                logging.shutdown()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _work(self, place: _Place, unblock: Callable[[], None]) -> int:
        """What a child does."""
        settings = self._settings
        try:
            crew = Crew(self._consumer, settings, place.notes, place.wills, beats=False)
            with draining(crew, settings.drain_seconds) as stop:
                signal.signal(signal.SIGTERM, lambda _signum, _frame: stop())
                unblock()
                self._end_with_parent(stop)
                crew.run()
        except OutboxError as error:
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
            if not error.retryable:
                place.notes[0].failed()
            return 1
        return 0

    def _end_with_parent(self, end: Callable[[], object]) -> None:
        def wait() -> None:
            os.read(self._alive[0], 1)
            end()

        threading.Thread(target=wait, name="parent", daemon=True).start()

    def _looked(self) -> bool:
        """Have a child look for danger; whether we may start."""

        def look(unblock: Callable[[], None]) -> int:
            unblock()
            self._end_with_parent(lambda: os._exit(1))
            return self._look()

        self._looking = self._fork(look)
        while self._settings.strict and self._looking is not None and not self._asked:
            self._wait()
            self._reap()
        return not self._worst and not self._asked

    # --- waiting ---

    def _at_work(self) -> bool:
        return not self._asked or any(
            pid is not None for pid in (self._looking, *(place.pid for place in self._places))
        )

    def _wait(self) -> None:
        """Wait for a signal, a child's end, or until something is due."""
        now = time.monotonic()
        dues = [place.due for place in self._places if place.pid is None and not self._asked]
        timeout = max(0.0, min([*dues, self._kill_at, now + _BEAT_SECONDS]) - now)
        if select.select([self._wake[0]], [], [], timeout)[0]:
            for number in os.read(self._wake[0], 4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._stop()
        if time.monotonic() >= self._kill_at:
            self._stop()

    def _stop(self) -> None:
        """Ask the children to end; kill them if they were asked before."""
        self._asked += 1
        self._kill_at = time.monotonic() + self._settings.drain_seconds + _GRACE_SECONDS
        pids = [place.pid for place in self._places] + [self._looking]
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def _reap(self) -> None:
        """See which children have ended, and what follows from it."""
        for pid, status in list(self._ended()):
            code = os.waitstatus_to_exitcode(status)
            place = next((place for place in self._places if place.pid == pid), None)
            if pid == self._looking:
                self._looking = None
                if self._settings.strict and not self._asked:
                    self._worst = max(self._worst, code)
            elif place is not None:
                place.pid = None
                self._bury(place, pid, code)

    def _ended(self) -> Iterator[tuple[int, int]]:
        ours = [pid for pid in (*(place.pid for place in self._places), self._looking) if pid is not None]
        if os.getpid() == 1:  # of a container: orphans are ours to reap
            ours = [-1] * (len(ours) + 1)
        for pid in ours:
            with suppress(ChildProcessError):
                while (found := os.waitpid(pid, os.WNOHANG))[0]:
                    yield found
                    if pid != -1:
                        break

    def _bury(self, place: _Place, pid: int, code: int) -> None:
        failed = any(note.has_failed for note in place.notes)
        if self._asked or failed:
            self._worst = max(self._worst, 128 - code if code < 0 else code)
            if not self._asked:
                self._stop()
            return
        left = wills(place.notes)
        place.wills = place.wills[place.notes[0].number_settled :] + left
        self._put_off(place)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        at = sum(len(will.deliveries) + len(will.rows) for will in left)
        _log.warning(
            "process %d of consumer %s ended %s%s; another takes its place%s", pid, self._consumer.name, how,
            f", while a handler was at {at} events" if at else "", f" in {place.pause:.1f} s" if place.pause else "",
            extra={"action": "process_ended", "exit_code": code},
        )  # fmt: skip

    @staticmethod
    def _put_off(place: _Place) -> None:
        """Let the next one begin at once, or after a pause if this one was of no use."""
        now = time.monotonic()
        useful = now - place.began >= _OF_USE_SECONDS or any(note.has_worked for note in place.notes)
        useful = useful or any(will.explained for will in wills(place.notes))  # and it is counted
        place.pause = 0.0 if useful else min(max(_PAUSE_SECONDS, 2 * place.pause), _LONGEST_PAUSE_SECONDS)
        place.due = now + place.pause

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self._wake, self._alive = os.pipe(), os.pipe()
        for descriptor in self._wake:
            os.set_blocking(descriptor, False)
        handlers = {number: signal.signal(number, lambda _signum, _frame: None) for number in _SIGNALS}
        wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for descriptor in (*self._wake, *self._alive):
                os.close(descriptor)
