"""The consumer's tables as SQLAlchemy sees them, for users who look at them with it (`metadata`).

The migrations make them."""

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
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from outbox.settings import check_schema


@lru_cache(maxsize=256)
def metadata(schema: str = "public") -> MetaData:
    """MetaData of the consumer's tables in `schema`. What keeps autogenerate calm is `outbox.schema.include_object`.

    Raises:
        SettingsError: `schema` is not a name that can be used.
    """
    meta = MetaData(schema=check_schema(schema))
    time = DateTime(timezone=True)
    Table(
        "processed_messages",
        meta,
        Column("consumer", Text, nullable=False),
        Column("event_id", Uuid, nullable=False),
        Column("outcome", Text, nullable=False, server_default=text("'applied'")),
        Column("processed_at", time, nullable=False, server_default=text("now()")),
        PrimaryKeyConstraint("consumer", "event_id"),
        Index(
            "processed_messages_time",
            "processed_at",
            postgresql_using="brin",
            postgresql_with={"autosummarize": "on"},
        ),
        postgresql_partition_by="RANGE (event_id)",
    )
    Table(
        "entity_versions",
        meta,
        Column("consumer", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("type", Text, nullable=False),
        Column("key", Text, nullable=False),
        Column("version", BigInteger),
        Column("updated_at", time, nullable=False, server_default=text("now()")),
        PrimaryKeyConstraint("consumer", "topic", "type", "key"),
    )
    Table(
        "consumer_retention",
        meta,
        Column("consumer", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("retention_seconds", BigInteger, nullable=False),
        Column("outbox_since", time),
        Column("before_since", time),
        Column("begun_at", time, nullable=False, server_default=text("clock_timestamp()")),
        Column("seen_at", time, nullable=False, server_default=text("clock_timestamp()")),
        PrimaryKeyConstraint("consumer", "topic"),
    )
    Table(
        "dead_letters",
        meta,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("consumer", Text, nullable=False),
        Column("stream", Text, nullable=False),
        Column("stream_id", Text, nullable=False),
        Column("event_id", Uuid),
        Column("reason", Text, nullable=False),
        Column("error", Text, nullable=False),
        Column("fields", ARRAY(LargeBinary), nullable=False),
        Column("attempts", Integer, nullable=False, server_default=text("1")),
        Column("created_at", time, nullable=False, server_default=text("now()")),
        Column("topic", Text),
        Column("type", Text),
        Column("key", Text),
        Column("version", BigInteger),
        Column("error_class", Text),
        Column("first_failed_at", time, nullable=False, server_default=text("now()")),
        Column("cut", Boolean, nullable=False, server_default=text("false")),
        Index(
            "dead_letters_delivery", "consumer", "stream", "stream_id", unique=True, postgresql_where="event_id IS NULL"
        ),
        Index("dead_letters_event", "event_id"),
        Index("dead_letters_time", "consumer", "created_at"),
    )
    Table(
        "message_failures",
        meta,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("consumer", Text, nullable=False),
        Column("stream", Text, nullable=False),
        Column("stream_id", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("event_id", Uuid),
        Column("type", Text),
        Column("key", Text),
        Column("version", BigInteger),
        Column("fields", ARRAY(LargeBinary), nullable=False),
        Column("reason", Text, nullable=False),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("tries", Integer, nullable=False, server_default=text("0")),
        Column("starts", Integer, nullable=False, server_default=text("0")),
        Column("lease", Uuid),
        Column("next_attempt_at", time, nullable=False, server_default=text("clock_timestamp()")),
        Column("give_up_at", time),
        Column("past_gap", Boolean, nullable=False, server_default=text("false")),
        Column("error_class", Text),
        Column("error", Text),
        Column("first_failed_at", time, nullable=False, server_default=text("clock_timestamp()")),
        Column("last_failed_at", time, nullable=False, server_default=text("clock_timestamp()")),
        UniqueConstraint("consumer", "event_id", name="message_failures_event"),
        Index("message_failures_due", "consumer", "next_attempt_at", "id"),
        Index("message_failures_gap", "consumer", "topic", "key", "version", postgresql_where="reason = 'gap'"),
        Index("message_failures_failed", "consumer", postgresql_where="reason = 'failed'"),
        Index("message_failures_type", "consumer", "type", postgresql_where="reason = 'no_handler'"),
    )
    return meta
