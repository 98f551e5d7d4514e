"""A real PgBouncer in front of a PostgreSQL server, for tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from outbox.embedded import EmbeddedServer, EmbeddedServerError, _postgres_account


class Bouncer(EmbeddedServer):
    """Every database of a server, as that server's user: whoever connects becomes it.

    Args:
        target: address of any database of the server.
        pool_mode: ``transaction``, ``session`` or ``statement``.
        pool_size: connections to a database.
        prepared: prepared statements that it keeps for its clients; 0: it knows none. It never does before 1.21.
        settings: more of the section ``[pgbouncer]``.
    """

    _url = "postgresql://anybody@{host}:{port}/pgbouncer"
    _guard_signal = signal.SIGKILL

    def __init__(
        self, target: str, pool_mode: str = "transaction", pool_size: int = 3, prepared: int = 0, **settings: str
    ) -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise EmbeddedServerError("no pgbouncer: apt-get install pgbouncer")
        self._account = _postgres_account()  # it refuses to be root
        self._target = conninfo_to_dict(target)
        said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        self.version = tuple(int(number) for number in re.findall(r"\d+", said)[:2])
        # SIGTERM waits for clients from 1.23 on; SIGQUIT has no handler before, and is ignored in a shell's background job.
        self._stop_signal = signal.SIGQUIT if self.version >= (1, 23) else signal.SIGTERM
        given = {"pool_mode": pool_mode, "default_pool_size": str(pool_size)}
        if self.version >= (1, 21):
            given["max_prepared_statements"] = str(prepared)
        super().__init__(None, None, given | settings, Path(program))

    def _prepare(self, data: Path, log: IO[bytes]) -> None:
        data.mkdir(mode=0o700, exist_ok=True)
        if self._account:
            os.chown(data, *self._account)

    def _command(self, data: Path, port: int) -> list[str]:
        parts = {name: self._target[name] for name in ("host", "port", "user", "password") if self._target.get(name)}
        fixed = {
            "listen_addr": "127.0.0.1", "listen_port": port, "unix_socket_dir": "", "auth_type": "any",
            "pidfile": data / "pid", "server_login_retry": 0.2, "max_client_conn": 200,
        }  # fmt: skip
        configuration = data / "pgbouncer.ini"
        lines = ["[databases]", "* = " + " ".join(f"{name}='{value}'" for name, value in parts.items())]
        lines += ["[pgbouncer]", *(f"{name} = {value}" for name, value in (fixed | self.settings).items())]
        configuration.write_text("\n".join(lines) + "\n")
        return [str(self._program), str(configuration)]

    def _serves(self, data: Path, pid: int, port: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return (data / "pid").read_text().split() == [str(pid)]
        return False

    def through(self, url: str) -> str:
        """The address of a database of the server, through this pooler."""
        assert self.port is not None
        return urlsplit(url)._replace(netloc=f"anybody@127.0.0.1:{self.port}").geturl()

    def show(self, what: str) -> list[dict[str, Any]]:
        """What the console's ``SHOW`` says."""
        with psycopg.connect(
            self.url, autocommit=True, row_factory=dict_row, cursor_factory=psycopg.ClientCursor
        ) as console:
            return console.execute(f"SHOW {what}").fetchall()  # type: ignore[arg-type]  # a word of the tests' own
