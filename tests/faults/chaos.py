"""A bench for relays: an outbox to write into, relays in this process and in their own, and what really arrived.

`python -m tests.faults.chaos` is a relay that dies after a publish, before it knows of it. `ledger` is a consumer that
counts: ``consumer run tests.faults.chaos:ledger``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psycopg
import redis
from sqlalchemy import text
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Order
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record
from outbox.envelope import QUEUE_PREFIX
from outbox.relay import Counts, Relay
from outbox.settings import RelaySettings
from outbox.transport import StreamTransport

ROOT = Path(__file__).parents[2]
TOPIC = "accounts"

TABLES = """
    CREATE TABLE public.effects (event_id uuid, key text, version bigint);
    CREATE TABLE public.limits (key text PRIMARY KEY, version bigint)
"""

ledger = Consumer("ledger", topics=[TOPIC])


@ledger.on("credited")
def credit(event: Envelope, session: Session) -> None:
    """Counts always; no unique constraint, so that a double effect is a row."""
    session.execute(
        text("INSERT INTO public.effects VALUES (:id, :key, :version)"),
        {"id": event.id, "key": event.key, "version": event.version},
    )


#: The same with jobs.
clerk = Consumer("ledger", queues=[TOPIC])
clerk.job("credited")(credit)


@ledger.on("limited", order=Order.LATEST)
def limit(event: Envelope, session: Session) -> None:
    """Sets, without looking at what is there: the order is the consumer's to keep."""
    session.execute(
        text(
            "INSERT INTO public.limits VALUES (:key, :version) "
            "ON CONFLICT (key) DO UPDATE SET version = excluded.version"
        ),
        {"key": event.key, "version": event.version},
    )


class Bench:
    """One outbox, one Redis prefix, and relays between them.

    Args:
        client: of the servers, where redis-py makes none of the address.
    """

    topic, consumer = TOPIC, ("consumer", "run", "tests.faults.chaos:ledger")

    def __init__(self, database_url: str, redis_url: str, prefix: str = "", *, client: Any = None) -> None:
        self.database_url, self.redis_url, self.prefix = database_url, redis_url, prefix
        self._stack = ExitStack()
        self.db = self.connect(autocommit=True)
        self.redis: Any = self._stack.enter_context(client or redis.Redis.from_url(redis_url))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._version = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self._stack.close()

    # --- the producer ---

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return self._stack.enter_context(psycopg.connect(self.database_url, **options))

    def event(self, **fields: Any) -> Event:
        self._version += 1
        defaults = {"topic": self.topic, "type": "credited", "key": "A", "version": self._version, "payload": {"n": 1}}
        return Event(**(defaults | fields))

    def write(self, number: int = 1, connection: psycopg.Connection[Any] | None = None, **fields: Any) -> list[str]:
        """Record events in the transaction of `connection`, or commit them in one of their own; returns their ids."""
        events = [self.event(**fields) for _ in range(number)]
        if connection is None:
            with self.db.transaction():
                record(self.db, *events)
        else:
            record(connection, *events)
        return [str(event.id) for event in events]

    def fill(self, number: int, topic: str = TOPIC, keys: int = 20) -> None:
        """Many events by one statement."""
        self.db.execute(
            "INSERT INTO public.outbox (event_id, topic, type, key, version, data) "
            "SELECT gen_random_uuid(), %s, 'credited', 'k' || i %% %s, i, convert_to(repeat('x', 100), 'UTF8') "
            "FROM generate_series(1, %s) i",
            (topic, keys, number),
        )

    # --- relays ---

    def settings(self, **options: Any) -> RelaySettings:
        given = {"database_url": self.database_url, "redis_url": self.redis_url, "key_prefix": self.prefix}
        return RelaySettings(**(given | {"backoff_max_seconds": 0.2} | options))

    def relay(self, *, transport: Any = None, observer: Any = None, **options: Any) -> Relay:
        made = Relay(self.settings(**options), transport=transport, observer=observer)
        self._stack.callback(made.close)
        return made

    def transport(self, redis_url: str | None = None) -> StreamTransport:
        return StreamTransport.from_url(redis_url or self.redis_url, prefix=self.prefix, timeout_seconds=2)

    def start(self, *command: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """A process with our addresses; default: a relay. It is killed at the end, if it still runs.

        Args:
            log: where its output goes.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", *(command or ("outbox", "relay"))],
            cwd=ROOT,
            env=os.environ
            | {
                "DATABASE_URL": self.database_url,
                "REDIS_URL": self.redis_url,
                "OUTBOX_KEY_PREFIX": self.prefix,
                "OUTBOX_CHECK_SECONDS": "0.2",
                "OUTBOX_BACKOFF_MAX_SECONDS": "0.2",
            }
            | environment,
            stdout=log.open("ab") if log else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if log else subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, who end them
        )
        self.processes.append(process)
        return process

    def relays_connected(self) -> int:
        row = self.db.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE application_name = 'outbox relay' AND datname = current_database()"
        ).fetchone()
        return int(row[0]) if row else 0

    # --- what arrived ---

    def key(self, stream: str = TOPIC) -> str:
        return f"{self.prefix}{{{stream}}}"

    def entries(self, stream: str = TOPIC) -> list[dict[str, str]]:
        """The stream's entries, oldest first; for topics with text payloads."""
        return [
            {name.decode(): value.decode() for name, value in fields.items()}
            for _, fields in self.redis.xrange(self.key(stream))
        ]

    def ids(self, stream: str = TOPIC) -> list[str]:
        return [fields[b"id"].decode() for _, fields in self.redis.xrange(self.key(stream))]

    def pending(self) -> int:
        """What the consumer has not acknowledged."""
        return int(self.redis.xpending(self.key(), ledger.name)["pending"])

    def length(self, stream: str = TOPIC) -> int:
        return int(self.redis.xlen(self.key(stream)))

    def outbox(self, stream: str = TOPIC) -> list[str]:
        """The ids of the outbox, in positions' order."""
        rows = self.db.execute("SELECT event_id::text FROM public.outbox WHERE topic = %s ORDER BY position", (stream,))
        return [row[0] for row in rows]

    def one(self, query: str, *parameters: Any) -> Any:
        row = self.db.execute(query, parameters).fetchone()
        return row[0] if row and len(row) == 1 else row

    def effects(self) -> Counter[str]:
        return Counter(row[0] for row in self.db.execute("SELECT event_id::text FROM public.effects"))

    def consume(self) -> Counter[str]:
        """Run a real worker until nothing is left to read; returns the effects by event id."""
        self.make_tables()
        settings = ConsumerSettings(
            database_url=self.database_url, redis_url=self.redis_url, key_prefix=self.prefix, block_seconds=0.05
        )
        worker = Worker(ledger, settings)
        try:
            while worker.run_once():
                pass
        finally:
            worker.close()
        assert self.pending() == 0
        return self.effects()

    def dead(self) -> int:
        """Dead letters."""
        return int(self.one("SELECT count(*) FROM public.dead_letters"))

    def make_tables(self) -> None:
        if not self.one("SELECT to_regclass('public.effects') IS NOT NULL"):
            self.db.execute(TABLES)


class QueueBench(Bench):
    """The same with jobs."""

    topic, consumer = f"{QUEUE_PREFIX}{TOPIC}", ("consumer", "run", "tests.faults.chaos:clerk")

    def ids(self, stream: str = topic) -> list[str]:
        return [key.decode().rpartition(":")[2] for key in self.redis.scan_iter(f"{self.key(stream)}:job:*")]

    def pending(self) -> int:
        return int(self.redis.zcard(f"{self.key(self.topic)}:batches"))


def drain(relay: Relay) -> Counts:
    """Run rounds until one does nothing; returns the sums."""
    total = Counts()
    while True:
        counts = relay.run_once()
        for name in ("sealed", "published", "repaired"):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
        total.behind, total.standing_by = counts.behind, counts.standing_by
        if (
            not counts.sealed and not counts.repaired and not counts.standing_by
        ):  # a killed relay's last seal may come late
            return total


def version_order(entries: Sequence[dict[str, str]]) -> dict[str, list[int]]:
    """The versions of each key as they stand in a stream, first occurrences of an event only."""
    seen: set[str] = set()
    versions: dict[str, list[int]] = {}
    for fields in entries:
        if fields["id"] not in seen:
            seen.add(fields["id"])
            versions.setdefault(fields["subject"], []).append(int(fields["version"]))
    return versions


class DiesAfterPublish(StreamTransport):
    """Ends the process when the server has the batch and the relay does not know it yet."""

    def publish(self, parts: Sequence[Any]) -> Any:
        super().publish(parts)
        os._exit(9)


def main() -> None:
    settings = RelaySettings()
    address = settings.redis_url.get_secret_value()
    Relay(settings, transport=DiesAfterPublish.from_url(address, prefix=settings.key_prefix)).run()


if __name__ == "__main__":
    time.sleep(0)
    main()
