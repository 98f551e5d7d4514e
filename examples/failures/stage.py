"""Where the gallery plays: servers and databases of its own, and processes that may be killed."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from examples.failures.place import EFFECT, WAIT_SECONDS, GalleryError, Place
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers

_PROCESSES = multiprocessing.get_context("forkserver")  # starts fast, and inherits no connection and no thread
_PROCESSES.set_forkserver_preload([__name__])
_TEMPLATE = "failures_template"


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


class Scene:
    """A database and servers for one way through one failure; gone at the end, and so are the processes."""

    def __init__(self, server: str, program: Path, database_url: str, stack: ExitStack) -> None:
        self.server = server
        self._program, self._database_url, self._stack = program, database_url, stack

    def start(self, **settings: str) -> ValkeyServer:
        """A Redis or Valkey server to be maltreated; settings as in its configuration, with ``_`` for ``-``."""
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        given["hz"] = "100"  # looks ten times as often whether it is to stop
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
            connection.execute(EFFECT)

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
