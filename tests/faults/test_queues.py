"""Jobs from the outbox to their effect, with processes, and what operators see and do: what events have no counterpart for. Cases
that are about both are tested with both, where those about events are."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from consumer import Consumer, Envelope, Reject, Retry
from consumer.cli import app as consumer_app
from consumer.jobs import Cancelled, cancel
from consumer.ledger import Operations
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import InvalidEvent, Job, jobs, record
from outbox.cli import app
from outbox.embedded import ValkeyServer
from outbox.errors import StreamUnusable
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.transport import Router, Settled
from tests.faults.proxy import Proxy, port_of, through
from tests.faults.test_consumer_faults import QueueSite, job
from tests.waiting import eventually, in_time, lasting

MAIL = "queue/accounts"


@pytest.fixture
def site(database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path) -> Iterator[QueueSite]:
    with ExitStack() as stack:
        found = QueueSite(database_url, own_valkey().url, tmp_path, stack)
        yield found
        found.all_is_well()


def started(site: QueueSite) -> Counter[str]:
    return Counter(site.starts.read_text().split())


# --- processes that end --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_o_28_workers_that_are_stopped_again_and_again_lose_no_job(site: QueueSite) -> None:
    """50 jobs a second for as long as it lasts; one worker after the other is stopped as soon as another has started, five times
    at least instead of forty."""
    restarts, over, numbers = round(lasting(5, 40)), threading.Event(), count(1)
    number = 0

    def push() -> None:
        nonlocal number
        while not over.wait(0.02):
            site.add(1)
            number = next(numbers)

    pusher = threading.Thread(target=push)
    pusher.start()
    workers = [site.consumer() for _ in range(3)]
    try:
        for began in range(4, 4 + restarts):
            workers.append(site.consumer())
            site.ready(began)
            before = len(site.lists.jobs("accounts", "completed", 10_000))
            eventually(lambda: len(site.lists.jobs("accounts", "completed", 10_000)) > before)  # noqa: B023 - called here
            old = workers.pop(0)
            old.send_signal(signal.SIGTERM)
            assert old.wait(30) == 0
    finally:
        over.set()
        pusher.join()
    assert number > 25 * restarts
    site.settled(number, 40)
    assert (site.unread(), set(started(site).values())) == (0, {1})
    assert site.redis.zcard(f"{site.base}:batches") == 0
    assert site.redis.zcard(f"{site.base}:claims") == 0
    assert set(site.statuses()) == {"completed"}


@pytest.mark.long
def test_o_29_a_job_whose_worker_is_killed_starts_elsewhere_soon(site: QueueSite) -> None:
    """Although it may take an hour."""
    handlers = (site.folder / "shop.py").read_text().replace("raw=True", "raw=True, timeout_seconds=3600")
    (site.folder / "shop.py").write_text(handlers)
    claim, numbers = {"CONSUMER_CLAIM_SECONDS": "2"}, count(1)

    def done_elsewhere() -> float:
        number = next(numbers)
        dead = site.consumer(GATE=str(site.folder / "gate"), **claim)
        site.add(1)
        eventually(lambda: len(started(site)) == number)
        other = site.consumer(**claim)
        site.ready(2 * number)
        dead.kill()
        killed = time.monotonic()
        site.settled(number)
        took = time.monotonic() - killed
        other.terminate()
        assert other.wait(20) == 0
        return took

    assert in_time(5, done_elsewhere)
    assert set(started(site).values()) == {2}
    assert {done.count for done in site.lists.jobs("accounts", "completed")} == {2}


@pytest.mark.long
@pytest.mark.parametrize("reads", ["queues=['paper']", "topics=['paper']"], ids=["another queue's", "a topic's"])
def test_o_39_jobs_of_a_queue_whose_own_workers_are_gone_are_ready_again(site: QueueSite, reads: str) -> None:
    """Made so by a worker of another queue, or by a consumer of topics; meanwhile they are seen as orphaned."""
    claim, what = {"CONSUMER_CLAIM_SECONDS": "1"}, "job" if "queues" in reads else "on"
    (site.folder / "other.py").write_text(
        f"from consumer import Consumer\nwallet = Consumer('printer', {reads})\nwallet.{what}('print')(print)\n"
    )
    site.run("consumer", "run", "other:wallet", **claim)
    eventually(lambda: "consumer printer started" in site.output())
    numbers = count(1)

    def done_by_the_next() -> float:
        number = next(numbers)
        dead = site.consumer(GATE=str(site.folder / "gate"), **claim)
        site.add(1)
        eventually(lambda: len(started(site)) == number)
        dead.kill()
        killed = time.monotonic()
        eventually(lambda: site.lists.queues()[0].orphaned == 1)
        eventually(lambda: (site.pending(), site.unread()) == (0, 1))
        ready = time.monotonic() - killed
        time.sleep(lasting(0, 10))  # nobody is there for so long
        assert site.lists.queues()[0].orphaned == 0
        next_one = site.consumer(**claim)
        site.ready(2 * number)
        begun = time.monotonic()
        site.settled(number)
        took = time.monotonic() - begun
        next_one.terminate()
        assert next_one.wait(20) == 0
        return max(took, ready - 1)  # workers of other queues wait for one claim more than its own

    assert in_time(2, done_by_the_next)


@pytest.mark.long
def test_o_27_jobs_whose_claim_is_heard_of_by_nobody_are_done_in_time(site: QueueSite) -> None:
    """The reply to a worker that waits is lost, and then its connection; or the worker is killed as it gets one. All the time the
    queue has all that is not done."""
    claim, chance, over = {"CONSUMER_CLAIM_SECONDS": "1"}, random.Random(27), threading.Event()
    added, numbers, lost = 0, count(1), list[int]()

    def add(number: int) -> None:
        nonlocal added
        site.add(number)
        added += number

    def watch() -> None:
        while not over.wait(0.005):
            before = added
            with site.redis.pipeline(transaction=True) as pipeline:
                for name in ("high", "normal", "low"):
                    pipeline.llen(f"{site.base}:ready:{name}")
                pipeline.hlen(f"{site.base}:processing").zcard(f"{site.base}:completed")
                if sum(pipeline.execute()) < before:
                    lost.append(before)

    with Proxy(port_of(site.redis_url)) as proxy, ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            worker = site.consumer(REDIS_URL=through(proxy, site.redis_url), **claim)

            def done_after_a_lost_reply() -> float:
                number = next(numbers)
                eventually(lambda: site.blocked() == 1)
                proxy.drop_replies = True
                add(1)
                eventually(lambda: site.pending() == 1)
                assert len(started(site)) == number - 1
                cut = time.monotonic()
                proxy.cut()
                proxy.drop_replies = False
                site.settled(number)
                return time.monotonic() - cut

            assert in_time(2, done_after_a_lost_reply)
            worker.terminate()
            assert worker.wait(20) == 0
            kills = round(lasting(4, 100))

            def done_after_kills() -> float:
                nonlocal kills
                for _ in range(kills):
                    doomed = site.consumer(PACE="0.01", **claim)
                    eventually(lambda: site.blocked() == 1)
                    add(5)
                    time.sleep(chance.uniform(0, 0.03))
                    doomed.kill()
                    eventually(lambda: site.blocked() == 0)
                assert site.state()[0] < added, "kills met work"
                kills, ready = 1, site.output().count("consumer ledger started")
                last = site.consumer(**claim)
                site.ready(ready + 1)
                begun = time.monotonic()
                site.settled(added)
                took = time.monotonic() - begun
                last.terminate()
                assert last.wait(20) == 0
                return took

            assert in_time(2, done_after_kills)
        finally:
            over.set()
        watching.result()
    assert lost == []
    assert len(started(site)) == added


# --- in this process -----------------------------------------------------------------------------------------------------


class Shop:
    """A relay and a worker that a test runs round by round."""

    def __init__(self, site: QueueSite, stack: ExitStack) -> None:
        self.site, self.lists = site, site.lists
        self.addresses: dict[str, Any] = {"database_url": site.database_url, "redis_url": site.redis_url}
        self.relay = Relay(RelaySettings(**self.addresses, check_seconds=0.02, trim_seconds=0.02))
        stack.callback(self.relay.close)
        self._stack = stack
        self.db = stack.enter_context(site.connect())

    def worker(self, consumer: Consumer, **options: Any) -> Worker:
        short = {"check_seconds": 0.02, "block_seconds": 0.02}
        made = Worker(consumer, ConsumerSettings(**self.addresses, **(short | options)))
        self._stack.callback(made.close)
        return made

    def record(self, *given: Job) -> None:
        with psycopg.connect(self.site.database_url) as connection:
            record(connection, *given)

    def run(self, worker: Worker, until: Callable[[], bool]) -> None:
        eventually(lambda: (self.relay.run_once(), worker.run_once(), until())[2])

    def status(self, which: Job) -> str | None:
        found = self.lists.job("accounts", which.id)
        return found and found.status

    def outbox(self, *command: str) -> Result:
        return self._command(app, *command)

    def consumer(self, *command: str) -> Result:
        return self._command(consumer_app, *command)

    def _command(self, which: Any, *command: str) -> Result:
        addresses = {"DATABASE_URL": self.site.database_url, "REDIS_URL": self.site.redis_url}
        return CliRunner().invoke(which, command, env=addresses)


@pytest.fixture
def shop(site: QueueSite) -> Iterator[Shop]:
    with ExitStack() as stack:
        yield Shop(site, stack)


def keeper(seen: list[Envelope], **options: Any) -> Consumer:
    """Keeps what it sees."""
    consumer = Consumer("ledger", queues=["accounts"], **options)
    consumer.job("credited")(lambda job, session: seen.append(job))
    return consumer


def test_o_68_o_72_values_are_those_of_the_job_at_every_stage(shop: Shop) -> None:
    """Delayed, ready, failed once, tried again, dead, requeued: the same bytes; and a result that is a number stays one."""
    money = [Decimal("1234567890.123456789"), Decimal("1E+3"), *[Decimal("0.10")] * 3]
    values: list[Any] = [
        [9007199254740993, 9223372036854775807, -1, 2**80], money, None, {}, [], "", 0, False, "\x00 é😀\u2028",
    ]  # fmt: skip
    given = [
        Job(queue="accounts", type="credited", payload=value, run_at=timedelta(seconds=0.3 * (n % 2)))
        for n, value in enumerate(values)
    ]
    raw = b'{"n": 0.1234567890123456789, "m":1.10 }'
    given.append(Job(queue="accounts", type="credited", payload=raw, content_type="application/json"))
    binary = bytes(range(256))
    given.append(Job(queue="accounts", type="credited", payload=binary, content_type="application/octet-stream"))
    shop.record(*given)
    seen: list[Envelope] = []
    consumer = Consumer("ledger", queues=["accounts"], retry=Retry(attempts=2, first_seconds=0.01))

    @consumer.job("credited")
    def fail(job: Envelope, session: Any) -> Any:
        seen.append(job)
        if len(seen) <= 2 * len(given):
            raise ValueError
        return job.payload if isinstance(job.payload, list) else None

    worker = shop.worker(consumer)
    shop.run(worker, lambda: len(seen) == 2 * len(given) and set(map(shop.status, given)) == {"failed"})
    assert shop.consumer("dead", "requeue", "ledger", "--all", "--yes").exit_code == 0
    shop.run(worker, lambda: set(map(shop.status, given)) == {"completed"})
    assert len(seen) == 3 * len(given)
    wanted = {job.id: hashlib.sha256(job.data).digest() for job in given}
    assert Counter((job.id, hashlib.sha256(job.data).digest()) for job in seen) == dict.fromkeys(wanted.items(), 3)
    payloads = {job.id: job.payload for job in seen}
    texts = [str(each) for each in money]
    expected = [*values[:1], texts, *values[2:], json.loads(raw), binary]
    assert [payloads[job.id] for job in given] == expected
    assert [type(payloads[job.id]) for job in given] == [type(value) for value in expected]
    assert sum(Decimal(text) for text in payloads[given[1].id][2:]) == Decimal("0.30")
    exact = shop.lists.job("accounts", given[0].id)
    assert exact is not None
    assert exact.result == b"[9007199254740993,9223372036854775807,-1,1208925819614629174706176]"


@pytest.fixture(params=["Asia/Kolkata", "America/New_York"])
def process_time_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone of this process meanwhile."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


def test_o_71_a_delay_depends_on_no_time_zone(shop: Shop, process_time_zone: None) -> None:
    """Jobs start when Redis' clock says so, never early; sessions of PostgreSQL have another time zone. One that fails, dies and is
    requeued keeps its time."""
    shop.db.execute(f"ALTER DATABASE \"{shop.db.info.dbname}\" SET timezone = 'Asia/Tokyo'")  # type: ignore[arg-type]
    shop.db.execute("SET TimeZone = 'Asia/Tokyo'")
    with pytest.raises(InvalidEvent, match="time zone"):
        job(run_at=datetime.now() + timedelta(seconds=3))
    now = datetime.now(UTC)
    at = now + timedelta(seconds=1.5)
    given = [
        job(run_at=at), job(run_at=at.astimezone(timezone(timedelta(hours=5, minutes=30)))),
        job(run_at=timedelta(seconds=1.5)), job(), job(run_at=now - timedelta(days=1)),
    ]  # fmt: skip
    shop.record(*given)
    by_sql = shop.db.execute(
        "SELECT outbox_record(%s, 'credited', '{}', p_headers => %s::jsonb)",
        (MAIL, json.dumps({"runat": at.isoformat()})),
    ).fetchone()
    assert by_sql is not None
    seconds, micros = site_time(shop)
    ahead = seconds + micros / 1e6 - time.time()
    begun: dict[uuid.UUID, float] = {}
    seen: list[Envelope] = []
    consumer, tries = (
        Consumer("ledger", queues=["accounts"], retry=Retry(attempts=2, first_seconds=0.01)),
        list[float](),
    )

    @consumer.job("credited")
    def note(job: Envelope, session: Any) -> None:
        if job.id == given[1].id:
            tries.append(time.time() + ahead)
            if len(tries) <= 2:
                raise ValueError
        begun[job.id] = time.time() + ahead
        seen.append(job)

    worker = shop.worker(consumer)
    shop.run(worker, lambda: len(begun) == 5 and shop.status(given[1]) == "failed")
    assert shop.consumer("dead", "requeue", "ledger", "--all", "--yes").exit_code == 0
    shop.run(worker, lambda: shop.status(given[1]) == "completed")
    begun[given[1].id] = tries[0]
    late = [begun[given[0].id], begun[given[1].id], begun[by_sql[0]]]
    assert all(at.timestamp() - 0.01 <= when < at.timestamp() + 3 for when in late)
    assert begun[given[2].id] >= at.timestamp() - 0.01
    assert max(begun[given[3].id], begun[given[4].id]) < at.timestamp()
    assert {job.id: job.run_at for job in seen} == {job.id: job.run_at for job in given} | {by_sql[0]: at}


def site_time(shop: Shop) -> tuple[int, int]:
    seconds, micros = shop.site.redis.time()
    return int(seconds), int(micros)


def test_what_redis_forgets_of_a_queue_comes_again_and_is_done_once(shop: Shop) -> None:
    """All of it, while some are done, one has failed, one is for later, and one is cancelled."""
    seen: list[Envelope] = []
    done, later, off = job(), job(run_at=timedelta(days=1)), job(run_at=timedelta(days=1))
    fails = Job(queue="accounts", type="unknown", payload=None)
    shop.record(done, later, off, fails)
    worker = shop.worker(keeper(seen))
    shop.run(
        worker, lambda: (shop.status(done), shop.status(fails), shop.status(off)) == ("completed", "waiting", "delayed")
    )
    cancelled = cancel(shop.db, Operations("ledger"), shop.lists, "accounts", off.id)
    assert cancelled == Cancelled("cancelled", "delayed")
    assert shop.status(off) == "cancelled"
    shop.site.redis.flushall()
    late = job()
    shop.record(late)
    shop.run(worker, lambda: (shop.status(late), shop.status(later)) == ("completed", "delayed"))
    assert Counter(each.id for each in seen) == {done.id: 1, late.id: 1}
    assert shop.db.execute("SELECT outcome FROM processed_messages WHERE event_id = %s", (off.id,)).fetchone() == (
        "cancelled",
    )


def test_an_idle_worker_begins_a_job_within_50_ms(shop: Shop) -> None:
    """At one of five tries; what looks once a second does at none, since it has just looked."""
    begun: list[float] = []
    consumer = Consumer("ledger", queues=["accounts"])
    consumer.job("credited")(lambda job, session: begun.append(time.monotonic()))
    worker = shop.worker(consumer, block_seconds=20, check_seconds=60)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:

        def begins() -> float:
            number = len(begun)
            eventually(lambda: shop.site.blocked() == 1)
            given = time.monotonic()
            shop.lists.enqueue([job()])
            eventually(lambda: len(begun) > number and not shop.site.pending())
            eventually(lambda: shop.site.blocked() == 1)
            return begun[-1] - given

        assert in_time(0.05, begins, tries=5)
    finally:
        worker.stop()
        thread.join(20)
    assert not thread.is_alive()


def test_of_jobs_with_one_id_one_is_done(shop: Shop) -> None:
    """Recorded twice, before and after it is done, and enqueued besides."""
    seen: list[Envelope] = []
    receipt, worker = job(), shop.worker(keeper(seen))
    for _ in range(2):
        shop.record(receipt)
        shop.record(receipt)
        jobs.enqueue(shop.lists, receipt)
        shop.run(worker, lambda: shop.status(receipt) == "completed" and not shop.site.unread())
    assert [each.id for each in seen] == [receipt.id]


def test_a_ledger_that_went_back_is_repaired_although_redis_knows_the_jobs_as_done(shop: Shop) -> None:
    """`consumer reconcile --repair` brings them to their queue again; a job for later is late and not missing."""
    seen: list[Envelope] = []
    (shop.site.folder / "clerk.py").write_text(
        "from consumer import Consumer\nclerk = Consumer('ledger', queues=['accounts'])\nclerk.job('credited')(print)\n"
    )
    lost, kept, later = job(), job(), job(run_at=timedelta(days=1))
    shop.record(lost, kept, later)
    worker = shop.worker(keeper(seen))
    shop.run(worker, lambda: (shop.status(lost), shop.status(kept)) == ("completed", "completed"))
    shop.db.execute("DELETE FROM processed_messages WHERE event_id = %s", (lost.id,))
    process = shop.site.run("consumer", "reconcile", "clerk:clerk", "--grace", "0", "--repair", "--json")
    assert process.wait(60) == 3
    report = json.loads(shop.site.output()[: shop.site.output().rindex("}") + 1])
    assert (report["missing"], report["late"], report["compared"]) == ([str(lost.id)], [str(later.id)], 3)
    shop.run(worker, lambda: len(seen) == 3)
    assert Counter(each.id for each in seen) == {lost.id: 2, kept.id: 1}
    shop.run(worker, lambda: shop.status(lost) == "completed")


def test_operators_see_queues_and_may_replay_them(shop: Shop) -> None:
    seen: list[Envelope] = []
    shop.record(*(job() for _ in range(3)), job(run_at=timedelta(days=1)))
    worker = shop.worker(keeper(seen))
    shop.run(worker, lambda: len(seen) == 3)
    running = job()
    shop.record(running)
    shop.relay.run_once()
    held = shop.lists.read("ledger", "other", [MAIL], 1, 0)
    assert len(held) == 1
    eventually(lambda: (shop.relay.run_once(), shop.db.execute("SELECT FROM outbox_group").fetchone())[1] is not None)
    found = shop.outbox("status", "--json")
    assert found.exit_code == 0, found.output
    (stream,) = json.loads(found.stdout)["streams"]
    assert (stream["stream"], stream["unpublished"], stream["missing"], stream["entries"]) == (MAIL, 0, 0, 2)
    assert [(group["name"], group["pending"], group["dead"]) for group in stream["groups"]] == [("ledger", 1, 0)]
    assert json.loads(found.stdout)["side_streams"] == []
    assert shop.outbox("status").exit_code == 0
    shop.lists.hand_back("ledger", "other", held)
    shop.run(worker, lambda: len(seen) == 4)
    for group in ([], ["--group", "ledger"]):
        marker = shop.lists.markers([MAIL])
        replayed = shop.outbox("replay", "--topic", MAIL, "--yes", *group)
        assert replayed.exit_code == 0, replayed.output
        assert f"{MAIL}: 5, recorded from" in replayed.output
        assert shop.lists.markers([MAIL]) == marker
        shop.run(
            worker, lambda: shop.lists.queues()[0].counts == {"ready": 0, "delayed": 1, "running": 0, "completed": 4}
        )
    assert len(seen) == 4, "the ledger knows them"
    before = len(shop.site.output())
    shop.site.run("consumer", "doctor", "shop:wallet", "--json").wait(60)
    for findings in (shop.outbox("doctor", "--json").stdout, shop.site.output()[before:]):
        levels = {each["code"]: each["level"] for each in json.loads(findings)}
        assert levels["groups"] == levels["redis-rights"] == levels["lanes"] == "ok", levels
        assert "group-missing" not in levels


def test_a_job_that_is_enqueued_without_a_transaction_is_done_once(shop: Shop) -> None:
    seen: list[Envelope] = []
    once, later = job(priority="high"), job(run_at=timedelta(days=1))
    router = Router.from_url(shop.site.redis_url)
    try:
        assert jobs.enqueue(shop.site.redis_url, once, later, once) == [True, True, False]
        assert jobs.enqueue(router, once) == [False]
        assert jobs.enqueue(shop.lists, once, job()) == [False, True]
        shop.run(shop.worker(keeper(seen)), lambda: len(seen) == 2)
        state = jobs.state(router, "accounts", later.id)
        assert state is not None
        assert (state.status, state.due_at and state.due_at - later.run_at < timedelta(milliseconds=2)) == (  # type: ignore[operator]
            "delayed", True,
        )  # fmt: skip
        assert jobs.enqueue(router, once) == [False], "also when it is done"
        assert jobs.state(shop.site.redis_url, "accounts", uuid.uuid4()) is None
    finally:
        router.close()
    with pytest.raises(InvalidEvent, match="queue: must match"):
        jobs.state(shop.lists, "a:b", once.id)
    with pytest.raises(InvalidEvent, match="more than the limit"):
        jobs.enqueue(shop.lists, Job(queue="accounts", type="t", payload="x" * 1_048_577))
    with pytest.raises(TypeError, match="takes Jobs"):
        jobs.enqueue(shop.lists, [once])  # type: ignore[arg-type]


# --- full memory, lost and odd things ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["new", "lost"])
def test_o_53_a_consumer_that_comes_when_memory_is_full_drains_its_queue(shop: Shop, lost: bool) -> None:
    """It is the first to come, or its name was lost: to make the queue its own takes no memory worth refusing."""
    shop.record(*[job() for _ in range(3)])
    seen: list[Envelope] = []
    worker = shop.worker(keeper(seen))
    if lost:
        worker.run_once()
    eventually(lambda: (shop.relay.run_once(), shop.site.unread() == 3)[1])
    if lost:
        shop.site.redis.delete(f"{shop.site.base}:relay")
    shop.site.redis.config_set("maxmemory", "1")
    eventually(lambda: (worker.run_once(), len(seen) == 3)[1])


@pytest.mark.long
def test_o_64_a_worker_does_good_jobs_behind_broken_ones_soon_and_at_leisure(site: QueueSite) -> None:
    """200 have lost their data when they are due, with 50 good ones behind them."""
    site.consumer(CONSUMER_BLOCK_SECONDS="1", CONSUMER_CHECK_SECONDS="1", CONSUMER_CLAIM_SECONDS="60")
    site.ready(1)
    numbers = count(1)

    def looks() -> int:
        return int(site.redis.info("commandstats")["cmdstat_evalsha"]["calls"])

    def done() -> float:
        number = next(numbers)
        due = datetime.now(UTC) + timedelta(seconds=0.5)
        broken, good = [job(run_at=due) for _ in range(200)], [job(run_at=due) for _ in range(50)]
        site.lists.enqueue([*broken, *good])
        assert site.redis.delete(*[f"{site.base}:job:{each.id}" for each in broken]) == 200
        begun, before = time.monotonic(), looks()
        site.settled(50 * number)
        took = time.monotonic() - begun
        eventually(lambda: time.monotonic() > begun + 3)
        assert looks() - before < 20 * (time.monotonic() - begun), "a second"
        assert site.statuses() == {"completed": 50 * number, "failed": 200 * number}
        return took

    assert in_time(0.5 + 5, done)


@pytest.mark.parametrize("delay", [0, 60])
def test_a_job_that_a_queue_has_twice_is_not_missing_for_ever(shop: Shop, delay: int) -> None:
    """Its data were lost while it was ready, and came again when something else was lost, too; no worker is there."""
    shop.worker(keeper([])).run_once()
    given = [job(run_at=timedelta(seconds=delay)) for _ in range(5)]
    shop.record(*given)
    eventually(lambda: (shop.relay.run_once(), shop.site.unread() == 5)[1])
    shop.site.redis.delete(f"{shop.site.base}:job:{given[0].id}", f"{shop.site.base}:batches")

    def repaired() -> int:
        time.sleep(0.03)
        return shop.relay.run_once().repaired

    eventually(lambda: repaired() > 0)
    rounds = [repaired() for _ in range(30)]
    assert (set(rounds[-20:]), shop.site.unread()) == ({0}, 5)
    assert {str(shop.status(each)) for each in given} == {"delayed" if delay else "ready"}


def test_no_job_starts_before_its_time_not_even_by_a_part_of_a_millisecond(shop: Shop) -> None:
    shop.lists.open("ledger", [MAIL])
    until = time.monotonic() + lasting(3, 10)
    early = []
    while time.monotonic() < until:
        now = datetime.now(UTC)
        due = now.replace(microsecond=now.microsecond // 1000 * 1000) + timedelta(milliseconds=3)
        shop.lists.enqueue([job(run_at=due)])
        while not (found := shop.lists.read("ledger", "one", [MAIL], 1, 0)):
            pass
        seconds, microseconds = shop.site.redis.time()
        early.append(datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds) < due)
        shop.lists.ack("ledger", found)
    assert not any(early)


def test_a_time_that_is_none_fails_at_once(shop: Shop) -> None:
    """It must not be taken for one in some years."""
    seen: list[Envelope] = []
    worker = shop.worker(keeper(seen))
    times = [
        "2090-99-99T00:00:00Z", "2090-00-01T00:00:00Z", "2090-04-31T00:00:00Z", "2090-01-01T24:00:00Z", "2090-01-01T00:60:00Z",
        "2090-01-01T00:00:61Z", "2090-01-01T00:00:00+24:00",
    ]  # fmt: skip
    with psycopg.connect(shop.site.database_url) as connection:
        for runat in times:
            connection.execute(
                "SELECT outbox_record('queue/accounts', 'credited', '{}', p_headers => %s::jsonb)",
                (json.dumps({"runat": runat}),),
            )
    shop.run(worker, lambda: shop.site.dead() == len(times))
    assert (seen, shop.site.unread()) == ([], 0)


def test_a_job_with_thousands_of_headers_holds_no_others_up(shop: Shop) -> None:
    """Rows that SQL producers wrote before there was a limit may have them."""
    seen: list[Envelope] = []
    worker = shop.worker(keeper(seen))
    shop.db.execute("ALTER TABLE public.outbox DROP CONSTRAINT outbox_headers_number")
    many = json.dumps({f"h{number}": "x" for number in range(4500)})
    with psycopg.connect(shop.site.database_url) as connection:
        connection.execute("SELECT outbox_record('queue/accounts', 'credited', '{}', p_headers => %s::jsonb)", (many,))
    shop.record(job())
    shop.run(worker, lambda: len(seen) == 2)
    assert max(len(each.headers) for each in seen) == 4500


def test_what_others_keep_among_the_names_of_queues_ends_no_worker(shop: Shop) -> None:
    shop.site.redis.sadd("queues", b"\xff\xfe", "default", MAIL)
    seen: list[Envelope] = []
    worker = shop.worker(keeper(seen))
    shop.record(job())
    shop.run(worker, lambda: len(seen) == 1)
    assert [queue.queue for queue in shop.lists.queues()] == ["accounts"]
    assert shop.lists.reclaim() == 0


def test_a_job_that_is_in_no_list_any_more_can_be_enqueued_again(shop: Shop) -> None:
    """Nobody else would bring it again."""
    lost, there = job(), job()
    assert shop.lists.enqueue([lost]) == [True]
    shop.site.redis.delete(f"{shop.site.base}:ready:normal")
    assert shop.lists.enqueue([there]) == [True]
    assert shop.lists.enqueue([there, lost]) == [False, True]
    seen: list[Envelope] = []
    worker = shop.worker(keeper(seen))
    eventually(lambda: (worker.run_once(), len(seen) == 2)[1])
    assert shop.lists.enqueue([there, lost]) == [False, False]


def test_what_is_told_late_of_a_cancelled_job_is_no_news(shop: Shop) -> None:
    given = job()
    shop.lists.enqueue([given])
    assert shop.lists.cancel("accounts", given.id) == "ready"
    shop.lists.settle(MAIL, {given.id: Settled("waiting", error="ValueError: too late")})
    assert shop.status(given) == "cancelled"


@pytest.mark.parametrize("state", ["paused", "reads nothing new", "has no queue"])
def test_o_39_whoever_does_nothing_itself_makes_jobs_of_the_dead_ready(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr("consumer.worker._TROUBLES_SECONDS", 0.05)
    consumer = Consumer("ledger", queues=["accounts"], retry=Retry(first_seconds=60))

    @consumer.job("credited")
    def fail(job: Envelope, session: Any) -> None:
        raise Reject("no") if state == "paused" else ValueError

    if state == "has no queue":
        shop.lists.open("others", [MAIL])
    worker = shop.worker(consumer, claim_seconds=0.2, dead_letter_limit=1, max_waiting=1)
    shop.lists.enqueue([job()])

    def works() -> bool:
        with suppress(StreamUnusable):
            worker.run_once()
            return worker._dying if state == "paused" else worker._failing
        return state == "has no queue"

    eventually(works)
    left = Job(queue="paper", type="print", payload=None)
    shop.lists.open("printer", ["queue/paper"])
    shop.lists.enqueue([left])
    assert len(shop.lists.read("printer", "dead", ["queue/paper"], 1, 0)) == 1
    shop.site.redis.zadd("{queue/paper}:claims", {str(left.id): 1})

    def ready() -> bool:
        works()
        found = shop.lists.job("paper", left.id)
        return found is not None and found.status == "ready"

    eventually(ready)
