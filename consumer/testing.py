"""Run a consumer's handlers without any server: each event twice, in another order every time, in milliseconds.

What is decided about an event is decided by `consumer.work`, as in production: only the ledger is in memory here, and failures
are tried again at once. What is not here is PostgreSQL itself, and what two processes do to each other; for that there are the
pytest fixtures (docs/how-to/testing.md).
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any, cast

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session, scoped_session

from consumer.blame import brief
from consumer.handlers import Consumer, Registered
from consumer.ledger import Connection, DeadLetter, Entity, Ledger, Wait, Waiting
from consumer.payloads import Payload
from consumer.process import Processor
from consumer.work import Item, Outcome, Work
from outbox.envelope import (
    LIFO,
    PRIORITY,
    QUEUE_PREFIX,
    RUN_AT,
    Envelope,
    Event,
    Job,
    decode,
    decode_json,
    is_queue,
    wire,
)
from outbox.errors import SettingsError
from outbox.transport import Delivery

_SEEDS = 2**32


def envelope(event: Event, payload_type: Any = None, *, delivery_count: int = 1) -> Envelope:
    """The event as a handler receives it, for calling one directly: encoded, put on the wire, and decoded again.

    Args:
        payload_type: what the handler's annotation says, `Payment` of ``Envelope[Payment]``.

    Raises:
        PayloadMismatch: the payload is not of that type.
    """
    received = decode(event.topic, _fields(event), delivery_count)
    return received if payload_type in (None, Any) else Payload(payload_type).typed(received)


def _fields(event: Event) -> dict[bytes, bytes]:
    """The event as an entry of a stream, as the relay would write it."""
    version = None if event.version is None else str(event.version)
    at = event.time or (None if event.id.version == 7 else datetime.now(UTC))  # as `outbox.record` does
    time = at and at.astimezone(UTC).isoformat()
    headers = json.dumps(dict(event.all_headers)) if event.all_headers else None
    row = (event.data, str(event.id), event.type, event.key, version, event.content_type, time, event.source, headers)
    ((entry,),) = (run.entries() for run in wire([row]))
    return entry


@dataclass(frozen=True, slots=True)
class Failed:
    """A handler failed with an event, for the so manieth time."""

    event: Envelope
    error: BaseException
    attempt: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An event that was not applied.

    Attributes:
        reason: as in ``dead_letters`` and ``message_failures``: ``rejected``, ``attempts``, ``no_key``, …; ``failed``,
            ``no_handler``, ``gap``.
        error: in words.
    """

    event: Envelope
    reason: str
    error: str | None = None


@dataclass(slots=True)
class Result:
    """What became of the events of one `Rehearsal.deliver`, and of those that had waited.

    Attributes:
        seed: what the order was drawn from.
        deliveries: how many deliveries and tries ended how.
        failures: every time that a handler failed.
        dead: what was put aside.
        waiting: what still waits: for a handler, for the versions before it, or for another try.
        recorded: what handlers recorded with `outbox.record` through SQLAlchemy, in transactions that were committed; jobs as
            `outbox.Job`.
        returned: the results of jobs, by their ids.
    """

    seed: int
    deliveries: Counter[str] = field(default_factory=Counter)
    failures: list[Failed] = field(default_factory=list)
    dead: list[Unfinished] = field(default_factory=list)
    waiting: list[Unfinished] = field(default_factory=list)
    recorded: list[Event] = field(default_factory=list)
    returned: dict[uuid.UUID, Any] = field(default_factory=dict)
    _ended: dict[uuid.UUID, str] = field(default_factory=dict)

    @property
    def outcomes(self) -> Counter[str]:
        """How many events ended how: ``{"applied": 2, "stale": 1}``."""
        return Counter(self._ended.values())

    def note(self, event: Envelope, outcome: str) -> None:
        """A delivery of the event ended so."""
        self.deliveries[outcome] += 1
        if outcome != "duplicate" or event.id not in self._ended:
            self._ended[event.id] = outcome

    def outcome(self, event: Event | Envelope) -> str | None:
        """How the event ended: applied, stale, ignored, dead, retry or parked; None: as nothing in this call."""
        return self._ended.get(event.id)


class Rehearsal:
    """A consumer with a ledger in memory, which it keeps from one `deliver` to the next.

    Args:
        consumer: the handlers to run.
        session: makes what handlers get as their second argument, for each transaction anew or always the same: a SQLAlchemy
            Session on any database (its transaction is committed or rolled back as in production), or a stand-in of yours.
            Left out, they get None.
    """

    def __init__(self, consumer: Consumer, session: Callable[[], Any] | None = None) -> None:
        self._consumer = consumer
        self._processor = _Processor(consumer, session or (lambda: None))
        self._receipts = 0

    def deliver(
        self, *events: Event, times: int = 2, shuffled: bool = True, seed: int | None = None, strict: bool = True
    ) -> Result:
        """Deliver events or jobs, and run again what waits from before and may be run now. A job that is to run later runs now.

        Args:
            times: how often each is delivered.
            shuffled: in random order, in batches of random sizes; otherwise as they are given, in one batch.
            seed: the seed that an earlier call printed, for its order.
            strict: raise what a handler raises, and refuse events that cannot be applied. False: see what the result says.

        Raises:
            Exception: the first that a handler raised. Everything has been delivered by then.
            AssertionError: an event was put aside, or nobody handles its type.
        """
        result = Result(random.SystemRandom().randrange(_SEEDS) if seed is None else seed)
        dice = random.Random(result.seed)
        left = [self._delivery(event) for _ in range(times) for event in events]
        if shuffled:
            print(f"consumer.testing: the order is that of seed={result.seed}")  # pytest shows it where a test fails
            dice.shuffle(left)
        self._processor.result = result
        self._run_waiting(self._ledger.wake_types(self._consumer), tried := Counter[int]())
        while left:
            size = dice.randint(1, len(left)) if shuffled else len(left)
            self._process(left[:size])
            left = left[size:]
            self._run_waiting([], tried)
        for number, wait in self._ledger.waits.items():
            assert wait.event is not None
            result.waiting.append(Unfinished(wait.event, self._ledger.waiting[number].reason, wait.error))
        if strict:
            _refuse_failures(result)
        return result

    @property
    def _ledger(self) -> _MemoryLedger:
        return self._processor.memory

    def _delivery(self, event: Event) -> Delivery:
        self._receipts += 1
        return Delivery(event.topic, str(self._receipts), _fields(event))

    def _run_waiting(self, woken: Iterable[int], tried: Counter[int]) -> None:
        """Run what may be run, until it is done, waits for something else, or has failed often enough."""
        due = set(woken)
        while True:
            due |= self._ledger.woken
            self._ledger.woken.clear()
            for row in self._ledger.waiting.values():
                event = self._ledger.waits[row.id].event
                handler = event and self._consumer.handler(event.type)
                if row.reason == "failed" and handler and tried[row.id] < handler.retry.attempts:
                    due.add(row.id)
            rows = [row for row in self._ledger.waiting.values() if row.id in due]
            if not rows:
                return
            tried.update(row.id for row in rows)
            due.clear()
            self._process(rows)

    def _process(self, deliveries: Sequence[Delivery]) -> None:
        if Outcome.HELD in self._processor.process(deliveries):
            raise AssertionError(
                "the session's transactions fail, so that not even a failure can be written down; see the log"
            )


class _Processor(Processor):
    """The consumer's own, with another place for its transactions."""

    def __init__(self, consumer: Consumer, session: Callable[[], Any]) -> None:
        super().__init__(consumer, cast(sqlalchemy.Engine, None))
        self._session = session
        self.memory = _MemoryLedger()
        self.result = Result(0)

    def _transact_once(self, items: Sequence[Item], progress: Callable[[], None], lenient: bool) -> None:
        before, handlers = self.memory.copied(), [item.handler for item in items]
        stage = _Stage(self._session())
        work = Work(
            items, self._consumer, cast(Ledger, self.memory), self._limits, stage.connection, cast(Connection, stage),
            self._patience_seconds, progress, self._starting, overdue=lambda items, raw: None, lenient=lenient,
        )  # fmt: skip
        try:
            for item in items:
                item.handler = item.handler and stage.adapted(item.handler)
            with stage.recording():
                work.apply(stage.begun)
            stage.session.commit()
        except BaseException:
            stage.session.rollback()
            self.memory = before
            raise
        finally:
            for item, handler in zip(items, handlers, strict=True):
                item.handler = handler
        self.result.recorded += stage.recorded

    def _look_up(self, items: Sequence[Item]) -> None:
        """There is no queue that is to know it."""

    def _tell(self, items: Sequence[Item]) -> None:
        """Note what was committed."""
        super()._tell(items)
        for item in items:
            assert item.event is not None
            self.result.note(item.event, str(item.outcome))
            if item.failure:
                tries = item.waiting.tries if item.waiting else 0
                self.result.failures.append(Failed(item.event, item.failure.error, tries + 1))
            if item.outcome is Outcome.APPLIED and item.returned.json:
                self.result.returned[item.event.id] = decode_json(item.returned.json)
            if item.outcome is Outcome.DEAD and item.grave:
                self.result.dead.append(Unfinished(item.event, item.grave.reason, item.grave.error))


@cache
def _nowhere() -> sqlalchemy.Engine:
    """The database of those who have none: its transactions come to nothing."""
    return sqlalchemy.create_engine("sqlite://")


class _Stage:
    """What stands for PostgreSQL in one transaction: the user's Session, or whatever else handlers are to get.

    To `consumer.work` it is a psycopg connection, as far as it looks at one.
    """

    closed = broken = False

    def __init__(self, given: Any) -> None:
        given = given() if isinstance(given, scoped_session) else given
        if type(given).__name__.startswith("Async"):
            raise SettingsError(
                "session: must make a Session, not an AsyncSession; async handlers get one that is over it"
            )
        self._stand_in, self._is_stand_in = given, not isinstance(given, Session)
        self.session: Session = Session(_nowhere()) if self._is_stand_in else given
        self.recorded: list[Event] = []
        self._savepoints = 0
        try:
            self.session.flush()
            self.connection = self.session.connection()
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise SettingsError(f"session: it cannot begin a transaction: {brief(error)}") from error
        self.begun = cast(sqlalchemy.RootTransaction, self.connection.get_transaction())
        self._driver = self.connection.connection.driver_connection
        if isinstance(self._driver, sqlite3.Connection) and not self._driver.in_transaction:
            self.connection.exec_driver_sql("BEGIN")  # or the first savepoint's release would be a commit

    def adapted(self, handler: Registered) -> Registered:
        """The handler, called with what it is to get."""
        if not self._is_stand_in and not handler.raw:
            return handler
        given = self._stand_in if self._is_stand_in else self._driver
        if handler.raw and not self._is_stand_in and not isinstance(given, psycopg.Connection):
            raise SettingsError("a handler with raw=True needs a session over psycopg, or a stand-in of yours")
        return replace(handler, function=lambda event, _: handler.function(event, given))

    @property
    def info(self) -> _Stage:
        return self

    @property
    def transaction_status(self) -> TransactionStatus:
        if isinstance(self._driver, psycopg.Connection):
            return self._driver.info.transaction_status
        if isinstance(self._driver, sqlite3.Connection) and not self._driver.in_transaction:
            return TransactionStatus.IDLE
        return TransactionStatus.INTRANS

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A savepoint."""
        self._savepoints += 1
        name, recorded = f"rehearsal_{self._savepoints}", len(self.recorded)
        self.connection.exec_driver_sql(f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            del self.recorded[recorded:]
            if self.transaction_status != TransactionStatus.IDLE:
                self.connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {name}")
            raise
        self.connection.exec_driver_sql(f"RELEASE SAVEPOINT {name}")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """See what is recorded; where there is no outbox, since it is another database, that is all that happens."""

        def seen(connection: Any, statement: Any, several: Any, parameters: Any, options: Any) -> Any:
            if not isinstance(statement, sqlalchemy.Insert) or not {"xid", "event_id"} <= set(statement.table.c.keys()):
                return statement, several, parameters
            self.recorded += _events(statement)
            if connection.dialect.name == "postgresql":
                return statement, several, parameters
            return sqlalchemy.select(sqlalchemy.null()), [], {}

        sqlalchemy.event.listen(self.connection, "before_execute", seen, retval=True)
        try:
            yield
        finally:
            sqlalchemy.event.remove(self.connection, "before_execute", seen)


def _events(statement: sqlalchemy.Insert) -> Iterator[Event]:
    """The events that the writer's statement inserts."""
    values = statement.compile(dialect=postgresql.dialect()).params  # type: ignore[no-untyped-call]  # SQLAlchemy has no types there
    for n in itertools.takewhile(lambda n: f"event_id_m{n}" in values, itertools.count()):
        row = {name.removesuffix(f"_m{n}"): value for name, value in values.items() if name.endswith(f"_m{n}")}
        data, event_id, headers = row.pop("data"), row.pop("event_id"), row.pop("headers") or {}
        payload = data if row["content_type"] else decode_json(data)
        if is_queue(topic := row.pop("topic")):
            at, priority, lifo = headers.pop(RUN_AT, None), headers.pop(PRIORITY, "normal"), LIFO in headers
            headers.pop(LIFO, None)
            yield Job(
                queue=topic.removeprefix(QUEUE_PREFIX), id=event_id, payload=payload, headers=headers, lifo=lifo,
                run_at=at and datetime.fromisoformat(at), priority=priority, **row,
            )  # fmt: skip
        else:
            yield Event(topic=topic, id=event_id, payload=payload, headers=headers, **row)


class _MemoryLedger:
    """`consumer.ledger.Ledger`, as far as `consumer.work` uses it, for one process that is alone."""

    def __init__(self) -> None:
        self.outcomes: dict[uuid.UUID, str] = {}
        self.versions: dict[Entity, int] = {}
        self.waiting: dict[int, Waiting] = {}
        self.waits: dict[int, Wait] = {}
        self.woken: set[int] = set()
        self._ids = itertools.count(1)

    def copied(self) -> _MemoryLedger:
        """One that is as this one is now, whatever becomes of this one."""
        copy = _MemoryLedger()
        for name, value in vars(self).items():
            setattr(copy, name, value if name == "_ids" else value.copy())
        return copy

    def wake_types(self, consumer: Consumer) -> list[int]:
        """What waits for a handler that there is by now."""
        return [
            number for number, wait in self.waits.items()
            if wait.reason == "no_handler" and wait.event and consumer.handler(wait.event.type)
        ]  # fmt: skip

    def tag(self, _: object) -> None:
        return None  # a handler's own COMMIT is told by the driver's state

    def session_is_changed(self, _: object) -> bool:
        return False

    def claim(self, _: object, ids: Iterable[uuid.UUID], _patience: float) -> set[uuid.UUID]:
        fresh = set(ids) - self.outcomes.keys()
        self.outcomes |= dict.fromkeys(fresh, "applied")
        return fresh

    def take(self, _: object, waiting: Sequence[Waiting], _patience: float) -> set[int]:
        return {row.id for row in waiting} & self.waiting.keys()

    def retake(self, _: object, ids: Iterable[uuid.UUID], _patience: float) -> set[uuid.UUID]:
        self.outcomes |= dict.fromkeys(ids, "applied")  # there is nobody else who could have done it
        return set(ids)

    def lock_versions(self, _: object, entities: Iterable[Entity], _patience: float) -> dict[Entity, int | None]:
        return {entity: self.versions.get(entity) for entity in entities}

    def raise_versions(self, _: object, reached: Mapping[Entity, int]) -> None:
        self.versions |= reached

    def wake(self, _: object, reached: Mapping[Entity, int], _limit: int) -> None:
        gaps = {
            (wait.event.topic, wait.event.key, wait.event.version): number
            for number, wait in self.waits.items() if wait.reason == "gap" and wait.event
        }  # fmt: skip
        for entity, version in reached.items():
            while (number := gaps.get((entity.topic, entity.key, version := version + 1))) is not None:
                self.woken.add(number)

    def mark(self, _: object, ids: Iterable[uuid.UUID], outcome: str) -> None:
        self.outcomes |= dict.fromkeys(ids, outcome)

    def forget(self, _: object, ids: Iterable[uuid.UUID]) -> None:
        for event_id in ids:
            self.outcomes.pop(event_id, None)

    def wait(self, _: object, waits: Sequence[Wait]) -> None:
        for wait in waits:
            delivery = wait.delivery
            number = delivery.id if isinstance(delivery, Waiting) else next(self._ids)
            self.waits[number] = wait
            self.waiting[number] = Waiting(
                delivery.stream, delivery.receipt, delivery.fields, id=number, reason=wait.reason,
                attempts=wait.attempts, tries=wait.tries, starts=wait.starts,
            )  # fmt: skip

    def done_waiting(self, _: object, rows: Iterable[Waiting]) -> None:
        for row in rows:
            del self.waiting[row.id], self.waits[row.id]
            self.woken.discard(row.id)

    def bury(self, _: object, letters: Sequence[DeadLetter], _patience: float) -> None:
        """They are in the result."""


def _refuse_failures(result: Result) -> None:
    hint = f"deliver(seed={result.seed}, …) repeats it; with strict=False the result tells"
    for failure in result.failures:
        failure.error.add_note(f"with {failure.event.type} {failure.event.id}; {hint}")
        raise failure.error
    for some, what in ((result.dead, "was put aside"), (result.waiting, "waits")):
        for each in some:
            if each.reason != "gap" and result.outcome(each.event):  # or it waits from an earlier call
                error = f" ({each.error})" if each.error else ""
                raise AssertionError(f"{each.event.type} {each.event.id} {what}: {each.reason}{error}; {hint}")
