"""Redis loses data: it evicts, it is killed, the power fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from examples.failures.place import STREAM, Place, payments, wait_for
from examples.failures.stage import Failure, Scene
from outbox.embedded import ValkeyServer

# --- eviction: a cache on the same server ---------------------------------------------------------------------------

CACHE = {"maxmemory": "10mb", "maxmemory_policy": "allkeys-lru"}


def naive_eviction(scene: Scene) -> str:
    """A queue is a key like any other to allkeys-lru, and one that nobody reads just now is a good one to evict."""
    place = scene.at(scene.start(**CACHE))
    place.add(payments(100))
    fill_cache(place)
    empty_cache(place)
    place.work_through()
    return place.outcome(100)


def our_eviction(scene: Scene) -> str:
    """While the memory is full the relay waits; as soon as there is room it publishes what is gone and not acknowledged."""
    place = scene.at(scene.start(**CACHE))
    with place.relay() as publish:
        place.record(payments(100))
        publish()
        fill_cache(place)
        empty_cache(place)
        publish()
    place.consume()
    return place.outcome(100)


def fill_cache(place: Place) -> None:
    """Cache pages until the queue has been evicted."""
    pages = iter(range(1_000_000))

    def evicted() -> bool:
        for page in (next(pages) for _ in range(100)):
            place.redis.set(f"page:{page}", "x" * 10_000)
        return not place.redis.exists(STREAM)

    wait_for("the queue is evicted", evicted)


def empty_cache(place: Place) -> None:
    """As if its pages had expired."""
    place.redis.unlink(*place.redis.scan_iter("page:*", count=1000))


# --- SIGKILL and power cut ------------------------------------------------------------------------------------------


def naive_no_aof(scene: Scene) -> str:
    """Without an AOF everything is in memory."""
    server = scene.start()
    place = scene.at(server)
    place.add(payments(5000))
    server.kill()
    server.start()
    place.work_through()
    return place.outcome(5000)


def our_no_aof(scene: Scene) -> str:
    """The relay finds no stream, and publishes again what is not acknowledged."""
    server = scene.start()
    place = scene.at(server)
    with place.relay() as publish:
        place.record(payments(5000))
        publish()
        server.kill()
        server.start()
        place.must_hold(0)
        publish()
    place.consume()
    return place.outcome(5000)


EVERYSEC = {"appendonly": "yes", "appendfsync": "everysec"}


def naive_power_cut(scene: Scene) -> str:
    """What came since the last fsync is not on the disk yet. (After a SIGKILL the kernel still has it.)"""
    server = scene.start(**EVERYSEC)
    place = scene.at(server)
    place.add(payments(400))
    with power_cut(server, place):
        place.add(payments(100, first=401))
    place.work_through()
    return place.outcome(500)


def our_power_cut(scene: Scene) -> str:
    """The marker went back with the stream, so the relay knows from where on to publish again."""
    server = scene.start(**EVERYSEC)
    place = scene.at(server)
    with place.relay() as publish:
        place.record(payments(400))
        publish()
        with power_cut(server, place):
            place.record(payments(100, first=401))
            publish()
        place.must_hold(400)
        publish()
    place.consume()
    return place.outcome(500)


@contextmanager
def power_cut(server: ValkeyServer, place: Place) -> Iterator[None]:
    """An fsync; then what is done meanwhile; then SIGKILL, and a start with the disk as it was at the fsync."""
    place.redis.config_set("appendfsync", "always")
    place.redis.set("synced", 1)  # returns when all that is in the AOF is on the disk
    place.redis.config_set("appendfsync", "everysec")
    files, disk = server.data_dir / "data" / "appendonlydir", server.data_dir / "disk"
    shutil.copytree(files, disk)
    yield
    server.kill()
    shutil.rmtree(files)
    disk.rename(files)
    server.start()


EXHIBITS = (
    Failure(
        "eviction", "allkeys-lru, and a cache on the same server fills the memory",
        naive_eviction, "100 of 100 lost", our_eviction, "all 100 once",
    ),
    Failure(
        "no-aof", "SIGKILL of a server without an AOF",
        naive_no_aof, "5,000 of 5,000 lost", our_no_aof, "all 5,000 once",
    ),
    Failure(
        "power-cut", "power cut with appendfsync everysec; 100 payments since the last fsync",
        naive_power_cut, "100 of 500 lost", our_power_cut, "all 500 once",
    ),
)  # fmt: skip
