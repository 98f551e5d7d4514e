"""Redis and Valkey streams as a transport. All commands of this kind are here and in the scripts beside it.

Invariants:
* A stream ``{topic}`` or ``{topic:3}`` and its marker ``{topic}:relay`` share a hash slot, whatever the topic's name.
* Entries are only ever added by publish.lua, together with the marker, and trimmed by inspect.lua.
* A group is made at 0, so that what was published before it is delivered to it.
* Replies are taken as bytes, in both protocols, whatever the client decodes.
* Every command goes to the server that has its stream; none is about several streams, but for reads of one server.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec
import redis

from outbox.envelope import Run
from outbox.errors import GroupLost, NotYetSafe, SettingsError, StreamUnusable, TransportError, TransportUnavailable
from outbox.transport.base import (
    Claim,
    Delivery,
    GroupState,
    Marker,
    Part,
    ServerFacts,
    StreamInfo,
    StreamState,
    Wait,
    batch_number,
)
from outbox.transport.cluster import Cluster
from outbox.transport.connect import connect
from outbox.transport.servers import Command, Server, answer


def _text(name: str) -> str:
    return (files("outbox.transport") / f"{name}.lua").read_text()


_SCRIPTS = {
    "publish": _text("marker") + _text("publish"),
    "inspect": _text("marker") + _text("inspect"),
    "forget": _text("forget"),
}
_SHAS = {name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in _SCRIPTS.items()}
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
    ],
}  # fmt: skip
#: What both sides send to a cluster besides.
_CLUSTER_PROBES: list[Command] = [(b"CLUSTER", b"SLOTS"), (b"CLUSTER", b"INFO"), (b"ASKING",)]
_REPLAYED = re.compile(rb"(\d{1,18}):(\d{1,18})")
#: Hand-back: so long idle that anyone's claim finds it at once.
_LONG_IDLE_MS = 30 * 86_400_000
#: Entries that are read at once where their payloads do not matter.
_PAGE = 100


class StreamTransport:
    """Streams on Redis 7.0 or newer, or Valkey; on one server, or on a cluster.

    Args:
        client: any redis-py client of one server (`decode_responses` and `protocol` as you like), or what `connect` makes. Its
            socket time-out must be longer than the longest block of `read`. Commands are safe to repeat, so its retries do
            no harm.
        prefix: put before every key.
        wait: how safe what is published must be. A connection must wait longer for a reply than this does.
    """

    def __init__(self, client: redis.Redis | Server | Cluster, prefix: str = "", wait: Wait | None = None) -> None:
        self._servers = client if isinstance(client, Server | Cluster) else Server(client)
        self._prefix = prefix
        self._wait = wait or Wait()

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "",
        timeout_seconds: float = 5.0,
        block_seconds: float = 0.0,
        wait: Wait | None = None,
    ) -> StreamTransport:
        """A transport with connections of its own, which wait `timeout_seconds` for a reply, beyond `block_seconds` and what
        `wait` may take.

        Raises:
            ValueError: the address is malformed.
        """
        block_seconds += sum(wait.timeout_seconds for _ in _waits(wait)) if wait else 0
        return cls(connect(url, timeout_seconds=timeout_seconds, block_seconds=block_seconds), prefix, wait)

    def close(self) -> None:
        for (group, consumer), replies in self._servers.unread().items():
            with suppress(TransportError):  # others claim them later
                self.hand_back(group, consumer, self._read_deliveries(replies))
        self._servers.close()

    # --- the relay's side ---

    def markers(self, streams: Sequence[str]) -> dict[str, Marker | TransportError | None]:
        return dict(zip(streams, self._publish([(stream, ("", "")) for stream in streams]), strict=True))

    def prepare(self, runs: Sequence[Run]) -> Sequence[Run]:
        return _Prepared(runs, _packed(runs))

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        waits = _waits(self._wait)
        replies = self._script("publish", [
            (part.stream, (part.expected or "", part.marker, part.lanes, _packed(part.runs), part.keep_seconds,
                           _mode(part)))
            for part in parts
        ], waits)  # fmt: skip
        answers = [_marker(reply) for reply in replies[: len(parts)]]
        if any(answer == part.marker for part, answer in zip(parts, answers, strict=True)):
            self._see_safe(waits, replies[len(parts) :])
        return answers

    def confirm(self, streams: Sequence[str]) -> None:
        waits = _waits(self._wait)
        if self._wait.aof != "no" and any(
            _asked(server, b"COMMAND", b"INFO", "WAITAOF") == [None] for server in self._servers.nodes().values()
        ):
            raise SettingsError(
                f"OUTBOX_WAIT_AOF: is {self._wait.aof}, but this server does not know WAITAOF: it takes Redis 7.2 or newer, or "
                "Valkey"
            )
        if not waits or not streams:
            return
        # A server waits for what the connection wrote last, and for nothing on a new one: so it writes, in the order of all
        # other writes.
        writes = [(stream, (b"HSET", f"{self._key(stream)}:relay", "waited", "1")) for stream in streams]
        replies = self._pipeline(writes, waits)
        written = replies[: len(streams)]
        # One that takes no writes now takes no publishing either, and that error says more.
        if not all(isinstance(reply, TransportError) for reply in written):
            self._see_safe(waits, replies[len(streams) :])

    def _see_safe(self, waits: list[Command], replies: Sequence[Any]) -> None:
        """See that the replies to `waits`, of every server, say what was asked for."""
        for (name, *wanted, _timeout), reply in zip(waits * (len(replies) // max(1, len(waits))), replies, strict=True):
            if isinstance(reply, TransportError):
                found = f"{name.decode()} is refused: {reply}"
            else:
                there = reply if isinstance(reply, list) else [reply]
                if all(have >= want for have, want in zip(there, wanted, strict=True)):
                    continue
                places = ("server's disk", "replicas' disks") if len(wanted) == 2 else ("replicas",)
                found = ", ".join(
                    f"{place}: {have} of {want}"
                    for have, want, place in zip(there, wanted, places, strict=True)
                    if want
                )
                found += f" within {self._wait.timeout_seconds:g} s"
            raise NotYetSafe(
                f"Redis: what was published is not safe yet, nothing more is before: {found}", name.decode()
            )

    def _publish(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Marker | TransportError | None]:
        return [_marker(reply) for reply in self._script("publish", calls)]

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        arguments = ("" if keep_seconds is None else round(keep_seconds * 1000), *groups)
        (reply,) = self._script("inspect", [(stream, arguments)])
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

    def memory_share(self) -> float | None:
        """On a cluster, of the fullest node that answers; its others are full before long, where lanes are spread evenly."""
        shares, failures = [], []
        for server in self._servers.nodes().values():
            try:
                info = _info(answer(server, "", (b"INFO", "memory")))
            except StreamUnusable:  # not allowed to look
                continue
            except TransportUnavailable as error:
                failures.append(error)
                continue
            if limit := int(info.get("maxmemory", 0)):
                shares.append(int(info["used_memory"]) / limit)
        if failures and len(failures) == len(self._servers.nodes()):
            raise failures[0]
        return max(shares, default=None)

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        (reply,) = self._script("forget", [(stream, (group, round(idle_seconds * 1000), *names))])
        if isinstance(reply, TransportError):
            raise reply
        return [_readable(name) for name in reply]

    def drop_group(self, group: str, stream: str) -> bool:
        (reply,) = self._pipeline([(stream, (b"XGROUP", b"DESTROY", self._key(stream), group))])
        if isinstance(reply, TransportError) and reply.code not in ("ERR", "WRONGTYPE"):  # else there is no such stream
            raise reply
        return bool(reply == 1)

    def _script(
        self, name: str, calls: Sequence[tuple[str, tuple[Any, ...]]], then: Sequence[Command] = ()
    ) -> list[Any]:
        """Run a script for each stream, and `then` some commands, in one round trip; where a server does not have the script
        (yet, or any more), once more with its text."""
        commands = [
            (stream, (b"EVALSHA", _SHAS[name], 2, self._key(stream), f"{self._key(stream)}:relay", *map(_argument, args)))
            for stream, args in calls
        ]  # fmt: skip
        replies = self._pipeline(commands, then)
        unknown = [n for n in range(len(calls)) if getattr(replies[n], "code", None) == "NOSCRIPT"]
        if not unknown:
            return replies
        again = self._pipeline([
            (commands[n][0], (b"EVAL", _SCRIPTS[name], *commands[n][1][2:])) for n in unknown
        ], then)  # fmt: skip
        for n, reply in zip(unknown, again, strict=False):
            replies[n] = reply
        return [*replies, *again[len(unknown) :]]

    def leave(self, streams: Sequence[str], keep_seconds: int, oldest: int | None, stays_seconds: int = 0) -> None:
        fields = ("keep", keep_seconds, "stays", stays_seconds, *(() if oldest is None else ("oldest", oldest)))
        self._pipeline([(stream, (b"HSET", f"{self._key(stream)}:relay", *fields)) for stream in streams])

    def info(self, stream: str) -> StreamInfo:
        found = self._command(
            stream, b"HMGET", f"{self._key(stream)}:relay", "lanes", "keep", "oldest", "stays", "replayed"
        )
        lanes, keep, oldest, stays = (
            int(value) if value and value.isdigit() and len(value) <= 12 else None for value in found[:4]
        )
        replayed = _REPLAYED.fullmatch(found[4] or b"")
        return StreamInfo(lanes, keep, oldest, stays, (int(replayed[1]), int(replayed[2])) if replayed else None)

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

    def ack(self, group: str, deliveries: Sequence[Delivery]) -> None:
        commands = [
            (stream, (b"XACK", self._key(stream), group, *(delivery.receipt for delivery in some)))
            for stream, some in groupby(sorted(deliveries, key=attrgetter("stream")), key=attrgetter("stream"))
        ]
        _settle(self._pipeline(commands))

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
        self._set_pending(group, consumer, [replace(d, count=d.count - 1) for d in deliveries], _LONG_IDLE_MS)

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._set_pending(group, consumer, deliveries, 0)

    def _set_pending(self, group: str, consumer: str, deliveries: Sequence[Delivery], idle_ms: int) -> list[Delivery]:
        # What somebody else has claimed meanwhile is his: XCLAIM alone would take it from him.
        replies = self._pipeline([
            (d.stream, (b"XPENDING", self._key(d.stream), group, d.receipt, d.receipt, 1, consumer)) for d in deliveries
        ])  # fmt: skip
        _settle(replies)
        pairs = zip(deliveries, replies, strict=True)
        ours = [d for d, reply in pairs if reply and not isinstance(reply, TransportError)]
        # JUSTID leaves the count alone and RETRYCOUNT sets it.
        _settle(self._pipeline([
            (d.stream, (b"XCLAIM", self._key(d.stream), group, consumer, 0, d.receipt,
                        b"IDLE", idle_ms, b"RETRYCOUNT", d.count, b"JUSTID"))
            for d in ours
        ]))  # fmt: skip
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
        hello = _named(_asked(server, b"HELLO"))
        info = _info(_asked(server, b"INFO") or b"")
        settings: dict[str, str] = {}
        for name in ("appendfsync", "min-replicas-to-write"):
            settings |= _named(_asked(server, b"CONFIG", b"GET", name))
        before, clock = time.time(), _asked(server, b"TIME")
        ahead = None if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - (before + time.time()) / 2
        names = sorted({_name_of(probe).split()[0] for probes in _PROBES.values() for probe in probes})
        known = _asked(server, b"COMMAND", b"INFO", *names) or ()
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
        probes = [*(_CLUSTER_PROBES if isinstance(self._servers, Cluster) else ()), *_PROBES[side]]
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

    # --- plumbing ---

    def _key(self, stream: str) -> str:
        return f"{self._prefix}{{{stream}}}"

    def _command(self, stream: str, *command: Any) -> Any:
        """One command about a stream."""
        return answer(self._servers, self._key(stream), command)

    def _pipeline(self, commands: Sequence[tuple[str, Command]], then: Sequence[Command] = ()) -> list[Any]:
        """Commands about streams in one round trip; an error of one is its reply and does not stop the others. `then`: see
        `Servers.run`."""
        calls = [(self._key(stream), command) for stream, command in commands]
        return self._servers.run(calls, then) if calls else []


class _Prepared(list[Run]):
    """Runs with their form for the script."""

    def __init__(self, runs: Sequence[Run], packed: bytes) -> None:
        super().__init__(runs)
        self.packed = packed


_pack = msgspec.msgpack.Encoder().encode


def _marker(reply: Any) -> Marker | TransportError | None:
    return reply if isinstance(reply, TransportError) else Marker.parse(reply.decode())


def _waits(wait: Wait) -> list[Command]:
    """The commands that wait for what this connection has written; each takes `timeout_seconds` at most."""
    milliseconds = max(1, round(wait.timeout_seconds * 1000))
    found: list[Command] = []
    if wait.replicas and wait.aof != "all":
        found.append((b"WAIT", wait.replicas, milliseconds))
    if wait.aof != "no":
        found.append((b"WAITAOF", 1, wait.replicas if wait.aof == "all" else 0, milliseconds))
    return found


def _packed(runs: Sequence[Run]) -> bytes:
    """Runs as the script takes them: Redis reads no binary type, so that payloads go as msgpack strings, whatever is in
    them."""
    if isinstance(runs, _Prepared):
        return runs.packed
    return _pack([(run.names, _strings(run.columns[0]), *run.columns[1:]) for run in runs])


def _strings(payloads: Sequence[bytes]) -> Sequence[str | msgspec.Raw]:
    try:
        return list(map(bytes.decode, payloads))
    except UnicodeDecodeError:  # by hand, with four bytes of length
        return [msgspec.Raw(b"\xdb%b%b" % (len(data).to_bytes(4), data)) for data in payloads]


def _mode(part: Part) -> str:
    return "append" if part.append else "restart" if part.restart else ""


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


def _asked(server: Server, *command: Any) -> Any:
    """The answer; None if the server does not know the command or refuses it to our user."""
    try:
        return answer(server, "", command)
    except StreamUnusable:
        return None


def _info(reply: bytes) -> dict[str, str]:
    """The fields of INFO."""
    pairs = (line.partition(":") for line in reply.decode().splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def _settle(replies: Iterable[Any]) -> None:
    """See to the errors of commands on pending lists: where the group or the stream is gone, so is the list; where a node is
    away, what was to be forgotten is claimed and recognised later."""
    for reply in replies:
        if isinstance(reply, TransportError) and not isinstance(reply, GroupLost | StreamUnusable):
            raise reply


def _argument(value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value)


def _deliveries(stream: str, entries: Iterable[Any]) -> list[Delivery]:
    """Entries of a reply: id and flat list of names and values. The last of a repeated name counts."""
    return [
        Delivery(stream, receipt.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for receipt, fields in entries
        if fields is not None
    ]
