"""The demo does what it says, shows it when it does not, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
import redis

from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from examples.wallet import demo
from examples.wallet.handlers import wallet
from examples.wallet.report import Report, riyal
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
CHECK = re.compile(r"  (?P<what>.+?) \.+ expected (?P<expected>\S+) +actual (?P<actual>\S+) +(?P<verdict>\S+)")
DEMO = [sys.executable, "-m", "examples.wallet"]


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """`main` is a program's entry point and takes SIGTERM for itself."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_every_value_is_as_expected() -> None:
    done = subprocess.run(DEMO, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [found.groupdict() for found in CHECK.finditer(done.stdout)]
    assert [check for check in checks if check["expected"] != check["actual"] or check["verdict"] != "ok"] == []
    assert f"All {len(checks)} values are as expected." in done.stdout
    balances = [check["actual"] for check in checks if check["what"].startswith("balance")]
    assert balances == ["350.00", "200.00", "250.00", "250.00"]
    actual = {check["what"]: check["actual"] for check in checks}  # of equal names the last part's
    for what, value in {
        "rows in processed_messages": "5",
        "pending deliveries": "0",
        "rows changed, 1st time": "1",
        "rows changed, 2nd time": "0",
        "left in stock, 1st time": "9",
        "left in stock, 2nd time": "8",
        "signal that ended the relay": "9",
        "payments in the stream, each once": "5",
        "city": "Riyadh",
        "events applied": "6",
        "events stale": "1",
    }.items():
        assert actual[what] == value, what
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_servers_of_the_environment_are_left_as_they_were(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_url.replace("redis://", "valkey://"))
    monkeypatch.setenv("OUTBOX_LANES", "payments=4")  # ours must not get through
    with redis.Redis.from_url(redis_url) as client, psycopg.connect(database_url) as connection:
        before = set(client.keys("wallet_demo_*"))
        assert demo.main(["--url-from-environment"], [demo.whole_path]) == 0, capsys.readouterr()
        assert set(client.keys("wallet_demo_*")) == before
        schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'wallet_demo_%'").fetchall()
        assert schemas == []
        assert connection.execute("SELECT to_regclass('wallet')").fetchone() == (None,)


def test_without_the_ledger_the_demo_fails(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    sabotaged = partial(demo.dedup_table, module="examples.wallet.naive", consumer="simple")
    assert demo.main(["--url-from-environment"], [sabotaged]) == 1
    checks = {found["what"]: found.groupdict() for found in CHECK.finditer(capsys.readouterr().out)}
    assert checks["balance"] == {"what": "balance", "expected": "250.00", "actual": "350.00", "verdict": "DIFFERS"}
    assert checks["rows in processed_messages"]["verdict"] == "DIFFERS"


@pytest.mark.parametrize("missing", ["DATABASE_URL", "REDIS_URL"])
def test_a_missing_address_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://localhost/none")
    monkeypatch.setenv("REDIS_URL", "redis://localhost")
    monkeypatch.delenv(missing)
    assert demo.main(["--url-from-environment"]) == 2
    assert f"{missing}: is not set" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_demo_leaves_no_process(number: signal.Signals, status: int) -> None:
    mark = f"WALLET_DEMO_TEST={secrets.token_hex(8)}"  # inherited by whatever the demo starts
    name, _, value = mark.partition("=")
    with subprocess.Popen(
        DEMO,
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "c2 takes over" in line:  # servers and a consumer are at work
                break
        assert len(marked(mark)) > 3
        if number is signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            running.send_signal(number)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == status, errors
    assert "Traceback" not in errors
    eventually(lambda: not marked(mark), message="no process is left")


def marked(mark: str) -> list[int]:
    """Processes with the mark in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def test_the_consumer_makes_its_tables(database_url: str, redis_url: str, prefix: str) -> None:
    """As in compose, where the consumer runs before anybody has made the demo's tables."""
    with redis.Redis.from_url(redis_url) as client:
        entry = {"id": str(uuid.uuid4()), "type": "payment.received", "subject": "w9"}
        client.xadd(f"{prefix}{{payments}}", entry | {"data": json.dumps({"amount_halala": 5000})})
    for name in ("one", "two"):
        settings = ConsumerSettings(
            database_url=database_url, redis_url=redis_url, key_prefix=prefix, block_seconds=0.05, process_name=name
        )
        worker = Worker(wallet, settings)
        try:
            assert {str(k): n for k, n in worker.run_once().items()} == ({"applied": 1} if name == "one" else {})
        finally:
            worker.close()
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT id, balance_halala FROM wallet").fetchall() == [("w9", 5000)]


def test_report_counts_what_differs() -> None:
    out = io.StringIO()
    report = Report(out)
    assert report.summary() == 1, "nothing was checked"
    assert report.check("same", expected=1, actual=1)
    assert report.summary() == 0
    assert not report.check("other", expected="250.00", actual="350.00")
    assert report.summary() == 1
    assert "expected 250.00   actual 350.00   DIFFERS" in out.getvalue()
    assert "1 of 2 values differ: other" in out.getvalue()


def test_amounts_are_shown_in_riyal() -> None:
    assert [riyal(halala) for halala in (0, 5, 5000, 35000)] == ["0.00", "0.05", "50.00", "350.00"]
