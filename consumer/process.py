"""One batch of deliveries becomes outcomes: one database transaction, no loop, no Redis.

What may happen between any two statements, and why it does no harm: the ledger rows are inserted first, in the same
transaction as the effects, so either all of it is there after a crash or nothing; nothing is acknowledged by anybody
before `Processor.process` has returned, that is, before the transaction's end is known. An error on COMMIT tells nothing;
the ledger, read on a new connection, does.

What one transaction does is in `consumer.work`. Here is what becomes of it when it does not simply commit. If it is the COMMIT
that fails, or the connection is lost, the deliveries run one by one, each in a transaction of its own, so that only the failing
one is left for later. A lost connection may be the server's doing, or one event's (a query that crashes its backend). An event
that loses it alone as well has failed; if no new connection can be opened, nobody has.

Another process may be frozen in its transaction, and hold rows that ours wants. The ledger's statements wait for a while;
then the batch runs one by one, and what is held is left as it was, without a handler having been called.

A handler may leave settings on its connection. What they could make fail is done again on another one.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Final

import psycopg
import sqlalchemy
from psycopg import capabilities
from psycopg.pq import PollingStatus
from psycopg.pq.abc import PGcancelConn

from consumer import calls
from consumer.blame import (
    CHANGED,
    LOCK_TIMEOUT,
    WAITED,
    away,
    brief,
    ends_session,
    given_up,
    may_be_the_sessions,
    presentable,
    sqlstate,
    storable,
)
from consumer.handlers import Consumer, Order
from consumer.ledger import Connection, DeadLetter, Entity, Ledger, Waiting, size
from consumer.work import Blame, Failure, Item, Limits, Outcome, Work, blame
from outbox.envelope import decode
from outbox.errors import HandlerTimeout, OutboxError, PayloadMismatch, SettingsError, UndecodableEntry
from outbox.transport import Delivery
from outbox.transport.base import topic_of

_log = logging.getLogger(__name__)

__all__ = ["DatabaseUnavailable", "Outcome", "Processor", "driver_connection"]

#: Tries of a transaction that PostgreSQL gives up for the sake of another.
_TRIES = 5
#: Shortest wait of a ledger's statement for another transaction.
_IMPATIENCE_SECONDS = 0.01
#: How often it is said again that rows are held.
_REMIND_SECONDS = 30.0
#: Exit code of a process whose handler could not be interrupted (EX_SOFTWARE of sysexits.h).
OVERDUE: Final = 70
#: How long such a process takes to write that down, at most.
_LAST_WORDS_SECONDS = 10.0
#: How long PostgreSQL may take to hear that it is to cancel a statement.
_CANCEL_SECONDS = 2.0
#: Until it is known how many events of a type fail: so many of so many.
_UNKNOWN: Final = (0.1, 10.0)
#: Of so many events of each type at most it is remembered how many have failed.
_LATELY = 4000
#: How likely it is that an event fails that has failed before.
_AGAIN = 0.5
#: Waiting events that are let go at a time when there is a handler for them.
_WOKEN = 1000


class DatabaseUnavailable(OutboxError):
    """PostgreSQL cannot be reached or cannot work; nothing of the batch is known to be done, it is to be run again."""

    retryable = True


class ProcessDied(Exception):
    """A process ended while a handler was at an event."""


class _Lost(Exception):
    """The connection was lost after handlers had begun, and nothing was committed; or PostgreSQL cannot work any more.

    Attributes:
        error: what said so: the driver's error, or what the handler made of it.
    """

    def __init__(self, error: Exception, blame: Blame) -> None:
        super().__init__(brief(error))
        self.error, self.blame = calls.raised(error), blame


class _Held(Exception):
    """Another transaction holds a row of the ledger, and does not end."""


class Processor:
    """Runs the handlers of one consumer.

    Args:
        engine: a SQLAlchemy engine over psycopg; the consumer's database.
        schema: schema of the ledger.
        patience_seconds: longest wait of a ledger's statement for another transaction. Each that is in vain halves the next
            one, each batch without doubles it: a healthy process is waited for, a frozen one with hundreds of rows is not.
        limits: see `Limits`.
        starting: called with the deliveries that a handler is about to be called with, and with none after the last.
    """

    def __init__(
        self,
        consumer: Consumer,
        engine: sqlalchemy.Engine,
        schema: str = "public",
        patience_seconds: float = 2.0,
        limits: Limits | None = None,
        starting: Callable[[Sequence[Delivery]], None] = lambda _: None,
    ) -> None:
        self._consumer = consumer
        self._engine = engine
        self._ledger = Ledger(consumer.name, schema)
        self._limits = limits or Limits()
        self._starting = starting
        self._unknown: set[str] = set()
        self._longest_patience_seconds = self._patience_seconds = patience_seconds
        self._lately: dict[str, tuple[float, float]] = {}  # of each type: how many failed, of how many
        self._told_held = float("-inf")
        self._one_by_one = False  # the batch lost its connection, and PostgreSQL was away then
        # What ran alone when PostgreSQL went away, and the error that it met.
        self._suspect: tuple[tuple[str, str], Exception] | None = None
        self._stopping: Callable[[], bool] = lambda: False
        self._at_work: Connection | None = None
        self._cut = False

    def process(
        self,
        deliveries: Sequence[Delivery],
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Outcome | None]:
        """The outcome of each delivery, in their order; None for what was not started because of `stopping`.

        Args:
            deliveries: out of a stream, or of one `due`.
            stopping: asked before every call of a handler; what has run is committed then.
            progress: called after every call of a handler and every delivery that runs alone.

        Raises:
            DatabaseUnavailable: run the same deliveries again later.
            SettingsError: the engine cannot be used, or this thread.
        """
        return [item.outcome for item in self.run(deliveries, stopping, progress)]

    def run(
        self,
        deliveries: Sequence[Delivery],
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Item]:
        """`process`, with all that is known of each delivery."""
        self._stopping = stopping
        calls.check_thread(self._consumer)
        items = [self._decoded(delivery) for delivery in deliveries]
        alone = items if self._one_by_one or not self._together(items, progress) else [i for i in items if i.again]
        for item in alone:
            if stopping():
                item.outcome = None
                continue
            self._alone(item, progress)
            progress()
        self._one_by_one = False
        self._look_up(items)
        self._tell_held([item for item in items if item.outcome is Outcome.HELD])
        return items

    def _look_up(self, items: Sequence[Item]) -> None:
        """See what the ledger says of jobs that it knew before."""
        known = [item for item in items if item.outcome is Outcome.DUPLICATE and not item.waiting]
        if not known or not self._consumer.has_queues:
            return
        try:
            with self._autocommit() as raw:
                outcomes = self._ledger.outcomes(raw, [item.event.id for item in known if item.event])
        except DatabaseUnavailable as error:
            _log.debug("jobs done before stay as they are for now: %s", error)
            for item in known:
                item.outcome = Outcome.HELD
        else:
            for item in known:
                item.before = outcomes.get(item.event.id) if item.event else None

    def died(self, delivery: Delivery) -> Item:
        """Write down that a process ended while a handler was at this delivery.

        Raises:
            DatabaseUnavailable: it is to be said again.
        """
        item = self._decoded(delivery)
        self._failed(
            item, Failure(ProcessDied("process died while a handler was at this event"), Blame.PROCESS), lambda: None
        )
        self._look_up([item])
        return item

    def cut(self) -> None:
        """See that the transaction at work is rolled back, whatever a handler is at, and that none begins after it. For the end
        of the process; by another thread than that which processes."""
        self._cut = True
        raw = self._at_work
        with suppress(psycopg.Error, OSError):
            if raw is None:
                return
            cancel = _canceller(raw)
            with socket.socket(fileno=os.dup(raw.fileno())) as connection:
                connection.shutdown(
                    socket.SHUT_RDWR
                )  # first, so that nothing is written about the statement that fails
            cancel()

    @contextmanager
    def _cuttable(self, raw: Connection) -> Iterator[Connection]:
        self._at_work = raw
        try:
            if self._cut:
                raise DatabaseUnavailable("this process ends, and begins no transaction any more")
            yield raw
        finally:
            self._at_work = None

    def _overdue(self, items: Sequence[Item], raw: Connection) -> None:
        """Write down that a handler has failed which nothing can end, and end the process, which can do no more; in a thread
        beside that of the handler, which may hold anything: the lock of the log, too."""
        last = threading.Timer(_LAST_WORDS_SECONDS, os._exit, (OVERDUE,))
        last.daemon = True
        last.start()
        try:
            handler, event = items[0].handler, items[0].event
            assert handler is not None
            assert event is not None
            _log.critical(
                "the handler of %s %s goes on after its timeout_seconds, %g, and cannot be interrupted; this process ends with "
                "exit code %d",
                event.type, event.id, handler.timeout_seconds, OVERDUE,
                extra={"action": "handler_overdue", "event_id": str(event.id)},
            )  # fmt: skip
            # PostgreSQL rolls back when it sees this: the handler's transaction holds the ledger row.
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(raw.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            # Of many, nobody knows which it was: they are counted as delivered, and run alone one day.
            if len(items) == 1:
                error = HandlerTimeout("the handler could not be interrupted, and its process ended")
                failure = Failure(error, Blame.EVENT)
                item = Item(items[0].delivery, event, handler)
                self._failed(item, failure, lambda: None)
                if item.outcome is Outcome.HELD:
                    _log.error(
                        "the failure of %s %s was not written: its rows are still locked", event.type, event.id,
                        extra={"action": "failure_not_written"},
                    )  # fmt: skip
        except Exception as problem:
            _log.error("a failure was not written: %s", brief(problem), extra={"action": "failure_not_written"})
        finally:
            os._exit(OVERDUE)

    # --- events that wait ---

    def due(self, seconds: float, limit: int, suspects: bool = True) -> tuple[list[Waiting], float | None]:
        """See `Ledger.lease`.

        Raises:
            DatabaseUnavailable: PostgreSQL failed.
        """
        with self._autocommit() as raw:
            return self._ledger.lease(raw, seconds, limit, suspects)

    def leased(self, token: uuid.UUID) -> list[Waiting]:
        """What somebody has leased, who is gone; to be released, or said that he `died` of it.

        Raises:
            DatabaseUnavailable: PostgreSQL failed.
        """
        with self._autocommit() as raw:
            return self._ledger.leased_by(raw, token)

    def release(self, waiting: Sequence[Waiting]) -> None:
        """Give back what was leased and not started.

        Raises:
            DatabaseUnavailable: PostgreSQL failed; others take it when the lease is over.
        """
        with self._autocommit() as raw:
            self._ledger.release(raw, waiting)

    def wake(self) -> None:
        """Let go what waited for a handler that there is now.

        Raises:
            DatabaseUnavailable: PostgreSQL failed.
        """
        with self._autocommit() as raw:
            self._ledger.wake_types(raw, self._consumer.types, _WOKEN)

    def troubles(self, seconds: float, dead: int, waiting: int) -> tuple[int, int]:
        """Dead letters of the last so many seconds, and events that wait for another try; counted to `dead` and `waiting`.

        Raises:
            DatabaseUnavailable: PostgreSQL failed.
        """
        with self._autocommit() as raw:
            return self._ledger.lately_dead(raw, seconds, dead), self._ledger.number_waiting(raw, waiting)

    @contextmanager
    def _autocommit(self) -> Iterator[Connection]:
        with self._connect() as connection:
            try:
                driver_connection(connection)
                yield driver_connection(connection.execution_options(isolation_level="AUTOCOMMIT"), autocommit=True)
            except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
                connection.invalidate()  # the connection's settings may be the cause
                raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    # --- one batch, or one event ---

    def _tell_held(self, held: Sequence[Item]) -> None:
        if held and time.monotonic() >= self._told_held + _REMIND_SECONDS:
            self._told_held = time.monotonic()
            _log.warning(
                "%d deliveries stay pending: another transaction holds their ledger rows or versions, and does not end (a "
                "frozen process? see pg_stat_activity), the first is %s %s",
                len(held), held[0].delivery.stream, held[0].delivery.receipt, extra={"action": "ledger_held"},
            )  # fmt: skip

    def _together(self, items: Sequence[Item], progress: Callable[[], None]) -> bool:
        """Run items in one transaction; False: they are to run one by one."""
        try:
            self._transact(items, progress)
            self._patience_seconds = min(self._patience_seconds * 2, self._longest_patience_seconds)
            self._count_failures(items)
            return True
        except (DatabaseUnavailable, SettingsError):
            raise
        except _Held as error:
            self._waited_in_vain()
            if len(items) == 1:
                items[0].outcome = Outcome.HELD
                return True
            reason = str(error)
        except _Lost as error:
            self._one_by_one = True  # also when PostgreSQL must come back first: it may be an event that crashed it
            reason = str(error)
        except Exception as error:
            if len(items) == 1:
                self._failed(items[0], self._failure(items[0], error), progress)
                return True
            reason = brief(error)
        _log.info("a batch of %d failed and runs one by one: %s", len(items), reason, extra={"action": "one_by_one"})
        return False

    def _count_failures(self, items: Sequence[Item]) -> None:
        """See how many events of each type fail. Those that have failed before, and fail again, say nothing about others."""
        for item in items:
            if _has_failed(item) or item.event is None or item.handler is None:
                continue
            failures, ran = self._lately.get(item.event.type, _UNKNOWN)
            failures, ran = failures + (item.failure is not None), ran + 1
            self._lately[item.event.type] = (failures, ran) if ran < _LATELY else (failures / 2, ran / 2)

    def _failing(self, item: Item) -> float:
        if _has_failed(item) or item.event is None:
            return _AGAIN
        failures, ran = self._lately.get(item.event.type, _UNKNOWN)
        return failures / ran

    def _alone(self, item: Item, progress: Callable[[], None]) -> None:
        """Run an item in a transaction of its own."""
        name = (item.delivery.stream, item.delivery.receipt)
        try:
            if self._suspect and self._suspect[0] == name:
                raise _Lost(self._suspect[1], Blame.CONNECTION)
            self._transact([item], progress)
            if item.again:  # its connection is gone, this one is new
                self._transact([item], progress, lenient=False)
        except (DatabaseUnavailable, SettingsError):
            raise
        except _Held:
            self._waited_in_vain()
            item.outcome = Outcome.HELD
        except _Lost as error:
            self._suspect = name, error.error
            self._reach()
            self._suspect = None
            self._failed(item, Failure(error.error, error.blame), progress)
        except Exception as error:
            self._failed(item, self._failure(item, error), progress)

    @staticmethod
    def _failure(item: Item, error: Exception) -> Failure:
        return Failure(error, blame(item.handler, error) if item.handler else Blame.EVENT)

    def _failed(self, item: Item, failure: Failure, progress: Callable[[], None]) -> None:
        """Write down that an event failed, whose transaction is gone."""
        item.lost = failure
        try:
            self._transact([item], progress)
        except (DatabaseUnavailable, SettingsError):
            raise
        except _Held:
            item.outcome = Outcome.HELD
        except Exception as error:
            item.outcome = Outcome.HELD
            _log.error(
                "%s %s failed (%s), and that cannot be written down: it stays as it was: %s",
                item.delivery.stream, item.delivery.receipt, brief(failure.error), brief(error),
                extra={"action": "failure_not_written"}, exc_info=presentable(error),
            )  # fmt: skip

    def _waited_in_vain(self) -> None:
        self._patience_seconds = max(self._patience_seconds / 2, _IMPATIENCE_SECONDS)

    def _decoded(self, delivery: Delivery) -> Item:
        item, waiting = Item(delivery), delivery if isinstance(delivery, Waiting) else None
        try:
            item.event = decode(topic_of(delivery.stream), delivery.fields, delivery.count)
        except UndecodableEntry as error:
            item.letter = _letter(item, "undecodable", str(error))
            return item
        item.handler = self._consumer.handler(item.event.type)
        starts = (waiting.starts if waiting else delivery.count) - 1
        if starts >= self._limits.max_deliveries:
            died = f"process died: it ended each time that this was delivered, {starts} times (CONSUMER_MAX_DELIVERIES)"
            item.letter = _letter(item, "process_died", died, starts)
        elif item.handler and item.handler.order is not Order.ANY:
            order, key, version = item.handler.order, item.event.key, item.event.version
            if key is None or version is None:
                missing = "key" if key is None else "version"
                item.letter = _letter(item, f"no_{missing}", f"a handler with {order} needs events with a {missing}")
            elif order is Order.NEXT and version < 1:
                item.letter = _letter(item, "no_version", f"a handler with {order} needs versions from 1 on")
        if item.handler and not item.letter:
            try:
                item.event = item.handler.typed(item.event)
            except PayloadMismatch as error:
                item.letter = _letter(item, "payload", str(error))
        return item

    # --- the transaction ---

    def _transact(self, items: Sequence[Item], progress: Callable[[], None], *, lenient: bool = True) -> None:
        """Run items in one transaction; tries again when PostgreSQL gave it up for the sake of another."""
        for left in reversed(range(_TRIES)):
            try:
                self._transact_once(items, progress, lenient)
            except (psycopg.Error, sqlalchemy.exc.DBAPIError, DatabaseUnavailable) as error:
                cause = error.__cause__ if isinstance(error, DatabaseUnavailable) else error
                if not given_up(cause) or not left:
                    raise
            else:
                return self._tell(items)
        return None

    def _transact_once(self, items: Sequence[Item], progress: Callable[[], None], lenient: bool) -> None:
        with self._connect() as connection, self._cuttable(driver_connection(connection)) as raw:
            work = Work(
                items, self._consumer, self._ledger, self._limits, connection, raw, self._patience_seconds, progress,
                self._starting, self._overdue, lenient, self._stopping, self._failing,
            )  # fmt: skip
            try:
                with connection.begin() as transaction:
                    work.apply(transaction)
                    work.ours, work.committing = False, True
            except BaseException as error:
                with suppress(psycopg.Error):
                    raw.rollback()  # SQLAlchemy leaves it out after a commit that was refused
                try:
                    if not isinstance(error, Exception) or (
                        not raw.closed and not work.ended and not away(error, work.ours)
                    ):
                        raise
                    self._settle(raw, items, work, error)
                finally:
                    if raw.closed or may_be_the_sessions(error, work.ours):
                        connection.invalidate()
            if any(item.again for item in items) and not connection.invalidated:
                connection.invalidate()

    def _settle(self, raw: Connection, items: Sequence[Item], work: Work, error: Exception) -> None:
        """See what became of a transaction that was not simply rolled back; returns if it is done after all."""
        if raw.closed:
            if work.misuse:  # the handler closed it, not the server
                raise work.misuse from None
            if work.committing and self._was_committed(work):
                return
            if work.begun:
                raise _Lost(error, Blame.CONNECTION) from error
        elif work.ended:
            if self._take_back(raw, items, work):
                return
            if not away(error, work.ours):
                raise error  # it was a rollback: nothing is left
        elif work.ours and sqlstate(error) in WAITED:
            # If it was the whole table that is locked, this waits, too.
            self._reach(raw if sqlstate(error) == LOCK_TIMEOUT else None)
            raise _Held(brief(error)) from error
        elif work.begun and (not work.ours or sqlstate(error) in CHANGED):
            # It could work when the ledger rows were inserted; whether it cannot now is seen when this runs alone.
            raise _Lost(error, Blame.CONNECTION if ends_session(error) else Blame.NOBODY) from error
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

    def _was_committed(self, work: Work) -> bool:
        """Whether the transaction was committed, asked on a new connection.

        All of its ledger rows must be there: some may be another process's, which took a part of the batch when ours was
        rolled back. If it took all of it, that is as good. And nothing of what waited may be leased to us still.

        No means no for now only: the server may still be at it. Running the batch again is right in both cases, since
        its insert waits for the other transaction.
        """
        if not work.fresh and not work.taken:
            return False
        try:
            with self._connect() as connection:
                raw = driver_connection(connection)
                return self._ledger.present(raw, work.fresh) == work.fresh and not (
                    work.taken and self._ledger.leased(raw, work.taken)
                )
        except (psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _take_back(self, raw: Connection, items: Sequence[Item], work: Work) -> bool:
        """Make good what a handler's own COMMIT did: the ledger rows of events that have not run are there with it.

        They are as they were before, and the versions written of those that have run. Returns whether it was a COMMIT.
        """
        ran = work.done + work.running
        left = work.fresh - {item.event.id for item in ran if item.event}
        waited = {item.event.id for item in items if item.waiting and item.event}
        versions: dict[Entity, int] = {}
        try:
            with raw.transaction():
                if not self._ledger.applied(raw, work.fresh):
                    return False
                self._ledger.forget(raw, left - waited)
                self._ledger.mark(raw, left & waited, "waiting")
                self._ledger.done_waiting(raw, [item.waiting for item in ran if item.waiting])
                for item in ran:
                    if item.entity and item.event and item.event.version is not None:
                        versions[item.entity] = max(versions.get(item.entity, 0), item.event.version)
                if versions:
                    before = self._ledger.lock_versions(raw, versions)
                    versions = {e: v for e, v in versions.items() if (before[e] is None) or v > (before[e] or 0)}
                    self._ledger.raise_versions(raw, versions)
                    self._ledger.wake(raw, {e: v for e, v in versions.items() if not e.type}, _WOKEN)
        except psycopg.Error as error:
            _log.critical(
                "a handler ended the transaction with a statement of its own, and what it left could not be taken back "
                "(%s); these events count as applied, but have not run: %s",
                brief(error), ", ".join(map(str, left)), extra={"action": "events_lost"},
            )  # fmt: skip
            raise
        for item in items:
            item.again = item.event is None or item.event.id in left
        for item in ran:
            item.outcome = Outcome.APPLIED
        culprit = work.running[-1].event
        assert culprit is not None
        _log.error(
            "the handler of %s %s ended the transaction with a statement of its own: it and %d events before it in the "
            "batch are committed, what it did after that is not; %d that had not run run alone",
            culprit.type, culprit.id, len(ran) - 1, sum(item.again for item in items),
            extra={"action": "transaction_ended", "event_id": str(culprit.id)},
        )  # fmt: skip
        return True

    # --- what is said ---

    def _tell(self, items: Sequence[Item]) -> None:
        """Log what was committed and somebody should know."""
        for item in items:
            if item.outcome is Outcome.DEAD and item.grave:
                self._tell_dead(item, item.grave)
            elif item.outcome is Outcome.RETRY and item.wait and item.failure:
                self._tell_failed(item, item.failure)
            elif item.outcome is Outcome.PARKED and item.wait and item.wait.reason == "no_handler":
                self._tell_unknown(item)

    def _tell_failed(self, item: Item, failure: Failure) -> None:
        wait, event = item.wait, item.event
        assert wait is not None
        of = item.handler.retry.attempts if item.handler else self._consumer.retry.attempts
        counted = f"attempt {wait.attempts} of {of}" if failure.blame is Blame.EVENT else "not counted"
        if failure.blame in (Blame.CONNECTION, Blame.PROCESS):
            counted = f"start {wait.starts} of {self._limits.max_deliveries}"
        known = _has_failed(item)  # its traceback was shown then, and will be at the end
        _log.error(
            "handler failed (%s), tried again in %.1f s: %s %s: %s",
            counted, wait.seconds, event.type if event else None, event.id if event else item.delivery.receipt,
            brief(failure.error),
            extra={"action": "handler_failed", "event_id": str(event.id) if event else None, "attempts": wait.attempts},
            exc_info=None if known else presentable(failure.error),
        )  # fmt: skip

    def _tell_dead(self, item: Item, letter: DeadLetter) -> None:
        event = item.event
        what = f"{event.type} {event.id} of key {event.key!r}" if event else "what is no event"
        _log.error(
            "put aside in dead_letters (%s): %s, %s %s: %s",
            letter.reason, what, item.delivery.stream, item.delivery.receipt, letter.error,
            extra={"action": "dead_letter", "reason": letter.reason, "event_id": str(event.id) if event else None},
            exc_info=presentable(item.failure.error) if item.failure else None,
        )  # fmt: skip

    def _tell_unknown(self, item: Item) -> None:
        assert item.event is not None
        if item.event.type in self._unknown or len(self._unknown) >= 1000:
            return
        self._unknown.add(item.event.type)
        _log.warning(
            "no handler for %r in consumer %s: such events wait for one to be deployed, and are put aside after %g s "
            "(CONSUMER_NO_HANDLER_SECONDS); or ignore the type: consumer.ignore(%r)",
            item.event.type, self._consumer.name, self._limits.no_handler_seconds, item.event.type,
            extra={"action": "no_handler"},
        )  # fmt: skip


def driver_connection(connection: sqlalchemy.Connection, *, autocommit: bool = False) -> Connection:
    """The psycopg connection beneath SQLAlchemy's.

    Raises:
        SettingsError: it is another driver's, or commits by itself.
    """
    raw = connection.connection.driver_connection
    if not isinstance(raw, psycopg.Connection):
        raise SettingsError("the consumer's engine must use psycopg 3 (postgresql+psycopg://)")
    if raw.autocommit and not autocommit:
        raise SettingsError(
            "the consumer's engine is in AUTOCOMMIT mode: an event's ledger row and its effect would not be one "
            "transaction, and a crash between them would lose the event; leave isolation_level out"
        )
    return raw


def _canceller(raw: Connection) -> Callable[[], object]:
    """What has PostgreSQL cancel the statement at work on a connection, also when that is closed by then."""
    if not capabilities.has_cancel_safe():  # libpq before 17
        return raw.pgconn.get_cancel().cancel
    return partial(_cancel, raw.pgconn.cancel_conn())


def _cancel(request: PGcancelConn) -> None:
    """Without `PGcancel.cancel`, in which no thread of this process runs until a server answers, and one that hangs does not."""
    events = {PollingStatus.READING: select.POLLIN, PollingStatus.WRITING: select.POLLOUT}
    deadline = time.monotonic() + _CANCEL_SECONDS
    request.start()
    while (wanted := events.get(PollingStatus(request.poll()))) and (left := deadline - time.monotonic()) > 0:
        poll = select.poll()
        poll.register(request.socket, wanted)
        poll.poll(left * 1000)
    request.finish()


def _has_failed(item: Item) -> bool:
    """Whether it waited for another try; others have waited for a handler, or for the versions before them."""
    return item.waiting is not None and item.waiting.tries > 0


def _letter(item: Item, reason: str, error: str, attempts: int | None = None) -> DeadLetter:
    error = storable(error[:1000])  # a field's name may have NUL, PostgreSQL's text may not
    letter = DeadLetter(item.delivery, item.event, reason, error, item.delivery.count if attempts is None else attempts)
    if letter.cut:
        letter = replace(letter, error=f"{error}; only the beginning of its {size(item.delivery)} bytes is kept")
    return letter
