"""What persons do to partitions: nothing ends for it, nothing of theirs is dropped, and the log says what to do."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import psycopg
import pytest

from consumer import doctor as consumer_doctor
from consumer.ledger import Ledger
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import doctor, schema
from outbox.embedded import PostgresServer
from outbox.partitions import Partition, Partitions
from outbox.store import Store
from tests.catalog import existing_partitions
from tests.faults.chaos import TABLES, TOPIC, Bench, drain, ledger
from tests.waiting import eventually

DAY = 86_400_000


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        made.db.execute(TABLES)
        yield made


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield


def names(bench: Bench, table: str = "outbox") -> list[str]:
    return existing_partitions(bench.db, "public", table)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Actions about partitions that were logged, but that some were made."""
    actions = [getattr(record, "action", "") for record in caplog.records]
    return [action for action in actions if "partition" in action and action != "partitions_made"]


def relay(bench: Bench, rounds: int = 2, **options: object) -> None:
    """A relay whose every look is due, from start to end; what is published counts as old at once."""
    made = bench.relay(**({"partition_rows": 1000, "trim_seconds": 0.001, "check_seconds": 0.001} | options))
    for _ in range(rounds):
        made._partitions_due = 0.0
        drain(made)
        time.sleep(0.002)
    made.close()


def age(bench: Bench) -> None:
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '30 days'")
    bench.db.execute("UPDATE public.outbox_batch SET sealed_at = sealed_at - interval '30 days'")


def consume(bench: Bench, rounds: int = 2) -> None:
    """A worker from start to end that looks after the ledger in every round."""
    given = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    worker = Worker(ledger, ConsumerSettings(**given, block_seconds=0.01))  # type: ignore[arg-type]
    for _ in range(rounds):
        worker._partitions_due = 0.0
        worker.run_once()
    worker.close()


def test_a_detached_partition_ends_no_relay_and_is_said_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.write(1)
    relay(bench)
    bench.db.execute("ALTER TABLE public.outbox DETACH PARTITION public.outbox_3000_4000")
    bench.fill(1500)
    caplog.clear()
    relay(bench, rounds=4)
    assert said(caplog) == ["partition_detached"]
    assert names(bench) == [
        "outbox_0_1000", "outbox_1000_2000", "outbox_2000_3000", "outbox_4000_5000", "outbox_default"
    ]  # fmt: skip
    bench.fill(2000)
    relay(bench)
    assert bench.length() == 3501
    assert bench.one("SELECT count(*) FROM ONLY public.outbox_default") == 502, "of the range that is left out"


def test_partitions_of_anothers_making_are_used_and_gone_around(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Other names, another width in the middle, one far away, one in another schema, an open end."""
    bench.db.execute("""
        CREATE SCHEMA attic;
        CREATE TABLE public.outbox_archive PARTITION OF public.outbox FOR VALUES FROM (900000000) TO (900001000);
        CREATE TABLE public.outbox_by_hand PARTITION OF public.outbox FOR VALUES FROM (1500) TO (1700);
        CREATE TABLE public.outbox_10_20 PARTITION OF public.outbox FOR VALUES FROM (2000) TO (2010);
        CREATE TABLE attic.old PARTITION OF public.outbox FOR VALUES FROM (MINVALUE) TO (0);
    """)
    assert Store().make_partitions(bench.db, 1000, 3) == 4
    bench.db.execute("ALTER TABLE public.outbox_0_1000 SET SCHEMA attic")
    made = [
        "old", "outbox_0_1000", "outbox_default", "outbox_1000_1500", "outbox_by_hand", "outbox_1700_2000",
        "outbox_10_20", "outbox_2010_3010", "outbox_archive",
    ]  # fmt: skip
    assert sorted(names(bench)) == sorted(made)
    bench.fill(2500)
    relay(bench)
    assert bench.length() == 2500
    (found,) = [f for f in doctor.examine(bench.settings()) if f.code == "foreign-partitions"]
    assert "attic.outbox_0_1000" in found.what
    assert "5 partitions" in found.what
    assert said(caplog) == []
    age(bench)
    relay(bench)
    dropped = {"outbox_1000_1500", "outbox_1700_2000"}
    assert set(made) - set(names(bench)) == dropped, "only what bears our name for its bounds"


def test_a_default_partition_that_is_missing_is_said_and_partitions_are_made_all_the_same(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.write(3)
    bench.db.execute("ALTER TABLE public.outbox DETACH PARTITION public.outbox_default")
    with pytest.raises(psycopg.errors.CheckViolation):
        bench.write()
    relay(bench)
    (record,) = [r for r in caplog.records if getattr(r, "action", "") == "default_partition_missing"]
    assert record.levelno == logging.ERROR
    assert "ALTER TABLE public.outbox ATTACH PARTITION public.outbox_default DEFAULT" in record.getMessage()
    (found,) = [f for f in doctor.examine(bench.settings()) if f.code == "default-partition-missing"]
    assert found.level == "error"
    bench.fill(1500)
    relay(bench)
    age(bench)
    bench.db.execute("UPDATE public.outbox_default SET created_at = '2020-01-01'")
    relay(bench)
    assert bench.length() == 1500
    assert bench.one("SELECT count(*) FROM public.outbox_default") == 3, "what is detached is not ours to delete"


def test_a_default_partition_of_another_name_is_used(bench: Bench) -> None:
    bench.db.execute("ALTER TABLE public.outbox_default RENAME TO rest")
    bench.write(3)
    assert Store().make_partitions(bench.db, 1000, 1) == 2
    assert bench.one("SELECT count(*) FROM public.outbox_0_1000") == 3
    bench.fill(3000)
    relay(bench, partition_rows=10**9)
    age(bench)
    relay(bench, partition_rows=10**9)
    assert bench.one("SELECT count(*) FROM public.rest") == 0


def test_a_server_that_refuses_partitions_stops_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.db.execute("""
        CREATE FUNCTION public.refuse() RETURNS event_trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'not in this house'; END $$;
        CREATE EVENT TRIGGER house_rule ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION public.refuse()
    """)
    bench.write(3)
    relay(bench, rounds=3)
    consume(bench, rounds=3)
    assert said(caplog) == ["partition_refused"] * 2, "one says the relay, one the consumer"
    assert all("not in this house" in r.getMessage() for r in caplog.records if "partition_" in str(vars(r)["action"]))
    assert len(bench.effects()) == 3
    store = Store()
    assert [store.make_partitions(bench.db, 1000, 1) for _ in range(2)] == [0, 0]
    bench.db.execute("DROP EVENT TRIGGER house_rule")
    assert store.make_partitions(bench.db, 1000, 1) == 0, "it is not tried at once again"
    assert Store().make_partitions(bench.db, 1000, 1) == 2


@pytest.mark.long
def test_a_partition_that_cannot_be_attached_in_time_is_tried_less_and_less_often(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """As beside a default partition of many millions of rows: PostgreSQL looks through it, and writers wait."""
    bench.db.execute("""
        CREATE FUNCTION public.slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
        CREATE TRIGGER large BEFORE DELETE ON public.outbox_default FOR EACH STATEMENT EXECUTE FUNCTION public.slowly()
    """)
    store, took = Store(), []
    for _ in range(3):
        begun = time.monotonic()
        assert store.make_partitions(bench.db, 1000, 3) == 0
        took.append(time.monotonic() - begun)
    assert took[0] > 0.9
    assert max(took[1:]) < 0.5, "writers have not waited again"
    pauses = []
    for _ in range(4):
        store._partitions._due = 0.0
        store.make_partitions(bench.db, 1000, 3)
        pauses.append(store._partitions._due - time.monotonic())
    assert [round(pause) for pause in pauses] == [10, 20, 40, 80]
    assert said(caplog) == ["partition_too_slow"]


def test_a_partition_that_something_depends_on_keeps_no_other_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    Store().make_partitions(bench.db, 1000, 3)
    bench.db.execute("CREATE VIEW public.report AS SELECT count(*) FROM public.outbox_0_1000")
    bench.fill(3500)
    relay(bench)
    age(bench)
    relay(bench)
    assert said(caplog) == ["partition_kept"]
    assert [name for name in names(bench) if name < "outbox_3"] == ["outbox_0_1000"]


def test_what_is_detached_with_events_that_redis_lost_holds_nothing_up(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has acknowledged them, and Redis has lost its stream: the batches lack events, and the rest is published."""
    Store().make_partitions(bench.db, 1000, 3)
    bench.transport().open(ledger.name, [TOPIC])
    bench.fill(1500)
    relay(bench, batch_rows=200)
    bench.db.execute("ALTER TABLE public.outbox DETACH PARTITION public.outbox_0_1000")
    bench.redis.delete(bench.key())
    begun = time.monotonic()
    relay(bench, batch_rows=200)
    assert time.monotonic() - begun < 10
    assert bench.length() == 501, "what is in the outbox"
    assert {getattr(r, "action", "") for r in caplog.records} >= {"rows_missing"}
    caplog.clear()
    bench.fill(10)
    relay(bench)
    assert bench.length() == 511
    assert "rows_missing" not in {getattr(r, "action", "") for r in caplog.records}, "and nothing is published again"


def test_the_ledgers_partitions_of_anothers_making(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The newest is detached, one of another name is attached, and one by hand whose bounds are within milliseconds."""
    bench.write(3)
    relay(bench)
    consume(bench)
    made = [name for name in names(bench, "processed_messages") if not name.endswith("_default")]
    newest = max(made)
    bench.db.execute(f"ALTER TABLE public.processed_messages DETACH PARTITION public.{newest}")  # type: ignore[arg-type]
    end = int(newest.rsplit("_", 1)[1])
    low, high = uuid.UUID(int=((end + DAY) << 80) + 1), uuid.UUID(int=((end + 2 * DAY) << 80) + 1)
    bench.db.execute(
        "CREATE TABLE public.processed_mine PARTITION OF public.processed_messages "  # type: ignore[arg-type]
        f"FOR VALUES FROM ('{low}') TO ('{high}')"
    )
    caplog.clear()
    bench.write(3)
    relay(bench)
    consume(bench, rounds=3)
    assert said(caplog) == ["partition_detached"]
    assert len(bench.effects()) == 6
    assert Ledger("ledger").make_partitions(bench.db, 7, 8) > 2, "the rest is made"
    names_now = names(bench, "processed_messages")
    assert f"processed_messages_{end}_{end + DAY}" in names_now, "up to the one that is in the way"
    assert f"processed_messages_{end + 2 * DAY + 1}_{end + 9 * DAY + 1}" in names_now
    later = Store().now(bench.db) + timedelta(days=10_000)
    while name := Ledger("ledger").drop_partition(bench.db, later):
        assert name in names_now
    assert names(bench, "processed_messages") == ["processed_messages_default", "processed_mine"]
    assert bench.one("SELECT to_regclass(%s) IS NOT NULL", f"public.{newest}"), "what is detached is left alone"


def test_a_ledger_without_a_default_partition(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.db.execute("ALTER TABLE public.processed_messages DETACH PARTITION public.processed_messages_default")
    bench.write(3)
    relay(bench)
    consume(bench)
    assert said(caplog) == ["default_partition_missing"]
    assert len(bench.effects()) == 3, "ids of today have a partition of their own"
    settings = ConsumerSettings(database_url=bench.database_url, redis_url=bench.redis_url, key_prefix=bench.prefix)
    (found,) = [f for f in consumer_doctor.examine(ledger, settings) if f.code == "default-partition-missing"]
    assert "processed_messages_default" in found.do
    bench.write(1, id=uuid.uuid4())
    relay(bench)
    consume(bench)
    assert len(bench.effects()) == 3, "the other ones wait"
    bench.db.execute("ALTER TABLE public.processed_messages ATTACH PARTITION public.processed_messages_default DEFAULT")
    worker = Worker(
        ledger, settings.model_copy(update={"claim_seconds": 0.1, "check_seconds": 0.01, "block_seconds": 0.01})
    )
    eventually(lambda: worker.run_once() and len(bench.effects()) == 4)
    worker.close()


def test_a_partition_of_another_owner_is_passed_over(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    role = f"relay_{secrets.token_hex(4)}"
    bench.db.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")  # type: ignore[arg-type]
    try:
        bench.db.execute("CREATE TABLE public.outbox_0_1000 PARTITION OF public.outbox FOR VALUES FROM (0) TO (1000)")
        for table in ("", "_default", "_batch", "_stream", "_epoch", "_group", "_pause", "_schema_version"):
            bench.db.execute(f"ALTER TABLE public.outbox{table} OWNER TO {role}")  # type: ignore[arg-type]
        bench.db.execute(f"GRANT ALL ON SCHEMA public TO {role}; GRANT SELECT ON public.outbox_0_1000 TO {role}")  # type: ignore[arg-type]
        parts = urlsplit(bench.database_url)
        url = parts._replace(netloc=f"{role}:{role}@{parts.hostname}:{parts.port}").geturl()
        bench.write(1)
        relay(bench, database_url=url)
        bench.fill(2500)
        relay(bench, database_url=url)
        age(bench)
        relay(bench, database_url=url)
        assert names(bench)[:3] == ["outbox_0_1000", "outbox_2000_3000", "outbox_3000_4000"]
        assert "retention_denied" not in {getattr(record, "action", "") for record in caplog.records}
        assert bench.one("SELECT count(*) FROM public.outbox_batch") == 1
    finally:
        bench.db.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")  # type: ignore[arg-type]


def test_what_is_detached_at_the_last_moment_is_not_dropped(bench: Bench) -> None:
    Store().make_partitions(bench.db, 1000, 1)
    asked: list[Partition] = []

    def is_old(found: Partition) -> bool:
        asked.append(found)
        if len(asked) == 1:
            bench.db.execute("ALTER TABLE public.outbox DETACH PARTITION public.outbox_0_1000")
        return True

    mover = bench.connect(autocommit=True)
    assert Partitions("public", "outbox", "position").drop_oldest(mover, is_old) is None
    assert bench.one("SELECT to_regclass('public.outbox_0_1000') IS NOT NULL")


def test_another_tablespace_makes_no_difference(
    own_postgres: Callable[..., PostgresServer], redis_url: str, prefix: str
) -> None:
    database = own_postgres()
    schema.upgrade(database.url, "outbox")
    with Bench(database.url, redis_url, prefix) as bench:
        Store().make_partitions(bench.db, 1000, 2)
        bench.db.execute("SET allow_in_place_tablespaces = on")
        bench.db.execute("CREATE TABLESPACE elsewhere LOCATION ''")
        bench.db.execute("ALTER TABLE public.outbox_0_1000 SET TABLESPACE elsewhere")
        bench.fill(1500)
        relay(bench)
        age(bench)
        relay(bench)
        assert bench.length() == 1500
        assert "outbox_0_1000" not in names(bench), "it is ours all the same"


def test_partitions_are_left_to_the_one_that_makes_or_drops_them(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The other is halfway: it holds the lock that says so."""
    store, partitions = Store(), Partitions("public", "outbox", "position")
    assert store.make_partitions(bench.db, 1000, 3) == 4
    with bench.connect() as other:
        assert partitions._alone(other, "make")
        assert partitions._alone(other, "drop")
        assert store.make_partitions(bench.db, 1000, 5) == 0
        assert partitions.drop_oldest(bench.db, lambda found: True) is None
        other.rollback()
    assert store.make_partitions(bench.db, 1000, 5) == 2
    assert partitions.drop_oldest(bench.db, lambda found: True) == "outbox_0_1000"
    assert said(caplog) == []
