"""Whom an error is blamed on, by its SQLSTATE; and what of it may be shown."""

from __future__ import annotations

from typing import Final

import psycopg
import sqlalchemy

from outbox.retry import database_away

#: PostgreSQL gave the transaction up for the sake of another: deadlock, serialization failure. Worth trying again at once.
_GIVEN_UP: Final = "40"
#: Classes of SQLSTATEs that say something about the values in a statement.
_VALUES: Final = ("22", "23", "54")
#: Of the resource class (53), but about one query: it wants more temporary files than it may have.
_QUERY_LIMIT: Final = "53400"
READ_ONLY: Final = "25006"
#: What the ledger's own statements fail with when a handler has made the transaction read-only, or has set another role.
CHANGED: Final = frozenset({READ_ONLY, "42501"})
#: A wait for a lock, or a statement, took too long.
LOCK_TIMEOUT: Final = "55P03"
WAITED: Final = frozenset({LOCK_TIMEOUT, "57014"})


def _original(error: BaseException | None) -> BaseException | None:
    """The driver's error in SQLAlchemy's."""
    return (error.orig or error) if isinstance(error, sqlalchemy.exc.StatementError) else error


def sqlstate(error: BaseException | None) -> str | None:
    """The error's SQLSTATE; None where it has none."""
    try:
        state = getattr(_original(error), "sqlstate", None)
    except Exception:  # of a class of the handler's
        return None
    return state if isinstance(state, str) else None


def given_up(error: BaseException | None) -> bool:
    """Whether the transaction can succeed if it is simply run again."""
    return (sqlstate(error) or "").startswith(_GIVEN_UP)


def away(error: BaseException, ours: bool) -> bool:
    """Whether an error says that PostgreSQL cannot work now, and nothing about an event; the connection is still open.

    Args:
        ours: whether the statement was the ledger's; otherwise a handler's, or the COMMIT with what is deferred to it.
    """
    original = _original(error)
    if not isinstance(original, psycopg.Error):
        return False
    if ours:  # time-outs, rights, a table that is gone: no event's fault, unless the values are refused
        return not (original.sqlstate or "").startswith(_VALUES)
    # Without a SQLSTATE it is the handler's mistake with the driver, or a connection of its own to somewhere else.
    return original.sqlstate not in (None, _QUERY_LIMIT) and database_away(original)


def ends_session(error: BaseException) -> bool:
    """Whether the connection is as good as lost: an operator or the server ends it, and may not have done so yet."""
    return (sqlstate(error) or "").startswith("57P")


def innocent(error: BaseException) -> bool:
    """Whether a handler's error says nothing about its event, so that it is tried again without end: a transaction that was
    given up, a lock that was not to be had, a server that cannot work, a prepared statement that a migration has outdated
    (the rollback forgets it)."""
    return given_up(error) or sqlstate(error) == LOCK_TIMEOUT or away(error, ours=False) or _outdated(error)


def _outdated(error: BaseException) -> bool:
    """Whether a prepared statement has other columns now. Its SQLSTATE says less, and its words are translated."""
    original = _original(error)
    return isinstance(original, psycopg.errors.FeatureNotSupported) and (
        original.diag.source_function == "RevalidateCachedQuery"
    )


def may_be_the_sessions(error: BaseException, ours: bool) -> bool:
    """Whether an error may come from what a handler set for the session (its role, a time-out, read-only, the encoding),
    so that another connection may be spared it."""
    state = sqlstate(error)
    if ours:
        return isinstance(error, Exception) and state != LOCK_TIMEOUT
    return state is not None and not state.startswith((*_VALUES, "P0"))  # P0: raised by PL/pgSQL on purpose


def named(error: BaseException) -> str:
    """The class of the error, of the driver's where SQLAlchemy has wrapped it."""
    return storable(type(_original(error)).__qualname__)


def brief(error: BaseException) -> str:
    """The error in one line, without the values that PostgreSQL's details and SQLAlchemy's parameters hold."""
    return storable(f"{type(_original(error)).__name__}: {' '.join(_text(error).split())[:500]}")


def storable(text: str) -> str:
    """Text as PostgreSQL can have it: NUL and lone surrogates (of a file's name, say) as escapes."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    original = _original(error)
    if isinstance(original, psycopg.Error) and original.sqlstate:
        if original.sqlstate.startswith("22"):  # of data: the message itself quotes the value
            return f"SQLSTATE {original.sqlstate}"
        return original.diag.message_primary or f"SQLSTATE {original.sqlstate}"
    if original is not error and not isinstance(original, psycopg.Error):
        return "a parameter cannot be sent"  # SQLAlchemy's StatementError; the error in it quotes the value
    try:
        text = str(original)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # a handler's own class may do anything
        return f"its text cannot be had ({type(problem).__name__})"
    if isinstance(error, sqlalchemy.exc.PendingRollbackError):
        return text.partition(" Original exception was:")[0]
    return text


def presentable(error: BaseException) -> BaseException:
    """The error as a traceback may show it: databases' errors in its chain are replaced by such as have no values, and one whose
    text cannot be written by one that can."""
    try:
        str(error).encode()
    except KeyboardInterrupt:
        raise
    except BaseException:  # lone surrogates, or whatever its class does
        return RuntimeError(brief(error)).with_traceback(error.__traceback__)
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
            try:
                link.__cause__ = presentable(behind)
            except Exception:  # a frozen dataclass, say
                return RuntimeError(brief(error)).with_traceback(error.__traceback__)
            break
        link = behind
        seen.add(id(link))
    return error
