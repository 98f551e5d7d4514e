"""All SQL of the consumer's side.

Invariants:

* A row in ``processed_messages`` is inserted in the transaction of the effect, and before it: of two transactions with the
  same event the second waits for the first, and then either finds the row (duplicate) or takes its place.
* Rows are inserted in the order of their event ids, and versions locked in the order of their keys, so that overlapping
  batches wait for each other instead of deadlocking.
* A dead letter is written together with the event's ledger row, so an event never ends both applied and dead.
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
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from outbox.partitions import Partition, Partitions, covered_until

Connection = psycopg.Connection[Any]

_DAY_MS = 86_400_000

#: Longest wait for another transaction, where it does not matter how long it is.
_PATIENCE_SECONDS = 2.0
#: What is kept of an entry that is put aside: this many bytes, of so many fields.
KEPT_BYTES = 1 << 20
_KEPT_FIELDS = 512


@dataclass(frozen=True, slots=True, order=True)
class Entity:
    """What a version counts for: the key, for one type of a topic."""

    topic: str
    type: str
    key: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A delivery to put aside, as it arrived."""

    stream: str
    receipt: str
    event_id: uuid.UUID | None
    reason: str
    error: str
    fields: Mapping[bytes, bytes]
    attempts: int

    def parts(self) -> list[bytes]:
        """Names and values in turn; of an entry of more than `KEPT_BYTES` the beginning of each of the first 512 fields."""
        parts = [part for pair in self.fields.items() for part in pair]
        if self.size <= KEPT_BYTES:
            return parts
        kept = parts[: 2 * _KEPT_FIELDS]
        return [part[: KEPT_BYTES // len(kept)] for part in kept]

    @property
    def size(self) -> int:
        """Bytes of all names and values."""
        return sum(len(name) + len(value) for name, value in self.fields.items())


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
        self._held: dict[str, datetime] = {}  # partitions of old ids, and when a row of theirs was processed
        names = {
            name: sql.Identifier(schema, name)
            for name in ("processed_messages", "entity_versions", "dead_letters", "consumer_retention")
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
        self._mark = compose("""
            UPDATE {processed_messages} SET outcome = %s WHERE consumer = %s AND event_id = ANY (%s::uuid[])
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
        self._count_dead = compose(
            "SELECT reason, count(*) FROM {dead_letters} WHERE consumer = %s GROUP BY reason ORDER BY reason"
        )
        self._bury = bounded("""
            INSERT INTO {dead_letters} (consumer, stream, stream_id, event_id, reason, error, fields, attempts)
            SELECT %s, %s, %s, %s::uuid, %s, %s, %s::bytea[], %s::integer FROM before
            ON CONFLICT (consumer, stream, stream_id) DO NOTHING RETURNING id
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
        tag = f"consumer {self.consumer} *"
        rows = connection.execute(
            self._claim, (_milliseconds(patience_seconds), self.consumer, tag, _array(sorted(ids)))
        )
        return {uuid.UUID(found) for (found,) in rows if found}

    @staticmethod
    def tag(connection: Connection) -> bytes | None:
        """The application's name as PostgreSQL last said it. It says it of itself whenever the name changes, so when a
        tagged transaction ends, too; asking costs nothing."""
        return None if connection.closed else connection.pgconn.parameter_status(b"application_name")

    def present(self, connection: Connection, ids: Iterable[uuid.UUID]) -> set[uuid.UUID]:
        """Those of the events that have a ledger row. Uses the primary key."""
        rows = connection.execute(self._present, (self.consumer, _array(ids)))
        return {uuid.UUID(found) for (found,) in rows}

    def mark(self, connection: Connection, ids: Iterable[uuid.UUID], outcome: str) -> None:
        """Say in the ledger rows (inserted by this transaction) how the events ended, if not ``applied``."""
        connection.execute(self._mark, (outcome, self.consumer, _array(ids)))

    def forget(self, connection: Connection, ids: Iterable[uuid.UUID]) -> None:
        """Delete the rows of events that were not processed after all. Uses the primary key."""
        connection.execute(self._forget, (self.consumer, _array(ids)))

    def lock_versions(
        self, connection: Connection, entities: Iterable[Entity], patience_seconds: float = _PATIENCE_SECONDS
    ) -> dict[Entity, int | None]:
        """Lock the entities against other consumers of the name, in order; returns the versions applied so far.

        New entities get a row first, since what is not there cannot be locked. Waits for each for `patience_seconds`.
        Uses the primary key.
        """
        patience = _milliseconds(patience_seconds)
        ordered = sorted(set(entities))
        columns = [[e.topic for e in ordered], [e.type for e in ordered], [e.key for e in ordered]]
        connection.execute(self._touch, (patience, self.consumer, *columns))
        rows = connection.execute(self._lock, (patience, self.consumer, *columns))
        return {Entity(topic, kind, key): version for topic, kind, key, version in rows if topic}

    def raise_versions(self, connection: Connection, versions: Mapping[Entity, int]) -> None:
        """Write the highest versions applied, of entities that this transaction has locked."""
        ordered = sorted(versions)
        connection.execute(
            self._raise,
            (
                [e.topic for e in ordered], [e.type for e in ordered], [e.key for e in ordered],
                [versions[e] for e in ordered], self.consumer,
            ),
        )  # fmt: skip

    def bury(
        self, connection: Connection, letters: Sequence[DeadLetter], patience_seconds: float = _PATIENCE_SECONDS
    ) -> None:
        """Put deliveries aside, raw; burying one twice keeps the first. Waits for who buries the same for so long."""
        for letter in letters:
            connection.execute(
                self._bury,
                (
                    _milliseconds(patience_seconds), self.consumer, letter.stream, letter.receipt, letter.event_id,
                    letter.reason, letter.error, letter.parts(), letter.attempts,
                ),
            )  # fmt: skip

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
        connection.execute(
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
        row = connection.execute(self._keeper, {"margin": margin_seconds}).fetchone()
        assert row is not None
        needed: datetime = row[-1]
        return needed

    def drop_partition(self, connection: Connection, before: datetime) -> str | None:
        """Drop the oldest partition of ours of which all UUIDv7 ids are from before then, and no row was processed later
        (ids may be much older than their events); returns its name.

        It holds rows of every consumer. See `outbox.partitions.Partitions.drop_oldest`. For rows processed later it looks
        into processed_messages_time, and reads the last pages, which are not in there yet: for a second at most, or it is
        another time's turn. What is found is remembered here, so that it is not looked for every time.

        Args:
            connection: in autocommit mode.
        """

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
                    row = connection.execute(
                        sql.SQL("SELECT processed_at FROM {} WHERE processed_at >= %s LIMIT 1").format(child), (before,)
                    ).fetchone()
            except psycopg.errors.QueryCanceled:
                return False
            if row is not None:
                self._held[found.name] = row[0]
            return row is None

        return self._partitions.drop_oldest(connection, is_old)

    def delete_old(self, connection: Connection, before: datetime, limit: int) -> int:
        """Delete up to `limit` rows each of the ledger's default partition (ids that are not UUIDv7) that were processed
        before then, and of the versions that stand still since, of every consumer. Reads both tables; locks only these
        rows."""
        deleted = 0
        versions = sql.Identifier(self.schema, "entity_versions")
        for table, column in ((self._partitions.default(connection), "processed_at"), (versions, "updated_at")):
            if table is None:
                continue
            deleted += connection.execute(
                sql.SQL("""
                DELETE FROM {table} WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM {table} WHERE {column} < %s LIMIT %s FOR UPDATE SKIP LOCKED))
                """).format(table=table, column=sql.Identifier(column)),
                (before, limit),
            ).rowcount
        return deleted

    def delete_dead(self, connection: Connection, before: datetime, days: int, limit: int) -> int:
        """Delete up to `limit` of this consumer's dead letters that are older than so many days, and were put aside `before`
        then, so that none goes before its ledger row may (see `needed_since`). Walks dead_letters_time; locks only these
        rows, and passes over those that somebody works with."""
        table = sql.Identifier(self.schema, "dead_letters")
        return connection.execute(
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
        gone = connection.execute(
            sql.SQL("""
            DELETE FROM {table} WHERE consumer = %(consumer)s AND NOT EXISTS (
                SELECT FROM {table} WHERE consumer = %(consumer)s
                AND seen_at >= clock_timestamp() - make_interval(secs => %(unseen)s))
            """).format(table=table),
            {"consumer": self.consumer, "unseen": unseen_seconds},
        ).rowcount
        row = connection.execute(
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
        row = connection.execute("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
        assert row is not None
        return int(row[0])

    # --- for the doctor ---

    def keeper(self, connection: Connection, margin_seconds: int) -> Keeper | None:
        """Whom the ledger remembers the most for, see `needed_since`; None: no consumer has been here."""
        row = connection.execute(self._keeper, {"margin": margin_seconds}).fetchone()
        return Keeper(*row[:-1]) if row else None

    def seconds_ahead(self, connection: Connection) -> float:
        """How far the partitions reach beyond the clock, up to the first gap; 0: not even to it."""
        now = self._now(connection)
        return (covered_until(self._partitions.present(connection), now) - now) / 1000

    def partitions(self, connection: Connection) -> list[Partition]:
        """Every partition of the ledger."""
        return self._partitions.present(connection)

    def dead_letters(self, connection: Connection) -> dict[str, int]:
        """How many deliveries of this consumer are put aside, by reason. Walks its part of dead_letters_delivery."""
        rows = connection.execute(self._count_dead, (self.consumer,))
        return dict(rows.fetchall())


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
