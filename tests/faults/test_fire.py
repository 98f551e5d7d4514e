"""Jobs while everything around Redis is killed at random; see `tests.faults.fire`. Longer: ``make fire SECONDS=60``."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from outbox.embedded import ValkeyServer, redis_servers
from pytest_outbox import missing
from tests.faults.cluster import Cluster
from tests.faults.fire.run import PREFIX, Fire
from tests.faults.fire.work import QUEUE
from tests.waiting import lasting

pytestmark = [pytest.mark.xdist_group("soak"), pytest.mark.timeout(240)]  # each has fifteen processes
SECONDS = lasting(8, 60)
#: What is broken afterwards, and what is said about it.
BROKEN_IN_POSTGRESQL = {
    "INSERT INTO letters SELECT * FROM letters LIMIT 1": "not every effect once: 1 ",
    "DELETE FROM letters WHERE ctid = (SELECT min(ctid) FROM letters)": "not every effect once: 1 ",
    """UPDATE letters SET begun = due - interval '1 ms'
    WHERE ctid = (SELECT min(ctid) FROM letters WHERE due > 'epoch')""": "before their time: 1 ",
    """UPDATE letters SET claimed = due - interval '1 ms'
    WHERE ctid = (SELECT min(ctid) FROM letters WHERE due > 'epoch')""": "before their time: 1 ",
    """DELETE FROM processed_messages
    WHERE event_id = (SELECT min(event_id::text)::uuid FROM processed_messages)""": "accepted, not done: 1 ",
    """UPDATE processed_messages SET event_id = gen_random_uuid()
    WHERE event_id = (SELECT min(event_id::text)::uuid FROM processed_messages)""": "done, never accepted: 1 ",
}
BASE = f"{PREFIX}{{queue/{QUEUE}}}"
BROKEN_IN_REDIS: dict[tuple[Any, ...], str] = {
    ("SET", f"{BASE}:lock", "1"): "keys that nobody knows: 1 ",
    ("HSET", f"{BASE}:job:{uuid.UUID(int=1)}", "data", "{}"): "left over: 1 ",
    ("EXPIRE", f"{BASE}:relay", 1000): "keys with a TTL: 1 ",
    ("PERSIST", f"{BASE}:relay"): "",
    ("RPUSH", f"{BASE}:ready:normal", f"{uuid.UUID(int=1)}"): "nothing is left in the queue",
}


def all_were_killed(tally: Counter[str]) -> None:
    assert min(tally[f"{role}s killed"] for role in ("producer", "worker", "scheduler", "relay")) > 0


@pytest.mark.parametrize(
    "server",
    ["valkey9", pytest.param("redis8", marks=pytest.mark.long), pytest.param("redis7", marks=pytest.mark.long)],
)
def test_o_17_o_32_accepted_jobs_are_done_once_and_never_early_whoever_is_killed(
    database_url: str, own_valkey: Callable[..., ValkeyServer], server: str, tmp_path: Path
) -> None:
    url = own_valkey(server).url
    with redis.Redis.from_url(url) as client, Fire(database_url, url, [client], tmp_path) as fire:
        tally = fire.run(SECONDS)
        if server == "valkey9":
            it_complains(fire, client)
    all_were_killed(tally)
    assert tally["recorded"] > 50
    assert tally["enqueued"] > 50
    assert tally["with a delay"] > 50


def it_complains(fire: Fire, client: Any) -> None:
    """About each thing that is broken, and about nothing else."""
    for statement, told in BROKEN_IN_POSTGRESQL.items():
        with fire.db.transaction(force_rollback=True):
            assert fire.db.execute(statement.encode()).rowcount == 1
            found = fire.look_again()
            assert any(told in each for each in found), (statement, found)
            assert len(found) == (2 if "not done" in told else 1), (statement, found)
    for command, told in BROKEN_IN_REDIS.items():
        assert client.execute_command(*command)
        found = fire.look_again()
        assert any(told in each for each in found) if told else not found, (command, found)
        if command[0] in ("SET", "HSET"):
            client.delete(command[1])


@pytest.mark.long
@pytest.mark.parametrize("server", ["valkey9", "redis8", "redis7"])
def test_o_17_o_32_on_a_cluster(database_url: str, server: str, tmp_path: Path) -> None:
    program = redis_servers().get(server) or missing(f"no {server}")
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(replicas=False, program=program))
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in cluster.nodes]
        fire = stack.enter_context(Fire(database_url, cluster.url, clients, tmp_path))
        tally = fire.run(SECONDS)
    all_were_killed(tally)
    assert tally["accepted"] > 100


@pytest.mark.long
def test_recorded_jobs_are_done_although_redis_is_emptied_meanwhile(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    url = own_valkey().url
    with redis.Redis.from_url(url) as client, Fire(database_url, url, [client], tmp_path, flush=True) as fire:
        tally = fire.run(SECONDS)
    all_were_killed(tally)
    assert tally["times emptied"] >= 2
    assert tally["accepted"] > 100
