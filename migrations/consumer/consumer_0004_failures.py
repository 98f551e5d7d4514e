"""Events whose handler failed, or that wait for something, with all that is needed to run them again; and what dead letters tell."""

from alembic import op

revision = "consumer_0004"
down_revision = "consumer_0003"
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
            CHECK (outcome IN ('applied', 'stale', 'dead', 'waiting')) NOT VALID
    """,
    # One row an event that was delivered and is not done: its ledger row says 'waiting'. It goes with the transaction that
    # applies it, or moves to dead_letters. id orders what is due at the same time.
    """
    CREATE TABLE {s}.message_failures (
        id              bigint      NOT NULL GENERATED ALWAYS AS IDENTITY CONSTRAINT message_failures_pkey PRIMARY KEY,
        consumer        text        NOT NULL,
        stream          text        NOT NULL,
        stream_id       text        NOT NULL,
        topic           text        NOT NULL,
        event_id        uuid,
        type            text,
        key             text,
        version         bigint,
        fields          bytea[]     NOT NULL,
        reason          text        NOT NULL
                        CONSTRAINT message_failures_reason CHECK (reason IN ('failed', 'no_handler', 'gap')),
        attempts        integer     NOT NULL DEFAULT 0,
        tries           integer     NOT NULL DEFAULT 0,
        starts          integer     NOT NULL DEFAULT 0,
        lease           uuid,
        next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        give_up_at      timestamptz,
        past_gap        boolean     NOT NULL DEFAULT false,
        error_class     text,
        error           text,
        first_failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        last_failed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT message_failures_event UNIQUE (consumer, event_id),
        CONSTRAINT message_failures_wait CHECK ((reason = 'failed') = (give_up_at IS NULL))
    )
    """,
    "COMMENT ON COLUMN {s}.message_failures.event_id IS 'NULL: put aside as no event, and to be read again.'",
    "COMMENT ON COLUMN {s}.message_failures.attempts IS 'Failures that count towards the last attempt.'",
    "COMMENT ON COLUMN {s}.message_failures.tries IS 'All failures, by which the pauses grow.'",
    "COMMENT ON COLUMN {s}.message_failures.starts IS 'Starts since the last known outcome: what ends its process has many.'",
    "COMMENT ON COLUMN {s}.message_failures.lease IS 'Who has taken it for a try, until next_attempt_at.'",
    "COMMENT ON COLUMN {s}.message_failures.past_gap IS 'A person has said to apply it although versions before it are missing.'",
    "CREATE INDEX message_failures_due ON {s}.message_failures (consumer, next_attempt_at, id)",
    "CREATE INDEX message_failures_gap ON {s}.message_failures (consumer, topic, key, version) WHERE reason = 'gap'",
    "CREATE INDEX message_failures_type ON {s}.message_failures (consumer, type) WHERE reason = 'no_handler'",
    "CREATE INDEX message_failures_failed ON {s}.message_failures (consumer) WHERE reason = 'failed'",
    # Of events the ledger row is the guard against burying twice; a stream's ids may come again after a loss.
    "ALTER TABLE {s}.dead_letters DROP CONSTRAINT dead_letters_delivery",
    "CREATE UNIQUE INDEX dead_letters_delivery ON {s}.dead_letters (consumer, stream, stream_id) WHERE event_id IS NULL",
    "CREATE INDEX dead_letters_event ON {s}.dead_letters (event_id)",
    """
    ALTER TABLE {s}.dead_letters
        ADD COLUMN topic text,
        ADD COLUMN type text,
        ADD COLUMN key text,
        ADD COLUMN version bigint,
        ADD COLUMN error_class text,
        ADD COLUMN first_failed_at timestamptz NOT NULL DEFAULT now(),
        ADD COLUMN cut boolean NOT NULL DEFAULT false
    """,
    # Of these no more than the text told it so far.
    "UPDATE {s}.dead_letters SET cut = true WHERE error LIKE '%; only the beginning of its % bytes is kept'",
    "COMMENT ON COLUMN {s}.dead_letters.cut IS 'Only the beginning of fields is kept: it cannot be processed again from here.'",
)
BACK = (
    """
    ALTER TABLE {s}.dead_letters DROP COLUMN topic, DROP COLUMN type, DROP COLUMN key, DROP COLUMN version,
        DROP COLUMN error_class, DROP COLUMN first_failed_at, DROP COLUMN cut
    """,
    "DROP INDEX {s}.dead_letters_event",
    "DROP INDEX {s}.dead_letters_delivery",
    """
    DELETE FROM {s}.dead_letters d USING {s}.dead_letters e
    WHERE d.consumer = e.consumer AND d.stream = e.stream AND d.stream_id = e.stream_id AND d.id > e.id
    """,
    "ALTER TABLE {s}.dead_letters ADD CONSTRAINT dead_letters_delivery UNIQUE (consumer, stream, stream_id)",
    # Their events are put aside, not lost.
    """
    INSERT INTO {s}.dead_letters (consumer, stream, stream_id, event_id, reason, error, fields, attempts)
    SELECT consumer, stream, stream_id, event_id, reason, coalesce(error, reason), fields, attempts
    FROM {s}.message_failures ON CONFLICT DO NOTHING
    """,
    "DROP TABLE {s}.message_failures",
    "UPDATE {s}.processed_messages SET outcome = 'dead' WHERE outcome = 'waiting'",
    """
    ALTER TABLE {s}.processed_messages
        DROP CONSTRAINT processed_messages_outcome,
        ADD CONSTRAINT processed_messages_outcome CHECK (outcome IN ('applied', 'stale', 'dead'))
    """,
)
