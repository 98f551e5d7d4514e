"""What becomes of the deliveries of a worker that has died: who took it with him is counted, the others go on at once.

Everything here may be done twice, by a successor and, if it dies before it has said that it is done, by the next one: what was
said is in the ledger, and what was taken over is the dead one's no more. Whatever somebody else has finished, claimed or leased
meanwhile is his.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from consumer.notes import Will
from consumer.process import Outcome, Processor
from consumer.work import Item
from outbox.envelope import is_queue
from outbox.errors import GroupLost, StreamUnusable, TransportError
from outbox.transport import Delivery, Transport
from outbox.transport.base import Settled

_log = logging.getLogger(__name__)

#: What was delivered more often than this, and nobody could say why it was not done, may have ended its process.
SUSPECT_AFTER = 2
#: Most deliveries taken over of each stream; others come with the next look, or when they have been idle for long.
_MOST = 10_000
#: What those that have waited come to; of others nothing new is known.
_ENDS = (Outcome.APPLIED, Outcome.IGNORED, Outcome.DEAD, Outcome.RETRY, Outcome.PARKED)


@dataclass(slots=True)
class Estate:
    """What a successor goes on with.

    Attributes:
        innocent: no handler was at them.
        suspects: to be run alone, and counted as delivered when they are.
        told: of how many it is written down now that a process died of them.
        held: those that must be looked at again: another transaction (the dead one's own, most likely) holds their rows.
    """

    innocent: list[Delivery] = field(default_factory=list)
    suspects: list[Delivery] = field(default_factory=list)
    told: int = 0
    held: int = 0


def settle(
    will: Will, processor: Processor, transport: Transport, group: str, name: str, streams: Sequence[str]
) -> Estate:
    """Take over what a worker has left.

    Args:
        name: the successor's in the group.

    Raises:
        TransportError: Redis failed; to be done again.
        DatabaseUnavailable: PostgreSQL failed; to be done again.
    """
    estate = Estate()
    _settle_leased(will, processor, transport, estate)
    for stream in streams:
        try:
            left = transport.left(group, will.name, stream, _MOST)
        except (GroupLost, StreamUnusable):
            continue
        if len(will.deliveries) == 1:
            for delivery in [d for d in left if _name(d) in will.deliveries]:
                left.remove(delivery)
                if item := _said(processor, delivery, estate):
                    transport.ack(group, [delivery], *([[item.settled]] if is_queue(stream) else []))
        _take_over(will, left, lambda those: transport.inherit(group, name, will.name, those), estate)
    if estate.innocent or estate.suspects:
        _log.info(
            "took over from %s: %d deliveries, and %d to be run alone",
            will.name, len(estate.innocent), len(estate.suspects), extra={"action": "inherited"},
        )  # fmt: skip
    return estate


def _name(delivery: Delivery) -> tuple[str, str]:
    return delivery.stream, delivery.receipt


def _take_over(
    will: Will, left: Sequence[Delivery], inherit: Callable[[Sequence[Delivery]], list[Delivery]], estate: Estate
) -> None:
    """Where nobody knows what ended the process, each may have: it counts as delivered once more, as if it were claimed."""
    innocent, suspects = [], []
    for delivery in left:
        count = delivery.count + (not will.explained)
        if will.many or _name(delivery) in will.deliveries or count > SUSPECT_AFTER:
            suspects.append(delivery)
        else:
            innocent.append(replace(delivery, count=count))
    estate.innocent += inherit(innocent)
    estate.suspects += [replace(d, count=d.count + 1) for d in inherit(suspects)]


def _settle_leased(will: Will, processor: Processor, transport: Transport, estate: Estate) -> None:
    if will.lease is None:
        return
    innocent = []
    for row in processor.leased(will.lease):
        if will.many or row.id in will.rows or not will.explained:
            if item := _said(processor, row, estate):
                tell_ended(transport, [item])
        else:
            innocent.append(row)
    if innocent:
        processor.release(innocent)


def _said(processor: Processor, delivery: Delivery, estate: Estate) -> Item | None:
    """Have it written down that a process died of this; None: it is not."""
    item = processor.died(delivery)
    done = item.outcome not in (None, Outcome.HELD)
    estate.told += done
    estate.held += not done
    return item if done else None


def tell_ended(transport: Transport, items: Sequence[Item]) -> None:
    """Say in their queues what has become of jobs that have waited in the database. If that fails, look-ups do not know it."""
    ended: dict[str, dict[uuid.UUID, Settled]] = {}
    for item in items:
        if is_queue(item.delivery.stream) and item.outcome in _ENDS:
            with suppress(ValueError):  # a stranger's, and no job's
                job = item.event.id if item.event else uuid.UUID(item.delivery.receipt)
                ended.setdefault(item.delivery.stream, {})[job] = item.settled
    for stream, some in ended.items():
        try:
            transport.settle(stream, some)
        except TransportError as error:
            _log.debug("not said in queue %s what has become of %d jobs: %s", stream, len(some), error)
