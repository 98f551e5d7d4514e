"""Jobs while everything around Redis is killed at random; see `tests.faults.fire`. Longer: ``make fire SECONDS=60``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from outbox.embedded import ValkeyServer, redis_servers
from pytest_outbox import missing
from tests.faults.cluster import Cluster
from tests.faults.fire.run import Fire

pytestmark = [pytest.mark.xdist_group("soak"), pytest.mark.timeout(240)]  # each has fifteen processes
SECONDS = 8


@pytest.mark.parametrize(
    "server",
    ["valkey9", pytest.param("redis8", marks=pytest.mark.long), pytest.param("redis7", marks=pytest.mark.long)],
)
def test_o_17_accepted_jobs_are_done_once_and_never_early_whoever_is_killed(
    database_url: str, own_valkey: Callable[..., ValkeyServer], server: str, tmp_path: Path
) -> None:
    url = own_valkey(server).url
    with redis.Redis.from_url(url) as client, Fire(database_url, url, [client], tmp_path) as fire:
        tally = fire.run(SECONDS)
    assert min(tally[f"{role}s killed"] for role in ("producer", "worker", "scheduler", "relay")) > 0
    assert tally["recorded"] > 50
    assert tally["enqueued"] > 50
    assert tally["with a delay"] > 50


@pytest.mark.long
@pytest.mark.parametrize("server", ["valkey9", "redis8", "redis7"])
def test_o_17_on_a_cluster(database_url: str, server: str, tmp_path: Path) -> None:
    program = redis_servers().get(server) or missing(f"no {server}")
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(replicas=False, program=program))
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in cluster.nodes]
        fire = stack.enter_context(Fire(database_url, cluster.url, clients, tmp_path))
        assert fire.run(SECONDS)["accepted"] > 100


@pytest.mark.long
def test_recorded_jobs_are_done_although_redis_is_emptied_meanwhile(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    url = own_valkey().url
    with redis.Redis.from_url(url) as client, Fire(database_url, url, [client], tmp_path, flush=True) as fire:
        tally = fire.run(SECONDS)
    assert tally["times emptied"] >= 2
    assert tally["accepted"] > 100
