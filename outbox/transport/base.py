"""What the relay and the consumers ask of a transport, and the names of streams.

A transport is a fast copy that may lose anything at any time. It owes only this:

* `publish` is a compare-and-set: a part is added whole, and only if the stream's marker is the expected one. A stream
  that lost entries loses its marker with them, or shows an older one.
* What a group has read is pending until it is acknowledged, and can be claimed by others meanwhile.
* A group starts at the beginning of the stream, never at its end.

Every method raises `outbox.errors.TransportError` when the server does not do what is asked, and nothing else.
"""

from __future__ import annotations

import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from outbox.envelope import QUEUE_PREFIX as QUEUE_PREFIX
from outbox.envelope import Run
from outbox.envelope import is_queue as is_queue
from outbox.errors import TransportError


def stream_of(topic: str, key: str | None, lanes: int) -> str:
    """The stream that events of `key` go to: ``topic``, or one of ``topic:0`` … when the topic has several lanes.

    Events without a key have no order and share lane 0. CRC-32 (zlib's) because every language has it.
    """
    if lanes == 1:
        return topic
    return f"{topic}:{zlib.crc32(key.encode()) % lanes if key is not None else 0}"


def streams_of(topic: str, lanes: int) -> list[str]:
    """All streams of a topic."""
    return [topic] if lanes == 1 else [f"{topic}:{lane}" for lane in range(lanes)]


#: Names that consumers may have. No colon or brace is in them, so that a side stream is nothing else.
CONSUMER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")


def side_stream(topic: str, consumer: str) -> str:
    """The stream that only one consumer reads beside a topic: what is published again for it alone."""
    return f"{topic}:@{consumer}"


def topic_of(stream: str) -> str:
    """The topic of a stream. Topics have no colon in them."""
    return stream.partition(":")[0]


def queue_of(stream: str) -> str:
    """The name of the queue that is this stream, or topic."""
    return stream.removeprefix(QUEUE_PREFIX)


@dataclass(frozen=True, slots=True)
class Marker:
    """The last batch that reached a stream. Batches are numbered anew in a restored database, so `token` tells apart."""

    epoch: int
    seq: int
    token: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.seq}:{self.token}"

    @property
    def label(self) -> str:
        """What the last entry of the batch says in its field ``batch``: enough to tell it from another outbox's."""
        return f"{self.seq}:{self.token[:8]}"

    @classmethod
    def parse(cls, text: str) -> Marker | None:
        """The marker in its written form; None for anything else, which is as good as no marker (as in marker.lua)."""
        if not _MARKER.fullmatch(text):
            return None
        epoch, seq, token = text.split(":")
        return cls(int(epoch), int(seq), token)


_MARKER = re.compile(r"[0-9]+:[0-9]+:[0-9A-Za-z-]+")
_LABEL = re.compile(r"([0-9]+):[0-9A-Za-z-]+")


def batch_number(label: str) -> int | None:
    """The number in a `Marker.label`; None for anything else."""
    found = _LABEL.fullmatch(label)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Part:
    """What one batch brings to one stream.

    Attributes:
        expected: the marker that must be there; None: none.
        marker: the marker afterwards.
        runs: the events (see `outbox.envelope.wire`).
        lanes: lanes of the topic, left beside the stream for consumers to check.
        keep_seconds: how long the outbox keeps events, left there too.
        append: these are events of no batch: where the expected marker is, they are added, and it stays.
    """

    stream: str
    expected: Marker | None
    marker: Marker
    runs: Sequence[Run]
    lanes: int = 1
    keep_seconds: int = 0
    append: bool = False

    @property
    def restart(self) -> bool:
        """Whether the batch is not one that follows the expected one: batches may then be in the stream twice."""
        return not self.append and (self.expected is None or self.expected.seq >= self.marker.seq)

    @property
    def events(self) -> int:
        """How many events these are."""
        return sum(map(len, self.runs))


@dataclass(frozen=True, slots=True)
class Wait:
    """How safe a batch must be before more is published.

    Attributes:
        replicas: so many replicas have it.
        aof: ``local``: it is on the server's disk; ``all``: and on that of so many replicas; ``no``: wherever.
        timeout_seconds: how long to wait for it.
    """

    replicas: int = 0
    aof: Literal["no", "local", "all"] = "no"
    timeout_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry as it was received.

    Attributes:
        receipt: the entry's id in its stream.
        fields: names and values as they arrived.
        count: how often it was delivered, 1 for the first time.
    """

    stream: str
    receipt: str
    fields: Mapping[bytes, bytes]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a job.

    Attributes:
        status: ``completed``, ``failed``, ``cancelled``, or ``waiting``: for its next try, in PostgreSQL.
        result: what its handler returned, JSON.
        error: why it failed, the last time.
    """

    status: str
    result: bytes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as its queue has it; one that ended long ago is not there any more.

    Attributes:
        status: ``delayed``, ``ready``, ``running``, or as in `Settled`.
        since: since when it is so, by the server's clock.
        added_at: when it came to the queue.
        due_at: when it is to run; None: at once.
        count: how often it was begun.
        by: the process that has it, or had it last.
        deadline: when the claim of that process ends, if it does not renew it.
        fields: as a delivery's; without ``data`` once it has ended.
    """

    queue: str
    id: uuid.UUID
    status: str
    since: datetime | None
    added_at: datetime | None
    due_at: datetime | None
    priority: str
    count: int
    by: str | None
    deadline: datetime | None
    result: bytes | None
    error: str | None
    fields: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue at a glance.

    Attributes:
        counts: jobs by status; of those that have ended only the last ones (`outbox.transport.list.KEPT`), and of those that
            are ``waiting`` PostgreSQL knows more.
        orphaned: running ones whose claim has ended or is lost; they are in ``running``, too.
        oldest_ready_seconds: how long the oldest ready job waits for a worker; None: there is none.
        next_due: when the next delayed job is due; None: there is none.
        group: the consumer whose queue it is; None: none has opened it yet.
        ready: those of ``ready`` by priority.
    """

    queue: str
    counts: Mapping[str, int]
    orphaned: int
    oldest_ready_seconds: float | None
    next_due: datetime | None
    group: str | None
    ready: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claim:
    """What `Transport.claim` found: taken over, gone (deleted while pending), and where to look on (None: at the end)."""

    deliveries: list[Delivery]
    missing: list[str]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What the relay left beside a stream for consumers; None: the relay has not been there.

    Attributes:
        lanes: lanes of the topic.
        keep_seconds: how long the outbox is set to keep events.
        oldest: Unix time before which no event was recorded that may come again: see `Transport.leave`.
        stays_seconds: how long entries are set to stay in the stream that every group has acknowledged.
        replayed: a number that is another one whenever the stream was lost or restarted, and how many parts were appended
            (`Part.append`) since; None: there was none.
    """

    lanes: int | None
    keep_seconds: int | None = None
    oldest: int | None = None
    stays_seconds: int | None = None
    replayed: tuple[int, int] | None = None

    @property
    def margin_seconds(self) -> int:
        """By how much longer a ledger must remember than the outbox keeps: an event may be published again just before the
        outbox drops it, stay in the stream for a group that is made anew, and then be tried. A day, and an hour of it for
        trying and for clocks that differ."""
        return max(86_400, (self.stays_seconds or 0) + 3600)

    @property
    def remember_seconds(self) -> int | None:
        """How long a ledger must remember; None: the relay has not been there."""
        return None if self.keep_seconds is None else self.keep_seconds + self.margin_seconds


@dataclass(frozen=True, slots=True)
class GroupState:
    """How far a group is in a stream.

    Attributes:
        pending: delivered and not acknowledged.
        oldest_pending: id of the oldest of them.
        acked: the last batch of which everything before and in it is acknowledged; None: cannot be told.
        delivered: the last batch of which everything is delivered; None: cannot be told.
        undelivered: entries not yet delivered of the batch after that one.
        idle_seconds: since a consumer of the group last asked for something; None: it has none.
        basis: the label of the batch that `acked` was read from, which may be another outbox's.
        orphaned: those of `pending` whose claim has ended or is lost; None: it is no queue.
    """

    name: str
    pending: int
    oldest_pending: str | None
    acked: int | None
    delivered: int | None
    undelivered: int
    idle_seconds: float | None = field(default=None, compare=False)
    basis: str = field(default="", compare=False)
    orphaned: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StreamState:
    """What is in a stream.

    Attributes:
        length: entries.
        missing: entries that a stranger deleted or trimmed since the marker began.
        trimmed: entries trimmed just now.
        marker: the one that is there; None: there is none.
    """

    length: int
    missing: int
    trimmed: int
    groups: list[GroupState]
    marker: Marker | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says about itself, for a person's eyes (`outbox.doctor`). No part of the contract below.

    Attributes:
        product: ``Redis`` or ``Valkey``.
        version: its own version, not the one it is compatible with.
        protocol: version of RESP on our connection; None: HELLO is refused or not known.
        ahead_seconds: its clock minus this machine's; None: TIME is refused.
        info: the fields of INFO; empty where that is refused.
        settings: the fields of CONFIG GET that were asked for; empty where that is refused.
        unknown: commands that we need and that it does not know, or knows by another name.
        node: its name in a cluster; empty for one that is alone.
    """

    product: str
    version: str
    protocol: int | None
    ahead_seconds: float | None
    info: Mapping[str, Any]
    settings: Mapping[str, str]
    unknown: Sequence[str]
    node: str = ""


class Transport(Protocol):
    """See the module's head. Streams are given by their names (`stream_of`), never by server keys."""

    def markers(self, streams: Sequence[str]) -> dict[str, Marker | TransportError | None]:
        """The marker of each stream; None where there is none or the stream has lost entries since."""

    def prepare(self, runs: Sequence[Run]) -> Sequence[Run]:
        """The same runs, made ready for `publish` in advance; may be called by another thread."""

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        """Publish each part whose expected marker is there. Returns for each part the marker now there, or its error.

        The part is in the stream if, and only if, the marker returned is its own. Parts are independent of each other.

        Raises:
            NotYetSafe: parts are in their streams, but not as safe as this transport is to `Wait` for; see `confirm`.
        """

    def confirm(self, streams: Sequence[str]) -> None:
        """Wait until what was ever published to any stream of the server is as safe as this transport is to `Wait` for.

        Args:
            streams: those known; one of them is needed for a write that changes nothing.

        Raises:
            NotYetSafe: it is not, in time.
            SettingsError: this server cannot do it.
        """

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        """How far the stream's groups are. With `keep_seconds`, entries are trimmed that are older (0: of any age) and
        acknowledged by every group, if there is one and all of `groups` are there.

        Raises:
            StreamUnusable: it cannot be used.
        """

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        """Ids of the events that were added after the batch, newest first, `limit` at most.

        Raises:
            StreamUnusable: it cannot be used.
        """

    def memory_share(self) -> float | None:
        """How full the server's memory is, 0 to 1; None: it has no limit."""

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        """Remove names from the group that have nothing pending and were idle for so long (or are among `names`)."""

    def drop_group(self, group: str, stream: str) -> bool:
        """Remove a group for good, with what is pending in it; whether it was there."""

    def leave(self, streams: Sequence[str], keep_seconds: int, oldest: int | None, stays_seconds: int = 0) -> None:
        """Leave beside the streams, whether they are there or not, how long events are kept (see `StreamInfo`).

        Where it is refused, and where `oldest` is None, what was left before stays: an older `oldest`, so that consumers
        remember for longer.
        """

    def info(self, stream: str) -> StreamInfo:
        """What the relay left beside the stream."""

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        """Make the group where it is missing, at the beginning of the stream. Returns the streams that cannot be used."""

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        """Up to `count` entries of each stream that nobody of the group has read; waits until there is one.

        Raises:
            GroupLost: the group or a stream is gone; `open` them.
            StreamUnusable: a stream cannot be used; `open` tells which.
        """

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        """Forget the deliveries; acknowledging twice, or what is gone, does nothing.

        Args:
            settled: what became of each, for queues; None: all are completed.
        """

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        """Say what became of jobs that had left the queue before (``waiting``); best effort. For streams nothing."""

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        """Take over up to `count` deliveries that have been pending for `idle_seconds`, at anyone, oldest id first.

        Raises:
            GroupLost: the group or the stream is gone.
        """

    def reclaim_when_due(self) -> None:
        """Let jobs of every queue be ready again whose workers are gone, if that is due. For streams nothing.

        Raises:
            TransportError: it could not be done; there is a next time.
        """

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        """Let others claim these deliveries of ours at once, as if they had not been delivered this time."""

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Let these deliveries of ours count as delivered `Delivery.count` times, the last time just now. Returns those that
        are ours still; what others have taken over meanwhile stays theirs."""

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Let these deliveries of ours be as if delivered just now, without counting it; may be called by another thread.

        Returns those that are ours still, or of streams that cannot be asked now.
        """

    def left(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        """Up to `count` deliveries that a consumer of the group has pending, oldest id first, counted as they are. They stay his.

        Raises:
            GroupLost: the group or the stream is gone.
        """

    def inherit(self, group: str, consumer: str, late: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Take over deliveries of a consumer that is gone, at once; they count as delivered `Delivery.count` times. Returns those
        that were his still."""

    def close(self) -> None:
        """Close the connections."""
