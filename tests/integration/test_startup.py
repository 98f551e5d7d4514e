"""What `outbox relay` and `consumer run` look at before they work, or beside it, and when they refuse to start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from outbox import schema as schemas
from outbox.doctor import Finding
from outbox.embedded import PostgresServer, ValkeyServer
from outbox.errors import NotStarted
from outbox.retry import Stop
from outbox.startup import examined
from tests.faults.chaos import ROOT, TOPIC, Bench
from tests.waiting import eventually

CONSUMER = ("consumer", "run", "tests.faults.chaos:ledger")
EVICTION = Finding("redis-eviction", "error", "streams are thrown away", "CONFIG SET maxmemory-policy noeviction")
COMMITS = Finding("database-synchronous-commit", "warning", "commits can be lost", "Set it on")
AWAY = Finding("redis-unavailable", "error", "Redis does not answer", "See that it runs")
FINE = Finding("redis-memory", "ok", "half of it is used", "")
UNSAFE = "?options=-csynchronous_commit%3Doff"
DANGER = "start check: redis-eviction: maxmemory-policy is allkeys-lru: "


@pytest.fixture
def bench(database_url: str, own_valkey: Callable[..., ValkeyServer]) -> Iterator[Bench]:
    """Redis as it is for a cache; PostgreSQL without synchronous commits."""
    server = own_valkey(settings={"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    with Bench(database_url + UNSAFE, server.url) as made:
        yield made


@pytest.fixture
def safe_bench(own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]) -> Iterator[Bench]:
    postgres = own_postgres(settings={"fsync": "on"})
    for branch in ("outbox", "consumer"):
        schemas.upgrade(postgres.url, branch)  # type: ignore[arg-type]
    with Bench(postgres.url, own_valkey().url) as made:
        yield made


def started(bench: Bench, path: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process with the bench's addresses, whose output goes to a file."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT,
        env=os.environ | {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url} | environment,
        stdout=path.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    bench.processes.append(process)
    return process


@pytest.mark.parametrize("command", [("outbox", "relay"), CONSUMER], ids=" ".join)
def test_what_is_dangerous_is_a_line_of_the_log_and_work_goes_on(
    bench: Bench, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "log"
    process = started(bench, path, *command)
    eventually(lambda: DANGER in path.read_text() and "start check: database-synchronous-commit: " in path.read_text())
    assert "-> CONFIG SET maxmemory-policy noeviction" in path.read_text()
    if command != CONSUMER:
        bench.write(1)
        eventually(lambda: bench.length() == 1)
    process.terminate()
    assert process.wait(10) == 0
    assert path.read_text().count(DANGER) == 1


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (("outbox", "relay", "--strict"), {}),
        (("outbox", "relay"), {"OUTBOX_STRICT": "yes"}),
        ((*CONSUMER, "--strict"), {}),
        (CONSUMER, {"CONSUMER_STRICT": "1"}),
    ],
    ids=["relay --strict", "OUTBOX_STRICT", "run --strict", "CONSUMER_STRICT"],
)
def test_strict_refuses_to_start_and_says_why(
    bench: Bench, tmp_path: Path, command: tuple[str, ...], environment: dict[str, str]
) -> None:
    bench.write(1)
    path = tmp_path / "log"
    assert started(bench, path, *command, **environment).wait(20) == 78
    (error,) = [line for line in path.read_text().splitlines() if line.startswith("error: not started")]
    assert "redis-eviction: maxmemory-policy is allkeys-lru" in error
    assert "-> CONFIG SET maxmemory-policy noeviction" in error
    assert "database-synchronous-commit: " in error
    assert bench.redis.dbsize() == 0, "nothing was published, and no group made"


def test_strict_starts_where_there_is_no_danger(safe_bench: Bench, tmp_path: Path) -> None:
    safe_bench.write(1)
    paths = [tmp_path / "relay", tmp_path / "consumer"]
    processes = [
        started(safe_bench, paths[0], "outbox", "relay", "--strict"),
        started(safe_bench, paths[1], *CONSUMER, "--strict"),
    ]
    eventually(lambda: safe_bench.length() == 1, 20)
    for process, path in zip(processes, paths, strict=True):
        eventually(lambda path=path: "started" in path.read_text(), 20)
        assert "start check: no danger found" in path.read_text()
        assert "WARNING" not in path.read_text()
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.parametrize("strict", [False, True], ids=["warns", "strict"])
def test_redis_is_away_at_the_start(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, strict: bool
) -> None:
    """The relay starts all the same, and the look is taken when Redis is back; a strict one waits for it."""
    server = own_valkey(settings={"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    server.stop()
    path = tmp_path / "log"
    with Bench(database_url + UNSAFE, server.url) as bench:
        bench.write(1)
        process = started(bench, path, "outbox", "relay", *(["--strict"] if strict else []))
        if strict:  # what is known of PostgreSQL is enough
            assert process.wait(20) == 78
            assert "database-synchronous-commit" in path.read_text()
            return
        told = ("start check: database-synchronous-commit", "relay waits, try 1: Redis")
        eventually(lambda: all(line in path.read_text() for line in told))
        server.start()
        eventually(lambda: bench.length(TOPIC) == 1, ignoring=(Exception,))
        eventually(lambda: DANGER in path.read_text(), 40)
        assert [path.read_text().count(line) for line in (DANGER, told[0])] == [1, 1]


def test_strict_waits_for_servers_that_do_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([[AWAY, FINE], [AWAY, FINE], [FINE]])
    entered = []
    with examined(lambda: next(looks), strict=True, stopping=Stop()):
        entered.append(next(looks, None))
    assert entered == [None], "all three looks were taken before"
    actions = [record.action for record in caplog.records]  # type: ignore[attr-defined]
    assert actions.count("start_waits") == 1


def test_strict_refuses_by_what_it_knows_while_another_server_is_away() -> None:
    told = r"database-synchronous-commit: commits can be lost -> Set it on"
    with pytest.raises(NotStarted, match=told), examined(lambda: [AWAY, COMMITS], strict=True, stopping=Stop()):
        pytest.fail("was entered")


def test_waiting_ends_when_the_command_is_to_end() -> None:
    stopping = Stop()
    threading.Timer(0.3, stopping.set).start()
    with examined(lambda: [AWAY], strict=True, stopping=stopping):
        assert stopping.is_set()


def test_every_danger_is_told_once_also_when_servers_come_back_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([[AWAY, COMMITS], [AWAY, COMMITS], [COMMITS, EVICTION]])
    done = threading.Event()

    def look() -> list[Finding]:
        found = next(looks)
        if EVICTION in found:
            done.set()
        return found

    with caplog.at_level(logging.INFO, logger="outbox"), examined(look, strict=False, stopping=Stop()):
        assert done.wait(20)
    told: list[Any] = [getattr(record, "code", None) for record in caplog.records]
    assert told == [COMMITS.code, EVICTION.code]


def test_a_doctor_that_stumbles_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with examined(lambda: [][0], strict=False, stopping=Stop()):
        eventually(lambda: [record for record in caplog.records if record.message == "the check at the start failed"])


# --- the commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("outbox", "relay"), CONSUMER], ids=" ".join)
def test_variables_that_nobody_reads_are_named(bench: Bench, tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "log"
    process = started(bench, path, *command, OUTBOX_CHECK_SECOND="1")
    eventually(lambda: "started" in path.read_text())
    process.terminate()
    assert process.wait(10) == 0
    line = "WARNING outbox: nothing reads the variable OUTBOX_CHECK_SECOND; OUTBOX_CHECK_SECONDS is meant, most likely"
    line += " action=unknown_variable\n"
    assert path.read_text().count(line) == 1


@pytest.mark.parametrize("package", ["outbox", "consumer"])
def test_so_do_commands_that_do_not_log_and_the_version_is_told(package: str) -> None:
    def run(*arguments: str) -> tuple[str, str]:
        environment = os.environ | {f"{package.upper()}_SCHEMAS": "x"}
        command = [sys.executable, "-m", package, *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    out, err = run("migrate", "--sql")
    assert "CREATE TABLE" in out
    name = package.upper()
    assert err == f"nothing reads the variable {name}_SCHEMAS; {name}_SCHEMA is meant, most likely\n"
    assert run("--version") == (f"outbox-consumer {version('outbox-consumer')}\n", "")
