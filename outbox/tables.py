"""The outbox's tables as SQLAlchemy sees them, for the writer and for users who look at them with SQLAlchemy (`metadata`).

The migrations under ``migrations/outbox`` make them; partitions, functions and the view are only there. No foreign keys:
partitions of the outbox are dropped while batches that name them may stay.
"""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import UserDefinedType

from outbox.settings import check_schema

#: Columns that a producer fills, in the order the writer sends them.
COLUMNS = ("event_id", "topic", "type", "key", "version", "data", "content_type", "time", "source", "headers")


class _Named(UserDefinedType[str]):
    """A PostgreSQL type that SQLAlchemy has no class for."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_kw: object) -> str:
        return self.name


@lru_cache(maxsize=256)
def metadata(schema: str = "public") -> MetaData:
    """MetaData of the outbox's tables in `schema`. What keeps autogenerate calm is `outbox.schema.include_object`.

    Raises:
        SettingsError: `schema` is not a name that can be used.
    """
    meta = MetaData(schema=check_schema(schema))
    now = text("clock_timestamp()")
    time = DateTime(timezone=True)
    Table(
        "outbox",
        meta,
        Column("position", BigInteger, Identity(always=True), nullable=False),
        Column("xid", _Named("xid8"), nullable=False, server_default=text("pg_current_xact_id()")),
        Column("event_id", Uuid, nullable=False),
        Column("topic", Text, nullable=False),
        Column("type", Text, nullable=False),
        Column("key", Text),
        Column("version", BigInteger),
        Column("data", LargeBinary, nullable=False),
        Column("content_type", Text),
        Column("time", time),
        Column("source", Text),
        Column("headers", JSONB(none_as_null=True)),
        Column("created_at", time, nullable=False, server_default=now),
        PrimaryKeyConstraint("position"),
        Index("outbox_xid", "xid"),
        postgresql_partition_by="RANGE (position)",
    )
    Table(
        "outbox_batch",
        meta,
        Column("seq", BigInteger, primary_key=True, autoincrement=False),
        Column("token", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
        Column("epoch", Integer, nullable=False),
        Column("prev", _Named("pg_snapshot"), nullable=False),
        Column("snap", _Named("pg_snapshot"), nullable=False),
        Column("after", BigInteger, nullable=False),
        Column("last", BigInteger, nullable=False),
        Column("done", Boolean, nullable=False),
        Column("events", Integer, nullable=False),
        Column("sealed_at", time, nullable=False, server_default=now),
    )
    Table(
        "outbox_stream",
        meta,
        Column("stream", Text, nullable=False),
        Column("seq", BigInteger, nullable=False),
        Column("lanes", Integer, nullable=False),
        Column("events", Integer, nullable=False),
        PrimaryKeyConstraint("stream", "seq"),
    )
    Table(
        "outbox_epoch",
        meta,
        Column("epoch", Integer, primary_key=True, autoincrement=False),
        Column("opened_at", time, nullable=False, server_default=now),
        Column("timeline", Integer),
    )
    Table(
        "outbox_group",
        meta,
        Column("stream", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("acked", BigInteger, nullable=False, server_default=text("0")),
        Column("acked_at", time, nullable=False, server_default=now),
        Column("seen_at", time, nullable=False, server_default=now),
        PrimaryKeyConstraint("stream", "name"),
    )
    Table(
        "outbox_pause",
        meta,
        Column("stream", Text, primary_key=True),
        Column("reason", Text, nullable=False),
        Column("since", time, nullable=False, server_default=now),
    )
    return meta


def outbox_table(schema: str = "public") -> Table:
    """The outbox in `schema`."""
    return metadata(schema).tables[f"{schema}.outbox"]
