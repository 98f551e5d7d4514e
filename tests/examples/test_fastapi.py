"""The FastAPI example behind a real uvicorn: what comes twice, also at once, is done once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class Service:
    """The running service, and its database looked at past it."""

    def __init__(self, address: str, database_url: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=60)
        self.database_url = database_url

    def top_up(self, key: str, amount: int = 5000, wallet: str = "w1") -> httpx.Response:
        return self.client.post(
            f"/wallets/{wallet}/top-ups", json={"amount_halala": amount}, headers={"Idempotency-Key": key}
        )

    def webhook(self, event: str, amount: int = 5000) -> httpx.Response:
        body = {"id": event, "wallet_id": "w1", "amount_halala": amount}
        return self.client.post("/webhooks/payments", json=body)

    def all(self, query: str) -> list[Any]:
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(query.encode()).fetchall()

    @property
    def balances(self) -> dict[str, int]:
        return dict(self.all("SELECT id, balance_halala FROM fastapi_wallets"))

    @property
    def events(self) -> int:
        return len(self.all("SELECT FROM outbox"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the wallet from being changed."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute("SELECT FROM fastapi_wallets FOR UPDATE")
            yield

    def under_way(self, number: int) -> None:
        """Wait until so many transactions wait for the wallet, or for one that does."""
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        eventually(lambda: len(self.all(waiting)) == number, 60, f"{number} are under way")

    def scheduler(self, month: str) -> subprocess.Popen[bytes]:
        """Start a scheduler's job."""
        url = self.database_url.replace("postgresql://", "postgresql+psycopg://")
        command = [sys.executable, "-m", "examples.fastapi.app", month]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"DATABASE_URL": url}, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def address(new_database_url: Callable[[], str]) -> Iterator[tuple[str, str]]:
    database_url = new_database_url()
    environment = os.environ | {"DATABASE_URL": database_url.replace("postgresql://", "postgresql+psycopg://")}
    make = "from examples.fastapi.app import create_tables; create_tables()"
    subprocess.run([sys.executable, "-c", make], cwd=ROOT, env=environment, check=True)
    command = [sys.executable, "-m", "uvicorn", "examples.fastapi.app:app", "--port", "0", "--no-access-log"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
    ):

        def running() -> Any:
            text = os.pread(log.fileno(), 100_000, 0).decode()
            assert process.poll() is None, text
            return re.search(r"running on (http://[\d.:]+)", text)

        try:
            yield eventually(running, 60)[1], database_url
        finally:
            process.kill()


@pytest.fixture
def service(address: tuple[str, str]) -> Iterator[Service]:
    """With an empty database but for a wallet, w1, of 100.00."""
    with psycopg.connect(address[1]) as connection:
        connection.execute("TRUNCATE fastapi_wallets, fastapi_answers, processed_messages, outbox")
        connection.execute("INSERT INTO fastapi_wallets VALUES ('w1', 10000, 1)")
    made = Service(*address)
    yield made
    made.client.close()


def test_a_request_that_is_sent_again_gets_the_same_answer(service: Service) -> None:
    answers = [service.top_up("click-1") for _ in range(3)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (201, {"wallet_id": "w1", "balance_halala": 15000})
    ] * 3
    assert [answer.headers.get("Idempotency-Replayed") for answer in answers] == [None, "true", "true"]
    assert service.top_up("click-2").json()["balance_halala"] == 20000
    assert service.top_up("click-1", wallet="w2").json()["balance_halala"] == 5000
    assert (service.balances, service.events) == ({"w1": 20000, "w2": 5000}, 3)


def test_a_double_click_is_one_top_up_and_two_equal_answers(service: Service) -> None:
    with ThreadPoolExecutor(5) as pool:
        with service.held():
            clicks = [pool.submit(service.top_up, "click-1") for _ in range(5)]
            service.under_way(5)
        answers = [click.result(60) for click in clicks]
    assert {(answer.status_code, answer.text) for answer in answers} == {
        (201, '{"wallet_id":"w1","balance_halala":15000}')
    }
    assert sorted(answer.headers.get("Idempotency-Replayed", "") for answer in answers) == ["", *["true"] * 4]
    assert (service.balances, service.events) == ({"w1": 15000}, 1)


def test_what_is_no_request_of_ours_leaves_no_key(service: Service) -> None:
    assert service.top_up("click-1", amount=-1).status_code == 422
    assert service.client.post("/wallets/w1/top-ups", json={"amount_halala": 1}).status_code == 422
    assert service.top_up("").status_code == 422
    assert service.webhook("evt\x00").status_code == 400
    assert service.webhook("").json() == {"detail": "key: must have 1 to 1000 characters, has 0"}
    assert (service.all("SELECT FROM processed_messages"), service.events) == ([], 0)
    assert service.top_up("click-1").status_code == 201
    assert service.top_up("click-1", amount=5001).status_code == 422
    assert service.balances == {"w1": 15000}


def test_a_repeated_webhook_is_one_payment(service: Service) -> None:
    with ThreadPoolExecutor(3) as pool:
        with service.held():
            calls = [pool.submit(service.webhook, "evt_1") for _ in range(3)]
            service.under_way(3)
        assert {call.result(60).status_code for call in calls} == {204}
    assert service.webhook("evt_1").status_code == 204
    assert service.webhook("evt_2").status_code == 204
    assert (service.balances, service.events) == ({"w1": 20000}, 2)


def test_of_two_schedulers_at_once_one_charges_the_fee(service: Service) -> None:
    with service.held():
        both = [service.scheduler("2026-07") for _ in range(2)]
        service.under_way(2)
    assert sorted(process.communicate(timeout=60)[0] for process in both) == [b"0\n", b"1\n"]
    assert (service.balances, service.events) == ({"w1": 9500}, 1)


@pytest.mark.long
def test_when_one_scheduler_dies_at_it_the_other_charges_the_fee(service: Service) -> None:
    with service.held():
        first = service.scheduler("2026-07")
        service.under_way(1)
        second = service.scheduler("2026-07")
        service.under_way(2)
        first.kill()
        assert first.communicate(timeout=60)[0] == b""
    assert second.communicate(timeout=60)[0] == b"1\n"
    assert (service.balances, service.events) == ({"w1": 9500}, 1)
