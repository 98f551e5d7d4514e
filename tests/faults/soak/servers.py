"""The Redis side of the soak: a server and its replica, some that sentinels watch, or a cluster, and what happens to them."""

from __future__ import annotations

import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from redis.crc import key_slot

from outbox.embedded import ValkeyServer
from outbox.transport.base import streams_of
from tests.faults.chaos import TOPIC
from tests.faults.cluster import Cluster
from tests.faults.proxy import Proxy, port_of, through
from tests.faults.sentinels import Watched
from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.faults.soak.witness import Witness

Fault = Callable[[], None]

#: Of a command of ours; far more than any takes, since a setting that is not set back would be a fault that never ends.
_SECONDS = 20.0


class Servers(ABC):
    """Where the streams are.

    Attributes:
        url: for relays and consumers.
        streams: the streams' keys.
    """

    url: str
    lanes = 1

    def __init__(self, chance: random.Random) -> None:
        self.streams = [f"{{{stream}}}" for stream in streams_of(TOPIC, self.lanes)]
        self._chance, self._stack = chance, ExitStack()

    def close(self) -> None:
        self._stack.close()

    @abstractmethod
    def node(self, stream: str) -> ValkeyServer:
        """The server that has a stream to write to. Raises LookupError or ValueError while there is none."""

    @abstractmethod
    def own_faults(self) -> dict[str, Fault]:
        """What happens to these servers only."""

    def client(self, stream: str, timeout_seconds: float = _SECONDS) -> redis.Redis:
        return self._connect(self.node(stream), timeout_seconds)

    def _connect(self, server: ValkeyServer, timeout_seconds: float = _SECONDS) -> redis.Redis:
        return redis.Redis.from_url(server.url, protocol=2, socket_timeout=timeout_seconds)

    def faults(self, witness: Witness) -> dict[str, Fault]:
        """What is done by commands, to any of the streams, and `own_faults`."""

        def on_stream(*commands: tuple[Any, ...]) -> Fault:
            def fault() -> None:
                stream = self._any()
                at = {"KEY": stream, "MARKER": f"{stream}:relay"}
                witness.destroy(stream, *(tuple(at.get(word, word) for word in command) for command in commands))

            return fault

        def wrong_type() -> None:
            stream = self._any()
            witness.destroy(stream, ("DEL", stream), ("SET", stream, "not a stream"))
            time.sleep(1)
            witness.destroy(stream, ("DEL", stream))

        def delete_entries() -> None:
            """Some of the newest, which are not read yet or pending, and some of the others."""
            stream = self._any()
            with self.client(stream) as client:
                entries = client.xrevrange(stream, count=300)
            if names := [name for name, _ in entries[:30]] + [name for name, _ in entries[30::3]]:
                witness.destroy(stream, ("XDEL", stream, *names))

        def flush() -> None:
            server = self._one()
            for stream in self.streams:
                if self.node(stream) is server:
                    witness.destroy(stream)  # that is: only takes down what there is
            self._command(server, "FLUSHALL")

        return {
            "flushes": flush,
            "streams deleted": on_stream(("DEL", "KEY")),
            "markers deleted": on_stream(("DEL", "MARKER")),
            "streams deleted with their markers": on_stream(("DEL", "KEY", "MARKER")),
            "strangers' trims": on_stream(("XTRIM", "KEY", "MAXLEN", "5")),
            "strangers' deletions": delete_entries,
            "streams of a wrong type": wrong_type,
            "groups destroyed": lambda: on_stream(
                ("XGROUP", "DESTROY", "KEY", self._chance.choice(("ledger", witness.group)))
            )(),
            "scripts flushed": lambda: self._command(self._one(), "SCRIPT", "FLUSH"),
            "Redis full": lambda: self._for_a_while({"maxmemory": "1mb"}, {"maxmemory": "0"}),
            "evictions": lambda: self._for_a_while(
                {"maxmemory-policy": "allkeys-lru", "maxmemory": "1mb"},
                {"maxmemory": "0", "maxmemory-policy": "noeviction"},
            ),
            "Redis without enough replicas": lambda: self._for_a_while(
                {"min-replicas-to-write": "5"}, {"min-replicas-to-write": "0"}
            ),
            "Redis unable to save": self._misconf,
        } | self.own_faults()

    def _any(self) -> str:
        return self._chance.choice(self.streams)

    def _one(self) -> ValkeyServer:
        """A server that has streams."""
        return self.node(self._any())

    def _command(self, server: ValkeyServer, *command: Any) -> Any:
        with self._connect(server) as client:
            return client.execute_command(*command)

    def _for_a_while(self, settings: dict[str, str], usual: dict[str, str]) -> None:
        server = self._one()
        for pair in settings.items():
            self._command(server, "CONFIG", "SET", *pair)
        time.sleep(1)
        for pair in usual.items():
            self._command(server, "CONFIG", "SET", *pair)

    def _misconf(self) -> None:
        """MISCONF: a snapshot cannot be put where there is a folder, whoever we are."""
        server = self._one()
        (server.data_dir / "data" / "folder").mkdir(exist_ok=True)
        with self._connect(server) as client:

            def save(name: str, status: str) -> None:
                client.config_set("dbfilename", name)

                def saved() -> bool:
                    with suppress(redis.ResponseError):  # the replica's snapshot, or one before, is under way
                        client.bgsave()
                    return client.info("persistence")["rdb_last_bgsave_status"] == status

                eventually(saved, 20, f"a snapshot is {status}")

            client.config_set("save", "3600 1")
            save("folder", "err")
            time.sleep(1)
            save("dump.rdb", "ok")
            client.config_set("save", "")


class Single(Servers):
    """One server with a replica, behind a proxy."""

    def __init__(self, program: Path, chance: random.Random) -> None:
        super().__init__(chance)
        settings = {
            "appendonly": "yes", "appendfsync": "everysec", "repl-diskless-sync-delay": "0",
            "enable-protected-configs": "yes",
        }  # fmt: skip
        self.primary, self.replica = (
            self._stack.enter_context(ValkeyServer(program=program, settings=settings)) for _ in range(2)
        )
        self._proxy = self._stack.enter_context(Proxy(port_of(self.primary.url)))
        self.url = through(self._proxy, self.primary.url)
        self._replicate()

    def node(self, stream: str) -> ValkeyServer:
        return self.primary

    def own_faults(self) -> dict[str, Fault]:
        return {
            **connection_faults("Redis", self._proxy, self._chance, deaf_seconds=(0.5, 3)),
            "Redis half-open": self._half_open,
            "Redis killed": self._kill,
            "Redis killed and empty": lambda: self._kill(shutil.rmtree),
            "Redis restored from an older copy": self._restore,
            "Redis loading": self._load,
            "Redis read-only": self._read_only,
            "Redis' replica asked": self._lead_to_replica,
            "failovers to a replica behind": self._fail_over,
        }

    def _half_open(self) -> None:
        """Nothing comes on the connections that there are, for ever; new ones work."""
        self._proxy.forget()
        time.sleep(self._chance.choice((0.5, 3)))

    def _kill(self, meanwhile: Callable[[Path], None] = lambda _: None) -> None:
        self.primary.kill()
        meanwhile(self._append_only_files)
        time.sleep(self._chance.uniform(0, 1))
        self.primary.start()
        self._replicate()

    def _restore(self) -> None:
        copy = self.primary.data_dir / "copy"
        self.primary.pause()  # so that no rewriting is under way
        shutil.copytree(self._append_only_files, copy)
        self.primary.resume()
        time.sleep(self._chance.uniform(0.5, 3))

        def put_back(current: Path) -> None:
            shutil.rmtree(current)
            copy.rename(current)

        self._kill(put_back)

    @property
    def _append_only_files(self) -> Path:
        return self.primary.data_dir / "data" / "appendonlydir"

    def _load(self) -> None:
        """It comes back with much to load, each key of which is made to take a while: LOADING."""
        with self._connect(self.primary) as client:
            keys = [f"ballast:{number}" for number in range(4_000)]
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.set(key, bytes(100))
            pipeline.execute()
            slow = {"key-load-delay": "100", "loading-process-events-interval-bytes": "4096"}
            self.primary.settings |= slow
            self._kill()
            for name in slow:
                del self.primary.settings[name]
            client.unlink(*keys)

    def _read_only(self) -> None:
        self._command(self.primary, "REPLICAOF", "127.0.0.1", port_of(self.replica.url))
        time.sleep(1)
        self._command(self.primary, "REPLICAOF", "NO", "ONE")
        self._replicate()

    def _lead_to_replica(self) -> None:
        """READONLY by an address that leads to the wrong server, whose settings nobody has touched."""
        self._proxy.redirect(port_of(self.replica.url))
        time.sleep(1)
        self._proxy.redirect(port_of(self.primary.url))

    def _replicate(self) -> None:
        command = ("REPLICAOF", "127.0.0.1", port_of(self.primary.url))
        errors = (redis.BusyLoadingError,)  # what it got from its primary
        eventually(lambda: self._command(self.replica, *command), 60, "the replica hears", ignoring=errors)

    def _fail_over(self) -> None:
        """The replica stops hearing the primary, becomes one, and the old one becomes its replica."""
        self.replica.pause()
        time.sleep(self._chance.uniform(0.2, 1))
        self.primary.pause()
        self.replica.resume()
        self._command(self.replica, "REPLICAOF", "NO", "ONE")
        self._proxy.redirect(port_of(self.replica.url))
        self.primary.resume()
        self.primary, self.replica = self.replica, self.primary
        self._replicate()


class Sentinels(Servers):
    """Two servers of which sentinels name the primary; nothing is in between."""

    def __init__(self, program: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self._watched = self._stack.enter_context(Watched(program, {"enable-protected-configs": "yes"}))
        self.url = self._watched.url

    def node(self, stream: str) -> ValkeyServer:
        return self._watched.primary()

    def own_faults(self) -> dict[str, Fault]:
        return {
            "Redis killed, the replica takes over": lambda: self._lost(ValkeyServer.kill, ValkeyServer.start),
            "Redis hangs, the replica takes over": lambda: self._lost(ValkeyServer.pause, ValkeyServer.resume),
            "Redis killed and empty": self._empty,
            "sentinels paused": self._pause_sentinel,
        }

    def _lost(self, away: Callable[[ValkeyServer], object], back: Callable[[ValkeyServer], object]) -> None:
        old = self._watched.primary()
        away(old)
        try:
            eventually(lambda: self._watched.primary() is not old, 60, "the replica takes over", ignoring=(ValueError,))
        finally:
            back(old)
        self._rests()

    def _empty(self) -> None:
        """Back before anybody has noticed, with nothing."""
        self._watched.primary().kill()
        self._watched.primary().start()
        self._rests()

    def _pause_sentinel(self) -> None:
        sentinel = self._chance.choice(self._watched.sentinels)
        sentinel.pause()
        time.sleep(self._chance.uniform(0.2, 3))
        sentinel.resume()

    def _rests(self) -> None:
        """Wait until the other server replicates the one that the sentinels name, so that it may be lost in turn."""

        def replicates() -> bool:
            primary = self._watched.primary()
            (other,) = (server for server in self._watched.servers if server is not primary)
            role = self._command(other, "ROLE")
            return role[0] == b"slave" and role[2] == primary.port and role[3] == b"connected"

        eventually(replicates, 60, "the other one replicates", ignoring=(ValueError, redis.RedisError))


class Clustered(Servers):
    """Three primaries with a replica each, and streams of more than one on them."""

    lanes = 6

    def __init__(self, program: Path, chance: random.Random) -> None:
        super().__init__(chance)
        self.cluster = self._stack.enter_context(Cluster(program=program, settings={"enable-protected-configs": "yes"}))
        self.url = self.cluster.url

    def node(self, stream: str) -> ValkeyServer:
        return self.cluster.nodes[self.cluster.owner(stream)]

    def own_faults(self) -> dict[str, Fault]:
        return {
            "slots moved": self._move,
            "primaries killed, replicas take over": lambda: self._lost(ValkeyServer.kill, ValkeyServer.start),
            "primaries hang, replicas take over": lambda: self._lost(ValkeyServer.pause, ValkeyServer.resume),
            "primaries killed and empty": self._empty,
            "failovers by command": self._fail_over,
        }

    def _move(self) -> None:
        """A stream's slot goes to another primary, with a while between any two steps."""
        stream = self._any()
        source = self.cluster.owner(stream)
        target = self._chance.choice([number for number in self.cluster.primaries() if number != source])
        for _ in self.cluster.move(key_slot(stream.encode()), source, target):
            time.sleep(self._chance.uniform(0, 0.3))

    def _lost(self, away: Callable[[ValkeyServer], object], back: Callable[[ValkeyServer], object]) -> None:
        with self._another_owner() as number:
            away(self.cluster.nodes[number])
        back(self.cluster.nodes[number])
        self._rests()

    def _empty(self) -> None:
        server = self._one()
        server.kill()
        server.start()
        self._rests()

    def _fail_over(self) -> None:
        with self._another_owner() as number:
            self.cluster.clients[self.cluster.replica_of(number)].execute_command("CLUSTER", "FAILOVER")
        self._rests()

    @contextmanager
    def _another_owner(self) -> Iterator[int]:
        """A primary that has a stream; waits at the end until another one has it."""
        stream = self._any()
        number = self.cluster.owner(stream)
        yield number
        errors = (LookupError, redis.RedisError)
        eventually(lambda: self.cluster.owner(stream) != number, 60, "the replica takes over", ignoring=errors)

    def _rests(self) -> None:
        eventually(self.cluster.well, 60, "the cluster is well", ignoring=(redis.RedisError,))


def connection_faults(
    what: str, proxy: Proxy, chance: random.Random, deaf_seconds: tuple[float, ...]
) -> dict[str, Fault]:
    """What a network does to the connections through a proxy.

    Args:
        deaf_seconds: how long nothing may come through, each as likely.
    """

    def for_a_while(seconds: float, **state: Any) -> None:
        usual = {name: getattr(proxy, name) for name in state}
        for name, value in state.items():
            setattr(proxy, name, value)
        time.sleep(seconds)
        for name, value in usual.items():
            setattr(proxy, name, value)

    def dropped() -> None:
        for_a_while(0.5, drop_replies=True)
        proxy.cut()

    def deaf() -> None:
        for_a_while(chance.choice(deaf_seconds), deaf=True)
        proxy.cut()

    def slow() -> None:
        delay = chance.uniform(0.05, 0.5)
        for_a_while(2, delay_seconds=delay, delay_requests_seconds=delay)

    return {
        f"{what} connections cut": proxy.cut, f"{what} replies dropped": dropped, f"{what} deaf": deaf,
        f"{what} slow": slow,
    }  # fmt: skip
