"""What every transport owes (`outbox.transport.base`): one suite, run against memory and against every server here, which carries
streams and queues.

Each server is spoken to in both protocols, by clients that decode replies and that do not; and each as a cluster (case O-91).

A queue differs by its nature (`is_queue`): it has one group, a receipt is of one claim, and has the claim's token after the job's
id; what is handed back is ready again; what has ended is gone, so that nothing is trimmed; and jobs are known by their ids, so that
none is there twice. What only queues have is in test_queue.py.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis

from outbox.embedded import ValkeyServer, redis_servers
from outbox.envelope import Job, Run, uuid7, wire
from outbox.errors import GroupLost, NotYetSafe, StreamUnusable, TransportError, TransportUnavailable
from outbox.transport import (
    Claim,
    Delivery,
    ListTransport,
    Marker,
    MemoryTransport,
    Part,
    StreamTransport,
    Transport,
    Wait,
)
from outbox.transport.base import GroupState, StreamInfo, StreamState, stream_of, streams_of, topic_of
from tests.faults.cluster import Cluster
from tests.waiting import eventually

GROUP = "wallet"
BINARY = bytes(range(256))
SERVERS = sorted(redis_servers())
#: Protocol, and whether the client decodes replies. Each value of both stands in the first two; the crosswise ones take long.
CLIENTS = [(2, False), (3, True), (2, True), (3, False)]


class Memory:
    """How the suite does to a MemoryTransport what strangers, operators and crashes do."""

    keeps_foreign_types = False
    is_queue = False

    def __init__(self) -> None:
        self.transport = MemoryTransport()
        self.add = self.transport.add
        self.delete = self.transport.delete

    def another(self) -> Transport:
        return self.transport

    def lose(self, stream: str) -> None:
        self.transport.flush()

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        return self.transport.entries(stream)

    def pending(self, stream: str) -> int:
        return self.transport.pending(GROUP, stream)

    def age(self, deliveries: list[Delivery]) -> None:
        """Let these have been pending for very long."""
        for delivery in deliveries:
            pending = self.transport._streams[delivery.stream].groups[GROUP].pending
            pending[int(delivery.receipt)].delivered_at = float("-inf")


class Server:
    """The same for a StreamTransport, past the transport, on a client of its own."""

    keeps_foreign_types = True
    is_queue = False

    def __init__(self, url: str, protocol: int, decode: bool) -> None:
        self._url, self._protocol, self._decode = url, protocol, decode
        self.prefix = f"t{secrets.token_hex(4)}:"
        self.raw: Any = redis.Redis.from_url(url, protocol=2)
        self._clients: list[redis.Redis] = []
        self.transport = self.another()

    def client(self) -> redis.Redis:
        made = redis.Redis.from_url(
            self._url, protocol=self._protocol, decode_responses=self._decode, socket_timeout=30
        )
        self._clients.append(made)
        return made

    def another(self, wait: Wait | None = None) -> Any:
        return StreamTransport(self.client(), self.prefix, wait)

    def key(self, stream: str) -> str:
        return f"{self.prefix}{{{stream}}}"

    def add(self, stream: str, fields: dict[bytes, bytes]) -> str:
        return str(self.raw.xadd(self.key(stream), fields).decode())

    def delete(self, stream: str, receipt: str) -> None:
        self.raw.xdel(self.key(stream), receipt)

    def lose(self, stream: str) -> None:
        self.raw.delete(self.key(stream), f"{self.key(stream)}:relay")

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.raw.xrange(self.key(stream))]

    def pending(self, stream: str) -> int:
        return int(self.raw.xpending(self.key(stream), GROUP)["pending"])

    def age(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.raw.xclaim(self.key(delivery.stream), GROUP, "one", 0, [delivery.receipt], idle=10**9, justid=True)

    def blocked(self) -> int:
        return int(self.raw.info("clients")["blocked_clients"])

    def limit_memory(self, most_bytes: int) -> None:
        self.raw.config_set("maxmemory", most_bytes)

    def close(self) -> None:
        for key in self.raw.scan_iter(match=f"{self.prefix}*", count=1000):
            self.raw.unlink(key)
        for client in (self.raw, *self._clients):
            client.close()


class Nodes(Server):
    """The same for a cluster; `raw` is redis-py's own client of it."""

    kind: Any = StreamTransport

    def __init__(self, cluster: Cluster, protocol: int) -> None:
        self._cluster, self._transports = cluster, list[Any]()
        super().__init__(cluster.nodes[0].url.removesuffix("/0"), protocol, False)
        self.raw.close()
        self.raw = cluster.raw(protocol=2)

    def another(self, wait: Wait | None = None) -> Any:
        made = self.kind.from_url(
            f"{self._cluster.url}?protocol={self._protocol}", prefix=self.prefix, timeout_seconds=30, wait=wait
        )
        self._transports.append(made)
        return made

    def blocked(self) -> int:
        return sum(int(client.info("clients")["blocked_clients"]) for client in self._cluster.clients)

    def limit_memory(self, most_bytes: int) -> None:
        for client in self._cluster.clients:
            client.config_set("maxmemory", most_bytes)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        super().close()


class Queue(Server):
    """The same for a ListTransport."""

    is_queue = True

    def another(self, wait: Wait | None = None) -> Any:
        return ListTransport(self.client(), self.prefix, wait)

    def add(self, stream: str, fields: dict[bytes, bytes]) -> str:
        job_id, key = str(uuid7()), self.key(stream)
        self.raw.hset(f"{key}:job:{job_id}", mapping={":status": "ready", **fields})
        self.raw.rpush(f"{key}:ready:normal", job_id)
        self.raw.zadd(f"{key}:batches", {job_id: "inf"})
        self.raw.hincrby(f"{key}:relay", "added", 1)
        return job_id

    def delete(self, stream: str, receipt: str) -> None:
        self.raw.delete(f"{self.key(stream)}:job:{receipt.partition(':')[0]}")

    def lose(self, stream: str) -> None:
        for key in self.raw.scan_iter(match=f"{self.key(stream)}:*", count=1000):
            self.raw.delete(key)

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        """Of jobs that are ready."""
        ids = [job_id.decode() for job_id in self.raw.lrange(f"{self.key(stream)}:ready:normal", 0, -1)]
        jobs = [self.raw.hgetall(f"{self.key(stream)}:job:{job_id}") for job_id in ids]
        return [{name: value for name, value in job.items() if name[:1] != b":"} for job in jobs]

    def pending(self, stream: str) -> int:
        return int(self.raw.hlen(f"{self.key(stream)}:processing"))

    def age(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.raw.zadd(f"{self.key(delivery.stream)}:claims", {delivery.receipt.partition(":")[0]: 0})

    def blocked(self) -> int:
        return sum(len(client.pubsub_channels(f"{self.prefix}*:wake")) for client in self._nodes())

    def _nodes(self) -> list[Any]:
        return [self.raw]


class QueueNodes(Nodes, Queue):
    """The same for a cluster."""

    kind = ListTransport
    add, delete, lose, entries, pending, age = (
        Queue.add, Queue.delete, Queue.lose, Queue.entries, Queue.pending, Queue.age
    )  # fmt: skip
    blocked = Queue.blocked

    def _nodes(self) -> list[Any]:
        return list(self._cluster.clients)


def _server(name: str, protocol: int, decode: bool) -> Any:
    return pytest.param(
        ("server", name, protocol, decode),
        id=f"{name}-resp{protocol}-{'text' if decode else 'bytes'}",
        marks=() if (protocol, decode) in CLIENTS[:2] else pytest.mark.long,
    )


def _queue(number: int, name: str, protocol: int, decode: bool) -> Any:
    """Every protocol and way to decode with some server; the rest of the combinations take long."""
    found = _server(name, protocol, decode)
    return pytest.param(
        ("queue", name, protocol, decode),
        id=f"queue-{found.id}",
        marks=() if (protocol, decode) == CLIENTS[number % 2] else pytest.mark.long,
    )


_SERVERS = [_server(name, *client) for name in SERVERS for client in (CLIENTS if name == SERVERS[-1] else CLIENTS[:2])]
QUEUES = [_queue(number, name, *client) for number, name in enumerate(SERVERS) for client in CLIENTS[:2]]
QUEUES += [
    pytest.param(("queue-cluster", name, 3), id=f"queue-{name}-cluster-resp3", marks=pytest.mark.long)
    for name in SERVERS[::2]
]
_SERVERS += [
    pytest.param(
        ("cluster", name, protocol),
        id=f"{name}-cluster-resp{protocol}",
        marks=pytest.mark.long,
    )
    for name in SERVERS[::2]
    for protocol in ((2, 3) if name == SERVERS[-1] else (3,))
]


def made(details: Any, server_urls: Callable[[str], str], clusters: Callable[[str], Cluster]) -> Any:
    kind, name, protocol, *decode = details
    if kind.endswith("cluster"):
        return (QueueNodes if kind == "queue-cluster" else Nodes)(clusters(name), protocol)
    return (Queue if kind == "queue" else Server)(server_urls(name), protocol, *decode)


_STREAMS = [pytest.param(("memory",), id="memory"), *_SERVERS]
#: For what a queue has not: everything in it is outstanding, and jobs are known by their ids.
only_streams = pytest.mark.parametrize("there", _STREAMS, indirect=True)


@pytest.fixture(params=[*_STREAMS, *QUEUES])
def there(
    request: pytest.FixtureRequest, server_urls: Callable[[str], str], clusters: Callable[[str], Cluster]
) -> Iterator[Any]:
    """A transport (`there.transport`) and how to interfere with it."""
    if request.param == ("memory",):
        yield Memory()
        return
    server = made(request.param, server_urls, clusters)
    yield server
    server.close()


@pytest.fixture(params=_SERVERS)
def server(
    request: pytest.FixtureRequest, server_urls: Callable[[str], str], clusters: Callable[[str], Cluster]
) -> Iterator[Server]:
    """Only the servers, for what memory cannot suffer."""
    found = made(request.param, server_urls, clusters)
    yield found
    found.close()


def marker(seq: int, epoch: int = 1) -> Marker:
    return Marker(epoch, seq, f"token{seq}")


def label(seq: int) -> str:
    return marker(seq).label


def part(seq: int, expected: Marker | None = None, stream: str = "a", events: int = 1, **more: Any) -> Part:
    names = [f"{seq}.{n}" for n in range(events)]
    run = Run(["data", "id", "type"], [[name.encode() for name in names], names, ["t"] * events])
    return Part(stream, expected, more.pop("marker", marker(seq)), [run] if events else [], **more)


def published(there: Any, *names: str, stream: str = "a") -> None:
    """Put entries with these data into the stream."""
    for name in names:
        there.add(stream, {b"data": name.encode()})


def names(deliveries: list[Delivery]) -> list[str]:
    """Their receipts, without the tokens of claims."""
    return [delivery.receipt.partition(":")[0] for delivery in deliveries]


def handed(there: Any, consumer: str, stream: str) -> list[Delivery]:
    """What was handed back, as another gets it."""
    if there.is_queue:
        return list(there.transport.read(GROUP, consumer, [stream], 10, 0))
    return list(there.transport.claim(GROUP, consumer, stream, 60, 10).deliveries)


def data(deliveries: list[Delivery]) -> list[str]:
    return [delivery.fields[b"data"].decode() for delivery in deliveries]


def in_stream(there: Any, stream: str = "a") -> list[str]:
    return [fields[b"data"].decode() for fields in there.entries(stream)]


# --- publish ------------------------------------------------------------------------------------------------


def test_a_batch_is_published_when_the_expected_marker_is_there(there: Any) -> None:
    transport = there.transport
    assert transport.markers(["a"]) == {"a": None}
    assert transport.publish([part(1, events=3, lanes=4)]) == [marker(1)]
    assert transport.publish([part(2, marker(1))]) == [marker(2)]
    assert in_stream(there) == ["1.0", "1.1", "1.2", "2.0"]
    assert transport.markers(["a", "b"]) == {"a": marker(2), "b": None}
    assert transport.info("a").lanes == 1
    assert transport.info("b").lanes is None


def test_lanes_are_left_beside_the_stream(there: Any) -> None:
    there.transport.publish([part(1, stream="a:3", lanes=4)])
    assert there.transport.info("a:3").lanes == 4


def test_publishing_again_adds_nothing(there: Any) -> None:
    for _ in range(3):
        assert there.transport.publish([part(1, events=2)]) == [marker(1)]
    assert in_stream(there) == ["1.0", "1.1"]


@pytest.mark.parametrize(
    ("expected", "why"),
    [
        (None, "none is expected where one is"),
        (marker(1), "behind"),
        (marker(3), "ahead: the stream has lost a batch"),
        (Marker(1, 2, "other"), "the number of another history"),
        (Marker(2, 2, "token2"), "another epoch"),
    ],
)
def test_an_unexpected_marker_refuses_the_batch_and_is_told(there: Any, expected: Marker | None, why: str) -> None:
    there.transport.publish([part(1)])
    there.transport.publish([part(2, marker(1))])
    assert there.transport.publish([part(7, expected)]) == [marker(2)], why
    assert in_stream(there) == ["1.0", "2.0"]


def test_a_marker_that_is_expected_and_missing_refuses_the_batch(there: Any) -> None:
    assert there.transport.publish([part(2, marker(1))]) == [None]
    assert in_stream(there) == []


def test_without_a_wait_there_is_nothing_to_confirm(there: Any) -> None:
    there.transport.confirm([])
    there.transport.confirm(["a"])
    assert there.transport.markers(["a"]) == {"a": None}
    assert there.transport.publish([part(1)]) == [marker(1)]
    there.transport.confirm(["a"])
    assert there.transport.markers(["a"]) == {"a": marker(1)}


@pytest.mark.parametrize(
    "wait", [Wait(replicas=1, timeout_seconds=0.01), Wait(1, "all", 0.01)], ids=["WAIT", "WAITAOF"]
)
def test_what_is_not_safe_in_time_is_published_all_the_same(server: Server, wait: Wait) -> None:
    """No replica is there, and nothing is written to disk."""
    transport = server.another(wait)
    with pytest.raises(NotYetSafe, match=r"replicas: 0 of 1 within 0\.01 s|WAITAOF is refused"):
        transport.publish([part(1, events=3)])
    assert transport.markers(["a"]) == {"a": marker(1)}
    assert len(server.entries("a")) == 3
    assert transport.publish([part(2)]) == [marker(1)], "what is refused is not waited for"


def test_streams_of_one_batch_are_independent(there: Any) -> None:
    there.transport.publish([part(1, stream="b")])
    found = there.transport.publish([
        part(2, stream="a"), part(2, marker(9), stream="b"), part(2, stream="c", events=2), part(2, marker(1), stream="d")
    ])  # fmt: skip
    assert found == [marker(2), marker(1), marker(2), None]
    assert [in_stream(there, stream) for stream in "abcd"] == [["2.0"], ["1.0"], ["2.0", "2.1"], []]


def test_of_eight_relays_one_publishes(there: Any) -> None:
    transports = [there.another() for _ in range(8)]
    barrier = threading.Barrier(8)

    def publish(n: int) -> Marker | None:
        barrier.wait()
        (found,) = transports[n].publish([part(n, marker=Marker(1, 1, f"relay{n}"), events=5)])
        return found

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(publish, range(8)))
    assert len(found) == 1
    (winner,) = found
    assert in_stream(there) == [f"{winner.token.removeprefix('relay')}.{n}" for n in range(5)]


def test_a_lost_stream_has_no_marker_and_can_be_published_again(there: Any) -> None:
    there.transport.publish([part(1)])
    there.lose("a")
    assert there.transport.markers(["a"]) == {"a": None}
    assert there.transport.publish([part(2, marker(1))]) == [None]
    assert there.transport.publish([part(1)]) == [marker(1)]
    assert in_stream(there) == ["1.0"]


def test_a_batch_of_which_nothing_is_left_leaves_its_marker_where_no_stream_is(there: Any) -> None:
    assert there.transport.publish([part(1, events=0)]) == [marker(1)]
    assert there.transport.markers(["a"]) == {"a": marker(1)}
    assert there.transport.publish([part(2, marker(1))]) == [marker(2)]
    assert in_stream(there) == ["2.0"]
    state = there.transport.inspect("a")
    assert (state.length, state.missing) == (1, 0)


def test_a_group_that_was_there_first_does_not_disturb_the_first_batch(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    assert there.transport.markers(["a"]) == {"a": None}
    assert there.transport.publish([part(1)]) == [marker(1)]


def test_a_stranger_adding_entries_does_not_disturb_the_marker(there: Any) -> None:
    there.transport.publish([part(1)])
    published(there, "stranger")
    assert there.transport.markers(["a"]) == {"a": marker(1)}
    assert there.transport.publish([part(2, marker(1))]) == [marker(2)]


def test_deleted_entries_do_not_disturb_the_marker(there: Any) -> None:
    there.transport.publish([part(1, events=2)])
    there.transport.open(GROUP, ["a"])
    for delivery in there.transport.read(GROUP, "one", ["a"], 10, 0):
        there.delete("a", delivery.receipt)
    assert there.transport.markers(["a"]) == {"a": marker(1)}


def test_o_69_payloads_are_received_equal_to_the_byte(there: Any) -> None:
    payloads = [b"\xff\xfe\x00\x80", BINARY, b"", b"x" * 100_000, "é😀".encode()]
    ids = [str(n) for n in range(len(payloads))]
    run = Run(["data", "id", "type", "x"], [payloads, ids, ["té😀"] * len(payloads), [""] * len(payloads)])
    assert there.transport.publish([Part("a", None, marker(1), [run])]) == [marker(1)]
    published(there, "good")
    there.transport.open(GROUP, ["a"])
    found = there.transport.read(GROUP, "one", ["a"], 10, 0)
    assert [d.fields[b"data"] for d in found] == [*payloads, b"good"]
    assert found[0].fields[b"type"].decode() == "té😀"
    assert found[0].fields[b"x"] == b""
    there.transport.ack(GROUP, found)
    assert there.pending("a") == 0


def test_o_69_names_and_values_of_strangers_may_be_any_bytes(there: Any) -> None:
    there.add("a", {b"\xff\x00": BINARY})
    there.transport.open(GROUP, ["a"])
    (found,) = there.transport.read(GROUP, "one", ["a"], 10, 0)
    assert found.fields == {b"\xff\x00": BINARY}


def test_o_70_replies_look_alike_whatever_the_protocol_and_the_client(there: Any) -> None:
    """Empty and non-empty replies of every command; the suite as a whole runs in each combination too."""
    transport = there.transport
    assert transport.markers(["a"]) == {"a": None}
    assert transport.open(GROUP, ["a", "b"]) == {}
    assert transport.read(GROUP, "c1", ["a", "b"], 10, 0.01) == []
    assert transport.claim(GROUP, "c1", "a", 0, 10) == Claim([], [], None)
    assert transport.publish([part(1, events=2)]) == [marker(1)]
    assert transport.markers(["a", "b"]) == {"a": marker(1), "b": None}
    read = transport.read(GROUP, "c1", ["a", "b"], 10, 0.01)
    assert [(type(d), d.stream, type(d.receipt), type(d.fields), d.count) for d in read] == [
        (Delivery, "a", str, dict, 1)
    ] * 2
    claimed = transport.claim(GROUP, "c2", "a", 0, 10)
    again = [Delivery(d.stream, c.receipt, d.fields, 2) for d, c in zip(read, claimed.deliveries, strict=True)]
    assert (claimed, names(again)) == (Claim(again, [], None), names(read))
    transport.ack(GROUP, claimed.deliveries)
    assert transport.claim(GROUP, "c1", "a", 0, 10) == Claim([], [], None)


def test_a_large_batch_is_published_whole_and_in_order(there: Any) -> None:
    assert there.transport.publish([part(1, events=3000)]) == [marker(1)]
    assert in_stream(there) == [f"1.{n}" for n in range(3000)]


# --- groups and reading -------------------------------------------------------------------------------------


def test_a_group_starts_at_the_beginning_and_opening_again_changes_nothing(there: Any) -> None:
    published(there, "1", "2")
    assert there.transport.open(GROUP, ["a"]) == {}
    assert data(there.transport.read(GROUP, "one", ["a"], 10, 0)) == ["1", "2"]
    assert there.transport.open(GROUP, ["a"]) == {}
    assert there.transport.read(GROUP, "one", ["a"], 10, 0) == []
    assert there.pending("a") == 2


def test_each_group_gets_everything_and_each_of_a_group_its_share(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    refused = there.transport.open("other", ["a"])
    published(there, "1", "2", "3")
    assert data(there.transport.read(GROUP, "one", ["a"], 2, 0)) == ["1", "2"]
    assert data(there.transport.read(GROUP, "two", ["a"], 2, 0)) == ["3"]
    if there.is_queue:
        assert "is the queue of consumer wallet" in str(refused["a"])
        return
    assert data(there.transport.read("other", "one", ["a"], 10, 0)) == ["1", "2", "3"]


def test_count_is_for_each_stream_and_streams_are_told_apart(there: Any) -> None:
    streams = ["a", "b:0", "b:1"]
    there.transport.open(GROUP, streams)
    for stream in streams:
        published(there, "1", "2", "3", stream=stream)
    found = there.transport.read(GROUP, "one", streams, 2, 0)
    assert [(d.stream, d.fields[b"data"]) for d in found] == [(s, n) for s in streams for n in (b"1", b"2")]
    assert {d.count for d in found} == {1}


def test_a_blocked_reader_is_woken_by_a_new_entry(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(there.another().read, GROUP, "one", ["a", "b"], 10, 20)
        there.transport.publish([part(1, stream="b")])
        assert data(reading.result(timeout=10)) == ["1.0"]


def test_a_reader_does_not_wait_for_ever(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    assert there.transport.read(GROUP, "one", ["a"], 10, 0.01) == []
    assert there.transport.read(GROUP, "one", ["a"], 10, 0.0001) == []


def test_what_is_acknowledged_is_forgotten(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    published(there, "1", "2")
    published(there, "3", stream="b")
    found = there.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    there.transport.ack(GROUP, [found[2], found[0]])
    assert (there.pending("a"), there.pending("b")) == (1, 0)
    there.transport.ack(GROUP, found)
    there.transport.ack(GROUP, found)
    there.transport.ack(GROUP, [])
    assert there.pending("a") == 0
    assert there.transport.claim(GROUP, "two", "a", 0, 10).deliveries == []


def test_acknowledging_what_is_gone_does_nothing(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1")
    found = there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.lose("a")
    there.transport.ack(GROUP, found)


# --- claims -------------------------------------------------------------------------------------------------


def test_only_what_was_pending_long_enough_is_claimed(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2")
    there.transport.read(GROUP, "one", ["a"], 10, 0)
    assert there.transport.claim(GROUP, "two", "a", 60, 10).deliveries == []
    claimed = eventually(lambda: there.transport.claim(GROUP, "two", "a", 0.02, 10).deliveries)
    assert (data(claimed), [d.count for d in claimed]) == (["1", "2"], [2, 2])
    assert there.transport.claim(GROUP, "three", "a", 60, 10).deliveries == []
    again = there.transport.claim(GROUP, "three", "a", 0, 10).deliveries
    assert [d.count for d in again] == [3, 3]
    assert names(again) == names(claimed)


def test_claims_go_page_by_page_to_the_end(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, *map(str, range(10)))
    there.transport.read(GROUP, "one", ["a"], 100, 0)
    seen, cursor, pages = [], None, 0
    while True:
        claim = there.transport.claim(GROUP, "two", "a", 0, 4, cursor)
        seen += data(claim.deliveries)
        pages, cursor = pages + 1, claim.cursor
        if cursor is None:
            break
    assert (seen, pages) == ([str(n) for n in range(10)], 3)


def test_pages_begin_past_what_is_busy(there: Any) -> None:
    """However much older deliveries are renewed, those that are idle come at once."""
    there.transport.open(GROUP, ["a"])
    published(there, *map(str, range(10)))
    found = there.transport.read(GROUP, "one", ["a"], 100, 0)
    there.age(found)
    busy, idle = found[:6], found[6:]
    assert there.transport.renew(GROUP, "one", busy) == busy
    page = there.transport.claim(GROUP, "two", "a", 60, 3)
    assert names(page.deliveries) == names(idle[:3])
    assert page.cursor is not None
    page = there.transport.claim(GROUP, "two", "a", 60, 3, page.cursor)
    assert (names(page.deliveries), page.cursor) == (names(idle[3:]), None)
    assert there.transport.claim(GROUP, "two", "a", 60, 3).deliveries == []


def test_what_was_deleted_while_pending_is_named_and_forgotten(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2", "3")
    found = there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.delete("a", found[1].receipt)
    claim = there.transport.claim(GROUP, "two", "a", 0, 10)
    assert (data(claim.deliveries), claim.missing) == (["1", "3"], names(found[1:2]))
    assert there.pending("a") == 2
    assert there.transport.claim(GROUP, "three", "a", 0, 10).missing == []


def test_o_13_eight_claimers_at_once_get_each_delivery_once(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    names = [str(n) for n in range(100)]
    published(there, *names)
    there.transport.read(GROUP, "dead", ["a"], 100, 0)
    idle_seconds = 0.3  # far more than the claims take, so that what one has taken is not due for the next
    eventually(lambda: _all_idle(there, idle_seconds))
    transports = [there.another() for _ in range(8)]
    barrier = threading.Barrier(8)

    def claim(n: int) -> list[Delivery]:
        barrier.wait()
        got, cursor = [], None
        while True:
            page = transports[n].claim(GROUP, f"c{n}", "a", idle_seconds, 10, cursor)
            got += page.deliveries
            assert page.missing == []
            if (cursor := page.cursor) is None:
                return got

    with ThreadPoolExecutor(8) as pool:
        claimed = [delivery for got in pool.map(claim, range(8)) for delivery in got]
    assert sorted(data(claimed), key=int) == names
    assert {delivery.count for delivery in claimed} == {2}


def _all_idle(there: Any, idle_seconds: float) -> bool:
    if isinstance(there, Memory):
        import time

        pending = there.transport._streams["a"].groups[GROUP].pending.values()
        return all(time.monotonic() - p.delivered_at >= idle_seconds for p in pending)
    if there.is_queue:
        seconds, microseconds = there.raw.time() if not isinstance(there, Nodes) else there._cluster.clients[0].time()
        ended = 1000 * (seconds + 60 - idle_seconds) + microseconds / 1000
        return int(there.raw.zcount(f"{there.key('a')}:claims", "-inf", ended)) == 100
    found = there.raw.xpending_range(there.key("a"), GROUP, "-", "+", 100, idle=round(idle_seconds * 1000))
    return len(found) == 100


def test_what_a_dead_consumer_left_is_taken_over_at_once_and_counts_as_before(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    published(there, "1", "2", "3", "4")
    published(there, "5", stream="b")
    first = there.transport.read(GROUP, "dead", ["a", "b"], 10, 0)
    there.transport.ack(GROUP, first[3:4])
    (again,) = there.transport.claim(GROUP, "dead", "a", 0, 1).deliveries
    left = there.transport.left(GROUP, "dead", "a", 10)
    assert [(d.fields[b"data"], d.count) for d in left] == [(b"1", 2), (b"2", 1), (b"3", 1)]
    assert again in left
    assert data(there.transport.left(GROUP, "dead", "a", 2)) == ["1", "2"]
    assert there.transport.left(GROUP, "nobody", "a", 10) == []
    quick, other, count = (
        ("2", "1", 2) if there.is_queue else ("1", "2", 1)
    )  # what has waited for longest, or is oldest
    assert data(there.transport.claim(GROUP, "quick", "a", 0, 1).deliveries) == [quick]  # before the heir
    wanted = [left[0], left[1], replace(left[2], count=4), *there.transport.left(GROUP, "dead", "b", 10)]
    assert data(there.transport.inherit(GROUP, "heir", "dead", wanted)) == [other, "3", "5"]
    assert there.transport.inherit(GROUP, "late", "dead", wanted) == []
    assert there.transport.left(GROUP, "dead", "a", 10) == []
    assert [(d.fields[b"data"], d.count) for d in there.transport.left(GROUP, "heir", "a", 10)] == [
        (other.encode(), count),
        (b"3", 4),
    ]
    assert data(there.transport.left(GROUP, "quick", "a", 10)) == [quick]
    assert there.transport.claim(GROUP, "other", "b", 60, 10).deliveries == [], "it is the heir's, from now on"
    with pytest.raises(GroupLost):
        there.transport.left("none", "dead", "a", 10)


def test_what_a_dead_consumer_left_far_apart(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, *map(str, range(40)))
    for _ in range(2):
        there.transport.read(GROUP, "dead", ["a"], 1, 0)
        there.transport.read(GROUP, "other", ["a"], 19, 0)
    assert data(there.transport.left(GROUP, "dead", "a", 10)) == ["0", "20"]


def test_what_was_deleted_while_a_dead_consumer_had_it_is_left_to_those_who_claim(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2")
    found = there.transport.read(GROUP, "dead", ["a"], 10, 0)
    there.delete("a", found[0].receipt)
    assert data(there.transport.left(GROUP, "dead", "a", 10)) == ["2"]
    assert there.transport.claim(GROUP, "other", "a", 0, 10).missing == names(found[:1])


def test_what_is_handed_back_is_claimable_at_once_and_not_counted(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    published(there, "1", "2")
    published(there, "3", stream="b")
    found = there.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    there.transport.hand_back(GROUP, "one", [found[0], found[2]])
    claimed = handed(there, "two", "a")
    assert (data(claimed), [d.count for d in claimed]) == (["1"], [1])
    assert data(handed(there, "two", "b")) == ["3"]
    there.transport.hand_back(GROUP, "two", claimed)
    (again,) = handed(there, "three", "a")
    assert again.count == 1
    there.transport.hand_back(GROUP, "three", [])


def test_handing_back_a_claimed_delivery_restores_the_count_before_the_claim(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1")
    there.transport.read(GROUP, "one", ["a"], 10, 0)
    claimed = there.transport.claim(GROUP, "two", "a", 0, 10).deliveries
    assert claimed[0].count == 2
    there.transport.hand_back(GROUP, "two", claimed)
    assert handed(there, "three", "a")[0].count == 2


def test_o_14_what_somebody_else_has_claimed_cannot_be_handed_back(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2")
    late = there.transport.read(GROUP, "paused", ["a"], 10, 0)
    assert len(there.transport.claim(GROUP, "successor", "a", 0, 1).deliveries) == 1
    there.transport.hand_back(GROUP, "paused", late)
    assert data(handed(there, "third", "a")) == ["2"]


def test_what_was_acknowledged_is_not_handed_back(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1")
    found = there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.transport.ack(GROUP, found)
    there.transport.hand_back(GROUP, "one", found)
    assert there.pending("a") == 0


def test_deliveries_of_ours_are_recounted(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2", "3")
    first = there.transport.read(GROUP, "one", ["a"], 10, 0)
    found = there.transport.claim(GROUP, "two", "a", 0, 10).deliveries
    assert [delivery.count for delivery in found] == [2, 2, 2]
    there.transport.ack(GROUP, found[2:])
    assert there.transport.recount(GROUP, "one", first) == []
    wanted = [replace(found[0], count=7), replace(found[1], count=1), found[2]]
    assert there.transport.recount(GROUP, "two", wanted) == wanted[:2]
    assert there.transport.claim(GROUP, "three", "a", 60, 10).deliveries == []  # they stay ours, from now on
    assert [d.count for d in there.transport.claim(GROUP, "three", "a", 0, 10).deliveries] == [8, 2]
    assert there.transport.recount(GROUP, "three", []) == []


def test_o_12_what_is_renewed_is_not_claimed_and_not_counted(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    published(there, "1", "2")
    published(there, "3", stream="b")
    found = there.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    for _ in range(2):
        there.age(found)
        assert there.transport.renew(GROUP, "one", found) == found
        assert [there.transport.claim(GROUP, "two", stream, 60, 10).deliveries for stream in "ab"] == [[], []]
    claimed = there.transport.claim(GROUP, "two", "a", 0, 10).deliveries
    assert [(d.fields[b"data"], d.count) for d in claimed] == [(b"1", 2), (b"2", 2)]
    assert there.transport.renew(GROUP, "one", []) == []


def test_o_14_nothing_that_others_took_over_is_taken_back(there: Any) -> None:
    """By whatever it is asked for; nor what was acknowledged, or is pending no more since the group is gone."""
    there.transport.open(GROUP, ["a", "b"])
    published(there, "1", "2", "3")
    published(there, "4", stream="b")
    found = there.transport.read(GROUP, "paused", ["a", "b"], 10, 0)
    (taken,) = there.transport.claim(GROUP, "successor", "a", 0, 1).deliveries
    there.transport.ack(GROUP, found[1:2])
    there.lose("b") if there.keeps_foreign_types else there.transport.drop_group(GROUP, "b")
    for ask in (there.transport.renew, there.transport.recount):
        assert ask(GROUP, "paused", found) == [found[2]]
    there.transport.hand_back(GROUP, "paused", found)
    his = taken if there.is_queue else found[0]
    assert there.transport.renew(GROUP, "successor", [his, *found]) == ([his] if there.is_queue else [his, his])
    assert taken.count == 2
    assert there.pending("a") == (1 if there.is_queue else 2)


def test_what_was_deleted_while_pending_is_ours_once_more(there: Any) -> None:
    """Nobody else can get it any longer, so that whoever has it may as well go on with it. Of a job, nobody can tell whose it is."""
    there.transport.open(GROUP, ["a"])
    published(there, "1", "2")
    found = there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.delete("a", found[0].receipt)
    assert there.transport.renew(GROUP, "one", found) == (found[1:] if there.is_queue else found)


def test_thousands_of_deliveries_are_held_at_once(server: Server) -> None:
    server.transport.open(GROUP, ["a"])
    with server.raw.pipeline(transaction=False) as pipeline:
        for number in range(5000):
            pipeline.xadd(server.key("a"), {"n": number})
        pipeline.execute()
    found = server.transport.read(GROUP, "one", ["a"], 5000, 0)
    assert server.transport.renew(GROUP, "one", found) == found
    counted = [replace(delivery, count=1 + n % 7) for n, delivery in enumerate(found)]
    assert server.transport.recount(GROUP, "one", counted) == counted
    server.transport.hand_back(GROUP, "one", found)
    assert len(server.transport.claim(GROUP, "two", "a", 60, 5000).deliveries) == 5000


def test_a_stream_that_cannot_be_asked_is_not_taken_for_lost(server: Server) -> None:
    """It may be of a node of a cluster that is away, and comes back; or the right to ask is missing."""
    server.transport.open(GROUP, ["a", "b"])
    published(server, "1")
    published(server, "2", stream="b")
    found = server.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    server.raw.set(server.key("a"), "something else")
    assert server.transport.renew(GROUP, "one", found) == found
    assert server.transport.recount(GROUP, "one", found) == found[1:]
    server.transport.hand_back(GROUP, "one", found)


# --- what is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
def test_without_a_group_reading_and_claiming_say_so(there: Any, opened: bool) -> None:
    if opened:
        there.transport.open("other", ["a"])
    for call in (
        lambda: there.transport.read(GROUP, "one", ["a"], 10, 0),
        lambda: there.transport.read(GROUP, "one", ["a"], 10, 1),
        lambda: there.transport.claim(GROUP, "one", "a", 0, 10),
    ):
        with pytest.raises(GroupLost) as lost:
            call()
        assert lost.value.retryable


def test_a_lost_group_is_made_again_and_gets_everything(there: Any) -> None:
    there.transport.open(GROUP, ["a"])
    there.transport.publish([part(1)])
    there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.lose("a")
    there.transport.publish([part(1)])
    with pytest.raises(GroupLost):
        there.transport.read(GROUP, "one", ["a"], 10, 0)
    there.transport.open(GROUP, ["a"])
    assert data(there.transport.read(GROUP, "one", ["a"], 10, 0)) == ["1.0"]


def test_a_blocked_reader_is_told_at_once_when_the_stream_goes(there: Any) -> None:
    there.transport.open(GROUP, ["a", "b"])
    reader = there.another()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, GROUP, "one", ["a", "b"], 10, 25)
        eventually(lambda: _is_blocked(there) or reading.done())
        there.lose("a")
        with pytest.raises(GroupLost):
            reading.result(timeout=10)


def _is_blocked(there: Any) -> bool:
    if isinstance(there, Memory):
        return bool(there.transport._changed._waiters)  # type: ignore[attr-defined]  # of threading.Condition
    return bool(there.blocked())


# --- what only servers suffer -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["stream", "marker", "remade with a group", "remade by a stranger", "garbled marker", "older dump"]
)
def test_a_stream_that_lost_entries_counts_as_having_no_marker(server: Server, loss: str) -> None:
    server.transport.publish([part(1, events=2)])
    key, beside = server.key("a"), f"{server.key('a')}:relay"
    dump = server.raw.dump(key)
    server.transport.publish([part(2, marker(1))])
    if loss != "marker" and loss != "garbled marker":
        server.raw.delete(key)
    match loss:
        case "marker":
            server.raw.delete(beside)
        case "remade with a group":
            server.transport.open(GROUP, ["a"])
        case "remade by a stranger":
            for n in range(5):
                server.raw.xadd(key, {"data": "x"}, id=f"5-{n + 1}")
        case "garbled marker":
            server.raw.hset(beside, "batch", "nonsense")
        case "older dump":
            server.raw.restore(key, 0, dump)
    assert server.transport.markers(["a"]) == {"a": None}
    assert server.transport.publish([part(3, marker(2))]) == [None]


def test_one_key_of_another_type_stops_only_its_own_stream(server: Server) -> None:
    server.raw.set(server.key("b"), "x")
    server.raw.set(f"{server.key('c')}:relay", "x")
    one, two, three, four = server.transport.publish([part(1, stream=stream) for stream in "abcd"])
    assert (one, four) == (marker(1), marker(1))
    assert isinstance(two, StreamUnusable)
    assert isinstance(three, StreamUnusable)
    assert (two.code, two.retryable) == ("WRONGTYPE", True)
    assert in_stream(server, "d") == ["1.0"]
    markers = server.transport.markers(["a", "b"])
    assert markers["a"] == marker(1)
    assert isinstance(markers["b"], StreamUnusable)
    unusable = server.transport.open(GROUP, ["a", "b", "d"])
    assert list(unusable) == ["b"]
    assert isinstance(unusable["b"], StreamUnusable)
    found: list[Delivery] = []
    with pytest.raises(StreamUnusable):
        for _ in range(2):  # on a cluster, others' entries come first
            found += server.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    found += server.transport.read(GROUP, "one", ["a", "d"], 10, 0)
    assert [(d.stream, d.fields[b"data"]) for d in found] == [("a", b"1.0"), ("d", b"1.0")]
    server.raw.delete(server.key("b"))
    assert server.transport.publish([part(1, stream="b")]) == [marker(1)]


def test_o_48_scripts_may_be_forgotten_at_any_moment(server: Server) -> None:
    expected = None
    for seq in range(1, 4):
        server.raw.script_flush()
        assert server.transport.publish([part(seq, expected), part(seq, expected, stream="b")]) == [marker(seq)] * 2
        server.raw.script_flush()
        assert server.transport.markers(["a"]) == {"a": marker(seq)}
        expected = marker(seq)
    assert in_stream(server) == in_stream(server, "b") == ["1.0", "2.0", "3.0"]
    server.transport.open(GROUP, ["a", "b"])
    found = server.transport.read(GROUP, "one", ["a", "b"], 10, 0)
    server.raw.script_flush()
    assert server.transport.renew(GROUP, "one", found) == found


def test_a_reader_whose_group_is_destroyed_is_told(server: Server) -> None:
    server.transport.open(GROUP, ["a"])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.another().read, GROUP, "one", ["a"], 10, 25)
        eventually(lambda: _is_blocked(server))
        server.raw.xgroup_destroy(server.key("a"), GROUP)
        with pytest.raises(GroupLost):
            reading.result(timeout=10)


def test_a_reader_whose_stream_becomes_something_else_is_told(server: Server) -> None:
    server.transport.open(GROUP, ["a"])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.another().read, GROUP, "one", ["a"], 10, 25)
        eventually(lambda: _is_blocked(server))
        server.raw.set(server.key("a"), "x")
        with pytest.raises((GroupLost, StreamUnusable)):
            reading.result(timeout=10)
    assert isinstance(server.transport.open(GROUP, ["a"])["a"], StreamUnusable)


def test_all_keys_begin_with_the_prefix_and_share_a_slot(server: Server) -> None:
    server.transport.publish([part(1, stream="a:3")])
    keys = sorted(server.raw.scan_iter(match=f"{server.prefix}*", count=1000))
    assert keys == [server.key("a:3").encode(), f"{server.key('a:3')}:relay".encode()]
    assert {key[key.index(b"{") : key.index(b"}")] for key in keys} == {b"{a:3"}


def test_a_server_that_is_not_there_is_unavailable() -> None:
    transport = StreamTransport.from_url("redis://127.0.0.1:1/0", timeout_seconds=1)
    for call in (
        lambda: transport.markers(["a"]),
        lambda: transport.publish([part(1)]),
        lambda: transport.info("a"),
        lambda: transport.open(GROUP, ["a"]),
        lambda: transport.read(GROUP, "one", ["a"], 1, 0),
        lambda: transport.claim(GROUP, "one", "a", 0, 1),
        lambda: transport.ack(GROUP, [Delivery("a", "1-1", {})]),
        lambda: transport.hand_back(GROUP, "one", [Delivery("a", "1-1", {})]),
        lambda: transport.recount(GROUP, "one", [Delivery("a", "1-1", {})]),
        lambda: transport.renew(GROUP, "one", [Delivery("a", "1-1", {})]),
    ):
        with pytest.raises(TransportUnavailable) as error:
            call()
        assert isinstance(error.value.__cause__, redis.RedisError)
        assert error.value.retryable
    transport.close()


@pytest.mark.parametrize("name", SERVERS)
def test_a_full_server_adds_a_batch_whole_or_not_at_all(name: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = Server(own_valkey(name).url, 3, False)
    server.transport.publish([part(1)])
    server.transport.open(GROUP, ["a"])
    found = server.transport.read(GROUP, "one", ["a"], 10, 0)
    server.raw.config_set("maxmemory", "1")
    (refused,) = server.transport.publish([part(2, marker(1), events=3)])
    assert isinstance(refused, TransportUnavailable)
    assert refused.code == "OOM"
    assert server.transport.renew(GROUP, "one", found) == server.transport.recount(GROUP, "one", found) == found
    server.transport.hand_back(GROUP, "one", found)
    server.transport.ack(GROUP, found)
    server.raw.config_set("maxmemory", "0")
    assert server.transport.markers(["a"]) == {"a": marker(1)}
    assert server.transport.publish([part(2, marker(1), events=3)]) == [marker(2)]
    assert in_stream(server) == ["1.0", "2.0", "2.1", "2.2"]
    server.close()


@pytest.mark.parametrize("name", SERVERS)
def test_a_restarted_server_is_found_again(name: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    process = own_valkey(name)
    server = Server(process.url, 2, True)
    server.transport.publish([part(1)])
    process.kill()
    with pytest.raises(TransportUnavailable):
        server.transport.publish([part(2, marker(1))])
    process.start()
    found = eventually(lambda: server.transport.publish([part(1)]), ignoring=(TransportError,))
    assert found == [marker(1)]
    server.raw.close()


# --- names --------------------------------------------------------------------------------------------------


def test_streams_of_a_topic() -> None:
    assert streams_of("a", 1) == ["a"]
    assert streams_of("a", 3) == ["a:0", "a:1", "a:2"]
    assert stream_of("a", "k", 1) == stream_of("a", None, 1) == "a"
    assert stream_of("a", None, 3) == "a:0"
    assert stream_of("a", "123456789", 1024) == f"a:{0xCBF43926 % 1024}"  # CRC-32's own check value
    assert stream_of("a", "é", 1024) == stream_of("a", "\u00e9", 1024) != stream_of("a", "e\u0301", 1024)
    assert {stream_of("a", str(n), 8) for n in range(200)} == set(streams_of("a", 8))
    assert [topic_of(stream) for stream in ("a", "a:7")] == ["a", "a"]


@pytest.mark.parametrize("text", ["", "1", "1:2", "a:2:t", "1:b:t", "1:2:", "::", "-1:2:t"])
def test_a_malformed_marker_is_none(text: str) -> None:
    assert Marker.parse(text) is None


def test_a_marker_is_read_as_it_is_written() -> None:
    assert Marker.parse(str(Marker(3, 12, "x-Y9"))) == Marker(3, 12, "x-Y9")


# --- groups and trimming -------------------------------------------------------------------------------------------------


def batch(seq: int, expected: Marker | None = None, events: int = 2, stream: str = "a") -> Part:
    """A batch as the relay publishes it: its last entry says so."""
    run = wire([(b"1", f"{seq}.{n}", "t", None, None, None, None, None, None) for n in range(events)], label(seq))
    return Part(stream, expected, marker(seq), run, 1, 3600)


def publish_batches(there: Any, *seqs: int, stream: str = "a") -> None:
    before = None
    for seq in seqs:
        assert there.transport.publish([batch(seq, before, stream=stream)]) == [marker(seq)]
        before = marker(seq)


def group_of(state: StreamState, name: str = GROUP) -> GroupState:
    (found,) = (group for group in state.groups if group.name == name)
    return found


def how_far(there: Any) -> tuple[Any, ...]:
    """What is pending, the oldest of it and what is acknowledged; and where it can be told, what is delivered."""
    found = group_of(there.transport.inspect("a"))
    if there.is_queue:
        return found.pending, found.oldest_pending, found.acked
    return found.pending, found.oldest_pending, found.acked, found.delivered, found.undelivered


def trim(there: Any, *groups: str) -> int:
    """Trim what can be trimmed, once the entries are older than this millisecond; returns what is left."""
    time.sleep(0.002)  # ids are milliseconds, and only what is older is trimmed
    state = there.transport.inspect("a", groups=groups, keep_seconds=0)
    assert state.length == len(there.entries("a"))
    assert state.missing == 0
    return int(state.length)


def test_a_stream_that_is_not_there_has_no_state(there: Any) -> None:
    assert there.transport.inspect("a", keep_seconds=0) == StreamState(0, 0, 0, [])


def test_the_ids_after_a_batch_newest_first(there: Any) -> None:
    run = [
        wire([(b"", str(uuid.UUID(int=seq * 10 + n)), "t", *[None] * 6) for n in range(2)], label(seq))
        for seq in (3, 5, 9)
    ]
    before = None
    for seq, runs in zip((3, 5, 9), run, strict=True):
        there.transport.publish([Part("a", before, marker(seq), runs)])
        before = marker(seq)
    for after, limit, wanted in ((3, 9, [91, 90, 51, 50]), (4, 9, [91, 90, 51, 50]), (9, 9, []), (0, 3, [91, 90, 51])):
        assert [found.int for found in there.transport.ids_after("a", after, limit)] == wanted
    assert there.transport.ids_after("nothing", 0, 9) == []


def test_more_ids_than_are_read_at_once(there: Any) -> None:
    rows = [(b"", str(uuid.UUID(int=n)), "t", *[None] * 6) for n in range(250)]
    there.transport.publish([Part("a", None, marker(1), wire(rows, label(1)))])
    assert [found.int for found in there.transport.ids_after("a", 0, 1000)] == [*range(249, -1, -1)]


def test_the_marker_of_a_stream_that_is_looked_at(there: Any) -> None:
    assert there.transport.inspect("a").marker is None
    there.transport.publish([Part("a", None, marker(1, epoch=7), batch(1).runs)])
    assert there.transport.inspect("a").marker == marker(1, epoch=7)


def test_how_far_a_group_is(there: Any) -> None:
    publish_batches(there, 3, 5, 9)
    there.transport.open(GROUP, ["a"])
    few = 3 if there.is_queue else 5
    assert how_far(there) == (0, None, 2, 2, 2)[:few]
    first, second, third = there.transport.read(GROUP, "one", ["a"], 3, 0)
    assert how_far(there) == (3, *names([first]), 2, 4, 1)[:few]
    there.transport.ack(GROUP, [first, third])
    assert how_far(there) == (1, *names([second]), 2, 4, 1)[:few]
    there.transport.ack(GROUP, [second])
    assert how_far(there) == (0, None, 4, 4, 1)[:few]
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 10, 0))
    assert how_far(there) == (0, None, 9, 9, 0)[:few]
    assert there.transport.info("a") == StreamInfo(1, 3600)


@only_streams
def test_o_26_only_what_every_group_has_acknowledged_is_trimmed(there: Any) -> None:
    publish_batches(there, 1, 2, 3)
    assert trim(there) == 6, "without a group nothing is"
    there.transport.open(GROUP, ["a"])
    there.transport.open("slow", ["a"])
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 10, 0))
    assert trim(there) == 6
    first, *rest = there.transport.read("slow", "one", ["a"], 4, 0)
    there.transport.ack("slow", rest)
    assert trim(there) == 6, "the first is still pending"
    there.transport.ack("slow", [first])
    assert trim(there, "slow", "lost") == 6, "a group that was declared is not there"
    assert trim(there, "slow") == 2, "exactly, and not only whole nodes of them"
    assert [d.fields[b"id"] for d in there.transport.read("slow", "one", ["a"], 10, 0)] == [b"3.0", b"3.1"]
    assert group_of(there.transport.inspect("a")).acked == 3
    assert there.transport.markers(["a"]) == {"a": marker(3)}


def test_o_26_what_is_younger_than_the_margin_stays(server: Server) -> None:
    publish_batches(server, 1)
    server.transport.open(GROUP, ["a"])
    server.transport.ack(GROUP, server.transport.read(GROUP, "one", ["a"], 10, 0))
    assert server.transport.inspect("a", keep_seconds=60).length == 2
    assert server.transport.inspect("a", keep_seconds=10**9).length == 2


def test_what_strangers_delete_is_missing_until_the_marker_is_restarted(there: Any) -> None:
    publish_batches(there, 1, 2)
    there.transport.open(GROUP, ["a"])
    deliveries = there.transport.read(GROUP, "one", ["a"], 3, 0)
    there.transport.ack(GROUP, deliveries)
    if not there.is_queue:
        trim(there)
    (fourth,) = there.transport.read(GROUP, "one", ["a"], 1, 0)
    there.delete("a", fourth.receipt)
    if there.is_queue:  # somebody has to come upon it
        assert there.transport.claim(GROUP, "two", "a", 0, 10).missing == names([fourth])
    assert there.transport.publish([batch(3, marker(2))]) == [marker(3)]
    assert there.transport.inspect("a").missing == 1
    assert there.transport.publish([Part("a", marker(3), marker(3), [])]) == [marker(3)]
    assert there.transport.inspect("a").missing == 0
    assert there.transport.info("a") == StreamInfo(1, 3600)


@only_streams
def test_what_is_appended_leaves_the_marker_and_what_is_missing_as_they_are(there: Any) -> None:
    publish_batches(there, 1, 2)
    there.transport.open(GROUP, ["a"])
    (first,) = there.transport.read(GROUP, "one", ["a"], 1, 0)
    there.transport.ack(GROUP, [first])
    (second,) = there.transport.read(GROUP, "one", ["a"], 1, 0)
    there.delete("a", second.receipt)
    again = Part("a", marker(2), marker(2), part(7, events=2).runs, append=True)
    assert there.transport.publish([again, again]) == [marker(2), marker(2)]
    state = there.transport.inspect("a")
    assert (state.length, state.missing, state.marker) == (3 + 4, 1, marker(2))
    assert group_of(state).basis == label(2)
    stale = Part("a", marker(1), marker(1), part(7).runs, append=True)
    assert there.transport.publish([stale]) == [marker(2)], "not where another marker is"


def test_what_is_appended_is_counted_until_it_is_lost(there: Any) -> None:
    publish_batches(there, 1)
    assert there.transport.info("a").replayed is None
    append = Part("a", marker(1), marker(1), part(7).runs, append=True)
    there.transport.publish([append, append])
    began, parts = there.transport.info("a").replayed
    assert parts == 2
    there.transport.publish([batch(2, marker(1))])
    there.transport.publish([Part("a", marker(2), marker(2), part(7).runs, append=True)])
    assert there.transport.info("a").replayed == (began, 3)
    there.lose("a")
    publish_batches(there, 1)
    assert there.transport.info("a").replayed is None
    there.transport.publish([append])
    again, parts = there.transport.info("a").replayed
    assert (again != began, parts) == (True, 1)
    there.transport.publish([Part("a", marker(1), marker(1), part(7).runs)])
    assert there.transport.info("a").replayed is None, "a relay has mended the stream"


def test_how_far_a_group_is_names_the_batch_that_says_so(there: Any) -> None:
    publish_batches(there, 1, 2)
    there.transport.open(GROUP, ["a"])
    assert group_of(there.transport.inspect("a")).basis == label(2 if there.is_queue else 1)
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 10, 0))
    assert group_of(there.transport.inspect("a")).basis == label(2), "nothing is left: the marker"


def test_whatever_strangers_write_beside_a_stream_is_no_marker_at_worst(server: Server) -> None:
    for field, value, last in [
        ("added", "x", None), ("added", "nan", None), ("last", "x", None), ("batch", b"1:1:\xff", None), ("batch", "x", None),
        ("absent", "x", marker(1)), ("since", "x", marker(1)),
    ]:  # fmt: skip
        publish_batches(server, 1)
        server.raw.hset(server.key("a") + ":relay", field, value)
        assert server.transport.markers(["a"]) == {"a": last}, field
        assert server.transport.inspect("a").marker == last
        assert server.transport.publish([batch(2, last)]) == [marker(2)]
        server.raw.delete(server.key("a"), server.key("a") + ":relay")


def test_groups_of_strangers_may_have_any_name(server: Server) -> None:
    publish_batches(server, 1)
    for name in (b"\xff", b"a\0b"):
        server.raw.execute_command("XGROUP", "CREATE", server.key("a"), name, "0")
        server.raw.execute_command("XREADGROUP", "GROUP", name, b"\xfe", "STREAMS", server.key("a"), ">")
        server.raw.execute_command("XGROUP", "SETID", server.key("a"), name, "$")
    assert {group.name for group in server.transport.inspect("a").groups} == {"\\xff", "a\0b"}


def test_a_group_that_is_set_back_needs_what_comes_before_its_pending_entries(server: Server) -> None:
    publish_batches(server, 1)
    server.raw.execute_command("XGROUP", "CREATE", server.key("a"), GROUP, "$")
    assert server.transport.publish([batch(2, marker(1))]) == [marker(2)]
    (pending,) = server.transport.read(GROUP, "one", ["a"], 1, 0)
    server.raw.execute_command("XGROUP", "SETID", server.key("a"), GROUP, "0")
    state = server.transport.inspect("a", keep_seconds=0)
    assert (state.trimmed, group_of(state).acked, group_of(state).oldest_pending) == (0, 0, pending.receipt)


def test_an_entry_in_the_future_does_not_keep_what_is_acknowledged(server: Server) -> None:
    server.raw.xadd(server.key("a"), {"x": "y"}, id="99999999999999-0")
    publish_batches(server, 1, 2)
    server.transport.open(GROUP, ["a"])
    server.transport.ack(GROUP, server.transport.read(GROUP, "one", ["a"], 4, 0))
    assert server.transport.inspect("a", keep_seconds=3600).trimmed == 4, "its age cannot be told"
    assert server.transport.inspect("a", keep_seconds=0).length == 1, "the last one is still to be read"


def test_what_the_relay_leaves_for_consumers_needs_no_publishing(there: Any) -> None:
    there.transport.leave(["a", "b"], 60, 1_700_000_000)
    assert there.transport.info("a") == there.transport.info("b") == StreamInfo(None, 60, 1_700_000_000, 0)
    assert there.transport.markers(["a"]) == {"a": None}
    publish_batches(there, 1)
    assert there.transport.info("a") == StreamInfo(1, 3600, 1_700_000_000, 0)
    there.transport.leave(["a"], 3600, 1_700_000_001, 5)
    assert there.transport.info("a") == StreamInfo(1, 3600, 1_700_000_001, 5)
    there.transport.leave(["a"], 7200, None, 6)
    assert there.transport.info("a") == StreamInfo(1, 7200, 1_700_000_001, 6), "what was left stays"
    assert there.transport.markers(["a"]) == {"a": marker(1)}


def test_what_was_left_stays_where_the_server_is_full(server: Server) -> None:
    """Or where the key is somebody else's: the relay goes on, and what stays there is older, so that more is remembered."""
    server.transport.leave(["a"], 60, 1)
    server.limit_memory(1)
    try:
        server.transport.leave(["a"], 60, 2)
    finally:
        server.limit_memory(0)
    assert server.transport.info("a").oldest == 1
    server.raw.set(f"{server.key('b')}:relay", "x")
    server.transport.leave(["b", "a"], 60, 3)
    assert server.transport.info("a").oldest == 3
    server.raw.hset(f"{server.key('a')}:relay", "oldest", "9" * 40)
    assert server.transport.info("a").oldest is None, "no time"


@only_streams
def test_batches_published_again_are_not_taken_for_progress(there: Any) -> None:
    publish_batches(there, 1, 2, 3)
    there.transport.open(GROUP, ["a"])
    assert there.transport.publish([batch(2, marker(3))]) == [marker(2)]
    assert there.transport.publish([batch(3, marker(2))]) == [marker(3)]
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 5, 0))
    assert group_of(there.transport.inspect("a")) == GroupState(GROUP, 0, None, None, None, 0)
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 2, 0))
    assert group_of(there.transport.inspect("a")) == GroupState(GROUP, 0, None, 1, 1, 1)
    there.transport.ack(GROUP, there.transport.read(GROUP, "one", ["a"], 10, 0))
    assert group_of(there.transport.inspect("a")).acked == 3


def test_o_25_names_with_pending_deliveries_are_never_removed(server: Server) -> None:
    there = server.transport
    publish_batches(server, 1, 2)
    there.open(GROUP, ["a"])
    (held,) = there.read(GROUP, "busy", ["a"], 1, 0)
    there.ack(GROUP, there.read(GROUP, "idle", ["a"], 10, 0))
    assert there.forget_consumers(GROUP, "a", 3600) == []
    assert there.forget_consumers(GROUP, "a", 3600, ["busy", "idle"]) == ["idle"]
    there.ack(GROUP, [held])
    assert eventually(lambda: there.forget_consumers(GROUP, "a", 0.01)) == ["busy"]
    with pytest.raises(GroupLost):
        there.forget_consumers("other", "a", 0)


def test_a_group_that_is_dropped_is_gone(there: Any) -> None:
    publish_batches(there, 1)
    there.transport.open(GROUP, ["a"])
    assert there.transport.drop_group(GROUP, "a") is True
    assert there.transport.drop_group(GROUP, "a") is False
    assert there.transport.drop_group(GROUP, "nowhere") is False
    assert there.transport.inspect("a").groups == []


def test_how_full_the_memory_is(server: Server) -> None:
    assert server.transport.memory_share() is None
    server.limit_memory(10 << 30)
    try:
        assert 0 < (server.transport.memory_share() or 0) < 0.5
    finally:
        server.limit_memory(0)


def test_a_stream_whose_last_id_is_taken_says_what_to_do(server: Server) -> None:
    publish_batches(server, 1, 2)
    server.raw.xadd(server.key("a"), {"by": "a stranger"}, id="18446744073709551615-18446744073709551615")
    for _ in range(2):
        refused, other = server.transport.publish([part(3, marker(2)), part(3, stream="b")])
        assert isinstance(refused, StreamUnusable)
        assert "last possible id of this stream" in str(refused)
        assert "delete it (DEL)" in str(refused)
        assert other == marker(3)
    assert server.transport.markers(["a"]) == {"a": marker(2)}
    server.raw.delete(server.key("a"))
    assert server.transport.publish([part(3, marker(2))]) == [None], "so all that is needed is published again"


def test_a_stream_made_anew_beside_an_old_marker_is_not_acknowledged(server: Server) -> None:
    """Somebody deletes the stream, and a consumer makes it again with its group before the relay looks."""
    publish_batches(server, 1, 2, 3)
    server.raw.delete(server.key("a"))
    server.transport.open(GROUP, ["a"])
    state = server.transport.inspect("a", keep_seconds=0)
    assert (group_of(state).acked, state.missing) == (0, 0)
    server.add("a", {b"id": b"x"})
    assert group_of(server.transport.inspect("a")).acked is None


# --- what only queues have ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=QUEUES)
def jobs(
    request: pytest.FixtureRequest, server_urls: Callable[[str], str], clusters: Callable[[str], Cluster]
) -> Iterator[Queue]:
    found = made(request.param, server_urls, clusters)
    yield found
    found.close()


def test_a_queue_that_has_lost_its_group_says_so_also_while_others_have_jobs(jobs: Queue) -> None:
    for stream in ("a", "b"):
        jobs.transport.publish([part(1, stream=stream, events=20)])
    jobs.transport.open(GROUP, ["a", "b"])
    jobs.raw.hdel(f"{jobs.key('a')}:relay", "group")
    assert {d.stream for d in jobs.transport.read(GROUP, "one", ["a", "b"], 2, 0)} == {"b"}
    with pytest.raises(GroupLost):
        jobs.transport.read(GROUP, "one", ["a", "b"], 2, 0)
    jobs.transport.open(GROUP, ["a", "b"])
    assert {d.stream for d in jobs.transport.read(GROUP, "one", ["a", "b"], 2, 0)} == {"a", "b"}


def test_a_full_queue_that_nobody_has_opened_yet_is_opened_and_drained(jobs: Queue) -> None:
    jobs.transport.publish([part(1, stream="full")])
    jobs.limit_memory(1)
    try:
        assert jobs.transport.open(GROUP, ["full"]) == {}
        found = jobs.transport.read(GROUP, "one", ["full"], 10, 0)
        jobs.transport.ack(GROUP, found)
    finally:
        jobs.limit_memory(0)
    assert len(found) == 1
    assert jobs.transport.inspect("full").length == 0


def test_what_leaves_a_history_takes_no_job_along_that_has_come_again(jobs: Queue) -> None:
    """Its data were lost (evicted, say) after it had ended, and it was added once more."""
    transport = jobs.transport
    transport._kept = 2
    transport.open(GROUP, ["queue/a"])

    def end_one() -> None:
        transport.enqueue([Job(queue="a", type="t", payload=None)])
        transport.ack(GROUP, transport.read(GROUP, "one", ["queue/a"], 1, 0))

    job = Job(queue="a", type="t", payload=None)
    transport.enqueue([job])
    transport.ack(GROUP, transport.read(GROUP, "one", ["queue/a"], 1, 0))
    jobs.raw.delete(f"{jobs.key('queue/a')}:job:{job.id}")
    transport.enqueue([Job(queue="a", type="t", payload=None, id=job.id, run_at=timedelta(days=1))])
    for _ in range(3):
        end_one()
    found = transport.job("a", job.id)
    assert found is not None
    assert (found.status, b"data" in found.fields) == ("delayed", True)


def test_a_job_whose_time_is_none_is_not_kept_for_years(jobs: Queue) -> None:
    """Its consumer is to say what is wrong."""
    times = ["2030-13-31T09:00:00Z", "2030-00-31T09:00:00Z", "2030-01-32T09:00:00Z", "2030-01-31T99:00:00Z", "soon"]
    rows = [(b"{}", str(uuid7()), "t", None, None, None, None, None, f'{{"runat": "{time}"}}') for time in times]
    jobs.transport.publish([Part("a", None, marker(1), wire(rows, label(1)))])
    jobs.transport.open(GROUP, ["a"])
    assert len(jobs.transport.read(GROUP, "one", ["a"], 10, 0)) == len(times)


def test_whoever_may_not_look_for_queues_does_not_try_again_and_again(
    own_valkey: Callable[..., ValkeyServer],
) -> None:
    """Each try is in ACL LOG; rights for streams alone are what most have."""
    server = own_valkey()
    raw: Any = redis.Redis.from_url(server.url)
    raw.execute_command("ACL", "SETUSER", "few", "on", ">pw", "~{a*", "+@all")
    transport = ListTransport(redis.Redis.from_url(server.url.replace("://", "://few:pw@")), claim_seconds=60)
    transport.reclaim_when_due()
    assert 10 < transport._reclaim_due - time.monotonic() <= 15
    transport.close()
    raw.close()


def test_a_look_at_a_queue_costs_the_same_whatever_has_ended(own_valkey: Callable[..., ValkeyServer]) -> None:
    """The relay looks every few seconds; only who wants to know goes through the histories."""
    client: Any = redis.Redis.from_url(own_valkey().url)
    lists = ListTransport(client)
    lists.open(GROUP, ["queue/a"])
    lists.enqueue([Job(queue="a", type="t", payload=None) for _ in range(50)])
    lists.ack(GROUP, lists.read(GROUP, "one", ["queue/a"], 50, 0))
    client.config_resetstat()
    lists.inspect("queue/a")
    assert client.info("commandstats")["cmdstat_hmget"]["calls"] < 10
    assert [state.counts["completed"] for state in lists.queues()] == [50]
    lists.close()
