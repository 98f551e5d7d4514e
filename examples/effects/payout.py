"""Money is sent by an API without idempotency keys. There are three ways; none of them is exactly once.

* ``at_least_once``: call, and call again when in doubt. Possible: twice.
* ``at_most_once``: note that it begins, in a transaction that commits before the call; what was begun and not finished is never
  tried again, and a person looks at it. Possible: not at all, but never without a row that says ``unknown``.
* ``asking``: ask whether it was done before doing it. Possible: twice, when the first request was still under way.

Each is a whole consumer: ``CONSUMER_BATCH_SIZE=1 consumer run examples.effects.payout:at_most_once``. Run one of them.
They read a topic; all would be the same with a queue.
"""

from __future__ import annotations

import os

import httpx
from sqlalchemy import delete, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Retry
from examples.effects.models import Payout

away = Retry(retry_on=(httpx.ConnectError,))  # nothing was sent: tried until it can be, and not counted
at_least_once = Consumer("payouts-at-least-once", topics=["payouts"], retry=away)
at_most_once = Consumer("payouts-at-most-once", topics=["payouts"], retry=away)
asking = Consumer("payouts-asking", topics=["payouts"], retry=away)


@at_least_once.on("payout.wanted")
def pay(event: Envelope, session: Session) -> None:
    """Who dies after the call and before the COMMIT has paid, and nobody here knows."""
    _call(event).raise_for_status()
    session.add(Payout(id=event.id, status="paid"))


@at_most_once.on("payout.wanted")
def pay_unless_begun(event: Envelope, session: Session) -> None:
    """Who finds that it was begun has died before, or got no answer. The call is not made again."""
    begin = insert(Payout).values(id=event.id, status="begun").on_conflict_do_nothing().returning(Payout.id)
    with session.connection().engine.begin() as own:  # a transaction of its own, over before the call
        is_first = own.execute(begin).first() is not None
    status = "unknown"
    if is_first:
        try:
            status = "paid" if _call(event).is_success else "unknown"
        except httpx.ConnectError:  # nothing was sent: this can be tried again
            with session.connection().engine.begin() as own:
                own.execute(delete(Payout).where(Payout.id == event.id))
            raise
    session.execute(update(Payout).where(Payout.id == event.id).values(status=status))


@asking.on("payout.wanted")
def pay_unless_known(event: Envelope, session: Session) -> None:
    """The event's id is the reference that the API files the payout under, and can be asked for."""
    known = httpx.get(f"{os.environ['PAYMENTS_URL']}/payouts", params={"reference": str(event.id)}, timeout=10)
    if not known.raise_for_status().json():
        _call(event).raise_for_status()
    session.add(Payout(id=event.id, status="paid"))


def _call(event: Envelope) -> httpx.Response:
    body = {"reference": str(event.id), "account": event.key, "amount_halala": event.payload["amount_halala"]}
    return httpx.post(f"{os.environ['PAYMENTS_URL']}/payouts", json=body, timeout=10)
