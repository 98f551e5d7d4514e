"""Relay and consumer on a cluster whose slots move and whose primaries die, as processes that nobody restarts (case O-91)."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from consumer.claims import Recovery
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Job, doctor
from outbox.embedded import redis_servers
from outbox.errors import StreamUnusable, TransportUnavailable
from outbox.transport import Delivery, ListTransport, StreamTransport
from outbox.transport.base import streams_of
from tests.contract.test_transport import marker, part
from tests.faults.chaos import TOPIC, Bench, drain, ledger, version_order
from tests.faults.cluster import Cluster
from tests.waiting import eventually

pytestmark = pytest.mark.long

LANES = 8
KEYS = 24
STREAMS = streams_of(TOPIC, LANES)
QUICK = {
    "OUTBOX_LANES": f"{TOPIC}={LANES}", "OUTBOX_REDIS_TIMEOUT_SECONDS": "2", "OUTBOX_TRIM_SECONDS": "0.5",
    "OUTBOX_STREAM_KEEP_SECONDS": "600", "CONSUMER_CLAIM_SECONDS": "1", "CONSUMER_CHECK_SECONDS": "0.2",
    "CONSUMER_BLOCK_SECONDS": "0.5", "CONSUMER_REDIS_TIMEOUT_SECONDS": "2", "CONSUMER_BACKOFF_MAX_SECONDS": "0.3",
}  # fmt: skip


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


class Load:
    """A thread that goes on recording events of many keys; `ids` are those that are committed."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._stop, self.ids = bench, threading.Event(), list[str]()
        self._db = bench.connect(autocommit=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for kind in ("credited", "limited"):
                ids = []
                with self._db.transaction():
                    for key in range(KEYS):
                        ids += self._bench.write(1, self._db, key=f"k{key}", type=kind)
                self.ids += ids
            time.sleep(0.01)  # its pace

    def end(self) -> list[str]:
        self._stop.set()
        self._thread.join()
        return self.ids


class Scene:
    """A cluster, an outbox, a relay and two consumers that are processes of their own."""

    def __init__(self, stack: ExitStack, database_url: str, cluster: Cluster) -> None:
        self.cluster = cluster
        client = cluster.raw(protocol=2, socket_timeout=5)
        self.bench = stack.enter_context(Bench(database_url, cluster.url, client=client))
        self.bench.make_tables()
        self.relay = self.bench.start(**QUICK)
        self.consumers = [self.bench.start("consumer", "run", "tests.faults.chaos:ledger", **QUICK) for _ in range(2)]
        self.load = Load(self.bench)
        stack.callback(self.load.end)
        self.flows()

    def flows(self) -> None:
        """Something is recorded from now on, and it and all before is applied soon, whatever has happened."""
        before = len(self.load.ids)
        eventually(lambda: len(self.load.ids) > before)
        ids = set(self.load.ids)
        eventually(lambda: self._applied() >= ids, 40, "what was recorded is applied")

    def _applied(self) -> set[str]:
        """Applied, or of no use any more: the other consumer was faster with a later state of the key."""
        rows = self.bench.db.execute(
            "SELECT event_id::text FROM public.processed_messages WHERE outcome IN ('applied', 'stale')"
        )
        return {row[0] for row in rows}

    def check(self) -> None:
        """Every event once, in the order of its key, and by the processes that were there at the beginning."""
        ids = set(self.load.end())
        eventually(lambda: self._applied() == ids, 40, "everything is applied")
        assert len(ids) > 1000
        credited = {
            row[0] for row in self.bench.db.execute("SELECT event_id::text FROM public.outbox WHERE type = 'credited'")
        }
        assert self.bench.effects() == Counter(dict.fromkeys(credited, 1))
        newest = dict(self._rows("SELECT key, max(version) FROM public.outbox WHERE type = 'limited' GROUP BY 1"))
        assert dict(self._rows("SELECT key, version FROM public.limits")) == newest
        assert self.bench.dead() == 0
        for stream in STREAMS:
            eventually(lambda s=stream: self.bench.redis.xpending(self.bench.key(s), "ledger")["pending"] == 0, 20)
            for versions in version_order(self.bench.entries(stream)).values():
                assert versions == sorted(versions)
        assert [process.poll() for process in (self.relay, *self.consumers)] == [None] * 3

    def _rows(self, query: str) -> Any:
        return self.bench.db.execute(query).fetchall()

    def slots(self, *streams: str) -> list[int]:
        return [key_slot(self.bench.key(stream).encode()) for stream in streams]


@pytest.fixture
def scene(request: pytest.FixtureRequest, database_url: str, stack: ExitStack) -> Scene:
    """On the wheel's Valkey, or on the server that the test asks for by its name in `redis_servers`."""
    name = getattr(request, "param", "valkey9")
    return Scene(stack, database_url, stack.enter_context(Cluster(program=redis_servers()[name])))


@pytest.mark.parametrize("scene", [name for name in ("redis8", "valkey9") if name in redis_servers()], indirect=True)
def test_o_91_slots_are_moved_under_way(scene: Scene) -> None:
    """Every lane's slot goes to another node, and one of them stands between two for a while."""
    cluster = scene.cluster
    for stream, slot in zip(STREAMS, scene.slots(*STREAMS), strict=True):
        source = cluster.owner(scene.bench.key(stream))
        for step in cluster.move(slot, source, (source + 1) % cluster.size):
            if stream == STREAMS[0] and step.startswith("moved"):
                time.sleep(0.5)  # the other key of the slot is still at the old node
        assert cluster.owner(scene.bench.key(stream)) != source
    scene.flows()
    scene.check()


@pytest.mark.parametrize(
    ("scene", "behind"),
    [
        pytest.param(name, behind, id=f"{name}, its replica is {'behind' if behind else 'up to date'}")
        for name, behind in (("valkey9", False), ("valkey9", True), ("redis8", True))
        if name in redis_servers()
    ],
    indirect=["scene"],
)
def test_o_91_a_primary_is_killed(scene: Scene, behind: bool) -> None:
    cluster = scene.cluster
    victim = cluster.owner(scene.bench.key(STREAMS[0]))
    heir = cluster.replica_of(victim)
    if behind:  # it may not follow any more, and the loss shows in the markers
        cluster.clients[heir].execute_command("CONFIG", "SET", "masteruser", "nobody", "masterauth", "wrong")
        cluster.clients[victim].execute_command("CLIENT", "KILL", "TYPE", "replica")
        eventually(lambda: cluster.clients[heir].role()[3] != "connected")
        scene.flows()
        assert 0 < _length(cluster, heir, scene) < cluster.clients[victim].xlen(scene.bench.key(STREAMS[0]))
    cluster.nodes[victim].kill()
    eventually(lambda: heir in cluster.primaries(), 20, "the replica takes over")
    scene.flows()
    scene.check()


def _length(cluster: Cluster, node: int, scene: Scene) -> int:
    """Entries that a replica has of lane 0."""
    with redis.Redis.from_url(cluster.nodes[node].url, protocol=2) as client:
        client.execute_command("READONLY")
        return int(client.xlen(scene.bench.key(STREAMS[0])))


def test_o_91_a_failover_by_hand(scene: Scene) -> None:
    cluster = scene.cluster
    for primary in range(cluster.size):
        heir = cluster.replica_of(primary)
        cluster.clients[heir].execute_command("CLUSTER", "FAILOVER")
        eventually(lambda heir=heir: heir in cluster.primaries(), 20, "the replica takes over")
        scene.flows()
    eventually(cluster.well, 20)
    scene.check()


# --- one node, and the others -----------------------------------------------------------------------------------------------


@pytest.fixture
def bare(stack: ExitStack) -> Cluster:
    """Three primaries without replicas; what one of them does not serve, the others do not mind."""
    return stack.enter_context(Cluster(replicas=False, settings={"cluster-require-full-coverage": "no"}))


def transport(stack: ExitStack, cluster: Cluster, **options: Any) -> StreamTransport:
    return closed(stack, StreamTransport.from_url(cluster.url, **({"timeout_seconds": 1} | options)))


def closed(stack: ExitStack, made: Any) -> Any:
    stack.callback(made.close)
    return made


def streams_by_node(cluster: Cluster) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {number: [] for number in range(cluster.size)}
    for stream in STREAMS:
        found[cluster.owner(f"{{{stream}}}")].append(stream)
    assert all(found.values())
    return found


def test_a_node_that_is_away_stops_only_its_own_streams(stack: ExitStack, bare: Cluster, database_url: str) -> None:
    """Killed, and later started again without its data: relay and consumer go on with the others, and then with all."""
    lost = set(streams_by_node(bare)[0])
    bench = stack.enter_context(Bench(database_url, bare.url, client=bare.raw(protocol=2)))
    bench.make_tables()
    relay = bench.relay(lanes={TOPIC: LANES}, check_seconds=0.01, redis_timeout_seconds=1)
    settings = ConsumerSettings(
        database_url=database_url, redis_url=bare.url, lanes={TOPIC: LANES}, block_seconds=0.05, check_seconds=0.05,
        redis_timeout_seconds=1,
    )  # fmt: skip
    worker = closed(stack, Worker(ledger, settings))

    def write() -> set[str]:
        return {event for key in range(100) for event in bench.write(1, key=f"k{key}")}

    def consumed() -> set[str]:
        worker.run_once()
        return set(bench.effects())

    all_ids = write()
    drain(relay)
    eventually(lambda: consumed() == all_ids)
    bare.nodes[0].kill()
    more = write()
    relay.run_once()
    elsewhere = {event for stream in set(STREAMS) - lost for event in map(bytes.decode, _ids(bench, stream))}
    assert len(elsewhere & more) > 20
    eventually(lambda: consumed() >= elsewhere, ignoring=(TransportUnavailable,))
    assert bench.effects().keys() == all_ids | elsewhere
    bare.nodes[0].start()
    eventually(lambda: relay.run_once().behind == 0, ignoring=(TransportUnavailable,))
    eventually(lambda: consumed() == all_ids | more, ignoring=(TransportUnavailable,))
    assert bench.effects() == Counter(dict.fromkeys(all_ids | more, 1))


def _ids(bench: Bench, stream: str) -> list[bytes]:
    return [fields[b"id"] for _, fields in bench.redis.xrange(bench.key(stream))]


def test_errors_of_a_node_that_is_away_are_those_of_its_streams(stack: ExitStack, bare: Cluster) -> None:
    there, by_node = transport(stack, bare), streams_by_node(bare)
    there.publish([part(1, stream=stream) for stream in STREAMS])
    there.open("wallet", STREAMS)
    away, fine = by_node[0][0], by_node[1][0]
    while sum(there.inspect(stream).groups[0].pending for stream in STREAMS) < LANES:
        there.read("wallet", "one", STREAMS, 10, 0)
    bare.nodes[0].kill()
    found, _, _ = Recovery(there, "wallet", "two", 0).claim(STREAMS, 10)
    assert {delivery.stream for delivery in found} == {*by_node[1], *by_node[2]}
    answers = there.markers(STREAMS)
    assert {stream for stream, answer in answers.items() if answer == marker(1)} == {*by_node[1], *by_node[2]}
    assert all(isinstance(answers[stream], StreamUnusable) for stream in by_node[0])
    assert set(there.open("wallet", STREAMS)) == set(by_node[0])
    for call in (there.info, there.inspect, lambda stream: there.claim("wallet", "one", stream, 0, 10)):
        call(fine)
        with pytest.raises(StreamUnusable):
            call(away)
    assert there.memory_share() is None
    for node in bare.nodes[1:]:
        node.kill()
    with pytest.raises(TransportUnavailable, match="no node says that the cluster works"):
        there.markers(STREAMS)
    with pytest.raises(TransportUnavailable):
        there.read("wallet", "one", STREAMS, 10, 0.1)
    for node in bare.nodes:
        node.start()
    eventually(lambda: there.markers(STREAMS) == dict.fromkeys(STREAMS), 20, ignoring=(TransportUnavailable,))


def test_a_cluster_that_refuses_everything_is_unavailable(stack: ExitStack) -> None:
    """One without a replica is gone, and with cluster-require-full-coverage the others do not work either."""
    cluster = stack.enter_context(Cluster(replicas=False))
    there = transport(stack, cluster)
    there.publish([part(1, stream=stream) for stream in STREAMS])
    fine = streams_by_node(cluster)[1][0]
    cluster.nodes[0].kill()
    eventually(lambda: "cluster_state:fail" in cluster.clients[1].execute_command("CLUSTER", "INFO"))
    with pytest.raises(TransportUnavailable, match="says that the cluster is down"):
        there.markers([fine])
    cluster.nodes[0].start()
    eventually(lambda: there.markers([fine]) == {fine: marker(1)}, 20, ignoring=(TransportUnavailable,))


def test_a_node_that_hangs_is_waited_for_once(stack: ExitStack, bare: Cluster) -> None:
    there, by_node = transport(stack, bare, block_seconds=0), streams_by_node(bare)
    there.publish([part(1, stream=stream) for stream in STREAMS])
    bare.nodes[0].pause()
    stack.callback(bare.nodes[0].resume)
    began = time.monotonic()
    for _ in range(5):
        answers = there.markers(STREAMS)
        assert [answers[stream] for stream in by_node[1]] == [marker(1)] * len(by_node[1])
        assert isinstance(answers[by_node[0][0]], StreamUnusable)
    assert time.monotonic() - began < 2 * 1


def test_a_slot_between_two_nodes(stack: ExitStack, bare: Cluster) -> None:
    """Its keys are found on either side; where one is here and one is there, the stream waits, and no other does."""
    there, reader = transport(stack, bare), transport(stack, bare)
    there.publish([part(1, stream=stream) for stream in STREAMS])
    reader.open("wallet", STREAMS)
    stream, other = streams_by_node(bare)[0][0], streams_by_node(bare)[1][0]
    slot, seq, read = key_slot(f"{{{stream}}}".encode()), 1, 0
    for step in bare.move(slot, 0, 1):
        halves = {number: bare.clients[number].execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) for number in (0, 1)}
        ours, others = there.publish([part(seq + 1, marker(seq), stream=s) for s in (stream, other)])
        assert others == marker(seq + 1), step
        if halves == {0: 1, 1: 1}:
            assert isinstance(ours, StreamUnusable), step
            assert ours.code == "TRYAGAIN"
            assert isinstance(there.markers([stream])[stream], StreamUnusable)
            bare.clients[0].execute_command("PING")
            there.publish([part(seq + 1, marker(seq + 1), stream=other, marker=marker(seq))])  # as it was
        else:
            assert ours == marker(seq + 1), step
            seq += 1
        read += len(reader.read("wallet", "one", [stream], 100, 0))  # a key by itself is found at any step
        assert read == seq
    assert bare.owner(f"{{{stream}}}") == 1


def test_o_91_a_queue_between_two_nodes_waits_until_it_is_at_one(stack: ExitStack, bare: Cluster) -> None:
    """No script sees half of its keys: each does all or is refused, so that every job is done, once."""
    there, stream = closed(stack, ListTransport.from_url(bare.url, timeout_seconds=1)), "queue/moved"
    there.open("mailer", [stream])
    jobs = [Job(queue="moved", type="send", payload=n, priority=p) for n in range(5) for p in ("high", "low", "normal")]
    there.enqueue(jobs)
    key = f"{{{stream}}}"
    source = bare.owner(key)
    done, refused, held = Counter[str](), Counter[str](), list[Delivery]()
    for _ in bare.move(key_slot(key.encode()), source, (source + 1) % 3):
        for step in ("claim", "ack"):
            try:
                if step == "claim":
                    held += there.read("mailer", "one", [stream], 1, 0)
                elif held:
                    if not there.renew("mailer", "one", held[:1]):
                        continue
                    there.ack("mailer", held[:1])
                    if there.job("moved", uuid.UUID(held[0].fields[b"id"].decode())).status == "completed":  # type: ignore[union-attr]
                        done[held.pop(0).receipt.partition(":")[0]] += 1
            except StreamUnusable as error:
                refused[error.code] += 1
    assert refused.keys() == {"TRYAGAIN"}
    assert refused["TRYAGAIN"] > 15, "all the while"
    found = [*there.read("mailer", "one", [stream], 100, 0), *held]
    there.ack("mailer", found)
    done.update(delivery.receipt.partition(":")[0] for delivery in found)
    assert done == Counter(str(job.id) for job in jobs)
    state = there.inspect(stream)
    assert (state.length, state.missing) == (0, 0)


def test_scripts_forgotten_by_one_node(stack: ExitStack, bare: Cluster) -> None:
    there = transport(stack, bare)
    there.publish([part(1, stream=stream) for stream in STREAMS])
    bare.clients[1].script_flush()
    answers = there.publish([part(seq, marker(seq - 1), stream=stream) for seq in (2, 3) for stream in STREAMS])
    assert answers == [marker(2)] * LANES + [marker(3)] * LANES


def test_the_fullest_node_counts(stack: ExitStack, bare: Cluster) -> None:
    there = transport(stack, bare)
    for client, limit in zip(bare.clients, (1 << 30, 64 << 20, 1 << 30), strict=True):
        client.config_set("maxmemory", limit)
    share = there.memory_share()
    used = int(bare.clients[1].info("memory")["used_memory"])
    assert share == pytest.approx(used / (64 << 20), rel=0.2)


def test_what_was_read_ahead_is_handed_back_at_the_end(stack: ExitStack, bare: Cluster) -> None:
    there, other = transport(stack, bare, block_seconds=1), transport(stack, bare)
    there.open("wallet", STREAMS)
    first, *others = STREAMS
    other.publish([part(1, stream=first)])
    (got,) = there.read("wallet", "one", STREAMS, 10, 1)
    assert got.stream == first
    other.publish([part(1, stream=stream) for stream in others])  # the reads of these still wait
    eventually(lambda: sum(other.inspect(s).groups[0].pending for s in STREAMS) == LANES)
    there.close()
    claimed = [d for stream in STREAMS for d in other.claim("wallet", "two", stream, 60, 10).deliveries]
    assert {d.stream for d in claimed} == set(others)
    assert {d.count for d in claimed} == {1}


def test_an_entry_of_any_stream_is_read_at_once(stack: ExitStack, bare: Cluster) -> None:
    """However the others wait: within a small part of the block time."""
    there, other = transport(stack, bare, block_seconds=5), transport(stack, bare)
    there.open("wallet", STREAMS)
    took = []
    for seq in range(1, 4):
        for stream in STREAMS:
            timer = threading.Timer(
                0.02, other.publish, [[part(seq, marker(seq - 1) if seq > 1 else None, stream=stream)]]
            )
            began = time.monotonic()
            timer.start()
            (found,) = there.read("wallet", "one", STREAMS, 10, 5)
            took.append(time.monotonic() - began - 0.02)
            assert found.stream == stream
            timer.join()
    assert sorted(took)[len(took) // 2] < 0.2


def test_doctor_looks_at_every_node(stack: ExitStack, bare: Cluster, database_url: str) -> None:
    bench = stack.enter_context(Bench(database_url, bare.url, client=bare.raw(protocol=2)))
    bare.clients[2].config_set("maxmemory-policy", "allkeys-lru")
    findings = doctor.examine(bench.settings())
    (found,) = [each for each in findings if each.code == "redis-eviction"]
    assert found.level == "error"
    assert found.what.startswith(f"node 127.0.0.1:{bare.nodes[2].port}: maxmemory-policy is allkeys-lru")
    (found,) = [each for each in findings if each.code == "redis-cluster"]
    assert found.level == "ok"
    assert [each.level for each in findings if each.code == "redis-rights"] == ["ok"]
    (alone,) = [e for e in doctor.examine(bench.settings(redis_url=bare.nodes[0].url)) if e.code == "redis-cluster"]
    assert "redis+cluster://" in alone.do


def test_a_server_of_a_cluster_by_a_plain_address_says_so(stack: ExitStack, bare: Cluster) -> None:
    alone = closed(stack, StreamTransport.from_url(bare.nodes[0].url))
    answers = alone.markers(STREAMS)
    assert None in answers.values()
    assert any(isinstance(a, StreamUnusable) and "redis+cluster://" in str(a) for a in answers.values())


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_a_server_that_is_no_cluster_by_a_clusters_address(name: str, own_valkey: Callable[..., Any]) -> None:
    there = StreamTransport.from_url(own_valkey(name).url.replace("redis://", "redis+cluster://"))
    with pytest.raises(TransportUnavailable, match="cluster support disabled"):
        there.markers(["a"])
    there.close()
