"""The transport between relay and consumers; see `outbox.transport.base` for the contract."""

from outbox.transport.base import Claim, Delivery, Marker, Part, StreamInfo, Transport, Wait
from outbox.transport.memory import MemoryTransport
from outbox.transport.stream import StreamTransport

__all__ = [
    "Claim",
    "Delivery",
    "Marker",
    "MemoryTransport",
    "Part",
    "StreamInfo",
    "StreamTransport",
    "Transport",
    "Wait",
]
