"""Sentinels that watch a primary and its replicas, on this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import redis

from outbox.embedded import ValkeyServer
from tests.waiting import eventually

NAME = "events"


class _Sentinel(ValkeyServer):
    """The same program in its other role; told by commands what to watch."""

    def _command(self, data: Path, port: int) -> list[str]:
        return [*super()._command(data, port), "--sentinel"]

    def _serves(self, data: Path, pid: int, port: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as client:
            client.sendall(b"PING\r\n")
            return client.recv(7) == b"+PONG\r\n"
        return False


class Watched:
    """A primary and a replica, and three sentinels of which two must agree; as a context manager it is closed at the end."""

    def __init__(self, program: Path | None = None, settings: dict[str, str] | None = None) -> None:
        settings = {"repl-diskless-sync-delay": "0"} | (settings or {})
        self.servers = [ValkeyServer(program=program, settings=settings) for _ in range(2)]
        self.sentinels: list[ValkeyServer] = [_Sentinel(program=program) for _ in range(3)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in (*self.servers, *self.sentinels):
                stack.enter_context(server)
            clients = [
                stack.enter_context(redis.Redis.from_url(server.url, protocol=2, decode_responses=True))
                for server in self.servers
            ]
            asked: list[Any] = [
                stack.enter_context(redis.Redis(port=sentinel.port, protocol=2, decode_responses=True))
                for sentinel in self.sentinels
            ]
            port = self.servers[0].port
            clients[1].replicaof("127.0.0.1", port)
            eventually(lambda: clients[1].role()[3] == "connected", 20)
            for client in asked:
                client.execute_command("SENTINEL", "MONITOR", NAME, "127.0.0.1", port, 2)
                client.execute_command(
                    "SENTINEL", "SET", NAME, "down-after-milliseconds", 500, "failover-timeout", 3000
                )  # fmt: skip
            eventually(lambda: all(_sees_all(client) for client in asked), 30, "the sentinels know each other")
            self._asked, self._stack = asked, stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{NAME}/0"

    def primary(self) -> ValkeyServer:
        """The server that the sentinels name as the primary."""
        ports = {int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1]) for client in self._asked}
        (found,) = [server for server in self.servers if {server.port} == ports]
        return found


def _sees_all(client: Any) -> bool:
    fields = client.execute_command("SENTINEL", "MASTER", NAME)
    found = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    return (str(found["num-slaves"]), str(found["num-other-sentinels"])) == ("1", "2")
