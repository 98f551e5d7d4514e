"""The PostgreSQL side of the soak: a server behind a proxy, behind a pooler if wanted, and stand-bys that take over."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, suppress

import psycopg

from outbox import schema as schemas
from outbox.embedded import PostgresServer, postgres_servers
from tests.faults.bouncer import Bouncer
from tests.faults.proxy import Proxy, port_of, through
from tests.faults.soak.handlers import TABLES
from tests.faults.soak.servers import Fault, connection_faults
from tests.faults.standby import base_backup, hold_back, promote
from tests.waiting import eventually


class Database:
    """Outbox, ledger, and the accounts of both sides.

    Attributes:
        url: for relays, consumers and writers.
        server: the one that is the primary now.
        went_back: from when to when (`time.monotonic`) commits did not reach the stand-by that took over.
    """

    def __init__(self, chance: random.Random, keys: int, *, name: str = "", pooled: bool = False) -> None:
        self._chance, self._stack = chance, ExitStack()
        found = postgres_servers()
        self._binaries = found[name] if name else found[max(found)]
        self.server = self._stack.enter_context(PostgresServer(binaries=self._binaries))
        for branch in ("outbox", "consumer"):
            schemas.upgrade(self.server.url, branch)  # type: ignore[arg-type]
        with self.connect() as connection:
            connection.execute(
                "CREATE TABLE public.accounts (key text PRIMARY KEY, version bigint NOT NULL, balance bigint NOT NULL)"
            )
            connection.execute(
                "INSERT INTO public.accounts SELECT 'k' || i, 0, 0 FROM generate_series(0, %s - 1) i", (keys,)
            )
            connection.execute(TABLES)
        self._proxy = self._stack.enter_context(Proxy(port_of(self.server.url)))
        self.url = through(self._proxy, self.server.url)
        self._pooler = self._stack.enter_context(Bouncer(self.url, pool_size=30)) if pooled else None
        if self._pooler:
            self.url = self._pooler.through(self.url)
        self.went_back: list[tuple[float, float]] = []

    def close(self) -> None:
        self._stack.close()

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """Directly, in autocommit mode."""
        return psycopg.connect(self.server.url, autocommit=True)

    def faults(self) -> dict[str, Fault]:
        return {
            # Not longer: nothing at all on a connection that is open is for the operating system to notice.
            **connection_faults("PostgreSQL", self._proxy, self._chance, deaf_seconds=(0.5, 3)),
            "PostgreSQL killed": self._kill,
            "backends terminated": self._terminate,
            **({"poolers killed": self._kill_pooler} if self._pooler else {}),
        }

    def rare_faults(self) -> dict[str, Fault]:
        """Such as leave a copy of the data each time."""
        if not os.access(self._binaries / "pg_basebackup", os.X_OK):
            return {}
        return {
            "PostgreSQL failovers, nothing lost": self._fail_over_in_step,
            "PostgreSQL failovers, some lost": self._fail_over_behind,
        }

    def _kill(self) -> None:
        self.server.kill()
        time.sleep(self._chance.uniform(0, 0.5))
        self.server.start()

    def _terminate(self) -> None:
        with suppress(psycopg.Error), self.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    def _kill_pooler(self) -> None:
        assert self._pooler is not None
        self._pooler.kill()
        time.sleep(self._chance.uniform(0, 0.5))
        self._pooler.start()

    def _fail_over_in_step(self) -> None:
        """What anybody was told to be committed is on the stand-by."""
        standby = self._standby()
        with self.connect() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            query = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            eventually(lambda: connection.execute(query).fetchone() == (1,), 60, "the stand-by is in step")
        time.sleep(self._chance.uniform(0.2, 1))
        self._turn(standby)

    def _fail_over_behind(self) -> None:
        standby = self._standby()
        begin = time.monotonic()
        hold_back(self.server, standby)
        time.sleep(self._chance.uniform(0.2, 1))
        self._turn(standby)
        self.went_back.append((begin, time.monotonic()))

    def _standby(self) -> PostgresServer:
        copy = base_backup(self.server, self._binaries, "standby")
        return self._stack.enter_context(PostgresServer(copy, binaries=self._binaries))

    def _turn(self, standby: PostgresServer) -> None:
        self.server.kill()
        promote(standby)
        self._proxy.redirect(port_of(standby.url))
        self.server = standby
