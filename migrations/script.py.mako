"""${message}"""

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade(schema: str) -> None:
    """`schema` comes quoted; qualify every name with it."""
    ${upgrades if upgrades else "pass"}


def downgrade(schema: str) -> None:
    ${downgrades if downgrades else "pass"}
