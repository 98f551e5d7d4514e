"""Something to do: ``python -m examples.effects`` makes the examples' tables, and records one order that was paid, one charge and
one payout."""

from __future__ import annotations

import os
import uuid

from sqlalchemy.orm import Session

from examples.effects.models import Base
from outbox import Event, Job, record
from outbox.schema import engine


def main() -> None:
    """Record them in one transaction."""
    shop = engine(os.environ["DATABASE_URL"], "examples")
    Base.metadata.create_all(shop)
    order = f"order-{uuid.uuid4().hex[:8]}"
    paid = {"amount_halala": 4950, "mail": "ali@example.com"}
    with Session(shop) as session, session.begin():
        record(
            session,
            Event(topic="orders", type="order.paid", key=order, payload=paid),
            Job(queue="charges", type="charge_card", key=order, payload={"amount_halala": 4950}),
            Event(topic="payouts", type="payout.wanted", key="account-1", payload={"amount_halala": 4000}),
        )
    shop.dispose()
    print(f"{order} is recorded, with a charge and a payout")


if __name__ == "__main__":
    main()
