"""A TCP proxy between a client and a server of the tests: it cuts, goes deaf, drops replies, delays; by itself or at a pattern.

One thread a direction of a connection. What it does is set from outside at any time and holds for what arrives from then on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self
from urllib.parse import urlsplit

When = Literal["before", "after"]


class Proxy:
    """Listens on a port of its own and forwards to `host`:`port`.

    Attributes:
        deaf: nothing is forwarded in either direction any more; connections stay open.
        drop_replies: what the server says is thrown away; what the client says is forwarded.
        delay_seconds: how long each piece of what the server says is held back.
        delay_requests_seconds: the same of what the client says.
        cuts: connections that a pattern has cut so far.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._server = socket.create_server((host, 0))
        self.port: int = self._server.getsockname()[1]
        self.deaf = self.drop_replies = False
        self.delay_seconds = self.delay_requests_seconds = 0.0
        self.cuts = 0
        self._pattern: tuple[bytes, Callable[[int], When | None]] | None = None
        self._seen = 0
        self._open: set[socket.socket] = set()
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection now; new ones are taken."""
        with self._lock:
            found, self._open = self._open, set()
        for each in found:
            _end(each)

    def forget(self) -> int:
        """Forward nothing more on the connections there are, without a word, and take new ones: half-open, as after a
        router forgot them. Returns how many."""
        with self._lock:
            found, self._links = self._links, []
        for link in found:
            link.forgotten = True
        return len(found)

    def redirect(self, port: int) -> None:
        """Forward to another port of the host from now on, and end every connection: a failover."""
        self._target = (self._target[0], port)
        self.cut()

    def cut_at(self, pattern: bytes, when: Callable[[int], When | None]) -> None:
        """For each piece from a client that contains `pattern`, ask `when` with its number, from 1 on.

        ``before``: cut without forwarding it. ``after``: forward it, and cut when the server has answered, without
        forwarding the answer. None: forward both.
        """
        with self._lock:
            self._pattern, self._seen = (pattern, when), 0

    def close(self) -> None:
        """Stop listening and end every connection."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                _end(client)
                continue
            with self._lock:
                self._open |= {client, server}
            link = _Link(client, server)
            with self._lock:
                self._links.append(link)
            threading.Thread(target=self._up, args=(link,), daemon=True).start()
            threading.Thread(target=self._down, args=(link,), daemon=True).start()

    def _up(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.client.recv(65536):
                if self.deaf or link.forgotten:
                    continue
                order = self._order(data)
                if order == "before":
                    break
                if self.delay_requests_seconds:
                    time.sleep(self.delay_requests_seconds)
                link.cut_at_answer = order == "after"
                link.server.sendall(data)
        self._finish(link)

    def _down(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.server.recv(65536):
                if link.cut_at_answer:
                    break
                if self.deaf or self.drop_replies or link.forgotten:
                    continue
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                link.client.sendall(data)
        self._finish(link)

    def _order(self, data: bytes) -> When | None:
        with self._lock:
            if self._pattern is None or self._pattern[0] not in data:
                return None
            self._seen += 1
            order = self._pattern[1](self._seen)
            self.cuts += order is not None
            return order

    def _finish(self, link: _Link) -> None:
        with self._lock:
            self._open -= {link.client, link.server}
        _end(link.client)
        _end(link.server)


def through(proxy: Proxy, url: str) -> str:
    """The URL with the proxy's port."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()


def port_of(url: str) -> int:
    """The port of a URL that has one."""
    port = urlsplit(url).port
    assert port is not None
    return port


class _Link:
    """A client's connection and ours to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.cut_at_answer = self.forgotten = False


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
