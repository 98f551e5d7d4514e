"""Jobs that a person has cancelled: their ledger rows say so, and nobody runs them."""

from alembic import op

revision = "consumer_0005"
down_revision = "consumer_0004"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    for statement in STATEMENTS:
        op.execute(statement.replace("{s}", schema))


def downgrade(schema: str) -> None:
    for statement in BACK:
        op.execute(statement.replace("{s}", schema))


STATEMENTS = (
    # NOT VALID: what fulfilled the narrower rule fulfils this one, so nothing is read while the table is locked.
    """
    ALTER TABLE {s}.processed_messages
        DROP CONSTRAINT processed_messages_outcome,
        ADD CONSTRAINT processed_messages_outcome
            CHECK (outcome IN ('applied', 'stale', 'dead', 'waiting', 'cancelled')) NOT VALID
    """,
)
BACK = (
    # Not to be run, like what is older than what was applied.
    "UPDATE {s}.processed_messages SET outcome = 'stale' WHERE outcome = 'cancelled'",
    """
    ALTER TABLE {s}.processed_messages
        DROP CONSTRAINT processed_messages_outcome,
        ADD CONSTRAINT processed_messages_outcome CHECK (outcome IN ('applied', 'stale', 'dead', 'waiting')) NOT VALID
    """,
)
