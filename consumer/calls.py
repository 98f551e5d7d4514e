"""Call one handler within the transaction that it is given, and see that it leaves it as it should."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from sqlalchemy.orm import Session

from consumer.blame import brief
from consumer.handlers import Consumer, Registered
from consumer.ledger import Connection
from consumer.timeouts import Watch
from outbox.envelope import Envelope, encode_json
from outbox.errors import HandlerMisuse, SettingsError

if TYPE_CHECKING:
    from consumer.loops import Loop


class HandlerSession(Session):
    """The Session that handlers get. Its transaction is the consumer's to end."""

    def commit(self) -> NoReturn:
        _misused("commit")

    def rollback(self) -> NoReturn:
        _misused("rollback")

    def close(self) -> NoReturn:
        _misused("close")

    def reset(self) -> NoReturn:  # pending changes would be forgotten
        _misused("reset")

    def invalidate(self) -> NoReturn:
        _misused("invalidate")

    def discard(self) -> None:
        """Forget the objects; the consumer's own way to close it."""
        super().close()


def _misused(method: str) -> NoReturn:
    raise HandlerMisuse(
        f"a handler must not {method} the session it is given: the consumer ends the transaction, together with the "
        "ledger row. Use session.begin_nested() for a part that may fail, or raise to give up the event for now."
    )


_LEFT = (
    "the handler left a command at work on its connection: a COPY, a stream that was not read to its end, a pipeline"
)
#: Most of JSON that is kept as a job's result.
_MAX_RESULT_BYTES = 64 << 10
#: Errors behind an error whose frames are let go.
_CHAIN = 100


class _Thread(threading.local):
    """What a thread needs for its handlers, made when it is first needed."""

    loop: Loop | None = None
    watch: Watch | None = None


_thread = _Thread()


class Unchangeable(Exception):
    """Stands for an error that takes no attribute, not even a traceback (a frozen dataclass, say): a block of `contextlib`'s would
    put an error of its own in its place.

    Attributes:
        error: what the handler raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__)
        self.error = error


@dataclass(frozen=True, slots=True)
class Returned:
    """What a handler returned: JSON; None: nothing, or why it is not kept."""

    json: bytes | None = None
    note: str | None = None


NOTHING: Final = Returned()


def _encoded(result: object) -> Returned:
    """That the result cannot be kept is no failure: the work is done."""
    try:
        encoded = encode_json(result, "result")
    except Exception as error:
        return Returned(note=f"its result is not kept: {brief(error)}")
    if len(encoded) > _MAX_RESULT_BYTES:
        return Returned(note=f"its result is not kept: {len(encoded):,} bytes of JSON, more than {_MAX_RESULT_BYTES:,}")
    return Returned(encoded)


def raised(error: Exception) -> Exception:
    """What the handler raised."""
    return error.error if isinstance(error, Unchangeable) else error


def call(
    handler: Registered,
    events: Sequence[Envelope],
    session: HandlerSession,
    raw: Connection,
    overdue: Callable[[], object] = lambda: None,
    *,
    keep: bool = False,
) -> Returned:
    """Call a handler with an event, or one of `on_batch` with several; its changes are sent to PostgreSQL when this returns.

    Args:
        keep: what it returns is wanted.
        overdue: called from another thread when the handler goes on although its time was over long ago and it has been
            interrupted. It may still do so when this returns.

    Raises:
        HandlerTimeout: it took longer than it may.
        HandlerMisuse: it ended the transaction, left it aborted, left tasks running, or would have ended the process.
        Exception: what it raised, see `raised`.
    """
    with _as_it_was(raw), _contained():
        work, time_up = _prepared(handler, list(events) if handler.batch else events[0], session, raw)
        try:
            if handler.timeout_seconds is None:
                result = work()
            else:
                watch = _thread.watch = _thread.watch or Watch()
                result = watch.run(work, handler.timeout_seconds, raw, time_up, overdue)
        except Exception as error:
            try:
                error.__traceback__ = error.__traceback__
            except Exception:
                raise Unchangeable(error) from None
            raise
        returned = NOTHING
        if result is not None:
            _refuse_unfinished(result)
            returned = _encoded(result) if keep else returned
    if raw.broken:
        raise psycopg.OperationalError("the handler caught the loss of its connection")
    status = raw.info.transaction_status
    if status == TransactionStatus.INERROR or not session.is_active:  # it has rolled back what failed in a flush
        raise HandlerMisuse(
            "the handler caught a database error outside of session.begin_nested() and left the transaction aborted"
        )
    if status != TransactionStatus.INTRANS:
        raise HandlerMisuse("the handler ended the transaction it was given")
    return returned


def check_thread(consumer: Consumer) -> None:
    """See that this thread can run the consumer's handlers.

    Raises:
        SettingsError: it runs an event loop, and another cannot be run within it.
    """
    if consumer.asynchronous:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise SettingsError(
                f"consumer {consumer.name} has async handlers, which have an event loop of their own, and runs in a thread whose "
                "loop is running; run the worker in another: await asyncio.to_thread(worker.run)"
            )


def close() -> None:
    """Close what this thread has kept for its handlers: an event loop, a thread that watches their time."""
    if _thread.loop:
        _thread.loop.close()
    if _thread.watch:
        _thread.watch.close()
    _thread.loop = _thread.watch = None


def _prepared(
    handler: Registered, argument: object, session: HandlerSession, raw: Connection
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What runs a handler, and what ends it early from another thread, besides an exception."""
    if handler.asynchronous:
        from consumer import loops  # SQLAlchemy's asyncio is no small thing, and not everybody has it

        loop = _thread.loop = _thread.loop or loops.Loop()
        task = loop.task(handler.function, argument, session)  # type: ignore[arg-type]  # it was looked at when registered
        return partial(loop.run, task), partial(loops.cancel, task)

    def run() -> object:
        result = handler.function(argument, raw if handler.raw else session)
        if not handler.raw:
            session.flush()  # now, so that an error names the right event
        return result

    return run, lambda: None


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


@contextmanager
def _as_it_was(raw: Connection) -> Iterator[None]:
    """See that a handler leaves neither ways of reading rows on the connection nor a command at work: a COPY, a `stream` that was
    not read to its end, a pipeline. Whoever sends the next statement would wait for ever, for the server or for the connection's
    lock. An error keeps the frames that it came through, and what is in them, so these go first; what is then still at work
    ends with the connection."""
    if not isinstance(raw, psycopg.Connection):  # a rehearsal's
        yield  # type: ignore[unreachable]
        return
    made = raw.row_factory, raw.cursor_factory
    raw.cursor_factory = _guarded(raw.cursor_factory)  # type: ignore[arg-type]  # mypy's view of a class as a key
    try:
        yield
    except BaseException as error:
        behind: BaseException | None = error
        for _ in range(_CHAIN):
            if behind is None or not _at_work(raw):
                break
            traceback.clear_frames(behind.__traceback__)
            behind = behind.__cause__ or behind.__context__
        if _at_work(raw):
            _closed(raw)
            raise HandlerMisuse(_LEFT) from error
        raise
    finally:
        raw.row_factory, raw.cursor_factory = made
    if _at_work(raw):
        _closed(raw)
        raise HandlerMisuse(_LEFT)


#: Statements that end a transaction, as PostgreSQL's grammar has them, behind any comments; ROLLBACK TO a savepoint does not. The group
#: is atomic, or many comments could be told apart in very many ways.
_ENDS = re.compile(
    r"(?>(?:\s|--[^\n]*\n|/\*.*?\*/)*)(commit|end|rollback(?!(\s+(work|transaction))?\s+to\b)|abort|prepare\s+transaction)\b",
    re.IGNORECASE | re.DOTALL,
)


@cache
def _guarded(cursor: type[psycopg.Cursor[Any]]) -> type[psycopg.Cursor[Any]]:
    """Cursors of this kind that refuse to end the transaction by a statement. Of several in one text the first counts: what
    comes behind it is noticed when it has been done."""

    class GuardedCursor(cursor):  # type: ignore[misc, valid-type]
        def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
            self._refuse(query)
            return super().execute(query, *arguments, **options)

        def executemany(self, query: Any, *arguments: Any, **options: Any) -> Any:
            self._refuse(query)
            return super().executemany(query, *arguments, **options)

        def _refuse(self, query: Any) -> None:
            if isinstance(query, sql.Composable):
                query = query.as_string(self)
            text = query.decode("utf-8", "replace") if isinstance(query, bytes) else str(query)
            if found := _ENDS.match(text):
                raise HandlerMisuse(
                    f"a handler must not send {found[1].upper()}: the consumer ends the transaction, together with the ledger "
                    "row. Use a savepoint (session.begin_nested(), connection.transaction()) for a part that may fail"
                )

    return GuardedCursor


def _closed(raw: Connection) -> None:
    raw.close()
    raw.lock = threading.Lock()  # what was left has the other one, and to roll back takes it even now


def _at_work(raw: Connection) -> bool:
    return not raw.closed and (
        raw.lock.locked()
        or raw.info.transaction_status == TransactionStatus.ACTIVE
        or raw.pgconn.pipeline_status != PipelineStatus.OFF
    )


def _refuse_unfinished(result: object) -> None:
    """Refuse what a handler has only promised to do (a lambda's or a partial's coroutine, say)."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
    elif not inspect.isawaitable(result) and not inspect.isasyncgen(result):
        return
    raise HandlerMisuse(
        f"the handler returned a {type(result).__name__}, which nobody runs: write it as `async def`, and register that; "
        "generators are no handlers"
    )
