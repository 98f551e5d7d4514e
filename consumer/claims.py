"""Take over what others left pending: crashed consumers' deliveries, and failed ones whose time has come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from outbox.errors import GroupLost, StreamUnusable
from outbox.transport import Delivery, Transport

_log = logging.getLogger(__name__)


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
