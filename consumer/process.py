"""One batch of deliveries becomes outcomes: one database transaction, no loop, no Redis.

What may happen between any two statements, and why it does no harm: the ledger rows are inserted first, in the same
transaction as the effects, so either all of it is there after a crash or nothing; nothing is acknowledged by anybody
before `Processor.process` has returned, that is, before the transaction's end is known. An error on COMMIT tells nothing;
the ledger, read on a new connection, does.

If a handler of the batch fails, the transaction is rolled back and its deliveries run one by one, each in a transaction of
its own, so that only the failing one is left for later.
"""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NoReturn

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session

from consumer.handlers import Consumer, Order, Registered
from consumer.ledger import Connection, DeadLetter, Entity, Ledger
from outbox.envelope import Envelope, decode
from outbox.errors import HandlerMisuse, OutboxError, UndecodableEntry
from outbox.transport import Delivery
from outbox.transport.base import topic_of

_log = logging.getLogger(__name__)

#: SQLSTATEs of transactions that PostgreSQL gave up for the sake of another: worth trying again at once.
_SERIALIZATION = frozenset({"40001", "40P01"})
_TRIES = 5


class Outcome(enum.StrEnum):
    """How a delivery ended. All but RETRY are final, and acknowledged."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"  # processed before
    STALE = "stale"  # older than what was applied
    IGNORED = "ignored"  # of a type that the consumer ignores
    DEAD = "dead"  # put aside in dead_letters
    RETRY = "retry"  # left pending, tried again later


class DatabaseUnavailable(OutboxError):
    """PostgreSQL cannot be reached or cannot work; nothing of the batch is known to be done, it is to be run again."""

    retryable = True


@dataclass(slots=True)
class _Item:
    delivery: Delivery
    event: Envelope | None = None
    handler: Registered | None = None
    outcome: Outcome | None = None
    letter: DeadLetter | None = None


@dataclass(slots=True)
class _Work:
    """What a transaction did besides the handlers' effects."""

    fresh: set[uuid.UUID] = field(default_factory=set)
    misuse: HandlerMisuse | None = None


class HandlerSession(Session):
    """The Session that handlers get. Its transaction is the consumer's to end."""

    def commit(self) -> NoReturn:
        _misused("commit")

    def rollback(self) -> NoReturn:
        _misused("rollback")

    def close(self) -> NoReturn:
        _misused("close")

    def discard(self) -> None:
        """Forget the objects; the consumer's own way to close it."""
        super().close()


def _misused(method: str) -> NoReturn:
    raise HandlerMisuse(
        f"a handler must not {method} the session it is given: the consumer ends the transaction, together with the "
        "ledger row. Use session.begin_nested() for a part that may fail, or raise to give up the event for now."
    )


class Processor:
    """Runs the handlers of one consumer.

    Args:
        engine: a SQLAlchemy engine over psycopg; the consumer's database.
        schema: schema of the ledger.
    """

    def __init__(self, consumer: Consumer, engine: sqlalchemy.Engine, schema: str = "public") -> None:
        self._consumer = consumer
        self._engine = engine
        self._ledger = Ledger(consumer.name, schema)
        self._unknown: set[str] = set()

    def process(
        self, deliveries: Sequence[Delivery], stopping: Callable[[], bool] = lambda: False
    ) -> list[Outcome | None]:
        """The outcome of each delivery, in their order; None for what was not started because of `stopping`.

        Raises:
            DatabaseUnavailable: run the same deliveries again later.
        """
        items = [self._decoded(delivery) for delivery in deliveries]
        try:
            self._transact(items)
            return [item.outcome for item in items]
        except DatabaseUnavailable:
            raise
        except Exception as error:
            if len(items) == 1:
                self._failed(items[0], error)
                return [items[0].outcome]
            _log.info(
                "a batch of %d failed and runs one by one: %s",
                len(items),
                _brief(error),
                extra={"action": "one_by_one"},
            )
        for item in items:
            if stopping():
                item.outcome = None
                continue
            try:
                self._transact([item])
            except DatabaseUnavailable:
                raise
            except Exception as error:
                self._failed(item, error)
        return [item.outcome for item in items]

    def _decoded(self, delivery: Delivery) -> _Item:
        item = _Item(delivery)
        try:
            item.event = decode(topic_of(delivery.stream), delivery.fields, delivery.count)
        except UndecodableEntry as error:
            item.letter = _letter(item, "undecodable", str(error))
            return item
        item.handler = self._consumer.handler(item.event.type)
        if item.handler is None:
            return item
        if item.handler.order is Order.LATEST and (item.event.key is None or item.event.version is None):
            missing = "key" if item.event.key is None else "version"
            item.letter = _letter(item, f"no_{missing}", f"a handler with Order.LATEST needs events with a {missing}")
        return item

    def _failed(self, item: _Item, error: Exception) -> None:
        item.outcome = Outcome.RETRY
        event = item.event
        _log.error(
            "handler failed, the event stays pending: %s %s: %s",
            event.type if event else None, event.id if event else item.delivery.receipt, _brief(error),
            extra={"action": "handler_failed", "event_id": str(event.id) if event else None},
            exc_info=error,
        )  # fmt: skip

    # --- the transaction ---

    def _transact(self, items: Sequence[_Item]) -> None:
        """Run items in one transaction; tries again when PostgreSQL gave it up for the sake of another."""
        for left in reversed(range(_TRIES)):
            try:
                return self._transact_once(items)
            except (psycopg.Error, sqlalchemy.exc.DBAPIError) as error:
                if _sqlstate(error) not in _SERIALIZATION or not left:
                    raise
        return None

    def _transact_once(self, items: Sequence[_Item]) -> None:
        try:
            connection = self._engine.connect()
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {_brief(error)}") from error
        with connection:
            raw = connection.connection.driver_connection
            if not isinstance(raw, psycopg.Connection):
                raise TypeError("the engine must use psycopg 3 (postgresql+psycopg://)")
            work = _Work()
            try:
                with connection.begin():
                    self._apply(connection, raw, items, work)
                    committing = True
            except BaseException as error:
                if not raw.closed:
                    raw.rollback()  # SQLAlchemy leaves it out after a commit that was refused
                    raise
                connection.invalidate()
                if not isinstance(error, Exception):
                    raise
                if work.misuse:  # the handler closed it, not the server
                    raise work.misuse from None
                if "committing" in locals() and work.fresh and self._was_committed(work.fresh):
                    return
                raise DatabaseUnavailable(f"PostgreSQL: {_brief(error)}") from error

    def _was_committed(self, fresh: set[uuid.UUID]) -> bool:
        """Whether the transaction with these ledger rows was committed, asked on a new connection.

        No means no for now only: the server may still be at it. Running the batch again is right in both cases, since
        its insert waits for the other transaction.
        """
        try:
            with self._engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert isinstance(raw, psycopg.Connection)
                return bool(self._ledger.present(raw, fresh))
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {_brief(error)}") from error

    def _apply(self, connection: sqlalchemy.Connection, raw: Connection, items: Sequence[_Item], work: _Work) -> None:
        ledger = self._ledger
        first: dict[uuid.UUID, _Item] = {}
        for item in items:
            event = item.event
            if event is None:
                item.outcome = Outcome.DEAD
            elif item.handler is None:
                item.outcome = self._unhandled(event)
            elif event.id in first:
                item.outcome = Outcome.DUPLICATE
            else:
                first[event.id] = item
                item.outcome = Outcome.DUPLICATE
        if first:
            work.fresh = ledger.claim(raw, first)
        fresh = [item for event_id, item in first.items() if event_id in work.fresh]
        for item in fresh:
            item.outcome = Outcome.DEAD if item.letter else Outcome.APPLIED
        to_run = [item for item in fresh if item.letter is None]
        versions = self._settle_versions(raw, to_run)
        try:
            self._run(connection, raw, [item for item in to_run if item.outcome is Outcome.APPLIED])
        except HandlerMisuse as error:
            work.misuse = error
            raise
        if versions:
            ledger.raise_versions(raw, versions)
        for outcome in (Outcome.STALE, Outcome.DEAD):
            ids = [item.event.id for item in fresh if item.outcome is outcome and item.event]
            if ids:
                ledger.mark(raw, ids, outcome)
        letters = [item.letter for item in items if item.letter and item.outcome is Outcome.DEAD]
        if letters:
            ledger.bury(raw, letters)
            for letter in letters:
                _log.error(
                    "put aside in dead_letters: %s %s: %s", letter.stream, letter.receipt, letter.error,
                    extra={"action": "dead_letter", "reason": letter.reason, "event_id": str(letter.event_id)},
                )  # fmt: skip

    def _unhandled(self, event: Envelope) -> Outcome:
        if self._consumer.ignores(event.type):
            return Outcome.IGNORED
        if event.type not in self._unknown and len(self._unknown) < 1000:
            self._unknown.add(event.type)
            _log.warning(
                "no handler for %r in consumer %s: such events stay pending until one is deployed "
                "(or ignore the type: consumer.ignore(%r))",
                event.type, self._consumer.name, event.type, extra={"action": "no_handler"},
            )  # fmt: skip
        return Outcome.RETRY

    def _settle_versions(self, raw: Connection, items: Sequence[_Item]) -> dict[Entity, int]:
        """Lock the entities of handlers with an order, mark the stale items, and return the versions then reached."""
        ordered: list[tuple[_Item, Entity, int]] = []
        for item in items:
            event, handler = item.event, item.handler
            assert event is not None
            assert handler is not None
            if handler.order is Order.LATEST:
                assert event.key is not None
                assert event.version is not None
                ordered.append((item, Entity(event.topic, event.type, event.key), event.version))
        if not ordered:
            return {}
        applied = self._ledger.lock_versions(raw, [entity for _, entity, _ in ordered])
        reached: dict[Entity, int] = {}
        for item, entity, version in ordered:
            before = reached.get(entity, applied[entity])
            if before is not None and version <= before:
                item.outcome = Outcome.STALE
            else:
                reached[entity] = version
        return reached

    def _run(self, connection: sqlalchemy.Connection, raw: Connection, items: list[_Item]) -> None:
        """Run the handlers, sorted by key: one key keeps its order, and a common order avoids deadlocks."""
        items.sort(key=lambda item: (item.event.key or "") if item.event else "")
        if not items:
            return
        session = HandlerSession(bind=connection)
        with ExitStack() as stack:
            stack.callback(session.discard)
            # Inside psycopg's own transaction block nobody can commit or roll back, by whatever way he got at the
            # connection: a commit would leave the ledger rows of events that have not run.
            stack.enter_context(raw.transaction())
            for item in items:
                event, handler = item.event, item.handler
                assert event is not None
                assert handler is not None
                handler.function(event, raw if handler.raw else session)
                if not handler.raw:
                    session.flush()  # now, so that an error names the right event
                status = raw.info.transaction_status
                if status != TransactionStatus.INTRANS:
                    raise HandlerMisuse(
                        "the handler caught a database error outside of session.begin_nested() and left the transaction "
                        "aborted"
                        if status == TransactionStatus.INERROR
                        else "the handler ended the transaction it was given"
                    )


def _letter(item: _Item, reason: str, error: str) -> DeadLetter:
    delivery = item.delivery
    event_id = item.event.id if item.event else None
    error = error.replace("\x00", "\\x00")  # a field's name may have it, PostgreSQL's text may not
    return DeadLetter(delivery.stream, delivery.receipt, event_id, reason, error, delivery.fields, delivery.count)


def _sqlstate(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error
    return getattr(original, "sqlstate", None)


def _brief(error: BaseException) -> str:
    """The error in one line, without the statement and parameters that SQLAlchemy adds: they hold payloads."""
    original = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig else error
    return f"{type(original).__name__}: {' '.join(str(original).split())[:500]}"
