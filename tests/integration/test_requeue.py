"""From a handler that fails to a dead letter and back, with a relay, streams and a consumer that are real."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from consumer import Consumer, Envelope, Order, Retry
from consumer.cli import app
from consumer.dead_letters import choose, discard, requeue
from consumer.ledger import Operations, Selection
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from tests.faults.chaos import ROOT, TABLES, TOPIC, Bench, drain
from tests.integration.test_values import process_time_zone as process_time_zone
from tests.waiting import eventually

NAME = "shop"


class Shop(Bench):
    """A consumer whose handler fails until it is mended, and an operator."""

    broken = True

    def __init__(self, database_url: str, redis_url: str, prefix: str) -> None:
        super().__init__(database_url, redis_url, prefix)
        self.db.execute(TABLES)
        self.seen: list[Envelope] = []

    def handle(self, event: Envelope, session: Session) -> None:
        self.seen.append(event)
        values = {"id": event.id, "key": event.key, "version": event.version}
        session.execute(text("INSERT INTO public.effects VALUES (:id, :key, :version)"), values)
        if self.broken:
            raise ValueError("the handler is broken")

    def consumer(self, *types: str, order: Order = Order.ANY) -> Consumer:
        made = Consumer(NAME, topics=[TOPIC], retry=Retry(2, 0.01, 0.01))
        for kind in types or ("credited",):
            made.on(kind, order=order)(self.handle)
        return made

    def work(self, until: Callable[[], object], consumer: Consumer | None = None, **options: Any) -> None:
        """Publish, and let a process of the consumer run until then."""
        drain(self.relay())
        given: dict[str, Any] = {
            "database_url": self.database_url,
            "redis_url": self.redis_url,
            "key_prefix": self.prefix,
        }
        worker = Worker(consumer or self.consumer(), ConsumerSettings(**given, **({"block_seconds": 0.02} | options)))

        def done() -> object:
            worker.run_once()
            return until()

        try:
            eventually(done)
        finally:
            worker.close()

    def waiting(self) -> int:
        return int(self.one("SELECT count(*) FROM public.message_failures"))

    def over(self) -> bool:
        """Whether nothing waits any more, and nothing is pending."""
        return not self.waiting() and not self.redis.xpending(self.key(), NAME)["pending"]

    def died(self, number: int = 1) -> Callable[[], bool]:
        return lambda: self.dead() == number and self.over()

    def done(self, number: int) -> Callable[[], bool]:
        return lambda: self.effects().total() == number and self.over()

    def dead_command(self, what: str, *arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["dead", what, NAME, *arguments], env={"DATABASE_URL": self.database_url})
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    def requeue(self, *arguments: str) -> int:
        return int(json.loads(self.dead_command("requeue", *arguments, "--yes", "--json"))["requeued"])

    def letters(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.dead_command("list", "--json"))
        return found


@pytest.fixture
def shop(database_url: str, redis_url: str, prefix: str) -> Iterator[Shop]:
    with Shop(database_url, redis_url, prefix) as made:
        yield made


@pytest.fixture
def resp3(database_url: str, redis_url: str, prefix: str) -> Iterator[Shop]:
    with Shop(database_url, f"{redis_url}?protocol=3", prefix) as made:
        yield made


@pytest.mark.parametrize("which", ["shop", "resp3"])
def test_o_65_o_70_requeued_events_get_all_attempts_and_take_effect_once(
    which: str, request: pytest.FixtureRequest
) -> None:
    shop: Shop = request.getfixturevalue(which)
    ids = shop.write(3)
    shop.work(shop.died(3))
    before = {letter["event_id"]: letter for letter in shop.letters()}
    assert {letter["event_id"]: (letter["reason"], letter["attempts"]) for letter in before.values()} == dict.fromkeys(
        ids, ("attempts", 2)
    )
    assert [str(event.id) for event in shop.seen].count(ids[0]) == 2
    shop.seen.clear()
    assert shop.requeue("--id", ids[0]) == 1, "still broken"
    shop.work(shop.died(3))
    assert [str(event.id) for event in shop.seen] == [ids[0]] * 2, "all attempts again"
    again = {letter["event_id"]: letter for letter in shop.letters()}
    assert again.keys() == before.keys()
    for name, kept in {"first_failed_at": True, "attempts": True, "number": False, "last_failed_at": False}.items():
        assert (again[ids[0]][name] == before[ids[0]][name]) is kept, name
    assert shop.effects().total() == 0
    shop.broken = False
    assert shop.requeue("--id", ids[1]) == 1
    assert shop.requeue("--all") == 2
    assert shop.requeue("--all") == 0
    shop.work(shop.done(3))
    assert shop.requeue("--all") == 0
    assert (shop.effects(), shop.dead()) == (dict.fromkeys(ids, 1), 0)
    shop.redis.delete(shop.key(), f"{shop.key()}:relay")  # all comes again
    shop.write(1)
    shop.work(shop.done(4))
    assert max(shop.effects().values()) == 1


@dataclass
class Exact:
    amount: int


@dataclass
class Mended:
    amount: int | Decimal


def test_a_payload_of_another_type_is_applied_after_the_type_was_mended(shop: Shop) -> None:
    """The letter is decoded anew, by the annotation of whoever runs it."""
    shop.broken = False

    def deployed(wanted: type) -> Consumer:
        def handler(event: Any, session: Session) -> None:
            shop.handle(event, session)

        handler.__annotations__["event"] = Envelope[wanted]  # type: ignore[valid-type]
        made = Consumer(NAME, topics=[TOPIC])
        made.on("credited")(handler)
        return made

    (fits,) = shop.write(1, payload={"amount": 5})
    (other,) = shop.write(1, payload={"amount": "0.30"})
    shop.work(lambda: shop.dead() == 1 and shop.done(1)(), deployed(Exact))
    assert shop.requeue("--reason", "payload") == 1, "not mended yet"
    shop.work(lambda: shop.dead() == 1 and shop.over(), deployed(Exact))
    (letter,) = shop.letters()
    assert (letter["event_id"], letter["reason"]) == (other, "payload")
    assert letter["error"].startswith("payload.amount: ")
    assert "0.30" not in letter["error"]
    assert shop.requeue("--reason", "payload") == 1
    shop.work(shop.done(2), deployed(Mended))
    assert [(str(event.id), event.payload) for event in shop.seen] == [
        (fits, Exact(5)), (other, Mended(Decimal("0.30"))),
    ]  # fmt: skip
    assert shop.dead() == 0


def test_o_34_what_an_old_version_had_no_handler_for_is_requeued_for_the_new_one(shop: Shop) -> None:
    shop.broken = False
    first, new, last = shop.write(1) + shop.write(1, type="refunded") + shop.write(1)
    shop.work(lambda: shop.effects().total() == 2 and shop.dead() == 1, no_handler_seconds=0.3)
    (letter,) = shop.letters()
    assert (letter["event_id"], letter["reason"], letter["type"]) == (new, "no_handler", "refunded")
    assert shop.one("SELECT created_at - first_failed_at >= interval '0.3 s' FROM public.dead_letters")
    assert shop.requeue("--reason", "no_handler") == 1
    shop.work(shop.done(3), shop.consumer("credited", "refunded"))
    assert (shop.effects(), shop.dead()) == (dict.fromkeys([first, new, last], 1), 0)


@pytest.mark.parametrize("time_zone", ["Asia/Kolkata", "America/New_York"])
def test_o_66_o_68_o_69_o_71_o_72_bytes_are_the_same_at_each_stage(
    shop: Shop, time_zone: str, process_time_zone: str
) -> None:
    """In the stream, waiting, dead, exported, waiting again, and at the handler that takes them; in whatever time zone."""
    shop.db.execute(f"ALTER DATABASE \"{shop.db.info.dbname}\" SET timezone = '{time_zone}'")  # type: ignore[arg-type]
    assert shop.connect().execute("SHOW timezone").fetchone() == (time_zone,)
    payloads: list[Any] = [
        {"t": "a\x00b"}, "😀 שלום e\u0301 𠜎 \u2028", [9007199254740993, 9223372036854775807, -1, 2**80],
        [Decimal("1234567890.123456789"), Decimal("1E+3"), Decimal("0.10")], None, {}, [], "", 0, False,
    ]  # fmt: skip
    ids = [shop.write(1, payload=payload, key="ключ 😀")[0] for payload in payloads]
    raw: list[tuple[str, bytes]] = [
        ("application/json", b'{"n": 0.1234567890123456789, "m":1.10 }'),
        ("application/octet-stream", b"\xff\xfe\x00\x80"),
        ("application/octet-stream", b""),
    ]
    ids += [shop.write(1, payload=data, content_type=kind)[0] for kind, data in raw]
    instant = datetime(2026, 7, 1, 12, 0, 0, 1, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    ids += shop.write(1, payload={"at": instant}, time=instant)
    wanted = {
        str(event_id): hashlib.sha256(data).hexdigest()
        for event_id, data in shop.db.execute("SELECT event_id, data FROM public.outbox")
    }
    assert wanted.keys() == set(ids)
    assert wanted[ids[-2]] == hashlib.sha256(b"").hexdigest()
    drain(shop.relay())
    stream = {fields[b"id"].decode(): fields[b"data"] for _, fields in shop.redis.xrange(shop.key())}
    assert {event_id: hashlib.sha256(data).hexdigest() for event_id, data in stream.items()} == wanted

    def stored(table: str) -> dict[str, str]:
        query = "SELECT event_id::text, fields FROM public.dead_letters"
        if table == "message_failures":
            query = "SELECT event_id::text, fields FROM public.message_failures"
        return {
            event_id: hashlib.sha256(dict(zip(parts[::2], parts[1::2], strict=True))[b"data"]).hexdigest()
            for event_id, parts in shop.db.execute(query)  # type: ignore[arg-type]
        }

    slow = Consumer(NAME, topics=[TOPIC], retry=Retry(2, 3600, 3600))
    slow.on("credited")(shop.handle)
    shop.work(lambda: shop.waiting() == len(ids), slow)
    assert stored("message_failures") == wanted
    shop.db.execute("UPDATE public.message_failures SET next_attempt_at = now()")
    shop.work(shop.died(len(ids)))
    assert stored("dead_letters") == wanted
    exported = {}
    for line in shop.dead_command("export").splitlines():
        letter = json.loads(line)
        (data,) = (base64.b64decode(field["base64"]) for field in letter["fields"] if field["name"] == "data")
        exported[letter["event_id"]] = hashlib.sha256(data).hexdigest()
    assert exported == wanted
    shop.broken, shop.seen = False, []
    assert shop.requeue("--all") == len(ids)
    assert stored("message_failures") == wanted
    shop.work(shop.done(len(ids)))
    assert {str(event.id): hashlib.sha256(event.data).hexdigest() for event in shop.seen} == wanted
    found = {str(event.id): event for event in shop.seen}
    texts = [format(number) for number in (Decimal("1234567890.123456789"), Decimal("1E+3"), Decimal("0.10"))]
    assert [found[event_id].payload for event_id in ids[:10]] == [*payloads[:3], texts, *payloads[4:]]
    last = found[ids[-1]]
    assert last.time == instant == datetime.fromisoformat(last.payload["at"])
    assert {found[event_id].key for event_id in ids[:10]} == {"ключ 😀"}


def test_o_66_o_67_what_strangers_wrote_stays_as_it_is_at_each_stage(shop: Shop) -> None:
    """What no JSON or PostgreSQL holds is no event, also when it is requeued; the rest waits, dies and is applied, byte for byte."""
    bad = [b"NaN", b'{"a": [Infinity]}', b"-1e400", b"\xff\xfe", b""]
    good = [
        b'{"t": "\\ud800"}',
        b'{"t": "a\\u0000b"}',
        b'{"\\u0000k": 1}',
        '"\u2028 שלום 😀"'.encode(),
        b' {"a":1 ,"a":2} ',
    ]
    shop.write(1)
    drain(shop.relay())
    for data in [*bad, *good]:
        shop.redis.xadd(shop.key(), {"id": str(uuid.uuid4()), "type": "credited", "subject": "k", "data": data})
    shop.redis.xadd(shop.key(), {"id": str(uuid.uuid4()), "type": "credited", "subject": "k\x00", "data": b"1"})
    handle = shop.handle

    def fails(event: Envelope, session: Session) -> None:
        try:
            handle(event, session)
        except ValueError:
            raise ValueError(f"\x00 \ud800 {event.payload!r}") from None

    shop.handle = fails  # type: ignore[method-assign]

    def stored() -> Counter[bytes]:
        rows = [fields for (fields,) in shop.db.execute("SELECT fields FROM public.dead_letters")]
        return Counter(dict(zip(parts[::2], parts[1::2], strict=True))[b"data"] for parts in rows)

    all_of_them = Counter([*bad, *good, b"1", shop.event().data])
    for _ in range(2):
        shop.work(shop.died(12))
        assert Counter(letter["reason"] for letter in shop.letters()) == {"undecodable": 6, "attempts": 6}
        assert stored() == all_of_them
        assert shop.requeue("--all") == 12
    shop.broken, shop.seen = False, []
    shop.work(lambda: shop.died(6)() and shop.done(6)())
    assert Counter(event.data for event in shop.seen) == Counter([*good, shop.event().data])
    assert stored() == Counter([*bad, b"1"])
    assert set(shop.effects().values()) == {1}


class _Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_o_93_a_pickle_is_looked_at_and_requeued_and_never_loaded(shop: Shop, tmp_path: Path) -> None:
    marker = tmp_path / "loaded"
    trap = pickle.dumps(_Trap(marker))
    shop.write(1)
    drain(shop.relay())
    shop.broken = False
    shop.redis.xadd(shop.key(), {b"payload": trap, trap: b"1"})
    shop.redis.xadd(shop.key(), {b"data": trap, b"id": b"x"})
    shop.work(lambda: shop.dead() == 2 and shop.effects().total() == 1)
    numbers = [str(letter["number"]) for letter in shop.letters()]
    for arguments in (
        ("list",),
        ("show", *numbers, "--payload"),
        ("show", *numbers, "--payload", "--json"),
        ("export",),
    ):
        assert shop.dead_command(*arguments)
    assert shop.requeue("--reason", "undecodable") == 2
    shop.work(shop.died(2))
    assert [(letter["reason"], letter["event_id"]) for letter in shop.letters()] == [("undecodable", None)] * 2
    assert not marker.exists()
    pickle.loads(trap)  # noqa: S301 - the trap is set
    assert marker.exists()


def test_what_could_not_be_read_is_applied_by_a_version_that_can(shop: Shop) -> None:
    shop.broken = False
    shop.write(1)
    drain(shop.relay())
    ((_, fields),) = shop.redis.xrange(shop.key())
    fields[b"id"] = str(shop.event().id).encode()
    shop.redis.xadd(shop.key(), fields | {b"version": b"one"})
    shop.work(lambda: shop.dead() == 1 and shop.effects().total() == 1)
    good = [part for pair in (fields | {b"version": b"2"}).items() for part in pair]
    shop.db.execute("UPDATE public.dead_letters SET fields = %s", (good,))  # as if we could read it now
    assert shop.requeue("--all") == 1
    shop.work(shop.done(2))
    assert shop.effects()[fields[b"id"].decode()] == 1


def test_past_the_gap_that_a_discarded_version_leaves(shop: Shop) -> None:
    """The second of four fails for good; the later ones wait, are put aside, and go on without it."""
    ids = [shop.write(1, version=version)[0] for version in (1, 2, 3, 4)]
    strict = self_mending(shop, ids[1])
    shop.work(lambda: shop.dead() == 1 and shop.waiting() == 2, strict)
    (second,) = shop.letters()
    result = CliRunner().invoke(
        app, ["dead", "discard", NAME, "--id", str(second["number"]), "--yes"], env={"DATABASE_URL": shop.database_url}
    )
    assert "2 later events of their keys wait for them" in result.stderr
    shop.db.execute("UPDATE public.message_failures SET give_up_at = now(), next_attempt_at = now()")
    shop.work(shop.died(2), strict)
    assert {letter["reason"] for letter in shop.letters()} == {"gap"}
    assert shop.requeue("--all") == 2, "it is still there"
    shop.work(
        lambda: (
            shop.waiting() == 2 and not shop.one("SELECT count(*) FROM public.message_failures WHERE reason <> 'gap'")
        ),
        strict,
    )
    shop.db.execute("UPDATE public.message_failures SET give_up_at = now(), next_attempt_at = now()")
    shop.work(shop.died(2), strict)
    assert shop.requeue("--reason", "gap", "--past-gap") == 2
    shop.work(shop.done(3), strict)
    applied = [row[0] for row in shop.db.execute("SELECT version FROM public.effects")]
    assert applied == [1, 3, 4]


def self_mending(shop: Shop, broken: str) -> Consumer:
    """A consumer with Order.NEXT whose handler fails with one event only."""
    made = Consumer(NAME, topics=[TOPIC], retry=Retry(2, 0.01, 0.01))

    @made.on("credited", order=Order.NEXT)
    def handle(event: Envelope, session: Session) -> None:
        shop.broken = str(event.id) == broken
        shop.handle(event, session)

    return made


@pytest.mark.long
def test_processes_and_operators_at_once_apply_each_event_once_or_have_thrown_it_away(shop: Shop) -> None:
    """Two processes whose handler fails a few times, with some events always, two people who requeue, one who throws those away."""
    tries = Counter[str]()

    def moody(event: Envelope, session: Session) -> None:
        session.execute(text("INSERT INTO public.effects VALUES (:id, NULL, NULL)"), {"id": event.id})
        tries[str(event.id)] += 1
        if tries[str(event.id)] < 3 + event.id.int % 3 or str(event.id) in hopeless:
            raise ValueError("not yet")

    flaky = Consumer(NAME, topics=[TOPIC], retry=Retry(2, 0.01, 0.01))
    flaky.on("credited")(moody)
    ids, thrown, over, failures = shop.write(120), set[str](), threading.Event(), list[BaseException]()
    hopeless = set(ids[:10])
    drain(shop.relay())
    given: dict[str, Any] = {"database_url": shop.database_url, "redis_url": shop.redis_url, "key_prefix": shop.prefix}

    def beside(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                while not over.wait(0.01):
                    work()
            except BaseException as error:
                failures.append(error)
                over.set()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    workers = [Worker(flaky, ConsumerSettings(**given, block_seconds=0.02, batch_size=20)) for _ in range(2)]
    operations = Operations(NAME)
    connections = [shop.connect(autocommit=True) for _ in range(3)]

    def again(connection: psycopg.Connection[Any]) -> None:
        for _ in requeue(connection, operations, choose(connection, operations, Selection())):
            pass

    def throw_away() -> None:
        for event_id in hopeless - thrown:
            chosen = choose(connections[2], operations, Selection(events=(uuid.UUID(event_id),)))
            if sum(progress.done for progress in discard(connections[2], operations, chosen)):
                thrown.add(event_id)

    threads = [
        *(beside(worker.run_once) for worker in workers), *(beside(partial(again, c)) for c in connections[:2]),
        beside(throw_away),
    ]  # fmt: skip
    try:
        eventually(lambda: over.is_set() or shop.effects().total() + len(thrown) >= len(ids), 90)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
        for worker in workers:
            worker.close()
    assert failures == []
    assert shop.effects() == dict.fromkeys(set(ids) - thrown, 1)
    assert (thrown, shop.dead(), shop.waiting()) == (hopeless, 0, 0)
    outcomes = shop.db.execute("SELECT outcome, count(*) FROM public.processed_messages GROUP BY outcome").fetchall()
    assert dict(outcomes) == {"applied": 110, "dead": 10}


def test_what_is_thrown_away_to_be_forgotten_is_applied_when_it_comes_again(shop: Shop) -> None:
    ids = shop.write(2)
    shop.work(shop.died(2))
    numbers = {letter["event_id"]: str(letter["number"]) for letter in shop.letters()}
    shop.broken = False
    shop.dead_command("discard", "--id", numbers[ids[0]], "--yes")
    shop.dead_command("discard", "--id", numbers[ids[1]], "--forget", "--yes")
    command = [sys.executable, "-m", "outbox", "replay", "--group", NAME, "--yes"]
    environment = {"DATABASE_URL": shop.database_url, "REDIS_URL": shop.redis_url, "OUTBOX_KEY_PREFIX": shop.prefix}
    subprocess.run(command, env=os.environ | environment, cwd=ROOT, check=True, capture_output=True, timeout=60)
    shop.write(1)
    shop.work(shop.done(2))
    assert shop.effects()[ids[1]] == 1
    assert shop.effects()[ids[0]] == 0


def test_the_rights_that_the_page_names_are_enough(shop: Shop) -> None:
    page = (ROOT / "docs/operations/dead-letters.md").read_text().partition("## Rights")[2]
    role, info = f"r{shop.prefix[:-1]}", shop.db.info
    url = f"postgresql://{role}@{info.host}:{info.port}/{info.dbname}"
    shop.db.execute(f"CREATE ROLE {role} LOGIN")

    def grant(row: str) -> None:
        (rights,) = (line for line in page.splitlines() if line.startswith(f"| {row} |"))
        for names, tables in GRANTS[row].items():
            for table in tables:
                assert f"`{table}`" in rights
                assert all(name in rights for name in names.split(", "))
                shop.db.execute(f"GRANT {names} ON public.{table} TO {role}")  # type: ignore[arg-type]

    def run(*arguments: str) -> int:
        return CliRunner().invoke(app, arguments, env={"DATABASE_URL": url}).exit_code

    try:
        shop.write(3)
        shop.work(shop.died(3))
        numbers = [str(letter["number"]) for letter in shop.letters()]
        looks = [
            ("dead", "list", NAME),
            ("dead", "show", NAME, numbers[0]),
            ("waiting", NAME),
            ("status", NAME),
            ("dead", "export", NAME),
        ]
        assert {run(*arguments) for arguments in looks} == {1}
        grant("looking")
        assert {run(*arguments) for arguments in looks} == {0}
        assert run("dead", "discard", NAME, "--id", numbers[0], "--yes") == 1
        grant("discard")
        assert run("dead", "discard", NAME, "--id", numbers[0], "--yes") == 0
        assert run("dead", "discard", NAME, "--id", numbers[1], "--forget", "--yes") == 0
        assert run("dead", "requeue", NAME, "--all", "--yes") == 1
        grant("requeue")
        assert run("dead", "requeue", NAME, "--all", "--yes") == 0
        assert shop.waiting() == 1
    finally:
        shop.db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


GRANTS = {
    "looking": {"SELECT": ["dead_letters", "message_failures", "consumer_retention", "consumer_schema_version"]},
    "discard": {"UPDATE, DELETE": ["dead_letters"], "SELECT, UPDATE, DELETE": ["processed_messages"]},
    "requeue": {
        "UPDATE, DELETE": ["dead_letters"], "INSERT": ["message_failures"], "SELECT, INSERT, UPDATE": ["processed_messages"],
    },
}  # fmt: skip


def test_o_95_no_password_is_said_by_the_commands() -> None:
    address = "postgresql+psycopg://somebody:S3cr3t%21%2540@127.0.0.1:1/db"
    environment = os.environ | {"DATABASE_URL": address}
    command = [sys.executable, "-m", "consumer", "dead", "requeue", NAME, "--all"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert "S3cr3t" not in done.stderr
