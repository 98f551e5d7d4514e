"""Redis and PostgreSQL come and go, forget connections, load, and fill up, under real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import redis

from outbox import Event, InvalidEvent, doctor, operations, record
from outbox import schema as schemas
from outbox.doctor import examine
from outbox.embedded import PostgresServer, ValkeyServer
from outbox.operations import opened
from outbox.replay import Selection, replay
from tests.faults.chaos import ROOT, TOPIC, Bench, drain
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

CONSUMER = ("consumer", "run", "tests.faults.chaos:ledger")
QUICK = {
    "CONSUMER_CLAIM_SECONDS": "0.5", "CONSUMER_CHECK_SECONDS": "0.2", "CONSUMER_BLOCK_SECONDS": "0.5",
    "CONSUMER_BACKOFF_MAX_SECONDS": "0.5", "CONSUMER_REDIS_TIMEOUT_SECONDS": "2", "OUTBOX_REDIS_TIMEOUT_SECONDS": "2",
}  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def postgres(own_postgres: Callable[..., PostgresServer]) -> PostgresServer:
    server = own_postgres()
    for branch in ("outbox", "consumer"):
        schemas.upgrade(server.url, branch)  # type: ignore[arg-type]
    return server


def opened_bench(stack: ExitStack, database_url: str, redis_url: str) -> Bench:
    bench = stack.enter_context(Bench(database_url, redis_url))
    bench.make_tables()
    return bench


def settled(bench: Bench, ids: list[str], seconds: float = 20) -> None:
    """Everything recorded has its effect once, and nothing is pending."""
    expected = Counter(dict.fromkeys(ids, 1))
    eventually(lambda: bench.effects() == expected, seconds, f"{len(ids)} effects", ignoring=(psycopg.Error,))
    eventually(lambda: bench.redis.xpending(bench.key(), "ledger")["pending"] == 0, 10, ignoring=(redis.RedisError,))


def output(process: subprocess.Popen[bytes], path: Path) -> str:
    assert process.poll() is None
    return path.read_text()


def logged(bench: Bench, path: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process whose output goes to a file."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT,
        env=os.environ | QUICK | {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url} | environment,
        stdout=path.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    bench.processes.append(process)
    return process


def test_o_05_a_stream_of_the_wrong_type_holds_its_events_in_order(bench: Bench) -> None:
    bench.redis.set(bench.key(), "x")
    bench.redis.delete(bench.key("other"))
    relay, ids = bench.relay(check_seconds=0.001), []
    for _ in range(5):
        ids += bench.write(1, type="limited")
        bench.write(1, topic="other")
        relay.run_once()
    assert bench.length("other") == 5, "the other stream goes on"
    bench.redis.delete(bench.key())
    eventually(lambda: drain(relay).behind == 0)
    assert bench.ids() == ids
    bench.consume()
    assert bench.one("SELECT version FROM public.limits") == bench.one(
        "SELECT max(version) FROM public.outbox WHERE topic = %s", TOPIC
    )


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def test_o_24_redis_killed_without_persistence_and_started_empty(
    stack: ExitStack, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    """The relay sees it by itself; a replay of everything besides does no harm."""
    server = own_valkey()
    bench = opened_bench(stack, database_url, server.url)
    ids = bench.write(100)
    relay = bench.relay(check_seconds=0.001, batch_rows=10)
    drain(relay)
    transport = bench.transport()
    transport.open("ledger", [TOPIC])
    server.kill()
    server.start()
    assert bench.length() == 0
    relay = bench.relay(check_seconds=0.001)
    eventually(lambda: drain(relay) and bench.length() == 100, ignoring=(Exception,))
    assert len(bench.consume()) == 100
    with opened(bench.settings()) as (store, connection, to):
        assert [step.events for step in replay(store, connection, to, bench.settings(), Selection())] == [100]
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))
    assert bench.one("SELECT count(*) FROM public.processed_messages") == 100


@pytest.mark.long
def test_o_41_a_redis_that_hangs_holds_up_nobody(
    stack: ExitStack, database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """It is frozen while one relay is publishing and another stands by; producers, status and doctor do not wait for it."""
    server = own_valkey()
    bench = opened_bench(stack, database_url, server.url)
    bench.transport().open("ledger", [TOPIC])
    ids = bench.write(1)
    before = bench.relay(trim_seconds=0.001)
    drain(before), before.run_once()  # the group is written down
    before.close()
    # They turn to Redis for nothing else, so that the first thing that hangs is the publishing of a batch.
    calm = {"OUTBOX_CHECK_SECONDS": "60", "OUTBOX_TRIM_SECONDS": "60", "OUTBOX_REDIS_TIMEOUT_SECONDS": "8"}
    logs = [tmp_path / "one", tmp_path / "two"]
    relays = [logged(bench, log, "outbox", "relay", **calm) for log in logs]
    eventually(lambda: bench.relays_connected() == 2, 30)
    ids += bench.write(1)
    eventually(lambda: bench.length() == 2, 30)
    server.pause()
    ids += bench.write(1)
    eventually(lambda: bench.one("SELECT max(seq) FROM public.outbox_batch") == 3, 30, "sealed, and on its way")
    frozen, inserts, held = time.monotonic(), [], set()
    while time.monotonic() < frozen + 2:
        started = time.monotonic()
        ids += bench.write(1)
        inserts.append(time.monotonic() - started)
        held.update(
            bench.db.execute("""
            SELECT application_name, state, wait_event_type FROM pg_stat_activity
            WHERE datname = current_database() AND clock_timestamp() - xact_start > interval '1 second'
            """).fetchall()
        )
        time.sleep(0.1)
    looks = []
    for _ in range(3):
        started = time.monotonic()
        found_status = operations.status(bench.settings())
        looks.append(time.monotonic() - started)
        (shown,) = found_status.streams
        assert "Timeout" in (found_status.redis_error or "")
        assert shown.error == found_status.redis_error
        (group,) = shown.groups
        waiting = group.unacknowledged + sum(count for count, _ in found_status.unsealed.values())
        assert (group.name, waiting) == ("ledger", len(ids)), "all that PostgreSQL knows"
    assert sorted(inserts)[len(inserts) // 2] < 0.2
    assert min(looks) < 1
    assert held == set(), "nobody has a transaction open, or waits for a lock in one"
    started = time.monotonic()
    seen = examine(bench.settings(redis_timeout_seconds=0.5))
    assert {(f.code, f.level) for f in seen if f.level == "error"} >= {("redis-unavailable", "error")}
    assert "schema-revision" in {f.code for f in seen}
    assert time.monotonic() - started < 5
    server.resume()
    eventually(lambda: operations.status(bench.settings()).streams[0].unpublished == 0, 30)
    assert bench.consume() == Counter(ids)
    assert all("Traceback" not in output(relay, log) for relay, log in zip(relays, logs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_postgresql_that_hangs_ends_status_and_doctor_with_a_clear_error(
    stack: ExitStack, postgres: PostgresServer, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Also one that hangs when the connection is there: its own time-outs and TCP's do not end that."""
    bench = stack.enter_context(Bench(postgres.url, redis_url, prefix))
    monkeypatch.setattr(operations, "_DATABASE_SECONDS", 1.0)
    monkeypatch.setattr(doctor, "_ANSWER_SECONDS", 1.0)
    settings = bench.settings(database_url=f"{postgres.url}?connect_timeout=2")
    if when == "before":
        postgres.pause()
    else:
        there, connected = operations.schemas.connect, threading.Event()

        def connect_and_hang(*arguments: object, **options: object) -> psycopg.Connection[object]:
            connection = there(*arguments, **options)  # type: ignore[arg-type]
            postgres.pause()
            connected.set()
            return connection

        monkeypatch.setattr(operations.schemas, "connect", connect_and_hang)
    started = time.monotonic()
    with pytest.raises(psycopg.OperationalError, match="timeout expired|PostgreSQL has not answered within 1 s"):
        operations.status(settings)
    if when == "meanwhile":
        postgres.resume()
    found = [(finding.code, finding.level) for finding in examine(settings) if finding.level == "error"]
    assert found == [("database-unavailable", "error")]
    assert time.monotonic() - started < 15
    postgres.resume()
    monkeypatch.undo()
    assert operations.status(settings).relays == 0


@pytest.mark.long
def test_o_31_o_51_an_outage_costs_no_attempts_few_lines_and_little_cpu(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Ten seconds instead of 15 and 60: twenty times the longest pause."""
    server = own_valkey(settings={"appendonly": "yes", "appendfsync": "always"})
    bench = opened_bench(stack, postgres.url, server.url)
    paths = [tmp_path / name for name in ("relay", "one", "two")]
    processes = [
        logged(bench, paths[0], "outbox", "relay", OUTBOX_BACKOFF_MAX_SECONDS="0.5"),
        logged(bench, paths[1], *CONSUMER), logged(bench, paths[2], *CONSUMER),
    ]  # fmt: skip
    ids = bench.write(5)
    settled(bench, ids)
    before = [len(path.read_text().splitlines()) for path in paths]
    server.stop()
    ids += bench.write(100)
    spent = [_cpu_seconds(process) for process in processes]
    time.sleep(10)  # the length of the outage, not a wait for anything
    spent = [_cpu_seconds(process) - seconds for process, seconds in zip(processes, spent, strict=True)]
    server.start()
    begun = time.monotonic()
    settled(bench, ids)
    assert time.monotonic() - begun < 10
    assert max(spent) < 2, "a fifth of a core"
    for process, path, lines in zip(processes, paths, before, strict=True):
        told = re.compile(r"waits, try 1: .*\n(.*\n)*.*goes on after 1?\d\.\d s")
        eventually(lambda told=told, path=path: told.search(path.read_text()))
        assert len(output(process, path).splitlines()) - lines < 30
    assert bench.one("SELECT count(*) FROM public.dead_letters") == 0


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_o_43_redis_restarted_again_and_again(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(settings={"appendonly": "yes"})
    bench = opened_bench(stack, postgres.url, server.url)
    processes = [bench.start(**QUICK), bench.start(*CONSUMER, **QUICK)]
    ids: list[str] = []
    for number in range(5):
        ids += bench.write(20)
        if number != 1:  # the second and third come at once
            eventually(lambda: bench.length() > 0, 10, ignoring=(redis.RedisError,))
        server.kill()
        server.start()
    settled(bench, ids)
    assert [process.poll() for process in processes] == [None, None]


@pytest.mark.long
def test_o_44_connections_that_the_other_side_forgot(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey()
    proxy = stack.enter_context(Proxy(port_of(server.url)))
    bench = opened_bench(stack, postgres.url, server.url)
    address = {"REDIS_URL": through(proxy, server.url)}
    processes = [bench.start(**QUICK | address), bench.start(*CONSUMER, **QUICK | address)]
    ids = bench.write(5)
    settled(bench, ids)
    assert proxy.forget() >= 2
    ids += bench.write(5)
    begun = time.monotonic()
    settled(bench, ids)
    assert time.monotonic() - begun < 0.5 + 2 + 5  # block, time-out, and the case's five seconds
    assert [process.poll() for process in processes] == [None, None]


@pytest.mark.long
def test_o_45_blocking_for_longer_than_the_time_out_is_no_error(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Six seconds idle instead of 30: three times block, six times the time-out."""
    server = own_valkey()
    bench = opened_bench(stack, postgres.url, server.url)
    drain(bench.relay())
    path = tmp_path / "consumer"
    process = logged(
        bench, path, *CONSUMER, CONSUMER_BLOCK_SECONDS="2", CONSUMER_REDIS_TIMEOUT_SECONDS="1", CONSUMER_CHECK_SECONDS="60",
        CONSUMER_CLAIM_SECONDS="60",
    )  # fmt: skip
    eventually(lambda: "start check: " in path.read_text())  # done, and so are its connections
    eventually(lambda: bench.redis.exists(bench.key()))

    def connections() -> int:
        return int(bench.redis.info("stats")["total_connections_received"])

    eventually(lambda: bench.redis.info("clients")["blocked_clients"] == 1)
    before = connections()
    time.sleep(6)  # the idle time
    assert connections() == before
    ids = bench.write(1)
    drain(bench.relay())
    settled(bench, ids, 2)
    lines = [line for line in output(process, path).splitlines() if "start check: " not in line]
    assert re.search("WARNING|ERROR", "\n".join(lines)) is None


def test_o_46_postgresql_restarted_and_backends_terminated(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    server = own_valkey()
    bench = opened_bench(stack, postgres.url, server.url)
    paths = [tmp_path / "relay", tmp_path / "consumer"]
    processes = [logged(bench, paths[0], "outbox", "relay"), logged(bench, paths[1], *CONSUMER)]
    ids: list[str] = []
    for _ in range(3):
        with psycopg.connect(postgres.url) as connection:
            events = [bench.event() for _ in range(30)]
            record(connection, *events)
        ids += [str(event.id) for event in events]
        postgres.kill()
        postgres.start()
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        query = "SELECT event_id::text, count(*) FROM public.effects GROUP BY 1"
        expected = dict.fromkeys(ids, 1)
        eventually(lambda: dict(connection.execute(query).fetchall()) == expected, 20)
    for process, path in zip(processes, paths, strict=True):
        assert len(output(process, path).splitlines()) < 150


def test_o_50_a_server_that_is_still_loading_is_waited_for(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """A port that answers LOADING to everything, and then the real server behind it."""
    server = own_valkey()
    loading = stack.enter_context(_Loading())
    proxy = stack.enter_context(Proxy(loading.port))
    bench = opened_bench(stack, postgres.url, server.url)
    address = {"REDIS_URL": through(proxy, server.url)}
    paths = [tmp_path / "relay", tmp_path / "consumer"]
    processes = [
        logged(bench, paths[0], "outbox", "relay", **address), logged(bench, paths[1], *CONSUMER, **address)
    ]  # fmt: skip
    ids = bench.write(5)
    eventually(lambda: all("loading" in path.read_text() for path in paths), 20)
    proxy.redirect(port_of(server.url))
    settled(bench, ids)
    assert [process.poll() for process in processes] == [None, None]


class _Loading:
    """A server that is loading for ever."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def __enter__(self) -> _Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        try:
            while data := client.recv(65536):
                count = max(1, len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", data)))
                client.sendall(b"-LOADING server is loading the dataset in memory\r\n" * count)
        except OSError:
            pass


def test_o_54_what_both_groups_have_acknowledged_does_not_stay_in_memory(bench: Bench) -> None:
    """20,000 events instead of 50,000."""
    transport = bench.transport()
    for group in ("one", "two"):
        transport.open(group, [TOPIC])
    bench.fill(20_000)
    relay = bench.relay(stream_keep_seconds=0, trim_seconds=0.001)
    drain(relay)
    full = int(bench.redis.memory_usage(bench.key()) or 0)
    for group in ("one", "two"):
        found = transport.read(group, "c", [TOPIC], 19_000, 0.01)
        transport.ack(group, found)
    drain(relay)
    relay.run_once()
    assert 1000 <= bench.length() <= 1101
    assert int(bench.redis.memory_usage(bench.key()) or 0) < full / 5
    left = transport.read("one", "c", [TOPIC], 5000, 0.01)
    assert len(left) == 1000


@pytest.mark.parametrize("payload", ["x" * 7_990, "x" * 8_100, "x" * 200_000, "😀" * 3_000], ids=len)
def test_o_60_payloads_of_any_length_are_delivered_byte_equal(bench: Bench, payload: str) -> None:
    event = bench.event(payload=payload)
    with psycopg.connect(bench.database_url) as connection:
        record(connection, event)
    drain(bench.relay())
    ((_, fields),) = bench.redis.xrange(bench.key())
    assert fields[b"data"] == event.data


@pytest.mark.long
def test_o_61_megabytes_are_processed_in_bounded_memory(bench: Bench, tmp_path: Path) -> None:
    """The process may have 256 MB more than it starts with; one event over the limit is refused before anything is sent."""
    bench.make_tables()
    with psycopg.connect(bench.database_url) as connection:
        for _ in range(100):
            record(connection, Event(topic=TOPIC, type="credited", key="A", version=1, payload="x" * 1_000_000))
        with pytest.raises(InvalidEvent, match=r"payload: has \d+ bytes, more than the limit of 1048576"):
            record(connection, Event(topic=TOPIC, type="credited", key="A", payload="x" * 1_048_576))
    drain(bench.relay())
    process = subprocess.Popen(
        [sys.executable, "-m", *CONSUMER], cwd=ROOT,
        env=os.environ | QUICK | {
            "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix,
            "CONSUMER_BATCH_SIZE": "100",
        },
    )  # fmt: skip
    try:
        eventually(lambda: len(bench.effects()) == 100, 30)
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[1])  # type: ignore[index]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert peak < 512 * 1024, f"{peak // 1024} MB"
