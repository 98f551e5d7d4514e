"""Redis loses data: it evicts, it is killed, the power fails, a replica that was behind takes over."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from examples.failures.stage import STREAM, Failure, Place, Scene, payments, wait_for
from outbox.embedded import ValkeyServer

# --- eviction: a cache on the same server ---------------------------------------------------------------------------

CACHE = {"maxmemory": "10mb", "maxmemory_policy": "allkeys-lru"}


def naive_eviction(scene: Scene) -> str:
    """A queue is a key like any other to allkeys-lru, and one that nobody reads just now is a good one to evict."""
    place = scene.at(scene.start(**CACHE))
    place.add(payments(100))
    fill_cache(place)
    place.work_through()
    return place.outcome(100)


def our_eviction(scene: Scene) -> str:
    """While the memory is full the relay waits; as soon as there is room it publishes what is gone and not acknowledged."""
    place = scene.at(scene.start(**CACHE))
    with place.relay() as publish:
        place.record(payments(100))
        publish()
        fill_cache(place)
        place.redis.unlink(*place.redis.scan_iter("page:*", count=1000))  # as its pages would expire
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
    place.add(payments(4900))
    with power_cut(server, place):
        place.add(payments(100, first=4901))
    place.work_through()
    return place.outcome(5000)


def our_power_cut(scene: Scene) -> str:
    """The marker went back with the stream, so the relay knows from where on to publish again."""
    server = scene.start(**EVERYSEC)
    place = scene.at(server)
    with place.relay() as publish:
        place.record(payments(4900))
        publish()
        with power_cut(server, place):
            place.record(payments(100, first=4901))
            publish()
        place.must_hold(4900)
        publish()
    place.consume()
    return place.outcome(5000)


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


# --- failover -------------------------------------------------------------------------------------------------------


def naive_failover(scene: Scene) -> str:
    """Replication is asynchronous: what the primary has accepted and not passed on dies with it."""
    primary, replica = scene.start(repl_diskless_sync_delay="0"), scene.start()
    place, promoted = scene.at(primary), scene.at(replica)
    place.add(payments(100))
    with failover(primary, replica, scene):
        place.add(payments(50, first=101))
    promoted.work_through()
    return promoted.outcome(150)


def our_failover(scene: Scene) -> str:
    """The marker on the new primary is older, so the relay knows from where on to publish again."""
    primary, replica = scene.start(repl_diskless_sync_delay="0"), scene.start()
    place, promoted = scene.at(primary), scene.at(replica)
    with place.relay() as publish:
        place.record(payments(100))
        publish()
        with failover(primary, replica, scene):
            place.record(payments(50, first=101))
            publish()
    promoted.must_hold(100)
    with promoted.relay() as publish:  # the address changed; behind Sentinel or one name it would be the same relay
        publish()
    promoted.consume()
    return promoted.outcome(150)


@contextmanager
def failover(primary: ValkeyServer, replica: ValkeyServer, scene: Scene) -> Iterator[None]:
    """A replica that is up to date, then cut off; what is done meanwhile it never hears of; then it is promoted."""
    old, new = scene.at(primary).redis, scene.at(replica).redis
    new.replicaof("127.0.0.1", primary.port)
    wait_for("the replica has everything", lambda: new.info("replication")["master_link_status"] == "up")
    replica.pause()
    old.client_kill_filter(_type="replica")
    yield
    primary.kill()
    replica.resume()
    new.replicaof("NO", "ONE")


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
        naive_power_cut, "100 of 5,000 lost", our_power_cut, "all 5,000 once",
    ),
    Failure(
        "failover", "failover to a replica that was 50 payments behind",
        naive_failover, "50 of 150 lost", our_failover, "all 150 once",
    ),
)  # fmt: skip
