"""What both sides' databases have in common: connecting, migrating, and making partitions ahead."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import alembic.command
import psycopg
import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.pool import NullPool

from outbox.errors import SchemaError
from outbox.settings import check_schema, database_address

Branch = Literal["outbox", "consumer"]

_log = logging.getLogger(__name__)


def connect(url: str, application: str, **options: Any) -> psycopg.Connection[Any]:
    """A psycopg connection that also works through a transaction pooler: no named prepared statements.

    Args:
        url: as `outbox.settings.database_address` takes it.
        application: shown as ``application_name`` in ``pg_stat_activity``.
    """
    address = database_address(url)
    given = conninfo_to_dict(address)
    defaults = {name: value for name, value in _CONNECTION.items() if name not in given}
    return psycopg.connect(address, prepare_threshold=None, **(defaults | {"application_name": application} | options))


#: A server that vanished without a word is noticed within a minute. An address may say otherwise.
_CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def engine(url: str, application: str, **options: Any) -> sqlalchemy.Engine:
    """A SQLAlchemy engine over `connect`."""
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: connect(url, application), **options)


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


def upgrade(url: str, branch: Branch, *, schema: str = "public") -> str:
    """Bring the tables of one side to this version; safe when many processes do it at once. Returns the revision.

    Raises:
        SettingsError: the address or the schema name is malformed.
        psycopg.Error, sqlalchemy.exc.SQLAlchemyError: PostgreSQL refused; nothing was changed.
    """
    config = _config(branch, schema)
    database = engine(url, f"{branch} migrate", poolclass=NullPool)
    with database.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, f"{branch}@head")
    return head(branch)


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
    """See that the tables are there and of this version.

    Raises:
        SchemaError: they are not; says what to run.
    """
    table = sql.Identifier(schema, f"{branch}_schema_version")
    wanted = head(branch)
    try:
        row = connection.execute(sql.SQL("SELECT version_num FROM {}").format(table)).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None
    found = row[0] if row else None
    if found is None:
        raise SchemaError(f"schema {schema!r} has no {branch} tables; run: {branch} migrate")
    if found != wanted:
        raise SchemaError(
            f"schema {schema!r} is at revision {found}, this version needs {wanted}; run: {branch} migrate "
            "(or update this program, if the schema is the newer one)"
        )


# --- partitions ----------------------------------------------------------------------------------------------------


def existing_partitions(connection: psycopg.Connection[Any], schema: str, table: str) -> list[str]:
    """Names of the partitions of a table, the default one included."""
    rows = connection.execute(
        """
        SELECT child.relname FROM pg_catalog.pg_inherits
        JOIN pg_catalog.pg_class parent ON parent.oid = inhparent
        JOIN pg_catalog.pg_namespace n ON n.oid = parent.relnamespace
        JOIN pg_catalog.pg_class child ON child.oid = inhrelid
        WHERE n.nspname = %s AND parent.relname = %s ORDER BY child.relname
        """,
        (schema, table),
    )
    return [name for (name,) in rows]


def make_partitions(
    connection: psycopg.Connection[Any],
    schema: str,
    table: str,
    column: str,
    ranges: Iterable[tuple[str, Any, Any]],
) -> int:
    """Make the missing ones of `ranges` (partition name, from, to), each in a transaction of its own; return how many.

    A plain table is made first and attached, which locks only the (mostly empty) default partition against its writers,
    for at most a quarter of a second; when that is not enough the partition is left for the next call. Rows of the range
    that went to the default partition are moved in the same transaction, since PostgreSQL would refuse the partition
    otherwise. Safe when many processes do it at once. Where rows of the range may be written or read meanwhile, the caller
    locks the parent first (see `outbox.store.Store`): a statement that had chosen the default partition before would be
    refused by it, or miss the moved rows.

    Args:
        connection: in autocommit mode.
    """
    have = set(existing_partitions(connection, schema, table))
    made = 0
    for name, low, high in ranges:
        if name in have:
            continue
        parent, default, child = (sql.Identifier(schema, part) for part in (table, f"{table}_default", name))
        bounds: dict[str, sql.Composable] = {
            "child": child,
            "parent": parent,
            "default": default,
            "column": sql.Identifier(column),
        }
        bounds |= {"low": sql.Literal(low), "high": sql.Literal(high)}
        try:
            with connection.transaction():
                connection.execute("SET LOCAL lock_timeout = '250ms'; SET LOCAL statement_timeout = '1s'")
                connection.execute(
                    "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"partitions {schema} {table}",)
                )
                if name in existing_partitions(connection, schema, table):
                    continue
                for statement in _MAKE_PARTITION:
                    connection.execute(sql.SQL(statement).format(**bounds))
            made += 1
        except (
            psycopg.errors.LockNotAvailable,
            psycopg.errors.QueryCanceled,
            psycopg.errors.DeadlockDetected,
        ):
            _log.info("partition %s waits for a writer", name, extra={"action": "partition_waits"})
            break
    return made


_MAKE_PARTITION = (
    "LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE",
    "CREATE TABLE {child} (LIKE {parent} INCLUDING ALL EXCLUDING IDENTITY)",
    "WITH moved AS (DELETE FROM {default} WHERE {column} >= {low} AND {column} < {high} RETURNING *) "
    "INSERT INTO {child} SELECT * FROM moved",
    "ALTER TABLE {parent} ATTACH PARTITION {child} FOR VALUES FROM ({low}) TO ({high})",
)
