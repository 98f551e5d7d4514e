"""The errors of both packages. One root; each error carries its data and says whether trying again can help.

Foreign errors (psycopg, SQLAlchemy, redis) are translated where they are met: by SQLSTATE or by the error code that a
Redis reply starts with, never by the text of a message. The cause is always kept as ``__cause__``.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Root of all errors raised by `outbox` and `consumer`."""

    #: Whether the same call may succeed later without anybody changing anything.
    retryable = False


class SettingsError(OutboxError):
    """A setting is missing, malformed or contradicts another; nothing was started."""


class NotStarted(OutboxError):
    """A command that is to be strict found something dangerous; nothing was started. Says what, and what to do."""


class InvalidEvent(OutboxError, ValueError):
    """An event breaks a rule and was refused before any SQL: the caller's transaction is untouched.

    Attributes:
        field: the event's field, with the path inside a payload (``payload.items[2].price``).
        rule: what the field must satisfy.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class InvalidKey(OutboxError, ValueError):
    """A scope or key of `consumer.first_time` breaks its rule and was refused before any SQL.

    Attributes:
        field: ``scope`` or ``key``.
        rule: what it must satisfy.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class NoTransaction(OutboxError):
    """The connection is in autocommit mode: what is recorded would not be part of the business transaction."""


class UndecodableEntry(OutboxError):
    """An entry of a stream is not an event: a field is missing or malformed.

    Attributes:
        field: the wire field.
        rule: what the field must satisfy.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class PayloadMismatch(OutboxError):
    """A payload is not of the type that the handler's annotation asks for. Never quotes the value.

    Attributes:
        field: path in the payload (``payload.items[2].price``).
        rule: what it must satisfy.
    """

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class TransportError(OutboxError):
    """The transport (Redis, Valkey) did not do what was asked. Never the fault of an event.

    Attributes:
        code: the error's code as the server names it (``OOM``, ``READONLY``, …), or the client error's class.
    """

    retryable = True

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class TransportUnavailable(TransportError):
    """The server cannot be reached or cannot work now: refused, timed out, loading, read-only, failing over."""


class NotYetSafe(TransportUnavailable):
    """What was published is in the stream, but not yet at as many replicas or on disk as was asked for (OUTBOX_WAIT_…)."""


class StreamUnusable(TransportError):
    """One stream cannot be used (its key holds another type, …); the others can."""


class GroupLost(TransportError):
    """The consumer group or its stream is gone (FLUSHALL, DEL, XGROUP DESTROY); it is to be made again at 0."""


class StaleRelay(OutboxError):
    """A stream is in a later epoch than this relay's database: this relay's PostgreSQL is not the current one.

    Attributes:
        stream: the stream.
        epoch: the stream's epoch.
    """

    retryable = True  # a failover may still be under way

    def __init__(self, stream: str, epoch: int, ours: int) -> None:
        super().__init__(
            f"stream {stream} is in epoch {epoch}, this relay's database in epoch {ours}: "
            "it is not the database that publishes now, so nothing is published from it. After a failover, point this relay "
            "at the new primary; if this database is the one to go on with, run: outbox new-epoch. Two outboxes that share a "
            "Redis need topics, or an OUTBOX_KEY_PREFIX, of their own"
        )
        self.stream = stream
        self.epoch = epoch


class AlreadySealed(OutboxError):
    """Another relay sealed this batch number first, or a pooler turned to another server; this one stands by and reads anew."""

    retryable = True


class HandlerMisuse(OutboxError):
    """A handler ended the transaction it was given (commit, rollback or close); its work is rolled back."""


class HandlerTimeout(OutboxError):
    """A handler took longer than its ``timeout_seconds``; its work is rolled back."""


class Reject(OutboxError):
    """Raised by a handler: this event can never be applied. It is put aside as a dead letter, without another try."""


class SchemaError(OutboxError):
    """The database's tables are missing or of another revision than this code."""
