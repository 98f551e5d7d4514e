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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import redis

from consumer.process import Outcome
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import InvalidEvent, SettingsError, doctor, operations, record
from outbox import schema as schemas
from outbox.doctor import examine
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.errors import TransportError
from outbox.operations import opened, status
from outbox.replay import Selection, replay
from outbox.telemetry import StreamFailed
from tests.faults.chaos import ROOT, TOPIC, Bench, QueueBench, drain, ledger
from tests.faults.proxy import Proxy, port_of, through
from tests.integration.test_consumer import TABLES, wallet
from tests.waiting import eventually, lasting

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


def opened_bench(stack: ExitStack, database_url: str, redis_url: str, kind: type[Bench] = Bench) -> Bench:
    bench = stack.enter_context(kind(database_url, redis_url))
    bench.make_tables()
    return bench


def settled(bench: Bench, ids: list[str], seconds: float = 20) -> None:
    """Everything recorded has its effect once, and nothing is pending."""
    expected = Counter(dict.fromkeys(ids, 1))
    eventually(lambda: bench.effects() == expected, seconds, f"{len(ids)} effects", ignoring=(psycopg.Error,))
    eventually(lambda: bench.pending() == 0, 10, ignoring=(redis.RedisError,))


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


def credits_and_names(bench: Bench, version: int) -> list[str]:
    """A credit of 50.00 to A, and a state of A of that version."""
    (credit,) = bench.write(1, version=version, payload={"amount": "50.00"})
    (state,) = bench.write(1, version=version, type="renamed", payload={"name": f"v{version}"})
    return [credit, state]


@pytest.mark.parametrize("tries", [3, 20], ids=["three times", "for good"])
def test_o_05_a_stream_of_the_wrong_type_holds_its_events_in_order(bench: Bench, tries: int) -> None:
    """Publishing of version 1 fails; versions 2 to 5 of its key wait for it, and other streams go on.

    There is no OUT_DEAD: nothing is ever given up. What cannot be published is held, and status tells how much and why.
    """
    bench.db.execute(TABLES)
    bench.redis.set(bench.key(), "x")
    failures: list[StreamFailed] = []
    relay = bench.relay(check_seconds=0.001, observer=lambda m: isinstance(m, StreamFailed) and failures.append(m))
    ids = credits_and_names(bench, 1)
    eventually(lambda: relay.run_once() and len(failures) >= tries)
    for version in range(2, 6):
        ids += credits_and_names(bench, version)
        bench.write(1, topic="other")
        relay.run_once()
    assert {failure.code for failure in failures} == {"WRONGTYPE"}
    assert bench.length("other") == 4, "the other stream goes on"
    found = status(bench.settings())
    held = next(stream for stream in found.streams if stream.stream == TOPIC)
    assert (held.unpublished, held.published_batch, found.unsealed) == (len(ids), None, {})
    assert held.error
    assert "WRONGTYPE" in held.error
    bench.redis.delete(bench.key())
    eventually(lambda: drain(relay).behind == 0)
    assert bench.ids() == ids
    worker = Worker(
        wallet(), ConsumerSettings(
            database_url=bench.database_url, redis_url=bench.redis_url, key_prefix=bench.prefix, block_seconds=0.05
        ),
    )  # fmt: skip
    while worker.run_once():
        pass
    worker.close()
    assert bench.db.execute("SELECT balance, version, name FROM public.accounts").fetchall() == [(250, 5, "v5")]
    assert bench.effects() == Counter(dict.fromkeys(ids[::2], 1))
    assert bench.dead() == 0


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def test_o_24_redis_killed_without_persistence_and_started_empty(
    stack: ExitStack, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    """Of 100 events 40 are processed. Status shows what is missing, and the relay repairs it by itself; the operator's replay of
    everything since then does no harm. Relay and consumer are those of before."""
    server = own_valkey()
    bench = opened_bench(stack, database_url, server.url)
    since = bench.one("SELECT clock_timestamp()")
    ids = bench.write(100)
    relay = bench.relay(check_seconds=0.001, trim_seconds=3600)
    drain(relay)
    worker = Worker(ledger, ConsumerSettings(
        database_url=database_url, redis_url=server.url, block_seconds=0.05, batch_size=10, claim_seconds=3600,
    ))  # fmt: skip
    stack.callback(worker.close)
    outcomes: Counter[Outcome] = Counter()

    def consume(number: int) -> Counter[Outcome]:
        """Until so many deliveries have ended; what the server says at first is that it is back without its group."""
        outcomes.clear()

        def enough() -> bool:
            outcomes.update(worker.run_once())
            return outcomes.total() >= number

        eventually(enough, 20, ignoring=(TransportError,))
        return outcomes

    assert consume(40) == {Outcome.APPLIED: 40}
    server.kill()
    server.start()
    assert bench.length() == 0
    (shown,) = status(bench.settings()).streams
    assert (shown.published_batch, shown.unpublished, shown.entries) == (None, 100, 0)
    eventually(lambda: drain(relay) and bench.length() == 100, ignoring=(TransportError,))
    assert consume(100) == {Outcome.APPLIED: 60, Outcome.DUPLICATE: 40}
    (shown,) = status(bench.settings()).streams
    assert (shown.unpublished, shown.groups[0].undelivered, shown.groups[0].pending) == (0, 0, 0)
    with opened(bench.settings()) as (store, connection, to):
        selection = Selection(since=since)
        assert [step.events for step in replay(store, connection, to, bench.settings(), selection)] == [100]
    assert consume(100) == {Outcome.DUPLICATE: 100}
    assert bench.effects() == Counter(dict.fromkeys(ids, 1))
    assert bench.one("SELECT count(*) FROM public.processed_messages") == 100
    assert bench.redis.xpending(bench.key(), "ledger")["pending"] == 0
    assert bench.dead() == 0


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
@pytest.mark.parametrize("kind", [Bench, QueueBench], ids=["events", "jobs"])
def test_o_31_o_51_an_outage_costs_no_attempts_few_lines_and_little_cpu(
    stack: ExitStack,
    postgres: PostgresServer,
    own_valkey: Callable[..., ValkeyServer],
    tmp_path: Path,
    kind: type[Bench],
) -> None:
    """As in the case, sixty times the longest pause between tries; that is a second there."""
    seconds = lasting(8, 60)
    longest = str(seconds / 60)
    server = own_valkey(settings={"appendonly": "yes", "appendfsync": "always"})
    bench = opened_bench(stack, postgres.url, server.url, kind)
    paths = [tmp_path / name for name in ("relay", "one", "two")]
    processes = [
        logged(bench, paths[0], "outbox", "relay", OUTBOX_BACKOFF_MAX_SECONDS=longest),
        *(logged(bench, path, *bench.consumer, CONSUMER_BACKOFF_MAX_SECONDS=longest) for path in paths[1:]),
    ]  # fmt: skip
    ids = bench.write(5)
    settled(bench, ids)
    before = [len(path.read_text().splitlines()) for path in paths]
    server.stop()
    ids += bench.write(100)
    spent = [_cpu_seconds(process) for process in processes]
    time.sleep(seconds)  # the length of the outage, not a wait for anything
    spent = [_cpu_seconds(process) - before_it for process, before_it in zip(processes, spent, strict=True)]
    server.start()
    begun = time.monotonic()
    eventually(lambda: set(bench.ids()) == set(ids), 30, ignoring=(redis.RedisError,))
    assert time.monotonic() - begun < 5
    settled(bench, ids)
    assert max(spent) < seconds / 5, "a fifth of a core"
    for process, path, lines in zip(processes, paths, before, strict=True):
        told = re.compile(r"waits, try 1: .*\n(.*\n)*.*goes on after \d+\.\d s")
        eventually(lambda told=told, path=path: told.search(path.read_text()))
        assert len(output(process, path).splitlines()) - lines < 30
    assert bench.dead() == 0


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    user, system = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.parametrize("kind", [Bench, QueueBench], ids=["events", "jobs"])
def test_o_43_redis_restarted_again_and_again(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], kind: type[Bench]
) -> None:
    """Five times during 100 events, the third time at once after the second; what is shortened is the pause between events.
    Every other time it is killed, else it shuts down."""
    server = own_valkey(settings={"appendonly": "yes"})
    bench = opened_bench(stack, postgres.url, server.url, kind)
    processes = [bench.start(**QUICK), bench.start(*bench.consumer, **QUICK)]
    ids = bench.write(1)
    settled(bench, ids)
    pause, started = lasting(0.03, 0.2), 0.0
    for number in range(1, 100):
        ids += bench.write(1)
        if number in (15, 35, 37, 60, 80):
            (server.kill if number % 2 else server.stop)()
            server.start()
            started = time.monotonic()
        elif number == 81:
            eventually(lambda newest=ids[-1]: bench.effects()[newest] == 1, 30)  # type: ignore[misc]  # bound now
            assert time.monotonic() - started < 5
        time.sleep(pause)
    settled(bench, ids)
    assert [process.poll() for process in processes] == [None, None]


@pytest.mark.long
def test_o_44_connections_that_the_other_side_forgot(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer]
) -> None:
    """Nothing comes through, without a word; then only new connections work."""
    server = own_valkey()
    proxy = stack.enter_context(Proxy(port_of(server.url)))
    bench = opened_bench(stack, postgres.url, server.url)
    address = {"REDIS_URL": through(proxy, server.url)}
    processes = [bench.start(**QUICK | address), bench.start(*CONSUMER, **QUICK | address)]
    ids = bench.write(5)
    settled(bench, ids)
    eventually(lambda: bench.redis.info("clients")["blocked_clients"] == 1)
    before = established(proxy.port)
    assert len(before) >= 2
    proxy.deaf = True
    time.sleep(lasting(4, 30))  # the length of the outage
    assert proxy.forget() >= 2
    proxy.deaf = False
    ids += bench.write(5)
    begun = time.monotonic()
    settled(bench, ids)
    assert time.monotonic() - begun < 0.5 + 2 + 5  # block, time-out, and the case's five seconds
    eventually(lambda: not before & established(proxy.port), 10, "the old connections are closed")
    assert [process.poll() for process in processes] == [None, None]


def established(port: int) -> set[str]:
    """The clients of a port on this machine that have not closed their side, by their addresses."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"}


@pytest.mark.long
def test_o_45_blocking_for_longer_than_the_time_out_is_no_error(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Idle for longer than a read that blocks for 5 seconds, at a time-out of 1. To block for ever (0) is refused."""
    with pytest.raises(SettingsError, match="CONSUMER_BLOCK_SECONDS"):
        ConsumerSettings(database_url=postgres.url, redis_url="redis://unused", block_seconds=0)
    server = own_valkey()
    bench = opened_bench(stack, postgres.url, server.url)
    path, relay = tmp_path / "consumer", bench.relay()
    process = logged(
        bench, path, *CONSUMER, CONSUMER_BLOCK_SECONDS="5", CONSUMER_REDIS_TIMEOUT_SECONDS="1", CONSUMER_CHECK_SECONDS="60",
        CONSUMER_CLAIM_SECONDS="60",
    )  # fmt: skip
    eventually(lambda: "start check: " in path.read_text(), 20)  # done, and so are its connections
    ids = bench.write(1)
    drain(relay)
    settled(bench, ids)

    def connections() -> int:
        return int(bench.redis.info("stats")["total_connections_received"])

    eventually(lambda: bench.redis.info("clients")["blocked_clients"] == 1)
    before = connections()
    time.sleep(lasting(6, 30))  # the idle time
    assert connections() == before
    ids += bench.write(1)
    drain(relay)
    begun = time.monotonic()
    settled(bench, ids)
    assert time.monotonic() - begun < 1
    lines = [line for line in output(process, path).splitlines() if "start check: " not in line]
    assert re.search("WARNING|ERROR", "\n".join(lines)) is None


@pytest.mark.long
def test_o_46_postgresql_restarted_and_backends_terminated(
    stack: ExitStack, postgres: PostgresServer, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Three times during 100 events; what is shortened is how long it is away."""
    server = own_valkey()
    bench = opened_bench(stack, postgres.url, server.url)
    paths = [tmp_path / "relay", tmp_path / "consumer"]
    processes = [logged(bench, paths[0], "outbox", "relay"), logged(bench, paths[1], *CONSUMER)]
    ids: list[str] = []
    eventually(lambda: _sessions(postgres.url) == {"outbox relay", "consumer ledger"}, 20)
    for number in (34, 33, 33):
        with psycopg.connect(postgres.url) as connection:
            for _ in range(number):
                ids += bench.write(1, connection)
                connection.commit()
        before = [len(path.read_text().splitlines()) for path in paths]
        postgres.kill()
        time.sleep(lasting(1, 10))  # the length of the outage
        postgres.start()
        ended: set[str] = set()
        eventually(lambda: ended.update(_terminated(postgres.url, ended)) or len(ended) == 2, 20)  # noqa: B023
        for path, lines in zip(paths, before, strict=True):
            assert len(path.read_text().splitlines()) - lines < 50
            assert "sqlalchemy.pool" not in path.read_text(), "it has fifty by itself"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        query = "SELECT event_id::text, count(*) FROM public.effects GROUP BY 1"
        expected = dict.fromkeys(ids, 1)
        eventually(lambda: dict(connection.execute(query).fetchall()) == expected, 20)
        assert connection.execute("SELECT count(*) FROM public.processed_messages").fetchone() == (100,)
    eventually(lambda: bench.redis.xpending(bench.key(), "ledger")["pending"] == 0)
    assert [process.poll() for process in processes] == [None, None]


_OURS = "FROM pg_stat_activity WHERE application_name ~ '^(outbox|consumer) '"


def _sessions(url: str) -> set[str]:
    """The product's sessions at a server; the consumer's name has a star at its end while it is in a transaction."""
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(f"SELECT rtrim(application_name, ' *') {_OURS}")}


def _terminated(url: str, before: set[str]) -> set[str]:
    """The sessions that are ended by this: each whose name was not among those before, or what it says would be our doing."""
    with psycopg.connect(url) as connection:
        ours = f"WITH ours AS MATERIALIZED (SELECT pid, rtrim(application_name, ' *') AS name {_OURS}) "
        query = ours + "SELECT name FROM ours WHERE name <> ALL (%s) AND pg_terminate_backend(pid)"  # noqa: S608
        return {row[0] for row in connection.execute(query, (list(before),))}


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


@pytest.mark.long
@pytest.mark.parametrize("kind", [Bench, QueueBench], ids=["events", "jobs"])
def test_o_53_consumers_drain_a_server_over_maxmemory_and_the_relay_waits(
    new_database_url: Callable[[], str], stack: ExitStack, own_valkey: Callable[..., ValkeyServer], kind: type[Bench]
) -> None:
    """500 of them are not read yet, and 100 events not published, when maxmemory falls below what is used."""

    def survives(bench: Bench) -> None:
        processes = [bench.start(**QUICK), bench.start(*bench.consumer, **QUICK)]
        settled(bench, ids := bench.write(1))  # the group is there: it could not be made at full memory
        processes[1].send_signal(signal.SIGSTOP)
        ids += bench.write(500)
        eventually(lambda: set(bench.ids()) >= set(ids), 20)
        bench.redis.config_set("maxmemory", bench.redis.info("memory")["used_memory"] // 2)
        with pytest.raises(redis.OutOfMemoryError):
            bench.redis.set("x", "x")
        paused = eventually(lambda: status(bench.settings()).streams[0].paused, 20)
        late = bench.write(100)
        processes[1].send_signal(signal.SIGCONT)
        settled(bench, ids)
        (shown,) = status(bench.settings()).streams
        assert (paused, shown.unpublished + status(bench.settings()).unsealed.get(bench.topic, (0, 0))[0]) == (
            "memory",
            100,
        )
        assert set(late).isdisjoint(bench.ids())
        bench.redis.config_set("maxmemory", 0)
        settled(bench, ids + late)
        assert bench.dead() == 0
        assert [process.poll() for process in processes] == [None, None]

    benches = [opened_bench(stack, new_database_url(), own_valkey(name).url, kind) for name in sorted(redis_servers())]
    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(survives, benches))


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
@pytest.mark.parametrize("left", [False, True], ids=["new", "taken over"])
def test_o_61_megabytes_are_processed_in_bounded_memory(bench: Bench, tmp_path: Path, left: bool) -> None:
    """100 events of 1 MB, 100 of them wanted at once, in 256 MB; an event over the limit is refused before anything is sent."""
    bench.make_tables()
    with psycopg.connect(bench.database_url) as connection:
        for _ in range(100):
            bench.write(1, connection, payload="x" * 1_000_000)
        with pytest.raises(InvalidEvent, match=r"payload: has 1048578 bytes, more than the limit of 1048576"):
            bench.write(1, connection, payload="x" * 1_048_576)
    assert len(bench.outbox()) == 100
    drain(bench.relay())
    if left:  # by somebody who died with all of them
        bench.redis.xgroup_create(bench.key(), "ledger", "0")
        assert len(bench.redis.xreadgroup("ledger", "dead", {bench.key(): ">"})[0][1]) == 100
    process = bench.start(*CONSUMER, **QUICK, CONSUMER_BATCH_SIZE="100")
    eventually(lambda: len(bench.effects()) == 100, 30)
    status = Path(f"/proc/{process.pid}/status").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) // 1024  # type: ignore[index]
    assert peak < 256, f"{peak} MB"
    assert bench.redis.xpending(bench.key(), "ledger")["pending"] == 0
