"""The relay and queues: what it publishes there, and what it does when Redis loses jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from outbox import Job, record
from outbox.embedded import ValkeyServer
from outbox.errors import GroupLost
from outbox.store import Store
from outbox.transport import Marker, Router
from tests.faults.chaos import Bench, drain

GROUP, MAIL = "mailer", "queue/mail"


@pytest.fixture
def bench(database_url: str, own_valkey: Callable[..., ValkeyServer]) -> Iterator[Bench]:
    with Bench(database_url, own_valkey().url, "q:") as made:
        yield made


class Site:
    """A relay that looks after everything in every round, and a pool of workers."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.done = bench, Counter[str]()
        self.transport = Router.from_url(bench.redis_url, prefix=bench.prefix, timeout_seconds=2)
        self.begin_anew()

    def begin_anew(self) -> None:
        """With another relay."""
        self._relay = self.bench.relay(trim_seconds=0.001, check_seconds=0.001, batch_rows=3)

    def record(self, number: int, **options: Any) -> list[str]:
        jobs = [Job(queue="mail", type="send", payload={"n": n}, **options) for n in range(number)]
        with self.bench.db.transaction():
            record(self.bench.db, *jobs)
        self.publish()
        return [str(job.id) for job in jobs]

    def publish(self) -> None:
        time.sleep(0.002)  # its looks are due
        drain(self._relay)

    def work(self, count: int = 100) -> list[str]:
        try:
            found = self.transport.read(GROUP, "one", [MAIL], count, 0)
            found += self.transport.claim(GROUP, "one", MAIL, 60, count).deliveries
        except GroupLost:
            self.transport.open(GROUP, [MAIL])
            return self.work(count)
        self.transport.ack(GROUP, found)
        ids = [delivery.fields[b"id"].decode() for delivery in found]
        self.done.update(ids)
        return ids

    @property
    def acked(self) -> Any:
        return self.bench.one("SELECT acked FROM public.outbox_group WHERE name = %s AND stream = %s", GROUP, MAIL)

    def key(self, end: str) -> str:
        return f"{self.bench.key(MAIL)}:{end}"


@pytest.fixture
def site(bench: Bench) -> Iterator[Site]:
    found = Site(bench)
    found.transport.open(GROUP, [MAIL])
    yield found
    found.transport.close()


def test_jobs_are_published_done_and_written_down_as_acknowledged(site: Site) -> None:
    ids = site.record(10)
    assert site.acked == 0
    assert site.work(4) == ids[:4]
    site.publish()
    assert site.acked == 1, "batches of three"
    assert site.work() == ids[4:]
    site.publish()
    assert (site.acked, site.work()) == (4, [])
    assert site.transport.inspect(MAIL).length == 0


def test_a_job_out_of_turn_keeps_its_batch_from_being_acknowledged(site: Site) -> None:
    (first,) = site.record(1, priority="low")
    rest = site.record(8, priority="high")
    assert site.work(5) == rest[:5]
    site.publish()
    assert site.acked == 0
    assert set(site.work()) == {first, *rest[5:]}
    site.publish()
    assert site.acked == 4


def test_after_a_flush_what_is_not_acknowledged_is_published_again(site: Site) -> None:
    ids = site.record(10)
    site.work(4)
    held = site.transport.read(GROUP, "dead", [MAIL], 2, 0)
    site.publish()
    site.bench.redis.flushall()
    site.publish()
    while site.work():
        pass
    assert set(site.done) == set(ids)
    assert {job_id for job_id, times in site.done.items() if times == 2} == {ids[3]}, "its batch was not done"
    site.transport.ack(GROUP, held)  # of before the flush
    site.publish()
    assert (site.acked, site.transport.inspect(MAIL).missing) == (4, 0)


@pytest.mark.parametrize(
    "end", ["ready:normal", "ready:high", "processing", "claims", "delayed", "batches", "relay", "completed", "job"]
)
def test_a_deleted_key_is_mended_by_the_relay_and_every_job_is_done(site: Site, end: str) -> None:
    ids = [*site.record(8), *site.record(6, priority="high"), *site.record(2, run_at=timedelta(days=1000))]
    site.work(2)
    held = [d.fields[b"id"].decode() for d in site.transport.read(GROUP, "dead", [MAIL], 2, 0)]
    key = site.key(end if end != "job" else f"job:{ids[7]}")
    assert site.bench.redis.delete(key) == 1
    for job_id in held:  # their process is dead
        site.bench.redis.zadd(site.key("claims"), {job_id: 0}, xx=True)
    for _ in range(4):
        site.work()
        site.publish()
    while site.work():
        pass
    unclaimed = set(held) if end == "claims" else set()  # they have got a claim, which ends in a minute
    assert set(site.done) == set(ids[:14]) - unclaimed
    state = site.transport.inspect(MAIL)
    assert (state.missing, state.length) == (0, 2 + len(unclaimed))
    before = site.bench.redis.info("commandstats")["cmdstat_rpush"]["calls"]
    site.publish()
    assert site.bench.redis.info("commandstats")["cmdstat_rpush"]["calls"] == before, (
        "nothing is published again any more"
    )


def test_a_restored_older_dump_is_brought_up_to_date(site: Site) -> None:
    ids = site.record(7)
    site.work(2)
    redis = site.bench.redis
    dump = {key: redis.dump(key) for key in redis.scan_iter(count=1000)}
    ids += site.record(5)
    site.work(6)
    site.publish()
    redis.flushall()
    for key, value in dump.items():
        redis.restore(key, 0, value)
    site.publish()
    while site.work():
        pass
    assert set(site.done) == set(ids)
    site.publish()
    assert (site.acked, site.transport.inspect(MAIL).missing) == (5, 0)


def test_an_outbox_that_went_back_publishes_again_what_it_does_not_know_to_be_done(site: Site) -> None:
    """A new epoch: jobs that are outstanding are not there twice, and those that have ended are done once more, for the ledger to
    decide."""
    ids = site.record(9)
    site.work(5)
    Store("public").open_epoch(site.bench.db, 2)
    site.begin_anew()
    site.publish()
    marker = site.transport.markers([MAIL])[MAIL]
    assert isinstance(marker, Marker)
    assert (marker.epoch, site.transport.inspect(MAIL).length) == (2, 9)
    while site.work():
        pass
    assert site.done == Counter([*ids, *ids[:5]])
    site.publish()
    assert (site.acked, site.transport.inspect(MAIL).missing) == (3, 0)


def test_streams_and_queues_side_by_side(site: Site) -> None:
    events = site.bench.write(3, topic="payments")
    jobs = site.record(3)
    assert site.bench.ids("payments") == events
    assert site.work() == jobs
    assert site.transport.markers(["payments", MAIL]).keys() == {"payments", MAIL}
    site.bench.redis.flushall()
    site.publish()
    assert site.bench.ids("payments") == events
