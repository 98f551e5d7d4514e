"""OUTBOX_TEST_CONTAINERS=1: the tests' servers are containers. Proved by running a test of this file that way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis

ROOT = Path(__file__).parent.parent.parent


def test_servers_answer(database_url: str, redis_url: str, prefix: str) -> None:
    """Whatever servers this run has: the tables are there, and a key comes back."""
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (0,)
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}key", "value")
        assert client.get(f"{prefix}key") == b"value"


@pytest.mark.docker
@pytest.mark.long
@pytest.mark.xdist_group("containers")
@pytest.mark.timeout(180)
def test_servers_are_containers_when_asked_for() -> None:
    if not engine_answers():
        pytest.skip("no container engine (`docker info` fails)")
    before = containers()

    done = in_containers(f"{Path(__file__).relative_to(ROOT)}::test_servers_answer")

    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert re.search(r"^1 passed|=+ 1 passed", done.stdout, re.MULTILINE), output
    assert re.search(r"^servers: PostgreSQL 18\S* container, Valkey 9\S* container", done.stdout, re.MULTILINE), output
    assert containers() <= before, "containers were left behind"


def in_containers(test: str) -> subprocess.CompletedProcess[str]:
    """Run one test in a pytest of its own that has no addresses and asks for containers."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "REDIS_URL") and not k.startswith("PYTEST_")
    }
    env["OUTBOX_TEST_CONTAINERS"] = "1"
    env.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # the fixtures remove them; no image beyond the two needed
    if "DOCKER_HOST" not in env:
        env.setdefault("TESTCONTAINERS_HOST_OVERRIDE", "127.0.0.1")  # a local engine publishes ports there
    command = [sys.executable, "-m", "pytest", "--color=no", test]
    return subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150
    )


def engine_answers() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def containers() -> set[str]:
    """Containers of the two images, by id."""
    command = [
        "docker",
        "ps",
        "-aq",
        "--no-trunc",
        "--filter=ancestor=postgres:18",
        "--filter=ancestor=valkey/valkey:9",
    ]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split())
