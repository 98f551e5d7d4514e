"""README and docs: snippets run, links lead somewhere, every setting is described, no page says what is not so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

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
        "consumer",
        "consumer migrate",
        "consumer run",
        "consumer doctor",
    ],
)
def test_help_is_there(command: str) -> None:
    package, *rest = command.split()
    done = subprocess.run(
        [sys.executable, "-m", package, *rest, "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "Usage" in done.stdout


def test_the_soak_has_the_options_that_its_page_names() -> None:
    page = (ROOT / "docs/explanation/soak.md").read_text()
    program = [sys.executable, "-m", "tests.faults.soak", "--help"]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(re.findall(r"--[a-z]+", page)) <= set(re.findall(r"--[a-z]+", done.stdout))


def test_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    for path in re.findall(r"`((?:outbox|consumer|migrations)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
