"""Which streams the relay has paused and why: `outbox status` says what the relay itself does."""

from alembic import op

revision = "outbox_0004"
down_revision = "outbox_0003"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    # A row as long as the stream is paused. Relays read it, too, so that all of them, and the next one, go on from it.
    op.execute(f"""
    CREATE TABLE {schema}.outbox_pause (
        stream text        NOT NULL CONSTRAINT outbox_pause_pkey PRIMARY KEY,
        reason text        NOT NULL CONSTRAINT outbox_pause_reason CHECK (reason IN ('memory', 'length')),
        since  timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """)


def downgrade(schema: str) -> None:
    op.execute(f"DROP TABLE {schema}.outbox_pause")
