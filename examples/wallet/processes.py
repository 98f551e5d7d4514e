"""The demo's other processes, and where each one is made to die. Addresses and settings come from the environment.

``python -m examples.wallet.processes producer|ledger c1|ledger c2|dying-relay``

Nothing in the product knows of these deaths: the consumer is killed by its observer, the relay by its transport.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import redis

from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from examples.wallet.handlers import wallet
from examples.wallet.naive import KILLED
from outbox.cli import stop_on_signals
from outbox.errors import TransportError
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.telemetry import Outcomes
from outbox.transport import Marker, Part, StreamTransport


def producer() -> None:
    """Send five payments of 50.00 to wallet w1; the second one twice, since the first time no answer came.

    It writes to the stream directly, as services without an outbox do.
    """
    valkey = redis.Redis.from_url(os.environ["REDIS_URL"])
    stream = os.environ["OUTBOX_KEY_PREFIX"] + "{payments}"
    for number in (1, 2, 3, 4, 5):
        payment = {"wallet": "w1", "amount_halala": 5000, "number": number}
        entry: dict[Any, Any] = {
            "id": str(uuid.uuid4()),  # made once, before the first try
            "type": "payment.received",
            "subject": "w1",
            "data": json.dumps(payment),
        }
        valkey.xadd(stream, entry)
        if number == 2:
            valkey.xadd(stream, entry)  # again: same event id, new entry id


def ledger(name: str) -> None:
    """Run our consumer. The process named c1 dies when its third payment is committed and not yet acknowledged."""
    applied = 0

    def observe(measurement: object) -> None:
        nonlocal applied
        if isinstance(measurement, Outcomes):  # measured after COMMIT, before XACK
            applied += measurement.counts.get("applied", 0)
            if name == "c1" and applied == 3:
                os._exit(KILLED)

    worker = Worker(wallet, ConsumerSettings(process_name=name), observer=observe)
    stop_on_signals(worker.stop)
    worker.run()


class DiesAfterPublishing(StreamTransport):
    """Kills its own process (SIGKILL) after a batch has reached Valkey and before the relay hears of it."""

    def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
        super().publish(parts)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def dying_relay() -> None:
    """Run our relay on that transport."""
    settings = RelaySettings()
    transport = DiesAfterPublishing.from_url(settings.redis_url.get_secret_value(), prefix=settings.key_prefix)
    Relay(settings, transport=transport).run()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["producer"]:
            producer()
        case ["ledger", name]:
            ledger(name)
        case ["dying-relay"]:
            dying_relay()
        case _:
            raise SystemExit(__doc__)
