"""What a consumer of queues does with jobs, PostgreSQL's side: results, failures, how many at once, cancelling. Jobs come from a
`MemoryTransport` here, to which a queue is a stream; `test_queues.py` has the queues themselves."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from consumer import Consumer, Envelope, Reject, Retry
from consumer.jobs import Cancelled, cancel
from consumer.ledger import Operations
from consumer.process import Outcome, Processor
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import schema as schemas
from outbox.envelope import uuid7
from outbox.errors import TransportUnavailable
from outbox.transport import Delivery, MemoryTransport, Settled
from tests.waiting import eventually

QUEUE = "queue/mail"
SOON = Retry(attempts=1000, first_seconds=0.02, longest_seconds=0.02)


class Told(MemoryTransport):
    """Keeps what it is told of jobs; may fail to be told, and to give a job up."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: dict[uuid.UUID, list[Settled]] = {}
        self.status: dict[uuid.UUID, str] = {}
        self.fails = False
        self.acks_fail = 0

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        assert settled is not None
        if self.acks_fail:
            self.acks_fail -= 1
            raise TransportUnavailable("Redis: no reply", "TimeoutError")
        for delivery, each in zip(deliveries, settled, strict=True):
            self.settled.setdefault(uuid.UUID(delivery.fields[b"id"].decode()), []).append(each)
        super().ack(group, deliveries)

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        if self.fails:
            raise TransportUnavailable("Redis: away", "ConnectionError")
        assert stream == QUEUE
        for job, each in ended.items():
            self.settled.setdefault(job, []).append(each)

    def cancel(self, queue: str, job_id: uuid.UUID) -> str | None:
        assert queue == "mail"
        if self.fails:
            raise TransportUnavailable("Redis: away", "ConnectionError")
        was = self.status.get(job_id)
        self.status[job_id] = "cancelled"
        return was

    def put(self, kind: str = "send", payload: Any = None, stream: str = QUEUE, **fields: Any) -> uuid.UUID:
        job = fields.pop("id", None) or uuid7()
        wire = {"id": job, "type": kind, "data": json.dumps(payload)} | fields
        self.add(stream, {name.encode(): str(value).encode() for name, value in wire.items()})
        return uuid.UUID(str(job))

    def last(self, job: uuid.UUID) -> Settled:
        return self.settled[job][-1]


@pytest.fixture
def queue() -> Told:
    return Told()


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.sent (id uuid)")
        yield connection


@pytest.fixture
def start(database_url: str, queue: Told) -> Iterator[Callable[..., Worker]]:
    with ExitStack() as stack:

        def make(consumer: Consumer, **options: Any) -> Worker:
            settings = {"check_seconds": 0.02, "block_seconds": 0.02} | options
            worker = Worker(
                consumer,
                ConsumerSettings(database_url=database_url, redis_url="redis://unused", **settings),
                transport=queue,
            )
            stack.callback(worker.close)
            return worker

        yield make


def mailer(**options: Any) -> Consumer:
    return Consumer("mailer", queues=["mail"], **({"retry": SOON} | options))


def outcome(db: psycopg.Connection[Any], job: uuid.UUID) -> str | None:
    row = db.execute("SELECT outcome FROM processed_messages WHERE event_id = %s", (job,)).fetchone()
    return row and row[0]


def put_in_ledger(db: psycopg.Connection[Any], job: uuid.UUID, outcome: str) -> None:
    db.execute("INSERT INTO processed_messages (consumer, event_id, outcome) VALUES ('mailer', %s, %s)", (job, outcome))


def drain(worker: Worker, done: Callable[[], bool]) -> None:
    eventually(lambda: worker.run_once() is not None and done())


# --- how they end --------------------------------------------------------------------------------------------------


def test_how_a_job_ended_is_told_its_queue(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    """With what its handler returned; one that failed waits in PostgreSQL, and what becomes of it is told after that."""
    consumer, broken = mailer(), [True]

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> Any:
        session.execute(text("INSERT INTO public.sent VALUES (:id)"), {"id": job.id})
        if job.payload == "fail" and broken[0]:
            raise ValueError("the server is busy")
        if job.payload == "reject":
            raise Reject("no such address")
        return job.payload

    consumer.ignore("noise")
    nothing, much = queue.put(), queue.put(payload={"message": "é" * 3})
    fails, rejected = queue.put(payload="fail"), queue.put(payload="reject")
    noise, unknown, large = queue.put("noise"), queue.put("print"), queue.put(payload="x" * 70_000)
    worker = start(consumer)
    drain(worker, lambda: queue.pending("mailer", QUEUE) == 0 and large in queue.settled)
    assert queue.last(nothing) == Settled("completed")
    assert queue.last(much) == Settled("completed", '{"message":"ééé"}'.encode())
    assert queue.last(rejected) == Settled("failed", error="Reject: no such address")
    assert queue.last(noise) == Settled("completed")
    assert queue.last(unknown) == Settled("waiting")
    note = "its result is not kept: 70,002 bytes of JSON, more than 65,536"
    assert queue.last(large) == Settled("completed", error=note)
    assert queue.settled[fails][0] == Settled("waiting", error="ValueError: the server is busy")

    broken[0] = False
    drain(worker, lambda: queue.last(fails).status == "completed")
    assert queue.last(fails).result == b'"fail"'
    assert Counter(row[0] for row in db.execute("SELECT id FROM public.sent")) == dict.fromkeys(
        (nothing, much, fails, large), 1
    )


def test_handlers_of_every_kind_have_results(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    consumer = mailer()

    @consumer.job("async", timeout_seconds=30)
    async def send_async(job: Envelope, session: Any) -> Any:
        await session.execute(text("SELECT 1"))
        return job.type

    consumer.job("raw", raw=True)(lambda job, connection: connection.execute("SELECT 'raw'").fetchone())
    consumer.job("timed", timeout_seconds=30)(lambda job, session: job.type)
    found = {kind: queue.put(kind) for kind in ("async", "raw", "timed")}
    drain(start(consumer), lambda: queue.settled.keys() == set(found.values()))
    assert {kind: queue.last(job).result for kind, job in found.items()} == {
        "async": b'"async"', "raw": b'["raw"]', "timed": b'"timed"',
    }  # fmt: skip


def test_a_result_is_told_when_redis_is_back_or_is_lost_with_its_worker(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    """The work is done once in either case."""
    consumer, ran = mailer(), []
    consumer.job("send")(lambda job, session: ran.append(job.id) or "done")  # type: ignore[func-returns-value]
    told, worker = queue.put(), start(consumer)
    queue.acks_fail = 2
    for _ in range(2):
        with pytest.raises(TransportUnavailable):
            eventually(worker.run_once)
    drain(worker, lambda: told in queue.settled)
    assert queue.settled[told] == [Settled("completed", b'"done"')]

    lost = queue.put()
    queue.acks_fail = 100
    with pytest.raises(TransportUnavailable):
        eventually(worker.run_once)
    queue.acks_fail = 0  # and it dies before it tries again
    drain(start(consumer, claim_seconds=0.05), lambda: lost in queue.settled)
    assert queue.settled[lost] == [Settled("completed")]
    assert ran == [told, lost]


@pytest.mark.parametrize("result", [{1, 2}, float("nan"), {"at": object()}, {"deep": [[[b"x"]]]}])
def test_a_result_that_is_no_json_fails_nothing(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker], result: Any
) -> None:
    consumer = mailer()
    consumer.job("send")(lambda job, session: result)
    job = queue.put()
    drain(start(consumer), lambda: job in queue.settled)
    assert queue.last(job).status == "completed"
    assert queue.last(job).result is None
    assert str(queue.last(job).error).startswith("its result is not kept: InvalidEvent: result")


def test_a_generator_is_no_result(db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]) -> None:
    consumer = mailer(retry=Retry(attempts=1))
    consumer.job("send")(lambda job, session: (n for n in range(3)))
    job = queue.put()
    drain(start(consumer), lambda: job in queue.settled)
    assert queue.last(job).status == "failed"


@pytest.mark.parametrize(
    ("before", "status"),
    [("applied", "completed"), ("dead", "failed"), ("cancelled", "cancelled"), ("waiting", "waiting")],
)
def test_a_job_that_comes_again_is_told_as_the_ledger_knows_it(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker], before: str, status: str
) -> None:
    """Redis forgot it, and the relay has published it once more."""
    consumer, ran = mailer(), []
    consumer.job("send")(lambda job, session: ran.append(job.id))
    job = queue.put()
    put_in_ledger(db, job, before)
    drain(start(consumer), lambda: job in queue.settled)
    assert queue.settled[job] == [Settled(status)]
    assert not ran
    assert outcome(db, job) == before


def test_nobody_is_stopped_by_a_queue_that_cannot_be_told(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    consumer, broken = mailer(), [True]

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        if broken[0]:
            raise ValueError

    job, worker = queue.put(), start(consumer)
    drain(worker, lambda: outcome(db, job) == "waiting")
    queue.fails, broken[0] = True, False
    drain(worker, lambda: outcome(db, job) == "applied")
    assert queue.last(job).status == "waiting"


def test_a_job_that_is_none_is_put_aside_once_however_often_it_comes(
    db: psycopg.Connection[Any], database_url: str
) -> None:
    """Its receipt has another token each time."""
    engine = schemas.engine(database_url, "handlers")
    processor = Processor(mailer(), engine)
    name = str(uuid7())
    for token in ("1", "2"):
        broken = Delivery(QUEUE, f"{name}:{token}", {b"id": b"no id", b"data": b"{"})
        assert processor.process([broken]) == [Outcome.DEAD]
    assert db.execute("SELECT stream, stream_id FROM dead_letters").fetchall() == [(QUEUE, name)]
    engine.dispose()


# --- how many at once ----------------------------------------------------------------------------------------------


def test_slow_jobs_are_claimed_one_by_one_and_fast_ones_many_at_once(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    consumer = mailer()
    claimed: list[int] = []

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        claimed.append(queue.pending("mailer", QUEUE))
        time.sleep(job.payload)

    worker = start(consumer, claim_seconds=60)
    for _ in range(4):
        queue.put(payload=0.15)
    drain(worker, lambda: len(claimed) == 4)
    assert claimed == [1] * 4
    for _ in range(3000):
        queue.put(payload=0)
    drain(worker, lambda: len(claimed) == 3004)
    assert max(claimed) >= 16


def test_a_job_that_takes_long_holds_no_others_back(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were claimed with it go to others as soon as it is done, and what it did is committed then."""
    monkeypatch.setattr("consumer.worker._OVERRUN_SECONDS", 0.3)
    consumer, by = mailer(), dict[uuid.UUID, str]()

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        by[job.id] = threading.current_thread().name
        time.sleep(job.payload)

    worker = start(consumer, claim_seconds=60)
    for _ in range(200):
        queue.put(payload=0)
    drain(worker, lambda: len(by) == 200)
    late, *rest = [queue.put(payload=0.6 if n == 0 else 0) for n in range(8)]
    worker.run_once()
    assert by.keys() & {late, *rest} == {late}
    assert queue.last(late).status == "completed"
    assert [found.count for found in queue.claim("mailer", "other", QUEUE, 50, 10).deliveries] == [1] * 7


def test_a_job_that_takes_long_and_costs_its_connection_stops_nobody(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch has run for too long when it is rolled back, and nothing of it is done: then it is not handed on for that."""
    monkeypatch.setattr("consumer.worker._OVERRUN_SECONDS", 0.1)
    consumer = mailer()

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        session.execute(text("INSERT INTO public.sent VALUES (:id)"), {"id": job.id})
        if job.payload:
            time.sleep(0.2)
            session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    worker = start(consumer, claim_seconds=60, max_deliveries=2, backoff_max_seconds=0.05)
    thread = threading.Thread(target=worker.run)
    thread.start()
    first = [queue.put() for _ in range(200)]
    eventually(lambda: len(queue.settled) == 200)
    fine, bad, *good = [queue.put(payload=n == 1) for n in range(8)]
    try:
        eventually(lambda: {fine, *good} <= queue.settled.keys() and outcome(db, bad) == "dead")
    finally:
        worker.stop()
        thread.join()
    assert Counter(row[0] for row in db.execute("SELECT id FROM public.sent")) == dict.fromkeys(
        [*first, fine, *good], 1
    )


def test_of_several_queues_one_job_at_a_time_is_claimed(
    db: psycopg.Connection[Any], queue: Told, start: Callable[..., Worker]
) -> None:
    names = ["mail", "sms", "push"]
    consumer = Consumer("mailer", queues=names, retry=SOON)
    claimed: list[int] = []

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        claimed.append(sum(queue.pending("mailer", f"queue/{name}") for name in names))
        time.sleep(0.12)

    for name in names * 2:
        queue.put(stream=f"queue/{name}")
    drain(start(consumer), lambda: len(claimed) == 6)
    assert claimed == [1] * 6


# --- cancelling ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cancelled(db: psycopg.Connection[Any], queue: Told) -> Callable[[uuid.UUID], Cancelled]:
    return lambda job: cancel(db, Operations("mailer"), queue, "mail", job)


def test_a_cancelled_job_is_not_run_whatever_redis_forgets(
    db: psycopg.Connection[Any],
    queue: Told,
    start: Callable[..., Worker],
    cancelled: Callable[[uuid.UUID], Cancelled],
) -> None:
    """Nor one that is on its way to Redis, or that a worker has claimed already."""
    consumer, ran = mailer(), list[uuid.UUID]()
    consumer.job("send")(lambda job, session: ran.append(job.id))
    job, on_its_way = uuid7(), uuid7()
    queue.status[job] = "delayed"
    assert cancelled(job) == Cancelled("cancelled", "delayed")
    assert cancelled(job) == Cancelled("cancelled", "cancelled")
    queue.fails = True
    assert cancelled(on_its_way) == Cancelled("cancelled")  # Redis need not know
    for each in (job, on_its_way):
        queue.put(id=each)
    good = queue.put()
    drain(start(consumer), lambda: good in queue.settled)
    assert ran == [good]
    assert queue.settled[job] == queue.settled[on_its_way] == [Settled("cancelled")]


def test_a_job_that_waits_for_another_try_is_cancelled_also_when_it_is_leased(
    db: psycopg.Connection[Any],
    queue: Told,
    start: Callable[..., Worker],
    cancelled: Callable[[uuid.UUID], Cancelled],
    database_url: str,
) -> None:
    consumer, tries = mailer(retry=Retry(first_seconds=60, longest_seconds=60)), list[uuid.UUID]()

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        tries.append(job.id)
        raise ValueError

    waits, leased = queue.put(), queue.put()
    drain(start(consumer), lambda: len(tries) == 2)
    engine = schemas.engine(database_url, "handlers")
    processor = Processor(consumer, engine)
    db.execute("UPDATE message_failures SET next_attempt_at = now() WHERE event_id = %s", (leased,))
    ((lease,), _) = processor.due(60, 10)
    for job in (waits, leased):
        assert cancelled(job) == Cancelled("cancelled", "waiting")
        assert queue.last(job) == Settled("cancelled")
        assert outcome(db, job) == "cancelled"
    assert processor.process([lease]) == [Outcome.DUPLICATE]
    engine.dispose()
    assert sorted(tries) == sorted([waits, leased])
    assert db.execute("SELECT FROM message_failures").fetchall() == []


@pytest.mark.parametrize(
    ("before", "status"), [("applied", "completed"), ("dead", "failed"), ("cancelled", "cancelled")]
)
def test_what_has_ended_cannot_be_cancelled(
    db: psycopg.Connection[Any], cancelled: Callable[[uuid.UUID], Cancelled], before: str, status: Any
) -> None:
    job = uuid7()
    put_in_ledger(db, job, before)
    assert cancelled(job) == Cancelled(status)
    assert outcome(db, job) == before


@pytest.mark.parametrize("waited", [False, True])
def test_a_job_that_runs_cannot_be_cancelled_and_is_done_once(
    db: psycopg.Connection[Any],
    queue: Told,
    start: Callable[..., Worker],
    cancelled: Callable[[uuid.UUID], Cancelled],
    monkeypatch: pytest.MonkeyPatch,
    waited: bool,
) -> None:
    """For the first time, or after a failure. Who asks is not kept waiting until it is done."""
    monkeypatch.setattr("consumer.jobs._PATIENCE_SECONDS", 0.1)
    consumer, running, end = mailer(), threading.Event(), threading.Event()
    tries: list[int] = []

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        session.execute(text("INSERT INTO public.sent VALUES (:id)"), {"id": job.id})
        tries.append(1)
        if waited and len(tries) == 1:
            raise ValueError
        running.set()
        assert end.wait(30)

    job, worker = queue.put(), start(consumer)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        assert running.wait(30)
        assert cancelled(job) == Cancelled("running")
        end.set()
        eventually(lambda: outcome(db, job) == "applied")
        assert cancelled(job) == Cancelled("completed")
    finally:
        end.set()
        worker.stop()
        thread.join()
    assert db.execute("SELECT id FROM public.sent").fetchall() == [(job,)]


def test_cancelling_and_running_at_once_end_in_one_of_both(
    db: psycopg.Connection[Any],
    queue: Told,
    start: Callable[..., Worker],
    database_url: str,
) -> None:
    """Three workers and three who cancel, at the same jobs, of which every other fails at first."""
    consumer, failed = mailer(), set[uuid.UUID]()

    @consumer.job("send")
    def send(job: Envelope, session: Any) -> None:
        session.execute(text("INSERT INTO public.sent VALUES (:id)"), {"id": job.id})
        if job.payload and job.id not in failed:
            failed.add(job.id)
            raise ValueError

    jobs = [queue.put(payload=n % 2) for n in range(150)]
    ends: list[dict[uuid.UUID, Cancelled]] = [{}, {}, {}]
    workers = [start(consumer) for _ in range(3)]

    def cancels(found: dict[uuid.UUID, Cancelled], some: Sequence[uuid.UUID]) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            for job in some:
                found[job] = cancel(connection, Operations("mailer"), queue, "mail", job)

    threads = [threading.Thread(target=worker.run) for worker in workers]
    threads += [
        threading.Thread(target=cancels, args=(found, some))
        for found, some in zip(ends, (jobs[::-1], jobs[50:], jobs[::3]), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads[3:]:
        thread.join()
    finished = "SELECT count(*) = 150 FROM processed_messages WHERE outcome IN ('applied', 'cancelled')"
    eventually(lambda: bool(db.execute(finished).fetchone() == (True,)))
    for worker in workers:
        worker.stop()
    for thread in threads[:3]:
        thread.join()
    sent = Counter(row[0] for row in db.execute("SELECT id FROM public.sent"))
    assert set(sent.values()) <= {1}
    for job in jobs:
        assert (outcome(db, job) == "applied") == (job in sent)
        said = {found[job].status for found in ends if job in found}
        assert ("cancelled" not in said) if job in sent else said <= {"cancelled", "running"}
    assert db.execute("SELECT FROM message_failures").fetchall() == []
