"""The test kit and the worker on PostgreSQL and Redis, given the same deliveries, come to the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from consumer import Consumer, Order, Reject, Retry
from consumer.settings import ConsumerSettings
from consumer.testing import Rehearsal
from consumer.worker import Worker
from outbox import Event, record
from outbox.relay import Relay
from outbox.settings import RelaySettings
from tests.waiting import eventually

_ONCE = Retry(attempts=1, first_seconds=0.001, longest_seconds=0.001)
_TWICE = Retry(attempts=2, first_seconds=0.001, longest_seconds=0.001)


def consumer() -> Consumer:
    """Every kind of handler there is; what they do is written down in the table `effect`."""
    made = Consumer("kit", topics=["t"], retry=_TWICE)
    failed: Counter[Any] = Counter()

    def act(event: Any, session: Session) -> None:
        values = {"type": event.type, "key": event.key, "version": event.version, "id": str(event.id)}
        session.execute(sa.text("INSERT INTO effect VALUES (:type, :key, :version, :id)"), values)
        record(session, Event(topic="recorded", type=event.type, key=event.key, payload=str(event.id)))
        failed[event.id] += 1
        if event.payload == "reject":
            raise Reject("never")
        if event.payload == "bad" or (event.payload == "flaky" and failed[event.id] == 1):
            raise ValueError(event.payload)

    made.on("any")(act)
    made.on("impatient", retry=_ONCE)(act)
    made.on("latest", order=Order.LATEST)(act)
    made.on("next", order=Order.NEXT)(act)
    made.ignore("ignored")

    @made.on_batch("set")
    def act_all(events: Any, session: Session) -> None:
        for event in events:
            act(event, session)

    @made.on_batch("newest", order=Order.LATEST)
    def act_newest(events: Any, session: Session) -> None:
        assert len({event.key for event in events}) == len(events)
        act_all(events, session)

    @made.on("misuse")
    def misuse(event: Any, session: Session) -> None:
        session.rollback()

    return made


def event(type: str, payload: Any = None, key: str | None = "k", version: int | None = None) -> Event:
    return Event(topic="t", type=type, payload=payload, key=key, version=version)


@dataclass
class Ended:
    """What there is to compare."""

    effects: list[tuple[Any, ...]]
    recorded: list[Any]
    ledger: dict[str, str]
    dead: Counter[str]
    waiting: Counter[str]
    versions: dict[tuple[str, str], int]


TABLE = "CREATE TABLE effect (type text, key text, version bigint, id text)"
EFFECTS = "SELECT type, key, version, id FROM effect ORDER BY id"


def rehearsed(parts: list[list[Event]]) -> Ended:
    engine = sa.create_engine("sqlite://")
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)
    rehearsal = Rehearsal(consumer(), lambda: Session(engine))
    results = [rehearsal.deliver(*some, times=1, shuffled=False, strict=False) for some in parts]
    with engine.connect() as connection:
        effects = [tuple(row) for row in connection.exec_driver_sql(EFFECTS)]
    engine.dispose()
    ledger = rehearsal._ledger
    return Ended(
        effects,
        sorted(event.payload for result in results for event in result.recorded),
        {str(event_id): outcome for event_id, outcome in ledger.outcomes.items()},
        Counter(letter.reason for result in results for letter in result.dead),
        Counter(wait.reason for wait in results[-1].waiting),
        {(entity.type, entity.key): version for entity, version in ledger.versions.items()},
    )


def performed(parts: list[list[Event]], database_url: str, redis_url: str, prefix: str) -> Ended:
    where: dict[str, Any] = {"database_url": database_url, "redis_url": redis_url, "key_prefix": prefix}
    relay, worker = Relay(RelaySettings(**where)), Worker(consumer(), ConsumerSettings(**where, block_seconds=0.01))
    with psycopg.connect(database_url, autocommit=True) as connection:

        def done() -> bool:
            read = worker.run_once()
            left = "SELECT FROM message_failures WHERE reason = 'failed' OR next_attempt_at <= clock_timestamp()"
            return not read and connection.execute(left).fetchone() is None

        connection.execute(TABLE)
        for some in parts:
            with connection.transaction():
                for each in some:
                    record(connection, each)
            relay.run_once()
            eventually(done)
        relay.close()
        worker.close()
        rows = connection.execute("SELECT data FROM outbox WHERE topic = 'recorded'")
        return Ended(
            connection.execute(EFFECTS).fetchall(),
            sorted(bytes(data).decode().strip('"') for (data,) in rows),
            dict(connection.execute("SELECT event_id::text, outcome FROM processed_messages").fetchall()),
            Counter(reason for (reason,) in connection.execute("SELECT reason FROM dead_letters")),
            Counter(reason for (reason,) in connection.execute("SELECT reason FROM message_failures")),
            {
                (type, key): version
                for type, key, version in connection.execute("SELECT type, key, version FROM entity_versions")
                if version is not None
            },
        )


def scenario(name: str) -> list[Event]:
    if name == "deltas":
        one, bad = event("any"), event("any", "bad")
        return [one, one, bad, event("any", "flaky"), event("any", "reject"), event("impatient", "flaky"), bad, one]
    if name == "states":
        events = [event("latest", payload, version=version) for version, payload in
                  ((3, None), (1, None), (4, "flaky"), (5, "bad"), (4, None), (6, None))]  # fmt: skip
        return [*events, events[0], event("latest"), event("latest", key=None, version=1)]
    if name == "flaky states":
        return [event("latest", "flaky", version=1), event("latest", "flaky", version=2), event("latest", version=0)]
    if name == "sequences":
        versions = [event("next", version=version) for version in (2, 1, 4, 3, 6)]
        return [*versions, event("next", "flaky", "l", 1), event("next", key="l", version=2), event("next", version=0)]
    if name == "a broken sequence":
        return [event("next", version=1), event("next", "bad", version=2), event("next", version=3)]
    if name == "sets":
        sets = [event("set", payload) for payload in (None, "bad", None, "flaky", "reject", None)]
        newest = [event("newest", payload, version=version) for payload, version in ((None, 2), ("bad", 4), (None, 3))]
        return [*sets, sets[0], *newest, event("newest", key="l", version=1)]
    if name == "others":
        return [event("ignored"), event("nobody's"), event("misuse"), event("any"), event("nobody's", key=None)]
    dice = random.Random(name)
    made: list[Event] = []
    while len(made) < 16:  # one read's, so that both sides have the same batch
        type = dice.choice(["any", "impatient", "latest", "next", "set", "newest", "ignored", "nobody's", "misuse"])
        payload = dice.choice([None, None, None, "flaky", "bad", "reject"])
        if made and dice.random() < 0.2:
            made.append(dice.choice(made))
        else:
            made.append(event(type, payload, dice.choice("kl"), dice.randint(1, 4)))
    return made


@pytest.mark.parametrize(
    "name",
    [
        "deltas", "states", "flaky states", "sequences", "a broken sequence", "sets", "others", "random 1",
        *(pytest.param(f"random {n}", marks=pytest.mark.long) for n in range(2, 12)),
    ],
)  # fmt: skip
def test_kit_and_worker_come_to_the_same(name: str, database_url: str, redis_url: str, prefix: str) -> None:
    events = scenario(name)
    assert len(events) <= 16
    parts = [events, [*events[:3], event("any"), *events[-3:]]]  # some of it comes again
    assert rehearsed(parts) == performed(parts, database_url, redis_url, prefix)


def test_a_rehearsal_on_postgresql_has_its_effects_there(database_url: str) -> None:
    made = Consumer("kit", topics=["t"], retry=_TWICE)

    @made.on("raw", raw=True)
    def act_raw(event: Any, connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO effect (type, id) VALUES ('raw', %s)", (str(event.id),))
        if event.payload == "bad":
            connection.execute("SELECT 1 / 0")

    @made.on("any")
    def act(event: Any, session: Session) -> None:
        session.execute(sa.text("INSERT INTO effect (type, id) VALUES ('any', :id)"), {"id": str(event.id)})
        record(session, Event(topic="recorded", type="any", payload=1))
        if event.payload == "bad":
            session.execute(sa.text("SELECT 1 / 0"))

    engine = sa.create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.exec_driver_sql(TABLE)
    events = [event("raw"), event("any"), event("raw", "bad"), event("any", "bad"), event("raw"), event("any")]
    result = Rehearsal(made, lambda: Session(engine)).deliver(*events, strict=False)

    assert result.outcomes == {"applied": 4, "dead": 2}
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT type, count(*) FROM effect GROUP BY type ORDER BY type")
        assert [tuple(row) for row in rows] == [("any", 2), ("raw", 2)]
        recorded = connection.exec_driver_sql("SELECT count(*) FROM outbox").scalar_one()
        assert recorded == len(result.recorded) == 2
        assert connection.exec_driver_sql("SELECT count(*) FROM processed_messages").scalar_one() == 0
    engine.dispose()
