"""Who is blamed for what fails in a consumer, and that one bad event or setting does not stop, lose or double the others."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import text

from consumer import Consumer, Envelope, Order, Reject, Retry
from consumer.process import DatabaseUnavailable, Outcome, Processor, driver_connection
from consumer.settings import ConsumerSettings
from consumer.worker import Worker, _worth_retrying
from outbox import schema as schemas
from outbox.embedded import PostgresServer
from outbox.envelope import uuid7
from outbox.errors import HandlerMisuse, SettingsError
from outbox.transport import MemoryTransport
from outbox.transport.base import Claim, Delivery
from tests.faults.proxy import Proxy
from tests.integration.test_consumer import TOPIC, Database, Name, credit, deliveries, entry, rename, wallet
from tests.waiting import eventually

APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY, PARKED, HELD = Outcome


def bad(handler: Any, **options: Any) -> Consumer:
    """A consumer whose events of type ``bad`` meet this handler; others are credits."""
    consumer = wallet()
    consumer.on("bad", **options)(handler)
    return consumer


def three(kind: str = "bad") -> list[Delivery]:
    """Three events, the middle one of this type; handlers run in this order."""
    return deliveries(entry(subject="A"), entry(kind, subject="B"), entry(subject="C"))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Actions of our errors."""
    return [r.action for r in caplog.records if r.levelno >= logging.ERROR and not r.name.startswith("sqlalchemy")]  # type: ignore[attr-defined]


# --- lost connections --------------------------------------------------------------------------------------------------


def test_a_lost_commit_of_which_another_process_took_a_part(database: Database, database_url: str) -> None:
    port = urlsplit(database_url).port
    assert port is not None
    batch = deliveries(entry(subject="A"), entry(subject="B"))
    with Proxy(port) as proxy:
        ours = schemas.engine(database_url.replace(f":{port}", f":{proxy.port}"), "ours")
        others = schemas.engine(database_url, "others")
        ours.connect().close()
        proxy.cut_at(b"COMMIT", lambda number: "before" if number == 1 else None)
        a, b = Processor(wallet(), ours), Processor(wallet(), others)
        look = a._was_committed

        def look_later(work: Any) -> bool:
            if work.fresh and not database.effects:
                assert b.process(batch[:1]) == [APPLIED]
            return look(work)

        a._was_committed = look_later  # type: ignore[method-assign]
        assert a.process(batch) == [DUPLICATE, APPLIED]
        assert proxy.cuts == 1
        ours.dispose()
        others.dispose()
    assert (database.effects, database.processed) == (2, {"applied": 2})


def terminated(event: Envelope, session: Any) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def idle(event: Envelope, session: Any) -> None:
    session.execute(text("SET idle_in_transaction_session_timeout = '20ms'"))
    pid = session.connection().connection.driver_connection.info.backend_pid
    with psycopg.connect(session.connection().engine.url_of_test, autocommit=True) as outside:
        alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: outside.execute(alive, (pid,)).fetchone() == (0,))


def too_long(event: Envelope, session: Any) -> None:
    session.execute(text("SET LOCAL transaction_timeout = '50ms'"))
    session.execute(text("SELECT pg_sleep(10)"))


def swallowed(event: Envelope, session: Any) -> None:
    with suppress(sqlalchemy.exc.DBAPIError):
        terminated(event, session)


@pytest.mark.parametrize("handler", [terminated, idle, too_long, swallowed])
@pytest.mark.parametrize("size", [1, 3])
def test_an_event_that_costs_its_connection_stops_nobody_else(
    handler: Any, size: int, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.url_of_test = database.url  # type: ignore[attr-defined]
    batch = three() if size == 3 else deliveries(entry("bad"))
    processor = Processor(bad(handler), engine)
    assert processor.process(batch) == ([APPLIED, RETRY, APPLIED] if size == 3 else [RETRY])
    assert errors(caplog) == ["handler_failed"]
    assert database.effects == size - 1
    assert processor.process(deliveries(entry(), entry())) == [APPLIED, APPLIED]


def test_an_event_that_crashes_postgresql_stops_nobody_else(
    own_postgres: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends all connections and is in recovery for a while: it looks like an outage, again and again."""
    server = own_postgres()
    schemas.upgrade(server.url, "consumer")
    database = Database(server.url)
    crashes = []

    def crash(event: Envelope, connection: Any) -> None:
        crashes.append(event.id)
        os.kill(connection.info.backend_pid, signal.SIGKILL)
        connection.execute("SELECT pg_sleep(10)")

    transport = MemoryTransport()
    for delivery in three():
        transport.add(TOPIC, dict(delivery.fields))
    settings = ConsumerSettings(
        database_url=server.url, redis_url="redis://unused", claim_seconds=600, block_seconds=0.02,
        backoff_max_seconds=0.1,
    )  # fmt: skip
    worker = Worker(bad(crash, raw=True, retry=Retry(first_seconds=600)), settings, transport=transport)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()

    def settled() -> bool:
        database.connection.close()
        database.connection = psycopg.connect(server.url, autocommit=True)
        return database.effects == 2 and database.waiting == {"failed": 1}

    eventually(settled, 60, ignoring=(psycopg.Error,))
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    database.connection.close()
    assert len(crashes) <= 3
    assert errors(caplog) == ["handler_failed"]


def test_nobody_is_blamed_while_postgresql_is_away(
    own_postgres: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_postgres()
    schemas.upgrade(server.url, "consumer")
    database = Database(server.url)
    down = True

    def handler(event: Envelope, session: Any) -> None:
        if down:
            server.kill()
        credit(event, session)

    engine = schemas.engine(server.url, "away")
    processor = Processor(bad(handler), engine)
    batch = three()
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable):
            processor.process(batch)
    server.start()
    down = False
    assert eventually(lambda: processor.process(batch), ignoring=(DatabaseUnavailable,)) == [APPLIED] * 3
    assert errors(caplog) == []
    engine.dispose()
    database.connection.close()


# --- whose fault -------------------------------------------------------------------------------------------------------


def raises(state: str) -> Callable[[Envelope, Any], None]:
    def handler(event: Envelope, session: Any) -> None:
        session.execute(text(f"DO $$ BEGIN RAISE 'no' USING ERRCODE = '{state}'; END $$"))

    return handler


@pytest.mark.parametrize("state", ["53100", "53200", "57P01", "58030"])
def test_a_server_that_cannot_work_is_nobodys_fault(
    state: str, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert Processor(bad(raises(state)), engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert Processor(bad(raises(state)), engine).process(deliveries(entry("bad"))) == [RETRY]
    counted = "start 1 of 5" if state == "57P01" else "not counted"  # that is as good as a lost connection
    assert caplog.text.count(counted) == 2
    assert database.effects == 2
    assert database.all("SELECT attempts, tries FROM public.message_failures") == [(0, 1), (0, 1)]


@pytest.mark.parametrize("state", ["25006", "53400", "55P03", "57014", "P0001"])
def test_a_handlers_own_time_outs_and_limits_are_its_fault(
    state: str, database: Database, engine: sqlalchemy.Engine
) -> None:
    assert Processor(bad(raises(state)), engine).process(three()) == [APPLIED, RETRY, APPLIED]


def test_another_database_that_is_away_is_the_handlers_affair(database: Database, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, session: Any) -> None:
        psycopg.connect("postgresql://127.0.0.1:1/nowhere")

    assert Processor(bad(handler), engine).process(three()) == [APPLIED, RETRY, APPLIED]


def test_a_read_only_server(database: Database, database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = schemas.engine(f"{database_url}?options=-c%20default_transaction_read_only%3Don", "replica")
    with pytest.raises(DatabaseUnavailable):
        Processor(wallet(), engine).process(deliveries(entry()))
    assert errors(caplog) == []
    engine.dispose()


@pytest.mark.parametrize("option", ["lock_timeout", "statement_timeout"])
def test_a_ledger_that_is_locked_is_not_the_handlers_fault(
    option: str, database: Database, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = schemas.engine(f"{database_url}?options=-c%20{option}%3D50", "locked")
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE public.processed_messages")
        with pytest.raises(DatabaseUnavailable):
            Processor(wallet(), engine).process(deliveries(entry()))
    assert Processor(wallet(), engine).process(deliveries(entry())) == [APPLIED]
    assert errors(caplog) == []
    engine.dispose()


def test_a_ledger_that_is_gone_is_not_the_handlers_fault(database: Database, engine: sqlalchemy.Engine) -> None:
    database.connection.execute("DROP TABLE public.processed_messages")
    with pytest.raises(DatabaseUnavailable, match="UndefinedTable"):
        Processor(wallet(), engine).process(deliveries(entry(), entry()))


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_deadlocks_are_tried_again_at_once(state: str, database: Database, engine: sqlalchemy.Engine) -> None:
    tries = []

    def handler(event: Envelope, session: Any) -> None:
        tries.append(event.id)
        if len(tries) < 5:
            raises(state)(event, session)

    assert Processor(bad(handler), engine).process(three()) == [APPLIED] * 3
    assert len(tries) == 5


@pytest.mark.parametrize("raw", [True, False], ids=["psycopg", "session"])
def test_a_migration_under_way_costs_no_attempt(raw: bool, database: Database, start: Callable[..., Worker]) -> None:
    """What a connection keeps prepared has other columns then; the same connection goes on."""
    database.connection.execute("CREATE TABLE public.wide (a int)")
    query, prepared = "SELECT * FROM public.wide", list[int]()

    def handler(event: Envelope, session: Any) -> None:
        session.execute(query if raw else text(query))
        mine = session if raw else session.connection().connection.driver_connection
        known = mine.execute(
            "SELECT FROM pg_prepared_statements WHERE statement = %s", (query,), prepare=False
        ).rowcount
        prepared.append(known)

    transport = MemoryTransport()
    worker = start(bad(handler, raw=raw, retry=Retry(attempts=1, first_seconds=0.01)), transport)

    def kept() -> bool:
        transport.add(TOPIC, entry("bad"))
        worker.run_once()
        return prepared[-2:] == [1, 1]  # not only since the last batch

    eventually(kept)
    database.connection.execute("ALTER TABLE public.wide ADD COLUMN b int")
    transport.add(TOPIC, entry("bad"))
    eventually(lambda: worker.run_once() and database.waiting["failed"] == 1)
    assert database.all("SELECT attempts, tries FROM public.message_failures") == [(0, 1)]
    eventually(lambda: (worker.run_once(), not database.waiting)[1])
    assert (database.processed, database.dead) == (Counter(applied=len(prepared)), [])


def test_the_loop_goes_on_only_for_what_passes() -> None:
    assert _worth_retrying(psycopg.OperationalError("refused"))
    assert _worth_retrying(psycopg.errors.lookup("25006")("read-only"))
    assert not _worth_retrying(psycopg.errors.lookup("42P01")("no table"))
    assert not _worth_retrying(psycopg.errors.lookup("57014")("somebody else's time-out"))


# --- engines and handlers that cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["engine", "options", "driver"])
def test_an_engine_that_commits_by_itself_is_refused(
    how: str, database: Database, database_url: str, start: Callable[..., Worker]
) -> None:
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = {
        "engine": lambda: sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT"),
        "options": lambda: sqlalchemy.create_engine(url).execution_options(isolation_level="AUTOCOMMIT"),
        "driver": lambda: sqlalchemy.create_engine(url, connect_args={"autocommit": True}),
    }[how]()
    transport = MemoryTransport()
    transport.add(TOPIC, entry())
    transport.open("ledger", [TOPIC])
    with pytest.raises(SettingsError, match="AUTOCOMMIT"):
        start(wallet(), transport, engine=engine).run()
    with pytest.raises(SettingsError, match="AUTOCOMMIT"):
        Processor(wallet(), engine).process(deliveries(entry()))
    assert transport.pending("ledger", TOPIC) == 0
    assert (database.effects, database.processed.total()) == (0, 0)
    engine.dispose()


async def asynchronous(event: Envelope, session: Any) -> None:
    credit(event, session)


def generator(event: Envelope, session: Any) -> Iterator[None]:
    credit(event, session)
    yield


async def asynchronous_generator(event: Envelope, session: Any) -> Any:
    credit(event, session)
    yield


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("handler", [asynchronous, generator, asynchronous_generator])
def test_what_a_handler_only_promises_is_not_applied(
    handler: Any, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = bad(lambda event, session: handler(event, session))
    assert Processor(consumer, engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert "HandlerMisuse: the handler returned a" in caplog.text
    assert database.processed == {"applied": 2, "waiting": 1}


def test_what_a_plain_handler_returns_does_not_matter(database: Database, engine: sqlalchemy.Engine) -> None:
    consumer = bad(lambda event, session: session.execute(text("SELECT 1")))
    consumer.on("worse")(functools.partial(lambda _, event, session: [1], 0))
    assert Processor(consumer, engine).process(three() + deliveries(entry("worse"), first=4)) == [APPLIED] * 4


# --- the statement COMMIT ----------------------------------------------------------------------------------------------


_ENDS = ["COMMIT", " end;", "rollback work", "Abort", "/* a */ -- b\n COMMIT", "PREPARE TRANSACTION 'x'"]


@pytest.mark.parametrize(
    ("raw", "statement"),
    [*((raw, end) for raw in (False, True) for end in _ENDS), (True, b"COMMIT"), (True, sql.SQL("COMMIT"))],
)
def test_a_statement_that_ends_the_transaction_is_refused(
    statement: Any, raw: bool, database: Database, engine: sqlalchemy.Engine
) -> None:
    def handler(event: Envelope, given: Any) -> None:
        if not raw:
            credit(event, given)
        with pytest.raises(HandlerMisuse, match="a handler must not send"):
            given.execute(statement if raw else text(statement))
        given.execute(statement if raw else text(statement))

    assert Processor(bad(handler, raw=raw), engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert (database.effects, database.processed) == (2, {"applied": 2, "waiting": 1})


@pytest.mark.timeout(20)
def test_many_comments_before_a_statement_cost_nothing(database: Database, engine: sqlalchemy.Engine) -> None:
    consumer = bad(lambda event, connection: connection.execute("/* a */" * 200 + "SELECT 1"), raw=True)
    assert Processor(consumer, engine).process(three()) == [APPLIED] * 3


def test_a_savepoint_in_words_may_be_rolled_back_to(database: Database, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, connection: psycopg.Connection[Any]) -> None:
        for statement in ("SAVEPOINT a", "SELECT 1", "ROLLBACK TO SAVEPOINT a", "ROLLBACK WORK TO a", "RELEASE a"):
            connection.execute(statement)
        with pytest.raises(ZeroDivisionError), connection.transaction():
            raise ZeroDivisionError
        connection.cursor(row_factory=dict_row).execute("SELECT 1 AS commit").fetchone()

    assert Processor(bad(handler, raw=True), engine).process(three()) == [APPLIED] * 3


ENDINGS: dict[str, Callable[[Any], Any]] = {
    "commit": lambda execute: execute("SELECT 1; COMMIT"),
    "commit and fail": lambda execute: [execute("SELECT 1; COMMIT"), 1 / 0],
    "end": lambda execute: execute("SELECT 1; END"),
    "commit and go on": lambda execute: [execute("SELECT 1; COMMIT"), execute("SELECT 1")],
    "commit and begin": lambda execute: [execute("SELECT 1; COMMIT"), execute("BEGIN")],
    "commit and chain": lambda execute: execute("SELECT 1; COMMIT AND CHAIN"),
    "commit, go on and fail": lambda execute: [execute("SELECT 1; COMMIT"), execute("SELECT 1 / 0")],
}


@pytest.mark.parametrize("raw", [False, True], ids=["session", "raw"])
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_the_statement_commit_loses_no_other_event(
    ending: Callable[[Any], Any], raw: bool, database: Database, engine: sqlalchemy.Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    once = True

    def handler(event: Envelope, given: Any) -> None:
        if raw:
            given.execute("INSERT INTO public.effects VALUES ('ledger', %s, 1)", (event.id,))
        else:
            credit(event, given)
        if once:
            ending(lambda statement: given.execute(statement if raw else text(statement)))

    twin = uuid7()
    batch = [
        *three(),
        *deliveries(
            entry("renamed", {"name": "B"}, version=2, subject="A"),
            entry("renamed", {"name": "D"}, version=2, subject="D"),
            entry("renamed", {"name": "D"}, version=1, subject="D"),
            entry("renamed", {"name": "E"}, subject="E"),
            entry(id=twin, subject="F"), entry(id=twin, subject="F"), entry(data=b"{"), entry("noise"), entry("what"),
            first=4,
        ),
    ]  # fmt: skip
    processor = Processor(bad(handler, raw=raw), engine)
    assert processor.process(batch) == [
        APPLIED, APPLIED, APPLIED, APPLIED, APPLIED, STALE, DEAD, APPLIED, DUPLICATE, DEAD, IGNORED, PARKED,
    ]  # fmt: skip
    culprit = batch[1].fields[b"id"].decode()
    ended = [r for r in caplog.records if getattr(r, "action", "") == "transaction_ended"]
    assert [r.event_id for r in ended] == [culprit]  # type: ignore[attr-defined]
    assert f"bad {culprit} ended the transaction" in ended[0].getMessage()
    assert (database.effects, database.processed) == (4, {"applied": 6, "stale": 1, "dead": 1, "waiting": 1})
    assert sorted(database.dead) == ["no_version", "undecodable"]
    once = False
    assert set(processor.process(batch)) == {DUPLICATE, IGNORED, DEAD}
    assert database.effects == 4
    older = deliveries(entry("renamed", {"name": "A"}, version=1, subject="A"))
    assert processor.process(older) == [STALE]


@pytest.mark.parametrize(
    "statements", [["SELECT 1; ROLLBACK"], ["SELECT 1; ROLLBACK", "SELECT 1"], ["SELECT 1; ROLLBACK AND CHAIN"]]
)
def test_the_statement_rollback_applies_nothing(
    statements: list[str], database: Database, engine: sqlalchemy.Engine
) -> None:
    consumer = bad(lambda event, session: [session.execute(text(statement)) for statement in statements])
    assert Processor(consumer, engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert (database.effects, database.processed) == (2, {"applied": 2, "waiting": 1})


def test_what_cannot_be_taken_back_is_named(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise psycopg.OperationalError("refused")

    processor = Processor(bad(lambda event, session: session.execute(text("SELECT 1; COMMIT"))), engine)
    monkeypatch.setattr(processor._ledger, "forget", refused)
    batch = three()
    processor.process(batch)
    (lost,) = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "events_lost"]
    named = [delivery.fields[b"id"].decode() in lost for delivery in batch]
    assert named == [False, False, True]


def test_a_handler_that_closes_its_connection_is_told_so(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = bad(lambda event, connection: connection.close(), raw=True)
    assert Processor(consumer, engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert "HandlerMisuse: the handler ended the transaction" in caplog.text


def test_savepoints_and_settings_do_not_end_the_transaction(database: Database, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, session: Any) -> None:
        session.execute(text("SET LOCAL statement_timeout = '9s'"))
        with suppress(sqlalchemy.exc.DBAPIError), session.begin_nested():
            session.execute(text("SELECT 1 / 0"))
        credit(event, session)

    assert Processor(bad(handler), engine).process(three()) == [APPLIED] * 3
    with engine.connect() as connection:  # the mark has gone with the transaction
        assert connection.execute(text("SHOW application_name")).scalar() == "handlers"


def rows_as_dicts(event: Envelope, connection: Any) -> None:
    connection.row_factory, connection.cursor_factory = dict_row, psycopg.ClientCursor
    assert connection.execute("SELECT 1 AS one").fetchone() == {"one": 1}


def test_how_a_handler_reads_rows_applies_nothing_twice(database: Database, engine: sqlalchemy.Engine) -> None:
    """The ledger took a dict that said that nothing was fresh for an event that was."""
    processor, before = Processor(bad(rows_as_dicts, raw=True), engine), deliveries(entry(subject="A"))
    assert processor.process(before) == [APPLIED]
    assert processor.process(deliveries(entry("bad"))) == [APPLIED]
    with engine.connect() as connection:  # of a thread that has not ended, say
        driver_connection(connection).row_factory = dict_row
    assert processor.process(before) == [DUPLICATE]
    assert (database.effects, database.processed) == (1, {"applied": 2})


def test_a_role_that_a_handler_sets_stops_nobody(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """What the ledger writes after the handlers is written by that role: it was not allowed to, however often it was tried."""

    def handler(event: Envelope, session: Any) -> None:
        session.execute(text("SET LOCAL ROLE pg_monitor"))

    consumer = bad(handler)

    @consumer.on("worse")
    def fails(event: Envelope, session: Any) -> None:
        raise ValueError

    batch = deliveries(entry(subject="A"), entry("bad", subject="B"), entry("worse", subject="C"))
    assert Processor(consumer, engine).process(batch) == [APPLIED, APPLIED, RETRY]
    assert (database.effects, database.processed) == (1, {"applied": 2, "waiting": 1})
    assert errors(caplog) == ["handler_failed"]


left: list[Any] = []


def stream_and_fail(event: Envelope, connection: Any) -> None:
    rows = connection.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    raise Reject("as of the first row")


def copy_and_leave(event: Envelope, connection: Any) -> None:
    copy = connection.cursor().copy("COPY public.names FROM STDIN")
    copy.__enter__()
    left.append(copy)


def stream_and_leave(event: Envelope, connection: Any) -> None:
    rows = connection.cursor().stream("SELECT generate_series(1, 100000)")
    next(rows)
    left.append(rows)


def pipeline_and_leave(event: Envelope, connection: Any) -> None:
    pipeline = connection.pipeline()
    pipeline.__enter__()
    left.append(pipeline)


@pytest.mark.parametrize(
    ("handler", "outcome"),
    [(stream_and_fail, DEAD), (copy_and_leave, RETRY), (stream_and_leave, RETRY), (pipeline_and_leave, RETRY)],
)
def test_a_command_that_a_handler_leaves_at_work_holds_nobody_up(
    handler: Any, outcome: Outcome, database: Database, engine: sqlalchemy.Engine
) -> None:
    """The process waited for ever, for the server or for the connection's lock."""
    processor = Processor(bad(handler, raw=True), engine)
    assert processor.process(three()) == [APPLIED, outcome, APPLIED]
    assert processor.process(deliveries(entry(), first=9)) == [APPLIED]
    left.clear()
    assert database.effects == 3


class Mute(Exception):
    """Has no text, and says so with an error that has none either."""

    def __str__(self) -> str:
        raise self


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Number(Exception):
    sqlstate = 40001


@dataclass(frozen=True)
class Frozen(Exception):
    why: str


@pytest.mark.parametrize(
    "error", [Mute(), Exits(), Number(), Frozen("x"), ValueError("a name: \udcff"), ValueError("\0")]
)
def test_an_error_of_an_odd_kind_costs_the_others_nothing(
    error: Exception, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(event: Envelope, session: Any) -> None:
        try:
            session.execute(text("SELECT 1 / 0"))
        except sqlalchemy.exc.DBAPIError:
            raise error  # noqa: B904 - with the other behind it

    assert Processor(bad(handler), engine).process(three()) == [APPLIED, RETRY, APPLIED]
    assert errors(caplog) == ["handler_failed"]
    assert "one by one" not in caplog.text


# --- the log -----------------------------------------------------------------------------------------------------------


def secret_statement(event: Envelope, session: Any) -> None:
    session.execute(text("INSERT INTO public.nowhere VALUES (:s)"), {"s": event.payload["secret"]})


def secret_key(event: Envelope, session: Any) -> None:
    for _ in range(2):
        session.execute(text("INSERT INTO public.names VALUES (:s)"), {"s": event.payload["secret"]})


def secret_number(event: Envelope, session: Any) -> None:
    session.execute(text("SELECT CAST(CAST(:s AS text) AS int)"), {"s": event.payload["secret"]})


def secret_type(event: Envelope, session: Any) -> None:
    boolean = sqlalchemy.bindparam("s", type_=sqlalchemy.Boolean)
    session.execute(sqlalchemy.select(boolean), {"s": event.payload["secret"]})


def secret_pending(event: Envelope, session: Any) -> None:
    try:
        session.add_all([Name(name=event.payload["secret"])])
        session.flush()
        session.expunge_all()
        session.add_all([Name(name=event.payload["secret"])])
        session.flush()
    except sqlalchemy.exc.IntegrityError:
        session.execute(text("SELECT 1"))


def secret_behind(event: Envelope, session: Any) -> None:
    try:
        secret_key(event, session)
    except sqlalchemy.exc.IntegrityError as error:
        raise RuntimeError("cannot") from error


def secret_before(event: Envelope, session: Any) -> None:
    try:
        secret_key(event, session)
    except sqlalchemy.exc.IntegrityError:
        raise RuntimeError("cannot")  # noqa: B904


def secret_lost(event: Envelope, session: Any) -> None:
    session.execute(text("SELECT :s, pg_terminate_backend(pg_backend_pid())"), {"s": event.payload["secret"]})


SECRETS = [
    secret_statement, secret_key, secret_number, secret_type, secret_pending, secret_behind, secret_before, secret_lost,
]  # fmt: skip


@pytest.mark.parametrize("handler", SECRETS)
@pytest.mark.parametrize("theirs", [False, True], ids=["our engine", "the user's"])
def test_no_payload_is_logged(
    handler: Any, theirs: bool, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    if theirs:
        engine = sqlalchemy.create_engine(database.url.replace("postgresql://", "postgresql+psycopg://"))
    batch = deliveries(*(entry("bad", {"secret": f"S3cr3t{n}"}) for n in range(2)))
    assert Processor(bad(handler), engine).process(batch) == [RETRY, RETRY]
    engine.dispose()
    assert "S3cr3t" not in caplog.text  # with the tracebacks
    assert handler.__name__ in caplog.text  # where it happened


def test_a_dead_letters_line_names_the_event(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    batch = deliveries(entry("renamed", {"name": "B"}, subject="acc-7"), entry("renamed", version=1, subject=None))
    assert Processor(wallet(), engine).process(batch) == [DEAD, DEAD]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    for line, key, delivery in zip(lines, ["'acc-7'", "None"], batch, strict=True):
        assert f"renamed {delivery.fields[b'id'].decode()} of key {key}" in line


def test_one_debug_line_for_each_batch(
    database: Database, start: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    transport = MemoryTransport()
    for fields in (entry(), entry(), entry("noise")):
        transport.add(TOPIC, fields)
    start(wallet(), transport).run_once()
    lines = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "batch"]
    assert len(lines) == 1
    assert "a batch of 3" in lines[0]
    assert "2 applied, 1 ignored" in lines[0]


# --- the loop ----------------------------------------------------------------------------------------------------------


class Counted(MemoryTransport):
    """Says what was asked of it, in order; a look for others' deliveries takes as long as is said."""

    def __init__(self, look_seconds: float = 0.0) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._look = threading.Event()
        self._look_seconds = look_seconds

    def read(self, *arguments: Any) -> list[Delivery]:
        found = super().read(*arguments)
        self.asked.append(f"read {len(found)}")
        return found

    def claim(self, *arguments: Any) -> Claim:
        self._look.wait(self._look_seconds)  # never set: the time it takes
        found = super().claim(*arguments)
        if arguments[2] == TOPIC:  # not the side stream
            self.asked.append(f"claim {len(found.deliveries)}")
        return found


def test_new_events_do_not_wait_for_a_long_pending_list(database: Database, start: Callable[..., Worker]) -> None:
    transport = Counted()
    for _ in range(8):
        transport.add(TOPIC, entry())
    transport.open("ledger", [TOPIC])
    left = transport.read("ledger", "crashed", [TOPIC], 8, 0)
    transport.hand_back("ledger", "crashed", left)  # so that they are due
    for _ in range(8):
        transport.add(TOPIC, entry())
    transport.asked.clear()
    worker = start(wallet(), transport, batch_size=2, claim_seconds=60)
    for _ in range(8):
        assert worker.run_once() == {APPLIED: 2}
    assert transport.asked == ["claim 2", "read 2"] * 4


@pytest.mark.parametrize(("look_seconds", "most"), [(0.0, 1000), (0.05, 2)])
def test_long_pending_lists_are_walked_less_often(
    look_seconds: float, most: int, database: Database, start: Callable[..., Worker]
) -> None:
    """A look that takes 50 ms is followed by a pause of 2.5 s, not of 20 ms."""
    transport = Counted(look_seconds)
    worker = start(wallet(), transport, claim_seconds=60)
    for _ in range(50):
        worker.run_once()
    looks = [asked for asked in transport.asked if asked.startswith("claim")]
    assert len(transport.asked) - len(looks) == 50
    assert len(looks) <= most
    assert len(looks) > 10 or most == 2


def test_a_batch_is_the_most_in_one_transaction(database: Database, start: Callable[..., Worker]) -> None:
    lanes = {TOPIC: 4}
    transport = MemoryTransport()
    for lane in range(4):
        for _ in range(3):
            transport.add(f"{TOPIC}:{lane}", entry())
    worker = start(wallet(), transport, batch_size=3, lanes=lanes)
    assert worker.run_once() == {APPLIED: 3}
    per_transaction = "SELECT count(*) FROM public.effects GROUP BY xmin::text"
    assert worker.run_once() == {APPLIED: 3}
    assert database.all(per_transaction) == [3, 3]
    assert sum(transport.pending("ledger", f"{TOPIC}:{lane}") for lane in range(4)) == 6
    worker.close()  # hands back the rest
    other = start(wallet(), transport, batch_size=3, lanes=lanes, claim_seconds=3600)
    assert other.run_once() == {APPLIED: 3}
    assert other.run_once() == {APPLIED: 3}
    assert database.effects == 12


def test_a_heartbeat_is_for_rounds_that_ended(database: Database, start: Callable[..., Worker], tmp_path: Path) -> None:
    """Also for empty ones, and none while PostgreSQL fails."""
    file = tmp_path / "heartbeat"
    transport = MemoryTransport()
    worker = start(wallet(), transport, heartbeat_file=str(file), backoff_max_seconds=0.02)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    eventually(file.exists)  # nothing has come
    failures: list[int] = []
    process = worker._processor.run

    def fails(*arguments: Any) -> Any:
        failures.append(1)
        raise DatabaseUnavailable("away")

    worker._processor.run = fails  # type: ignore[method-assign]
    transport.add(TOPIC, entry())
    eventually(lambda: len(failures) > 1)
    file.unlink()
    before = len(failures)
    eventually(lambda: len(failures) > before + 10)
    assert not file.exists()
    worker._processor.run = process  # type: ignore[method-assign]
    eventually(file.exists)
    worker.stop()
    thread.join(5)


def test_a_heartbeat_goes_on_in_a_long_round(
    database: Database, start: Callable[..., Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._BEAT_SECONDS", 0)
    file = tmp_path / "heartbeat"
    seen: list[bool] = []

    def slow(event: Envelope, session: Any) -> None:
        seen.append(file.exists())
        file.unlink(missing_ok=True)
        raise RuntimeError

    transport = MemoryTransport()
    for _ in range(3):
        transport.add(TOPIC, entry("bad"))
    worker = start(bad(slow), transport, heartbeat_file=str(file))
    assert worker.run_once() == {RETRY: 3}
    assert seen == [False, True, True]


def test_order_must_be_one_of_the_two(database: Database) -> None:
    with pytest.raises(SettingsError, match=r"Order.LATEST or Order.NEXT, is 'latest'"):
        wallet().on("moved", order="latest")  # type: ignore[arg-type]
    wallet().on("moved", order=Order.LATEST)(rename)
