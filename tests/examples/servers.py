"""Servers on loopback that the examples call, and that can keep a caller waiting in the worst moment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import pytest

Moment = Literal["before", "after"]


class Held:
    """Keeps requests waiting before or after they take effect, until they are released."""

    def __init__(self) -> None:
        self.at: Moment | None = None
        self.arrived = threading.Event()
        self.released = threading.Event()

    def wait(self, moment: Moment) -> None:
        if self.at == moment:
            self.arrived.set()
            assert self.released.wait(60)

    def release(self) -> None:
        self.at = None
        self.released.set()


class PaymentApi:
    """Charges by ``POST /charges`` (with an Idempotency-Key) and payouts by ``POST /payouts`` (without one).

    Attributes:
        charges: what was charged, in order.
        payouts: what was paid out, in order.
        calls: how many requests to do one of them came.
        silent: it ends the connection where an answer should come, after doing what was asked.
    """

    def __init__(self) -> None:
        self.charges: list[dict[str, Any]] = []
        self.payouts: list[dict[str, Any]] = []
        self.calls = 0
        self.silent = False
        self.held = Held()
        self._keys: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                booked = api.book(self.path, body, self.headers["Idempotency-Key"])
                if not api.silent:
                    self._answer(201, booked)

            def do_GET(self) -> None:
                (reference,) = parse_qs(urlsplit(self.path).query)["reference"]
                self._answer(200, [one for one in api.payouts if one["reference"] == reference])

            def _answer(self, status: int, value: object) -> None:
                data = json.dumps(value).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except ConnectionError:
                    pass  # the caller was killed: that is what it is for

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def book(self, path: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        with self._lock:
            self.calls += 1
        self.held.wait("before")
        with self._lock:
            made = self.charges if path == "/charges" else self.payouts
            booked = self._keys.get(key) if key else None
            if booked is None:
                booked = {"id": f"{path[1:3]}_{len(made) + 1}", **body}
                made.append(booked)
                if key:
                    self._keys[key] = booked
        self.held.wait("after")
        return booked


class Mailbox:
    """What an SMTP server took.

    Attributes:
        refused: addresses, and what it says to them.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.messages: list[Message] = []
        self.held = Held()
        self.host, self.port = "127.0.0.1", 0

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any) -> str:
        if address in self.refused:
            return self.refused[address]
        envelope.rcpt_tos.append(address)
        return "250 known"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        import email

        self.messages.append(email.message_from_bytes(envelope.content))
        await asyncio.to_thread(self.held.wait, "after")
        return "250 taken"


@pytest.fixture
def payments(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaymentApi]:
    """A payment API; PAYMENTS_URL leads to it."""
    api = PaymentApi()
    thread = threading.Thread(target=api.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("PAYMENTS_URL", api.url)
    yield api
    api.held.release()
    api.server.shutdown()
    thread.join()
    api.server.server_close()


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    """An SMTP server; SMTP_HOST and SMTP_PORT lead to it."""
    box = Mailbox()
    with _smtp(box):
        monkeypatch.setenv("SMTP_HOST", box.host)
        monkeypatch.setenv("SMTP_PORT", str(box.port))
        yield box
        box.held.release()


@contextmanager
def _smtp(box: Mailbox) -> Iterator[None]:
    """aiosmtpd on a port that the system chooses; its own Controller wants to know the port before."""
    from aiosmtpd.smtp import SMTP

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: SMTP(box, loop=loop), box.host, 0))
    box.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
