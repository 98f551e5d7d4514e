"""Pytest fixtures: real servers, and a migrated database of its own for every test.

The entry point ``pytest11`` names this module. It stands beside the packages, and imports nothing of them before a test asks
for one of its fixtures: whoever has the distribution installed pays no start-up time for it in other projects' tests.

A server is taken from DATABASE_URL / REDIS_URL; or, with OUTBOX_TEST_CONTAINERS=1 and a running container engine, from a
container; otherwise from the wheels of the extra `testing`. It is started by the first test that wants it, one for each
worker of pytest-xdist. A server that cannot be had is a skip with the reason, and a failure where CI is set.

Names are random everywhere: runs and workers may share a server. Nothing here flushes a server, or touches a database that
it has not made.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

if TYPE_CHECKING:
    import sqlalchemy

    from consumer import Consumer
    from outbox.embedded import EmbeddedServer

    _Server = TypeVar("_Server", bound=EmbeddedServer)

_T = TypeVar("_T")
_USED = pytest.StashKey[dict[str, str]]()  # "postgres" or "redis" -> product, version and where it came from
_PASSWORD = "postgres"  # of containers that only this run knows
_IMAGES = {"postgres": ("postgres:18", 5432), "redis": ("valkey/valkey:9", 6379)}
_CONTAINER_SECONDS = 60.0  # until what runs in a container must answer
_CONNECT_SECONDS = 10


# --- what users' tests ask for -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def outbox_prepare() -> Callable[[sqlalchemy.Engine], object]:
    """Override it in your top conftest.py to make your own tables: a function that is called once with a SQLAlchemy engine
    of the database that the tests' databases are cloned from, e.g. ``Base.metadata.create_all``."""
    return lambda engine: None


@pytest.fixture
def outbox_database_url(outbox_postgres_url: str, _outbox_template: str) -> Iterator[str]:
    """A database of the test's own, with the tables of both sides and those of `outbox_prepare`; as psycopg takes it."""
    with new_database(outbox_postgres_url, template=_outbox_template) as url:
        yield url


@pytest.fixture
def outbox_engine(outbox_database_url: str) -> Iterator[sqlalchemy.Engine]:
    """A SQLAlchemy engine (over psycopg 3) on `outbox_database_url`."""
    engine = _engine(outbox_database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox_key_prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """What all keys of the test begin with (OUTBOX_KEY_PREFIX); those with it in their names are gone afterwards."""
    unique = f"t{secrets.token_hex(4)}"
    url = request.getfixturevalue("outbox_redis_url") if "outbox_redis_url" in request.fixturenames else None
    yield f"{unique}:"
    if url is not None:
        _remove_keys(url, f"*{unique}*")


@pytest.fixture
def outbox_run(outbox_database_url: str, outbox_redis_url: str, outbox_key_prefix: str) -> Callable[..., Counter[str]]:
    """``outbox_run(consumer)`` publishes what was recorded and processes what is due now, with a real relay and a real
    worker; returns how many deliveries ended how: ``{"applied": 2, "duplicate": 1}``. It takes several consumers, too.

    Call it again for what came to be due meanwhile. Settings other than the addresses come from the environment.
    """

    def run(*consumers: Consumer) -> Counter[str]:
        from consumer.settings import ConsumerSettings
        from consumer.worker import Worker
        from outbox.relay import Relay
        from outbox.settings import RelaySettings

        where: dict[str, Any] = {
            "database_url": outbox_database_url, "redis_url": outbox_redis_url, "key_prefix": outbox_key_prefix,
        }  # fmt: skip
        relay = Relay(RelaySettings(**where))
        try:
            relay.run_once()
        finally:
            relay.close()
        ended: Counter[str] = Counter()
        for consumer in consumers:
            worker = Worker(consumer, ConsumerSettings(**where, block_seconds=0.01))
            try:
                while counts := worker.run_once():
                    ended.update({str(outcome): number for outcome, number in counts.items()})
            finally:
                worker.close()
        return ended

    return run


# --- servers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def outbox_postgres_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """A database of the session's PostgreSQL server, as a role that may create databases; leave it as it is."""
    import psycopg

    from outbox.embedded import PostgresServer
    from outbox.settings import database_address

    with _server("postgres", "DATABASE_URL", PostgresServer, settings={"fsync": "off"}) as (origin, url):
        url = database_address(url)
        connect = partial(psycopg.connect, url, connect_timeout=_CONNECT_SECONDS)
        with _answer(origin, connect, psycopg.OperationalError) as connection:
            version = connection.info.parameter_status("server_version")
        pytestconfig.stash.setdefault(_USED, {})["postgres"] = f"PostgreSQL {version} {origin}"
        yield url


@pytest.fixture(scope="session")
def outbox_redis_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """The session's Valkey or Redis server; shared, so all keys of a test begin with its `outbox_key_prefix`."""
    from outbox.embedded import ValkeyServer
    from outbox.errors import TransportError
    from outbox.settings import redis_address

    with _server("redis", "REDIS_URL", ValkeyServer) as (origin, url):
        url = redis_address(url)
        product, version = _answer(origin, partial(_product, url), TransportError)
        pytestconfig.stash.setdefault(_USED, {})["redis"] = f"{product} {version} {origin}"
        yield url


@pytest.fixture(scope="session")
def _outbox_template(outbox_postgres_url: str, outbox_prepare: Callable[[sqlalchemy.Engine], object]) -> Iterator[str]:
    """Name of a database with all tables, to be cloned; nobody stays connected to it."""
    from sqlalchemy.pool import NullPool

    from outbox import schema

    with new_database(outbox_postgres_url) as url:
        schema.upgrade(url, "outbox", schema=os.environ.get("OUTBOX_SCHEMA", "public"))
        schema.upgrade(url, "consumer", schema=os.environ.get("CONSUMER_SCHEMA", "public"))
        engine = _engine(url, poolclass=NullPool)
        outbox_prepare(engine)
        with engine.connect() as connection:
            name, others = connection.exec_driver_sql(
                "SELECT current_database(), (SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid())"
            ).one()
        if others:
            pytest.fail(
                "outbox_prepare left a connection open: a database is cloned only while nobody is connected to it"
            )
        yield name


@contextmanager
def new_database(server_url: str, *, template: str = "template0") -> Iterator[str]:
    """A database that is gone afterwards; gives its address."""
    import psycopg
    from psycopg import sql

    name = f"test_{secrets.token_hex(6)}"
    statement = "CREATE DATABASE {} TEMPLATE {}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        try:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Identifier(template)))
        except psycopg.errors.InsufficientPrivilege:
            role = connection.info.user
            pytest.fail(
                f"the role {role} of DATABASE_URL may not create a database for each test: it needs CREATEDB "
                "(or unset DATABASE_URL, and a server is started)",
                pytrace=False,
            )
    try:
        yield _with_database(server_url, name)
    finally:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def started(kind: type[_Server], **options: Any) -> _Server:
    """A server of `outbox.embedded`, running; without its program the test is skipped, or fails where CI is set."""
    from outbox.embedded import EmbeddedServerError

    try:
        server = kind(**options)
    except EmbeddedServerError as error:  # not found; one that is found must start
        missing(str(error))
    with _memory():
        return server.start()


def missing(reason: str) -> NoReturn:
    """Skip the test for want of a server; where CI is set it fails."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"{reason} (CI is set, so this is no skip)", pytrace=False)
    pytest.skip(reason)


@contextmanager
def _server(name: str, variable: str, kind: type[EmbeddedServer], **options: Any) -> Iterator[tuple[str, str]]:
    """Where the server is from, and its address."""
    with ExitStack() as stack:
        if url := os.environ.get(variable):
            yield variable, url
        elif _containers():
            yield "container", stack.enter_context(_container(name))
        else:
            yield "embedded", stack.enter_context(started(kind, **options)).url


def _answer(origin: str, ask: Callable[[], _T], error: type[Exception]) -> _T:
    """What a server says; a container is still starting, the others run."""
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    seconds = _CONTAINER_SECONDS if origin == "container" else 0
    try:
        return Retrying(
            stop=stop_after_delay(seconds), wait=wait_fixed(0.1), retry=retry_if_exception_type(error), reraise=True
        )(ask)
    except error as reason:
        missing(f"the server of {origin} cannot be reached: {' '.join(str(reason).split())}")


@contextmanager
def _memory() -> Iterator[None]:
    """Temporary directories are made in memory meanwhile, where there is enough: databases are cloned ten times as fast."""
    before, memory = tempfile.tempdir, Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 << 30:
        tempfile.tempdir = str(memory)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _containers() -> bool:
    """Whether containers were asked for and an engine runs."""
    if os.environ.get("OUTBOX_TEST_CONTAINERS") != "1":
        return False
    try:
        from docker import DockerClient  # type: ignore[import-untyped]  # no stubs in the wheel
        from docker.errors import DockerException  # type: ignore[import-untyped]
    except ImportError:
        missing("OUTBOX_TEST_CONTAINERS=1 needs testcontainers; run: pip install testcontainers")
    try:
        return bool(DockerClient.from_env().ping())
    except DockerException:
        return False


@contextmanager
def _container(name: str) -> Iterator[str]:
    """Run a container; gives the address at which it will answer."""
    from testcontainers.core.container import DockerContainer

    image, port = _IMAGES[name]
    wanted = DockerContainer(image).with_exposed_ports(port).with_env("POSTGRES_PASSWORD", _PASSWORD)
    with wanted as container:
        address = f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"
        yield f"postgresql://postgres:{_PASSWORD}@{address}/postgres" if name == "postgres" else f"redis://{address}/0"


def _with_database(url: str, name: str) -> str:
    """The address of another database of the server; a URL, also where the given one is ``key=value``."""
    from urllib.parse import quote, urlencode

    from psycopg.conninfo import conninfo_to_dict

    if "://" not in url:
        given = {key: value for key, value in conninfo_to_dict(url).items() if key != "dbname"}
        url = f"postgresql://?{urlencode(given, quote_via=quote)}"
    return re.sub("^(postgresql://[^/?]*)(/[^?]*)?", rf"\1/{name}", url)


def _engine(url: str, **options: Any) -> sqlalchemy.Engine:
    """With the address in ``engine.url``, as a user's migrations want it."""
    import sqlalchemy

    return sqlalchemy.create_engine(f"postgresql+psycopg{url.removeprefix('postgresql')}", **options)


def _product(url: str) -> tuple[str, str]:
    """Name and version of what answers."""
    from outbox.transport.connect import connect
    from outbox.transport.servers import answer

    servers = connect(url, timeout_seconds=_CONNECT_SECONDS)
    try:
        for server in servers.nodes().values():
            lines = answer(server, "", (b"INFO", "server")).decode().splitlines()
            said = dict(line.split(":", 1) for line in lines if ":" in line)
            product = "valkey" if "valkey_version" in said else "redis"
            return product.title(), said[f"{product}_version"]
    finally:
        servers.close()
    raise AssertionError("a cluster has a server")


def _remove_keys(url: str, pattern: str) -> None:
    from outbox.transport.connect import connect
    from outbox.transport.servers import answer

    servers = connect(url, timeout_seconds=_CONNECT_SECONDS)
    try:
        for server in servers.nodes().values():
            cursor: Any = b"0"
            while True:
                cursor, keys = answer(server, "", (b"SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
                server.run([(key, (b"UNLINK", key)) for key in keys])
                if cursor == b"0":
                    break
    finally:
        servers.close()


# --- what is said at the end ---------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["outbox_servers"] = session.config.stash.get(_USED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist ended: its servers are the session's."""
    if servers := getattr(node, "workeroutput", {}).get("outbox_servers"):
        node.config.stash.setdefault(_USED, {}).update(servers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if used := config.stash.get(_USED, {}):
        terminalreporter.write_line(f"servers: {', '.join(used.values())}")
