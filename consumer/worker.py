"""The loop of a consumer: read, process, acknowledge; take over what others left; drain on SIGTERM.

Nothing is acknowledged before its outcome is known. When PostgreSQL is away, the deliveries at hand are kept and run again;
when Redis is away, what is processed is acknowledged later (or delivered again, and recognised by the ledger).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psycopg
import sqlalchemy

from consumer import calls
from consumer.blame import brief
from consumer.claims import Claims, Recovery
from consumer.handlers import Consumer
from consumer.inheritance import SUSPECT_AFTER, settle, tell_ended
from consumer.ledger import Ledger, Waiting
from consumer.notes import Note, Will
from consumer.process import DatabaseUnavailable, Outcome, Processor, driver_connection
from consumer.settings import ConsumerSettings
from consumer.work import Item, Limits
from outbox import schema as schemas
from outbox.errors import GroupLost, SettingsError, StreamUnusable, TransportError, TransportUnavailable
from outbox.retry import Stop, database_away, until_done
from outbox.telemetry import Claimed, Observer, Outcomes, guarded
from outbox.transport import Delivery, Router, Transport
from outbox.transport.base import StreamInfo, side_stream, streams_of

_log = logging.getLogger(__name__)

_DAY = 86_400
_PARTITION_SECONDS = 60.0
_LANES_SECONDS = 10.0
#: Rows of the ledger deleted at a time, once a minute, or after a pause while there are more.
_DELETED = 5000
_MORE_SECONDS = 2.0
#: And dead letters, each of which may have a megabyte.
_DEAD_DELETED = 500
_SIDE_SECONDS = 60.0
#: How often it is looked for events whose handler is here now, and for how much is put aside and waits.
_WAKE_SECONDS = 5.0
_TROUBLES_SECONDS = 5.0
#: How often it is said again that the consumer is paused.
_REMIND_SECONDS = 60.0
#: How long before the oldest event that may come again rows of the ledger stay, for clocks that differ.
MARGIN_SECONDS = _DAY
#: How often names are looked for that processes left in the group, and after how long idle they are taken for left.
_NAMES_SECONDS = 60.0
_LEFT_SECONDS = 3600.0
_BEAT_SECONDS = 1.0
#: Until the next look at what dead workers have left: where a transaction holds it, and once more after all is settled.
_HELD_SECONDS, _AGAIN_SECONDS = 0.05, 1.0
_PATIENCE_SECONDS = 2.0
#: While there is other work, events that may end their process come no more often than this: each may cost a new process.
_SUSPECTS_SECONDS = 5.0
#: Pause between looks for events that have waited, while there is other work.
_LEASE_SECONDS = 0.25
#: After the end of a process batches have a part of their size, and grow by an eighth each: the next such event takes less along.
_CAREFUL = 4
#: Jobs that are claimed at once take about this long together, by the mean of late; what has not started when they take so much
#: longer goes back, so that a slow one holds no others back.
_PREFETCH_SECONDS, _OVERRUN_SECONDS = 0.1, 1.0
#: Weight of the last batch in that mean.
_LATE = 0.25
#: Longest wait in one read, so that a request to stop is noticed.
_STOP_SECONDS = 1.0
#: Deliveries are asked for by number, and what they have of bytes is not known before: so few at first, then at most four
#: times as many as the last time, and so many that all streams together bring about this much.
_FIRST_COUNT, _READ_BYTES = 16, 16 << 20
#: Pause between looks for deliveries to take over, in durations of the last look: a server whose pending lists are long
#: is busy with them for a fiftieth of the time at most.
_LOOK_PAUSE = 50.0


class Worker:
    """Runs one consumer in this thread.

    Args:
        consumer: the handlers.
        settings: see `consumer.settings.ConsumerSettings`.
        transport: where to read; default: streams and queues at ``settings.redis_url``.
        engine: SQLAlchemy engine over psycopg for the ledger and the handlers; default: ``settings.database_url``.
        observer: gets the measurements of `outbox.telemetry`.
        note: where it says what it is at.
        wills: of those before it, which it settles first.
        suspects: whether it runs events that may have ended their process.

    Raises:
        SettingsError: an address cannot be used.
    """

    def __init__(
        self,
        consumer: Consumer,
        settings: ConsumerSettings,
        *,
        transport: Transport | None = None,
        engine: sqlalchemy.Engine | None = None,
        observer: Observer | None = None,
        note: Note | None = None,
        wills: Sequence[Will] = (),
        suspects: bool = True,
    ) -> None:
        self._process_id = os.getpid()
        self._consumer = consumer
        self._settings = settings
        self._transport: Transport = transport or Router.from_url(
            settings.redis_url.get_secret_value(),
            prefix=settings.key_prefix,
            timeout_seconds=settings.redis_timeout_seconds,
            block_seconds=settings.block_seconds,
            claim_seconds=settings.claim_seconds,
        )
        self._own_engine = engine is None
        self._engine = engine or schemas.engine(
            settings.database_url.get_secret_value(),
            f"consumer {consumer.name}",
            {"prepare_threshold": _prepare_threshold(settings)},
            pool_size=1,
            max_overflow=1,
        )
        self._observe = guarded(observer)
        # Who waits for a frozen process must not seem frozen himself.
        patience = min(_PATIENCE_SECONDS, settings.claim_seconds / 4)
        limits = Limits(settings.max_deliveries, settings.no_handler_seconds, settings.gap_seconds)
        starting = note.running if note else lambda _: None  # nobody reads a private one
        self._note, self._wills, self._lease_suspects = note or Note.private(), list(wills), suspects
        self._lease_suspects_due = time.monotonic() + _SUSPECTS_SECONDS
        self._idle = False  # there was nothing new the last time
        self._wills_due, self._wills_seen = 0.0, False
        self._processor = Processor(consumer, self._engine, settings.schema_name, patience, limits, starting)
        self._ledger = Ledger(consumer.name, settings.schema_name)
        self._name = settings.process_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._note.begin(self._name)
        self._streams = [
            stream for topic in consumer.topics for stream in streams_of(topic, settings.lanes.get(topic, 1))
        ]
        if not consumer.has_queues:
            self._streams += [side_stream(topic, consumer.name) for topic in consumer.topics]
        self._most = max(1, settings.batch_size // (_CAREFUL if wills else 1))  # in one batch
        self._count = (
            1 if consumer.has_queues else min(_FIRST_COUNT, settings.batch_size)
        )  # of each stream, in one read
        self._job_seconds = 0.0  # mean of late; 0: not known
        self._began, self._has_run = 0.0, False  # the batch, and something of it
        self._patient = False  # however long the batch takes
        self._recovery = Recovery(self._transport, consumer.name, self._name, settings.claim_seconds)
        self._claims = Claims(self._transport, consumer.name, self._name, settings.claim_seconds, self._held)
        self._stopping = Stop()
        self._usable: list[str] | None = None  # None: the groups are to be made
        self._pooling_checked = False
        self._opened = False  # our name may be in them
        self._away = False  # Redis did not answer the last time
        self._at_hand: list[Delivery] = []  # what is in work among it
        self._in_work: list[Delivery] = []
        self._suspects: list[Delivery] = []  # run alone, after all others; counted as delivered when they are run
        self._suspects_due = 0.0
        self._suspect_ran = False
        self._unacknowledged: list[Item] = []
        self._others: list[Callable[[], list[Delivery]]] = [self._claim_others, self._lease]
        self._others_turn = False
        self._look_seconds = 0.0
        self._check_due = 0.0
        self._partitions_due = self._note.upkeep_due
        self._forget_due = self._names_due = self._partitions_due
        self._lanes_due = 0.0
        self._unread: dict[str, float] = {}  # streams that cannot be read, and when that is said again
        self._lease_due = 0.0
        # The lease must outlive a handler that nothing can end, or nobody could write down that it failed.
        longest = consumer.longest_timeout_seconds
        self._lease_seconds = settings.claim_seconds + (2 * longest + 10 if longest else 0)
        self._wake_due = 0.0
        self._troubles_due = 0.0
        self._told_paused = float("-inf")
        self._dying = self._failing = False  # too many dead letters, too many events that wait
        self._beat_due = 0.0

    # --- running ---

    def run(self) -> None:
        """Consume until `stop` is called; backs off while PostgreSQL or Redis fails, and goes on when they do.

        Raises:
            SchemaError: the tables are missing or of another revision.
            SettingsError: the relay spreads a topic over another number of lanes, or the engine commits by itself; or a
                pooler is in statement mode, or mixes up prepared statements.
        """
        self._refuse_fork()
        try:
            while not self._stopping.is_set():
                counts = until_done(
                    self.run_once,
                    worth_retrying=_worth_retrying,
                    longest_pause_seconds=self._settings.backoff_max_seconds,
                    stopping=self._stopping,
                    failed=self._failed,
                    log=_log,
                    who=f"consumer {self._consumer.name}",
                )
                if counts is None:
                    break
                if counts:
                    self._note.worked()
                self._beat()
        finally:
            self.close()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process_id:
            raise SettingsError("a Worker made before a fork cannot be used after it: make one in each process")

    def stop(self) -> None:
        """Let the handler at work return, commit, hand back what has not started, and return from `run`; safe in a signal
        handler."""
        self._stopping.set()

    def hand_back_unstarted(self) -> None:
        """Let others have at once what is not in work; by another thread than `run`'s, after `stop`.

        Raises:
            TransportError: Redis failed.
            DatabaseUnavailable: PostgreSQL failed.
        """
        working = set(map(id, self._in_work))
        self._give_back([d for d in self._at_hand + self._suspects if id(d) not in working])

    def abandon(self) -> None:
        """Roll back the transaction at work, and let others have everything as if it had not been delivered. For the end of the
        process; by another thread than `run`'s.

        Raises:
            TransportError: Redis failed.
            DatabaseUnavailable: PostgreSQL failed.
        """
        self._claims.close()
        self._processor.cut()
        self._give_back(self._at_hand + self._suspects)

    def close(self) -> None:
        """Hand back what is at hand and close the connections; those of a process that has forked this one stay."""
        if os.getpid() != self._process_id:
            return
        self._claims.close()
        try:
            if not self._away:  # or the end would wait for one more time-out
                self._hand_back()
        except (TransportError, DatabaseUnavailable) as error:
            _log.warning("could not hand back deliveries, others take them over later: %s", error)
        self._transport.close()
        calls.close()
        if self._own_engine:
            self._engine.dispose()

    def _hand_back(self) -> None:
        """Leave nothing behind: acknowledgements, deliveries that have not started, our name."""
        self._acknowledge()
        self._give_back(self._at_hand + self._suspects)
        if self._opened:
            self._forget_names([self._name])

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        try:
            self._claims.hand_back(_of_streams(deliveries))
        finally:
            if waiting := [delivery for delivery in deliveries if isinstance(delivery, Waiting)]:
                self._processor.release(waiting)

    def _held(self) -> list[Delivery]:
        """What is renewed. Once we are to stop, that is what is in work: the rest goes back."""
        return _of_streams(self._in_work if self._stopping.is_set() else self._at_hand + self._suspects)

    def _failed(self, _error: BaseException) -> None:
        self._usable = None

    def _beat(self) -> None:
        """Say that a round has ended."""
        self._note.beat()
        if self._settings.heartbeat_file:
            Path(self._settings.heartbeat_file).touch()

    def _progress(self) -> None:
        """Say within a round that it goes on: something of the batch was started, and is over."""
        self._note.beat()
        self._has_run = True
        if self._settings.heartbeat_file and time.monotonic() >= self._beat_due:
            self._beat_due = time.monotonic() + _BEAT_SECONDS
            self._beat()

    # --- one round ---

    def run_once(self) -> Counter[Outcome]:
        """One batch: what is at hand from a round before, else what others left and what is new by turns; counts by outcome.

        Waits for at most ``block_seconds`` when there is nothing.

        Raises:
            TransportError: Redis failed.
            DatabaseUnavailable: PostgreSQL failed; the deliveries are kept for the next round.
            SchemaError, SettingsError: see `run`.
        """
        self._refuse_fork()
        try:
            self._away = False
            return self._round()
        except TransportUnavailable:
            self._away = True
            raise

    def _round(self) -> Counter[Outcome]:
        self._reclaim()
        if self._stopping.is_set():
            return Counter()
        self._prepare()
        self._acknowledge()
        if not self._at_hand:
            if self._paused():
                self._stopping.wait(min(self._settings.block_seconds, _TROUBLES_SECONDS))
                return Counter()
            self._at_hand = self._next()
            self._size_up(self._at_hand)
        if not self._at_hand or self._stopping.is_set():
            return Counter()
        return self._process()

    def _reclaim(self) -> None:
        """Look for jobs that the dead have left, in every queue; also who is paused or cannot use his own does. That it fails
        is no reason not to try the rest: other servers may be there."""
        try:
            self._transport.reclaim_when_due()
        except TransportError as error:
            _log.debug("not looked for jobs that others have left: %s", error)
            self._away = self._stopping.is_set() and isinstance(error, TransportUnavailable)

    def _next(self) -> list[Delivery]:
        """What is new, what others left, or what has waited, by turns: after a page of one come the others, so that none has to
        wait for it.

        A suspect comes when there is nothing else; if there always is, it waits for half the time after which others would
        take it over, and then takes turns."""
        if self._suspects and not self._suspect_ran and time.monotonic() >= self._suspects_due:
            return self._suspect()
        self._suspect_ran = False
        self._others_turn = not self._others_turn
        if self._others_turn:
            for turn in tuple(self._others):
                if found := turn():
                    self._others.remove(turn)
                    self._others.append(turn)
                    return found
        self._others_turn = False
        found = self._read()
        self._idle = not found
        return found or self._suspect()

    def _size_up(self, found: Sequence[Delivery]) -> None:
        """See how many deliveries to ask for the next time."""
        size = sum(sum(map(len, delivery.fields.values())) for delivery in found)
        if size:
            room = _READ_BYTES * len(found) // size // len(self._streams)
            self._count = max(1, min(room, 4 * self._count, self._most))

    def _set_aside(self, found: list[Delivery]) -> list[Delivery]:
        """Keep the suspects for later, as if they had not been delivered yet; returns the others.

        The most often delivered one comes last: the others may have been its neighbours.
        """
        suspects = sorted((d for d in found if d.count > SUSPECT_AFTER), key=lambda delivery: delivery.count)
        if suspects:
            self._transport.recount(
                self._consumer.name, self._name, [replace(suspect, count=suspect.count - 1) for suspect in suspects]
            )
            self._suspects, self._suspects_due = suspects, time.monotonic() + self._settings.claim_seconds / 2
        return [delivery for delivery in found if delivery.count <= SUSPECT_AFTER]

    def _suspect(self) -> list[Delivery]:
        """The next suspect that nobody has taken over, counted as delivered from now on."""
        self._suspect_ran = True
        while self._suspects:
            ours = self._transport.recount(self._consumer.name, self._name, self._suspects[:1])
            del self._suspects[0]
            if ours:
                return ours
        return []

    def _process(self) -> Counter[Outcome]:
        """Process as much of what is at hand (a batch of each stream, maybe) as goes into one transaction."""
        started = time.monotonic()
        batch, rest = self._at_hand[: self._most], self._at_hand[self._most :]
        self._in_work, self._began, self._has_run = batch, started, False
        self._claims.keep()
        try:
            items = self._processor.run(batch, self._enough, self._progress)
        finally:
            self._note.running(())
            self._in_work = []
        self._most = min(self._settings.batch_size, self._most + self._most // 8 + 1)
        read = [item for item in items if not item.waiting]
        left = [item.delivery for item in items if item.outcome is None]
        self._at_hand = left + rest
        self._unacknowledged = [item for item in read if item.outcome not in (None, Outcome.HELD)]
        counts = Counter(item.outcome for item in items if item.outcome is not None)
        seconds = time.monotonic() - started
        self._observe(Outcomes(self._consumer.name, {str(k): n for k, n in counts.items()}, seconds))
        _log.debug(
            "a batch of %d in %.3f s: %s",
            len(batch), seconds, ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), extra={"action": "batch"},
        )  # fmt: skip
        self._acknowledge()
        held = [item.delivery for item in items if item.outcome is Outcome.HELD]
        # What was held is as it was, or it would be a suspect one day.
        if again := [replace(d, count=d.count - 1) for d in _of_streams(held) if d.count > 1]:
            self._transport.recount(self._consumer.name, self._name, again)
        if leased := [d for d in held if isinstance(d, Waiting)]:
            self._processor.release(leased)
            self._lease_due = time.monotonic() + self._settings.check_seconds  # or they would be tried without a pause
        if counts[Outcome.RETRY] or counts[Outcome.PARKED]:
            soon = time.monotonic() + (0.0 if self._idle else _LEASE_SECONDS)
            self._lease_due, self._troubles_due = min(self._lease_due, soon), min(self._troubles_due, soon)
        if counts[Outcome.DEAD]:
            self._troubles_due = 0.0
        if self._consumer.has_queues:
            self._look_after_jobs(items, seconds)
        return counts

    def _acknowledge(self) -> None:
        """Let Redis forget what is done, and of jobs say how they ended."""
        if items := self._unacknowledged:
            settled = [[item.settled for item in items]] if self._consumer.has_queues else []
            self._transport.ack(self._consumer.name, [item.delivery for item in items], *settled)
        self._unacknowledged = []

    def _enough(self) -> bool:
        """Whether no more of a batch is to be started."""
        return self._stopping.is_set() or self._overrun()

    def _overrun(self) -> bool:
        """Whether jobs of a batch take much longer than those before, so that others are to have the rest."""
        late = time.monotonic() >= self._began + _OVERRUN_SECONDS
        return late and self._consumer.has_queues and self._has_run and not self._patient

    def _look_after_jobs(self, items: Sequence[Item], seconds: float) -> None:
        """See how long jobs take, and hand back what one of them that took long has kept waiting."""
        tell_ended(self._transport, [item for item in items if item.waiting])
        ended = sum(item.outcome is not None for item in items)
        late = seconds / max(1, ended)
        self._job_seconds = late if not self._job_seconds else (1 - _LATE) * self._job_seconds + _LATE * late
        self._count = max(1, min(self._count, int(_PREFETCH_SECONDS / self._job_seconds)))
        overrun = self._overrun()
        self._patient = overrun and not ended  # or a batch that is rolled back each time would go round for ever
        if overrun and ended and not self._stopping.is_set():
            left, self._at_hand = self._at_hand, []
            self._give_back(left)

    def _prepare(self) -> None:
        if time.monotonic() >= self._partitions_due:
            self._on_ledger(self._check_ledger)
            self._partitions_due, self._forget_due = time.monotonic() + _PARTITION_SECONDS, 0.0
            self._note.upkeep_due = self._partitions_due
        if self._usable is None:
            self._open()
        elif time.monotonic() >= self._lanes_due:
            self._check_lanes()
        if time.monotonic() >= self._forget_due:  # not before our settings are checked
            more = self._look_after_retention()
            self._forget_due = time.monotonic() + _MORE_SECONDS if more else self._partitions_due
        if time.monotonic() >= self._names_due:
            self._names_due = time.monotonic() + _NAMES_SECONDS
            self._forget_names()
            if not self._consumer.has_queues:
                self._trim_side_streams()
        if self._wills and time.monotonic() >= self._wills_due:
            self._settle_wills()

    def _settle_wills(self) -> None:
        """Say what those before us died of, and go on with what they had; and look once more, since Redis may have delivered
        to them before it knew that they were gone."""
        held = 0
        for will in self._wills:
            estate = settle(will, self._processor, self._transport, self._consumer.name, self._name, self._streams)
            self._at_hand += estate.innocent
            self._suspects += estate.suspects
            held += estate.held
            if estate.told:
                self._note.worked()
        self._forget_names([will.name for will in self._wills])
        self._wills_due = time.monotonic() + (_HELD_SECONDS if held else _AGAIN_SECONDS)
        if not held:
            self._note.settled(len(self._wills))
            self._wills, self._wills_seen = [Will(will.name) for will in self._wills if not self._wills_seen], True

    def _open(self) -> None:
        """Make the groups where they are missing, and see which streams can be used and that the lanes agree."""
        unusable = self._transport.open(self._consumer.name, self._streams)
        self._opened = True
        told, now = self._unread, time.monotonic()
        self._unread = {stream: told.get(stream, 0.0) for stream in unusable}
        for stream, error in unusable.items():
            if now >= self._unread[stream]:
                self._unread[stream] = now + _REMIND_SECONDS
                _log.warning(
                    "stream %s cannot be read: %s", stream, error, extra={"action": "stream_failed", "stream": stream}
                )
        self._usable = [stream for stream in self._streams if stream not in unusable]
        if not self._usable:
            self._usable = None
            raise next(iter(unusable.values()))
        self._check_lanes()

    def _check_lanes(self) -> None:
        """See that the relay spreads each topic over as many lanes as are read here; it may come after us.

        Raises:
            SettingsError: it does not.
        """
        self._lanes_due = time.monotonic() + _LANES_SECONDS
        for topic in self._consumer.topics:
            ours = self._settings.lanes.get(topic, 1)
            for stream in {topic} if self._consumer.has_queues else {topic, f"{topic}:0"}:
                try:
                    info = self._transport.info(stream)
                except StreamUnusable:
                    continue
                theirs = info.lanes
                self._check_retention(info)
                if theirs is not None and theirs != ours and stream in streams_of(topic, theirs):
                    raise SettingsError(
                        f"OUTBOX_LANES: the relay spreads topic {topic} over {theirs} lanes, this consumer reads {ours}; "
                        "set the same for both"
                    )

    def _check_retention(self, info: StreamInfo) -> None:
        """See that the ledger remembers longer than an event can come again: from the outbox, and then in the stream.

        Raises:
            SettingsError: it does not.
        """
        needed = info.remember_seconds
        if needed is not None and self._settings.ledger_retention_days * _DAY < needed:
            raise SettingsError(
                f"CONSUMER_LEDGER_RETENTION_DAYS is {self._settings.ledger_retention_days}, but the relay's "
                f"OUTBOX_RETENTION_SECONDS is {info.keep_seconds} and its OUTBOX_STREAM_KEEP_SECONDS "
                f"{info.stays_seconds or 0}: an event that comes again could be applied again. The ledger must remember for a "
                f"day longer than the outbox keeps, and an hour longer than both together: {math.ceil(needed / _DAY)} days"
            )

    def _forget_names(self, names: Sequence[str] = ()) -> None:
        """Remove names from the group that crashed processes left, and `names`; such as have pending deliveries stay."""
        for stream in self._streams:
            try:
                self._transport.forget_consumers(self._consumer.name, stream, _LEFT_SECONDS, names)
            except (GroupLost, StreamUnusable) as error:
                _log.debug("names stay in the group of stream %s: %s", stream, error)
            except TransportError as error:
                _log.debug("names stay in the groups: %s", error)
                return

    def _claim(self) -> list[Delivery]:
        if time.monotonic() < self._check_due or self._usable is None:
            return []
        if len(self._usable) < len(self._streams):
            self._open()
        started = time.monotonic()
        found, missing, more = self._recovery.claim(self._usable, self._count)
        self._look_seconds += time.monotonic() - started
        if found or missing:
            self._observe(Claimed(self._consumer.name, len(found), missing))
            self._look_seconds = 0.0
        if not more:
            longest = max(self._settings.check_seconds, self._settings.claim_seconds / 4)
            pause = min(max(self._settings.check_seconds, self._look_seconds * _LOOK_PAUSE), longest)
            self._check_due, self._look_seconds = time.monotonic() + pause, 0.0
        return found

    def _claim_others(self) -> list[Delivery]:
        """What others left, but for the suspects among it; none while there are suspects."""
        return [] if self._suspects or self._failing else self._set_aside(self._claim())

    def _lease(self) -> list[Delivery]:
        """What has waited in the database, and is due."""
        if time.monotonic() >= self._wake_due:
            self._wake_due = time.monotonic() + _WAKE_SECONDS
            self._processor.wake()
        if time.monotonic() < self._lease_due:
            return []
        suspects = self._lease_suspects and (self._idle or time.monotonic() >= self._lease_suspects_due)
        found, seconds = self._processor.due(self._lease_seconds, self._count, suspects)
        if found:
            self._note.leased(found[0].lease)
            if found[0].starts > 1:
                self._lease_suspects_due = time.monotonic() + _SUSPECTS_SECONDS
        if not found:
            now, most = time.monotonic(), self._settings.check_seconds
            later = self._check_due if now < self._check_due <= now + most else now + most  # one wait for both
            self._lease_due = later if seconds is None else min(later, now + max(seconds, 0.0))
        elif not self._idle and len(found) < self._count:  # what is due meanwhile comes in one go
            self._lease_due = time.monotonic() + min(self._settings.check_seconds, _LEASE_SECONDS)
        return list(found)

    def _paused(self) -> bool:
        """Whether so much is put aside that nothing is tried for now; also sees whether so much waits that nothing is read."""
        settings = self._settings
        if time.monotonic() >= self._troubles_due:
            self._troubles_due = time.monotonic() + _TROUBLES_SECONDS
            limit = settings.dead_letter_limit
            dead, waiting = self._processor.troubles(settings.dead_letter_window_seconds, limit, settings.max_waiting)
            before = self._dying, self._failing
            self._dying, self._failing = 0 < limit <= dead, waiting >= settings.max_waiting
            self._tell_troubles(before)
        return self._dying

    def _tell_troubles(self, before: tuple[bool, bool]) -> None:
        settings, name, now = self._settings, self._consumer.name, (self._dying, self._failing)
        if now == before and (not any(now) or time.monotonic() < self._told_paused + _REMIND_SECONDS):
            return
        self._told_paused = time.monotonic()
        if self._dying:
            _log.error(
                "consumer %s is paused: %d dead letters within %g s (CONSUMER_DEAD_LETTER_LIMIT). See what is wrong with: consumer "
                "dead list %s; it goes on when they are requeued or discarded, or older",
                name, settings.dead_letter_limit, settings.dead_letter_window_seconds, name,
                extra={"action": "paused", "reason": "dead_letters"},
            )  # fmt: skip
        if self._failing:
            _log.error(
                "consumer %s reads nothing new: %d events wait for another try (CONSUMER_MAX_WAITING)",
                name, settings.max_waiting, extra={"action": "paused", "reason": "waiting"},
            )  # fmt: skip
        if not any(now):
            _log.warning("consumer %s goes on", name, extra={"action": "paused", "reason": None})

    def _read(self) -> list[Delivery]:
        """What is new; waits for it until something else is due. What is due already does not wait at all: servers look at what
        they let wait ten times a second only."""
        if self._usable is None:
            return []
        due = min(self._lease_due, self._wake_due, self._troubles_due)
        if not self._failing:  # else nothing is taken over either
            due = min(0.0 if self._suspects else self._check_due, due)
        wait = min(self._settings.block_seconds, _STOP_SECONDS, max(0.0, due - time.monotonic()))
        if self._failing:
            self._stopping.wait(max(0.001, wait))
            return []
        try:
            return self._read_from(self._usable, wait)
        except (GroupLost, StreamUnusable) as error:
            _log.warning(
                "consumer %s makes its groups again: %s", self._consumer.name, error, extra={"action": "group_lost"}
            )
            self._open()
            return []

    def _read_from(self, streams: list[str], wait: float) -> list[Delivery]:
        """From each as many as are to be had at once; where that is few, and they are queues, from one at a time, by turns."""
        read, name = self._transport.read, self._consumer.name
        if self._consumer.has_queues and self._count < len(streams):
            for _ in streams:
                streams.append(streams.pop(0))
                if found := read(name, self._name, streams[-1:], self._count, 0):
                    return found
        return read(name, self._name, streams, self._count, wait)

    def _on_ledger(self, work: Callable[[psycopg.Connection[Any]], None]) -> None:
        try:
            with schemas.refusing_statement_pooling(), self._engine.connect() as connection:
                driver_connection(connection)
                connection.invalidate()  # a new one, in which no handler has set anything
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
                raw = connection.connection.driver_connection
                assert isinstance(raw, psycopg.Connection)
                work(raw)
        except (psycopg.OperationalError, sqlalchemy.exc.OperationalError, sqlalchemy.exc.TimeoutError) as error:
            raise DatabaseUnavailable(f"PostgreSQL: {brief(error)}") from error

    def _check_ledger(self, raw: psycopg.Connection[Any]) -> None:
        settings = self._settings
        if not self._pooling_checked:
            self._check_prepared(raw)
        schemas.check_revision(raw, "consumer", settings.schema_name)
        try:
            self._ledger.make_partitions(raw, settings.ledger_partition_days, settings.ledger_partitions_ahead)
        except psycopg.errors.InsufficientPrivilege as error:
            _log.warning(
                "cannot make partitions of the ledger, rows stay in the default one: %s",
                " ".join(str(error).split()), extra={"action": "partitions_denied"},
            )  # fmt: skip

    def _check_prepared(self, raw: psycopg.Connection[Any]) -> None:
        """See that our engine's prepared statements are ours alone.

        Raises:
            SettingsError: they are not.
        """
        if raw.prepare_threshold is not None and schemas.shares_prepared(raw):
            raise SettingsError(
                "CONSUMER_PREPARE_THRESHOLD (prepare_threshold of an engine of yours): PostgreSQL is reached through a "
                "pooler that mixes up prepared statements of its clients, so that one could run another's. Unset it (an engine: None), "
                "or let the pooler keep them (PgBouncer 1.22 or newer with max_prepared_statements)"
            )
        self._pooling_checked = True

    def _look_after_retention(self) -> bool:
        """Say what we need the ledger to remember, and forget what no consumer needs any longer. While no stream says what
        its outbox still has and may publish again, nothing is forgotten. Returns whether there may be more to forget.

        Raises:
            SettingsError: see `_check_retention`; nothing is said or forgotten then.
        """
        left = {topic: self._left_by_relay(topic) for topic in self._consumer.topics}
        oldest = {topic: (info.oldest, info.margin_seconds) for topic, info in left.items()}
        more = False

        def work(raw: psycopg.Connection[Any]) -> None:
            nonlocal more
            self._ledger.remember(raw, self._settings.ledger_retention_days * _DAY, oldest)
            if any(since is not None for since, _ in oldest.values()):
                more = self._forget_old(raw)

        self._on_ledger(work)
        return more

    def _left_by_relay(self, topic: str) -> StreamInfo:
        """What the relay left about the age of the topic's events, in the lane where that is the oldest: each is trimmed by
        itself, or is not. Nothing: no relay has said it, or not of every lane that it publishes to."""
        left, unknown = list[StreamInfo](), False
        for stream in streams_of(topic, self._settings.lanes.get(topic, 1)):
            try:
                info = self._transport.info(stream)
            except StreamUnusable:
                unknown = True
                continue
            self._check_retention(info)
            if info.keep_seconds is not None:
                left.append(info)
        if unknown or any(info.oldest is None for info in left):
            return StreamInfo(None)
        return min(left, key=lambda info: info.oldest or 0, default=StreamInfo(None))

    def _forget_old(self, raw: psycopg.Connection[Any]) -> bool:
        """Forget what no consumer of the schema needs any longer; a bounded amount of work. Returns whether there may be more."""
        letters, days = 0, self._settings.dead_letter_retention_days
        try:
            before = self._ledger.needed_since(raw, MARGIN_SECONDS)
            name, rows = self._ledger.drop_partition(raw, before), self._ledger.delete_old(raw, before, _DELETED)
            if days is not None:
                letters = self._ledger.delete_dead(raw, before, days, _DEAD_DELETED)
        except psycopg.errors.InsufficientPrivilege as error:
            _log.debug("the ledger keeps what is old: %s", error)
            return False
        if name or rows or letters:
            _log.info(
                "dropped %s of the ledger, %d old rows and %d dead letters", name or "no partition", rows, letters,
                extra={"action": "dropped_old", "dead_letters": letters},
            )  # fmt: skip
        return rows >= _DELETED or letters >= _DEAD_DELETED

    def _trim_side_streams(self) -> None:
        """What was published again for us alone is ours to trim."""
        for topic in self._consumer.topics:
            with contextlib.suppress(TransportError):
                self._transport.inspect(side_stream(topic, self._consumer.name), keep_seconds=_SIDE_SECONDS)


def _prepare_threshold(settings: ConsumerSettings) -> int | Literal["direct"] | None:
    wanted = settings.prepare_threshold
    return "direct" if wanted is None else None if wanted == "never" else wanted


def _of_streams(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Those that are pending in Redis; what is leased in PostgreSQL is not."""
    return [delivery for delivery in deliveries if not isinstance(delivery, Waiting)]


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransportError | DatabaseUnavailable) or database_away(error)
