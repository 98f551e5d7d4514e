"""Queues and streams behind one transport: which of the two carries something is told by its name (`is_queue`)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Literal

from outbox.envelope import Run
from outbox.errors import NotYetSafe, SettingsError, TransportError
from outbox.transport.base import (
    Claim,
    Delivery,
    Marker,
    Part,
    ServerFacts,
    Settled,
    StreamInfo,
    StreamState,
    Transport,
    Wait,
    is_queue,
)
from outbox.transport.connect import connect
from outbox.transport.list import ListTransport
from outbox.transport.relayed import longest
from outbox.transport.stream import StreamTransport


class Router:
    """Carries queues by `lists`, all else by `streams`.

    Args:
        streams: as `StreamTransport`.
        lists: as `ListTransport`; of the same servers.
    """

    def __init__(self, streams: StreamTransport, lists: ListTransport) -> None:
        self.streams, self.lists = streams, lists

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "",
        timeout_seconds: float = 5.0,
        block_seconds: float = 0.0,
        wait: Wait | None = None,
        claim_seconds: float = 60.0,
    ) -> Router:
        """Both with the same connections; see `StreamTransport.from_url` and `ListTransport`.

        Raises:
            ValueError: the address is malformed.
        """
        servers = connect(url, timeout_seconds=timeout_seconds, block_seconds=block_seconds + longest(wait))
        return cls(
            StreamTransport(servers, prefix, wait), ListTransport(servers, prefix, wait, claim_seconds=claim_seconds)
        )

    def of(self, stream: str) -> Transport:
        """The one that carries it."""
        return self.lists if is_queue(stream) else self.streams

    def _split(self, streams: Sequence[str]) -> list[tuple[Transport, list[str]]]:
        """Those of each, if there are any."""
        parts: list[tuple[Transport, list[str]]] = [
            (self.streams, [stream for stream in streams if not is_queue(stream)]),
            (self.lists, [stream for stream in streams if is_queue(stream)]),
        ]
        return [(transport, some) for transport, some in parts if some]

    def _only(self, streams: Sequence[str]) -> Transport:
        """The one that carries all of a consumer."""
        parts = self._split(streams) or [(self.streams, [])]
        if len(parts) > 1:
            raise SettingsError("a consumer reads topics or queues, not both")
        return parts[0][0]

    # --- the relay's side ---

    def markers(self, streams: Sequence[str]) -> dict[str, Marker | TransportError | None]:
        found: dict[str, Marker | TransportError | None] = {}
        for transport, some in self._split(streams):
            found |= transport.markers(some)
        return {stream: found[stream] for stream in streams}

    def prepare(self, runs: Sequence[Run]) -> Sequence[Run]:
        return self.streams.prepare(runs)

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        answers: dict[int, Marker | TransportError | None] = {}
        unsafe: NotYetSafe | None = None
        for transport, some in self._split([part.stream for part in parts]):
            names = set(some)
            numbers = [number for number, part in enumerate(parts) if part.stream in names]
            try:
                found = transport.publish([parts[number] for number in numbers])
            except NotYetSafe as error:  # the others are to be where the relay takes them for
                unsafe = error
                continue
            answers |= zip(numbers, found, strict=True)
        if unsafe is not None:
            raise unsafe
        return [answers[number] for number in range(len(parts))]

    def confirm(self, streams: Sequence[str]) -> None:
        self.streams.confirm(streams)  # of queues, too: what is waited for is all that the server was given

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        return self.of(stream).inspect(stream, groups=groups, keep_seconds=keep_seconds)

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        return self.of(stream).ids_after(stream, batch, limit)

    def memory_share(self) -> float | None:
        return self.streams.memory_share()

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        return self.of(stream).forget_consumers(group, stream, idle_seconds, names)

    def drop_group(self, group: str, stream: str) -> bool:
        return self.of(stream).drop_group(group, stream)

    def leave(self, streams: Sequence[str], keep_seconds: int, oldest: int | None, stays_seconds: int = 0) -> None:
        for transport, some in self._split(streams):
            transport.leave(some, keep_seconds, oldest, stays_seconds)

    def info(self, stream: str) -> StreamInfo:
        return self.of(stream).info(stream)

    # --- the consumer's side ---

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        return self._only(streams).open(group, streams)

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        return self._only(streams).read(group, consumer, streams, count, block_seconds)

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        self._only(_streams(deliveries)).ack(group, deliveries, settled)

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        self.of(stream).settle(stream, ended)

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        return self.of(stream).claim(group, consumer, stream, idle_seconds, count, cursor)

    def reclaim_when_due(self) -> None:
        self.lists.reclaim_when_due()

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        self._only(_streams(deliveries)).hand_back(group, consumer, deliveries)

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._only(_streams(deliveries)).recount(group, consumer, deliveries)

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._only(_streams(deliveries)).renew(group, consumer, deliveries)

    def left(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        return self.of(stream).left(group, consumer, stream, count)

    def inherit(self, group: str, consumer: str, late: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._only(_streams(deliveries)).inherit(group, consumer, late, deliveries)

    # --- for the doctor ---

    def nodes(self) -> list[str]:
        return self.streams.nodes()

    def facts(self, node: str = "") -> ServerFacts:
        return self.streams.facts(node)

    def refused(self, stream: str, side: Literal["relay", "consumer"]) -> list[str]:
        return self.streams.refused(stream, side)

    def has_group(self, group: str, stream: str) -> bool:
        if is_queue(stream):
            return any(found.name == group for found in self.lists.inspect(stream).groups)
        return self.streams.has_group(group, stream)

    def close(self) -> None:
        self.streams.close()  # hands back what it has, by the connections of both
        self.lists.close()


def _streams(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.stream for delivery in deliveries]
