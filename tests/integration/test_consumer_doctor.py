"""`consumer doctor`: what a consumer needs is looked at on real servers, and what is missing is seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from consumer import doctor
from consumer.doctor import examine
from consumer.ledger import Ledger
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema
from outbox.doctor import Finding
from outbox.embedded import PostgresServer, ValkeyServer
from outbox.errors import SettingsError
from tests.faults.chaos import ROOT, TABLES, TOPIC, Bench, drain, ledger


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        made.db.execute(TABLES)
        yield made


def settings(bench: Bench, **options: Any) -> ConsumerSettings:
    given = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    return ConsumerSettings(**(given | {"block_seconds": 0.01} | options))


def named(findings: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in findings if finding.code == code]


def seen(bench: Bench, code: str, **options: Any) -> Finding:
    (found,) = named(examine(ledger, settings(bench, **options)), code)
    assert found.level == "ok" or found.do
    return found


def consume(bench: Bench, **options: Any) -> None:
    worker = Worker(ledger, settings(bench, **options))
    worker.run_once()
    worker.close()


def test_where_all_is_well_nothing_is_complained_of(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]
) -> None:
    database, server = (
        own_postgres(settings={"fsync": "on"}),
        own_valkey(settings={"maxmemory": "1gb", "appendonly": "yes"}),
    )
    for branch in ("outbox", "consumer"):
        schema.upgrade(database.url, branch)  # type: ignore[arg-type]
    with Bench(database.url, server.url) as bench:
        bench.db.execute(TABLES)
        environment = os.environ | {"DATABASE_URL": database.url, "REDIS_URL": server.url}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "consumer", "doctor", "tests.faults.chaos:ledger", *arguments]
            return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)

        done = run("--json", "--strict")
        assert done.returncode == 2, "nothing has run yet"
        warnings = [found["code"] for found in json.loads(done.stdout) if found["level"] == "warning"]
        assert warnings == ["ledger-partitions", "group-missing", "relay-missing"]
        bench.write(2)
        drain(bench.relay())
        consume(bench)
        findings = examine(ledger, settings(bench))
        assert [finding for finding in findings if finding.level != "ok"] == []
        done = run("--strict")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == f"0 errors, 0 warnings, {len(findings)} ok"
        bench.db.execute("DROP TABLE public.consumer_schema_version")
        done = run()
        assert done.returncode == 1
        assert "FAIL  schema-revision" in done.stdout
        assert "-> Run: consumer migrate." in done.stdout


def test_servers_that_are_down_are_findings() -> None:
    away = ConsumerSettings(database_url="postgresql://u@127.0.0.1:1/x", redis_url="redis://127.0.0.1:1/0")
    found = [(finding.code, finding.level) for finding in examine(ledger, away)]
    assert found == [("database-unavailable", "error"), ("redis-unavailable", "error")]


def test_a_role_without_rights(bench: Bench) -> None:
    role, info = f"r{bench.prefix[:-1]}", bench.db.info
    url = f"postgresql://{role}@{info.host}:{info.port}/{info.dbname}"
    bench.db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        found = seen(bench, "database-rights", database_url=url)
        wanted = [f"{right} on {table}" for table, some in doctor.CONSUMING.items() for right in some.split(", ")]
        assert found.level == "error"
        assert sorted(found.what.removeprefix("this role lacks ").split(", ")) == sorted(wanted)
        for table, rights in doctor.CONSUMING.items():
            bench.db.execute(f"GRANT {rights} ON public.{table} TO {role}")
        assert seen(bench, "database-rights", database_url=url).level == "ok"
        assert seen(bench, "partition-rights", database_url=url).level == "warning"
        assert seen(bench, "upkeep-rights", database_url=url).level == "warning"
        bench.db.execute(f"GRANT INSERT ON public.effects TO {role}")
        bench.db.execute(f"GRANT SELECT, INSERT, UPDATE ON public.limits TO {role}")
        bench.write(2)
        bench.write(1, type="limited", key="B")
        bench.redis.xadd(bench.key(), {"id": "nonsense"})
        drain(bench.relay())
        consume(bench, database_url=url)
        assert bench.one("SELECT count(*) FROM public.processed_messages") == 3, "these rights are enough"
        assert seen(bench, "dead-letters", database_url=url).what.startswith("1 deliveries are put aside")
        for table, rights in doctor.UPKEEP.items():
            bench.db.execute(f"GRANT {rights} ON public.{table} TO {role}")
        assert seen(bench, "upkeep-rights", database_url=url).level == "ok"
        found = seen(bench, "upkeep-rights", database_url=url, dead_letter_retention_days=30)
        assert found.level == "warning"
        assert {"UPDATE on dead_letters", "DELETE on dead_letters"} == set(re.findall(r"\w+ on \w+", found.what))
        bench.db.execute(f"GRANT UPDATE, DELETE ON public.dead_letters TO {role}")
        assert seen(bench, "upkeep-rights", database_url=url, dead_letter_retention_days=30).level == "ok"
        with bench.connect(autocommit=True) as connection:
            connection.execute(f"SET ROLE {role}")
            some, later = Ledger(ledger.name), datetime.now(UTC) + timedelta(days=1)
            assert some.delete_old(connection, later, 10) > 0, "these rights are enough"
            assert some.delete_dead(connection, later, 0, 10) == 1
    finally:
        bench.db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_partitions_of_the_ledger(bench: Bench) -> None:
    assert seen(bench, "ledger-partitions").level == "warning"
    consume(bench)
    assert seen(bench, "ledger-partitions").level == "ok"
    assert seen(bench, "ledger-partitions", ledger_partition_days=365).level == "warning"


def test_whom_the_ledger_remembers_for(bench: Bench) -> None:
    assert seen(bench, "ledger-keeps").what.startswith("the ledger forgets nothing yet")
    consume(bench, ledger_retention_days=40)
    assert seen(bench, "ledger-keeps").what == "the ledger remembers what was processed in the last 40 days"
    bench.db.execute("UPDATE public.consumer_retention SET outbox_since = now() - interval '50 days'")
    found = seen(bench, "ledger-keeps")
    assert found.level == "ok"
    assert "the last 51 days, longer than for the 40 days that consumer ledger is set to" in found.what
    assert f"the outbox of topic {TOPIC} still has older events" in found.what
    bench.db.execute("UPDATE public.consumer_retention SET seen_at = now() - interval '3 days'")
    found = seen(bench, "ledger-keeps")
    assert (found.level, "last seen, 3 days ago" in found.what) == ("warning", True)
    assert "outbox drop-group ledger, then consumer forget ledger." in found.do


def test_dead_letters_are_counted_by_reason(bench: Bench) -> None:
    assert seen(bench, "dead-letters").level == "ok"
    bench.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, reason, error, fields) "
        "SELECT c, 's', i::text, CASE WHEN i < 3 THEN 'bad' ELSE 'worse' END, '', '{}' "
        "FROM generate_series(1, 3) i, unnest(ARRAY[%s, 'another']) c",
        (ledger.name,),
    )
    found = seen(bench, "dead-letters")
    assert found.level == "warning"
    assert found.what == "3 deliveries are put aside as dead letters (2 bad, 1 worse)"
    assert found.do.endswith("consumer dead list ledger.")
    assert seen(bench, "paused").level == "ok"
    assert seen(bench, "paused", dead_letter_limit=4).level == "ok"
    assert seen(bench, "paused", dead_letter_limit=0).level == "ok"
    found = seen(bench, "paused", dead_letter_limit=3, dead_letter_window_seconds=60)
    assert (found.level, "paused: 3 dead letters within 60 s" in found.what) == ("warning", True)


def test_events_that_wait_are_told_and_warned_of_when_they_are_many_late_or_old(bench: Bench) -> None:
    assert seen(bench, "waiting-events").what == "no event waits for another try"

    def wait(number: int, reason: str = "failed", failed: int = 0, due: int = -60) -> Finding:
        """Failed first, and due, so many minutes ago."""
        bench.db.execute("TRUNCATE public.message_failures")
        bench.db.execute(
            "INSERT INTO public.message_failures (consumer, stream, stream_id, topic, fields, reason, give_up_at, "
            "first_failed_at, next_attempt_at) "
            "SELECT c, 's', i::text, 's', '{}', %(reason)s, CASE WHEN %(reason)s <> 'failed' THEN now() END, "
            "now() - make_interval(mins => %(failed)s), now() - make_interval(mins => %(due)s) "
            "FROM generate_series(1, %(number)s) i, unnest(ARRAY['ledger', 'another']) c",
            {"number": number, "reason": reason, "failed": failed, "due": due},
        )
        return seen(bench, "waiting-events")

    assert (wait(3).level, wait(3).what) == ("ok", "3 events wait (3 failed)")
    assert wait(999).level == "ok"
    many = wait(1000, "gap")
    assert many.level == "warning"
    assert many.what.startswith("1,000 events wait (1,000 gap), the oldest has failed first ")
    assert many.do == "See what they fail with: consumer waiting ledger."
    assert wait(1, failed=59).level == "ok"
    assert wait(1, failed=180).what.endswith("the oldest has failed first 3 h ago")
    assert wait(1, due=4).level == "ok"
    assert "one has been due for 6 min, and nobody has come to it" in wait(1, due=6).what


def test_groups_and_what_the_relay_left(bench: Bench) -> None:
    assert seen(bench, "group-missing").level == "warning"
    assert seen(bench, "relay-missing").level == "warning"
    bench.write(1)
    drain(bench.relay(retention_seconds=3 * 86_400))
    assert seen(bench, "group-missing").level == "warning"
    assert seen(bench, "lanes").level == "ok"
    found = seen(bench, "retention", ledger_retention_days=4)
    assert found.level == "ok"
    assert f"events of topic {TOPIC} for 3 days (OUTBOX_RETENTION_SECONDS)" in found.what
    assert "the ledger remembers for 4 days" in found.what
    assert seen(bench, "retention", ledger_retention_days=3).level == "error"
    bench.transport().leave([TOPIC], 3 * 86_400, None, 2 * 86_400)
    found = seen(bench, "retention", ledger_retention_days=5)
    assert (found.level, "for 2 days (OUTBOX_STREAM_KEEP_SECONDS)" in found.what) == ("error", True)
    assert "for 6 days at least" in found.do
    assert seen(bench, "retention", ledger_retention_days=6).level == "ok"
    bench.transport().leave([TOPIC], 3 * 86_400, None, 60)
    with pytest.raises(SettingsError, match="CONSUMER_LEDGER_RETENTION_DAYS is 3"):
        consume(bench, ledger_retention_days=3)
    consume(bench)
    assert seen(bench, "groups").level == "ok"
    found = seen(bench, "lanes", lanes={TOPIC: 4})
    assert (found.level, "over 1 lanes, OUTBOX_LANES says 4" in found.what) == ("error", True)
    bench.redis.set(bench.key(), "x")
    assert seen(bench, "stream-unusable").level == "error"


def test_a_topic_of_several_lanes(bench: Bench) -> None:
    bench.write(1, key="A")
    drain(bench.relay(lanes={TOPIC: 3}))
    assert not bench.redis.exists(bench.key(f"{TOPIC}:0")), "the first lane is empty yet"
    assert seen(bench, "lanes", lanes={TOPIC: 3}).level == "ok"
    bench.write(1, key=None)
    drain(bench.relay(lanes={TOPIC: 3}))
    assert seen(bench, "lanes").level == "error"
    assert seen(bench, "lanes", lanes={TOPIC: 3}).level == "ok"
    assert len(named(examine(ledger, settings(bench, lanes={TOPIC: 3})), "group-missing")) == 3


def test_what_the_redis_user_may_not_do(bench: Bench, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    with Bench(bench.database_url, server.url) as there:
        rights = (
            "~*",
            "+eval",
            "+evalsha",
            "+xgroup",
            "+xack",
            "+xreadgroup",
            "+xpending",
            "+xclaim",
            "+xrange",
            "+hmget",
        )
        there.redis.execute_command("ACL", "SETUSER", "app", "on", ">pw", *rights)
        there.redis_url = server.url.replace("redis://", "redis://app:pw@")
        assert seen(there, "redis-rights").level == "ok"
        assert seen(there, "redis-info").level == "warning"
        there.write(1)
        drain(there.relay(redis_url=server.url))
        consume(there)
        assert there.redis.xpending(there.key(), ledger.name)["pending"] == 0, "these rights are enough"
        there.redis.execute_command("ACL", "SETUSER", "app", "-xack")
        found = seen(there, "redis-rights")
        assert (found.level, found.what) == ("error", f"this user may not run XACK on stream {TOPIC}, {TOPIC}:@ledger")
        there.redis.execute_command("ACL", "SETUSER", "app", "resetkeys", f"~{{{TOPIC}}}*", "+xack")
        assert f"on stream {TOPIC}:@ledger" in seen(there, "redis-rights").what, "keys are looked at too"
        found = seen(there, "redis-rights", lanes={TOPIC: 8})
        assert f"on stream {TOPIC}:0, {TOPIC}:1, {TOPIC}:2 and 6 more" in found.what


def test_a_limit_for_idle_transactions_that_handlers_may_meet(bench: Bench) -> None:
    assert seen(bench, "idle-limit").level == "ok"

    def limited(milliseconds: int) -> Finding:
        option = quote(f"-c idle_in_transaction_session_timeout={milliseconds}")
        url = f"{bench.database_url}{'&' if '?' in bench.database_url else '?'}options={option}"
        return seen(bench, "idle-limit", database_url=url, claim_seconds=60)

    assert limited(5000).level == "warning"
    assert "after 5 s" in limited(5000).what
    assert limited(120_000).level == "ok"


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps them", "hands names on"])
def test_prepared_statements_through_a_pooler(bench: Bench, keeps: bool) -> None:
    """A pooler that keeps prepared statements gives them names of its own; `tests/faults/test_pooler.py` has a real one."""
    pooler = SimpleNamespace(
        execute=bench.db.execute, info=SimpleNamespace(backend_pid=bench.db.info.backend_pid + 1),
        transaction=bench.db.transaction,
        pgconn=SimpleNamespace(prepare=lambda name, statement: keeps or bench.db.pgconn.prepare(name, statement)),
    )  # fmt: skip
    for threshold, level in ((None, "ok"), (5, "ok" if keeps else "error")):
        findings = doctor._prepared(pooler, settings(bench, prepare_threshold=threshold))  # type: ignore[arg-type]
        assert [found.level for found in findings] == [level]
    assert bench.one("SELECT count(*) FROM pg_prepared_statements WHERE starts_with(name, 'outbox_')") == 0
