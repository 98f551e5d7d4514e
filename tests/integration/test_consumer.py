"""What a consumer does with deliveries: outcomes, order, transactions, the ledger.

PostgreSQL is real everywhere. Where Redis does not matter, deliveries come from a `MemoryTransport`, so that a test says
exactly what arrives in which batch; `test_consumer_streams.py` has what needs real streams.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from consumer import Consumer, Envelope, Order, Retry
from consumer.ledger import Ledger
from consumer.process import Outcome, Processor
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.telemetry import Claimed, Measurement
from outbox.transport import Delivery, MemoryTransport
from tests.catalog import existing_partitions
from tests.waiting import eventually

TOPIC = "accounts"
APPLIED, DUPLICATE, STALE, IGNORED, DEAD, RETRY, PARKED, HELD = Outcome
Fields = dict[bytes, bytes]

TABLES = """
    CREATE TABLE public.effects (consumer text, event_id uuid, amount numeric(20,2));
    CREATE TABLE public.accounts (id text PRIMARY KEY, balance numeric(20,2) NOT NULL DEFAULT 0, version bigint, name text);
    CREATE TABLE public.names (name text PRIMARY KEY)
"""


class Base(DeclarativeBase):
    """Of the handlers' own tables."""


class Name(Base):
    __tablename__ = "names"
    __table_args__ = {"schema": "public"}  # noqa: RUF012 - SQLAlchemy's own way
    name: Mapped[str] = mapped_column(primary_key=True)


def entry(kind: str = "credited", payload: Any = None, *, id: object = None, **fields: Any) -> Fields:
    """An entry as the relay writes it; a credit of 1.00 to A when left out. None leaves a field out."""
    wire = {"id": id or uuid7(), "type": kind, "subject": "A", "data": json.dumps(payload or {"amount": "1.00"})}
    wire |= fields
    return {n.encode(): v if isinstance(v, bytes) else str(v).encode() for n, v in wire.items() if v is not None}


def deliveries(*entries: Fields, first: int = 1, stream: str = TOPIC) -> list[Delivery]:
    return [Delivery(stream, f"{number}-0", fields) for number, fields in enumerate(entries, first)]


class Database:
    """The test's database, looked at past the product."""

    def __init__(self, url: str, consumer: str = "ledger") -> None:
        self.url, self.consumer = url, consumer
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(TABLES)

    def one(self, query: str, *parameters: Any) -> Any:
        row = self.connection.execute(query, parameters).fetchone()
        return row[0] if row and len(row) == 1 else row

    def all(self, query: str, *parameters: Any) -> list[Any]:
        return [row[0] if len(row) == 1 else row for row in self.connection.execute(query, parameters)]

    @property
    def effects(self) -> int:
        return int(self.one("SELECT count(*) FROM public.effects WHERE consumer = %s", self.consumer))

    @property
    def balance(self) -> Decimal:
        return self.one("SELECT coalesce(sum(balance), 0) FROM public.accounts WHERE id = 'A'")

    @property
    def processed(self) -> Counter[str]:
        return Counter(self.all("SELECT outcome FROM public.processed_messages WHERE consumer = %s", self.consumer))

    @property
    def waiting(self) -> Counter[str]:
        """Events in message_failures, by reason."""
        return Counter(self.all("SELECT reason FROM public.message_failures WHERE consumer = %s", self.consumer))

    def let_go(self) -> None:
        """The time of all that waits has come."""
        self.connection.execute("UPDATE public.message_failures SET next_attempt_at = now() WHERE lease IS NULL")

    @property
    def dead(self) -> list[str]:
        return self.all("SELECT reason FROM public.dead_letters WHERE consumer = %s ORDER BY id", self.consumer)


def again(processor: Processor, database: Database) -> list[Outcome | None]:
    """Run all that waits, as if its time had come, oldest first."""
    database.let_go()
    outcomes: list[Outcome | None] = []
    while leased := processor.due(60, 500)[0]:
        outcomes += processor.process(leased)
    return outcomes


def credit(event: Envelope, session: Session) -> None:
    """Counts always: an effect row without any unique constraint, and the balance."""
    values = {"c": "ledger", "e": event.id, "a": Decimal(event.payload["amount"]), "k": event.key}
    session.execute(text("INSERT INTO public.effects VALUES (:c, :e, :a)"), values)
    session.execute(
        text(
            "INSERT INTO public.accounts (id, balance) VALUES (:k, :a) "
            "ON CONFLICT (id) DO UPDATE SET balance = accounts.balance + excluded.balance"
        ),
        values,
    )


def rename(event: Envelope, session: Session) -> None:
    """Sets, without looking at what is there: the order is the consumer's to keep."""
    session.execute(
        text(
            "INSERT INTO public.accounts (id, name, version) VALUES (:k, :n, :v) "
            "ON CONFLICT (id) DO UPDATE SET name = excluded.name, version = excluded.version"
        ),
        {"k": event.key, "n": event.payload["name"], "v": event.version},
    )


#: Another try at once, as good as without end.
SOON = Retry(attempts=1000, first_seconds=0.02, longest_seconds=0.02)


def wallet(*, name: str = "ledger") -> Consumer:
    consumer = Consumer(name, topics=[TOPIC], retry=SOON)
    consumer.on("credited")(credit)
    consumer.on("renamed", order=Order.LATEST)(rename)
    consumer.ignore("noise")
    return consumer


def drain(worker: Worker, transport: MemoryTransport, *, group: str = "ledger", deliveries: int) -> Counter[Outcome]:
    """Run rounds until so many deliveries ended for good; then nothing may be pending."""
    total: Counter[Outcome] = Counter()

    def done() -> bool:
        total.update(worker.run_once())
        return sum(n for outcome, n in total.items() if outcome is not RETRY) >= deliveries

    eventually(done)
    assert transport.pending(group, TOPIC) == 0
    return total


# --- outcomes ------------------------------------------------------------------------------------------------------


def test_a_batch_ends_in_one_outcome_each(database: Database, engine: sqlalchemy.Engine) -> None:
    once = uuid7()
    batch = deliveries(
        entry(id=once),
        entry(id=once),  # published twice, in one batch
        entry("noise"),
        entry("shipped"),  # nobody knows this type
        entry("renamed", {"name": "B"}, version=2),
        entry("renamed", {"name": "A"}, version=1),
        entry("renamed", {"name": "C"}),
        entry("renamed", {"name": "C"}, version=3, subject=None),
        entry(data=b"{"),
    )
    processor = Processor(wallet(), engine)
    outcomes = [APPLIED, DUPLICATE, IGNORED, PARKED, APPLIED, STALE, DEAD, DEAD, DEAD]
    assert processor.process(batch) == outcomes
    assert database.effects == 1
    assert database.processed == {"applied": 2, "stale": 1, "dead": 2, "waiting": 1}
    assert database.waiting == {"no_handler": 1}
    assert sorted(database.dead) == ["no_key", "no_version", "undecodable"]

    once_more = [DUPLICATE, DUPLICATE, IGNORED, *[DUPLICATE] * 5, DEAD]
    assert processor.process(batch) == once_more
    assert database.effects == 1
    assert database.one("SELECT name FROM public.accounts") == "B"
    assert len(database.dead) == 3  # the undecodable one is put aside once


def test_what_has_not_started_when_asked_to_stop_is_left_out(database: Database, engine: sqlalchemy.Engine) -> None:
    """Without its ledger row, version, or any other trace."""
    once = uuid7()
    batch = deliveries(
        entry(id=once),
        entry("renamed", {"name": "B"}, version=2),
        entry("renamed", {"name": "A"}, version=1),
        entry("renamed", {"name": "D"}, subject="B", version=2),
        entry("renamed", {"name": "C"}, subject="B", version=1),
        entry(id=once),
        entry("noise"),
        entry(data=b"{"),
    )
    processor, left = Processor(wallet(), engine), [None] * 5
    assert processor.process(batch, lambda: True) == [*left, DUPLICATE, IGNORED, DEAD]
    assert database.processed == {}
    calls = iter([False, False])
    assert processor.process(batch, lambda: next(calls, True)) == [
        APPLIED,
        APPLIED,
        *left[2:],
        DUPLICATE,
        IGNORED,
        DEAD,
    ]
    assert database.processed == {"applied": 2}
    assert database.all("SELECT key, version FROM public.entity_versions WHERE version > 0") == [("A", 2)]
    assert processor.process(batch[:5]) == [DUPLICATE, DUPLICATE, STALE, APPLIED, STALE]
    assert database.all("SELECT name FROM public.accounts ORDER BY id") == ["B", "D"]


def test_what_waits_is_left_waiting_when_asked_to_stop(database: Database, engine: sqlalchemy.Engine) -> None:
    """Also for a handler that takes many at once."""
    failing = True
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on_batch("credited")
    def credit_all(events: Sequence[Envelope], session: Session) -> None:
        if failing:
            raise RuntimeError("not yet")
        for event in events:
            credit(event, session)

    processor = Processor(consumer, engine)
    assert processor.process(deliveries(entry(), entry()), lambda: True) == [None, None]
    assert processor.process(deliveries(entry(), entry())) == [RETRY, RETRY]
    failing = False
    database.connection.execute("UPDATE public.message_failures SET next_attempt_at = now()")
    for _ in range(3):
        due, _ = processor.due(60, 10)
        assert [row.starts for row in due] == [1, 1]
        assert processor.process(due, lambda: True) == [None, None]
        assert database.processed == {"waiting": 2}
        processor.release(due)
    assert processor.process(processor.due(60, 10)[0]) == [APPLIED, APPLIED]
    assert database.processed == {"applied": 2}
    assert database.one("SELECT count(*) FROM public.message_failures") == 0


def test_an_event_counts_once_for_each_consumer_name(database: Database, engine: sqlalchemy.Engine) -> None:
    batch = deliveries(entry(), entry())
    assert Processor(wallet(), engine).process(batch) == [APPLIED, APPLIED]
    assert Processor(wallet(name="mailer"), engine).process(batch) == [APPLIED, APPLIED]
    assert Processor(wallet(name="mailer"), engine).process(batch) == [DUPLICATE, DUPLICATE]


def test_events_of_unknown_types_wait_for_a_handler(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    transport.add(TOPIC, entry("debited"))
    transport.add(TOPIC, entry())
    worker = start(wallet(), transport)
    assert worker.run_once() == {PARKED: 1, APPLIED: 1}
    assert transport.pending("ledger", TOPIC) == 0
    assert database.processed == {"applied": 1, "waiting": 1}

    newer = wallet()
    newer.on("debited")(credit)
    assert drain(start(newer, transport), transport, deliveries=1) == {APPLIED: 1}
    assert database.effects == 2


class Watched(MemoryTransport):
    """Says at each acknowledgement what the database holds, as others see it."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []
        self._database = database

    def ack(self, group: str, deliveries: Sequence[Delivery]) -> None:
        processed = self._database.processed
        self.seen.append((len(deliveries), processed.total(), self._database.effects))
        super().ack(group, deliveries)


def test_nothing_is_acknowledged_before_the_commit(database: Database, start: Callable[..., Worker]) -> None:
    transport = Watched(database)
    worker = start(wallet(), transport, batch_size=2)
    for _ in range(5):
        transport.add(TOPIC, entry())
    drain(worker, transport, deliveries=5)
    assert transport.seen == [(2, 2, 2), (2, 4, 4), (1, 5, 5)]


def test_o_21_an_event_whose_handler_fails_is_kept(database: Database, start: Callable[..., Worker]) -> None:
    failed: set[uuid.UUID] = set()
    counts: dict[uuid.UUID, int] = {}
    ids = [uuid7() for _ in range(5)]
    consumer = Consumer("ledger", topics=[TOPIC], retry=SOON)

    @consumer.on("credited")
    def fails_first(event: Envelope, session: Session) -> None:
        credit(event, session)
        counts[event.id] = event.delivery_count
        if event.id in (ids[1], ids[3]) and event.delivery_count == 1:
            failed.add(event.id)
            raise RuntimeError("first time")

    transport = Watched(database)
    worker = start(consumer, transport)
    for event_id in ids:
        transport.add(TOPIC, entry(payload={"amount": "50.00"}, id=event_id))
    assert worker.run_once() == {APPLIED: 3, RETRY: 2}
    assert (database.effects, database.waiting) == (3, {"failed": 2})
    drain(worker, transport, deliveries=2)
    assert (database.balance, database.effects, database.processed) == (250, 5, {"applied": 5})
    assert failed == {ids[1], ids[3]}
    assert [counts[event_id] >= 2 for event_id in ids] == [False, True, False, True, False]


class Counting(MemoryTransport):
    """Knows how many deliveries it was asked for, by read and by claim."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.asked_to_claim: list[int] = []

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        self.asked.append(count)
        return super().read(group, consumer, streams, count, block_seconds)

    def claim(self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: Any = None) -> Any:
        self.asked_to_claim.append(count)
        return super().claim(group, consumer, stream, idle_seconds, count, cursor)


def test_large_deliveries_are_asked_for_in_small_numbers(database: Database, start: Callable[..., Worker]) -> None:
    """Half of 16 MiB is for the stream of the topic, as the other one is for what is replayed for this group alone."""
    transport = Counting()
    for _ in range(16 + 64 + 256 + 500):
        transport.add(TOPIC, entry("noise"))
    for _ in range(10):
        transport.add(TOPIC, entry(payload={"amount": "1.00", "x": "x" * (1 << 20)}))
    worker = start(wallet(), transport)
    while database.effects < 10:
        worker.run_once()
    assert transport.asked == [16, 64, 256, 500, 500]
    eventually(lambda: [worker.run_once(), transport.asked_to_claim[-1] == 7][-1])
    assert transport.asked[-1] == 7


def test_o_63_what_cannot_be_parsed_is_put_aside_raw(database: Database, start: Callable[..., Worker]) -> None:
    transport = MemoryTransport()
    bad = [entry() | {b"id": b"not-a-uuid"}, entry(data=b"{"), entry()]
    del bad[2][b"id"]
    for fields in bad:
        transport.add(TOPIC, fields)
    transport.add(TOPIC, entry(payload={"amount": "0.00"}, colour="red", shape="round"))
    for _ in range(5):
        transport.add(TOPIC, entry(payload={"amount": "50.00"}))
    assert drain(start(wallet(), transport), transport, deliveries=9) == {DEAD: 3, APPLIED: 6}
    assert (database.balance, database.effects) == (250, 6)
    rows = database.all("SELECT fields, reason, error, attempts, stream_id FROM public.dead_letters ORDER BY id")
    raw = [dict(zip(fields[::2], fields[1::2], strict=True)) for fields, *_ in rows]
    assert sorted(raw, key=str) == sorted(bad, key=str)
    assert [(reason, attempts) for _, reason, _, attempts, _ in rows] == [("undecodable", 1)] * 3
    assert {error for _, _, error, *_ in rows} == {
        "id: is not a UUID",
        "data: is not application/json",
        "id: is missing",
    }


@pytest.mark.parametrize(
    "fields",
    [
        entry() | {b"na\x00me": b"\xff"},
        entry() | {b"\xff\x00": b"x"},
        entry() | {b"": b"\xff"},
        entry(subject="a\x00b"),
        entry("\x00"),
        entry(version="9" * 30),
        entry(time="yesterday"),
        {b"\x00": b"\x00"},
    ],
    ids=lambda fields: repr(sorted(fields))[:40],
)
def test_o_63_even_what_postgresql_cannot_hold_as_text(
    fields: Fields, database: Database, engine: sqlalchemy.Engine
) -> None:
    assert Processor(wallet(), engine).process(deliveries(fields, entry())) == [DEAD, APPLIED]
    assert database.dead == ["undecodable"]


def test_o_93_a_pickle_is_never_loaded(database: Database, engine: sqlalchemy.Engine, tmp_path: Any) -> None:
    marker = tmp_path / "loaded"
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    batch = deliveries(
        entry(data=pickled),
        entry(data=pickled, datacontenttype="application/octet-stream", type="opaque"),
        entry(data=pickled, datacontenttype="application/x-python-pickle", type="opaque"),
        {b"id": pickled, b"type": pickled, b"data": pickled},
        {b"pickle": pickled},
        entry(),
    )
    consumer, seen = wallet(), []
    consumer.on("opaque")(lambda event, session: seen.append(event.payload))
    assert Processor(consumer, engine).process(batch) == [DEAD, APPLIED, APPLIED, DEAD, DEAD, APPLIED]
    assert seen == [pickled, pickled]  # bytes, as they came
    assert database.effects == 1
    assert not marker.exists()


# --- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 500])
def test_o_06_an_older_or_unversioned_event_does_not_overwrite(
    batch_size: int, database: Database, start: Callable[..., Worker]
) -> None:
    """The event without a version is dead here with a ledger row of its own, so that there are 6 of them and not 5."""
    transport = MemoryTransport()
    for version, name in [(5, "E"), (3, "C"), (7, "G"), (6, "F"), (7, "X"), (None, "N")]:
        transport.add(TOPIC, entry("renamed", {"name": name}, version=version))
    outcomes = drain(start(wallet(), transport, batch_size=batch_size), transport, deliveries=6)
    assert outcomes == {APPLIED: 2, STALE: 3, DEAD: 1}
    assert database.all("SELECT name, version FROM public.accounts") == [("G", 7)]
    assert database.processed == {"applied": 2, "stale": 3, "dead": 1}
    assert database.dead == ["no_version"]


def test_o_07_an_update_before_its_create_does_not_touch_its_neighbours(
    database: Database, start: Callable[..., Worker]
) -> None:
    """A's update raises until its create was seen; B's credits share the batch and are applied once."""
    consumer = Consumer("ledger", topics=[TOPIC])
    refused: list[int] = []

    @consumer.on("credited")
    def apply(event: Envelope, session: Session) -> None:
        if event.key == "A" and event.version == 2 and not refused:
            refused.append(2)
            raise LookupError("not yet")
        credit(event, session)
        session.execute(
            text("UPDATE public.accounts SET version = greatest(version, :v) WHERE id = :k"),
            {"v": event.version, "k": event.key},
        )

    transport = MemoryTransport()
    for key, version in [("A", 2), ("A", 1), ("B", 1), ("B", 2), ("B", 3), ("B", 4)]:
        transport.add(TOPIC, entry(version=version, subject=key))
    drain(start(consumer, transport), transport, deliveries=6)
    assert refused == [2]
    assert database.all("SELECT id, balance, version FROM public.accounts ORDER BY id") == [("A", 2, 2), ("B", 4, 4)]
    assert database.effects == 6


def test_latest_takes_several_versions_of_a_key_in_one_batch(database: Database, engine: sqlalchemy.Engine) -> None:
    ran: list[tuple[str | None, int | None]] = []
    consumer = Consumer("ledger", topics=[TOPIC, "people"])
    consumer.on("renamed", order=Order.LATEST)(lambda event, session: ran.append((event.key, event.version)))
    consumer.on("moved", order=Order.LATEST)(lambda event, session: ran.append((f"{event.key} moved", event.version)))
    processor = Processor(consumer, engine)

    def versions(kind: str, key: str, *numbers: int, stream: str = TOPIC) -> list[Outcome | None]:
        return processor.process(deliveries(*(entry(kind, version=n, subject=key) for n in numbers), stream=stream))

    assert versions("renamed", "A", 3, 5, 4, 5, 6) == [APPLIED, APPLIED, STALE, STALE, APPLIED]
    assert ran == [("A", 3), ("A", 5), ("A", 6)]
    assert versions("renamed", "A", 6, 0, 7) == [STALE, STALE, APPLIED]
    assert versions("renamed", "B", 0) == [APPLIED]  # the first version may be 0
    assert versions("moved", "A", 1) == [APPLIED]  # a newer rename does not hide an older move
    assert versions("renamed", "A", 1, stream="people") == [APPLIED]  # nor another topic
    assert versions("renamed", "A", 2**63 - 1, 2**63 - 2) == [APPLIED, STALE]


def test_latest_forgets_the_version_of_a_handler_that_failed(database: Database, engine: sqlalchemy.Engine) -> None:
    broken = True
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("renamed", order=Order.LATEST)
    def fails(event: Envelope, session: Session) -> None:
        rename(event, session)
        if event.version == 9 and broken:
            raise RuntimeError

    processor = Processor(consumer, engine)
    newest = entry("renamed", {"name": "I"}, version=9)
    batch = deliveries(newest, entry("renamed", {"name": "E"}, version=5))
    assert processor.process(batch) == [RETRY, APPLIED]  # 5 is not older than anything applied
    assert database.one("SELECT name FROM public.accounts") == "E"
    broken = False
    assert processor.process(batch) == [DUPLICATE, DUPLICATE]
    assert again(processor, database) == [APPLIED]
    assert database.one("SELECT name FROM public.accounts") == "I"


def test_one_key_keeps_the_order_of_the_stream(database: Database, engine: sqlalchemy.Engine) -> None:
    ran: list[tuple[str | None, int]] = []
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("credited")(lambda event, session: ran.append((event.key, event.payload["n"])))
    batch = deliveries(*(entry(payload={"n": n}, subject="BAC"[n % 3]) for n in range(1, 31)))
    assert set(Processor(consumer, engine).process(batch)) == {APPLIED}
    for key in "ABC":
        assert [n for k, n in ran if k == key] == [n for n in range(1, 31) if "BAC"[n % 3] == key]


def test_two_consumers_of_a_name_share_keys_without_deadlock(database: Database, database_url: str) -> None:
    """Both get all events, one of them backwards, as after a claim of what the other is still at."""
    rounds, size = 15, 40
    batches = [
        deliveries(
            *(entry(subject=f"k{n}") for n in range(size)),
            *(entry("renamed", {"name": str(n)}, version=number, subject=f"k{n}") for n in range(size)),
        )
        for number in range(rounds)
    ]
    engines = [schemas.engine(database_url, "deadlock?", pool_size=1) for _ in range(2)]
    outcomes: list[list[Outcome | None]] = [[], []]
    barrier = threading.Barrier(2)

    def run(which: int) -> None:
        processor = Processor(wallet(), engines[which])
        for batch in batches:
            barrier.wait(10)
            outcomes[which] += processor.process(batch[::-1] if which else batch)

    threads = [threading.Thread(target=run, args=(which,), daemon=True) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for made in engines:
        made.dispose()
    total = rounds * size
    ended = Counter(outcomes[0]) + Counter(outcomes[1])
    assert ended == {APPLIED: 2 * total, DUPLICATE: 2 * total}
    assert database.effects == total
    assert set(database.all("SELECT balance, version FROM public.accounts")) == {(rounds, rounds - 1)}
    # Their counters are complete once they have gone.
    eventually(lambda: not database.one("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'deadlock?'"))
    assert database.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


# --- what handlers do to their transaction ---------------------------------------------------------------------------


MISUSES: dict[str, Callable[[Any], Any]] = {
    "commit": lambda session: session.commit(),
    "rollback": lambda session: session.rollback(),
    "close": lambda session: session.close(),
    "commit the connection": lambda session: session.connection().commit(),
    "roll the connection back": lambda session: session.connection().rollback(),
    "commit the driver's": lambda session: session.connection().connection.driver_connection.commit(),
    "roll the driver's back": lambda session: session.connection().connection.driver_connection.rollback(),
    "close the driver's": lambda session: session.connection().connection.driver_connection.close(),
}
RAW_MISUSES: dict[str, Callable[[Any], Any]] = {
    "commit": lambda connection: connection.commit(),
    "rollback": lambda connection: connection.rollback(),
    "close": lambda connection: connection.close(),
}


def _misused(misuse: Callable[[Any], Any], raw: bool, database: Database, engine: sqlalchemy.Engine) -> list[Any]:
    """A batch of three, the middle one of which misuses what it is given, after its effect; then once more, well."""
    once = True
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("credited")(credit)

    @consumer.on("misused", raw=raw)
    def handler(event: Envelope, given: Any) -> None:
        nonlocal once
        if raw:
            given.execute("INSERT INTO public.effects VALUES ('ledger', %s, 1)", (event.id,))
        else:
            credit(event, given)
        if once:
            misuse(given)

    processor = Processor(consumer, engine)
    batch = deliveries(entry(subject="A"), entry("misused", subject="B"), entry(subject="C"))
    first = processor.process(batch)
    left = database.all("SELECT DISTINCT event_id::text FROM public.effects")
    assert sorted(left) == sorted(batch[n].fields[b"id"].decode() for n in (0, 2))
    assert database.processed == {"applied": 2, "waiting": 1}
    once = False
    assert again(processor, database) == [APPLIED]
    assert processor.process(batch) == [DUPLICATE] * 3
    assert database.effects == 3
    return first


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_a_handler_that_ends_its_session_applies_nothing(
    misuse: Callable[[Any], Any], database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert _misused(misuse, False, database, engine) == [APPLIED, RETRY, APPLIED]
    assert [r.action for r in caplog.records if r.levelno == logging.ERROR] == ["handler_failed"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("misuse", RAW_MISUSES.values(), ids=RAW_MISUSES.keys())
def test_a_raw_handler_that_ends_its_connection_applies_nothing(
    misuse: Callable[[Any], Any], database: Database, engine: sqlalchemy.Engine
) -> None:
    assert _misused(misuse, True, database, engine) == [APPLIED, RETRY, APPLIED]


@pytest.mark.parametrize("method", ["commit", "rollback", "close"])
def test_misuse_is_named(
    method: str, database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer("ledger", topics=[TOPIC])
    consumer.on("credited")(lambda event, session: getattr(session, method)())
    assert Processor(consumer, engine).process(deliveries(entry())) == [RETRY]
    assert f"HandlerMisuse: a handler must not {method} the session" in caplog.text


def _batch_of_ten(
    database: Database, engine: sqlalchemy.Engine, handler: Any
) -> tuple[list[Outcome | None], Counter[str]]:
    """Three of the ten were processed before; the sixth meets a name that is taken.

    For O-38 without streams: that what ends in RETRY stays pending and all else is acknowledged is O-21's.
    """
    database.connection.execute("INSERT INTO public.names VALUES ('taken')")
    consumer = wallet()
    consumer.on("named")(handler)
    processor = Processor(consumer, engine)
    before = [entry() for _ in range(3)]
    processor.process(deliveries(*before))
    fresh = [entry() for _ in range(6)]
    batch = deliveries(*before[:2], *fresh[:3], entry("named", {"name": "taken"}), *fresh[3:], before[2])
    return processor.process(batch), database.processed


def test_o_38_an_integrity_error_caught_in_a_savepoint_is_fine(database: Database, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, session: Session) -> None:
        try:
            with session.begin_nested():
                session.add(Name(name=event.payload["name"]))
        except IntegrityError:
            credit(event_with_amount(event), session)

    outcomes, processed = _batch_of_ten(database, engine, handler)
    assert outcomes == [DUPLICATE] * 2 + [APPLIED] * 7 + [DUPLICATE]
    assert (database.effects, processed) == (10, {"applied": 10})


def test_o_38_an_integrity_error_caught_without_a_savepoint_fails_that_event_only(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(event: Envelope, session: Session) -> None:
        try:
            session.execute(text("INSERT INTO public.names VALUES (:n)"), {"n": event.payload["name"]})
        except IntegrityError:
            credit  # what it wanted to do instead  # noqa: B018

    outcomes, processed = _batch_of_ten(database, engine, handler)
    assert outcomes == [DUPLICATE] * 2 + [APPLIED] * 3 + [RETRY] + [APPLIED] * 3 + [DUPLICATE]
    assert (database.effects, processed) == (9, {"applied": 9, "waiting": 1})
    assert "outside of session.begin_nested()" in caplog.text
    assert "current transaction is aborted" not in caplog.text


def test_o_38_and_if_it_goes_on_regardless(database: Database, engine: sqlalchemy.Engine) -> None:
    def handler(event: Envelope, session: Session) -> None:
        try:
            session.add(Name(name=event.payload["name"]))
            session.flush()
        except IntegrityError:
            credit(event_with_amount(event), session)

    outcomes, processed = _batch_of_ten(database, engine, handler)
    assert outcomes == [DUPLICATE] * 2 + [APPLIED] * 3 + [RETRY] + [APPLIED] * 3 + [DUPLICATE]
    assert (database.effects, processed) == (9, {"applied": 9, "waiting": 1})


def event_with_amount(event: Envelope) -> Envelope:
    return Envelope(event.id, event.topic, event.type, b"", {"amount": "1.00"}, key=event.key)


def test_pending_changes_are_flushed_so_that_the_right_event_is_named(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[str] = []
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("named")
    def handler(event: Envelope, session: Session) -> None:
        started.append(event.payload["name"])
        session.add(Name(name=event.payload["name"]))

    database.connection.execute("INSERT INTO public.names VALUES ('b')")
    batch = deliveries(*(entry("named", {"name": name}, subject=name) for name in "abc"))
    assert Processor(consumer, engine).process(batch) == [APPLIED, RETRY, APPLIED]
    assert started == ["a", "b", "a", "c"]  # the batch ended at b, not at its end
    failed = [r for r in caplog.records if getattr(r, "action", "") == "handler_failed"]
    assert [r.event_id for r in failed] == [batch[1].fields[b"id"].decode()]  # type: ignore[attr-defined]
    assert database.all("SELECT name FROM public.names ORDER BY name") == ["a", "b", "c"]


def test_o_94_what_a_message_says_is_only_ever_a_value(database: Database, engine: sqlalchemy.Engine) -> None:
    """Type, key, a field's name, payload: applied, put aside for two reasons, and waiting; no statement is spoilt."""
    nasty = "x'); SELECT pg_sleep(5)--\"; DROP TABLE accounts; --%s %(a)s {x} :y"
    consumer = wallet()
    consumer.on(nasty, order=Order.LATEST)(rename)
    good = entry(nasty, {"name": nasty}, version=1, subject=nasty, source="/x") | {nasty.encode(): nasty.encode()}
    batch = deliveries(
        good,
        entry(nasty, {"name": nasty}, subject=nasty),  # without a version
        {nasty.encode(): nasty.encode()},
        entry(f"unknown{nasty}", subject=nasty),
        stream=TOPIC,
    )
    begun = time.monotonic()
    assert Processor(consumer, engine).process(batch) == [APPLIED, DEAD, DEAD, PARKED]
    assert time.monotonic() - begun < 4
    assert database.one("SELECT id, name, version FROM public.accounts") == (nasty, nasty, 1)
    assert database.one("SELECT type, key, version FROM public.entity_versions") == (nasty, nasty, 1)
    assert database.one("SELECT count(*) FROM public.dead_letters WHERE %s::bytea = ANY (fields)", nasty.encode()) == 2


def test_failures_do_not_log_payloads(
    database: Database, engine: sqlalchemy.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("named")
    def handler(event: Envelope, session: Session) -> None:
        session.execute(text("INSERT INTO public.nowhere VALUES (:secret)"), {"secret": event.payload["secret"]})

    assert Processor(consumer, engine).process(deliveries(entry("named", {"secret": "S3cr3t"}))) == [RETRY]
    assert "UndefinedTable" in caplog.text
    assert all("S3cr3t" not in record.getMessage() for record in caplog.records)


# --- the ledger ------------------------------------------------------------------------------------------------------


def test_o_57_the_ledgers_lookups_use_its_primary_key(database: Database, database_url: str) -> None:
    """100,000 rows instead of two million; prepared statements with generic plans too, as after many executions."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        Ledger("ledger").make_partitions(connection, 7, 2)
        connection.execute(
            "INSERT INTO public.processed_messages (consumer, event_id) "
            "SELECT 'ledger', gen_random_uuid() FROM generate_series(1, 100000)"
        )
        connection.execute("ANALYZE public.processed_messages")

    def scans() -> Any:
        database.connection.execute("SELECT pg_stat_force_next_flush()")  # of what this connection itself has read
        database.connection.execute("SELECT pg_stat_clear_snapshot()")
        return database.one(
            "SELECT sum(seq_scan), sum(seq_tup_read), sum(idx_scan) FROM pg_stat_user_tables "
            "WHERE relname = 'processed_messages_default'"
        )

    present = set(database.all("SELECT event_id FROM public.processed_messages LIMIT 300"))
    for threshold, plans in ((None, "auto"), (0, "force_generic_plan")):
        with psycopg.connect(database_url, autocommit=True, prepare_threshold=threshold) as connection:
            connection.execute(sql.SQL("SET plan_cache_mode = {}").format(plans))
            before = scans()
            ledger = Ledger("ledger")
            for _ in range(12):
                absent = {uuid.uuid4() for _ in range(200)}
                assert ledger.present(connection, present | absent) == present
                assert ledger.claim(connection, present | absent) == absent
            connection.execute("SELECT pg_stat_force_next_flush()")
            connection.execute("SELECT 1")
            after = scans()
        assert after[:2] == before[:2], (threshold, before, after)
        assert after[2] > before[2]


@pytest.mark.parametrize("schema", ["tenant_a", "TenantA", "tenant-a", "select", "té", "a.b c$"])
def test_odd_schema_names(schema: str, empty_database_url: str) -> None:
    schemas.upgrade(empty_database_url, "consumer", schema=schema)
    engine = schemas.engine(empty_database_url, "odd")
    database = Database(empty_database_url)
    batch = deliveries(entry(), entry("renamed", {"name": "B"}, version=2), entry(data=b"{"), entry("renamed"))
    try:
        worker = Worker(
            wallet(),
            ConsumerSettings(
                database_url=empty_database_url, redis_url="redis://unused", schema_name=schema, block_seconds=0.02
            ),
            transport=(transport := MemoryTransport()),
            engine=engine,
        )
        for delivery in batch:
            transport.add(TOPIC, dict(delivery.fields))
        assert worker.run_once() == {APPLIED: 2, DEAD: 2}
        tables = set(
            database.all("SELECT relname FROM pg_class WHERE relnamespace = quote_ident(%s)::regnamespace", schema)
        )
        assert {"processed_messages", "entity_versions", "dead_letters", "processed_messages_default"} <= tables
        assert sum(re.fullmatch(r"processed_messages_\d+_\d+", name) is not None for name in tables) == 5
        count = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, "processed_messages"))
        assert database.connection.execute(count).fetchone() == (3,)
        in_public = database.all("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
        assert in_public == ["accounts", "effects", "names"]  # the test's own
    finally:
        engine.dispose()
        database.connection.close()


def test_rows_go_to_the_partition_of_their_time(
    database: Database, engine: sqlalchemy.Engine, start: Callable[..., Worker]
) -> None:
    transport = MemoryTransport()
    ids = {"now": uuid7(), "random": uuid.uuid4(), "old": uuid.UUID("01000000-0000-7000-8000-000000000000")}
    for event_id in ids.values():
        transport.add(TOPIC, entry(id=event_id))
    worker = start(wallet(), transport)
    assert drain(worker, transport, deliveries=3) == {APPLIED: 3}
    rows = dict(database.all("SELECT event_id, tableoid::regclass::text FROM public.processed_messages"))
    where = {name: rows[event_id] for name, event_id in ids.items()}
    # A version 4 id is random and may fall into a partition, with odds of some 10**-7 for four weeks of 8,900 years.
    assert where["random"] == where["old"] == "processed_messages_default"
    low, high = map(int, where["now"].rsplit("_", 2)[1:])
    assert low <= ids["now"].int >> 80 < high
    assert high - low == 7 * 86_400_000
    for event_id in ids.values():
        transport.add(TOPIC, entry(id=event_id))
    assert drain(worker, transport, deliveries=3) == {DUPLICATE: 3}


def test_partitions_are_made_once_and_take_the_rows_that_were_early(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    Processor(wallet(), engine).process(deliveries(entry(), entry()))
    where = "SELECT DISTINCT tableoid::regclass::text FROM public.processed_messages"
    assert database.all(where) == ["processed_messages_default"]
    ledger = Ledger("ledger")
    assert [ledger.make_partitions(database.connection, 7, 2) for _ in range(2)] == [3, 0]
    assert database.one(where) != "processed_messages_default"
    assert ledger.make_partitions(database.connection, 1, 30) > 0  # another width goes on where the last one ends
    assert database.processed == {"applied": 2}


def test_an_empty_search_path(database: Database, database_url: str) -> None:
    url = f"{database_url}?options=-c%20search_path%3D"
    engine = schemas.engine(url, "lost")
    with engine.connect() as connection:
        assert connection.execute(text("SHOW search_path")).scalar() in ("", '""')
    transport = MemoryTransport()
    worker = Worker(
        wallet(),
        ConsumerSettings(database_url=url, redis_url="redis://unused", block_seconds=0.02),
        transport=transport,
        engine=engine,
    )
    for fields in (entry(), entry("renamed", {"name": "B"}, version=2), entry(data=b"{"), entry("renamed")):
        transport.add(TOPIC, fields)
    assert worker.run_once() == {APPLIED: 2, DEAD: 2}
    assert len(existing_partitions(database.connection, "public", "processed_messages")) == 6
    engine.dispose()


def test_o_36_deliveries_deleted_while_pending_are_counted(database: Database, start: Callable[..., Worker]) -> None:
    """The part that needs no server; `test_consumer_streams.py` has it on every server."""
    transport, seen = MemoryTransport(), list[Measurement]()
    receipts = [transport.add(TOPIC, entry()) for _ in range(5)]
    transport.open("ledger", [TOPIC])
    transport.read("ledger", "crashed", [TOPIC], 5, 0)
    for receipt in receipts[:2]:
        transport.delete(TOPIC, receipt)
    drain(start(wallet(), transport, observer=seen.append), transport, deliveries=3)
    claims = [m for m in seen if isinstance(m, Claimed)]
    assert [sum(c.deliveries for c in claims), sum(c.missing for c in claims)] == [3, 2]
    assert database.effects == 3
