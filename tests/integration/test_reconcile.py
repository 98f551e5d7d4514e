"""Outbox and ledger compared, in one database and in two, and what is missing published again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from consumer.cli import app
from consumer.ledger import Ledger
from consumer.reconcile import Report, reconcile
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.errors import SettingsError
from outbox.store import Store
from tests.faults.chaos import Bench, drain, ledger

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def compared(bench: Bench, grace: float = 0) -> Report:
    with bench.connect() as outbox, bench.connect() as other:
        now = Store().now(outbox)
        return reconcile(ledger, outbox, other, since=now - timedelta(days=1), now=now, grace=timedelta(seconds=grace))


def command(bench: Bench, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "consumer", "reconcile", "tests.faults.chaos:ledger", *arguments],
        cwd=ROOT, env=os.environ | addresses | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_nothing_differs_where_everything_was_applied(bench: Bench) -> None:
    bench.write(50)
    bench.write(3, topic="other")
    bench.write(2, type="unheard of")
    drain(bench.relay())
    bench.make_tables()
    settings = ConsumerSettings(
        database_url=bench.database_url, redis_url=bench.redis_url, key_prefix=bench.prefix, block_seconds=0.05
    )
    worker = Worker(ledger, settings)
    worker.run_once()
    worker.close()
    assert compared(bench) == Report(compared=50)


def test_missing_late_extra_and_dead(bench: Bench) -> None:
    ids = bench.write(100)
    drain(bench.relay())
    bench.consume()
    lost = sorted(ids[10:13])
    bench.db.execute("DELETE FROM public.processed_messages WHERE event_id = ANY (%s::uuid[])", (lost,))
    bench.db.execute("UPDATE public.processed_messages SET outcome = 'dead' WHERE event_id = %s", (ids[20],))
    stranger = uuid.uuid4()
    bench.db.execute("INSERT INTO public.processed_messages (consumer, event_id) VALUES ('ledger', %s)", (stranger,))
    found = compared(bench)
    assert [str(event_id) for event_id in found.missing] == lost
    assert (found.compared, found.missing_count, found.late_count, found.extra, found.dead) == (
        100,
        3,
        0,
        [stranger],
        1,
    )
    assert compared(bench, grace=3600).late_count == 3


def test_what_was_recorded_before_and_processed_after_is_not_extra(bench: Bench) -> None:
    bench.write(5)
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '3 days'")
    drain(bench.relay())
    bench.consume()
    assert compared(bench) == Report()


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
        shown = command(bench, "--grace", "0", "--repair", **environment)
        assert shown.returncode == 3, shown.stderr
        assert "30 events compared" in shown.stdout
        assert "4 missing: not in the ledger:" in shown.stdout
        assert "4 published again for ledger alone" in shown.stderr
        assert bench.length() == 30
        assert theirs.consume() == Counter(dict.fromkeys(ids, 1))
        clean = command(bench, "--json", "--grace", "0", **environment)
        assert clean.returncode == 0, clean.stderr
        assert json.loads(clean.stdout)["compared"] == 30


def test_more_than_it_can_hold_are_repaired_by_running_it_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer.reconcile._KEPT", 2)
    for name, value in (
        ("DATABASE_URL", bench.database_url), ("REDIS_URL", bench.redis_url), ("OUTBOX_KEY_PREFIX", bench.prefix)
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    bench.write(5)
    drain(bench.relay())
    done = CliRunner().invoke(app, ["reconcile", "tests.faults.chaos:ledger", "--grace", "0", "--repair"])
    assert done.exit_code == 3, done.output
    assert "5 missing" in done.output
    assert "2 published again" in done.output
    assert "3 more are missing: run it again" in done.output


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
