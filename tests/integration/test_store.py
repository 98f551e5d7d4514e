"""Windows between snapshots, sealed batches and partitions, on a real PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from outbox import schema as schemas
from outbox.embedded import PostgresServer
from outbox.envelope import ROW
from outbox.errors import AlreadySealed
from outbox.store import BEGINNING, POSITION, Batch, Connection, Store, StreamPart, Window
from tests.catalog import existing_partitions
from tests.faults.chaos import TOPIC, Bench
from tests.waiting import eventually

START = Window(BEGINNING, BEGINNING, 0, False)
MIB = 1 << 20
EVENT_ID = ROW.index("event_id")


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url) as made:
        yield made


class Reader:
    """Reads window after window as the relay does, without sealing; keeps the batches."""

    def __init__(self, bench: Bench, rows: int = 1000, size_bytes: int = MIB) -> None:
        self.connection, self.store = bench.connect(autocommit=True), Store()
        self.rows, self.size_bytes, self.window = rows, size_bytes, START
        self.batches: list[tuple[Batch, list[str]]] = []

    def read(self) -> list[str]:
        """Ids of everything new."""
        return [event_id for page in self.pages() for event_id in page]

    def pages(self) -> list[list[str]]:
        pages = []
        while True:
            if not self.window.open:
                self.window = self.store.advance(self.connection, self.window)
                if not self.window.open:
                    return pages
            window = self.window
            rows, done = self.store.page(self.connection, window, self.rows, self.size_bytes)
            assert rows or done
            last = rows[-1][POSITION] if rows else window.after + 1
            batch = Batch(
                len(self.batches) + 1, "", 1, window.prev, window.snap, window.after, last, done, max(len(rows), 1)
            )
            self.window = batch.rest
            if rows:
                pages.append([row[EVENT_ID] for row in rows])
                self.batches.append((batch, pages[-1]))
            if done:
                return pages

    def check_again(self) -> None:
        """Every batch reads as it did the first time."""
        for batch, ids in self.batches:
            assert [row[EVENT_ID] for row in self.store.read_again(self.connection, batch, TOPIC)] == ids


class Explaining:
    """A connection that counts the buffers of each statement, by running it once more under EXPLAIN."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.buffers: list[int] = []

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        text = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.as_string(self.connection)
        row = self.connection.execute(text, parameters).fetchone()  # type: ignore[arg-type]
        assert row is not None
        plan = row[0][0]["Plan"]
        self.buffers.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
        return self.connection.execute(statement, parameters)


# --- windows ---


def test_a_late_commit_is_read_when_it_commits_and_never_twice(bench: Bench) -> None:
    reader = Reader(bench)
    late = bench.connect()
    before = bench.write()
    held = bench.write(connection=late)
    after = bench.write()
    assert reader.read() == before + after
    assert reader.read() == []
    late.commit()
    assert reader.read() == held
    assert reader.read() == []
    reader.check_again()  # the first batch spans the position of the late one


def test_rolled_back_rows_and_subtransactions(bench: Bench) -> None:
    reader, writer = Reader(bench), bench.connect()
    bench.write(3, writer)
    writer.rollback()
    kept = bench.write(connection=writer)
    with writer.transaction():
        kept += bench.write(connection=writer)
        with pytest.raises(ZeroDivisionError), writer.transaction():
            bench.write(connection=writer)
            raise ZeroDivisionError
    assert reader.read() == []
    writer.commit()
    assert reader.read() == kept
    reader.check_again()


def test_a_prepared_transaction_is_read_when_it_is_committed(
    own_postgres: Callable[..., PostgresServer], redis_url: str
) -> None:
    url = own_postgres(settings={"max_prepared_transactions": "4"}).url
    schemas.upgrade(url, "outbox")
    with Bench(url, redis_url) as bench:
        reader, writer = Reader(bench), bench.connect()
        writer.tpc_begin(writer.xid(1, "held", "test"))
        held = bench.write(connection=writer)
        writer.tpc_prepare()
        others = bench.write(2)
        assert reader.read() == others
        writer.tpc_commit()
        assert reader.read() == held
        reader.check_again()


def test_interleaved_transactions_are_read_exactly_once_in_position_order_of_their_window(bench: Bench) -> None:
    """Ten writers that begin, write and end in every order; compared with what committed."""
    reader, expected, seen = Reader(bench, rows=7), [], []
    writers = [bench.connect() for _ in range(10)]
    open_events: dict[int, list[str]] = {}
    for step in range(200):
        number = step * 7 % 10
        writer = writers[number]
        if step % 3 == 0 and number in open_events:
            if step % 4 == 0:
                writer.rollback()
            else:
                writer.commit()
                expected += open_events[number]
            del open_events[number]
        else:
            open_events.setdefault(number, []).extend(bench.write(1 + step % 3, writer))
        if step % 5 == 0:
            seen += reader.read()
    for writer in writers:
        writer.rollback()
    seen += reader.read()
    assert len(expected) > 50
    assert sorted(seen) == sorted(expected)
    reader.check_again()


def test_sealed_rows_stay_whatever_happens_since(bench: Bench) -> None:
    reader, late = Reader(bench, rows=4), bench.connect()
    bench.write()
    bench.write(3, late)
    bench.write(9)
    reader.read()
    late.rollback()
    bench.write(3, late)
    bench.write(5)
    reader.read()
    late.commit()
    reader.read()
    bench.db.execute("VACUUM FREEZE public.outbox")
    bench.db.execute("CLUSTER public.outbox_default USING outbox_default_pkey")
    assert sum(len(ids) for _, ids in reader.batches) == 18
    reader.check_again()


def test_uncommitted_bulk_rows_are_not_walked(bench: Bench) -> None:
    bulk, reader = bench.connect(), Reader(bench)
    bench.write()
    assert len(reader.read()) == 1
    bulk.execute(
        "INSERT INTO public.outbox (event_id, topic, type, data) "
        "SELECT gen_random_uuid(), %s, 'bulk', '' FROM generate_series(1, 30000)",
        (TOPIC,),
    )
    explaining = Explaining(reader.connection)
    for _ in range(3):  # the bulk's transaction is beyond what prev knows: the upper bound keeps it out
        reader.store.advance(explaining, reader.window)  # type: ignore[arg-type]
    bench.write()
    assert len(reader.read()) == 1
    for _ in range(3):  # and now it is one that prev knows to be running
        reader.store.advance(explaining, reader.window)  # type: ignore[arg-type]
    assert max(explaining.buffers) < 20, explaining.buffers
    bulk.commit()
    assert len(reader.read()) == 30_000


# --- bounds ---


def test_pages_are_bounded_in_rows(bench: Bench) -> None:
    bench.write(25)
    assert [len(page) for page in Reader(bench, rows=10).pages()] == [10, 10, 5]


def test_a_full_last_page_is_followed_by_an_empty_one(bench: Bench) -> None:
    bench.write(20)
    reader = Reader(bench, rows=10)
    assert [len(page) for page in reader.pages()] == [10, 10]
    assert reader.read() == []


def test_pages_end_with_the_event_that_reaches_the_bytes(bench: Bench) -> None:
    bench.write(7, payload="x" * 398)  # 400 bytes with its quotes
    assert [len(page) for page in Reader(bench, size_bytes=1000).pages()] == [3, 3, 1]


def test_one_huge_event_is_a_page_by_itself(bench: Bench) -> None:
    bench.write(payload="x" * 500_000)
    bench.write(2)
    bench.write(payload="x" * 500_000)
    bench.write(1)
    assert [len(page) for page in Reader(bench, size_bytes=1024).pages()] == [1, 3, 1]


# --- sealing ---


def test_of_two_that_seal_one_number_the_second_is_refused(bench: Bench) -> None:
    bench.write(2)
    store, first, second = Store(), bench.connect(autocommit=True), bench.connect(autocommit=True)
    window = store.advance(first, START)
    batch = Batch(1, "", 1, window.prev, window.snap, window.after, window.after + 2, True, 2)
    sealed = store.seal(first, batch, [StreamPart(TOPIC, 1, 2)])
    with pytest.raises(AlreadySealed):
        store.seal(second, batch, [StreamPart("other", 1, 2)])
    assert store.newest(second) == sealed
    assert store.token(second, 1) == sealed.token
    assert [head.stream for head in store.heads(second)] == [TOPIC]  # nothing of the refused one


@pytest.mark.parametrize("stale", [1, 2])
def test_a_number_that_retention_has_deleted_is_not_sealed_again(bench: Bench, stale: int) -> None:
    """By a relay that was frozen for as long as that: the window that it has read lies in batches that others sealed."""
    store, connection = Store(), bench.connect(autocommit=True)
    window = store.advance(connection, START)
    for number in (1, 2, 3):
        store.seal(connection, Batch(number, "", 1, window.prev, window.snap, number - 1, number, True, 1), [])
    assert store.delete_batches(connection, 3, 0, 10) == 2
    with pytest.raises(AlreadySealed):
        store.seal(connection, Batch(stale, "", 1, window.prev, window.snap, stale - 1, stale, True, 1), [])
    assert store.oldest_seq(connection) == 3


# --- partitions ---


def partitions(bench: Bench) -> list[str]:
    return [n for n in existing_partitions(bench.db, "public", "outbox") if n != "outbox_default"]


def test_partitions_are_made_ahead_and_rows_of_the_default_one_moved(bench: Bench) -> None:
    bench.write(30)
    reader = Reader(bench)
    reader.read()
    rows = bench.one("SELECT array_agg((position, xid::text, event_id)::text ORDER BY position) FROM public.outbox")
    assert Store().make_partitions(bench.db, 20, 2) == 4
    assert partitions(bench) == ["outbox_0_20", "outbox_20_40", "outbox_40_60", "outbox_60_80"]
    assert bench.one("SELECT count(*) FROM ONLY public.outbox_default") == 0
    assert (
        bench.one("SELECT array_agg((position, xid::text, event_id)::text ORDER BY position) FROM public.outbox")
        == rows
    )
    reader.check_again()
    assert reader.read() == []  # what was moved is not new
    assert Store().make_partitions(bench.db, 20, 2) == 0


def test_partitions_are_made_while_writers_write(bench: Bench) -> None:
    stop, failures, written = threading.Event(), [], []

    def write() -> None:
        try:
            with psycopg.connect(bench.database_url) as connection:
                while not stop.is_set():
                    written.extend(bench.write(3, connection))
                    connection.commit()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(3)]
    reader, seen = Reader(bench), []
    for thread in threads:
        thread.start()

    def enough() -> bool:
        Store().make_partitions(bench.db, 500, 1)
        seen.extend(reader.read())
        return len(partitions(bench)) > 4

    try:
        eventually(enough, 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    seen.extend(reader.read())
    assert not failures
    assert sorted(seen) == sorted(written)
    reader.check_again()


def test_a_partition_waits_for_an_open_writer_and_keeps_nobody_waiting(bench: Bench) -> None:
    writer = bench.connect()
    bench.write(connection=writer)
    assert Store().make_partitions(bench.db, 10, 2) == 0
    bench.db.execute("SET statement_timeout = '2s'")
    bench.write()
    writer.commit()
    assert Store().make_partitions(bench.db, 10, 2) == 3


def test_a_reader_that_waits_for_the_move_of_rows_loses_none(bench: Bench) -> None:
    """The reader has its list of partitions when it comes to the lock on the default one, which is then emptied."""
    ids = bench.write(3)
    mover, reader, seen = bench.connect(), Reader(bench), []
    pid = reader.connection.info.backend_pid
    assert Store().make_partitions(mover, 10, 1) == 2  # not committed
    thread = threading.Thread(target=lambda: seen.extend(reader.read()))
    thread.start()
    eventually(lambda: bench.one("SELECT cardinality(pg_blocking_pids(%s)) > 0", pid))
    mover.commit()
    thread.join()
    seen += reader.read()
    assert seen == ids


def test_a_writer_that_waits_for_a_new_partition_is_not_refused(bench: Bench) -> None:
    """Also where no row is moved: the writer has chosen the default partition when it comes to the lock."""
    mover, writer, failures = bench.connect(), bench.connect(), []

    def write() -> None:
        try:
            bench.write(connection=writer)
            writer.commit()
        except psycopg.Error as error:
            failures.append(error)

    assert Store().make_partitions(mover, 10, 1) == 2  # not committed
    thread = threading.Thread(target=write)
    thread.start()
    eventually(lambda: bench.one("SELECT cardinality(pg_blocking_pids(%s)) > 0", writer.info.backend_pid))
    mover.commit()
    thread.join()
    assert not failures
    assert bench.one("SELECT count(*) FROM public.outbox_0_10") == 1


@pytest.mark.parametrize("name", ["public", "TenantA", "té", "s" * 63])
def test_relays_are_counted_by_their_schema(database_url: str, name: str) -> None:
    store, other = Store(name), Store("another")
    with schemas.connect(database_url, store.application) as connection:
        assert store.relays(connection) == 1
        assert other.relays(connection) == 0
