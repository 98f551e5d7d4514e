"""The transport between relay and consumers; see `outbox.transport.base` for the contract."""

from outbox.transport.base import Claim, Delivery, Marker, Part, Settled, StreamInfo, Transport, Wait
from outbox.transport.list import ListTransport
from outbox.transport.memory import MemoryTransport
from outbox.transport.router import Router
from outbox.transport.stream import StreamTransport

__all__ = [
    "Claim",
    "Delivery",
    "ListTransport",
    "Marker",
    "MemoryTransport",
    "Part",
    "Router",
    "Settled",
    "StreamInfo",
    "StreamTransport",
    "Transport",
    "Wait",
]
