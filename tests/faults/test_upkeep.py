"""Many processes look after the same tables at once: nobody waits for nobody for long, and no deadlock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from consumer.ledger import Ledger
from outbox import schema as schemas
from outbox.retention import drop_old
from outbox.retry import Stop
from outbox.store import Store
from tests.faults.chaos import Bench
from tests.waiting import eventually, lasting

#: Sessions that have been waiting for a lock for longer than anybody may hold one that others need, and all sessions.
_SAMPLES = """
    SELECT count(*) FILTER (WHERE EXISTS (
               SELECT FROM pg_locks l WHERE l.pid = s.pid AND waitstart < clock_timestamp() - interval '200 ms')), count(*)
    FROM pg_stat_activity s WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(500)
def test_o_42_five_relays_and_five_cleaners_do_not_pile_up(bench: Bench) -> None:
    """Ten seconds instead of five minutes, at the case's 50 events/s; but the cleaners do not rest, and nothing is kept, so
    that there is as much to drop and to make as there can be. So somebody always waits for some milliseconds, and what is
    counted are those who wait for longer."""
    stop = Stop()
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # shown by the test
                failures.append(error)

        threads.append(threading.Thread(target=guarded))
        threads[-1].start()

    with ExitStack() as stack:
        stack.callback(lambda: [thread.join(20) for thread in threads])
        stack.callback(stop.set)
        bench.fill(5_000)
        relays = [
            bench.relay(partition_rows=1000, check_seconds=0.1, trim_seconds=0.2, stream_keep_seconds=0)
            for _ in range(5)
        ]
        for relay in relays:
            stack.callback(relay.stop)
            run(relay.run)
        for _ in range(5):
            run(lambda: _clean(bench, stop))
        eventually(lambda: bench.one("SELECT count(*) FROM public.outbox_batch") > 0, 20)
        before = bench.one(_DEADLOCKS)
        samples, until, due = [], time.monotonic() + lasting(10, 300), time.monotonic()
        while time.monotonic() < until:
            samples.append(bench.one(_SAMPLES))
            if time.monotonic() >= due:
                due += 1
                bench.write(50)
                bench.fill(1000)  # one partition more
            time.sleep(0.05)
        assert failures == []
        # One moment may show them all on a busy machine; a pile stays.
        assert sum(waiting > 2 for waiting, _ in samples) <= len(samples) / 20
        assert max(sessions for _, sessions in samples) <= 11 + len(threads)
        eventually(lambda: set(bench.outbox()) <= set(bench.ids()), 20)
    bench.db.execute("SELECT pg_stat_force_next_flush()")
    assert bench.one(_DEADLOCKS) == before
    assert failures == []


_DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def _clean(bench: Bench, stop: Stop) -> None:
    """What relays and consumers do every minute, without a pause, on a connection of its own."""
    store, ledger = Store(), Ledger("ledger")
    with schemas.connect(bench.database_url, "cleaner", autocommit=True) as connection:
        while not stop.is_set():
            store.make_partitions(connection, 1000, 3)
            if newest := store.newest(connection):
                drop_old(store, connection, newest.rest, newest.seq, 0)
            ledger.make_partitions(connection, 7, 4)
            ledger.remember(connection, 86_400, {"b": (int(time.time()), 0), "a": (None, 0)})
            before = ledger.needed_since(connection, 0)
            ledger.drop_partition(connection, before)
            ledger.delete_old(connection, before, 1000)
            time.sleep(0.01)


def test_the_sample_sees_a_session_that_waits(bench: Bench) -> None:
    with psycopg.connect(bench.database_url) as held, psycopg.connect(bench.database_url) as waits:
        held.execute("LOCK TABLE public.outbox")
        thread = threading.Thread(target=lambda: waits.execute("LOCK TABLE public.outbox"))
        thread.start()
        eventually(lambda: bench.one(_SAMPLES)[0] == 1)
        held.rollback()
        thread.join(10)
