"""Dead letters of a consumer by age, so that old ones are found without reading all of them."""

from alembic import op

revision = "consumer_0003"
down_revision = "consumer_0002"
branch_labels = None
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    op.execute(f"CREATE INDEX dead_letters_time ON {schema}.dead_letters (consumer, created_at)")


def downgrade(schema: str) -> None:
    op.execute(f"DROP INDEX {schema}.dead_letters_time")
