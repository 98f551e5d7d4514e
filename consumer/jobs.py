"""Jobs in the hands of operators: cancel one.

The ledger decides, as it does for events: from the row on that says so nobody runs the job, whatever Redis forgets and a relay
publishes again. Only then it is taken out of Redis; if that fails, or we end before it, a worker finds the row when the job's
turn comes, and cancelling it again takes it out.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import Literal, Protocol

import psycopg

from consumer.ledger import Connection, Operations
from outbox.envelope import QUEUE_PREFIX
from outbox.errors import TransportError
from outbox.transport import Settled, Transport

_log = logging.getLogger(__name__)

#: Longest wait for a worker that runs it just now.
_PATIENCE_SECONDS = 2.0
#: What an outcome in the ledger means for a job that has ended; any other: ``completed``.
ENDED: dict[str | None, Literal["completed", "failed", "cancelled"]] = {
    "dead": "failed",
    "cancelled": "cancelled",
}


class Queues(Transport, Protocol):
    """A transport that has queues."""

    def cancel(self, queue: str, job_id: uuid.UUID) -> str | None:
        """Take a job out of its queue; what it was."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What came of it.

    Attributes:
        status: ``cancelled``: it is not run (any more); ``running``: a worker is at it, and it could not be; ``completed`` or
            ``failed`` (a dead letter, to be discarded): it had ended before.
        before: what it was until then: as the queue had it, or ``waiting`` for another try; None: Redis does not know it (it may be
            on its way there), or does not answer.
    """

    status: Literal["cancelled", "running", "completed", "failed"]
    before: str | None = None


def cancel(
    connection: Connection, operations: Operations, transport: Queues, queue: str, job_id: uuid.UUID
) -> Cancelled:
    """See that a job is not run, if it is not too late. One that is claimed and not yet begun is not begun.

    Args:
        connection: in autocommit mode.
        operations: of the consumer whose queue it is.

    Raises:
        psycopg.Error: PostgreSQL cannot be reached; nothing is known to be cancelled.
    """
    try:
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            operations.be_patient(connection, _PATIENCE_SECONDS)
            before, done = operations.cancel(connection, job_id)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
        return Cancelled("running")
    if not done and before != "cancelled":  # whoever cancelled it may have died before he told Redis
        if before == "waiting":
            return Cancelled("running")
        return Cancelled(ENDED.get(before, "completed"))
    try:
        if before == "waiting":
            transport.settle(QUEUE_PREFIX + queue, {job_id: Settled("cancelled")})
        else:
            before = transport.cancel(queue, job_id)
    except TransportError as error:
        _log.warning("job %s is cancelled, and Redis does not know it yet: %s", job_id, error)
    return Cancelled("cancelled", before)
