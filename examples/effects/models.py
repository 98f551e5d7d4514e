"""Tables of the examples' own."""

from __future__ import annotations

import uuid

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Of these tables. They have no foreign keys: an order is known to others by its events alone."""


class Order(Base):
    """What was paid for."""

    __tablename__ = "effects_orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    amount_halala: Mapped[int]


class Charge(Base):
    """A card was charged, with the API's own number for it."""

    __tablename__ = "effects_charges"
    order_id: Mapped[str] = mapped_column(primary_key=True)
    charge_id: Mapped[str]


class Payout(Base):
    """Money that was sent, or may have been: ``unknown`` is for a person to look at."""

    __tablename__ = "effects_payouts"
    __table_args__ = (CheckConstraint("status IN ('begun', 'paid', 'unknown')", "effects_payouts_status"),)
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    status: Mapped[str]
