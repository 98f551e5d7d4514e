"""A consumer on real streams: groups, pending deliveries, clients, lanes; and end to end with the relay."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from redis._parsers import _HiredisParser, _RESP2Parser

from consumer import Consumer, Envelope, Order
from consumer.process import Outcome
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.errors import SettingsError
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.telemetry import Claimed, Measurement
from outbox.transport import StreamTransport
from outbox.transport.base import stream_of
from tests.integration.test_consumer import TABLES, TOPIC, credit, entry, wallet
from tests.waiting import eventually

APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY = Outcome
ROOT = Path(__file__).parents[2]


def event(kind: str, payload: Any, **fields: Any) -> Event:
    return Event(topic=TOPIC, type=kind, payload=payload, **fields)


class Site:
    """One database, one prefix on a server; relays and workers of it, and a look past them."""

    def __init__(self, database_url: str, redis_url: str, prefix: str, stack: ExitStack) -> None:
        self.addresses = {"database_url": database_url, "redis_url": redis_url, "key_prefix": prefix}
        self.redis: Any = stack.enter_context(redis.Redis.from_url(redis_url))
        self.sql = stack.enter_context(psycopg.connect(database_url, autocommit=True))
        self.sql.execute(TABLES)
        self._stack = stack

    def relay(self, **options: Any) -> Relay:
        made = Relay(RelaySettings(**self.addresses, **options))
        self._stack.callback(made.close)
        return made

    def worker(self, consumer: Consumer, **options: Any) -> Worker:
        parts = {name: options.pop(name) for name in ("observer", "transport") if name in options}
        short = {"claim_seconds": 0.05, "check_seconds": 0.02, "block_seconds": 0.02}
        made = Worker(consumer, ConsumerSettings(**self.addresses, **(short | options)), **parts)
        self._stack.callback(made.close)
        return made

    def key(self, stream: str = TOPIC) -> str:
        return f"{self.addresses['key_prefix']}{{{stream}}}"

    def add(self, *entries: dict[bytes, bytes], stream: str = TOPIC) -> list[bytes]:
        return [self.redis.xadd(self.key(stream), fields) for fields in entries]

    def pending(self, group: str = "ledger", stream: str = TOPIC) -> int:
        return int(self.redis.xpending(self.key(stream), group)["pending"])

    def record(self, *events: Event) -> None:
        for event in events:  # each in its own transaction
            with psycopg.connect(self.addresses["database_url"]) as connection:
                record(connection, event)

    def count(self, query: str) -> Any:
        row = self.sql.execute(query).fetchone()
        return row[0] if row and len(row) == 1 else row

    @property
    def effects(self) -> int:
        return int(self.count("SELECT count(*) FROM public.effects"))


@pytest.fixture
def site(database_url: str, redis_url: str, prefix: str) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(database_url, redis_url, prefix, stack)


def f5() -> list[Event]:
    return [event("credited", {"amount": "50.00"}, key="A") for _ in range(5)]


def drain(worker: Worker, wanted: int) -> Counter[Outcome]:
    total: Counter[Outcome] = Counter()

    def done() -> bool:
        total.update(worker.run_once())
        return sum(n for outcome, n in total.items() if outcome is not RETRY) >= wanted

    eventually(done)
    return total


# --- end to end ------------------------------------------------------------------------------------------------------


def test_o_22_the_first_consumer_starts_late(site: Site) -> None:
    """Groups always start at 0: there is no option "from now", so that a case of it cannot be asked for.

    How often an idle consumer reads is counted by the server.
    """
    site.record(*f5())
    site.relay().run_once()
    worker = site.worker(wallet(), block_seconds=0.2, check_seconds=0.2, claim_seconds=0.5)
    assert drain(worker, 5) == {APPLIED: 5}
    assert site.count("SELECT balance FROM public.accounts") == 250
    assert (site.effects, site.pending()) == (5, 0)
    assert drain(site.worker(wallet(name="newcomer")), 5) == {APPLIED: 5}

    def reads() -> int:
        return int(site.redis.info("commandstats").get("cmdstat_xreadgroup", {}).get("calls", 0))

    seconds = []
    thread = threading.Thread(target=worker.run, daemon=True)
    before = reads()
    started = site.redis.time()
    thread.start()

    def ten_rounds() -> bool:
        now = site.redis.time()
        seconds.append(now[0] - started[0] + (now[1] - started[1]) / 1e6)
        return reads() - before >= 10

    eventually(ten_rounds)
    worker.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert (reads() - before - 1) / seconds[-1] < 10


def test_o_19_two_groups_on_one_stream(site: Site) -> None:
    """Without the part about trimming: nothing of ours trims."""
    site.record(*f5())
    site.relay().run_once()
    assert drain(site.worker(wallet()), 5) == {APPLIED: 5}
    assert site.redis.xlen(site.key()) == 5
    assert drain(site.worker(wallet(name="mailer")), 5) == {APPLIED: 5}
    rows = site.sql.execute("SELECT consumer, count(*) FROM public.processed_messages GROUP BY 1 ORDER BY 1")
    assert rows.fetchall() == [("ledger", 5), ("mailer", 5)]
    assert (site.pending("ledger"), site.pending("mailer")) == (0, 0)


def test_o_21_no_read_is_noack_and_no_ack_precedes_its_commit(site: Site) -> None:
    """As the server saw it: MONITOR, and what the database held at the time of each XACK."""
    site.record(*f5())
    site.relay().run_once()
    failed: set[Any] = set()
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("credited")
    def fails_once(event: Envelope, session: Any) -> None:
        credit(event, session)
        if len(failed) < 2 and event.delivery_count == 1:
            failed.add(event.id)
            raise RuntimeError("first time")

    commands: list[str] = []
    with site.redis.monitor() as monitor:
        worker = site.worker(consumer)
        drain(worker, 5)
        site.redis.echo("end")
        for command in monitor.listen():
            if "ECHO" in command["command"]:
                break
            if site.key() in command["command"]:
                commands.append(command["command"])
    assert len(failed) == 2
    assert (site.effects, site.pending()) == (5, 0)
    assert any(command.startswith("XREADGROUP") for command in commands)
    assert not [command for command in commands if "NOACK" in command]
    acked = [len(command.split()) - 3 for command in commands if command.startswith("XACK")]
    assert sum(acked) == 5  # none for a failed one, and none twice


VALUES: list[Any] = [
    9007199254740993, 9223372036854775807, -1, 0.1234567890123456789, Decimal("1234567890.123456789"),
    Decimal("1E+3"), Decimal("0.10"),
]  # fmt: skip


def test_o_68_numbers_arrive_as_they_were_written(site: Site) -> None:
    """Integers are exact, Decimals become exact strings, floats are the same double; the bytes are equal on the way."""
    recorded = event("numbers", {"values": VALUES, "map": {str(n): v for n, v in enumerate(VALUES)}})
    seen: list[Envelope] = []
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("numbers")(lambda event, session: seen.append(event))
    site.record(recorded)
    site.relay().run_once()
    drain(site.worker(consumer), 1)
    got = seen[0].payload["values"]
    assert got[:4] == VALUES[:4]
    assert [type(value) for value in got[:4]] == [int, int, int, float]
    assert [Decimal(value) for value in got[4:]] == VALUES[4:]
    assert got[4:] == ["1234567890.123456789", "1E+3", "0.10"]
    assert sum([Decimal(got[6])] * 3) == Decimal("0.30")
    stored = site.count("SELECT data FROM public.outbox")
    ((_, fields),) = site.redis.xrange(site.key())
    assert len({hashlib.sha256(data).digest() for data in (recorded.data, stored, fields[b"data"], seen[0].data)}) == 1


def test_o_72_empty_payloads_are_delivered_as_exactly_that(site: Site) -> None:
    payloads: list[Any] = [None, {}, [], "", 0, False]
    seen: list[Any] = []
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("empty")(lambda event, session: seen.append(event.payload))
    site.record(*(event("empty", payload) for payload in payloads))
    site.record(event("empty", b"", content_type="application/octet-stream"))
    site.relay().run_once()
    assert drain(site.worker(consumer), 7) == {APPLIED: 7}
    assert seen == [*payloads, b""]
    assert [type(value) for value in seen] == [type(value) for value in [*payloads, b""]]


def test_o_74_a_column_is_added_under_running_processes(site: Site) -> None:
    relay, worker = site.relay(), site.worker(wallet())
    for _ in range(12):  # so often that statements would have been prepared
        site.record(event("credited", {"amount": "1.00"}, key="A"))
        relay.run_once()
        assert drain(worker, 1) == {APPLIED: 1}
    for table in ("outbox", "outbox_batch", "processed_messages", "entity_versions"):
        site.sql.execute(f"ALTER TABLE public.{table} ADD COLUMN note text")
    site.record(*f5())
    assert relay.run_once().published == 5
    assert worker.run_once() == {APPLIED: 5}
    assert (site.effects, site.pending()) == (17, 0)
    assert site.count("SELECT balance FROM public.accounts") == 262


# --- pending deliveries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_o_36_deliveries_deleted_while_pending(
    name: str, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    with ExitStack() as stack:
        site = Site(database_url, own_valkey(name).url, "", stack)
        ids = site.add(*(entry() for _ in range(50)))
        site.redis.xgroup_create(site.key(), "ledger", "0")
        site.redis.xreadgroup("ledger", "crashed", {site.key(): ">"})
        site.redis.xtrim(site.key(), minid=ids[10], approximate=False)
        site.redis.xdel(site.key(), *ids[15:35])
        seen: list[Measurement] = []
        worker = site.worker(wallet(), observer=seen.append, batch_size=7)
        assert drain(worker, 20) == {APPLIED: 20}
        eventually(lambda: worker.run_once() is not None and site.pending() == 0)
        claims = [m for m in seen if isinstance(m, Claimed)]
        assert [sum(c.deliveries for c in claims), sum(c.missing for c in claims)] == [20, 30]
        site.add(entry())
        assert drain(worker, 1) == {APPLIED: 1}  # it goes on
        assert site.effects == 21


def test_o_37_own_pending_deliveries_whose_data_is_gone(site: Site) -> None:
    """A process of the same name reads five and is gone; another of that name finds three of them."""
    ids = site.add(*(entry() for _ in range(5)))
    site.redis.xgroup_create(site.key(), "ledger", "0")
    site.redis.xreadgroup("ledger", "stable", {site.key(): ">"})
    site.redis.xdel(site.key(), ids[0], ids[3])
    worker = site.worker(wallet(), process_name="stable")
    assert drain(worker, 3) == {APPLIED: 3}
    assert (site.effects, site.pending()) == (3, 0)
    site.add(entry())
    drain(worker, 1)
    assert (site.effects, site.pending()) == (4, 0)


def test_a_crashed_consumers_deliveries_are_taken_over_when_they_are_idle(site: Site) -> None:
    """By XPENDING IDLE and XCLAIM of what it showed, and not before the time."""
    site.add(*(entry() for _ in range(3)))
    site.redis.xgroup_create(site.key(), "ledger", "0")
    site.redis.xreadgroup("ledger", "crashed", {site.key(): ">"})
    early = site.worker(wallet(), claim_seconds=60)
    assert early.run_once() == {}
    assert site.pending() == 3
    counts: list[int] = []
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("credited")(lambda event, session: counts.append(event.delivery_count))
    before = site.redis.info("commandstats")
    drain(site.worker(consumer), 3)
    after = site.redis.info("commandstats")
    assert counts == [2, 2, 2]
    used = {n for n in ("xpending", "xclaim", "xautoclaim") if calls(after, n) > calls(before, n)}
    assert used == {"xpending", "xclaim"}
    assert site.pending() == 0


def names(site: Site, group: str = "ledger") -> set[str]:
    return {info["name"].decode() for info in site.redis.xinfo_consumers(site.key(), group)}


def test_o_55_names_do_not_pile_up(site: Site) -> None:
    """Twenty processes that stop cleanly, then one that leaves a delivery: its name stays as long as that is pending."""
    for n in range(20):
        site.add(entry())
        worker = site.worker(wallet(), process_name=f"pod-{n}")
        assert drain(worker, 1) == {APPLIED: 1}
        worker.stop()
        worker.run()  # only closes
        assert names(site) == set()
    site.add(entry("shipped"), entry())
    keeps = site.worker(wallet(), process_name="keeps")
    assert keeps.run_once() == {RETRY: 1, APPLIED: 1}
    keeps.close()
    assert names(site) == {"keeps"}
    newer = wallet()
    newer.ignore("shipped")
    worker = site.worker(newer, process_name="newer")
    assert drain(worker, 1) == {IGNORED: 1}
    worker.close()
    assert (site.effects, site.pending(), names(site)) == (21, 0, {"keeps"})


def test_o_55_names_that_crashed_processes_left_go_when_they_are_long_idle(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add(entry(), entry())
    site.redis.xgroup_create(site.key(), "ledger", "0")
    for n in range(20):
        site.redis.xgroup_createconsumer(site.key(), "ledger", f"crashed-{n}")
    site.redis.xreadgroup("ledger", "busy", {site.key(): ">"}, count=1)
    worker = site.worker(wallet(), process_name="ours", claim_seconds=60)
    assert drain(worker, 1) == {APPLIED: 1}
    assert len(names(site)) == 22  # an hour is not over
    monkeypatch.setattr("consumer.worker._LEFT_SECONDS", 0.05)
    worker._names_due = 0
    eventually(lambda: worker.run_once() is not None and setattr(worker, "_names_due", 0) is None
               and names(site) <= {"busy", "ours"})  # fmt: skip
    assert "busy" in names(site)
    assert site.pending() == 1


def calls(stats: dict[str, Any], command: str) -> int:
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


# --- clients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [False, True], ids=["bytes", "decode_responses"])
@pytest.mark.parametrize(
    ("protocol", "parser"),
    [(2, _RESP2Parser), (2, _HiredisParser), (3, None)],  # parsers are chosen for RESP 2 only
    ids=["resp2-python", "resp2-hiredis", "resp3"],
)
def test_o_69_binary_values_between_good_ones(site: Site, decode: bool, parser: Any, protocol: int) -> None:
    binary = b"\xff\xfe\x00\x80"
    site.add(
        entry(),
        entry(data=binary),
        entry(data=binary, datacontenttype="application/octet-stream", type="opaque"),
        entry(),
    )
    options = {"decode_responses": decode, "protocol": protocol, "socket_timeout": 10}
    if parser is not None:
        options["parser_class"] = parser
    pool = redis.ConnectionPool.from_url(site.addresses["redis_url"], **options)
    client = redis.Redis(connection_pool=pool)
    seen: list[Any] = []
    consumer = wallet()
    consumer.on("opaque")(lambda event, session: seen.append(event.payload))
    worker = site.worker(consumer, transport=StreamTransport(client, site.addresses["key_prefix"]))
    assert drain(worker, 4) == {APPLIED: 3, DEAD: 1}
    assert seen == [binary]
    assert (site.effects, site.pending()) == (2, 0)
    assert site.count("SELECT fields FROM public.dead_letters")[-1] == binary
    pool.disconnect()


# --- lanes -------------------------------------------------------------------------------------------------------------


def test_a_topic_over_several_lanes(site: Site) -> None:
    keys = [f"k{n}" for n in range(24)]
    lanes = {stream_of(TOPIC, key, 4) for key in keys}
    assert lanes == {f"{TOPIC}:{lane}" for lane in range(4)}
    ran: dict[str | None, list[int]] = {}
    topics: set[str] = set()
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("counted", order=Order.LATEST)
    def count(event: Envelope, session: Any) -> None:
        topics.add(event.topic)
        ran.setdefault(event.key, []).append(event.payload)

    site.record(*(event("counted", n, key=key, version=n) for n in range(2) for key in keys))
    site.relay(lanes={TOPIC: 4}).run_once()
    assert drain(site.worker(consumer, lanes={TOPIC: 4}), 48) == {APPLIED: 48}
    assert ran == {key: [0, 1] for key in keys}
    assert topics == {TOPIC}
    for lane in range(4):
        found = [fields[b"subject"].decode() for _, fields in site.redis.xrange(site.key(f"{TOPIC}:{lane}"))]
        assert found
        assert {stream_of(TOPIC, key, 4) for key in found} == {f"{TOPIC}:{lane}"}
        assert site.pending(stream=f"{TOPIC}:{lane}") == 0
    assert not site.redis.exists(site.key())


@pytest.mark.parametrize(("theirs", "ours"), [(4, 1), (1, 4), (4, 2), (2, 4)])
def test_lanes_that_differ_are_refused(site: Site, theirs: int, ours: int) -> None:
    site.record(*(event("credited", {"amount": "1.00"}, key=f"k{n}") for n in range(8)))
    site.relay(lanes={TOPIC: theirs}).run_once()
    with pytest.raises(SettingsError, match=f"over {theirs} lanes, this consumer reads {ours}"):
        site.worker(wallet(), lanes={TOPIC: ours}).run()
    assert site.effects == 0


# --- the command -------------------------------------------------------------------------------------------------------

PASSWORD, ENCODED = "S3cr3t!%@", "S3cr3t!%25%40"


def _says(environment: dict[str, str], tmp_path: Path, until: str, stop: bool) -> tuple[int, str, str]:
    """Run `consumer run` at the level debug until it ends, or says `until` and is stopped: exit code, output, command."""
    tmp_path.mkdir()
    (tmp_path / "shop.py").write_text(
        "from consumer import Consumer\nwallet = Consumer('wallet', topics=['accounts'])\n"
    )
    output = tmp_path / "output"
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("CONSUMER_", "OUTBOX_"))}
    command = [sys.executable, "-m", "consumer", "run", "shop:wallet", "--log-level", "debug"]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env=clean | environment | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "CONSUMER_BACKOFF_MAX_SECONDS": "0.05"},
            cwd=tmp_path,
            stdout=sink,
            stderr=sink,
        )
    try:
        eventually(lambda: process.poll() is not None or until in output.read_text(), 20)
        line = Path(f"/proc/{process.pid}/cmdline").read_text() if process.poll() is None else ""
        if stop:
            process.send_signal(signal.SIGTERM)
        return process.wait(10), output.read_text(), line
    finally:
        process.kill()


@pytest.fixture
def guarded(own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]) -> dict[str, str]:
    """Addresses of servers that want the password, in both forms of a URL."""
    postgres, valkey = own_postgres(), own_valkey()
    with redis.Redis.from_url(valkey.url) as client:
        client.config_set("requirepass", PASSWORD)
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE shop SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
        access = postgres.data_dir / "data" / "pg_hba.conf"
        access.write_text("host all shop 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        connection.execute("SELECT pg_reload_conf()")
    urls = {
        "DATABASE_URL": postgres.url.replace("postgres@", f"shop:{ENCODED}@"),
        "REDIS_URL": valkey.url.replace("redis://", f"redis://:{ENCODED}@"),
    }

    def refused() -> bool:
        try:
            psycopg.connect(urls["DATABASE_URL"].replace("S3cr3t", "other")).close()
        except psycopg.OperationalError:
            return True
        return False

    eventually(refused)  # the file has been read again
    from outbox import schema

    schema.upgrade(urls["DATABASE_URL"], "consumer")
    return urls


def test_o_95_the_command_never_shows_a_password(guarded: dict[str, str], tmp_path: Path) -> None:
    def wrong(name: str) -> dict[str, str]:
        return guarded | {name: guarded[name].replace("S3cr3t", "S3cr3tWRONG")}

    def down(name: str) -> dict[str, str]:
        head, _, tail = guarded[name].rpartition(":")
        return guarded | {name: f"{head}:1/{tail.partition('/')[2]}"}

    def malformed(name: str) -> dict[str, str]:
        return guarded | {name: guarded[name].replace("127.0.0.1:", "127.0.0.1:x")}

    cases = {
        "all is well": (guarded, "consumer wallet started", 0),
        "wrong password of PostgreSQL": (wrong("DATABASE_URL"), "password authentication failed", 0),
        "wrong password of Redis": (wrong("REDIS_URL"), "invalid username-password pair", 0),
        "PostgreSQL is down": (down("DATABASE_URL"), "Connection refused", 0),
        "Redis is down": (down("REDIS_URL"), "Connection refused", 0),
        "not PostgreSQL's address": (guarded | {"DATABASE_URL": f"postgres//shop:{ENCODED}@h"}, "DATABASE_URL: is not", 1),
        "not Redis' address": (malformed("REDIS_URL"), "REDIS_URL: is not", 1),
        "no TLS there": (
            guarded | {"REDIS_URL": guarded["REDIS_URL"].replace("redis:", "rediss:")}, "consumer wallet waits", 0,
        ),
    }  # fmt: skip

    def run(case: str) -> tuple[int, str, str]:
        environment, until, code = cases[case]
        return _says(environment, tmp_path / case.replace(" ", "_"), until, stop=code == 0)

    with ThreadPoolExecutor(4) as pool:
        for (case, (_, until, code)), (status, output, line) in zip(cases.items(), pool.map(run, cases), strict=True):
            assert until in output, (case, output)
            assert status == code, (case, output)
            assert "S3cr3t" not in output + line, (case, output)
