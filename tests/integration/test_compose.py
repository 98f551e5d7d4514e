"""compose.yaml as it stands: the image builds, both workers get healthy, an event gets through, and again after a kill.

A smoke test; load and faults are tested on loopback servers elsewhere.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from outbox import Event, record
from tests.waiting import eventually

ROOT = Path(__file__).parent.parent.parent
IMAGE = "outbox-consumer:test"

pytestmark = [
    pytest.mark.docker,
    pytest.mark.long,
    pytest.mark.xdist_group("containers"),  # all in one worker: one project for all
    pytest.mark.timeout(420),  # the image is built within the first test's time
]


def run(*command: str, timeout: float = 60, env: dict[str, str] | None = None) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@cache
def compose_command() -> list[str]:
    """`docker compose`, else `docker-compose`; skips the test where there is neither, or no engine."""
    if not succeeds("docker", "info"):
        pytest.skip("no container engine (`docker info` fails)")
    if succeeds("docker", "compose", "version"):
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("a container engine, but neither `docker compose` nor `docker-compose`")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:  # all open at once, so that they differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Project:
    """The services of compose.yaml under a name of their own."""

    def __init__(self) -> None:
        self.name = f"outboxtest{secrets.token_hex(4)}"
        self.password = f"p:@/{secrets.token_urlsafe(8)}"  # characters that a URL would not take
        self.postgres_port, self.valkey_port = free_ports(2)
        self.env = os.environ | {
            "OUTBOX_IMAGE": IMAGE,
            "POSTGRES_PASSWORD": self.password,
            "POSTGRES_PORT": str(self.postgres_port),
            "VALKEY_PORT": str(self.valkey_port),
        }

    def compose(self, *arguments: str, timeout: float = 60) -> str:
        return run(*compose_command(), "-p", self.name, *arguments, timeout=timeout, env=self.env)

    def container(self, service: str) -> dict[str, Any]:
        """What the engine says about a service's container."""
        name = self.compose("ps", "-a", "-q", service).strip()
        (details,) = json.loads(run("docker", "inspect", name))
        return details

    def healthy(self, *services: str) -> bool:
        return all(self.container(service)["State"]["Health"]["Status"] == "healthy" for service in services)

    def wait_healthy(self, *services: str) -> None:
        try:
            eventually(partial(self.healthy, *services), 60, f"{services} healthy")
        except AssertionError as error:
            error.add_note(self.logs())
            raise

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail=60")

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.postgres_port,
            user="outbox",
            dbname="outbox",
            password=self.password,
            connect_timeout=10,
        )


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    compose_command()
    # The host's network, so that the build reaches what the host reaches.
    run("docker", "build", "--network=host", f"--tag={IMAGE}", ".", timeout=300)
    project = Project()
    try:
        project.compose("up", "-d", "--no-build", timeout=120)
        yield project
    finally:
        project.compose("--profile", "demo", "down", "-v", "--remove-orphans", "--timeout=5", timeout=90)


def payment(project: Project) -> Event:
    """Record a payment as a producer outside of the containers would."""
    event = Event(topic="payments", type="payment.received", key=secrets.token_hex(4), version=1, payload=PAYLOAD)
    with project.connect() as connection:
        record(connection, event)
    return event


PAYLOAD = {"amount_halala": 5000}


def outcome(project: Project, event: Event) -> str | None:
    with project.connect() as connection:
        row = connection.execute(
            "SELECT outcome FROM processed_messages WHERE consumer = 'wallet' AND event_id = %s", (event.id,)
        ).fetchone()
    return row[0] if row else None


def assert_applied(project: Project, event: Event) -> None:
    try:
        assert eventually(partial(outcome, project, event), 45, "the event's row in the ledger") == "applied"
    except AssertionError as error:
        error.add_note(project.logs())
        raise


def test_an_event_is_applied_and_both_workers_are_healthy(project: Project) -> None:
    project.wait_healthy("relay", "consumer")
    assert_applied(project, payment(project))


def test_a_killed_worker_comes_back(project: Project) -> None:
    project.wait_healthy("relay", "consumer")
    restarts = project.container("relay")["RestartCount"]

    # From inside, since the engine takes `docker kill` for a wish to stop. All but the init process die; then it ends.
    subprocess.run(
        [*compose_command(), "-p", project.name, "exec", "-T", "relay", "sh", "-c", "kill -9 -1"],
        cwd=ROOT,
        env=project.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    eventually(lambda: project.container("relay")["RestartCount"] > restarts, 30, "the relay is started again")

    assert_applied(project, payment(project))
    project.wait_healthy("relay", "consumer")


def test_a_relay_without_progress_is_unhealthy(project: Project) -> None:
    project.wait_healthy("relay")
    check = project.container("relay")["Config"]["Healthcheck"]["Test"][1]
    inside = partial(project.compose, "exec", "-T", "relay", "sh", "-c")
    inside(check)

    stale = check.replace("/tmp/heartbeat", "/tmp/stale")
    inside(f"touch -d '1 minute ago' /tmp/stale; ! {{ {stale}; }}")
    inside(f"rm /tmp/stale; ! {{ {stale}; }}")


def test_nothing_listens_beyond_this_machine_and_nothing_is_evicted(project: Project) -> None:
    for service in ("postgres", "valkey", "relay", "consumer"):
        bindings = project.container(service)["NetworkSettings"]["Ports"] or {}
        assert {host["HostIp"] for hosts in bindings.values() for host in hosts or []} <= {"127.0.0.1"}
    with redis.Redis(port=project.valkey_port) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}


@pytest.mark.parametrize("service", ["relay", "consumer"])
def test_workers_run_without_privileges(project: Project, service: str) -> None:
    details = project.container(service)

    assert details["Config"]["User"] not in ("", "0", "root")
    assert details["HostConfig"]["ReadonlyRootfs"]
    assert project.password not in json.dumps([details["Config"]["Cmd"], details["Path"], details["Args"]])
    assert project.password not in project.logs()


def test_the_demo_runs(project: Project) -> None:
    project.compose("--profile", "demo", "run", "-T", "--rm", "demo", timeout=120)
