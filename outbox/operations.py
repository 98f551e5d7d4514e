"""What a person asks of the producer's side: how things stand, to forget a group that is gone, to go on with a database."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from outbox import schema as schemas
from outbox.errors import SettingsError, TransportError, TransportUnavailable
from outbox.settings import RelaySettings
from outbox.store import Connection, Store, StreamHead
from outbox.transport import Marker, StreamTransport
from outbox.transport.base import GroupState, StreamState, streams_of

_COUNTED = 1_000_000
_TRIES, _PAUSE_SECONDS = 20, 0.25


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """How far a group is in a stream.

    Attributes:
        unacknowledged: events of batches after `acked_batch`, published or not: never too few, whatever Redis lost.
        undelivered: events that none of its consumers has read, counted from the sealed batches, since the server's own
            ``lag`` is null or wrong after trims and deletions; None: it cannot be told just now.
        pending: delivered and not acknowledged.
        oldest_pending_seconds: age of the oldest of them in the stream.
        acked_batch: up to here everything is acknowledged, as last written down by a relay.
        still_seconds: since that last moved.
        idle_seconds: since one of its consumers asked for something; None: it has none.
        there: whether the server has the group.
        dead: deliveries put aside as dead letters; None: the consumer's tables are in another database or schema.
    """

    name: str
    unacknowledged: int
    undelivered: int | None
    pending: int
    oldest_pending_seconds: float | None
    acked_batch: int
    still_seconds: float | None
    idle_seconds: float | None
    there: bool
    dead: int | None


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream and its groups.

    Attributes:
        batch: the newest batch that it is made of.
        published_batch: the newest one that is there; None: the stream was lost, or never was.
        unpublished: events sealed and not there.
        unpublished_seconds: since the oldest of them was sealed, as far as its batch is known.
        entries: its length.
        missing: entries that strangers took.
        paused: why the relay does not publish to it: ``memory`` or ``length``.
        error: why it cannot be used.
    """

    stream: str
    batch: int
    published_batch: int | None
    unpublished: int
    unpublished_seconds: float | None
    entries: int
    missing: int
    paused: str | None
    error: str | None
    groups: list[GroupStatus]


@dataclass(frozen=True, slots=True)
class Status:
    """How things stand.

    Attributes:
        relays: relays that are connected; None: it cannot be told through a pooler.
        memory_share: how full Redis is, 0 to 1; None: no limit is set.
        unsealed: by topic: committed events that no relay has seen yet (counted up to a million), and the oldest's age.
    """

    relays: int | None
    epoch: int
    batch: int
    memory_share: float | None
    unsealed: dict[str, tuple[int, float]]
    streams: list[StreamStatus]


def status(settings: RelaySettings, consumer_schema: str = "public") -> Status:
    """How things stand; changes nothing.

    Args:
        consumer_schema: where the consumers' tables are, if they are in the same database.

    Raises:
        SchemaError: the tables are missing or of another revision.
        psycopg.Error: PostgreSQL cannot be reached. Where Redis cannot, that is the error of every stream.
    """
    with opened(settings) as (store, connection, transport):
        newest, heads = store.newest(connection), store.heads(connection)
        share: float | None = None
        markers: Mapping[str, Marker | TransportError | None]
        try:
            share = transport.memory_share()
            markers = transport.markers([head.stream for head in heads]) if heads else {}
        except TransportUnavailable as error:
            markers = {head.stream: error for head in heads}
        full = share is not None and share > settings.max_memory_share
        dead = store.dead_letters(connection, consumer_schema)
        streams = []
        for head in heads:
            found, state = markers[head.stream], StreamState(0, 0, 0, [])
            if not isinstance(found, TransportError):
                try:
                    state = transport.inspect(head.stream)
                except TransportError as error:
                    found = error
            streams.append(_stream(store, connection, settings, head, found, state, full, dead))
        return Status(
            store.relays(connection), store.epoch(connection), newest.seq if newest else 0, share,
            store.unsealed(connection, _COUNTED), streams,
        )  # fmt: skip


def drop_group(settings: RelaySettings, name: str) -> list[str]:
    """Forget a group for good, in PostgreSQL and in Redis: nothing is kept for it any longer. Returns its streams.

    Raises:
        SettingsError: there is no such group.
    """
    streams: set[str] = set()
    with opened(settings) as (store, connection, transport):
        for _ in range(_TRIES):
            known = [group.stream for group in store.groups(connection) if group.name == name]
            if not known:
                break
            for stream in known:
                transport.drop_group(name, stream)
            streams.update(store.drop_group(connection, name))
            time.sleep(_PAUSE_SECONDS)  # a relay that saw it just before declares it once more
    if not streams:
        raise SettingsError(f"there is no group {name!r}; `outbox status` lists them")
    return sorted(streams)


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
def opened(settings: RelaySettings) -> Iterator[tuple[Store, Connection, StreamTransport]]:
    """What operations work with; closed at the end.

    Raises:
        SchemaError: the tables are missing or of another revision.
        psycopg.Error: PostgreSQL cannot be reached.
    """
    transport = StreamTransport.from_url(
        settings.redis_url.get_secret_value(),
        prefix=settings.key_prefix,
        timeout_seconds=settings.redis_timeout_seconds,
    )
    try:
        address = settings.database_url.get_secret_value()
        with schemas.connect(address, "outbox operations", autocommit=True) as connection:
            schemas.check_revision(connection, "outbox", settings.schema_name)
            yield Store(settings.schema_name), connection, transport
    finally:
        transport.close()


def _stream(
    store: Store,
    connection: Connection,
    settings: RelaySettings,
    head: StreamHead,
    found: Marker | TransportError | None,
    state: StreamState,
    full: bool,
    dead: Mapping[tuple[str, str], int] | None,
) -> StreamStatus:
    declared = {group.name: group.acked for group in store.groups(connection) if group.stream == head.stream}
    published = found.seq if isinstance(found, Marker) else None
    # What was lost and is acknowledged everywhere is not published again.
    after = published if published is not None else min(declared.values(), default=0)
    unpublished = store.events_between(connection, head.stream, after, head.seq)
    first = store.batches_after(connection, head.stream, after, 1) if unpublished else []
    unacked = store.events_between(connection, head.stream, min(declared.values(), default=0), after)
    long = min(unacked, state.length) > settings.max_stream_length
    ages = store.group_ages(connection)
    there = {group.name: group for group in state.groups}
    groups = []
    for name in sorted(declared.keys() | there.keys()):
        group = there.get(name)
        undelivered = None
        if group is not None and group.delivered is not None and published is not None:
            whole = store.events_between(connection, head.stream, group.delivered + 1, published)
            undelivered = group.undelivered + (whole if group.undelivered else 0)
        groups.append(
            GroupStatus(
                name, store.events_between(connection, head.stream, declared.get(name, 0), head.seq), undelivered, group.pending if group else 0, _age(group), declared.get(name, 0),
                ages.get((head.stream, name)), group.idle_seconds if group else None, group is not None,
                None if dead is None else dead.get((head.stream, name), 0),
            )
        )  # fmt: skip
    return StreamStatus(
        head.stream, head.seq, published, unpublished,
        store.sealed_age(connection, first[0][0].seq) if first else None,
        state.length, state.missing, "memory" if full else "length" if long else None,
        str(found) if isinstance(found, TransportError) else None, groups,
    )  # fmt: skip


def _age(group: GroupState | None) -> float | None:
    """Seconds since the group's oldest pending entry was added, by the milliseconds in its id."""
    if group is None or group.oldest_pending is None:
        return None
    return max(0.0, time.time() - int(group.oldest_pending.partition("-")[0]) / 1000)
