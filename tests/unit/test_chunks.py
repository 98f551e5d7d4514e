"""How many events run between two savepoints."""

from __future__ import annotations

import pytest

from consumer.work import CHUNK, Item, chunks
from outbox.transport import Delivery


def items(number: int) -> list[Item]:
    return [Item(Delivery("a", f"{n}-0", {}, 1)) for n in range(number)]


@pytest.mark.parametrize(
    ("failing", "sizes"),
    [(0.0, [64, 64, 64, 8]), (0.01, [17] * 11 + [13]), (0.1, [6] * 33 + [2]), (0.5, [3] * 66 + [2]), (1.0, [2] * 100)],
)
def test_the_more_fail_the_fewer_run_between_two_savepoints(failing: float, sizes: list[int]) -> None:
    some = items(200)
    found = list(chunks(some, lambda _: failing))
    assert [item for chunk in found for item in chunk] == some
    assert [len(chunk) for chunk in found] == sizes


def test_what_is_likely_to_fail_has_nothing_before_it_run_again() -> None:
    some = items(100)
    bad = some[10], some[50]
    found = list(chunks(some, lambda item: 0.95 if item in bad else 0.0))
    assert [chunk[0] for chunk in found] == [some[0], *bad]
    assert max(len(chunk) for chunk in found) <= CHUNK


def test_nothing_needs_no_savepoint() -> None:
    assert list(chunks([], lambda _: 1.0)) == []
