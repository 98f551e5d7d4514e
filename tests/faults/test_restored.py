"""PostgreSQL goes back: a stand-by that was behind is promoted, a backup is restored to a point in time, a dump into another
cluster, a snapshot of the disk comes up again. The servers, stand-bys and archives are real."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from consumer.reconcile import reconcile
from outbox import Event, record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, postgres_servers
from outbox.errors import StaleRelay
from outbox.relay import Counts, Relay
from outbox.store import Store
from outbox.telemetry import EventsLost
from pytest_outbox import missing
from tests.faults.chaos import Bench, drain, ledger, version_order
from tests.faults.proxy import Proxy, port_of, through
from tests.faults.standby import PRIMARY, base_backup, copied, folder, hold_back, promote
from tests.waiting import eventually

OTHER = "others"  # a topic whose first batch comes when the stand-by is behind

#: Copies of a server need the programs beside it.
BINARIES = {name: path for name, path in postgres_servers().items() if os.access(path / "pg_basebackup", os.X_OK)}


@pytest.fixture(params=sorted(BINARIES) or [""])
def binaries(request: pytest.FixtureRequest) -> Path:
    return BINARIES.get(request.param) or missing("no pg_basebackup here")


@pytest.fixture
def place(
    binaries: Path,
    own_postgres: Callable[..., PostgresServer],
    own_valkey: Callable[..., ValkeyServer],
    database_url: str,
) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, binaries, own_postgres, own_valkey().url, database_url)


class Place:
    """An outbox on a server that can be copied, at an address that can be turned to a copy; its consumer's database is on
    another server, which does not go back."""

    def __init__(
        self,
        stack: ExitStack,
        binaries: Path,
        start: Callable[..., PostgresServer],
        redis_url: str,
        ledger_url: str,
        **settings: str,
    ) -> None:
        self._stack, self._start, self._redis_url, self.binaries = stack, start, redis_url, binaries
        self.primary = start(binaries=binaries, settings=PRIMARY | settings)
        schemas.upgrade(self.primary.url, "outbox")
        self.proxy = stack.enter_context(Proxy(port_of(self.primary.url)))
        self.old = self.bench(self.primary.url)
        self.consumer = self.bench(ledger_url)

    def bench(self, url: str) -> Bench:
        return self._stack.enter_context(Bench(url, self._redis_url))

    def standby(self, name: str = "standby") -> PostgresServer:
        return self._start(data_dir=base_backup(self.primary, self.binaries, name), binaries=self.binaries)

    def relay(self, **options: Any) -> Relay:
        """A relay at the address that is turned."""
        return self.old.relay(database_url=through(self.proxy, self.primary.url), batch_rows=3, **options)

    def turn(self, server: PostgresServer) -> Bench:
        """Turn the address to another server."""
        self.proxy.redirect(port_of(server.url))
        return self.bench(server.url)

    def extra(self, outbox: Bench) -> set[str]:
        """What `consumer reconcile` finds applied and not recorded."""
        with outbox.connect() as recorded, self.consumer.connect() as processed:
            now = Store().now(recorded)
            since = now - timedelta(days=1)
            return {str(i) for i in reconcile(ledger, recorded, processed, since=since, now=now).extra}


def drained(relay: Relay) -> None:
    """`drain`, with a relay that has to connect anew first."""
    eventually(lambda: drain(relay), ignoring=(psycopg.OperationalError,))


def records(caplog: pytest.LogCaptureFixture, action: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "action", None) == action]


def once(*ids: list[str]) -> Counter[str]:
    return Counter(dict.fromkeys([event_id for some in ids for event_id in some], 1))


@pytest.mark.long
def test_a_standby_that_was_behind_is_promoted(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """What it has is applied once, what it lacks is reported, and the old primary's relay publishes nothing more."""
    old, consumer, seen = place.old, place.consumer, list[Any]()
    relay = place.relay(observer=seen.append)
    kept = old.write(10)
    drain(relay)
    assert consumer.consume() == once(kept)
    standby = place.standby()
    kept += old.write(4)  # recorded on both, published while the stand-by does not see the seals
    pending = old.connect()
    kept_back = old.write(2, connection=pending)
    hold_back(place.primary, standby)
    pending.commit()  # the stand-by has the rows and not the commit
    lost = old.write(7)
    lost_elsewhere = old.write(2, topic=OTHER)
    drain(relay)
    assert consumer.consume() == once(kept, kept_back, lost)
    never_published = old.write(3)
    highest = old.one("SELECT max(position) FROM public.outbox")
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    assert new.outbox() == kept
    after = new.write(6) + new.write(5, key="B")
    after_elsewhere = new.write(3, topic=OTHER)
    # Positions of the lost events are used again, or jumped over: nothing rests on it.
    assert new.one("SELECT min(position) FROM public.outbox WHERE event_id = %s", after[0]) <= highest + 32
    place.relay()._load()  # begins the epoch and dies
    with caplog.at_level(logging.WARNING):
        drained(relay)
    assert consumer.consume() == once(kept, kept_back, lost, after)
    assert set(after_elsewhere) <= set(new.ids(OTHER))
    assert not set(never_published) & set(new.ids())
    assert new.one("SELECT max(epoch) FROM public.outbox_epoch") == 2
    reported = {record.stream: (record.events, set(record.ids)) for record in records(caplog, "events_lost")}
    assert reported == {"accounts": (9, {*kept_back, *lost}), OTHER: (2, set(lost_elsewhere))}
    assert {(m.stream, m.events) for m in seen if isinstance(m, EventsLost)} == {("accounts", 9), (OTHER, 2)}
    assert place.extra(new) == {*kept_back, *lost}
    # The old primary comes back, with producers and a relay that nobody told.
    place.primary.start()
    stale = place.bench(place.primary.url)
    stale.write(4)
    stale.write(4, topic="third")
    before = [new.ids(stream) for stream in ("accounts", OTHER, "third")]
    for _ in range(2):
        with pytest.raises(StaleRelay, match=r"point this relay at the new primary.*outbox new-epoch"):
            stale.relay().run_once()
    assert [new.ids(stream) for stream in ("accounts", OTHER, "third")] == before
    after += new.write(4)
    drained(relay)
    assert consumer.consume() == once(kept, kept_back, lost, after)
    assert len(records(caplog, "events_lost")) == 2


@pytest.mark.long
def test_a_failover_under_load(place: Place) -> None:
    """Four writers, two relays, one of which is killed, and a stand-by that stops receiving somewhere in between."""
    old, consumer, stop = place.old, place.consumer, threading.Event()
    address = through(place.proxy, place.primary.url)

    def produce(number: int) -> None:
        versions = count(1)
        while not stop.is_set():
            with suppress(psycopg.OperationalError), psycopg.connect(address) as connection:
                while not stop.wait(0.01):  # relays with small batches have to keep up
                    with connection.transaction():
                        record(connection, *(
                            Event(topic="accounts", type="credited", key=f"k{number}", version=next(versions), payload={})
                            for _ in range(number)
                        ))  # fmt: skip

    writers = [threading.Thread(target=produce, args=(number,)) for number in range(1, 5)]
    environment = {"DATABASE_URL": address, "OUTBOX_BATCH_ROWS": "20"}
    relays = [old.start(**environment) for _ in range(2)]
    try:
        for writer in writers:
            writer.start()
        standby = place.standby()
        eventually(lambda: old.length() > 200)
        hold_back(place.primary, standby)
        lost = old.write()
        eventually(lambda: set(lost) <= set(old.ids()), 30)
        relays[0].kill()
        place.primary.kill()
        promote(standby)
        new = place.turn(standby)
        survived = new.outbox()
        eventually(lambda: len(new.outbox()) > len(survived) + 200, 30, ignoring=(psycopg.OperationalError,))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    recorded = set(new.outbox())
    eventually(lambda: recorded <= set(new.ids()), 30)
    effects = consumer.consume()
    assert max(effects.values()) == 1
    assert recorded <= effects.keys()
    assert effects.keys() - recorded == place.extra(new) >= set(lost)
    assert new.one("SELECT max(epoch) FROM public.outbox_epoch") == 2
    assert new.one("SELECT count(*) = count(DISTINCT position) FROM public.outbox")
    inherited = {event_id: place for place, event_id in enumerate(new.outbox())}
    since = [e for e in new.entries() if inherited.get(e["id"], -1) >= len(survived)]
    assert all(versions == sorted(versions) for versions in version_order(since).values())


@pytest.mark.long
def test_a_standby_that_lacks_nothing_is_promoted_and_the_old_primary_comes_back(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing tells the old primary that it is not the one but the new one's timeline."""
    old, consumer, relay = place.old, place.consumer, place.relay()
    ids = old.write(8)
    drain(relay)
    standby = place.standby()
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):  # a stand-by is waited for, not published from
        place.bench(standby.url).relay().run_once()
    hold_back(place.primary, standby)
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    ids += new.write(5)
    drained(relay)
    assert new.one("SELECT max(epoch) FROM public.outbox_epoch") == 2
    length = new.length()
    assert length == 13, "nothing is published again"
    place.primary.start()
    stale = place.bench(place.primary.url)
    stale.write(5)
    with pytest.raises(StaleRelay):
        stale.relay().run_once()
    assert new.length() == length
    ids += new.write(5)
    with caplog.at_level(logging.WARNING):
        drained(relay)
    assert consumer.consume() == once(ids)
    assert new.ids() == ids
    assert not records(caplog, "events_lost")
    assert new.one("SELECT max(epoch) FROM public.outbox_epoch") == 2


@pytest.mark.long
def test_a_ledger_that_goes_back_with_the_outbox_gets_its_events_again(place: Place) -> None:
    """Outbox and ledger are in one database. The stand-by has every batch, but not what consumers committed, and Redis holds
    their acknowledgements."""
    old, relay = place.old, place.relay()
    schemas.upgrade(place.primary.url, "consumer")
    ids = old.write(4)
    drain(relay)
    assert old.consume() == once(ids)
    relay._groups_due = 0
    drain(relay)  # sees that these are acknowledged
    standby = place.standby()
    ids += old.write(8)
    drain(relay)
    hold_back(place.primary, standby)
    assert old.consume() == once(ids)
    relay._groups_due = 0
    drain(relay)
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    assert new.effects() == once(ids[:4])
    drained(relay)
    assert new.length() == 12 + 8, "what was acknowledged before is not published again"
    ids += new.write(2)
    drained(relay)
    assert new.consume() == once(ids)


@pytest.mark.long
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "seals at once"])
def test_a_pooler_turns_to_the_new_primary_and_the_relay_does_not_notice(
    place: Place, looks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection goes on, and what it remembers, snapshots too, is the old primary's."""
    old, relay, consumer = place.old, place.relay(), place.consumer
    ids = old.write(6)
    drain(relay)
    consumer.consume()
    standby = place.standby()
    hold_back(place.primary, standby)
    for _ in range(50):  # transactions of others, which the stand-by does not have
        old.db.execute("SELECT pg_current_xact_id()")
    drain(relay)
    lost = old.write(4)
    drain(relay)
    consumer.consume()
    for _ in range(50):
        old.db.execute("SELECT pg_current_xact_id()")
    drain(relay)
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    relay._connection = new.connect(autocommit=True)
    ids += new.write(6)  # by transaction ids that the old primary's snapshots take for finished
    if not looks:
        for _ in range(200):
            new.db.execute("SELECT pg_current_xact_id()")
        ids += new.write(3)
    relay._check_due, relay._groups_due = (0 if looks else math.inf), 0
    with caplog.at_level(logging.ERROR):
        drained(relay)
    assert new.one("SELECT coalesce(max(acked), 0) FROM public.outbox_group") <= 2, (
        "what another timeline's batches were"
    )
    assert new.one("SELECT max(epoch) FROM public.outbox_epoch") == 2
    assert consumer.consume() == once(ids, lost)
    assert place.extra(new) == set(lost)
    assert new.one("SELECT count(*) = max(seq) FROM public.outbox_batch")


@pytest.mark.long
def test_a_relay_dies_after_a_seal_that_the_standby_has(place: Place) -> None:
    """Sealed on the primary, published or not, and brought to an end from the stand-by; transactions that were open at
    the seal are committed, lost, or rolled back by then."""
    old, consumer = place.old, place.consumer
    committed, lost = old.connect(), old.connect()
    late = old.write(2, connection=committed)
    never = old.write(2, connection=lost)
    relay = place.relay()
    ids = old.write(3)
    drain(relay)
    standby = place.standby()
    ids += old.write(7)
    relay._load()
    published, unpublished = relay._seal_next(), relay._seal_next()
    assert published is not None
    assert unpublished is not None
    relay._publish([published], Counts())
    committed.commit()
    hold_back(place.primary, standby)
    lost.commit()
    old.write(2)
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    assert sorted(new.outbox()) == sorted(ids + late)
    more = new.write(3)
    drained(place.relay())
    assert new.ids() == [*ids, *late, *more]
    assert not set(never) & set(new.ids())
    assert consumer.consume() == once(ids, late, more)


@pytest.mark.long
def test_a_relay_that_commits_synchronously_publishes_nothing_that_the_standby_lacks(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Producers do not wait for the stand-by, the relay does: nothing that was published is lost by a failover."""
    old, consumer = place.old, place.consumer
    ids = old.write(3)
    drain(place.relay())
    standby = place.standby()
    old.db.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    old.db.execute("ALTER SYSTEM SET synchronous_commit = 'local'")
    old.db.execute("SELECT pg_reload_conf()")
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'outbox relay'"
    process = old.start(PGOPTIONS="-c synchronous_commit=on")
    ids += old.write(3)
    eventually(lambda: old.length() == 6)
    hold_back(place.primary, standby)
    old.write(4)
    eventually(lambda: old.one(waits) == 1)
    assert old.length() == 6
    place.primary.kill()
    assert old.length() == 6
    process.kill()
    promote(standby)
    new = place.turn(standby)
    ids += new.write(4)
    with caplog.at_level(logging.WARNING):
        drained(place.relay())
    assert consumer.consume() == once(ids)
    assert not records(caplog, "events_lost")


@pytest.mark.long
def test_a_consumers_database_fails_over_to_a_standby_that_was_behind(
    binaries: Path,
    own_postgres: Callable[..., PostgresServer],
    own_valkey: Callable[..., ValkeyServer],
    database_url: str,
) -> None:
    """Only the ledger goes back, with its effects; what it acknowledged is trimmed. `reconcile --repair` brings it back."""
    redis_url, primary = own_valkey().url, own_postgres(binaries=binaries, settings=PRIMARY)
    schemas.upgrade(primary.url, "consumer")
    with Bench(database_url, redis_url) as outbox, Bench(primary.url, redis_url) as before:
        relay = outbox.relay(batch_rows=3, trim_seconds=0.001, stream_keep_seconds=0)
        ids = outbox.write(6) + outbox.write(2, type="limited", key="C")
        drain(relay)
        before.consume()
        standby = own_postgres(data_dir=base_backup(primary, binaries, "standby"), binaries=binaries)
        hold_back(primary, standby)
        lost = outbox.write(5)
        newest = outbox.write(3, type="limited", key="C")
        drain(relay)
        assert before.consume() == once(ids[:6], lost)
        eventually(lambda: relay.run_once() and outbox.length() <= 1)
        primary.kill()
        promote(standby)
        with Bench(standby.url, redis_url) as after:
            assert after.consume() == once(ids[:6]), "nobody knows yet"
            repair = ("consumer", "reconcile", "tests.faults.chaos:ledger", "--grace", "0")
            environment = {"OUTBOX_DATABASE_URL": database_url}
            assert after.start(*repair, "--repair", **environment).wait() == 3
            assert after.consume() == once(ids[:6], lost)
            versions = outbox.one("SELECT max(version) FROM public.outbox WHERE event_id = %s", newest[-1])
            assert after.one("SELECT version FROM public.limits WHERE key = 'C'") == versions
            assert after.start(*repair, **environment).wait() == 0


@pytest.mark.long
def test_a_backup_is_restored_to_a_point_in_time(
    place: Place, own_postgres: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Twice, from one archive: both restores begin the same timeline, and the second is still the newer one."""
    old, consumer, primary = place.old, place.consumer, place.primary
    archive = folder(primary, "archive")
    primary.settings |= {"archive_mode": "on", "archive_command": f"cp %p {archive}/%f"}
    primary.restart()
    old = place.turn(primary)
    relay = place.relay()
    kept = old.write(5)
    drained(relay)
    backup = base_backup(primary, place.binaries, "backup")
    again = copied(backup, "again")
    kept += old.write(5)
    drained(relay)
    assert consumer.consume() == once(kept)
    unpublished = old.write(4)
    old.db.execute("SELECT pg_create_restore_point('before')")
    lost = old.write(6)
    drained(relay)
    assert consumer.consume() == once(kept, unpublished, lost)
    segment = old.one("SELECT pg_walfile_name(pg_switch_wal())")
    eventually(lambda: (archive / segment).exists(), 20)
    primary.stop()
    target = {
        "restore_command": f"cp {archive}/%f %p", "recovery_target_name": "before", "recovery_target_action": "promote",
        "archive_mode": "off",
    }  # fmt: skip

    def restored(directory: Path) -> Bench:
        (directory / "data" / "standby.signal").rename(directory / "data" / "recovery.signal")
        server = own_postgres(data_dir=directory, binaries=place.binaries, settings=target)
        bench = place.turn(server)
        eventually(lambda: not bench.one("SELECT pg_is_in_recovery()"), 20)
        return bench

    new = restored(backup)
    assert new.outbox() == kept + unpublished
    after = new.write(5)
    with caplog.at_level(logging.WARNING):
        drained(relay)
        assert consumer.consume() == once(kept, unpublished, lost, after)
        assert [(r.events, set(r.ids)) for r in records(caplog, "events_lost")] == [(6, set(lost))]
        assert place.extra(new) == set(lost)
        caplog.clear()
        newer = restored(again)
        assert newer.outbox() == kept + unpublished
        last = newer.write(5)
        drained(relay)
    assert newer.one("SELECT count(DISTINCT timeline) FROM public.outbox_epoch") == 2
    assert newer.one("SELECT max(epoch) FROM public.outbox_epoch") == 3
    assert consumer.consume() == once(kept, unpublished, lost, after, last)
    assert place.extra(newer) == {*lost, *after}
    with pytest.raises(StaleRelay):
        new.relay().run_once()


@pytest.mark.long
def test_a_snapshot_of_the_disk_is_refused_until_a_person_says_so(place: Place) -> None:
    """PostgreSQL itself does not know that it is an old copy: its timeline is the one that it had."""
    old, consumer, relay = place.old, place.consumer, place.relay()
    ids = old.write(4)
    drain(relay)
    standby = place.standby()
    hold_back(place.primary, standby)
    place.primary.kill()
    promote(standby)
    new = place.turn(standby)
    lost = new.write(3)
    drained(relay)
    assert consumer.consume() == once(ids, lost)
    standby.kill()
    place.primary.start()
    chosen = place.turn(place.primary)
    ids += chosen.write(3)
    with pytest.raises(StaleRelay):
        drained(relay)
    assert chosen.start("outbox", "new-epoch", "--yes").wait() == 0
    assert chosen.one("SELECT max(epoch) FROM public.outbox_epoch") == 3
    drained(relay)
    assert consumer.consume() == once(ids, lost)
    assert place.extra(chosen) == set(lost)


def test_what_is_acknowledged_of_another_timeline_is_not_taken_for_ours(
    database_url: str,
    empty_database_url: str,
    own_valkey: Callable[..., ValkeyServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While Redis is too full to publish, batches are sealed whose numbers a lost, acknowledged batch had."""
    monkeypatch.setattr("outbox.relay._CATCH_UP_SECONDS", 0.0005)  # a batch a turn
    server = own_valkey(settings={"maxmemory": "100mb"})
    with Bench(database_url, server.url) as old, Bench(empty_database_url, server.url) as new:
        old.write(10)
        drain(old.relay(batch_rows=1))
        old.consume()
        schemas.upgrade(empty_database_url, "outbox")
        ids = new.write(6)
        relay = new.relay(batch_rows=1, max_memory_share=0.5, trim_seconds=0.001, check_seconds=0.01)
        old.redis.config_set("maxmemory", 1_000_000)
        for _ in range(10):
            relay.run_once()
        assert new.one("SELECT count(*) FROM public.outbox_batch") == 6
        assert not new.one("SELECT sum(acked) FROM public.outbox_group")
        old.redis.config_set("maxmemory", 0)
        for _ in range(20):
            relay.run_once()
        assert set(new.ids()) >= set(ids)


def test_a_dump_restored_into_another_cluster_loses_nothing(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]
) -> None:
    programs = postgres_servers().get("postgres18")
    if programs is None or not os.access(programs / "pg_dump", os.X_OK):
        missing("no pg_dump here")
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
