"""Jobs that need no transaction, and what became of a job.

`enqueue` is the second choice. It writes to Redis and nowhere else: the job may be there although your transaction was rolled back, or
be missing although it was committed; what Redis loses is lost, and no replay brings it back. `outbox.record` costs an INSERT and has
none of this. What is left for `enqueue` is work that follows from no transaction and may be missed once: warming a cache, say.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from outbox.envelope import DEFAULT_MAX_PAYLOAD_BYTES, Job, check_queue
from outbox.errors import InvalidEvent
from outbox.settings import check_prefix, redis_address
from outbox.transport import ListTransport, Router
from outbox.transport.base import JobState

__all__ = ["JobState", "enqueue", "state"]


def enqueue(redis: str | ListTransport | Router, *jobs: Job, prefix: str = "") -> list[bool]:
    """Add jobs to their queues at once; see the module's head first. May be repeated when it fails: no job is added twice.

    Args:
        redis: an address, as REDIS_URL, to connect to for this call; or a transport that you keep.
        prefix: OUTBOX_KEY_PREFIX, with an address.

    Returns:
        For each job whether it was added; False: the queue knows a job of its id.

    Raises:
        InvalidEvent: a job is too large.
        SettingsError: the address or the prefix is malformed.
        TransportError: Redis did not do it, or has not said so; some may be in their queues.
    """
    for job in jobs:
        if not isinstance(job, Job):
            raise TypeError(f"enqueue takes Jobs (a list as *jobs), not {type(job).__name__}")
        if len(job.data) > DEFAULT_MAX_PAYLOAD_BYTES:
            raise InvalidEvent(
                "payload", f"has {len(job.data)} bytes, more than the limit of {DEFAULT_MAX_PAYLOAD_BYTES}"
            )
    with _lists(redis, prefix) as lists:
        return lists.enqueue(jobs)


def state(redis: str | ListTransport | Router, queue: str, job_id: uuid.UUID, *, prefix: str = "") -> JobState | None:
    """What Redis knows of a job; None: nothing. It is on its way there, ended long ago, or is lost: of a job that was recorded the
    outbox and the consumer's ledger know in any case.

    Args:
        redis, prefix: as `enqueue`.

    Raises:
        InvalidEvent: no queue can have that name.
        SettingsError: the address or the prefix is malformed.
        TransportError: Redis does not answer.
    """
    with _lists(redis, prefix) as lists:
        return lists.job(check_queue(queue), job_id)


@contextmanager
def _lists(redis: str | ListTransport | Router, prefix: str) -> Iterator[ListTransport]:
    if isinstance(redis, str):
        opened = ListTransport.from_url(redis_address(redis), prefix=check_prefix(prefix))
        try:
            yield opened
        finally:
            opened.close()
    else:
        yield redis.lists if isinstance(redis, Router) else redis
