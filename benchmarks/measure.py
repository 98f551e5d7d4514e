"""What a suite returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import psycopg


@dataclass(frozen=True)
class Measurement:
    """One side's turn: `events` in `seconds`; none, and a note that says why, where it could not be measured."""

    what: str
    events: int
    seconds: float
    baseline: bool = False
    details: dict[str, object] = field(default_factory=dict)
    note: str = ""

    @property
    def rate(self) -> float:
        """Events a second."""
        return self.events / self.seconds if self.events else 0.0


def size(connection: psycopg.Connection, table: str) -> int:
    """Bytes of a partitioned table on disk, with its indexes and what is kept out of line."""
    query = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(%s)"
    row = connection.execute(query, (table,)).fetchone()
    assert row is not None
    return int(row[0])
