"""A replica that was behind takes over from its primary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from examples.failures.place import payments, wait_for
from examples.failures.stage import Failure, Scene
from outbox.embedded import ValkeyServer


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
        "failover", "failover to a replica that was 50 payments behind",
        naive_failover, "50 of 150 lost", our_failover, "all 150 once",
    ),
)  # fmt: skip
