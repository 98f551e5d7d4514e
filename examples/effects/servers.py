"""A mail server and a payment API for the examples to call: ``python -m examples.effects.servers``.

They keep what they take in memory. For the tests they can keep a caller waiting in the worst moment.
"""

from __future__ import annotations

import asyncio
import email
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from aiosmtpd.smtp import SMTP

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

    Args:
        port: 0: one that the system chooses.
        say: is told what it does.

    Attributes:
        charges: what was charged, in order.
        payouts: what was paid out, in order.
        calls: how many requests to do one of them came.
        silent: it ends the connection where an answer should come, after doing what was asked.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, say: Callable[[str], object] = lambda _: None) -> None:
        self.charges: list[dict[str, Any]] = []
        self.payouts: list[dict[str, Any]] = []
        self.calls = 0
        self.silent = False
        self.held = Held()
        self._keys: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._say = say
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

        self._server = ThreadingHTTPServer((host, port), Handler)
        self.url = f"http://{host}:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves in a thread; lets go of whom it keeps waiting at the end."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.held.release()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def book(self, path: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        with self._lock:
            self.calls += 1
        self.held.wait("before")
        with self._lock:
            made = self.charges if path == "/charges" else self.payouts
            booked = self._keys.get(key) if key else None
            again = booked is not None
            if booked is None:
                booked = {"id": f"{path[1:3]}_{len(made) + 1}", **body}
                made.append(booked)
                if key:
                    self._keys[key] = booked
        self._say(f"{path} {booked}" + (", with a key that was used: nothing is done" if again else ""))
        self.held.wait("after")
        return booked


class Mailbox:
    """An SMTP server (aiosmtpd), and what it took.

    Args:
        port: 0: one that the system chooses.
        say: is told what it takes.

    Attributes:
        refused: addresses, and what it says to them.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, say: Callable[[str], object] = lambda _: None) -> None:
        self.refused: dict[str, str] = {}
        self.messages: list[Message] = []
        self.held = Held()
        self.host, self.port = host, port
        self._say = say

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves in a thread. aiosmtpd's own Controller wants to know the port before."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(loop.create_server(lambda: SMTP(self, loop=loop), self.host, self.port))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.held.release()
            loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any) -> str:
        if address in self.refused:
            return self.refused[address]
        envelope.rcpt_tos.append(address)
        return "250 known"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        message = email.message_from_bytes(envelope.content)
        self.messages.append(message)
        self._say(f"mail to {message['To']}: {message['Subject']}, {message['Message-ID']}")
        await asyncio.to_thread(self.held.wait, "after")
        return "250 taken"


def main() -> None:
    """Run both where SMTP_HOST, SMTP_PORT and PAYMENTS_URL say, and print what they take."""
    url = urlsplit(os.environ["PAYMENTS_URL"])
    api = PaymentApi(url.hostname or "127.0.0.1", url.port or 80, say=_print)
    box = Mailbox(os.environ["SMTP_HOST"], int(os.environ["SMTP_PORT"]), say=_print)
    with suppress(KeyboardInterrupt), api.running(), box.running():
        _print(f"mails are taken at {box.host}:{box.port}, payments at {api.url}; Ctrl-C ends both")
        threading.Event().wait()


def _print(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main()
