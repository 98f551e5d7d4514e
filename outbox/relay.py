"""The relay: seals batches of the outbox and brings every stream up to the newest one.

Two things happen, and each may die between any two statements:

* `_seal_next` reads the next page of the outbox and seals it in PostgreSQL. From then on it is the same for ever.
* `_bring` publishes a sealed batch to each stream it touches, if the stream stands where it should (compare-and-set).

A stream that does not (new, restarted, failed before, flushed, restored, published by another relay, replayed) is *behind*,
and there is one way to mend it, `_catch_up`: publish from the batch it shows up to the newest. Sealed batches that nobody
published are found in the same way. What is published twice, consumers recognise by its event id.

Any number of relays may run. Sealing decides: the one that loses a number stands by and looks again after a while.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psycopg

from outbox import schema as schemas
from outbox.envelope import Run, wire
from outbox.errors import (
    AlreadySealed,
    NotYetSafe,
    OutboxError,
    SettingsError,
    StaleRelay,
    TransportError,
    TransportUnavailable,
)
from outbox.retention import drop_old
from outbox.retry import Stop, database_away, until_done
from outbox.settings import RelaySettings
from outbox.store import (
    BEGINNING,
    KEY,
    POSITION,
    TOPIC,
    Batch,
    Connection,
    Row,
    Store,
    StreamPart,
    Window,
    reading,
)
from outbox.streams import Stream, Streams
from outbox.telemetry import (
    EventsLost,
    Observer,
    Published,
    Sealed,
    StandBy,
    StreamBehind,
    StreamFailed,
    WaitedInVain,
    guarded,
)
from outbox.transport import Marker, Part, Router, Transport
from outbox.transport.base import Wait, stream_of, topic_of

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PARTITION_SECONDS = 5.0
_RETENTION_SECONDS = 60.0
#: Longest turn of a stream that is brought up to date, and shortest of sealing and publishing what is new beside it.
_CATCH_UP_SECONDS = 0.25
#: Batches that are sealed while those before are published, and then go out together.
_AHEAD = 2
#: Entries of a stream that are compared with the outbox after PostgreSQL went back, and lost ids that are named.
_LOOKED_AT, _SHOWN = 100_000, 20
#: How long publishing to a stream may wait for that comparison.
_LOOKING_SECONDS = 5.0


@dataclass(slots=True)
class Counts:
    """What one round did.

    Attributes:
        sealed: events sealed into batches.
        published: events published for the first time.
        repaired: events published while bringing a stream up to date.
        behind: streams that could not be brought up to date in this round.
        standing_by: another relay is at work.
    """

    sealed: int = 0
    published: int = 0
    repaired: int = 0
    behind: int = 0
    standing_by: bool = False


@dataclass(slots=True)
class _Sealed:
    """A sealed batch in memory, and what it brings to each stream, ready for the wire."""

    batch: Batch
    parts: list[tuple[StreamPart, Sequence[Run]]]


class Relay:
    """Publishes the outbox of one schema of one database.

    Args:
        settings: see `outbox.settings.RelaySettings`.
        transport: where to publish; default: streams and queues at ``settings.redis_url``.
        observer: gets the measurements of `outbox.telemetry`.
    """

    def __init__(
        self, settings: RelaySettings, *, transport: Transport | None = None, observer: Observer | None = None
    ) -> None:
        self._settings = settings
        self._transport: Transport = transport or Router.from_url(
            settings.redis_url.get_secret_value(),
            prefix=settings.key_prefix,
            timeout_seconds=settings.redis_timeout_seconds,
            wait=Wait(settings.wait_replicas, settings.wait_aof, settings.wait_timeout_seconds),
        )
        self._observe = guarded(observer)
        self._store = Store(settings.schema_name)
        self._stopping = Stop()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="outbox-seal")
        self._connection: Connection | None = None
        self._process_id = 0  # that has opened it
        self._epoch = 1
        self._timeline: int | None = None
        self._seq = 0
        self._window = Window(BEGINNING, BEGINNING, 0, False)
        self._streams = Streams(settings, self._store, self._transport, self._observe)
        self._reported: dict[str, Marker] = {}
        self._too_large = False  # the outbox, for `_report_lost`
        self._loaded = False
        self._check_due = 0.0
        self._partitions_due = 0.0
        self._groups_due = 0.0
        self._unseen: list[str] = []  # streams still to be looked at in this turn
        self._retention_due = 0.0

    # --- running ---

    def run(self) -> None:
        """Publish until `stop` is called; backs off while PostgreSQL or Redis fails, and goes on when they do.

        Raises:
            SchemaError: the tables are missing or of another revision.
            SettingsError: a topic is set to another number of lanes than it has, a pooler is in statement mode, or Redis knows
                no WAITAOF.
        """
        pause = self._settings.poll_min_seconds
        try:
            while not self._stopping.is_set():
                counts = until_done(
                    self.run_once,
                    worth_retrying=_worth_retrying,
                    longest_pause_seconds=self._settings.backoff_max_seconds,
                    stopping=self._stopping,
                    failed=self._failed,
                    log=_log,
                    who="relay",
                )
                if counts is None:
                    break
                self._beat()
                if counts.standing_by:
                    pause = self._settings.check_seconds
                elif counts.sealed or counts.repaired:
                    pause = self._settings.poll_min_seconds
                else:
                    pause = min(max(pause, self._settings.poll_min_seconds) * 1.5, self._settings.poll_max_seconds)
                self._stopping.wait(pause)
        finally:
            self.close()

    def stop(self) -> None:
        """Finish the batch at hand and return from `run`; may be called from a signal handler or another thread."""
        self._stopping.set()

    def close(self) -> None:
        """Close the connections."""
        self._ahead.shutdown(wait=True)
        self._disconnect()
        self._transport.close()

    def _failed(self, _error: BaseException) -> None:
        self._disconnect()

    def _beat(self) -> None:
        if self._settings.heartbeat_file:
            Path(self._settings.heartbeat_file).touch()

    # --- one round ---

    def run_once(self) -> Counts:
        """Bring every stream up to date: look at the markers if that is due, then seal and publish what is new.

        Raises:
            psycopg.OperationalError: PostgreSQL cannot be reached or cannot work.
            TransportUnavailable: Redis cannot be reached or cannot work; NotYetSafe, one of them: see OUTBOX_WAIT_REPLICAS.
            StaleRelay: this database is not the one that publishes now.
            SchemaError, SettingsError: see `run`.
        """
        counts = Counts()
        try:
            self._load()
            self._streams.write_pauses(self._connect())
            if time.monotonic() >= self._check_due:
                self._check_due = time.monotonic() + self._settings.check_seconds
                self._streams.load_pauses(self._connect())
                self._streams.check_memory()
                self._check(counts)
                if any(stream.paused == "length" for stream in self._streams.values()):
                    self._groups_due = 0.0  # look now whether it can go on
            if time.monotonic() >= self._groups_due:
                self._look_after_streams(counts)
            self._drain(counts)
            self._streams.write_pauses(self._connect())
            if time.monotonic() >= self._retention_due:
                self._drop_old()
        except AlreadySealed:
            # Somebody else is at work. Everything believed is forgotten, and read again next time.
            self._observe(StandBy(self._seq + 1))
            self._loaded = False
            counts.standing_by = True
        except BaseException as error:
            self._loaded = False
            if isinstance(error, NotYetSafe):
                self._observe(WaitedInVain(error.code))
            raise
        counts.behind = sum(not stream.current for stream in self._streams.values())
        return counts

    def _drain(self, counts: Counts) -> None:
        """Seal and publish until nothing is new or a look at the streams is due; the next batches are read and sealed while
        those before are published."""
        until = max(min(self._check_due, self._groups_due), time.monotonic() + _CATCH_UP_SECONDS)
        sealed = self._seal_some(1)
        while sealed:
            counts.sealed += sum(some.batch.events for some in sealed)
            self._beat()
            last = self._stopping.is_set() or time.monotonic() >= until
            ahead = None if last else self._ahead.submit(self._seal_some, _AHEAD)
            try:
                self._publish(sealed, counts)
            finally:
                # The connection is used by one of both at a time: nothing below or above runs before this has returned.
                following = [] if ahead is None else _settled(ahead.result)
            if isinstance(following, BaseException):
                raise following
            for name in {part.stream for some in sealed for part, _ in some.parts}:
                if not self._streams[name].paused:
                    self._streams.check_length(self._connect(), name)
            self._streams.write_pauses(self._connect())
            sealed = following

    def _load(self) -> None:
        """Read where the outbox stands, after a start and whenever another relay may have moved it, or a pooler leads to
        another server."""
        connection = self._connect()
        if time.monotonic() >= self._partitions_due:
            self._make_partitions(connection)
        looking = time.monotonic() >= self._check_due
        if self._loaded and not (looking and self._store.timeline(connection) != self._timeline):
            return
        if self._store.is_foreign(connection):
            self._rebase(connection)
        self._timeline = self._store.timeline(connection)
        followed = self._store.follow_timeline(connection)
        self._epoch = self._store.epoch(connection)
        if followed:
            _log.warning(
                "PostgreSQL is on another timeline than before (a stand-by was promoted, or it was restored to a point in "
                "time): epoch %d begins, and relays that are left at the old server publish nothing more",
                self._epoch, extra={"action": "epoch_opened", "epoch": self._epoch},
            )  # fmt: skip
        newest = self._store.newest(connection)
        self._seq = newest.seq if newest else 0
        self._window = newest.rest if newest else Window(BEGINNING, BEGINNING, 0, False)
        self._streams.load(connection)
        self._transport.confirm(list(self._streams))  # before what the markers show is believed, and more published
        self._check_due = 0.0
        self._loaded = True

    def _make_partitions(self, connection: Connection) -> None:
        self._partitions_due = time.monotonic() + _PARTITION_SECONDS
        try:
            made = self._store.make_partitions(
                connection, self._settings.partition_rows, self._settings.partitions_ahead
            )
            if made:
                _log.info("made %d partitions of the outbox", made, extra={"action": "partitions_made"})
        except psycopg.errors.InsufficientPrivilege as error:
            self._partitions_due = time.monotonic() + 600
            _log.warning(
                "cannot make partitions of the outbox, events stay in the default one: %s",
                _one_line(error),
                extra={"action": "partitions_denied"},
            )

    def _rebase(self, connection: Connection) -> None:
        events = self._store.rebase(connection)
        _log.error(
            "this database was restored into another cluster, whose transaction ids are smaller: all %d events of the "
            "outbox are published again in a new epoch; consumers recognise what they have done",
            events, extra={"action": "rebased", "events": events},
        )  # fmt: skip

    # --- sealing ---

    def _seal_some(self, most: int) -> list[_Sealed]:
        """Seal what is new, `most` batches at most."""
        sealed: list[_Sealed] = []
        while len(sealed) < most and (following := self._seal_next()) is not None:
            sealed.append(following)
        return sealed

    def _seal_next(self) -> _Sealed | None:
        """Read the next page of the outbox and seal it; None if nothing is new."""
        connection, settings = self._connect(), self._settings
        if self._window.open:
            rows, done = self._store.page(connection, self._window, settings.batch_rows, settings.batch_bytes)
            if not rows:  # the batch before happened to end with the window
                self._window = replace(self._window, prev=self._window.snap, open=False)
        if not self._window.open:
            self._window = self._store.advance(connection, self._window)
            if not self._window.open:
                return None
            rows, done = self._store.page(connection, self._window, settings.batch_rows, settings.batch_bytes)
        if not rows:
            return None
        window = self._window
        streams = _by_stream(rows, settings.lanes)
        parts = [StreamPart(name, settings.lanes.get(topic_of(name), 1), len(some)) for name, some in streams.items()]
        batch = Batch(
            seq=self._seq + 1, token="", epoch=self._epoch, prev=window.prev, snap=window.snap,
            after=window.after, last=rows[-1][POSITION], done=done, events=len(rows),
        )  # fmt: skip
        batch = self._store.seal(connection, batch, parts, self._timeline)
        self._seq, self._window = batch.seq, batch.rest
        self._observe(Sealed(batch.seq, batch.events, len(parts)))
        # Made ready for the wire here, beside the publishing of the batch before.
        prepare, label = self._transport.prepare, self._marker(batch).label
        return _Sealed(batch, [(part, prepare(wire(streams[part.stream], label))) for part in parts])

    # --- publishing ---

    def _publish(self, sealed: Sequence[_Sealed], counts: Counts) -> None:
        """Publish batches just sealed to the streams that were up to date before them; the others catch up later.

        They go out in one round trip, so that one is on its way while Redis works on the one before; each expects the
        marker of the one before, so that none gets in where that one did not.

        Raises:
            TransportUnavailable: Redis refused it for every stream, so that it makes no sense to go on sealing.
        """
        parts: list[Part] = []
        expected: dict[str, Marker] = {}
        started = time.monotonic()
        for each in sealed:
            marker = self._marker(each.batch)
            for share, runs in each.parts:
                stream = self._streams.setdefault(share.stream, Stream(current=True))
                if stream.current:
                    parts.append(self._part(share, expected.get(share.stream, stream.marker), marker, runs))
                    expected[share.stream] = marker
                stream.seq, stream.token = marker.seq, marker.token
        try:
            answers = self._transport.publish(parts) if parts else []
        except TransportError:
            for part in parts:
                self._streams[part.stream].current = False
            raise
        refused: dict[str, TransportUnavailable] = {}
        for part, answer in zip(parts, answers, strict=True):
            stream = self._streams[part.stream]
            if answer == part.marker:
                stream.marker = answer
                self._streams.count(part)
                counts.published += part.events
                self._observe(Published(part.stream, part.marker.seq, part.events, False, time.monotonic() - started))
                continue
            stream.current = False
            self._check_due = 0.0
            if isinstance(answer, TransportError):
                self._blame(part.stream, answer)
                if isinstance(answer, TransportUnavailable):
                    refused[part.stream] = answer
        if expected and refused.keys() == expected.keys():
            raise next(iter(refused.values()))

    def _check(self, counts: Counts) -> None:
        """Look at every stream's marker, and mend what is behind."""
        if not self._streams:
            return
        markers = self._transport.markers(list(self._streams))
        self._compare_epochs({name: found for name, found in markers.items() if isinstance(found, Marker)})
        until = time.monotonic() + _CATCH_UP_SECONDS
        for name, found in markers.items():
            stream = self._streams[name]
            if isinstance(found, TransportError):
                stream.current = False
                self._blame(name, found)
                if isinstance(found, TransportUnavailable):
                    raise found
                continue
            current = found is not None and (found.seq, found.token) == (stream.seq, stream.token)
            if found is None and 0 < stream.seq <= stream.needed:
                current = True  # it lost nothing that anybody needs
            behind = not current or (found is not None and found.epoch != self._epoch)
            stream.current = not behind and not stream.paused
            stream.marker = found if current or stream.paused else stream.marker
            if stream.paused or not behind:
                continue
            if time.monotonic() >= until or self._stopping.is_set():
                stream.current = False
                self._check_due = 0.0
                continue
            self._streams[name] = self._streams.pop(name)  # next time it is the others' turn first
            self._catch_up(name, stream, found, counts)

    def _catch_up(
        self, name: str, stream: Stream, found: Marker | None, counts: Counts, after: int | None = None
    ) -> None:
        """Bring a stream from the batch that it shows, or from `after` on, up to the newest one.

        A marker that is not the expected one, at any step, is where to go on from: another relay may do the same, and
        Redis may lose data again meanwhile.
        """
        connection, started, repaired = self._connect(), time.monotonic(), 0
        if after is None:
            after = self._after(connection, name, found)
        self._observe(StreamBehind(name, after))
        while True:
            batches = self._store.batches_after(connection, name, after, 32)
            if not batches:
                break
            for batch, share in batches:
                rows = self._store.read_again(connection, batch, topic_of(name))
                rows = _by_stream(rows, {topic_of(name): share.lanes}).get(name, [])
                marker = self._marker(batch)
                part = self._part(share, found, marker, wire(rows, marker.label))
                (answer,) = self._transport.publish([part])
                self._beat()
                if isinstance(answer, TransportError):
                    stream.current = False
                    self._blame(name, answer)
                    if isinstance(answer, TransportUnavailable):
                        raise answer
                    return
                if answer != marker:
                    found = answer
                    after = self._after(connection, name, found)
                    break
                found, after = marker, batch.seq
                repaired += len(rows)
                self._streams.count(part)
                if len(rows) != share.events:
                    self._lost_rows(name, batch.seq, share.events - len(rows))
                self._observe(Published(name, batch.seq, len(rows), True, time.monotonic() - started))
                self._streams.check_length(connection, name)
                late = time.monotonic() - started >= _CATCH_UP_SECONDS
                if late or stream.paused or self._stopping.is_set():
                    # The others have their turn now; what is left of this one follows in the next round.
                    self._check_due = 0.0
                    counts.repaired += repaired
                    return
        counts.repaired += repaired
        if found is not None and found.seq > stream.seq:  # another relay sealed and published meanwhile
            stream.seq, stream.token = found.seq, found.token
        newest = Marker(self._epoch, stream.seq, stream.token)
        if found is not None and found != newest:  # nothing is left to publish, but the marker is to say so
            (answer,) = self._transport.publish([Part(name, found, newest, [])])
            if answer != newest:
                return
            found = newest
        stream.marker = found
        stream.current = True
        if repaired:
            _log.info(
                "stream %s brought up to batch %d: %d events published again or late",
                name, after, repaired, extra={"action": "stream_repaired", "stream": name, "events": repaired},
            )  # fmt: skip

    def _after(self, connection: Connection, name: str, found: Marker | None) -> int:
        """The batch after which a stream with marker `found` is to be published again.

        A stream that has no marker has lost everything; one of an earlier epoch may hold what PostgreSQL has lost, or what a
        ledger that went back with the outbox was acknowledged for. Of both, what the outbox says that every group has
        acknowledged is not published again: it was written down after the effects, so it did not survive without them.

        Raises:
            StaleRelay: see `_compare_epochs`.
        """
        if found is None:
            self._streams.load_groups(connection)
            return self._streams[name].needed
        self._compare_epochs({name: found})
        stream = self._streams[name]
        if not self._knows(connection, name, found):
            self._report_lost(connection, name, found)
        elif found.epoch == self._epoch or not stream.acked:
            return max(found.seq, stream.needed)
        return stream.needed

    def _compare_epochs(self, found: Mapping[str, Marker]) -> None:
        """Make sure that this database is the one that publishes: its epoch is to be the newest of all. It begins another
        one where PostgreSQL went back within the epoch, so that a stream holds a batch that this database does not know.

        Raises:
            StaleRelay: a stream is in an epoch that this database knows nothing of.
        """
        connection = self._connect()
        for name, marker in found.items():
            if marker.epoch > self._epoch:
                self._epoch = self._store.epoch(connection)
            if marker.epoch > self._epoch:
                raise StaleRelay(name, marker.epoch, self._epoch)
        for name, marker in found.items():
            if marker.epoch == self._epoch and not self._knows(connection, name, marker):
                self._store.open_epoch(connection, self._epoch + 1)
                self._epoch = self._store.epoch(connection)
                _log.error(
                    "stream %s has batch %d, which this database does not know (restored, or failed over to a stand-by that "
                    "was behind): epoch %d begins, and what is not acknowledged is published again",
                    name, marker.seq, self._epoch,
                    extra={"action": "epoch_opened", "stream": name, "epoch": self._epoch},
                )  # fmt: skip

    def _knows(self, connection: Connection, name: str, marker: Marker) -> bool:
        """Whether the marker's batch is one of this database, or older than those that it keeps."""
        stream = self._streams[name]
        if (marker.seq, marker.token) == (stream.seq, stream.token):
            return True
        if self._store.token(connection, marker.seq) == marker.token:
            return True
        oldest = self._store.oldest_seq(connection)
        return oldest is not None and marker.seq < oldest

    def _report_lost(self, connection: Connection, name: str, found: Marker) -> None:
        """Say which events of a stream are no longer in the outbox: they were published before PostgreSQL went back.

        The outbox has no index on ids; where it is too large to be read in `_LOOKING_SECONDS`, only that is said.
        """
        if self._reported.get(name) == found:
            return
        lost: list[str] | None = None
        try:
            published = self._transport.ids_after(name, self._streams[name].needed, _LOOKED_AT)
            if not self._too_large:
                with reading(connection, _LOOKING_SECONDS):
                    known = self._store.known(connection, published)
                lost = [str(event_id) for event_id in published if event_id not in known]
        except TransportUnavailable:
            raise
        except TransportError as error:
            self._blame(name, error)
            return
        except psycopg.errors.QueryCanceled:
            self._too_large = True
        self._reported[name] = found
        if lost == []:
            return
        number, shown = (None, []) if lost is None else (len(lost), lost[:_SHOWN])
        how_many = "perhaps" if number is None else f"{number}" if len(published) < _LOOKED_AT else f"at least {number}"
        _log.error(
            "stream %s holds events that PostgreSQL no longer has, %s: published before it went back, and perhaps applied. "
            "`consumer reconcile` lists, as extra, all that a consumer has applied of them. The newest: %s",
            name, how_many, ", ".join(shown) or "not looked for, the outbox is too large",
            extra={"action": "events_lost", "stream": name, "events": number, "ids": shown},
        )  # fmt: skip
        self._observe(EventsLost(name, number))

    # --- groups, retention ---

    def _marker(self, batch: Batch) -> Marker:
        return Marker(self._epoch, batch.seq, batch.token)

    def _part(self, share: StreamPart, expected: Marker | None, marker: Marker, runs: Sequence[Run]) -> Part:
        return Part(share.stream, expected, marker, runs, share.lanes, self._settings.retention_seconds)

    def _look_after_streams(self, counts: Counts) -> None:
        """See how far the groups of every stream are, and publish again what strangers took away from under them.

        A turn of `_CATCH_UP_SECONDS`; where there are more streams, the rest of them follow in the next rounds.
        """
        connection, until = self._connect(), time.monotonic() + _CATCH_UP_SECONDS
        if not self._unseen:
            self._unseen = self._streams.leave_age(connection)
            self._streams.load_groups(connection)
        while self._unseen:
            self._look_after(connection, self._unseen.pop(), counts)
            if time.monotonic() >= until or self._stopping.is_set():
                break
        if not self._unseen:
            self._groups_due = time.monotonic() + self._settings.trim_seconds
            self._streams.load_groups(connection)

    def _look_after(self, connection: Connection, name: str, counts: Counts) -> None:
        stream = self._streams.get(name)
        try:
            if stream is None:
                self._streams.trim_idle(name)
                return
            missing = self._streams.inspect(connection, name, self._epoch, self._timeline)
        except TransportUnavailable:
            raise
        except TransportError as error:
            self._blame(name, error)
            return
        if missing and stream.marker is not None and not stream.paused:
            self._replace_missing(name, stream, missing, counts)
        was = stream.paused
        self._streams.check_length(connection, name)
        if was and not stream.paused:
            self._check_due = 0.0

    def _replace_missing(self, name: str, stream: Stream, missing: int, counts: Counts) -> None:
        """Publish again what some group may not have seen of the entries that a stranger deleted."""
        _log.error(
            "%d entries of stream %s were deleted by a stranger (XDEL, XTRIM, MAXLEN, eviction): publishing again what is "
            "not acknowledged",
            missing, name, extra={"action": "entries_missing", "stream": name, "missing": missing},
        )  # fmt: skip
        found = self._transport.markers([name])[name]  # what is believed may be old, where another relay publishes
        if not isinstance(found, Marker):
            return
        stream.marker = found
        self._streams.load_groups(self._connect())  # with those that were found just now
        if stream.needed < found.seq:
            self._catch_up(name, stream, found, counts, after=stream.needed)  # its first batch begins the count anew
        else:
            self._transport.publish([Part(name, found, found, [])])  # nobody needs it: only count anew

    def _drop_old(self) -> None:
        """See `outbox.retention`: up to the batch that every stream has and every group has acknowledged."""
        self._retention_due = time.monotonic() + _RETENTION_SECONDS
        connection = self._connect()
        seq = min((stream.settled for stream in self._streams.values()), default=float("inf"))
        if seq >= self._seq and not self._window.open:
            settled, before = self._window, self._seq
        elif batch := self._store.batch_up_to(connection, int(min(seq, self._seq))):
            settled, before = batch.rest, batch.seq
        else:
            return
        try:
            dropped = drop_old(self._store, connection, settled, before, self._settings.retention_seconds)
        except psycopg.errors.InsufficientPrivilege as error:
            self._retention_due = time.monotonic() + 600
            _log.warning(
                "cannot drop what is older than OUTBOX_RETENTION_SECONDS: %s", _one_line(error),
                extra={"action": "retention_denied"},
            )  # fmt: skip
            return
        if dropped.partitions or dropped.rows or dropped.batches:
            self._retention_due = 0.0  # there may be more
            _log.info(
                "dropped partitions %s, %d rows of the default one, %d batches",
                ", ".join(dropped.partitions) or "none", dropped.rows, dropped.batches,
                extra={"action": "dropped_old", "partitions": len(dropped.partitions)},
            )  # fmt: skip

    def _lost_rows(self, name: str, seq: int, rows: int) -> None:
        _log.error(
            "batch %d of stream %s lacks %d events that were sealed: somebody deletes rows of the outbox",
            seq, name, rows, extra={"action": "rows_missing", "stream": name, "batch": seq, "rows": rows},
        )  # fmt: skip

    def _blame(self, name: str, error: TransportError) -> None:
        _log.warning(
            "stream %s cannot be published to: %s", name, error, extra={"action": "stream_failed", "stream": name}
        )
        self._observe(StreamFailed(name, error.code))

    # --- the connection ---

    def _connect(self) -> Connection:
        if self._connection is not None and self._process_id != os.getpid():
            self._connection = None  # it is the parent's
            raise SettingsError("a Relay that has begun before a fork cannot go on after it: make one in each process")
        if self._connection is None or self._connection.closed:
            self._connection = schemas.connect(
                self._settings.database_url.get_secret_value(), self._store.application, autocommit=True
            )
            self._process_id = os.getpid()
            schemas.check_revision(self._connection, "outbox", self._settings.schema_name)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None and self._process_id == os.getpid():
            self._connection.close()
        self._connection = None


def _by_stream(rows: list[Row], lanes: Mapping[str, int]) -> dict[str, list[Row]]:
    """The rows of each stream, in their order."""
    topics = {row[TOPIC] for row in rows}
    if len(topics) == 1 and lanes.get(rows[0][TOPIC], 1) == 1:
        return {rows[0][TOPIC]: rows}
    streams: dict[str, list[Row]] = {}
    for row in rows:
        streams.setdefault(stream_of(row[TOPIC], row[KEY], lanes.get(row[TOPIC], 1)), []).append(row)
    return streams


def _settled(result: Callable[[], T]) -> T | BaseException:
    try:
        return result()
    except BaseException as error:  # handed to the thread that waits
        return error


def _worth_retrying(error: BaseException) -> bool:
    return database_away(error) or (isinstance(error, OutboxError) and error.retryable)


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
