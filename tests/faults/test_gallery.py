"""The failure gallery shows what it says, and fails when it does not."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from examples.failures import gallery, polling
from outbox.embedded import redis_servers
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "examples.failures", "--server"]
GALLERY = [*COMMAND, "valkey9"]
#: What the naive way makes of it, and ours.
FIGURES = {
    "brpop": ("1 of 5 lost", "all 5 once"),
    "ack-first": ("1 of 5 lost", "all 5 once"),
    "dedup-mark": ("1 of 5 lost", "all 5 once"),
    "time-out": ("1 of 1 twice", "all 1 once"),
    "eviction": ("100 of 100 lost", "all 100 once"),
    "no-aof": ("5,000 of 5,000 lost", "all 5,000 once"),
    "power-cut": ("100 of 500 lost", "all 500 once"),
    "failover": ("50 of 150 lost", "all 150 once"),
    "maxlen": ("903 of 1,006 lost", "all 1,006 once"),
    "acked": ("3 of 10 lost", "all 10 once"),
    "lag": ("1,003 / null", "1,003 / 1,003"),
    "last-id": ("1 of 2 lost", "all 2 once"),
}
#: Where a server differs: Redis 8.2 has XTRIM ACKED, and a lag after XTRIM that is neither right nor unknown.
DIFFERENT = {
    "redis8": {"acked": ("ACKED: all 10 once", "all 10 once"), "lag": ("100 / null", "1,003 / 1,003")},
}
SERVERS = sorted(redis_servers())


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` is a program's entry point: it takes SIGTERM for itself, and drops settings from the environment."""
    before, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    yield
    signal.signal(signal.SIGTERM, before)
    os.environ.update(environment)


@pytest.mark.long
def test_every_figure_is_as_expected() -> None:
    """On every server, side by side; also where settings of another installation are in the environment, which must not get
    through."""
    environment = os.environ | {"OUTBOX_LANES": "payments=4", "CONSUMER_SCHEMA": "other"}

    def run(server: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, server], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
        )

    with ThreadPoolExecutor(len(SERVERS)) as pool:
        for name, done in zip(SERVERS, pool.map(run, SERVERS), strict=True):
            assert done.returncode == 0, done.stdout + done.stderr
            assert shown(done.stdout.splitlines(), name) == FIGURES | DIFFERENT.get(name, {})


def shown(lines: list[str], name: str) -> dict[str, tuple[str, str]]:
    """What a table of one server says, by exhibit."""
    assert f"All {len(FIGURES)} are as expected." in lines
    assert max(map(len, lines)) <= 100
    found = {}
    for title, row in zip(lines[2:-3:2], lines[3:-3:2], strict=True):
        server, naive_expected, naive, expected, ours, verdict = (cell.strip() for cell in _cells(row))
        assert (server, naive_expected, expected, verdict) == (name, naive, ours, "ok")
        found[title.partition(":")[0]] = (naive, ours)
    return found


def _cells(row: str) -> list[str]:
    return [row[0:18], row[18:39], row[39:60], row[60:76], row[76:92], row[92:]]


def test_a_figure_that_is_not_as_expected_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (exhibit,) = polling.EXHIBITS
    sabotaged = replace(exhibit, ours=exhibit.naive)
    assert gallery.main(["--server", "valkey9"], [sabotaged]) == 1
    printed = capsys.readouterr()
    assert "1 of 2 lost          all 2 once      1 of 2 lost     DIFFERS" in printed.out
    assert "1 of 1 differ." in printed.out
    assert "last-id on valkey9" in printed.err


@pytest.mark.long
def test_what_does_not_happen_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that does not die as it should shows nothing."""
    unscathed = replace(gallery.EXHIBITS[0], naive=lambda scene: str(scene.killed(int)))
    assert gallery.main(["--server", "valkey9"], [unscathed]) == 2
    assert "ended with status 0 instead of -9" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_a_stopped_gallery_leaves_no_process() -> None:
    mark = secrets.token_hex(8)  # inherited by whatever the gallery starts
    with subprocess.Popen(
        [*GALLERY, "--only", "brpop", "--only", "time-out"],
        cwd=ROOT, env=os.environ | {"GALLERY_TEST": mark}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as running:  # fmt: skip
        assert running.stderr is not None
        assert "brpop on valkey9" in running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    assert "Traceback" not in errors
    eventually(lambda: not _marked(f"GALLERY_TEST={mark}"), message="no process is left")


def _marked(mark: str) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found
