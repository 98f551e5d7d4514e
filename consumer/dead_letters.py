"""Dead letters in the hands of operators: have them tried again, or throw them away.

Both go page by page, each page one short transaction: they may end at any point, and are run again for the rest. Which
letters it is about is settled at the beginning, so that what dies again meanwhile is not tried for ever.

Nothing here gives an event a second effect: the ledger decides. A letter whose event was applied after all, or waits already,
stays where it is, and so does one that another transaction works with; all are counted.
"""

from __future__ import annotations

import enum
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psycopg

from consumer.ledger import Connection, Operations, Selection
from outbox.retry import Stop

#: Letters in one transaction.
_PAGE = 200
#: Longest wait for a consumer that is just about to process an event of which the ledger has forgotten that it died.
_PATIENCE_SECONDS = 2.0
#: Kinds that are told one by one, and letters by number.
_KINDS, _EXAMPLES = 20, 20


class Kept(enum.StrEnum):
    """Why a letter stays."""

    CUT = "cut"  # only the beginning of it was kept
    DONE = "done"  # its event was applied, or a newer one was
    WAITING = "waiting"  # its event waits for another try already
    BUSY = "busy"  # another transaction holds its ledger row
    GONE = "gone"  # somebody else has requeued, discarded or deleted it, or is at it


#: By number of a letter: why it stays, None: it does not.
_Ends = dict[int, Kept | None]


@dataclass(slots=True)
class Chosen:
    """What a command is about.

    Attributes:
        kinds: reason, type and number, the most frequent first; at most 20 of them.
        held_back: events that wait for versions before theirs, and are later ones of these letters' keys.
    """

    kinds: list[tuple[str, str | None, int]]
    held_back: int
    _numbers: array[int] = field(default_factory=lambda: array("q"))
    _first: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._numbers)

    def pages(self) -> Iterator[tuple[list[int], list[int]]]:
        """Numbers, and those of them that are the first of their keys."""
        for start in range(0, len(self._numbers), _PAGE):
            numbers = self._numbers[start : start + _PAGE].tolist()
            first = self._first[start : start + _PAGE]
            yield numbers, [number for number, is_first in zip(numbers, first, strict=True) if is_first]


@dataclass(slots=True)
class Progress:
    """How far a command is.

    Attributes:
        seen: letters looked at.
        done: of them, requeued or discarded (or that would be, in a dry run).
        kept: the others, by why they stay.
        examples: the numbers of the first of each of these.
    """

    seen: int = 0
    done: int = 0
    kept: Counter[Kept] = field(default_factory=Counter)
    examples: dict[Kept, list[int]] = field(default_factory=dict)

    def _add(self, ends: _Ends) -> None:
        self.seen += len(ends)
        for number, why in ends.items():
            if why is None:
                self.done += 1
                continue
            self.kept[why] += 1
            examples = self.examples.setdefault(why, [])
            if len(examples) < _EXAMPLES:
                examples.append(number)


def choose(connection: Connection, operations: Operations, selection: Selection, *, by_version: bool = False) -> Chosen:
    """Settle what a command is about.

    Args:
        connection: in autocommit mode.
        by_version: those of a key in order of their versions, so that the first can go past the gap before it.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        kinds, held_back = operations.kinds(connection, selection, _KINDS), operations.held_back(connection, selection)
        chosen = Chosen(kinds, held_back)
        for number, first in operations.numbers(connection, selection, by_version):
            chosen._numbers.append(number)
            chosen._first.append(first)
    return chosen


def requeue(
    connection: Connection,
    operations: Operations,
    chosen: Chosen,
    *,
    past_gap: bool = False,
    dry_run: bool = False,
    stopping: Stop | None = None,
) -> Iterator[Progress]:
    """Have letters tried again, with all attempts, due now; yields after each page. Stop iterating to stop.

    Args:
        connection: in autocommit mode.
        past_gap: the first letter of each key (see `choose`) does not wait for versions before it that are missing.
        dry_run: change nothing, only count.
        stopping: ends it between two pages.

    Raises:
        psycopg.Error: PostgreSQL cannot be reached; go on by choosing anew.
    """

    def step(numbers: Sequence[int], first: Sequence[int]) -> _Ends:
        ends: _Ends = dict.fromkeys(numbers, Kept.GONE)
        wanted: dict[uuid.UUID | int, int] = {}  # by event id, or by number of what is no event
        for number, event_id, cut in operations.hold(connection, numbers, lock=not dry_run):
            twice = event_id is not None and event_id in wanted
            ends[number] = Kept.CUT if cut else Kept.WAITING if twice else None
            if not cut and not twice:
                wanted[event_id or number] = number
        ids = {event_id for event_id in wanted if isinstance(event_id, uuid.UUID)}
        outcomes = operations.outcomes(connection, ids, lock=False)
        forgotten = set[uuid.UUID]()
        if not dry_run:
            forgotten = operations.expect(connection, ids - outcomes.keys())
            outcomes = operations.outcomes(connection, ids, lock=True)
        for event_id in ids - forgotten:
            outcome = outcomes.get(event_id, "dead" if dry_run else None)
            if outcome != "dead":
                ends[wanted[event_id]] = _REASONS.get(outcome, Kept.DONE)
        ready = [number for number, end in ends.items() if end is None]
        if not dry_run:
            moved = operations.requeue(connection, ready, first if past_gap else ())
            ends |= dict.fromkeys(set(ready) - moved, Kept.WAITING)
        return ends

    return _pages(connection, operations, chosen, step, stopping)


def discard(
    connection: Connection,
    operations: Operations,
    chosen: Chosen,
    *,
    forget: bool = False,
    stopping: Stop | None = None,
) -> Iterator[Progress]:
    """Throw letters away; yields after each page. Stop iterating to stop. The ledger goes on knowing that their events were
    put aside, so that they are not applied when they come again.

    Args:
        connection: in autocommit mode.
        forget: let the ledger forget it, so that an event that is published again is applied.
        stopping: ends it between two pages.

    Raises:
        psycopg.Error: PostgreSQL cannot be reached; go on by choosing anew.
    """

    def step(numbers: Sequence[int], _first: Sequence[int]) -> _Ends:
        ends: _Ends = dict.fromkeys(numbers, Kept.GONE)
        letters = operations.hold(connection, numbers, lock=True)
        ends |= {number: None for number, _, _ in letters}
        if forget:
            ids = {event_id for _, event_id, _ in letters if event_id}
            busy = set(operations.outcomes(connection, ids, lock=False))
            busy -= set(operations.outcomes(connection, ids, lock=True))
            ends |= {number: Kept.BUSY for number, event_id, _ in letters if event_id in busy}
            operations.forget(connection, ids - busy)
        operations.discard(connection, [number for number, end in ends.items() if end is None])
        return ends

    return _pages(connection, operations, chosen, step, stopping)


#: What an outcome in the ledger means for a letter; None: the row is another transaction's.
_REASONS = {"waiting": Kept.WAITING, None: Kept.BUSY}


def _pages(
    connection: Connection,
    operations: Operations,
    chosen: Chosen,
    step: Callable[[Sequence[int], Sequence[int]], _Ends],
    stopping: Stop | None,
) -> Iterator[Progress]:
    """Take the steps, each in a transaction; one that meets somebody who does not give way is taken letter by letter."""

    def transact(numbers: Sequence[int], first: Sequence[int]) -> _Ends:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            operations.be_patient(connection, _PATIENCE_SECONDS)
            return step(numbers, first)

    progress = Progress()
    for numbers, first in chosen.pages():
        if stopping is not None and stopping.is_set():
            return
        try:
            ends = transact(numbers, first)
        except _HELD:
            ends = {}
            for number in numbers:
                try:
                    ends |= transact([number], first)
                except _HELD:
                    ends[number] = Kept.BUSY
        progress._add(ends)
        yield progress


#: Somebody did not end his transaction, or PostgreSQL gave up ours for another's sake.
_HELD = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
