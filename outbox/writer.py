"""Record events in the caller's transaction.

`record` inserts at once, in one statement, on the connection that the business data goes through, so that savepoints and
rollbacks mean what people expect. Pending changes of a Session are flushed first: the business rows' locks are then taken
before the event gets its position, and that is what keeps one key's events in commit order.

What is asynchronous in SQLAlchemy runs the same code (`run_sync`); psycopg's asynchronous connection differs in two lines.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.json import Jsonb
from sqlalchemy import Insert, insert
from sqlalchemy.orm import Session, scoped_session

from outbox import store
from outbox.envelope import DEFAULT_MAX_PAYLOAD_BYTES, Event
from outbox.errors import InvalidEvent
from outbox.settings import check_schema
from outbox.tables import COLUMNS, outbox_table
from outbox.transaction import Caller, connection_of, explained, refuse_autocommit, run_sync

if TYPE_CHECKING:
    from outbox.transaction import AsyncCaller

_MAX_EVENTS = 1000  # PostgreSQL takes 65,535 parameters in a statement


class Writer:
    """Records events into one outbox. `outbox.record` and `outbox.record_async` are those of ``Writer()``.

    Args:
        schema: schema of the outbox table.
        max_payload_bytes: largest encoded payload that is accepted; Redis holds every published event in memory.

    Raises:
        SettingsError: `schema` is not a name that can be used.
    """

    def __init__(self, schema: str = "public", max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> None:
        self.schema = check_schema(schema)
        self.max_payload_bytes = max_payload_bytes

    def record(self, session: Caller, *events: Event) -> None:
        """Record `events`, and jobs, in the transaction of `session`, in this order, with one statement.

        Args:
            session: a SQLAlchemy Session or Connection, or a psycopg 3 connection.

        Raises:
            InvalidEvent: an event is too large, two have the same id, or there are too many; nothing was sent to the
                database.
            NoTransaction: the connection commits every statement by itself; nothing was sent to the database.
            SchemaError: there is no outbox in the schema; says what to run. As after every error of PostgreSQL's, the
                transaction can only be rolled back.
        """
        rows = self._rows(events)
        connection = connection_of(session, "record")
        if not rows:
            return
        if isinstance(session, Session | scoped_session):
            session.flush()
        with explained("outbox", self.schema):  # of the insert alone: a flush may miss tables of the user's
            if isinstance(connection, psycopg.Connection):
                connection.execute(store.insert(self.schema, len(rows)), _parameters(rows))
            else:
                connection.execute(self._insert(rows))

    async def record_async(self, session: AsyncCaller, *events: Event) -> None:
        """`record` for an AsyncSession, AsyncConnection or psycopg 3 AsyncConnection."""
        if not isinstance(session, psycopg.AsyncConnection):
            await run_sync(session, "record_async", lambda sync: self.record(sync, *events))
            return
        rows = self._rows(events)
        refuse_autocommit(session)
        if rows:
            with explained("outbox", self.schema):
                await session.execute(store.insert(self.schema, len(rows)), _parameters(rows))

    def _rows(self, events: tuple[Event, ...]) -> list[tuple[Any, ...]]:
        if len(events) > _MAX_EVENTS:
            raise InvalidEvent("events", f"at most {_MAX_EVENTS} in one call, are {len(events)}")
        for event in events:
            if not isinstance(event, Event):
                raise TypeError(f"record takes Events (a list as *events), not {type(event).__name__}")
            if len(event.data) > self.max_payload_bytes:
                raise InvalidEvent(
                    "payload", f"has {len(event.data)} bytes, more than the limit of {self.max_payload_bytes}"
                )
        if len({event.id for event in events}) < len(events):
            twice = next(e.id for n, e in enumerate(events) if e.id in {other.id for other in events[:n]})
            raise InvalidEvent("id", f"two events of one call have {twice}; consumers would apply the first alone")
        now = datetime.now(UTC)
        return [
            (
                e.id, e.topic, e.type, e.key, e.version, e.data, e.content_type,
                e.time or (None if e.id.version == 7 else now), e.source, dict(e.all_headers) or None,
            )
            for e in events
        ]  # fmt: skip

    def _insert(self, rows: list[tuple[Any, ...]]) -> Insert:
        values = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        return insert(outbox_table(self.schema)).inline().values(values)


def _parameters(rows: list[tuple[Any, ...]]) -> list[Any]:
    return [value for row in rows for value in (*row[:-1], Jsonb(row[-1]) if row[-1] else None)]


_default = Writer()
record = _default.record
record_async = _default.record_async
