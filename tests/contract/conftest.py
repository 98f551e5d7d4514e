"""Servers of every kind, for the suites of transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from outbox.embedded import ValkeyServer, redis_servers
from tests.faults.cluster import Cluster


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[str], Cluster]]:
    """A cluster of three primaries by its name in `redis_servers`; each is started once, when first asked for."""
    with ExitStack() as stack:
        started: dict[str, Cluster] = {}

        def cluster(name: str) -> Cluster:
            if name not in started:
                started[name] = stack.enter_context(Cluster(replicas=False, program=redis_servers()[name]))
            return started[name]

        yield cluster


@pytest.fixture(scope="session")
def server_urls() -> Iterator[Callable[[str], str]]:
    """The address of a server by its name in `redis_servers`; each is started once, when first asked for."""
    started: dict[str, ValkeyServer] = {}

    def url(name: str) -> str:
        if name not in started:
            started[name] = ValkeyServer(program=redis_servers()[name]).start()
        return started[name].url

    yield url
    for server in started.values():
        server.close()
