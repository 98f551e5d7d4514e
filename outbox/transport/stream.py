"""Redis and Valkey streams as a transport. All commands of this kind are here and in the scripts beside it.

Invariants:
* Entries are only ever added by publish.lua, together with the marker, and trimmed by inspect.lua.
* What is pending at one consumer is changed for him only, or for his heir (hold.lua), or taken over when it was idle for long.
* A group is made at 0, so that what was published before it is delivered to it.
* See `outbox.transport.relayed`, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from outbox.errors import GroupLost, TransportError, TransportUnavailable
from outbox.transport.base import (
    Claim,
    Delivery,
    GroupState,
    Marker,
    ServerFacts,
    Settled,
    StreamState,
    batch_number,
    is_queue,
)
from outbox.transport.cluster import Cluster
from outbox.transport.relayed import RelayedTransport, Script, asked, fields_of_info, settle
from outbox.transport.servers import Command

_INSPECT, _FORGET, _HOLD = Script.of("marker", "inspect"), Script.of("forget"), Script.of("hold")
#: Places of keys in the probes, and a group that nobody has.
_STREAM, _BESIDE, _NOBODY = "<stream>", "<stream>:relay", "outbox-doctor:nobody"
#: What each side sends to the server (the relay by its scripts too), so that it has no effect: the group is not there, the
#: id is none that can be added or found, the number of arguments or their type is refused.
_PROBES: dict[str, list[Command]] = {
    "relay": [
        (b"INFO", "memory"), (b"EVAL", "return 0", 0), (b"EVALSHA", "0" * 40, 0), (b"TIME",),
        (b"EXISTS", _STREAM), (b"XINFO", b"STREAM", _STREAM), (b"XINFO", b"GROUPS", _STREAM),
        (b"XINFO", b"CONSUMERS", _STREAM, _NOBODY), (b"XPENDING", _STREAM, _NOBODY), (b"XRANGE", _STREAM, "-", "-"),
        (b"XREVRANGE", _STREAM, "-", "-"), (b"XADD", _STREAM, "NOMKSTREAM", "0-0", "", ""), (b"XTRIM", _STREAM, "MINID", "0-0"),
        (b"XGROUP", b"DESTROY", _STREAM, _NOBODY), (b"XGROUP", b"DELCONSUMER", _STREAM, _NOBODY, ""),
        (b"HMGET", _BESIDE, "batch"), (b"HSET", _BESIDE, "batch", "", "odd"), (b"HDEL", _BESIDE, _NOBODY),
        (b"HINCRBY", _BESIDE, "absent", "no number"),
    ],
    "consumer": [
        (b"XGROUP", b"CREATE", _STREAM, _NOBODY, "no id"), (b"XACK", _STREAM, _NOBODY, "0-0"),
        (b"XREADGROUP", b"GROUP", _NOBODY, "", "STREAMS", _STREAM, ">"), (b"XPENDING", _STREAM, _NOBODY),
        (b"XCLAIM", _STREAM, _NOBODY, "", 0, "0-0"), (b"XRANGE", _STREAM, "-", "-"), (b"HMGET", _BESIDE, "lanes"),
        (b"EVAL", "return 0", 0), (b"EVALSHA", "0" * 40, 0),
    ],
    # Both sides of a queue, whose scripts send these; what adds to a list has no form without an effect.
    "queue": [
        (b"EVAL", "return 0", 0), (b"EVALSHA", "0" * 40, 0), (b"TIME",), (b"DEL", _STREAM),
        (b"HMGET", _BESIDE, "batch"), (b"HGET", _BESIDE, "batch"), (b"HGETALL", _STREAM), (b"HKEYS", _STREAM),
        (b"HLEN", _STREAM), (b"HEXISTS", _STREAM, ""), (b"HSET", _BESIDE, "batch", "", "odd"), (b"HDEL", _BESIDE, _NOBODY),
        (b"HINCRBY", _BESIDE, "batch", "no number"),
        (b"LLEN", _STREAM), (b"LRANGE", _STREAM, 0, 0), (b"LINDEX", _STREAM, 0), (b"LPOP", _STREAM), (b"LREM", _STREAM, 0, ""),
        (b"ZADD", _STREAM, "no number", ""), (b"ZREM", _STREAM, ""), (b"ZCARD", _STREAM), (b"ZSCORE", _STREAM, ""),
        (b"ZCOUNT", _STREAM, 0, 0), (b"ZRANGE", _STREAM, 0, 0), (b"ZREVRANGE", _STREAM, 0, 0),
        (b"ZRANGEBYSCORE", _STREAM, 0, 0), (b"ZREVRANGEBYSCORE", _STREAM, 0, 0), (b"ZPOPMIN", _STREAM),
    ],
}  # fmt: skip
#: What both sides send to a cluster besides.
_CLUSTER_PROBES: list[Command] = [(b"CLUSTER", b"SLOTS"), (b"CLUSTER", b"INFO"), (b"ASKING",)]
#: Hand-back: so long idle that anyone's claim finds it at once.
_LONG_IDLE_MS = 30 * 86_400_000
#: Entries that are read at once where their payloads do not matter.
_PAGE = 100


class StreamTransport(RelayedTransport):
    """Streams on Redis 7.0 or newer, or Valkey; on one server, or on a cluster. A connection must wait longer for a reply than the
    longest block of `read`."""

    _PUBLISH = Script.of("marker", "publish")

    def close(self) -> None:
        for (group, consumer), replies in self._servers.unread().items():
            with suppress(TransportError):  # others claim them later
                self.hand_back(group, consumer, self._read_deliveries(replies))
        super().close()

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        arguments = ("" if keep_seconds is None else round(keep_seconds * 1000), *groups)
        (reply,) = self._script(_INSPECT, [(stream, arguments)])
        if isinstance(reply, TransportError):
            raise reply
        length, missing, trimmed, text, found = reply
        marker = Marker.parse(text.decode())
        return StreamState(length, missing, trimmed, [_group_state(marker, *group) for group in found], marker)

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        ids: list[uuid.UUID] = []
        end = "+"
        while len(ids) < limit:
            count = min(_PAGE, limit - len(ids))
            page = self._command(stream, b"XREVRANGE", self._key(stream), end, "-", b"COUNT", count)
            for entry in _deliveries(stream, page):
                number = batch_number(entry.fields.get(b"batch", b"").decode(errors="replace"))
                if number is not None and number <= batch:
                    return ids
                with suppress(KeyError, ValueError):  # not of ours
                    ids.append(uuid.UUID(entry.fields[b"id"].decode()))
                end = f"({entry.receipt}"
            if not page:
                return ids
        return ids

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        (reply,) = self._script(_FORGET, [(stream, (group, round(idle_seconds * 1000), *names))])
        if isinstance(reply, TransportError):
            raise reply
        return [_readable(name) for name in reply]

    def drop_group(self, group: str, stream: str) -> bool:
        (reply,) = self._pipeline([(stream, (b"XGROUP", b"DESTROY", self._key(stream), group))])
        if isinstance(reply, TransportError) and reply.code not in ("ERR", "WRONGTYPE"):  # else there is no such stream
            raise reply
        return bool(reply == 1)

    # --- the consumer's side ---

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        replies = self._pipeline([
            (stream, (b"XGROUP", b"CREATE", self._key(stream), group, "0", b"MKSTREAM")) for stream in streams
        ])  # fmt: skip
        unusable: dict[str, TransportError] = {}
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, TransportUnavailable):
                raise reply
            if isinstance(reply, TransportError) and reply.code != "BUSYGROUP":
                unusable[stream] = reply
        return unusable

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        """On a cluster, what comes from one stream while that of another is handed out waits for the next call, or for
        `close`, which hands it back."""
        block = (b"BLOCK", max(1, round(block_seconds * 1000))) if block_seconds > 0 else ()

        def command(keys: Sequence[str]) -> Command:
            return (
                b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", count, *block, b"STREAMS", *keys, *([">"] * len(keys))
            )  # fmt: skip

        keys = [self._key(stream) for stream in streams]
        return self._read_deliveries(self._servers.read((group, consumer), keys, command, block_seconds))

    def _read_deliveries(self, replies: Iterable[Any]) -> list[Delivery]:
        found = []
        for reply in replies:
            for key, entries in reply.items() if isinstance(reply, dict) else reply or ():  # RESP3, RESP2, nothing
                found += _deliveries(key.decode()[len(self._prefix) + 1 : -1], entries)
        return found

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        """Streams keep no jobs."""

    def reclaim_when_due(self) -> None:
        """What workers of streams leave, their consumer takes over."""

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        commands = [
            (stream, (b"XACK", self._key(stream), group, *(delivery.receipt for delivery in some)))
            for stream, some in groupby(sorted(deliveries, key=attrgetter("stream")), key=attrgetter("stream"))
        ]
        settle(self._pipeline(commands))

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        key, idle_ms = self._key(stream), round(idle_seconds * 1000)
        start = f"({cursor}" if cursor else "-"
        pending = self._command(stream, b"XPENDING", key, group, b"IDLE", idle_ms, start, "+", count)
        if not pending:
            return Claim([], [], None)
        counts = {receipt.decode(): int(delivered) for receipt, _, _, delivered in pending}
        # The idle time is asked for again: of two consumers that saw the same list, the second gets nothing.
        entries = self._command(stream, b"XCLAIM", key, group, consumer, idle_ms, *counts)
        deliveries = _deliveries(stream, (entry for entry in entries if entry and entry[1] is not None))
        deliveries = [Delivery(d.stream, d.receipt, d.fields, counts[d.receipt] + 1) for d in deliveries]
        absent = counts.keys() - {delivery.receipt for delivery in deliveries}
        missing = self._gone(stream, sorted(absent)) if absent else []
        last = next(reversed(counts))
        return Claim(deliveries, missing, last if len(pending) == count else None)

    def _gone(self, stream: str, receipts: Sequence[str]) -> list[str]:
        """Those entries that are no longer in the stream (the others were claimed by somebody else just now)."""
        replies = self._pipeline([(stream, (b"XRANGE", self._key(stream), receipt, receipt)) for receipt in receipts])
        return [receipt for receipt, reply in zip(receipts, replies, strict=True) if reply == []]

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        self._hold(group, consumer, [(d, d.count - 1) for d in deliveries], _LONG_IDLE_MS)

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        ours = self._hold(group, consumer, [(d, d.count) for d in deliveries], 0)
        return [d for d in deliveries if d.receipt in (ours[d.stream] or ())]

    def left(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        pending = self._command(stream, b"XPENDING", self._key(stream), group, "-", "+", count, consumer)
        counts = {receipt.decode(): int(delivered) for receipt, _, _, delivered in pending}
        if not counts:
            return []
        # What one consumer read stands close together, mostly; what does not is asked for one by one.
        first, last, most = next(iter(counts)), next(reversed(counts)), 3 * len(counts)
        near = self._command(stream, b"XRANGE", self._key(stream), first, last, b"COUNT", most)
        entries = {entry[0].decode(): entry for entry in near if entry[0].decode() in counts}
        far = [receipt for receipt in counts if receipt not in entries] if len(near) == most else []
        replies = self._pipeline([(stream, (b"XRANGE", self._key(stream), receipt, receipt)) for receipt in far])
        settle(replies)
        for reply in replies:
            if not isinstance(reply, TransportError):
                entries |= {entry[0].decode(): entry for entry in reply}
        found = _deliveries(stream, (entries[receipt] for receipt in counts if receipt in entries))
        return [replace(d, count=counts[d.receipt]) for d in found]

    def inherit(self, group: str, consumer: str, late: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        ours = self._hold(group, consumer, [(d, d.count) for d in deliveries], 0, late)
        return [d for d in deliveries if d.receipt in (ours[d.stream] or ())]

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        ours = self._hold(group, consumer, [(d, "") for d in deliveries], 0)
        return [d for d in deliveries if (those := ours[d.stream]) is None or d.receipt in those]

    def _hold(
        self, group: str, consumer: str, counts: Sequence[tuple[Delivery, int | str]], idle_ms: int, late: str = ""
    ) -> dict[str, set[str] | None]:
        """By stream, which of these are ours (or `late`'s), so that it was done to them; None: the stream cannot be used now."""
        calls: dict[str, list[Any]] = {}
        for delivery, count in counts:
            calls.setdefault(delivery.stream, [group, consumer, late or consumer, idle_ms]).extend(
                (delivery.receipt, count)
            )
        replies = self._script(_HOLD, [(stream, tuple(arguments)) for stream, arguments in calls.items()])
        settle(replies)
        ours: dict[str, set[str] | None] = {}
        for stream, reply in zip(calls, replies, strict=True):
            failed = isinstance(reply, TransportError)
            away = failed and not isinstance(reply, GroupLost)
            ours[stream] = None if away else set() if failed else {receipt.decode() for receipt in reply}
        return ours

    # --- for the doctor ---

    def nodes(self) -> list[str]:
        """The servers that take writes, for `facts`: one without a name, or those of a cluster.

        Raises:
            TransportUnavailable: no node of the cluster answers.
        """
        return list(self._servers.nodes())

    def facts(self, node: str = "") -> ServerFacts:
        """What a server says about itself; what it refuses to say is left out.

        Raises:
            TransportUnavailable: it cannot be reached or cannot work.
        """
        server = self._servers.nodes()[node]
        hello = _named(asked(server, b"HELLO"))
        info = fields_of_info(asked(server, b"INFO") or b"")
        settings: dict[str, str] = {}
        for name in ("appendfsync", "min-replicas-to-write"):
            settings |= _named(asked(server, b"CONFIG", b"GET", name))
        before, clock = time.time(), asked(server, b"TIME")
        ahead = None if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - (before + time.time()) / 2
        names = sorted({_name_of(probe).split()[0] for probes in _PROBES.values() for probe in probes})
        known = asked(server, b"COMMAND", b"INFO", *names) or ()
        valkey = "valkey_version" in info or hello.get("server") == "valkey"
        version = info.get("valkey_version") or info.get("redis_version") or hello.get("version") or ""
        return ServerFacts(
            "Valkey" if valkey else "Redis", str(version), int(hello["proto"]) if "proto" in hello else None, ahead,
            info, settings, [name for name, reply in zip(names, known, strict=False) if not reply], node,
        )  # fmt: skip

    def refused(self, stream: str, side: Literal["relay", "consumer"]) -> list[str]:
        """Commands of the relay or of a consumer that our user may not run on the stream or its marker.

        Each is really sent, with arguments that cannot have an effect: rights are looked at before them.

        Raises:
            TransportUnavailable: the server cannot be reached or cannot work.
        """
        keys = {_STREAM: self._key(stream), _BESIDE: f"{self._key(stream)}:relay"}
        probes = [
            *(_CLUSTER_PROBES if isinstance(self._servers, Cluster) else ()),
            *_PROBES["queue" if is_queue(stream) else side],
        ]
        replies = self._pipeline([(stream, tuple(keys.get(part, part) for part in probe)) for probe in probes])
        return [
            _name_of(probe)
            for probe, reply in zip(probes, replies, strict=True)
            if isinstance(reply, TransportError) and reply.code == "NOPERM"
        ]

    def has_group(self, group: str, stream: str) -> bool:
        """Whether the stream is there and has the group."""
        try:
            self._command(stream, b"XPENDING", self._key(stream), group)
        except GroupLost:
            return False
        return True


def _group_state(
    marker: Marker | None, name: bytes, pending: int, oldest: bytes, needed: bytes, undelivered: bytes, in_it: int,
    idle_ms: int,
) -> GroupState:  # fmt: skip
    def before(batch: bytes) -> int | None:
        if not batch:
            return marker.seq if marker else 0
        number = batch_number(batch.decode())
        return None if number is None else number - 1

    idle = idle_ms / 1000 if idle_ms >= 0 else None
    basis = needed.decode() if needed else marker.label if marker else ""
    return GroupState(
        _readable(name), pending, oldest.decode() or None, before(needed), before(undelivered), in_it, idle, basis
    )


def _readable(name: bytes) -> str:
    """The name of a group or consumer; ours are always readable, strangers' may be anything."""
    return name.decode(errors="backslashreplace")


def _name_of(probe: Command) -> str:
    """The command and its subcommand: what a probe has as bytes."""
    return " ".join(part.decode() for part in probe if isinstance(part, bytes) and part != b"GROUP")


def _named(reply: Any) -> dict[str, Any]:
    """A reply of names and values as a dictionary, in both protocols; empty for none."""
    pairs = reply.items() if isinstance(reply, dict) else zip((reply or ())[::2], (reply or ())[1::2], strict=True)
    return {name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in pairs}


def _deliveries(stream: str, entries: Iterable[Any]) -> list[Delivery]:
    """Entries of a reply: id and flat list of names and values. The last of a repeated name counts."""
    return [
        Delivery(stream, receipt.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for receipt, fields in entries
        if fields is not None
    ]
