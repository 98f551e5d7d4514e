"""Consuming events whose handler is one UPDATE: our worker beside one transaction a message, with the same handler, and with one
that does the same for a whole batch."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import psycopg
import redis
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.orm import Session

from benchmarks.measure import Measurement, size
from consumer import Consumer, Envelope
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema
from outbox.envelope import decode

_CREDIT = text("UPDATE wallet SET balance = balance + :amount WHERE id = :id")
_CREDIT_RAW = "UPDATE wallet SET balance = balance + %s WHERE id = %s"
_CREDIT_MANY = """
    UPDATE wallet SET balance = balance + batch.amount
    FROM (
        SELECT id, sum(amount) AS amount FROM unnest(%s::text[], %s::bigint[]) AS batch (id, amount) GROUP BY id
    ) AS batch
    WHERE wallet.id = batch.id
"""
_BASELINE_LEDGER = text(
    "INSERT INTO processed_messages (consumer, event_id) VALUES ('baseline', :id) ON CONFLICT DO NOTHING RETURNING 1"
)


def credit(event: Envelope, session: Session) -> None:
    session.execute(_CREDIT, {"amount": event.payload["amount_halala"], "id": event.key})


def credit_raw(event: Envelope, connection: psycopg.Connection[Any]) -> None:
    connection.execute(_CREDIT_RAW, (event.payload["amount_halala"], event.key))


def credit_many(events: Sequence[Envelope], connection: psycopg.Connection[Any]) -> None:
    connection.execute(_CREDIT_MANY, ([e.key for e in events], [e.payload["amount_halala"] for e in events]))


def run(postgres: str, valkey: str, events: int) -> list[Measurement]:
    """All sides' turns on one pair of servers; the baseline gets a tenth of the messages, being that much slower."""
    some = max(1000, events // 5)
    schema.upgrade(postgres, "consumer")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE TABLE wallet (id text PRIMARY KEY, balance bigint NOT NULL DEFAULT 0)")
        connection.execute("INSERT INTO wallet SELECT 'wallet-' || n FROM generate_series(0, 999) n")
        connection.execute("VACUUM ANALYZE wallet")
        client = redis.Redis.from_url(valkey)
        turns = []
        for stream, count in (("baseline", some // 10), ("session", some), ("raw", some), ("batch", 5 * some)):
            _fill(client, stream, count)
        turns.append(_baseline(postgres, client, some // 10))
        turns.append(_worker(postgres, valkey, "session", "worker, plain handler (SQLAlchemy Session)", some))
        turns.append(_worker(postgres, valkey, "raw", "worker, plain handler (psycopg connection)", some))
        turns.append(_worker(postgres, valkey, "batch", "worker, batch handler (one statement a batch)", 5 * some))
        row = connection.execute("SELECT sum(balance) FROM wallet").fetchone()
        assert row is not None
        done = sum(turn.events for turn in turns)
        assert row[0] == 5000 * done, "money was lost or made"
        turns[-1].details["ledger_bytes_per_event"] = round(size(connection, "processed_messages") / done)
    return turns


def _fill(client: redis.Redis, topic: str, events: int) -> None:
    now = int(time.time() * 1000)
    for start in range(0, events, 1000):
        with client.pipeline(transaction=False) as pipeline:
            for n in range(start, min(start + 1000, events)):
                event_id = uuid.UUID(int=(now << 80) | (7 << 76) | (2 << 62) | n)
                pipeline.xadd(
                    f"{{{topic}}}",
                    {
                        "data": b'{"amount_halala":5000,"note":"' + b"x" * 160 + b'"}', "id": str(event_id),
                        "type": "payment.received", "subject": f"wallet-{n % 1000}", "version": n,
                    },
                )  # fmt: skip
            pipeline.execute()


def _baseline(postgres: str, client: redis.Redis, events: int) -> Measurement:
    engine = sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(postgres))
    client.xgroup_create("{baseline}", "baseline", "0")
    started, done = time.perf_counter(), 0
    while done < events:
        reply: Any = client.xreadgroup("baseline", "one", {"{baseline}": ">"}, count=500)
        entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
        for receipt, fields in entries:
            event = decode("baseline", fields)
            with Session(engine) as session, session.begin():
                if session.execute(_BASELINE_LEDGER, {"id": event.id}).first():
                    credit(event, session)
            client.xack("{baseline}", "baseline", receipt)
            done += 1
    seconds = time.perf_counter() - started
    engine.dispose()
    return Measurement("one transaction and one XACK a message, same handler", events, seconds, True)


def _worker(postgres: str, valkey: str, topic: str, what: str, events: int) -> Measurement:
    consumer = Consumer(topic, topics=[topic])
    if topic == "batch":
        consumer.on_batch("payment.received", raw=True)(credit_many)
    elif topic == "raw":
        consumer.on("payment.received", raw=True)(credit_raw)
    else:
        consumer.on("payment.received")(credit)
    settings = ConsumerSettings(database_url=postgres, redis_url=valkey)  # type: ignore[arg-type]  # text is taken
    worker = Worker(consumer, settings)
    started, done = time.perf_counter(), 0
    while done < events:
        done += sum(worker.run_once().values())
    seconds = time.perf_counter() - started
    worker.close()
    return Measurement(what, events, seconds)
