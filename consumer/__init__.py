"""Idempotent consumer: every event takes effect exactly once in your database."""

from consumer.handlers import Consumer, Order, Retry
from consumer.once import first_time, first_time_async
from outbox.envelope import Envelope
from outbox.errors import Reject

__all__ = ["Consumer", "Envelope", "Order", "Reject", "Retry", "first_time", "first_time_async"]
