"""All SQL of the producer's side: the insert of the writer, and how the relay reads the outbox without touching it.

Invariants:

* Rows of the outbox are inserted once and never updated or deleted. (One exception moves rows from the default partition
  to their own, see `outbox.partitions`; a moved row keeps its position and transaction id.)
* The relay reads **windows between two snapshots**: the rows visible in `snap` and not in `prev`, ordered by position.
  Ids are handed out before commit, so neither a last id nor a lowest running transaction will do: the first loses
  what commits late, the second stops for any open transaction and breaks the order of a key. In a window nothing is
  lost, since every committed row is visible in some snapshot for the first time; and one key's events keep commit order,
  since two transactions that change a key wait for each other: the later one's event is never visible in an earlier
  window, and has the higher position inside one. The idea is that of PgQ.
* A **sealed** batch is (prev, snap, after, last]: reading it again gives the same rows in the same order, since
  visibility in a given snapshot never changes.
* ``outbox_batch.seq`` is dense and unique: of two relays that seal the same number one fails, whatever it believes.

Every name is qualified with the schema; everything works in autocommit, through a transaction pooler, and with an empty
search_path.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox import schema as schemas
from outbox.envelope import ROW
from outbox.errors import AlreadySealed
from outbox.partitions import Partition, Partitions, covered_until
from outbox.tables import COLUMNS

Connection = psycopg.Connection[Any]
Row = tuple[Any, ...]  #: `outbox.envelope.ROW`, then position and topic
KEY, POSITION, TOPIC = ROW.index("key"), len(ROW), len(ROW) + 1

#: A snapshot in which nothing is visible.
BEGINNING: Final = "1:1:"
_ROW: Final = (
    "event_id::text, type, key, version::text, content_type, "
    """to_char("time" AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), source, headers::text, position, topic"""
)
_IN_WINDOW: Final = (
    "NOT pg_visible_in_snapshot(xid, %(prev)s::pg_snapshot) AND pg_visible_in_snapshot(xid, %(snap)s::pg_snapshot)"
)
_SELECTED: Final = (
    "position > %(after)s AND (%(up_to_position)s::bigint IS NULL OR position <= %(up_to_position)s::bigint)"
    " AND (%(topic)s::text IS NULL OR topic = %(topic)s)"
    " AND (%(key)s::text IS NULL OR key = %(key)s) AND (%(type)s::text IS NULL OR type = %(type)s)"
    " AND (%(ids)s::uuid[] IS NULL OR event_id = ANY (%(ids)s::uuid[]))"
    " AND (%(positions)s::bigint[] IS NULL OR position = ANY (%(positions)s::bigint[]))"
    " AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)"
    " AND (%(until)s::timestamptz IS NULL OR created_at < %(until)s)"
    # Of a range of batches: what the last one and those before have, and those before the first have not.
    " AND (%(prev)s::pg_snapshot IS NULL OR xid >= pg_snapshot_xmin(%(prev)s::pg_snapshot)"
    " AND NOT pg_visible_in_snapshot(xid, %(prev)s::pg_snapshot)"
    " AND (position > %(batch_after)s::bigint OR NOT pg_visible_in_snapshot(xid, %(snap)s::pg_snapshot))"
    " AND (pg_visible_in_snapshot(xid, %(last_prev)s::pg_snapshot)"
    " OR position <= %(last)s::bigint AND pg_visible_in_snapshot(xid, %(last_snap)s::pg_snapshot)))"
)
#: The server's timeline, in the first 8 hexadecimal digits of the name of a WAL file.
_TIMELINE: Final = "('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer"
_BATCH: Final = "b.seq, b.token::text, b.epoch, b.prev::text, b.snap::text, b.after, b.last, b.done, b.events"


@dataclass(frozen=True, slots=True)
class Window:
    """Where the relay reads: rows visible in `snap` and not in `prev`, at positions above `after`.

    `open` says whether there may be such rows; a closed window only remembers `prev`.
    """

    prev: str
    snap: str
    after: int
    open: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A sealed batch; `done` if it is the last of its window."""

    seq: int
    token: str
    epoch: int
    prev: str
    snap: str
    after: int
    last: int
    done: bool
    events: int

    @property
    def rest(self) -> Window:
        """Where to read on after this batch."""
        if self.done:
            return Window(prev=self.snap, snap=self.snap, after=self.last, open=False)
        return Window(prev=self.prev, snap=self.snap, after=self.last, open=True)


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A stream's share of a batch."""

    stream: str
    lanes: int
    events: int


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group of a stream; everything of the stream up to the batch `acked` is acknowledged by it."""

    stream: str
    name: str
    acked: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is compared with a ledger.

    Attributes:
        run_at: of a job, when it is to run, as its producer has it; None: at once.
    """

    id: uuid.UUID
    position: int
    type: str
    created_at: datetime
    run_at: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """How many events of a topic are selected, when the oldest and the newest of them were recorded, and the last position."""

    topic: str
    events: int
    oldest: datetime
    newest: datetime
    last: int


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The newest batch that a stream is made of, and over how many lanes its topic was spread then."""

    stream: str
    seq: int
    token: str
    lanes: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Why the relay publishes nothing to a stream (``memory`` or ``length``), and for how long it has not."""

    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How long a declared group has acknowledged nothing, and how many events it has not acknowledged."""

    stream: str
    name: str
    silent_seconds: float
    events: int


class Store:
    """The statements, for one schema. Connections are in autocommit mode and passed in by the caller."""

    def __init__(self, schema: str = "public") -> None:
        self.schema = schema
        self._names: dict[str, sql.Composable] = {
            "batch": sql.SQL(_BATCH),
            "row": sql.SQL(_ROW),
            "in_window": sql.SQL(_IN_WINDOW),
            "selected": sql.SQL(_SELECTED),
        } | {
            name: sql.Identifier(schema, name)
            for name in ("outbox", "outbox_batch", "outbox_stream", "outbox_epoch", "outbox_group", "outbox_pause")
        }
        self._partitions = Partitions(schema, "outbox", "position")
        self._composed: dict[tuple[str, int | None], sql.Composed] = {}

    def _sql(self, statement: str, timeline: int | None = None) -> sql.Composed:
        """The statement; ``{there}`` in it is a condition: the server is on this timeline, if one is given."""
        composed = self._composed.get((statement, timeline))
        if composed is None:
            there = sql.SQL("TRUE" if timeline is None else f"{_TIMELINE} = {timeline}")
            composed = sql.SQL(statement).format(**self._names, there=there)
            self._composed[statement, timeline] = composed
        return composed

    # --- reading the outbox ---

    def advance(self, connection: Connection, window: Window) -> Window:
        """The next window after a closed one: open if anything has become visible since, else with a newer `prev`.

        Uses outbox_xid twice (two probes for a partition when idle); locks nothing. The two bounds matter: without them
        a bulk transaction's uncommitted rows would be walked by every look. MATERIALIZED keeps the planner from walking
        the primary key for the smallest position.
        """
        row = connection.execute(
            self._sql("""
            WITH fresh AS MATERIALIZED (
                SELECT position FROM {outbox}
                WHERE xid >= pg_snapshot_xmax(%(prev)s::pg_snapshot) AND xid < pg_snapshot_xmax(pg_current_snapshot())
                UNION ALL
                SELECT position FROM {outbox}
                WHERE xid = ANY (ARRAY(
                    SELECT x FROM pg_snapshot_xip(%(prev)s::pg_snapshot) x
                    WHERE pg_visible_in_snapshot(x, pg_current_snapshot())))
            )
            SELECT pg_current_snapshot()::text, min(position) FROM fresh
            """),
            {"prev": window.prev},
        ).fetchone()
        assert row is not None
        snap, low = row
        if low is None:
            return Window(prev=snap, snap=snap, after=window.after, open=False)
        return Window(prev=window.prev, snap=snap, after=low - 1, open=True)

    def page(self, connection: Connection, window: Window, rows: int, size_bytes: int) -> tuple[list[Row], bool]:
        """The next rows of an open window, at most `rows` and up to the one that reaches `size_bytes` of payload, and whether
        they are its last. Walks the primary key from `after`; locks nothing."""
        parameters = {
            "after": window.after, "prev": window.prev, "snap": window.snap, "rows": rows,
            "bytes": size_bytes, "share": size_bytes // rows,
        }  # fmt: skip
        # Where no payload is over its share there is nothing to add up, and that costs half as much.
        found = self._rows(
            connection,
            self._sql("""
            SELECT CASE WHEN octet_length(data) <= %(share)s THEN data END, {row}
            FROM {outbox} WHERE position > %(after)s AND {in_window} ORDER BY position LIMIT %(rows)s
            """),
            parameters,
        )
        if all(row[0] is not None for row in found):
            return found, len(found) < rows
        found = self._rows(
            connection,
            self._sql("""
            SELECT data, {row}, bytes
            FROM (
                SELECT *, sum(octet_length(data)) OVER (ORDER BY position ROWS UNBOUNDED PRECEDING) AS bytes
                FROM {outbox} WHERE position > %(after)s AND {in_window} ORDER BY position LIMIT %(rows)s
            ) page
            WHERE bytes - octet_length(data) < %(bytes)s
            ORDER BY position
            """),
            parameters,
        )
        return found, len(found) < rows and found[-1][-1] < size_bytes

    def read_again(self, connection: Connection, batch: Batch, topic: str) -> list[Row]:
        """The rows of a sealed batch that are of one topic, in order. Walks the primary key between two positions."""
        return self._rows(
            connection,
            self._sql("""
            SELECT data, {row}
            FROM {outbox} WHERE position > %(after)s AND position <= %(last)s AND {in_window} AND topic = %(topic)s
            ORDER BY position
            """),
            {
                "after": batch.after, "last": batch.last, "prev": batch.prev, "snap": batch.snap, "topic": topic
            },
        )  # fmt: skip

    @staticmethod
    def _rows(connection: Connection, statement: sql.Composed, parameters: dict[str, Any]) -> list[Row]:
        with connection.cursor(binary=True) as cursor:
            return cursor.execute(statement, parameters).fetchall()

    # --- batches ---

    def seal(
        self, connection: Connection, batch: Batch, parts: Sequence[StreamPart], timeline: int | None = None
    ) -> Batch:
        """Seal a batch (its token is made here) with what it brings to each stream; durable when it returns.

        Args:
            timeline: where the batch was read; None: not known.

        Raises:
            AlreadySealed: another relay has sealed this number, perhaps so long ago that retention has deleted it; or the
                server is on another timeline: behind a pooler, nothing else tells a relay that its snapshots are another
                server's.
        """
        try:
            row = connection.execute(
                self._sql("""
                WITH sealed AS (
                    INSERT INTO {outbox_batch} (seq, epoch, prev, snap, after, last, done, events)
                    SELECT %s, %s, %s::pg_snapshot, %s::pg_snapshot, %s, %s, %s, %s
                    WHERE {there} AND (SELECT coalesce(max(seq), 0) FROM {outbox_batch}) = %s
                    RETURNING seq, token
                ), parts AS (
                    INSERT INTO {outbox_stream} (stream, seq, lanes, events)
                    SELECT part.stream, sealed.seq, part.lanes, part.events
                    FROM sealed, unnest(%s::text[], %s::integer[], %s::integer[]) AS part (stream, lanes, events)
                )
                SELECT token::text FROM sealed
                """, timeline),
                (
                    batch.seq, batch.epoch, batch.prev, batch.snap, batch.after, batch.last, batch.done, batch.events,
                    batch.seq - 1, [p.stream for p in parts], [p.lanes for p in parts], [p.events for p in parts],
                ),
            ).fetchone()  # fmt: skip
        except psycopg.errors.UniqueViolation as error:
            raise AlreadySealed(f"batch {batch.seq} is another relay's") from error
        if row is None:
            raise AlreadySealed(f"batch {batch.seq} is past, or was read on another timeline")
        return replace(batch, token=row[0])

    def newest(self, connection: Connection) -> Batch | None:
        """The newest sealed batch."""
        return self.batch_up_to(connection, 2**63 - 1)

    def oldest_seq(self, connection: Connection) -> int | None:
        """The oldest batch that is still there. Walks outbox_batch_pkey."""
        row = connection.execute(self._sql("SELECT min(seq) FROM {outbox_batch}")).fetchone()
        assert row is not None
        return None if row[0] is None else int(row[0])

    def token(self, connection: Connection, seq: int) -> str | None:
        """The token of a batch, None if it is not there. Uses outbox_batch_pkey."""
        row = connection.execute(self._sql("SELECT token::text FROM {outbox_batch} WHERE seq = %s"), (seq,)).fetchone()
        return row[0] if row else None

    def ours(self, connection: Connection, labels: Iterable[str]) -> set[str]:
        """Those labels (`Marker.label`) that are of a batch of this outbox, or of one older than those kept. Uses
        outbox_batch_pkey."""
        pairs = [(int(seq), token) for seq, _, token in (label.partition(":") for label in labels)]
        pairs = [(seq, token) for seq, token in pairs if seq < 2**63]
        if not pairs:
            return set()
        rows = connection.execute(
            self._sql("""
            SELECT label.seq, label.token FROM unnest(%s::bigint[], %s::text[]) AS label (seq, token)
            WHERE EXISTS (SELECT FROM {outbox_batch} b WHERE b.seq = label.seq AND left(b.token::text, 8) = label.token)
                OR label.seq < (SELECT min(seq) FROM {outbox_batch})
            """),
            ([seq for seq, _ in pairs], [token for _, token in pairs]),
        )
        return {f"{seq}:{token}" for seq, token in rows}

    def batches_after(
        self, connection: Connection, stream: str, seq: int, limit: int
    ) -> list[tuple[Batch, StreamPart]]:
        """The next batches that a stream is made of, oldest first. Uses outbox_stream_pkey and outbox_batch_pkey."""
        rows = connection.execute(
            self._sql("""
            SELECT {batch}, s.stream, s.lanes, s.events
            FROM {outbox_stream} s JOIN {outbox_batch} b USING (seq)
            WHERE s.stream = %s AND s.seq > %s ORDER BY s.seq LIMIT %s
            """),
            (stream, seq, limit),
        ).fetchall()
        return [(Batch(*row[:9]), StreamPart(*row[9:])) for row in rows]

    def heads(self, connection: Connection) -> list[StreamHead]:
        """The newest batch of every stream. Skips through outbox_stream_pkey, one probe a stream."""
        rows = connection.execute(
            self._sql("""
            WITH RECURSIVE streams AS (
                (SELECT stream FROM {outbox_stream} ORDER BY stream LIMIT 1)
                UNION ALL
                SELECT (SELECT stream FROM {outbox_stream} s WHERE s.stream > streams.stream ORDER BY stream LIMIT 1)
                FROM streams WHERE stream IS NOT NULL
            )
            SELECT streams.stream, head.seq, b.token::text, head.lanes
            FROM streams,
                 LATERAL (SELECT seq, lanes FROM {outbox_stream} s WHERE s.stream = streams.stream
                          ORDER BY seq DESC LIMIT 1) head
                 JOIN {outbox_batch} b ON b.seq = head.seq
            WHERE streams.stream IS NOT NULL
            """)
        ).fetchall()
        return [StreamHead(*row) for row in rows]

    # --- consumer groups ---

    def groups(self, connection: Connection) -> list[Group]:
        """Every declared group of every stream. Reads the whole table: a few rows a stream."""
        rows = connection.execute(self._sql("SELECT stream, name, acked FROM {outbox_group} ORDER BY stream, name"))
        return [Group(*row) for row in rows]

    def progress(self, connection: Connection) -> list[GroupProgress]:
        """How far every declared group is. Walks for each the part of outbox_stream_pkey that it has not acknowledged."""
        rows = connection.execute(
            self._sql("""
            SELECT g.stream, g.name, extract(epoch FROM clock_timestamp() - g.acked_at)::float8,
                   coalesce((SELECT sum(s.events) FROM {outbox_stream} s
                             WHERE s.stream = g.stream AND s.seq > g.acked), 0)::bigint
            FROM {outbox_group} g ORDER BY g.stream, g.name
            """)
        )
        return [GroupProgress(*row) for row in rows]

    def see_groups(self, connection: Connection, groups: Sequence[Group], timeline: int | None = None) -> None:
        """Declare groups that are new, and write down how far they are; `acked` never goes back. A group that stands
        still is written once a minute. Nothing is, where the server is not on `timeline` (see `seal`). Locks rows in order
        of the key; uses outbox_group_pkey."""
        ordered = sorted(groups, key=lambda group: (group.stream, group.name))
        connection.execute(
            self._sql("""
            INSERT INTO {outbox_group} AS g (stream, name, acked)
            SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[]) WHERE {there}
            ON CONFLICT (stream, name) DO UPDATE
            SET acked = greatest(g.acked, excluded.acked), seen_at = clock_timestamp(),
                acked_at = CASE WHEN excluded.acked > g.acked THEN clock_timestamp() ELSE g.acked_at END
            WHERE excluded.acked > g.acked OR g.seen_at < clock_timestamp() - interval '1 minute'
            """, timeline),
            ([g.stream for g in ordered], [g.name for g in ordered], [g.acked for g in ordered]),
        )  # fmt: skip

    def drop_group(self, connection: Connection, name: str) -> list[str]:
        """Forget a group; returns the streams that it was declared for."""
        rows = connection.execute(self._sql("DELETE FROM {outbox_group} WHERE name = %s RETURNING stream"), (name,))
        return sorted(stream for (stream,) in rows)

    # --- pauses ---

    def pauses(self, connection: Connection) -> dict[str, Pause]:
        """The streams that are paused, as the relay last wrote it down. Reads the whole table: a row a paused stream."""
        rows = connection.execute(
            self._sql(
                "SELECT stream, reason, extract(epoch FROM clock_timestamp() - since)::float8 FROM {outbox_pause}"
            )
        )
        return {stream: Pause(reason, seconds) for stream, reason, seconds in rows}

    def write_pauses(self, connection: Connection, changes: Mapping[str, str | None]) -> None:
        """Write down why streams are paused, or (None) that they go on. A pause for the reason that is there already has
        been since then. Each statement locks its rows in order of the streams; both use outbox_pause_pkey."""
        if gone := [stream for stream, reason in changes.items() if not reason]:
            connection.execute(
                self._sql("""
                DELETE FROM {outbox_pause} WHERE stream IN (
                    SELECT stream FROM {outbox_pause} WHERE stream = ANY (%s) ORDER BY stream FOR UPDATE)
                """),
                (gone,),
            )
        if paused := sorted((stream, reason) for stream, reason in changes.items() if reason):
            connection.execute(
                self._sql("""
                INSERT INTO {outbox_pause} AS p (stream, reason) SELECT * FROM unnest(%s::text[], %s::text[])
                ON CONFLICT (stream) DO UPDATE SET reason = excluded.reason, since = clock_timestamp()
                WHERE p.reason <> excluded.reason
                """),
                ([stream for stream, _ in paused], [reason for _, reason in paused]),
            )

    def events_between(self, connection: Connection, stream: str, after: int, last: int) -> int:
        """How many events of the stream are in the batches (after, last]. Walks that part of outbox_stream_pkey."""
        row = connection.execute(
            self._sql(
                "SELECT coalesce(sum(events), 0) FROM {outbox_stream} WHERE stream = %s AND seq > %s AND seq <= %s"
            ),
            (stream, after, last),
        ).fetchone()
        assert row is not None
        return int(row[0])

    # --- epochs ---

    def epoch(self, connection: Connection) -> int:
        """The current epoch."""
        row = connection.execute(self._sql("SELECT max(epoch) FROM {outbox_epoch}")).fetchone()
        assert row is not None
        return int(row[0] or 1)

    def open_epoch(self, connection: Connection, epoch: int) -> None:
        """Begin an epoch; nothing happens if it has begun already."""
        connection.execute(
            self._sql("INSERT INTO {outbox_epoch} (epoch, timeline) VALUES (%s, %s) ON CONFLICT (epoch) DO NOTHING"),
            (epoch, self.timeline(connection)),
        )

    def follow_timeline(self, connection: Connection) -> bool:
        """Begin an epoch if the server is on another timeline than the newest one; whether this call did.

        Raises:
            psycopg.errors.ReadOnlySqlTransaction: the server is a stand-by.
        """
        opened = connection.execute(
            self._sql("""
            INSERT INTO {outbox_epoch} (epoch, timeline)
            SELECT epoch + 1, %(timeline)s::integer
            FROM (SELECT epoch, timeline FROM {outbox_epoch} ORDER BY epoch DESC LIMIT 1) newest
            WHERE %(timeline)s::integer IS NOT NULL AND timeline IS DISTINCT FROM %(timeline)s::integer
            ON CONFLICT (epoch) DO NOTHING
            """),
            {"timeline": self.timeline(connection)},
        )
        return opened.rowcount > 0

    @staticmethod
    def timeline(connection: Connection) -> int | None:
        """The server's timeline: a stand-by begins a new one when it is promoted, and so does a restore to a point in time.
        None: it does not say (a stand-by, and services that only speak like PostgreSQL)."""
        try:
            row = connection.execute(f"SELECT CASE WHEN NOT pg_is_in_recovery() THEN {_TIMELINE} END").fetchone()
        except (
            psycopg.errors.FeatureNotSupported,
            psycopg.errors.InsufficientPrivilege,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.ObjectNotInPrerequisiteState,
        ):
            return None
        return row[0] if row else None

    # --- replay ---

    def select(self, connection: Connection, parameters: dict[str, Any]) -> list[Row]:
        """Up to `limit` committed rows at positions above `after`, up to the one that reaches `bytes` of payload, that fit
        `up_to_position`, `topic`, `key`, `type`, `ids`, `positions`, `since`, `until` and the batches (None fits all). Walks the primary key:
        the outbox has no index for these but for positions, and writers no price to pay."""
        return self._rows(
            connection,
            self._sql("""
            SELECT data, {row}
            FROM (
                SELECT *, sum(octet_length(data)) OVER (ORDER BY position ROWS UNBOUNDED PRECEDING) AS bytes
                FROM {outbox} WHERE {selected} ORDER BY position LIMIT %(limit)s
            ) page
            WHERE bytes - octet_length(data) < %(bytes)s ORDER BY position
            """),
            parameters,
        )

    def chosen(self, connection: Connection, parameters: dict[str, Any]) -> list[Chosen]:
        """What `select` would find, by topic. Reads the whole outbox above `after`."""
        rows = connection.execute(
            self._sql("""
            SELECT topic, count(*), min(created_at), max(created_at), max(position) FROM {outbox} WHERE {selected}
            GROUP BY topic ORDER BY topic
            """),
            parameters,
        )
        return [Chosen(*row) for row in rows]

    # --- reconciliation ---

    def now(self, connection: Connection) -> datetime:
        """The time by the database's clock."""
        row = connection.execute("SELECT clock_timestamp()", binary=True).fetchone()
        assert row is not None
        found: datetime = row[0]
        return found

    def recorded(self, connection: Connection, topics: Sequence[str], since: datetime) -> Iterator[Recorded]:
        """What was recorded since then, in order of the event ids; streamed, in a transaction. Reads and sorts the outbox."""
        with connection.cursor(name="recorded", binary=True) as cursor:
            cursor.itersize = 5000
            cursor.execute(
                self._sql("""
                SELECT event_id, position, type, created_at,
                       CASE WHEN starts_with(topic, 'queue/') THEN headers ->> 'runat' END FROM {outbox}
                WHERE created_at >= %s AND topic = ANY (%s) ORDER BY event_id
                """),
                (since, list(topics)),
            )
            for row in cursor:
                yield Recorded(*row)

    def known(self, connection: Connection, ids: Sequence[uuid.UUID]) -> set[uuid.UUID]:
        """Those of the events that are in the outbox. Reads all of it, if there are any to look for."""
        if not ids:
            return set()
        rows = connection.execute(self._sql("SELECT event_id FROM {outbox} WHERE event_id = ANY (%s)"), (list(ids),))
        return {event_id for (event_id,) in rows}

    def kept_since(self, connection: Connection) -> datetime | None:
        """When the event at the lowest position was recorded; None: there is no event. Retention may have dropped what is
        older. Uses the primary key."""
        query = self._sql("SELECT created_at FROM {outbox} ORDER BY position LIMIT 1")
        row = connection.execute(query, binary=True).fetchone()
        return row[0] if row else None

    # --- status ---

    def unsealed(self, connection: Connection, limit: int) -> dict[str, tuple[int, float]]:
        """By topic: how many committed events are not sealed yet (counted up to `limit` in all), and the age of the oldest
        in seconds. Walks outbox_xid from the newest batch's snapshot on."""
        newest = self.newest(connection)
        rest = newest.rest if newest else Window(BEGINNING, BEGINNING, 0, False)
        rows = connection.execute(
            self._sql("""
            SELECT topic, count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8
            FROM (
                SELECT topic, created_at FROM {outbox}
                WHERE xid >= pg_snapshot_xmin(%(prev)s::pg_snapshot)
                  AND NOT pg_visible_in_snapshot(xid, %(prev)s::pg_snapshot)
                  AND NOT (pg_visible_in_snapshot(xid, %(snap)s::pg_snapshot) AND position <= %(after)s)
                LIMIT %(limit)s
            ) backlog GROUP BY topic
            """),
            {"prev": rest.prev, "snap": rest.snap, "after": rest.after, "limit": limit},
        )
        return {topic: (count, age) for topic, count, age in rows}

    def put_aside(self, connection: Connection, schema: str, table: str) -> dict[tuple[str, str], int] | None:
        """By stream and group: what the consumers have in ``dead_letters`` or ``message_failures``, where their tables are in
        this database too, in `schema`; None: they are not, or not for our role. Reads the whole table."""
        if not _readable(connection, schema, table):
            return None
        rows = connection.execute(
            sql.SQL("SELECT stream, consumer, count(*) FROM {} GROUP BY stream, consumer").format(
                sql.Identifier(schema, table)
            )
        )
        return {(stream, consumer): number for stream, consumer, number in rows}

    def ledgers(self, connection: Connection, schema: str) -> list[tuple[str, str, int]] | None:
        """Consumer, topic, and for how many seconds its ledger is set to remember, where the consumers' tables are in this
        database too, in `schema`; None: they are not, or not for our role. Reads the whole table: a row a topic."""
        table = sql.Identifier(schema, "consumer_retention")
        if not _readable(connection, schema, "consumer_retention"):
            return None
        query = sql.SQL("SELECT consumer, topic, retention_seconds FROM {} ORDER BY consumer, topic").format(table)
        return connection.execute(query).fetchall()

    def group_ages(self, connection: Connection) -> dict[tuple[str, str], float]:
        """By stream and group: seconds since `acked` last moved."""
        rows = connection.execute(
            self._sql("""
            SELECT stream, name, extract(epoch FROM clock_timestamp() - acked_at)::float8 FROM {outbox_group}
            """)
        )
        return {(stream, name): age for stream, name, age in rows}

    def sealed_age(self, connection: Connection, seq: int) -> float | None:
        """Seconds since a batch was sealed; None: it is not there. Uses outbox_batch_pkey."""
        row = connection.execute(
            self._sql("""
            SELECT extract(epoch FROM clock_timestamp() - sealed_at)::float8 FROM {outbox_batch} WHERE seq = %s
            """),
            (seq,),
        ).fetchone()
        return float(row[0]) if row else None

    @property
    def application(self) -> str:
        """What relays of this schema call themselves in ``pg_stat_activity``: 63 characters of ASCII at most, as it keeps."""
        name = "outbox relay" if self.schema == "public" else f"outbox relay {self.schema}"
        return name.encode("ascii", "replace").decode()[:63]

    def relays(self, connection: Connection) -> int | None:
        """Relays of this schema that are connected (of a role whose activity we may see). None: it cannot be told, since a
        pooler's sessions bear the name of whoever had them last."""
        if schemas.is_pooled(connection):
            return None
        row = connection.execute(
            """
            SELECT count(*) FROM pg_catalog.pg_stat_activity
            WHERE application_name = %s AND datname = pg_catalog.current_database()
            """,
            (self.application,),
        ).fetchone()
        assert row is not None
        return int(row[0])

    # --- retention ---

    def oldest(self, connection: Connection) -> int:
        """When the oldest event was recorded that is still here (the first by position, which is given together with the
        time), in seconds of Unix time, rounded down; where there is none: now. By the database's clock. One probe of each
        partition's primary key."""
        row = connection.execute(
            self._sql("""
            SELECT floor(extract(epoch FROM coalesce(
                (SELECT created_at FROM {outbox} ORDER BY position LIMIT 1), clock_timestamp())))::bigint
            """)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def batch_up_to(self, connection: Connection, seq: int) -> Batch | None:
        """The newest batch up to `seq`. Walks outbox_batch_pkey backwards."""
        row = connection.execute(
            self._sql("SELECT {batch} FROM {outbox_batch} b WHERE b.seq <= %s ORDER BY b.seq DESC LIMIT 1"), (seq,)
        ).fetchone()
        return Batch(*row) if row else None

    def drop_partition(self, connection: Connection, settled: Window, keep_seconds: float) -> str | None:
        """Drop the oldest partition of ours that is full, if all of its rows are settled and its last one is older than
        `keep_seconds`; returns its name. Settled is what is visible in the window's `snap`, if the window is open: up to
        position `after`. See `outbox.partitions.Partitions.drop_oldest`; two probes of the indexes of each."""
        newest = self._newest_position(connection)
        full = min(newest, settled.after + 1) if settled.open else newest
        query = sql.SQL("""
            SELECT NOT EXISTS (
                SELECT FROM {child} WHERE xid >= pg_snapshot_xmin(%(snap)s::pg_snapshot)
                AND NOT pg_visible_in_snapshot(xid, %(snap)s::pg_snapshot)
            ) AND (SELECT created_at < clock_timestamp() - make_interval(secs => %(keep)s)
                   FROM {child} ORDER BY position DESC LIMIT 1)
        """)
        parameters = {"snap": settled.snap, "keep": keep_seconds}

        def is_settled(found: Partition) -> bool:
            if found.high > full:
                return False
            child = sql.Identifier(found.schema, found.name)
            row = connection.execute(query.format(child=child), parameters).fetchone()
            return bool(row and row[0])  # NULL: it is empty, and may yet be written to

        return self._partitions.drop_oldest(connection, is_settled)

    def delete_from_default(self, connection: Connection, settled: Window, keep_seconds: float, limit: int) -> int:
        """Delete up to `limit` rows of the default partition that are settled (see `drop_partition`) and older than
        `keep_seconds`: those that never got a partition of their own. Walks its primary key; locks only these rows."""
        default = self._partitions.default(connection)
        if default is None:
            return 0
        deleted = connection.execute(
            sql.SQL("""
            DELETE FROM {default} WHERE position = ANY (ARRAY(
                SELECT position FROM {default}
                WHERE pg_visible_in_snapshot(xid, %(snap)s::pg_snapshot) AND (NOT %(open)s OR position <= %(after)s)
                  AND created_at < clock_timestamp() - make_interval(secs => %(keep)s)
                ORDER BY position LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
            """).format(default=default),
            {
                "snap": settled.snap, "open": settled.open, "after": settled.after, "keep": keep_seconds, "limit": limit
            },
        )  # fmt: skip
        return deleted.rowcount

    def delete_batches(self, connection: Connection, before: int, keep_seconds: float, limit: int) -> int:
        """Delete up to `limit` of the oldest batches below number `before` that were sealed longer than `keep_seconds`
        ago, without a gap, with their shares in streams. Walks the primary keys from their beginning."""
        with connection.transaction():
            row = connection.execute(
                self._sql("""
                WITH oldest AS (
                    SELECT seq, sealed_at FROM {outbox_batch} WHERE seq < %(before)s ORDER BY seq LIMIT %(limit)s
                ), young AS (
                    SELECT min(seq) AS seq FROM oldest
                    WHERE sealed_at >= clock_timestamp() - make_interval(secs => %(keep)s)
                ), deleted AS (
                    DELETE FROM {outbox_batch} b USING oldest, young
                    WHERE b.seq = oldest.seq AND (young.seq IS NULL OR b.seq < young.seq) RETURNING b.seq
                )
                SELECT count(*), max(seq) FROM deleted
                """),
                {"before": before, "keep": keep_seconds, "limit": limit},
            ).fetchone()
            assert row is not None
            if row[0]:
                connection.execute(self._sql("DELETE FROM {outbox_stream} WHERE seq <= %s"), (row[1],))
        return int(row[0])

    # --- another cluster ---

    def is_foreign(self, connection: Connection) -> bool:
        """Whether the tables come from another cluster (a dump restored, a logical copy): they name transactions that this
        cluster has not had yet. Uses outbox_xid and outbox_batch_pkey."""
        row = connection.execute(
            self._sql("""
            SELECT EXISTS (SELECT FROM {outbox} WHERE xid >= pg_snapshot_xmax(pg_current_snapshot()))
                OR coalesce((SELECT pg_snapshot_xmax(snap) > pg_snapshot_xmax(pg_current_snapshot())
                             FROM {outbox_batch} ORDER BY seq DESC LIMIT 1), false)
            """)
        ).fetchone()
        assert row is not None
        return bool(row[0])

    def rebase(self, connection: Connection) -> int:
        """Make tables of another cluster this one's own; return how many events will be published again, or for the first
        time. 0: another relay has done it.

        Transaction ids of the other cluster say nothing here, so the sealed batches, which are made of them, go; rows of
        ids that are still to come get this transaction's. What is published already is recognised by consumers. A new
        epoch keeps a relay of the other cluster off. Locks out other relays, not writers.
        """
        timeline = self.timeline(connection)
        with connection.transaction():
            connection.execute(self._sql("LOCK TABLE {outbox_batch} IN ACCESS EXCLUSIVE MODE"))
            if not self.is_foreign(connection):
                return 0
            connection.execute(
                self._sql("""
                UPDATE {outbox} SET xid = pg_current_xact_id() WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())
                """)
            )
            connection.execute(self._sql("DELETE FROM {outbox_stream}"))
            connection.execute(self._sql("DELETE FROM {outbox_batch}"))
            connection.execute(self._sql("UPDATE {outbox_group} SET acked = 0"))
            connection.execute(
                self._sql("INSERT INTO {outbox_epoch} (epoch, timeline) SELECT max(epoch) + 1, %s FROM {outbox_epoch}"),
                (timeline,),
            )
            row = connection.execute(self._sql("SELECT count(*) FROM {outbox}")).fetchone()
            assert row is not None
            return int(row[0])

    # --- partitions ---

    def make_partitions(self, connection: Connection, rows: int, ahead: int) -> int:
        """Make partitions of `rows` positions up to `ahead` of them beyond the newest position; return how many. See
        `outbox.partitions.Partitions.make`."""
        newest = self._newest_position(connection)
        present = self._partitions.present(connection)
        low = max((found.high for found in present if found.low <= newest), default=0)
        if newest - low > 2 * rows:  # the relay was away for long; what lies between stays in the default partition
            low = newest - newest % rows
        return self._partitions.make(connection, low, newest + ahead * rows, rows, busy=newest + rows)

    def positions_ahead(self, connection: Connection) -> int:
        """How many positions after the newest event have a partition of their own, up to the first gap."""
        following = self._newest_position(connection) + 1
        return covered_until(self._partitions.present(connection), following) - following

    def partitions(self, connection: Connection) -> list[Partition]:
        """Every partition of the outbox."""
        return self._partitions.present(connection)

    def _newest_position(self, connection: Connection) -> int:
        row = connection.execute(self._sql("SELECT coalesce(max(position), 0) FROM {outbox}")).fetchone()
        assert row is not None
        return int(row[0])

    def rows_in_default(self, connection: Connection, limit: int) -> int | None:
        """Events in the default partition, counted up to `limit`; None: there is none, or our role may not read it."""
        default = next((found for found in self._partitions.present(connection) if found.default), None)
        if default is None or not _readable(connection, default.schema, default.name):
            return None
        name = sql.Identifier(default.schema, default.name)
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM (SELECT FROM {} LIMIT %s) held").format(name), (limit,)
        ).fetchone()
        assert row is not None
        return int(row[0])


def _readable(connection: Connection, schema: str, table: str) -> bool:
    """Whether the table is there, and our role may read it. (to_regclass is an error in a schema that it may not use.)"""
    row = connection.execute(
        "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s "
        "AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')",
        (schema, table),
    ).fetchone()
    return row is not None


@lru_cache(maxsize=256)
def insert(schema: str, events: int) -> sql.Composed:
    """The writer's one statement for psycopg connections: `events` rows with `COLUMNS` each."""
    row = sql.SQL("({})").format(sql.SQL(", ").join([sql.Placeholder()] * len(COLUMNS)))
    return sql.SQL("INSERT INTO {} ({}) VALUES {}").format(
        sql.Identifier(schema, "outbox"),
        sql.SQL(", ").join(map(sql.Identifier, COLUMNS)),
        sql.SQL(", ").join([row] * events),
    )


# --- what the doctors of both sides ask; system views only, nothing is locked -------------------------------------------


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What a PostgreSQL server says about itself and our session.

    Attributes:
        version: ``server_version_num``: 180001 is 18.1.
        pooled: our connection does not lead to a session of its own (PgBouncer and the like).
        transactions: they can be had; not through a pooler in statement mode, which has closed the connection over it.
        keeps_session: the pooler leaves its session to us between transactions; None: there is no pooler, or it was not
            told apart (see `keeps_session`).
        ahead_seconds: its clock minus this machine's.
        sees_sessions: our role sees what other roles' sessions do.
        idle_limit_seconds: ``idle_in_transaction_session_timeout``; 0: none.
    """

    version: int
    pooled: bool
    transactions: bool
    ahead_seconds: float
    sees_sessions: bool
    in_recovery: bool
    read_only: bool
    fsync: bool
    synchronous_commit: str
    idle_limit_seconds: float
    keeps_session: bool | None = None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction of another session of our database.

    Attributes:
        seconds: since it began.
        idle_seconds: since its last statement ended; None: one runs.
        holds: it has a snapshot or a transaction id, so that VACUUM keeps what died since.
    """

    pid: int
    application: str
    role: str
    seconds: float
    idle_seconds: float | None
    holds: bool


@contextmanager
def reading(connection: Connection, limit_seconds: float = 10) -> Iterator[None]:
    """A transaction in which nothing can be changed, and no statement runs or waits for longer than the limit."""
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        connection.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(round(limit_seconds * 1000)))
        yield


def database_facts(connection: Connection) -> DatabaseFacts:
    """What the server says about itself."""
    before = time.time()
    row = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    ahead = row[0] - (before + time.time()) / 2
    row = connection.execute(
        """
        SELECT current_setting('server_version_num')::integer, pg_backend_pid() <> %s, true, %s::float8,
               pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), pg_is_in_recovery(),
               current_setting('default_transaction_read_only')::boolean, current_setting('fsync')::boolean,
               current_setting('synchronous_commit'),
               (SELECT setting::float8 / 1000 FROM pg_catalog.pg_settings
                WHERE name = 'idle_in_transaction_session_timeout')
        """,
        (connection.info.backend_pid, ahead),
    ).fetchone()
    assert row is not None
    facts = DatabaseFacts(*row)
    try:
        with connection.transaction():
            return facts
    except psycopg.OperationalError as error:
        if not schemas.is_statement_pooling(error):
            raise
        return replace(facts, transactions=False)


def keeps_session(connection: Connection, other: Connection) -> bool:
    """Whether a pooler leaves our session to us between transactions (session mode) or gives it to others (transaction mode):
    who comes next then gets ours, or we get another one.

    Args:
        other: a second connection through the same pooler; it may have to wait for a session.
    """

    def session(of: Connection) -> Any:
        return of.execute("SELECT pg_backend_pid()").fetchone()

    ours = session(connection)
    if any(session(connection) != ours for _ in range(2)):
        return False
    with other.transaction():
        return bool(session(other) != ours)


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Transactions of our database's other sessions, oldest first, as far as our role may see them."""
    rows = connection.execute(
        """
        SELECT pid, application_name, usename::text, extract(epoch FROM clock_timestamp() - xact_start)::float8,
               CASE WHEN starts_with(state, 'idle') THEN
                   extract(epoch FROM clock_timestamp() - state_change)::float8 END,
               backend_xmin IS NOT NULL OR backend_xid IS NOT NULL
        FROM pg_catalog.pg_stat_activity
        WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
          AND backend_type = 'client backend'
        ORDER BY xact_start
        """
    )
    return [OpenTransaction(*row) for row in rows]


def prepared_transactions(connection: Connection) -> list[tuple[str, str, float]]:
    """Prepared transactions of our database: identifier, owner, and how many seconds ago they were prepared."""
    return connection.execute(
        """
        SELECT gid, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8
        FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() ORDER BY prepared
        """
    ).fetchall()


def unused_slots(connection: Connection) -> list[str]:
    """Replication slots that nobody reads from: they keep WAL, and with a snapshot of their own also dead rows."""
    rows = connection.execute(
        "SELECT slot_name::text FROM pg_catalog.pg_replication_slots WHERE NOT active AND restart_lsn IS NOT NULL "
        "ORDER BY slot_name"
    )
    return [name for (name,) in rows]


def lacking(connection: Connection, schema: str, wanted: Mapping[str, str]) -> list[str]:
    """The rights (``INSERT on outbox``) that our role lacks.

    Args:
        wanted: privileges with commas between them, by table; tables that are not there are passed over.
    """
    pairs = [(table, privilege) for table, some in wanted.items() for privilege in some.split(", ")]
    rows = connection.execute(
        """
        SELECT 'USAGE on schema ' || nspname FROM pg_catalog.pg_namespace
        WHERE nspname = %(schema)s AND NOT has_schema_privilege(oid, 'USAGE')
        UNION ALL
        SELECT wanted.privilege || ' on ' || wanted.name
        FROM unnest(%(tables)s::text[], %(privileges)s::text[]) AS wanted (name, privilege)
        JOIN pg_catalog.pg_class c ON c.relname = wanted.name
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
        WHERE NOT has_table_privilege(c.oid, wanted.privilege)
        """,
        {"schema": schema, "tables": [table for table, _ in pairs], "privileges": [right for _, right in pairs]},
    )
    return [right for (right,) in rows]


def may_partition(connection: Connection, schema: str, table: str) -> bool:
    """Whether our role can make and drop partitions of a table: it owns it, and may create in its schema."""
    row = connection.execute(
        """
        SELECT bool_and(pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(n.oid, 'CREATE'))
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = %s AND c.relname IN (%s, %s)
        """,
        (schema, table, f"{table}_default"),
    ).fetchone()
    return bool(row and row[0])
