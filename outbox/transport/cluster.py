"""A Redis or Valkey cluster: which node serves which slot, and what happens when that changes.

redis-py's own cluster client is not used: an error of one node is to be that of its streams and no more, and a consumer waits
for streams of many slots at once. Every node is a `Server` of its own; what is here only chooses among them.

* Who serves a slot is asked of any node (CLUSTER SLOTS), at the beginning and after a failure. MOVED and ASK lead on.
* A node fails, or a slot is being moved: where another node says that the cluster works, that is the trouble of the streams
  there (`StreamUnusable`); only where none does is the transport unavailable.
* No command is sent twice, except where a node said that it did not do it (MOVED, ASK).
* A command may name keys of one slot only, so that streams are read one by one, each by a thread that waits. What it brings
  after `read` has returned is handed out by the next; a stream is in one read at a time, so that its order stays.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import redis
from redis.crc import key_slot

from outbox.address import Host
from outbox.errors import StreamUnusable, TransportError, TransportUnavailable
from outbox.transport.servers import Call, Command, Reading, Server

#: Streams that one transport waits for at once, each with a connection; more than that take turns.
_READERS = 256
_NODES = 64
#: How often a call is led on before it fails: a slot moves once, and another node may know it later.
_HOPS = 5
#: How long a node that did not answer in time is left alone, so that the streams of others do not wait for it again.
_REST_SECONDS = 5.0
#: By how much later than asked a server may end a wait: it looks ten times a second (setting ``hz``).
_LATE_SECONDS = 0.15
#: How long the end of a transport waits for reads under way. What a longer one gets in that instant, others claim later.
_END_SECONDS = 1.0

_STATE: tuple[Call, ...] = (("", (b"CLUSTER", b"INFO")), ("", (b"CLUSTER", b"SLOTS")))


class Cluster:
    """The nodes of a cluster.

    Args:
        seeds: some of them, to begin with.
        options: of the connections to each, as redis-py takes them.
    """

    def __init__(self, seeds: Sequence[Host], options: Mapping[str, Any]) -> None:
        self._seeds = list(seeds)
        self._options = {"max_connections": 1 << 20, **options}
        self._closed = False
        self._begin_anew()
        _clusters.add(self)

    def _begin_anew(self) -> None:
        """As at first: in a child of a fork, which has none of the threads, and leaves the connections to its parent."""
        self._known: dict[Host, Server] = {}
        self._owners: dict[int, Host] = {}
        self._current = threading.Event()  # set: what is known of owners is not known to be wrong
        self._lock = threading.Lock()
        self._at_once = ThreadPoolExecutor(_NODES, thread_name_prefix="outbox-node")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="outbox-read")
        self._reads: dict[tuple[tuple[str, str], str], Future[Any]] = {}
        self._reads_end = 0.0
        self._failures: list[TransportError] = []  # one at most

    # --- calls ---

    def run(self, calls: Sequence[Call], then: Sequence[Command] = ()) -> list[Any]:
        replies: list[Any] = [None] * len(calls)
        behind: list[Any] = []
        left, asking = list(range(len(calls))), dict[int, Host]()
        for _ in range(_HOPS):
            self._look()
            shares: dict[tuple[Host | None, bool], list[int]] = {}
            for number in left:
                owner = asking.get(number) or self._owners.get(key_slot(calls[number][0].encode()))
                shares.setdefault((owner, number in asking), []).append(number)
            asking, left = {}, []
            for host, numbers, found in self._share_out(shares, calls, then):
                behind += found[len(numbers) :]
                for number, reply in zip(numbers, found, strict=False):
                    replies[number] = reply
                    if host is None or not isinstance(reply, TransportError) or reply.code not in ("MOVED", "ASK"):
                        continue
                    left.append(number)
                    slot, target = _redirection(reply, host)
                    if reply.code == "MOVED":
                        self._owners[slot] = target
                    else:
                        asking[number] = target
            if not left:
                break
        for number in left:
            replies[number] = TransportUnavailable("Redis: the nodes do not agree who serves the slot", "MOVED")
        failed = [number for number, reply in enumerate(replies) if isinstance(reply, TransportUnavailable)]
        if failed:
            self._current.clear()
            self._look()
            for number in failed:
                replies[number] = _of_its_streams(replies[number])
        return [*replies, *behind]

    def _share_out(
        self, shares: Mapping[tuple[Host | None, bool], list[int]], calls: Sequence[Call], then: Sequence[Command]
    ) -> list[tuple[Host | None, list[int], list[Any]]]:
        """Each node's calls to that node, all at once: the node, its calls' numbers, the replies."""
        tasks = [(host, asking, numbers) for (host, asking), numbers in shares.items()]
        *others, (host, asking, numbers) = tasks
        futures = [
            self._at_once.submit(self._at, host, [calls[number] for number in numbers], asking, then)
            for host, asking, numbers in others
        ]
        mine = (host, numbers, self._at(host, [calls[number] for number in numbers], asking, then))
        return [
            *((host, numbers, future.result()) for (host, _, numbers), future in zip(others, futures, strict=True)), mine
        ]  # fmt: skip

    def _at(
        self, host: Host | None, calls: Sequence[Call], asking: bool = False, then: Sequence[Command] = ()
    ) -> list[Any]:
        """Calls to one node; where that fails, the failure is the reply of each. ASKING goes before each where wanted."""
        if host is None:
            return [TransportUnavailable("Redis: no node of the cluster serves the slot", "CLUSTERDOWN")] * len(calls)
        if self._closed:
            return [TransportUnavailable("Redis: the transport was closed", "ConnectionError")] * len(calls)
        sent = [each for call in calls for each in (("", (b"ASKING",)), call)] if asking else calls
        try:
            replies = self._server(host).run(sent, then)
        except TransportUnavailable as error:
            return [error] * len(calls)
        return [*replies[1 : len(sent) : 2], *replies[len(sent) :]] if asking else replies

    def _server(self, host: Host) -> Server:
        if (known := self._known.get(host)) is not None:
            return known
        pool = redis.ConnectionPool(host=host[0], port=host[1], **self._options)
        return self._known.setdefault(host, _Node(redis.Redis.from_pool(pool)))

    # --- who serves what ---

    def _look(self) -> None:
        """Ask for the owners of all slots, if what is known may be wrong.

        Raises:
            TransportUnavailable: no node answers that the cluster works.
        """
        if self._current.is_set():
            return
        with self._lock:
            if self._current.is_set():
                return
            last: object = "none was asked"
            for host in dict.fromkeys([*self._owners.values(), *self._seeds]):
                state, slots = self._at(host, _STATE)
                wrong = next((reply for reply in (state, slots) if isinstance(reply, TransportError)), None)
                if wrong is None and b"cluster_state:ok" in state:
                    self._owners = _owners(slots, host)
                    self._current.set()
                    for gone in self._known.keys() - {*self._owners.values(), *self._seeds}:
                        del self._known[gone]  # its connections are closed when nobody uses them any more
                    return
                last = wrong or f"{_name(host)} says that the cluster is down"
            code = last.code if isinstance(last, TransportError) else "CLUSTERDOWN"
            raise TransportUnavailable(f"no node says that the cluster works; the last answer: {last}", code)

    def nodes(self) -> Mapping[str, Server]:
        self._look()
        return {_name(host): self._server(host) for host in sorted(set(self._owners.values()))}

    # --- waiting for streams ---

    def read(self, reader: tuple[str, str], keys: Sequence[str], command: Reading, block_seconds: float) -> list[Any]:
        if self._failures:
            raise self._failures.pop()
        end = time.monotonic() + block_seconds + _LATE_SECONDS
        self._reads_end = max(self._reads_end, end)
        begun = [
            self._begin(reader, key, command([key])) for key in keys if (reader, key) not in self._reads
        ]  # fmt: skip
        if not block_seconds:
            wait(begun)
        while True:
            replies = self._collect(reader)
            mine = [future for (who, _), future in self._reads.items() if who == reader]
            if replies or self._failures or not mine or time.monotonic() >= end:
                break
            wait(mine, max(0.0, end - time.monotonic()), FIRST_COMPLETED)
        if self._failures and not replies:
            raise self._failures.pop()
        return replies

    def _begin(self, reader: tuple[str, str], key: str, command: tuple[Any, ...]) -> Future[Any]:
        future = self._readers.submit(lambda: self.run([(key, command)])[0])
        self._reads[reader, key] = future
        return future

    def _collect(self, reader: tuple[str, str]) -> list[Any]:
        """What the reader's threads have brought; the first failure among it is kept, to be raised when it is its turn."""
        replies = []
        for who, key in [each for each, future in self._reads.items() if each[0] == reader and future.done()]:
            try:
                reply = self._reads.pop((who, key)).result()
            except TransportError as error:
                reply = error
            if isinstance(reply, TransportError):
                self._failures = self._failures or [reply]
            elif reply:
                replies.append(reply)
        return replies

    def unread(self) -> Mapping[tuple[str, str], list[Any]]:
        wait(self._reads.values(), min(_END_SECONDS, max(0.0, self._reads_end - time.monotonic())))
        return {reader: self._collect(reader) for reader in {reader for reader, _ in self._reads}}

    def close(self) -> None:
        self._closed = True
        for executor in (self._at_once, self._readers):
            executor.shutdown(wait=False, cancel_futures=True)
        for server in self._known.values():
            server.close()


_clusters: weakref.WeakSet[Cluster] = weakref.WeakSet()


def _after_fork() -> None:
    for cluster in _clusters:
        cluster._begin_anew()


os.register_at_fork(after_in_child=_after_fork)


class _Node(Server):
    """A node; one that did not answer in time rests."""

    _rests_until = 0.0

    def run(self, calls: Sequence[Call], then: Sequence[Command] = ()) -> list[Any]:
        if time.monotonic() < self._rests_until:
            raise TransportUnavailable("Redis: a node did not answer just now", "TimeoutError")
        try:
            return super().run(calls, then)
        except TransportUnavailable as error:
            if error.code == "TimeoutError":
                self._rests_until = time.monotonic() + _REST_SECONDS
            raise


def _owners(slots: Sequence[Any], asked: Host) -> dict[int, Host]:
    """The node of each slot, by the reply to CLUSTER SLOTS; a node without an address is the one that was asked."""
    owners: dict[int, Host] = {}
    for first, last, primary, *_ in slots:
        host, port = primary[:2]
        known = host not in (None, b"", b"?")
        owners |= dict.fromkeys(range(first, last + 1), (host.decode() if known else asked[0], int(port)))
    return owners


def _redirection(error: TransportError, asked: Host) -> tuple[int, Host]:
    """Slot and node that MOVED and ASK name: ``… 3999 127.0.0.1:6381``, without a host for that of the node asked."""
    *_, slot, address = str(error.__cause__).split()
    host, _, port = address.rpartition(":")
    return int(slot), (host or asked[0], int(port))


def _of_its_streams(error: TransportUnavailable) -> StreamUnusable:
    found = StreamUnusable(str(error), error.code)
    found.__cause__ = error
    return found


def _name(host: Host) -> str:
    return f"{host[0]}:{host[1]}"
