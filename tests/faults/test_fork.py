"""What was made before a fork is safe after it, or refused (case O-82)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from consumer import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema
from outbox.embedded import PostgresServer, ValkeyServer, postgres_servers
from outbox.relay import Relay
from outbox.settings import RelaySettings
from pytest_outbox import missing
from tests.faults.cluster import Cluster
from tests.faults.test_consumer_faults import Site
from tests.faults.test_width import children, send, wide, working
from tests.faults.test_width import site as site
from tests.integration.test_connections import certificates as certificates
from tests.integration.test_connections import tls_server as tls_server
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
#: Records 50 events in the parent, and 50 in each of four children, which also consume, with a transport that the parent has used.
SCRIPT = """
import json, os, sys, time
from sqlalchemy.orm import Session
from consumer import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record, schema
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.transport import StreamTransport

settings = ConsumerSettings(block_seconds=0.1)
url, redis_url = (a.get_secret_value() for a in (settings.database_url, settings.redis_url))

def write(engine):
    with Session(engine) as session, session.begin():
        record(session, *[Event(topic="jobs", type="job", payload={"pid": os.getpid()}) for _ in range(50)])

consumer = Consumer("ledger", topics=["jobs"])

@consumer.on("job", raw=True)
def work(event, connection):
    connection.execute("INSERT INTO done VALUES (%s, %s, pg_backend_pid())", (event.id, os.getpid()))

engine = schema.engine(url, "script")
write(engine)
transport = StreamTransport.from_url(redis_url, timeout_seconds=10, block_seconds=0.1)
streams = ["jobs", "jobs:@ledger", "others"]
transport.open("ledger", streams)
assert transport.read("ledger", "parent", streams, 1, 0.01) == []  # on a cluster, by as many threads
children = []
for _ in range(4):
    if pid := os.fork():
        children.append(pid)
        continue
    code = 1
    try:
        own = schema.engine(url, "script")
        write(own)
        worker = Worker(consumer, settings, transport=transport)
        with own.connect() as connection:
            while connection.exec_driver_sql("SELECT count(*) FROM done").scalar() < 250:
                connection.rollback()
                worker.run_once()
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        ids = [node.run([("", (b"CLIENT", b"ID"))])[0] for node in transport._servers.nodes().values()]
        os.write(1, json.dumps([os.getpid(), pid, ids]).encode() + b"\\n")
        code = 0
    finally:
        os._exit(code)
relay = Relay(RelaySettings())
while children:
    relay.run_once()
    found, status = os.waitpid(-1, os.WNOHANG)
    if found:
        assert status == 0, status
        children.remove(found)
transport.markers(["jobs"])  # its connections are as they were
write(engine)
"""


def script(database_url: str, redis_url: str) -> list[Any]:
    """Run it; what the children say."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE done (event_id uuid, pid integer, backend integer)")
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("CONSUMER_", "OUTBOX_"))}
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, timeout=120, cwd=ROOT,
            env=clean | {"DATABASE_URL": database_url, "REDIS_URL": redis_url},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        done = connection.execute("SELECT event_id, pid, backend FROM done").fetchall()
        assert set(Counter(event_id for event_id, _, _ in done).values()) == {1}
        assert len(done) == 250
        backends: dict[int, set[int]] = {}
        for _, pid, backend in done:
            backends.setdefault(pid, set()).add(backend)
        assert sum(map(len, backends.values())) == len(set.union(*backends.values())), "no backend is two processes'"
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_o_82_recorded_and_consumed_before_and_after_forks(database_url: str, redis_url: str, own_valkey: Any) -> None:
    said = script(database_url, own_valkey().url)
    assert len({pid for pid, _, _ in said}) == len({backend for _, backend, _ in said}) == 4
    assert len({client for _, _, (client,) in said}) == 4


@pytest.fixture
def tls_postgres(own_postgres: Callable[..., PostgresServer], certificates: Path) -> Iterator[str]:
    """A migrated database of a server that takes connections with TLS; the wheel's PostgreSQL cannot."""
    capable = {name: path for name, path in postgres_servers().items() if path.is_relative_to("/usr/lib/postgresql")}
    if not capable:
        missing("no PostgreSQL with TLS here (apt-get install postgresql)")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        key = Path(folder, "server.key")
        for name in ("server.key", "server.crt"):
            shutil.copy(certificates / name, folder)
        key.chmod(0o600)
        if os.getuid() == 0:
            shutil.chown(key, "nobody")  # whom the server runs as then
        settings = {"ssl": "on", "ssl_key_file": str(key), "ssl_cert_file": f"{folder}/server.crt"}
        url = f"{own_postgres(binaries=capable.popitem()[1], settings=settings).url}?sslmode=require"
        for package in ("outbox", "consumer"):
            schema.upgrade(url, package)
        with psycopg.connect(url) as connection:
            assert connection.pgconn.ssl_in_use
        yield url


def test_o_82_with_tls(database_url: str, tls_server: Callable[[], str], certificates: Path) -> None:
    at = f"{certificates}/"
    keys = f"ssl_ca_certs={at}ca.crt&ssl_certfile={at}client.crt&ssl_keyfile={at}client.key"
    said = script(database_url, f"{tls_server()}?{keys}")
    assert len({client for _, _, (client,) in said}) == 4


def test_o_82_with_tls_to_postgresql(tls_postgres: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    said = script(tls_postgres, own_valkey().url)
    assert len({pid for pid, _, _ in said}) == len({backend for _, backend, _ in said}) == 4


def test_o_82_on_a_cluster(database_url: str) -> None:
    with Cluster(3, replicas=False) as cluster:
        said = script(database_url, cluster.url)
        for clients in zip(*(ids for _, _, ids in said), strict=True):
            assert len(set(clients)) == 4, "of each node"


def in_a_child(work: Callable[[], object]) -> str:
    """What it raises in a child of a fork."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            work()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as found:
        said = found.read().decode()
    os.wait()
    return said


def test_o_82_a_worker_made_before_a_fork_is_refused_and_the_parents_goes_on(
    database_url: str, redis_url: str, prefix: str
) -> None:
    settings = ConsumerSettings(
        database_url=database_url,
        redis_url=redis_url,
        key_prefix=prefix,
        block_seconds=0.01,  # type: ignore[arg-type]
    )
    with closing(Worker(Consumer("ledger", topics=["jobs"]), settings)) as worker:
        worker.run_once()
        for work in (worker.run_once, worker.run):
            assert in_a_child(work).startswith("SettingsError: a Worker made before a fork")
        with worker._engine.connect() as connection:
            before = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        assert in_a_child(worker.close) == "nothing"
        with worker._engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() == before
        worker.run_once()


def test_o_82_a_relay_that_has_begun_before_a_fork_is_refused_and_the_parents_goes_on(
    database_url: str, redis_url: str, prefix: str
) -> None:
    settings = RelaySettings(database_url=database_url, redis_url=redis_url, key_prefix=prefix)  # type: ignore[arg-type]
    with closing(Relay(settings)) as relay:
        relay.run_once()
        for work in (relay.run_once, relay.run):
            assert in_a_child(work).startswith("SettingsError: a Relay that has begun before a fork")
        relay.run_once()
    fresh = Relay(settings)
    assert in_a_child(fresh.run_once) == "nothing"
    fresh.close()


def test_o_82_watched_processes_share_nothing(site: Site) -> None:
    parent = wide(site, "--processes", "3", "--threads", "2", CONSUMER_BLOCK_SECONDS="5")
    working(site, 3)
    with site.connect() as connection:
        rows = eventually(
            lambda: connection.execute(
                "SELECT pid, client_port FROM pg_stat_activity WHERE application_name LIKE 'consumer ledger%'"
            ).fetchall()
        )
    assert len(rows) >= 6
    clients = [client for client in site.redis.client_list() if client["cmd"].startswith("xreadgroup")]
    assert len(clients) >= 6
    assert not any(os.readlink(found).startswith("socket:") for found in Path(f"/proc/{parent.pid}/fd").iterdir())
    assert len(list(Path(f"/proc/{parent.pid}/task").iterdir())) == 1, "the parent has no thread"
    sockets = [
        {os.readlink(found) for found in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(found).startswith("socket:")}
        for pid in children(parent)
    ]
    assert all(sockets)
    assert sum(map(len, sockets)) == len(set.union(*sockets))
    send(site, "credited")
