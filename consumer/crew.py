"""Several workers in the threads of one process. They share nothing but the Consumer: each has connections of its own."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from consumer.handlers import Consumer
from consumer.notes import Note, Will, slowest
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.telemetry import Observer

_BEAT_SECONDS = 1.0


class Crew:
    """Runs a worker for each note; of all of them what `Worker` is of one.

    Only the first runs events that may have ended their process, so that none has its end counted for another's.

    Args:
        notes: where they say what they are at.
        wills: of those before them.
        beats: whether the heartbeat file is theirs to touch: as late as the slowest of them is.

    Raises:
        SettingsError: an address cannot be used.
    """

    def __init__(
        self,
        consumer: Consumer,
        settings: ConsumerSettings,
        notes: Sequence[Note],
        wills: Sequence[Will] = (),
        *,
        beats: bool = True,
        observer: Observer | None = None,
    ) -> None:
        self._settings, self._notes = settings, notes
        self._file = Path(settings.heartbeat_file) if beats and settings.heartbeat_file else None
        name = f"{settings.process_name or socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._workers = [
            Worker(
                consumer,
                settings.model_copy(update={"heartbeat_file": None, "process_name": f"{name}-{number}"}),
                observer=observer,
                note=note,
                wills=() if number else wills,
                suspects=not number,
            )
            for number, note in enumerate(notes)
        ]

    def run(self) -> None:
        """Consume until `stop` is called. An error of one stops the others.

        Raises:
            Exception: what the first of them that ended by itself has raised, see `Worker.run`; the others had
                CONSUMER_DRAIN_SECONDS to end.
        """
        if len(self._workers) == 1 and self._file is None:
            self._workers[0].run()
            return
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def work(worker: Worker) -> None:
            error: BaseException | None = None
            try:
                worker.run()
            except BaseException as caught:
                error = caught
            ended.put(error)

        for number, worker in enumerate(self._workers):
            threading.Thread(target=work, args=(worker,), name=f"worker-{number}", daemon=True).start()
        left, failure, deadline = len(self._workers), None, float("inf")
        while left and time.monotonic() < deadline:
            try:
                error = ended.get(timeout=_BEAT_SECONDS)
            except queue.Empty:
                error = None
            else:
                left -= 1
            if error and not failure:
                failure, deadline = error, time.monotonic() + self._settings.drain_seconds
                self.stop()
            if self._file:
                touch(self._file, self._notes)
        if failure:
            raise failure

    def stop(self) -> None:
        """See `Worker.stop`."""
        for worker in self._workers:
            worker.stop()

    def hand_back_unstarted(self) -> None:
        """See `Worker.hand_back_unstarted`."""
        for worker in self._workers:
            worker.hand_back_unstarted()

    def abandon(self) -> None:
        """See `Worker.abandon`."""
        for worker in self._workers:
            worker.abandon()


def touch(file: Path, notes: Sequence[Note]) -> None:
    """Let the file be as old as the last sign of life of the slowest worker."""
    beat = slowest(notes)
    file.touch()
    os.utime(file, (beat, beat))
