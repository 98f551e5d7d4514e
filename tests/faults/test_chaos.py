"""Everything at once: writers that race and roll back, relays and consumers killed -9, Redis flushed."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest

from outbox import record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer
from tests.faults.chaos import Bench, version_order
from tests.waiting import eventually

WRITERS = 16
KEYS = 20


class Writers:
    """Threads that take their transaction ids early, lock a key's row late, sleep, and roll back at random.

    `committed` is what they know to be committed: (event id, key, version).
    """

    def __init__(self, bench: Bench, seconds: float) -> None:
        self.bench, self.seconds = bench, seconds
        self.committed: list[tuple[str, str, int]] = []
        self.rolled_back: list[str] = []
        self.failures: list[BaseException] = []
        bench.db.execute(
            "CREATE TABLE public.entities (key text PRIMARY KEY, version bigint NOT NULL);"
            "INSERT INTO public.entities SELECT 'k' || i, 0 FROM generate_series(0, 19) i"
        )
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(WRITERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not self.failures

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _run(self, seed: int) -> None:
        try:
            rnd, end = random.Random(seed), time.monotonic() + self.seconds
            with psycopg.connect(self.bench.database_url) as connection:
                while time.monotonic() < end:
                    self._one(connection, rnd)
        except BaseException as error:
            self.failures.append(error)

    def _one(self, connection: psycopg.Connection[tuple[int]], rnd: random.Random) -> None:
        if rnd.random() < 0.5:
            connection.execute("SELECT pg_current_xact_id()")  # before the lock
            time.sleep(rnd.random() * 0.005)
        key = f"k{rnd.randrange(KEYS)}"
        row = connection.execute(
            "UPDATE public.entities SET version = version + 1 WHERE key = %s RETURNING version", (key,)
        ).fetchone()
        assert row is not None
        event = self.bench.event(key=key, version=row[0])
        record(connection, event)
        time.sleep(rnd.random() * 0.01)
        if rnd.random() < 0.15:
            connection.rollback()
            self.rolled_back.append(str(event.id))
        else:
            connection.commit()
            self.committed.append((str(event.id), key, row[0]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("server", "seconds"),
    [
        ("valkey9", 8.0),
        pytest.param("redis8", 3.0, marks=pytest.mark.long),
        pytest.param("redis7", 3.0, marks=pytest.mark.long),
    ],
)
def test_chaos(
    own_postgres: Callable[..., PostgresServer],
    own_valkey: Callable[..., ValkeyServer],
    server: str,
    seconds: float,
) -> None:
    database_url, redis_url = own_postgres().url, own_valkey(server).url
    for branch in ("outbox", "consumer"):
        schemas.upgrade(database_url, branch)  # type: ignore[arg-type]
    with Bench(database_url, redis_url) as bench:
        bench.make_tables()

        def consume() -> subprocess.Popen[bytes]:
            return bench.start(
                "consumer", "run", "tests.faults.chaos:ledger", CONSUMER_CLAIM_SECONDS="1", CONSUMER_BLOCK_SECONDS="0.2",
                CONSUMER_CHECK_SECONDS="0.2",
            )  # fmt: skip

        consumers = [consume() for _ in range(2)]
        relays = [bench.start(OUTBOX_BATCH_ROWS="50") for _ in range(2)]
        eventually(bench.relays_connected, 30)
        writers = Writers(bench, seconds)
        writers.start()
        kills = flushes = 0
        rnd, next_flush = random.Random(7), time.monotonic() + 1.2
        while writers.running:
            time.sleep(0.5)  # the pace of the faults, not a wait for anything
            victim = rnd.randrange(2)
            relays[victim].kill()
            relays[victim].wait()
            relays[victim] = bench.start(OUTBOX_BATCH_ROWS="50")
            kills += 1
            if kills % 3 == 0:  # the other one works meanwhile, so that a take-over meets new deliveries
                consumers[0].kill()
                consumers[0].wait()
                consumers = [consumers[1], consume()]
            if time.monotonic() >= next_flush:
                bench.redis.flushall()
                flushes, next_flush = flushes + 1, time.monotonic() + 2
        writers.join()
        # Once more with everything written and no group known: the stream is then made anew as a whole.
        for consumer in consumers:
            consumer.kill()
            consumer.wait()
        bench.redis.flushall()
        bench.db.execute("DELETE FROM public.outbox_group")
        bench.redis.flushall()
        flushes += 2
        expected = {event_id for event_id, _, _ in writers.committed}
        assert len(expected) > 200
        assert kills >= 4
        assert flushes >= 2
        eventually(lambda: set(bench.ids()) == expected, 30, f"the stream holds all {len(expected)} events")
        consumers = [consume() for _ in range(2)]
        eventually(lambda: bench.effects().keys() == expected, 30, f"effects of all {len(expected)} events")
        eventually(lambda: bench.redis.xpending(bench.key(), "ledger")["pending"] == 0, 20)
        assert set(bench.outbox()) == expected
        assert bench.effects() == Counter(dict.fromkeys(expected, 1))
        assert not expected.intersection(writers.rolled_back)
        assert bench.one("SELECT count(*) FROM public.processed_messages WHERE outcome = 'applied'") == len(expected)
        assert bench.one("SELECT count(*) FROM public.dead_letters") == 0
        versions: dict[str, list[int]] = {}
        for _, key, version in writers.committed:
            versions.setdefault(key, []).append(version)
        assert version_order(bench.entries()) == {key: sorted(some) for key, some in versions.items()}
        assert [consumer.poll() for consumer in consumers] == [None, None]
