"""The producer: a business row and the event about it, in one transaction.

The caller owns the transaction. If it commits, both are there; if it rolls back, neither is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

import outbox
from examples.wallet.models import Customer, Payment
from outbox import Event

#: `outbox.record`, or that of an `outbox.Writer` for another schema than ``public``.
Record = Callable[..., None]


def receive_payment(session: Session, wallet_id: str, amount_halala: int, record: Record = outbox.record) -> Event:
    """Note a payment and say so. The payment and its event share an id, which every retry keeps."""
    payload: dict[str, Any] = {"amount_halala": amount_halala}
    event = Event(topic="payments", type="payment.received", key=wallet_id, payload=payload)
    session.add(Payment(id=event.id, wallet_id=wallet_id, amount_halala=amount_halala))
    record(session, event)
    return event


def move_customer(session: Session, customer_id: str, city: str, record: Record = outbox.record) -> None:
    """Change a customer's city and say so, with the version that the change led to."""
    customer = session.get_one(Customer, customer_id, with_for_update=True)
    customer.city = city
    customer.version += 1
    announce_move(session, customer_id, city, customer.version, record)


def announce_move(session: Session, customer_id: str, city: str, version: int, record: Record = outbox.record) -> None:
    """Say only that a customer moved; also for a job that announces an old change late."""
    record(
        session,
        Event(topic="customers", type="customer.moved", key=customer_id, version=version, payload={"city": city}),
    )
