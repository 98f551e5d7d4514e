"""What the relay believes of its streams, how far their groups are, and which of them have to wait.

Beliefs may be wrong: another relay may publish too, and Redis may forget. The marker in Redis decides; a wrong belief costs
a look at it. What groups have acknowledged is kept in PostgreSQL, so that it is known when Redis has lost everything.

So are pauses, for people and for other relays: each goes on from the pause that is written down, as if it had begun it.
What could not be written down yet is written before anything else, and counts meanwhile.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outbox.errors import SettingsError
from outbox.settings import RelaySettings
from outbox.store import Connection, Group, Store, StreamHead
from outbox.telemetry import Measurement, StreamPaused, Trimmed
from outbox.transport import Marker, Part, Transport
from outbox.transport.base import GroupState, StreamState, batch_number, is_queue, topic_of

_log = logging.getLogger(__name__)

#: Memory goes on being full until so much less of it is used.
_RESUME_BELOW = 0.05
_SEEN_SECONDS = 60.0
#: Groups with other names are strangers', and not written down.
_LONGEST_NAME = 200
#: In a name: bytes that are no text. So written it is another name, and its group would be missing.
_NO_TEXT = re.compile(r"\\x[0-9a-f]{2}")
_PAUSED = {
    "memory": "Redis uses more than OUTBOX_MAX_MEMORY_SHARE of its memory",
    "length": "it has more than OUTBOX_MAX_STREAM_LENGTH unacknowledged entries",
}


@dataclass(slots=True)
class Stream:
    """One of them.

    Attributes:
        seq: number of its newest sealed batch.
        token: and that batch's token.
        marker: what was last seen in Redis.
        current: the marker is that of the newest sealed batch.
        acked: by group: the batch up to which all is acknowledged.
        inspected: its groups are known.
        unopened: it is a queue with jobs that no consumer has opened; of a stream nobody can tell whether one is to come.
        length: entries when it was looked at, and those published since.
        paused: why it has to wait, a key of `_PAUSED`.
        written_until: when it is to be written down anew that its groups, which stand still, are there.
    """

    seq: int = 0
    token: str = ""
    marker: Marker | None = None
    current: bool = False
    acked: dict[str, int] = field(default_factory=dict)
    inspected: bool = False
    unopened: bool = False
    length: int = 0
    paused: str | None = None
    written_until: float = 0.0

    @property
    def needed(self) -> int:
        """The batch after which some group still needs everything; 0 where no group is known."""
        return min(self.acked.values(), default=0)

    @property
    def settled(self) -> float:
        """The batch up to which it is published and acknowledged by every group that is known."""
        if not self.current or not self.inspected or self.unopened:
            return 0
        return self.needed if self.acked and self.needed < self.seq else float("inf")


class Streams(dict[str, Stream]):
    """All of them, by name."""

    def __init__(
        self, settings: RelaySettings, store: Store, transport: Transport, observe: Callable[[Measurement], None]
    ) -> None:
        super().__init__()
        self._settings, self._store, self._transport, self._observe = settings, store, transport, observe
        self._memory_full = False
        self._bytes = 0  # published since the memory was looked at
        self._declared: dict[str, list[str]] = {}  # groups by stream, also of those of which no batch is left
        self._trimmed: dict[str, bool] = {}  # whether what everybody has acknowledged goes, when it was last looked at
        self._unwritten: dict[str, str | None] = {}  # pauses that are not written down as they are

    def load(self, connection: Connection) -> None:
        """Read what is sealed and acknowledged; what was believed of markers is forgotten.

        Raises:
            SettingsError: a topic is spread over another number of lanes than before. A consumer that reads the new ones would
                not read what is left in the old ones, and one key would be in two.
        """
        heads = self._store.heads(connection)
        for head in heads:
            self._check_lanes(head)
        known = dict(self)
        self.clear()
        for head in heads:
            before = known.get(head.stream, Stream())
            self[head.stream] = Stream(head.seq, head.token, length=before.length, paused=before.paused)
        self.load_groups(connection)

    def _check_lanes(self, head: StreamHead) -> None:
        topic = topic_of(head.stream)
        wanted = self._settings.lanes.get(topic, 1)
        if head.lanes != wanted:
            raise SettingsError(
                f"OUTBOX_LANES: topic {topic} is spread over {head.lanes} lanes, and is now set to {wanted}; the lanes "
                "of a topic cannot be changed while the outbox keeps events of it. Use a new topic"
            )

    def load_groups(self, connection: Connection) -> None:
        """Read how far every group is."""
        for stream in self.values():
            stream.acked = {}
        for group in self._store.groups(connection):
            if group.stream in self:
                self[group.stream].acked[group.name] = group.acked

    def load_pauses(self, connection: Connection) -> None:
        """Go on from the pauses that are written down, whoever did it; ours were, before (`write_pauses`)."""
        written = self._store.pauses(connection)
        for name, stream in self.items():
            self._set_pause(name, stream, written[name].reason if name in written else None)
        self._memory_full = any(stream.paused == "memory" for stream in self.values())

    def write_pauses(self, connection: Connection) -> None:
        """Write down what has changed; does nothing if nothing has."""
        if self._unwritten:
            self._store.write_pauses(connection, self._unwritten)
            self._unwritten = {}

    def leave_age(self, connection: Connection) -> list[str]:
        """Leave beside every stream, also one whose batches are all dropped, since when events were recorded that may come
        again, to a group that is made anew: what consumers must not forget. They come from the outbox, or may have come from
        it just before it dropped them, and stayed in the stream. While a stream is not trimmed (a group is missing), what
        was left there stays.

        Returns:
            The streams.
        """
        self._declared = {}
        for group in self._store.groups(connection):
            self._declared.setdefault(group.stream, []).append(group.name)
        streams = sorted({*self, *self._declared})
        keep, stays = self._settings.retention_seconds, math.ceil(self._settings.stream_keep_seconds)
        oldest = self._store.oldest(connection) - stays
        for trimmed in (True, False):
            some = [name for name in streams if self._trimmed.get(name, False) == trimmed]
            self._transport.leave(some, keep, oldest if trimmed else None, stays)
        return streams

    def trim_idle(self, name: str) -> None:
        """Trim a stream of which no batch is left; what it has was published again, or stays for longer than the outbox. Its
        groups are those of the last `leave_age`: there may be thousands of such streams.

        Raises:
            TransportError: it cannot be looked at.
        """
        state = self._look(name, self._declared.get(name, []), self._settings.stream_keep_seconds)
        if _lagging(state):  # what it keeps there has left the outbox
            self._trimmed[name] = False

    def _look(self, name: str, declared: list[str], keep_seconds: float) -> StreamState:
        self._trimmed[name] = False  # nor does it go where nobody can look
        state = self._transport.inspect(name, groups=declared, keep_seconds=keep_seconds)
        there = {group.name for group in state.groups if _is_declared(group)}
        self._trimmed[name] = not state.length or (bool(there) and there.issuperset(declared))
        if state.trimmed:
            self._observe(Trimmed(name, state.trimmed))
        return state

    def inspect(self, connection: Connection, name: str, epoch: int, timeline: int | None) -> int:
        """Look how far the groups of a stream are, write it down, and trim what all of them have acknowledged.

        Batches of another epoch than `epoch`, or of another outbox, may be others of the same number: of them nothing is
        known to be acknowledged. Nor is anything where entries are missing, which may be skipped and not acknowledged.

        Returns:
            How many entries a stranger deleted, which some group may not have seen.

        Raises:
            TransportError: it cannot be looked at.
        """
        stream = self[name]
        # Where room is short, nothing acknowledged stays; it may be that ids lie in the future and never get old.
        keep = 0 if stream.paused else self._settings.stream_keep_seconds
        state = self._look(name, list(stream.acked), keep)
        stream.length, stream.inspected = state.length, True
        stream.unopened = is_queue(name) and not state.groups and state.length > 0
        ours: set[str] = set()
        if state.marker and state.marker.epoch == epoch and not state.missing:
            ours = self._ours(connection, stream, {group.basis for group in state.groups})
        seen = [
            Group(name, group.name, min(group.acked or 0, stream.seq) if group.basis in ours else 0)
            for group in state.groups
            if _is_declared(group)
        ]
        if time.monotonic() >= stream.written_until or any(
            group.acked > stream.acked.get(group.name, -1) for group in seen
        ):
            self._store.see_groups(connection, seen, timeline)
            stream.written_until = time.monotonic() + _SEEN_SECONDS
        if lagging := _lagging(state):  # which is no matter, while the outbox has all that they keep in the stream
            oldest = self._store.oldest_seq(connection) or 0
            self._trimmed[name] &= all(group.basis in ours and (group.acked or 0) + 1 >= oldest for group in lagging)
        return state.missing

    def _ours(self, connection: Connection, stream: Stream, labels: set[str]) -> set[str]:
        """Those of the batches' labels that are of this outbox: a restored one, or a stranger, may use the same numbers."""
        newest = Marker(0, stream.seq, stream.token).label
        others = {label for label in labels if label != newest and batch_number(label) is not None}
        return self._store.ours(connection, others) | {newest}

    # --- back-pressure ---

    def check_memory(self) -> None:
        """Pause all streams while Redis' memory is too full, and let them go on when it no longer is."""
        self._bytes = 0
        share = self._transport.memory_share()
        limit = self._settings.max_memory_share - (_RESUME_BELOW if self._memory_full else 0)
        self._memory_full = share is not None and share > limit
        for name, stream in self.items():
            if self._memory_full:
                self._pause(name, stream, "memory")
            elif stream.paused == "memory":
                self._pause(name, stream, None)

    def count(self, part: Part) -> None:
        """Count what was published, and look at the memory where it was much."""
        self[part.stream].length += part.events
        self._bytes += sum(len(data) for run in part.runs for data in run.columns[0])
        if self._bytes > self._settings.batch_bytes:
            self.check_memory()

    def check_length(self, connection: Connection, name: str) -> None:
        """Pause a stream with more unacknowledged entries than allowed; it goes on when a tenth of them is gone."""
        stream = self[name]
        if stream.paused == "memory":
            return
        limit = self._settings.max_stream_length
        if stream.paused:
            limit -= limit // 10
        long = stream.length > limit
        if long and stream.acked and stream.marker:  # what is acknowledged, but not yet trimmed, does not count
            long = self._store.events_between(connection, name, stream.needed, stream.marker.seq) > limit
        self._pause(name, stream, "length" if long else None)

    def _pause(self, name: str, stream: Stream, reason: str | None) -> None:
        if reason != stream.paused:
            self._unwritten[name] = reason
            self._set_pause(name, stream, reason)

    def _set_pause(self, name: str, stream: Stream, reason: str | None) -> None:
        if reason == stream.paused:
            return
        stream.paused = reason
        if reason:
            stream.current = False
            _log.warning(
                "stream %s is paused, %s; the outbox holds the rest", name, _PAUSED[reason],
                extra={"action": "stream_paused", "stream": name, "reason": reason},
            )  # fmt: skip
        else:
            _log.info("stream %s goes on", name, extra={"action": "stream_resumed", "stream": name})
        self._observe(StreamPaused(name, reason))


def _is_declared(group: GroupState) -> bool:
    """Whether a group that is there is written down; else it is a stranger's, by its name."""
    return group.name.isprintable() and len(group.name) <= _LONGEST_NAME and not _NO_TEXT.search(group.name)


def _lagging(state: StreamState) -> list[GroupState]:
    """The groups for which there is something that they have not acknowledged."""
    return [group for group in state.groups if group.pending or group.undelivered or group.acked is None]
