"""README and docs: snippets run, links lead somewhere, every setting is described, no page says what is not so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import typer
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from consumer.cli import app
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.relay import Relay
from outbox.settings import RelaySettings, Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippet(name: str) -> str:
    found = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, f"README has no snippet marked {name}"
    return found[1]


class Base(DeclarativeBase):
    pass


class Wallet(Base):
    __tablename__ = "wallet"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance_halala: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=0)


def test_readme_snippets_do_what_they_say(database_url: str, redis_url: str, prefix: str) -> None:
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    Base.metadata.create_all(engine)
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE balance (wallet text PRIMARY KEY, halala bigint NOT NULL)")
        connection.execute("CREATE TABLE customer (id text PRIMARY KEY, city text)")
    producer: dict[str, object] = {"Wallet": Wallet}
    exec(compile(snippet("producer"), "README.md", "exec"), producer)  # noqa: S102  # our own README
    consumer: dict[str, object] = {}
    exec(compile(snippet("consumer"), "README.md", "exec"), consumer)  # noqa: S102  # our own README
    record, event, deposit = producer["record"], producer["Event"], producer["deposit"]
    assert callable(record)
    assert callable(event)
    assert callable(deposit)
    with Session(engine) as session, session.begin():
        session.add(Wallet(id="w1", balance_halala=0, version=0))
    for _ in range(2):
        with Session(engine) as session, session.begin():
            deposit(session, "w1", 5000)
    for version, city in ((4, "Riyadh"), (3, "Dammam")):
        with Session(engine) as session, session.begin():
            record(
                session,
                event(topic="customers", type="customer.moved", key="c1", version=version, payload={"city": city}),
            )
    relay = Relay(RelaySettings(database_url=database_url, redis_url=redis_url, key_prefix=prefix))
    relay.run_once()
    relay.close()
    settings = ConsumerSettings(database_url=database_url, redis_url=redis_url, key_prefix=prefix, block_seconds=0.05)
    worker = Worker(consumer["wallet"], settings)  # type: ignore[arg-type]
    counts = worker.run_once()
    worker.close()
    engine.dispose()
    assert {str(outcome): n for outcome, n in counts.items()} == {"applied": 3, "stale": 1}
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT halala FROM balance").fetchone() == (10000,)
        assert connection.execute("SELECT city FROM customer").fetchone() == ("Riyadh",)
    with redis.Redis.from_url(redis_url) as client:
        assert client.xpending(f"{prefix}{{payments}}", "wallet")["pending"] == 0


def test_readme_starts_the_servers_that_it_names() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", snippet("embedded")], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    said = dict(program.stdout.readline().strip().removeprefix("export ").split("=", 1) for _ in range(2))
    engine = create_engine(said["DATABASE_URL"])
    with engine.connect() as connection, redis.Redis.from_url(said["REDIS_URL"]) as client:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
        assert client.ping()
    engine.dispose()
    program.communicate("\n", timeout=60)
    assert program.returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_every_setting_is_described() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    shared = {"database_url": "DATABASE_URL", "redis_url": "REDIS_URL"}
    shared |= {"key_prefix": "OUTBOX_KEY_PREFIX", "lanes": "OUTBOX_LANES"}
    wanted = set()
    for settings in (RelaySettings, ConsumerSettings):
        for name in settings.model_fields:
            variable = settings.prefix + ("SCHEMA" if name == "schema_name" else name.upper())
            wanted.add(shared.get(name, variable))
    described = set(re.findall(r"`((?:OUTBOX|CONSUMER|DATABASE|REDIS)_[A-Z_]+)`", page))
    assert wanted - described == set(), "not described"
    assert described - wanted == set(), "described, but there is no such setting"
    assert Settings.model_fields.keys() <= RelaySettings.model_fields.keys()


@pytest.mark.parametrize(
    "command",
    [
        "outbox",
        "outbox migrate",
        "outbox relay",
        "outbox doctor",
        "outbox queues",
        "consumer",
        "consumer migrate",
        "consumer run",
        "consumer doctor",
        "consumer dead requeue",
        "consumer waiting",
        "consumer jobs cancel",
    ],
)
def test_help_is_there(command: str) -> None:
    package, *rest = command.split()
    done = subprocess.run(
        [sys.executable, "-m", package, *rest, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "Usage" in done.stdout


def test_help_is_folded_where_the_terminal_ends_and_not_where_the_source_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "consumer", "run", "--help"],
        capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"COLUMNS": "160"},
    )  # fmt: skip
    assert "and was handed back. 78: with --strict" in done.stdout


def test_the_soak_and_the_fire_have_the_options_that_their_page_names() -> None:
    page = (ROOT / "docs/explanation/soak.md").read_text()
    before, heading, rest = page.partition("## Jobs under fire")
    fire, end, after = rest.partition("## What was run")
    assert heading and end  # noqa: PT018 - one thing: the page has its parts
    for name, text in {"soak": before + after, "fire": fire}.items():
        program = [sys.executable, "-m", f"tests.faults.{name}", "--help"]
        done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
        assert set(re.findall(r"--[a-z]+", text)) <= set(re.findall(r"--[a-z]+", done.stdout))


def test_the_commands_for_dead_letters_are_as_their_page_says() -> None:
    page = (ROOT / "docs/operations/dead-letters.md").read_text()
    group: Any = typer.main.get_command(app)
    dead = group.commands["dead"]
    assert set(re.findall(r"consumer dead (\w+)", page)) == dead.commands.keys()
    commands = {"waiting": group.commands["waiting"], "status": group.commands["status"], **dead.commands}
    options = {name: {o for p in command.params for o in p.opts} for name, command in commands.items()}
    for name, used in re.findall(r"`consumer (?:dead )?(\w+) ([^`]*)`", page):
        assert set(re.findall(r"--[a-z-]+", used)) <= options.get(name, set()), (name, used)
    assert set(re.findall(r"`(--[a-z-]+)", page)) - {"--schema"} <= set().union(*options.values())


def test_the_commands_for_jobs_are_as_their_page_says() -> None:
    page = (ROOT / "docs/how-to/jobs.md").read_text().partition("## At the terminal")[2].partition("\n## ")[0]
    group: Any = typer.main.get_command(app)
    jobs = group.commands["jobs"].commands
    assert set(re.findall(r"`consumer jobs (\w+) [A-Z]", page)) == jobs.keys()
    for name, arguments in re.findall(r"`consumer jobs (\w+) ([A-Z ]+)`", page):
        shown = [p.name.upper() for p in jobs[name].params if p.param_type_name == "argument"]
        assert " ".join(shown) == arguments
    options = {o for command in jobs.values() for p in command.params for o in p.opts}
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= options


def test_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    for path in re.findall(r"`((?:outbox|consumer|migrations)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
