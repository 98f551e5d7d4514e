"""Relays and consumers with the one thing taken out that a promise rests on: ``python -m tests.faults.sabotage WHAT…``.

The soak has to complain about each of them, or it proves nothing. Each does its work, wrongly, and none just stops.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from consumer import Envelope
from consumer.ledger import Ledger
from consumer.settings import ConsumerSettings
from consumer.work import Work
from consumer.worker import Worker
from outbox import relay as relays
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.store import BEGINNING, Store, Window
from outbox.transport import StreamTransport
from tests.faults.soak.handlers import consumer, note_effect


class AcknowledgesFirst(StreamTransport):
    """What is read is acknowledged before it is processed, and now and then the process dies in between, and begins anew."""

    def read(self, group: str, *arguments: Any) -> Any:
        found = super().read(group, *arguments)
        self.ack(group, found)
        if found and random.random() < 0.05:
            os.execv(sys.executable, [sys.executable, "-m", "tests.faults.sabotage", *sys.argv[1:]])
        return found


class ReadsInAnyOrder(StreamTransport):
    """Nothing that may not happen among many consumers: what stands first is not always what is processed first."""

    def read(self, group: str, *arguments: Any) -> Any:
        found = super().read(group, *arguments)
        random.shuffle(found)
        return found


def forgets_duplicates() -> None:
    claim = Ledger.claim

    def all_of_them(self: Ledger, connection: Any, ids: Any, *patience: Any) -> Any:
        claim(self, connection, ids, *patience)
        return set(ids)

    Ledger.claim = all_of_them  # type: ignore[method-assign]


def forgets_versions() -> None:
    """Applies whatever comes."""
    Work._admitted = lambda *_: True  # type: ignore[method-assign]


def reads_then_writes(event: Envelope, session: Session) -> None:
    """What handlers do that trust in being alone: two at once, and one's amount is gone."""
    note_effect(event, session)
    row = {"key": event.key}
    balance = session.scalar(text("SELECT amount FROM public.balances WHERE key = :key"), row)
    row["amount"] = (balance or 0) + event.payload["amount"]
    session.execute(
        text(
            "INSERT INTO public.balances VALUES (:key, :amount) "
            "ON CONFLICT (key) DO UPDATE SET amount = excluded.amount"
        ),
        row,
    )


def polls_by_last_position() -> None:
    """What most outboxes do: everything visible above the last position."""

    def advance(self: Store, connection: Any, window: Window) -> Window:
        row = connection.execute("SELECT pg_current_snapshot()::text, max(position) FROM public.outbox").fetchone()
        return Window(BEGINNING, row[0], window.after, open=(row[1] or 0) > window.after)

    Store.advance = advance  # type: ignore[method-assign]


def publishes_backwards() -> None:
    """The newest of a batch first."""
    by_stream = relays._by_stream

    def backwards(*arguments: Any) -> Any:
        return {stream: rows[::-1] for stream, rows in by_stream(*arguments).items()}

    relays._by_stream = backwards


def trusts_strangers() -> None:
    """Entries that were deleted are not published again."""
    Relay._replace_missing = lambda *_: None  # type: ignore[method-assign]


RELAYS = {
    "polls-by-last-position": polls_by_last_position,
    "publishes-backwards": publishes_backwards,
    "trusts-strangers": trusts_strangers,
}
CONSUMERS = {"forgets-duplicates": forgets_duplicates, "forgets-versions": forgets_versions}
READERS = {"acknowledges-first": AcknowledgesFirst, "forgets-versions": ReadsInAnyOrder}


def main(whats: Sequence[str]) -> None:
    for what in whats:
        (RELAYS | CONSUMERS).get(what, lambda: None)()
    if RELAYS.keys() & whats:
        Relay(RelaySettings()).run()
        return
    settings = ConsumerSettings()
    (reader,) = [READERS[what] for what in whats if what in READERS] or [StreamTransport]
    transport = reader.from_url(settings.redis_url.get_secret_value(), block_seconds=settings.block_seconds)
    made = consumer(reads_then_writes) if "reads-then-writes" in whats else consumer()
    Worker(made, settings, transport=transport).run()


if __name__ == "__main__":
    main(sys.argv[1:])
