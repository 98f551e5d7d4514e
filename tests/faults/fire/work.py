"""What the processes under fire do: they produce jobs, or do them."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psycopg
from sqlalchemy import text
from sqlalchemy.orm import Session

from consumer import Consumer, Envelope, Retry
from outbox import Job, jobs, record
from outbox.envelope import uuid7
from outbox.errors import TransportError
from outbox.transport import ListTransport

QUEUE, OTHER = "mail", "errands"
#: No unique constraint, so that a double effect is a row.
TABLES = (
    "CREATE TABLE public.letters (id uuid, due timestamptz, claimed timestamptz, begun timestamptz, delivery_count int)"
)
#: Longest delay, and a producer's mean pause between two jobs.
DELAY_SECONDS, PAUSE_SECONDS = 2.0, 0.03
_AGAIN, _SHARED, _SLOW, _FAILING = 0.1, 0.05, 0.03, 0.01

clerk = Consumer("clerk", queues=[QUEUE], retry=Retry(attempts=1000, first_seconds=0.1, longest_seconds=1))
runner = Consumer("runner", queues=[OTHER])


@clerk.job("letter")
def write(job: Envelope, session: Session) -> dict[str, str]:
    begun = datetime.now(UTC)  # Redis runs on this machine: its clock is ours
    found = jobs.state(_lists(), QUEUE, job.id)
    session.execute(
        text("INSERT INTO public.letters VALUES (:id, :due, :claimed, :begun, :count)"),
        {
            "id": job.id, "due": job.run_at, "begun": begun, "count": job.delivery_count,
            "claimed": found.since if found and found.status == "running" else None,
        },
    )  # fmt: skip
    if random.random() < _SLOW:
        time.sleep(random.uniform(0.05, 0.3))  # long enough to be killed in
    if random.random() < _FAILING:
        raise RuntimeError("now and then")
    return {"to": str(job.key)}


@runner.job("errand")
def run(job: Envelope, session: Session) -> None:
    """There is none: these workers are there for the other queue's sake."""


@cache
def _lists() -> ListTransport:
    """This process's own: nobody asks for it before the fork."""
    return ListTransport.from_url(os.environ["REDIS_URL"], prefix=os.environ["OUTBOX_KEY_PREFIX"])


class Book:
    """A producer's file of what it was about to add, and what it was told to be accepted: what a kill cannot undo.

    A line for each, in one write: a job is written down before it is added, and its id again, after a plus, when that is answered.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self._file = path.open("ab", buffering=0)

    def intend(self, job: Job) -> None:
        due = job.run_at.isoformat() if isinstance(job.run_at, datetime) else "-"
        self._file.write(f"{job.id} {due} {job.priority} {job.lifo}\n".encode())

    def accepted(self, job: Job) -> None:
        self._file.write(f"+{job.id}\n".encode())

    def read(self) -> tuple[dict[uuid.UUID, Job], set[uuid.UUID]]:
        """All jobs, and the ids of those that are in doubt."""
        found: dict[uuid.UUID, Job] = {}
        doubtful: set[uuid.UUID] = set()
        for line in self._path.read_text().splitlines():
            if line.startswith("+"):
                doubtful.discard(uuid.UUID(line[1:]))
                continue
            job_id, due, priority, lifo = line.split()
            run_at = None if due == "-" else datetime.fromisoformat(due)
            made = _job(uuid.UUID(job_id), run_at, priority, lifo == "True")
            found[made.id] = made
            doubtful.add(made.id)
        return found, doubtful

    def settle(self, send: Callable[[Job], object]) -> dict[uuid.UUID, Job]:
        """Add once more what is in doubt, with its id, as a producer does that was interrupted; returns all jobs."""
        found, doubtful = self.read()
        for job_id in doubtful:
            send(found[job_id])
            self.accepted(found[job_id])
        return found


def _job(job_id: uuid.UUID, run_at: datetime | None, priority: Any, lifo: bool) -> Job:
    return Job(
        queue=QUEUE, type="letter", id=job_id, key=str(job_id)[:4], payload={"text": "x" * 100},
        run_at=run_at, priority=priority, lifo=lifo,
    )  # fmt: skip


def _any_job() -> Job:
    if random.random() < _SHARED:  # whoever else makes such a one in this tenth of a second gives it the same id
        return _job(uuid.uuid5(uuid.NAMESPACE_OID, f"{time.time():.1f}"), None, "normal", False)
    later = datetime.now(UTC) + timedelta(seconds=random.uniform(0, DELAY_SECONDS))
    return _job(
        uuid7(), random.choice((None, later)), random.choice(("high", "normal", "low")),
        random.random() < 0.2,
    )  # fmt: skip


def sender(
    kind: Literal["record", "enqueue"], database_url: str, lists: Callable[[], ListTransport]
) -> Callable[[Job], object]:
    """A function that adds a job, in either way."""
    if kind == "enqueue":
        transport = lists()

        def enqueue(job: Job) -> None:
            while True:
                try:
                    jobs.enqueue(transport, job)
                    return
                except TransportError:  # a busy machine
                    time.sleep(0.1)

        return enqueue

    connection = psycopg.connect(database_url)

    def recorded(job: Job) -> None:
        record(connection, job)
        connection.commit()

    return recorded


def produce(kind: Any, path: str) -> None:
    """Make jobs until we are killed."""
    book, earlier = Book(Path(path)), list[Job]()
    send = sender(kind, os.environ["DATABASE_URL"], _lists)
    book.settle(send)
    while True:
        job = _any_job()
        book.intend(job)
        send(job)
        book.accepted(job)
        earlier = [*earlier[-50:], job]
        if random.random() < _AGAIN:  # it may be waiting, running, or done
            send(random.choice(earlier))
        time.sleep(random.uniform(0, 2 * PAUSE_SECONDS))
