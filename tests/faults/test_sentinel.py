"""Relay and consumer follow the primary that sentinels name, and nobody restarts them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from outbox.embedded import ValkeyServer, redis_servers
from outbox.errors import TransportUnavailable
from outbox.transport import StreamTransport
from tests.faults.chaos import Bench
from tests.faults.sentinels import Watched
from tests.waiting import eventually

pytestmark = pytest.mark.long

QUICK = {
    "OUTBOX_REDIS_TIMEOUT_SECONDS": "1", "CONSUMER_REDIS_TIMEOUT_SECONDS": "1", "CONSUMER_BLOCK_SECONDS": "0.5",
    "CONSUMER_CLAIM_SECONDS": "1", "CONSUMER_CHECK_SECONDS": "0.2", "CONSUMER_BACKOFF_MAX_SECONDS": "0.3",
}  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "killed") for name in sorted(redis_servers())), ("valkey9", "hangs")]
)
def test_the_primary_is_lost_and_another_takes_over(database_url: str, stack: ExitStack, name: str, how: str) -> None:
    watched = stack.enter_context(Watched(redis_servers()[name]))
    old = watched.primary()
    bench = stack.enter_context(Bench(database_url, watched.url, client=redis.Redis.from_url(old.url)))
    bench.make_tables()
    processes = [bench.start(**QUICK), bench.start("consumer", "run", "tests.faults.chaos:ledger", **QUICK)]
    ids = bench.write(50)
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    if how == "killed":
        old.kill()
    else:
        old.pause()
        stack.callback(old.resume)
    ids += bench.write(50)
    eventually(lambda: watched.primary() is not old, 20, "the replica takes over", ignoring=(ValueError,))
    ids += bench.write(50)
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    # The old one comes back as a replica, and nobody is led astray by it.
    old.resume() if how == "hangs" else old.start()
    with redis.Redis.from_url(old.url, protocol=2) as client:
        eventually(lambda: client.role()[0] == b"slave", 30, ignoring=(redis.RedisError,))
    ids += bench.write(50)
    eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
    assert [process.poll() for process in processes] == [None, None]
    assert bench.dead() == 0


def test_sentinels_that_are_away_or_do_not_know_the_service(own_valkey: Callable[..., ValkeyServer]) -> None:
    for url in (
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/events",
        f"redis+sentinel://127.0.0.1:{own_valkey().port}/events",
    ):
        there = StreamTransport.from_url(url, timeout_seconds=1)
        began = time.monotonic()
        with pytest.raises(TransportUnavailable) as refused:
            there.markers(["a"])
        assert time.monotonic() - began < 3
        assert refused.value.retryable
        there.close()
