"""However Redis was away: publishing starts again within five seconds, by the real relay with its default settings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis

from outbox.embedded import ValkeyServer
from tests.faults.chaos import ROOT, Bench
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

pytestmark = pytest.mark.long

#: Longer than it takes for the relay's pauses to have grown to the longest, and than a time-out (of 3 seconds).
_OUTAGE_SECONDS = 4.0
_WITHIN_SECONDS = 5.0


@contextmanager
def killed(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    server.kill()
    yield "waits, try"
    server.start()


@contextmanager
def paused(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    server.pause()
    yield "waits, try"
    server.resume()


@contextmanager
def full(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    info = bench.redis.info("memory")
    bench.redis.set("ballast", bytes(32 << 20))
    bench.redis.config_set("maxmemory", int(info["used_memory"]) + (33 << 20))
    yield "is paused, Redis uses more than OUTBOX_MAX_MEMORY_SHARE"
    bench.redis.delete("ballast")


@contextmanager
def loading(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    """From an append-only file that takes some seconds, since each key of it is made to take a while."""
    pipeline = bench.redis.pipeline(transaction=False)
    for number in range(40_000):
        pipeline.set(f"{number}", bytes(100))
    pipeline.execute()
    server.kill()
    server.settings |= {"key-load-delay": "100", "loading-process-events-interval-bytes": "4096"}
    yield "oading"
    server.start()  # returns when it has loaded


@contextmanager
def read_only(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    bench.redis.replicaof("127.0.0.1", "1")
    yield "a read only replica"
    bench.redis.replicaof("NO", "ONE")


@contextmanager
def half_open(server: ValkeyServer, bench: Bench, proxy: Proxy) -> Iterator[str]:
    """Nothing comes through; then new connections work, and those of before stay as they are."""
    proxy.deaf = True
    yield "waits, try"
    proxy.forget()
    proxy.deaf = False


Outage = Callable[[ValkeyServer, Bench, Proxy], AbstractContextManager[str]]


@pytest.mark.parametrize("outage", [killed, paused, full, loading, read_only, half_open])
def test_publishing_goes_on_within_five_seconds(
    outage: Outage, database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    server = own_valkey(settings={"appendonly": "yes"})
    path = tmp_path / "log"
    with Proxy(port_of(server.url)) as proxy, Bench(database_url, server.url) as bench:
        _relay(bench, path, through(proxy, server.url))
        ids = bench.write(3)
        eventually(lambda: bench.ids() == ids, 20)
        with outage(server, bench, proxy) as told:
            ids += bench.write(3)
            time.sleep(_OUTAGE_SECONDS)  # its length, not a wait for anything
        begun = time.monotonic()
        eventually(lambda: set(bench.ids()) == set(ids), 30, ignoring=(redis.RedisError,))
        seconds = time.monotonic() - begun
        assert told in path.read_text(), "the relay has met the outage"
        assert bench.ids()[:3] == ids[:3]
        assert seconds < _WITHIN_SECONDS


def _relay(bench: Bench, path: Path, redis_url: str) -> None:
    """The command, with default settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    bench.processes.append(
        subprocess.Popen(
            [sys.executable, "-m", "outbox", "relay", "--log-level", "debug"], cwd=ROOT,
            env=ours | {"DATABASE_URL": bench.database_url, "REDIS_URL": redis_url},
            stdout=path.open("wb"), stderr=subprocess.STDOUT,
        )
    )  # fmt: skip
