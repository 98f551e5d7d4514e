"""Where a part of the demo plays: servers, a schema and a key prefix of its own, and its processes.

Two demos may run on the same servers at once, beside anything else: all names are random, and gone at the end.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psycopg
import redis
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox import schema as schemas
from outbox.settings import database_address, redis_address

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 30.0  #: for anything; far more than any of it needs
_POLL_SECONDS = 0.02


class DemoError(Exception):
    """The demo cannot go on: something did not happen in time, or a process ended that should not have."""


@dataclass
class Process:
    """A process of the demo, with what it printed."""

    title: str
    popen: subprocess.Popen[bytes]
    out: IO[bytes]
    log: IO[bytes]

    def wait(self) -> int:
        """Its exit status, once it has ended by itself; negative: the signal that killed it."""
        try:
            return self.popen.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.title} did not end within {WAIT_SECONDS:.0f} s\n{self.end_of_log()}") from None

    def stop(self) -> None:
        """SIGTERM, and wait; SIGKILL if that takes too long."""
        self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def output(self) -> str:
        """What it printed so far."""
        return _text(self.out)

    def end_of_log(self) -> str:
        """The last lines of its standard error, for a person."""
        return "\n".join(_text(self.log).splitlines()[-15:])


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1_000_000, 0).decode(errors="replace")


@dataclass
class Stage:
    """One part's place. Made by `stage`."""

    name: str
    database_url: str  # connections made with it find the part's tables without naming the schema
    redis_url: str
    valkey: Any  # redis.Redis, whose types say less than nothing
    _processes: list[Process] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """What all keys of the part begin with."""
        return f"{self.name}:"

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        """Where a process finds everything: nothing of our own OUTBOX_… and CONSUMER_… variables gets through."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "CONSUMER_"))}
        return ours | {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "OUTBOX_KEY_PREFIX": self.prefix,
            "OUTBOX_SCHEMA": self.name,
            "CONSUMER_SCHEMA": self.name,
            "CONSUMER_CLAIM_SECONDS": "1",
            "CONSUMER_CHECK_SECONDS": "0.1",
            "CONSUMER_BLOCK_SECONDS": "0.1",
            **settings,
        }

    def start(self, title: str, module: str, *arguments: str, **settings: str) -> Process:
        """Start ``python -m module arguments``; it ends with the part at the latest."""
        out = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stage
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stage
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=self.environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
        )
        process = Process(title, popen, out, log)
        self._processes.append(process)
        return process

    def wait_for(self, what: str, condition: Callable[[], object], *running: Process) -> None:
        """Wait until the condition holds.

        Args:
            running: processes without which it never will.

        Raises:
            DemoError: it did not hold in time, or one of the processes ended.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            for process in running:
                if process.popen.poll() is not None:
                    raise DemoError(
                        f"{process.title} ended with status {process.popen.returncode}\n{process.end_of_log()}"
                    )
            if time.monotonic() > deadline:
                logs = "".join(f"\n{process.title}: {process.end_of_log()}" for process in running)
                raise DemoError(f"not within {WAIT_SECONDS:.0f} s: {what}{logs}")
            time.sleep(_POLL_SECONDS)

    # --- looking at Valkey and PostgreSQL ---

    def key(self, topic: str) -> str:
        """The key of a topic's stream."""
        return f"{self.prefix}{{{topic}}}"

    def length(self, topic: str) -> int:
        """Entries in the topic's stream."""
        return int(self.valkey.xlen(self.key(topic)))

    def pending(self, topic: str, group: str) -> int:
        """Deliveries of the group that are not acknowledged."""
        return int(self.valkey.xpending(self.key(topic), group)["pending"])

    def settled(self, topic: str, group: str) -> bool:
        """Whether the group has read everything and acknowledged it."""
        try:
            last = self.valkey.xinfo_stream(self.key(topic))["last-generated-id"]
            groups = {found["name"]: found for found in self.valkey.xinfo_groups(self.key(topic))}
        except redis.ResponseError:  # no such stream yet
            return False
        found = groups.get(group)
        return found is not None and found["last-delivered-id"] == last and found["pending"] == 0

    def value(self, query: str, *parameters: object) -> Any:
        """The one value that a query returns, None for no row."""
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute(query.encode(), parameters).fetchone()
        return row[0] if row else None

    def execute(self, statements: str) -> None:
        """Run statements in one transaction."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute(statements.encode())


@contextmanager
def stage(database_url: str, redis_url: str) -> Iterator[Stage]:
    """A schema with the tables of both sides, and a key prefix; both are gone afterwards, and so are the processes."""
    name = f"wallet_demo_{secrets.token_hex(4)}"
    address = database_address(database_url)
    options = f"{conninfo_to_dict(address).get('options') or ''} -c search_path={name}".strip()
    with redis.Redis.from_url(redis_address(redis_url), decode_responses=True) as valkey:
        place = Stage(name, make_conninfo(address, options=options), redis_address(redis_url), valkey)
        try:
            for branch in ("outbox", "consumer"):
                schemas.upgrade(address, branch, schema=name)
            yield place
        finally:
            for process in reversed(place._processes):
                process.stop()
                process.out.close()
                process.log.close()
            with psycopg.connect(address, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))
            valkey.connection_pool.disconnect()  # Ctrl-C may have come between a command and its reply
            for key in valkey.scan_iter(match=f"{place.prefix}*", count=1000):
                valkey.unlink(key)
