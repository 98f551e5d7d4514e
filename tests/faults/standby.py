"""Copies of a running PostgreSQL server, made by its own pg_basebackup: a stand-by that streams, or a restore from an archive.

A copy lives in its server's directory and ends before it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psycopg

from outbox.embedded import PostgresServer, _as_account, _postgres_account
from tests.waiting import eventually

#: Of a server that is to be copied.
PRIMARY = {"wal_level": "replica", "max_wal_senders": "4", "hot_standby": "on", "fsync": "off"}


def folder(server: PostgresServer, name: str) -> Path:
    """A new folder in the server's directory that it may write."""
    made = server.data_dir / name
    made.mkdir()
    if account := _postgres_account():
        os.chown(made, *account)
    return made


def base_backup(server: PostgresServer, binaries: Path, name: str) -> Path:
    """Copy the running server; returns the directory for another one's `data_dir`. It would start as a stand-by."""
    made = folder(server, name)
    command = [binaries / "pg_basebackup", "-d", server.url, "-D", made / "data", "-R", "-c", "fast", "--no-sync"]
    subprocess.run(command, **_as_account(_postgres_account()), cwd="/", check=True, capture_output=True)
    return made


def copied(backup: Path, name: str) -> Path:
    """Another copy of a backup that was not started yet."""
    made = shutil.copytree(backup, backup.with_name(name), copy_function=shutil.copy)
    if account := _postgres_account():
        for path in (made, *made.rglob("*")):
            os.chown(path, *account)
    (made / "data").chmod(0o700)
    return made


def hold_back(primary: PostgresServer, standby: PostgresServer) -> None:
    """Let the stand-by have all that the primary has written, and nothing from then on."""
    with psycopg.connect(primary.url, autocommit=True) as here, psycopg.connect(standby.url, autocommit=True) as there:
        row = here.execute("SELECT pg_current_wal_lsn()").fetchone()
        assert row is not None
        eventually(lambda: _one(there, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", row[0]))
        there.execute("ALTER SYSTEM SET primary_conninfo = ''")
        there.execute("SELECT pg_reload_conf()")
        eventually(lambda: _one(there, "SELECT count(*) = 0 FROM pg_stat_wal_receiver"))


def promote(standby: PostgresServer) -> None:
    """Make it a primary of its own."""
    with psycopg.connect(standby.url, autocommit=True) as there:
        assert _one(there, "SELECT pg_promote()")


def _one(connection: psycopg.Connection, query: str, *parameters: object) -> object:
    row = connection.execute(query, parameters).fetchone()
    return row[0] if row else None
