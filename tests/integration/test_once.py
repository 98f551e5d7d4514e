"""`first_time`: a key is new in exactly one transaction that commits, on every kind of connection that is taken."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from consumer import Consumer, Envelope, first_time, first_time_async
from consumer.ledger import Ledger
from consumer.process import Outcome, Processor
from consumer.reconcile import reconcile
from outbox import NoTransaction, SchemaError, SettingsError, schema
from outbox.errors import InvalidKey
from tests.faults.bouncer import Bouncer
from tests.faults.proxy import Proxy, port_of, through
from tests.integration.test_consumer import deliveries, entry
from tests.integration.test_writer import ASYNC, SYNC, Doing, dialect, opened, opened_async
from tests.waiting import eventually

SCOPE = "payment-webhooks"
DAY = 86_400


@pytest.fixture(scope="module")
def _url(new_database_url: Callable[[], str]) -> str:
    return new_database_url()


@pytest.fixture
def url(_url: str) -> str:
    """A migrated database with an empty ledger."""
    with psycopg.connect(_url) as connection:
        connection.execute(
            "DELETE FROM processed_messages; DELETE FROM consumer_retention; DELETE FROM message_failures"
        )
    return _url


def keys(url: str) -> list[tuple[str, uuid.UUID]]:
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT consumer, event_id FROM processed_messages ORDER BY 1, 2").fetchall()


async def first(doing: Doing, key: Any = "evt_1", scope: Any = SCOPE, **options: Any) -> bool:
    if doing.is_async:
        return await first_time_async(doing.handle, scope, key, **options)
    return first_time(doing.handle, scope, key, **options)


def on_every_kind(scenario: Callable[..., Any]) -> Any:
    """Run an async scenario(doing, url) with every kind of connection."""

    @pytest.mark.parametrize("kind", SYNC + ASYNC)
    def test(kind: str, url: str) -> None:
        async def run() -> None:
            if kind in ASYNC:
                async with opened_async(kind, url) as handle:
                    await scenario(Doing(kind, handle), url)
            else:
                with opened(kind, url) as handle:
                    await scenario(Doing(kind, handle), url)

        asyncio.run(run())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@on_every_kind
async def test_a_key_is_new_until_a_transaction_with_it_commits(doing: Doing, url: str) -> None:
    assert await first(doing)
    assert not await first(doing)  # not twice in one transaction either
    await doing.rollback()
    assert await first(doing)
    await doing.commit()
    assert not await first(doing)
    assert await first(doing, "evt_2")
    assert await first(doing, scope="refund-webhooks")
    await doing.commit()
    assert [name for name, _ in keys(url)] == [f"once:{SCOPE}", f"once:{SCOPE}", "once:refund-webhooks"]


@on_every_kind
async def test_a_savepoint_that_is_rolled_back_forgets_its_key(doing: Doing, url: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with doing.savepoint():
            assert await first(doing)
            raise ZeroDivisionError
    assert await first(doing)
    await doing.commit()
    assert len(keys(url)) == 1


BAD_KEYS: list[tuple[Any, str]] = [
    ("", "key: must have 1 to 1000 characters, has 0"),
    ("x" * 1001, "key: must have 1 to 1000 characters, has 1001"),
    ("a\x00b", "key: must not contain control characters"),
    ("a\nb", "key: must not contain control characters"),
    ("a\ud800", "key: has a lone surrogate"),
    (None, "key: must be a string, is NoneType"),
    (b"evt_1", "key: must be a string, is bytes"),
    (uuid.UUID(int=1), "key: must be a string, is UUID"),
    (float("nan"), "key: must be a string, is float"),
    (9007199254740993, "key: must be a string, is int"),
    (Decimal("0.10"), "key: must be a string, is Decimal"),
    (datetime(2026, 7, 1), "key: must be a string, is datetime"),
    (False, "key: must be a string, is bool"),
]
BAD_SCOPES: list[tuple[Any, str]] = [
    ("", "scope: must match "),
    ("once:a", "scope: must match "),
    ("a b", "scope: must match "),
    ("a\x00", "scope: must match "),
    ("\ud800", "scope: must match "),
    ("s" * 101, "scope: must match "),
    (None, "scope: must match "),
]


@on_every_kind
async def test_o_66_o_67_o_68_o_71_o_72_what_is_no_key_is_refused_before_any_sql(doing: Doing, url: str) -> None:
    """What has several written forms (numbers, times, ids) is the caller's to write; the business row still commits."""
    assert await first(doing, "business")
    for key, message in BAD_KEYS:
        with pytest.raises(InvalidKey, match=message) as refused:
            await first(doing, key)
        assert refused.value.field == "key"
        str(refused.value).encode()  # fit to be logged
    for scope, message in BAD_SCOPES:
        with pytest.raises(InvalidKey, match=message) as refused:
            await first(doing, "evt_1", scope)
        assert refused.value.field == "scope"
        str(refused.value).encode()
    await doing.execute("SELECT 1")
    await doing.commit()
    assert len(keys(url)) == 1


TEXTS = [
    "0", "0.0", "0.10", "0.1", "1E+3", "1000", "9007199254740993", "9007199254740992", "null", "None", "false", "[]", "{}",
    "NaN", "é", "e\u0301", "😀", "𠀋", "שלום", "مرحبا", " ", "  ", "a", "A", "%s", "'; --", "2026-07-01T00:00:00+00:00",
    "2026-07-01T00:00:00+05:30", "x" * 1000,
]  # fmt: skip


@on_every_kind
async def test_o_66_o_68_o_71_o_72_every_text_is_a_key_of_its_own(doing: Doing, url: str) -> None:
    assert [await first(doing, key) for key in TEXTS] == [True] * len(TEXTS)
    await doing.commit()
    assert [await first(doing, key) for key in TEXTS] == [False] * len(TEXTS)


def test_ids_of_keys_are_the_same_in_every_version(url: str) -> None:
    """Were they not, every key would be new after an update."""
    with psycopg.connect(url) as connection:
        assert first_time(connection, SCOPE, "évt_1")
    assert keys(url) == [(f"once:{SCOPE}", uuid.UUID("1f118b0a-831b-54ef-bf08-36306ee3d82f"))]


# --- two at once --------------------------------------------------------------------------------------------


def waiting(url: str) -> bool:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and row[0] > 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as made:
        yield made


@pytest.mark.parametrize("end", ["commit", "rollback", "die"])
def test_the_second_waits_for_the_end_of_the_first(url: str, pool: ThreadPoolExecutor, end: str) -> None:
    def second() -> bool:
        with psycopg.connect(url) as connection:
            return first_time(connection, SCOPE, "evt_1")

    connection = psycopg.connect(url)
    assert first_time(connection, SCOPE, "evt_1")
    later = pool.submit(second)
    eventually(lambda: waiting(url), message="the second waits")
    assert not later.done()
    if end == "die":
        with psycopg.connect(url) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
    else:
        getattr(connection, end)()
    assert later.result(30) is (end != "commit")
    connection.close()
    assert len(keys(url)) == 1


def test_of_many_at_once_one_commits_what_it_does(url: str, pool: ThreadPoolExecutor) -> None:
    """Some of those whose turn it is give up, or die; the next takes the place."""
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE IF EXISTS charges; CREATE TABLE charges (key text)")
    start = threading.Barrier(16)

    def charge(number: int) -> list[bool]:
        start.wait(30)
        found = []
        for round in range(10):
            with psycopg.connect(url) as connection:
                found.append(first_time(connection, "charge", f"key-{round}"))
                if not found[-1]:
                    continue
                connection.execute("INSERT INTO charges VALUES (%s)", (f"key-{round}",))
                if (number + round) % 3 == 0:
                    connection.rollback()
                elif (number + round) % 3 == 1:
                    connection.close()
        return found

    results = list(pool.map(charge, range(16)))
    with psycopg.connect(url) as connection:
        charged = connection.execute("SELECT key, count(*) FROM charges GROUP BY key").fetchall()
    assert sorted(charged) == [(f"key-{round}", 1) for round in range(10)]
    assert all(any(found[round] for found in results) for round in range(10))


@pytest.mark.parametrize("kind", ["session", "psycopg"])
def test_the_wait_is_bounded_by_lock_timeout(url: str, kind: str) -> None:
    with psycopg.connect(url) as holder, opened(kind, url) as handle:
        assert first_time(holder, SCOPE, "evt_1")
        handle.execute(sa.text("SET LOCAL lock_timeout = '50ms'") if kind == "session" else "SET lock_timeout = '50ms'")
        with pytest.raises((psycopg.errors.LockNotAvailable, sa.exc.OperationalError)) as refused:
            first_time(handle, SCOPE, "evt_1")
        assert getattr(refused.value, "orig", refused.value).sqlstate == "55P03"
        handle.rollback()
        assert first_time(handle, SCOPE, "evt_2")


def test_at_repeatable_read_the_second_is_refused_and_knows_when_it_tries_again(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM processed_messages")  # its snapshot is from now
        with psycopg.connect(url) as other:
            assert first_time(other, SCOPE, "evt_1")
        with pytest.raises(psycopg.errors.SerializationFailure):
            first_time(connection, SCOPE, "evt_1")
        connection.rollback()
        assert not first_time(connection, SCOPE, "evt_1")


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("kind", ["session", "psycopg"])
def test_a_commit_without_an_answer_is_asked_about_by_the_key(url: str, kind: str, cut: Any) -> None:
    """The caller does not know whether it was committed; when it tries again, the key does."""
    with Proxy(port_of(url)) as proxy:
        proxy.cut_at(b"COMMIT", lambda number: cut if number == 1 else None)
        with (
            suppress(psycopg.OperationalError, sa.exc.OperationalError),
            opened(kind, through(proxy, url)) as handle,
        ):
            assert first_time(handle, SCOPE, "evt_1")
            with pytest.raises((psycopg.OperationalError, sa.exc.OperationalError)):
                handle.commit()
        assert proxy.cuts == 1
        with opened(kind, through(proxy, url)) as handle:
            assert first_time(handle, SCOPE, "evt_1") is (cut == "before")
            handle.commit()
    assert len(keys(url)) == 1


# --- in handlers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_a_handler_that_fails_gives_its_key_back_to_the_next_one_of_the_batch(url: str, raw: bool) -> None:
    """One alert a customer, say, whatever the number of events: the key of a try that failed is new again."""
    consumer, found = Consumer("alerts", topics=["accounts"]), []

    @consumer.on("credited", raw=raw)
    def alert(event: Envelope, session: Any) -> None:
        found.append((event.payload["n"], first_time(session, "alerts", event.key or "")))
        if event.payload["n"] == 1:
            raise ZeroDivisionError

    engine = schema.engine(url, "test", poolclass=NullPool)
    batch = deliveries(*(entry("credited", {"n": n}) for n in (1, 2, 3)))
    assert Processor(consumer, engine).process(batch) == [Outcome.RETRY, Outcome.APPLIED, Outcome.APPLIED]
    assert found == [(1, True), (2, True), (3, False)]
    assert [name for name, _ in keys(url) if name.startswith("once:")] == ["once:alerts"]


# --- connections --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SYNC + ASYNC)
def test_autocommit_is_refused(url: str, kind: str) -> None:
    async def refused(handle: Any) -> None:
        with pytest.raises(NoTransaction, match="autocommit"):
            await first(Doing(kind, handle))

    async def run() -> None:
        if kind in ASYNC:
            async with opened_async(kind, url, **options) as handle:
                await refused(handle)
        else:
            with opened(kind, url, **options) as handle:
                await refused(handle)

    options: dict[str, Any] = {"autocommit": True} if "psycopg" in kind else {"isolation_level": "AUTOCOMMIT"}
    asyncio.run(run())
    assert keys(url) == []


def test_a_transaction_begun_on_an_autocommit_connection_is_one(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(ZeroDivisionError), connection.transaction():
            assert first_time(connection, SCOPE, "evt_1")
            raise ZeroDivisionError
        with connection.transaction():
            assert first_time(connection, SCOPE, "evt_1")
    assert len(keys(url)) == 1


def test_what_the_user_makes_of_rows_does_not_matter(url: str) -> None:
    def refuse(_cursor: Any) -> Any:
        raise AssertionError("not our rows")

    with psycopg.connect(url, row_factory=refuse) as connection:
        assert first_time(connection, SCOPE, "evt_1")
        assert not first_time(connection, SCOPE, "evt_1")


def test_in_a_pipeline_the_answer_is_waited_for(url: str) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection, connection.pipeline():
            assert await first_time_async(connection, SCOPE, "evt_2")
            assert not await first_time_async(connection, SCOPE, "evt_2")

    with psycopg.connect(url) as connection, connection.pipeline():
        assert first_time(connection, SCOPE, "evt_1")
        assert not first_time(connection, SCOPE, "evt_1")
    asyncio.run(run())
    assert len(keys(url)) == 2


def test_an_async_session_over_a_sync_connection(url: str) -> None:
    engine = sa.create_engine(dialect(url), poolclass=NullPool)

    async def run(connection: sa.Connection) -> list[bool]:
        async with AsyncSession() as session:
            session.sync_session.bind = connection
            found = [await first_time_async(session, SCOPE, "evt_1") for _ in range(2)]
            await session.commit()
            return found

    with engine.begin() as connection:
        assert asyncio.run(run(connection)) == [True, False]
    assert len(keys(url)) == 1
    engine.dispose()


def test_pending_changes_are_left_pending(url: str) -> None:
    """The key comes first, so that two with one key wait for each other there and not at rows of business tables."""

    class Base(sa.orm.DeclarativeBase):
        pass

    class Absent(Base):
        __tablename__ = "absent"
        id: sa.orm.Mapped[int] = sa.orm.mapped_column(primary_key=True)

    with opened("session", url) as session:
        session.add(Absent(id=1))
        assert first_time(session, SCOPE, "evt_1")
        assert len(session.new) == 1


def test_what_is_no_connection_is_named(url: str) -> None:
    with pytest.raises(TypeError, match=r"first_time takes .*, not str$"):
        first_time("session", SCOPE, "a")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match=r"not AsyncSession; use `await first_time_async\(…\)`"):
        first_time(AsyncSession(), SCOPE, "a")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match="first_time_async takes .*, not Session"):
        asyncio.run(first_time_async(Session(), SCOPE, "a"))  # type: ignore[arg-type]  # what is tested


@on_every_kind
async def test_a_ledger_in_another_schema(doing: Doing, url: str) -> None:
    with pytest.raises(SettingsError, match="schema"):
        await first(doing, schema="a\x00")
    with pytest.raises(SchemaError, match="schema 'nowhere' has no consumer tables; run: consumer migrate --schema"):
        await first(doing, schema="nowhere")
    await doing.rollback()
    schema.upgrade(url, "consumer", schema="else where")
    assert await first(doing, doing.kind, schema="else where")
    assert await first(doing, doing.kind)
    await doing.commit()
    assert not await first(doing, doing.kind, schema="else where")


def test_o_77_through_a_transaction_pooler(url: str, own_bouncer: Callable[..., Bouncer]) -> None:
    pooled = own_bouncer(url, pool_size=1).through(url)
    for kind, options in (("session", {"connect_args": {"prepare_threshold": None}}), ("psycopg", {})):
        for n in range(4):
            with opened(kind, pooled, **options) as handle:
                assert first_time(handle, SCOPE, f"{kind} {n // 2}") is (n % 2 == 0)
                handle.commit()


# --- what else there is in the ledger -----------------------------------------------------------------------


def test_no_consumer_takes_a_key_for_an_event(url: str) -> None:
    consumer = Consumer(SCOPE, topics=["payments"])
    consumer.on("paid")(lambda event, session: None)
    with psycopg.connect(url) as connection:
        assert first_time(connection, SCOPE, "evt_1")
    ((_, event_id),) = keys(url)
    now = datetime.now(UTC)
    with psycopg.connect(url) as outbox, psycopg.connect(url) as ledger:
        report = reconcile(consumer, outbox, ledger, since=now - timedelta(days=1), now=now)
        assert (report.compared, list(report.missing), list(report.extra)) == (0, [], [])
        assert Ledger(SCOPE).present(ledger, [event_id]) == set()
        assert Ledger(SCOPE).claim(ledger, [event_id]) == {event_id}


def test_keys_are_forgotten_when_the_consumers_of_the_schema_forget_and_not_without_any(url: str) -> None:
    ledger = Ledger("wallet")
    with psycopg.connect(url, autocommit=True) as connection:
        for days in (10, 40):
            with connection.transaction():
                assert first_time(connection, SCOPE, f"{days} days ago")
            connection.execute(
                "UPDATE processed_messages SET processed_at = now() - make_interval(days => %s) WHERE processed_at > "
                "now() - interval '1 hour'",
                (days,),
            )
        assert ledger.keeper(connection, 0) is None  # no consumer: nobody is there who forgets, nor says since when
        ledger.remember(connection, 30 * DAY, {"payments": (None, DAY)})
        assert ledger.delete_old(connection, ledger.needed_since(connection, DAY), 100) == 1
        with connection.transaction():
            assert not first_time(connection, SCOPE, "10 days ago")
            assert first_time(connection, SCOPE, "40 days ago")
