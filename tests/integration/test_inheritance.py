"""What a successor makes of what a dead worker left, in the cases where others, or a successor before it, were quicker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from consumer import Consumer, Retry
from consumer.inheritance import Estate, settle
from consumer.notes import Will
from consumer.process import Outcome, Processor
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.transport import Delivery, MemoryTransport

TOPIC = "accounts"


class Desk:
    """A stream of which a worker, ``dead``, has read everything."""

    def __init__(self, url: str, number: int) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute("CREATE TABLE effects (event_id uuid)")
        consumer = Consumer("ledger", topics=[TOPIC], retry=Retry(first_seconds=0.001, longest_seconds=0.001))

        @consumer.on("credited", raw=True)
        def credit(event: Any, connection: Any) -> None:
            connection.execute("INSERT INTO effects VALUES (%s)", (event.id,))

        self.engine = schemas.engine(url, "desk")
        self.processor = Processor(consumer, self.engine, patience_seconds=0.1)
        self.transport = MemoryTransport()
        self.transport.open("ledger", [TOPIC])
        for _ in range(number):
            self.transport.add(TOPIC, {b"id": str(uuid7()).encode(), b"type": b"credited", b"data": b"{}"})
        self.deliveries = self.transport.read("ledger", "dead", [TOPIC], 100, 0)

    def settle(self, will: Will) -> Estate:
        return settle(will, self.processor, self.transport, "ledger", "heir", [TOPIC])

    def will(self, *deliveries: Delivery, **others: Any) -> Will:
        return Will("dead", deliveries=frozenset((d.stream, d.receipt) for d in deliveries), explained=True, **others)

    def rows(self) -> list[tuple[str, int, int]]:
        return self.connection.execute("SELECT reason, starts, tries FROM message_failures").fetchall()

    def pending(self) -> int:
        return self.transport.pending("ledger", TOPIC)


@pytest.fixture
def desk(database_url: str) -> Iterator[Desk]:
    found = Desk(database_url, 3)
    yield found
    found.connection.close()
    found.engine.dispose()


def test_one_is_counted_and_the_others_go_on_as_before(desk: Desk) -> None:
    estate = desk.settle(desk.will(desk.deliveries[1]))
    assert (estate.innocent, estate.suspects, estate.told) == ([desk.deliveries[0], desk.deliveries[2]], [], 1)
    assert desk.rows() == [("failed", 1, 1)]
    assert desk.pending() == 2
    assert desk.settle(desk.will(desk.deliveries[1])) == Estate(), "said twice, it is said once"
    assert desk.rows() == [("failed", 1, 1)]


def test_what_was_committed_before_the_end_is_acknowledged_and_nothing_else(desk: Desk) -> None:
    first = desk.deliveries[0]
    assert desk.processor.process([first]) == [Outcome.APPLIED]
    estate = desk.settle(desk.will(first))
    assert (desk.rows(), desk.pending(), estate.innocent) == ([], 2, desk.deliveries[1:])


def test_what_others_have_taken_over_is_theirs(desk: Desk) -> None:
    (taken,) = desk.transport.claim("ledger", "quick", TOPIC, 0, 1).deliveries
    estate = desk.settle(desk.will(taken))
    assert (estate.told, desk.rows(), estate.innocent) == (0, [], desk.deliveries[1:])
    assert desk.transport.left("ledger", "quick", TOPIC, 9) == [taken]


def test_what_another_transaction_holds_is_left_until_it_ends(desk: Desk) -> None:
    """The dead one's own, which the server has not noticed yet; or somebody's who has just claimed it."""
    first = desk.deliveries[0]
    with psycopg.connect(desk.connection.info.dsn) as other:
        other.execute(
            "INSERT INTO processed_messages (consumer, event_id) VALUES ('ledger', %s)", (first.fields[b"id"].decode(),)
        )
        estate = desk.settle(desk.will(first))
        assert (estate.held, desk.rows(), len(estate.innocent)) == (1, [], 2)
        assert desk.transport.left("ledger", "dead", TOPIC, 9) == [first]
        other.rollback()
    assert desk.settle(desk.will(first)).told == 1
    assert (desk.rows(), desk.pending()) == ([("failed", 1, 1)], 2)


def test_of_several_nobody_knows_which_it_was(desk: Desk) -> None:
    estate = desk.settle(desk.will(*desk.deliveries[:2]))
    assert [(d.receipt, d.count) for d in estate.suspects] == [(d.receipt, 2) for d in desk.deliveries[:2]]
    assert (estate.innocent, estate.told, desk.rows()) == (desk.deliveries[2:], 0, [])
    assert [d.count for d in desk.transport.left("ledger", "heir", TOPIC, 9)] == [1, 1, 1], "counted when they are run"


def test_where_nothing_explains_the_end_each_counts_once_more(desk: Desk) -> None:
    estate = desk.settle(Will("dead"))
    assert ([d.count for d in estate.innocent], estate.suspects) == ([2, 2, 2], [])
    estate = settle(Will("heir"), desk.processor, desk.transport, "ledger", "next", [TOPIC])
    assert (estate.innocent, [d.count for d in estate.suspects]) == ([], [3, 3, 3])


def leased(desk: Desk) -> tuple[Any, list[int]]:
    """All three wait, and are leased by the dead one; the token, and the rows."""
    for delivery in desk.deliveries:
        desk.processor.died(delivery)
    desk.connection.execute("UPDATE message_failures SET starts = 0, next_attempt_at = now()")
    rows, _ = desk.processor.due(600, 100)
    desk.transport.ack("ledger", desk.deliveries)
    return rows[0].lease, [row.id for row in rows]


def test_of_what_waited_one_is_counted_and_the_others_are_due_at_once(desk: Desk) -> None:
    token, ids = leased(desk)
    will = Will("dead", token, rows=frozenset(ids[:1]), explained=True)
    assert desk.settle(will).told == 1
    assert desk.settle(will).told == 0, "again"
    found = desk.connection.execute(
        "SELECT id, starts, lease IS NULL, next_attempt_at <= clock_timestamp() + interval '1 s' FROM message_failures ORDER BY id"
    ).fetchall()
    assert found == [(ids[0], 1, True, True), (ids[1], 0, True, True), (ids[2], 0, True, True)]


def test_what_waited_and_was_finished_or_leased_by_others_is_left_alone(desk: Desk) -> None:
    token, ids = leased(desk)
    desk.connection.execute("DELETE FROM message_failures WHERE id = %s", (ids[0],))
    desk.connection.execute("UPDATE message_failures SET lease = %s WHERE id = %s", (uuid.uuid4(), ids[1]))
    assert desk.settle(Will("dead", token, rows=frozenset(ids[:2]), explained=True)).told == 0
    found = desk.connection.execute("SELECT id, starts FROM message_failures ORDER BY id").fetchall()
    assert found == [(ids[1], 1), (ids[2], 0)]


def test_the_fifth_start_is_the_last(desk: Desk) -> None:
    token, ids = leased(desk)
    desk.connection.execute("UPDATE message_failures SET starts = 5 WHERE id = %s", (ids[0],))
    desk.settle(Will("dead", token, rows=frozenset(ids[:1]), explained=True))
    assert desk.connection.execute("SELECT reason FROM dead_letters").fetchall() == [("process_died",)]
    assert len(desk.rows()) == 2
