"""The page on handlers of all kinds: its code is one module, which is run here, and does what the page says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pytest

from consumer import Envelope
from consumer.process import Outcome, Processor
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.transport import Delivery

PAGE = Path(__file__).parents[2] / "docs/how-to/handlers.md"
TABLES = """
    CREATE TABLE balances (wallet text PRIMARY KEY, amount numeric NOT NULL);
    CREATE TABLE notes (event_id uuid, amount numeric);
    CREATE TABLE customers (id text PRIMARY KEY, city text);
    CREATE TABLE history (id text, what text);
    CREATE TABLE rates (currency text, rate numeric)
"""
APPLIED, STALE, DEAD, RETRY, PARKED = (
    Outcome.APPLIED, Outcome.STALE, Outcome.DEAD, Outcome.RETRY, Outcome.PARKED,
)  # fmt: skip


class Shop:
    """The page's consumer on a database of its own."""

    def __init__(self, url: str) -> None:
        self.module = ModuleType("wallet")
        code = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
        exec(compile(code, "handlers.md", "exec", dont_inherit=True), self.module.__dict__)  # noqa: S102  # our own page
        self.engine = schemas.engine(url, "page")
        self.processor = Processor(self.module.wallet, self.engine)
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.execute(TABLES)
        self.number = 0

    def event(self, kind: str, payload: Any, key: str = "w1", version: int | None = None) -> Delivery:
        self.number += 1
        fields = {"id": str(uuid7()), "type": kind, "subject": key, "data": json.dumps(payload)}
        if version is not None:
            fields["version"] = str(version)
        return Delivery("payments", f"{self.number}-0", {n.encode(): v.encode() for n, v in fields.items()})

    def all(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query).fetchall()

    @property
    def reasons(self) -> list[str]:
        return [row[0] for row in self.all("SELECT reason FROM dead_letters ORDER BY id")]


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    made = Shop(database_url)
    yield made
    made.connection.close()
    made.engine.dispose()


def test_all_that_an_event_offers_is_listed() -> None:
    table = PAGE.read_text().partition("## What an event offers")[2].partition("\n## ")[0]
    listed = [name for row in re.findall(r"^\| (`.+?) \|", table, re.M) for name in re.findall(r"`event\.(\w+)", row)]
    offered = {name for name in dir(Envelope) if not name.startswith("_")}
    offered |= {field.name for field in dataclasses.fields(Envelope)}
    assert sorted(listed) == sorted(offered)


def test_typed_raw_and_rejected(shop: Shop) -> None:
    batch = [
        shop.event("payment.received", {"amount": "10.10", "currency": "USD", "further": 1}),
        shop.event("payment.received", {"amount": "0.20"}),
        shop.event("payment.received", {"amount": "4711", "currency": "EUR"}),
        shop.event("payment.refunded", {"amount": "0.30"}),
        shop.event("payment.refunded", {"amount": "1"}, key="nobody"),
    ]
    assert shop.processor.process(batch) == [APPLIED, APPLIED, DEAD, APPLIED, DEAD]
    assert shop.all("SELECT * FROM balances") == [("w1", Decimal("10.00"))]
    assert sorted(shop.reasons) == ["payload", "rejected"]
    assert shop.all("SELECT error FROM dead_letters WHERE reason = 'payload'") == [
        ("payload.currency: Invalid enum value",)
    ]


def test_async(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"currency": request.url.path[1:], "rate": "3.75"})

    real = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: real(transport=httpx.MockTransport(answer), **options))
    assert shop.processor.process([shop.event("rates.wanted", {"currencies": ["USD", "EUR"]})]) == [APPLIED]
    assert shop.all("SELECT * FROM rates") == [("USD", Decimal("3.75")), ("EUR", Decimal("3.75"))]


def test_batches(shop: Shop) -> None:
    settled = [shop.event("payment.settled", {"amount": "0.10"}, key=f"w{n % 2}") for n in range(6)]
    noted = [shop.event("payment.noted", {"amount": "0.10"}) for _ in range(3)]
    assert shop.processor.process([*settled, *noted]) == [APPLIED] * 9
    assert shop.all("SELECT * FROM balances ORDER BY 1") == [("w0", Decimal("0.30")), ("w1", Decimal("0.30"))]
    assert shop.all("SELECT count(*), sum(amount) FROM notes") == [(3, Decimal("0.30"))]


def test_orders(shop: Shop) -> None:
    batch = [
        shop.event("customer.moved", {"city": "Riyadh"}, version=7),
        shop.event("customer.moved", {"city": "Dammam"}, version=6),
        shop.event("customer.closed", {}, key="c1", version=2),
        shop.event("customer.closed", {}, key="c2", version=None),
    ]
    assert shop.processor.process(batch) == [APPLIED, STALE, PARKED, DEAD]
    assert shop.processor.process([shop.event("customer.opened", {}, key="c1", version=1)]) == [APPLIED]
    due, _ = shop.processor.due(60, 10)
    assert shop.processor.process(due) == [APPLIED]
    assert shop.all("SELECT * FROM customers") == [("w1", "Riyadh")]
    assert shop.all("SELECT what FROM history") == [("customer.opened",), ("customer.closed",)]


def test_failures_and_time_outs(shop: Shop) -> None:
    sources = ("unknown", "gone", "busy", "odd")
    batch = [shop.event("payment.imported", {"source": source}) for source in sources]
    assert shop.processor.process(batch) == [DEAD, DEAD, RETRY, RETRY]
    assert shop.reasons == ["rejected", "rejected"]
    found = shop.all("SELECT error_class, attempts FROM message_failures ORDER BY id")
    assert found == [("ConnectionError", 0), ("ValueError", 1)]
    assert shop.processor.process([shop.event("report.wanted", {"seconds": 0})]) == [APPLIED]
    assert shop.module.wallet.handler("report.wanted").timeout_seconds == 30
