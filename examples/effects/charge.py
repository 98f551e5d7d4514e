"""A card is charged by an API that takes an idempotency key: ``CONSUMER_BATCH_SIZE=1 consumer run examples.effects.charge:billing``.

The key is the job's id, the same at every try, so however often this runs the card is charged once: for as long as the
API remembers keys.
"""

from __future__ import annotations

import os

import httpx
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Retry
from examples.effects.models import Charge

billing = Consumer("billing", queues=["charges"], retry=Retry(retry_on=(httpx.TransportError,)))  # away, or too slow


@billing.job("charge_card")
def charge(job: Envelope, session: Session) -> None:
    """Charge, and keep what the API answered. A time-out raises: the next try has the same key, and gets the answer."""
    answer = httpx.post(
        f"{os.environ['PAYMENTS_URL']}/charges",
        json={"order": job.key, "amount_halala": job.payload["amount_halala"]},
        headers={"Idempotency-Key": str(job.id)},
        timeout=10,
    )
    answer.raise_for_status()
    session.add(Charge(order_id=job.key, charge_id=answer.json()["id"]))
