"""Somebody who reads every stream as a group of its own and remembers in which order events first appeared.

It acknowledges only what it has taken down, so the relay publishes again what it has not seen. Who deletes a part of a
stream does so by `destroy`, which takes down what is there in the same transaction: otherwise an event that was published
in its order, and deleted unseen, would be seen again behind its successors. A loss from a point on (a flush, a crash) needs
no such care: what was seen is then all that stood before some entry, and the rest comes again in its order.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import redis

from tests.faults.soak.servers import Servers

#: How soon a reader gives a server up, in seconds; faults wait for it.
_TIMEOUT_SECONDS = 2.0


class Seen(NamedTuple):
    """What an entry said."""

    type: str
    key: str
    version: int


class Witness:
    """Reads until it is closed.

    Attributes:
        group: its name.
        first: every event that was seen, in the order of their first appearances.
        gone: ids of events that were deleted while the consumers' group had them pending, or had not read them yet.
    """

    group = "witness"

    def __init__(self, servers: Servers, consumers: str) -> None:
        self.first: dict[str, Seen] = {}
        self.gone: set[str] = set()
        self._servers, self._consumers = servers, consumers
        self._entries: set[tuple[str, bytes]] = set()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    @property
    def again(self) -> int:
        """How many entries repeated an event."""
        return len(self._entries) - len(self.first)

    def destroy(self, stream: str, *commands: tuple[Any, ...]) -> None:
        """Do something to a stream and its companions, and take down what it held, at once."""
        with self._lock, self._servers.client(stream) as client:
            pipeline = client.pipeline(transaction=True)
            pipeline.xrange(stream)
            pipeline.xpending_range(stream, self._consumers, "-", "+", 1_000_000)
            pipeline.xinfo_groups(stream)
            for command in commands:
                pipeline.execute_command(*command)
            entries, pending, groups, *_ = pipeline.execute(raise_on_error=False)
            if isinstance(entries, list):
                self._record(stream, entries)
                self._note_gone(entries, pending, groups)

    def _note_gone(self, entries: list[tuple[bytes, dict[bytes, bytes]]], pending: Any, groups: Any) -> None:
        """Without the group, what it had acknowledged is not known."""
        for group in groups:
            if group["name"] == self._consumers.encode():
                names, read = {one["message_id"] for one in pending}, _place(group["last-delivered-id"])
                left = (fields for name, fields in entries if name in names or _place(name) > read)
                self.gone |= {fields[b"id"].decode() for fields in left}

    def check(self) -> None:
        """Raise what ended the reading, if anything did."""
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        behind = set(self._servers.streams)  # may have entries that were read and not acknowledged
        clients: dict[str, redis.Redis] = {}
        try:
            while not self._end.is_set():
                found = False
                for stream in self._servers.streams:
                    with self._lock:
                        try:
                            if stream not in clients:
                                clients[stream] = self._servers.client(stream, _TIMEOUT_SECONDS)
                            found |= self._read(clients[stream], stream, "0" if stream in behind else ">")
                            behind.discard(stream)
                        except (redis.RedisError, OSError, LookupError, ValueError) as error:
                            behind.add(stream)
                            if client := clients.pop(stream, None):
                                client.close()
                            if "NOGROUP" in str(error):
                                with suppress(redis.RedisError, LookupError), self._servers.client(stream) as client:
                                    client.xgroup_create(stream, self.group, "0", mkstream=True)
                if not found:
                    time.sleep(0.05)  # its pace
        except BaseException as error:
            self._failure = error

    def _read(self, client: redis.Redis, stream: str, after: str) -> bool:
        """Take down some entries and acknowledge them."""
        while answer := client.xreadgroup(self.group, "it", {stream: after}, count=1000):
            ((_, entries),) = answer
            if not entries:
                return False
            self._record(stream, entries)
            client.xack(stream, self.group, *(name for name, _ in entries))
            if after == ">":
                return True
        return False

    def _record(self, stream: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for name, fields in entries:
            if fields and (stream, name) not in self._entries:  # without fields: deleted while pending
                self._entries.add((stream, name))
                seen = Seen(fields[b"type"].decode(), fields[b"subject"].decode(), int(fields[b"version"]))
                self.first.setdefault(fields[b"id"].decode(), seen)


def _place(name: bytes) -> tuple[int, ...]:
    """An entry's id as something that can be compared."""
    return tuple(map(int, name.split(b"-")))
