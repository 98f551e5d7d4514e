"""What the outbox need not keep any longer goes: whole partitions, and the batches that they were sealed in."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.store import Connection, Store, Window

#: Rows and batches deleted in one statement: small, so that nobody waits for it.
_LIMIT = 5000


@dataclass(frozen=True, slots=True)
class Dropped:
    """What went.

    Attributes:
        partitions: their names.
        rows: rows deleted from the default partition.
        batches: sealed batches deleted.
    """

    partitions: list[str]
    rows: int
    batches: int


def drop_old(store: Store, connection: Connection, settled: Window, before: int, keep_seconds: float) -> Dropped:
    """Drop what is older than `keep_seconds`: settled rows, and batches below number `before`.

    Does a bounded amount of work; call it again while it does something. Any number of processes may: each statement
    finds for itself what is left to do, and no lock outlives it.

    Args:
        connection: in autocommit mode.
        settled: every row visible in its `snap` (where it is open: up to position `after`) is published, and acknowledged
            wherever somebody has to.
    """
    partitions = []
    while name := store.drop_partition(connection, settled, keep_seconds):
        partitions.append(name)
    rows = store.delete_from_default(connection, settled, keep_seconds, _LIMIT)
    return Dropped(partitions, rows, store.delete_batches(connection, before, keep_seconds, _LIMIT))
