"""Two services' tables. In real life they live in two databases; nothing here joins one side with the other.

Amounts are integers: 5,000 halala are 50.00 riyal.
"""

from __future__ import annotations

import uuid

from sqlalchemy import BigInteger, Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The tables of the demo. They have no schema of their own: ``search_path`` decides."""


# --- the producer's side: a payment service ---


class Payment(Base):
    """A payment that was received."""

    __tablename__ = "payment"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    wallet_id: Mapped[str]
    amount_halala: Mapped[int] = mapped_column(BigInteger)


class Customer(Base):
    """A customer; the version counts the changes."""

    __tablename__ = "customer"
    id: Mapped[str] = mapped_column(primary_key=True)
    city: Mapped[str]
    version: Mapped[int]


# --- the consumer's side: wallets ---


class Wallet(Base):
    """The sum of the payments."""

    __tablename__ = "wallet"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance_halala: Mapped[int] = mapped_column(BigInteger)


class Address(Base):
    """Where a customer lives now, as far as the consumer knows."""

    __tablename__ = "address"
    customer_id: Mapped[str] = mapped_column(primary_key=True)
    city: Mapped[str]


def create_tables(engine: Engine) -> None:
    """Make the missing tables; safe when many processes do it at once."""
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('examples.wallet', 0))"))
        Base.metadata.create_all(connection)
