"""The benchmark of jobs: what it says is so. Other libraries are not installed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from benchmarks import jobs
from benchmarks.peers import wallet
from outbox.embedded import PostgresServer, ValkeyServer


@pytest.mark.long
def test_ours_is_measured_and_what_cannot_be_installed_is_said(
    own_postgres: Callable[..., PostgresServer],
    own_valkey: Callable[..., ValkeyServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    absent = jobs.Side("absent", "with_rq", ("--no-index", "no-such-library"), "rq", 1000)
    ours, other = jobs.run(own_postgres().url, own_valkey().url, 500, (jobs.OURS, absent))
    assert (ours.events, ours.note, ours.baseline) == (300, "", True)
    assert 0 < ours.seconds < 60
    assert ours.rate == 300 / ours.seconds
    assert all(isinstance(cpu, float) and cpu > 0 for key, cpu in ours.details.items() if "valkey" not in key), ours
    assert (other.events, other.rate, other.baseline) == (0, 0.0, False)
    assert other.note.startswith("cannot be installed: ERROR: No matching distribution found for no-such-library")


def test_what_is_lost_or_done_twice_is_said_though_the_sum_is_right(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as db:
        jobs.make_wallets(db)
        for wallet_id, amount, _ in wallet.jobs(1500):
            db.execute(wallet.CREDIT, (amount, wallet_id))
        assert jobs.wrong(db, 1500) == ""
        db.execute("UPDATE wallet SET balance = balance - 5000 WHERE id IN ('wallet-7', 'wallet-600')")
        assert jobs.wrong(db, 1500) == "2 jobs lost"
        db.execute("UPDATE wallet SET balance = balance + 10000 WHERE id = 'wallet-8'")
        assert jobs.wrong(db, 1500) == "2 jobs lost, 2 jobs done twice"
