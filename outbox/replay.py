"""Publish events of the outbox once more, with the same event ids: to everybody, or to one consumer alone.

To everybody: entries are added to the streams behind what is there; who has processed them recognises them. To one
consumer: entries go to a side stream of each topic (`outbox.transport.base.side_stream`), which only that consumer reads.

A replay is a loop of small steps, each of which may be the last: it says how far it is, and goes on from there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from outbox.envelope import Run, wire
from outbox.errors import SettingsError, TransportError
from outbox.settings import RelaySettings
from outbox.store import KEY, POSITION, TOPIC, Connection, Row, Store
from outbox.transport import Marker, Part, Transport
from outbox.transport.base import side_stream, stream_of

#: Events in one step.
_STEP = 500
_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which events; what is None does not matter. Times are those of recording (``created_at``), and aware."""

    topic: str | None = None
    key: str | None = None
    type: str | None = None
    ids: tuple[uuid.UUID, ...] | None = None
    since: datetime | None = None
    until: datetime | None = None
    after_position: int = 0

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is not None and value.tzinfo is None:
                raise SettingsError(f"{name}: must carry a time zone, e.g. 2026-01-31T12:00:00+03:00")


@dataclass(frozen=True, slots=True)
class Step:
    """How far a replay is: `events` published so far, the last of them at `position`."""

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
    events_per_second: float | None = None,
) -> Iterator[Step]:
    """Publish the selected events again, oldest first, a step at a time; stop iterating to stop.

    Args:
        consumer: the only one to get them; None: every group of the stream.
        events_per_second: not faster than that; None: as fast as it goes.

    Raises:
        TransportError: Redis does not take them; go on later with ``after_position`` of the last step.
    """
    begun, events, after = time.monotonic(), 0, selection.after_position
    while True:
        rows = store.select(connection, _filter(selection) | {"after": after, "limit": _STEP})
        if not rows:
            return
        for stream, some in _by_stream(rows, settings, consumer).items():
            _append(transport, settings, stream, some)
        events, after = events + len(rows), int(rows[-1][POSITION])
        yield Step(events, after)
        if events_per_second:
            time.sleep(max(0.0, begun + events / events_per_second - time.monotonic()))


def count(store: Store, connection: Connection, selection: Selection) -> int:
    """How many events are selected."""
    return store.count(connection, _filter(selection) | {"after": selection.after_position})


def _filter(selection: Selection) -> dict[str, object]:
    return {
        "topic": selection.topic, "key": selection.key, "type": selection.type,
        "ids": None if selection.ids is None else list(selection.ids),
        "since": selection.since, "until": selection.until,
    }  # fmt: skip


def _by_stream(rows: list[Row], settings: RelaySettings, consumer: str | None) -> dict[str, list[Row]]:
    streams: dict[str, list[Row]] = {}
    for row in rows:
        topic = row[TOPIC]
        stream = side_stream(topic, consumer) if consumer else stream_of(topic, row[KEY], settings.lanes.get(topic, 1))
        streams.setdefault(stream, []).append(row)
    return streams


def _append(transport: Transport, settings: RelaySettings, stream: str, rows: list[Row]) -> None:
    """Add entries and leave the marker as it is, also its count of missing ones; repeated while a relay moves it."""
    runs: list[Run] = wire(rows)
    for _ in range(_TRIES):
        found = transport.markers([stream])[stream]
        if isinstance(found, TransportError):
            raise found
        marker = found or Marker(0, 0, "replay")  # of a side stream, which no relay looks after
        (answer,) = transport.publish([
            Part(
                stream, found, marker, runs, settings.lanes.get(rows[0][TOPIC], 1), settings.retention_seconds,
                append=found is not None,
            )
        ])  # fmt: skip
        if isinstance(answer, TransportError):
            raise answer
        if answer == marker:
            return
    raise TransportError(f"stream {stream} is too busy to add to; try again", "BUSY")
