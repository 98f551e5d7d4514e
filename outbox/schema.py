"""What both sides' databases have in common: connecting and migrating."""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import alembic.command
import psycopg
import sqlalchemy
import tenacity
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.pool import NullPool

from outbox.errors import SchemaError, SettingsError
from outbox.settings import check_schema, database_address

_log = logging.getLogger(__name__)

Branch = Literal["outbox", "consumer"]


def connect(
    url: str, application: str, prepare_threshold: int | Literal["direct"] | None = None, **options: Any
) -> psycopg.Connection[Any]:
    """A psycopg connection that also works through a transaction pooler.

    Args:
        url: as `outbox.settings.database_address` takes it.
        application: shown as ``application_name`` in ``pg_stat_activity``.
        prepare_threshold: after how many times a statement is kept prepared; None: never; ``direct``: after 5, as is psycopg's
            own default, but never through a pooler.
    """
    address = database_address(url)
    given = conninfo_to_dict(address)
    defaults = {name: value for name, value in _CONNECTION.items() if name not in given}
    direct = prepare_threshold == "direct"
    defaults |= {"application_name": application, "prepare_threshold": None if direct else prepare_threshold}
    connection = psycopg.connect(address, **(defaults | options))
    if direct:
        try:
            before, connection.autocommit = connection.autocommit, True
            connection.prepare_threshold = None if is_pooled(connection) else _PREPARE_THRESHOLD
            connection.autocommit = before
        except BaseException:
            connection.close()
            raise
    return connection


_PREPARE_THRESHOLD: Final = 5
#: A server that vanished without a word is noticed within a minute. An address may say otherwise.
_CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


@contextmanager
def answering(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Give up on PostgreSQL when the block takes longer than so many seconds: a server that hangs (a frozen machine or
    process) keeps its connections open, and neither its time-outs nor TCP's end a wait for it.

    Raises:
        psycopg.OperationalError: it took longer; the connection is closed.
    """
    guard, late, done = threading.Lock(), False, False

    def cut() -> None:
        nonlocal late
        with guard:
            if not done:
                late = True
                with socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.Error as error:
        if late:
            connection.close()
            raise psycopg.OperationalError(
                f"PostgreSQL has not answered within {seconds:g} s: it hangs, or is far too busy"
            ) from error
        raise
    finally:
        with guard:
            done = True
        timer.cancel()


def engine(
    url: str, application: str, connection: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> sqlalchemy.Engine:
    """A SQLAlchemy engine over `connect`, which gets the options `connection`. Its errors and logs show no parameters."""
    return sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(url, application, **connection),
        hide_parameters=True,
        **options,
    )


# --- poolers -------------------------------------------------------------------------------------------------------

#: What nothing of ours works through.
STATEMENT_POOLING: Final = (
    "PostgreSQL is reached through a pooler in statement mode, in which there are no transactions"
)
CHANGE_POOLING: Final = "set pool_mode = transaction (or session) in its configuration, for this database"


@contextmanager
def refusing_statement_pooling() -> Iterator[None]:
    """Name the pooler's mode where it is the reason that a transaction could not begin.

    Raises:
        SettingsError: it is.
    """
    try:
        yield
    except (psycopg.OperationalError, sqlalchemy.exc.OperationalError) as error:
        if is_statement_pooling(error):
            raise SettingsError(f"DATABASE_URL: {STATEMENT_POOLING}; {CHANGE_POOLING}") from error
        raise


def is_statement_pooling(error: psycopg.Error | sqlalchemy.exc.DBAPIError) -> bool:
    """Whether PgBouncer refused a transaction because of its pool mode.

    It says everything with one SQLSTATE, also that a server is away, so its words decide; they are never translated.
    """
    cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    return isinstance(cause, psycopg.errors.ProtocolViolation) and "statement pooling" in str(cause)


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether the connection leads to a pooler (PgBouncer and the like) and not to a session of its own."""
    row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    return row is None or row[0] != connection.info.backend_pid


def shares_prepared(connection: psycopg.Connection[Any]) -> bool:
    """Whether a pooler hands on the names of prepared statements as they are.

    Its server sessions have many clients one after the other, and psycopg numbers its statements on every connection from
    0 on: one client would then run another one's statement with its own values. A pooler that knows prepared statements
    (PgBouncer from 1.21 on, with ``max_prepared_statements``) gives them names of its own.

    Args:
        connection: in autocommit mode. Of a pooler that knows them, it remembers one statement more.
    """
    if not is_pooled(connection):
        return False
    name = f"outbox_{secrets.token_hex(8)}"
    with connection.transaction():
        connection.pgconn.prepare(name.encode(), b"SELECT 1")
        known = "SELECT FROM pg_catalog.pg_prepared_statements WHERE name = %s"
        if connection.execute(known, (name,), prepare=False).fetchone() is None:
            return False
        connection.execute(sql.SQL("DEALLOCATE {}").format(sql.Identifier(name)), prepare=False)
    return True


# --- migrations ----------------------------------------------------------------------------------------------------


def migrations_path() -> Path:
    """The script directory, for `version_locations` of an alembic of your own."""
    installed = Path(__file__).parent / "migrations"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "migrations"


def _config(branch: Branch, schema: str) -> Config:
    scripts = str(migrations_path())
    config = Config()
    config.set_main_option("script_location", scripts.replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", f"{scripts}/outbox\n{scripts}/consumer".replace("%", "%%"))
    config.attributes.update(branch=branch, schema=check_schema(schema))
    return config


def upgrade(url: str, branch: Branch, *, schema: str = "public", wait_seconds: float = 60.0) -> str:
    """Bring the tables of one side to this version; safe when many processes do it at once. Returns the revision.

    Args:
        wait_seconds: how long to try where transactions at work hold the tables. Each try waits for 0.3 s, since all that
            come meanwhile wait behind it.

    Raises:
        SettingsError: the address or the schema name is malformed, or a pooler is in statement mode.
        SchemaError: the tables were held all the time; nothing was changed.
        psycopg.Error, sqlalchemy.exc.SQLAlchemyError: PostgreSQL refused; nothing was changed.
    """
    config = _config(branch, schema)
    database = engine(url, f"{branch} migrate", poolclass=NullPool)
    tries = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_held),
        wait=tenacity.wait_random(0.5, 1.0),
        stop=tenacity.stop_after_delay(wait_seconds),
        before_sleep=lambda _: _log.warning(
            "another transaction holds a table; trying again", extra={"action": "migrate"}
        ),
        reraise=True,
    )

    def migrate() -> None:
        with refusing_statement_pooling(), database.begin() as connection:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, f"{branch}@head")

    try:
        tries(migrate)
    except sqlalchemy.exc.OperationalError as error:
        if not _is_held(error):
            raise
        raise SchemaError(
            f"another transaction has held a table of schema {schema!r} for {wait_seconds:g} s, so that it could not be changed; "
            f"see who is at work in pg_stat_activity (the oldest xact_start), and run {_migrate(branch, schema)} again"
        ) from error
    return head(branch)


def _is_held(error: BaseException) -> bool:
    return isinstance(error, sqlalchemy.exc.OperationalError) and isinstance(
        error.orig, psycopg.errors.LockNotAvailable
    )


def upgrade_sql(branch: Branch, *, schema: str = "public") -> str:
    """The statements of `upgrade` on an empty database, for a person who runs them with psql."""
    buffer = io.StringIO()
    config = _config(branch, schema)
    config.output_buffer = buffer
    with redirect_stdout(buffer):
        alembic.command.upgrade(config, f"{branch}@head", sql=True)
    return re.sub(r"[ \t]+\n", "\n", buffer.getvalue())


@lru_cache(maxsize=2)
def head(branch: Branch) -> str:
    """The revision this version of the code wants."""
    revision = ScriptDirectory.from_config(_config(branch, "public")).get_revision(f"{branch}@head")
    assert revision is not None
    return str(revision.revision)


def check_revision(connection: psycopg.Connection[Any], branch: Branch, schema: str) -> None:
    """See that the tables are there and of this version, and that transactions can be had.

    Raises:
        SchemaError: they are not; says what to run.
        SettingsError: a pooler is in statement mode.
    """
    table = sql.Identifier(schema, f"{branch}_schema_version")
    wanted = head(branch)
    try:
        with refusing_statement_pooling(), connection.transaction():
            row = connection.execute(sql.SQL("SELECT version_num FROM {}").format(table)).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None
    found = row[0] if row else None
    if found is None:
        raise no_tables(branch, schema)
    if found != wanted:
        raise SchemaError(
            f"schema {schema!r} is at revision {found}, this version needs {wanted}; run: {_migrate(branch, schema)} "
            "(or update this program, if the schema is the newer one)"
        )


def no_tables(branch: Branch, schema: str) -> SchemaError:
    """The error for tables that are not there."""
    return SchemaError(f"schema {schema!r} has no {branch} tables; run: {_migrate(branch, schema)}")


def _migrate(branch: Branch, schema: str) -> str:
    return f"{branch} migrate" if schema == "public" else f"{branch} migrate --schema {schema!r}"


_OURS = re.compile(
    r"outbox(_batch|_stream|_epoch|_group|_pause|_default|_schema_version|_\d+_\d+)?|consumer_schema_version|consumer_retention"
    r"|entity_versions|dead_letters|message_failures|processed_messages(_default|_\d+_\d+)?"
)


def include_object(item: Any, name: str | None, kind: str, _reflected: bool = True, _compared: Any = None) -> bool:
    """For ``context.configure(include_object=…)`` in an alembic of your own: autogenerate leaves the tables of both sides
    alone (partitions, version tables and indexes included). `outbox migrate` and `consumer migrate` look after them."""
    table = name if kind == "table" else getattr(getattr(item, "table", None), "name", None)
    return table is None or not _OURS.fullmatch(table)
