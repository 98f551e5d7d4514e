"""The outbox, its sealed batches, and what plain-SQL producers and people with psql use."""

from alembic import op

revision = "outbox_0001"
down_revision = None
branch_labels = ("outbox",)
depends_on = None

# The same rules as outbox/envelope.py, for producers that do not come through it.
TOPIC = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
HEADER = "^[a-z][a-z0-9]{0,39}$"
RESERVED = (
    "id", "source", "specversion", "type", "subject", "time", "datacontenttype", "dataschema", "data",
    "database64", "version", "batch", "topic",
)  # fmt: skip


def upgrade(schema: str) -> None:
    """`schema` comes quoted; every name is qualified with it, so that an empty search_path works."""
    for statement in STATEMENTS:
        op.execute(
            statement.replace("{s}", schema)
            .replace("{topic}", TOPIC)
            .replace("{header}", HEADER)
            .replace("{reserved}", ", ".join(f"'{name}'" for name in RESERVED))
        )


def downgrade(schema: str) -> None:
    op.execute(f"DROP VIEW {schema}.outbox_events")
    op.execute(f"DROP FUNCTION {schema}.outbox_record, {schema}.outbox_json")
    op.execute(f"DROP TABLE {schema}.outbox, {schema}.outbox_batch, {schema}.outbox_stream, {schema}.outbox_epoch")


STATEMENTS = (
    # Append-only: rows are inserted once, never updated or deleted; whole partitions are dropped.
    # xid is what the relay's snapshot windows are made of, so it cannot be given by the producer to any good end.
    r"""
    CREATE TABLE {s}.outbox (
        position     bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
        xid          xid8        NOT NULL DEFAULT pg_current_xact_id(),
        event_id     uuid        NOT NULL,
        topic        text        NOT NULL CONSTRAINT outbox_topic_name CHECK (topic ~ '{topic}'),
        type         text        NOT NULL CONSTRAINT outbox_type_length CHECK (length(type) BETWEEN 1 AND 200),
        key          text        CONSTRAINT outbox_key_length CHECK (length(key) BETWEEN 1 AND 200),
        version      bigint      CONSTRAINT outbox_version_not_negative CHECK (version >= 0),
        data         bytea       NOT NULL,
        content_type text        CONSTRAINT outbox_content_type_ascii CHECK (content_type ~ '^[!-~][ -~]{0,199}$'),
        "time"       timestamptz,
        source       text        CONSTRAINT outbox_source_length CHECK (length(source) BETWEEN 1 AND 200),
        headers      jsonb       CONSTRAINT outbox_headers_strings CHECK (
                                     jsonb_typeof(headers) = 'object'
                                     AND NOT jsonb_path_exists(
                                         headers, 'strict $.* ? (@.type() != "string")', '{}', true)
                                     AND NOT jsonb_path_exists(
                                         headers, '$.keyvalue() ? (!(@.key like_regex "{header}"))')
                                     AND NOT headers ?| ARRAY[{reserved}]),
        created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT outbox_pkey PRIMARY KEY (position)
    ) PARTITION BY RANGE (position)
    """,
    "CREATE INDEX outbox_xid ON {s}.outbox (xid)",
    # A writer never fails for lack of a partition. The relay makes partitions ahead and moves what is here.
    "CREATE TABLE {s}.outbox_default PARTITION OF {s}.outbox DEFAULT",
    # A sealed batch is the rows visible in snap, not visible in prev, at positions in (after, last]: the same rows in the
    # same order whenever it is read. The primary key is the whole leader election: two relays cannot seal one number.
    """
    CREATE TABLE {s}.outbox_batch (
        seq       bigint      NOT NULL CONSTRAINT outbox_batch_pkey PRIMARY KEY,
        token     uuid        NOT NULL DEFAULT gen_random_uuid(),
        epoch     integer     NOT NULL,
        prev      pg_snapshot NOT NULL,
        snap      pg_snapshot NOT NULL,
        after     bigint      NOT NULL,
        last      bigint      NOT NULL,
        done      boolean     NOT NULL,
        events    integer     NOT NULL CONSTRAINT outbox_batch_not_empty CHECK (events > 0),
        sealed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT outbox_batch_positions CHECK (last > after)
    )
    """,
    # Which batches a stream is made of, and over how many lanes its topic was spread then.
    """
    CREATE TABLE {s}.outbox_stream (
        stream text    NOT NULL,
        seq    bigint  NOT NULL,
        lanes  integer NOT NULL CONSTRAINT outbox_stream_lanes CHECK (lanes > 0),
        events integer NOT NULL CONSTRAINT outbox_stream_not_empty CHECK (events > 0),
        CONSTRAINT outbox_stream_pkey PRIMARY KEY (stream, seq)
    )
    """,
    # A new epoch begins when this database is found to be behind what Redis holds (failover, point-in-time restore).
    """
    CREATE TABLE {s}.outbox_epoch (
        epoch     integer     NOT NULL CONSTRAINT outbox_epoch_pkey PRIMARY KEY,
        opened_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
    """,
    "INSERT INTO {s}.outbox_epoch (epoch) VALUES (1)",
    # For producers in plain SQL (triggers, other languages). Returns the event id. Retries must pass the same p_id.
    """
    CREATE FUNCTION {s}.outbox_record(
        p_topic text, p_type text, p_payload json, p_key text DEFAULT NULL, p_version bigint DEFAULT NULL,
        p_id uuid DEFAULT NULL, p_headers jsonb DEFAULT NULL, p_source text DEFAULT NULL
    ) RETURNS uuid LANGUAGE sql VOLATILE SET search_path = pg_catalog AS $$
        INSERT INTO {s}.outbox (event_id, topic, type, key, version, data, headers, source)
        VALUES (
            coalesce(p_id, encode(set_byte(set_byte(overlay(
                uuid_send(gen_random_uuid())
                PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
                6, (get_byte(uuid_send(gen_random_uuid()), 0) & 15) | 112),
                8, (get_byte(uuid_send(gen_random_uuid()), 0) & 63) | 128), 'hex')::uuid),
            p_topic, p_type, p_key, p_version, convert_to(p_payload::text, 'UTF8'), p_headers, p_source)
        RETURNING event_id
    $$
    """,
    """
    COMMENT ON FUNCTION {s}.outbox_record IS
    'Record an event in the current transaction: topic, type, JSON payload, key, version, id (default: a new UUIDv7), '
    'headers (an object of strings), source. Change the business rows first, so that their locks order events of one key.'
    """,
    # Bytes that are not JSON show as NULL instead of failing the whole look.
    """
    CREATE FUNCTION {s}.outbox_json(data bytea, content_type text) RETURNS json
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog AS $$
    BEGIN
        IF content_type IS NULL OR content_type ~* '^\\s*(application/json|[^;]*\\+json)\\s*(;|$)' THEN
            RETURN convert_from(data, 'UTF8')::json;
        END IF;
        RETURN NULL;
    EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
        RETURN NULL;
    END
    $$
    """,
    """
    CREATE VIEW {s}.outbox_events AS
    SELECT position, event_id, topic, type, key, version, {s}.outbox_json(data, content_type) AS payload,
           coalesce(content_type, 'application/json') AS content_type, octet_length(data) AS payload_bytes,
           "time", source, headers, created_at, xid
    FROM {s}.outbox
    """,
    "COMMENT ON VIEW {s}.outbox_events IS 'The outbox for people: payloads as JSON, NULL where they are not.'",
)
