"""What the outbox need not keep goes in whole partitions, and nothing else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from outbox import record
from outbox import schema as schemas
from outbox.retention import Dropped, drop_old
from outbox.store import BEGINNING, Batch, Store, Window
from outbox.transport import ListTransport
from tests.catalog import existing_partitions
from tests.faults.chaos import TOPIC, Bench, drain
from tests.waiting import eventually

GROUP = "wallet"
OLD = 3600.0


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        assert Store().make_partitions(made.db, 1000, 3) == 4
        yield made


def partitions(bench: Bench) -> list[str]:
    return existing_partitions(bench.db, "public", "outbox")


def fill(bench: Bench, events: int, *, old: bool = True) -> None:
    bench.fill(events)
    if old:
        age(bench)


def age(bench: Bench) -> None:
    """As if everything had been there for a day."""
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '1 day'")
    bench.db.execute("UPDATE public.outbox_batch SET sealed_at = sealed_at - interval '1 day'")


def acknowledge(bench: Bench, count: int = 100_000) -> int:
    """Let the group read and acknowledge; returns how many."""
    transport = bench.transport()
    transport.open(GROUP, [TOPIC])
    found = transport.read(GROUP, "one", [TOPIC], count, 0.01)
    transport.ack(GROUP, found)
    return len(found)


def relay(bench: Bench, **options: object) -> None:
    """A relay whose every look is due: publishes, looks at the groups, and drops what is old."""
    defaults = {"retention_seconds": 60, "trim_seconds": 0.001, "check_seconds": 0.001, "batch_rows": 100}
    made = bench.relay(**(defaults | {"partition_rows": 1000} | options))
    for _ in range(2):  # the second looks at what the first has published
        drain(made)
        time.sleep(0.002)
    made.close()


def test_published_and_old_goes_whole_partitions_at_a_time(bench: Bench) -> None:
    fill(bench, 2500)
    relay(bench)
    age(bench)
    relay(bench)
    assert partitions(bench)[0:2] == ["outbox_2000_3000", "outbox_3000_4000"]
    assert bench.one("SELECT min(position) FROM public.outbox") == 2000
    assert bench.one("SELECT count(*) FROM public.outbox_batch") == 1, "the newest stays"
    fill(bench, 10, old=False)
    relay(bench)
    assert bench.length() == 2510


def test_what_is_young_stays(bench: Bench) -> None:
    fill(bench, 2500, old=False)
    relay(bench)
    relay(bench)
    assert bench.one("SELECT count(*) FROM public.outbox") == 2500
    assert bench.one("SELECT count(*) FROM public.outbox_batch") == 25


def test_what_a_group_has_not_acknowledged_stays(bench: Bench) -> None:
    acknowledge(bench)
    fill(bench, 3500)
    relay(bench)
    age(bench)
    relay(bench)
    assert bench.one("SELECT count(*) FROM public.outbox") == 3500
    assert acknowledge(bench, 1500) == 1500
    relay(bench)
    relay(bench)
    assert bench.one("SELECT min(position) FROM public.outbox") == 1000
    assert bench.one("SELECT min(seq) FROM public.outbox_batch") <= 15
    acknowledge(bench)
    relay(bench)
    relay(bench)
    assert bench.one("SELECT min(position) FROM public.outbox") == 3000


def test_what_waits_in_a_queue_that_no_consumer_has_opened_stays(bench: Bench) -> None:
    """Redis would have the only copy."""
    fill(bench, 2500)
    bench.db.execute("UPDATE public.outbox SET topic = 'queue/mail', type = 'send'")
    lists = ListTransport.from_url(bench.redis_url, prefix=bench.prefix)
    relay(bench)
    age(bench)
    relay(bench)
    assert bench.one("SELECT min(position) FROM public.outbox") < 1000
    lists.open("mailer", ["queue/mail"])
    while found := lists.read("mailer", "one", ["queue/mail"], 500, 0):
        lists.ack("mailer", found)
    relay(bench)
    assert bench.one("SELECT min(position) FROM public.outbox") == 2000
    lists.close()


def test_what_is_not_published_stays(bench: Bench) -> None:
    """One stream cannot be published to; the other's rows lie between its own."""
    bench.redis.set(bench.key(), "not a stream")
    fill(bench, 2500)
    bench.write(3, topic="other")
    age(bench)
    relay(bench)
    age(bench)
    relay(bench)
    assert bench.length("other") == 3
    assert bench.one("SELECT count(*) FROM public.outbox") == 2503
    bench.redis.delete(bench.key())
    relay(bench)
    relay(bench)
    assert bench.length() == 2500
    assert bench.one("SELECT min(position) FROM public.outbox") == 2000


def test_a_transaction_that_wrote_early_and_commits_late_loses_nothing(bench: Bench) -> None:
    with bench.connect() as late:
        event = bench.event()
        record(late, event)
        fill(bench, 2500)
        relay(bench)
        age(bench)
        begun = time.monotonic()
        relay(bench)
        assert time.monotonic() - begun < 5
        assert partitions(bench)[0] == "outbox_0_1000", "a writer is still in it"
        late.commit()
    assert str(event.id) not in bench.ids()
    relay(bench)
    assert str(event.id) in bench.ids()
    relay(bench)
    assert partitions(bench)[0] == "outbox_2000_3000"


def test_an_uncommitted_position_below_a_dropped_partition_is_not_lost(bench: Bench) -> None:
    """A position was handed out, its row comes when the partition is gone: it goes to the default one."""
    bench.db.execute("SELECT nextval(pg_get_serial_sequence('public.outbox', 'position'))")
    fill(bench, 2500)
    relay(bench)
    age(bench)
    relay(bench)
    assert partitions(bench)[0] == "outbox_2000_3000"
    bench.db.execute("""
        INSERT INTO public.outbox (position, event_id, topic, type, data) OVERRIDING SYSTEM VALUE
        VALUES (1, gen_random_uuid(), 'late', 't', '1')
    """)
    relay(bench)
    assert bench.length("late") == 1


def test_rows_that_never_got_a_partition_are_deleted_little_by_little(
    database_url: str, redis_url: str, prefix: str
) -> None:
    with Bench(database_url, redis_url, prefix) as bench:
        bench.fill(12_000)
        age(bench)
        relay(bench, partition_rows=1_000_000)
        age(bench)
        snap = bench.one("SELECT pg_current_snapshot()::text")
        dropped = [drop_old(Store(), bench.db, Window(snap, snap, 0, False), 1, OLD) for _ in range(4)]
        assert [some.rows for some in dropped] == [5000, 5000, 2000, 0]
        assert dropped[-1] == Dropped([], 0, 0)


def test_o_57_what_never_got_a_partition_is_deleted_by_its_index(
    database_url: str, redis_url: str, prefix: str
) -> None:
    with Bench(database_url, redis_url, prefix) as bench:
        bench.fill(200_000)
        bench.db.execute("ANALYZE public.outbox_default")

        def scans() -> Any:
            bench.db.execute("SELECT pg_stat_force_next_flush()")
            bench.db.execute("SELECT pg_stat_clear_snapshot()")
            return bench.one("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'outbox_default'")

        snap, before = bench.one("SELECT pg_current_snapshot()::text"), scans()
        for _ in range(3):
            assert drop_old(Store(), bench.db, Window(snap, snap, 0, False), 1, 0).rows == 5000
        assert scans() == before


def test_o_58_many_at_once_under_load_drop_each_partition_once(bench: Bench) -> None:
    fill(bench, 3500)
    relay(bench)
    age(bench)
    snap = bench.one("SELECT pg_current_snapshot()::text")
    names: list[str] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(bench.database_url, autocommit=True) as connection:
            while not stop.is_set():
                with connection.transaction():
                    record(connection, bench.event())

    def drop() -> None:
        try:
            with schemas.connect(bench.database_url, "test", autocommit=True) as connection:
                while len(names) < 3 and not stop.is_set():
                    names.extend(drop_old(Store(), connection, Window(snap, snap, 0, False), 10**9, OLD).partitions)
        except BaseException as error:
            failures.append(error)

    writer, droppers = threading.Thread(target=write), [threading.Thread(target=drop) for _ in range(5)]
    for thread in (writer, *droppers):
        thread.start()
    try:
        eventually(lambda: len(names) >= 3 or failures, 20)
    finally:
        stop.set()
        for thread in (writer, *droppers):
            thread.join()
    assert not failures
    assert sorted(names) == ["outbox_0_1000", "outbox_1000_2000", "outbox_2000_3000"]
    relay(bench)
    assert set(bench.outbox()) <= set(bench.ids())


@pytest.mark.long
def test_o_58_a_million_expired_rows_go_while_producers_and_a_relay_work(
    database_url: str, redis_url: str, prefix: str
) -> None:
    """Three quarters of them in partitions, the others in the default one. A write may take a second and not the case's 100 ms:
    the cleaners share this process and its processors with the producer."""
    with Bench(database_url, redis_url, prefix) as bench, ExitStack() as stack:
        assert Store().make_partitions(bench.db, 250_000, 2) == 3
        bench.db.execute("""
            INSERT INTO public.outbox (position, event_id, topic, type, data, created_at) OVERRIDING SYSTEM VALUE
            SELECT i, gen_random_uuid(), 'old', 't', '1', now() - interval '1 day' FROM generate_series(0, 999999) i
        """)
        bench.db.execute("SELECT setval(pg_get_serial_sequence('public.outbox', 'position'), 999999)")
        snap = bench.one("SELECT pg_current_snapshot()::text")
        store, settled = Store(), Window(snap, snap, 0, False)
        batch = Batch(1, "", 1, BEGINNING, snap, 0, 999_999, True, 1_000_000)  # sealed, and in no stream
        store.seal(bench.db, batch, [], store.timeline(bench.db))
        relay = bench.relay(partition_rows=250_000)
        threads = [threading.Thread(target=relay.run)]
        stack.callback(lambda: [thread.join(30) for thread in threads])
        stack.callback(relay.stop)
        threads[0].start()
        ids: list[str] = []
        stop, dropped, failures = threading.Event(), list[Dropped](), list[BaseException]()
        stack.callback(stop.set)

        def clean() -> None:
            try:
                with schemas.connect(database_url, "test", autocommit=True) as connection:
                    while not stop.is_set():
                        dropped.append(drop_old(Store(), connection, settled, 1, OLD))
            except BaseException as error:
                failures.append(error)

        def write(until: Callable[[], bool]) -> float:
            """About 100 events a second; the 99th percentile of the seconds that one takes."""
            took = []
            while not until():
                begun = time.monotonic()
                ids.extend(bench.write(1))
                took.append(time.monotonic() - begun)
                time.sleep(0.01)  # their pace
            return sorted(took)[len(took) * 99 // 100]

        def gone() -> bool:
            return bool(failures) or sum(some.rows + 250_000 * len(some.partitions) for some in dropped) >= 1_000_000

        deadlocks = bench.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        eventually(lambda: "outbox_1000000_1250000" in partitions(bench), 20)
        write(lambda: len(ids) >= 100)
        for _ in range(3):
            threads.append(threading.Thread(target=clean))
            threads[-1].start()
        assert write(gone) < 1
        stop.set()
        threads[-1].join(30)
        assert failures == []
        assert sum(len(some.partitions) for some in dropped) == 3
        assert sum(some.rows for some in dropped) == 250_000
        assert max(some.rows for some in dropped) == 5000
        eventually(lambda: bench.ids() == ids, 20)
        assert bench.outbox() == ids
        assert bench.length("old") == 0
        bench.db.execute("SELECT pg_stat_force_next_flush()")
        assert bench.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == deadlocks
