"""Servers as the transport talks to them, and what their errors mean. `Server` is one; `outbox.transport.cluster` has many.

A call is a command and the key that it is about; its name goes as bytes, so that redis-py has no parser of its own for it and
the reply is what the server sent, alike in every version of the client. An error is the reply of its call, and one of ours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import redis
from redis.client import NEVER_DECODE, PubSub
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outbox.errors import GroupLost, StreamUnusable, TransportError, TransportUnavailable

Command = tuple[Any, ...]
Call = tuple[str, Command]
#: How long to wait for the answer to SUBSCRIBE: by so much a read may take longer than it was to block, where the connection is dead.
_SUBSCRIBED_SECONDS = 1.0
#: The command that reads these keys: one, or several where one server has them all.
Reading = Callable[[Sequence[str]], Command]


class Servers(Protocol):
    """One server, or those of a cluster."""

    def run(self, calls: Sequence[Call], then: Sequence[Command] = ()) -> list[Any]:
        """Several calls in one round trip (one to each server that they concern); an error of one does not stop the others.

        `then`: what each of these servers gets after its calls, on the same connection. The replies are behind those of the
        calls, server by server; of one that is away there are none.

        Raises:
            TransportUnavailable: nothing can be reached or can work.
        """

    def read(self, reader: tuple[str, str], keys: Sequence[str], command: Reading, block_seconds: float) -> list[Any]:
        """Replies to a command that waits at the server, about all of the keys; those of streams that have something.

        Raises:
            TransportError: an error in place of the first reply.
        """

    def unread(self) -> Mapping[tuple[str, str], list[Any]]:
        """Replies, by reader, that came and that `read` has not handed out; nothing is read after it."""

    def nodes(self) -> Mapping[str, Server]:
        """The servers that take writes, by name; one server alone has none."""

    def close(self) -> None:
        """Close the connections."""


class Server:
    """One server, by any redis-py client of it."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def run(self, calls: Sequence[Call], then: Sequence[Command] = ()) -> list[Any]:
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                add: Callable[..., Any] = pipeline.execute_command
                for command in (*(command for _, command in calls), *then):
                    add(*command, **{NEVER_DECODE: True})
                replies = pipeline.execute(raise_on_error=False)
        except RedisError as error:  # of the connection, whatever its code: nothing was sent to any stream
            found = translated(error)
            raise TransportUnavailable(str(found), found.code) from error
        return [translated(reply) if isinstance(reply, RedisError) else reply for reply in replies]

    def read(self, reader: tuple[str, str], keys: Sequence[str], command: Reading, block_seconds: float) -> list[Any]:
        return [answer(self, "", command(keys))]

    def unread(self) -> Mapping[tuple[str, str], list[Any]]:
        return {}

    def nodes(self) -> Mapping[str, Server]:
        return {"": self}

    def channels(self) -> PubSub:
        """redis-py's own way to hear what is said on channels."""
        return self._client.pubsub()  # type: ignore[no-any-return,no-untyped-call]  # redis-py has no types for it

    def close(self) -> None:
        self._client.close()


class Listener:
    """Waits for something to be said on channels, on a connection of its own. In a cluster every node hears everything."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._channels: frozenset[str] = frozenset()
        self._heard: PubSub | None = None

    def hear(self, channels: Sequence[str]) -> bool:
        """Listen to these; whether that has just begun, so that something may have been said before.

        Raises:
            TransportError: it cannot be done.
        """
        if self._channels == frozenset(channels):
            return False
        with self._translated():
            if self._heard is None:
                self._heard = random.choice(list(self._servers.nodes().values())).channels()
            self._heard.subscribe(*channels)
            left, end = len(channels), time.monotonic() + _SUBSCRIBED_SECONDS
            while left:
                message = self._heard.get_message(timeout=max(0.0, end - time.monotonic()))
                if message is None and time.monotonic() >= end:
                    raise RedisTimeoutError("SUBSCRIBE is not answered")
                left -= message is not None and message["type"] == "subscribe"
        self._channels = frozenset(channels)
        return True

    def wait(self, seconds: float) -> bool:
        """Whether something was said in this time, or since it was asked last.

        Raises:
            TransportError: nothing can be heard.
        """
        with self._translated():
            if self._heard is None:
                raise RedisConnectionError("not listening")
            return self._heard.get_message(timeout=seconds) is not None

    def hear_nothing(self) -> None:
        """Until the next `hear`."""
        self._channels = frozenset()
        if self._heard is not None:
            with suppress(TransportError), self._translated():
                self._heard.unsubscribe()  # type: ignore[no-untyped-call]  # of redis-py

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            self.close()
            raise (
                translated(error)
                if isinstance(error, RedisError)
                else TransportUnavailable(f"Redis: {error}", "OSError")
            ) from error

    def close(self) -> None:
        """Close the connection."""
        heard, self._heard, self._channels = self._heard, None, frozenset()
        if heard is not None:
            with suppress(RedisError, OSError):
                heard.close()


def answer(server: Server | Servers, key: str, command: Command) -> Any:
    """The reply to one command.

    Raises:
        TransportError: it is an error.
    """
    (reply,) = server.run([(key, command)])
    if isinstance(reply, TransportError):
        raise reply
    return reply


#: Codes that say something about one stream, not about the server.
_STREAM_CODES = frozenset({"WRONGTYPE", "NOPERM", "CROSSSLOT", "ERR"})
#: Codes that its caller knows what to do about.
_OTHER_CODES = frozenset({"BUSYGROUP", "NOSCRIPT"})
#: redis-py drops the code from the text of the errors that it has classes for.
_CODES = {
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "ExecAbortError": "EXECABORT",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "ClusterCrossSlotError": "CROSSSLOT",
    "MovedError": "MOVED",
    "AskError": "ASK",
}


def translated(error: RedisError) -> TransportError:
    """Our error for redis-py's, by the class or the code that the server's reply starts with; its cause is redis-py's."""
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        return _caused(TransportUnavailable(f"Redis: {error}", type(error).__name__), error)
    code = getattr(error, "status_code", None) or _CODES.get(type(error).__name__) or str(error).partition(" ")[0]
    if not code.isupper():  # old versions of the client drop ERR from the text
        code = "ERR"
    if code in ("NOGROUP", "UNBLOCKED"):
        return _caused(GroupLost(f"Redis: {error}", code), error)
    if code in ("MOVED", "ASK"):
        what = "this server is one of a cluster, and REDIS_URL does not say so (redis+cluster://host:port)"
        return _caused(StreamUnusable(f"Redis: {what}", code), error)
    if code in _STREAM_CODES and isinstance(error, ResponseError):
        return _caused(StreamUnusable(f"Redis: {error}", code), error)
    if code in _OTHER_CODES:
        return _caused(TransportError(f"Redis: {error}", code), error)
    return _caused(TransportUnavailable(f"Redis: {error}", code), error)


def _caused(error: TransportError, cause: BaseException) -> TransportError:
    error.__cause__ = cause
    return error
