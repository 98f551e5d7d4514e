"""`consumer.testing`: what it does with deliveries, sessions and failures. That it decides as the worker does, on PostgreSQL, is
in `tests/integration/test_rehearsal.py`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from consumer import Consumer, Envelope, Order, Reject, Retry, first_time
from consumer.testing import Rehearsal, envelope
from outbox import Event, Job, NoTransaction, SettingsError, record, record_async
from outbox.errors import HandlerMisuse, HandlerTimeout, PayloadMismatch
from outbox.transaction import refuse_autocommit


def event(type: str = "credited", payload: Any = 0, key: str | None = "a", version: int | None = None) -> Event:
    return Event(topic="wallets", type=type, key=key, version=version, payload=payload)


@dataclass
class Price:
    price: Decimal


@pytest.fixture
def wallet() -> Consumer:
    return Consumer("wallet", topics=["wallets"], retry=Retry(attempts=3))


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (key text, n integer)")
    yield engine
    engine.dispose()


def effects(engine: sa.Engine) -> list[tuple[str, int]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql("SELECT key, n FROM effect ORDER BY key, n")]  # type: ignore[misc]


def add(session: Session, event: Any) -> None:
    session.execute(sa.text("INSERT INTO effect VALUES (:key, :n)"), {"key": event.key, "n": event.payload})


# --- deliveries ----------------------------------------------------------------------------------------------------


def test_each_event_is_delivered_twice_and_applied_once(wallet: Consumer) -> None:
    seen: list[int] = []
    wallet.on("credited")(lambda event, session: seen.append(event.payload))
    result = Rehearsal(wallet).deliver(*(event(payload=n) for n in range(20)))
    assert sorted(seen) == list(range(20))
    assert result.outcomes == {"applied": 20}
    assert result.deliveries == {"applied": 20, "duplicate": 20}


def test_the_order_is_another_one_each_time_and_that_of_its_seed(
    wallet: Consumer, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    wallet.on("credited")(lambda event, session: seen.append(event.payload))

    def order(**options: Any) -> list[int]:
        seen.clear()
        Rehearsal(wallet).deliver(*(event(payload=n, key=None) for n in range(30)), **options)
        return seen.copy()

    assert order() != order()
    assert order(seed=7) == order(seed=7) != order(seed=8)
    assert "seed=7" in capsys.readouterr().out
    assert order(shuffled=False) == list(range(30))
    assert "seed" not in capsys.readouterr().out


def test_the_ledger_is_kept_from_one_call_to_the_next(wallet: Consumer) -> None:
    wallet.on("moved", order=Order.LATEST)(lambda event, session: None)
    rehearsal = Rehearsal(wallet)
    first, late, again = event("moved", version=5), event("moved", version=4), event("moved", version=6)
    assert rehearsal.deliver(first).outcomes == {"applied": 1}
    result = rehearsal.deliver(first, late, again, shuffled=False)
    assert [result.outcome(e) for e in (first, late, again)] == ["duplicate", "stale", "applied"]
    assert result.outcome(event()) is None


def test_a_sequence_is_applied_in_order_however_it_comes(wallet: Consumer) -> None:
    seen: list[int | None] = []
    wallet.on("step", order=Order.NEXT)(lambda event, session: seen.append(event.version))
    rehearsal = Rehearsal(wallet)
    for seed in range(20):
        seen.clear()
        steps = [event("step", key=str(seed), version=version) for version in (1, 2, 3, 5)]
        result = rehearsal.deliver(*steps, seed=seed)
        assert seen == [1, 2, 3], f"seed {seed}"
        assert [w.event.version for w in result.waiting if w.event.key == str(seed)] == [5]
        assert result.outcome(steps[3]) == "parked"
        rehearsal.deliver(event("step", key=str(seed), version=4))
        assert seen == [1, 2, 3, 4, 5], f"seed {seed}"


def test_what_has_no_handler_is_said_and_runs_when_there_is_one(wallet: Consumer) -> None:
    wallet.ignore("boring")
    rehearsal, odd = Rehearsal(wallet), event("odd")
    result = rehearsal.deliver(odd, event("boring"), strict=False)
    assert result.outcomes == {"parked": 1, "ignored": 1}
    assert [(w.event.type, w.reason) for w in result.waiting] == [("odd", "no_handler")]
    with pytest.raises(AssertionError, match="other .* waits: no_handler"):
        rehearsal.deliver(event("other"))
    wallet.on("odd")(lambda event, session: None)
    result = rehearsal.deliver()
    assert (result.outcome(odd), [w.event.type for w in result.waiting]) == ("applied", ["other"])


def test_batches_come_as_lists_of_several_sizes(wallet: Consumer) -> None:
    sizes: list[int] = []
    wallet.on_batch("credited")(lambda events, session: sizes.append(len(events)))
    Rehearsal(wallet).deliver(*(event(payload=n) for n in range(50)), shuffled=False)
    assert sizes == [50]
    for seed in range(5):
        Rehearsal(wallet).deliver(*(event(payload=n) for n in range(50)), seed=seed)
    assert sum(sizes) == 300
    assert len(set(sizes)) > 3


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_failing_handler_fails_the_test_and_says_with_what(wallet: Consumer) -> None:
    @wallet.on("credited")
    def credit(event: Any, session: Any) -> None:
        raise ZeroDivisionError("by zero")

    poison = event()
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        Rehearsal(wallet).deliver(poison, seed=3)
    (note,) = caught.value.__notes__
    assert str(poison.id) in note
    assert "seed=3" in note


def test_failures_are_tried_again_as_often_as_the_policy_says(wallet: Consumer) -> None:
    tries: list[str] = []

    @wallet.on("credited")
    def credit(event: Any, session: Any) -> None:
        tries.append(event.payload)
        if event.payload == "bad" or (event.payload == "flaky" and tries.count("flaky") < 3):
            raise ValueError(event.payload)

    good, bad, flaky = events = [event(payload=payload) for payload in ("good", "bad", "flaky")]
    result = Rehearsal(wallet).deliver(*events, strict=False)
    assert [result.outcome(e) for e in (good, bad, flaky)] == ["applied", "dead", "applied"]
    assert [f.attempt for f in result.failures if f.event.id == bad.id] == [1, 2, 3]
    assert [f.attempt for f in result.failures if f.event.id == flaky.id] == [1, 2]
    assert all(isinstance(f.error, ValueError) for f in result.failures)
    assert [(d.event.id, d.reason) for d in result.dead] == [(bad.id, "attempts")]
    assert "ValueError: bad" in str(result.dead[0].error)
    assert tries.count("good") >= 1, "with a savepoint that was rolled back it may have run more than once"


def test_what_is_rejected_is_dead_at_once_and_what_is_nobodys_fault_waits(wallet: Consumer) -> None:
    down = True

    @wallet.on("credited", retry=Retry(attempts=2, retry_on=(ConnectionError,)))
    def credit(event: Any, session: Any) -> None:
        if event.payload == "never":
            raise Reject("never")
        if down:
            raise ConnectionError("no service")

    rehearsal, never, later = Rehearsal(wallet), event(payload="never"), event(payload="later")
    result = rehearsal.deliver(never, later, strict=False)
    assert [(d.event.id, d.reason) for d in result.dead] == [(never.id, "rejected")]
    assert [(w.event.id, w.reason) for w in result.waiting] == [(later.id, "failed")]
    down = False
    assert rehearsal.deliver(never).outcomes == {"duplicate": 1, "applied": 1}


def test_an_order_wants_keys_and_versions(wallet: Consumer) -> None:
    wallet.on("moved", order=Order.LATEST)(lambda event, session: None)
    with pytest.raises(AssertionError, match="was put aside: no_version"):
        Rehearsal(wallet).deliver(event("moved"))


def test_a_payload_that_does_not_fit_says_where(wallet: Consumer) -> None:
    @wallet.on("credited")
    def credit(event: Envelope[int], session: None) -> None: ...

    with pytest.raises(AssertionError, match=r"was put aside: payload \(payload: Expected `int`, got `str`\); deliver"):
        Rehearsal(wallet).deliver(event(payload="5"))


def test_a_key_is_met_for_the_first_time_in_postgresql_only(engine: sa.Engine) -> None:
    with Session(engine) as session, pytest.raises(SettingsError, match="first_time needs PostgreSQL, not sqlite"):
        first_time(session, "webhooks", "1")


# --- sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["new", "same", "scoped"])
def test_a_failed_handler_leaves_nothing_behind_and_the_others_stay(
    wallet: Consumer, engine: sa.Engine, kind: str
) -> None:
    @wallet.on("credited")
    def credit(event: Any, session: Session) -> None:
        with session.begin_nested():
            add(session, event)
        record(session, Event(topic="receipts", type="receipt", payload=event.payload))
        if event.payload % 3 == 0:
            raise ValueError

    same = Session(engine)
    factory: dict[str, Callable[[], Any]] = {
        "new": lambda: Session(engine), "same": lambda: same, "scoped": lambda: scoped_session(sessionmaker(engine)),
    }  # fmt: skip
    result = Rehearsal(wallet, factory[kind]).deliver(*(event(payload=n) for n in range(9)), strict=False)
    wanted = [1, 2, 4, 5, 7, 8]
    assert effects(engine) == [("a", n) for n in wanted]
    assert sorted(e.payload for e in result.recorded) == wanted, "and what it recorded is gone with it"
    same.close()


def test_what_is_recorded_can_be_delivered_to_the_next_consumer(wallet: Consumer, engine: sa.Engine) -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=timezone(timedelta(hours=3)))

    @wallet.on("credited")
    def credit(event: Any, session: Session) -> None:
        record(
            session,
            Event(topic="mails", type="receipt", key="a", version=7, payload={"n": Decimal("0.10")}, time=at,
                  source="wallet", headers={"traceparent": "00-1"}),
            Event(topic="mails", type="raw", payload=b"\x00\xff", content_type="image/png"),
        )  # fmt: skip

    mails, seen = Consumer("mails", topics=["mails"]), []
    mails.on("receipt")(lambda event, session: seen.append(event))
    mails.on("raw")(lambda event, session: seen.append(event))
    result = Rehearsal(wallet, lambda: Session(engine)).deliver(event())
    assert len(result.recorded) == 2
    assert Rehearsal(mails).deliver(*result.recorded, shuffled=False).outcomes == {"applied": 2}
    raw, receipt = sorted(seen, key=lambda envelope: envelope.type)
    assert (raw.payload, raw.content_type) == (b"\x00\xff", "image/png")
    assert (receipt.payload, receipt.key, receipt.version, receipt.time) == ({"n": "0.10"}, "a", 7, at)
    assert (receipt.source, receipt.headers) == ("wallet", {"traceparent": "00-1"})


def test_sqlite_as_python_3_12_has_it_is_not_in_autocommit_mode() -> None:
    refuse_autocommit(SimpleNamespace(autocommit=-1))  # sqlite3.LEGACY_TRANSACTION_CONTROL
    with pytest.raises(NoTransaction):
        refuse_autocommit(SimpleNamespace(autocommit=True))


def test_the_users_own_connection_gets_no_listener_that_stays(wallet: Consumer, engine: sa.Engine) -> None:
    wallet.on("credited")(lambda event, session: record(session, Event(topic="x", type="x", payload=1)))
    with engine.connect() as connection:
        rehearsal = Rehearsal(wallet, lambda: Session(connection))
        assert len(rehearsal.deliver(event()).recorded) == 1
        assert len(rehearsal.deliver(event()).recorded) == 1


def test_a_handler_must_not_end_the_transaction(wallet: Consumer, engine: sa.Engine) -> None:
    @wallet.on("credited")
    def credit(event: Any, session: Session) -> None:
        session.commit()

    @wallet.on("sneaky")
    def sneaky(event: Any, session: Session) -> None:
        session.connection().exec_driver_sql("COMMIT")

    for type in ("credited", "sneaky"):
        with pytest.raises(HandlerMisuse, match="must not commit|ended the transaction"):
            Rehearsal(wallet, lambda: Session(engine)).deliver(event(type))


def test_stand_ins_are_handed_on_as_they_are(wallet: Consumer) -> None:
    class Fake:
        def __init__(self) -> None:
            self.added: list[Any] = []

    fake = Fake()
    wallet.on("credited")(lambda event, session: session.added.append(event.payload))
    wallet.on("raw", raw=True)(lambda event, connection: connection.added.append("raw"))
    assert Rehearsal(wallet, lambda: fake).deliver(event(), event("raw")).outcomes == {"applied": 2}
    assert sorted(map(str, fake.added)) == ["0", "raw"]


def test_sessions_that_cannot_be_used_are_refused(wallet: Consumer, engine: sa.Engine) -> None:
    wallet.on("credited")(lambda event, session: None)
    wallet.on("raw", raw=True)(lambda event, connection: None)
    with pytest.raises(SettingsError, match="raw=True needs a session over psycopg"):
        Rehearsal(wallet, lambda: Session(engine)).deliver(event("raw"))
    with pytest.raises(SettingsError, match="not an AsyncSession"):
        Rehearsal(wallet, AsyncSession).deliver(event())
    nowhere = sa.create_engine("sqlite:////nowhere/at/all")
    with pytest.raises(SettingsError, match="session: it cannot begin a transaction"):
        Rehearsal(wallet, lambda: Session(nowhere)).deliver(event())


def test_a_commit_that_fails_is_the_events_failure(wallet: Consumer) -> None:
    engine = sa.create_engine("sqlite://")
    sa.event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA foreign_keys = ON"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE parent (id integer PRIMARY KEY)")
        connection.exec_driver_sql("CREATE TABLE child (id integer REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")

    @wallet.on("credited")
    def credit(event: Any, session: Session) -> None:
        table = "child" if event.payload else "parent"
        session.execute(sa.text(f"INSERT INTO {table} VALUES (:n)"), {"n": event.payload + 1})  # noqa: S608 - two names

    good, bad = event(payload=0), event(payload=1)
    result = Rehearsal(wallet, lambda: Session(engine)).deliver(good, bad, strict=False)
    assert (result.outcome(good), result.outcome(bad)) == ("applied", "dead")
    assert {f.event.id for f in result.failures} == {bad.id}


def test_a_commit_that_fails_takes_everything_with_it(wallet: Consumer, engine: sa.Engine) -> None:
    class Refusing(Session):
        left = 1

        def commit(self) -> None:
            if Refusing.left:
                Refusing.left -= 1
                raise OSError("lost")
            super().commit()

    wallet.on("credited")(lambda event, session: add(session, event))
    result = Rehearsal(wallet, lambda: Refusing(engine)).deliver(*(event(payload=n) for n in range(3)), shuffled=False)
    assert result.outcomes == {"applied": 3}
    assert effects(engine) == [("a", 0), ("a", 1), ("a", 2)], "and is run again, once"


# --- envelopes -----------------------------------------------------------------------------------------------------


def test_an_envelope_is_what_a_handler_gets() -> None:
    at = datetime(2026, 3, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=3)))
    made = Event(
        topic="wallets", type="credited", key="ä", version=3, time=at, headers={"traceparent": "00"}, source="/app",
        payload={"n": 2**70, "price": Decimal("0.10"), "ids": (uuid.UUID(int=1),)},
    )  # fmt: skip
    got = envelope(made, delivery_count=2)
    assert got.payload == {"n": 2**70, "price": "0.10", "ids": [str(uuid.UUID(int=1))]}
    assert (got.id, got.topic, got.type, got.key, got.version) == (made.id, "wallets", "credited", "ä", 3)
    assert (got.time, got.source, got.headers, got.delivery_count) == (at, "/app", {"traceparent": "00"}, 2)
    assert got.time is not None
    assert got.time.tzinfo == UTC
    assert got.data == made.data
    derived = envelope(Event(topic="wallets", type="x", payload=1, id=got.derived_id("x")))
    assert derived.time is not None, "as what is recorded has one"


def test_an_envelope_has_a_payload_of_the_type_that_is_asked_for() -> None:
    assert envelope(event(payload={"price": "0.10"}), Price).payload == Price(Decimal("0.10"))
    assert envelope(event(payload=5), int, delivery_count=2).payload == 5
    with pytest.raises(PayloadMismatch, match=r"payload\.price: Expected `decimal`, got `null`"):
        envelope(event(payload={"price": None}), Price)


# --- handlers of all kinds -----------------------------------------------------------------------------------------


@dataclass
class Amount:
    n: int


def test_async_and_typed_handlers_are_called_as_in_production(wallet: Consumer, engine: sa.Engine) -> None:
    @wallet.on("credited", timeout_seconds=60)
    async def credit(event: Envelope[Amount], session: AsyncSession) -> None:
        await asyncio.sleep(0)
        await session.execute(sa.text("INSERT INTO effect VALUES ('a', :n)"), {"n": event.payload.n})
        await record_async(session, Event(topic="receipts", type="receipt", payload=event.payload.n))
        if event.payload.n == 3:
            raise ValueError

    @wallet.on_batch("debited")
    async def debit(events: list[Envelope[Amount]], session: AsyncSession) -> None:
        await session.execute(
            sa.text("INSERT INTO effect VALUES ('b', :n)"), [{"n": event.payload.n} for event in events]
        )

    events = [event(payload={"n": n}) for n in range(5)]
    odd, batch = event(payload={"n": "one"}), [event("debited", {"n": n}) for n in (1, 2)]
    result = Rehearsal(wallet, lambda: Session(engine)).deliver(*events, odd, *batch, strict=False)
    assert effects(engine) == [("a", 0), ("a", 1), ("a", 2), ("a", 4), ("b", 1), ("b", 2)]
    assert sorted(e.payload for e in result.recorded) == [0, 1, 2, 4]
    assert sorted((d.event.id, d.reason) for d in result.dead) == sorted(
        [(events[3].id, "attempts"), (odd.id, "payload")]
    )


def test_an_async_handler_gets_the_stand_in_as_it_is(wallet: Consumer) -> None:
    seen: list[Any] = []

    @wallet.on("credited")
    async def credit(event: Any, session: Any) -> None:
        await asyncio.sleep(0)
        seen.append(session)

    Rehearsal(wallet, lambda: "fake").deliver(event())
    assert seen == ["fake"]


def test_a_time_out_is_a_failure_here_too(wallet: Consumer) -> None:
    @wallet.on("credited", timeout_seconds=0.01)
    def credit(event: Any, session: Any) -> None:
        while True:
            pass

    with pytest.raises(HandlerTimeout):
        Rehearsal(wallet).deliver(event())


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_jobs_are_rehearsed_also_those_that_a_handler_records_for_later() -> None:
    """From the event to the receipt: what one consumer records is what the other is given."""
    wallet, mailer = Consumer("wallet", topics=["wallets"]), Consumer("mailer", queues=["mail"])
    sent: list[Any] = []

    @wallet.on("credited")
    def credit(event: Envelope, session: Session) -> None:
        for name, later in (("receipt", None), ("survey", timedelta(days=2))):
            record(session, Job(
                queue="mail", type=name, payload={"to": event.key}, id=event.derived_id(name), run_at=later,
                priority="low", lifo=True, headers={"tenant": "t1"},
            ))  # fmt: skip

    @mailer.job("receipt")
    @mailer.job("survey")
    def send(job: Envelope, session: Session) -> Any:
        sent.append((job.type, job.payload["to"], job.topic, dict(job.headers), job.run_at))
        return {"message": job.type}

    recorded = Rehearsal(wallet, lambda: Session(sa.create_engine("sqlite://"))).deliver(event()).recorded
    assert [type(job) for job in recorded] == [Job, Job]
    receipt, survey = recorded
    assert isinstance(survey, Job)
    assert isinstance(survey.run_at, datetime)
    assert timedelta(days=1) < survey.run_at - datetime.now(UTC) < timedelta(days=3)
    assert (survey.queue, survey.priority, survey.lifo, survey.headers) == ("mail", "low", True, {"tenant": "t1"})

    result = Rehearsal(mailer).deliver(*recorded)
    assert result.outcomes == {"applied": 2}
    assert result.deliveries == {"applied": 2, "duplicate": 2}
    assert sorted(sent) == [
        ("receipt", "a", "queue/mail", {"tenant": "t1"}, None),
        ("survey", "a", "queue/mail", {"tenant": "t1"}, survey.run_at),
    ]
    assert result.returned == {receipt.id: {"message": "receipt"}, survey.id: {"message": "survey"}}


def test_a_rehearsed_job_that_fails_is_tried_again_and_its_result_may_be_too_much() -> None:
    mailer = Consumer("mailer", queues=["mail"], retry=Retry(attempts=2))
    results: Iterator[Any] = iter([ValueError("not now"), "x" * 70_000])

    @mailer.job("send")
    def send(job: Envelope, session: Any) -> Any:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    job = Job(queue="mail", type="send", payload=None)
    result = Rehearsal(mailer).deliver(job, strict=False)
    assert result.outcome(job) == "applied"
    assert [failed.attempt for failed in result.failures] == [1]
    assert result.returned == {}  # and no failure
