"""What both sides measure: small frozen records handed to one observer.

An observer is any callable that takes a measurement. A broken observer cannot break the work: its error is logged once
a minute at most. Measurements carry names and numbers, never payloads, ids of events or addresses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The relay sealed a batch of `events` for `streams`."""

    batch: int
    events: int
    streams: int


@dataclass(frozen=True, slots=True)
class Published:
    """The relay published `events` of one batch to one stream; `repair` if they had been there before or failed then."""

    stream: str
    batch: int
    events: int
    repair: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """Publishing to one stream failed for Redis' reasons; nothing is counted against an event."""

    stream: str
    code: str


@dataclass(frozen=True, slots=True)
class WaitedInVain:
    """What was published was not as safe in time as OUTBOX_WAIT_… asks; the relay publishes nothing more before it is."""

    code: str


@dataclass(frozen=True, slots=True)
class StreamBehind:
    """A stream lacks batches that were sealed: it is new, it failed, or Redis lost data. `after` is the last it has."""

    stream: str
    after: int


@dataclass(frozen=True, slots=True)
class StreamPaused:
    """The relay pauses a stream, because of its length or of Redis' memory; `reason` None: it goes on."""

    stream: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Trimmed:
    """`entries` of a stream that every group had acknowledged were trimmed."""

    stream: str
    entries: int


@dataclass(frozen=True, slots=True)
class EventsLost:
    """A stream holds `events` that PostgreSQL no longer has: it went back (failover, restore) after they were published.

    None: it may hold some; the outbox was too large to look.
    """

    stream: str
    events: int | None


@dataclass(frozen=True, slots=True)
class StandBy:
    """Another relay sealed batch `batch` first."""

    batch: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A consumer finished a batch of deliveries; `counts` by outcome (see `consumer.process.Outcome`)."""

    consumer: str
    counts: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """A consumer took over `deliveries` of others, and found `missing` entries deleted while pending."""

    consumer: str
    deliveries: int
    missing: int


Measurement = (
    Sealed
    | Published
    | StreamFailed
    | WaitedInVain
    | StreamBehind
    | StreamPaused
    | Trimmed
    | EventsLost
    | StandBy
    | Outcomes
    | Claimed
)
Observer = Callable[[Measurement], None]


def guarded(observer: Observer | None) -> Observer:
    """`observer` made safe to call: its errors are logged, once a minute at most, and swallowed."""
    if observer is None:
        return lambda measurement: None
    muted_until = 0.0

    def observe(measurement: Measurement) -> None:
        nonlocal muted_until
        try:
            observer(measurement)
        except Exception:
            if time.monotonic() >= muted_until:
                muted_until = time.monotonic() + 60
                _log.exception("observer failed", extra={"action": "observer_failed"})

    return observe
