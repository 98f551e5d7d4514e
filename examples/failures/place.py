"""Numbered payments, what workers do with them, naive and ours, and the count of what became of them.

Whoever handles a payment writes its name into the table ``effect``. No constraint keeps a name out that is there already,
so that a payment that is lost is a row too few, and one that is done twice a row too many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg
import redis

from consumer import Consumer, Envelope
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record
from outbox.errors import TransportUnavailable
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.telemetry import Observer

TOPIC, STREAM, GROUP = "payments", "{payments}", "wallet"  #: our relay writes the topic to the key STREAM
WAIT_SECONDS = 30.0  #: for anything; far more than any of it needs
EFFECT = "CREATE TABLE effect (name text NOT NULL)"


class GalleryError(Exception):
    """The gallery cannot go on: something did not happen in time, or a process ended in another way than it should."""


def wait_for(what: str, condition: Callable[[], object]) -> None:
    """Wait until the condition holds.

    Raises:
        GalleryError: it did not hold in time.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise GalleryError(f"not within {WAIT_SECONDS:.0f} s: {what}")
        time.sleep(0.002)


def payments(number: int, first: int = 1) -> list[str]:
    """Names of payments: ``payment-1`` …"""
    return [f"payment-{n}" for n in range(first, first + number)]


@dataclass(frozen=True)
class Place:
    """A database and a Redis or Valkey; can be handed to another process."""

    database_url: str
    redis_url: str

    @cached_property
    def redis(self) -> Any:
        """A plain client (of type Any: redis-py's types say less than nothing)."""
        return redis.Redis.from_url(self.redis_url, decode_responses=True, socket_timeout=WAIT_SECONDS)

    def database(self) -> psycopg.Connection[Any]:
        """A new connection; every statement is a transaction of its own unless one is begun."""
        return psycopg.connect(self.database_url, autocommit=True)

    def __reduce__(self) -> tuple[type[Place], tuple[str, str]]:
        return Place, (self.database_url, self.redis_url)  # without the client, which is of this process

    # --- the naive way ---

    def apply(self, names: Iterable[str]) -> None:
        """Do the work of these payments, in one transaction."""
        with self.database() as database, database.transaction(), database.cursor() as cursor:
            cursor.executemany("INSERT INTO effect VALUES (%s)", [(name,) for name in names])

    def add(self, names: Iterable[str], **options: Any) -> None:
        """Put payments straight into the stream, as a service without an outbox does."""
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.xadd(STREAM, {"name": name}, **options)
        pipeline.execute()

    def make_group(self) -> None:
        """Make the consumers' group."""
        self.redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

    def read(self, count: int, worker: str = "w1") -> dict[str, str]:
        """Names of the next payments of the stream, by the id of their entry."""
        found = self.redis.xreadgroup(GROUP, worker, {STREAM: ">"}, count=count)
        return {entry: fields["name"] for _, entries in found for entry, fields in entries}

    def take_over(self, worker: str) -> dict[str, str]:
        """Names of what some worker has had for longer than 50 ms, now given to this one, by the id of their entry."""
        _, entries, *_ = self.redis.xautoclaim(STREAM, GROUP, worker, min_idle_time=50)
        return {entry: fields["name"] for entry, fields in entries}

    def work_through(self) -> None:
        """Handle all that the stream still has for the group."""
        with suppress(redis.ResponseError):  # it is there
            self.make_group()
        while entries := self.read(1000):
            self.apply(entries.values())
            self.redis.xack(STREAM, GROUP, *entries)

    # --- our way ---

    def record(self, names: Iterable[str], connection: psycopg.Connection[Any] | None = None) -> None:
        """Record payments in the outbox, in the transaction of `connection` or one of their own."""
        events = [Event(topic=TOPIC, type="payment.received", key=name, payload={}) for name in names]
        with ExitStack() as stack:
            if connection is None:
                connection = stack.enter_context(self.database())
                stack.enter_context(connection.transaction())
            for first in range(0, len(events), 1000):  # the most that `record` takes at once
                record(connection, *events[first : first + 1000])

    def relay_settings(self, **settings: Any) -> RelaySettings:
        """Settings of a relay that looks at everything in every round."""
        often = {"check_seconds": 0.001, "trim_seconds": 0.001}
        return RelaySettings(**(self._addresses() | often | settings))

    def _addresses(self) -> dict[str, Any]:
        return {"database_url": self.database_url, "redis_url": self.redis_url}

    @contextmanager
    def relay(self, **settings: Any) -> Iterator[Callable[[], None]]:
        """A relay, as a function that has it work until there is nothing left to do."""
        relay = Relay(self.relay_settings(**settings))

        def publish() -> None:
            def quiet() -> bool:
                with suppress(TransportUnavailable):  # it went away; the relay tries again
                    counts = relay.run_once()
                    return not (counts.sealed or counts.repaired or counts.behind)
                return False

            wait_for("everything published", quiet)

        try:
            yield publish
        finally:
            relay.close()

    def consume(
        self,
        meanwhile: Callable[[str], None] | None = None,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        """Run our worker until its group has acknowledged everything in the stream.

        Args:
            meanwhile: called in the handler, after the effect and before the commit.
            observer: called between commit and acknowledgement, among others.
        """
        consumer = Consumer(GROUP, topics=[TOPIC])

        @consumer.on("payment.received", raw=True)
        def handle(event: Envelope, connection: psycopg.Connection[Any]) -> None:
            connection.execute("INSERT INTO effect VALUES (%s)", (event.key,))
            if meanwhile and event.key:
                meanwhile(event.key)

        soon = {"block_seconds": 0.02, "claim_seconds": 0.05, "check_seconds": 0.05}
        worker = Worker(consumer, ConsumerSettings(**(self._addresses() | soon | settings)), observer=observer)
        try:
            wait_for("everything handled", lambda: not worker.run_once() and self.settled())
        finally:
            worker.close()

    def settled(self) -> bool:
        """Whether the group has read everything and acknowledged it."""
        last = self.redis.xinfo_stream(STREAM)["last-generated-id"]
        (group,) = self.redis.xinfo_groups(STREAM)
        return bool(group["last-delivered-id"] == last and group["pending"] == 0)

    # --- what came of it ---

    def must_hold(self, entries: int) -> None:
        """See that the misfortune has happened: so many entries are left in the stream.

        Raises:
            GalleryError: it has not.
        """
        if (left := self.redis.xlen(STREAM)) != entries:
            raise GalleryError(f"the stream has {left} entries instead of {entries}")

    def outcome(self, number: int) -> str:
        """What became of `number` payments: ``3 of 10 lost``, ``1 of 10 twice``, ``all 10 once``."""
        with self.database() as database:
            row = database.execute("SELECT count(DISTINCT name), count(*) FROM effect").fetchone()
        assert row is not None
        lost, twice = number - row[0], row[1] - row[0]
        found = [f"{count:,} of {number:,} {what}" for count, what in ((lost, "lost"), (twice, "twice")) if count]
        return " and ".join(found) or f"all {number:,} once"
