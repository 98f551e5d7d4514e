"""Compare an outbox with a consumer's ledger, in one database or two: what is missing, and what nobody recorded.

The only module of this side that looks into the outbox. Both are read in order of the event ids, side by side, so that
millions of rows need no memory here (PostgreSQL sorts the outbox on its disk).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from consumer.handlers import Consumer
from consumer.ledger import Connection, Ledger
from outbox.store import Recorded, Store

#: Ids that a report keeps of each kind; beyond that it only counts.
_KEPT = 100_000
#: By how much the clocks of two databases may differ.
_CLOCKS = timedelta(hours=1)


@dataclass(slots=True)
class Report:
    """What differs. Lists hold the first 100,000 ids, the counts all.

    Attributes:
        compared: events recorded in the time looked at, of the consumer's topics and types.
        missing: recorded more than `grace` ago and not in the ledger: to be published again.
        late: not in the ledger, but so young that they may be on their way.
        extra: in the ledger, and not recorded in this outbox.
        dead: in the ledger as put aside in dead_letters.
    """

    compared: int = 0
    missing: list[uuid.UUID] = field(default_factory=list)
    late: list[uuid.UUID] = field(default_factory=list)
    extra: list[uuid.UUID] = field(default_factory=list)
    missing_count: int = 0
    late_count: int = 0
    extra_count: int = 0
    dead: int = 0


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
    report, store = Report(), Store(outbox_schema)
    recorded = store.recorded(outbox, consumer.topics, since)
    processed = Ledger(consumer.name, ledger_schema).processed(ledger, since - _CLOCKS)
    for event, outcome in _merged((e for e in recorded if consumer.handler(e.type)), processed):
        if isinstance(event, Recorded):
            report.compared += 1
            if outcome == "dead":
                report.dead += 1
            elif outcome is None and event.created_at > now - grace:
                report.late_count += 1
                _keep(report.late, event.id)
            elif outcome is None:
                report.missing_count += 1
                _keep(report.missing, event.id)
        else:
            report.extra_count += 1
            _keep(report.extra, event)
    # Recorded before `since` and processed after, or of a type that had a handler once: not extra after all.
    known = store.known(outbox, report.extra)
    report.extra = [event_id for event_id in report.extra if event_id not in known]
    report.extra_count -= len(known)
    return report


def _keep(ids: list[uuid.UUID], event_id: uuid.UUID) -> None:
    if len(ids) < _KEPT:
        ids.append(event_id)


def _merged(
    recorded: Iterable[Recorded], processed: Iterable[tuple[uuid.UUID, str]]
) -> Iterator[tuple[Recorded | uuid.UUID, str | None]]:
    """Both in order of their ids: an event with its outcome, one without, or an id that was not recorded."""
    rows = iter(processed)
    row = next(rows, None)
    last: uuid.UUID | None = None
    for event in recorded:
        while row is not None and row[0] < event.id:
            if row[0] != last:
                yield row
            row = next(rows, None)
        found = row is not None and row[0] == event.id
        yield event, row[1] if row is not None and found else None
        last = event.id
    while row is not None:
        if row[0] != last:
            yield row
        row = next(rows, None)
