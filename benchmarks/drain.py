"""Draining a full outbox of 200-byte events into a stream: our relay beside SKIP LOCKED + UPDATE + pipelined XADD."""

from __future__ import annotations

import time

import psycopg
import redis

from benchmarks.measure import Measurement, size
from outbox import schema
from outbox.relay import Relay
from outbox.settings import RelaySettings

_FILL = """
    INSERT INTO {table} (event_id, topic, type, key, version, data)
    SELECT gen_random_uuid(), 'payments', 'payment.received', 'wallet-' || n % 1000, n,
           convert_to('{{"amount_halala": 5000, "note": "' || repeat('x', 160) || '"}}', 'UTF8')
    FROM generate_series(1, {events}) n
"""


def run(postgres: str, valkey: str, events: int) -> list[Measurement]:
    """Both sides' turns on one pair of servers."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        schema.upgrade(postgres, "outbox")
        connection.execute("""
            CREATE TABLE baseline_outbox (
                position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event_id uuid NOT NULL, topic text NOT NULL,
                type text NOT NULL, key text, version bigint, data bytea NOT NULL, published_at timestamptz);
            CREATE INDEX ON baseline_outbox (position) WHERE published_at IS NULL;
        """)
        # A relay is a running process: what it does once, at its start, is not part of draining.
        settings = RelaySettings(database_url=postgres, redis_url=valkey)  # type: ignore[arg-type]  # text is taken
        relay = Relay(settings)
        relay.run_once()
        for table in ("outbox", "baseline_outbox"):
            connection.execute(_FILL.format(table=table, events=events))
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("VACUUM ANALYZE baseline_outbox")
        connection.execute("CHECKPOINT")
        return [_baseline(connection, postgres, valkey, events), _relay(connection, relay, valkey, events)]


def _baseline(connection: psycopg.Connection, postgres: str, valkey: str, events: int) -> Measurement:
    client = redis.Redis.from_url(valkey)
    before, started, published = _wal(connection), time.perf_counter(), 0
    with psycopg.connect(postgres) as work:
        while True:
            rows = work.execute(
                "SELECT position, event_id::text, type, key, version, data FROM baseline_outbox "
                "WHERE published_at IS NULL ORDER BY position LIMIT 1000 FOR UPDATE SKIP LOCKED",
                binary=True,
            ).fetchall()
            if not rows:
                break
            with client.pipeline(transaction=False) as pipeline:
                for _, event_id, kind, key, version, data in rows:
                    pipeline.xadd(
                        "baseline", {"id": event_id, "type": kind, "subject": key, "version": version, "data": data}
                    )
                pipeline.execute()
            work.execute(
                "UPDATE baseline_outbox SET published_at = now() WHERE position = ANY (%s)", ([r[0] for r in rows],)
            )
            work.commit()
            published += len(rows)
    seconds = time.perf_counter() - started
    assert published == events == client.xlen("baseline")
    details: dict[str, object] = {"wal_bytes_per_event": round((_wal(connection) - before) / events, 1)}
    return Measurement("SKIP LOCKED + UPDATE, pipelined XADD", events, seconds, True, details)


def _relay(connection: psycopg.Connection, relay: Relay, valkey: str, events: int) -> Measurement:
    before, started, published = _wal(connection), time.perf_counter(), 0
    while counts := relay.run_once().published:
        published += counts
    seconds = time.perf_counter() - started
    relay.close()
    client = redis.Redis.from_url(valkey)
    assert published == events == client.xlen("{payments}")
    details: dict[str, object] = {
        "wal_bytes_per_event": round((_wal(connection) - before) / events, 1),
        "outbox_bytes_per_event": round(size(connection, "outbox") / events),
        "stream_bytes_per_event": round(client.memory_usage("{payments}", samples=0) / events),
    }
    return Measurement("outbox relay", events, seconds, False, details)


def _wal(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])
