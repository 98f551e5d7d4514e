"""The ledger, the versions applied so far, and the dead letters."""

from alembic import op

revision = "consumer_0001"
down_revision = None
branch_labels = ("consumer",)
depends_on = None


def upgrade(schema: str) -> None:
    """`schema` comes quoted; every name is qualified with it, so that an empty search_path works."""
    for statement in STATEMENTS:
        op.execute(statement.replace("{s}", schema))


def downgrade(schema: str) -> None:
    op.execute(f"DROP TABLE {schema}.processed_messages, {schema}.entity_versions, {schema}.dead_letters")


STATEMENTS = (
    # The ledger: one row an event and consumer, inserted in the transaction of the effect. UUIDv7 ids are ordered by
    # time, so ranges of them are ranges of time and old partitions can be dropped; other ids go to the default one.
    """
    CREATE TABLE {s}.processed_messages (
        consumer     text        NOT NULL,
        event_id     uuid        NOT NULL,
        outcome      text        NOT NULL DEFAULT 'applied'
                     CONSTRAINT processed_messages_outcome CHECK (outcome IN ('applied', 'stale', 'dead')),
        processed_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT processed_messages_pkey PRIMARY KEY (consumer, event_id)
    ) PARTITION BY RANGE (event_id)
    """,
    "CREATE TABLE {s}.processed_messages_default PARTITION OF {s}.processed_messages DEFAULT",
    # The highest version applied by a handler with Order.LATEST; NULL: the key is locked for the first time, nothing
    # applied yet. Versions of different types are apart: a newer rename must not hide an older move.
    """
    CREATE TABLE {s}.entity_versions (
        consumer   text        NOT NULL,
        topic      text        NOT NULL,
        type       text        NOT NULL,
        key        text        NOT NULL,
        version    bigint,
        updated_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT entity_versions_pkey PRIMARY KEY (consumer, topic, type, key)
    )
    """,
    # What could not be processed, as it arrived. stream_id is the entry's id in its stream.
    """
    CREATE TABLE {s}.dead_letters (
        id          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY CONSTRAINT dead_letters_pkey PRIMARY KEY,
        consumer    text        NOT NULL,
        stream      text        NOT NULL,
        stream_id   text        NOT NULL,
        event_id    uuid,
        reason      text        NOT NULL,
        error       text        NOT NULL,
        fields      bytea[]     NOT NULL,
        attempts    integer     NOT NULL DEFAULT 1,
        created_at  timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT dead_letters_delivery UNIQUE (consumer, stream, stream_id)
    )
    """,
    "COMMENT ON COLUMN {s}.dead_letters.fields IS 'The entry as it arrived: names and values in turn.'",
)
