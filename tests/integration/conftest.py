"""A database with the tables of the tests' wallet, an engine, and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy

from consumer import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema
from outbox.transport import MemoryTransport
from tests.integration.test_consumer import Database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url)
    yield found
    found.connection.close()


@pytest.fixture
def engine(database_url: str) -> Iterator[sqlalchemy.Engine]:
    made = schema.engine(database_url, "handlers")
    yield made
    made.dispose()


@pytest.fixture
def start(database_url: str) -> Iterator[Callable[..., Worker]]:
    """Makes workers whose failed deliveries come again after 50 ms; they are closed at the end."""
    with ExitStack() as stack:

        def make(consumer: Consumer, transport: MemoryTransport, **options: Any) -> Worker:
            parts = {name: options.pop(name) for name in ("engine", "observer") if name in options}
            settings: dict[str, Any] = {"database_url": database_url, "redis_url": "redis://unused"}
            settings |= {"claim_seconds": 0.05, "check_seconds": 0.02, "block_seconds": 0.02} | options
            worker = Worker(consumer, ConsumerSettings(**settings), transport=transport, **parts)
            stack.callback(worker.close)
            return worker

        yield make
