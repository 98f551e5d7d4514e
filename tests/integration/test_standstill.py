"""What could make consumers stand still: processes that freeze or die, handlers that leave settings, entries without end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import text

from consumer import Consumer, Envelope, Order
from consumer.ledger import KEPT_BYTES, Connection, DeadLetter, Entity, Ledger
from consumer.process import DatabaseUnavailable, Outcome, Processor
from consumer.work import Work
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.transport import MemoryTransport
from outbox.transport.base import Delivery
from tests.integration.test_consumer import TOPIC, Database, credit, deliveries, entry, rename, wallet
from tests.integration.test_consumer_failures import bad, errors, three
from tests.waiting import eventually

APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY, PARKED, HELD = Outcome


def not_for_ever(url: str) -> str:
    """The address, with a limit by which a test of waiting ends with a lost connection, where PostgreSQL has one."""
    with psycopg.connect(url) as connection:
        known = connection.info.server_version >= 170_000
    return f"{url}?options=-c%20transaction_timeout%3D5s" if known and "?" not in url else url


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    made = schemas.engine(not_for_ever(database_url), "handlers")
    yield made
    made.dispose()


# --- frozen processes --------------------------------------------------------------------------------------------------


@contextmanager
def frozen(url: str) -> Iterator[tuple[Ledger, Connection]]:
    """Another process's ledger, in a transaction that it does not end."""
    with psycopg.connect(url) as connection:
        yield Ledger("ledger"), connection


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_a_frozen_process_holds_stops_nothing_else(
    end: str, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    batch = three("credited")
    processor = Processor(wallet(), engine, patience_seconds=0.1)
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(batch[1].fields[b"id"].decode())])
        assert processor.process(batch) == [APPLIED, HELD, APPLIED]
        assert processor.process(deliveries(entry(), first=9)) == [APPLIED]
        assert processor.process(batch[1:2]) == [HELD]
        getattr(connection, end)()
    assert processor.process(batch[1:2]) == [DUPLICATE if end == "commit" else APPLIED]
    assert database.effects == (3 if end == "commit" else 4)
    assert [r.action for r in caplog.records if r.levelno >= logging.WARNING] == ["ledger_held"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("new", [True, False], ids=["a new key", "a known key"])
def test_a_version_that_a_frozen_process_holds_stops_no_other_key(
    new: bool, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    processor = Processor(wallet(), engine, patience_seconds=0.1)
    if not new:
        assert processor.process(deliveries(entry("renamed", {"name": "first"}, version=1))) == [APPLIED]
    batch = deliveries(
        entry(),
        entry("renamed", {"name": "second"}, version=2),
        entry("renamed", {"name": "other"}, version=1, subject="B"),
    )
    with frozen(database.url) as (ledger, connection):
        ledger.lock_versions(connection, [Entity(TOPIC, "renamed", "A")])
        assert processor.process(batch) == [APPLIED, HELD, APPLIED]
    assert processor.process(batch) == [DUPLICATE, APPLIED, DUPLICATE]
    assert errors(caplog) == []


def test_a_dead_letter_that_a_frozen_process_holds_stops_nothing_else(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    batch = deliveries(entry(), entry(data=b"{"), entry())
    processor = Processor(wallet(), engine, patience_seconds=0.1)
    with frozen(database.url) as (ledger, connection):
        ledger.bury(connection, [DeadLetter(batch[1], None, "undecodable", "", 1)])
        assert processor.process(batch) == [APPLIED, HELD, APPLIED]
    assert errors(caplog) == []
    assert processor.process(batch) == [DUPLICATE, DEAD, DUPLICATE]


def test_a_time_out_of_the_roles_that_is_shorter_than_our_patience(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    engine = schemas.engine(f"{database.url}?options=-c%20statement_timeout%3D300", "handlers")
    batch = three("credited")
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(batch[1].fields[b"id"].decode())])
        assert Processor(wallet(), engine, patience_seconds=5).process(batch) == [APPLIED, HELD, APPLIED]
    assert errors(caplog) == []
    engine.dispose()


def test_hundreds_of_rows_of_a_frozen_process_are_not_waited_for_one_by_one(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    batch = deliveries(*(entry() for _ in range(100)))
    processor = Processor(wallet(), engine, patience_seconds=0.5)
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(delivery.fields[b"id"].decode()) for delivery in batch[:99]])
        began = time.monotonic()
        assert processor.process(batch) == [HELD] * 99 + [APPLIED]
        assert time.monotonic() - began < 15  # and not 50


def test_an_early_version_that_a_frozen_process_holds_stops_no_version_before_it(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("renamed", order=Order.NEXT)(rename)
    processor = Processor(consumer, engine)
    first, second, third = (entry("renamed", {"name": f"{n}"}, version=n) for n in (1, 2, 3))
    assert processor.process(deliveries(second, third)) == [PARKED, PARKED]
    database.let_go()
    leased, _ = processor.due(60, 1)
    with frozen(database.url) as (ledger, connection):
        ledger.take(connection, leased)
        assert processor.process(deliveries(first, first=9)) == [APPLIED]
    assert processor.process(leased) == [APPLIED]
    assert processor.process(processor.due(60, 10)[0]) == [APPLIED]
    assert database.waiting == {}


def test_what_a_frozen_process_holds_is_not_waited_for_when_it_is_given_back(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    processor = Processor(wallet(), engine)
    assert processor.process(deliveries(entry("unknown"), entry("unknown"))) == [PARKED, PARKED]
    database.let_go()
    leased, _ = processor.due(60, 10)
    with frozen(database.url) as (ledger, connection):
        ledger.take(connection, leased[:1])
        processor.release(leased)
    assert [row.id for row in processor.due(60, 10)[0]] == [leased[1].id]


def test_a_version_that_is_forgotten_before_it_is_locked_is_locked_anew(database: Database) -> None:
    entity = Entity(TOPIC, "renamed", "A")

    class Forgetting(psycopg.Connection[Any]):
        statements = 0

        def execute(self, *arguments: Any, **options: Any) -> Any:
            self.statements += 1
            if self.statements == 2:
                database.connection.execute("DELETE FROM public.entity_versions")
            return super().execute(*arguments, **options)

    with frozen(database.url) as (ledger, connection):
        ledger.lock_versions(connection, [entity])
    with Forgetting.connect(database.url) as forgetting:
        assert ledger.lock_versions(forgetting, [entity]) == {entity: None}


def test_a_healthy_process_is_waited_for(database: Database, engine: sqlalchemy.Engine) -> None:
    batch = deliveries(entry(), entry())
    processor = Processor(wallet(), engine, patience_seconds=9)
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(batch[0].fields[b"id"].decode())])
        pid = connection.info.backend_pid
        wait = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"

        def commits_when_waited_for() -> None:
            eventually(lambda: database.one(wait, pid))
            connection.commit()

        thread = threading.Thread(target=commits_when_waited_for)
        thread.start()
        assert processor.process(batch) == [DUPLICATE, APPLIED]
        thread.join()


@pytest.mark.parametrize("theirs", ["0", "7s"])
@pytest.mark.parametrize("order", list(Order))
def test_handlers_wait_for_locks_as_long_as_they_want(theirs: str, order: Order, database: Database) -> None:
    seen: list[str] = []

    def handler(event: Envelope, session: Any) -> None:
        seen.append(session.execute(text("SHOW lock_timeout")).scalar())

    engine = schemas.engine(f"{database.url}?options=-c%20lock_timeout%3D{theirs}", "handlers")
    batch = deliveries(entry("bad", version=1), entry("bad", version=2), entry(data=b"{"))
    processor = Processor(bad(handler, order=order), engine)
    assert processor.process(batch) == [APPLIED, APPLIED, DEAD]
    assert processor.process(deliveries(entry("bad", version=3))) == [APPLIED], "its version has a row already"
    assert seen == [theirs] * 3
    engine.dispose()


def test_no_plan_leaves_our_patience_to_the_handlers(database: Database) -> None:
    """The genetic optimizer, used from two tables on, shuffles what is joined first. Also where no row is fresh."""
    ledger, ids, entities = Ledger("ledger"), [uuid7()], [Entity(TOPIC, "renamed", "A")]
    for seed in range(10):
        with psycopg.connect(database.url, options=f"-c geqo_threshold=2 -c geqo_seed={seed / 10}") as connection:
            connection.execute("SET lock_timeout = '7s'")
            for fresh in (1, 0):
                assert len(ledger.claim(connection, ids)) == fresh
                assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",), (seed, fresh)
                assert len(ledger.lock_versions(connection, entities)) == 1
                assert connection.execute("SHOW lock_timeout").fetchone() == ("7s",), (seed, fresh)
            connection.rollback()


# --- processes that die ------------------------------------------------------------------------------------------------


@pytest.fixture
def start(start: Callable[..., Worker], database_url: str) -> Callable[..., Worker]:
    return partial(start, claim_seconds=60, database_url=not_for_ever(database_url))


def left_behind(transport: MemoryTransport, times: int) -> None:
    """All that is in the stream was delivered so many times to processes that died, and is due."""
    transport.open("ledger", [TOPIC])
    transport.read("ledger", "died", [TOPIC], 1000, 0)
    for _ in range(times - 1):
        transport.claim("ledger", "died", TOPIC, 0, 1000)
    pending = transport._group("ledger", TOPIC).pending
    for state in pending.values():
        state.delivered_at = float("-inf")


class Died(BaseException):
    """The process ends here, and does nothing more."""


def dies(transport: MemoryTransport, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the process would have died; it hands nothing back."""
    with pytest.raises(Died):
        for _ in range(50):
            worker.run_once()
    monkeypatch.setattr(worker, "_hand_back", lambda: None)
    for state in transport._group("ledger", TOPIC).pending.values():
        state.delivered_at = float("-inf")


def test_an_event_that_ends_its_process_harms_its_neighbours_twice_at_most(
    database: Database, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = MemoryTransport()
    deaths: list[int] = []

    def kill(event: Envelope, session: Any) -> None:
        deaths.append(event.delivery_count)

    consumer = bad(kill)
    call = Work._call

    def run(self: Work, *arguments: Any) -> None:
        before = len(deaths)
        call(self, *arguments)
        if len(deaths) > before:
            raise Died

    monkeypatch.setattr(Work, "_call", run)
    for kind in ("credited", "bad", "credited", "credited"):
        transport.add(TOPIC, entry(kind))
    for number in (1, 2):
        dies(transport, start(consumer, transport), monkeypatch)
        assert (deaths, database.effects) == (list(range(1, number + 1)), 0)
    transport.add(TOPIC, entry())
    dies(transport, start(consumer, transport), monkeypatch)
    assert (deaths, database.effects) == ([1, 2, 3], 2)  # the new one and the one before it
    dies(transport, start(consumer, transport), monkeypatch)
    assert (deaths, database.effects) == ([1, 2, 3, 4], 4)
    assert transport.pending("ledger", TOPIC) == 1
    transport.add(TOPIC, entry())
    dies(transport, start(consumer, transport), monkeypatch)
    assert database.effects == 5  # also later, what is new comes before it


def test_suspects_run_alone_and_are_acknowledged_one_by_one(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    pending: list[int] = []

    def look(event: Envelope, session: Any) -> None:
        pending.append(transport.pending("ledger", TOPIC))
        credit(event, session)

    for _ in range(3):
        transport.add(TOPIC, entry("bad"))
    left_behind(transport, 1)
    worker = start(bad(look), transport)
    eventually(lambda: worker.run_once() == {} and database.effects == 3)
    assert pending == [3, 3, 3]
    for _ in range(3):
        transport.add(TOPIC, entry("bad"))
    left_behind(transport, 2)
    pending.clear()
    eventually(lambda: worker.run_once() == {} and database.effects == 6)
    assert pending == [3, 2, 1]


def test_suspects_wait_for_what_is_new_but_not_for_ever(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    ran: list[str] = []

    def handler(event: Envelope, session: Any) -> None:
        ran.append(event.key or "")

    for _ in range(2):
        transport.add(TOPIC, entry("bad", subject="suspect"))
    left_behind(transport, 2)
    worker = start(bad(handler), transport, claim_seconds=1, batch_size=2)

    def fresh() -> bool:
        transport.add(TOPIC, entry("bad", subject="new"))
        worker.run_once()
        return ran.count("suspect") == 2

    eventually(fresh)
    first = ran.index("suspect")
    assert ran[:first] == ["new"] * first
    assert first >= 2
    assert ran[first:] == ["suspect", "new", "new", "suspect"]  # by turns


def test_suspects_are_handed_back_as_they_were(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    for _ in range(3):
        transport.add(TOPIC, entry())
    left_behind(transport, 2)
    worker = start(wallet(), transport)
    eventually(lambda: worker.run_once() == {APPLIED: 1})
    worker.close()
    assert [d.count for d in transport.claim("ledger", "next", TOPIC, 60, 10).deliveries] == [3, 3]


def test_waiting_for_a_handler_or_a_frozen_process_makes_no_suspects(
    database: Database, start: Callable[..., Worker]
) -> None:
    transport = MemoryTransport()
    held = entry()
    transport.add(TOPIC, entry("unknown"))
    transport.add(TOPIC, held)
    worker = start(wallet(), transport, claim_seconds=0.05)
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(held[b"id"].decode())])
        rounds = [worker.run_once() for _ in range(30)]
    assert sum(counts[HELD] for counts in rounds) > 5
    counts = [state.count for state in transport._group("ledger", TOPIC).pending.values()]
    assert counts == [1]
    assert database.waiting == {"no_handler": 1}


def test_what_a_frozen_process_holds_is_not_asked_for_all_the_time(
    database: Database, start: Callable[..., Worker]
) -> None:
    transport = MemoryTransport()
    held = entry()
    transport.add(TOPIC, held)
    worker = start(wallet(), transport)
    with frozen(database.url) as (ledger, connection):
        ledger.claim(connection, [uuid.UUID(held[b"id"].decode())])
        assert worker.run_once() == {HELD: 1}
        assert [worker.run_once() for _ in range(20)] == [{}] * 20
        transport.add(TOPIC, entry())
        assert worker.run_once() == {APPLIED: 1}


def test_what_waits_and_a_frozen_process_holds_is_not_tried_all_the_time(
    database: Database, start: Callable[..., Worker]
) -> None:
    transport = MemoryTransport()
    consumer = wallet()
    worker = start(consumer, transport, check_seconds=2)
    transport.add(TOPIC, entry("renamed at last", {"name": "new"}, version=1))
    assert worker.run_once() == {PARKED: 1}
    consumer.on("renamed at last", order=Order.LATEST)(rename)
    with frozen(database.url) as (ledger, connection):
        ledger.lock_versions(connection, [Entity(TOPIC, "renamed at last", "A")])
        database.let_go()
        eventually(lambda: worker.run_once() == {HELD: 1})
        assert [worker.run_once() for _ in range(10)] == [{}] * 10
    eventually(lambda: worker.run_once() == {APPLIED: 1})


# --- what handlers raise -----------------------------------------------------------------------------------------------


class Own(BaseException):
    """Of a library's."""


ENDS = [
    SystemExit(1),
    SystemExit("no"),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    Own(),
    psycopg.Rollback(),
]


@pytest.mark.parametrize("raw", [False, True], ids=["session", "raw"])
@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_whatever_a_handler_raises_is_a_failure_of_its_event(
    error: BaseException, raw: bool, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(event: Envelope, given: Any) -> None:
        raise error

    assert Processor(bad(handler, raw=raw), engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert errors(caplog) == ["handler_failed"]
    assert (database.effects, database.processed) == (2, {"applied": 2, "waiting": 1})


def test_ctrl_c_is_no_failure(database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture) -> None:
    pressed: list[bool] = []

    def handler(event: Envelope, session: Any) -> None:
        if not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        credit(event, session)

    processor, batch = Processor(bad(handler), engine), three()
    with pytest.raises(KeyboardInterrupt):
        processor.process(batch)
    assert database.effects == 0
    assert processor.process(batch) == [APPLIED] * 3
    assert errors(caplog) == []


def dispose(session: Any) -> None:
    session.connection().engine.dispose()
    raise RuntimeError


ENDINGS: dict[str, Callable[[Any], Any]] = {
    "Session.invalidate": lambda session: (session.connection(), session.invalidate()),
    "Connection.invalidate": lambda session: session.connection().invalidate(),
    "Connection.close": lambda session: session.connection().close(),
    "Connection.detach": lambda session: (session.connection().detach(), session.connection().close()),
    "psycopg close": lambda session: session.connection().connection.driver_connection.close(),
    "libpq finish": lambda session: session.connection().connection.driver_connection.pgconn.finish(),
    "dispose": dispose,
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_handler_that_ends_its_connection_has_failed(
    ending: Callable[[Any], Any], database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    processor = Processor(bad(lambda event, session: ending(session)), engine)
    assert processor.process(three()) == [APPLIED, RETRY, APPLIED]
    assert errors(caplog) == ["handler_failed"]
    assert (database.effects, database.processed) == (2, {"applied": 2, "waiting": 1})
    assert processor.process(three("credited")) == [APPLIED] * 3


@pytest.mark.parametrize("raised", [None, SystemExit(0), SystemExit(7), RuntimeError(), KeyboardInterrupt()], ids=repr)
def test_a_child_that_a_handler_forks_is_no_consumer(
    raised: BaseException | None, database: Database, engine: sqlalchemy.Engine
) -> None:
    ours, ended = os.getpid(), []

    def handler(event: Envelope, session: Any) -> None:
        if child := os.fork():
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            credit(event, session)
        elif raised:
            raise raised

    try:
        outcomes = Processor(bad(handler), engine).process(three())
    finally:
        if os.getpid() != ours:
            os._exit(99)
    assert outcomes == [APPLIED] * 3
    code = raised.code if isinstance(raised, SystemExit) else 1 if raised else 0
    assert ended == [code]
    assert database.effects == 3


# --- what handlers set -------------------------------------------------------------------------------------------------

SETTINGS = [
    "SET ROLE {role}", "SET SESSION AUTHORIZATION {role}", "SET default_transaction_read_only = on",
    "SET statement_timeout = '1ms'", "SET lock_timeout = '1ms'", "SET default_transaction_isolation = 'serializable'",
    "SET search_path = nowhere", "SET client_encoding = 'LATIN1'", "SET session_replication_role = replica",
    "LISTEN something", "SELECT pg_advisory_lock(1)", "CREATE TEMP TABLE processed_messages (x int)",
    "SET row_security = off", "SET constraint_exclusion = on",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_handler_leaves_on_its_connection_stops_nobody_for_long(
    setting: str, database: Database, engine: sqlalchemy.Engine
) -> None:
    role = f"weak_{uuid7().hex}"
    database.connection.execute(f"CREATE ROLE {role}")
    database.connection.execute(f"GRANT USAGE ON SCHEMA public TO {role}")
    try:
        processor = Processor(bad(lambda event, session: session.execute(text(setting.format(role=role)))), engine)
        assert processor.process(deliveries(entry("bad"))) == [APPLIED]
        name = "أحمد"
        batch = deliveries(entry(), entry("renamed", {"name": name}, version=1, subject=name), entry(subject="B"))
        tries = 0
        waiting = batch
        while waiting and tries < 3:
            tries += 1
            try:
                outcomes = processor.process(waiting)
            except DatabaseUnavailable:
                continue
            waiting = [d for d, outcome in zip(waiting, outcomes, strict=True) if outcome is RETRY]
        assert waiting == []
        assert database.effects == 2
    finally:
        engine.dispose()
        database.connection.execute(f"DROP OWNED BY {role}")
        database.connection.execute(f"DROP ROLE {role}")


def test_a_time_out_that_one_handler_leaves_costs_another_no_try(database: Database, engine: sqlalchemy.Engine) -> None:
    consumer = bad(lambda event, session: session.execute(text("SET statement_timeout = '100ms'")))
    consumer.on("slow")(lambda event, session: session.execute(text("SELECT pg_sleep(0.3)")))
    processor = Processor(consumer, engine)
    assert processor.process(deliveries(entry("bad"))) == [APPLIED]
    assert processor.process(deliveries(entry("slow"))) == [APPLIED]


def test_a_handler_that_makes_its_transaction_read_only_is_no_outage(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    batch = three()
    consumer = bad(lambda event, session: session.execute(text("SET transaction_read_only = on")))
    assert Processor(consumer, engine).process(batch) == [APPLIED] * 3
    assert database.effects == 2


def test_the_ledger_is_looked_after_whatever_a_handler_has_set(
    database: Database, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._PARTITION_SECONDS", 0)
    role = f"weak_{uuid7().hex}"
    database.connection.execute(f"CREATE ROLE {role}")
    transport = MemoryTransport()
    worker = start(bad(lambda event, session: session.execute(text(f"SET ROLE {role}"))), transport)
    for _ in range(2):
        transport.add(TOPIC, entry("bad"))
        assert worker.run_once() == {APPLIED: 1}
    worker.close()
    database.connection.execute(f"DROP ROLE {role}")


# --- entries without end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [
    {b"a": b"x" * 3_000_000, b"b" * 3_000_000: b"y", b"id": b"no"},
    {b"%d" % number: b"x" * 1000 for number in range(5000)},
    {b"x" * 1_100_000 + b"\x00": b""},
], ids=["huge", "many", "a name"])  # fmt: skip
def test_of_a_huge_entry_the_beginning_is_put_aside(
    fields: dict[bytes, bytes], database: Database, engine: sqlalchemy.Engine
) -> None:
    batch = [Delivery(TOPIC, "1-0", fields), *deliveries(entry(), first=2)]
    assert Processor(wallet(), engine).process(batch) == [DEAD, APPLIED]
    kept, error = database.one("SELECT fields, error FROM public.dead_letters")
    whole = [part for pair in fields.items() for part in pair]
    assert KEPT_BYTES // 4 < sum(map(len, kept)) <= KEPT_BYTES
    assert all(part.startswith(found) for part, found in zip(whole, kept, strict=False))
    assert f"only the beginning of its {sum(map(len, whole))} bytes is kept" in error
    assert len(error) < 1200


def test_an_entry_that_is_not_huge_is_put_aside_whole(database: Database, engine: sqlalchemy.Engine) -> None:
    fields = {b"a": b"x" * (KEPT_BYTES - 1002), **{b"%03d" % n: b"" for n in range(333)}, b"bc": b""}
    assert sum(len(n) + len(v) for n, v in fields.items()) == KEPT_BYTES
    assert Processor(wallet(), engine).process([Delivery(TOPIC, "1-0", fields)]) == [DEAD]
    kept, error = database.one("SELECT fields, error FROM public.dead_letters")
    assert dict(zip(kept[::2], kept[1::2], strict=True)) == fields
    assert "only the beginning" not in error


def test_a_huge_event_is_put_aside_whole(
    database: Database, engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can be processed again; unless it is larger than what can be handled well."""
    consumer = wallet()
    consumer.on("moved", order=Order.LATEST)(rename)
    batch = deliveries(*(entry("moved", {"name": "x" * 2_000_000}) for _ in range(2)))
    processor = Processor(consumer, engine)
    assert processor.process(batch[:1]) == [DEAD]
    monkeypatch.setattr("consumer.ledger.LARGEST_BYTES", 1_000_000)
    assert processor.process(batch[1:]) == [DEAD]
    (whole, first), (cut, second) = database.all("SELECT cut, error FROM public.dead_letters ORDER BY id")
    assert (whole, cut) == (False, True)
    assert ["only the beginning" in error for error in (first, second)] == [False, True]
    assert database.all("SELECT fields FROM public.dead_letters ORDER BY id")[0][1::2] == [*batch[0].fields.values()]
