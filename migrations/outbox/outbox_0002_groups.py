"""How far the consumer groups are: what a stream that was lost is published again from, and what may be dropped."""

from alembic import op

revision = "outbox_0002"
down_revision = "outbox_0001"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    # acked: everything of the stream up to this batch is acknowledged by the group. It never goes back.
    op.execute(f"""
    CREATE TABLE {schema}.outbox_group (
        stream   text        NOT NULL,
        name     text        NOT NULL,
        acked    bigint      NOT NULL DEFAULT 0,
        acked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        seen_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT outbox_group_pkey PRIMARY KEY (stream, name)
    )
    """)


def downgrade(schema: str) -> None:
    op.execute(f"DROP TABLE {schema}.outbox_group")
