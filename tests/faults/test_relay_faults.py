"""Relays that are killed, paused, doubled, and cut off from their replies, each a process of its own where it can be."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest

from outbox import record
from outbox.errors import TransportUnavailable
from outbox.transport import StreamTransport
from tests.faults.chaos import TOPIC, Bench, drain, version_order
from tests.waiting import eventually


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        made.make_tables()
        yield made


def test_o_04_three_relays_of_which_one_is_paused_twice(bench: Bench) -> None:
    relays = [bench.start(OUTBOX_BATCH_ROWS="5") for _ in range(3)]
    eventually(lambda: bench.relays_connected() == 3, 30)
    for version in range(1, 101):
        with bench.db.transaction():
            for kind in ("credited", "limited"):
                record(bench.db, bench.event(type=kind, version=version))
        if version in (30, 60):
            wanted = bench.length() + 1
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


def test_o_09_killed_after_publishing_before_it_knew(bench: Bench) -> None:
    for _ in range(5):
        bench.write()
        dying = bench.start("tests.faults.chaos")
        assert dying.wait(20) == 9
    drain(bench.relay())
    assert bench.ids() == bench.outbox()  # the marker told each successor what was there already
    assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))


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


def test_o_11_lost_replies(bench: Bench) -> None:
    """Every tenth publish reaches the server and its reply is lost."""

    class Deaf(StreamTransport):
        calls = 0

        def publish(self, parts: Sequence[Any]) -> Any:
            answers = super().publish(parts)
            Deaf.calls += 1
            if Deaf.calls % 10 == 0:
                raise TransportUnavailable("connection reset", "ConnectionError")
            return answers

    transport = Deaf(bench.redis, bench.prefix)
    relay = bench.relay(transport=transport, batch_rows=2)
    bench.write(200)
    lost = 0
    while True:
        try:
            if not relay.run_once().sealed and len(bench.ids()) >= 200:
                break
        except TransportUnavailable:
            lost += 1
    assert lost >= 10
    assert bench.ids() == bench.outbox()
    assert bench.consume() == Counter(dict.fromkeys(bench.outbox(), 1))


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
