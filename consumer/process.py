"""One batch of deliveries becomes outcomes: one database transaction, no loop, no Redis.

What may happen between any two statements, and why it does no harm: the ledger rows are inserted first, in the same
transaction as the effects, so either all of it is there after a crash or nothing; nothing is acknowledged by anybody
before `Processor.process` has returned, that is, before the transaction's end is known. An error on COMMIT tells nothing;
the ledger, read on a new connection, does.

If a handler of the batch fails, the transaction is rolled back and its deliveries run one by one, each in a transaction of
its own, so that only the failing one is left for later. The same if the connection is lost while handlers run: that may be
the server's doing, or one event's (a time-out, a query that crashes its backend). An event that loses it alone as well has
failed; if no new connection can be opened, nobody has.

Whom an error is blamed on: a handler's own statement, or the COMMIT with what is deferred to it, on the handler, unless
the server says that it cannot work now; a statement of the ledger's on PostgreSQL.

Another process may be frozen in its transaction, and hold rows that ours wants. The ledger's statements wait for a while;
then the batch runs one by one, and what is held stays pending, without a handler having been called.

A handler may leave settings on its connection. What they could make fail is done again on another one.
"""

from __future__ import annotations

import enum
import inspect
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from sqlalchemy.orm import Session

from consumer.handlers import Consumer, Order, Registered
from consumer.ledger import KEPT_BYTES, Connection, DeadLetter, Entity, Ledger
from outbox.envelope import Envelope, decode
from outbox.errors import HandlerMisuse, OutboxError, SettingsError, UndecodableEntry
from outbox.retry import database_away
from outbox.transport import Delivery
from outbox.transport.base import topic_of

_log = logging.getLogger(__name__)

#: SQLSTATEs of transactions that PostgreSQL gave up for the sake of another: worth trying again at once.
_SERIALIZATION = frozenset({"40001", "40P01"})
_TRIES = 5
#: Classes of SQLSTATEs that say something about the values in a statement.
_VALUES = ("22", "23", "54")
#: Of the resource class (53), but about one query: it wants more temporary files than it may have.
_QUERY_LIMIT = "53400"
_READ_ONLY = "25006"
#: A wait for a lock, or a statement, took too long.
_LOCK_TIMEOUT = "55P03"
_WAITED = frozenset({_LOCK_TIMEOUT, "57014"})
#: Shortest wait of a ledger's statement for another transaction.
_IMPATIENCE_SECONDS = 0.01
#: How often it is said again that rows are held.
_REMIND_SECONDS = 30.0


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


class _Lost(Exception):
    """The connection was lost after handlers had begun, and nothing was committed; or it cannot write any more."""


class _Held(Exception):
    """Another transaction holds a row of the ledger, and does not end."""


@dataclass(slots=True)
class _Item:
    delivery: Delivery
    event: Envelope | None = None
    handler: Registered | None = None
    outcome: Outcome | None = None
    letter: DeadLetter | None = None
    held: bool = False


@dataclass(slots=True)
class _Work:
    """How far a transaction is.

    Attributes:
        fresh: events whose ledger rows it inserted.
        begun: what handlers were called with; the last one may be at it.
        ours: whether the statement at work is the ledger's; otherwise it is a handler's, or the COMMIT.
        tag: what the transaction can be told by from another (see `Ledger.tag`); None: it cannot.
        ended: a handler ended the transaction by a statement of its own.
    """

    fresh: set[uuid.UUID] = field(default_factory=set)
    begun: list[_Item] = field(default_factory=list)
    ours: bool = True
    committing: bool = False
    tag: bytes | None = None
    ended: bool = False
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
        patience_seconds: longest wait of a ledger's statement for another transaction. Each that is in vain halves the next
            one, each batch without doubles it: a healthy process is waited for, a frozen one with hundreds of rows is not.

    Attributes:
        waiting: those of the last deliveries that stay pending for want of something, without a handler having been called.
    """

    def __init__(
        self, consumer: Consumer, engine: sqlalchemy.Engine, schema: str = "public", patience_seconds: float = 2.0
    ) -> None:
        self._consumer = consumer
        self._engine = engine
        self._ledger = Ledger(consumer.name, schema)
        self._unknown: set[str] = set()
        self.waiting: list[Delivery] = []
        self._longest_patience_seconds = self._patience_seconds = patience_seconds
        self._told_held = float("-inf")
        self._one_by_one = False  # the batch lost its connection, and PostgreSQL was away then
        self._suspect: tuple[str, str] | None = None  # ran alone when PostgreSQL went away

    def process(
        self,
        deliveries: Sequence[Delivery],
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Outcome | None]:
        """The outcome of each delivery, in their order; None for what was not started because of `stopping`.

        Args:
            progress: called after every handler and every delivery that runs alone.

        Raises:
            DatabaseUnavailable: run the same deliveries again later.
            SettingsError: the engine cannot be used.
        """
        items = [self._decoded(delivery) for delivery in deliveries]
        if self._one_by_one or not self._together(items, progress):
            for item in items:
                if stopping():
                    item.outcome = None
                    continue
                self._alone(item, progress)
                progress()
            self._one_by_one = False
        self._tell_held([item for item in items if item.held])
        self.waiting = [
            i.delivery for i in items if i.outcome is Outcome.RETRY and (i.held or (i.event and not i.handler))
        ]
        return [item.outcome for item in items]

    def _tell_held(self, held: Sequence[_Item]) -> None:
        if held and time.monotonic() >= self._told_held + _REMIND_SECONDS:
            self._told_held = time.monotonic()
            _log.warning(
                "%d deliveries stay pending: another transaction holds their ledger rows or versions, and does not end (a "
                "frozen process? see pg_stat_activity), the first is %s %s",
                len(held), held[0].delivery.stream, held[0].delivery.receipt, extra={"action": "ledger_held"},
            )  # fmt: skip

    def _together(self, items: Sequence[_Item], progress: Callable[[], None]) -> bool:
        """Run items in one transaction; False: they are to run one by one."""
        try:
            self._transact(items, progress)
            self._patience_seconds = min(self._patience_seconds * 2, self._longest_patience_seconds)
            return True
        except (DatabaseUnavailable, SettingsError):
            raise
        except _Held as error:
            self._waited_in_vain()
            if len(items) == 1:
                items[0].outcome, items[0].held = Outcome.RETRY, True
                return True
            reason = str(error)
        except _Lost as error:
            self._one_by_one = True  # also when PostgreSQL must come back first: it may be an event that crashed it
            reason = str(error)
        except Exception as error:
            if len(items) == 1:
                self._failed(items[0], error)
                return True
            reason = brief(error)
        _log.info("a batch of %d failed and runs one by one: %s", len(items), reason, extra={"action": "one_by_one"})
        return False

    def _alone(self, item: _Item, progress: Callable[[], None]) -> None:
        """Run an item in a transaction of its own."""
        name = (item.delivery.stream, item.delivery.receipt)
        try:
            if self._suspect == name:
                raise _Lost("PostgreSQL went away while it ran alone")
            self._transact([item], progress)
        except (DatabaseUnavailable, SettingsError):
            raise
        except _Held:
            self._waited_in_vain()
            item.outcome, item.held = Outcome.RETRY, True
        except _Lost as error:
            self._suspect = name
            self._reach()
            self._suspect = None
            self._failed(item, error)
        except Exception as error:
            self._failed(item, error)

    def _waited_in_vain(self) -> None:
        self._patience_seconds = max(self._patience_seconds / 2, _IMPATIENCE_SECONDS)

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
            event.type if event else None, event.id if event else item.delivery.receipt, brief(error),
            extra={"action": "handler_failed", "event_id": str(event.id) if event else None},
            exc_info=_presentable(error),
        )  # fmt: skip

    # --- the transaction ---

    def _transact(self, items: Sequence[_Item], progress: Callable[[], None]) -> None:
        """Run items in one transaction; tries again when PostgreSQL gave it up for the sake of another."""
        for left in reversed(range(_TRIES)):
            try:
                return self._transact_once(items, progress)
            except (psycopg.Error, sqlalchemy.exc.DBAPIError, DatabaseUnavailable) as error:
                cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
                if _sqlstate(cause) not in _SERIALIZATION or not left:
                    raise
        return None

    def _transact_once(self, items: Sequence[_Item], progress: Callable[[], None]) -> None:
        with self._connect() as connection:
            raw = driver_connection(connection)
            work = _Work()
            try:
                with connection.begin():
                    self._apply(connection, raw, items, work, progress)
                    work.ours, work.committing = False, True
            except BaseException as error:
                with suppress(psycopg.Error):
                    raw.rollback()  # SQLAlchemy leaves it out after a commit that was refused
                try:
                    if not isinstance(error, Exception) or (
                        not raw.closed and not work.ended and not _is_away(error, work)
                    ):
                        raise
                    self._settle(raw, items, work, error)
                finally:
                    if raw.closed or _may_be_the_sessions(error, work):
                        connection.invalidate()

    def _settle(self, raw: Connection, items: Sequence[_Item], work: _Work, error: Exception) -> None:
        """See what became of a transaction that was not simply rolled back; returns if it is done after all."""
        if raw.closed:
            if work.misuse:  # the handler closed it, not the server
                raise work.misuse from None
            if work.committing and work.fresh and self._was_committed(work.fresh):
                return
            if work.begun:
                raise _Lost(f"the connection was lost: {brief(error)}") from error
        elif work.ended:
            if self._take_back(raw, items, work):
                return
            if not _is_away(error, work):
                raise error  # it was a rollback: nothing is left
        elif work.ours and _sqlstate(error) in _WAITED:
            # If it was the whole table that is locked, this waits, too.
            self._reach(raw if _sqlstate(error) == _LOCK_TIMEOUT else None)
            raise _Held(brief(error)) from error
        elif work.begun and _sqlstate(error) == _READ_ONLY:  # it was not when the ledger rows were inserted
            raise _Lost(brief(error)) from error
        raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _connect(self) -> sqlalchemy.Connection:
        try:
            return self._engine.connect()
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _reach(self, raw: Connection | None = None) -> None:
        """See that PostgreSQL answers and the ledger can be written, on this connection or a new one.

        Raises:
            DatabaseUnavailable: it does not.
        """
        try:
            with ExitStack() as stack:
                connection = raw or driver_connection(stack.enter_context(self._connect()))
                with connection.transaction(force_rollback=True):
                    self._ledger.claim(connection, ())
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _was_committed(self, fresh: set[uuid.UUID]) -> bool:
        """Whether the transaction with these ledger rows was committed, asked on a new connection.

        All of them must be there: some may be another process's, which took a part of the batch when ours was rolled
        back. If it took all of it, that is as good: everything is applied.

        No means no for now only: the server may still be at it. Running the batch again is right in both cases, since
        its insert waits for the other transaction.
        """
        try:
            with self._connect() as connection:
                return self._ledger.present(driver_connection(connection), fresh) == fresh
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _take_back(self, raw: Connection, items: Sequence[_Item], work: _Work) -> bool:
        """Make good what a handler's own COMMIT did: the ledger rows of events that have not run are there with it.

        They are deleted again, and the versions written of those that have run. Returns whether it was a COMMIT.
        """
        ran = {item.event.id for item in work.begun if item.event}
        try:
            with raw.transaction():
                if not self._ledger.present(raw, work.fresh):
                    return False
                self._ledger.forget(raw, work.fresh - ran)
                if versions := self._settle_versions(raw, work.begun):
                    self._ledger.raise_versions(raw, versions)
        except psycopg.Error as error:
            _log.critical(
                "a handler ended the transaction with a statement of its own, and what it left could not be taken back "
                "(%s); these events count as applied, but have not run: %s",
                brief(error), ", ".join(map(str, work.fresh - ran)), extra={"action": "events_lost"},
            )  # fmt: skip
            raise
        waiting = [item for item in items if item.event is None or item.event.id in work.fresh - ran]
        for item in waiting:
            item.outcome = Outcome.RETRY
        for item in work.begun:
            item.outcome = Outcome.APPLIED
        culprit = work.begun[-1].event
        assert culprit is not None
        _log.error(
            "the handler of %s %s ended the transaction with a statement of its own: it and %d events before it in the "
            "batch are committed, what it did after that is not; %d that had not run stay pending",
            culprit.type, culprit.id, len(ran) - 1, len(waiting),
            extra={"action": "transaction_ended", "event_id": str(culprit.id)},
        )  # fmt: skip
        return True

    def _apply(
        self,
        connection: sqlalchemy.Connection,
        raw: Connection,
        items: Sequence[_Item],
        work: _Work,
        progress: Callable[[], None],
    ) -> None:
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
            before = ledger.tag(raw)
            work.fresh = ledger.claim(raw, first, self._patience_seconds)
            tag = ledger.tag(raw)
            work.tag = tag if tag != before else None
        fresh = [item for event_id, item in first.items() if event_id in work.fresh]
        for item in fresh:
            item.outcome = Outcome.DEAD if item.letter else Outcome.APPLIED
        to_run = [item for item in fresh if item.letter is None]
        versions = self._settle_versions(raw, to_run)
        try:
            self._run(connection, raw, [item for item in to_run if item.outcome is Outcome.APPLIED], work, progress)
        except HandlerMisuse as error:
            work.misuse = error
            raise
        work.ours = True
        if versions:
            ledger.raise_versions(raw, versions)
        for outcome in (Outcome.STALE, Outcome.DEAD):
            ids = [item.event.id for item in fresh if item.outcome is outcome and item.event]
            if ids:
                ledger.mark(raw, ids, outcome)
        dead = [(item.event, item.letter) for item in items if item.letter and item.outcome is Outcome.DEAD]
        if dead:
            ledger.bury(raw, [letter for _, letter in dead], self._patience_seconds)
            for event, letter in dead:
                what = f"{event.type} {event.id} of key {event.key!r}" if event else "what is no event"
                _log.error(
                    "put aside in dead_letters: %s, %s %s: %s", what, letter.stream, letter.receipt, letter.error,
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
        applied = self._ledger.lock_versions(raw, [entity for _, entity, _ in ordered], self._patience_seconds)
        reached: dict[Entity, int] = {}
        for item, entity, version in ordered:
            before = reached.get(entity, applied[entity])
            if before is not None and version <= before:
                item.outcome = Outcome.STALE
            else:
                reached[entity] = version
        return reached

    def _run(
        self,
        connection: sqlalchemy.Connection,
        raw: Connection,
        items: list[_Item],
        work: _Work,
        progress: Callable[[], None],
    ) -> None:
        """Run the handlers, sorted by key: one key keeps its order, and a common order avoids deadlocks."""
        items.sort(key=lambda item: (item.event.key or "") if item.event else "")
        if not items:
            return
        session = HandlerSession(bind=connection)
        work.ours = False
        with ExitStack() as stack:
            stack.callback(session.discard)
            # Inside psycopg's own transaction block nobody can commit or roll back, by whatever way he got at the
            # connection: a commit would leave the ledger rows of events that have not run.
            stack.enter_context(raw.transaction())
            try:
                for item in items:
                    work.begun.append(item)
                    _call(item, session, raw)
                    # The statement COMMIT cannot be refused, and psycopg begins anew with the next one.
                    if work.tag is not None and self._ledger.tag(raw) != work.tag:
                        raise HandlerMisuse("the handler ended the transaction it was given (or set application_name)")
                    progress()
            except BaseException:  # looked at before anybody rolls back
                idle = raw.info.transaction_status == TransactionStatus.IDLE
                work.ended = idle or (work.tag is not None and self._ledger.tag(raw) != work.tag)
                raise


def _call(item: _Item, session: HandlerSession, raw: Connection) -> None:
    """Run one handler, and see that it leaves the transaction as it should."""
    with _contained():
        event, handler = item.event, item.handler
        assert event is not None
        assert handler is not None
        result = handler.function(event, raw if handler.raw else session)
        if result is not None:
            _refuse_unfinished(result)
        if not handler.raw:
            session.flush()  # now, so that an error names the right event
    status = raw.info.transaction_status
    if raw.broken:
        raise psycopg.OperationalError("the handler caught the loss of its connection")
    if status != TransactionStatus.INTRANS:
        raise HandlerMisuse(
            "the handler caught a database error outside of session.begin_nested() and left the transaction aborted"
            if status == TransactionStatus.INERROR
            else "the handler ended the transaction it was given"
        )


@contextmanager
def _contained() -> Iterator[None]:
    """Whatever a handler raises is a failure of its event; only KeyboardInterrupt, a person's wish, goes further."""
    process = os.getpid()
    code = 1
    try:
        yield
        code = 0
    except psycopg.Rollback as error:  # psycopg's block would take it for its own, and for no failure
        raise HandlerMisuse("the handler raised psycopg.Rollback outside of a transaction block of its own") from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        raise HandlerMisuse(f"the handler raised {type(error).__name__}, which would end the process") from error
    finally:
        if os.getpid() != process:  # a child that the handler forked came here; the connections are its parent's
            os._exit(code)


def _refuse_unfinished(result: object) -> None:
    """Refuse what a handler has only promised to do (a lambda's or a partial's coroutine, say)."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not inspect.isawaitable(result) and not inspect.isasyncgen(result):
        return
    raise HandlerMisuse(
        f"the handler returned a {type(result).__name__}, which nobody runs: handlers are plain functions, not async "
        "ones or generators"
    )


def driver_connection(connection: sqlalchemy.Connection) -> Connection:
    """The psycopg connection beneath SQLAlchemy's.

    Raises:
        SettingsError: it is another driver's, or commits by itself.
    """
    raw = connection.connection.driver_connection
    if not isinstance(raw, psycopg.Connection):
        raise SettingsError("the consumer's engine must use psycopg 3 (postgresql+psycopg://)")
    if raw.autocommit:
        raise SettingsError(
            "the consumer's engine is in AUTOCOMMIT mode: an event's ledger row and its effect would not be one "
            "transaction, and a crash between them would lose the event; leave isolation_level out"
        )
    return raw


def _letter(item: _Item, reason: str, error: str) -> DeadLetter:
    delivery = item.delivery
    event_id = item.event.id if item.event else None
    error = error[:1000].replace("\x00", "\\x00")  # a field's name may have it, PostgreSQL's text may not
    letter = DeadLetter(delivery.stream, delivery.receipt, event_id, reason, error, delivery.fields, delivery.count)
    if letter.size > KEPT_BYTES:
        letter = replace(letter, error=f"{error}; only the beginning of its {letter.size} bytes is kept")
    return letter


def _original(error: BaseException | None) -> BaseException | None:
    """The driver's error in SQLAlchemy's."""
    return (error.orig or error) if isinstance(error, sqlalchemy.exc.StatementError) else error


def _sqlstate(error: BaseException | None) -> str | None:
    return getattr(_original(error), "sqlstate", None)


def _is_away(error: BaseException, work: _Work) -> bool:
    """Whether an error says that PostgreSQL cannot work now, and nothing about an event; the connection is still open."""
    original = _original(error)
    if not isinstance(original, psycopg.Error):
        return False
    if work.ours:  # time-outs, rights, a table that is gone: no event's fault, unless the values are refused
        return not (original.sqlstate or "").startswith(_VALUES)
    # Without a SQLSTATE it is the handler's mistake with the driver, or a connection of its own to somewhere else.
    return original.sqlstate not in (None, _QUERY_LIMIT) and database_away(original)


def _may_be_the_sessions(error: BaseException, work: _Work) -> bool:
    """Whether an error may come from what a handler set for the session (its role, a time-out, read-only, the encoding),
    so that another connection may be spared it."""
    if work.ours:
        return isinstance(error, Exception) and _sqlstate(error) != _LOCK_TIMEOUT
    state = _sqlstate(error)
    return state is not None and not state.startswith((*_VALUES, "P0"))  # P0: raised by PL/pgSQL on purpose


def brief(error: BaseException) -> str:
    """The error in one line, without the values that PostgreSQL's details and SQLAlchemy's parameters hold."""
    original = _original(error)
    return f"{type(original).__name__}: {' '.join(_text(error).split())[:500]}"


def _text(error: BaseException) -> str:
    original = _original(error)
    if isinstance(original, psycopg.Error) and original.sqlstate:
        if original.sqlstate.startswith("22"):  # of data: the message itself quotes the value
            return f"SQLSTATE {original.sqlstate}"
        return original.diag.message_primary or f"SQLSTATE {original.sqlstate}"
    if original is not error and not isinstance(original, psycopg.Error):
        return "a parameter cannot be sent"  # SQLAlchemy's StatementError; the error in it quotes the value
    text = str(original)
    if isinstance(error, sqlalchemy.exc.PendingRollbackError):
        return text.partition(" Original exception was:")[0]
    return text


def _presentable(error: BaseException) -> BaseException:
    """The error as a traceback may show it: databases' errors in its chain are replaced by such as have no values."""
    if isinstance(error, psycopg.Error | sqlalchemy.exc.SQLAlchemyError):
        original = _original(error)
        shown: Exception = RuntimeError(brief(error))
        if isinstance(original, psycopg.Error):
            shown = type(original)(_text(error))
        return shown.with_traceback(error.__traceback__)
    link, seen = error, {id(error)}
    while (behind := link.__cause__ or (None if link.__suppress_context__ else link.__context__)) is not None:
        if id(behind) in seen:
            break
        if isinstance(behind, psycopg.Error | sqlalchemy.exc.SQLAlchemyError):
            link.__cause__ = _presentable(behind)
            break
        link = behind
        seen.add(id(link))
    return error
