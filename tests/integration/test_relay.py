"""The relay between a real PostgreSQL and a real Valkey: what reaches the streams, and from where it goes on."""

from __future__ import annotations

import logging
import random
import secrets
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from statistics import median
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

from outbox import record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer
from outbox.errors import SettingsError, StaleRelay, TransportError, TransportUnavailable
from outbox.relay import Counts, Relay
from outbox.store import Connection, Store, Window
from outbox.telemetry import Measurement, Published, StreamBehind, StreamFailed
from outbox.transport import Marker, Part, StreamTransport
from outbox.transport.base import stream_of
from tests.faults.chaos import TOPIC, Bench, drain, version_order
from tests.waiting import eventually, stops_within


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


# --- rounds ---


def test_counts_of_a_round(bench: Bench) -> None:
    relay = bench.relay(batch_rows=4)
    assert relay.run_once() == Counts()
    bench.write(10)
    assert relay.run_once() == Counts(sealed=10, published=10)
    assert relay.run_once() == Counts()
    bench.redis.delete(bench.key())
    relay._check_due = 0
    assert relay.run_once() == Counts(repaired=10)


def test_everything_of_an_event_reaches_the_wire_exactly(bench: Bench) -> None:
    raw = bytes(range(256))
    full = bench.event(
        key="é:{}",
        version=2**63 - 1,
        id=uuid.UUID(int=7),
        payload=raw,
        content_type="application/octet-stream",
        time=datetime(2026, 2, 3, 4, 5, 6, 789012, UTC),
        source="/bank/é",
        headers={"traceparent": "00-1", "tenant": "ü"},
    )
    plain = bench.event(key=None, version=None, payload={"amount": 10**30, "text": "é\u0000"})
    with bench.db.transaction():
        record(bench.db, full, plain)
    drain(bench.relay())
    first, second = (fields for _, fields in bench.redis.xrange(bench.key()))
    assert first == {
        b"data": raw,
        b"id": str(uuid.UUID(int=7)).encode(),
        b"type": b"credited",
        b"subject": "é:{}".encode(),
        b"version": b"9223372036854775807",
        b"datacontenttype": b"application/octet-stream",
        b"time": b"2026-02-03T04:05:06.789012Z",
        b"source": "/bank/é".encode(),
        b"traceparent": b"00-1",
        b"tenant": "ü".encode(),
    }
    label = bench.transport().markers([TOPIC])[TOPIC].label.encode()  # type: ignore[union-attr]
    assert second == {b"data": plain.data, b"id": str(plain.id).encode(), b"type": b"credited", b"batch": label}
    assert label.startswith(b"1:")


def test_a_new_relay_goes_on_where_the_last_one_was(bench: Bench) -> None:
    for _ in range(3):
        bench.write(5)
        assert drain(bench.relay(batch_rows=2)) == Counts(sealed=5, published=5)
    assert bench.ids() == bench.outbox()


def test_a_sealed_batch_that_nobody_published_is_published(bench: Bench) -> None:
    """As when a relay dies between the two."""

    class Unreachable(StreamTransport):
        def publish(self, parts: Sequence[Any]) -> Any:
            raise TransportUnavailable("gone", "gone")

    bench.write(5)
    with pytest.raises(TransportUnavailable):
        bench.relay(transport=Unreachable(bench.redis, bench.prefix)).run_once()
    assert bench.one("SELECT sum(events) FROM public.outbox_batch") == 5
    assert bench.length() == 0
    assert drain(bench.relay()) == Counts(repaired=5)
    assert bench.ids() == bench.outbox()


def test_two_relays_of_which_one_seals_the_other_stands_by(bench: Bench) -> None:
    first, second = bench.relay(batch_rows=5), bench.relay(batch_rows=5)
    drain(first), drain(second)
    bench.write(5)
    drain(first)
    bench.write(5)
    assert second.run_once().standing_by  # it believes that the next batch is number 1
    assert bench.length() == 5
    drain(second), drain(first)
    assert bench.ids() == bench.outbox()


def test_nothing_of_the_outbox_is_updated_or_deleted_and_little_wal_is_written(
    own_postgres: Callable[..., PostgresServer], redis_url: str, prefix: str
) -> None:
    url = own_postgres(settings={"autovacuum": "off", "full_page_writes": "off"}).url
    schemas.upgrade(url, "outbox")
    with Bench(url, redis_url, prefix) as bench:
        relay = bench.relay()
        drain(relay)
        bench.fill(20_000)
        before = bench.one("SELECT pg_current_wal_insert_lsn()")
        assert drain(relay).published == 20_000
        written = bench.one("SELECT pg_current_wal_insert_lsn() - %s::pg_lsn", before)
        assert written < 64 * 20_000, written
        bench.db.execute("SELECT pg_stat_force_next_flush()")
        touched = "SELECT sum(n_tup_upd + n_tup_del), sum(n_tup_ins) FROM pg_stat_user_tables WHERE relname ~ '^outbox_(def|[0-9])'"
        assert bench.one(touched) == (0, 20_000)
        assert bench.ids() == bench.outbox()


# --- running and stopping ---


def test_run_publishes_until_stop(bench: Bench) -> None:
    relay = bench.relay()
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        ids = bench.write(3)
        eventually(lambda: bench.ids() == ids)
    finally:
        relay.stop()
        thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("load", [False, True], ids=["idle", "under load"])
def test_sigterm_ends_the_command_within_two_seconds(bench: Bench, load: bool) -> None:
    if load:
        bench.fill(100_000)

    def working() -> subprocess.Popen[bytes]:
        process, before = bench.start(OUTBOX_BATCH_ROWS="20" if load else "1000"), bench.length()
        eventually(bench.relays_connected)
        if load:
            eventually(lambda: bench.length() > before)
        return process

    assert stops_within(2, working)
    if load:
        assert 0 < bench.length() < 100_000  # it was in the middle of it
        sealed = bench.one("SELECT sum(events) FROM public.outbox_batch")
        assert bench.length() == sealed  # what was sealed was also published


# --- catching up ---


def delete_marker(bench: Bench) -> None:
    bench.redis.delete(f"{bench.key()}:relay")


def delete_stream(bench: Bench) -> None:
    bench.redis.delete(bench.key())


def delete_both(bench: Bench) -> None:
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")


def remake_stream(bench: Bench) -> None:
    """A consumer that finds its group gone makes it again."""
    bench.redis.delete(bench.key())
    bench.redis.xgroup_create(bench.key(), "group", id="0", mkstream=True)


def break_marker(bench: Bench) -> None:
    bench.redis.hset(f"{bench.key()}:relay", "batch", "nonsense")


@pytest.mark.parametrize("lose", [delete_marker, delete_stream, delete_both, remake_stream, break_marker])
@pytest.mark.parametrize("fresh", [False, True], ids=["same relay", "new relay"])
def test_whatever_is_lost_is_published_again(bench: Bench, lose: Callable[[Bench], None], fresh: bool) -> None:
    relay = bench.relay(batch_rows=3)
    bench.write(10)
    drain(relay)
    lose(bench)
    later = bench.write(2)
    relay = bench.relay(batch_rows=3) if fresh else relay
    relay._check_due = 0
    drain(relay)
    assert list(dict.fromkeys(bench.ids())) == bench.outbox()
    assert bench.ids()[-2:] == later
    relay._check_due = 0
    assert relay.run_once() == Counts()


def test_a_loss_is_found_by_the_next_publish_too(bench: Bench) -> None:
    relay = bench.relay(check_seconds=60)
    bench.write(5)
    drain(relay)
    remake_stream(bench)
    bench.write(5)
    relay.run_once()  # the compare-and-set refuses, and asks for a look
    drain(relay)
    assert bench.ids() == bench.outbox()


def test_an_older_marker_is_gone_on_from(bench: Bench) -> None:
    """As after a failover to a replica that was behind: stream and marker of an earlier moment."""
    relay = bench.relay(batch_rows=3)
    bench.write(6)
    drain(relay)
    stream, marker = bench.redis.dump(bench.key()), bench.redis.dump(f"{bench.key()}:relay")
    bench.write(6)
    drain(relay)
    bench.redis.restore(bench.key(), 0, stream, replace=True)
    bench.redis.restore(f"{bench.key()}:relay", 0, marker, replace=True)
    relay._check_due = 0
    assert drain(relay) == Counts(repaired=6)
    assert bench.ids() == bench.outbox()


def test_a_stream_of_the_wrong_type_holds_no_other_back(bench: Bench) -> None:
    seen: list[Measurement] = []
    relay = bench.relay(observer=seen.append, check_seconds=60)
    bench.redis.set(bench.key("bad"), "x")
    for _ in range(3):
        bench.write(2, topic="bad")
        bench.write(2, topic="good")
        assert relay.run_once().behind == 1
    assert bench.ids("good") == bench.outbox("good")
    assert bench.redis.get(bench.key("bad")) == b"x"
    assert {m.stream for m in seen if isinstance(m, StreamFailed)} == {"bad"}
    bench.redis.delete(bench.key("bad"))
    relay._check_due = 0
    drain(relay)
    assert bench.ids("bad") == bench.outbox("bad")
    assert any(isinstance(m, StreamBehind) and m.stream == "bad" for m in seen)


def test_o_48_script_flush(own_valkey: Callable[..., ValkeyServer], database_url: str) -> None:
    server = own_valkey()
    with Bench(database_url, server.url) as bench:
        relay = bench.relay()
        for number in range(6):
            bench.write(3)
            bench.redis.script_flush()
            drain(relay)
            assert bench.length() == 3 * (number + 1)
        server.kill()
        server.start()  # without persistence: all is lost, the script too
        bench.write(2)
        eventually(lambda: drain(relay) and bench.length() == 20, ignoring=(TransportUnavailable,))
        assert bench.ids() == bench.outbox()


# --- lanes ---


def test_lanes_keep_each_key_in_order_and_cannot_be_changed(bench: Bench) -> None:
    for number in range(40):
        bench.write(key=f"k{number % 8}", topic="pay")
    drain(bench.relay(lanes={"pay": 3}, batch_rows=7))
    lanes = {f"pay:{lane}": bench.entries(f"pay:{lane}") for lane in range(3)}
    assert sum(map(len, lanes.values())) == 40
    for stream, entries in lanes.items():
        for key, versions in version_order(entries).items():
            assert stream_of("pay", key, 3) == stream
            assert versions == sorted(versions)
    bench.redis.delete(*map(bench.key, lanes))
    bench.write(key="k1", topic="pay")
    for changed in ({"pay": 2}, {}):
        with pytest.raises(SettingsError, match="OUTBOX_LANES: topic pay is spread over 3 lanes"):
            bench.relay(lanes=changed).run_once()
    drain(bench.relay(lanes={"pay": 3}))
    for stream, entries in lanes.items():
        assert [e["id"] for e in bench.entries(stream)][: len(entries)] == [e["id"] for e in entries]
    assert sum(bench.length(f"pay:{lane}") for lane in range(3)) == 41
    assert {bench.redis.hget(bench.key(stream) + ":relay", "lanes") for stream in lanes} == {b"3"}


# --- epochs ---


def test_an_unknown_marker_opens_a_new_epoch_and_the_older_relay_refuses(bench: Bench, empty_database_url: str) -> None:
    """PostgreSQL went back: a copy of the database before the last batches, and the original still alive."""
    bench.write(4)
    old = bench.relay()
    drain(old)
    schemas.upgrade(empty_database_url, "outbox")
    with Bench(empty_database_url, bench.redis_url, bench.prefix) as restored:
        ids = restored.write(3)
        drain(restored.relay())
        assert restored.one("SELECT max(epoch) FROM public.outbox_epoch") == 2
        assert set(ids) <= set(bench.ids())
        assert bench.ids()[-3:] == ids
        length = bench.length()
        bench.write(2)
        old._check_due = 0
        with pytest.raises(StaleRelay):
            drain(old)
        assert bench.length() == length
        more = restored.write(2)
        drain(restored.relay())
        assert bench.ids()[length:] == more


def test_one_epoch_for_a_timeline_however_many_relays_see_it(bench: Bench) -> None:
    store = Store()
    assert not store.follow_timeline(bench.db)
    bench.db.execute("UPDATE public.outbox_epoch SET timeline = timeline + 1")
    relays = [bench.relay() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Relay._load, relays))
    assert {relay._epoch for relay in relays} == {2}
    assert bench.one("SELECT count(*), count(DISTINCT timeline) FROM public.outbox_epoch") == (2, 2)


def test_a_server_that_does_not_say_its_timeline_begins_no_epoch(bench: Bench) -> None:
    role = f"relay_{secrets.token_hex(4)}"
    bench.db.execute(f"CREATE ROLE {role}; GRANT SELECT, INSERT ON public.outbox_epoch TO {role}")
    bench.db.execute("UPDATE public.outbox_epoch SET timeline = timeline + 1")
    try:
        bench.db.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_walfile_name(pg_lsn) FROM PUBLIC")
        bench.db.execute(f"SET ROLE {role}")
        assert Store.timeline(bench.db) is None
        assert not Store().follow_timeline(bench.db)
        Store().open_epoch(bench.db, 2)
        bench.db.execute("RESET ROLE")
        assert bench.one("SELECT epoch, timeline FROM public.outbox_epoch ORDER BY epoch DESC LIMIT 1") == (2, None)
        assert Store().follow_timeline(bench.db), "it says so again, and nobody knows what was in between"
    finally:
        bench.db.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_postgresql_lost_is_reported_once_and_no_more_than_was_looked_at(
    bench: Bench, empty_database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay._LOOKED_AT", 3)

    class Full(StreamTransport):
        refusals = 2

        def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
            self.refusals -= 1
            return [TransportUnavailable("full", "OOM")] if self.refusals >= 0 else super().publish(parts)

    lost = bench.write(5)
    drain(bench.relay())
    schemas.upgrade(empty_database_url, "outbox")
    with Bench(empty_database_url, bench.redis_url, bench.prefix) as restored, caplog.at_level(logging.ERROR):
        restored.write(2)
        relay = restored.relay(transport=Full.from_url(bench.redis_url, prefix=bench.prefix))
        for _ in range(2):
            restored.write(1)
            with pytest.raises(TransportUnavailable):
                drain(relay)
        drain(relay)
        drain(restored.relay())
        assert set(restored.ids()) == {*lost, *restored.outbox()}
    (said,) = [r for r in caplog.records if getattr(r, "action", "") == "events_lost"]
    assert (said.stream, said.events, said.ids) == (TOPIC, 3, lost[:1:-1])  # type: ignore[attr-defined]
    assert "at least 3" in said.getMessage()


def test_an_outbox_too_large_to_look_for_lost_events_does_not_hold_up_publishing(
    bench: Bench, empty_database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.relay._LOOKING_SECONDS", 0.3)
    bench.write(2)
    bench.write(2, topic="other")
    drain(bench.relay())
    schemas.upgrade(empty_database_url, "outbox")
    with Bench(empty_database_url, bench.redis_url, bench.prefix) as restored, caplog.at_level(logging.ERROR):
        ids = restored.write(2) + restored.write(1, topic="other")
        relay, looked = restored.relay(), list[float]()

        def known(connection: Connection, published: Sequence[uuid.UUID]) -> set[uuid.UUID]:
            looked.append(time.monotonic())
            connection.execute("SELECT pg_sleep(60)")
            return set()

        monkeypatch.setattr(relay._store, "known", known)
        drain(relay)
        assert time.monotonic() - looked[0] < 30
        assert set(ids) <= {*restored.ids(), *restored.ids("other")}
    assert len(looked) == 1
    said = [r for r in caplog.records if getattr(r, "action", "") == "events_lost"]
    assert {(r.stream, r.events) for r in said} == {(TOPIC, None), ("other", None)}  # type: ignore[attr-defined]


# --- acceptance cases ---


def test_o_01_late_commits_of_lower_positions(bench: Bench) -> None:
    """Half as many rounds of the eight writers as in the case."""
    relay, late = bench.relay(), bench.connect()
    held = bench.write(connection=late)
    first = bench.write()
    drain(relay)
    assert bench.ids() == first
    late.commit()
    drain(relay)
    assert bench.ids() == first + held

    def write(seed: int) -> None:
        chance = random.Random(seed)
        with psycopg.connect(bench.database_url) as connection:
            for _ in range(100):
                bench.write(connection=connection, key=f"w{seed}")
                time.sleep(chance.random() * 0.05)  # the hold
                connection.commit()

    running = threading.Thread(target=relay.run)
    running.start()
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(8)]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    try:
        eventually(lambda: bench.length() >= 802)
    finally:
        relay.stop()
        running.join()
    assert sorted(bench.ids()) == sorted(bench.outbox())
    assert len(bench.ids()) == 802
    assert_all_applied(bench)


def assert_all_applied(bench: Bench) -> None:
    """A consumer applies every event of the outbox once, and nothing is pending or dead."""
    assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))
    assert bench.one("SELECT count(*) FROM public.processed_messages") == len(bench.outbox())
    assert bench.dead() == 0


def test_o_02_rolled_back_positions_do_not_stall(bench: Bench) -> None:
    relay, writer = bench.relay(), bench.connect()
    for _ in range(5):
        bench.write()
        for _ in range(10):
            bench.write(connection=writer)
            writer.rollback()
    bench.db.execute("SELECT nextval('public.outbox_position_seq') FROM generate_series(1, 1000)")
    last = bench.write()
    drain(relay)
    assert bench.ids() == bench.outbox()
    assert bench.ids()[-1:] == last
    assert len(bench.ids()) == 6
    assert_all_applied(bench)


@pytest.mark.parametrize("with_event", [False, True], ids=["unrelated", "with its own event"])
def test_o_03_an_open_transaction_delays_nobody_else(bench: Bench, with_event: bool) -> None:
    relay, forgotten = bench.relay(), bench.connect()
    forgotten.execute("SELECT pg_current_xact_id()")
    held = bench.write(connection=forgotten) if with_event else []
    for _ in range(5):
        ids = bench.write()
        drain(relay)
        assert bench.ids()[-1:] == ids
    assert len(bench.ids()) == 5
    forgotten.commit()
    drain(relay)
    assert bench.ids()[5:] == held


def test_o_08_order_after_a_heap_shuffle(bench: Bench) -> None:
    bench.fill(500, keys=1)
    bench.db.execute("UPDATE public.outbox SET source = 'x' WHERE position % 2 = 0 AND position <= 250")
    bench.db.execute("VACUUM public.outbox_default")
    heap = [row[0] for row in bench.db.execute("SELECT position FROM public.outbox ORDER BY ctid")]
    assert heap != sorted(heap)
    relay = bench.relay(batch_rows=100)
    drain(relay)
    assert [int(entry["version"]) for entry in bench.entries()] == list(range(1, 501))
    bench.redis.delete(bench.key())  # published again by another statement
    relay._check_due = 0
    eventually(lambda: drain(relay) and bench.length() >= 500)
    assert [int(entry["version"]) for entry in bench.entries()] == list(range(1, 501))


@pytest.mark.long
def test_o_56_a_long_snapshot_leaves_the_lag_alone(bench: Bench) -> None:
    """Shortened from five minutes to a thousand events."""
    reading = bench.connect()
    reading.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reading.execute("SELECT count(*) FROM public.outbox, pg_current_xact_id()")
    relay = bench.relay()
    thread = threading.Thread(target=relay.run)
    thread.start()
    lags = []
    try:
        for number in range(1, 201):
            bench.write(5)
            committed = time.monotonic()
            eventually(lambda wanted=5 * number: bench.length() == wanted)
            lags.append(time.monotonic() - committed)
    finally:
        relay.stop()
        thread.join()
    assert sorted(lags)[-2] < 2
    assert max(lags[-50:]) < 2
    assert median(lags[-50:]) < 3 * median(lags[:50])
    assert bench.one("SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE relname ~ '^outbox'") == 0


@pytest.mark.long
def test_o_57_idle_polls_use_the_indexes(bench: Bench) -> None:
    """300,000 published rows instead of two million, in partitions of 100,000; forty polls instead of a minute of them.

    The relay prepares nothing, so that no plan can become a generic one. `test_consumer.py` has the ledger's look-ups.
    """
    relay = bench.relay(partition_rows=100_000, batch_rows=10_000)
    drain(relay)  # makes partitions
    bench.fill(300_000)
    bench.db.execute("ANALYZE public.outbox")
    connection, store = bench.connect(autocommit=True), Store()
    assert drain(relay).published == 300_000
    newest = store.newest(connection)
    assert newest is not None
    window = Window(prev=newest.snap, snap=newest.snap, after=newest.last, open=False)

    def scans() -> Any:
        bench.db.execute("SELECT pg_stat_clear_snapshot()")
        return bench.one(
            "SELECT sum(seq_scan) FROM pg_stat_user_tables "
            "WHERE relname ~ '^outbox_(def|[0-9])' AND pg_relation_size(relid) > 65536"  # an empty one is cheapest read whole
        )

    def buffers() -> Any:
        connection.execute("SELECT pg_stat_force_next_flush()")
        return bench.one(
            "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit) FROM pg_statio_user_tables "
            "WHERE relname ~ '^outbox'"
        )

    store.advance(connection, window)
    # What filling and draining did is counted first, so that only the polls are counted after.
    relay._connection.execute("SELECT pg_stat_force_next_flush()")  # type: ignore[union-attr]
    before, blocks = scans(), buffers()
    polls = 20
    for _ in range(polls):
        window = store.advance(connection, window)
        assert not window.open
    assert buffers() - blocks < 50 * polls
    assert scans() == before
    for _ in range(polls):
        assert relay.run_once() == Counts()
    relay._connection.execute("SELECT pg_stat_force_next_flush()")  # type: ignore[union-attr]
    assert scans() == before


def test_o_30_nothing_counts_as_published_while_redis_is_away(
    own_valkey: Callable[..., ValkeyServer], database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay runs through an outage of refusals and one of time-outs, each until it has tried several times."""
    caplog.set_level(logging.DEBUG, "outbox")
    server = own_valkey(settings={"appendonly": "yes"})

    def tries() -> int:
        return sum(getattr(record, "action", "") == "relay_waits" for record in caplog.records)

    with Bench(database_url, server.url) as bench:
        seen: list[Measurement] = []

        def published() -> int:
            return sum(m.events for m in seen if isinstance(m, Published))

        relay = bench.relay(observer=seen.append, redis_timeout_seconds=0.2)
        drain(relay)
        server.stop()
        bench.write(5)
        with pytest.raises(TransportUnavailable):  # a round says so itself
            relay.run_once()
        thread = threading.Thread(target=relay.run, daemon=True)
        thread.start()
        try:
            eventually(lambda: tries() >= 5)
            assert published() == 0
            server.start()
            eventually(lambda: bench.ids() == bench.outbox(), ignoring=(redis.RedisError,))
            eventually(lambda: published() == 5)
            server.pause()
            try:
                before = tries()
                bench.write(5)
                eventually(lambda: tries() >= before + 3)
                assert published() == 5
            finally:
                server.resume()
            eventually(lambda: set(bench.ids()) == set(bench.outbox()))
        finally:
            relay.stop()
            thread.join(10)
        assert not thread.is_alive()
        assert bench.ids() == bench.outbox()
        assert_all_applied(bench)


def test_a_marker_never_says_more_than_the_stream_holds(bench: Bench) -> None:
    relay = bench.relay()
    bench.write(3)
    drain(relay)
    marker = bench.transport().markers([TOPIC])[TOPIC]
    newest = Store().newest(bench.db)
    assert newest is not None
    assert marker == Marker(1, newest.seq, newest.token)


def test_a_relay_that_may_not_make_partitions_publishes_all_the_same(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"relay_{secrets.token_hex(4)}"
    bench.db.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    try:
        bench.db.execute(f"""
            GRANT SELECT ON public.outbox, public.outbox_default, public.outbox_schema_version TO {role};
            GRANT SELECT, INSERT ON public.outbox_batch, public.outbox_stream, public.outbox_epoch TO {role};
            GRANT SELECT, INSERT, UPDATE ON public.outbox_group TO {role};
            GRANT SELECT, INSERT, UPDATE, DELETE ON public.outbox_pause TO {role}
        """)
        bench.write(5)
        parts = urlsplit(bench.database_url)
        address = parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}").geturl()
        relay = bench.relay(database_url=address)
        with caplog.at_level(logging.WARNING):
            assert drain(relay) == Counts(sealed=5, published=5)
        assert [r.action for r in caplog.records if hasattr(r, "action")] == ["partitions_denied"]  # type: ignore[attr-defined]
        relay.close()
    finally:
        bench.db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("refused", [0, 1], ids=["the first", "the second"])
def test_of_batches_that_go_out_together_none_overtakes_a_refused_one(
    database_url: str, own_valkey: Callable[..., ValkeyServer], refused: int
) -> None:
    """The server is full for one of them: the rest is refused as well, and the relay backs off, not only blames."""
    server = own_valkey()

    class Full(StreamTransport):
        together: ClassVar[list[int]] = []

        def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
            self.together.append(len(parts))
            if len(parts) != 2 or self.together.count(2) > 1:
                return super().publish(parts)
            answers = super().publish(parts[:refused])
            bench.redis.config_set("maxmemory", 1)
            try:
                return answers + super().publish(parts[refused:])
            finally:
                bench.redis.config_set("maxmemory", 0)

    with Bench(database_url, server.url) as bench:
        relay = bench.relay(transport=Full(redis.Redis.from_url(server.url)), batch_rows=3)
        ids = bench.write(30)
        with pytest.raises(TransportUnavailable, match="OOM|memory"):
            relay.run_once()
        assert bench.ids() == ids[: 3 + 3 * refused]
        eventually(lambda: relay.run_once() == Counts())
        assert bench.ids() == ids
        assert 2 in Full.together
