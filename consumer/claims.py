"""The claims of a process: renew what it holds, hand back what it does not start, take over what others left pending.

A claim ends when it is not renewed for ``CONSUMER_CLAIM_SECONDS``, by Redis' clock alone. It is a courtesy, no lock: that an
event is applied once is the ledger's doing, so that a process which lost its claims (frozen, cut off from Redis) may finish
what it is at, and nothing comes of it that another has done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outbox.errors import GroupLost, StreamUnusable, TransportError
from outbox.transport import Delivery, Transport

_log = logging.getLogger(__name__)

#: Claims are renewed so many times before they would end.
_RENEWALS = 3
#: Pause before the next try where Redis failed.
_AGAIN_SECONDS = 1.0


class Claims:
    """Renews what this process holds while its own thread is busy with a handler; and hands back.

    Renewing is done by a thread that is there only while something is held. It needs the interpreter for a moment: Python code
    that computes gives it, an extension in C that holds the GIL for long does not, so that its claims end, too.

    Args:
        held: what is to be renewed now; called by the thread.
    """

    def __init__(
        self,
        transport: Transport,
        group: str,
        process_name: str,
        claim_seconds: float,
        held: Callable[[], Sequence[Delivery]],
    ) -> None:
        self._transport, self._group, self._process_name, self._held = transport, group, process_name, held
        self._every_seconds = claim_seconds / _RENEWALS
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._asking = threading.Lock()  # nothing is renewed that has just been handed back
        self._ended = threading.Event()
        self._lost: set[tuple[str, str]] = set()

    def keep(self) -> None:
        """See that what is held from now on is renewed, for as long as something is."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():  # not: in a child of a fork
                self._thread = threading.Thread(target=self._renew_all, name="renew-claims", daemon=True)
                self._thread.start()

    def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Let others have these at once; `held` must not return them any more, unless the claims are closed.

        Raises:
            TransportError: Redis failed; others take them over later.
        """
        with self._asking:
            self._transport.hand_back(self._group, self._process_name, deliveries)

    def close(self) -> None:
        """Renew nothing any more."""
        self._ended.set()

    def _renew_all(self) -> None:
        pause = self._every_seconds
        while not self._ended.wait(pause):
            with self._starting:
                if not self._held():
                    self._thread = None
                    return
            try:
                self._renew()
                pause = self._every_seconds
            except Exception as error:
                pause = min(self._every_seconds, _AGAIN_SECONDS)
                if not self._ended.is_set():
                    _log.log(
                        logging.DEBUG if isinstance(error, TransportError) else logging.ERROR,
                        "cannot renew claims now: %s", error, extra={"action": "not_renewed"},
                        exc_info=None if isinstance(error, TransportError) else error,
                    )  # fmt: skip

    def _renew(self) -> None:
        with self._asking:
            if self._ended.is_set():
                return
            asked = self._held()
            ours = {_name(d) for d in self._transport.renew(self._group, self._process_name, asked)}
        # What is not held any more was acknowledged meanwhile.
        lost = {_name(d) for d in asked} & {_name(d) for d in self._held()} - ours
        new, self._lost = lost - self._lost, lost
        if new:
            _log.warning(
                "lost claim: %d deliveries that this process holds are no longer its own: others took them over, since it did not "
                "renew them in time (frozen, or cut off from Redis), or Redis lost them; the ledger sees to it that they are "
                "applied once; the first is %s %s",
                len(new), *min(new), extra={"action": "claim_lost", "lost": len(new)},
            )  # fmt: skip


def _name(delivery: Delivery) -> tuple[str, str]:
    return delivery.stream, delivery.receipt


@dataclass(slots=True)
class Recovery:
    """Goes through the pending deliveries of a group in pages, a page of each stream at a time."""

    transport: Transport
    group: str
    process_name: str
    idle_seconds: float
    _cursors: dict[str, str | None] = field(default_factory=dict)

    def claim(self, streams: Sequence[str], count: int) -> tuple[list[Delivery], int, bool]:
        """Up to `count` deliveries of each stream, how many had been deleted while pending, and whether more may be due.

        Raises:
            TransportError: Redis failed.
        """
        found: list[Delivery] = []
        missing = 0
        more = False
        for stream in streams:
            try:
                claim = self.transport.claim(
                    self.group, self.process_name, stream, self.idle_seconds, count, self._cursors.get(stream)
                )
            except (GroupLost, StreamUnusable):
                continue  # the next read meets it too; what others have is not given up for it
            self._cursors[stream] = claim.cursor
            more = more or claim.cursor is not None
            found += claim.deliveries
            missing += len(claim.missing)
            if claim.missing:
                _log.error(
                    "%d entries of stream %s were deleted while pending for %s, the first is %s: somebody trims or "
                    "deletes entries that are not acknowledged",
                    len(claim.missing), stream, self.group, claim.missing[0],
                    extra={"action": "pending_deleted", "stream": stream, "missing": len(claim.missing)},
                )  # fmt: skip
        return found, missing, more
