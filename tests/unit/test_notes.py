"""What a worker leaves in memory, whole or torn."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from consumer.ledger import Waiting
from consumer.notes import Note, Will, notes, slowest
from outbox.transport import Delivery

TOKEN = uuid.uuid4()


def test_a_will_says_what_the_worker_was_at() -> None:
    (note,) = notes(1)
    assert note.will() is None
    note.begin("host-1")
    assert note.will() == Will("host-1")
    note.running([Delivery("a:1", "5-0", {})])
    assert note.will() == Will("host-1", None, frozenset({("a:1", "5-0")}))
    note.leased(TOKEN)
    note.running([Waiting("a", "1-0", {}, id=7), Waiting("a", "2-0", {}, id=8)])
    assert note.will() == Will("host-1", TOKEN, rows=frozenset({7, 8}))
    note.running(())
    assert note.will() == Will("host-1", TOKEN)
    note.running([Delivery("a" * 200, f"{n}-0", {}) for n in range(500)])
    assert note.will() == Will("host-1", TOKEN, many=True)
    note.clear()
    assert note.will() is None


def test_notes_lie_side_by_side() -> None:
    first, second = notes(2)
    first.begin("one")
    second.begin("two")
    first.running([Delivery("é" * 100, f"{n}-0", {}) for n in range(280)])  # nearly all the room there is
    assert second.will() == Will("two")
    will = first.will()
    assert will is not None
    assert (len(will.deliveries), will.many) == (280, False)


@pytest.mark.parametrize("written", range(1, 9))
def test_a_torn_note_says_nothing(written: int) -> None:
    """The process is killed at each instruction that changes the memory in turn."""

    class Torn(bytearray):
        left = written

        def __setitem__(self, key: object, value: object) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            super().__setitem__(key, value)  # type: ignore[index, assignment]  # as it was called

    memory = Torn(1 << 16)
    memory.left = 1000
    note = Note(memory)  # type: ignore[arg-type]  # of what a memoryview does, it needs this
    note.begin("one")
    note.running([Delivery("long" * 20, "1-0", {})])
    memory.left = written
    before, after = frozenset({("long" * 20, "1-0")}), frozenset({("b", "2-0")})
    try:
        note.running([Delivery("b", "2-0", {})])
        whole = True
    except KeyboardInterrupt:
        whole = False
    will = note.will()
    assert will is not None
    assert will.deliveries in ((after,) if whole else (frozenset(), after))
    assert before != will.deliveries


def test_it_outlives_a_process_that_is_killed() -> None:
    (note,) = notes(1)
    if (pid := os.fork()) == 0:
        note.begin("child")
        note.running([Delivery("a", "1-0", {})])
        note.worked()
        note.settled(3)
        note.settled(1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert note.will() == Will("child", None, frozenset({("a", "1-0")}))
    assert (note.has_worked, note.has_failed, note.number_settled) == (True, False, 3)


def test_the_slowest_counts() -> None:
    first, second = notes(2)
    before = slowest([first, second])
    assert before > 0
    first.beat()
    assert slowest([first, second]) <= second.last_beat < first.last_beat
