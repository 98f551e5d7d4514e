"""The transaction that a caller is in, on every kind of connection that is taken: SQLAlchemy's and psycopg's, sync and async."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, scoped_session

from outbox import schema as schemas
from outbox.errors import NoTransaction

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncCaller: TypeAlias = (
        AsyncSession | async_scoped_session[AsyncSession] | AsyncConnection | psycopg.AsyncConnection[Any]
    )

Caller: TypeAlias = Session | scoped_session[Session] | Connection | psycopg.Connection[Any]
_T = TypeVar("_T")
_NO_TABLE = psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName


def connection_of(session: Caller, function: str) -> Connection | psycopg.Connection[Any]:
    """The connection that a session's statements go through; sends nothing.

    Args:
        function: who asks, for the error.

    Raises:
        NoTransaction: it commits every statement by itself.
        TypeError: it is none that is taken.
    """
    if isinstance(session, psycopg.Connection):
        refuse_autocommit(session)
        return session
    if not isinstance(session, Session | scoped_session | Connection):
        raise TypeError(
            f"{function} takes a SQLAlchemy Session or Connection, or a psycopg connection, not "
            f"{type(session).__name__}" + (f"; use `await {function}_async(…)`" if _is_async(session) else "")
        )
    connection = session if isinstance(session, Connection) else session.connection()
    refuse_autocommit(connection.connection.dbapi_connection)
    return connection


async def run_sync(session: AsyncCaller, function: str, work: Callable[[Any], _T]) -> _T:
    """Call `work` with the sync session or connection beneath one of SQLAlchemy's asyncio; whatever drives that one.

    Raises:
        TypeError: it is none of them.
    """
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    if not isinstance(session, AsyncConnection | AsyncSession | async_scoped_session):
        raise TypeError(
            f"{function} takes a SQLAlchemy AsyncSession or AsyncConnection, or a psycopg AsyncConnection, not "
            f"{type(session).__name__}"
        )
    return await (session() if isinstance(session, async_scoped_session) else session).run_sync(work)


def refuse_autocommit(connection: Any) -> None:
    """Refuse a driver connection that is in autocommit mode, unless a transaction was begun on it all the same.

    Raises:
        NoTransaction: it is refused.
    """
    if getattr(connection, "autocommit", False) in (
        False,
        -1,
    ):  # -1: sqlite3's own way, which begins by itself, in rehearsals
        return
    info = getattr(connection, "info", None)
    if info is not None and getattr(info, "transaction_status", None) == TransactionStatus.INTRANS:
        return
    raise NoTransaction(
        "the connection is in autocommit mode, so this would not be part of the business transaction; "
        "begin one (psycopg: `with connection.transaction()`)"
    )


@contextmanager
def explained(branch: schemas.Branch, schema: str) -> Iterator[None]:
    """Say what to run where our own statement met no table.

    Raises:
        SchemaError: the tables of `branch` are not there.
    """
    try:
        yield
    except _NO_TABLE as error:
        raise schemas.no_tables(branch, schema) from error
    except ProgrammingError as error:
        if isinstance(error.orig, _NO_TABLE):
            raise schemas.no_tables(branch, schema) from error
        raise


def _is_async(session: object) -> bool:
    return type(session).__name__.startswith("Async") or type(session).__name__ == "async_scoped_session"
