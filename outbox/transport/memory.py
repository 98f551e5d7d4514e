"""A transport in this process's memory, for users' unit tests: the same contract, no server, nothing kept."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outbox.envelope import Run
from outbox.errors import GroupLost, TransportError
from outbox.transport.base import (
    Claim,
    Delivery,
    GroupState,
    Marker,
    Part,
    Settled,
    StreamInfo,
    StreamState,
    batch_number,
)


@dataclass
class _Pending:
    consumer: str
    delivered_at: float
    count: int


@dataclass
class _Group:
    read_to: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)


@dataclass
class _Stream:
    marker: Marker | None = None
    info: StreamInfo = field(default_factory=lambda: StreamInfo(None))
    since: int = 0
    added: int = 0
    absent: int = 0
    entries: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    groups: dict[str, _Group] = field(default_factory=dict)


class MemoryTransport:
    """Streams in memory; safe to use from several threads. `streams` and `add` are for looking and preparing in tests."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)

    # --- for tests ---

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        """What is in the stream, oldest first."""
        with self._changed:
            found = self._streams.get(stream)
            return list(found.entries.values()) if found else []

    def add(self, stream: str, fields: dict[bytes, bytes]) -> str:
        """Add an entry past the relay, as a stranger would; returns its receipt."""
        with self._changed:
            receipt = self._add(self._streams.setdefault(stream, _Stream()), fields)
            self._changed.notify_all()
            return str(receipt)

    def delete(self, stream: str, receipt: str) -> None:
        """Delete an entry, as a stranger would."""
        with self._changed:
            self._streams[stream].entries.pop(int(receipt), None)

    def flush(self) -> None:
        """Lose everything."""
        with self._changed:
            self._streams.clear()
            self._changed.notify_all()

    def pending(self, group: str, stream: str) -> int:
        """How many deliveries of the group are not acknowledged."""
        with self._changed:
            found = self._streams.get(stream)
            return len(found.groups[group].pending) if found and group in found.groups else 0

    # --- the relay's side ---

    def markers(self, streams: Sequence[str]) -> dict[str, Marker | TransportError | None]:
        with self._changed:
            return {stream: found.marker if (found := self._streams.get(stream)) else None for stream in streams}

    def prepare(self, runs: Sequence[Run]) -> Sequence[Run]:
        return runs

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        return [self._publish(part) for part in parts]

    def _publish(self, part: Part) -> Marker | None:
        with self._changed:
            stream = self._streams.get(part.stream)
            current = stream.marker if stream else None
            if current != part.expected or (current == part.marker and not (part.restart or part.append)):
                return current
            stream = self._streams.setdefault(part.stream, _Stream())
            if part.restart:
                stream.absent = stream.added - len(stream.entries)
                stream.since = stream.added + 1 if part.events else stream.since
                stream.info = replace(stream.info, replayed=None)
            if part.append:
                began, steps = stream.info.replayed or (next(self._numbers), 0)
                stream.info = replace(stream.info, replayed=(began, steps + 1))
            for run in part.runs:
                for fields in run.entries():
                    self._add(stream, fields)
            stream.marker = part.marker
            if part.events:
                stream.info = replace(stream.info, lanes=part.lanes, keep_seconds=part.keep_seconds)
            self._changed.notify_all()
            return part.marker

    def confirm(self, streams: Sequence[str]) -> None:
        """Nothing is safer than it is."""

    @staticmethod
    def _add(stream: _Stream, fields: dict[bytes, bytes]) -> int:
        stream.added += 1
        stream.entries[stream.added] = fields
        return stream.added

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        with self._changed:
            found = self._streams.get(stream)
            if found is None:
                return StreamState(0, 0, 0, [])
            states, trimmed = [], 0
            needed = {name: min(group.pending, default=group.read_to + 1) for name, group in found.groups.items()}
            for name, group in found.groups.items():
                oldest = str(min(group.pending)) if group.pending else None
                acked, _, basis = self._batch_before(found, needed[name])
                delivered, undelivered, _ = self._batch_before(found, group.read_to + 1)
                states.append(GroupState(name, len(group.pending), oldest, acked, delivered, undelivered, None, basis))
            if keep_seconds is not None and needed and needed.keys() >= set(groups):  # entries have no times here
                old = [number for number in found.entries if number < min(needed.values())]
                for number in old:
                    del found.entries[number]
                trimmed = len(old)
                found.absent += trimmed
            missing = found.added - len(found.entries) - found.absent if found.since else 0
            return StreamState(len(found.entries), missing, trimmed, states, found.marker)

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        with self._changed:
            ids: list[uuid.UUID] = []
            entries = self._streams[stream].entries if stream in self._streams else {}
            for receipt in sorted(entries, reverse=True):
                label = entries[receipt].get(b"batch", b"").decode()
                if len(ids) == limit or (batch_number(label) or batch + 1) <= batch:
                    break
                ids.append(uuid.UUID(entries[receipt][b"id"].decode()))
            return ids

    @staticmethod
    def _batch_before(stream: _Stream, start: int) -> tuple[int | None, int, str]:
        """The batch before that of the first entry from `start` on, entries from there to its end, and what says so."""
        left = [number for number in stream.entries if number >= start]
        if left and left[0] < stream.since:
            return None, 0, ""
        for count, number in enumerate(left, 1):
            label = stream.entries[number].get(b"batch", b"").decode()
            if (batch := batch_number(label)) is not None:
                return batch - 1, count, label
        marker = stream.marker
        return (marker.seq, len(left), marker.label) if marker else (0, len(left), "")

    def memory_share(self) -> float | None:
        return None

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        return []  # names leave nothing behind here

    def drop_group(self, group: str, stream: str) -> bool:
        with self._changed:
            return stream in self._streams and self._streams[stream].groups.pop(group, None) is not None

    def leave(self, streams: Sequence[str], keep_seconds: int, oldest: int | None, stays_seconds: int = 0) -> None:
        with self._changed:
            for name in streams:
                stream = self._streams.setdefault(name, _Stream())
                stream.info = replace(
                    stream.info, keep_seconds=keep_seconds, stays_seconds=stays_seconds,
                    oldest=stream.info.oldest if oldest is None else oldest,
                )  # fmt: skip

    def info(self, stream: str) -> StreamInfo:
        with self._changed:
            found = self._streams.get(stream)
            return found.info if found else StreamInfo(None)

    # --- the consumer's side ---

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        with self._changed:
            for stream in streams:
                self._streams.setdefault(stream, _Stream()).groups.setdefault(group, _Group())
        return {}

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        deadline = time.monotonic() + block_seconds
        with self._changed:
            while True:
                found = [d for stream in streams for d in self._unread(group, consumer, stream, count)]
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                self._changed.wait(left)

    def _unread(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        state = self._group(group, stream)
        entries = self._streams[stream].entries
        numbers = [number for number in entries if number > state.read_to][:count]
        for number in numbers:
            state.read_to = number
            state.pending[number] = _Pending(consumer, time.monotonic(), 1)
        return [Delivery(stream, str(number), entries[number]) for number in numbers]

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        """What became of a job is not kept here."""

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        with self._changed:
            for delivery in deliveries:
                stream = self._streams.get(delivery.stream)
                if stream and group in stream.groups:
                    stream.groups[group].pending.pop(int(delivery.receipt), None)

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        with self._changed:
            state = self._group(group, stream)
            entries = self._streams[stream].entries
            now, start = time.monotonic(), int(cursor or 0)
            due = sorted(n for n, p in state.pending.items() if n > start and now - p.delivered_at >= idle_seconds)
            taken = due[:count]
            deliveries, missing = [], []
            for number in taken:
                if number not in entries:
                    del state.pending[number]
                    missing.append(str(number))
                    continue
                pending = state.pending[number]
                state.pending[number] = _Pending(consumer, now, pending.count + 1)
                deliveries.append(Delivery(stream, str(number), entries[number], pending.count + 1))
            return Claim(deliveries, missing, str(taken[-1]) if len(taken) == count else None)

    def reclaim_when_due(self) -> None:
        """To this a queue is a stream."""

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        with self._changed:
            for pending, delivery in self._ours(group, consumer, deliveries):
                pending.delivered_at, pending.count = float("-inf"), delivery.count - 1

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        with self._changed:
            ours = self._ours(group, consumer, deliveries)
            for pending, delivery in ours:
                pending.delivered_at, pending.count = time.monotonic(), delivery.count
            return [delivery for _, delivery in ours]

    def left(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        with self._changed:
            pending, entries = self._group(group, stream).pending, self._streams[stream].entries
            his = [number for number in sorted(pending) if pending[number].consumer == consumer][:count]
            return [Delivery(stream, str(n), entries[n], pending[n].count) for n in his if n in entries]

    def inherit(self, group: str, consumer: str, late: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        with self._changed:
            his = self._ours(group, late, deliveries)
            for pending, delivery in his:
                pending.consumer, pending.delivered_at, pending.count = consumer, time.monotonic(), delivery.count
            return [delivery for _, delivery in his]

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        with self._changed:
            ours = self._ours(group, consumer, deliveries)
            for pending, _ in ours:
                pending.delivered_at = time.monotonic()
            return [delivery for _, delivery in ours]

    def _ours(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[tuple[_Pending, Delivery]]:
        """Those that are pending at the consumer."""
        found = []
        for delivery in deliveries:
            stream = self._streams.get(delivery.stream)
            state = stream.groups.get(group) if stream else None
            pending = state.pending.get(int(delivery.receipt)) if state else None
            if pending is not None and pending.consumer == consumer:
                found.append((pending, delivery))
        return found

    def close(self) -> None:
        """Nothing to close."""

    def _group(self, group: str, stream: str) -> _Group:
        found = self._streams.get(stream)
        if found is None or group not in found.groups:
            raise GroupLost(f"no group {group} at {stream}", "NOGROUP")
        return found.groups[group]
