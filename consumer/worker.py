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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy

from consumer.claims import Recovery
from consumer.handlers import Consumer
from consumer.ledger import Ledger
from consumer.process import DatabaseUnavailable, Outcome, Processor, brief, driver_connection
from consumer.settings import ConsumerSettings
from outbox import schema as schemas
from outbox.errors import GroupLost, SettingsError, StreamUnusable, TransportError, TransportUnavailable
from outbox.retry import Stop, database_away, until_done
from outbox.telemetry import Claimed, Observer, Outcomes, guarded
from outbox.transport import Delivery, StreamTransport, Transport
from outbox.transport.base import StreamInfo, side_stream, streams_of

_log = logging.getLogger(__name__)

_DAY = 86_400
_PARTITION_SECONDS = 60.0
_LANES_SECONDS = 10.0
#: Rows of the ledger deleted at a time, once a minute.
_DELETED = 5000
#: And dead letters, each of which may have a megabyte.
_DEAD_DELETED = 500
_SIDE_SECONDS = 60.0
#: How long before the oldest event that may come again rows of the ledger stay, for clocks that differ.
MARGIN_SECONDS = _DAY
#: How often names are looked for that processes left in the group, and after how long idle they are taken for left.
_NAMES_SECONDS = 60.0
_LEFT_SECONDS = 3600.0
_BEAT_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0
#: What was delivered more often than this, and nobody could say why it was not done, may have ended its process.
_SUSPECT_AFTER = 2
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
        transport: where to read; default: streams at ``settings.redis_url``.
        engine: SQLAlchemy engine over psycopg for the ledger and the handlers; default: ``settings.database_url``.
        observer: gets the measurements of `outbox.telemetry`.
    """

    def __init__(
        self,
        consumer: Consumer,
        settings: ConsumerSettings,
        *,
        transport: Transport | None = None,
        engine: sqlalchemy.Engine | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._consumer = consumer
        self._settings = settings
        self._transport: Transport = transport or StreamTransport.from_url(
            settings.redis_url.get_secret_value(),
            prefix=settings.key_prefix,
            timeout_seconds=settings.redis_timeout_seconds,
            block_seconds=settings.block_seconds,
        )
        self._own_engine = engine is None
        self._engine = engine or schemas.engine(
            settings.database_url.get_secret_value(),
            f"consumer {consumer.name}",
            {"prepare_threshold": settings.prepare_threshold},
            pool_size=1,
            max_overflow=1,
        )
        self._observe = guarded(observer)
        # Who waits for a frozen process must not seem frozen himself.
        patience = min(_PATIENCE_SECONDS, settings.claim_seconds / 4)
        self._processor = Processor(consumer, self._engine, settings.schema_name, patience)
        self._ledger = Ledger(consumer.name, settings.schema_name)
        self._name = settings.process_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._streams = [
            stream for topic in consumer.topics for stream in streams_of(topic, settings.lanes.get(topic, 1))
        ] + [side_stream(topic, consumer.name) for topic in consumer.topics]
        self._count = min(_FIRST_COUNT, settings.batch_size)  # of each stream, in one read
        self._recovery = Recovery(self._transport, consumer.name, self._name, settings.claim_seconds)
        self._stopping = Stop()
        self._usable: list[str] | None = None  # None: the groups are to be made
        self._pooling_checked = False
        self._opened = False  # our name may be in them
        self._away = False  # Redis did not answer the last time
        self._at_hand: list[Delivery] = []
        self._suspects: list[Delivery] = []  # run alone, after all others; counted as delivered when they are run
        self._suspects_due = 0.0
        self._suspect_ran = False
        self._unacknowledged: list[Delivery] = []
        self._claimed = False  # the last deliveries were taken over
        self._look_seconds = 0.0
        self._check_due = 0.0
        self._partitions_due = 0.0
        self._forget_due = 0.0
        self._lanes_due = 0.0
        self._names_due = 0.0
        self._beat_due = 0.0

    # --- running ---

    def run(self) -> None:
        """Consume until `stop` is called; backs off while PostgreSQL or Redis fails, and goes on when they do.

        Raises:
            SchemaError: the tables are missing or of another revision.
            SettingsError: the relay spreads a topic over another number of lanes, or the engine commits by itself; or a
                pooler is in statement mode, or mixes up prepared statements.
        """
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
                self._beat()
        finally:
            self.close()

    def stop(self) -> None:
        """Finish the batch at hand, hand back what has not started, and return from `run`; safe in a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """Hand back what is at hand and close the connections."""
        try:
            if not self._away:  # or the end would wait for one more time-out
                self._hand_back()
        except TransportError as error:
            _log.warning("could not hand back deliveries, others take them over later: %s", error)
        self._transport.close()
        if self._own_engine:
            self._engine.dispose()

    def _hand_back(self) -> None:
        """Leave nothing behind: acknowledgements, deliveries that have not started, our name."""
        if self._unacknowledged:
            self._transport.ack(self._consumer.name, self._unacknowledged)
        if self._at_hand or self._suspects:
            self._transport.hand_back(self._consumer.name, self._name, self._at_hand + self._suspects)
        if self._opened:
            self._forget_names([self._name])

    def _failed(self, _error: BaseException) -> None:
        self._usable = None

    def _beat(self) -> None:
        """Say that a round has ended."""
        if self._settings.heartbeat_file:
            Path(self._settings.heartbeat_file).touch()

    def _progress(self) -> None:
        """Say within a round that it goes on."""
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
        try:
            self._away = False
            return self._round()
        except TransportUnavailable:
            self._away = True
            raise

    def _round(self) -> Counter[Outcome]:
        self._prepare()
        if self._unacknowledged:
            self._transport.ack(self._consumer.name, self._unacknowledged)
            self._unacknowledged = []
        if not self._at_hand:
            self._at_hand = self._next()
            self._size_up(self._at_hand)
        if not self._at_hand:
            return Counter()
        return self._process()

    def _next(self) -> list[Delivery]:
        """What others left, or what is new: after a page of the one comes the other, so that neither has to wait.

        A suspect comes when there is nothing else; if there always is, it waits for half the time after which others would
        take it over, and then takes turns."""
        if self._suspects and not self._suspect_ran and time.monotonic() >= self._suspects_due:
            return self._suspect()
        self._suspect_ran = False
        found = [] if self._claimed or self._suspects else self._set_aside(self._claim())
        self._claimed = bool(found)
        return found or self._read() or self._suspect()

    def _size_up(self, found: Sequence[Delivery]) -> None:
        """See how many deliveries to ask for the next time."""
        size = sum(len(value) for delivery in found for value in delivery.fields.values())
        if size:
            room = _READ_BYTES * len(found) // size // len(self._streams)
            self._count = max(1, min(room, 4 * self._count, self._settings.batch_size))

    def _set_aside(self, found: list[Delivery]) -> list[Delivery]:
        """Keep the suspects for later, as if they had not been delivered yet; returns the others.

        The most often delivered one comes last: the others may have been its neighbours.
        """
        suspects = sorted((d for d in found if d.count > _SUSPECT_AFTER), key=lambda delivery: delivery.count)
        if suspects:
            self._transport.recount(
                self._consumer.name, self._name, [replace(suspect, count=suspect.count - 1) for suspect in suspects]
            )
            self._suspects, self._suspects_due = suspects, time.monotonic() + self._settings.claim_seconds / 2
        return [delivery for delivery in found if delivery.count <= _SUSPECT_AFTER]

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
        batch, rest = self._at_hand[: self._settings.batch_size], self._at_hand[self._settings.batch_size :]
        outcomes = self._processor.process(batch, self._stopping.is_set, self._progress)
        done = [d for d, outcome in zip(batch, outcomes, strict=True) if outcome not in (None, Outcome.RETRY)]
        left = [d for d, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        self._at_hand, self._unacknowledged = left + rest, done
        counts = Counter(outcome for outcome in outcomes if outcome is not None)
        seconds = time.monotonic() - started
        self._observe(Outcomes(self._consumer.name, {str(k): n for k, n in counts.items()}, seconds))
        _log.debug(
            "a batch of %d in %.3f s: %s",
            len(batch), seconds, ", ".join(f"{n} {outcome}" for outcome, n in counts.items()), extra={"action": "batch"},
        )  # fmt: skip
        if done:
            self._transport.ack(self._consumer.name, done)
        self._unacknowledged = []
        if waiting := [replace(d, count=d.count - 1) for d in self._processor.waiting if d.count > 1]:
            self._transport.recount(self._consumer.name, self._name, waiting)  # or they were suspects one day
        return counts

    def _prepare(self) -> None:
        if time.monotonic() >= self._partitions_due:
            self._on_ledger(self._check_ledger)
            self._partitions_due, self._forget_due = time.monotonic() + _PARTITION_SECONDS, 0.0
        if self._usable is None:
            self._open()
        elif time.monotonic() >= self._lanes_due:
            self._check_lanes()
        if time.monotonic() >= self._forget_due:  # not before our settings are checked
            self._look_after_retention()
            self._forget_due = self._partitions_due
        if time.monotonic() >= self._names_due:
            self._names_due = time.monotonic() + _NAMES_SECONDS
            self._forget_names()
            self._trim_side_streams()

    def _open(self) -> None:
        """Make the groups where they are missing, and see which streams can be used and that the lanes agree."""
        unusable = self._transport.open(self._consumer.name, self._streams)
        self._opened = True
        for stream, error in unusable.items():
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
            for stream in {topic, f"{topic}:0"}:
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

    def _read(self) -> list[Delivery]:
        if self._usable is None:
            return []
        due = 0.0 if self._suspects else self._check_due
        wait = min(self._settings.block_seconds, max(0.001, due - time.monotonic()))
        try:
            return self._transport.read(self._consumer.name, self._name, self._usable, self._count, wait)
        except (GroupLost, StreamUnusable) as error:
            _log.warning(
                "consumer %s makes its groups again: %s", self._consumer.name, error, extra={"action": "group_lost"}
            )
            self._open()
            return []

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
                "pooler that mixes up prepared statements of its clients, so that one could run another's. Unset it (None), "
                "or let the pooler keep them (PgBouncer 1.22 or newer with max_prepared_statements)"
            )
        self._pooling_checked = True

    def _look_after_retention(self) -> None:
        """Say what we need the ledger to remember, and forget what no consumer needs any longer. While no stream says what
        its outbox still has and may publish again, nothing is forgotten.

        Raises:
            SettingsError: see `_check_retention`; nothing is said or forgotten then.
        """
        left = {topic: self._left_by_relay(topic) for topic in self._consumer.topics}
        oldest = {topic: (info.oldest, info.margin_seconds) for topic, info in left.items()}

        def work(raw: psycopg.Connection[Any]) -> None:
            self._ledger.remember(raw, self._settings.ledger_retention_days * _DAY, oldest)
            if any(since is not None for since, _ in oldest.values()):
                self._forget_old(raw)

        self._on_ledger(work)

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

    def _forget_old(self, raw: psycopg.Connection[Any]) -> None:
        """Forget what no consumer of the schema needs any longer; a bounded amount of work."""
        letters, days = 0, self._settings.dead_letter_retention_days
        try:
            before = self._ledger.needed_since(raw, MARGIN_SECONDS)
            name, rows = self._ledger.drop_partition(raw, before), self._ledger.delete_old(raw, before, _DELETED)
            if days is not None:
                letters = self._ledger.delete_dead(raw, before, days, _DEAD_DELETED)
        except psycopg.errors.InsufficientPrivilege as error:
            _log.debug("the ledger keeps what is old: %s", error)
            return
        if name or rows or letters:
            _log.info(
                "dropped %s of the ledger, %d old rows and %d dead letters", name or "no partition", rows, letters,
                extra={"action": "dropped_old", "dead_letters": letters},
            )  # fmt: skip

    def _trim_side_streams(self) -> None:
        """What was published again for us alone is ours to trim."""
        for topic in self._consumer.topics:
            with contextlib.suppress(TransportError):
                self._transport.inspect(side_stream(topic, self._consumer.name), keep_seconds=_SIDE_SECONDS)


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransportError | DatabaseUnavailable) or database_away(error)
