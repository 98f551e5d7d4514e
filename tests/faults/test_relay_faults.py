"""Relays that are killed, paused, doubled, and cut off from their replies, each a process of its own where it can be."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outbox import record
from outbox.embedded import ValkeyServer
from outbox.errors import TransportUnavailable
from outbox.transport import StreamTransport
from tests.faults.chaos import TOPIC, Bench, drain, version_order
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually, stops_within


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        made.make_tables()
        yield made


def test_o_04_three_relays_of_which_one_is_paused_twice(bench: Bench) -> None:
    """Paused for the time of twenty transactions, and not surely with a batch in hand: for that see the next test."""
    relays = [bench.start(OUTBOX_BATCH_ROWS="5") for _ in range(3)]
    eventually(lambda: bench.relays_connected() == 3, 30)
    for version in range(1, 101):
        with bench.db.transaction():
            for kind in ("credited", "limited"):
                record(bench.db, bench.event(type=kind, version=version))
        if version in (30, 60):
            wanted = min(bench.length() + 1, 2 * version)
            eventually(lambda wanted=wanted: bench.length() >= wanted)
            relays[version // 30 - 1].send_signal(signal.SIGSTOP)  # somewhere in the middle of its work, or standing by
        if version in (50, 80):
            relays[0 if version == 50 else 1].send_signal(signal.SIGCONT)
    eventually(lambda: bench.length() == 200, 20)
    for process in relays:
        process.send_signal(signal.SIGCONT)
    entries = bench.entries()
    for kind in ("credited", "limited"):
        assert version_order([e for e in entries if e["type"] == kind]) == {"A": list(range(1, 101))}
    assert sum(bench.consume().values()) == 100
    assert bench.one("SELECT version FROM public.limits") == 100
    assert all(process.poll() is None for process in relays)


class Held(StreamTransport):
    """Its first publish waits until it is let go: the batch is sealed, and in hand."""

    def __init__(self, client: Any, prefix: str) -> None:
        super().__init__(client, prefix)
        self.holding, self.go = threading.Event(), threading.Event()

    def publish(self, parts: Sequence[Any]) -> Any:
        if not self.holding.is_set():
            self.holding.set()
            assert self.go.wait(30)
        return super().publish(parts)


def test_o_04_a_relay_paused_between_seal_and_publish(bench: Bench) -> None:
    """Twice. The other relay publishes what the paused one holds, and goes on; what comes late is not added."""

    def record_versions(first: int, last: int) -> None:
        for version in range(first, last + 1):
            with bench.db.transaction():
                for kind in ("credited", "limited"):
                    record(bench.db, bench.event(type=kind, version=version))

    other = bench.relay(batch_rows=5)
    for first in (1, 51):
        held = Held(bench.redis, bench.prefix)
        paused = bench.relay(transport=held, batch_rows=5)
        record_versions(first, first + 24)
        with ThreadPoolExecutor(1) as pool:
            draining = pool.submit(eventually, lambda: drain(paused) and held.holding.is_set())  # noqa: B023
            try:
                assert held.holding.wait(10)
                eventually(lambda: drain(other) and bench.ids() == bench.outbox())  # it may stand by for a round
                record_versions(first + 25, first + 49)
                eventually(lambda: drain(other) and bench.ids() == bench.outbox())
            finally:
                held.go.set()
            draining.result(20)
        drain(paused)
        assert bench.ids() == bench.outbox()
    entries = bench.entries()
    for kind in ("credited", "limited"):
        assert version_order([e for e in entries if e["type"] == kind]) == {"A": list(range(1, 101))}
    assert sum(bench.consume().values()) == 100
    assert bench.one("SELECT version FROM public.limits") == 100
    assert bench.dead() == 0


def test_o_09_killed_after_publishing_before_it_knew(bench: Bench) -> None:
    for _ in range(5):
        bench.write()
        dying = bench.start("tests.faults.chaos")
        assert dying.wait(20) == 9
    drain(bench.relay())
    assert bench.ids() == bench.outbox()  # the marker told each successor what was there already
    assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))


@pytest.mark.long
def test_o_09_killed_at_random(bench: Bench) -> None:
    rnd = random.Random(9)
    bench.fill(3000)
    for _ in range(4):
        process = bench.start(OUTBOX_BATCH_ROWS="3")
        wanted = bench.length() + rnd.randrange(1, 300)
        eventually(lambda wanted=wanted: bench.length() >= wanted, 20)
        process.kill()
        process.wait()
    assert bench.length() < 3000
    drain(bench.relay())
    assert bench.ids() == bench.outbox()


def test_o_10_four_relays_publish_nothing_twice(bench: Bench) -> None:
    relays = [bench.start(OUTBOX_BATCH_ROWS="50") for _ in range(4)]
    eventually(lambda: bench.relays_connected() == 4, 30)
    for number in range(20):
        bench.write(100, key=f"k{number % 3}")
    eventually(lambda: bench.length() >= 2000, 20)
    sealed = bench.one("SELECT max(seq) FROM public.outbox_batch")
    eventually(lambda: bench.transport().markers([TOPIC])[TOPIC].seq == sealed)  # type: ignore[union-attr]
    assert bench.length() == 2000
    assert bench.ids() == bench.outbox()
    assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))
    assert all(process.poll() is None for process in relays)


@pytest.mark.parametrize("retries", [0, 3], ids=["our client", "a client that retries"])
def test_o_11_lost_replies(database_url: str, own_valkey: Callable[..., ValkeyServer], retries: int) -> None:
    """Every tenth publish reaches the server, and its reply is lost with the connection. Without the part about jobs.

    Our client does not retry, so that the relay looks what is there; one that retries sends the whole publish again.
    """
    server = own_valkey()
    with Bench(database_url, server.url) as bench, Proxy(port_of(server.url)) as proxy:
        address = through(proxy, server.url)
        if retries:
            lost_on_the_way = [redis.ConnectionError, redis.TimeoutError]
            client = redis.Redis.from_url(
                address, socket_timeout=5, retry=Retry(NoBackoff(), retries), retry_on_error=lost_on_the_way
            )
            transport = StreamTransport(client)
        else:
            transport = bench.transport(address)
        relay = bench.relay(transport=transport, batch_rows=2, check_seconds=60)
        bench.write(400)
        # Only what publishes carries the events' types; looks at the marker do not.
        proxy.cut_at(b"credited", lambda number: "after" if number % 10 == 0 else None)
        lost = 0

        def done() -> bool:
            nonlocal lost
            try:
                counts = relay.run_once()
            except TransportUnavailable:
                lost += 1
                return False
            return not counts.sealed and not counts.repaired and bench.length() >= 400

        eventually(done, 30)
        assert proxy.cuts >= 10
        assert lost == (0 if retries else proxy.cuts)
        assert bench.ids() == bench.outbox()
        assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))
        assert bench.dead() == 0


@pytest.mark.long
@pytest.mark.parametrize("published", [False, True], ids=["idle", "with a publish under way"])
def test_sigterm_ends_a_relay_whose_redis_hangs(
    database_url: str, own_valkey: Callable[..., ValkeyServer], published: bool
) -> None:
    """Within OUTBOX_REDIS_TIMEOUT_SECONDS and one more: it waits for the answer at hand, and for no other one."""
    server = own_valkey()
    with Bench(database_url, server.url) as bench:

        def hanging() -> subprocess.Popen[bytes]:
            server.resume()
            before, process = bench.length(), bench.start(OUTBOX_REDIS_TIMEOUT_SECONDS="2")
            eventually(bench.relays_connected)
            bench.write(3)
            eventually(lambda: bench.length() >= before + 3)
            server.pause()
            if published:
                sealed = bench.one("SELECT max(seq) FROM public.outbox_batch")
                bench.write(3)
                eventually(lambda: bench.one("SELECT max(seq) FROM public.outbox_batch") > sealed)
            return process

        try:
            assert stops_within(2 + 1, hanging)
        finally:
            server.resume()


def test_relays_in_threads_race_for_every_batch(bench: Bench) -> None:
    """No process start in the way: four relays loop without a pause while writers write; order is that of commits."""
    done, failures = threading.Event(), []

    def loop() -> None:
        relay = bench.relay(batch_rows=3)
        try:
            while not done.is_set():
                relay.run_once()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with psycopg.connect(bench.database_url) as connection:
            for _ in range(100):
                bench.write(4, connection)
                connection.commit()
                time.sleep(0)
        eventually(lambda: bench.length() >= 400, 20)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    drain(bench.relay())
    assert bench.ids() == bench.outbox()
