"""What a user writes: a `Consumer`, its handlers, and in which order versions may be applied."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from outbox.envelope import MAX_NAME, Envelope, check_topic
from outbox.errors import InvalidEvent, SettingsError
from outbox.transport.base import CONSUMER_NAME

Handler = Callable[[Envelope, Any], object]
F = TypeVar("F", bound=Handler)


class Order(enum.Enum):
    """Which versions of a key a handler wants."""

    #: Every event once, in any order: for deltas ("50.00 more").
    ANY = "any"
    #: Only what is newer than the newest applied: for states ("lives in Riyadh"). Events need a key and a version.
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Registered:
    """A handler with what was asked of it."""

    function: Handler
    order: Order
    raw: bool


class Consumer:
    """A named set of handlers. The name is the consumer group in Redis and the scope in the ledger.

    Args:
        name: letters, digits and ``._/-``, at most 100. Renaming makes a new consumer that starts from the beginning.
        topics: the topics to read.

    Raises:
        SettingsError: the name or a topic is not one that can be used.
    """

    def __init__(self, name: str, *, topics: Iterable[str]) -> None:
        if not isinstance(name, str) or not CONSUMER_NAME.fullmatch(name):
            raise SettingsError(f"consumer name: must match {CONSUMER_NAME.pattern}, is {name!r}")
        self.name = name
        if isinstance(topics, str):
            raise SettingsError("topics: must be a list of topics, not one string")
        try:
            self.topics = tuple(dict.fromkeys(check_topic(topic) for topic in topics))
        except InvalidEvent as error:
            raise SettingsError(f"topics: one {error.rule}") from None
        if not self.topics:
            raise SettingsError(f"consumer {name}: needs at least one topic")
        self._handlers: dict[str, Registered] = {}
        self._ignored: set[str] = set()

    def on(self, type: str, *, order: Order = Order.ANY, raw: bool = False) -> Callable[[F], F]:
        """Register the handler of an event type: ``handler(event, session)``.

        It runs in the transaction that also writes the ledger row. It must not commit, roll back or close what it is
        given (``session.begin_nested()`` is fine), and it may raise: then nothing of it remains and the event is tried
        again later. What it sets for the session (``SET`` without ``LOCAL``) stays for other handlers on the connection,
        which is replaced when it makes a statement fail.

        Args:
            type: the event type, exactly.
            order: see `Order`.
            raw: give the handler the psycopg connection instead of a SQLAlchemy Session.

        Raises:
            SettingsError: the type has a handler already, or is ignored; the function is async or a generator, so that
                calling it would do nothing; `order` is not an `Order`.
        """
        self._check_type(type)
        if not isinstance(order, Order):
            raise SettingsError(f"consumer {self.name}: order must be Order.ANY or Order.LATEST, is {order!r}")

        def register(function: F) -> F:
            if not _runs_when_called(function):
                raise SettingsError(
                    f"consumer {self.name}: the handler of {type!r} is async or a generator: its body would never run; "
                    "handlers are plain functions"
                )
            if type in self._handlers or type in self._ignored:
                raise SettingsError(f"consumer {self.name}: {type!r} has a handler already or is ignored")
            self._handlers[type] = Registered(function, order, raw)
            return function

        return register

    def ignore(self, *types: str) -> None:
        """Acknowledge events of these types without doing anything. Types that are neither handled nor ignored wait.

        Raises:
            SettingsError: a type has a handler.
        """
        for type in types:
            self._check_type(type)
            if type in self._handlers:
                raise SettingsError(f"consumer {self.name}: {type!r} has a handler already")
            self._ignored.add(type)

    def handler(self, type: str) -> Registered | None:
        """The handler of a type, or None."""
        return self._handlers.get(type)

    def ignores(self, type: str) -> bool:
        """Whether events of the type are to be acknowledged without doing anything."""
        return type in self._ignored

    def _check_type(self, type: str) -> None:
        if not isinstance(type, str) or not 1 <= len(type) <= MAX_NAME:
            raise SettingsError(f"consumer {self.name}: an event type has 1 to {MAX_NAME} characters, is {type!r}")


def _runs_when_called(function: object) -> bool:
    """Whether calling it runs its body, instead of making a coroutine or a generator."""
    called = getattr(function, "__call__", None)  # noqa: B004 - an object's own, which may be async
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return not any(kind(each) for kind in kinds for each in (function, called))
