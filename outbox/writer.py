"""Record events in the caller's transaction.

`record` inserts at once, in one statement, on the connection that the business data goes through, so that savepoints and
rollbacks mean what people expect. Pending changes of a Session are flushed first: the business rows' locks are then taken
before the event gets its position, and that is what keeps one key's events in commit order.

Sync and async differ in two lines only; what is inserted is prepared in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb
from sqlalchemy import Connection, Insert, insert
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, scoped_session

from outbox import schema as schemas
from outbox import store
from outbox.envelope import DEFAULT_MAX_PAYLOAD_BYTES, Event
from outbox.errors import InvalidEvent, NoTransaction
from outbox.settings import check_schema
from outbox.tables import COLUMNS, outbox_table

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

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

    def record(
        self, session: Session | scoped_session[Session] | Connection | psycopg.Connection[Any], *events: Event
    ) -> None:
        """Record `events` in the transaction of `session`, in this order, with one statement.

        Args:
            session: a SQLAlchemy Session or Connection, or a psycopg 3 connection.

        Raises:
            InvalidEvent: an event is too large, or there are too many; nothing was sent to the database.
            NoTransaction: the connection commits every statement by itself; nothing was sent to the database.
            SchemaError: there is no outbox in the schema; says what to run. As after every error of PostgreSQL's, the
                transaction can only be rolled back.
        """
        rows = self._rows(events)
        if isinstance(session, psycopg.Connection):
            _refuse_autocommit(session)
            if rows:
                with self._explained():
                    session.execute(store.insert(self.schema, len(rows)), _parameters(rows))
        elif isinstance(session, Session | scoped_session | Connection):
            connection = session if isinstance(session, Connection) else session.connection()
            _refuse_autocommit(connection.connection.dbapi_connection)
            if rows:
                if not isinstance(session, Connection):
                    session.flush()
                with self._explained():
                    connection.execute(self._insert(rows))
        else:
            raise TypeError(
                "record takes a SQLAlchemy Session or Connection, or a psycopg connection, not "
                f"{type(session).__name__}" + ("; use `await record_async(…)`" if _is_async(session) else "")
            )

    async def record_async(
        self,
        session: AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection | psycopg.AsyncConnection[Any],
        *events: Event,
    ) -> None:
        """`record` for an AsyncSession, AsyncConnection or psycopg 3 AsyncConnection."""
        rows = self._rows(events)
        if isinstance(session, psycopg.AsyncConnection):
            _refuse_autocommit(session)
            if rows:
                with self._explained():
                    await session.execute(store.insert(self.schema, len(rows)), _parameters(rows))
            return
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

        if not isinstance(session, AsyncConnection | AsyncSession | async_scoped_session):
            raise TypeError(
                "record_async takes a SQLAlchemy AsyncSession or AsyncConnection, or a psycopg AsyncConnection, not "
                f"{type(session).__name__}"
            )
        connection = session if isinstance(session, AsyncConnection) else await session.connection()
        raw = await connection.get_raw_connection()
        _refuse_autocommit(raw.dbapi_connection)
        if rows:
            if not isinstance(session, AsyncConnection):
                await session.flush()
            with self._explained():
                await connection.execute(self._insert(rows))

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
        return [
            (e.id, e.topic, e.type, e.key, e.version, e.data, e.content_type, e.time, e.source, dict(e.headers) or None)
            for e in events
        ]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what to run where the insert met no table; of the insert alone, since a flush may miss tables of the user's."""
        try:
            yield
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise schemas.no_tables("outbox", self.schema) from error
        except ProgrammingError as error:
            if isinstance(error.orig, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
                raise schemas.no_tables("outbox", self.schema) from error
            raise

    def _insert(self, rows: list[tuple[Any, ...]]) -> Insert:
        values = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        return insert(outbox_table(self.schema)).inline().values(values)


def _parameters(rows: list[tuple[Any, ...]]) -> list[Any]:
    return [value for row in rows for value in (*row[:-1], Jsonb(row[-1]) if row[-1] else None)]


def _refuse_autocommit(connection: Any) -> None:
    """Refuse a driver connection that is in autocommit mode, unless a transaction was begun on it all the same."""
    if not getattr(connection, "autocommit", False):
        return
    info = getattr(connection, "info", None)
    if info is not None and getattr(info, "transaction_status", None) == TransactionStatus.INTRANS:
        return
    raise NoTransaction(
        "the connection is in autocommit mode, so the event would not be part of the business transaction; "
        "begin one (psycopg: `with connection.transaction()`)"
    )


def _is_async(session: object) -> bool:
    return type(session).__name__.startswith("Async") or type(session).__name__ == "async_scoped_session"


_default = Writer()
record = _default.record
record_async = _default.record_async
