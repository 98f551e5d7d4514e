"""Where the gallery plays: servers of its own, numbered payments, and the count of what became of them.

Whoever handles a payment, naive or ours, writes its name into the table ``effect``. No constraint keeps a name out that is
there already, so that a payment that is lost is a row too few, and one that is done twice a row too many.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psycopg
import redis
from psycopg import sql
from psycopg.conninfo import make_conninfo

from consumer import Consumer, Envelope
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.errors import TransportUnavailable
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.telemetry import Observer

TOPIC, STREAM, GROUP = "payments", "{payments}", "wallet"  #: our relay writes to the key STREAM
WAIT_SECONDS = 30.0  #: for anything; far more than any of it needs
_PROCESSES = multiprocessing.get_context("forkserver")  # starts fast, and inherits no connection and no thread
_PROCESSES.set_forkserver_preload([__name__])
_TEMPLATE = "failures_template"


class GalleryError(Exception):
    """The gallery cannot go on: something did not happen in time, or a process ended in another way than it should."""


@dataclass(frozen=True, eq=False)
class Failure:
    """One exhibit.

    Attributes:
        name: for ``--only``.
        title: what happens.
        naive, ours: make it happen, and return what came of it.
        naive_expected, ours_expected: what should come of it; by server where servers differ.
    """

    name: str
    title: str
    naive: Callable[[Scene], str]
    naive_expected: str | Mapping[str, str]
    ours: Callable[[Scene], str]
    ours_expected: str | Mapping[str, str]


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
        return redis.Redis.from_url(self.redis_url, decode_responses=True)

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


# --- servers and processes -----------------------------------------------------------------------------------------


class Scene:
    """A database and servers for one way through one failure; gone at the end, and so are the processes."""

    def __init__(self, server: str, program: Path, database_url: str, stack: ExitStack) -> None:
        self.server = server
        self._program, self._database_url, self._stack = program, database_url, stack

    def start(self, **settings: str) -> ValkeyServer:
        """A Redis or Valkey server to be maltreated; settings as in its configuration, with ``_`` for ``-``."""
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        return self._stack.enter_context(ValkeyServer(program=self._program, settings=given))

    def at(self, server: ValkeyServer) -> Place:
        """The database, and this server."""
        return Place(self._database_url, server.url)

    @cached_property
    def place(self) -> Place:
        """The database, and a server that nothing happens to."""
        return self.at(self.start())

    def run(self, target: Callable[..., None], *arguments: object) -> BaseProcess:
        """Start a process that runs a function."""
        process = _PROCESSES.Process(target=_run, args=(target, *arguments), daemon=True)
        process.start()
        self._stack.callback(process.kill)
        return process

    def killed(self, target: Callable[..., None], *arguments: object) -> None:
        """Run a function in a process that must end by SIGKILL, as `die` does it."""
        ended(self.run(target, *arguments), -signal.SIGKILL)


def _run(target: Callable[..., None], *arguments: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gallery, which then ends us
    target(*arguments)


def die() -> None:
    """End this process as a crash does: nothing is flushed, closed or handed back."""
    os.kill(os.getpid(), signal.SIGKILL)


def ended(process: BaseProcess, status: int = 0) -> None:
    """Wait for the end of a process, and see that it ended as it should."""
    process.join(WAIT_SECONDS)
    if process.exitcode != status:
        raise GalleryError(f"{process.name} ended with status {process.exitcode} instead of {status}")


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


class Stage:
    """PostgreSQL with a migrated template database, and the programs to play with."""

    def __init__(self, postgres_url: str) -> None:
        self._postgres_url = postgres_url
        self.programs = redis_servers()

    @contextmanager
    def scene(self, server: str) -> Iterator[Scene]:
        """A scene on ``valkey9``, ``redis8`` …"""
        name = f"failures_{secrets.token_hex(4)}"
        with ExitStack() as stack:
            self._administer("CREATE DATABASE {} TEMPLATE {}", name, _TEMPLATE)
            stack.callback(self._administer, "DROP DATABASE {} WITH (FORCE)", name)
            yield Scene(server, self.programs[server], make_conninfo(self._postgres_url, dbname=name), stack)

    def prepare(self) -> None:
        """Make the template."""
        self._administer("CREATE DATABASE {}", _TEMPLATE)
        url = make_conninfo(self._postgres_url, dbname=_TEMPLATE)
        schemas.upgrade(url, "outbox")
        schemas.upgrade(url, "consumer")
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE effect (name text NOT NULL)")

    def _administer(self, statement: Any, *names: str) -> None:
        with psycopg.connect(self._postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextmanager
def stage() -> Iterator[Stage]:
    """Start PostgreSQL: without fsync, and in memory where there is some, since it is Redis that is maltreated here."""
    before, memory = tempfile.tempdir, Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30:
        tempfile.tempdir = str(memory)
    try:
        postgres = PostgresServer(settings={"fsync": "off"}).start()
    finally:
        tempfile.tempdir = before
    with postgres:
        made = Stage(postgres.url)
        made.prepare()
        yield made
