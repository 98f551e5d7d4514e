"""`outbox doctor`: everything that it warns of is made on real servers, and must be seen; what is well must not be."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
import redis as redis_py

from outbox import doctor, schema
from outbox.doctor import Finding, Limits, examine
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.operations import status
from outbox.settings import RelaySettings
from outbox.store import BEGINNING, DatabaseFacts, Store, Window, reading
from outbox.transport import StreamTransport
from outbox.transport.base import ServerFacts
from outbox.transport.stream import _PROBES, _name_of
from tests.faults.chaos import TOPIC, Bench, drain
from tests.waiting import eventually

GROUP = "wallet"


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def named(findings: list[Finding], code: str) -> list[Finding]:
    return [finding for finding in findings if finding.code == code]


def the(findings: list[Finding], code: str) -> Finding:
    (found,) = named(findings, code)
    assert found.level == "ok" or found.do
    return found


def seen(bench: Bench, code: str, **options: Any) -> Finding:
    return the(examine(bench.settings(**options)), code)


def redis_facts(server: ValkeyServer) -> ServerFacts:
    with closing(StreamTransport.from_url(server.url)) as there:
        return there.facts()


def on_redis(server: ValkeyServer | ServerFacts, code: str) -> Finding:
    facts = server if isinstance(server, ServerFacts) else redis_facts(server)
    return the(list(doctor.redis(facts, Limits(), 0.8)), code)


def raw(server: ValkeyServer) -> Any:
    return redis_py.Redis.from_url(server.url, decode_responses=True)


# --- the whole ------------------------------------------------------------------------------------------------------


def run(settings: RelaySettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outbox", "doctor", *arguments],
        env=os.environ
        | {
            "DATABASE_URL": settings.database_url.get_secret_value(),
            "REDIS_URL": settings.redis_url.get_secret_value(),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_where_all_is_well_nothing_is_complained_of(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]
) -> None:
    database, server = (
        own_postgres(settings={"fsync": "on"}),
        own_valkey(settings={"maxmemory": "1gb", "appendonly": "yes"}),
    )
    schema.upgrade(database.url, "outbox")
    with Bench(database.url, server.url) as bench:
        bench.write(3)
        drain(bench.relay())
        findings = examine(bench.settings())
        assert [finding for finding in findings if finding.level != "ok"] == []
        assert len({finding.code for finding in findings}) == len(findings) > 25
        settings = bench.settings()
        done = run(settings, "--strict")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == f"0 errors, 0 warnings, {len(findings)} ok"
        raw(server).config_set("maxmemory", 0)
        assert run(settings).returncode == 0
        done = run(settings, "--strict", "--json")
        assert done.returncode == 2
        assert [found["code"] for found in json.loads(done.stdout) if found["level"] == "warning"] == ["redis-memory"]
        raw(server).config_set("maxmemory-policy", "allkeys-lru")
        done = run(settings, "--strict")
        assert done.returncode == 1
        assert done.stdout.startswith("FAIL  redis-eviction: maxmemory-policy is allkeys-lru")


def test_servers_that_are_down_are_findings() -> None:
    settings = RelaySettings(
        database_url="postgresql://u:geheim@127.0.0.1:1/x", redis_url="redis://:geheim@127.0.0.1:1/0"
    )
    findings = examine(settings)
    assert [(f.code, f.level) for f in findings] == [("database-unavailable", "error"), ("redis-unavailable", "error")]
    done = run(settings)
    assert (done.returncode, done.stderr) == (1, "")
    assert "geheim" not in done.stdout + str(findings)


def test_one_server_that_is_down_does_not_hide_the_other(bench: Bench, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    server.pause()
    findings = examine(bench.settings(redis_url=server.url, redis_timeout_seconds=0.2))
    assert the(findings, "redis-unavailable").level == "error"
    assert the(findings, "schema-revision").level == "ok"
    findings = examine(bench.settings(database_url="postgresql://u@127.0.0.1:1/x"))
    assert the(findings, "database-unavailable").level == "error"
    assert the(findings, "redis-rights").level == "ok"


def test_nothing_is_changed(bench: Bench) -> None:
    bench.write(3)
    drain(bench.relay())
    transport = bench.transport()
    transport.open(GROUP, [TOPIC])
    (taken, *_) = transport.read(GROUP, "one", [TOPIC], 1, 0)

    def state() -> Any:
        keys = sorted(bench.redis.scan_iter(match=f"{bench.prefix}*", count=1000))
        rows = [bench.db.execute(f"TABLE public.{t}").fetchall() for t in doctor.PUBLISHING]
        groups = [bench.redis.xinfo_groups(bench.key()), bench.redis.xinfo_consumers(bench.key(), GROUP)[0]["pending"]]
        return keys, [bench.redis.dump(key) for key in keys if key != bench.key().encode()], rows, groups

    before = state()
    for stream in (TOPIC, "nowhere"):
        assert transport.refused(stream, "relay") == []
        assert state() == before
        assert transport.refused(stream, "consumer") == []
        assert state() == before
    examine(bench.settings())
    assert state() == before
    transport.ack(GROUP, [taken])
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), reading(bench.db):
        bench.db.execute("DELETE FROM public.outbox")
    with pytest.raises(psycopg.errors.QueryCanceled), reading(bench.db, 0.05):
        bench.db.execute("SELECT pg_sleep(10)")


# --- PostgreSQL -----------------------------------------------------------------------------------------------------


def with_setting(url: str, *settings: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}options={quote(' '.join(f'-c {setting}' for setting in settings))}"


def test_tables_that_are_missing_or_of_another_version(empty_database_url: str, bench: Bench) -> None:
    missing = seen(bench, "schema-revision", database_url=empty_database_url)
    assert (missing.level, missing.do) == ("error", "Run: outbox migrate.")
    bench.db.execute("UPDATE public.outbox_schema_version SET version_num = 'outbox_0001'")
    other = seen(bench, "schema-revision")
    assert other.level == "error"
    assert "outbox_0001" in other.what


def test_a_standby_or_a_read_only_database(bench: Bench) -> None:
    assert seen(bench, "database-writable").level == "ok"
    url = with_setting(bench.database_url, "default_transaction_read_only=on")
    assert seen(bench, "database-writable", database_url=url).level == "error"


def test_synchronous_commit(bench: Bench) -> None:
    assert seen(bench, "database-synchronous-commit").level == "ok"
    url = with_setting(bench.database_url, "synchronous_commit=off")
    assert seen(bench, "database-synchronous-commit", database_url=url).level == "warning"


def test_what_a_server_of_its_own_shows(own_postgres: Callable[..., PostgresServer], redis_url: str) -> None:
    server = own_postgres(settings={"max_prepared_transactions": "2", "fsync": "off"})
    with Bench(server.url, redis_url) as bench:
        findings = examine(bench.settings())
        assert the(findings, "database-fsync").level == "error"
        assert the(findings, "prepared-transaction").level == the(findings, "unused-slot").level == "ok"
        with psycopg.connect(server.url) as connection:
            connection.execute("SELECT pg_current_xact_id()")
            connection.execute("PREPARE TRANSACTION 'forgotten'")
        bench.db.execute("SELECT pg_create_physical_replication_slot('left_behind', true)")
        findings = examine(bench.settings())
        prepared, slot = the(findings, "prepared-transaction"), the(findings, "unused-slot")
        assert (prepared.level, slot.level) == ("warning", "warning")
        assert "'forgotten' of postgres" in prepared.what
        assert "'left_behind'" in slot.what


def test_a_role_without_rights(bench: Bench) -> None:
    role, database = f"r{bench.prefix[:-1]}", bench.db.info.dbname
    url = f"postgresql://{role}@{bench.db.info.host}:{bench.db.info.port}/{database}"

    def levels() -> dict[str, Finding]:
        findings = examine(bench.settings(database_url=url))
        return {finding.code: finding for finding in findings}

    bench.db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        found = levels()["database-rights"]
        assert found.level == "error"
        wanted = [f"{right} on {table}" for table, some in doctor.PUBLISHING.items() for right in some.split(", ")]
        assert sorted(found.what.removeprefix("this role lacks ").split(", ")) == sorted(wanted)
        for table, rights in doctor.PUBLISHING.items():
            bench.db.execute(f"GRANT {rights} ON public.{table} TO {role}")
        found_all = levels()
        assert found_all["database-rights"].level == "ok"
        assert (found_all["upkeep-rights"].level, found_all["partition-rights"].level) == ("warning", "warning")
        assert "database-unavailable" not in found_all, "a strict relay would wait for that"
        assert found_all["sessions-hidden"].level == "warning"
        bench.write(1)
        relay = bench.relay(database_url=url)
        assert relay.run_once().published == 1, "these are all the rights that publishing takes"
        relay.close()
        for table, rights in doctor.UPKEEP.items():
            bench.db.execute(f"GRANT {rights} ON public.{table} TO {role}")
        with bench.connect(autocommit=True) as connection:
            connection.execute(f"SET ROLE {role}")
            everything = Window(BEGINNING, bench.one("SELECT pg_current_snapshot()::text"), 0, False)
            assert Store().delete_from_default(connection, everything, 0, 10) == 1, "these rights are enough"
        for table in ("outbox", "outbox_default"):
            bench.db.execute(f"ALTER TABLE public.{table} OWNER TO {role}")
        bench.db.execute(f"GRANT pg_read_all_stats TO {role}; GRANT CREATE ON SCHEMA public TO {role}")
        found_all = levels()
        assert (found_all["upkeep-rights"].level, found_all["partition-rights"].level) == ("ok", "ok")
        assert found_all["sessions-hidden"].level == "ok"
        bench.db.execute("REVOKE USAGE ON SCHEMA public FROM public")
        bench.db.execute(f"REVOKE USAGE ON SCHEMA public FROM {role}")
        assert levels()["database-rights"].what == "this role lacks USAGE on schema public"
    finally:
        bench.db.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_role_that_may_not_look_into_the_consumers_schema(bench: Bench) -> None:
    """It is not ours to look at; the outbox is, and nothing is taken for a server that is down."""
    role, database = f"r{bench.prefix[:-1]}", bench.db.info.dbname
    url = f"postgresql://{role}@{bench.db.info.host}:{bench.db.info.port}/{database}"
    bench.db.execute("CREATE SCHEMA theirs")
    schema.upgrade(bench.database_url, "consumer", schema="theirs")
    bench.db.execute(f"CREATE ROLE {role} LOGIN")
    try:
        for table, rights in doctor.PUBLISHING.items():
            bench.db.execute(f"GRANT {rights} ON public.{table} TO {role}")
        settings = bench.settings(database_url=url)
        for grant in ("SELECT", f"GRANT USAGE ON SCHEMA theirs TO {role}"):
            bench.db.execute(grant)
            found = examine(settings, None, "theirs")
            assert not named(found, "database-unavailable")
            assert the(found, "retention").level == "ok"
            assert status(settings, "theirs").batch == 0
            with bench.connect() as connection:
                connection.execute(f"SET ROLE {role}")
                assert Store().put_aside(connection, "theirs", "dead_letters") is None
                assert Store().ledgers(connection, "theirs") is None
    finally:
        bench.db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_o_56_the_oldest_snapshot_and_who_holds_it(bench: Bench) -> None:
    def oldest(seconds: float) -> Finding:
        return the(examine(bench.settings(), Limits(transaction_seconds=seconds)), "oldest-snapshot")

    assert (oldest(0).level, oldest(0).what) == ("ok", "nobody holds a snapshot")
    holder = bench.connect(application_name="report of the year")
    holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    holder.execute("SELECT 1")
    late = bench.connect(application_name="late")
    late.execute("SELECT pg_current_xact_id()")
    found = oldest(0)
    assert found.level == "warning"
    assert f"held by pid {holder.info.backend_pid} (report of the year, {holder.info.user}, idle)" in found.what
    assert str(holder.info.backend_pid) in found.do
    assert oldest(3600).level == "ok"
    assert "report of the year" in oldest(3600).what
    holder.rollback()
    assert f"pid {late.info.backend_pid} (late" in oldest(0).what
    late.rollback()
    done = bench.start("outbox", "doctor", "--transaction-seconds", "0")
    assert done.wait(60) in (0, 1)


def test_sessions_that_do_nothing_in_a_transaction(bench: Bench) -> None:
    def idle(seconds: float) -> list[Finding]:
        return named(examine(bench.settings(), Limits(idle_seconds=seconds)), "idle-in-transaction")

    assert [found.level for found in idle(0)] == ["ok"]
    sleeper = bench.connect(application_name="sleeper")
    sleeper.execute("SELECT 1")  # no snapshot is left, but a lock may be
    (found,) = idle(0)
    assert found.level == "warning"
    assert f"pid {sleeper.info.backend_pid} (sleeper" in found.what
    assert [found.level for found in idle(60)] == ["ok"]
    sleeper.rollback()


def test_partitions(bench: Bench) -> None:
    assert seen(bench, "partitions-ahead").level == "warning", "no relay has run yet"
    bench.write(3)
    found = seen(bench, "default-partition")
    assert (found.level, found.what) == ("warning", "3 events are in outbox_default")
    drain(bench.relay())
    assert (seen(bench, "partitions-ahead").level, seen(bench, "default-partition").level) == ("ok", "ok")
    assert seen(bench, "partitions-ahead", partition_rows=10_000_000).level == "warning"


def test_lanes_that_do_not_agree(bench: Bench) -> None:
    bench.write(1)
    drain(bench.relay())
    assert seen(bench, "lanes").level == "ok"
    found = seen(bench, "lanes", lanes={TOPIC: 2})
    assert found.level == "error"
    assert TOPIC in found.what


def test_how_long_ledgers_must_remember(bench: Bench) -> None:
    found = seen(bench, "retention")
    assert found.level == "ok"
    assert found.what.endswith("ledgers must remember for 8 days (CONSUMER_LEDGER_RETENTION_DAYS)")
    bench.write(1)
    bench.write(1, topic="other")
    drain(bench.relay())
    bench.db.execute(
        "INSERT INTO public.consumer_retention (consumer, topic, retention_seconds) "
        "VALUES ('ledger', %s, 864000), ('ledger', 'other', 864000), ('strange', 'elsewhere', 86400)",
        (TOPIC,),
    )
    assert seen(bench, "retention").what.endswith("; those of 1 consumers in this database do")
    found = seen(bench, "retention", stream_keep_seconds=4 * 86_400)
    assert found.level == "error"
    assert "ledgers must remember for 12 days" in found.what
    assert "that of consumer ledger does for 10 days" in found.what
    assert "then consumer forget ledger." in found.do
    assert the(examine(bench.settings(stream_keep_seconds=4 * 86_400), None, "elsewhere"), "retention").level == "ok"


def database_facts_of(bench: Bench) -> DatabaseFacts:
    with closing(doctor.connect(bench.settings(), "test")) as connection:
        return doctor.database_facts(connection)


def test_a_pooler_in_between_is_seen(bench: Bench) -> None:
    assert not database_facts_of(bench).pooled
    stranger = SimpleNamespace(
        execute=bench.db.execute, info=SimpleNamespace(backend_pid=bench.db.info.backend_pid + 1),
        transaction=bench.db.transaction,
    )  # fmt: skip
    facts = doctor.database_facts(stranger)  # type: ignore[arg-type]  # as through a pooler, which has ids of its own
    assert facts.pooled
    assert "through a pooler" in the(list(doctor.database(facts)), "database-pooler").what


@pytest.mark.parametrize(("version", "level"), [(130009, "error"), (140001, "ok"), (180001, "ok"), (190000, "warning")])
def test_versions_of_postgresql(bench: Bench, version: int, level: str) -> None:
    facts = replace(database_facts_of(bench), version=version)
    assert the(list(doctor.database(facts)), "database-version").level == level


def test_clocks_that_differ(bench: Bench, own_valkey: Callable[..., ValkeyServer]) -> None:
    database, server = database_facts_of(bench), redis_facts(own_valkey())
    assert abs(database.ahead_seconds) < 2
    assert server.ahead_seconds is not None
    assert abs(server.ahead_seconds) < 2
    assert [found.level for found in doctor.clocks(database, [replace(server, ahead_seconds=None)], Limits())] == ["ok"]

    def apart(database: DatabaseFacts | None, server: ServerFacts | None) -> list[Finding]:
        return list(doctor.clocks(database, [server] if server else [], Limits()))

    assert [found.level for found in apart(database, server)] == ["ok"]
    (found,) = apart(replace(database, ahead_seconds=-400), server)
    assert found.level == "warning"
    assert "ahead of that of PostgreSQL" in found.what
    (found,) = apart(None, replace(server, ahead_seconds=7))
    assert found.what == "the clock of Redis is 7 s ahead of that of this machine"
    assert apart(None, None) == []


# --- Redis ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maxmemory", ["0", "1gb"])
@pytest.mark.parametrize(
    ("policy", "level"),
    [("noeviction", "ok"), ("allkeys-lru", "error"), ("allkeys-random", "error"), ("volatile-lru", "warning")],
)
def test_o_52_an_evicting_policy_is_found(
    policy: str, level: str, maxmemory: str, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey()
    raw(server).config_set("maxmemory", maxmemory)
    raw(server).config_set("maxmemory-policy", policy)
    with Bench(database_url, server.url) as bench:
        assert seen(bench, "redis-eviction").level == level
        assert policy in seen(bench, "redis-eviction").what
        bench.write(2)
        drain(bench.relay())
        bench.transport().open(GROUP, [TOPIC])
        keys = list(bench.redis.scan_iter())
        assert len(keys) == 2
        assert {bench.redis.ttl(key) for key in keys} == {-1}, "so volatile-* evicts nothing of ours"


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_what_the_relay_would_wait_for_in_vain(
    name: str, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(name)
    with Bench(database_url, server.url) as bench:
        assert seen(bench, "redis-wait").level == "ok"
        for options, told in (
            ({"wait_replicas": 1}, "OUTBOX_WAIT_REPLICAS is 1, and 0 replicas are connected"),
            ({"wait_aof": "local"}, "WAITAOF" if name == "redis7" else "appendonly is off"),
        ):
            found = seen(bench, "redis-wait", **options)
            assert (found.level, told in found.what, doctor.dangerous(found)) == ("error", True, True)
        raw(server).config_set("appendonly", "yes")
        assert seen(bench, "redis-wait", wait_aof="local").level == ("error" if name == "redis7" else "ok")
        replica = own_valkey(name, settings={"repl-diskless-sync-delay": "0", "replicaof": f"127.0.0.1 {server.port}"})
        eventually(lambda: raw(replica).info("replication")["master_link_status"] == "up", 30)
        assert seen(bench, "redis-wait", wait_replicas=1).level == "ok"
        assert seen(bench, "redis-wait", wait_replicas=2).level == "error"


def test_memory_that_is_unlimited_or_nearly_full(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    assert on_redis(server, "redis-memory").level == "warning"
    used = int(raw(server).info("memory")["used_memory"])
    for share, level in ((0.01, "ok"), (0.7, "warning"), (0.95, "error")):
        raw(server).config_set("maxmemory", int(used / share))
        assert on_redis(server, "redis-memory").level == level


def test_persistence(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    assert on_redis(server, "redis-aof").level == "warning"
    raw(server).config_set("appendonly", "yes")
    eventually(lambda: not raw(server).info("persistence")["aof_rewrite_in_progress"])
    assert on_redis(server, "redis-aof").what == "appendonly is on, appendfsync everysec"
    assert on_redis(server, "redis-snapshot").level == "ok"
    facts = redis_facts(server)
    failed = replace(facts, info={**facts.info, "aof_last_write_status": "err"})
    assert on_redis(failed, "redis-aof").level == "error"
    shutil.rmtree(server.data_dir / "data")  # neither file can be written now
    with pytest.raises(redis_py.ResponseError):
        raw(server).bgrewriteaof()
    eventually(lambda: on_redis(server, "redis-aof").level == "warning")
    with raw(server) as client:
        eventually(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
        client.bgsave()
    eventually(lambda: on_redis(server, "redis-snapshot").level == "error")


@pytest.mark.long
def test_replicas(own_valkey: Callable[..., ValkeyServer]) -> None:
    primary, replica = own_valkey(), own_valkey()
    assert on_redis(primary, "redis-replication").what.startswith("0 replicas")
    raw(primary).config_set("min-replicas-to-write", 1)
    found = on_redis(primary, "redis-replication")
    assert (found.level, found.what.split(":")[0]) == ("error", "0 replicas are up to date, min-replicas-to-write is 1")
    raw(replica).replicaof("127.0.0.1", primary.port)
    eventually(lambda: on_redis(primary, "redis-replication").level == "ok", 30)
    assert on_redis(primary, "redis-replication").what.startswith("1 replicas")
    found = on_redis(replica, "redis-replication")
    assert (found.level, found.what) == ("error", "this server is a replica")


def test_a_cluster_and_commands_of_other_names(own_valkey: Callable[..., ValkeyServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # the usual one, 10,000 above, may be taken
        port = str(free.getsockname()[1])
    server = own_valkey(settings={"cluster-enabled": "yes", "cluster-port": port, "rename-command": "XCLAIM XTAKE"})
    assert on_redis(server, "redis-cluster").level == "warning"
    found = on_redis(server, "redis-commands")
    assert (found.level, found.what) == ("error", "the server does not know XCLAIM")


@pytest.mark.parametrize(
    ("name", "product"), [("valkey9", "Valkey is 9."), ("redis8", "Redis is 8."), ("redis7", "Redis is 7.")]
)
def test_products_and_versions(name: str, product: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    facts = redis_facts(own_valkey(name))
    assert on_redis(facts, "redis-version").what.startswith(product)
    assert on_redis(facts, "redis-version").level == "ok"
    assert on_redis(facts, "redis-commands").level == on_redis(facts, "redis-protocol").level == "ok"
    assert on_redis(replace(facts, version="6.2.14"), "redis-version").level == "error"
    assert on_redis(replace(facts, protocol=None), "redis-protocol").level == "warning"


def user(server: ValkeyServer, *rules: str) -> str:
    raw(server).execute_command("ACL", "SETUSER", "app", "reset", "on", ">pw", *rules)
    return server.url.replace("redis://", "redis://app:pw@")


@pytest.mark.parametrize("name", ["valkey9", "redis8", "redis7"])
@pytest.mark.parametrize("side", ["relay", "consumer"])
def test_every_command_that_is_refused_is_named(name: str, side: Any, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey(name)
    names = [_name_of(probe) for probe in _PROBES[side]]
    assert len(names) == len(set(names)) > 5
    for command in names:
        url = user(server, "~*", "+@all", f"-{command.lower().replace(' ', '|')}")
        with closing(StreamTransport.from_url(url)) as there:
            assert there.refused("a", side) == [command]
    with closing(StreamTransport.from_url(user(server, "~{a}*", "+@all"))) as there:
        assert there.refused("a", side) == []
        assert {"HMGET", "XPENDING"} <= set(there.refused("b", side))


def test_users_with_few_rights(database_url: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    least = [f"+{_name_of(probe).lower().replace(' ', '|')}" for probe in _PROBES["relay"]]
    with Bench(database_url, user(server, "~*", *least)) as bench:
        bench.write(1)
        assert drain(bench.relay()).published == 1, "these are all the rights that the relay needs"
        findings = examine(bench.settings())
        assert the(findings, "redis-rights").level == the(findings, "redis-info").level == "ok"
        assert "CONFIG GET is refused" in the(findings, "redis-replication").what
        user(server, "~*", *least, "-xadd", "-xtrim")
        found = seen(bench, "redis-rights")
        assert (found.level, found.what) == ("error", f"this user may not run XADD, XTRIM on stream {TOPIC}")
        assert found.do.endswith("ACL SETUSER … +xadd +xtrim")
    with Bench(database_url, user(server, "~*", "+@all", "-info")) as bench:
        findings = examine(bench.settings())
        assert the(findings, "redis-info").level == "warning"
        assert the(findings, "redis-version").what.startswith("Valkey is "), "HELLO tells it"
        assert not named(findings, "redis-memory"), "what was not looked at is not said to be well"


def test_rights_are_looked_at_before_there_is_a_stream(bench: Bench, own_valkey: Callable[..., ValkeyServer]) -> None:
    url = user(own_valkey(), "~*", "+@all", "-xadd")
    assert seen(bench, "redis-rights", redis_url=url).level == "warning"


# --- groups ---------------------------------------------------------------------------------------------------------


def test_groups_that_are_gone_or_do_nothing(bench: Bench) -> None:
    assert seen(bench, "groups").what == "no group has been seen yet"
    transport = bench.transport()
    bench.write(3)
    relay = bench.relay(trim_seconds=0.001)
    drain(relay)
    transport.open(GROUP, [TOPIC])
    eventually(lambda: drain(relay) and bench.one("SELECT count(*) FROM public.outbox_group"))
    assert seen(bench, "groups").what == "1 groups of streams are there and go on"
    bench.db.execute("UPDATE public.outbox_group SET acked_at = acked_at - interval '2 days'")
    found = seen(bench, "group-silent")
    assert found.level == "warning"
    assert f"group {GROUP} has acknowledged nothing of stream {TOPIC} for 2 days, and 3 events wait" in found.what
    bench.db.execute("UPDATE public.outbox_group SET acked = 1000")
    assert seen(bench, "groups").level == "ok", "nothing waits for it"
    transport.drop_group(GROUP, TOPIC)
    assert seen(bench, "group-missing").level == "warning"
    bench.redis.delete(bench.key())
    assert seen(bench, "group-missing").level == "warning"
    bench.redis.set(bench.key(), "x")
    assert seen(bench, "stream-unusable").level == "error"
