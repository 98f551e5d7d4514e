"""What each consumer needs the ledger to remember, so that none forgets for another; and when rows were processed, by pages."""

from alembic import op

revision = "consumer_0002"
down_revision = "consumer_0001"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    # outbox_since: the oldest event that the topic's outbox had at any time since begun_at was recorded then; before_since: the
    # same for a day or more until begun_at. NULL: it was never known.
    op.execute(f"""
    CREATE TABLE {schema}.consumer_retention (
        consumer          text        NOT NULL,
        topic             text        NOT NULL,
        retention_seconds bigint      NOT NULL,
        outbox_since      timestamptz,
        before_since      timestamptz,
        begun_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
        seen_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT consumer_retention_pkey PRIMARY KEY (consumer, topic)
    )
    """)
    # A few bytes for a megabyte of rows: whether a partition of old ids has rows that were processed lately is then known
    # without reading it.
    op.execute(f"""
    CREATE INDEX processed_messages_time ON {schema}.processed_messages USING brin (processed_at)
    WITH (autosummarize = on)
    """)


def downgrade(schema: str) -> None:
    op.execute(f"DROP INDEX {schema}.processed_messages_time")
    op.execute(f"DROP TABLE {schema}.consumer_retention")
