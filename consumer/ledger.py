"""All SQL of the consumer's side.

Invariants:

* A row in ``processed_messages`` is inserted in the transaction of the effect, and before it: of two transactions with the
  same event the second waits for the first, and then either finds the row (duplicate) or takes its place.
* Rows are inserted in the order of their event ids, and versions locked in the order of their keys, so that overlapping
  batches wait for each other instead of deadlocking.
* A dead letter is written together with the event's ledger row, so an event never ends both applied and dead.
* An event that waits (for another try, a handler, the versions before it) has a row in ``message_failures`` and a ledger row
  that says so, written in one transaction; then nothing more is needed of Redis. The transaction that ends the waiting locks
  the former, which others pass over, and changes both.
* No statement waits for ever for another transaction: its process may be frozen. A wait that gets too long ends in
  ``LockNotAvailable``; statements of handlers, and of COMMIT, wait as long as they would without us.

Connections are psycopg's, in a transaction that the caller begins and ends. Every name is qualified with the schema.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from outbox.envelope import QUEUE_PREFIX, Envelope
from outbox.errors import SettingsError
from outbox.partitions import Partition, Partitions, covered_until
from outbox.transport import Delivery
from outbox.transport.base import topic_of

Connection = psycopg.Connection[Any]
Parameters = dict[str, Any]

_DAY_MS = 86_400_000

#: Longest wait for another transaction, where it does not matter how long it is.
_PATIENCE_SECONDS = 2.0
#: Pages of the versions that are looked at in one go: 128 MiB.
_PAGES = 1 << 14
#: What is kept of an entry that is no event: this many bytes, of so many fields. Of an event all of it is kept, so that it can
#: be processed again, unless it is larger than PostgreSQL and we can handle well.
KEPT_BYTES = 1 << 20
_KEPT_FIELDS = 512
LARGEST_BYTES = 256 << 20
#: Of waiting events so many are leased at a time as bring about this much, as PostgreSQL stores it; one at least.
LEASED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class Entity:
    """What a version counts for: the key, for one type of a topic."""

    topic: str
    type: str
    key: str


_NO_LEASE = uuid.UUID(int=0)


@dataclass(frozen=True, slots=True)
class Waiting(Delivery):
    """An event out of ``message_failures``, leased to us; nothing of it is in Redis any more.

    Attributes:
        id: the row's.
        lease: what tells our lease from a later one's.
        reason: what it waits for: ``failed`` (another try), ``no_handler``, ``gap`` (the versions before it).
        attempts: failures that count; tries: all of them.
        starts: since its last known outcome, this one included.
        expired: it has waited for long enough.
        past_gap: it may be applied although versions before it are missing.
        first_failed_at: when it began to wait.
    """

    id: int = 0
    lease: uuid.UUID = _NO_LEASE
    reason: str = "failed"
    attempts: int = 0
    tries: int = 0
    starts: int = 1
    expired: bool = False
    past_gap: bool = False
    first_failed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """An event that is to wait.

    Attributes:
        delivery: as it came.
        event: what is in it; None: put aside as no event before, and not to be read now.
        reason: see `Waiting`.
        seconds: until the next try; until it is given up, if it waits for anything else.
        attempts, tries, starts: from now on.
        error_class, error: what its handler raised.
    """

    delivery: Delivery
    event: Envelope | None
    reason: str
    seconds: float
    attempts: int = 0
    tries: int = 0
    starts: int = 0
    error_class: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery to put aside, as it arrived."""

    delivery: Delivery
    event: Envelope | None
    reason: str
    error: str
    attempts: int
    error_class: str | None = None

    def parts(self) -> list[bytes]:
        """Names and values in turn; of an entry that is `cut` the beginning of each of the first 512 fields."""
        parts = _parts(self.delivery)
        if not self.cut:
            return parts
        kept = parts[: 2 * _KEPT_FIELDS]
        return [part[: KEPT_BYTES // len(kept)] for part in kept]

    @property
    def cut(self) -> bool:
        """Whether only the beginning is kept."""
        return size(self.delivery) > (LARGEST_BYTES if self.event else KEPT_BYTES)


def _place(delivery: Delivery) -> str:
    """The entry's id in its stream, or the job's in its queue; there the receipt's rest is another one with each delivery."""
    return delivery.receipt.partition(":")[0]


def _parts(delivery: Delivery) -> list[bytes]:
    return [part for pair in delivery.fields.items() for part in pair]


def size(delivery: Delivery) -> int:
    """Bytes of all names and values."""
    return sum(len(name) + len(value) for name, value in delivery.fields.items())


@dataclass(frozen=True, slots=True)
class Keeper:
    """The consumer, and its topic, that the ledger remembers the most for.

    Attributes:
        seconds: for how long it does.
        retention_seconds: for how long the consumer is set to; less, where its outbox still has older events.
        unseen_seconds: since a process of the consumer was last there.
    """

    consumer: str
    topic: str
    seconds: float
    retention_seconds: int
    unseen_seconds: float


class Ledger:
    """The statements, for one consumer name in one schema."""

    def __init__(self, consumer: str, schema: str = "public") -> None:
        self.consumer = consumer
        self.schema = schema
        self._partitions = Partitions(schema, "processed_messages", "event_id", _millisecond, _first_id)
        self._page = 0  # of the versions, where the next look for old ones begins
        self._held: dict[str, datetime] = {}  # partitions of old ids, and when a row of theirs was processed
        names = {
            name: sql.Identifier(schema, name)
            for name in (
                "processed_messages",
                "entity_versions",
                "message_failures",
                "dead_letters",
                "consumer_retention",
            )
        }

        def compose(statement: str) -> sql.Composed:
            return sql.SQL(statement).format(**names)

        def bounded(statement: LiteralString) -> sql.Composed:
            """A statement that sets lock_timeout for itself, and what it was before when all its rows are there: no round
            trip more. It has the rows of `before`; where it returns none, there is one of NULLs (an inner join might begin
            with them, and then never set it back)."""
            return sql.SQL("""
                WITH before AS MATERIALIZED (
                    SELECT current_setting('lock_timeout') AS patience, set_config('lock_timeout', %s, true)
                ), work AS ({work}), after AS MATERIALIZED (
                    SELECT set_config('lock_timeout', patience, true) FROM before, (SELECT count(*) FROM work) AS all_of_it
                )
                SELECT work.* FROM after LEFT JOIN work ON true
            """).format(work=compose(statement))

        self._claim = bounded("""
            INSERT INTO {processed_messages} (consumer, event_id)
            SELECT %s, event_id
            FROM before, (SELECT set_config('application_name', %s, true)) AS tagged,
                unnest(%s::uuid[]) WITH ORDINALITY AS batch (event_id, n)
            ORDER BY n
            ON CONFLICT (consumer, event_id) DO NOTHING RETURNING event_id::text
        """)
        self._present = compose("""
            SELECT event_id::text FROM {processed_messages} WHERE consumer = %s AND event_id = ANY (%s::uuid[])
        """)
        self._outcomes = compose("""
            SELECT event_id::text, outcome FROM {processed_messages} WHERE consumer = %s AND event_id = ANY (%s::uuid[])
        """)
        self._mark = compose("""
            UPDATE {processed_messages} SET outcome = %s, processed_at = now()
            WHERE consumer = %s AND event_id = ANY (%s::uuid[])
        """)
        self._forget = compose("""
            DELETE FROM {processed_messages} WHERE consumer = %s AND event_id = ANY (%s::uuid[])
        """)
        self._touch = bounded("""
            INSERT INTO {entity_versions} (consumer, topic, type, key)
            SELECT %s, topic, type, key
            FROM before, unnest(%s::text[], %s::text[], %s::text[]) WITH ORDINALITY AS batch (topic, type, key, n)
            ORDER BY n
            ON CONFLICT (consumer, topic, type, key) DO NOTHING RETURNING key
        """)
        self._lock = bounded("""
            SELECT topic, type, key, version FROM before, {entity_versions} v
            WHERE consumer = %s
              AND (topic, type, key) IN (SELECT * FROM unnest(%s::text[], %s::text[], %s::text[]))
            ORDER BY topic COLLATE "C", type COLLATE "C", key COLLATE "C" FOR UPDATE OF v
        """)
        self._raise = compose("""
            UPDATE {entity_versions} v SET version = batch.version, updated_at = now()
            FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[]) AS batch (topic, type, key, version)
            WHERE v.consumer = %s AND v.topic = batch.topic AND v.type = batch.type AND v.key = batch.key
        """)
        self._bury = bounded("""
            INSERT INTO {dead_letters} (consumer, stream, stream_id, event_id, topic, type, key, version, reason,
                                        error_class, error, fields, attempts, first_failed_at, cut)
            SELECT %s, %s, %s, %s::uuid, %s, %s, %s, %s::bigint, %s, %s, %s, %s::bytea[], %s::integer,
                   coalesce(%s::timestamptz, now()), %s
            FROM before
            ON CONFLICT (consumer, stream, stream_id) WHERE event_id IS NULL DO NOTHING RETURNING id
        """)

        self._lease = compose("""
            WITH due AS MATERIALIZED (
                SELECT id, next_attempt_at, pg_column_size(fields) AS size FROM {message_failures}
                WHERE consumer = %s AND next_attempt_at <= now() AND (starts > 0) = %s
                ORDER BY next_attempt_at, id LIMIT %s FOR UPDATE SKIP LOCKED
            ), few AS (
                SELECT id, next_attempt_at, sum(size) OVER (ORDER BY next_attempt_at, id) - size AS before FROM due
            ), leased AS (
                UPDATE {message_failures} f
                SET lease = %s, starts = starts + 1, next_attempt_at = clock_timestamp() + make_interval(secs => %s)
                FROM few WHERE f.id = few.id AND before < %s
                RETURNING f.*, few.next_attempt_at AS was_due_at
            )
            SELECT stream, stream_id, fields, id, reason, attempts, tries, starts,
                   coalesce(give_up_at <= clock_timestamp(), false), past_gap, first_failed_at
            FROM leased ORDER BY was_due_at, id
        """)
        self._leased_by = compose("""
            SELECT stream, stream_id, fields, id, reason, attempts, tries, starts,
                   coalesce(give_up_at <= clock_timestamp(), false), past_gap, first_failed_at
            FROM {message_failures} WHERE consumer = %s AND next_attempt_at > now() AND lease = %s ORDER BY id
        """)
        self._next_due = compose("""
            SELECT extract(epoch FROM min(next_attempt_at) - now())::float8 FROM {message_failures} WHERE consumer = %s
        """)
        self._take = bounded("""
            SELECT f.id FROM before, {message_failures} f WHERE f.id = ANY (%s::bigint[]) AND lease = %s
            ORDER BY f.id FOR UPDATE OF f
        """)
        self._retake = bounded("""
            INSERT INTO {processed_messages} AS p (consumer, event_id)
            SELECT %s, event_id
            FROM before, (SELECT set_config('application_name', %s, true)) AS tagged,
                unnest(%s::uuid[]) WITH ORDINALITY AS batch (event_id, n)
            ORDER BY n
            ON CONFLICT (consumer, event_id) DO UPDATE SET outcome = 'applied', processed_at = now()
            WHERE p.outcome = 'waiting' RETURNING event_id::text
        """)
        self._leased = compose("SELECT count(*) FROM {message_failures} WHERE id = ANY (%s::bigint[]) AND lease = %s")
        self._wait = compose("""
            INSERT INTO {message_failures} (consumer, stream, stream_id, topic, event_id, type, key, version, fields,
                                            reason, next_attempt_at, give_up_at, attempts, tries, starts, error_class, error)
            SELECT %(consumer)s, %(stream)s, %(receipt)s, %(topic)s, %(event_id)s::uuid, %(type)s, %(key)s,
                   %(version)s::bigint, %(fields)s::bytea[], %(reason)s,
                   clock_timestamp() + make_interval(secs => %(seconds)s),
                   CASE WHEN %(reason)s <> 'failed' THEN clock_timestamp() + make_interval(secs => %(seconds)s) END,
                   %(attempts)s::integer, %(tries)s::integer, %(starts)s::integer, %(error_class)s, %(error)s
            ON CONFLICT (consumer, event_id) DO NOTHING
        """)
        self._wait_on = compose("""
            UPDATE {message_failures} f SET
                next_attempt_at = CASE
                    WHEN %(reason)s = 'failed' OR reason <> %(reason)s
                    THEN clock_timestamp() + make_interval(secs => %(seconds)s) ELSE give_up_at END,
                give_up_at = CASE
                    WHEN %(reason)s = 'failed' THEN NULL
                    WHEN reason <> %(reason)s THEN clock_timestamp() + make_interval(secs => %(seconds)s)
                    ELSE give_up_at END,
                reason = %(reason)s, lease = NULL, attempts = %(attempts)s, tries = %(tries)s, starts = %(starts)s,
                event_id = coalesce(f.event_id, (SELECT %(event_id)s::uuid WHERE NOT EXISTS (
                    SELECT FROM {message_failures} WHERE consumer = f.consumer AND event_id = %(event_id)s::uuid))),
                type = %(type)s, key = %(key)s, version = %(version)s,
                error_class = coalesce(%(error_class)s, error_class), error = coalesce(%(error)s, error),
                last_failed_at = CASE WHEN %(error)s::text IS NULL THEN last_failed_at ELSE clock_timestamp() END
            WHERE id = %(id)s
        """)
        self._done_waiting = compose("DELETE FROM {message_failures} WHERE id = ANY (%s::bigint[])")
        self._release = compose("""
            UPDATE {message_failures} SET lease = NULL, starts = greatest(starts - 1, 0), next_attempt_at = clock_timestamp()
            WHERE id IN (
                SELECT id FROM {message_failures} WHERE id = ANY (%s::bigint[]) AND lease = %s FOR UPDATE SKIP LOCKED
            )
        """)
        self._wake = compose("""
            WITH found AS MATERIALIZED (
                SELECT found.id
                FROM unnest(%s::text[], %s::text[], %s::bigint[]) AS reached (topic, key, version),
                     LATERAL (
                        SELECT id, version, row_number() OVER (ORDER BY version) AS n FROM (
                            SELECT id, f.version FROM {message_failures} f
                            WHERE consumer = %s AND reason = 'gap' AND f.topic = reached.topic AND f.key = reached.key
                                AND f.version > reached.version
                            ORDER BY f.version LIMIT %s
                        ) AS after
                     ) AS found
                WHERE found.version = reached.version + found.n
            )
            UPDATE {message_failures} SET next_attempt_at = clock_timestamp() WHERE id IN (
                SELECT id FROM {message_failures} WHERE id IN (SELECT id FROM found) FOR UPDATE SKIP LOCKED
            )
        """)
        self._wake_types = compose("""
            UPDATE {message_failures} SET next_attempt_at = clock_timestamp() WHERE id IN (
                SELECT id FROM {message_failures}
                WHERE consumer = %s AND reason = 'no_handler' AND type = ANY (%s::text[]) AND lease IS NULL
                    AND next_attempt_at > now()
                LIMIT %s FOR UPDATE SKIP LOCKED
            )
        """)
        self._lately_dead = compose("""
            SELECT count(*) FROM (
                SELECT FROM {dead_letters}
                WHERE consumer = %s AND created_at > now() - make_interval(secs => %s) LIMIT %s
            ) AS lately
        """)
        self._number_waiting = compose("""
            SELECT count(*) FROM (SELECT FROM {message_failures} WHERE consumer = %s AND reason = 'failed' LIMIT %s) AS waiting
        """)

        self._remember = compose("""
            WITH gone AS (
                DELETE FROM {consumer_retention} WHERE consumer = %(consumer)s AND topic <> ALL (%(topics)s::text[])
                AND seen_at < clock_timestamp() - make_interval(secs => retention_seconds)
            )
            INSERT INTO {consumer_retention} AS r (consumer, topic, retention_seconds, outbox_since)
            SELECT %(consumer)s, topic, %(retention)s, to_timestamp(since)
            FROM unnest(%(topics)s::text[], %(since)s::bigint[]) AS found (topic, since) ORDER BY topic
            ON CONFLICT (consumer, topic) DO UPDATE SET
                retention_seconds = excluded.retention_seconds,
                seen_at = clock_timestamp(),
                (outbox_since, before_since, begun_at) = (
                    SELECT CASE WHEN over THEN excluded.outbox_since ELSE least(r.outbox_since, excluded.outbox_since) END,
                           CASE WHEN over THEN r.outbox_since ELSE r.before_since END,
                           CASE WHEN over THEN clock_timestamp() ELSE r.begun_at END
                    FROM (SELECT excluded.outbox_since IS NOT NULL
                              AND r.begun_at < clock_timestamp() - make_interval(secs => (%(margins)s::jsonb ->> r.topic)::bigint)
                    ) AS period (over)
                )
        """)
        self._keeper = compose("""
            SELECT consumer, topic, extract(epoch FROM clock_timestamp() - since)::float8, retention_seconds,
                   extract(epoch FROM clock_timestamp() - seen_at)::float8, since
            FROM {consumer_retention},
                 least(clock_timestamp() - make_interval(secs => retention_seconds),
                       least(outbox_since, before_since) - make_interval(secs => %(margin)s)) AS since
            ORDER BY since LIMIT 1
        """)

    def claim(
        self, connection: Connection, ids: Iterable[uuid.UUID], patience_seconds: float = _PATIENCE_SECONDS
    ) -> set[uuid.UUID]:
        """Insert the ledger rows of these events; returns those that are fresh. The others were processed before.

        Waits for transactions that insert the same rows, each for `patience_seconds`. Locks nothing else. Uses the
        primary key.

        Tags the transaction by the name of the application, for as long as it lasts (see `tag`).
        """
        return self._claimed(connection, self._claim, ids, patience_seconds)

    def _claimed(
        self, connection: Connection, statement: sql.Composed, ids: Iterable[uuid.UUID], patience_seconds: float
    ) -> set[uuid.UUID]:
        wanted, tag = set(ids), f"* consumer {self.consumer}"  # at the beginning: long names are cut
        rows = _execute(
            connection, statement, (_milliseconds(patience_seconds), self.consumer, tag, _array(sorted(wanted)))
        ).fetchall()
        found = [event_id for (event_id,) in rows if event_id]
        return wanted if len(found) == len(wanted) else set(map(uuid.UUID, found))

    @staticmethod
    def tag(connection: Connection) -> bytes | None:
        """The application's name as PostgreSQL last said it. It says it of itself whenever the name changes, so when a
        tagged transaction ends, too; asking costs nothing."""
        return None if connection.closed else connection.pgconn.parameter_status(b"application_name")

    def present(self, connection: Connection, ids: Iterable[uuid.UUID]) -> set[uuid.UUID]:
        """Those of the events that have a ledger row. Uses the primary key."""
        rows = _execute(connection, self._present, (self.consumer, _array(ids)))
        return {uuid.UUID(found) for (found,) in rows}

    def applied(self, connection: Connection, ids: Iterable[uuid.UUID]) -> set[uuid.UUID]:
        """Those of the events whose ledger row says that they were applied. Uses the primary key."""
        return {found for found, outcome in self.outcomes(connection, ids).items() if outcome == "applied"}

    def outcomes(self, connection: Connection, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, str]:
        """What the ledger says of the events that it has a row of. Uses the primary key."""
        rows = _execute(connection, self._outcomes, (self.consumer, _array(ids)))
        return {uuid.UUID(found): outcome for found, outcome in rows}

    def mark(self, connection: Connection, ids: Iterable[uuid.UUID], outcome: str) -> None:
        """Say in the ledger rows (inserted by this transaction) how the events ended, if not ``applied``."""
        _execute(connection, self._mark, (outcome, self.consumer, _array(ids)))

    def forget(self, connection: Connection, ids: Iterable[uuid.UUID]) -> None:
        """Delete the rows of events that were not processed after all. Uses the primary key."""
        _execute(connection, self._forget, (self.consumer, _array(ids)))

    def lock_versions(
        self, connection: Connection, entities: Iterable[Entity], patience_seconds: float = _PATIENCE_SECONDS
    ) -> dict[Entity, int | None]:
        """Lock the entities against other consumers of the name, in order; returns the versions applied so far.

        New entities get a row first, since what is not there cannot be locked; so does one that `delete_old` takes before
        it is locked. Waits for each for `patience_seconds`. Uses the primary key.
        """
        patience = _milliseconds(patience_seconds)
        ordered = sorted(set(entities))
        columns = [[e.topic for e in ordered], [e.type for e in ordered], [e.key for e in ordered]]
        found: dict[Entity, int | None] = {}
        for _ in range(2):  # what is new the second time is too young to be deleted
            _execute(connection, self._touch, (patience, self.consumer, *columns))
            rows = _execute(connection, self._lock, (patience, self.consumer, *columns))
            found = {Entity(topic, kind, key): version for topic, kind, key, version in rows if topic}
            if len(found) == len(ordered):
                break
        return found

    def raise_versions(self, connection: Connection, versions: Mapping[Entity, int]) -> None:
        """Write the highest versions applied, of entities that this transaction has locked."""
        ordered = sorted(versions)
        _execute(
            connection,
            self._raise,
            (
                [e.topic for e in ordered], [e.type for e in ordered], [e.key for e in ordered],
                [versions[e] for e in ordered], self.consumer,
            ),
        )  # fmt: skip

    def bury(
        self, connection: Connection, letters: Sequence[DeadLetter], patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        """Put deliveries aside, raw; burying what is no event twice keeps the first. Waits for who buries the same for so long."""
        for letter in letters:
            delivery, event = letter.delivery, letter.event
            _execute(
            connection,
                self._bury,
                (
                    _milliseconds(patience_seconds), self.consumer, delivery.stream, _place(delivery),
                    event and event.id, topic_of(delivery.stream), event and event.type, event and event.key,
                    event and event.version, letter.reason, letter.error_class, letter.error, letter.parts(),
                    letter.attempts, delivery.first_failed_at if isinstance(delivery, Waiting) else None, letter.cut,
                ),
            )  # fmt: skip

    # --- events that wait ---

    def lease(
        self, connection: Connection, seconds: float, limit: int, suspects: bool = True
    ) -> tuple[list[Waiting], float | None]:
        """Take up to `limit` events (fewer large ones) whose time has come, for so long; those that were started and not heard of since come
        alone, and first, if `suspects` are wanted. Also: in how many seconds the next one is due, None: there is
        none.

        Passes over what others are at. Walks message_failures_due; locks only the rows that it takes.

        Args:
            connection: in autocommit mode.
        """
        token = uuid.uuid4()
        for suspect, number in ((True, 1), (False, limit))[not suspects :]:
            rows = _execute(
                connection, self._lease, (self.consumer, suspect, number, token, seconds, LEASED_BYTES), binary=True
            ).fetchall()
            if rows:
                found = [self._waiting(row, token) for row in rows]
                return found, 0.0
        row = _execute(connection, self._next_due, (self.consumer,)).fetchone()
        return [], row[0] if row else None

    def leased_by(self, connection: Connection, token: uuid.UUID) -> list[Waiting]:
        """What is leased by this token, and was not finished since. Walks what is not due yet of message_failures_due."""
        rows = _execute(connection, self._leased_by, (self.consumer, token), binary=True).fetchall()
        return [self._waiting(row, token) for row in rows]

    @staticmethod
    def _waiting(row: Sequence[Any], token: uuid.UUID) -> Waiting:
        stream, receipt, parts, number, reason, attempts, tries, starts, expired, past_gap, first = row
        fields = dict(zip(parts[::2], parts[1::2], strict=False))  # an odd one is a person's doing, and stops nobody
        return Waiting(
            stream,
            receipt,
            fields,
            tries + starts,
            number,
            token,
            reason,
            attempts,
            tries,
            starts,
            expired,
            past_gap,
            first,
        )

    def take(
        self, connection: Connection, waiting: Sequence[Waiting], patience_seconds: float = _PATIENCE_SECONDS
    ) -> set[int]:
        """Lock these rows; returns those that are leased to us still. Uses the primary key."""
        rows = _execute(
            connection, self._take, (_milliseconds(patience_seconds), [row.id for row in waiting], waiting[0].lease)
        )
        return {found for (found,) in rows if found}

    def retake(
        self, connection: Connection, ids: Iterable[uuid.UUID], patience_seconds: float = _PATIENCE_SECONDS
    ) -> set[uuid.UUID]:
        """As `claim`, of events whose rows of message_failures we have locked: fresh is what waited, or is not known."""
        return self._claimed(connection, self._retake, ids, patience_seconds)

    def leased(self, connection: Connection, waiting: Sequence[Waiting]) -> bool:
        """Whether any of these is leased to us still: if so, no transaction of ours has ended its waiting."""
        row = _execute(connection, self._leased, ([row.id for row in waiting], waiting[0].lease)).fetchone()
        return bool(row and row[0])

    def wait(self, connection: Connection, waits: Sequence[Wait]) -> None:
        """Let events wait, or wait on, whose ledger rows this transaction has claimed."""
        for wait in waits:
            delivery, event = wait.delivery, wait.event
            values = {
                "consumer": self.consumer, "stream": delivery.stream, "receipt": _place(delivery),
                "topic": topic_of(delivery.stream), "event_id": event and event.id, "type": event and event.type,
                "key": event and event.key, "version": event and event.version, "reason": wait.reason,
                "seconds": wait.seconds, "attempts": wait.attempts, "tries": wait.tries, "starts": wait.starts,
                "error_class": wait.error_class, "error": wait.error,
            }  # fmt: skip
            if isinstance(delivery, Waiting):
                _execute(connection, self._wait_on, values | {"id": delivery.id})
            else:
                _execute(connection, self._wait, values | {"fields": _parts(delivery)})

    def done_waiting(self, connection: Connection, waiting: Sequence[Waiting]) -> None:
        """Delete rows that this transaction has locked: their events are done, or put aside."""
        _execute(connection, self._done_waiting, ([row.id for row in waiting],))

    def release(self, connection: Connection, waiting: Sequence[Waiting]) -> None:
        """Give back what was leased and not started. Locks only these rows, and passes over those that others have."""
        for lease, some in groupby(waiting, key=lambda row: row.lease):
            _execute(connection, self._release, ([row.id for row in some], lease))

    def wake(self, connection: Connection, reached: Mapping[Entity, int], limit: int) -> None:
        """Let those that waited for these versions be due: per key, without gap, up to `limit`. Walks message_failures_gap.

        Passes over rows that others have: whoever has one either waits for the version that we have locked, and then sees
        that its turn has come, or has no use for it.
        """
        ordered = sorted(reached)
        _execute(
            connection,
            self._wake,
            ([e.topic for e in ordered], [e.key for e in ordered], [reached[e] for e in ordered], self.consumer, limit),
        )

    def wake_types(self, connection: Connection, types: Sequence[str], limit: int) -> int:
        """Let up to `limit` that waited for a handler of one of these types be due. Walks message_failures_type."""
        return _execute(connection, self._wake_types, (self.consumer, list(types), limit)).rowcount

    def lately_dead(self, connection: Connection, seconds: float, limit: int) -> int:
        """How many dead letters there are of the last so many seconds; counts to `limit`. Walks dead_letters_time."""
        row = _execute(connection, self._lately_dead, (self.consumer, seconds, limit)).fetchone()
        return int(row[0]) if row else 0

    def number_waiting(self, connection: Connection, limit: int) -> int:
        """How many events wait for another try; counts to `limit`. Walks this consumer's part of message_failures_due."""
        row = _execute(connection, self._number_waiting, (self.consumer, limit)).fetchone()
        return int(row[0]) if row else 0

    @staticmethod
    def session_is_changed(connection: Connection) -> bool:
        """Whether the session has settings that are not those it began with (see pg_settings.source), or another role."""
        row = _execute(
            connection,
            """
            SELECT current_user <> %(user)s OR session_user <> %(user)s OR EXISTS (
                SELECT FROM pg_settings WHERE source = 'session' AND name <> ALL ('{application_name,lock_timeout,transaction_isolation}'))
            """,
            {"user": connection.info.user},
        ).fetchone()
        return bool(row and row[0])

    # --- retention ---

    def remember(
        self, connection: Connection, retention_seconds: int, oldest: Mapping[str, tuple[int | None, int]]
    ) -> None:
        """Write down what this consumer needs the ledger to remember, for whoever forgets; see `needed_since`.

        There may be entries in our streams of events that the outbox has dropped meanwhile: published again for a group
        that lagged, which has caught up before us. So what the outbox had stays written down for a margin (and up to once
        more that) from when we first saw that it has it no more; we may have been away until then. Locks this consumer's
        rows, in order of the topics; uses the primary key.

        Args:
            oldest: by topic, of all that we read: Unix time before which no event was recorded that may come again, and
                the margin in seconds; None: not known now, and what was written down before stays.
        """
        _execute(
            connection,
            self._remember,
            {
                "consumer": self.consumer, "retention": retention_seconds, "topics": list(oldest),
                "since": [since for since, _ in oldest.values()],
                "margins": json.dumps({topic: margin for topic, (_, margin) in oldest.items()}),
            },
        )  # fmt: skip

    def needed_since(self, connection: Connection, margin_seconds: int) -> datetime:
        """What was processed before may be forgotten: every consumer of the schema remembers for as long as it is set to,
        and what its outbox could publish again or had lately, and the margin on top of that, for clocks that differ. A
        consumer that is away keeps what it needed last. Reads a row a topic and consumer; ours must be there."""
        row = _execute(connection, self._keeper, {"margin": margin_seconds}, binary=True).fetchone()
        assert row is not None
        needed: datetime = row[-1]
        return needed

    def drop_partition(self, connection: Connection, before: datetime) -> str | None:
        """Drop the oldest partition of ours of which all UUIDv7 ids are from before then, and no row was processed later
        (ids may be much older than their events), and no event of them waits; returns its name.

        It holds rows of every consumer. See `outbox.partitions.Partitions.drop_oldest`. For rows processed later it looks
        into processed_messages_time, and reads the last pages, which are not in there yet: for a second at most, or it is
        another time's turn. What is found is remembered here, so that it is not looked for every time.

        Args:
            connection: in autocommit mode.
        """

        waiting = sql.Identifier(self.schema, "message_failures")

        def is_old(found: Partition) -> bool:
            if found.high > before.timestamp() * 1000 or (
                found.name in self._held and self._held[found.name] >= before
            ):
                return False
            child = sql.Identifier(found.schema, found.name)
            try:
                with connection.transaction():
                    connection.execute("SET LOCAL statement_timeout = '1s'")
                    connection.execute("SET LOCAL enable_seqscan = off")
                    row = _execute(
                        connection,
                        sql.SQL("SELECT processed_at FROM {} WHERE processed_at >= %s LIMIT 1").format(child),
                        (before,),
                        binary=True,
                    ).fetchone()
                    if row is not None:
                        self._held[found.name] = row[0]
                        return False
                    waits = _execute(
                        connection,
                        sql.SQL("SELECT FROM {} WHERE event_id >= %s::uuid AND event_id < %s::uuid LIMIT 1").format(
                            waiting
                        ),
                        (_first_id(found.low), _first_id(found.high)),
                    ).fetchone()
                    return waits is None
            except psycopg.errors.QueryCanceled:
                return False

        return self._partitions.drop_oldest(connection, is_old)

    def delete_old(self, connection: Connection, before: datetime, limit: int) -> int:
        """Delete up to `limit` rows each of the ledger's default partition (ids that are not UUIDv7) that were processed
        before then and do not wait, and of the versions that stand still since, of every consumer. Reads both; locks
        only these rows. Of the versions a part at a time, and the next call goes on behind it: there may be very many, and nothing
        says which are old.

        A version that was applied in sequence stays for ever, or the next one would be missing those before it; and any
        stays while there are letters or waiting events of its key, over which nothing older must be applied.
        """
        deleted = 0
        versions, letters, waits = (
            sql.Identifier(self.schema, name) for name in ("entity_versions", "dead_letters", "message_failures")
        )
        default, done = self._partitions.default(connection), sql.SQL("processed_at < %s AND outcome <> 'waiting'")
        row = _execute(
            connection,
            sql.SQL("SELECT pg_relation_size({}::regclass) / current_setting('block_size')::int").format(
                sql.Literal(versions.as_string(connection))
            ),
        ).fetchone()
        pages = int(row[0]) if row else 0
        first = self._page if self._page < pages else 0
        still = sql.SQL("""
            updated_at < %s AND (type <> '' OR version IS NULL)
            AND ctid >= {first}::tid AND ctid < {last}::tid
            AND NOT EXISTS (SELECT FROM {letters} a WHERE a.consumer = {table}.consumer AND a.key = {table}.key)
            AND NOT EXISTS (SELECT FROM {waits} a WHERE a.consumer = {table}.consumer AND a.key = {table}.key)
        """).format(
            table=versions, letters=letters, waits=waits,
            first=sql.Literal(f"({first},0)"), last=sql.Literal(f"({first + _PAGES},0)"),
        )  # fmt: skip
        for table, old in ((default, done), (versions, still)):
            if table is None:
                continue
            rows = _execute(
                connection,
                sql.SQL("""
                DELETE FROM {table} WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM {table} WHERE {old} LIMIT %s FOR UPDATE SKIP LOCKED))
                """).format(table=table, old=old),
                (before, limit),
            ).rowcount
            deleted += rows
            if table is versions and rows < limit:
                self._page = first + _PAGES
        return deleted

    def delete_dead(self, connection: Connection, before: datetime, days: int, limit: int) -> int:
        """Delete up to `limit` of this consumer's dead letters that are older than so many days, and were put aside `before`
        then, so that none goes before its ledger row may (see `needed_since`). Walks dead_letters_time; locks only these
        rows, and passes over those that somebody works with."""
        table = sql.Identifier(self.schema, "dead_letters")
        return _execute(
            connection,
            sql.SQL("""
            DELETE FROM {table} WHERE id = ANY (ARRAY(
                SELECT id FROM {table}
                WHERE consumer = %s AND created_at < least(%s, clock_timestamp() - make_interval(days => %s))
                ORDER BY created_at LIMIT %s FOR UPDATE SKIP LOCKED))
            """).format(table=table),
            (self.consumer, before, days, limit),
        ).rowcount

    def forget_consumer(self, connection: Connection, unseen_seconds: float) -> tuple[int, float | None]:
        """Keep nothing for this consumer any longer that others can do without, unless a process of it was there within
        `unseen_seconds`. Returns how many of its rows of consumer_retention are gone, and how many seconds ago it was seen if
        they are not. Uses the primary key."""
        table = sql.Identifier(self.schema, "consumer_retention")
        gone = _execute(
            connection,
            sql.SQL("""
            DELETE FROM {table} WHERE consumer = %(consumer)s AND NOT EXISTS (
                SELECT FROM {table} WHERE consumer = %(consumer)s
                AND seen_at >= clock_timestamp() - make_interval(secs => %(unseen)s))
            """).format(table=table),
            {"consumer": self.consumer, "unseen": unseen_seconds},
        ).rowcount
        row = _execute(
            connection,
            sql.SQL(
                "SELECT extract(epoch FROM clock_timestamp() - max(seen_at))::float8 FROM {} WHERE consumer = %s"
            ).format(table),
            (self.consumer,),
        ).fetchone()
        return gone, row[0] if row else None

    def processed(self, connection: Connection, since: datetime) -> Iterator[tuple[uuid.UUID, str, datetime]]:
        """Ids and outcomes of what was processed since then, and when, in order of the ids; streamed, in a transaction. Walks the
        primary key."""
        with connection.cursor(name="processed", binary=True) as cursor:
            cursor.itersize = 5000
            cursor.execute(
                sql.SQL("""
                SELECT event_id, outcome, processed_at FROM {}
                WHERE consumer = %s AND processed_at >= %s ORDER BY event_id
                """).format(sql.Identifier(self.schema, "processed_messages")),
                (self.consumer, since),
            )
            yield from cursor

    # --- partitions ---

    def make_partitions(self, connection: Connection, days: int, ahead: int) -> int:
        """Make partitions of the ledger, each of `days` days of UUIDv7 ids, from the running one on; return how many. See
        `outbox.partitions.Partitions.make`.

        Args:
            connection: in autocommit mode.
        """
        now, width = self._now(connection), days * _DAY_MS
        present = self._partitions.present(connection)
        low = max([now - now % width, *(found.high for found in present if found.low <= now)])
        return self._partitions.make(connection, low, now + ahead * width, width, busy=now)

    @staticmethod
    def _now(connection: Connection) -> int:
        """Milliseconds since 1970 by the database's clock."""
        row = _execute(connection, "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
        assert row is not None
        return int(row[0])

    # --- for the doctor ---

    def keeper(self, connection: Connection, margin_seconds: int) -> Keeper | None:
        """Whom the ledger remembers the most for, see `needed_since`; None: no consumer has been here."""
        row = _execute(connection, self._keeper, {"margin": margin_seconds}, binary=True).fetchone()
        return Keeper(*row[:-1]) if row else None

    def seconds_ahead(self, connection: Connection) -> float:
        """How far the partitions reach beyond the clock, up to the first gap; 0: not even to it."""
        now = self._now(connection)
        return (covered_until(self._partitions.present(connection), now) - now) / 1000

    def partitions(self, connection: Connection) -> list[Partition]:
        """Every partition of the ledger."""
        return self._partitions.present(connection)


def _execute(
    connection: Connection, query: Any, parameters: Any = None, *, binary: bool = False
) -> psycopg.Cursor[tuple[Any, ...]]:
    """Execute by a cursor whose rows are tuples, whatever a handler has made of the connection's `row_factory`: of another kind,
    a row that says that nothing is fresh could be taken for one that says an event is.

    Args:
        binary: for what has dates: psycopg reads their text in no other DateStyle than ISO.
    """
    return psycopg.Cursor(connection, row_factory=tuple_row).execute(query, parameters, binary=binary)


@lru_cache(maxsize=64)
def claim_key(schema: str) -> str:
    """The statement of `consumer.first_time`, for any driver connection: it has a row where ``name`` and ``id`` are new. Of
    two transactions with the same key the second waits for the first, for as long as its own lock_timeout says; it locks
    nothing else. Uses the primary key."""
    statement: LiteralString = """
        INSERT INTO {} (consumer, event_id) VALUES (%(name)s, %(id)s)
        ON CONFLICT (consumer, event_id) DO NOTHING RETURNING event_id
    """
    return sql.SQL(statement).format(sql.Identifier(schema, "processed_messages")).as_string(None)


def _millisecond(event_id: str) -> int:
    """What the first 48 bits of a UUID say, as in a UUIDv7."""
    return uuid.UUID(event_id).int >> 80


def _first_id(milliseconds: int) -> str:
    """The smallest UUID whose first 48 bits are this instant, as in a UUIDv7 (RFC 9562, section 5.7)."""
    return str(uuid.UUID(int=milliseconds << 80))


def _milliseconds(seconds: float) -> str:
    """A wait as lock_timeout takes it; 0 would be for ever."""
    return str(max(1, round(seconds * 1000)))


def _array(ids: Iterable[uuid.UUID]) -> str:
    """An array as one text literal, which psycopg sends faster than a list."""
    return "{" + ",".join(map(str, ids)) + "}"


# --- for operators -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters, or waiting events; what is None or empty does not matter.

    Attributes:
        numbers, events: their numbers and event ids; either will do.
        since, until: when they were put aside (a waiting event: when it last failed), the end not included; aware.
        limit: the first so many of them, by number.
    """

    numbers: tuple[int, ...] = ()
    events: tuple[uuid.UUID, ...] = ()
    reason: str | None = None
    topic: str | None = None
    type: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("reason", "topic", "type", "key"):
            value = getattr(self, name)
            if value is not None and not _is_text(value):
                raise SettingsError(f"{name}: must be Unicode text without NUL")
        for name in ("since", "until"):
            value = getattr(self, name)
            if value is not None and value.tzinfo is None:
                raise SettingsError(f"{name}: must carry a time zone, e.g. 2026-01-31T12:00:00+03:00")
        if not all(0 < number < 1 << 63 for number in self.numbers):
            raise SettingsError("id: the number of a dead letter is from 1 to 2^63 - 1")


@dataclass(frozen=True, slots=True)
class Aside:
    """A dead letter, or an event that waits for another try.

    Attributes:
        number: of the dead letter, or of the waiting event.
        event_id: None: it could not be read as an event.
        error_class: of what the handler raised, None: there was no such error.
        attempts: failures that counted.
        last_failed_at: when it was put aside, or failed last.
        stream, stream_id: where it was delivered.
        cut: only the beginning of its fields was kept.
        next_attempt_at: when a waiting event is due.
        give_up_at: when it becomes a dead letter if what it waits for has not come.
    """

    number: int
    event_id: uuid.UUID | None
    topic: str
    type: str | None
    key: str | None
    version: int | None
    reason: str
    error_class: str | None
    error: str | None
    attempts: int
    first_failed_at: datetime
    last_failed_at: datetime
    stream: str
    stream_id: str
    cut: bool = False
    next_attempt_at: datetime | None = None
    give_up_at: datetime | None = None


class Operations:
    """What operators ask about dead letters and waiting events, and do to them, for one consumer name in one schema.

    Nothing here waits for a consumer while it holds what consumers want, but for new ledger rows, which both insert in order
    of their ids. Letters are locked first: nobody waits for such a lock, all pass over what others hold. They are deleted last:
    whoever puts the same delivery aside waits for that, and it waits for nothing any more.
    """

    _LETTER: LiteralString = """
        id, event_id, {topic} AS topic, type, key, version, reason, error_class, error, attempts, first_failed_at, created_at,
        stream, stream_id, cut, NULL::timestamptz, NULL::timestamptz
    """
    _WAITING: LiteralString = """
        id, event_id, topic, type, key, version, reason, error_class, error, attempts, first_failed_at, last_failed_at,
        stream, stream_id, false, next_attempt_at, give_up_at
    """
    #: Letters of before the column, and what is no event, have no topic of their own; streams are named after theirs.
    _TOPIC: LiteralString = "coalesce(topic, split_part(stream, ':', 1))"

    def __init__(self, consumer: str, schema: str = "public") -> None:
        self.consumer, self.schema = consumer, schema
        self._names: dict[str, sql.Composable] = {
            name: sql.Identifier(schema, name)
            for name in ("processed_messages", "dead_letters", "message_failures", "consumer_retention")
        }

    def _sql(self, statement: LiteralString, **parts: sql.Composable) -> sql.Composed:
        return sql.SQL(statement).format(**self._names, **parts)

    def _chosen(
        self, selection: Selection, topic: LiteralString, time: LiteralString
    ) -> tuple[sql.Composed, Parameters]:
        """A WHERE clause, and its parameters."""
        clauses: list[LiteralString] = ["consumer = %(consumer)s"]
        if selection.numbers or selection.events:
            clauses.append("(id = ANY (%(numbers)s::bigint[]) OR event_id = ANY (%(events)s::uuid[]))")
        if selection.reason is not None:
            clauses.append("reason = %(reason)s")
        if selection.topic is not None:
            clauses.append(f"{topic} = %(topic)s")
        if selection.type is not None:
            clauses.append("type = %(type)s")
        if selection.key is not None:
            clauses.append("key = %(key)s")
        if selection.since is not None:
            clauses.append(f"{time} >= %(since)s")
        if selection.until is not None:
            clauses.append(f"{time} < %(until)s")
        parameters = {
            name: getattr(selection, name) for name in ("reason", "topic", "type", "key", "since", "until", "limit")
        }
        parameters |= {
            "numbers": list(selection.numbers),
            "events": _array(selection.events),
            "consumer": self.consumer,
        }
        return sql.SQL("WHERE {}").format(sql.SQL(" AND ").join(map(sql.SQL, clauses))), parameters

    # --- looking ---

    def now(self, connection: Connection) -> datetime:
        """The database's clock."""
        row = connection.execute("SELECT clock_timestamp()", binary=True).fetchone()
        assert row is not None
        now: datetime = row[0]
        return now

    def is_known(self, connection: Connection) -> bool:
        """Whether a process of this consumer was ever here. Uses the primary key."""
        query = self._sql("SELECT FROM {consumer_retention} WHERE consumer = %s LIMIT 1")
        return connection.execute(query, (self.consumer,)).fetchone() is not None

    def letters(self, connection: Connection, selection: Selection) -> Iterator[Aside]:
        """Dead letters in order of their numbers; streamed, in a transaction. Walks dead_letters_pkey, or sorts what an index
        finds."""
        for row in self._stream(connection, self._select_letters(""), *self._where_letters(selection), 1000):
            yield Aside(*row)

    def letters_whole(self, connection: Connection, selection: Selection) -> Iterator[tuple[Aside, list[bytes]]]:
        """The same with the raw fields, names and values in turn; a few at a time, for they may be large."""
        for *row, fields in self._stream(
            connection, self._select_letters(", fields"), *self._where_letters(selection), 10
        ):
            yield Aside(*row), fields

    def waiting(self, connection: Connection, selection: Selection) -> Iterator[Aside]:
        """Waiting events in order of their numbers; as `letters`."""
        where, parameters = self._chosen(selection, "topic", "last_failed_at")
        select = self._sql("SELECT {columns} FROM {message_failures}", columns=sql.SQL(self._WAITING))
        for row in self._stream(connection, select, where, parameters, 1000):
            yield Aside(*row)

    def waiting_whole(self, connection: Connection, selection: Selection) -> Iterator[tuple[Aside, list[bytes]]]:
        """As `letters_whole`."""
        where, parameters = self._chosen(selection, "topic", "last_failed_at")
        select = self._sql("SELECT {columns}, fields FROM {message_failures}", columns=sql.SQL(self._WAITING))
        for *row, fields in self._stream(connection, select, where, parameters, 10):
            yield Aside(*row), fields

    def _select_letters(self, more: LiteralString) -> sql.Composed:
        columns = sql.SQL(self._LETTER).format(topic=sql.SQL(self._TOPIC))
        return self._sql("SELECT {columns}{more} FROM {dead_letters}", columns=columns, more=sql.SQL(more))

    def _where_letters(self, selection: Selection) -> tuple[sql.Composed, Parameters]:
        return self._chosen(selection, self._TOPIC, "created_at")

    @staticmethod
    def _stream(
        connection: Connection, select: sql.Composed, where: sql.Composed, parameters: Parameters, size: int
    ) -> Iterator[tuple[Any, ...]]:
        with connection.cursor(name="aside", binary=True) as cursor:
            cursor.itersize = size
            cursor.execute(sql.SQL("{} {} ORDER BY id LIMIT %(limit)s").format(select, where), parameters)
            yield from cursor

    def numbers(self, connection: Connection, selection: Selection, by_version: bool) -> Iterator[tuple[int, bool]]:
        """Numbers of dead letters, and whether each is the first of its key; streamed, in a transaction.

        Args:
            by_version: in order of their versions, for each key; else of their numbers, and none is called the first.
        """
        where, parameters = self._where_letters(selection)
        first, order = (
            (
                "key IS NULL OR version IS NULL OR 1 = row_number() OVER (PARTITION BY topic, key ORDER BY version, id)",
                "topic, key, version, id",
            )
            if by_version
            else ("false", "id")
        )
        with connection.cursor(name="numbers", binary=True) as cursor:
            cursor.itersize = 5000
            cursor.execute(
                self._sql(
                    "SELECT id, {first} FROM (SELECT id, {topic} AS topic, key, version FROM {dead_letters} {where} "
                    "ORDER BY id LIMIT %(limit)s) chosen ORDER BY {order}",
                    first=sql.SQL(first), topic=sql.SQL(self._TOPIC), where=where, order=sql.SQL(order),
                ),
                parameters,
            )  # fmt: skip
            yield from cursor

    def kinds(self, connection: Connection, selection: Selection, most: int) -> list[tuple[str, str | None, int]]:
        """Reason and type of dead letters and how many there are, up to so many kinds, the most frequent first."""
        where, parameters = self._where_letters(selection)
        return connection.execute(
            self._sql(
                "SELECT reason, type, count(*) FROM (SELECT reason, type FROM {dead_letters} {where} ORDER BY id "
                "LIMIT %(limit)s) chosen GROUP BY reason, type ORDER BY 3 DESC, 1, 2 LIMIT %(most)s",
                where=where,
            ),
            parameters | {"most": most},
        ).fetchall()

    def held_back(self, connection: Connection, selection: Selection) -> int:
        """How many events wait for versions before theirs of the keys of these letters, and are later than them."""
        where, parameters = self._where_letters(selection)
        row = connection.execute(
            self._sql(
                "SELECT count(*) FROM {message_failures} w WHERE consumer = %(consumer)s AND reason = 'gap' AND EXISTS ("
                "SELECT FROM (SELECT {topic} AS topic, key, version FROM {dead_letters} {where} ORDER BY id LIMIT %(limit)s) d "
                "WHERE d.topic = w.topic AND d.key = w.key AND d.version < w.version)",
                topic=sql.SQL(self._TOPIC), where=where,
            ),
            parameters,
        ).fetchone()  # fmt: skip
        assert row is not None
        return int(row[0])

    # --- one step of requeue and discard; in a transaction ---

    def be_patient(self, connection: Connection, seconds: float) -> None:
        """Wait for no lock for longer, to the end of the transaction."""
        connection.execute("SELECT set_config('lock_timeout', %s, true)", (_milliseconds(seconds),))

    def hold(
        self, connection: Connection, numbers: Sequence[int], lock: bool
    ) -> list[tuple[int, uuid.UUID | None, bool]]:
        """Number, event id, and whether it is cut, of those of the letters that are there, in order of their numbers; with
        `lock` they are locked, but for those that somebody else has, which are passed over."""
        query = self._sql(
            "SELECT id, event_id, cut FROM {dead_letters} WHERE consumer = %s AND id = ANY (%s) ORDER BY id {lock}",
            lock=sql.SQL("FOR UPDATE SKIP LOCKED" if lock else ""),
        )
        return connection.execute(query, (self.consumer, list(numbers))).fetchall()

    def expect(self, connection: Connection, ids: Iterable[uuid.UUID]) -> set[uuid.UUID]:
        """Insert the ledger rows, as of waiting events, of those that the ledger has forgotten, in order of their ids; returns
        which. Waits for who inserts the same."""
        query = self._sql("""
            INSERT INTO {processed_messages} (consumer, event_id, outcome)
            SELECT %s, event_id, 'waiting' FROM unnest(%s::uuid[]) WITH ORDINALITY AS batch (event_id, n) ORDER BY n
            ON CONFLICT (consumer, event_id) DO NOTHING RETURNING event_id
        """)
        return {event_id for (event_id,) in connection.execute(query, (self.consumer, _array(sorted(ids))))}

    def outcomes(self, connection: Connection, ids: Iterable[uuid.UUID], lock: bool) -> dict[uuid.UUID, str]:
        """What the ledger says of the events; with `lock` the rows are locked, but for those that somebody else has, which
        are passed over. Uses the primary key."""
        query = self._sql(
            "SELECT event_id, outcome FROM {processed_messages} WHERE consumer = %s AND event_id = ANY (%s::uuid[]) "
            "ORDER BY event_id {lock}",
            lock=sql.SQL("FOR UPDATE SKIP LOCKED" if lock else ""),
        )
        return dict(connection.execute(query, (self.consumer, _array(ids))).fetchall())

    def requeue(self, connection: Connection, numbers: Sequence[int], past_gap: Sequence[int]) -> set[int]:
        """Make waiting events, due now, of letters that are locked, and whose ledger rows are; returns the numbers of those
        for whose events there was none yet. `past_gap`: those that need not wait for versions before them, unless one of
        these waits itself. Reads the waiting events' table where there are such."""
        rows = connection.execute(
            self._sql(
                """
                WITH moved AS (
                    INSERT INTO {message_failures} (
                        consumer, stream, stream_id, topic, event_id, type, key, version, fields, reason, past_gap,
                        error_class, error, first_failed_at, last_failed_at)
                    SELECT consumer, stream, stream_id, {topic}, event_id, type, key, version, fields, 'failed',
                           id = ANY (%(past_gap)s::bigint[]) AND NOT EXISTS (
                               SELECT FROM {message_failures} w WHERE w.consumer = d.consumer AND w.topic = d.topic
                               AND w.key = d.key AND w.version < d.version),
                           error_class, error, first_failed_at, created_at
                    FROM {dead_letters} d WHERE id = ANY (%(numbers)s::bigint[])
                    ORDER BY array_position(%(numbers)s::bigint[], id)
                    ON CONFLICT (consumer, event_id) DO NOTHING RETURNING event_id
                ), marked AS (
                    UPDATE {processed_messages} p SET outcome = 'waiting', processed_at = now()
                    FROM moved WHERE p.consumer = %(consumer)s AND p.event_id = moved.event_id
                )
                DELETE FROM {dead_letters} WHERE id = ANY (%(numbers)s::bigint[])
                AND (event_id IS NULL OR event_id IN (SELECT event_id FROM moved)) RETURNING id
                """,
                topic=sql.SQL(self._TOPIC),
            ),
            {"consumer": self.consumer, "numbers": list(numbers), "past_gap": list(past_gap)},
        )
        return {number for (number,) in rows}

    def discard(self, connection: Connection, numbers: Sequence[int]) -> None:
        """Delete letters that are locked."""
        connection.execute(self._sql("DELETE FROM {dead_letters} WHERE id = ANY (%s)"), (list(numbers),))

    def forget(self, connection: Connection, ids: Iterable[uuid.UUID]) -> None:
        """Delete the ledger rows (which are locked) of events that were put aside and not applied."""
        query = self._sql(
            "DELETE FROM {processed_messages} WHERE consumer = %s AND event_id = ANY (%s::uuid[]) AND outcome = 'dead'"
        )
        connection.execute(query, (self.consumer, _array(ids)))

    # --- cancelling; in a transaction ---

    def cancel(self, connection: Connection, event_id: uuid.UUID) -> tuple[str | None, bool]:
        """See that nobody runs this any more: by a ledger row, or that of what waits, which waits no more. Returns the outcome that
        the ledger had before, None: no row; and whether it is cancelled now: nothing that was done before is, nor what waits and
        somebody is at. Waits for who runs it for the first time. Uses the primary key, and message_failures_event."""
        inserted = connection.execute(
            self._sql("""
            INSERT INTO {processed_messages} (consumer, event_id, outcome) VALUES (%s, %s, 'cancelled')
            ON CONFLICT (consumer, event_id) DO NOTHING
            """),
            (self.consumer, event_id),
        ).rowcount
        if inserted:
            return None, True
        waits = connection.execute(
            self._sql("""
            WITH waits AS (
                DELETE FROM {message_failures} WHERE id IN (
                    SELECT id FROM {message_failures} WHERE consumer = %(consumer)s AND event_id = %(id)s
                    FOR UPDATE SKIP LOCKED)
                RETURNING event_id
            )
            UPDATE {processed_messages} p SET outcome = 'cancelled', processed_at = now() FROM waits
            WHERE p.consumer = %(consumer)s AND p.event_id = waits.event_id AND p.outcome = 'waiting'
            """),
            {"consumer": self.consumer, "id": event_id},
        ).rowcount
        if waits:
            return "waiting", True
        return self.outcomes(connection, [event_id], lock=False).get(event_id), False

    # --- sums ---

    def sums(self, connection: Connection) -> list[tuple[str, str, int, float, float | None]]:
        """Of waiting events and dead letters, by reason: ``waiting`` or ``dead``, the reason, how many, seconds since the
        oldest failed first, and for how many seconds the one that is due the longest has been due. Reads the consumer's part
        of both tables."""
        return connection.execute(
            self._sql("""
            SELECT 'waiting', reason, count(*), extract(epoch FROM clock_timestamp() - min(first_failed_at))::float8,
                   greatest(0, extract(epoch FROM clock_timestamp() - min(next_attempt_at)))::float8
            FROM {message_failures} WHERE consumer = %(consumer)s GROUP BY reason
            UNION ALL
            SELECT 'dead', reason, count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8, NULL
            FROM {dead_letters} WHERE consumer = %(consumer)s GROUP BY reason
            ORDER BY 1 DESC, 2
            """),
            {"consumer": self.consumer},
        ).fetchall()


def queues_read(connection: Connection, schema: str) -> list[tuple[str, str]]:
    """Each consumer that was ever seen in this schema, and a queue's topic that it reads. Reads a small table, a row a topic."""
    table = sql.Identifier(schema, "consumer_retention")
    query = sql.SQL("SELECT consumer, topic FROM {} WHERE starts_with(topic, %s) ORDER BY 1, 2").format(table)
    return connection.execute(query, (QUEUE_PREFIX,)).fetchall()


def _is_text(text: str) -> bool:
    """Whether PostgreSQL can have it: what is no text in a terminal's encoding comes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\x00" not in text
