"""What one transaction does with a batch of deliveries: the ledger rows first, then the handlers, then how each event ended.

Handlers run within savepoints. One that fails takes with it what ran since the last one, which is run again without it; the
failure is written in the same transaction as the effects of the others. So failing events cost the others little, and none of
them a transaction.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import sqlalchemy
from psycopg.pq import TransactionStatus

from consumer.blame import READ_ONLY, away, brief, given_up, innocent, may_be_the_sessions, named, sqlstate
from consumer.calls import NOTHING, HandlerSession, Returned, call, raised
from consumer.handlers import Consumer, Order, Registered
from consumer.ledger import LARGEST_BYTES, Connection, DeadLetter, Entity, Ledger, Wait, Waiting, size
from outbox.envelope import Envelope
from outbox.errors import HandlerMisuse, Reject
from outbox.transport import Delivery
from outbox.transport.base import Settled

#: Most events that handlers are called with, one by one, between two savepoints.
CHUNK = 64
#: What a savepoint costs, in calls of a handler that sends one statement.
_SAVEPOINT_CALLS = 1.5
#: Of an error's text this many characters are kept.
_KEPT_TEXT = 1000


class Outcome(enum.StrEnum):
    """How a delivery ended. All but HELD are known to the database, and acknowledged."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # processed before, or waiting
    STALE = "stale"  # older than what was applied
    IGNORED = "ignored"  # of a type that the consumer ignores
    DEAD = "dead"  # put aside in dead_letters
    RETRY = "retry"  # failed, waits in message_failures for another try
    PARKED = "parked"  # waits in message_failures for a handler, or for the versions before it
    HELD = "held"  # another transaction holds its rows: left as it was


@dataclass(frozen=True, slots=True)
class Limits:
    """How long events wait, and how often they may end their process; see `consumer.settings.ConsumerSettings`."""

    max_deliveries: int = 5
    no_handler_seconds: float = 3600.0
    gap_seconds: float = 3600.0


class Blame(enum.Enum):
    """What a failure counts for."""

    EVENT = enum.auto()  # an attempt
    NOBODY = enum.auto()  # tried again without end
    CONNECTION = enum.auto()  # lost while it ran alone: as often as it may be delivered
    PROCESS = enum.auto()  # ended while it ran alone: likewise


_STARTS = (Blame.CONNECTION, Blame.PROCESS)  # of these the starts are counted


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an event was not applied."""

    error: BaseException
    blame: Blame


@dataclass(slots=True, eq=False)
class Item:
    """A delivery on its way to an outcome.

    Attributes:
        event: what is in it; None: it is no event.
        handler: of its type; None: there is none.
        letter: it is to be put aside, whatever a handler would say.
        lost: it failed in a transaction that is gone, and is not to be run.
        failure, wait, grave: in this transaction: why it failed, how it is to wait, what is put aside.
        outcome: None in the end: it was not run, since it is to be run `again`, or we are to stop.
        again: to be run alone, on another connection: what a handler before it has set may have made it fail.
        returned: of a job, what its handler did.
        before: of a job that is a duplicate, what the ledger says of it.
    """

    delivery: Delivery
    event: Envelope | None = None
    handler: Registered | None = None
    outcome: Outcome | None = None
    letter: DeadLetter | None = None
    lost: Failure | None = None
    failure: Failure | None = None
    wait: Wait | None = None
    grave: DeadLetter | None = None
    again: bool = False
    returned: Returned = NOTHING
    before: str | None = None

    def reset(self) -> None:
        """Forget what a transaction that was rolled back has said."""
        self.outcome, self.failure, self.wait, self.grave, self.again = (
            Outcome.DUPLICATE,
            None,
            None,
            self.letter,
            False,
        )

    @property
    def settled(self) -> Settled:
        """How a job has ended, or waits in the database, for those who look for it in Redis."""
        if self.outcome in (Outcome.RETRY, Outcome.PARKED):
            return Settled("waiting", error=self.wait.error if self.wait else None)
        if self.outcome is Outcome.DEAD:
            return Settled("failed", error=self.grave.error if self.grave else None)
        if self.outcome is Outcome.DUPLICATE:
            return Settled(_STATUS.get(self.before or "", "completed"))
        return Settled("completed", self.returned.json, self.returned.note)

    @property
    def waiting(self) -> Waiting | None:
        """The delivery, if it comes out of message_failures."""
        return self.delivery if isinstance(self.delivery, Waiting) else None

    @property
    def entity(self) -> Entity | None:
        """What its version counts for, where its handler wants an order."""
        event, handler = self.event, self.handler
        if event is None or handler is None or handler.order is Order.ANY or event.key is None:
            return None
        return Entity(event.topic, "" if handler.order is Order.NEXT else event.type, event.key)


@dataclass(slots=True)
class Work:
    """One transaction's work, and how far it is.

    Attributes:
        fresh: events whose ledger rows it claimed.
        taken: events out of message_failures that are leased to it.
        done: items whose effects are in it.
        running: items that a handler is called with, since the last savepoint; the last one may be at it.
        ours: whether the statement at work is the ledger's; otherwise it is a handler's, or the COMMIT.
        tag: what the transaction can be told by from another (see `Ledger.tag`); None: it cannot.
        ended: a handler ended the transaction by a statement of its own.
        lenient: the connection is not new, so an event may fail for what handlers before it have set.
        failing: how likely it is that a handler fails with an item.
        stopping: asked before every call of a handler; then the rest is left as it was, and what has run is committed.
    """

    items: Sequence[Item]
    consumer: Consumer
    ledger: Ledger
    limits: Limits
    connection: sqlalchemy.Connection
    raw: Connection
    patience_seconds: float
    progress: Callable[[], None]
    starting: Callable[[Sequence[Delivery]], None]
    overdue: Callable[[Sequence[Item], Connection], None]
    lenient: bool = True
    stopping: Callable[[], bool] = lambda: False
    failing: Callable[[Item], float] = lambda _: 0.0
    fresh: set[uuid.UUID] = field(default_factory=set)
    taken: list[Waiting] = field(default_factory=list)
    begun: bool = False
    done: list[Item] = field(default_factory=list)
    running: list[Item] = field(default_factory=list)
    ours: bool = True
    committing: bool = False
    tag: bytes | None = None
    ended: bool = False
    misuse: HandlerMisuse | None = None
    _transaction: sqlalchemy.RootTransaction = field(init=False)
    _applied: dict[Entity, int | None] = field(default_factory=dict)
    _reached: dict[Entity, int] = field(default_factory=dict)

    def apply(self, transaction: sqlalchemy.RootTransaction) -> None:
        """All of it but the COMMIT.

        Raises:
            Exception: the transaction is to be rolled back; see `ours`, `running` and `ended`.
        """
        self._transaction = transaction
        to_run = self._claim()
        if entities := {item.entity: None for item in to_run if item.entity}:
            self._applied = self.ledger.lock_versions(self.raw, filter(None, entities), self.patience_seconds)
        try:
            self._run(to_run)
        except HandlerMisuse as error:
            self.misuse = error
            raise
        self._record()

    # --- which events are ours ---

    def _claim(self) -> list[Item]:
        """Claim the ledger rows; returns what is to be run, in its order."""
        self.taken = [item.delivery for item in self.items if isinstance(item.delivery, Waiting)]
        ours = self.ledger.take(self.raw, self.taken, self.patience_seconds) if self.taken else set()
        self.taken = [row for row in self.taken if row.id in ours]
        first: dict[uuid.UUID, Item] = {}
        again: dict[uuid.UUID, Item] = {}
        for item in self.items:
            item.reset()
            event, waiting = item.event, isinstance(item.delivery, Waiting)
            if isinstance(item.delivery, Waiting) and item.delivery.id not in ours:
                continue  # somebody else's by now
            if event is None:
                item.outcome = Outcome.DEAD
            elif item.handler is None and not item.letter and self.consumer.ignores(event.type):
                item.outcome = Outcome.IGNORED
                if waiting:
                    again.setdefault(event.id, item)
            else:
                (again if waiting else first).setdefault(event.id, item)
        before = self.ledger.tag(self.raw)
        if first:
            self.fresh = self.ledger.claim(self.raw, first, self.patience_seconds)
        if again:
            self.fresh |= self.ledger.retake(self.raw, again.keys() - self.fresh, self.patience_seconds)
        tag = self.ledger.tag(self.raw)
        self.tag = tag if tag != before else None
        found = [item for event_id, item in (first | again).items() if event_id in self.fresh]
        for item in found:
            if item.outcome is not Outcome.IGNORED:
                item.outcome = self._settled(item)
        return [item for item in found if item.outcome is Outcome.APPLIED]

    def _settled(self, item: Item) -> Outcome:
        """What becomes of a fresh event before any handler is called; APPLIED: that depends on the handler."""
        if item.letter:
            return Outcome.DEAD
        if item.lost:
            return self._fail(item, item.lost)
        if item.handler is None:
            return self._park(item, "no_handler", self.limits.no_handler_seconds)
        return Outcome.APPLIED

    # --- the handlers ---

    def _run(self, items: list[Item]) -> None:
        """Run the handlers, sorted by key: one key keeps its order, and a common order avoids deadlocks."""
        items.sort(key=_place)
        single = [item for item in items if item.handler and not item.handler.batch]
        for chunk in chunks(single, self.failing):
            self._run_each(chunk)
        sets: dict[str, list[Item]] = {}
        for item in items:
            if item.handler and item.handler.batch and item.event:
                sets.setdefault(item.event.type, []).append(item)
        for some in sets.values():
            self._run_set(some)
        self.ours = True
        self.starting([])

    def _run_each(self, items: Sequence[Item]) -> None:
        """Call handlers with one event after the other; what fails is left out, and the others run again."""
        while items:
            reached: dict[Entity, int] = {}
            try:
                with self._savepoint(items) as session:
                    for item in items:
                        if self.stopping():
                            item.outcome = None
                            continue
                        if (entity := item.entity) is not None and not self._admitted(item, entity, reached):
                            continue
                        self._call([item], session)
                        if entity is not None and item.event and item.event.version is not None:
                            reached[entity] = item.event.version
            except Exception as caught:
                error = raised(caught)
                culprit = self._culprit(error)
                self._blamed(culprit, error)
                items = [item for item in items if item is not culprit]
            else:
                self._settle(reached)
                return

    def _run_set(self, items: Sequence[Item]) -> None:
        """Call a handler with all events at once: with `Order.LATEST` with the newest of each key, and with an older one only
        if that failed."""
        while items:
            newest: dict[object, Item] = {}
            for item in items:
                if (entity := item.entity) is None:
                    newest[item] = item
                elif self._admitted(item, entity, {}):
                    before = newest.get(entity)
                    if before is None or _version(before) < _version(item):
                        newest[entity] = item
            chosen = list(newest.values())
            self._run_halves(chosen)
            if len(chosen) == len(items):
                return
            tried = set(chosen)
            items = [item for item in items if item not in tried and item.outcome is Outcome.APPLIED]

    def _run_halves(self, items: Sequence[Item]) -> None:
        if not items:
            return None
        if self.stopping():
            for item in items:
                item.outcome = None
            return None
        try:
            with self._savepoint(items) as session:
                self._call(items, session)
        except Exception as caught:
            error = raised(caught)
            self._culprit(error)
            if len(items) == 1:
                return self._blamed(items[0], error)
            middle = len(items) // 2
            self._run_halves(items[:middle])
            return self._run_halves(items[middle:])
        return self._settle({item.entity: _version(item) for item in items if item.entity})

    def _call(self, items: Sequence[Item], session: HandlerSession) -> None:
        handler = items[0].handler
        assert handler is not None
        self.starting([item.delivery for item in items])
        self.running += items
        events = [item.event for item in items if item.event]
        keep = self.consumer.has_queues
        items[0].returned = call(handler, events, session, self.raw, partial(self.overdue, items, self.raw), keep=keep)
        # The statement COMMIT cannot be refused, and psycopg begins anew with the next one.
        if (self.tag is not None and self.ledger.tag(self.raw) != self.tag) or not self._in_transaction():
            raise HandlerMisuse("the handler ended the transaction it was given (or set application_name)")
        self.progress()

    @contextmanager
    def _savepoint(self, items: Sequence[Item]) -> Iterator[HandlerSession]:
        """A part that may fail by itself. Inside psycopg's own transaction block nobody can commit or roll back, by whatever
        way he got at the connection: a commit would leave the ledger rows of events that have not run."""
        session = HandlerSession(bind=self.connection, join_transaction_mode="rollback_only")
        self.ours, self.begun, self.running = False, True, []
        try:
            with self.raw.transaction():
                # A Session whose flush fails rolls back at once, and this is what it then rolls back.
                sessions = any(item.handler and not item.handler.raw for item in items)
                part = self.connection.begin_nested() if sessions else None
                try:
                    yield session
                    if part:
                        part.commit()
                except BaseException:  # looked at before anybody rolls back
                    idle = self.raw.info.transaction_status == TransactionStatus.IDLE
                    self.ended = idle or (self.tag is not None and self.ledger.tag(self.raw) != self.tag)
                    if (
                        part
                        and not (self.ended or self.raw.closed)
                        and self.connection.get_nested_transaction() is part
                    ):
                        part.rollback()
                    raise
        finally:
            session.discard()
        self.done += self.running
        self.running = []

    def _in_transaction(self) -> bool:
        """Whether SQLAlchemy's transaction is the one it was, so that it will commit."""
        return self.connection.get_transaction() is self._transaction and self._transaction.is_active

    def _culprit(self, error: Exception) -> Item:
        """The item whose handler failed, if that is all that happened: the transaction is as it was at the savepoint.

        Raises:
            Exception: the error; the transaction cannot go on.
        """
        if (
            not self.running
            or self.ended
            or self.raw.closed
            or self.raw.info.transaction_status != TransactionStatus.INTRANS
            or not self._in_transaction()
            or given_up(error)
            or away(error, ours=False)
            or sqlstate(error) == READ_ONLY
        ):
            raise error
        return self.running[-1]

    def _blamed(self, item: Item, error: Exception) -> None:
        self.ours, self.running = True, []
        if self.lenient and may_be_the_sessions(error, ours=False) and self.ledger.session_is_changed(self.raw):
            item.outcome, item.again = None, True
        else:
            assert item.handler is not None
            item.outcome = self._fail(item, Failure(error, blame(item.handler, error)))
        self.progress()

    # --- versions ---

    def _admitted(self, item: Item, entity: Entity, reached: Mapping[Entity, int]) -> bool:
        """Whether the version may be applied now; otherwise says what becomes of the event."""
        version, before = _version(item), reached.get(entity, self._applied[entity])
        assert item.handler is not None
        if before is not None and version <= before:
            item.outcome = Outcome.STALE
            return False
        past_gap = item.waiting is not None and item.waiting.past_gap
        if item.handler.order is Order.NEXT and version > (before or 0) + 1 and not past_gap:
            item.outcome = self._park(item, "gap", self.limits.gap_seconds)
            return False
        item.outcome, item.wait = Outcome.APPLIED, None
        return True

    def _settle(self, reached: Mapping[Entity, int]) -> None:
        self._applied |= reached
        self._reached |= reached

    # --- how they ended ---

    def _fail(self, item: Item, failure: Failure) -> Outcome:
        """An event failed: another try, or none."""
        item.failure = failure
        row, event = item.waiting, item.event
        retry = item.handler.retry if item.handler else self.consumer.retry
        attempts = (row.attempts if row else 0) + (failure.blame is Blame.EVENT)
        tries = (row.tries if row else 0) + 1
        starts = (row.starts if row else item.delivery.count) if failure.blame in _STARTS else 0
        what, kind = text_of(failure.error), named(failure.error)
        reason = None
        if size(item.delivery) > LARGEST_BYTES:
            reason = "too_large"
        elif isinstance(failure.error, (Reject, *retry.reject_on)) and failure.blame is Blame.EVENT:
            reason = "rejected"
        elif attempts >= retry.attempts and failure.blame is Blame.EVENT:
            reason = "attempts"
        elif starts >= self.limits.max_deliveries and failure.blame is Blame.PROCESS:
            reason = "process_died"
        elif starts >= self.limits.max_deliveries:
            reason = "connection_lost"
        if reason:
            counted = starts if reason in ("process_died", "connection_lost") else attempts  # what was too often
            item.grave = DeadLetter(item.delivery, event, reason, what, counted, kind)
            return Outcome.DEAD
        pause = retry.pause_seconds(tries)
        item.wait = Wait(item.delivery, event, "failed", pause, attempts, tries, starts, kind, what)
        return Outcome.RETRY

    def _park(self, item: Item, reason: str, seconds: float) -> Outcome:
        """An event waits for something else than another try, or has waited for long enough."""
        row = item.waiting
        attempts = row.attempts if row else 0
        if row and row.expired and row.reason == reason:
            item.grave = DeadLetter(item.delivery, item.event, reason, _WAITED_FOR[reason], attempts)
            return Outcome.DEAD
        item.wait = Wait(item.delivery, item.event, reason, seconds, attempts, row.tries if row else 0)
        return Outcome.PARKED

    def _record(self) -> None:
        """Write what the handlers did not: versions, outcomes, what waits, what is put aside."""
        ledger, raw = self.ledger, self.raw
        if self._reached:
            ledger.raise_versions(raw, self._reached)
            if sequences := {entity: version for entity, version in self._reached.items() if not entity.type}:
                ledger.wake(raw, sequences, len(self.items) + CHUNK)
        if left := [i.event.id for i in self.items if i.outcome is None and i.event and not i.waiting]:
            ledger.forget(raw, left)
            self.fresh.difference_update(left)
        for word, outcomes in _WORDS.items():
            ids = [i.event.id for i in self.items if i.outcome in outcomes and i.event and i.event.id in self.fresh]
            ids += [i.event.id for i in self.items if word == "waiting" and i.outcome is None and i.waiting and i.event]
            if ids:
                ledger.mark(raw, ids, word)
        if waits := [item.wait for item in self.items if item.wait and item.outcome in _WORDS["waiting"]]:
            ledger.wait(raw, waits)
        if letters := [item.grave for item in self.items if item.grave and item.outcome is Outcome.DEAD]:
            ledger.bury(raw, letters, self.patience_seconds)
        ended = {row.id for row in self.taken} - {
            item.waiting.id for item in self.items if item.waiting and (item.wait or item.outcome is None)
        }
        if over := [row for row in self.taken if row.id in ended]:
            ledger.done_waiting(raw, over)


_WORDS = {
    "stale": {Outcome.STALE},
    "dead": {Outcome.DEAD},
    "waiting": {Outcome.RETRY, Outcome.PARKED},
}
_WAITED_FOR = {
    "no_handler": "no handler for its type came in time (CONSUMER_NO_HANDLER_SECONDS)",
    "gap": "the versions before it did not come in time (CONSUMER_GAP_SECONDS)",
}


def chunks(items: Sequence[Item], failing: Callable[[Item], float]) -> Iterator[list[Item]]:
    """What to run between two savepoints. A failure has what ran before it run again, so that both together cost least where
    that costs as much, on the average, as a savepoint: before those who are likely to fail there is one."""
    chunk: list[Item] = []
    redone = 0.0
    for item in items:
        more = failing(item) * len(chunk)
        if chunk and (redone + more > _SAVEPOINT_CALLS or len(chunk) == CHUNK):
            yield chunk
            chunk, redone, more = [], 0.0, 0.0
        chunk.append(item)
        redone += more
    if chunk:
        yield chunk


#: Of a job, by its outcome in the ledger; of others: completed.
_STATUS = {"dead": "failed", "waiting": "waiting", "cancelled": "cancelled"}


def blame(handler: Registered, error: BaseException) -> Blame:
    """What the failure counts for."""
    return Blame.NOBODY if isinstance(error, handler.retry.retry_on) or innocent(error) else Blame.EVENT


def text_of(error: BaseException) -> str:
    """The error's text as it is kept: without values, and without what PostgreSQL's text cannot hold."""
    return brief(error)[:_KEPT_TEXT]


def _version(item: Item) -> int:
    assert item.event is not None
    assert item.event.version is not None
    return item.event.version


def _place(item: Item) -> tuple[str, int]:
    """By key; what is applied in sequence by version, too."""
    event, handler = item.event, item.handler
    assert event is not None
    in_sequence = handler is not None and handler.order is Order.NEXT
    return event.key or "", (event.version or 0) if in_sequence else 0
