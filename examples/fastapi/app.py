"""A wallet service in which what comes twice is done once.

    uvicorn examples.fastapi.app:app             the service
    python -m examples.fastapi.app 2026-07       the fee of a month, as any number of schedulers may start it

The tables are made by `create_tables`; yours come by migrations. Every transaction is one ``with Session.begin()`` in the function that
does the work, not a dependency with ``yield``: what ends there may end after the answer was sent.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from sqlalchemy import create_engine, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.orm import Session as Transaction

from consumer import first_time
from outbox import Event, record
from outbox.errors import InvalidKey

FEE_HALALA = 500
engine = create_engine(os.environ["DATABASE_URL"])
Session = sessionmaker(engine)
app = FastAPI()


class Base(DeclarativeBase):
    """Of the service's tables."""


class Wallet(Base):
    """A balance."""

    __tablename__ = "fastapi_wallets"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance_halala: Mapped[int]
    version: Mapped[int]


class Answer(Base):
    """What a request was answered, to be given again. Keep a row for as long as the ledger remembers its key, or longer."""

    __tablename__ = "fastapi_answers"
    key: Mapped[str] = mapped_column(primary_key=True)
    amount_halala: Mapped[int]
    body: Mapped[dict[str, Any]] = mapped_column(JSONB)


class TopUp(BaseModel):
    """What a client sends."""

    amount_halala: int = Field(gt=0, le=1_000_000_00)


class Payment(BaseModel):
    """What the payment provider sends. See to its signature, too."""

    id: str
    wallet_id: str
    amount_halala: int = Field(gt=0, le=1_000_000_00)


@app.post("/wallets/{wallet_id}/top-ups", status_code=201)
def top_up(
    wallet_id: str, wanted: TopUp, idempotency_key: Annotated[str, Header(min_length=1, max_length=200)]
) -> JSONResponse:
    """Add to a wallet; a request with the same Idempotency-Key gets the first one's answer, also while that still runs."""
    key = f"{wallet_id}/{idempotency_key}"  # what clients choose counts for their wallet alone, whose id has no slash
    with Session.begin() as session:
        if not first_time(session, "top-ups", key):
            before = session.get_one(Answer, key)
            if before.amount_halala != wanted.amount_halala:
                raise HTTPException(422, "this Idempotency-Key came with another amount before")
            return JSONResponse(before.body, 201, {"Idempotency-Replayed": "true"})
        body = {"wallet_id": wallet_id, "balance_halala": _add(session, wallet_id, wanted.amount_halala)}
        session.merge(Answer(key=key, amount_halala=wanted.amount_halala, body=body))
    return JSONResponse(body, 201)  # committed


@app.post("/webhooks/payments", status_code=204)
def payment(received: Payment) -> Response:
    """A payment has arrived. Any error makes the provider send it again; so does an answer that is lost."""
    with Session.begin() as session:
        if first_time(session, "payment-webhooks", received.id):
            _add(session, received.wallet_id, received.amount_halala)
    return Response(status_code=204)


def charge_fee(month: str) -> int:
    """Take the month's fee from every wallet that has it; returns from how many. Once a month, whoever starts it."""
    with Session.begin() as session:
        if not first_time(session, "monthly-fee", month):
            return 0
        taken = update(Wallet).where(Wallet.balance_halala >= FEE_HALALA).returning(Wallet.id, Wallet.version)
        charged = session.execute(
            taken.values(balance_halala=Wallet.balance_halala - FEE_HALALA, version=Wallet.version + 1)
        ).all()
        for some in (charged[n : n + 1000] for n in range(0, len(charged), 1000)):
            record(session, *(_changed(wallet_id, version, -FEE_HALALA) for wallet_id, version in some))
        return len(charged)


def _add(session: Transaction, wallet_id: str, amount_halala: int) -> int:
    """Open the wallet or add to it; returns the balance."""
    opened = insert(Wallet).values(id=wallet_id, balance_halala=amount_halala, version=1)
    added = {"balance_halala": Wallet.balance_halala + amount_halala, "version": Wallet.version + 1}
    upsert = opened.on_conflict_do_update(index_elements=[Wallet.id], set_=added)
    balance, version = session.execute(upsert.returning(Wallet.balance_halala, Wallet.version)).one()
    record(session, _changed(wallet_id, version, amount_halala))
    return int(balance)


def _changed(wallet_id: str, version: int, amount_halala: int) -> Event:
    payload = {"amount_halala": amount_halala}
    return Event(topic="wallets", type="wallet.changed", key=wallet_id, version=version, payload=payload)


@app.exception_handler(InvalidKey)
def refuse_key(_request: Request, error: InvalidKey) -> JSONResponse:
    """A key that nobody can keep is the caller's mistake."""
    return JSONResponse({"detail": str(error)}, 400)


def create_tables() -> None:
    """Make the tables of the service, where they are not there."""
    Base.metadata.create_all(engine)


if __name__ == "__main__":
    print(charge_fee(sys.argv[1]))
