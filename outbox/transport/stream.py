"""Redis and Valkey streams as a transport. All commands of this kind are here and in the scripts beside it.

Invariants:
* A stream ``{topic}`` or ``{topic:3}`` and its marker ``{topic}:relay`` share a hash slot, whatever the topic's name.
* Entries are only ever added by publish.lua, together with the marker, and trimmed by inspect.lua.
* A group is made at 0, so that what was published before it is delivered to it.
* Replies are taken as bytes, in both protocols, whatever the client decodes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.client import NEVER_DECODE
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

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

T = TypeVar("T")


def _text(name: str) -> str:
    return (files("outbox.transport") / f"{name}.lua").read_text()


_SCRIPTS = {
    "publish": _text("marker") + _text("publish"),
    "inspect": _text("marker") + _text("inspect"),
    "forget": _text("forget"),
}
#: Places of keys in the probes, and a group that nobody has.
_STREAM, _BESIDE, _NOBODY = "<stream>", "<stream>:relay", "outbox-doctor:nobody"
#: What each side sends to the server (the relay by its scripts too), so that it has no effect: the group is not there, the
#: id is none that can be added or found, the number of arguments or their type is refused.
_PROBES: dict[str, list[tuple[Any, ...]]] = {
    "relay": [
        (b"INFO", "memory"), (b"SCRIPT", b"LOAD", "return 0"), (b"EVALSHA", "0" * 40, 0), (b"TIME",),
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
#: Hand-back: so long idle that anyone's claim finds it at once.
_LONG_IDLE_MS = 30 * 86_400_000
#: Entries that are read at once where their payloads do not matter.
_PAGE = 100


class StreamTransport:
    """Streams on Redis 7.0 or newer, or Valkey.

    Args:
        client: any redis-py client (`decode_responses` and `protocol` as you like). Its socket time-out must be longer
            than the longest block of `read`. Commands are safe to repeat, so its retries do no harm.
        prefix: put before every key.
        wait: how safe what is published must be. A connection must wait longer for a reply than this does.
    """

    def __init__(self, client: redis.Redis, prefix: str = "", wait: Wait | None = None) -> None:
        self._client = client
        self._prefix = prefix
        self._wait = wait or Wait()
        self._shas: dict[str, str] = {}

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
        """A transport with a connection of its own, which waits `timeout_seconds` for a reply, beyond `block_seconds` and
        what `wait` may take."""
        block_seconds += sum(wait.timeout_seconds for _ in _waits(wait)) if wait else 0
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_seconds + block_seconds,
            socket_connect_timeout=timeout_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
        return cls(client, prefix, wait)

    def close(self) -> None:
        self._client.close()

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
        ], *waits)  # fmt: skip
        answers = [_marker(reply) for reply in replies[: len(parts)]]
        if any(answer == part.marker for part, answer in zip(parts, answers, strict=True)):
            self._see_safe(waits, replies[len(parts) :])
        return answers

    def confirm(self, streams: Sequence[str]) -> None:
        waits = _waits(self._wait)
        if self._wait.aof != "no" and self._asked(b"COMMAND", b"INFO", "WAITAOF") == [None]:
            raise SettingsError(
                f"OUTBOX_WAIT_AOF: is {self._wait.aof}, but this server does not know WAITAOF: it takes Redis 7.2 or newer, or "
                "Valkey"
            )
        for stream in streams if waits else ():
            # A server waits for what the connection wrote last, and for nothing on a new one: so it writes, in the order
            # of all other writes.
            written, *replies = self._pipeline([(b"HSET", f"{self._key(stream)}:relay", "waited", "1"), *waits])
            if not isinstance(written, RedisError):
                return self._see_safe(waits, replies)
            if not isinstance(_translated(written), StreamUnusable):
                return None  # it takes no writes now: nothing is published either, and that error says more
        return None

    def _see_safe(self, waits: Sequence[tuple[Any, ...]], replies: Sequence[Any]) -> None:
        """See that the replies to `waits` say what was asked for."""
        for (name, *wanted, _timeout), reply in zip(waits, replies, strict=True):
            if isinstance(reply, RedisError):
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
        if isinstance(reply, RedisError):
            raise _translated(reply)
        length, missing, trimmed, text, found = reply
        marker = Marker.parse(text.decode())
        return StreamState(length, missing, trimmed, [_group_state(marker, *group) for group in found], marker)

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        ids: list[uuid.UUID] = []
        end = "+"
        while len(ids) < limit:
            page = self._command(b"XREVRANGE", self._key(stream), end, "-", b"COUNT", min(_PAGE, limit - len(ids)))
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
        try:
            info = _translating(lambda: self._client.info("memory"))
        except StreamUnusable:  # not allowed to look
            return None
        limit = int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / limit if limit else None

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        (reply,) = self._script("forget", [(stream, (group, round(idle_seconds * 1000), *names))])
        if isinstance(reply, RedisError):
            raise _translated(reply)
        return [_readable(name) for name in reply]

    def drop_group(self, group: str, stream: str) -> None:
        _settle(self._pipeline([(b"XGROUP", b"DESTROY", self._key(stream), group)]))

    def _script(self, name: str, calls: Sequence[tuple[str, tuple[Any, ...]]], *then: tuple[Any, ...]) -> list[Any]:
        """Run a script for each stream, and then some commands, in one round trip; loads it again when the server has
        forgotten it."""
        for attempt in (1, 2):
            scripts = [
                (
                    b"EVALSHA",
                    self._load(name),
                    2,
                    self._key(stream),
                    f"{self._key(stream)}:relay",
                    *map(_argument, args),
                )
                for stream, args in calls
            ]
            replies = self._pipeline([*scripts, *then])
            if attempt == 1 and any(isinstance(reply, NoScriptError) for reply in replies):
                self._shas.clear()
                continue
            break
        return replies

    def _load(self, name: str) -> str:
        if name not in self._shas:
            self._shas[name] = self._command(b"SCRIPT", b"LOAD", _SCRIPTS[name]).decode()
        return self._shas[name]

    def info(self, stream: str) -> StreamInfo:
        found = self._command(b"HMGET", f"{self._key(stream)}:relay", "lanes", "keep")
        return StreamInfo(*(int(value) if value is not None and value.isdigit() else None for value in found))

    # --- the consumer's side ---

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        replies = self._pipeline([
            (b"XGROUP", b"CREATE", self._key(stream), group, "0", b"MKSTREAM") for stream in streams
        ])  # fmt: skip
        unusable: dict[str, TransportError] = {}
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, RedisError):
                error = _translated(reply)
                if isinstance(error, TransportUnavailable):
                    raise error
                if error.code != "BUSYGROUP":
                    unusable[stream] = error
        return unusable

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        keys = {self._key(stream).encode(): stream for stream in streams}
        block = (b"BLOCK", max(1, round(block_seconds * 1000))) if block_seconds > 0 else ()
        reply = self._command(
            b"XREADGROUP", b"GROUP", group, consumer, b"COUNT", count, *block, b"STREAMS", *keys, *([">"] * len(keys))
        )
        pairs = reply.items() if isinstance(reply, dict) else reply or ()  # RESP3, RESP2, nothing
        return [delivery for key, entries in pairs for delivery in _deliveries(keys[key], entries)]

    def ack(self, group: str, deliveries: Sequence[Delivery]) -> None:
        commands = [
            (b"XACK", self._key(stream), group, *(delivery.receipt for delivery in some))
            for stream, some in groupby(sorted(deliveries, key=attrgetter("stream")), key=attrgetter("stream"))
        ]
        _settle(self._pipeline(commands))

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        key, idle_ms = self._key(stream), round(idle_seconds * 1000)
        start = f"({cursor}" if cursor else "-"
        pending = self._command(b"XPENDING", key, group, b"IDLE", idle_ms, start, "+", count)
        if not pending:
            return Claim([], [], None)
        counts = {receipt.decode(): int(delivered) for receipt, _, _, delivered in pending}
        # The idle time is asked for again: of two consumers that saw the same list, the second gets nothing.
        entries = self._command(b"XCLAIM", key, group, consumer, idle_ms, *counts)
        deliveries = _deliveries(stream, (entry for entry in entries if entry and entry[1] is not None))
        deliveries = [Delivery(d.stream, d.receipt, d.fields, counts[d.receipt] + 1) for d in deliveries]
        absent = counts.keys() - {delivery.receipt for delivery in deliveries}
        missing = self._gone(key, sorted(absent)) if absent else []
        last = next(reversed(counts))
        return Claim(deliveries, missing, last if len(pending) == count else None)

    def _gone(self, key: str, receipts: Sequence[str]) -> list[str]:
        """Those entries that are no longer in the stream (the others were claimed by somebody else just now)."""
        replies = self._pipeline([(b"XRANGE", key, receipt, receipt) for receipt in receipts])
        return [receipt for receipt, reply in zip(receipts, replies, strict=True) if reply == []]

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        # What somebody else has claimed meanwhile is his: XCLAIM alone would take it from him.
        replies = self._pipeline([
            (b"XPENDING", self._key(d.stream), group, d.receipt, d.receipt, 1, consumer) for d in deliveries
        ])  # fmt: skip
        _settle(replies)
        # JUSTID leaves the count alone and RETRYCOUNT sets it, so that this delivery is as if it had not been.
        _settle(self._pipeline([
            (b"XCLAIM", self._key(d.stream), group, consumer, 0, d.receipt,
             b"IDLE", _LONG_IDLE_MS, b"RETRYCOUNT", d.count - 1, b"JUSTID")
            for d, ours in zip(deliveries, replies, strict=True) if ours and not isinstance(ours, RedisError)
        ]))  # fmt: skip

    # --- for the doctor ---

    def facts(self) -> ServerFacts:
        """What the server says about itself; what it refuses to say is left out.

        Raises:
            TransportUnavailable: it cannot be reached or cannot work.
        """
        hello = _named(self._asked(b"HELLO"))
        info: dict[str, Any] = self._asked_of(lambda: self._client.info()) or {}
        settings: dict[str, str] = {}
        for name in ("appendfsync", "min-replicas-to-write"):
            settings |= _named(self._asked(b"CONFIG", b"GET", name))
        before, clock = time.time(), self._asked(b"TIME")
        ahead = None if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - (before + time.time()) / 2
        names = sorted({_name_of(probe).split()[0] for probes in _PROBES.values() for probe in probes})
        known = self._asked(b"COMMAND", b"INFO", *names) or ()
        valkey = "valkey_version" in info or hello.get("server") == "valkey"
        version = info.get("valkey_version") or info.get("redis_version") or hello.get("version") or ""
        return ServerFacts(
            "Valkey" if valkey else "Redis", str(version), int(hello["proto"]) if "proto" in hello else None, ahead,
            info, settings, [name for name, reply in zip(names, known, strict=False) if not reply],
        )  # fmt: skip

    def refused(self, stream: str, side: Literal["relay", "consumer"]) -> list[str]:
        """Commands of the relay or of a consumer that our user may not run on the stream or its marker.

        Each is really sent, with arguments that cannot have an effect: rights are looked at before them.

        Raises:
            TransportUnavailable: the server cannot be reached or cannot work.
        """
        keys = {_STREAM: self._key(stream), _BESIDE: f"{self._key(stream)}:relay"}
        replies = self._pipeline([tuple(keys.get(part, part) for part in probe) for probe in _PROBES[side]])
        return [
            _name_of(probe)
            for probe, reply in zip(_PROBES[side], replies, strict=True)
            if isinstance(reply, RedisError) and _translated(reply).code == "NOPERM"
        ]

    def has_group(self, group: str, stream: str) -> bool:
        """Whether the stream is there and has the group."""
        try:
            self._command(b"XPENDING", self._key(stream), group)
        except GroupLost:
            return False
        return True

    def _asked(self, *command: Any) -> Any:
        return self._asked_of(lambda: self._command(*command))

    @staticmethod
    def _asked_of(question: Callable[[], T]) -> T | None:
        """The answer; None if the server does not know the command or refuses it to our user."""
        try:
            return _translating(question)
        except StreamUnusable:
            return None

    # --- plumbing ---

    def _key(self, stream: str) -> str:
        return f"{self._prefix}{{{stream}}}"

    def _command(self, *command: Any) -> Any:
        """One command. Its name goes as bytes: redis-py then has no parser of its own for it, and the reply is what the
        server sent, alike in every version of the client."""
        execute: Callable[..., Any] = self._client.execute_command
        return _translating(lambda: execute(*command, **{NEVER_DECODE: True}))

    def _pipeline(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip; an error of one is its reply and does not stop the others."""

        def run() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipeline:
                add: Callable[..., Any] = pipeline.execute_command
                for command in commands:
                    add(*command, **{NEVER_DECODE: True})
                return pipeline.execute(raise_on_error=False)

        return _translating(run)


class _Prepared(list[Run]):
    """Runs with their form for the script."""

    def __init__(self, runs: Sequence[Run], packed: bytes) -> None:
        super().__init__(runs)
        self.packed = packed


_pack = msgspec.msgpack.Encoder().encode


def _marker(reply: Any) -> Marker | TransportError | None:
    return _translated(reply) if isinstance(reply, RedisError) else Marker.parse(reply.decode())


def _waits(wait: Wait) -> list[tuple[Any, ...]]:
    """The commands that wait for what this connection has written; each takes `timeout_seconds` at most."""
    milliseconds = max(1, round(wait.timeout_seconds * 1000))
    found: list[tuple[Any, ...]] = []
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


def _name_of(probe: tuple[Any, ...]) -> str:
    """The command and its subcommand: what a probe has as bytes."""
    return " ".join(part.decode() for part in probe if isinstance(part, bytes) and part != b"GROUP")


def _named(reply: Any) -> dict[str, Any]:
    """A reply of names and values as a dictionary, in both protocols; empty for none."""
    pairs = reply.items() if isinstance(reply, dict) else zip((reply or ())[::2], (reply or ())[1::2], strict=True)
    return {name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in pairs}


def _settle(replies: Iterable[Any]) -> None:
    """See to the errors of commands on pending lists: where the group or the stream is gone, so is the list."""
    for reply in replies:
        if isinstance(reply, RedisError):
            error = _translated(reply)
            if not isinstance(error, GroupLost | StreamUnusable):
                raise error


def _argument(value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value)


def _deliveries(stream: str, entries: Iterable[Any]) -> list[Delivery]:
    """Entries of a reply: id and flat list of names and values. The last of a repeated name counts."""
    return [
        Delivery(stream, receipt.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
        for receipt, fields in entries
        if fields is not None
    ]


def _translating(call: Callable[[], T]) -> T:
    try:
        return call()
    except RedisError as error:
        raise _translated(error) from error


#: Codes that say something about one stream, not about the server.
_STREAM_CODES = frozenset({"WRONGTYPE", "NOPERM", "CROSSSLOT", "ERR"})


def _translated(error: RedisError) -> TransportError:
    """Our error for redis-py's, by the class or the code that the server's reply starts with."""
    if isinstance(error, RedisConnectionError | RedisTimeoutError):
        return _caused(TransportUnavailable(f"Redis: {error}", type(error).__name__), error)
    code = getattr(error, "status_code", None) or _CODES.get(type(error).__name__) or str(error).partition(" ")[0]
    if not code.isupper():  # old versions of the client drop ERR from the text
        code = "ERR"
    if code in ("NOGROUP", "UNBLOCKED"):
        return _caused(GroupLost(f"Redis: {error}", code), error)
    if code in _STREAM_CODES and isinstance(error, ResponseError):
        return _caused(StreamUnusable(f"Redis: {error}", code), error)
    if code == "BUSYGROUP":
        return _caused(TransportError(f"Redis: {error}", code), error)
    return _caused(TransportUnavailable(f"Redis: {error}", code), error)


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
}


def _caused(error: TransportError, cause: BaseException) -> TransportError:
    error.__cause__ = cause
    return error
