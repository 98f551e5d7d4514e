"""Publish events of the outbox once more, with the same event ids: to everybody, or to one consumer alone.

To everybody: entries are added to the streams behind what is there; who has processed them recognises them. To one
consumer: entries go to a side stream of each topic (`outbox.transport.base.side_stream`), which only that consumer reads. A queue
has one consumer, so that both is the same: jobs that are not outstanding are added to it.

A replay is a loop of small steps, each of which may be the last: it says how far it is, and goes on from there. It is not faster
than asked, waits while Redis is away, full or has enough unacknowledged entries, and begins anew where Redis has forgotten
what was published again: nobody else would bring it.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice

from outbox.envelope import is_queue, wire
from outbox.errors import SettingsError, StreamUnusable, TransportError
from outbox.retry import Stop, until_done
from outbox.settings import RelaySettings
from outbox.store import KEY, POSITION, TOPIC, Chosen, Connection, Row, Store
from outbox.transport import Marker, Part, Transport
from outbox.transport.base import CONSUMER_NAME, side_stream, stream_of

_log = logging.getLogger(__name__)

#: Default of the rate: half of what one consumer process applies, so that what is new is not held up for long.
EVENTS_PER_SECOND = 2000.0
#: Events in one step, at most.
_STEP = 500
#: Positions that are put in order together.
_SORTED = 100_000
_TRIES = 20
#: Pause between looks at a full stream, and after how long a length is looked at anew.
_LOOK_SECONDS, _LENGTH_SECONDS = 0.5, 5.0
#: Memory goes on being full until so much less of it is used, and a stream until a tenth is gone: as for the relay.
_RESUME_BELOW = 0.05
#: What a server says of a stream that waiting does not mend.
_LASTING = frozenset({"WRONGTYPE", "NOPERM", "CROSSSLOT", "ERR"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which events; what is None does not matter.

    Attributes:
        ids: event ids.
        since, until: when they were recorded (``created_at``), the end not included; aware.
        batches: numbers of the first and the last sealed batch.
        after_position: only events at later positions.
        up_to_position: and not beyond this one; without it, or another end, what is recorded meanwhile is published, too.
    """

    topic: str | None = None
    key: str | None = None
    type: str | None = None
    ids: tuple[uuid.UUID, ...] | None = None
    since: datetime | None = None
    until: datetime | None = None
    batches: tuple[int, int] | None = None
    after_position: int = 0
    up_to_position: int | None = None

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is not None and value.tzinfo is None:
                raise SettingsError(f"{name}: must carry a time zone, e.g. 2026-01-31T12:00:00+03:00")


@dataclass(frozen=True, slots=True)
class Step:
    """How far a replay is: `events` published so far, the last of them at `position`. Fewer than before: it began anew."""

    events: int
    position: int


def replay(
    store: Store,
    connection: Connection,
    transport: Transport,
    settings: RelaySettings,
    selection: Selection,
    *,
    consumer: str | None = None,
    events_per_second: float | None = EVENTS_PER_SECOND,
    stopping: Stop | None = None,
) -> Iterator[Step]:
    """Publish the selected events again, oldest first, a step at a time; stop iterating to stop.

    Args:
        consumer: the only one to get them; None: every group of the stream.
        events_per_second: not faster than that; None or 0: as fast as it goes.
        stopping: ends it between two steps, also while it waits.

    Raises:
        SettingsError: no consumer can have that name; or see `survey`.
        StreamUnusable: a stream cannot be used; go on later with ``after_position`` of the last step.
        psycopg.Error: PostgreSQL cannot be reached; as well.
    """
    parameters = _filter(store, connection, selection)
    publisher = _Publisher(store, connection, transport, settings, consumer, events_per_second or 0, stopping or Stop())
    return publisher.steps(lambda: publisher.pages(parameters), selection.after_position)


def replay_positions(
    store: Store,
    connection: Connection,
    transport: Transport,
    settings: RelaySettings,
    positions: Callable[[], Iterable[int]],
    *,
    consumer: str | None = None,
    events_per_second: float | None = EVENTS_PER_SECOND,
    stopping: Stop | None = None,
) -> Iterator[Step]:
    """The same for the events at these positions, of any number; every 100,000 of them oldest first.

    Args:
        positions: called once more where it begins anew.
    """
    publisher = _Publisher(store, connection, transport, settings, consumer, events_per_second or 0, stopping or Stop())

    def pages() -> Iterator[list[Row]]:
        rest = iter(positions())
        while some := sorted(islice(rest, _SORTED)):
            for start in range(0, len(some), _STEP):
                yield from publisher.pages(_filter(store, connection, Selection(), some[start : start + _STEP]))

    return publisher.steps(pages, 0)


def check_consumer(name: str) -> None:
    """See that there can be such a consumer: nobody else reads or trims what is published for it alone.

    Raises:
        SettingsError: there cannot.
    """
    if not CONSUMER_NAME.fullmatch(name):
        raise SettingsError(f"consumer name: must match {CONSUMER_NAME.pattern}, is {name!r}")


def survey(store: Store, connection: Connection, selection: Selection) -> list[Chosen]:
    """What is selected, by topic.

    Raises:
        SettingsError: a batch is not there.
    """
    return store.chosen(connection, _filter(store, connection, selection))


def _filter(
    store: Store, connection: Connection, selection: Selection, positions: list[int] | None = None
) -> dict[str, object]:
    """The parameters of `Store.select`."""
    found = asdict(selection) | {"after": selection.after_position, "positions": positions, "prev": None}
    found |= {"ids": None if selection.ids is None else list(selection.ids)}
    names = ("prev", "snap", "batch_after", "last_prev", "last_snap", "last")
    if selection.batches is None:
        return found | dict.fromkeys(names)
    ends = [store.batch_up_to(connection, number) for number in selection.batches]
    first, last = ends
    if first is None or last is None or (first.seq, last.seq) != selection.batches or first.seq > last.seq:
        newest, oldest = store.newest(connection), store.oldest_seq(connection)
        there = f"there are batches {oldest} to {newest.seq}" if newest else "there is no batch"
        raise SettingsError(f"batches: must be the first and the last of a range that is there; {there}")
    values = (first.prev, first.snap, first.after, last.prev, last.snap, last.last)
    return found | dict(zip(names, values, strict=True))


class _Lost(Exception):
    """Redis has forgotten what this replay has published."""


class _Publisher:
    """Publishes pages of rows.

    What was published by nobody but us is lost for good if Redis forgets it, and only a marker tells: a side stream's counts
    the steps of whoever replays to it, and its token begins anew with the stream. Another stream's is the relay's, which mends
    it after a loss, and such steps are counted beside it. Neither count goes back but with the stream that it stands beside. The
    rest of the token is our own: of two that add a step at once, neither takes the other's marker for its own.
    """

    def __init__(
        self,
        store: Store,
        connection: Connection,
        transport: Transport,
        settings: RelaySettings,
        consumer: str | None,
        events_per_second: float,
        stopping: Stop,
    ) -> None:
        if consumer is not None:
            check_consumer(consumer)
        self._store, self._connection, self._transport, self._settings = store, connection, transport, settings
        self._consumer, self._rate, self._stopping = consumer, events_per_second, stopping
        self._name = _random()
        self._due = 0.0
        self._waiting: str | None = None
        self._lengths: dict[str, tuple[int, float]] = {}  # with what was added since, and when it was looked at
        self._seen: dict[str, tuple[str | int | None, int]] = {}  # what the count began with, and the last step of ours

    def pages(self, parameters: dict[str, object]) -> Iterator[list[Row]]:
        """Read what is selected: a second's worth of rows at most, and bounded in bytes like a batch."""
        limit = max(1, int(min(_STEP, self._rate or _STEP)))
        parameters = parameters | {"limit": limit, "bytes": self._settings.batch_bytes}
        while rows := self._store.select(self._connection, parameters):
            yield rows
            parameters["after"] = rows[-1][POSITION]

    def steps(self, pages: Callable[[], Iterator[list[Row]]], start: int) -> Iterator[Step]:
        done = False
        while not done:
            events = 0
            try:
                for rows in pages():
                    if self._stopping.wait(max(0.0, self._due - time.monotonic())) or not self._publish(rows):
                        return
                    events += len(rows)
                    if self._rate:  # what was not done while it waited is not made up for
                        self._due = max(self._due, time.monotonic()) + len(rows) / self._rate
                    yield Step(events, int(rows[-1][POSITION]))
                done = bool(self._patiently(self._check))
                if not done:
                    return
            except _Lost as error:
                _log.warning(
                    "%s has lost what was published again; it begins anew", error, extra={"action": "replay_lost"}
                )
                self._seen.clear()
                self._lengths.clear()
                yield Step(0, start)

    def _publish(self, rows: list[Row]) -> bool:
        """Add a page to its streams, whenever they have room; False: to stop first."""
        streams: dict[str, list[Row]] = {}
        for row in rows:
            topic = row[TOPIC]
            lanes = self._settings.lanes.get(topic, 1)
            alone = self._consumer if not is_queue(topic) else None
            stream = side_stream(topic, alone) if alone else stream_of(topic, row[KEY], lanes)
            streams.setdefault(stream, []).append(row)
        for stream, some in streams.items():
            if not self._patiently(lambda: self._has_room(stream) and self._append(stream, some)):  # noqa: B023  # called here
                return False
        return True

    def _patiently(self, call: Callable[[], bool]) -> bool | None:
        return until_done(
            call, worth_retrying=_worth_retrying, longest_pause_seconds=self._settings.backoff_max_seconds,
            stopping=self._stopping, failed=lambda _: None, log=_log, who="replay",
        )  # fmt: skip

    # --- publishing ---

    def _append(self, stream: str, rows: list[Row]) -> bool:
        """Add a step. A relay's marker stays as it is, also its count of missing ones; repeated while somebody moves it."""
        lanes, keep = self._settings.lanes.get(rows[0][TOPIC], 1), self._settings.retention_seconds
        alone = self._is_side(stream)
        for _ in range(_TRIES):
            found, (began, steps) = self._look(stream)
            ours = Marker(0, steps + 1, f"{began}-{self._name}")
            marker = ours if alone else found or Marker(0, 0, self._name)
            # Where no relay has been, a marker comes first: steps are counted beside one.
            runs = wire(rows, marker.label if marker.seq else None) if alone or found else []
            part = Part(stream, found, marker, runs, lanes, keep, append=found == marker)
            (answer,) = self._transport.publish([part])
            if isinstance(answer, TransportError):
                raise answer
            if answer == marker and runs:
                self._seen[stream] = began, steps + 1
                length, looked = self._lengths[stream]
                self._lengths[stream] = length + len(rows), looked
                return True
        raise TransportError(f"stream {stream} is too busy to add to", "BUSY")

    def _is_side(self, stream: str) -> bool:
        return bool(self._consumer) and not is_queue(stream)

    def _check(self) -> bool:
        for stream in self._seen:
            self._look(stream)
        return True

    def _look(self, stream: str) -> tuple[Marker | None, tuple[str | int | None, int]]:
        """The marker, and the count of steps.

        Raises:
            _Lost: it is not the one that counted ours.
        """
        found = self._transport.markers([stream])[stream]
        if isinstance(found, TransportError):
            raise found
        count: tuple[str | int | None, int] = (None, 0)
        alone = self._is_side(stream)
        if found and alone:
            count = found.token.partition("-")[0], found.seq
        elif found:
            count = self._transport.info(stream).replayed or count
        elif alone:
            count = _random(), 0
        began, steps = self._seen.get(stream, (None, 0))  # of the first step it is not yet known what it began
        if began not in (None, count[0]) or count[1] < steps:
            raise _Lost(f"stream {stream}")
        return found, count

    # --- back-pressure ---

    def _has_room(self, stream: str) -> bool:
        """Wait until there is room in the stream, and say so; False: to stop first."""
        while reason := self._full(stream):
            if reason != self._waiting:
                _log.warning("replay waits: %s", reason, extra={"action": "replay_waits", "stream": stream})
            self._waiting = reason
            if self._stopping.wait(_LOOK_SECONDS):
                return False
        if self._waiting:
            self._waiting = None
            _log.warning("replay goes on", extra={"action": "replay_goes_on", "stream": stream})
        return True

    def _full(self, stream: str) -> str | None:
        """Why nothing more is to be added to the stream, if so."""
        share, most = self._transport.memory_share(), self._settings.max_memory_share
        if share is not None and share > most - (_RESUME_BELOW if self._waiting else 0):
            return "Redis uses more than OUTBOX_MAX_MEMORY_SHARE of its memory"
        limit = self._settings.max_stream_length
        if self._waiting:
            limit -= limit // 10
        length, looked = self._lengths.get(stream, (limit + 1, 0.0))
        if length > limit or time.monotonic() - looked > _LENGTH_SECONDS:
            length = self._transport.inspect(stream).length
            if length > limit:  # what every group has acknowledged does not count, and goes
                length = self._transport.inspect(stream, groups=self._groups(stream), keep_seconds=0).length
            self._lengths[stream] = length, time.monotonic()
        if length > limit:
            return f"stream {stream} has more than OUTBOX_MAX_STREAM_LENGTH unacknowledged entries"
        return None

    def _groups(self, stream: str) -> list[str]:
        if self._consumer and self._is_side(stream):
            return [self._consumer]
        return [group.name for group in self._store.groups(self._connection) if group.stream == stream]


def _random() -> str:
    return secrets.token_hex(8)


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransportError) and not (isinstance(error, StreamUnusable) and error.code in _LASTING)
