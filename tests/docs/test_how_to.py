"""The how-to pages on effects and idempotency: what they show stands in the examples, which are tested, or runs here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from consumer import first_time
from pytest_outbox import missing
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / f"docs/how-to/{name}.md").read_text() for name in ("effects", "idempotency")}
SHOWN = re.compile(r"(?:<!-- (from|test): (\S+) -->\n)?```(?:python|sql)\n(.*?)```", re.DOTALL)


def snippet(page: str, name: str) -> str:
    (found,) = [text for kind, given, text in SHOWN.findall(PAGES[page]) if (kind, given) == ("test", name)]
    return str(found)


@pytest.mark.parametrize("page", PAGES)
def test_what_is_shown_is_what_is_tested(page: str) -> None:
    shown = SHOWN.findall(PAGES[page])
    assert len(shown) >= 5
    for kind, name, text in shown:
        if kind == "from":
            assert text in (ROOT / name).read_text(), f"{name} has it otherwise:\n{text}"
        else:
            assert (page, name) in {("idempotency", each) for each in ("psycopg", "async", "delete")}, text


def test_the_examples_run_as_the_page_says(database_url: str, redis_url: str, prefix: str) -> None:
    found = re.search(r"<!-- test: run -->\n```bash\n(.*?)```", PAGES["effects"], re.DOTALL)
    assert found
    script = found[1]
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
    for shown, port in zip(("8025", "8026"), free, strict=True):
        assert shown in script
        script = script.replace(shown, str(port))
    assert "`kill $(jobs -p)` ends all" in PAGES["effects"]
    environment = os.environ | {
        "DATABASE_URL": database_url, "REDIS_URL": redis_url, "OUTBOX_KEY_PREFIX": prefix,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    with psycopg.connect(database_url) as connection:  # nothing is there yet
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    shell = subprocess.Popen(
        ["bash", "-c", f"{script}\nread\nkill $(jobs -p)\nwait"], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert shell.stdin is not None
        assert shell.stdout is not None
        wanted, said = {"mail to ali@example.com: Receipt for order", "/charges {", "/payouts {"}, ""
        for line in shell.stdout:
            said += line
            wanted = {start for start in wanted if not line.startswith(start)}
            if not wanted:
                break
        assert not wanted, said
        eventually(
            lambda: _completed(environment) == {"mail": 1, "charges": 1}
        )  # a server that is gone has not answered
        shell.stdin.write("\n")
        shell.stdin.flush()
        shell.stdout.read()  # until all have ended
        shell.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    with psycopg.connect(database_url) as connection:
        counted = connection.execute(
            "SELECT (SELECT count(*) FROM effects_orders), (SELECT count(*) FROM effects_charges), "
            "(SELECT count(*) FROM effects_payouts WHERE status = 'paid')"
        )
        assert counted.fetchone() == (1, 1, 1)


def _completed(environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, "-m", "outbox", "queues", "--json"]
    queues = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return {queue["queue"]: queue["kept"].get("completed", 0) for queue in json.loads(queues.stdout)}


def test_the_fastapi_example_runs_as_the_page_says(database_url: str) -> None:
    if shutil.which("curl") is None:
        missing("no curl here")
    (script,) = re.findall(r"<!-- test: run -->\n```bash\n(.*?)```", PAGES["idempotency"], re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        script = script.replace("8000", str(free.getsockname()[1]))
    environment = os.environ | {
        "DATABASE_URL": database_url.replace("postgresql://", "postgresql+psycopg://"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    shell = subprocess.Popen(
        ["bash", "-c", f"{script}\nkill %1\nwait"], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert said.count("\nHTTP/1.1 201 Created\n") == 2, said
    assert said.count('{"wallet_id":"w1","balance_halala":5000}') == 2, said
    assert said.lower().count("idempotency-replayed: true") == 1, said
    assert said.endswith("1\n0\n"), said


def test_psycopg(database_url: str) -> None:
    space: dict[str, Any] = {}
    exec(compile(snippet("idempotency", "psycopg"), "idempotency.md", "exec"), space)  # noqa: S102  # our own page
    with psycopg.connect(database_url, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.UndefinedTable):
            space["close_books"](connection, "2026-07")  # the work fails: so the key is not kept
        connection.execute("CREATE TABLE closed_months (month text)")
        assert [space["close_books"](connection, "2026-07") for _ in range(3)] == [True, False, False]
        assert connection.execute("SELECT count(*) FROM closed_months").fetchone() == (1,)


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payments"
    webhook_id: Mapped[str]
    id: Mapped[int] = mapped_column(primary_key=True)


def test_async(database_url: str) -> None:
    space: dict[str, Any] = {"Payment": Payment}
    exec(compile(snippet("idempotency", "async"), "idempotency.md", "exec"), space)  # noqa: S102  # our own page

    async def run() -> int:
        engine = create_async_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

        async def receive() -> None:
            async with AsyncSession(engine) as session:
                await space["receive"](session, "evt_1")

        await asyncio.gather(*(receive() for _ in range(5)))
        async with AsyncSession(engine) as session:
            number = await session.scalar(select(func.count()).select_from(Payment))
        await engine.dispose()
        return int(number or 0)

    assert asyncio.run(run()) == 1


def test_delete(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        for scope, key, days in (
            ("payment-webhooks", "old", 91), ("payment-webhooks", "new", 89), ("close-books", "old", 91)
        ):  # fmt: skip
            assert first_time(connection, scope, key)
            connection.execute(
                "UPDATE processed_messages SET processed_at = now() - make_interval(days => %s) WHERE processed_at = now()",
                (days,),
            )
        assert connection.execute(snippet("idempotency", "delete").encode()).rowcount == 1
        assert first_time(connection, "payment-webhooks", "old")
        assert not first_time(connection, "payment-webhooks", "new")


def test_the_role_needs_what_the_page_says(database_url: str, prefix: str) -> None:
    assert "needs `SELECT` and `INSERT` on `processed_messages`" in PAGES["idempotency"]
    role = prefix.rstrip(":")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role}".encode())
        try:
            for right, message in (("INSERT", "permission denied"), ("SELECT", None)):
                connection.execute(f"GRANT {right} ON processed_messages TO {role}".encode())
                with connection.transaction(force_rollback=True):
                    connection.execute(f"SET LOCAL ROLE {role}".encode())
                    if message is None:
                        assert first_time(connection, "a", "b")
                    else:
                        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=message):
                            first_time(connection, "a", "b")
        finally:
            connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
