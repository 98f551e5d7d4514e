"""Outbox and ledger compared, in one database and in two, and what is missing published again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from consumer.ledger import Ledger
from consumer.reconcile import Report, reconcile
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.embedded import ValkeyServer
from outbox.errors import SettingsError
from outbox.store import Store
from outbox.transport.base import side_stream
from tests.faults.chaos import TOPIC, Bench, drain, ledger
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def compared(bench: Bench, grace: float = 0) -> Report:
    with bench.connect() as outbox, bench.connect() as other:
        now = Store().now(outbox)
        return reconcile(ledger, outbox, other, since=now - timedelta(days=1), now=now, grace=timedelta(seconds=grace))


def shown(report: Report) -> tuple[int, int, list[str], list[str], list[str]]:
    missing, late, extra = (
        [str(event_id) for event_id in kind] for kind in (report.missing, report.late, report.extra)
    )
    assert (len(missing), len(late), len(extra)) == (len(report.missing), len(report.late), len(report.extra))
    return report.compared, report.dead, missing, late, extra


def command(
    bench: Bench, *arguments: str, program: Sequence[str] = ("-m", "consumer"), **environment: str
) -> subprocess.CompletedProcess[str]:
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *program, "reconcile", "tests.faults.chaos:ledger", *arguments],
        cwd=ROOT, env=os.environ | addresses | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_nothing_differs_where_everything_was_applied(bench: Bench) -> None:
    bench.write(50)
    bench.write(3, topic="other")
    drain(bench.relay())
    bench.consume()
    bench.write(2, type="unheard of")
    assert shown(compared(bench)) == (50, 0, [], [], [])


def test_missing_late_extra_and_dead(bench: Bench) -> None:
    ids = bench.write(100)
    drain(bench.relay())
    bench.consume()
    lost = sorted(ids[10:13])
    bench.db.execute("DELETE FROM public.processed_messages WHERE event_id = ANY (%s::uuid[])", (lost,))
    bench.db.execute("UPDATE public.processed_messages SET outcome = 'dead' WHERE event_id = %s", (ids[20],))
    stranger = uuid.uuid4()
    bench.db.execute("INSERT INTO public.processed_messages (consumer, event_id) VALUES ('ledger', %s)", (stranger,))
    assert shown(compared(bench)) == (100, 1, lost, [], [str(stranger)])
    assert shown(compared(bench, grace=3600)) == (100, 1, [], lost, [str(stranger)])


def test_what_waits_for_another_try_is_neither_missing_nor_dead(bench: Bench) -> None:
    ids = bench.write(10)
    drain(bench.relay())
    bench.consume()
    bench.db.execute(
        "UPDATE public.processed_messages SET outcome = 'waiting' WHERE event_id = ANY (%s::uuid[])", (ids[:3],)
    )
    report = compared(bench)
    assert (shown(report), report.waiting) == ((10, 0, [], [], []), 3)
    told = command(bench)
    assert told.returncode == 0
    assert told.stdout.splitlines()[1] == "3 of them wait for another try, see: consumer waiting ledger"


def test_what_was_recorded_before_and_processed_after_is_not_extra(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(5)
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '3 days'")
    drain(bench.relay())
    bench.consume()
    assert shown(compared(bench)) == (0, 0, [], [], [])
    monkeypatch.setattr("consumer.reconcile._LOOKED_FOR", 2)
    strangers = sorted(str(uuid.uuid4()) for _ in range(5))
    bench.db.execute(
        "INSERT INTO public.processed_messages (consumer, event_id) SELECT 'ledger', unnest(%s::uuid[])", (strangers,)
    )
    assert shown(compared(bench)) == (0, 0, [], [], strangers)


def test_what_the_outbox_has_dropped_is_not_extra(bench: Bench) -> None:
    """Neither what was applied just before, nor what was recorded long before it was applied."""
    before, late = bench.write(3), bench.write(2)
    kept = bench.write(2)
    drain(bench.relay())
    bench.consume()
    bench.db.execute("UPDATE public.outbox SET created_at = created_at + interval '1 hour'")
    bench.db.execute("DELETE FROM public.outbox WHERE event_id = ANY (%s::uuid[])", (before + late,))
    bench.db.execute(
        "UPDATE public.processed_messages SET processed_at = processed_at + interval '2 hours' WHERE event_id = ANY (%s::uuid[])",
        (late + kept,),
    )
    report = compared(bench)
    assert (shown(report), report.older) == ((2, 0, [], [], []), 5)
    stranger = uuid.uuid4()
    bench.db.execute(
        "INSERT INTO public.processed_messages (consumer, event_id, processed_at) VALUES ('ledger', %s, now() + interval '2 hours')",
        (stranger,),
    )
    assert shown(compared(bench)) == (2, 0, [], [], [str(stranger)])
    said = command(bench, "--grace", "0")
    assert said.returncode == 3
    assert said.stdout.endswith("5 applied that are older than all that the outbox still has: not compared\n")


def test_the_command_repairs_for_this_consumer_alone_across_two_databases(
    bench: Bench, empty_database_url: str
) -> None:
    ids = bench.write(30)
    drain(bench.relay())
    schemas.upgrade(empty_database_url, "consumer")
    with Bench(empty_database_url, bench.redis_url, bench.prefix) as theirs:
        theirs.consume()
        theirs.db.execute("DELETE FROM public.processed_messages WHERE event_id = ANY (%s::uuid[])", (ids[:4],))
        theirs.db.execute("DELETE FROM public.effects WHERE event_id = ANY (%s::uuid[])", (ids[:4],))
        environment = {"OUTBOX_DATABASE_URL": bench.database_url, "DATABASE_URL": empty_database_url}
        done = command(bench, "--grace", "0", "--repair", **environment)
        assert done.returncode == 3, done.stderr
        assert "30 events compared" in done.stdout
        assert "4 missing: not in the ledger:" in done.stdout
        assert "4 published again for ledger alone" in done.stderr
        assert bench.length() == 30
        assert theirs.consume() == Counter(dict.fromkeys(ids, 1))
        clean = command(bench, "--json", "--grace", "0", **environment)
        assert clean.returncode == 0, clean.stderr
        assert json.loads(clean.stdout)["compared"] == 30


def test_json_has_every_id(bench: Bench) -> None:
    bench.make_tables()
    ids = bench.write(120)
    assert command(bench, "--days", "1000000").returncode == 2, "there is no such date"
    found = json.loads(command(bench, "--json", "--grace", "0").stdout)
    assert found == {
        "compared": 120, "dead": 0, "waiting": 0, "older": 0, "missing_count": 120, "late_count": 0, "extra_count": 0,
        "missing": sorted(ids), "late": [], "extra": [],
    }  # fmt: skip
    found = json.loads(command(bench, "--json").stdout)
    assert (found["missing"], found["late"]) == ([], sorted(ids))


def test_a_repair_that_is_stopped_is_run_again(bench: Bench) -> None:
    """What has come meanwhile is no longer missing."""
    ids = bench.write(500)
    drain(bench.relay())
    bench.redis.delete(bench.key())
    bench.make_tables()
    repair = ("consumer", "reconcile", "tests.faults.chaos:ledger", "--grace", "0", "--repair", "--rate")
    side = side_stream(TOPIC, "ledger")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = bench.start(*repair, "100", log=log)
        eventually(lambda: bench.length(side) >= 100, 30)
        process.terminate()
        assert process.wait(30) == 3
        came = bench.length(side)
        assert f"{came} published again for ledger alone; run it again" in log.read_text()
        assert sum(bench.consume().values()) == came < 500
        assert bench.start(*repair, "0", log=log).wait(60) == 3
        assert f"\n{500 - came} missing" in log.read_text()
        assert log.read_text().endswith(f"\n{500 - came} published again for ledger alone\n")
    assert bench.length(side) == 500
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


@pytest.mark.long
def test_repairs_at_once_while_redis_forgets_and_a_consumer_runs(
    database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    """Nothing twice, nothing lost: they are run until nothing is missing."""
    server = own_valkey()
    with Bench(database_url, server.url) as bench:
        ids = bench.write(1000)
        bench.make_tables()
        assert drain(bench.relay()).published == 1000
        bench.redis.flushall()
        consumer = bench.start("consumer", "run", "tests.faults.chaos:ledger", CONSUMER_BACKOFF_MAX_SECONDS="0.2")
        repair = ("consumer", "reconcile", "tests.faults.chaos:ledger", "--grace", "0", "--repair", "--rate", "400")
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            repairs = [bench.start(*repair, log=log) for _ in range(2)]
            for reached in (200, 500):
                eventually(lambda reached=reached: len(bench.effects()) >= reached, 60)  # type: ignore[misc]
                server.kill()
                server.start()
            assert [process.wait(120) for process in repairs] == [3, 3], log.read_text()
            assert "begins anew" in log.read_text()
        eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)), 60)
        consumer.terminate()
        assert consumer.wait(30) == 0
        assert bench.start(*repair).wait(60) == 0


#: The command, and how much memory it had at most. From in between, since a child also bears what its parent had.
MEASURED = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "consumer", *sys.argv[1:]])
_, status, used = os.wait4(child.pid, 0)
print(used.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_events_need_little_memory_and_any_number_is_repaired(bench: Bench) -> None:
    """Counts are exact, and so are the ids: 150,000 missing, 120,000 late, 110,000 extra."""
    bench.db.execute("DROP INDEX public.outbox_xid")  # only relays need it, and it takes long to fill
    bench.db.execute("""
        INSERT INTO public.outbox (event_id, topic, type, key, version, data, created_at)
        SELECT ('01a00000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'accounts', 'credited', 'A', i, '1'::bytea,
               now() - CASE WHEN i <= 880000 THEN interval '1 hour' ELSE interval '0' END
        FROM generate_series(1, 1000000) i
    """)
    bench.db.execute("""
        INSERT INTO public.processed_messages (consumer, event_id)
        SELECT 'ledger', event_id FROM public.outbox WHERE version BETWEEN 150001 AND 880000
    """)
    bench.db.execute("""
        INSERT INTO public.processed_messages (consumer, event_id)
        SELECT 'ledger', gen_random_uuid() FROM generate_series(1, 110000)
    """)
    bench.db.execute("ANALYZE public.outbox, public.processed_messages")
    done = command(bench, "--json", "--repair", "--rate", "0", program=("-c", MEASURED))
    assert done.returncode == 3, done.stderr
    found, (*_, peak_kib) = json.loads(done.stdout), done.stderr.split()
    counts = {kind: found[f"{kind}_count"] for kind in ("missing", "late", "extra")}
    assert counts == {"missing": 150_000, "late": 120_000, "extra": 110_000}
    assert {kind: len(set(found[kind])) for kind in counts} == counts
    assert bench.length(side_stream(TOPIC, "ledger")) == 150_000
    assert set(bench.ids(side_stream(TOPIC, "ledger"))) == set(found["missing"])
    assert int(peak_kib) < 160 * 1024, "130 MiB are usual"


# --- the ledger's retention ----------------------------------------------------------------------------------------------


def test_o_59_a_ledger_that_remembers_for_less_than_the_outbox_keeps_is_refused(bench: Bench) -> None:
    bench.write(1)
    drain(bench.relay(retention_seconds=10 * 86_400))
    settings = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    worker = Worker(ledger, ConsumerSettings(**settings, ledger_retention_days=10))  # type: ignore[arg-type]
    with pytest.raises(
        SettingsError, match=r"CONSUMER_LEDGER_RETENTION_DAYS is 10, .*OUTBOX_RETENTION_SECONDS is 864000"
    ):
        worker.run()
    worker = Worker(ledger, ConsumerSettings(**settings, ledger_retention_days=11))  # type: ignore[arg-type]
    worker.run_once()
    worker.close()


def test_old_partitions_of_the_ledger_go_and_other_old_rows_little_by_little(database_url: str) -> None:
    with schemas.connect(database_url, "test", autocommit=True) as connection:
        some = Ledger("ledger")
        day = 86_400_000
        row = connection.execute("SELECT (extract(epoch FROM now()) * 1000)::bigint").fetchone()
        assert row is not None
        start = row[0] - row[0] % day - 40 * day
        names = [f"processed_messages_{low}_{low + 20 * day}" for low in (start, start + 20 * day)]
        for name in names:
            low, high = (str(uuid.UUID(int=int(bound) << 80)) for bound in name.split("_")[2:])
            connection.execute(
                f"CREATE TABLE {name} PARTITION OF processed_messages FOR VALUES FROM ('{low}') TO ('{high}')"
            )
        old, young = uuid.UUID(int=(start + day) << 80), uuid.UUID(int=(start + 30 * day) << 80)
        other = [uuid.uuid4() for _ in range(3)]
        for event_id in (old, young, *other):
            connection.execute(
                "INSERT INTO processed_messages (consumer, event_id, processed_at) VALUES ('ledger', %s, %s)",
                (event_id, "2020-01-01" if event_id in (old, *other[:2]) else "now"),
            )
        now = Store().now(connection)
        before, later = now - timedelta(days=15), now + timedelta(days=365)
        assert some.drop_partition(connection, before) == names[0]
        assert some.drop_partition(connection, before) is None
        assert [some.delete_old(connection, before, 1) for _ in range(3)] == [1, 1, 0]
        left = {event_id for (event_id,) in connection.execute("SELECT event_id FROM processed_messages")}
        assert left == {young, other[2]}
        with psycopg.connect(database_url) as busy:
            busy.execute("SELECT FROM processed_messages LIMIT 1")
            assert some.drop_partition(connection, later) is None, "somebody reads it"
        assert some.drop_partition(connection, later) == names[1]


def test_versions_of_keys_that_stand_still_are_forgotten(bench: Bench) -> None:
    bench.db.execute("""
        INSERT INTO public.entity_versions (consumer, topic, type, key, version, updated_at)
        VALUES ('ledger', 't', 't', 'old', 1, now() - interval '40 days'), ('ledger', 't', 't', 'new', 1, now())
    """)
    with bench.connect(autocommit=True) as connection:
        before = Store().now(connection) - timedelta(days=30)
        assert Ledger("ledger").delete_old(connection, before, 100) == 1
    assert bench.one("SELECT key FROM public.entity_versions") == "new"
