"""What streams and queues have in common on a server: the relay's marker and what it leaves beside them, how safe that is, and how
scripts are run.

Invariants:
* A stream ``{topic}`` or ``{topic:3}`` or a queue ``{queue/mail}`` and its marker ``{…}:relay`` share a hash slot, whatever its name.
* What is published comes by one script, together with the marker.
* Replies are taken as bytes, in both protocols, whatever the client decodes.
* Every command goes to the server that has its stream; none is about several streams, but for reads of one server.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, ClassVar, Self

import msgspec
import redis

from outbox.envelope import Run
from outbox.errors import GroupLost, NotYetSafe, SettingsError, StreamUnusable, TransportError, TransportUnavailable
from outbox.transport.base import Marker, Part, StreamInfo, Wait
from outbox.transport.cluster import Cluster
from outbox.transport.connect import connect
from outbox.transport.servers import Command, Server, answer


@dataclass(frozen=True, slots=True)
class Script:
    """A script and its SHA-1, which is its name to the server."""

    text: str
    sha: str

    @classmethod
    def of(cls, *names: str, flags: str = "") -> Script:
        """The script in these files of this folder, one after the other; its flags as Redis 7.0 and Valkey know them."""
        text = (f"#!lua flags={flags}\n" if flags else "") + "".join(
            (files("outbox.transport") / f"{name}.lua").read_text() for name in names
        )
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_REPLAYED = re.compile(rb"(\d{1,18}):(\d{1,18})")


class RelayedTransport:
    """Redis 7.0 or newer, or Valkey; one server, or a cluster.

    Args:
        client: any redis-py client of one server (`decode_responses` and `protocol` as you like), or what `connect` makes. Its
            socket time-out must be longer than the longest block of `read`. Commands are safe to repeat, so its retries do
            no harm.
        prefix: put before every key.
        wait: how safe what is published must be. A connection must wait longer for a reply than this does.
    """

    #: Publishes one batch, see publish.lua for its arguments.
    _PUBLISH: ClassVar[Script]

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
    ) -> Self:
        """A transport with connections of its own, which wait `timeout_seconds` for a reply, beyond `block_seconds` and what
        `wait` may take.

        Raises:
            ValueError: the address is malformed.
        """
        servers = connect(url, timeout_seconds=timeout_seconds, block_seconds=block_seconds + longest(wait))
        return cls(servers, prefix, wait)

    def close(self) -> None:
        self._servers.close()

    def markers(self, streams: Sequence[str]) -> dict[str, Marker | TransportError | None]:
        return dict(zip(streams, self._publish([(stream, ("", "")) for stream in streams]), strict=True))

    def prepare(self, runs: Sequence[Run]) -> Sequence[Run]:
        return _Prepared(runs, packed(runs))

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        waits = _waits(self._wait)
        replies = self._script(self._PUBLISH, [
            (part.stream, (part.expected or "", part.marker, part.lanes, packed(part.runs), part.keep_seconds,
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
            asked(server, b"COMMAND", b"INFO", "WAITAOF") == [None] for server in self._servers.nodes().values()
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
        return [_marker(reply) for reply in self._script(self._PUBLISH, calls)]

    def memory_share(self) -> float | None:
        """On a cluster, of the fullest node that answers; its others are full before long, where lanes are spread evenly."""
        shares, failures = [], []
        for server in self._servers.nodes().values():
            try:
                info = fields_of_info(answer(server, "", (b"INFO", "memory")))
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

    # --- plumbing ---

    def _script(
        self, script: Script, calls: Sequence[tuple[str, tuple[Any, ...]]], then: Sequence[Command] = ()
    ) -> list[Any]:
        """Run a script for each stream or queue, and `then` some commands, in one round trip; where a server does not have the script
        (yet, or any more), once more with its text."""
        commands = [
            (stream, (b"EVALSHA", script.sha, 2, self._key(stream), f"{self._key(stream)}:relay", *map(_argument, args)))
            for stream, args in calls
        ]  # fmt: skip
        replies = self._pipeline(commands, then)
        unknown = [n for n in range(len(calls)) if getattr(replies[n], "code", None) == "NOSCRIPT"]
        if not unknown:
            return replies
        again = self._pipeline([
            (commands[n][0], (b"EVAL", script.text, *commands[n][1][2:])) for n in unknown
        ], then)  # fmt: skip
        for n, reply in zip(unknown, again, strict=False):
            replies[n] = reply
        return [*replies, *again[len(unknown) :]]

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


def longest(wait: Wait | None) -> float:
    """For how many seconds a reply may have to be waited for."""
    return sum(wait.timeout_seconds for _ in _waits(wait)) if wait else 0.0


def _waits(wait: Wait) -> list[Command]:
    """The commands that wait for what this connection has written; each takes `timeout_seconds` at most."""
    milliseconds = max(1, round(wait.timeout_seconds * 1000))
    found: list[Command] = []
    if wait.replicas and wait.aof != "all":
        found.append((b"WAIT", wait.replicas, milliseconds))
    if wait.aof != "no":
        found.append((b"WAITAOF", 1, wait.replicas if wait.aof == "all" else 0, milliseconds))
    return found


def packed(runs: Sequence[Run]) -> bytes:
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


def asked(server: Server, *command: Any) -> Any:
    """The answer; None if the server does not know the command or refuses it to our user."""
    try:
        return answer(server, "", command)
    except StreamUnusable:
        return None


def fields_of_info(reply: bytes) -> dict[str, str]:
    """The fields of INFO."""
    pairs = (line.partition(":") for line in reply.decode().splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def settle(replies: Iterable[Any]) -> None:
    """See to the errors of commands on pending lists: where the group or the stream is gone, so is the list; where a node is
    away, what was to be forgotten is claimed and recognised later."""
    for reply in replies:
        if isinstance(reply, TransportError) and not isinstance(reply, GroupLost | StreamUnusable):
            raise reply


def _argument(value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value)
