"""Upkeep of the partitions of both sides' big tables: made ahead, and dropped when they are old.

Which partitions there are and what they hold is read from PostgreSQL's catalog, never from names: a DBA may attach some of
his own, detach ours, or move them. Only what is ours is ever dropped. What cannot be done is said once in a while and tried
again less and less often; rows of such a range go to the default partition, and everything else goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import sql

from outbox.retry import database_away

Connection = psycopg.Connection[Any]

_log = logging.getLogger(__name__)

#: Rows of the default partition that are moved to a partition of their own; more are left where they are.
MOVED_ROWS: Final = 10_000
#: Between two tries after a failure: doubled from the first up to the longest, or up to the second where somebody only held
#: a lock.
_FIRST_PAUSE_SECONDS, _LOCK_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 30.0, 600.0
_REMIND_SECONDS = 600.0
#: Failures to get a lock after which that is worth a warning.
_PATIENCE = 10
_UNBOUNDED: Final = {"MINVALUE": -(1 << 63), "MAXVALUE": 1 << 63}


class Partition(NamedTuple):
    """A partition that is attached.

    Attributes:
        low, high: its rows are in [low, high), in whole units of its table; the default one: nothing.
        default: whether it is the default one.
        ours: a plain table beside its parent, named after its bounds, and of its owner or a role that we may act as.
    """

    schema: str
    name: str
    low: int
    high: int
    default: bool
    ours: bool


class _NeedsLock(Exception):
    """A range that nobody seemed to write into has rows after all."""


class Partitions:
    """The partitions of one table, and what could not be done with them lately.

    Args:
        column: what the table is partitioned by.
        unit: the whole unit that a bound, as PostgreSQL shows it, is in.
        bound: the bound at which a unit begins.
    """

    def __init__(
        self, schema: str, table: str, column: str, unit: Callable[[str], int] = int, bound: Callable[[int], str] = str
    ) -> None:
        self.schema, self.table, self.column = schema, table, column
        self._unit, self._bound = unit, bound
        self._failures, self._due = 0, 0.0
        self._told: dict[str, float] = {}

    def present(self, connection: Connection) -> list[Partition]:
        """Every partition that is attached, the lowest first."""
        rows = connection.execute(
            r"""
            SELECT n.nspname, child.relname, expression = 'DEFAULT',
                   child.relkind = 'r' AND n.oid = parent.relnamespace AND NOT inhdetachpending
                   AND (child.relowner = parent.relowner OR pg_has_role(child.relowner, 'USAGE')),
                   regexp_match(expression, $$FROM \('?([^')]+)'?\) TO \('?([^')]+)'?\)$$)
            FROM pg_catalog.pg_inherits
            JOIN pg_catalog.pg_class parent ON parent.oid = inhparent
            JOIN pg_catalog.pg_namespace home ON home.oid = parent.relnamespace
            JOIN pg_catalog.pg_class child ON child.oid = inhrelid
            JOIN pg_catalog.pg_namespace n ON n.oid = child.relnamespace,
            LATERAL pg_catalog.pg_get_expr(child.relpartbound, child.oid) AS expression
            WHERE home.nspname = %s AND parent.relname = %s AND expression IS NOT NULL
            """,
            (self.schema, self.table),
        )
        return sorted((self._partition(*row) for row in rows), key=lambda found: (found.low, found.high, found.name))

    def _partition(self, schema: str, name: str, default: bool, plain: bool, bounds: list[str] | None) -> Partition:
        if bounds is None:
            return Partition(schema, name, 0, 0, default, False)
        (low, low_exact), (high, high_exact) = map(self._read, bounds)
        high += not high_exact  # a part of a unit counts as one
        ours = plain and low_exact and high_exact and name == self._name(low, high)
        return Partition(schema, name, low, high, default, ours)

    def _read(self, bound: str) -> tuple[int, bool]:
        """The unit that a bound is in, and whether it is where the unit begins."""
        if bound in _UNBOUNDED:
            return _UNBOUNDED[bound], True
        unit = self._unit(bound)
        return unit, self._bound(unit) == bound

    def _name(self, low: int, high: int) -> str:
        return f"{self.table}_{low}_{high}"

    # --- making ---

    def make(self, connection: Connection, low: int, last: int, width: int, busy: int) -> int:
        """Make what is missing from `low` up to the range that begins at `last` or before; return how many were made.

        Each is made in a transaction of its own. Rows of its range that went to the default partition are moved in the same
        transaction, since PostgreSQL would refuse the partition otherwise; where they are more than `MOVED_ROWS`, the range
        is left to the default partition, since writers would have to wait. Locks are waited for for a quarter of a second
        and held for the move and for PostgreSQL's look through the default partition, a second at most: what needs longer
        is left for another call. Of many processes that do it at once one makes it, and the others leave it to that one.

        Args:
            connection: in autocommit mode.
            width: units in one partition; less where the next one that is there begins earlier.
            busy: ranges that begin here or before may be written or read just now.

        Raises:
            psycopg.errors.InsufficientPrivilege: our role may not.
            psycopg.OperationalError: PostgreSQL cannot be reached or cannot work.
        """
        present = self.present(connection)
        default = next((found for found in present if found.default), None)
        if default is None:
            self._say(
                logging.ERROR, "default_partition_missing",
                "%s has no default partition: a row beyond the other ones is refused, and its transaction fails. Attach "
                "what was detached (ALTER TABLE %s ATTACH PARTITION %s DEFAULT), or make one (CREATE TABLE %s PARTITION OF "
                "%s DEFAULT)",
                self._shown(), self._shown(), self._shown("default"), self._shown("default"), self._shown(),
            )  # fmt: skip
        if time.monotonic() < self._due:
            return 0
        made, failed, longest = 0, False, _LONGEST_PAUSE_SECONDS
        for start, end in _gaps(present, low, last, width):
            try:
                if self._is_taken(connection, start, end):
                    continue
                made += self._make(connection, default, start, end, start <= busy)
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected, _NeedsLock):
                self._say(
                    logging.WARNING if self._failures > _PATIENCE else logging.INFO, "partition_waits",
                    "partition %s of %s waits for a writer or a long reader; its rows go to the default partition meanwhile. "
                    "If it lasts, end the longest transactions (the doctor names them)",
                    self._name(start, end), self._shown(),
                )  # fmt: skip
                failed, longest = True, _LOCK_PAUSE_SECONDS
                break
            except psycopg.errors.QueryCanceled:
                self._say(
                    logging.WARNING, "partition_too_slow",
                    "partition %s of %s cannot be attached within a second, for which writers wait: %s is too large to be "
                    "looked through. Its rows go to the default partition meanwhile, nothing is lost. Let retention empty "
                    "it and VACUUM FULL it, or attach the partition by hand when nobody writes",
                    self._name(start, end), self._shown(), default.name if default else "the partition",
                )  # fmt: skip
                failed = True
                break
            except psycopg.errors.InsufficientPrivilege:
                raise
            except psycopg.Error as error:
                if database_away(error):
                    raise
                failed = True
                self._say(
                    logging.WARNING, "partition_refused",
                    "partition %s of %s cannot be made, its rows go to the default partition: %s. See what else is "
                    "attached to %s",
                    self._name(start, end), self._shown(), _one_line(error), self._shown(),
                )  # fmt: skip
        self._failures = 0 if not failed else 1 if made else self._failures + 1
        if failed:
            self._due = time.monotonic() + min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 10), longest)
        return made

    def _is_taken(self, connection: Connection, low: int, high: int) -> bool:
        """Whether another relation has the name that the partition would get."""
        name = self._name(low, high)
        row = connection.execute(
            "SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            (self.schema, name),
        ).fetchone()
        if row is None or any(found.name == name for found in self.present(connection)):  # just made by another process
            return row is not None
        self._say(
            logging.WARNING, "partition_detached",
            "%s.%s is there, but is no partition of %s with these bounds (it was detached, or is another relation): rows of "
            "its range go to the default partition. Attach it again, move it to another schema, rename it or drop it",
            self.schema, name, self._shown(),
        )  # fmt: skip
        return True

    def _make(self, connection: Connection, default: Partition | None, low: int, high: int, busy: bool) -> bool:
        """Make one partition as a plain table and attach it, which locks the default one against writers; whether it was
        made.

        Where rows are moved or written, ACCESS EXCLUSIVE on the parent itself comes first. Who has looked at the list of
        partitions already and then waits for the default one would go on with the old list: a reader would find the default
        one emptied, never look into the new one, and miss these rows; a writer would be refused, since his row no longer
        belongs into the default one.
        """
        parts: dict[str, sql.Composable] = {
            "parent": sql.Identifier(self.schema, self.table), "column": sql.Identifier(self.column),
            "child": sql.Identifier(self.schema, self._name(low, high)),
            "low": sql.Literal(self._bound(low)), "high": sql.Literal(self._bound(high)),
        }  # fmt: skip
        if default:
            parts["default"] = sql.Identifier(default.schema, default.name)

        def run(statement: LiteralString) -> psycopg.Cursor[Any]:
            return connection.execute(sql.SQL(statement).format(**parts, limit=sql.Literal(MOVED_ROWS + 1)))

        if default:
            row = run("""
                SELECT count(*) FROM (
                    SELECT FROM {default} WHERE {column} >= {low} AND {column} < {high} LIMIT {limit}) held
            """).fetchone()
            assert row is not None
            if row[0] > MOVED_ROWS:
                return False
            busy = busy or row[0] > 0
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '250ms'")
            connection.execute("SET LOCAL statement_timeout = '1s'")
            if not self._alone(connection, "make"):
                return False
            present = self.present(connection)
            if any(found.low < high and low < found.high for found in present):
                return False
            if default != next((found for found in present if found.default), None):
                return False  # it was changed under our hands: next time
            if busy:
                run("LOCK TABLE ONLY {parent} IN ACCESS EXCLUSIVE MODE")
            if default:
                run("LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE")
            run("CREATE TABLE {child} (LIKE {parent} INCLUDING ALL EXCLUDING IDENTITY)")
            if default:
                moved = run("""
                    WITH moved AS (DELETE FROM {default} WHERE {column} >= {low} AND {column} < {high} RETURNING *)
                    INSERT INTO {child} SELECT * FROM moved
                """)
                if moved.rowcount and not busy:  # rows came since they were counted: next time, with the lock
                    raise _NeedsLock
            run("ALTER TABLE {parent} ATTACH PARTITION {child} FOR VALUES FROM ({low}) TO ({high})")
        return True

    # --- dropping ---

    def drop_oldest(self, connection: Connection, is_old: Callable[[Partition], bool]) -> str | None:
        """Drop the lowest of our partitions that `is_old`; returns its name. None also where a writer still holds it, or
        somebody reads for long. One that something else depends on is passed over.

        Asks first without a lock, and once more with ACCESS EXCLUSIVE on it and on its parent, which is waited for for a
        quarter of a second; drops nothing that is no longer attached by then, nor while another process drops one.

        Args:
            connection: in autocommit mode.

        Raises:
            psycopg.errors.InsufficientPrivilege, psycopg.OperationalError: see `make`.
        """
        parent = sql.Identifier(self.schema, self.table)
        try:
            for old in self.present(connection):
                if not old.ours or not is_old(old):
                    continue
                child = sql.Identifier(old.schema, old.name)
                try:
                    with connection.transaction():
                        if not self._alone(connection, "drop"):
                            return None
                        connection.execute("SET LOCAL lock_timeout = '250ms'")
                        connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS EXCLUSIVE MODE").format(parent))
                        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(child))
                        if old not in self.present(connection) or not is_old(old):
                            return None
                        connection.execute(sql.SQL("DROP TABLE {}").format(child))
                except psycopg.errors.DependentObjectsStillExist as error:
                    self._say(
                        logging.WARNING, "partition_kept",
                        "partition %s of %s is old but cannot be dropped: %s. Drop what depends on it, or detach it",
                        old.name, self._shown(), _one_line(error),
                    )  # fmt: skip
                    continue
                return old.name
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected, psycopg.errors.UndefinedTable):
            pass
        return None

    def _alone(self, connection: Connection, what: str) -> bool:
        """Whether no other process does the same just now; if so, none begins to until the transaction ends. Those that come
        meanwhile have nothing to do, and do not queue for locks that everybody needs."""
        row = connection.execute(
            "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", (f"{what} {self.schema} {self.table}",)
        ).fetchone()
        return row is not None and bool(row[0])

    def default(self, connection: Connection) -> sql.Identifier | None:
        """The default partition, None if there is none."""
        return next((sql.Identifier(p.schema, p.name) for p in self.present(connection) if p.default), None)

    # --- saying ---

    def _shown(self, suffix: str = "") -> str:
        return f"{self.schema}.{self.table}_{suffix}" if suffix else f"{self.schema}.{self.table}"

    def _say(self, level: int, action: str, message: str, *values: object) -> None:
        """Log it, if it was not within the last ten minutes."""
        now = time.monotonic()
        if now - self._told.get(action, -_REMIND_SECONDS) >= _REMIND_SECONDS:
            self._told[action] = now
            _log.log(level, message, *values, extra={"action": action, "table": self.table})


def covered_until(present: Sequence[Partition], start: int) -> int:
    """Where the first gap after `start` begins."""
    for found in present:
        if found.low <= start < found.high:
            start = found.high
    return start


def _gaps(present: Sequence[Partition], low: int, last: int, width: int) -> Iterator[tuple[int, int]]:
    """The ranges of `width` that lie between the partitions that are there, the last one begins at `last` or before."""
    while (low := covered_until(present, low)) <= last:
        high = min([low + width, *(found.low for found in present if found.low > low)])
        yield low, high
        low = high


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
