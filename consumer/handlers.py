"""What a user writes: a `Consumer`, its handlers, and in which order versions may be applied."""

from __future__ import annotations

import enum
import inspect
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from consumer.payloads import Payload, payload_of
from outbox.envelope import MAX_NAME, QUEUE_PREFIX, Envelope, check_topic, is_queue
from outbox.errors import InvalidEvent, SettingsError
from outbox.transport.base import CONSUMER_NAME

Handler = Callable[[Any, Any], object]
F = TypeVar("F", bound=Handler)


class Order(enum.Enum):
    """Which versions of a key a handler wants."""

    #: Every event once, in any order: for deltas ("50.00 more").
    ANY = "any"
    #: Only what is newer than the newest applied: for states ("lives in Riyadh"). Events need a key and a version.
    LATEST = "latest"
    #: Every version of a key, one after the other, from 1 on: for what must not be left out ("closed", after "opened").
    #: Events need a key and a version. The versions are those of the key in its topic, over all types of it that the
    #: consumer handles with this order. An event that comes early waits until the gap before it closes.
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Retry:
    """When an event whose handler failed is tried again, by PostgreSQL's clock, and when no more.

    Args:
        attempts: how often a handler may fail with an event before it is put aside as a dead letter.
        first_seconds: pause after the first failure. Each is twice the one before, shortened by up to a quarter, so that what
            failed together does not come back together.
        longest_seconds: longest pause.
        reject_on: exceptions that are put aside at once, like `consumer.Reject`.
        retry_on: exceptions that say nothing about the event (a service that is away): tried again without end, not counted,
            also if they are among `reject_on`. So are deadlocks and serialization failures anyway. Connections that an
            event loses count by themselves, up to CONSUMER_MAX_DELIVERIES, whatever is said here.
    """

    attempts: int = 8
    first_seconds: float = 1.0
    longest_seconds: float = 600.0
    reject_on: tuple[type[Exception], ...] = ()
    retry_on: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 1 <= self.attempts <= 10_000:
            raise SettingsError(f"Retry: attempts must be 1 to 10,000, is {self.attempts!r}")
        for name in ("first_seconds", "longest_seconds"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 < seconds <= _DAY_SECONDS:
                raise SettingsError(f"Retry: {name} must be more than 0 and at most a day (86,400), is {seconds!r}")
        if self.first_seconds > self.longest_seconds:
            raise SettingsError(
                f"Retry: first_seconds is {self.first_seconds}, longer than longest_seconds, {self.longest_seconds}"
            )
        for name in ("reject_on", "retry_on"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(isinstance(k, type) and issubclass(k, Exception) for k in kinds):
                raise SettingsError(f"Retry: {name} must be a tuple of exception classes, is {kinds!r}")

    def pause_seconds(self, tries: int) -> float:
        """The pause after so many failures in a row."""
        pause = min(self.first_seconds * 2.0 ** min(tries - 1, 60), self.longest_seconds)
        return pause * random.uniform(0.75, 1)


#: The ledger remembers for so long at least.
_DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Registered:
    """A handler with what was asked of it.

    Attributes:
        payload: the type that its annotation gives payloads.
    """

    function: Handler
    order: Order = Order.ANY
    raw: bool = False
    batch: bool = False
    retry: Retry = Retry()
    timeout_seconds: float | None = None
    asynchronous: bool = False
    payload: Payload | None = None

    def typed(self, event: Envelope) -> Envelope:
        """The event as the handler wants it.

        Raises:
            PayloadMismatch: its payload is not of the type that the handler's annotation asks for.
        """
        return self.payload.typed(event) if self.payload else event


class Consumer:
    """A named set of handlers: of events of topics (`on`), or of jobs of queues (`job`). The name is the consumer group in Redis and
    the scope in the ledger.

    Args:
        name: letters, digits and ``._/-``, at most 100. Renaming makes a new consumer that starts from the beginning.
        topics: the topics to read.
        queues: or the queues to work for. A queue has one consumer.
        retry: what becomes of events whose handler fails, where the handler has nothing else.

    Attributes:
        topics: of a consumer of queues, their topics (``queue/mail``).

    Raises:
        SettingsError: the name, a topic or a queue is not one that can be used; there are topics and queues.
    """

    def __init__(
        self,
        name: str,
        *,
        topics: Iterable[str] = (),
        queues: Iterable[str] = (),
        retry: Retry | None = None,
    ) -> None:
        if not isinstance(name, str) or not CONSUMER_NAME.fullmatch(name):
            raise SettingsError(f"consumer name: must match {CONSUMER_NAME.pattern}, is {name!r}")
        self.name = name
        for what, given in (("topics", topics), ("queues", queues)):
            if isinstance(given, str):
                raise SettingsError(f"{what}: must be a list of {what}, not one string")
        topics, queues = list(topics), list(queues)
        if topics and queues:
            raise SettingsError(
                f"consumer {name}: has topics or queues, not both; make another Consumer for the queues"
            )
        self.has_queues = bool(queues)
        what = "queues" if queues else "topics"
        try:
            names = [f"{QUEUE_PREFIX}{queue}" for queue in queues] or topics
            self.topics = tuple(dict.fromkeys(check_topic(topic) for topic in names))
        except InvalidEvent as error:
            raise SettingsError(f"{what}: one {error.rule}") from None
        if not self.topics:
            raise SettingsError(f"consumer {name}: needs at least one topic or queue")
        if not queues and any(map(is_queue, self.topics)):
            raise SettingsError(f"topics: one is a queue's; say queues=[…], and its name without {QUEUE_PREFIX}")
        self.retry = self._checked(retry) or Retry()
        self._handlers: dict[str, Registered] = {}
        self._ignored: set[str] = set()

    def on(
        self,
        type: str,
        *,
        order: Order = Order.ANY,
        raw: bool = False,
        retry: Retry | None = None,
        timeout_seconds: float | None = None,
    ) -> Callable[[F], F]:
        """Register the handler of an event type: ``handler(event, session)``.

        It runs in the transaction that also writes the ledger row. It must not commit, roll back or close what it is
        given (``session.begin_nested()`` is fine), and it may raise: then nothing of it remains and the event is tried
        again later (see `Retry`), or never if it raises `consumer.Reject`. What it sets for the session (``SET`` without
        ``LOCAL``) stays for other handlers on the connection, which is replaced when it makes a statement fail.

        An ``async def`` handler gets an AsyncSession in the same transaction. If the event is annotated with
        ``Envelope[Payment]``, its payload is a `Payment`; events whose payload is none are put aside at once.

        Args:
            type: the event type, exactly.
            order: see `Order`.
            raw: give the handler the psycopg connection instead of a SQLAlchemy Session.
            retry: instead of the consumer's.
            timeout_seconds: how long the handler may take, all in all; then it is interrupted, has failed, and is called
                again according to `retry`. Default: as long as it likes.

        Raises:
            SettingsError: the type has a handler already, or is ignored; the function cannot be called with two arguments, is
                a generator, or is async and raw or without greenlet; its annotation cannot be used; an argument breaks its
                rule.
        """
        return self._register("on", type, retry, timeout_seconds, order=order, raw=raw)

    def on_batch(
        self,
        type: str,
        *,
        order: Order = Order.ANY,
        raw: bool = False,
        retry: Retry | None = None,
        timeout_seconds: float | None = None,
    ) -> Callable[[F], F]:
        """Register a handler of many events of a type at once: ``handler(events, session)``, for statements about sets.

        The events are sorted by key, those of one key in the order in which they came; with `Order.LATEST` there is one a
        key, the newest. The annotation for typed payloads is ``list[Envelope[Payment]]``. If it raises, all that it did is rolled
        back, and it is called again with each half, until the events that it fails with are alone. Otherwise as `on`.

        Raises:
            SettingsError: as `on`; or the order is `Order.NEXT`, for which one event's failure stops those after it.
        """
        if order is Order.NEXT:
            raise SettingsError(f"consumer {self.name}: on_batch cannot have Order.NEXT, on can")
        return self._register("on_batch", type, retry, timeout_seconds, order=order, raw=raw)

    def job(
        self,
        type: str,
        *,
        retry: Retry | None = None,
        timeout_seconds: float | None = None,
        raw: bool = False,
    ) -> Callable[[F], F]:
        """Register the handler of a type of jobs: ``handler(job, session)``; `on` for queues.

        What it returns (whatever a payload may be, at most 64 KiB of JSON) is the job's result, for people and for
        `outbox.jobs.state`. What it does in the session's database is done once; what it does elsewhere (sends, charges) may happen
        again, where a process ends before its transaction does: give the other side the job's id to tell by.

        Raises:
            SettingsError: as `on`; or the consumer has topics.
        """
        return self._register("job", type, retry, timeout_seconds, raw=raw)

    def _register(
        self,
        method: str,
        type: str,
        retry: Retry | None,
        timeout_seconds: float | None,
        *,
        order: Order = Order.ANY,
        raw: bool = False,
    ) -> Callable[[F], F]:
        self._check_type(type)
        if (method == "job") != self.has_queues:
            raise SettingsError(
                f"consumer {self.name}: {method} is for consumers of {'topics' if self.has_queues else 'queues'}"
                + (", job for those of queues" if self.has_queues else ", on and on_batch for those of topics")
            )
        if not isinstance(order, Order):
            raise SettingsError(
                f"consumer {self.name}: order must be Order.ANY, Order.LATEST or Order.NEXT, is {order!r}"
            )
        if timeout_seconds is not None and not (
            isinstance(timeout_seconds, int | float) and 0 < timeout_seconds <= _DAY_SECONDS
        ):
            raise SettingsError(
                f"consumer {self.name}: timeout_seconds must be more than 0 and at most a day (86,400), is "
                f"{timeout_seconds!r}"
            )
        retry = self._checked(retry) or self.retry

        def register(function: F) -> F:
            if type in self._handlers or type in self._ignored:
                raise SettingsError(f"consumer {self.name}: {type!r} has a handler already or is ignored")
            try:
                asynchronous = _is_asynchronous(function, raw)
                payload = payload_of(function, method == "on_batch")
            except SettingsError as error:
                name = getattr(function, "__qualname__", function)
                raise SettingsError(
                    f"consumer {self.name}: the handler of {type!r}, {name}, {error}"
                ) from error.__cause__
            self._handlers[type] = Registered(
                function, order, raw, method == "on_batch", retry, timeout_seconds, asynchronous, payload
            )
            return function

        return register

    def _checked(self, retry: Retry | None) -> Retry | None:
        if retry is not None and not isinstance(retry, Retry):
            raise SettingsError(f"consumer {self.name}: retry must be a Retry, is {retry!r}")
        return retry

    def ignore(self, *types: str) -> None:
        """Acknowledge events of these types without doing anything. Types that are neither handled nor ignored wait for a
        handler (CONSUMER_NO_HANDLER_SECONDS), and are then put aside.

        Raises:
            SettingsError: a type has a handler.
        """
        for type in types:
            self._check_type(type)
            if type in self._handlers:
                raise SettingsError(f"consumer {self.name}: {type!r} has a handler already")
            self._ignored.add(type)

    @property
    def longest_timeout_seconds(self) -> float:
        """Of its handlers that have one; 0: none has."""
        return max((handler.timeout_seconds or 0.0 for handler in self._handlers.values()), default=0.0)

    @property
    def types(self) -> list[str]:
        """The types that have a handler or are ignored."""
        return [*self._handlers, *self._ignored]

    @property
    def asynchronous(self) -> bool:
        """Whether any handler is async."""
        return any(handler.asynchronous for handler in self._handlers.values())

    def handler(self, type: str) -> Registered | None:
        """The handler of a type, or None."""
        return self._handlers.get(type)

    def ignores(self, type: str) -> bool:
        """Whether events of the type are to be acknowledged without doing anything."""
        return type in self._ignored

    def _check_type(self, type: str) -> None:
        if not isinstance(type, str) or not 1 <= len(type) <= MAX_NAME:
            raise SettingsError(f"consumer {self.name}: an event type has 1 to {MAX_NAME} characters, is {type!r}")


def _is_asynchronous(function: object, raw: bool) -> bool:
    """Whether calling it makes a coroutine.

    Raises:
        SettingsError: it makes a generator, whose body nobody runs; or a coroutine that cannot be given what it needs.
    """
    called = getattr(function, "__call__", None)  # noqa: B004 - an object's own, which may be async
    if any(
        kind(each) for kind in (inspect.isgeneratorfunction, inspect.isasyncgenfunction) for each in (function, called)
    ):
        raise SettingsError("is a generator: its body would never run")
    if not any(map(inspect.iscoroutinefunction, (function, called))):
        return False
    if raw:
        raise SettingsError("is async, and cannot be raw: there is one connection, and psycopg's own blocks")
    if find_spec("greenlet") is None:
        raise SettingsError("is async: that needs greenlet (pip install greenlet)")
    return True
