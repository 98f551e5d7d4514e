"""What a person asks of the producer's side: how things stand, to forget a group that is gone, to go on with a database."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeVar

from outbox import schema as schemas
from outbox.envelope import QUEUE_PREFIX, is_queue
from outbox.errors import SettingsError, StreamUnusable, TransportError
from outbox.settings import RelaySettings
from outbox.store import Connection, Group, Pause, Store, StreamHead
from outbox.transport import Marker, Router, Transport
from outbox.transport.base import GroupState, StreamState, queue_of, side_stream, streams_of, topic_of

T = TypeVar("T")

_COUNTED, _SIDE_COUNTED = 1_000_000, 10_000
_TRIES, _PAUSE_SECONDS = 20, 0.25
#: Whoever asked for something within this is still there: consumers ask every 30 seconds at least.
_GONE_SECONDS = 60.0
#: How long `status` waits for an answer of Redis, after which it asks no more; and of PostgreSQL, to one thing that it asks
#: (about one stream, of which there may be thousands), after which it gives up.
_REDIS_SECONDS, _DATABASE_SECONDS = 0.4, 10.0


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """How far a group is in a stream.

    Attributes:
        unacknowledged: events of batches after `acked_batch`, published or not: never too few, whatever Redis lost.
        unacknowledged_seconds: since the oldest of them was sealed, as far as its batch is known.
        undelivered: events that none of its consumers has read, counted from the sealed batches, since the server's own
            ``lag`` is null or wrong after trims and deletions; None: it cannot be told just now.
        pending: delivered and not acknowledged.
        oldest_pending_seconds: age of the oldest of them in the stream; None: it has none, or is a queue.
        acked_batch: up to here everything is acknowledged, as last written down by a relay.
        still_seconds: since that last moved.
        idle_seconds: since one of its consumers asked for something; None: it has none.
        there: whether the server has the group; None: it was not asked.
        dead: deliveries put aside as dead letters; None: the consumer's tables are in another database or schema.
        waiting: delivered events that wait in the consumer's tables for another try, a handler or an earlier version; as `dead`.
        orphaned: of a queue: pending jobs whose claim has ended or is lost; see `QueueStatus`. None: it has no group there.
    """

    name: str
    unacknowledged: int
    unacknowledged_seconds: float | None
    undelivered: int | None
    pending: int
    oldest_pending_seconds: float | None
    acked_batch: int
    still_seconds: float | None
    idle_seconds: float | None
    there: bool | None
    dead: int | None
    waiting: int | None
    orphaned: int | None


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream and its groups.

    Attributes:
        batch: the newest batch that it is made of.
        published_batch: the newest one that is there; None: the stream was lost, or never was.
        unpublished: events sealed and not there; None: Redis does not answer.
        unpublished_seconds: since the oldest of them was sealed, as far as its batch is known.
        entries: its length.
        missing: entries that strangers took.
        paused: why the relay does not publish to it: ``memory`` or ``length``, as the relay last wrote it down.
        paused_seconds: since it is.
        error: why it cannot be used, or was not looked at.
    """

    stream: str
    batch: int
    published_batch: int | None
    unpublished: int | None
    unpublished_seconds: float | None
    entries: int
    missing: int
    paused: str | None
    paused_seconds: float | None
    error: str | None
    groups: list[GroupStatus]


@dataclass(frozen=True, slots=True)
class SideStreamStatus:
    """What was published again for one group alone, in a stream of its own beside a topic; its consumers trim it.

    Attributes:
        entries: its length, what was acknowledged within a minute included; None: Redis does not answer.
        undelivered: entries that none of its consumers has read, counted up to ten thousand; None: as well.
        pending: delivered and not acknowledged.
        oldest_pending_seconds: age of the oldest of them in the stream.
        dead, waiting: as in `GroupStatus`.
    """

    stream: str
    group: str
    entries: int | None
    undelivered: int | None
    pending: int
    oldest_pending_seconds: float | None
    dead: int | None
    waiting: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """How things stand.

    Attributes:
        relays: relays that are connected; None: it cannot be told through a pooler.
        memory_share: how full Redis is, 0 to 1; None: no limit is set, or Redis does not answer.
        redis_error: how Redis failed to answer, so that only what PostgreSQL knows is true of the streams.
        unsealed: by topic: committed events that no relay has seen yet (counted up to a million), and the oldest's age.
        side_streams: those that hold something, or of which something was put aside.
    """

    relays: int | None
    epoch: int
    batch: int
    memory_share: float | None
    redis_error: str | None
    unsealed: dict[str, tuple[int, float]]
    streams: list[StreamStatus]
    side_streams: list[SideStreamStatus]


def status(settings: RelaySettings, consumer_schema: str = "public") -> Status:
    """How things stand; changes nothing. A Redis that hangs costs less than a second.

    Args:
        consumer_schema: where the consumers' tables are, if they are in the same database.

    Raises:
        SchemaError: the tables are missing or of another revision.
        psycopg.Error: PostgreSQL cannot be reached, or does not answer. Where Redis does not, that is `Status.redis_error`.
    """
    with opened(settings, _REDIS_SECONDS, _DATABASE_SECONDS) as (store, connection, transport):

        def ask(question: Callable[[], T]) -> T:
            with schemas.answering(connection, _DATABASE_SECONDS):
                return question()

        newest, heads = ask(lambda: (store.newest(connection), store.heads(connection)))
        share, unanswered = None, None
        seen: dict[str, tuple[Marker | TransportError | None, StreamState]] = {}
        try:
            share = transport.memory_share()
            markers = transport.markers([head.stream for head in heads]) if heads else {}
            for stream, found in markers.items():
                state = _NOTHING
                if not isinstance(found, TransportError):
                    try:
                        state = transport.inspect(stream)
                    except StreamUnusable as error:
                        found = error
                seen[stream] = found, state
        except TransportError as error:
            unanswered = error
        known = ask(lambda: _Known(
            _by_stream(store.groups(connection)), store.group_ages(connection), store.pauses(connection),
            store.put_aside(connection, consumer_schema, "dead_letters"),
            store.put_aside(connection, consumer_schema, "message_failures"),
        ))  # fmt: skip
        relays, epoch = ask(lambda: (store.relays(connection), store.epoch(connection)))
        unsealed = ask(lambda: store.unsealed(connection, _COUNTED))
        streams = []
        for head in heads:
            found, state = seen.get(head.stream, (unanswered, _NOTHING))
            streams.append(ask(partial(_stream, store, connection, head, found, state, known)))
        return Status(
            relays, epoch, newest.seq if newest else 0, share, str(unanswered) if unanswered else None, unsealed, streams,
            _side_streams(None if unanswered else transport, {topic_of(head.stream) for head in heads}, known),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue at a glance.

    Attributes:
        consumer: whose queue it is; None: no worker has opened it yet.
        whole: whether Redis has lost nothing of it; else the relay is about to publish what is not done (see `status`).
        ready: jobs that could begin, by priority.
        oldest_ready_seconds: how long the oldest of them waits for a worker; None: there is none.
        delayed: jobs whose time has not come; next_due: when the first one's does.
        running: jobs that a process has claimed.
        orphaned: those of them whose claim has ended or is lost: their process is gone, and another worker takes them over.
        waiting: jobs that failed and wait in the consumer's tables for another try; None: these are in another database or schema.
        dead: dead letters; as `waiting`.
        kept: the last jobs that have ended, as far as Redis remembers them, by status.
    """

    queue: str
    consumer: str | None
    whole: bool
    ready: Mapping[str, int]
    oldest_ready_seconds: float | None
    delayed: int
    next_due: datetime | None
    running: int
    orphaned: int
    waiting: int | None
    dead: int | None
    kept: Mapping[str, int]


def queues(settings: RelaySettings, consumer_schema: str = "public") -> list[QueueStatus]:
    """Every queue that Redis or the outbox knows, by name; changes nothing.

    Args:
        consumer_schema: as `status`.

    Raises:
        SchemaError: the tables are missing or of another revision.
        psycopg.Error: PostgreSQL cannot be reached, or does not answer.
        TransportError: Redis does not answer, or no queue can be used; one among others is named in the log and left out.
    """
    with opened(settings, database_seconds=_DATABASE_SECONDS) as (store, connection, transport):
        with schemas.answering(connection, _DATABASE_SECONDS):
            recorded = [head.stream for head in store.heads(connection) if is_queue(head.stream)]
            groups = _by_stream(store.groups(connection))
            waiting, dead = (
                _by_queue(store.put_aside(connection, consumer_schema, table))
                for table in ("message_failures", "dead_letters")
            )
        markers = transport.markers(recorded) if recorded else {}
        statuses = []
        for state in transport.lists.queues(map(queue_of, recorded)):
            stream, kept = QUEUE_PREFIX + state.queue, dict(state.counts)
            delayed, running, _ = (kept.pop(status, 0) for status in ("delayed", "running", "ready"))
            kept.pop("waiting", None)  # of which PostgreSQL knows more
            statuses.append(QueueStatus(
                state.queue, state.group or min(groups.get(stream, ()), default=None),
                stream not in markers or isinstance(markers[stream], Marker), state.ready, state.oldest_ready_seconds, delayed,
                state.next_due, running, state.orphaned, None if waiting is None else waiting[stream],
                None if dead is None else dead[stream], kept,
            ))  # fmt: skip
        return statuses


def _by_queue(numbers: Mapping[tuple[str, str], int] | None) -> Counter[str] | None:
    """All of a stream, whoever put it aside."""
    if numbers is None:
        return None
    found = Counter[str]()
    for (stream, _), number in numbers.items():
        found[stream] += number
    return found


def drop_group(settings: RelaySettings, name: str, *, force: bool = False) -> list[str]:
    """Forget a group for good, in PostgreSQL and in Redis: nothing is kept for it any longer. Returns its streams.

    Args:
        force: also one that is not gone. It is made anew at once, and never gets what it had not acknowledged.

    Raises:
        SettingsError: there is no such group; or one of its processes asked for something within the last minute.
        TransportError: Redis does not do it; what is left is dropped by another call.
    """
    streams: set[str] = set()
    with opened(settings) as (store, connection, transport):
        # At every stream: no relay may have seen it yet, and of a name that is too odd it writes nothing down.
        asked = {head.stream for head in store.heads(connection)}
        asked |= {group.stream for group in store.groups(connection) if group.name == name}
        if not force:
            _check_gone(transport, name, sorted(asked))
        for _ in range(_TRIES):
            asked |= {group.stream for group in store.groups(connection) if group.name == name}
            found = {stream for stream in sorted(asked) if transport.drop_group(name, stream)}
            found.update(store.drop_group(connection, name))
            if not found:
                break
            streams |= found
            asked = found
            time.sleep(_PAUSE_SECONDS)  # a relay that saw it just before declares it once more
    if not streams:
        raise SettingsError(f"there is no group {name!r}; `outbox status` lists them")
    return sorted(streams)


def _check_gone(transport: Transport, name: str, streams: list[str]) -> None:
    for stream in streams:
        with suppress(StreamUnusable):
            for group in transport.inspect(stream).groups:
                if group.name == name and group.idle_seconds is not None and group.idle_seconds < _GONE_SECONDS:
                    raise SettingsError(
                        f"a process of group {name!r} asked for events of stream {stream} {group.idle_seconds:.0f} s ago: it is "
                        "not gone, and would lose what it has not acknowledged. Stop it and come back in a minute, or say --force"
                    )


def new_epoch(settings: RelaySettings) -> int:
    """Make this database the one that publishes, whatever its streams say; relays of others stop. Returns the epoch.

    Raises:
        TransportError: a stream cannot be looked at.
    """
    with opened(settings) as (store, connection, transport):
        streams = {head.stream for head in store.heads(connection)}
        for topic in store.unsealed(connection, _COUNTED):
            streams.update(streams_of(topic, settings.lanes.get(topic, 1)))
        epochs = [store.epoch(connection)]
        for found in transport.markers(sorted(streams)).values() if streams else ():
            if isinstance(found, TransportError):
                raise found
            epochs.append(found.epoch if found else 0)
        store.open_epoch(connection, max(epochs) + 1)
        return max(epochs) + 1


@contextmanager
def opened(
    settings: RelaySettings, redis_seconds: float | None = None, database_seconds: float | None = None
) -> Iterator[tuple[Store, Connection, Router]]:
    """What operations work with; closed at the end.

    Args:
        redis_seconds: how long to wait for an answer of Redis; default: as the settings say.
        database_seconds: how long PostgreSQL may take for its first answer; default: for ever.

    Raises:
        SchemaError: the tables are missing or of another revision.
        psycopg.Error: PostgreSQL cannot be reached.
    """
    transport = Router.from_url(
        settings.redis_url.get_secret_value(),
        prefix=settings.key_prefix,
        timeout_seconds=redis_seconds or settings.redis_timeout_seconds,
    )
    try:
        address = settings.database_url.get_secret_value()
        with schemas.connect(address, "outbox operations", autocommit=True) as connection:
            with schemas.answering(connection, database_seconds) if database_seconds else nullcontext():
                schemas.check_revision(connection, "outbox", settings.schema_name)
            yield Store(settings.schema_name), connection, transport
    finally:
        transport.close()


#: Of a stream that was not looked at.
_NOTHING = StreamState(0, 0, 0, [])


@dataclass(frozen=True, slots=True)
class _Known:
    """What PostgreSQL knows about all streams."""

    groups: Mapping[str, Mapping[str, int]]  # by stream and name: the batch up to which all is acknowledged
    ages: Mapping[tuple[str, str], float]
    pauses: Mapping[str, Pause]
    dead: Mapping[tuple[str, str], int] | None
    waiting: Mapping[tuple[str, str], int] | None


def _stream(
    store: Store, connection: Connection, head: StreamHead, found: Marker | TransportError | None, state: StreamState,
    known: _Known,
) -> StreamStatus:  # fmt: skip
    declared = known.groups.get(head.stream, {})
    asked = not isinstance(found, TransportError) or isinstance(found, StreamUnusable)
    published = found.seq if isinstance(found, Marker) else None
    # What was lost and is acknowledged everywhere is not published again.
    after = published if published is not None else min(declared.values(), default=0)
    unpublished = store.events_between(connection, head.stream, after, head.seq) if asked else None
    there = {group.name: group for group in state.groups}
    groups = []
    for name in sorted(declared.keys() | there.keys()):
        group, acked = there.get(name), declared.get(name, 0)
        undelivered = None
        if group is not None and group.delivered is not None and published is not None:
            whole = store.events_between(connection, head.stream, group.delivered + 1, published)
            undelivered = group.undelivered + (whole if group.undelivered else 0)
        unacknowledged = store.events_between(connection, head.stream, acked, head.seq)
        oldest = _oldest(store, connection, head.stream, acked) if unacknowledged else None
        groups.append(
            GroupStatus(
                name, unacknowledged, oldest, undelivered,
                group.pending if group else 0, None if is_queue(head.stream) else _age(group), acked, known.ages.get((head.stream, name)),
                group.idle_seconds if group else None, group is not None if asked else None,
                _count(known.dead, head.stream, name), _count(known.waiting, head.stream, name),
                group.orphaned if group else None,
            )
        )  # fmt: skip
    pause = known.pauses.get(head.stream)
    return StreamStatus(
        head.stream, head.seq, published, unpublished,
        _oldest(store, connection, head.stream, after) if unpublished else None, state.length, state.missing,
        pause.reason if pause else None, pause.seconds if pause else None,
        str(found) if isinstance(found, TransportError) else None, groups,
    )  # fmt: skip


def _by_stream(groups: Iterable[Group]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for group in groups:
        found.setdefault(group.stream, {})[group.name] = group.acked
    return found


def _oldest(store: Store, connection: Connection, stream: str, after: int) -> float | None:
    """Seconds since the stream's first batch after that number was sealed."""
    first = store.batches_after(connection, stream, after, 1)
    return store.sealed_age(connection, first[0][0].seq) if first else None


def _side_streams(transport: Transport | None, topics: set[str], known: _Known) -> list[SideStreamStatus]:
    """Those that are worth a line; all that is known without Redis where there is no transport."""
    owners = {
        side_stream(topic_of(stream), name): name
        for stream, names in known.groups.items() if not is_queue(stream) for name in names
    }  # fmt: skip
    for stream, consumer in {**(known.dead or {}), **(known.waiting or {})}:
        if topic_of(stream) in topics and stream == side_stream(topic_of(stream), consumer):
            owners[stream] = consumer
    try:
        there = transport.markers(sorted(owners)) if transport and owners else {}
    except TransportError:
        transport, there = None, {}
    found = []
    for stream, name in sorted(owners.items()):
        dead, waiting = _count(known.dead, stream, name), _count(known.waiting, stream, name)
        try:
            marker = there.get(stream)
            state = transport.inspect(stream) if transport and isinstance(marker, Marker) else _NOTHING
            group = next((group for group in state.groups if group.name == name), None)
            read = 0 if group is None else group.delivered
            if transport is None or read is None:
                undelivered = None
            elif group is None:
                undelivered = state.length
            elif group.undelivered:  # of the step that is being read, and all of the later ones
                undelivered = group.undelivered + len(transport.ids_after(stream, read + 1, _SIDE_COUNTED))
            else:
                undelivered = 0
        except TransportError:
            transport, state, group, undelivered = None, _NOTHING, None, None
        if state.length or dead or waiting or (group and group.pending):
            entries = None if transport is None else state.length
            found.append(
                SideStreamStatus(
                    stream, name, entries, undelivered, group.pending if group else 0, _age(group), dead, waiting
                )
            )  # fmt: skip
    return found


def _count(numbers: Mapping[tuple[str, str], int] | None, stream: str, group: str) -> int | None:
    return None if numbers is None else numbers.get((stream, group), 0)


def _age(group: GroupState | None) -> float | None:
    """Seconds since the group's oldest pending entry was added, by the milliseconds in its id."""
    if group is None or group.oldest_pending is None:
        return None
    return max(0.0, time.time() - int(group.oldest_pending.partition("-")[0]) / 1000)
