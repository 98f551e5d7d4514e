"""Relays and consumers with the one thing taken out that a promise rests on: ``python -m tests.faults.sabotage WHAT``.

The soak has to complain about each of them, or it proves nothing.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from consumer.ledger import Ledger
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.store import BEGINNING, Store, Window
from outbox.transport import StreamTransport
from tests.faults.chaos import ledger


class AcknowledgesFirst(StreamTransport):
    """What is read is acknowledged before it is processed, and now and then the process dies in between, and begins anew."""

    def read(self, group: str, *arguments: Any) -> Any:
        found = super().read(group, *arguments)
        self.ack(group, found)
        if found and random.random() < 0.05:
            os.execv(sys.executable, [sys.executable, "-m", "tests.faults.sabotage", *sys.argv[1:]])
        return found


def forgets_duplicates(_consumer: Worker) -> None:
    claim = Ledger.claim

    def all_of_them(self: Ledger, connection: Any, ids: Any, *patience: Any) -> Any:
        claim(self, connection, ids, *patience)
        return set(ids)

    Ledger.claim = all_of_them  # type: ignore[method-assign]


def polls_by_last_position(_relay: Relay) -> None:
    """What most outboxes do: everything visible above the last position."""

    def advance(self: Store, connection: Any, window: Window) -> Window:
        row = connection.execute("SELECT pg_current_snapshot()::text, max(position) FROM public.outbox").fetchone()
        return Window(BEGINNING, row[0], window.after, open=(row[1] or 0) > window.after)

    Store.advance = advance  # type: ignore[method-assign]


def main(what: str) -> None:
    if what == "polls-by-last-position":
        relay = Relay(RelaySettings())
        polls_by_last_position(relay)
        relay.run()
        return
    settings = ConsumerSettings()
    address, transport = settings.redis_url.get_secret_value(), None
    if what == "acknowledges-first":
        transport = AcknowledgesFirst.from_url(
            address, prefix=settings.key_prefix, block_seconds=settings.block_seconds
        )
    worker = Worker(ledger, settings, transport=transport)
    if what == "forgets-duplicates":
        forgets_duplicates(worker)
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1])
