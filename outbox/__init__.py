"""Transactional outbox: record events in the transaction of your business data; a relay publishes them to Redis."""

from outbox.envelope import Envelope, Event, Job
from outbox.errors import InvalidEvent, NoTransaction, OutboxError, SchemaError, SettingsError
from outbox.writer import Writer, record, record_async

__all__ = [
    "Envelope",
    "Event",
    "InvalidEvent",
    "Job",
    "NoTransaction",
    "OutboxError",
    "SchemaError",
    "SettingsError",
    "Writer",
    "record",
    "record_async",
]
