"""However Redis was away: publishing and consuming start again within five seconds, with default settings, on every server.

The servers go through each kind of outage side by side; the relay and the consumer of each are never restarted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from outbox.embedded import ValkeyServer, redis_servers
from tests.faults.chaos import Bench
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(240), pytest.mark.xdist_group("recovery")]  # one set of servers

#: Longer than it takes for the pauses to have grown to the longest, and than a time-out (of 3 seconds).
_OUTAGE_SECONDS = 4.0
_WITHIN_SECONDS = 5.0
_COMMANDS = {"relay": ("outbox", "relay"), "consumer": ("consumer", "run", "tests.faults.chaos:ledger")}
_DEFAULTS = {"OUTBOX_CHECK_SECONDS": "1", "OUTBOX_BACKOFF_MAX_SECONDS": "1"}  # of the settings, not of the bench


class Place:
    """A server behind a proxy, an outbox, and a relay and a consumer of them as processes."""

    def __init__(self, name: str, database_url: str, folder: Path, stack: ExitStack) -> None:
        self.name, self.stack, self.ids = name, stack, list[str]()
        self.server = stack.enter_context(ValkeyServer(program=redis_servers()[name], settings={"appendonly": "yes"}))
        self.proxy = stack.enter_context(Proxy(port_of(self.server.url)))
        self.bench = stack.enter_context(Bench(database_url, self.server.url))
        self.bench.make_tables()
        self.logs = [folder / f"{name}-{side}" for side in _COMMANDS]
        address = {"REDIS_URL": through(self.proxy, self.server.url)}
        for command, log in zip(_COMMANDS.values(), self.logs, strict=True):
            self.bench.start(*command, "--log-level", "debug", log=log, **_DEFAULTS, **address)
        self.write()

    def write(self) -> None:
        self.ids += self.bench.write(3)

    def goes_on(self) -> tuple[float, float]:
        """Everything is in the stream soon, and has its effect once; returns after how many seconds."""
        begun, newest = time.monotonic(), set(self.ids[-3:])  # older ones may be trimmed
        eventually(lambda: newest <= set(self.bench.ids()), 30, "published", ignoring=(redis.RedisError,))
        published = time.monotonic() - begun
        eventually(lambda: self.bench.effects().keys() >= newest, 30, "applied")
        applied = time.monotonic() - begun
        assert self.bench.effects() == Counter(dict.fromkeys(self.ids, 1))
        assert [process.poll() for process in self.bench.processes] == [None, None]
        return published, applied


@contextmanager
def killed(place: Place) -> Iterator[str]:
    place.server.kill()
    yield "waits, try"
    place.server.start()


@contextmanager
def paused(place: Place) -> Iterator[str]:
    place.server.pause()
    yield "waits, try"
    place.server.resume()


@contextmanager
def full(place: Place) -> Iterator[str]:
    """The relay does not wait until it is refused; the consumer is not concerned."""
    info = place.bench.redis.info("memory")
    place.bench.redis.set("ballast", bytes(32 << 20))
    place.bench.redis.config_set("maxmemory", int(info["used_memory"]) + (33 << 20))
    eventually(lambda: "is paused, Redis uses more than OUTBOX_MAX_MEMORY_SHARE" in place.logs[0].read_text())
    yield ""
    place.bench.redis.delete("ballast")


@contextmanager
def read_only(place: Place) -> Iterator[str]:
    place.bench.redis.replicaof("127.0.0.1", "1")
    yield "a read only replica"
    place.bench.redis.replicaof("NO", "ONE")


@contextmanager
def not_saved(place: Place) -> Iterator[str]:
    """A snapshot could not be written, as on a full disk: something else has its name."""
    in_the_way = place.server.data_dir / "data" / "dump.rdb"
    in_the_way.mkdir()
    place.bench.redis.config_set("save", "3600 1")
    place.bench.redis.bgsave()
    eventually(lambda: place.bench.redis.info("persistence")["rdb_last_bgsave_status"] == "err")
    yield "MISCONF"
    in_the_way.rmdir()
    place.bench.redis.bgsave()
    eventually(lambda: place.bench.redis.info("persistence")["rdb_last_bgsave_status"] == "ok")
    place.bench.redis.config_set("save", "")


@contextmanager
def without_replicas(place: Place) -> Iterator[str]:
    place.bench.redis.config_set("min-replicas-to-write", 1)
    yield "NOREPLICAS"
    place.bench.redis.config_set("min-replicas-to-write", 0)


@contextmanager
def half_open(place: Place) -> Iterator[str]:
    """Nothing comes through; then new connections work, and those of before stay as they are."""
    place.proxy.deaf = True
    yield "waits, try"
    place.proxy.forget()
    place.proxy.deaf = False


@contextmanager
def loading(place: Place) -> Iterator[str]:
    """From an append-only file that takes some seconds, since each key of it is made to take a while."""
    pipeline = place.bench.redis.pipeline(transaction=False)
    for number in range(40_000):
        pipeline.set(f"{number}", bytes(100))
    pipeline.execute()
    place.server.kill()
    slow = {"key-load-delay": "100", "loading-process-events-interval-bytes": "4096"}
    place.server.settings |= slow
    yield "oading"
    place.server.start()  # returns when it has loaded
    for name in slow:
        del place.server.settings[name]


@contextmanager
def failed_over(place: Place) -> Iterator[str]:
    """The primary dies for good, and its replica takes over."""
    replica = place.stack.enter_context(ValkeyServer(program=redis_servers()[place.name]))
    client = place.stack.enter_context(redis.Redis.from_url(replica.url))
    client.replicaof("127.0.0.1", port_of(place.server.url))
    eventually(lambda: client.info("replication")["master_link_status"] == "up", 20)
    place.server.kill()
    yield "waits, try"
    client.replicaof("NO", "ONE")
    place.server, place.bench.redis = replica, client
    place.proxy.redirect(port_of(replica.url))


@pytest.fixture(scope="module")
def places(new_database_url: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Place]]:
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        found = [Place(name, new_database_url(), folder, stack) for name in sorted(redis_servers())]
        for place in found:
            place.goes_on()
        yield found


Outage = Callable[[Place], AbstractContextManager[str]]
OUTAGES = [killed, paused, full, read_only, not_saved, without_replicas, half_open, loading, failed_over]


@pytest.mark.parametrize("outage", OUTAGES)
def test_everything_goes_on_within_five_seconds(outage: Outage, places: list[Place]) -> None:
    def recovered(place: Place) -> tuple[float, float]:
        before = [len(log.read_text()) for log in place.logs]
        with outage(place) as told:
            place.write()
            time.sleep(_OUTAGE_SECONDS)  # its length, not a wait for anything
        seconds = place.goes_on()
        for log, length in zip(place.logs, before, strict=True):
            assert told in log.read_text()[length:], f"{log.name} says why it waits"
        return seconds

    with ThreadPoolExecutor(len(places)) as pool:
        for place, (published, applied) in zip(places, pool.map(recovered, places), strict=True):
            assert published < _WITHIN_SECONDS, place.name
            assert applied < _WITHIN_SECONDS, place.name
