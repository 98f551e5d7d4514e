"""The database comes back from a dump, in a cluster whose transaction ids begin anew."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, postgres_servers
from outbox.errors import StaleRelay
from tests.faults.chaos import Bench, drain


def test_a_dump_restored_into_another_cluster_loses_nothing(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]
) -> None:
    programs = postgres_servers().get("postgres18")
    if programs is None or not os.access(programs / "pg_dump", os.X_OK):
        pytest.skip("no pg_dump here")
    old, new, valkey = own_postgres(), own_postgres(), own_valkey()
    for branch in ("outbox", "consumer"):
        schemas.upgrade(old.url, branch)  # type: ignore[arg-type]
    with Bench(old.url, valkey.url) as before:
        with psycopg.connect(old.url, autocommit=True) as connection:
            for _ in range(3000):
                connection.execute("SELECT pg_current_xact_id()")
        before.make_tables()
        relay = before.relay(batch_rows=3)
        before.write(10)
        drain(relay)
        assert len(before.consume()) == 10
        before.write(5)
        dump = subprocess.run([programs / "pg_dump", old.url], check=True, capture_output=True).stdout
        subprocess.run([programs / "psql", "-qX", "-v", "ON_ERROR_STOP=1", new.url], check=True, input=dump)
        with Bench(new.url, valkey.url) as after:
            assert after.one("SELECT max(xid) >= pg_snapshot_xmax(pg_current_snapshot()) FROM public.outbox")
            after.write(5)  # the producers are up before the relay
            drain(after.relay(batch_rows=4))
            assert set(after.ids()) >= set(after.outbox())
            assert after.consume() == Counter(dict.fromkeys(after.outbox(), 1))
            assert len(after.outbox()) == 20
            after.write(5)
            drain(after.relay(batch_rows=4))
            assert after.consume() == Counter(dict.fromkeys(after.outbox(), 1))
            assert after.one("SELECT count(*) FROM public.outbox_epoch") > 1
            with psycopg.connect(new.url, autocommit=True) as connection:
                for _ in range(3500):  # past the other cluster's ids: nothing comes to light that was there before
                    connection.execute("SELECT pg_current_xact_id()")
            length = after.length()
            after.write(1)
            assert drain(after.relay()).published == 1
            assert after.length() == length + 1
            with pytest.raises(StaleRelay):
                drain(before.relay())
