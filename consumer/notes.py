"""What a worker is at, in memory that outlives its process: whoever comes after it reads there what it died of.

The memory is written without a lock, and who writes may be killed between any two instructions. So each part has a byte that
says whether it is whole: 0 before the part changes, its kind when it has. A part that is not whole says nothing; nobody is in
a handler while it is written.
"""

from __future__ import annotations

import mmap
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from consumer.ledger import Waiting
from outbox.transport import Delivery

#: Bytes of a note; what is never written costs no memory.
_BYTES: Final = 1 << 16
#: Where its parts are.
_RUNNING, _NAME, _LEASE, _FLAGS = 0, 60_000, 62_000, 62_400
_BEAT, _UPKEEP, _WORKED, _FATAL, _SETTLED = _FLAGS, _FLAGS + 8, _FLAGS + 16, _FLAGS + 17, _FLAGS + 20
_LONGEST: Final = _NAME - 8
_NOTHING, _DELIVERIES, _ROWS, _MANY = range(4)


@dataclass(frozen=True, slots=True)
class Will:
    """What a worker left that is gone.

    Attributes:
        name: its name in the group.
        lease: of the events out of ``message_failures`` that it took last; None: it took none.
        deliveries: stream and receipt of those that a handler was called with just then.
        rows: or these of ``message_failures``.
        many: it was called with more than can be named here.
        explained: whether that of all workers of the process says what ended it.
    """

    name: str
    lease: uuid.UUID | None = None
    deliveries: frozenset[tuple[str, str]] = frozenset()
    rows: frozenset[int] = frozenset()
    many: bool = False
    explained: bool = False


class Note:
    """What one worker is at."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @classmethod
    def private(cls) -> Note:
        """One that nobody else reads."""
        return cls(memoryview(bytearray(_BYTES)))

    # --- the worker writes ---

    def begin(self, name: str) -> None:
        """A worker of this name begins."""
        self._write(_NAME, 1, name.encode())

    def leased(self, token: uuid.UUID) -> None:
        """It has taken events out of ``message_failures``."""
        self._write(_LEASE, 1, token.bytes)

    def running(self, deliveries: Sequence[Delivery]) -> None:
        """A handler is about to be called with these, or, with none, has returned."""
        self._memory[_RUNNING] = _NOTHING
        if deliveries:
            kind = _ROWS if isinstance(deliveries[0], Waiting) else _DELIVERIES
            lines = (str(d.id) if isinstance(d, Waiting) else f"{d.receipt} {d.stream}" for d in deliveries)
            text = "\n".join(lines).encode()
            self._write(_RUNNING, kind, text) if len(text) <= _LONGEST else self._write(_RUNNING, _MANY, b"")

    def beat(self) -> None:
        """A round has ended, or something in it."""
        struct.pack_into("d", self._memory, _BEAT, time.time())

    def worked(self) -> None:
        """It is of use: it has done something."""
        self._memory[_WORKED] = 1

    def settled(self, wills: int) -> None:
        """So many of the wills that it was given are done, or more were before."""
        struct.pack_into("I", self._memory, _SETTLED, max(wills, self.number_settled))

    def failed(self) -> None:
        """It ends for a reason that would end the next one, too."""
        self._memory[_FATAL] = 1

    @property
    def upkeep_due(self) -> float:
        """When what is done once a minute is to be done again, by whoever works then; by `time.monotonic`."""
        return float(struct.unpack_from("d", self._memory, _UPKEEP)[0])

    @upkeep_due.setter
    def upkeep_due(self, due: float) -> None:
        struct.pack_into("d", self._memory, _UPKEEP, due)

    # --- others read ---

    @property
    def last_beat(self) -> float:
        """When it, or one before it, last got on; seconds since 1970."""
        return float(struct.unpack_from("d", self._memory, _BEAT)[0])

    @property
    def has_worked(self) -> bool:
        return bool(self._memory[_WORKED])

    @property
    def number_settled(self) -> int:
        return int(struct.unpack_from("I", self._memory, _SETTLED)[0])

    @property
    def has_failed(self) -> bool:
        return bool(self._memory[_FATAL])

    def will(self) -> Will | None:
        """What the worker left, now that it is gone; None: it had not begun."""
        _, name = self._read(_NAME)
        if not name:
            return None
        _, token = self._read(_LEASE)
        kind, text = self._read(_RUNNING)
        lines = text.decode().split("\n") if text else []
        return Will(
            name.decode(),
            uuid.UUID(bytes=token) if token else None,
            frozenset((stream, receipt) for receipt, _, stream in (line.partition(" ") for line in lines))
            if kind == _DELIVERIES
            else frozenset(),
            frozenset(map(int, lines)) if kind == _ROWS else frozenset(),
            kind == _MANY,
        )

    def clear(self) -> None:
        """Make it ready for the next worker. Its beats go on."""
        for part in (_RUNNING, _NAME, _LEASE, _WORKED, _FATAL):
            self._memory[part] = _NOTHING
        struct.pack_into("I", self._memory, _SETTLED, 0)

    def _write(self, part: int, kind: int, text: bytes) -> None:
        memory = self._memory
        memory[part] = _NOTHING
        memory[part + 8 : part + 8 + len(text)] = text
        struct.pack_into("I", memory, part + 4, len(text))
        memory[part] = kind

    def _read(self, part: int) -> tuple[int, bytes]:
        kind = self._memory[part]
        if kind == _NOTHING:
            return _NOTHING, b""
        (length,) = struct.unpack_from("I", self._memory, part + 4)
        return kind, bytes(self._memory[part + 8 : part + 8 + length])


def notes(number: int) -> list[Note]:
    """So many notes, in memory that processes forked from now on share with this one."""
    memory = memoryview(mmap.mmap(-1, number * _BYTES))
    found = [Note(memory[start : start + _BYTES]) for start in range(0, number * _BYTES, _BYTES)]
    for note in found:
        note.beat()
    return found


def wills(some: Sequence[Note]) -> list[Will]:
    """What the workers of one process left, now that it is gone."""
    left = [will for note in some if (will := note.will())]
    explained = any(will.deliveries or will.rows or will.many for will in left)
    return [replace(will, explained=explained) for will in left]


def slowest(some: Sequence[Note]) -> float:
    """When the one that is furthest behind last got on; seconds since 1970."""
    return min(note.last_beat for note in some)
