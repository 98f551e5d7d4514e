"""A real cluster on this machine: primaries, a replica of each if wanted, and what operators do to them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import key_slot

from outbox.embedded import ValkeyServer
from tests.waiting import eventually

SLOTS = 16_384
_SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-node-timeout": "1000",
    "cluster-replica-validity-factor": "0",
    "cluster-allow-replica-migration": "no",
    "repl-diskless-sync-delay": "0",
}


class Cluster:
    """`primaries` servers with the slots spread evenly, and a replica of each; as a context manager it is closed at the end.

    `nodes` has the first primaries in front and their replicas, in the same order, behind; `clients` one client of each.
    """

    def __init__(
        self,
        primaries: int = 3,
        *,
        replicas: bool = True,
        program: Path | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.size = primaries
        count = primaries * (2 if replicas else 1)
        self._stack = ExitStack()
        self.nodes = [
            ValkeyServer(program=program, settings=_SETTINGS | {"cluster-port": str(port)} | (settings or {}))
            for port in _free_ports(count)
        ]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self.clients: list[Any] = [
                stack.enter_context(redis.Redis.from_url(node.url, protocol=2, decode_responses=True, socket_timeout=5))
                for node in self.nodes
            ]
            self._form()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _form(self) -> None:
        for number, client in enumerate(self.clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, client in enumerate(self.clients[: self.size]):
            first, after = number * SLOTS // self.size, (number + 1) * SLOTS // self.size
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
        for node in self.nodes[1:]:
            bus = node.settings["cluster-port"]
            self.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        everybody = set(map(self.id, range(len(self.nodes))))
        eventually(lambda: all(self._knows(n) >= everybody for n in range(len(self.nodes))), 30, "all know all")
        for number in range(self.size, len(self.nodes)):
            self.clients[number].execute_command("CLUSTER", "REPLICATE", self.id(number - self.size))
        eventually(self.well, 30, "the cluster works")

    # --- what it is ---

    @property
    def url(self) -> str:
        """The address of the whole."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes[: self.size])}"

    def raw(self, **options: Any) -> Any:
        """redis-py's own client of the whole."""
        return redis.RedisCluster.from_url(self.nodes[0].url.removesuffix("/0"), **options)

    def id(self, number: int) -> str:
        return str(self.clients[number].execute_command("CLUSTER", "MYID"))

    def _knows(self, number: int) -> set[str]:
        lines = self.clients[number].execute_command("CLUSTER", "NODES").splitlines()
        return {line.split()[0] for line in lines}

    def well(self) -> bool:
        """Whether every node says that the cluster works, and every replica has its primary's data."""
        for client in self.clients:
            if "cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                return False
            role = client.role()
            if role[0] == "slave" and role[3] != "connected":
                return False
        return len(self.primaries()) == self.size

    def primaries(self) -> list[int]:
        """Numbers of the nodes that run as primaries."""
        found = []
        for number, client in enumerate(self.clients):
            with contextlib.suppress(redis.RedisError):
                if client.role()[0] == "master":
                    found.append(number)
        return found

    def owner(self, key: str) -> int:
        """The number of the primary that says it has the key's slot."""
        slot = key_slot(key.encode())
        for number in self.primaries():
            for first, last, (_, port, *_), *_ in self.clients[number].execute_command("CLUSTER", "SLOTS"):
                if first <= slot <= last and port == self.nodes[number].port:
                    return number
        raise LookupError(f"nobody has slot {slot}")

    # --- what happens to it ---

    def move(self, slot: int, source: int, target: int) -> Iterator[str]:
        """Move a slot with its keys from one primary to another, step by step: the generator stops between any two."""
        self.clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id(source))
        yield "importing"
        self.clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id(target))
        yield "migrating"
        while keys := self.clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            self.clients[source].execute_command(
                "MIGRATE", "127.0.0.1", self.nodes[target].port, "", 0, 5000, "KEYS", *keys
            )  # fmt: skip
            yield f"moved {keys}"
        for number in (target, source, *(set(self.primaries()) - {source, target})):
            self.clients[number].execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.id(target))
            yield f"node {number} knows"

    def replica_of(self, primary: int) -> int:
        """The node that replicates a primary."""
        for number, client in enumerate(self.clients):
            with contextlib.suppress(redis.RedisError):
                role = client.role()
                if role[0] == "slave" and role[2] == self.nodes[primary].port:
                    return number
        raise LookupError(f"nobody replicates node {primary}")


def _free_ports(count: int) -> Sequence[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
