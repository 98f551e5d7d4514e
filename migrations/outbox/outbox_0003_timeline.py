"""The timeline of PostgreSQL that an epoch began on: a promoted stand-by is told from the old primary by it."""

from alembic import op

revision = "outbox_0003"
down_revision = "outbox_0002"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    op.execute(f"ALTER TABLE {schema}.outbox_epoch ADD COLUMN timeline integer")
    # Not every service that speaks like PostgreSQL says it; NULL then, and only the streams' markers tell.
    op.execute(f"""
    DO $$
    BEGIN
        UPDATE {schema}.outbox_epoch
        SET timeline = ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
        WHERE epoch = (SELECT max(epoch) FROM {schema}.outbox_epoch);
    EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function
            OR object_not_in_prerequisite_state THEN
        NULL;
    END $$
    """)  # noqa: S608 - the schema comes quoted


def downgrade(schema: str) -> None:
    op.execute(f"ALTER TABLE {schema}.outbox_epoch DROP COLUMN timeline")
