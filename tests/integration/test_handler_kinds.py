"""Async handlers and time-outs: one handler, called in a transaction on a real connection.

`call` is told what to call and where, as the consumer does it; what becomes of a failure is `test_consumer.py`'s.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pydantic
import pytest
import sqlalchemy
from sqlalchemy import ForeignKey, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncAttrs, AsyncSession, async_object_session
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from consumer import Consumer, Envelope, Retry, calls, first_time_async
from consumer.calls import HandlerSession
from consumer.crew import Crew
from consumer.notes import notes
from consumer.process import OVERDUE, Outcome, Processor, driver_connection
from consumer.settings import ConsumerSettings
from outbox import Event, record_async
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.errors import HandlerMisuse, HandlerTimeout, SettingsError
from outbox.transport import Delivery
from tests.faults.chaos import Bench, drain
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually, lasting

Called = Callable[..., None]


class Base(AsyncAttrs, DeclarativeBase):
    """Of the handlers' own tables."""


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    entries: Mapped[list[Entry]] = relationship(order_by="Entry.id")


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(ForeignKey("accounts.id"))


def event(payload: Any = 1) -> Envelope:
    return Envelope(uuid.uuid4(), "accounts", "credited", b"1", payload, key="A")


def delivery(kind: str, payload: str = "1") -> Delivery:
    fields = {b"id": str(uuid7()).encode(), b"type": kind.encode(), b"subject": b"A", b"data": payload.encode()}
    return Delivery("accounts", f"{next(_numbers)}-0", fields)


_numbers = itertools.count(1)


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    made = schemas.engine(database_url, "kinds", pool_size=1, max_overflow=0, pool_timeout=5)
    Base.metadata.create_all(made)
    with made.begin() as connection:
        connection.execute(text("INSERT INTO accounts VALUES ('A', 0)"))
    yield made
    made.dispose()
    calls.close()


@pytest.fixture
def call(engine: sqlalchemy.Engine) -> Called:
    """Calls a handler in a transaction of its own, which is committed unless it raises."""

    def run(function: Any, *events: Envelope, batch: bool = False, **options: Any) -> None:
        overdue = options.pop("overdue", lambda: None)
        consumer = Consumer("kinds", topics=["accounts"])
        (consumer.on_batch if batch else consumer.on)("credited", **options)(function)
        handler = consumer.handler("credited")
        assert handler is not None
        with engine.connect() as connection:
            raw = driver_connection(connection)
            session = HandlerSession(bind=connection, join_transaction_mode="rollback_only")
            try:
                with connection.begin(), raw.transaction(), connection.begin_nested():
                    calls.call(handler, events or [event()], session, raw, overdue)
            finally:
                session.discard()

    return run


def balance(engine: sqlalchemy.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT balance FROM accounts WHERE id = 'A'")).scalar_one())


async def credit(event: Envelope, session: AsyncSession) -> None:
    account = await session.get_one(Account, event.key, with_for_update=True)
    await asyncio.sleep(0)
    account.balance += event.payload


def idle_in_transaction(engine: sqlalchemy.Engine) -> int:
    with engine.connect() as connection:
        found = connection.execute(
            text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'kinds' AND state LIKE 'idle in%'")
        )
        return int(found.scalar_one())


# --- async: what works ---------------------------------------------------------------------------------------------


def test_pending_changes_are_flushed_and_committed(call: Called, engine: sqlalchemy.Engine) -> None:
    call(credit, event(5))
    call(credit, event(6))
    assert balance(engine) == 11


def test_an_error_names_the_event_whose_changes_it_refuses(call: Called, engine: sqlalchemy.Engine) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        session.add(Entry(id=1, account="nobody's"))

    with pytest.raises(IntegrityError):
        call(handler)
    assert idle_in_transaction(engine) == 0


def test_a_batch_of_events(call: Called, engine: sqlalchemy.Engine) -> None:
    async def handler(events: list[Envelope[int]], session: AsyncSession) -> None:
        for each in events:
            await credit(each, session)

    call(handler, *(event(n) for n in range(5)), batch=True)
    assert balance(engine) == 10


def test_all_that_an_async_session_can_do(call: Called, engine: sqlalchemy.Engine) -> None:
    seen: list[Any] = []

    async def handler(event: Envelope, session: AsyncSession) -> None:
        session.add_all([Entry(id=n, account="A") for n in range(1, 4)])
        await session.flush()
        seen.append((await session.execute(text("SELECT count(*) FROM entries"))).scalar_one())
        seen.append(await session.scalar(text("SELECT 7")))
        seen.append((await session.scalars(select(Entry.id).order_by(Entry.id))).all())
        account = await session.get(Account, "A")
        assert account is not None
        seen.append([entry.id for entry in await account.awaitable_attrs.entries])
        assert async_object_session(account) is session
        try:
            async with session.begin_nested():
                await session.execute(text("INSERT INTO entries VALUES (1, 'A')"))
        except IntegrityError:
            seen.append("refused")
        async with session.begin_nested():
            account.balance = 9
        await session.refresh(account)
        seen.append(account.balance)
        seen.append(await session.run_sync(lambda sync: sync.connection().execute(text("SELECT 8")).scalar_one()))
        seen.append([row.id async for row in await session.stream(select(Entry.id).order_by(Entry.id))])
        seen.append([row async for row in await session.stream_scalars(select(Entry.id).order_by(Entry.id))])
        await session.delete(await session.get_one(Entry, 3))
        seen.append(await session.merge(Entry(id=2, account="A")) in session)

    call(handler)
    assert seen == [3, 7, [1, 2, 3], [1, 2, 3], "refused", 9, 8, [1, 2, 3], [1, 2, 3], True]
    with Session(engine) as session:
        assert session.scalars(select(Entry.id).order_by(Entry.id)).all() == [1, 2]
        assert session.get_one(Account, "A").balance == 9


def test_events_and_keys_are_recorded_in_its_transaction(call: Called, engine: sqlalchemy.Engine) -> None:
    fails = True

    async def handler(event: Envelope, session: AsyncSession) -> None:
        await record_async(session, Event(topic="mails", type="receipt.wanted", payload={}))
        assert await first_time_async(session, "webhooks", "evt_1")
        if fails:
            raise LookupError

    with pytest.raises(LookupError):
        call(handler)
    fails = False
    call(handler)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox")).scalar_one() == 1


def test_tasks_that_end_with_the_handler_and_time_outs_of_its_own(call: Called, engine: sqlalchemy.Engine) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(asyncio.sleep(0.01))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        await credit(event, session)

    call(handler)
    assert balance(engine) == 1


def test_generators_that_are_not_read_to_the_end_are_no_misuse(call: Called, engine: sqlalchemy.Engine) -> None:
    closed: list[int] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            closed.append(1)

    async def handler(event: Envelope, session: AsyncSession) -> None:
        async for _ in numbers():
            break
        gc.collect()

    call(handler)
    assert closed == [1]


def test_a_handler_sees_the_context_of_its_thread_and_leaves_nothing_in_it(call: Called) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    seen: list[str] = []

    async def handler(event: Envelope, session: AsyncSession) -> None:
        seen.append(variable.get())
        variable.set("the handler's")

    variable.set("the thread's")
    call(handler)
    call(handler)
    assert seen == ["the thread's"] * 2
    assert variable.get() == "the thread's"


def test_a_thread_has_one_loop_until_it_is_closed(call: Called) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def handler(event: Envelope, session: AsyncSession) -> None:
        loops.append(asyncio.get_running_loop())

    call(handler)
    call(handler)
    assert loops[0] is loops[1]
    calls.close()
    assert loops[0].is_closed()
    call(handler)
    assert loops[2] is not loops[0]
    other = threading.Thread(target=lambda: (call(handler), calls.close()))
    other.start()
    other.join(30)
    assert loops[3] is not loops[2]


def test_in_a_thread_whose_loop_runs_nothing_is_blamed_on_events(engine: sqlalchemy.Engine) -> None:
    consumer = Consumer("kinds", topics=["accounts"])
    consumer.on("credited")(credit)
    processor = Processor(consumer, engine)

    async def run() -> list[Outcome | None]:
        with pytest.raises(SettingsError, match=r"await asyncio.to_thread\(worker.run\)"):
            processor.process([delivery("credited")])
        return await asyncio.to_thread(processor.process, [delivery("credited")])

    assert asyncio.run(run()) == [Outcome.APPLIED]
    assert balance(engine) == 1
    assert Failures(engine).waiting == []


# --- async: what does not ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["commit", "rollback", "close", "aclose", "reset", "invalidate", "connection"])
def test_its_transaction_is_the_consumers(method: str, call: Called, engine: sqlalchemy.Engine) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        await credit(event, session)
        await getattr(session, method)()

    with pytest.raises(HandlerMisuse, match="session"):
        call(handler)
    assert balance(engine) == 0


def test_the_session_is_not_closed_as_a_context_manager_either(call: Called, engine: sqlalchemy.Engine) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        async with session:
            await credit(event, session)

    with pytest.raises(HandlerMisuse, match="must not close"):
        call(handler)
    assert balance(engine) == 0


def test_tasks_that_are_left_running_are_ended_first(call: Called, engine: sqlalchemy.Engine) -> None:
    ended: list[str] = []

    async def background(session: AsyncSession) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")
            await session.execute(text("SELECT 1"))
            await asyncio.sleep(0.01)
            ended.append("ended")

    async def handler(event: Envelope, session: AsyncSession) -> None:
        await credit(event, session)
        asyncio.get_running_loop().left = asyncio.create_task(background(session))  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    with pytest.raises(HandlerMisuse, match="left 1 of its tasks running"):
        call(handler)
    assert ended == ["cancelled", "ended"]
    assert balance(engine) == 0
    call(credit)
    assert balance(engine) == 1


def test_a_handlers_own_error_is_what_is_told_of_it(call: Called) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        asyncio.get_running_loop().left = asyncio.create_task(asyncio.sleep(60))  # type: ignore[attr-defined]
        raise LookupError("its own")

    with pytest.raises(LookupError, match="its own"):
        call(handler)


def test_tasks_that_do_not_end_never_see_the_next_handler(
    call: Called, engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from consumer import loops

    monkeypatch.setattr(loops, "_STUBBORN_SECONDS", 0.05)
    steps: list[int] = []

    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)
            steps.append(1)

    async def handler(event: Envelope, session: AsyncSession) -> None:
        asyncio.get_running_loop().left = asyncio.create_task(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    async def patient(event: Envelope, session: AsyncSession) -> None:
        await credit(event, session)
        await asyncio.sleep(0.05)

    with pytest.raises(HandlerMisuse, match="left 1 of its tasks running"):
        call(handler)
    before = len(steps)
    call(patient)
    assert len(steps) == before
    assert balance(engine) == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, GeneratorExit, psycopg.Rollback])
def test_whatever_it_raises_is_a_failure_of_its_event(
    error: type[BaseException], call: Called, engine: sqlalchemy.Engine
) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        await credit(event, session)
        raise error

    with pytest.raises(HandlerMisuse, match=f"raised .*{error.__name__}"):
        call(handler)
    assert balance(engine) == 0
    call(credit)
    assert balance(engine) == 1


def test_a_caught_database_error_is_named(call: Called) -> None:
    async def handler(event: Envelope, session: AsyncSession) -> None:
        with suppress(IntegrityError):
            await session.execute(text("INSERT INTO accounts VALUES ('A', 0)"))

    with pytest.raises(HandlerMisuse, match="left the transaction aborted"):
        call(handler)


def add_taken(event: Envelope, session: Session) -> None:
    session.add(Account(id="A"))


async def add_taken_too(event: Envelope, session: AsyncSession) -> None:
    session.add(Account(id="A"))


def swallow_what_a_flush_met(event: Envelope, session: Session) -> None:
    session.add(Account(id="A"))
    with suppress(IntegrityError):
        session.flush()


async def swallow_it_too(event: Envelope, session: AsyncSession) -> None:
    session.add(Account(id="A"))
    with suppress(IntegrityError):
        await session.flush()


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (add_taken, "UniqueViolation"), (add_taken_too, "UniqueViolation"), (swallow_what_a_flush_met, "HandlerMisuse"),
        (swallow_it_too, "HandlerMisuse"),
    ],
)  # fmt: skip
def test_an_error_in_a_flush_is_the_one_that_is_told_and_costs_the_others_nothing(
    handler: Any, says: str, engine: sqlalchemy.Engine
) -> None:
    runs: list[uuid.UUID] = []

    def credit_plainly(event: Envelope, session: Session) -> None:
        runs.append(event.id)
        session.get_one(Account, "A").balance += 1

    consumer = Consumer("kinds", topics=["accounts"])
    consumer.on("credited")(credit_plainly)
    consumer.on("failing")(handler)
    outcomes = Processor(consumer, engine).process([delivery("credited"), delivery("failing"), delivery("credited")])
    assert outcomes == [Outcome.APPLIED, Outcome.RETRY, Outcome.APPLIED]
    assert balance(engine) == 2
    assert len(runs) == 3  # the one before the failing one, twice
    with engine.connect() as connection:
        found = connection.execute(text("SELECT error_class, error, attempts FROM message_failures")).one()
    assert found.error_class == says
    assert says == "UniqueViolation" or "caught a database error outside of session.begin_nested()" in found.error
    assert found.attempts == 1


# --- time-outs -----------------------------------------------------------------------------------------------------


def sleeps_in_sql(event: Envelope, session: Session) -> None:
    session.execute(text("SELECT pg_sleep(60)"))


def sleeps_in_raw_sql(event: Envelope, connection: psycopg.Connection[Any]) -> None:
    connection.execute("SELECT pg_sleep(60)")


def spins(event: Envelope, session: Any) -> None:
    while True:
        pass


def spins_in_calls(event: Envelope, session: Any) -> None:
    while True:
        sum(range(1000))


def waits_and_waits(event: Envelope, session: Any) -> None:
    while True:
        threading.Event().wait(0.01)


def swallows(event: Envelope, session: Session) -> None:
    with suppress(BaseException):
        spins(event, session)


def swallows_sql(event: Envelope, session: Session) -> None:
    for _ in range(3):
        with suppress(Exception), session.begin_nested():
            sleeps_in_sql(event, session)


async def awaits(event: Envelope, session: AsyncSession) -> None:
    await asyncio.sleep(60)


async def spins_async(event: Envelope, session: AsyncSession) -> None:
    while True:
        pass


async def sleeps_in_async_sql(event: Envelope, session: AsyncSession) -> None:
    await session.execute(text("SELECT pg_sleep(60)"))


async def in_a_task(event: Envelope, session: AsyncSession) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(spins_async(event, session))


async def flushes_late(event: Envelope, session: AsyncSession) -> None:
    session.add(Entry(id=1, account="A"))
    await session.execute(text("SELECT pg_sleep(60)"))


SLOW = {
    handler.__name__: handler
    for handler in (
        sleeps_in_sql, spins, spins_in_calls, waits_and_waits, swallows, swallows_sql, awaits, spins_async,
        sleeps_in_async_sql, in_a_task, flushes_late,
    )
}  # fmt: skip


@pytest.mark.parametrize("handler", SLOW.values(), ids=SLOW.keys())
def test_whatever_a_handler_does_its_time_ends(handler: Any, call: Called, engine: sqlalchemy.Engine) -> None:
    started = time.monotonic()
    with pytest.raises(HandlerTimeout, match=r"longer than its timeout_seconds, 0\.1$"):
        call(handler, timeout_seconds=0.1)
    assert time.monotonic() - started < 30
    assert idle_in_transaction(engine) == 0
    call(credit, timeout_seconds=30)
    assert balance(engine) == 1


def test_raw_and_batch_handlers_have_time_outs_too(call: Called, engine: sqlalchemy.Engine) -> None:
    with pytest.raises(HandlerTimeout):
        call(sleeps_in_raw_sql, raw=True, timeout_seconds=0.1)
    with pytest.raises(HandlerTimeout):
        call(
            lambda events, session: sleeps_in_sql(events[0], session), event(), event(), batch=True, timeout_seconds=0.1
        )
    call(credit)
    assert balance(engine) == 1


def test_in_time_is_in_time(call: Called, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, session: Session) -> None:
        session.get_one(Account, "A").balance += 1

    for _ in range(50):
        call(handler, timeout_seconds=30)
        call(credit, timeout_seconds=30)
    assert balance(engine) == 100


def test_what_a_handler_raises_in_time_is_its_own(call: Called) -> None:
    def handler(event: Envelope, session: Session) -> None:
        raise LookupError("its own")

    with pytest.raises(LookupError, match="its own"):
        call(handler, timeout_seconds=30)


def test_a_handler_may_clean_up_when_it_is_interrupted(call: Called, engine: sqlalchemy.Engine) -> None:
    cleaned: list[str] = []

    async def handler(event: Envelope, session: AsyncSession) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("async")

    def plain(event: Envelope, session: Session) -> None:
        try:
            spins(event, session)
        finally:
            time.sleep(0.01)
            cleaned.append("plain")

    for each in (handler, plain):
        with pytest.raises(HandlerTimeout):
            call(each, timeout_seconds=0.05)
    assert cleaned == ["async", "plain"]


def test_who_cannot_be_interrupted_is_overdue(call: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    from consumer import timeouts

    monkeypatch.setattr(timeouts, "_GRACE_SECONDS", 0.1)
    told, names = threading.Event(), list[str]()

    def overdue() -> None:
        names.append(threading.current_thread().name)
        told.set()

    def handler(event: Envelope, session: Session) -> None:
        reader, writer = os.pipe()
        threading.Thread(target=lambda: (told.wait(30), os.write(writer, b"x"))).start()
        os.read(reader, 1)

    with pytest.raises(HandlerTimeout):
        call(handler, timeout_seconds=0.05, overdue=overdue)
    assert names == ["time limits of handlers"]


def test_who_is_interrupted_is_not_overdue(call: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    for handler in (sleeps_in_sql, spins, awaits):
        with pytest.raises(HandlerTimeout):
            call(handler, timeout_seconds=0.05, overdue=lambda: told.append(1))
    assert told == []


def test_a_fork_has_time_limits_and_a_loop_of_its_own(call: Called, engine: sqlalchemy.Engine) -> None:
    """It would take what wakes its parent's loop, and wait for a thread that it does not have."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def handler(event: Envelope, session: AsyncSession) -> None:
        loops.append(asyncio.get_running_loop())
        await credit(event, session)

    call(handler, timeout_seconds=30)
    engine.dispose()
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            signal.alarm(60)
            try:
                call(awaits, timeout_seconds=0.05)
            except HandlerTimeout:
                call(handler, timeout_seconds=30)
                code = int(loops[0] is loops[1])
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    call(handler, timeout_seconds=30)
    assert loops[0] is loops[1]
    assert balance(engine) == 3


# --- within a batch ------------------------------------------------------------------------------------------------


class Failures:
    """What the consumer has written down, looked at past it."""

    def __init__(self, engine: sqlalchemy.Engine) -> None:
        self._engine = engine

    def all(self, query: str) -> list[tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query))]

    @property
    def waiting(self) -> list[tuple[Any, ...]]:
        return self.all("SELECT error_class, attempts FROM message_failures ORDER BY id")

    @property
    def dead(self) -> list[tuple[Any, ...]]:
        return self.all("SELECT reason, error FROM dead_letters ORDER BY id")


@pytest.mark.parametrize("slow", [spins, awaits, sleeps_in_sql, sleeps_in_async_sql])
def test_a_time_out_is_a_failure_of_its_event_alone(slow: Any, engine: sqlalchemy.Engine) -> None:
    consumer = Consumer("kinds", topics=["accounts"])
    consumer.on("credited")(credit)
    consumer.on("slow", timeout_seconds=0.05)(slow)
    processor = Processor(consumer, engine)
    batch = [delivery("credited"), delivery("slow"), delivery("credited")]
    assert processor.process(batch) == [Outcome.APPLIED, Outcome.RETRY, Outcome.APPLIED]
    assert balance(engine) == 2
    assert Failures(engine).waiting == [("HandlerTimeout", 1)]
    assert processor.process(batch) == [Outcome.DUPLICATE] * 3


@dataclass
class Payment:
    amount: Decimal
    payer: str = "somebody"


class Refund(pydantic.BaseModel):
    amount: Decimal


def test_typed_payloads_arrive_and_what_does_not_fit_is_put_aside_at_once(
    engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    consumer = Consumer("kinds", topics=["accounts"])

    @consumer.on("paid")
    def paid(event: Envelope[Payment], session: Session) -> None:
        seen.append(event.payload)

    @consumer.on("refunded")
    async def refunded(event: Envelope[Refund], session: AsyncSession) -> None:
        seen.append(event.payload)

    @consumer.on_batch("paid.often")
    def paid_often(events: list[Envelope[Payment]], session: Session) -> None:
        seen.append(sum(event.payload.amount for event in events))

    good, bad = '{"amount": "0.10"}', '{"amount": "0.10", "payer": 9007199254740881}'
    batch = [
        delivery("paid", good),
        delivery("paid", bad),
        delivery("refunded", good),
        delivery("refunded", "9007199254740881"),
    ]
    batch += [delivery("paid.often", good), delivery("paid.often", bad), delivery("paid.often", good)]
    applied, dead = Outcome.APPLIED, Outcome.DEAD
    processor = Processor(consumer, engine)
    assert processor.process(batch) == [applied, dead, applied, dead, applied, dead, applied]
    assert seen == [Payment(Decimal("0.10")), Refund(amount=Decimal("0.10")), Decimal("0.20")]
    assert Failures(engine).dead == [
        ("payload", "payload.payer: Expected `str`, got `int`"),
        ("payload", "payload: model_type"),
        ("payload", "payload.payer: Expected `str`, got `int`"),
    ]
    assert "9007199254740881" not in caplog.text
    assert processor.process(batch) == [Outcome.DUPLICATE] * 7


_HANGS = """
import logging, os, sys
from consumer import Consumer, timeouts
from consumer.process import Processor
from outbox import schema
from outbox.transport import Delivery
timeouts._GRACE_SECONDS = 0.2
logging.basicConfig()
consumer = Consumer("kinds", topics=["accounts"])
held = os.pipe()

@consumer.on("credited")
def credited(event, session):
    "Done, and rolled back with the batch."

def hang(event, session):
    for handler in logging.getLogger().handlers:
        if "log" in sys.argv:
            handler.acquire()  # and so nobody can log any more
    os.read(held[0], 1)

if "batch" in sys.argv:
    consumer.on_batch("hangs", timeout_seconds=0.1)(hang)
else:
    consumer.on("hangs", timeout_seconds=0.1)(hang)
engine = schema.engine(sys.argv[1], "hangs")
deliveries = [Delivery("accounts", f"{n}-0", {k.encode(): v.encode() for k, v in
    {"id": id, "type": type, "subject": "A", "data": "1"}.items()}) for n, (id, type) in enumerate(
    [("0199a0a0-0000-7000-8000-000000000001", "credited"), ("0199a0a0-0000-7000-8000-000000000002", "hangs"),
     ("0199a0a0-0000-7000-8000-000000000003", "hangs")], 1)]
Processor(consumer, engine).process(deliveries[: 3 if "batch" in sys.argv else 2])
"""


def _hangs(database_url: str, *how: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", _HANGS, database_url, *how]
    return subprocess.run(program, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])


def test_a_process_whose_handler_nothing_ends_writes_it_down_and_ends(
    database_url: str, engine: sqlalchemy.Engine
) -> None:
    done = _hangs(database_url)
    assert done.returncode == OVERDUE
    assert "CRITICAL:consumer.process:the handler of hangs 0199a0a0-0000-7000-8000-000000000002 goes on" in done.stderr
    assert Failures(engine).waiting == [("HandlerTimeout", 1)]
    assert Failures(engine).all("SELECT event_id::text, outcome FROM processed_messages") == [
        ("0199a0a0-0000-7000-8000-000000000002", "waiting")
    ]
    assert _hangs(database_url).returncode == 0  # delivered again: it waits, and is not called before it is due


def test_of_a_batch_nobody_is_blamed_for_it(database_url: str, engine: sqlalchemy.Engine) -> None:
    assert _hangs(database_url, "batch").returncode == OVERDUE
    assert Failures(engine).waiting == []
    assert Failures(engine).all("SELECT * FROM processed_messages") == []


@pytest.mark.long
def test_a_process_that_cannot_even_log_ends_too(database_url: str) -> None:
    assert _hangs(database_url, "log").returncode == OVERDUE


@pytest.mark.long
def test_o_49_o_80_handlers_ended_anywhere_lose_nothing_and_leave_nothing_half(
    database_url: str, redis_url: str, prefix: str
) -> None:
    """Of every kind, in four threads behind a delay: by time-outs, and workers that are stopped in the middle. They are tried again until they are done, and then five events take effect as if nothing had been."""
    chance, started, out_of_step = random.Random(80), list[uuid.UUID](), list[str]()
    delay, number = lasting(0.01, 0.1), round(lasting(120, 300))
    consumer = Consumer("kinds", topics=["accounts"], retry=Retry(1000, 0.05, 0.05))
    limit = {"timeout_seconds": 15 * delay}

    def steps(event: Envelope) -> list[str]:
        """What is to be asked, and answered; of some too much to be done in time."""
        started.append(event.id)
        time.sleep(chance.uniform(0, delay))
        return [f"{event.id} {n}" for n in range(chance.choice((1, 1, 2, 20)))]

    def answered(sent: str, got: object) -> None:
        if got != sent:
            out_of_step.append(f"{sent}: {got}")

    @consumer.on("plain", **limit)
    def plain(event: Envelope, session: Session) -> None:
        session.execute(text("INSERT INTO effects VALUES (:id, :payload)"), {"id": event.id, "payload": event.payload})
        for sent in steps(event):
            answered(sent, session.scalar(text("SELECT :sent"), {"sent": sent}))
        session.get_one(Account, event.key, with_for_update=True).balance += event.payload

    @consumer.on("raw", raw=True, **limit)
    def raw(event: Envelope, connection: psycopg.Connection[Any]) -> None:
        connection.execute("UPDATE accounts SET balance = balance + %s WHERE id = %s", (event.payload, event.key))
        for sent in steps(event):
            row = connection.execute("SELECT %s::text", (sent,)).fetchone()
            answered(sent, row and row[0])
        connection.execute("INSERT INTO effects VALUES (%s, %s)", (event.id, event.payload))

    @consumer.on("async", **limit)
    async def asynchronous(event: Envelope, session: AsyncSession) -> None:
        insert = text("INSERT INTO effects VALUES (:id, :payload)")
        await session.execute(insert, {"id": event.id, "payload": event.payload})
        for sent in steps(event):
            async with session.begin_nested():
                answered(sent, await session.scalar(text("SELECT :sent"), {"sent": sent}))
            await asyncio.sleep(0)
        (await session.get_one(Account, event.key, with_for_update=True)).balance += event.payload

    with Bench(database_url, redis_url, prefix) as bench, Proxy(port_of(database_url)) as proxy:
        proxy.delay_seconds = delay
        bench.db.execute("CREATE TABLE accounts (id text PRIMARY KEY, balance integer)")
        bench.db.execute("INSERT INTO accounts SELECT 'k' || i, 0 FROM generate_series(0, 19) i UNION VALUES ('A', 0)")
        bench.db.execute("CREATE TABLE effects (event_id uuid, amount integer)")
        for n in range(number):
            bench.write(type=("plain", "raw", "async")[n % 3], payload=1, key=f"k{n % 20}")
        relay = bench.relay()
        drain(relay)
        settings = ConsumerSettings(
            database_url=through(proxy, database_url), redis_url=redis_url, key_prefix=prefix, batch_size=5,  # type: ignore[arg-type]
            block_seconds=0.05, check_seconds=0.05, claim_seconds=10,
        )  # fmt: skip

        def applied() -> int:
            return int(bench.one("SELECT count(*) FROM effects"))

        def sessions(state: str = "%") -> int:
            return int(
                bench.one(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND application_name LIKE '%%consumer kinds' AND state LIKE %s",
                    state,
                )
            )

        for last in (number // 3, 2 * number // 3, number):  # twice it is stopped in the middle
            crew = Crew(consumer, settings, notes(4))
            thread = threading.Thread(target=crew.run)
            thread.start()
            try:
                eventually(lambda: applied() >= last, 60)  # noqa: B023
                if last == number:
                    bench.write(5, type="async", payload=50)
                    drain(relay)
                    eventually(lambda: applied() == number + 5)
                    eventually(lambda: not bench.one("SELECT count(*) FROM message_failures"))
                    eventually(lambda: bench.redis.xpending(bench.key(), "kinds")["pending"] == 0)
                    eventually(lambda: not sessions("idle in%") and not held(crew))  # noqa: B023
            finally:
                crew.stop()
                thread.join(30)
            assert not thread.is_alive()
            assert held(crew) == 0
            eventually(lambda: not sessions("idle in%"), 2)
            eventually(lambda: not sessions())
        assert out_of_step == []
        assert len(started) > 1.2 * (number + 5), "many have not come to their end"
        assert bench.one("SELECT balance FROM accounts WHERE id = 'A'") == 250
        assert bench.one("SELECT sum(balance) FROM accounts") == number + 250
        assert set(bench.effects().values()) == {1}
        assert bench.one("SELECT count(*), count(*) FILTER (WHERE outcome = 'applied') FROM processed_messages") == (
            number + 5, number + 5,
        )  # fmt: skip
        assert bench.dead() == 0


def held(crew: Crew) -> int:
    """How many connections are out of their pools."""
    return sum(worker._engine.pool.checkedout() for worker in crew._workers)  # type: ignore[attr-defined]
