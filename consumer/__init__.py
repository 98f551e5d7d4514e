"""Idempotent consumer: every event takes effect exactly once in your database."""

from consumer.handlers import Consumer, Order
from outbox.envelope import Envelope

__all__ = ["Consumer", "Envelope", "Order"]
