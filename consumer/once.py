"""`first_time`: the ledger for what is no event — webhooks, cron jobs, requests that come with a key.

A key is a row of the ledger, under ``once:`` and the scope where events have their consumer's name, and with a UUIDv5 of the
key for their id. No consumer has such a name, so no consumer and no `consumer reconcile` takes a key for an event.
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg.rows import tuple_row

from consumer import ledger
from outbox.errors import InvalidKey, SettingsError
from outbox.settings import check_schema
from outbox.transaction import Caller, connection_of, explained, refuse_autocommit, run_sync
from outbox.transport.base import CONSUMER_NAME

if TYPE_CHECKING:
    from outbox.transaction import AsyncCaller

MAX_KEY: Final = 1000  #: characters

#: What all ids of keys are derived from. Fixed for ever: with another one every key would be new.
_NAMESPACE: Final = uuid.UUID("2ac2010a-9e97-4fa6-a7c6-27fbe93ad475")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def first_time(session: Caller, scope: str, key: str, *, schema: str = "public") -> bool:
    """Whether this is the first time that `key` is met: true in exactly one transaction that commits.

    Call it first, and do the work in the same transaction only if it is true. Another transaction with the same key waits
    until this one ends: it then gets false, or takes its place if this one was rolled back or its process died. It waits for
    as long as its ``lock_timeout`` says (``SET LOCAL lock_timeout = '5s'``), without end by default; after a time-out
    nothing is known, and the transaction can only be rolled back. At REPEATABLE READ and above the one that waited in vain
    is refused by PostgreSQL instead (SQLSTATE 40001): run it again.

    A key is remembered for as long as the consumers of the schema remember events (30 days by default, see
    ``CONSUMER_LEDGER_RETENTION_DAYS``), in a schema without consumers for ever.

    Args:
        session: a SQLAlchemy Session or Connection, or a psycopg 3 connection; pending changes of a Session are not flushed.
        scope: what the keys are for, as ``payment-webhooks``; letters, digits and ``._/-``, at most 100. Keys of different
            scopes have nothing to do with each other.
        key: 1 to 1,000 characters, compared exactly (``é`` in one code point and in two are two keys).
        schema: schema of the ledger (`consumer migrate`).

    Raises:
        InvalidKey: scope or key break their rule; nothing was sent to the database.
        NoTransaction: the connection commits every statement by itself; nothing was sent to the database.
        SchemaError: there is no ledger in the schema; says what to run.
        SettingsError: `schema` is not a name that can be used; the database is not PostgreSQL.
    """
    arguments = _arguments(scope, key)
    statement = ledger.claim_key(check_schema(schema))
    connection = connection_of(session, "first_time")
    if not isinstance(connection, psycopg.Connection) and connection.dialect.name != "postgresql":
        raise SettingsError(f"first_time needs PostgreSQL, not {connection.dialect.name}")
    with explained("consumer", schema):
        if isinstance(connection, psycopg.Connection):
            return connection.cursor(row_factory=tuple_row).execute(statement, arguments).fetchone() is not None
        return connection.exec_driver_sql(statement, arguments).first() is not None


async def first_time_async(session: AsyncCaller, scope: str, key: str, *, schema: str = "public") -> bool:
    """`first_time` for an AsyncSession, AsyncConnection or psycopg 3 AsyncConnection."""
    if not isinstance(session, psycopg.AsyncConnection):
        return await run_sync(session, "first_time_async", lambda sync: first_time(sync, scope, key, schema=schema))
    arguments = _arguments(scope, key)
    statement = ledger.claim_key(check_schema(schema))
    refuse_autocommit(session)
    with explained("consumer", schema):
        cursor = await session.cursor(row_factory=tuple_row).execute(statement, arguments)
        return await cursor.fetchone() is not None


def _arguments(scope: Any, key: Any) -> dict[str, Any]:
    if not isinstance(scope, str) or not CONSUMER_NAME.fullmatch(scope):
        raise InvalidKey("scope", f"must match {CONSUMER_NAME.pattern}, is {ascii(scope)[:80]}")
    if not isinstance(key, str):
        raise InvalidKey("key", f"must be a string, is {type(key).__name__}: say how it is to be written")
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidKey("key", f"must have 1 to {MAX_KEY} characters, has {len(key)}")
    if _CONTROL.search(key):
        raise InvalidKey("key", "must not contain control characters")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise InvalidKey("key", "has a lone surrogate, which UTF-8 cannot hold") from None
    return {"name": f"once:{scope}", "id": uuid.uuid5(_NAMESPACE, key)}
