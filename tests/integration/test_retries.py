"""What becomes of events whose handler fails, that come early, or that nobody handles: how often, when, and in which order."""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Order, Reject, Retry
from consumer.dead_letters import choose, requeue
from consumer.ledger import Ledger, Operations, Selection, Waiting
from consumer.process import DatabaseUnavailable, Outcome, Processor
from consumer.work import Limits
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.errors import SettingsError
from outbox.transport import Delivery
from outbox.transport.memory import MemoryTransport
from tests.integration.test_consumer import (
    SOON,
    TOPIC,
    Database,
    Fields,
    again,
    credit,
    deliveries,
    entry,
    rename,
    wallet,
)
from tests.waiting import eventually

APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY, PARKED, HELD = Outcome


@pytest.fixture
def start(start: Callable[..., Worker]) -> Callable[..., Worker]:
    return partial(start, claim_seconds=60)


class Broken:
    """A handler that fails with what it is told, after its effect."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.started: list[Envelope] = []

    def __call__(self, event: Envelope, session: Session) -> None:
        self.started.append(event)
        credit(event, session)
        if self.error:
            raise self.error


def fails(handler: Any, retry: Retry | None = None, **options: Any) -> Consumer:
    consumer = wallet()
    consumer.on("bad", retry=retry, **options)(handler)
    return consumer


def failing(database: Database) -> tuple[str, int, int, int]:
    found: tuple[str, int, int, int] = database.one(
        "SELECT reason, attempts, tries, starts FROM public.message_failures"
    )
    return found


# --- how often ---------------------------------------------------------------------------------------------------------


def test_a_handler_that_always_fails_has_so_many_attempts(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Broken(ValueError("no"))
    processor = Processor(fails(handler, Retry(attempts=3)), engine)
    batch = deliveries(entry(), entry("bad"), entry())
    assert processor.process(batch) == [APPLIED, RETRY, APPLIED]
    assert failing(database) == ("failed", 1, 1, 0)
    assert again(processor, database) == [RETRY]
    assert failing(database) == ("failed", 2, 2, 0)
    assert again(processor, database) == [DEAD]
    assert database.waiting == {}
    assert [event.delivery_count for event in handler.started] == [1, 2, 3]
    assert database.processed == {"applied": 2, "dead": 1}
    assert database.effects == 2
    kept = database.one("""
        SELECT reason, error_class, error, attempts, topic, type, key, cut, first_failed_at < created_at, fields
        FROM public.dead_letters
    """)
    assert kept[:-1] == ("attempts", "ValueError", "ValueError: no", 3, TOPIC, "bad", "A", False, True)
    assert dict(zip(kept[-1][::2], kept[-1][1::2], strict=True)) == batch[1].fields
    assert processor.process(batch) == [DUPLICATE] * 3
    assert [(r.action, r.exc_info is not None) for r in caplog.records if hasattr(r, "action")] == [
        ("handler_failed", True), ("handler_failed", False), ("dead_letter", True),
    ]  # fmt: skip


def test_what_fails_is_applied_once_when_it_can_be(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Broken(ValueError("no"))
    processor = Processor(fails(handler), engine)
    batch = deliveries(entry("bad"))
    assert processor.process(batch) == [RETRY]
    assert processor.process(batch) == [DUPLICATE]  # it came once more, and waits
    handler.error = None
    assert again(processor, database) == [APPLIED]
    assert processor.process(batch) == [DUPLICATE]
    assert (database.effects, database.processed, database.waiting) == (1, {"applied": 1}, {})


@dataclass(frozen=True)
class NotOurs(Reject):
    """As people write their errors; nothing can be set on it."""

    why: str


@pytest.mark.parametrize("timeout_seconds", [None, 30])
def test_an_error_that_is_frozen_is_what_it_is(
    timeout_seconds: float | None, database: Database, engine: sqlalchemy.Engine
) -> None:
    processor = Processor(fails(Broken(NotOurs("no")), timeout_seconds=timeout_seconds), engine)
    assert processor.process(deliveries(entry(), entry("bad"), entry())) == [APPLIED, DEAD, APPLIED]
    assert database.one("SELECT reason, error_class FROM public.dead_letters") == ("rejected", "NotOurs")
    assert database.effects == 2


@pytest.mark.parametrize("error", [Reject("never"), KeyError("key"), LookupError("key")], ids=repr)
def test_what_is_rejected_is_put_aside_at_once(error: Exception, database: Database, engine: sqlalchemy.Engine) -> None:
    retry = Retry(reject_on=(LookupError,))
    assert Processor(fails(Broken(error), retry), engine).process(deliveries(entry("bad"), entry())) == [DEAD, APPLIED]
    assert database.one("SELECT reason, error_class, attempts FROM public.dead_letters") == (
        "rejected", type(error).__name__, 1,
    )  # fmt: skip
    assert database.effects == 1


def raises(state: str) -> Callable[[Envelope, Session], None]:
    def handler(event: Envelope, session: Session) -> None:
        session.execute(text(f"DO $$ BEGIN RAISE 'no' USING ERRCODE = '{state}'; END $$"))

    return handler


@pytest.mark.parametrize(
    "handler",
    [raises("40001"), raises("40P01"), raises("55P03"), raises("53200"), Broken(ConnectionError("away"))],
    ids=["serialization", "deadlock", "lock", "memory", "retry_on"],
)
def test_what_says_nothing_about_the_event_is_not_counted(
    handler: Any, database: Database, engine: sqlalchemy.Engine
) -> None:
    retry = Retry(attempts=1, retry_on=(ConnectionError,), reject_on=(OSError,))
    processor = Processor(fails(handler, retry), engine)
    assert processor.process(deliveries(entry(), entry("bad"), entry())) == [APPLIED, RETRY, APPLIED]
    for tries in range(2, 5):
        assert again(processor, database) == [RETRY]
        assert failing(database) == ("failed", 0, tries, 0)
    assert database.effects == 2


def test_the_consumers_policy_is_for_handlers_that_have_none(database: Database, engine: sqlalchemy.Engine) -> None:
    consumer = Consumer("ledger", topics=[TOPIC], retry=Retry(attempts=1))
    consumer.on("bad")(Broken(ValueError("no")))
    consumer.on("worse", retry=Retry(attempts=2))(Broken(ValueError("no")))
    assert Processor(consumer, engine).process(deliveries(entry("bad"), entry("worse"))) == [DEAD, RETRY]


@pytest.mark.parametrize(("arguments", "said"), [
    ({"attempts": 0}, "attempts must be"), ({"attempts": True}, "attempts must be"), ({"attempts": 2.0}, "attempts must be"),
    ({"first_seconds": 0}, "first_seconds must be"), ({"longest_seconds": 86_401}, "longest_seconds must be"),
    ({"first_seconds": float("nan")}, "first_seconds must be"), ({"first_seconds": "1"}, "first_seconds must be"),
    ({"first_seconds": 9, "longest_seconds": 8}, "longer than longest_seconds"),
    ({"reject_on": ValueError}, "reject_on must be a tuple"), ({"retry_on": (ValueError("x"),)}, "retry_on must be a tuple"),
])  # fmt: skip
def test_a_policy_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Retry(**arguments)
    with pytest.raises(SettingsError, match="retry must be a Retry"):
        wallet().on("bad", retry=3)  # type: ignore[arg-type]


# --- when --------------------------------------------------------------------------------------------------------------


def test_pauses_double_by_the_databases_clock(database: Database, engine: sqlalchemy.Engine) -> None:
    retry = Retry(attempts=100, first_seconds=10, longest_seconds=60)
    processor = Processor(fails(Broken(ValueError()), retry), engine)
    processor.process(deliveries(entry("bad")))
    pauses = []
    for _ in range(6):
        pauses.append(
            float(
                database.one("SELECT extract(epoch FROM next_attempt_at - last_failed_at) FROM public.message_failures")
            )
        )
        again(processor, database)
    for pause, longest in zip(pauses, [10, 20, 40, 60, 60, 60], strict=True):
        assert longest * 0.75 <= pause <= longest + 0.1


def test_what_fails_together_does_not_come_back_together(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(fails(Broken(ValueError()), Retry(attempts=100, first_seconds=100)), engine)
    assert processor.process(deliveries(*(entry("bad") for _ in range(20)))) == [RETRY] * 20
    due = [when for (when,) in database.connection.execute("SELECT next_attempt_at FROM public.message_failures")]
    assert len({round(when.timestamp(), 2) for when in due}) > 15
    assert max(due) - min(due) > timedelta(seconds=10), "of 25"


def test_however_many_processes_a_try_comes_once_and_when_it_is_due(
    database: Database, start: Callable[..., Worker]
) -> None:
    transport = MemoryTransport()
    started: list[float] = []

    def handler(event: Envelope, session: Session) -> None:
        started.append(time.monotonic())
        raise ValueError

    transport.add(TOPIC, entry("bad"))
    consumer = fails(handler, Retry(attempts=4, first_seconds=0.4, longest_seconds=0.4))
    workers = [start(consumer, transport) for _ in range(4)]

    def dead() -> bool:
        for worker in workers:
            worker.run_once()
        return database.dead == ["attempts"]

    eventually(dead)
    assert len(started) == 4
    assert all(later - earlier >= 0.3 for earlier, later in itertools.pairwise(started))


def test_what_waits_needs_nothing_of_redis(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    handler = Broken(ValueError())
    transport.add(TOPIC, entry("bad"))
    worker = start(fails(handler), transport)
    assert worker.run_once() == {RETRY: 1}
    assert transport.pending("ledger", TOPIC) == 0
    transport.flush()
    handler.error = None
    eventually(lambda: worker.run_once() == {APPLIED: 1})
    assert (database.effects, database.waiting) == (1, {})


def test_a_lease_that_is_over_changes_nothing(database: Database, engine: sqlalchemy.Engine) -> None:
    """A process was frozen before its transaction; another one has run the event meanwhile, or is at it."""
    handler = Broken(ValueError())
    processor, other = (Processor(fails(handler), engine) for _ in range(2))
    processor.process(deliveries(entry("bad")))
    database.let_go()
    late, _ = processor.due(0, 10)
    handler.error = None
    (leased,) = other.due(60, 10)[0]
    assert leased.starts == 2
    assert processor.process(late) == [DUPLICATE]
    assert other.process([leased]) == [APPLIED]
    assert processor.process(late) == [DUPLICATE]
    assert (database.effects, database.waiting) == (1, {})


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres"])
def test_what_waits_comes_in_every_style_of_dates(style: str, database: Database, database_url: str) -> None:
    """psycopg reads no other than ISO's as text; the process ended."""
    database.connection.execute(
        sql.SQL("ALTER DATABASE {} SET datestyle = {}").format(
            sql.Identifier(database.connection.info.dbname), sql.Literal(style)
        )
    )
    engine = schemas.engine(database_url, "another style")
    processor = Processor(fails(Broken(ValueError())), engine)
    assert processor.process(deliveries(entry("bad"))) == [RETRY]
    assert again(processor, database) == [RETRY]
    engine.dispose()


def test_of_large_events_few_are_leased_at_a_time(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(fails(Broken(ValueError())), engine)
    large = [entry("bad", {"amount": base64.b64encode(os.urandom(6 << 20)).decode()}) for _ in range(5)]
    assert processor.process(deliveries(*large)) == [RETRY] * 5
    database.let_go()
    leased = [processor.due(60, 500)[0] for _ in range(3)]
    assert list(map(len, leased)) == [2, 2, 1]
    assert len({row.id for some in leased for row in some}) == 5


def test_what_is_given_back_is_as_it_was(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(fails(Broken(ValueError())), engine)
    processor.process(deliveries(entry("bad")))
    assert processor.due(60, 10) == ([], pytest.approx(0, abs=0.1))
    database.let_go()
    leased, _ = processor.due(60, 10)
    assert failing(database) == ("failed", 1, 1, 1)
    processor.release(leased)
    assert failing(database) == ("failed", 1, 1, 0)
    assert processor.due(60, 10)[0] != []


def test_a_commit_without_an_answer_while_something_waits(
    database: Database, engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost with the reply to COMMIT: what was done is seen in the ledger, what was not is done."""
    handler = Broken(ValueError())
    processor = Processor(fails(handler), engine)
    processor.process(deliveries(entry("bad"), entry("bad", subject="B")))
    handler.error = None
    database.let_go()
    leased, _ = processor.due(60, 10)
    from sqlalchemy.engine.default import DefaultDialect

    commit, lost = DefaultDialect.do_commit, []

    def commits_and_is_lost(self: Any, connection: Any) -> None:
        commit(self, connection)
        if not lost:
            lost.append(connection)
            connection.driver_connection.close()
            raise psycopg.OperationalError("gone")

    monkeypatch.setattr(DefaultDialect, "do_commit", commits_and_is_lost)
    assert processor.process(leased) == [APPLIED, APPLIED]
    assert lost
    assert (database.effects, database.waiting, database.processed) == (2, {}, {"applied": 2})


# --- no handler --------------------------------------------------------------------------------------------------------


def test_o_34_a_type_that_nobody_knows_waits_for_a_deploy(database: Database, start: Callable[..., Worker]) -> None:
    """The old version of a service meets B; the new one handles it, if it comes in time."""
    transport = MemoryTransport()
    unknown = entry("B")
    for fields in (entry(), unknown, entry()):
        transport.add(TOPIC, fields)
    old = start(wallet(), transport)
    assert old.run_once() == {APPLIED: 2, PARKED: 1}
    for _ in range(5):
        assert old.run_once() == {}
    assert (database.waiting, database.dead) == ({"no_handler": 1}, [])
    newer = wallet()
    newer.on("B")(credit)
    new = start(newer, transport)
    eventually(lambda: new.run_once() == {APPLIED: 1})
    assert (database.effects, database.waiting, database.dead) == (3, {}, [])


def test_o_34_and_is_put_aside_when_the_grace_is_over(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    unknown = entry("B")
    for fields in (entry(), unknown, entry()):
        transport.add(TOPIC, fields)
    worker = start(wallet(), transport, no_handler_seconds=1.2)
    began = time.monotonic()
    eventually(lambda: worker.run_once() is not None and database.dead == ["no_handler"])
    assert time.monotonic() - began >= 1.2
    assert (database.effects, database.processed) == (2, {"applied": 2, "dead": 1})
    kept = database.one("SELECT fields FROM public.dead_letters")
    assert dict(zip(kept[::2], kept[1::2], strict=True)) == unknown


def test_a_type_that_is_ignored_now_waits_no_longer(database: Database, engine: sqlalchemy.Engine) -> None:
    assert Processor(wallet(), engine).process(deliveries(entry("B"))) == [PARKED]
    newer = wallet()
    newer.ignore("B")
    processor = Processor(newer, engine)
    processor.wake()
    assert processor.process(processor.due(60, 10)[0]) == [IGNORED]
    assert database.waiting == {}


# --- Order.NEXT --------------------------------------------------------------------------------------------------------


class Steps:
    """Notes the versions of each key in the order in which they are applied; fails with those it is told to."""

    def __init__(self) -> None:
        self.bad: set[int | None] = set()

    def __call__(self, event: Envelope, session: Session) -> None:
        session.execute(
            text("INSERT INTO public.effects VALUES ('ledger', :id, :version)"),
            {"id": event.id, "version": event.version},
        )
        if event.version in self.bad:
            raise ValueError("not now")


def sequence(handler: Any, retry: Retry = SOON, **options: Any) -> Consumer:
    consumer = Consumer("ledger", topics=[TOPIC, "others"], retry=retry)
    consumer.on("opened", order=Order.NEXT)(handler)
    consumer.on("closed", order=Order.NEXT)(handler)
    return consumer


def step(version: int, kind: str = "opened", key: str = "A") -> Fields:
    return entry(kind, version=version, subject=key)


def applied(database: Database) -> list[int]:
    return [int(n) for n in database.all("SELECT amount FROM public.effects ORDER BY ctid")]


def test_next_is_one_after_the_other_over_all_types(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(sequence(Steps()), engine)
    batch = deliveries(step(2, "closed"), step(4, "closed"), step(1), step(1, key="B"))
    assert processor.process(batch) == [APPLIED, PARKED, APPLIED, APPLIED]
    assert database.waiting == {"gap": 1}
    assert processor.due(60, 10)[0] == []
    assert processor.process(deliveries(step(3), first=9)) == [APPLIED]
    assert processor.process(processor.due(60, 10)[0]) == [APPLIED]
    assert [n for n in applied(database) if n > 1] == [2, 3, 4]
    assert processor.process(deliveries(step(4), first=10)) == [STALE]
    assert processor.process(deliveries(step(2), first=1, stream="others")) == [
        PARKED
    ]  # another topic, another sequence


def test_next_wakes_what_follows_without_a_gap_and_no_more(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(sequence(Steps()), engine)
    early = [2, 3, 4, 6, 7]
    assert processor.process(deliveries(*(step(n) for n in early))) == [PARKED] * 5
    assert processor.process(deliveries(step(1), first=20)) == [APPLIED]
    woken, _ = processor.due(60, 100)
    assert processor.process(woken) == [APPLIED] * 3
    assert processor.due(60, 100)[0] == []
    assert processor.process(deliveries(step(5), first=21)) == [APPLIED]
    assert processor.process(processor.due(60, 100)[0]) == [APPLIED] * 2
    assert applied(database) == [1, 2, 3, 4, 5, 6, 7]


def test_next_waits_for_one_that_fails(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Steps()
    handler.bad = {2}
    processor = Processor(sequence(handler), engine)
    assert processor.process(deliveries(*(step(n) for n in (1, 2, 3)))) == [APPLIED, RETRY, PARKED]
    assert database.waiting == {"failed": 1, "gap": 1}
    handler.bad = set()
    assert again(processor, database) in ([APPLIED, APPLIED], [APPLIED, PARKED, APPLIED])
    assert applied(database) == [1, 2, 3]
    assert database.waiting == {}


def test_a_gap_that_does_not_close_ends_in_dead_letters(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(sequence(Steps()), engine, limits=Limits(gap_seconds=0.2))
    assert processor.process(deliveries(step(1), step(3))) == [APPLIED, PARKED]
    leased = eventually(lambda: processor.due(60, 10)[0])
    assert processor.process(leased) == [DEAD]
    assert (database.dead, database.waiting) == (["gap"], {})
    assert applied(database) == [1]


def test_a_gap_that_others_leave_does_not_keep_waiting_longer(database: Database, engine: sqlalchemy.Engine) -> None:
    """Woken in vain, an event waits until its own time is over, not from then on again."""
    processor = Processor(sequence(Steps()), engine, limits=Limits(gap_seconds=600))
    assert processor.process(deliveries(step(9))) == [PARKED]
    before = database.one("SELECT give_up_at, next_attempt_at FROM public.message_failures")
    assert again(processor, database) == [PARKED]
    assert database.one("SELECT give_up_at, next_attempt_at FROM public.message_failures") == (before[0], before[0])


def test_a_person_may_go_past_a_gap(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(sequence(Steps()), engine)
    assert processor.process(deliveries(step(1), step(5), step(6))) == [APPLIED, PARKED, PARKED]
    database.connection.execute(
        "UPDATE public.message_failures SET past_gap = true, next_attempt_at = now() WHERE version = 5"
    )
    assert processor.process(processor.due(60, 10)[0]) == [APPLIED]
    assert processor.process(processor.due(60, 10)[0]) == [APPLIED]
    assert applied(database) == [1, 5, 6]


def test_a_sequence_goes_on_however_long_it_has_stood_still(database: Database, engine: sqlalchemy.Engine) -> None:
    """Versions that were applied would be missing if they were forgotten; that nothing was applied need not be known."""
    processor = Processor(sequence(Steps()), engine)
    assert processor.process(deliveries(step(1), step(2), step(7, key="B"))) == [APPLIED, APPLIED, PARKED]
    database.connection.execute("DELETE FROM public.message_failures")  # that of B has gone by
    later = datetime.now(UTC) + timedelta(days=1)
    Ledger("ledger").delete_old(database.connection, later, 100)
    assert database.all("SELECT key FROM public.entity_versions") == ["A"]
    assert processor.process(deliveries(step(3, "closed"), first=9)) == [APPLIED]


def test_an_old_dead_letter_is_not_applied_over_what_came_after_it(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    """However long both were ago: the version is known for as long as there are letters of the key."""
    handler = Broken(Reject("no"))
    processor = Processor(fails(handler, order=Order.LATEST), engine)
    assert processor.process(deliveries(entry("bad", version=1, subject="A"))) == [DEAD]
    handler.error = None
    newer = [entry("bad", version=2, subject=key) for key in "AB"]
    assert processor.process(deliveries(*newer, first=5)) == [APPLIED, APPLIED]
    later = datetime.now(UTC) + timedelta(days=1)
    Ledger("ledger").delete_old(database.connection, later, 100)
    assert database.all("SELECT key FROM public.entity_versions") == ["A"]
    (number,) = database.all("SELECT id FROM public.dead_letters")
    operations = Operations("ledger")
    steps = requeue(
        database.connection, operations, choose(database.connection, operations, Selection(numbers=(number,)))
    )
    assert [step.done for step in steps] == [1]
    Ledger("ledger").delete_old(database.connection, later, 100)
    assert processor.process(processor.due(60, 10)[0]) == [STALE]


@pytest.mark.parametrize(("fields", "reason"), [
    ({"version": None}, "no_version"), ({"subject": None, "version": 1}, "no_key"), ({"version": 0}, "no_version"),
])  # fmt: skip
def test_next_needs_a_key_and_a_version(
    fields: dict[str, Any], reason: str, database: Database, engine: sqlalchemy.Engine
) -> None:
    assert Processor(sequence(Steps()), engine).process(deliveries(entry("opened", **fields))) == [DEAD]
    assert database.dead == [reason]


def test_two_processes_of_one_sequence(database: Database, database_url: str, start: Callable[..., Worker]) -> None:
    """Whoever parks an early version and whoever closes the gap wait for each other: nothing is left parked."""
    transport = MemoryTransport()
    for n in (2, 1, 4, 3, 6, 5, 8, 7, 10, 9):
        for key in "ABC":
            transport.add(TOPIC, step(n, key=key))
    workers = [start(sequence(Steps()), transport, batch_size=2) for _ in range(3)]
    import threading

    stop = threading.Event()

    def run(worker: Worker) -> None:
        while not stop.is_set():
            worker.run_once()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: database.effects == 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert database.waiting == {}
    assert set(database.all("SELECT version FROM public.entity_versions")) == {10}


# --- many at once ------------------------------------------------------------------------------------------------------


class Sets:
    """A handler of many events; notes how it was called, and fails if one of the amounts is bad."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, events: Sequence[Envelope], session: Session) -> None:
        self.calls.append(len(events))
        session.execute(
            text("INSERT INTO public.effects SELECT 'ledger', unnest(CAST(:ids AS uuid[])), 1"),
            {"ids": [event.id for event in events]},
        )
        if any(event.payload.get("bad") for event in events):
            raise ValueError("one of them")


def batches(handler: Any, **options: Any) -> Consumer:
    consumer = wallet()
    consumer.on_batch("many", **options)(handler)
    return consumer


def test_a_batch_handler_gets_all_at_once(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Sets()
    some = [entry("many", subject=f"{n % 7}") for n in range(40)]
    outcomes = Processor(batches(handler), engine).process(deliveries(*some, entry(), some[0]))
    assert outcomes == [APPLIED] * 41 + [DUPLICATE]
    assert handler.calls == [40]
    assert database.effects == 41


def test_of_a_batch_that_fails_the_bad_ones_alone_wait(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Sets()
    bad = {3, 17, 18}
    some = [entry("many", {"bad": n in bad}) for n in range(64)]
    processor = Processor(batches(handler, retry=Retry(attempts=2)), engine)
    assert processor.process(deliveries(*some)) == [RETRY if n in bad else APPLIED for n in range(64)]
    assert database.effects == 61
    assert len(handler.calls) < 35
    assert again(processor, database) == [DEAD] * 3
    assert (database.effects, database.dead) == (61, ["attempts"] * 3)


def test_a_batch_of_states_has_the_newest_of_each_key(database: Database, engine: sqlalchemy.Engine) -> None:
    calls: list[list[tuple[str | None, int | None]]] = []
    broken = True

    def handler(events: Sequence[Envelope], session: Session) -> None:
        calls.append([(event.key, event.version) for event in events])
        for event in events:
            rename(event, session)
            if event.version == 9 and broken:
                raise ValueError("not this one")

    consumer = Consumer("ledger", topics=[TOPIC], retry=SOON)
    consumer.on_batch("renamed", order=Order.LATEST)(handler)
    processor = Processor(consumer, engine)

    def named(version: int, key: str) -> Fields:
        return entry("renamed", {"name": f"{key}{version}"}, version=version, subject=key)

    batch = deliveries(named(3, "A"), named(9, "A"), named(8, "A"), named(2, "B"), named(1, "B"))
    assert processor.process(batch) == [STALE, RETRY, APPLIED, APPLIED, STALE]
    assert calls[0] == [("A", 9), ("B", 2)]
    assert dict(database.all("SELECT id, name FROM public.accounts")) == {"A": "A8", "B": "B2"}
    broken = False
    assert again(processor, database) == [APPLIED]
    assert dict(database.all("SELECT id, name FROM public.accounts")) == {"A": "A9", "B": "B2"}


def test_a_batch_handler_has_no_sequence() -> None:
    with pytest.raises(SettingsError, match=r"on_batch cannot have Order.NEXT"):
        wallet().on_batch("many", order=Order.NEXT)


# --- many that fail ----------------------------------------------------------------------------------------------------


def test_failing_events_cost_the_others_no_transaction(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Broken(ValueError())
    consumer = fails(handler)
    batch = deliveries(*(entry("bad" if n % 50 == 7 else "credited", subject=f"{n:03d}") for n in range(200)))
    outcomes = Processor(consumer, engine).process(batch)
    assert [outcome for outcome in outcomes if outcome is not APPLIED] == [RETRY] * 4
    assert database.one("SELECT count(DISTINCT xmin::text) FROM public.processed_messages") == 1
    assert len(handler.started) == 4


def test_what_a_failed_handler_loaded_is_not_seen_by_the_next(database: Database, engine: sqlalchemy.Engine) -> None:
    from tests.integration.test_consumer import Name

    def handler(event: Envelope, session: Session) -> None:
        session.add(Name(name=event.payload["name"]))
        if event.payload["name"] == "bad":
            session.flush()
            raise ValueError

    consumer = fails(handler)
    batch = deliveries(*(entry("bad", {"name": name}, subject=name) for name in ("a", "bad", "c")))
    assert Processor(consumer, engine).process(batch) == [APPLIED, RETRY, APPLIED]
    assert database.all("SELECT name FROM public.names ORDER BY name") == ["a", "c"]


def test_a_constraint_that_is_checked_at_the_commit(database: Database, engine: sqlalchemy.Engine) -> None:
    database.connection.execute(
        "CREATE TABLE public.late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO public.late VALUES (1)"
    )
    consumer = fails(
        lambda event, session: session.execute(text("INSERT INTO public.late VALUES (1)")), Retry(attempts=2)
    )
    processor = Processor(consumer, engine)
    assert processor.process(deliveries(entry(), entry("bad"), entry())) == [APPLIED, RETRY, APPLIED]
    assert failing(database) == ("failed", 1, 1, 0)
    assert again(processor, database) == [DEAD]
    assert (database.effects, database.dead) == (2, ["attempts"])


def test_a_flood_of_dead_letters_pauses_the_consumer(
    database: Database, start: Callable[..., Worker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._TROUBLES_SECONDS", 0.05)
    transport = MemoryTransport()
    for _ in range(20):
        transport.add(TOPIC, entry("bad"))
    transport.add(TOPIC, entry())
    worker = start(fails(Broken(Reject("no"))), transport, dead_letter_limit=5, batch_size=2)
    for _ in range(20):
        worker.run_once()
    assert 5 <= len(database.dead) <= 6
    assert (database.effects, transport.pending("ledger", TOPIC)) == (0, 0)
    (said,) = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "paused"]
    assert "consumer ledger is paused: 5 dead letters within 600 s" in said
    while database.dead:  # somebody looks at them
        database.connection.execute("DELETE FROM public.dead_letters")
        for _ in range(8):
            worker.run_once()
            time.sleep(0.02)
    eventually(lambda: worker.run_once() is not None and database.effects == 1)
    assert "consumer ledger goes on" in caplog.text


def test_a_flood_of_dead_letters_is_over_when_they_are_older(
    database: Database, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._TROUBLES_SECONDS", 0.05)
    transport = MemoryTransport()
    for kind in ("bad", "bad", "credited"):
        transport.add(TOPIC, entry(kind))
    worker = start(
        fails(Broken(Reject("no"))), transport, dead_letter_limit=2, dead_letter_window_seconds=30, batch_size=2
    )
    for _ in range(5):
        worker.run_once()
    assert (len(database.dead), database.effects) == (2, 0)
    database.connection.execute("UPDATE public.dead_letters SET created_at = now() - interval '31 s'")
    eventually(lambda: worker.run_once() is not None and database.effects == 1)


def test_nothing_new_is_read_while_too_much_waits(
    database: Database, start: Callable[..., Worker], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._LEASE_SECONDS", 0.0)
    monkeypatch.setattr("consumer.worker._TROUBLES_SECONDS", 0.05)
    transport = MemoryTransport()
    handler = Broken(ValueError())
    for _ in range(30):
        transport.add(TOPIC, entry("bad"))
    retry = Retry(attempts=1000, first_seconds=0.5, longest_seconds=0.5)
    worker = start(fails(handler, retry), transport, max_waiting=4, batch_size=2)
    for _ in range(12):
        worker.run_once()
    assert 4 <= database.waiting["failed"] <= 6
    assert "reads nothing new: 4 events wait for another try" in caplog.text
    handler.error = None
    eventually(lambda: worker.run_once() is not None and database.effects == 30)
    assert database.waiting == {}


# --- what ends its process ----------------------------------------------------------------------------------------------


def test_o_62_an_event_that_was_delivered_too_often_is_put_aside(database: Database, engine: sqlalchemy.Engine) -> None:
    fields = entry()
    processor = Processor(wallet(), engine)
    assert processor.process([Delivery(TOPIC, "1-0", fields, 6), Delivery(TOPIC, "2-0", entry(), 5)]) == [DEAD, APPLIED]
    reason, error, attempts = database.one("SELECT reason, error, attempts FROM public.dead_letters")
    assert (reason, attempts) == ("process_died", 5)
    assert error.startswith("process died")
    assert database.processed == {"applied": 1, "dead": 1}


def test_o_62_also_when_it_dies_while_it_is_tried_again(database: Database, engine: sqlalchemy.Engine) -> None:
    handler = Broken(ValueError())
    processor = Processor(fails(handler), engine, limits=Limits(max_deliveries=3))
    processor.process(deliveries(entry("bad"), entry("bad")))
    database.let_go()
    assert len(processor.due(0, 10)[0]) == 2  # and the process ends
    for starts in (2, 3):
        found = [leased for _ in range(2) for leased in processor.due(0.05, 10)[0]]
        assert [leased.starts for leased in found] == [starts] * 2
        time.sleep(0.06)
    (one,), (two,) = processor.due(60, 10)[0], processor.due(60, 10)[0]  # each alone
    assert processor.process([one]) + processor.process([two]) == [DEAD, DEAD]
    assert database.dead == ["process_died"] * 2
    assert len(handler.started) == 2


def test_o_62_who_knows_which_event_it_was_says_so(database: Database, engine: sqlalchemy.Engine) -> None:
    processor = Processor(wallet(), engine, limits=Limits(max_deliveries=3))
    fields = entry()
    assert processor.died(Delivery(TOPIC, "1-0", fields, 1)).outcome is RETRY
    assert failing(database) == ("failed", 0, 1, 1)
    assert processor.died(Delivery(TOPIC, "1-0", fields, 1)).outcome is DUPLICATE  # said twice
    for starts in (2, 3):
        database.let_go()
        ((leased,), _) = processor.due(60, 10)
        assert isinstance(leased, Waiting)
        assert leased.starts == starts
        assert processor.died(leased).outcome is (RETRY if starts == 2 else DEAD)
    assert database.dead == ["process_died"]
    assert database.one("SELECT attempts FROM public.dead_letters") == 3, "as where Redis has counted"
    done = deliveries(entry())
    assert processor.process(done) == [APPLIED]
    assert processor.died(done[0]).outcome is DUPLICATE  # it was committed before the process ended
    assert database.effects == 1


def test_an_event_that_loses_its_connection_does_so_no_more_than_it_may_be_delivered(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(event: Envelope, session: Session) -> None:
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    retry = Retry(attempts=100, retry_on=(sqlalchemy.exc.DBAPIError,))  # neither says anything about it
    processor = Processor(fails(handler, retry), engine, limits=Limits(max_deliveries=3))
    assert processor.process(deliveries(entry(), entry("bad"), entry())) == [APPLIED, RETRY, APPLIED]
    assert failing(database) == ("failed", 0, 1, 1)
    said = database.one("SELECT error_class, error FROM public.message_failures")
    assert said == ("AdminShutdown", "AdminShutdown: terminating connection due to administrator command")
    assert "start 1 of 3" in caplog.text
    assert again(processor, database) == [RETRY]
    assert again(processor, database) == [DEAD]
    assert (database.effects, database.dead) == (2, ["connection_lost"])
    assert database.one("SELECT error_class, error, attempts FROM public.dead_letters") == (*said, 3)


def test_while_postgresql_is_away_nothing_is_counted(
    database: Database, engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor(fails(Broken(ValueError()), Retry(attempts=2)), engine)
    processor.process(deliveries(entry("bad")))
    database.let_go()
    leased, _ = processor.due(60, 10)

    def refused() -> Any:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(processor, "_connect", refused)
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                processor.process(leased)
    assert failing(database) == ("failed", 1, 1, 1)
    assert processor.process(leased) == [DEAD]


def test_what_was_no_event_and_is_one_now_is_an_event_that_waits(database: Database, engine: sqlalchemy.Engine) -> None:
    """Requeued letters of what an older version could not read have no event id; and a person's row may be odd."""
    handler = Broken(ValueError())
    processor = Processor(fails(handler), engine)
    fields = entry("bad")
    parts = [part for pair in fields.items() for part in pair]
    for some in (parts, parts, [*parts, b"odd"]):
        database.connection.execute(
            "INSERT INTO public.message_failures (consumer, stream, stream_id, topic, fields, reason) "
            "VALUES ('ledger', %s, '1-0', %s, %s, 'failed')",
            (TOPIC, TOPIC, some),
        )
    assert processor.process(processor.due(60, 10)[0]) == [RETRY, DUPLICATE, DUPLICATE]
    assert database.all("SELECT event_id::text FROM public.message_failures") == [fields[b"id"].decode()]
    handler.error = None
    assert again(processor, database) == [APPLIED]
    assert (database.effects, database.waiting, database.processed) == (1, {}, {"applied": 1})


def test_what_was_started_and_not_heard_of_has_its_turn(
    database: Database, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process had leased it; there is always something else that is due."""
    monkeypatch.setattr("consumer.worker._SUSPECTS_SECONDS", 0.0)
    transport = MemoryTransport()
    broken = Broken(ValueError())
    worker = start(fails(broken), transport, batch_size=2)
    transport.add(TOPIC, entry("bad"))
    assert worker.run_once() == {RETRY: 1}
    database.connection.execute("UPDATE public.message_failures SET starts = 1, next_attempt_at = now()")
    suspect = broken.started[0].id
    for _ in range(20):
        transport.add(TOPIC, entry("bad"))
        database.let_go()
        worker.run_once()
    assert [event.id for event in broken.started].count(suspect) > 1


def test_old_versions_are_looked_for_a_part_at_a_time(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.ledger._PAGES", 2)
    database.connection.execute("""
        INSERT INTO public.entity_versions (consumer, topic, type, key, version, updated_at)
        SELECT 'ledger', 't', 'x', 'k' || n, 1, now() - CASE WHEN n % 2 = 0 THEN interval '9 days' ELSE '0' END
        FROM generate_series(1, 1000) n
    """)
    ledger, before = Ledger("ledger"), database.one("SELECT now() - interval '1 day'")
    with psycopg.connect(database_url, autocommit=True) as connection:
        first = ledger.delete_old(connection, before, 1000)
        assert 0 < first < 500
        deleted = [ledger.delete_old(connection, before, 40) for _ in range(40)]
        assert first + sum(deleted) == 500
        assert max(deleted) <= 40
        plan = connection.execute(
            "EXPLAIN SELECT ctid FROM public.entity_versions WHERE ctid >= '(2,0)'::tid AND ctid < '(4,0)'::tid"
        ).fetchall()
        assert "Tid Range Scan" in str(plan)
