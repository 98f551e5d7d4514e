"""A consumer on real streams: groups, pending deliveries, clients, lanes; and end to end with the relay."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from psycopg import sql
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.utils import HIREDIS_AVAILABLE

from consumer import Consumer, Envelope, Order
from consumer.ledger import Ledger
from consumer.process import Outcome
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, Writer, record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.errors import SettingsError
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.telemetry import Claimed, Measurement
from outbox.transport import StreamTransport
from outbox.transport.base import stream_of
from tests.catalog import existing_partitions
from tests.integration.test_consumer import TABLES, TOPIC, credit, entry, wallet
from tests.waiting import eventually

APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY, PARKED, HELD = Outcome
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


def counting(name: str) -> Consumer:
    """Every event is an effect of the consumer of this name."""
    consumer = Consumer(name, topics=[TOPIC])

    @consumer.on("credited", raw=True)
    def count(event: Envelope, connection: Any) -> None:
        connection.execute("INSERT INTO public.effects VALUES (%s, %s, 50)", (name, event.id))

    return consumer


def test_o_19_two_groups_on_one_stream(site: Site) -> None:
    """The relay trims all the while, and keeps what the group that stands still has not acknowledged."""
    relay = site.relay(stream_keep_seconds=0, trim_seconds=0.001)
    site.worker(counting("mailer")).run_once()  # its group is there, and then it is stopped
    site.record(*f5())
    relay.run_once()
    assert drain(site.worker(counting("ledger")), 5) == {APPLIED: 5}
    for _ in range(3):
        relay.run_once()
        assert site.redis.xlen(site.key()) == 5
    assert drain(site.worker(counting("mailer")), 5) == {APPLIED: 5}
    for query in (
        "SELECT consumer, count(*) FROM public.effects GROUP BY 1 ORDER BY 1",
        "SELECT consumer, count(*) FROM public.processed_messages GROUP BY 1 ORDER BY 1",
    ):
        assert site.sql.execute(query).fetchall() == [("ledger", 5), ("mailer", 5)]
    assert (site.pending("ledger"), site.pending("mailer")) == (0, 0)
    eventually(lambda: relay.run_once() and site.redis.xlen(site.key()) <= 1)  # the newest one stays


def test_o_21_no_read_is_noack_and_no_ack_precedes_its_commit(site: Site) -> None:
    """As the server saw it: MONITOR; and what another session saw in the ledger at the time of each XACK."""
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
    early: list[int] = []
    with site.redis.monitor() as monitor:
        worker = site.worker(consumer)
        ack = worker._transport.ack

        def watched(group: str, deliveries: Any) -> None:
            ids = [delivery.fields[b"id"].decode() for delivery in deliveries]
            query = "SELECT count(*) FROM public.processed_messages WHERE event_id = ANY (%s::uuid[])"
            row = site.sql.execute(query, (ids,)).fetchone()
            assert row is not None
            early.append(len(ids) - row[0])
            ack(group, deliveries)

        worker._transport.ack = watched  # type: ignore[method-assign]
        drain(worker, 5)
        site.redis.echo("end")
        for command in monitor.listen():
            if "ECHO" in command["command"]:
                break
            if site.key() in command["command"]:
                commands.append(command["command"])
    assert len(failed) == 2
    assert early
    assert not any(early)
    assert (site.effects, site.pending()) == (5, 0)
    assert any(command.startswith("XREADGROUP") for command in commands)
    assert not [command for command in commands if "NOACK" in command]
    acked = [len(command.split()) - 3 for command in commands if command.startswith("XACK")]
    assert sum(acked) == 5  # none for a failed one, and none twice


def test_two_databases_with_odd_schema_names_and_an_empty_search_path(
    empty_database_url: str, database_url: str, redis_url: str, prefix: str
) -> None:
    """The outbox in one database, the consumer in another; both sides make partitions, and the relay looks after groups."""
    theirs, ours = (f"{url}?options=-c%20search_path%3D" for url in (empty_database_url, database_url))
    schemas.upgrade(theirs, "outbox", schema="Té x")
    schemas.upgrade(ours, "consumer", schema="Sel ect")
    addresses = {"redis_url": redis_url, "key_prefix": prefix}
    writer = Writer(schema="Té x")
    relay = Relay(
        RelaySettings(
            database_url=theirs, schema_name="Té x", partition_rows=1000, stream_keep_seconds=0, trim_seconds=0.001,
            **addresses,
        )
    )  # fmt: skip
    seen: list[Any] = []
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("credited")(lambda event, session: seen.append(event.payload))
    consumer.on("renamed", order=Order.LATEST)(lambda event, session: seen.append(event.payload))
    settings = ConsumerSettings(database_url=ours, schema_name="Sel ect", block_seconds=0.02, **addresses)
    worker = Worker(consumer, settings)
    try:
        for number in range(3):
            with psycopg.connect(theirs) as connection:
                renamed = event("renamed", f"r{number}", key="A", version=number)
                writer.record(connection, event("credited", number), renamed, event("renamed", "unversioned"))
            relay.run_once()
            assert drain(worker, 3) == {APPLIED: 2, DEAD: 1}
        assert seen == [0, "r0", 1, "r1", 2, "r2"]
        with redis.Redis.from_url(redis_url) as client:
            eventually(lambda: relay.run_once() and client.xlen(f"{prefix}{{{TOPIC}}}") <= 1)  # trimmed
    finally:
        relay.close()
        worker.close()
    with psycopg.connect(empty_database_url) as connection:
        assert len(existing_partitions(connection, "Té x", "outbox")) > 2
        assert connection.execute('SELECT count(*), min(name) FROM "Té x".outbox_group').fetchone() == (1, "ledger")
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    with psycopg.connect(database_url) as connection:
        assert len(existing_partitions(connection, "Sel ect", "processed_messages")) > 2
        for table, rows in (("processed_messages", 9), ("dead_letters", 3), ("entity_versions", 1)):
            count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("Sel ect", table))
            assert connection.execute(count).fetchone() == (rows,)
            # The template's tables are there too, and stay empty.
            count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("public", table))
            assert connection.execute(count).fetchone() == (0,)


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


@pytest.mark.parametrize("threshold", [None, 5], ids=["nothing prepared", "prepared"])
def test_o_74_a_column_is_added_under_running_processes(
    site: Site, threshold: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even one statement fails: a batch of which one does would run again event by event, and say so."""
    caplog.set_level(logging.INFO, "consumer")
    relay, worker = site.relay(), site.worker(wallet(), prepare_threshold=threshold)

    def change(version: int) -> list[Event]:
        return [
            event("credited", {"amount": "1.00"}, key="A"),
            event("renamed", {"name": f"n{version}"}, key="A", version=version),
        ]

    for version in range(12):  # so often that statements are prepared, where they are
        site.record(*change(version))
        relay.run_once()
        assert drain(worker, 2) == {APPLIED: 2}
    for table in ("outbox", "outbox_batch", "processed_messages", "entity_versions", "dead_letters"):
        site.sql.execute(f"ALTER TABLE public.{table} ADD COLUMN note text")
    site.record(*f5(), *change(12))
    assert relay.run_once().published == 7
    assert worker.run_once() == {APPLIED: 7}
    assert not [record for record in caplog.records if getattr(record, "action", "") == "one_by_one"]
    assert (site.effects, site.pending()) == (18, 0)
    assert site.count("SELECT balance, name, version FROM public.accounts") == (263, "n12", 12)


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
    seen: list[Measurement] = []
    worker = site.worker(wallet(), process_name="stable", observer=seen.append)
    assert drain(worker, 3) == {APPLIED: 3}
    assert (site.effects, site.pending()) == (3, 0)
    assert sum(m.missing for m in seen if isinstance(m, Claimed)) == 2
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


@pytest.mark.long
def test_o_55_names_of_two_hundred_restarts_do_not_pile_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second process stops cleanly and leaves no name; the others die, every fourth of all with a delivery. Their names
    go when they are long idle, and not while something is pending for them."""
    server = site.addresses["redis_url"]
    site.redis.xgroup_create(site.key(), "ledger", "0", mkstream=True)
    for n in range(200):
        site.add(entry())
        if n % 2:
            worker = site.worker(wallet(), process_name=f"pod-{n}", claim_seconds=3600)
            assert drain(worker, 1).total() >= 1
            worker.stop()
            worker.run()  # only closes
        else:
            there = StreamTransport.from_url(server, prefix=site.addresses["key_prefix"])
            if n % 4:
                there.read("ledger", f"pod-{n}", [TOPIC], 1, 0)
            else:
                site.redis.xgroup_createconsumer(site.key(), "ledger", f"pod-{n}")
            there.close()
    assert names(site) == {f"pod-{n}" for n in range(0, 200, 2)}
    assert site.pending() == 50
    monkeypatch.setattr("consumer.worker._LEFT_SECONDS", 0.05)
    worker = site.worker(wallet(), process_name="ours", claim_seconds=3600)
    eventually(lambda: worker.run_once() is not None and len(names(site)) <= 50 + 1, 20)
    assert names(site) - {"ours"} == {f"pod-{n}" for n in range(2, 200, 4)}
    assert (site.effects, site.pending()) == (150, 50), "nothing pending is lost"
    heir = site.worker(wallet(), process_name="heir")
    eventually(lambda: heir.run_once() is not None and site.effects == 200, 20)
    heir._names_due = 0.0
    eventually(lambda: heir.run_once() is not None and names(site) <= {"ours", "heir"}, 20)
    assert (site.pending(), site.count("SELECT count(*) FROM public.processed_messages")) == (0, 200)


def test_o_55_a_name_stays_as_long_as_something_is_pending_for_it(site: Site) -> None:
    held = entry()
    site.add(held, entry())
    keeps = site.worker(wallet(), process_name="keeps")
    with psycopg.connect(site.addresses["database_url"]) as frozen:
        Ledger("ledger").claim(frozen, [uuid.UUID(held[b"id"].decode())])
        assert keeps.run_once() == {HELD: 1, APPLIED: 1}
        keeps.close()
        assert names(site) == {"keeps"}
        frozen.rollback()
    worker = site.worker(wallet(), process_name="newer")
    assert drain(worker, 1) == {APPLIED: 1}
    worker.close()
    assert (site.effects, site.pending(), names(site)) == (2, 0, {"keeps"})


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
    if parser is _HiredisParser and not HIREDIS_AVAILABLE:
        pytest.skip("hiredis is not installed")
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


def _says(
    command: Sequence[str], environment: dict[str, str], tmp_path: Path, until: str, stop: bool
) -> tuple[int, str, str]:
    """Run a command until it ends, or says `until` and is stopped: exit code, output, command line."""
    tmp_path.mkdir()
    (tmp_path / "shop.py").write_text(
        "from consumer import Consumer\nwallet = Consumer('wallet', topics=['accounts'])\n"
    )
    output = tmp_path / "output"
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("CONSUMER_", "OUTBOX_"))}
    quick = {
        f"{side}_{name}_SECONDS": value
        for side in ("CONSUMER", "OUTBOX")
        for name, value in (("BACKOFF_MAX", "0.05"), ("REDIS_TIMEOUT", "1"))
    }
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=clean | environment | quick | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
            cwd=tmp_path,
            stdout=sink,
            stderr=sink,
        )
    try:
        eventually(lambda: process.poll() is not None or (stop and until in output.read_text()), 40)
        line = Path(f"/proc/{process.pid}/cmdline").read_text() if process.poll() is None else ""
        if stop:
            process.send_signal(signal.SIGTERM)
        return process.wait(20), output.read_text(), line
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
    for branch in ("outbox", "consumer"):
        schemas.upgrade(urls["DATABASE_URL"], branch)  # type: ignore[arg-type]
    return urls


RUN = ("consumer", "run", "shop:wallet", "--log-level", "debug")
RELAY = ("outbox", "relay", "--log-level", "debug")


@pytest.mark.long
def test_o_95_no_command_ever_shows_a_password(guarded: dict[str, str], tmp_path: Path) -> None:
    """Every fault of the addresses that a command uses, with all logs on; what goes on trying is stopped when it says so."""

    def wrong(name: str) -> dict[str, str]:
        return guarded | {name: guarded[name].replace("S3cr3t", "S3cr3tWRONG")}

    def down(name: str) -> dict[str, str]:
        head, _, tail = guarded[name].rpartition(":")
        return guarded | {name: f"{head}:1/{tail.partition('/')[2]}"}

    malformed = guarded["REDIS_URL"].replace("127.0.0.1:", "127.0.0.1:x")
    in_tls = guarded["REDIS_URL"].replace("redis:", "rediss:")
    # What is said, and whether that is the end (with 1) or the process is stopped (and ends with 0).
    of_postgresql = {
        "wrong password of PostgreSQL": (wrong("DATABASE_URL"), "password authentication failed"),
        "PostgreSQL is down": (down("DATABASE_URL"), "Connection refused"),
        "no TLS in PostgreSQL": (
            guarded | {"DATABASE_URL": guarded["DATABASE_URL"] + "?sslmode=require"}, "does not support SSL",
        ),
    }  # fmt: skip
    of_redis = {
        "wrong password of Redis": (wrong("REDIS_URL"), "invalid username-password pair"),
        "Redis is down": (down("REDIS_URL"), "Connection refused"),
        "no TLS in Redis": (guarded | {"REDIS_URL": in_tls}, "waits"),
    }
    not_postgresql = (guarded | {"DATABASE_URL": f"postgres//shop:{ENCODED}@h"}, "DATABASE_URL: is not")
    cases: list[tuple[Sequence[str], str, dict[str, str], str, int]] = []
    for command, started in ((RUN, "consumer wallet started"), (RELAY, "relay started")):
        cases.append((command, "all is well", guarded, started, 0))
        cases += [(command, case, *faulty, 0) for case, faulty in (of_postgresql | of_redis).items()]
        cases.append((command, "not PostgreSQL's address", *not_postgresql, 1))
        cases.append((command, "not Redis' address", guarded | {"REDIS_URL": malformed}, "REDIS_URL: is not", 1))
    for doctor in (("outbox", "doctor"), ("consumer", "doctor", "shop:wallet")):
        for case in ("wrong password of PostgreSQL", "PostgreSQL is down", "wrong password of Redis", "Redis is down"):
            cases.append((doctor, case, *(of_postgresql | of_redis)[case], 1))
    for words in (("outbox", "status"), ("outbox", "replay", "--yes"), ("consumer", "reconcile", "shop:wallet")):
        cases.append((words, "wrong password", *of_postgresql["wrong password of PostgreSQL"], 1))
    cases.append((("outbox", "status"), "wrong password of Redis", *of_redis["wrong password of Redis"], -1))
    for migrate in (("outbox", "migrate"), ("consumer", "migrate")):  # they share all of their code
        cases.append((migrate, "all is well", guarded, "are at revision", -1))
        cases.append((migrate, "wrong password", *of_postgresql["wrong password of PostgreSQL"], 1))
    cases.append((("outbox", "migrate"), "PostgreSQL is down", *of_postgresql["PostgreSQL is down"], 1))
    cases.append((("outbox", "migrate"), "not PostgreSQL's address", *not_postgresql, 1))
    cases.append(((*RUN, "--help"), "help", guarded, "--log-level", -1))
    cases.append(((*RELAY, "--help"), "help", guarded, "--log-level", -1))
    with psycopg.connect(guarded["DATABASE_URL"]) as connection:
        record(connection, event("credited", {"amount": "1.00"}, key="A"))  # so that the relay needs Redis

    def run(number: int) -> tuple[int, str, str]:
        command, _, environment, until, code = cases[number]
        return _says(command, environment, tmp_path / str(number), until, stop=code == 0)

    with ThreadPoolExecutor(4) as pool:
        for case, (status, output, line) in zip(cases, pool.map(run, range(len(cases))), strict=True):
            command, name, _, until, code = case
            assert until in output, (command, name, output)
            assert status == max(code, 0), (command, name, output)
            assert "S3cr3t" not in output + line, (command, name, output)
