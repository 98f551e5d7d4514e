"""Rules of outbox/envelope.py that producers in SQL could still break: names of queues; how many headers, and how large.

What is there already is not looked at, so that the lock is short.
"""

from alembic import op

revision = "outbox_0005"
down_revision = "outbox_0004"
branch_labels = None
depends_on = None

RULES = {
    "outbox_queue_name": r"NOT starts_with(topic, 'queue/') OR topic ~ '^queue/[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'",
    "outbox_headers_number": "jsonb_array_length(jsonb_path_query_array(headers, '$.keyvalue()', '{}', true)) <= 32",
    # 32 of 1,024 bytes, each of which JSON may write as two.
    "outbox_headers_size": "octet_length(headers::text) <= 70000",
}


def upgrade(schema: str) -> None:
    """`schema` comes quoted."""
    for name, rule in RULES.items():
        op.execute(f"ALTER TABLE {schema}.outbox ADD CONSTRAINT {name} CHECK ({rule}) NOT VALID")


def downgrade(schema: str) -> None:
    for name in RULES:
        op.execute(f"ALTER TABLE {schema}.outbox DROP CONSTRAINT {name}")
