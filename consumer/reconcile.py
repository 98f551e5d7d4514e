"""Compare an outbox with a consumer's ledger, in one database or two: what is missing, and what nobody recorded.

The only module of this side that looks into the outbox. Both are read in order of the event ids, side by side, and what
differs is kept in files, so that any number of rows needs no memory here (PostgreSQL sorts the outbox on its disk).
"""

from __future__ import annotations

import struct
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice

from consumer.handlers import Consumer
from consumer.ledger import Connection, Ledger
from outbox.store import Recorded, Store

#: Ids that are looked for in the outbox at once.
_LOOKED_FOR = 100_000
#: By how much the clocks of two databases may differ.
_CLOCKS = timedelta(hours=1)
_IN_MEMORY_BYTES = 1 << 20
_READ = 5000  # ids at a time


class Found:
    """Events by id, in the order in which they were added, with a number each: where they are in the outbox. Any number: beyond a
    mebibyte they are in a file that has no name and goes with this object."""

    _ENTRY = struct.Struct("!16sq")

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115  # as long as we are there
        self._number = 0

    def __del__(self) -> None:
        self._file.close()

    def add(self, event_id: uuid.UUID, position: int = 0) -> None:
        """Add one; not once it has been looked at."""
        self._file.write(self._ENTRY.pack(event_id.bytes, position))
        self._number += 1

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[uuid.UUID]:
        return (uuid.UUID(bytes=event_id) for event_id, _ in self._entries())

    def positions(self) -> Iterator[int]:
        """Where they are, in the same order."""
        return (position for _, position in self._entries())

    def numbered(self) -> Iterator[tuple[uuid.UUID, int]]:
        """Both."""
        return ((uuid.UUID(bytes=event_id), number) for event_id, number in self._entries())

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        for start in range(0, self._number, _READ):
            self._file.seek(start * self._ENTRY.size)
            yield from self._ENTRY.iter_unpack(self._file.read(_READ * self._ENTRY.size))


@dataclass(slots=True)
class Report:
    """What differs.

    Attributes:
        compared: events recorded in the time looked at, of the consumer's topics and types.
        missing: recorded more than `grace` ago and not in the ledger: to be published again.
        late: not in the ledger, but so young that they may be on their way, or jobs for later.
        extra: in the ledger, and not recorded in this outbox.
        older: in the ledger and not in the outbox, but older than all that it still has, so that it may have dropped them.
        dead: in the ledger as put aside in dead_letters.
        waiting: in the ledger as waiting for another try, a handler or an earlier version.
    """

    compared: int = 0
    dead: int = 0
    waiting: int = 0
    older: int = 0
    missing: Found = field(default_factory=Found)
    late: Found = field(default_factory=Found)
    extra: Found = field(default_factory=Found)


def reconcile(
    consumer: Consumer,
    outbox: Connection,
    ledger: Connection,
    *,
    since: datetime,
    now: datetime,
    grace: timedelta = timedelta(minutes=5),
    outbox_schema: str = "public",
    ledger_schema: str = "public",
) -> Report:
    """Compare what was recorded since `since` (of the consumer's topics, and of types that it handles) with its ledger.

    Args:
        outbox, ledger: in a transaction each, since the rows are streamed.
        since: aware; not older than what outbox and ledger keep.
        now: the time on the outbox's clock.
    """
    report, store, unknown = Report(), Store(outbox_schema), Found()
    recorded = store.recorded(outbox, consumer.topics, since)
    processed = Ledger(consumer.name, ledger_schema).processed(ledger, since - _CLOCKS)
    for event, outcome, at in _merged((e for e in recorded if consumer.handler(e.type)), processed):
        if not isinstance(event, Recorded):
            assert at is not None
            unknown.add(event, _recorded_by(event, at))
            continue
        report.compared += 1
        if outcome == "dead":
            report.dead += 1
        elif outcome == "waiting":
            report.waiting += 1
        elif outcome is None:
            (report.late if _due(event) > now - grace else report.missing).add(event.id, event.position)
    # Recorded before `since` and processed after, or of a type that had a handler once: not extra after all.
    # Nor is what retention has dropped: it drops meanwhile, too, so it is asked last from when on the outbox has everything.
    rest = unknown.numbered()
    while some := list(islice(rest, _LOOKED_FOR)):
        known = store.known(outbox, [event_id for event_id, _ in some])
        since_when = store.kept_since(outbox)
        kept = _milliseconds(since_when) if since_when else 0
        for event_id, recorded_by in some:
            if event_id in known:
                continue
            if recorded_by <= kept:
                report.older += 1
            else:
                report.extra.add(event_id)
    return report


def _due(event: Recorded) -> datetime:
    """From when on it may be processed: a job may be for later."""
    with suppress(ValueError, TypeError):  # it is no instant
        return max(event.created_at, datetime.fromisoformat(event.run_at or ""))
    return event.created_at


def _recorded_by(event_id: uuid.UUID, processed_at: datetime) -> int:
    """By when at the latest the event was recorded, in milliseconds since 1970: before it was processed, and about when its
    id was made if that is a UUIDv7."""
    processed = _milliseconds(processed_at)
    return min(processed, event_id.int >> 80) if event_id.version == 7 else processed


def _milliseconds(instant: datetime) -> int:
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _merged(
    recorded: Iterable[Recorded], processed: Iterable[tuple[uuid.UUID, str, datetime]]
) -> Iterator[tuple[Recorded, str | None, None] | tuple[uuid.UUID, str, datetime]]:
    """Both in order of their ids: an event with its outcome, one without, or an id that was not recorded and when it was
    processed. The ledger is read
    from first: what is recorded meanwhile may then seem late, but what is processed meanwhile never extra."""
    rows = iter(processed)
    row = next(rows, None)
    last: uuid.UUID | None = None
    for event in recorded:
        while row is not None and row[0] < event.id:
            if row[0] != last:
                yield row
            row = next(rows, None)
        found = row is not None and row[0] == event.id
        yield event, row[1] if row is not None and found else None, None
        last = event.id
    while row is not None:
        if row[0] != last:
            yield row
        row = next(rows, None)
