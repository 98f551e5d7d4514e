"""Events are recorded in the caller's transaction, on every kind of connection that is taken."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox import Event, InvalidEvent, NoTransaction, SchemaError, Writer, record, record_async, schema
from outbox.store import Store
from outbox.tables import metadata, outbox_table
from tests.faults.bouncer import Bouncer

SYNC = ["session", "scoped_session", "connection", "psycopg"]
ASYNC = ["async_session", "async_scoped_session", "async_connection", "async_psycopg"]


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


@pytest.fixture(scope="module")
def _module_url(new_database_url: Callable[[], str]) -> str:
    """One database for the module: to clone one for each of its tests takes longer than the tests."""
    url = new_database_url()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE accounts (id text PRIMARY KEY, balance int NOT NULL)")
    return url


@pytest.fixture
def url(_module_url: str) -> str:
    """A migrated database with an empty outbox and one account, A, with nothing on it."""
    with psycopg.connect(_module_url) as connection:
        connection.execute("TRUNCATE outbox, accounts")
        connection.execute("INSERT INTO accounts VALUES ('A', 0)")
    return _module_url


def event(n: int = 1, **fields: Any) -> Event:
    return Event(**{"topic": "payments", "type": "credited", "key": "A", "payload": {"n": n}, **fields})


def dialect(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@contextmanager
def opened(kind: str, url: str, **options: Any) -> Iterator[Any]:
    """What `record` takes, in a transaction that is rolled back unless the test commits it."""
    if kind == "psycopg":
        with psycopg.connect(url, **options) as connection:
            yield connection
            connection.rollback()
        return
    engine = sa.create_engine(dialect(url), poolclass=NullPool, **options)
    if kind == "connection":
        with engine.connect() as connection:
            yield connection
    elif kind == "session":
        with Session(engine) as session:
            yield session
    else:
        scoped = scoped_session(sessionmaker(engine))
        yield scoped
        scoped.remove()


@asynccontextmanager
async def opened_async(kind: str, url: str, **options: Any) -> AsyncIterator[Any]:
    if kind == "async_psycopg":
        async with await psycopg.AsyncConnection.connect(url, **options) as connection:
            yield connection
            await connection.rollback()
        return
    engine = create_async_engine(dialect(url), poolclass=NullPool, **options)
    if kind == "async_connection":
        async with engine.connect() as connection:
            yield connection
    elif kind == "async_session":
        async with AsyncSession(engine) as session:
            yield session
    else:
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        yield scoped
        await scoped.remove()
    await engine.dispose()


class Doing:
    """One way to write for every kind: `do` awaits what is awaitable and passes on the rest."""

    def __init__(self, kind: str, handle: Any) -> None:
        self.kind, self.handle, self.is_async = kind, handle, kind.startswith("async")

    async def execute(self, statement: str) -> Any:
        text: Any = statement if "psycopg" in self.kind else sa.text(statement)
        return await self._settled(self.handle.execute(text))

    async def record(self, *events: Event, writer: Writer | None = None) -> None:
        chosen = writer or Writer()
        if self.is_async:
            await chosen.record_async(self.handle, *events)
        else:
            chosen.record(self.handle, *events)

    async def commit(self) -> None:
        await self._settled(self.handle.commit())

    async def rollback(self) -> None:
        await self._settled(self.handle.rollback())

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        nested = self.handle.transaction() if "psycopg" in self.kind else self.handle.begin_nested()
        if self.is_async:
            async with nested:
                yield
        else:
            with nested:
                yield

    @staticmethod
    async def _settled(value: Any) -> Any:
        return await value if hasattr(value, "__await__") else value


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


def rows(url: str, columns: str = "event_id, key, version, type, data") -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(sql.SQL(f"SELECT {columns} FROM outbox ORDER BY position")).fetchall()  # noqa: S608 - ours


def balance(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT balance FROM accounts").fetchone()
    assert row is not None
    return int(row[0])


CREDIT = "UPDATE accounts SET balance = balance + {}"


@on_every_kind
async def test_an_event_is_recorded_with_the_business_data(doing: Doing, url: str) -> None:
    made = event(version=3, time=datetime(2026, 1, 2, tzinfo=UTC), source="/bank", headers={"traceparent": "x é"})
    await doing.execute(CREDIT.format(50))
    await doing.record(made)
    assert rows(url) == []
    await doing.commit()
    columns = "event_id, topic, type, key, version, data, content_type, time, source, headers"
    assert rows(url, columns) == [
        (made.id, "payments", "credited", "A", 3, b'{"n":1}', None, made.time, "/bank", {"traceparent": "x é"})
    ]
    assert balance(url) == 50


@on_every_kind
async def test_what_is_absent_is_null(doing: Doing, url: str) -> None:
    await doing.record(event(key=None), event(payload=b"\xff", content_type="a/b"))
    await doing.commit()
    columns = "key, version, content_type, time, source, headers"
    assert rows(url, columns) == [(None,) * 6, ("A", None, "a/b", None, None, None)]


@on_every_kind
async def test_an_event_is_rolled_back_with_the_business_data(doing: Doing, url: str) -> None:
    await doing.execute(CREDIT.format(50))
    await doing.record(event())
    await doing.rollback()
    assert (rows(url), balance(url)) == ([], 0)


@on_every_kind
async def test_o_76_a_savepoint_that_is_rolled_back_publishes_nothing(doing: Doing, url: str) -> None:
    await doing.execute(CREDIT.format(50))
    kept = event(50)
    await doing.record(kept)
    with pytest.raises(ZeroDivisionError):
        async with doing.savepoint():
            await doing.execute(CREDIT.format(20))
            await doing.record(event(20))
            raise ZeroDivisionError
    await doing.commit()
    assert (rows(url, "event_id"), balance(url)) == ([(kept.id,)], 50)


@on_every_kind
async def test_o_76_an_outer_rollback_undoes_a_released_savepoint(doing: Doing, url: str) -> None:
    await doing.execute(CREDIT.format(50))
    async with doing.savepoint():
        await doing.record(event())
    await doing.rollback()
    assert (rows(url), balance(url)) == ([], 0)


@on_every_kind
async def test_many_events_keep_their_order_and_their_transaction(doing: Doing, url: str) -> None:
    made = [event(n, version=n) for n in range(1000)]
    await doing.record(*made)
    await doing.record()
    await doing.commit()
    assert [row[0] for row in rows(url)] == [one.id for one in made]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(DISTINCT xid) FROM outbox").fetchone() == (1,)


@on_every_kind
async def test_an_id_without_an_instant_gets_the_time_of_recording(doing: Doing, url: str) -> None:
    """A UUIDv7 says when it was made; for one that is derived or random the writer's clock does."""
    before, given = datetime.now(UTC), datetime(2026, 1, 2, tzinfo=UTC)
    ids = [uuid.uuid4(), uuid.uuid5(uuid.NAMESPACE_URL, "a")]
    await doing.record(event(), *(event(id=one) for one in ids), event(id=uuid.uuid4(), time=given))
    await doing.commit()
    with_instant, *(times), own = [time for (time,) in rows(url, "time")]
    assert (with_instant, own) == (None, given)
    assert len(times) == 2
    assert all(before <= time <= datetime.now(UTC) for time in times)


@on_every_kind
async def test_two_events_of_one_id_are_refused_in_one_call(doing: Doing, url: str) -> None:
    """Consumers would take the second for the first again, and it would be lost without a word."""
    one = event(1)
    with pytest.raises(InvalidEvent, match=f"id: two events of one call have {one.id}") as refused:
        await doing.record(one, event(2), event(3, id=one.id))
    assert refused.value.field == "id"
    await doing.record(one)
    await doing.commit()
    assert len(rows(url)) == 1


@on_every_kind
async def test_a_refusal_leaves_the_transaction_usable(doing: Doing, url: str) -> None:
    await doing.execute(CREDIT.format(50))
    with pytest.raises(InvalidEvent, match="payload: has 101 bytes, more than the limit of 100"):
        await doing.record(event(), event(payload="x" * 99), writer=Writer(max_payload_bytes=100))
    with pytest.raises(InvalidEvent, match="events: at most 1000 in one call, are 1001"):
        await doing.record(*[event()] * 1001)
    with pytest.raises(TypeError, match="record takes Events"):
        await doing.record({"topic": "payments"})  # type: ignore[arg-type]  # what is tested
    await doing.record(event(payload="x" * 98), writer=Writer(max_payload_bytes=100))
    await doing.commit()
    assert (len(rows(url)), balance(url)) == (1, 50)


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        ({"payload": [1, [float("nan")]]}, "payload[1][0]"),
        ({"payload": [float("inf")]}, "payload[0]"),
        ({"payload": [-float("inf")]}, "payload[0]"),
        ({"payload": {"t": "\ud800"}}, "payload.t"),
        ({"key": "a\x00b"}, "key"),
    ],
)
@pytest.mark.parametrize("kind", ["session", "psycopg"])
def test_o_66_and_o_67_what_cannot_be_held_is_refused_and_the_business_row_commits(
    url: str, kind: str, broken: dict[str, Any], field: str
) -> None:
    with opened(kind, url) as session:
        session.execute(sa.text(CREDIT.format(50)) if kind == "session" else CREDIT.format(50))
        with pytest.raises(InvalidEvent) as refused:
            record(session, event(**broken))
        session.execute(sa.text("SELECT 1") if kind == "session" else "SELECT 1")
        session.commit()
    assert refused.value.field == field
    assert (rows(url), balance(url)) == ([], 50)


# --- before and around the insert ---------------------------------------------------------------------------


def statements(handle: Any) -> list[str]:
    """The statements that the engine of a session or connection sends from now on."""
    sent: list[str] = []
    engine = handle.get_bind() if isinstance(handle, Session) else handle.engine

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        sent.append(statement.split()[0])

    return sent


def test_pending_changes_are_flushed_before_one_insert(url: str) -> None:
    with opened("session", url) as session:
        sent = statements(session)
        with session.no_autoflush:
            session.get_one(Account, "A").balance = 7
            session.add(Account(id="B", balance=1))
            record(session, *[event(n) for n in range(100)])
        assert sent[0] == "SELECT"
        assert sorted(sent[1:-1]) == ["INSERT", "UPDATE"]
        assert sent[-1] == "INSERT"
        session.commit()
    assert len(rows(url)) == 100


def test_an_async_session_is_flushed_before_the_insert_too(url: str) -> None:
    async def run() -> list[str]:
        async with opened_async("async_session", url) as session:
            sent = statements(session.sync_session)
            session.add(Account(id="B", balance=1))
            await record_async(session, event(1), event(2))
            await session.commit()
            return sent

    assert asyncio.run(run()) == ["INSERT", "INSERT"]
    assert len(rows(url)) == 2


def test_an_async_session_over_a_sync_connection_records_on_that_connection(url: str) -> None:
    """As one that an async handler is given: the consumer's own connection is not asynchronous."""
    engine = sa.create_engine(dialect(url), poolclass=NullPool)

    async def run(connection: sa.Connection) -> None:
        async with AsyncSession() as session:
            session.sync_session.bind = connection
            session.add(Account(id="B", balance=1))
            await record_async(session, event())
            await session.commit()  # of the session: the transaction of the connection goes on

    with engine.connect() as connection, connection.begin() as transaction:
        asyncio.run(run(connection))
        transaction.rollback()
    assert rows(url) == []
    with engine.begin() as connection:
        asyncio.run(run(connection))
    assert len(rows(url)) == 1
    engine.dispose()


class _Counting(psycopg.Cursor[Any]):
    sent: list[str]

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        _Counting.sent.append(query if isinstance(query, str) else query.as_string(self))
        return super().execute(query, *arguments, **options)


def test_many_events_on_psycopg_are_one_statement(url: str) -> None:
    _Counting.sent = []
    with psycopg.connect(url, cursor_factory=_Counting) as connection:
        record(connection, *[event(n) for n in range(100)])
        record(connection)
        assert len(_Counting.sent) == 1


@pytest.mark.parametrize("kind", SYNC)
def test_autocommit_is_refused_before_any_sql(url: str, kind: str) -> None:
    options: dict[str, Any] = {"autocommit": True} if kind == "psycopg" else {"isolation_level": "AUTOCOMMIT"}
    with opened(kind, url, **options) as handle:
        sent = [] if kind == "psycopg" else statements(handle() if kind == "scoped_session" else handle)
        if kind in ("session", "scoped_session"):
            handle.add(Account(id="B", balance=1))
        with pytest.raises(NoTransaction, match="autocommit") as refused:
            record(handle, event())
        assert not refused.value.retryable
        assert sent == []
        if kind == "psycopg":
            assert handle.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert rows(url) == []


@pytest.mark.parametrize("kind", ASYNC)
def test_autocommit_is_refused_on_async_connections_too(url: str, kind: str) -> None:
    options: dict[str, Any] = {"autocommit": True} if kind == "async_psycopg" else {"isolation_level": "AUTOCOMMIT"}

    async def run() -> None:
        async with opened_async(kind, url, **options) as handle:
            with pytest.raises(NoTransaction, match="autocommit"):
                await record_async(handle, event())

    asyncio.run(run())
    assert rows(url) == []


def test_a_transaction_begun_on_an_autocommit_connection_is_one(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        with connection.transaction():
            record(connection, event(1))
        with pytest.raises(ZeroDivisionError), connection.transaction():
            record(connection, event(2))
            raise ZeroDivisionError
    assert [row[-1] for row in rows(url)] == [b'{"n":1}']


@pytest.mark.parametrize("kind", SYNC + ASYNC)
def test_o_77_through_a_transaction_pooler(kind: str, url: str, own_bouncer: Callable[..., Bouncer]) -> None:
    """Two sessions, and another client at both of them: nothing of ours needs the same one again."""
    pooled = own_bouncer(url, pool_size=2).through(url)
    given = {"prepare_threshold": None}
    options: dict[str, Any] = given if "psycopg" in kind else {"connect_args": given}

    async def work(handle: Any) -> None:
        doing = Doing(kind, handle)
        with psycopg.connect(pooled, prepare_threshold=None) as other:
            for n in range(12):
                other.rollback()
                await doing.execute(CREDIT.format(1))  # in the session that `other` had
                other.execute("SELECT 1")  # in a transaction: takes the one that we had
                async with doing.savepoint():
                    await doing.record(event(n), event(n))
                await (doing.rollback() if n % 3 == 2 else doing.commit())

    async def run() -> None:
        if kind in ASYNC:
            async with opened_async(kind, pooled, **options) as handle:
                await work(handle)
        else:
            with opened(kind, pooled, **options) as handle:
                await work(handle)

    asyncio.run(run())
    assert balance(url) == 8
    assert [data for (data,) in rows(url, "data")] == [
        f'{{"n":{n}}}'.encode() for n in range(12) if n % 3 != 2 for _ in "ab"
    ]


def test_o_77_the_sql_function_through_a_transaction_pooler(url: str, own_bouncer: Callable[..., Bouncer]) -> None:
    pooled = own_bouncer(url, pool_size=1).through(url)
    for n in range(3):
        with psycopg.connect(pooled, prepare_threshold=None) as connection:
            connection.execute("SELECT public.outbox_record('payments', 'credited', %s)", (f'{{"n":{n}}}',))
    assert [data for (data,) in rows(url, "data")] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']


def test_what_is_no_connection_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(TypeError, match="not str"):
        record("postgresql://", event())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match=r"record_async"):
        record(AsyncSession(), event())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(TypeError, match=r"not Session"):
        asyncio.run(record_async(Session(), event()))  # type: ignore[arg-type]  # what is tested


def test_every_retry_keeps_the_events_id(url: str) -> None:
    made = event()
    for commit in (False, True):
        with opened("session", url) as session:
            record(session, made)
            if commit:
                session.commit()
    assert [row[0] for row in rows(url)] == [made.id]


def test_no_payload_is_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with opened("psycopg", url) as connection:
        record(connection, event(payload="S3cr3t"))
    assert "S3cr3t" not in caplog.text


# --- schemas and search_path --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SYNC)
def test_an_empty_search_path_does_no_harm(url: str, kind: str) -> None:
    with opened(kind, url) as handle:
        empty = "SET LOCAL search_path = ''"
        handle.execute(empty if kind == "psycopg" else sa.text(empty))
        record(handle, event())
        handle.commit()
    assert len(rows(url)) == 1


@pytest.mark.parametrize("name", ["tenant_a", "TenantA", "tenant-a", "select", "té", "a.b c"])
def test_o_89_events_go_to_the_schema_they_are_meant_for(url: str, name: str) -> None:
    schema.upgrade(url, "outbox", schema=name)
    writer = Writer(schema=name)
    for kind in ("psycopg", "session", "connection"):
        with opened(kind, url) as handle:
            writer.record(handle, event(headers={"a": "b"}))
            handle.commit()
    with psycopg.connect(url) as connection:
        here = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(name, "outbox"))).fetchone()
    assert (here, rows(url)) == ((3,), [])


@pytest.mark.filterwarnings("ignore:Did not recognize type")  # xid8, pg_snapshot: by SQLAlchemy's reflection
def test_autogenerate_of_a_users_own_alembic_leaves_our_tables_alone(database_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with schema.connect(database_url, "test", autocommit=True) as connection:
        assert Store().make_partitions(connection, 1000, 2) == 3
    engine = schema.engine(database_url, "test", poolclass=NullPool)
    wanted = sa.MetaData()
    sa.Table("outbox_of_mine", wanted, sa.Column("id", sa.Integer, primary_key=True))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_object": schema.include_object})
        assert [(*change[:1], change[1].name) for change in compare_metadata(context, wanted)] == [
            ("add_table", "outbox_of_mine")
        ]


@pytest.mark.filterwarnings("ignore:Did not recognize type")  # xid8, pg_snapshot: by SQLAlchemy's reflection
@pytest.mark.parametrize("name", ["public", "TenantA", "té"])
def test_metadata_is_what_the_migrations_make(empty_database_url: str, name: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    schema.upgrade(empty_database_url, "outbox", schema=name)
    ours = set(metadata(name).tables)

    def include(_object: Any, found: str | None, kind: str, reflected: bool, _compared: Any) -> bool:
        return not (kind == "table" and reflected and f"{name}.{found}" not in ours)

    options = {
        "include_schemas": True, "include_object": include, "compare_type": True, "compare_server_default": True,
        "include_name": lambda found, kind, _parents: kind != "schema" or found == name,
    }  # fmt: skip
    engine = schema.engine(empty_database_url, "test", poolclass=NullPool)
    with engine.connect() as connection:
        # So that even the default schema is compared by its name.
        connection.execute(sa.text("SET search_path = ''"))
        connection.dialect.default_schema_name = ""
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata(name)) == []
        broken = sa.MetaData()
        for table in metadata(name).tables.values():
            table.to_metadata(broken)
        broken.tables[f"{name}.outbox"].append_column(sa.Column("extra", sa.Text))
        assert len(compare_metadata(context, broken)) == 1
        found = {
            t: {c["name"] for c in sa.inspect(connection).get_columns(t, name)} for t in ("outbox", "outbox_batch")
        }
    assert found == {t: set(metadata(name).tables[f"{name}.{t}"].columns.keys()) for t in found}


def test_the_default_is_the_schema_public() -> None:
    assert outbox_table().schema == "public"


# --- producers in plain SQL, and people with psql -----------------------------------------------------------


def test_the_sql_function_records_like_the_library(url: str) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    with psycopg.connect(url) as connection:
        connection.execute("SET LOCAL search_path = ''")
        (made,) = connection.execute(
            "SELECT public.outbox_record('payments', 'credited', %s, p_key => 'A', p_version => 3, "
            "p_headers => %s, p_source => '/bank')",
            ('{ "n": 1.10, "t": "é😀" }', '{"traceparent": "x"}'),
        ).fetchone() or (None,)
    (row,) = rows(url, "event_id, topic, type, key, version, data, content_type, source, headers")
    assert row == (
        made, "payments", "credited", "A", 3, '{ "n": 1.10, "t": "é😀" }'.encode(), None, "/bank", {"traceparent": "x"}
    )  # fmt: skip
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    at = datetime.fromtimestamp((made.int >> 80) / 1000, UTC)
    assert before <= at <= datetime.now(UTC) + timedelta(milliseconds=1)


def test_ids_of_the_sql_function_are_valid_and_distinct_and_one_may_be_given(url: str) -> None:
    given = uuid.uuid4()
    with psycopg.connect(url) as connection:
        made = [
            row[0] for row in connection.execute("SELECT outbox_record('a', 'b', '1') FROM generate_series(1, 500)")
        ]
        connection.execute("SELECT outbox_record('a', 'b', '1', p_id => %s)", (given,))
    assert len(set(made)) == 500
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    assert rows(url)[-1][0] == given


@pytest.mark.parametrize(
    ("column", "value", "constraint"),
    [
        ("topic", "a b", "outbox_topic_name"),
        ("topic", "{a}", "outbox_topic_name"),
        ("topic", "a\n", "outbox_topic_name"),
        ("topic", "t" * 201, "outbox_topic_name"),
        ("type", "", "outbox_type_length"),
        ("key", "k" * 201, "outbox_key_length"),
        ("version", -1, "outbox_version_not_negative"),
        ("source", "", "outbox_source_length"),
        ("content_type", "é", "outbox_content_type_ascii"),
        ("headers", '{"A": "x"}', "outbox_headers_strings"),
        ("headers", '{"": "x"}', "outbox_headers_strings"),
        ("headers", '{"a-b": "x"}', "outbox_headers_strings"),
        ("headers", '{"id": "x"}', "outbox_headers_strings"),
        ("headers", '{"batch": "7"}', "outbox_headers_strings"),
        ("headers", '{"a": 1}', "outbox_headers_strings"),
        ("headers", '{"a": null}', "outbox_headers_strings"),
        ("headers", '{"a": ["x"]}', "outbox_headers_strings"),
        ("headers", '{"a": []}', "outbox_headers_strings"),
        ("headers", '{"a": {"b": "c"}}', "outbox_headers_strings"),
        ("headers", "[]", "outbox_headers_strings"),
        ("headers", '["a"]', "outbox_headers_strings"),
        ("headers", '[{"a": "b"}]', "outbox_headers_strings"),
        ("headers", '"a"', "outbox_headers_strings"),
        ("headers", "null", "outbox_headers_strings"),
        ("topic", "queue/", "outbox_queue_name"),
        ("topic", "queue/a/b", "outbox_queue_name"),
        ("topic", "queue/-a", "outbox_queue_name"),
        ("topic", "queue/" + "q" * 101, "outbox_queue_name"),
        ("headers", json.dumps({f"h{n}": "" for n in range(33)}), "outbox_headers_number"),
        ("headers", json.dumps({"h": "x" * 70_000}), "outbox_headers_size"),
    ],
)
def test_the_table_refuses_what_the_library_would(url: str, column: str, value: Any, constraint: str) -> None:
    fields = {"event_id": uuid.uuid4(), "topic": "a", "type": "b", "data": b"1", column: value}
    statement = sql.SQL("INSERT INTO outbox ({}) VALUES ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, fields)), sql.SQL(", ").join(sql.Placeholder() * len(fields))
    )
    with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(statement, list(fields.values()))
    assert refused.value.diag.constraint_name == constraint


def test_the_table_takes_the_most_that_the_library_would(url: str) -> None:
    most = {f"h{n:039d}": '"' * 1024 for n in range(32)}
    with psycopg.connect(url) as connection:
        connection.execute(
            "SELECT outbox_record(%s, 'b', '1', p_headers => %s)", ("queue/" + "q" * 100, json.dumps(most))
        )
        record(connection, Event(topic="a", type="b", payload=1, headers=most))


def test_o_94_values_in_the_sql_function_are_only_ever_values(url: str) -> None:
    nasty = "x'); SELECT pg_sleep(5)--\"; DROP TABLE accounts; --"
    with psycopg.connect(url) as connection:
        connection.execute(
            "SELECT outbox_record('a', %s, to_json(%s::text), p_key => %s, p_source => %s)", (nasty,) * 4
        )
        record(connection, event(type=nasty, key=nasty, payload=nasty))
    assert [row[3] for row in rows(url)] == [nasty, nasty]
    assert balance(url) == 0


def test_the_view_shows_json_and_null_for_the_rest(url: str) -> None:
    kinds = [
        event(payload={"n": 9007199254740993}),
        event(payload=None),
        event(payload=b'{"a": 1}', content_type="application/vnd.x+json; charset=utf-8"),
        event(payload=b'{"a": 1}', content_type="text/plain"),
        event(payload=b"\xff\x00", content_type="application/octet-stream"),
    ]
    with psycopg.connect(url) as connection:
        record(connection, *kinds)
        for data in (b"{", b"\xff", b"\x00", b"[" * 100_000):
            connection.execute(
                "INSERT INTO outbox (event_id, topic, type, data) VALUES (gen_random_uuid(), 'a', 'b', %s)", (data,)
            )
    with psycopg.connect(url) as connection:
        connection.execute("SET search_path = ''")
        found = connection.execute(
            "SELECT payload::text, content_type, payload_bytes FROM public.outbox_events ORDER BY position"
        ).fetchall()
    json = "application/json"
    assert found == [
        ('{"n":9007199254740993}', json, 22),
        ("null", json, 4),
        ('{"a": 1}', "application/vnd.x+json; charset=utf-8", 8),
        (None, "text/plain", 8),
        (None, "application/octet-stream", 2),
        (None, json, 1), (None, json, 1), (None, json, 1), (None, json, 100_000),
    ]  # fmt: skip


# --- no tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["the tables", "the schema"])
@pytest.mark.parametrize("kind", SYNC + ASYNC)
def test_tables_that_are_not_migrated_are_named_with_what_to_run(url: str, kind: str, missing: str) -> None:
    name = f"empty_{kind}" if missing == "the tables" else "no_such_schema"
    if missing == "the tables":
        with psycopg.connect(url) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(name)))
    told = rf"schema '{name}' has no outbox tables; run: outbox migrate --schema '{name}'"
    writer = Writer(schema=name)

    async def run() -> BaseException | None:
        async with opened_async(kind, url) as handle:
            with pytest.raises(SchemaError, match=told) as refused:
                await writer.record_async(handle, event())
        return refused.value.__cause__

    cause: Any
    if kind in ASYNC:
        cause = asyncio.run(run())
    else:
        with opened(kind, url) as handle, pytest.raises(SchemaError, match=told) as refused:
            writer.record(handle, event())
        cause = refused.value.__cause__
    assert getattr(cause, "orig", cause).sqlstate == "42P01"


def test_a_table_of_the_users_that_is_missing_is_not_taken_for_ours(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("ALTER TABLE accounts RENAME TO elsewhere")
    try:
        with opened("session", url) as session:
            session.add(Account(id="B", balance=1))
            with pytest.raises(sa.exc.ProgrammingError, match='relation "accounts" does not exist'):
                record(session, event())
    finally:
        with psycopg.connect(url) as connection:
            connection.execute("ALTER TABLE elsewhere RENAME TO accounts")
