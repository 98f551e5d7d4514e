"""What the soak's consumers do: they keep accounts, and write down what they did: ``consumer run tests.faults.soak.handlers:ledger``."""

from __future__ import annotations

import random

from sqlalchemy import text
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Order, Retry
from consumer.handlers import Handler
from tests.faults.chaos import TOPIC

#: `effects` has no unique constraint, so that a double effect is a row; `limits_set` is in the order of what was applied,
#: since the versions of a key are applied one at a time.
TABLES = """
    CREATE TABLE public.effects (event_id uuid, key text, amount bigint);
    CREATE TABLE public.balances (key text PRIMARY KEY, amount bigint);
    CREATE TABLE public.limits (key text PRIMARY KEY, version bigint);
    CREATE TABLE public.limits_set (number bigint GENERATED ALWAYS AS IDENTITY, key text, version bigint)
"""


#: So many of a handler's calls fail, after their effect.
FAILING = 0.02


def now_and_then() -> None:
    if random.random() < FAILING:
        raise RuntimeError("now and then")


def credit(event: Envelope, session: Session) -> None:
    note_effect(event, session)
    session.execute(
        text(
            "INSERT INTO public.balances AS b VALUES (:key, :amount) "
            "ON CONFLICT (key) DO UPDATE SET amount = b.amount + excluded.amount"
        ),
        {"key": event.key, "amount": event.payload["amount"]},
    )
    now_and_then()


def note_effect(event: Envelope, session: Session) -> None:
    session.execute(
        text("INSERT INTO public.effects VALUES (:id, :key, :amount)"),
        {"id": event.id, "key": event.key, "amount": event.payload["amount"]},
    )


def limit(event: Envelope, session: Session) -> None:
    """Sets, without looking at what is there: the order is the consumer's to keep."""
    session.execute(
        text(
            "WITH noted AS (INSERT INTO public.limits_set (key, version) VALUES (:key, :version)) "
            "INSERT INTO public.limits VALUES (:key, :version) "
            "ON CONFLICT (key) DO UPDATE SET version = excluded.version"
        ),
        {"key": event.key, "version": event.version},
    )
    now_and_then()


def consumer(credit: Handler = credit) -> Consumer:
    made = Consumer("ledger", topics=[TOPIC], retry=Retry(attempts=1000, first_seconds=0.2, longest_seconds=1))
    made.on("credited")(credit)
    made.on("limited", order=Order.LATEST)(limit)
    return made


ledger = consumer()
