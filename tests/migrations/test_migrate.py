"""Migrations are safe for eight at once, for busy producers, for a kill, and for odd names; partitions come in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import psycopg
import pytest
from psycopg import sql
from sqlalchemy.pool import NullPool

from outbox import Event, SettingsError, Writer, record, schema
from outbox.embedded import PostgresServer, postgres_servers
from outbox.errors import SchemaError
from outbox.store import Store
from tests.catalog import existing_partitions
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
NAMES = ["tenant_a", "TenantA", "tenant-a", "select", "té"]
BRANCHES: list[schema.Branch] = ["outbox", "consumer"]

#: A process that migrates once a line: ready before the line comes, so that all of them start at the same instant.
_MIGRATOR = """
import sys
from outbox import schema
print("ready", flush=True)
for line in sys.stdin:
    url, branch, name = line.rstrip("\\n").split("\\t")
    try:
        print(schema.upgrade(url, branch, schema=name), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
"""


@contextmanager
def migrators(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", _MIGRATOR]
    processes = [
        subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert answer(process) == "ready"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ask(process: subprocess.Popen[str], *words: str) -> None:
    assert process.stdin is not None
    process.stdin.write("\t".join(words) + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def tables(url: str) -> dict[str, set[str]]:
    """Tables and views of ours and of everybody's, by schema."""
    with psycopg.connect(url) as connection:
        found: dict[str, set[str]] = {}
        for name, relation in connection.execute(
            "SELECT nspname, relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE relkind IN ('r', 'p', 'v') AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'"
        ):
            found.setdefault(name, set()).add(relation)
        return found


def shape(url: str, name: str) -> list[Any]:
    """Columns, constraints, indexes and functions of a schema."""
    queries = [
        "SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity "
        "FROM information_schema.columns WHERE table_schema = %s",
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE connamespace = (SELECT oid FROM pg_namespace WHERE nspname = %s)",
        "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %s",
        "SELECT proname, pg_get_functiondef(oid) FROM pg_proc "
        "WHERE pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = %s)",
    ]
    with psycopg.connect(url) as connection:
        return [sorted(map(repr, connection.execute(query, (name,)).fetchall())) for query in queries]


OUTBOX = {
    "outbox", "outbox_default", "outbox_batch", "outbox_stream", "outbox_epoch", "outbox_events", "outbox_group",
    "outbox_pause", "outbox_schema_version",
}  # fmt: skip


# --- who, where, how often ----------------------------------------------------------------------------------


@pytest.mark.long
def test_o_73_eight_processes_migrate_an_empty_database_at_once(empty_database_url: str) -> None:
    """Twenty rounds of processes that have imported everything; the schema is dropped between."""
    with migrators(8) as processes, psycopg.connect(empty_database_url, autocommit=True) as connection:
        for number in range(20):
            name = ["public", "Round é"][number % 2]
            for branch in BRANCHES:
                for process in processes:
                    ask(process, empty_database_url, branch, name)
                assert [answer(process) for process in processes] == [schema.head(branch)] * 8
                schema.check_revision(connection, branch, name)
            found = tables(empty_database_url)
            assert set(found) - {"public"} == {name} - {"public"}
            assert found[name] >= OUTBOX
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


@pytest.mark.long
def test_o_73_eight_commands_migrate_an_empty_database_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-m", "outbox", "migrate"]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, text=True, env=os.environ | {"DATABASE_URL": empty_database_url},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for _ in range(8)
    ]  # fmt: skip
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, said
    assert set(said) == {f"outbox tables in schema public are at revision {schema.head('outbox')}\n"}
    assert tables(empty_database_url) == {"public": OUTBOX}


def test_o_89_tables_are_made_in_the_schema_that_was_named_and_nowhere_else(empty_database_url: str) -> None:
    for name in NAMES:
        for branch in BRANCHES:
            assert schema.upgrade(empty_database_url, branch, schema=name) == schema.head(branch)
        with psycopg.connect(empty_database_url) as connection:
            Writer(schema=name).record(connection, Event(topic="a", type="b", payload=name))
    found = tables(empty_database_url)
    assert set(found) == set(NAMES)
    assert len({frozenset(names) for names in found.values()}) == 1
    with psycopg.connect(empty_database_url) as connection:
        for name in NAMES:
            view = sql.Identifier(name, "outbox_events")
            assert connection.execute(sql.SQL("SELECT payload FROM {}").format(view)).fetchall() == [(name,)]


@pytest.mark.parametrize("name", ['x"; DROP TABLE accounts; -- ', "x'); SELECT pg_sleep(5)--", "", "pg_x", "a%s"])
def test_o_94_a_name_that_cannot_be_used_is_refused_before_any_sql(empty_database_url: str, name: str) -> None:
    with pytest.raises(SettingsError):
        schema.upgrade(empty_database_url, "outbox", schema=name)
    with pytest.raises(SettingsError):
        schema.upgrade_sql("outbox", schema=name)
    with pytest.raises(SettingsError):
        Writer(schema=name)
    assert tables(empty_database_url) == {}


def test_o_94_a_name_that_cannot_be_used_is_refused_by_every_command(empty_database_url: str, tmp_path: Path) -> None:
    name = "x'); SELECT pg_sleep(5)--\"; DROP TABLE accounts; --"
    (tmp_path / "shop.py").write_text("from consumer import Consumer\nwallet = Consumer('wallet', topics=['a'])\n")
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("CREATE TABLE public.accounts ()")
    commands = [["outbox", "migrate"], ["outbox", "relay"], ["consumer", "migrate"], ["consumer", "run", "shop:wallet"]]
    environment = {
        "DATABASE_URL": empty_database_url,
        "REDIS_URL": "redis://127.0.0.1:1",
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command, "--schema", name], cwd=tmp_path, text=True, env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command in commands
    ]  # fmt: skip
    for command, process in zip(commands, processes, strict=True):
        said = process.communicate(timeout=60)[0]
        assert (process.returncode, said.count("\n")) == (1, 1), (command, said)
        assert "schema" in said.lower(), (command, said)
    assert tables(empty_database_url) == {"public": {"accounts"}}


def test_migrating_again_changes_nothing(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        record(connection, Event(topic="a", type="b", payload=1))
    before = shape(database_url, "public")
    for branch in BRANCHES:
        assert schema.upgrade(database_url, branch) == schema.head(branch)
    assert shape(database_url, "public") == before
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (1,)


@pytest.mark.parametrize("name", ["public", "Tenant é"])
def test_the_statements_in_writing_make_the_same_tables(
    empty_database_url: str, postgres_url: str, name: str, database_url: str
) -> None:
    for branch in BRANCHES:
        schema.upgrade(database_url, branch, schema=name)
        with psycopg.connect(empty_database_url, autocommit=True) as connection:
            connection.execute(schema.upgrade_sql(branch, schema=name).encode())
            schema.check_revision(connection, branch, name)
        assert schema.upgrade(empty_database_url, branch, schema=name) == schema.head(branch)
    assert shape(empty_database_url, name) == shape(database_url, name)
    assert len(shape(empty_database_url, name)[0]) > 40
    assert set(tables(empty_database_url)) == {name}


def test_a_database_of_another_revision_is_refused_with_what_to_run(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        with pytest.raises(SchemaError, match="run: outbox migrate"):
            schema.check_revision(connection, "outbox", "public")
        schema.upgrade(empty_database_url, "outbox")
        schema.check_revision(connection, "outbox", "public")
        with pytest.raises(SchemaError, match="run: consumer migrate"):
            schema.check_revision(connection, "consumer", "public")
        connection.execute("UPDATE outbox_schema_version SET version_num = 'outbox_9999'")
        with pytest.raises(SchemaError, match=r"outbox_9999.*newer"):
            schema.check_revision(connection, "outbox", "public")


# --- producers at work, and a kill --------------------------------------------------------------------------


class Producer(threading.Thread):
    """Records events one by one, each in a transaction of its own, and notes the longest."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.enough, self.longest_seconds, self.recorded = url, threading.Event(), 0.0, 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self.url) as connection:
                while not self.enough.is_set():
                    begun = time.monotonic()
                    record(connection, Event(topic="a", type="b", payload=1))
                    connection.commit()
                    self.longest_seconds = max(self.longest_seconds, time.monotonic() - begun)
                    self.recorded += 1
        except Exception as error:
            self.error = error


@contextmanager
def producing(url: str) -> Iterator[Producer]:
    producer = Producer(url)
    producer.start()
    try:
        eventually(lambda: producer.recorded)
        yield producer
        seen = producer.recorded
        eventually(lambda: producer.recorded > seen or producer.error)
    finally:
        producer.enough.set()
        producer.join(10)
    assert producer.error is None


def test_o_75_producers_are_not_blocked_by_migrations_or_new_partitions(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO outbox (event_id, topic, type, data) "
            "SELECT gen_random_uuid(), 'a', 'b', '1' FROM generate_series(1, 20000)"
        )
    with producing(database_url) as producer, schema.connect(database_url, "test", autocommit=True) as connection:
        for branch in BRANCHES:
            schema.upgrade(database_url, branch)
            schema.upgrade(database_url, branch, schema="another")
        eventually(lambda: Store().make_partitions(connection, 100_000, 3) == 0)
    assert producer.longest_seconds < 1
    assert producer.recorded > 10


def test_o_75_producers_are_not_blocked_by_the_upgrade_of_an_older_outbox(empty_database_url: str) -> None:
    """From the first revision to the newest one with 200,000 rows instead of a million; producers write all the while."""
    config = schema._config("outbox", "public")
    with schema.engine(empty_database_url, "test", poolclass=NullPool).begin() as opened:
        config.attributes["connection"] = opened
        alembic.command.upgrade(config, "outbox_0001")
    with psycopg.connect(empty_database_url) as connection:
        insert(connection, 200_000)
    with producing(empty_database_url) as producer:
        assert schema.upgrade(empty_database_url, "outbox") == schema.head("outbox") != "outbox_0001"
    assert producer.longest_seconds < 1
    with psycopg.connect(empty_database_url) as connection:
        schema.check_revision(connection, "outbox", "public")
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (200_000 + producer.recorded,)
        assert connection.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid").fetchone() == (0,)


def test_o_75_a_migration_waits_for_a_long_transaction_and_lets_producers_pass(empty_database_url: str) -> None:
    config = schema._config("outbox", "public")
    with schema.engine(empty_database_url, "test", poolclass=NullPool).begin() as opened:
        config.attributes["connection"] = opened
        alembic.command.upgrade(config, "outbox_0001")
    with psycopg.connect(empty_database_url) as long, ThreadPoolExecutor() as pool:
        record(long, Event(topic="a", type="b", payload=1))
        with producing(empty_database_url) as producer:
            with pytest.raises(SchemaError, match=r"held a table .* run outbox migrate again"):
                schema.upgrade(empty_database_url, "outbox", wait_seconds=1.5)
            migration = pool.submit(schema.upgrade, empty_database_url, "outbox")
            time.sleep(1.5)
            assert not migration.done()
            long.commit()
            assert migration.result(20) == schema.head("outbox")
    assert producer.longest_seconds < 1


def test_o_75_a_migration_killed_midway_leaves_nothing_and_can_be_run_again(empty_database_url: str) -> None:
    def migrating(connection: psycopg.Connection[Any]) -> list[Any]:
        return connection.execute(
            "SELECT wait_event_type FROM pg_stat_activity WHERE application_name = 'outbox migrate' "
            "AND datname = current_database()"
        ).fetchall()

    with psycopg.connect(empty_database_url) as blocker, psycopg.connect(empty_database_url, autocommit=True) as watch:
        blocker.execute("CREATE TABLE outbox_stream (x int)")  # not committed: whoever makes it too has to wait
        with migrators(1) as (process,):
            ask(process, empty_database_url, "outbox", "public")
            eventually(lambda: migrating(watch) == [("Lock",)])
            process.kill()
            process.wait()
        assert tables(empty_database_url) == {}
        blocker.rollback()
        eventually(lambda: migrating(watch) == [])
    assert tables(empty_database_url) == {}
    assert schema.upgrade(empty_database_url, "outbox") == schema.head("outbox")
    assert tables(empty_database_url) == {"public": OUTBOX}
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid").fetchone() == (0,)


def test_dead_letters_of_before_keep_what_they_were(empty_database_url: str) -> None:
    """Such as were cut only said so in their text; they must not be requeued."""
    config = schema._config("consumer", "public")
    with schema.engine(empty_database_url, "test", poolclass=NullPool).begin() as opened:
        config.attributes["connection"] = opened
        alembic.command.upgrade(config, "consumer_0003")
    with psycopg.connect(empty_database_url) as connection:
        for number, error in enumerate(
            ["id: is missing", "id: is missing; only the beginning of its 2000000 bytes is kept"]
        ):
            connection.execute(
                "INSERT INTO dead_letters (consumer, stream, stream_id, reason, error, fields) "
                "VALUES ('c', 's', %s, 'undecodable', %s, '{}')",
                (f"{number}-0", error),
            )
    schema.upgrade(empty_database_url, "consumer")
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute("SELECT cut FROM dead_letters ORDER BY id").fetchall() == [(False,), (True,)]


# --- partitions ---------------------------------------------------------------------------------------------


def insert(connection: psycopg.Connection[Any], count: int) -> None:
    connection.execute(
        "INSERT INTO outbox (event_id, topic, type, data) "
        "SELECT gen_random_uuid(), 'a', 'b', '1' FROM generate_series(1, %s)", (count,)
    )  # fmt: skip


def placed(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """Rows of the outbox by partition."""
    return dict(connection.execute("SELECT tableoid::regclass::text, count(*) FROM outbox GROUP BY 1").fetchall())


@pytest.fixture
def database(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with schema.connect(database_url, "test", autocommit=True) as connection:
        yield connection


def test_partitions_are_made_ahead_and_only_once(database: psycopg.Connection[Any]) -> None:
    assert Store().make_partitions(database, 1000, 2) == 3
    assert Store().make_partitions(database, 1000, 2) == 0
    names = existing_partitions(database, "public", "outbox")
    assert names == ["outbox_0_1000", "outbox_1000_2000", "outbox_2000_3000", "outbox_default"]
    insert(database, 1500)
    assert placed(database) == {"outbox_0_1000": 999, "outbox_1000_2000": 501}
    assert Store().make_partitions(database, 1000, 2) == 1
    insert(database, 5000)
    assert placed(database)["outbox_default"] == 2501
    assert Store().make_partitions(database, 1000, 2) > 0
    insert(database, 1)
    newest = database.execute("SELECT tableoid::regclass::text FROM outbox ORDER BY position DESC LIMIT 1").fetchone()
    assert newest == ("outbox_6000_7000",)


def test_rows_of_the_default_partition_are_moved_as_they_are(database: psycopg.Connection[Any]) -> None:
    record_many = Writer()
    for n in range(3):
        with database.transaction():
            events = [Event(topic="a", type="b", payload=n, headers={"a": "b"}) for _ in range(400)]
            record_many.record(database, *events)
    rows = database.execute("SELECT * FROM outbox ORDER BY position").fetchall()
    assert Store().make_partitions(database, 1000, 1) == 3
    assert placed(database) == {"outbox_0_1000": 999, "outbox_1000_2000": 201}
    assert database.execute("SELECT * FROM outbox ORDER BY position").fetchall() == rows
    assert len({str(row[1]) for row in rows}) == 3


def test_too_many_rows_to_move_stay_where_they_are(database: psycopg.Connection[Any]) -> None:
    insert(database, 12_000)
    Store().make_partitions(database, 20_000, 1)
    insert(database, 1)
    assert placed(database) == {"outbox_default": 12_001}
    assert "outbox_20000_40000" in existing_partitions(database, "public", "outbox")


def test_partitions_are_like_their_parent(database: psycopg.Connection[Any]) -> None:
    Store().make_partitions(database, 1000, 1)
    query = "SELECT conname FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c' ORDER BY 1"
    names = {t: database.execute(query, (t,)).fetchall() for t in ("outbox", "outbox_0_1000")}
    assert names["outbox"] == names["outbox_0_1000"] != []
    assert len(database.execute("SELECT 1 FROM pg_indexes WHERE tablename = 'outbox_0_1000'").fetchall()) == 2


def test_many_callers_at_once_make_each_partition_once(database_url: str) -> None:
    barrier = threading.Barrier(6)

    def make(_n: int) -> int:
        with schema.connect(database_url, "test", autocommit=True) as connection:
            barrier.wait()
            made = 0
            while len(existing_partitions(connection, "public", "outbox")) < 9:
                made += Store().make_partitions(connection, 1000, 7)
            return made

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(make, range(6))) == 8


def test_a_writer_that_holds_the_default_partition_is_not_waited_for(
    database: psycopg.Connection[Any], database_url: str
) -> None:
    with psycopg.connect(database_url) as writer:
        record(writer, Event(topic="a", type="b", payload=1))
        begun = time.monotonic()
        assert Store().make_partitions(database, 1000, 2) == 0
        assert time.monotonic() - begun < 2
        with psycopg.connect(database_url) as another:  # nobody is stuck behind us
            another.execute("SET lock_timeout = '1s'")
            record(another, Event(topic="a", type="b", payload=2))
        writer.commit()
    assert Store().make_partitions(database, 1000, 2) == 3
    assert placed(database) == {"outbox_0_1000": 2}


def test_partitions_are_made_in_odd_schemas(empty_database_url: str) -> None:
    for name in NAMES:
        schema.upgrade(empty_database_url, "outbox", schema=name)
    with schema.connect(empty_database_url, "test", autocommit=True) as connection:
        connection.execute("SET search_path = ''")
        for name in NAMES:
            assert Store(name).make_partitions(connection, 1000, 1) == 2
    assert {len(names) for names in tables(empty_database_url).values()} == {len(OUTBOX) + 2}
    assert set(tables(empty_database_url)) == set(NAMES)


# --- the oldest PostgreSQL ----------------------------------------------------------------------------------


def test_postgresql_15_takes_it_all(own_postgres: Callable[..., PostgresServer]) -> None:
    found = postgres_servers().get("postgres15")
    if found is None:
        pytest.skip("no PostgreSQL 15 here: apt-get install postgresql-15")
    url = own_postgres(binaries=found).url
    for branch in BRANCHES:
        schema.upgrade(url, branch)
    with psycopg.connect(url) as connection:
        assert connection.info.server_version // 10_000 == 15
        record(connection, Event(topic="a", type="b", payload={"n": 1}, headers={"a": "b"}))
        connection.execute("""SELECT outbox_record('a', 'c', '{"n":2}', p_headers => '{"a": "b"}')""")
    with schema.connect(url, "test", autocommit=True) as connection:
        assert Store().make_partitions(connection, 1000, 1) == 2
        found_rows = connection.execute("SELECT payload FROM outbox_events ORDER BY position").fetchall()
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("SELECT outbox_record('a', 'c', '1', p_headers => '{\"a\": 1}')")
    assert found_rows == [({"n": 1},), ({"n": 2},)]
