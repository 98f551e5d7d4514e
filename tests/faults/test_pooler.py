"""Everything through PgBouncer: what is tied to a session of PostgreSQL would break here.

The pool has fewer sessions than there are clients, so that each statement outside of a transaction may meet another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope
from consumer import doctor as consumer_doctor
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import doctor as outbox_doctor
from outbox import operations, record
from outbox import schema as schemas
from outbox.errors import SettingsError
from tests.faults.bouncer import Bouncer
from tests.faults.chaos import ROOT, TOPIC, Bench, ledger, version_order
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

pytestmark = pytest.mark.long

CONSUMER = ("consumer", "run", "tests.faults.chaos:ledger")
QUICK = {
    "CONSUMER_CLAIM_SECONDS": "1", "CONSUMER_CHECK_SECONDS": "0.2", "CONSUMER_BLOCK_SECONDS": "0.2",
    "CONSUMER_BACKOFF_MAX_SECONDS": "0.2",
}  # fmt: skip
ABORTED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE '%%(aborted)'"


@pytest.fixture
def bouncer(own_bouncer: Callable[..., Bouncer], postgres_url: str) -> Bouncer:
    """In transaction mode, with three sessions for a database."""
    return own_bouncer(postgres_url)


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str, bouncer: Bouncer) -> Iterator[Bench]:
    """All of ours goes through the pooler; `db` does not."""
    with Bench(database_url, redis_url, prefix) as made:
        made.make_tables()
        made.database_url = bouncer.through(database_url)
        yield made


def consumer_settings(bench: Bench, **options: Any) -> ConsumerSettings:
    return ConsumerSettings(
        database_url=bench.database_url,
        redis_url=bench.redis_url,
        key_prefix=bench.prefix,
        block_seconds=0.05,
        **options,
    )


class Writers:
    """Threads that write versions of a few keys through the pooler, whatever becomes of their connections.

    `committed` is what they know to be committed; more may be, where the answer to a COMMIT was lost.
    """

    def __init__(self, bench: Bench, threads: int) -> None:
        self.committed: list[str] = []
        self.errors: Counter[str] = Counter()
        self._bench, self._enough = bench, threading.Event()
        bench.db.execute("CREATE TABLE public.entities (key text PRIMARY KEY, version bigint NOT NULL)")
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._enough.is_set():
            try:
                with psycopg.connect(self._bench.database_url, prepare_threshold=None) as connection:
                    while not self._enough.is_set():
                        self._one(connection, f"k{number % 2}")
            except psycopg.OperationalError as error:
                self.errors[type(error).__name__] += 1

    def _one(self, connection: psycopg.Connection[Any], key: str) -> None:
        row = connection.execute(
            "INSERT INTO public.entities VALUES (%s, 1) "
            "ON CONFLICT (key) DO UPDATE SET version = entities.version + 1 RETURNING version",
            (key,),
        ).fetchone()
        assert row is not None
        kind = ("credited", "limited")[row[0] % 2]
        event = self._bench.event(key=key, type=kind, version=row[0])
        record(connection, event)
        connection.commit()
        self.committed.append(str(event.id))


@pytest.mark.parametrize("kills", [0, 6])
def test_o_77_every_event_is_applied_once(bench: Bench, bouncer: Bouncer, tmp_path: Path, kills: int) -> None:
    """Three writers, two relays and two consumers share three sessions, and PgBouncer is killed -9 among them."""
    log = tmp_path / "log"
    processes = [bench.start(log=log, OUTBOX_BATCH_ROWS="50") for _ in range(2)]
    processes += [bench.start(*CONSUMER, log=log, **QUICK) for _ in range(2)]
    eventually(lambda: len(bouncer.show("CLIENTS")) > 4, 30)
    writers = Writers(bench, 3)
    try:
        for _ in range(kills):
            seen = len(writers.committed)
            eventually(lambda seen=seen: len(writers.committed) > seen + 20, 20)  # type: ignore[misc]  # bound now
            bouncer.kill()
            bouncer.start()
        eventually(lambda: len(writers.committed) > 500, 30)
        sessions = bench.one(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert kills or sessions <= 3
    finally:
        writers.stop()
    recorded = bench.outbox()
    assert set(writers.committed) <= set(recorded)
    credited = {row[0] for row in bench.db.execute("SELECT event_id::text FROM public.outbox WHERE type = 'credited'")}
    eventually(lambda: bench.effects().keys() == credited, 30, f"{len(credited)} effects")
    eventually(lambda: bench.redis.xpending(bench.key(), ledger.name)["pending"] == 0, 20)
    assert bench.effects() == Counter(dict.fromkeys(credited, 1))
    newest = "SELECT key, max(version) FROM public.outbox WHERE type = 'limited' GROUP BY key ORDER BY key"
    assert bench.db.execute("SELECT key, version FROM public.limits ORDER BY key").fetchall() == (
        bench.db.execute(newest).fetchall()
    )
    versions = version_order(bench.entries())
    assert all(found == sorted(found) for found in versions.values())
    assert sum(map(len, versions.values())) == len(recorded)
    assert [process.poll() for process in processes] == [None] * 4
    assert bench.one(ABORTED) == 0
    assert bench.dead() == 0
    said = log.read_text()
    assert "prepared statement" not in said
    assert ("waits" in said) == bool(kills)
    assert bool(writers.errors) == bool(kills)


def test_prepared_statements_of_clients_meet_each_other(bouncer: Bouncer, database_url: str) -> None:
    """Why ours are never prepared: psycopg's own default, through this very pooler."""
    url = bouncer.through(database_url)
    with (
        psycopg.connect(url, autocommit=True, prepare_threshold=0) as one,
        psycopg.connect(url, autocommit=True, prepare_threshold=0) as other,
    ):
        assert one.execute("SELECT 'mine'").fetchone() == ("mine",)
        with pytest.raises(psycopg.errors.DuplicatePreparedStatement):
            other.execute("SELECT 'yours'")


def test_o_77_a_consumer_whose_prepared_statements_would_be_mixed_up_does_not_start(
    bench: Bench, bouncer: Bouncer, own_bouncer: Callable[..., Bouncer], database_url: str
) -> None:
    def level(**options: Any) -> str:
        findings = consumer_doctor.examine(ledger, consumer_settings(bench, **options))
        return next(found.level for found in findings if found.code == "prepared-statements")

    assert (level(), level(prepare_threshold=5)) == ("ok", "error")
    with pytest.raises(SettingsError, match="CONSUMER_PREPARE_THRESHOLD.*mixes up prepared statements"):
        Worker(ledger, consumer_settings(bench, prepare_threshold=5)).run_once()
    yours = create_engine(bench.database_url.replace("postgresql://", "postgresql+psycopg://"))
    with pytest.raises(SettingsError, match="an engine of yours"):
        Worker(ledger, consumer_settings(bench), engine=yours).run_once()
    yours.dispose()
    with closing(Worker(ledger, consumer_settings(bench))) as worker:
        for _ in range(20):
            worker.run_once()
    assert bench.one("SELECT count(*) FROM pg_prepared_statements") == 0
    with psycopg.connect(bench.database_url) as connection:  # what was tried is gone
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    bench.database_url = database_url
    assert level(prepare_threshold=5) == "ok", "not through a pooler"
    if bouncer.version >= (1, 21):
        bench.database_url = own_bouncer(database_url, prepared=100).through(database_url)
        assert level(prepare_threshold=5) == "ok"
        with closing(Worker(ledger, consumer_settings(bench, prepare_threshold=0))) as worker:
            worker.run_once()


# --- LISTEN --------------------------------------------------------------------------------------------------------------


def published(bench: Bench, seconds: float) -> None:
    """A new event is in the stream within so many seconds."""
    (event_id,) = bench.write()
    eventually(lambda: bench.ids()[-1:] == [event_id], seconds, "published")


def test_o_78_an_idle_relay_notices_events_without_listening(bench: Bench, bouncer: Bouncer, tmp_path: Path) -> None:
    """Settings are the defaults. Other clients use up the sessions meanwhile, so that a LISTEN would be somebody else's."""
    bench.start(log=tmp_path / "log")
    published(bench, 20)
    for _ in range(5):
        time.sleep(0.3)  # idle: its polls are at their longest
        published(bench, 2)
    findings = outbox_doctor.examine(bench.settings())
    found = next(found for found in findings if found.code == "database-pooler")
    assert (found.level, "through a pooler in transaction mode" in found.what) == ("ok", True)
    assert operations.status(bench.settings()).relays is None, "it cannot be told"
    for _ in range(3):
        with psycopg.connect(bench.database_url) as connection:
            assert connection.execute("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)


def test_o_47_nothing_hangs_on_one_connection_of_an_idle_relay(
    database_url: str, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """Its session is ended, then its connections are cut; each time the next event is there within two seconds."""
    log = tmp_path / "log"
    with Bench(database_url, redis_url, prefix) as bench, Proxy(port_of(database_url)) as proxy:
        bench.database_url = through(proxy, database_url)
        bench.start(log=log)
        published(bench, 20)
        for number in range(1, 5):
            time.sleep(0.3)  # idle
            if number % 2:
                assert bench.one(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE application_name = 'outbox relay' AND datname = current_database()"
                )  # fmt: skip
            else:
                proxy.cut()
            published(bench, 2)
            eventually(lambda n=number: log.read_text().count("relay goes on") == n)  # type: ignore[misc]  # bound now
        assert log.read_text().count("relay waits") == 4
        assert bench.ids() == bench.outbox(), "none is missing"


def test_o_47_a_relay_whose_connection_was_forgotten_is_stood_in_for(
    database_url: str, redis_url: str, prefix: str
) -> None:
    """Half-open: it waits until TCP gives up (half a minute, and not the poll interval), the other relay does not."""
    with Bench(database_url, redis_url, prefix) as bench, Proxy(port_of(database_url)) as proxy:
        direct, bench.database_url = bench.database_url, through(proxy, database_url)
        bench.start()
        published(bench, 20)
        bench.database_url = direct
        bench.start()
        eventually(lambda: bench.relays_connected() == 2, 20)
        assert proxy.forget() >= 1  # that of the look at the start is done already
        published(bench, 2)


# --- idle in transaction ---------------------------------------------------------------------------------------------------

slow = Consumer("slow", topics=[TOPIC])


@slow.on("credited")
def credit_slowly(event: Envelope, session: Session) -> None:
    """Waits for a service of somebody else's in the transaction; the first event's one is slow, until it is mended."""
    session.execute(
        text("INSERT INTO public.effects VALUES (:id, :key, :version)"),
        {"id": event.id, "key": event.key, "version": event.version},
    )
    if event.version == 1 and not session.scalar(text("SELECT to_regclass('public.mended') IS NOT NULL")):
        time.sleep(2)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooler", "direct"])
def test_o_79_a_limit_for_idle_transactions(
    bench: Bench, database_url: str, bouncer: Bouncer, pooled: bool, tmp_path: Path
) -> None:
    """Redis answers late, and a handler waits for longer than PostgreSQL lets a transaction be idle.

    The relay has no transaction open while it waits. The event of that handler stays pending and is tried again, the others
    are applied, and nobody ends.
    """
    if not pooled:
        bench.database_url = database_url
    name = bench.one("SELECT current_database()")
    bench.db.execute(f"ALTER DATABASE \"{name}\" SET idle_in_transaction_session_timeout = '1s'")
    longest = (
        "SELECT coalesce(max(extract(epoch FROM clock_timestamp() - state_change)), 0)::float8 FROM pg_stat_activity "
        "WHERE datname = current_database() AND starts_with(state, 'idle in transaction')"
    )
    direct = bench.redis_url
    with Proxy(port_of(direct)) as proxy:
        bench.redis_url, proxy.delay_seconds = through(proxy, direct), 1.5
        relay = bench.start()
        bench.redis_url = direct
        ids, seen = bench.write(20), []
        eventually(lambda: seen.append(bench.one(longest)) or set(bench.ids()) == set(ids), 40)  # type: ignore[func-returns-value]
        assert max(seen) < 0.8
    log = tmp_path / "log"
    consumer = bench.start("consumer", "run", "tests.faults.test_pooler:slow", log=log, **QUICK)
    eventually(lambda: bench.effects().keys() == set(ids[1:]), 30)
    eventually(lambda: log.read_text().count("handler failed") >= 2, 20)
    assert bench.effects() == Counter(dict.fromkeys(ids[1:], 1))
    bench.db.execute("CREATE TABLE public.mended ()")
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    eventually(lambda: bench.redis.xpending(bench.key(), slow.name)["pending"] == 0, 20)
    assert (relay.poll(), consumer.poll()) == (None, None)


# --- every command -------------------------------------------------------------------------------------------------------------


def command(bench: Bench, *words: str) -> tuple[int, str]:
    """Exit code, and what it said (or the reason, where it said nothing)."""
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=os.environ | addresses, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout or ended.stderr


def test_every_command_through_a_pooler(bench: Bench) -> None:
    target = "tests.faults.chaos:ledger"
    for side in ("outbox", "consumer"):
        code, said = command(bench, side, "migrate", "--schema", "another")
        assert (code, said) == (0, f"{side} tables in schema another are at revision {schemas.head(side)}\n")  # type: ignore[arg-type]
    ids = bench.write(30)
    relay = bench.start()
    consumer = bench.start(*CONSUMER, **QUICK)
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    eventually(lambda: bench.redis.xpending(bench.key(), ledger.name)["pending"] == 0, 20)

    code, said = command(bench, "outbox", "status", "--json")
    (stream,) = json.loads(said)["streams"]
    assert (code, stream["stream"], stream["unpublished"], stream["entries"]) == (0, TOPIC, 0, 30)
    for side, *more in (("outbox",), ("consumer", target)):
        code, said = command(bench, side, "doctor", "--json", *more)
        found = {finding["code"]: finding for finding in json.loads(said)}
        assert found["database-pooler"]["level"] == "ok"
        assert "through a pooler" in found["database-pooler"]["what"]
        assert found["schema-revision"]["level"] == found["database-rights"]["level"] == "ok"

    code, said = command(bench, "outbox", "replay", "--topic", TOPIC, "--yes")
    assert (code, said.splitlines()[-1]) == (0, "30 events published again")
    assert bench.length() == 60
    code, said = command(bench, "consumer", "reconcile", target, "--grace", "0")
    assert (code, said.splitlines()[0]) == (0, "30 events compared, 0 of them put aside as dead letters")
    bench.db.execute("DELETE FROM public.processed_messages WHERE event_id = %s", (ids[3],))
    bench.db.execute("DELETE FROM public.effects WHERE event_id = %s", (ids[3],))
    code, said = command(bench, "consumer", "reconcile", target, "--grace", "0", "--repair")
    assert (code, "1 missing: not in the ledger:" in said) == (3, True)
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    for process in (consumer, relay):
        process.terminate()
        assert process.wait(20) == 0
    bench.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, event_id, reason, error, fields) "
        "SELECT %s, %s, i || '-0', gen_random_uuid(), 'attempts', '', '{}' FROM generate_series(1, 3) i",
        (ledger.name, TOPIC),
    )
    for arguments, wanted in (
        ("dead list", "     3  attempts"), ("dead show 1", "dead letter 1 of consumer ledger"), ("dead export", '{"number": 3'),
        ("dead requeue --id 1 --yes", "1 requeued"), ("waiting", "     1  failed"), ("dead discard --all --yes", "2 discarded"),
        ("status", "waiting  failed: 1"),
    ):  # fmt: skip
        what, *more = arguments.split()
        words = [what, more.pop(0)] if what == "dead" else [what]
        code, said = command(bench, "consumer", *words, ledger.name, *more)
        assert (code, wanted in said) == (0, True), said
    code, said = command(bench, "outbox", "drop-group", ledger.name, "--yes")
    assert code == 0
    assert bench.one("SELECT count(*) FROM public.outbox_group") == 0


def test_o_73_eight_migrate_at_once_through_a_pooler(bouncer: Bouncer, empty_database_url: str) -> None:
    """All but one wait for a lock of a transaction, five of them for a session of the pool."""
    url = bouncer.through(empty_database_url)
    program = "import sys; from outbox import schema; print(*(schema.upgrade(sys.argv[1], b) for b in ('outbox', 'consumer')))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True) for _ in range(8)
    ]
    said = [process.communicate(timeout=90)[0] for process in processes]
    assert said == [f"{schemas.head('outbox')} {schemas.head('consumer')}\n"] * 8


def test_statement_pooling_is_refused(
    bench: Bench, own_bouncer: Callable[..., Bouncer], postgres_url: str, database_url: str
) -> None:
    """By everything that would begin a transaction later, or never; nothing is published before."""
    bench.database_url = own_bouncer(postgres_url, pool_mode="statement").through(database_url)
    bench.write()
    url, ours, theirs = bench.database_url, bench.settings(), consumer_settings(bench)
    refused: list[Callable[[], Any]] = [
        lambda: schemas.upgrade(url, "outbox"), lambda: schemas.upgrade(url, "consumer"),
        bench.relay().run_once, Worker(ledger, theirs).run_once,
        lambda: operations.status(ours), lambda: operations.drop_group(ours, "x"), operations.opened(ours).__enter__,
    ]  # fmt: skip
    for number, work in enumerate(refused):
        with pytest.raises(SettingsError) as caught:
            work()
        assert str(caught.value) == f"DATABASE_URL: {schemas.STATEMENT_POOLING}; {schemas.CHANGE_POOLING}", number
    assert bench.length() == 0
    code, said = command(bench, "consumer", "reconcile", "tests.faults.chaos:ledger")
    assert (code, said) == (1, f"error: {caught.value}\n")
    for findings in (outbox_doctor.examine(ours), consumer_doctor.examine(ledger, theirs)):
        (pooler,) = (found for found in findings if found.code == "database-pooler")
        assert pooler == outbox_doctor.error(
            "database-pooler",
            "PostgreSQL is reached through a pooler in statement mode, in which there are no transactions",
            "Set pool_mode = transaction (or session) in its configuration, for this database.",
        )
        assert "database-unavailable" not in {found.code for found in findings}


def test_session_pooling_is_fine(
    bench: Bench, own_bouncer: Callable[..., Bouncer], postgres_url: str, database_url: str
) -> None:
    bench.database_url = own_bouncer(postgres_url, pool_mode="session").through(database_url)
    bench.write(3)
    with closing(bench.relay()) as relay:
        relay.run_once()
        assert bench.length() == 3
    (found,) = (found for found in outbox_doctor.examine(bench.settings()) if found.code == "database-pooler")
    assert (found.level, "in session mode" in found.what) == ("ok", True)


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_the_mode_of_a_pooler_is_told_apart_or_not_waited_for(
    bench: Bench, own_bouncer: Callable[..., Bouncer], postgres_url: str, database_url: str, mode: str
) -> None:
    def seen(pool_size: int, **settings: str) -> str:
        there = own_bouncer(postgres_url, pool_mode=mode, pool_size=pool_size, **settings)
        bench.database_url = there.through(database_url)
        with psycopg.connect(bench.database_url, prepare_threshold=None, autocommit=True) as busy:
            if pool_size > 1:  # sessions that the pool has left over
                with psycopg.connect(bench.database_url, prepare_threshold=None) as other:
                    busy.execute("SELECT 1"), other.execute("SELECT 1")
                busy.close()
            (found,) = (f.what for f in outbox_doctor.examine(bench.settings()) if f.code == "database-pooler")
        return found.partition(" in ")[2]

    one = {"session": "session or transaction mode, which is fine", "transaction": "transaction mode, which is fine"}
    assert seen(3) == f"{mode} mode, which is fine"
    assert seen(3, server_round_robin="1") == f"{mode} mode, which is fine"
    assert seen(1) == one[mode], "there is no second session to compare"


def test_a_handler_that_commits_is_found_out_through_a_pooler(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """What tells one transaction from the next is the name of the application, which the pooler hands on."""
    hasty = Consumer("hasty", topics=[TOPIC])

    @hasty.on("credited")
    def handler(event: Envelope, session: Session) -> None:
        session.execute(text("INSERT INTO public.effects VALUES (:id, 'A', 1)"), {"id": event.id})
        if event.version == 2:
            session.execute(text("SELECT 1; COMMIT"))
            session.execute(text("SELECT 1"))  # begins another transaction

    ids = bench.write(4)
    with closing(bench.relay()) as relay:
        relay.run_once()
    with closing(Worker(hasty, consumer_settings(bench))) as worker:
        worker.run_once()
        assert "ended the transaction with a statement of its own" in caplog.text
        assert bench.effects() == Counter(ids), "those that had not run run alone"
        processed = "SELECT event_id::text FROM public.processed_messages WHERE consumer = 'hasty'"
        assert {row[0] for row in bench.db.execute(processed)} == set(ids)
