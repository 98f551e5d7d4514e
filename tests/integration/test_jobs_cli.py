"""Queues and jobs in operators' hands: `outbox queues`, `consumer jobs …`."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import Session
from typer.testing import CliRunner, Result

from consumer import Consumer, Envelope, Reject, Retry
from consumer.cli import app as consumer_app
from consumer.cli import main as consumer_main
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, Job, record
from outbox.cli import app as outbox_app
from outbox.cli import main as outbox_main
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.transport import Router
from tests.waiting import eventually, in_time

LATER = Retry(attempts=5, first_seconds=3600, longest_seconds=3600)


class Office:
    """Somebody with the commands; a relay, and workers that a test runs round by round."""

    def __init__(self, database_url: str, redis_url: str, prefix: str, stack: ExitStack) -> None:
        self.addresses: dict[str, Any] = {"database_url": database_url, "redis_url": redis_url, "key_prefix": prefix}
        self.environment = {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "OUTBOX_KEY_PREFIX": prefix}
        self.db = stack.enter_context(psycopg.connect(database_url, autocommit=True))
        self.lists = Router.from_url(redis_url, prefix=prefix, claim_seconds=0.05).lists
        stack.callback(self.lists.close)
        self.relay = Relay(RelaySettings(**self.addresses, check_seconds=0.02, trim_seconds=0.02))
        stack.callback(self.relay.close)
        self.stack = stack

    def worker(self, consumer: Consumer) -> Worker:
        settings = ConsumerSettings(**self.addresses, check_seconds=0.02, block_seconds=0.02)
        made = Worker(consumer, settings)
        self.stack.callback(made.close)
        return made

    def record(self, *given: Event) -> list[str]:
        with psycopg.connect(self.environment["DATABASE_URL"]) as connection:
            record(connection, *given)
        self.relay.run_once()
        return [str(each.id) for each in given]

    def job(self, what: str = "done", **fields: Any) -> str:
        """The id of a job that is recorded, and in its queue."""
        queue = fields.pop("queue", "mail")
        (job_id,) = self.record(Job(queue=queue, type="send", payload={"what": what, "card": "xyzw"}, **fields))
        eventually(lambda: self.relay.run_once() is not None and self.lists.job(queue, uuid.UUID(job_id)))
        return job_id

    def run(self, app: Any, *arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(app, arguments, env=self.environment | {"CONSUMER_SCHEMA": None} | environment)

    def said(self, *arguments: str, code: int = 0) -> str:
        result = self.run(consumer_app, "jobs", *arguments)
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    def found(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.said(*arguments, "--json", code=code))

    def refused(self, *arguments: str, **environment: str) -> str:
        result = self.run(consumer_app, "jobs", *arguments, **environment)
        assert result.exit_code == 1, result.output
        return str(result.exception)

    def queues(self) -> dict[str, dict[str, Any]]:
        result = self.run(outbox_app, "queues", "--json")
        assert result.exit_code == 0, (result.output, result.exception)
        return {each["queue"]: each for each in json.loads(result.stdout)}

    def listed(self, *arguments: str) -> list[tuple[str, str]]:
        return [(each["status"], each["id"]) for each in self.found("list", "mail", *arguments)]

    def claim(self, number: int, queue: str = "mail") -> None:
        """A process takes so many jobs, and is gone."""
        assert len(self.lists.read("mailer", "gone", [f"queue/{queue}"], number, 0)) == number

    def count(self, query: str, *parameters: Any) -> int:
        row = self.db.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return int(row[0])

    def redis(self, *command: Any) -> Any:
        return self.lists._servers.run([(str(command[1]), command)])[0]


@pytest.fixture
def office(database_url: str, redis_url: str, prefix: str) -> Iterator[Office]:
    with ExitStack() as stack:
        yield Office(database_url, redis_url, prefix, stack)


def mailer(name: str = "mailer", **subscription: Any) -> Consumer:
    consumer = Consumer(name, **(subscription or {"queues": ["mail"]}), retry=LATER)

    def send(job: Envelope, session: Session) -> dict[str, str]:
        if job.payload["what"] == "rejected":
            raise Reject("no such address\x1b[2J")
        if job.payload["what"] == "fails":
            raise ValueError("not now")
        return {"answer": "s3cret"}

    (consumer.on if subscription.get("topics") else consumer.job)("send")(send)
    return consumer


@pytest.fixture
def worker(office: Office) -> Worker:
    made = office.worker(mailer())
    made.run_once()
    return made


def drained(office: Office, worker: Worker) -> None:
    eventually(lambda: worker.run_once() is not None and office.lists.queues()[0].counts["ready"] == 0)


# --- queues ----------------------------------------------------------------------------------------------------------------


def test_queues_are_shown_as_redis_and_postgresql_have_them(office: Office, worker: Worker) -> None:
    for what in ("done", "done", "fails", "rejected"):
        office.job(what)
    drained(office, worker)
    due = datetime.fromisoformat("2030-01-31T09:00:00+00:00")
    office.job(run_at=due)
    for priority in ("high", "low", "low"):
        office.job(priority=priority)
    office.job(queue="paper")
    found = office.queues()
    assert list(found) == ["mail", "paper"]
    mail, paper = found["mail"], found["paper"]
    assert 0 < mail.pop("oldest_ready_seconds") < 60
    assert mail == {
        "queue": "mail", "consumer": "mailer", "whole": True, "ready": {"high": 1, "normal": 0, "low": 2}, "delayed": 1,
        "next_due": due.isoformat(), "running": 0, "orphaned": 0, "waiting": 1, "dead": 1, "kept": {"completed": 2, "failed": 1},
    }  # fmt: skip
    assert (paper["consumer"], paper["ready"], paper["oldest_ready_seconds"] is None) == (
        None, {"high": 0, "normal": 1, "low": 0}, False,
    )  # fmt: skip
    head, first, second = office.run(outbox_app, "queues").stdout.splitlines()
    columns = [words.strip() for words in re.split(r"  +", head)]
    assert columns[:6] == ["queue", "consumer", "ready", "oldest", "delayed", "next due"]
    shown = re.split(r"  +", first)
    assert shown[:3] + shown[4:] == [
        "mail", "mailer", "1/0/2", "1", "2030-01-31T09:00:00Z", "0", "0", "1", "1", "2", "1", "0",
    ]  # fmt: skip
    assert re.fullmatch(r"\d+\.\d s", shown[3])
    assert re.split(r"  +", second)[:3] == ["paper", "-", "0/1/0"]
    elsewhere = office.run(outbox_app, "queues", CONSUMER_SCHEMA="elsewhere").stdout.splitlines()[1]
    assert re.split(r"  +", elsewhere)[8:10] == ["?", "?"]


def test_a_queue_that_redis_has_forgotten_is_shown_and_none_is_said(office: Office) -> None:
    assert office.run(outbox_app, "queues").stdout == "there are no queues\n"
    office.job()
    assert office.queues()["mail"]["whole"]
    prefix = office.addresses["key_prefix"]
    office.redis("DEL", f"{prefix}queues")
    office.redis("DEL", f"{prefix}{{queue/mail}}:relay")
    assert not office.queues()["mail"]["whole"]
    assert "INCOMPLETE" in office.run(outbox_app, "queues").stdout


def test_o_39_a_job_whose_process_is_gone_is_orphaned_until_somebody_takes_it_over(
    office: Office, worker: Worker
) -> None:
    claim = 0.5
    lists = Router.from_url(
        office.environment["REDIS_URL"], prefix=office.addresses["key_prefix"], claim_seconds=claim
    ).lists
    office.stack.callback(lists.close)
    numbers = count(1)

    def taken_over() -> float:
        number = next(numbers)
        office.job()
        assert len(lists.read("mailer", "gone", ["queue/mail"], 1, 0)) == 1
        begun = time.monotonic()
        eventually(lambda: office.queues()["mail"]["orphaned"] == 1)
        mail = office.queues()["mail"]
        assert (mail["running"], sum(mail["ready"].values())) == (1, 0)
        eventually(lambda: worker.run_once() is not None and office.queues()["mail"]["orphaned"] == 0)
        took = time.monotonic() - begun
        eventually(lambda: worker.run_once() is not None and office.queues()["mail"]["kept"] == {"completed": number})
        return took

    assert in_time(2 * claim, taken_over)


def test_o_98_deaths_and_backlog_are_shown_as_they_are(
    office: Office, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """Three events and two jobs are dead, four jobs orphaned, five events cannot be published."""
    prefix = office.addresses["key_prefix"]
    wallet = office.worker(mailer("wallet", topics=["payments"]))
    letters = [Event(topic="payments", type="send", key=str(n), payload={"what": "rejected"}) for n in range(3)]
    with caplog.at_level(logging.ERROR):
        dead = {*office.record(*letters), office.job("rejected"), office.job("rejected")}
        drained(office, worker)
        query = "SELECT count(*) FROM public.dead_letters"
        eventually(lambda: wallet.run_once() is not None and office.count(query) == 5)
    deaths = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.ERROR]
    assert sorted(job_id for job_id in dead for text in deaths if job_id in text) == sorted(dead), "one for each"
    assert "xyzw" not in caplog.text
    for _ in range(4):
        office.job()
    office.claim(4)
    eventually(lambda: office.queues()["mail"]["orphaned"] == 4)
    office.redis("SET", f"{prefix}{{refunds}}", "a stranger's")
    office.record(*(Event(topic="refunds", type="send", key=str(n), payload=n) for n in range(5)))

    mail = office.queues()["mail"]
    assert (mail["dead"], mail["orphaned"], mail["running"]) == (2, 4, 4)
    for name, number in (("wallet", 3), ("mailer", 2)):
        sums = json.loads(office.run(consumer_app, "status", name, "--json").stdout)
        assert [each["count"] for each in sums["dead"].values()] == [number]
        assert office.count("SELECT count(*) FROM public.dead_letters WHERE consumer = %s", name) == number
    base = f"{prefix}{{queue/mail}}"
    assert office.redis("HLEN", f"{base}:processing") == office.redis("ZCARD", f"{base}:claims") == 4
    ages = []
    for _ in range(2):
        office.relay.run_once()
        result = office.run(outbox_app, "status", "--json")
        streams = {each["stream"]: each for each in json.loads(result.stdout)["streams"]}
        assert streams["refunds"]["unpublished"] == 5
        (group,) = streams["queue/mail"]["groups"]
        assert (group["dead"], group["pending"], group["orphaned"]) == (2, 4, 4)
        assert "4 pending (oldest -), 4 of them orphaned" in office.run(outbox_app, "status").stdout
        ages.append(streams["refunds"]["unpublished_seconds"])
    assert 0 < ages[0] < ages[1]


# --- looking ---------------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_by_status_without_payloads(office: Office, worker: Worker) -> None:
    completed, waits, dead = office.job(), office.job("fails"), office.job("rejected")
    drained(office, worker)
    low, high = office.job(priority="low"), office.job(priority="high", key="o1")
    delayed = office.job(run_at=timedelta(days=1))
    running = office.job(priority="high", lifo=True)
    office.claim(1)
    assert office.listed() == [
        ("running", running), ("ready", high), ("ready", low), ("delayed", delayed), ("waiting", waits), ("failed", dead),
    ]  # fmt: skip
    assert office.listed("--status", "completed") == [("completed", completed)]
    assert office.listed("--status", "ready", "--status", "failed", "--limit", "1") == [
        ("ready", high),
        ("failed", dead),
    ]
    found = {each["id"]: each for each in office.found("list", "mail")}
    assert (found[running]["by"], found[running]["count"], found[high]["priority"]) == ("gone", 1, "high")
    assert found[delayed]["due_at"] > found[delayed]["added_at"]
    assert (found[waits]["consumer"], found[waits]["attempts"], found[dead]["reason"]) == ("mailer", 1, "rejected")
    text = office.said("list", "mail")
    assert [line.split()[0] for line in text.splitlines()] == [
        "running", "ready", "ready", "delayed", "waiting", "failed",
    ]  # fmt: skip
    assert "by gone, claimed until 2" in text
    assert (found[high]["key"], found[low]["key"], text.count("  key o1  ")) == ("o1", None, 1)
    for shown in (text, json.dumps(list(found.values()))):
        assert "\x1b" not in shown
        assert "xyzw" not in shown
    assert office.said("list", "mail", "--status", "cancelled") == ""
    limited = office.run(consumer_app, "jobs", "list", "mail", "--status", "ready", "--limit", "1")
    assert "first 1 ready ones" in limited.stderr
    assert "--status: must be one of running, ready," in office.refused("list", "mail", "--status", "done")


def test_a_queue_of_another_consumer_is_said_once_a_minute(
    office: Office, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    other = office.worker(mailer("other", queues=["mail", "letters"]))
    for _ in range(5):
        other.run_once()
        time.sleep(0.03)  # it looks again
    said = [each.getMessage() for each in caplog.records if getattr(each, "action", "") == "stream_failed"]
    assert len(said) == 1, said
    assert "is the queue of consumer mailer" in said[0]
    assert "If mailer is gone for good, `outbox drop-group mailer` frees it" in said[0]


def test_a_long_queue_is_listed_to_its_end(office: Office) -> None:
    given = [Job(queue="mail", type="send", payload=n) for n in range(250)]
    assert all(office.lists.enqueue(given))
    assert [job_id for _, job_id in office.listed()] == [str(each.id) for each in given]
    assert len(office.said("list", "mail").splitlines()) == 100


def test_all_about_a_job_is_shown_and_its_payload_only_when_asked_for(office: Office, worker: Worker) -> None:
    completed, waits, dead = office.job(), office.job("fails"), office.job("rejected")
    drained(office, worker)
    ready = office.job(priority="low")
    wanted = {
        completed: ("completed", {"mailer": "applied"}), waits: ("waiting", {"mailer": "waiting"}),
        dead: ("failed", {"mailer": "dead"}), ready: ("ready", {}),
    }  # fmt: skip
    found = {each["id"]: each for each in office.found("show", "mail", *wanted)}
    assert {job_id: (each["status"], each["ledger"]) for job_id, each in found.items()} == wanted
    assert {each["redis"]["status"] for each in found.values()} == {status for status, _ in wanted.values()}
    (wait,), (letter,) = found[waits]["waiting"], found[dead]["dead"]
    assert (wait["reason"], wait["attempts"], wait["error"]) == ("failed", 1, "ValueError: not now")
    assert datetime.fromisoformat(wait["next_attempt_at"]) - datetime.fromisoformat(wait["last_failed_at"]) > timedelta(
        minutes=1
    )
    assert letter["reason"] == "rejected"
    text = office.said("show", "mail", *wanted)
    for words in (
        "consumer mailer: applied",
        "next try 2",
        "rejected, 1 attempts",
        "no such address\\x1b[2J",
        "has not done it",
    ):
        assert words in text
    assert "data, " in text
    for shown in (text, json.dumps(list(found.values()))):
        assert "xyzw" not in shown
        assert "s3cret" not in shown
    for job_id in (waits, dead, ready):
        assert "xyzw" in office.said("show", "mail", job_id, "--payload")
        (whole,) = office.found("show", "mail", job_id, "--payload")
        (data,) = [each["text"] for each in whole["fields"] if each["name"] == "data"]
        assert json.loads(data)["card"] == "xyzw"
    whole = office.said("show", "mail", completed, "--payload")
    assert '{"answer":"s3cret"}' in whole
    assert "payload   is not kept in Redis" in whole
    assert "payload   is not kept" not in text + office.said("show", "mail", waits, dead, ready, "--payload")
    assert office.found("show", "mail", completed, "--payload")[0]["redis"]["result"] == {"answer": "s3cret"}


def test_unknown_names_and_ids_are_said_with_the_nearest_ones(office: Office, worker: Worker) -> None:
    known = office.job("rejected")
    drained(office, worker)
    other = known[:-1] + ("0" if known[-1] != "0" else "1")
    assert "no queue 'mial' (near it: mail)" in office.refused("list", "mial")
    assert "no queue 'Mail'" in office.refused("show", "Mail", known)
    assert "no queue 'queue/mail' (near it: mail)" in office.refused("list", "queue/mail")
    for command in ("cancel", "requeue"):
        assert "no consumer of queues 'mailr' (near it: mailer)" in office.refused(command, "mailr", known)
        assert "MODULE:NAME" in office.refused(command, "shop:mailer", known)
        assert f"no job {other} in mail (near it: {known})" in office.refused(command, "mailer", known, other)
        assert f"no id of a job, a whole UUID (near it: {known})" in office.refused(command, "mailer", known[:-1])
    assert f"(near it: {known})" in office.refused("show", "mail", other)
    assert office.listed() == [("failed", known)], "nothing is done where one is unknown"


def test_what_postgresql_knows_is_shown_without_redis(office: Office, worker: Worker) -> None:
    dead = office.job("rejected")
    drained(office, worker)
    away = {"REDIS_URL": "redis://127.0.0.1:1"}
    result = office.run(consumer_app, "jobs", "show", "mail", dead, **away)
    assert result.exit_code == 0, result.output
    assert "Redis     does not answer" in result.stdout
    assert "dead      letter" in result.stdout
    assert office.run(consumer_app, "jobs", "list", "mail", "--status", "failed", **away).exit_code == 0
    assert "Redis does not answer" in office.refused("show", "mail", str(uuid.uuid4()), **away)
    assert "Redis does not answer" in office.refused("list", "paper", **away)
    assert office.run(outbox_app, "queues", **away).exit_code == 1


# --- doing -----------------------------------------------------------------------------------------------------------------


def test_jobs_are_cancelled_where_it_is_not_too_late(office: Office, worker: Worker) -> None:
    done, waits, dead = office.job(), office.job("fails"), office.job("rejected")
    drained(office, worker)
    ready, delayed = office.job("fails"), office.job(run_at=timedelta(days=1))
    ids = (ready, delayed, waits, done, dead)
    ends = [
        ("cancelled", "ready"), ("cancelled", "delayed"), ("cancelled", "waiting"), ("completed", None), ("failed", None),
    ]  # fmt: skip
    rows = "SELECT event_id, outcome FROM public.processed_messages ORDER BY 1"
    before = office.db.execute(rows).fetchall()
    foreseen = office.found("cancel", "mailer", *ids, "--dry-run", code=3)
    assert office.db.execute(rows).fetchall() == before, "a dry run changes nothing"
    assert office.listed()[0] == ("ready", ready)
    assert "would be cancelled, is ready" in office.said("cancel", "mailer", ready, "--dry-run")
    found = office.found("cancel", "mailer", *ids, code=3)
    assert [(each["status"], each["before"]) for each in found] == ends
    assert found == foreseen
    assert office.listed() == [("failed", dead)]
    assert {job_id for _, job_id in office.listed("--status", "cancelled")} == {ready, delayed, waits}
    assert office.queues()["mail"]["kept"]["cancelled"] == 3
    text = office.said("cancel", "mailer", *ids, code=3)
    assert f"{ready}  is cancelled already" in text
    assert f"consumer dead discard mailer --id {dead}" in text
    assert "is cancelled already" in office.said("cancel", "mailer", ready)


def test_a_job_that_is_claimed_is_not_begun_once_it_is_cancelled(office: Office, worker: Worker) -> None:
    job_id = office.job("fails")
    office.claim(1)
    assert "cancelled, was running" in office.said("cancel", "mailer", job_id)
    eventually(
        lambda: worker.run_once() is not None and office.listed("--status", "cancelled") == [("cancelled", job_id)]
    )
    assert office.count("SELECT count(*) FROM public.message_failures") == 0


def test_what_a_command_that_died_has_left_in_redis_is_taken_out_by_the_next_one(
    office: Office, worker: Worker
) -> None:
    job_id = office.job()
    office.db.execute(
        "INSERT INTO public.processed_messages (consumer, event_id, outcome) VALUES ('mailer', %s, 'cancelled')",
        (job_id,),
    )
    assert "is cancelled already" in office.said("cancel", "mailer", job_id)
    assert office.listed("--status", "cancelled") == [("cancelled", job_id)]
    assert office.listed() == []


@pytest.mark.long  # waits for two seconds for who runs it
def test_a_job_that_runs_is_not_cancelled_and_said_so(office: Office) -> None:
    begun, go = threading.Event(), threading.Event()
    consumer = Consumer("mailer", queues=["mail"])

    @consumer.job("send")
    def send(job: Envelope, session: Session) -> None:
        begun.set()
        assert go.wait(60)

    worker = office.worker(consumer)
    worker.run_once()
    job_id = office.job()
    running = threading.Thread(target=lambda: eventually(lambda: worker.run_once() is not None and go.is_set()))
    running.start()
    try:
        assert begun.wait(60)
        assert "is being run just now" in office.said("cancel", "mailer", job_id, code=3)
    finally:
        go.set()
        running.join()
    eventually(
        lambda: worker.run_once() is not None and office.listed("--status", "completed") == [("completed", job_id)]
    )


def test_a_job_that_is_on_its_way_is_cancelled_when_asked_for(office: Office, worker: Worker) -> None:
    job = Job(queue="mail", type="send", payload={"what": "fails"})
    assert "it is on its way" in office.refused("cancel", "mailer", str(job.id))
    assert "cancelled, Redis has not said" in office.said("cancel", "mailer", str(job.id), "--unseen")
    office.record(job)
    eventually(lambda: (office.relay.run_once(), worker.run_once(), office.listed("--status", "cancelled"))[2])
    assert office.count("SELECT count(*) FROM public.message_failures") == 0


def test_jobs_of_a_queue_that_none_has_opened_are_cancelled_once_a_consumer_without_handlers_has(
    office: Office,
) -> None:
    ready, delayed = office.job(queue="reports"), office.job(queue="reports", run_at=timedelta(days=1))
    assert "no consumer of queues 'reporter'" in office.refused("cancel", "reporter", ready, delayed, "--unseen")
    worker = office.worker(Consumer("reporter", queues=["reports"]))
    eventually(lambda: worker.run_once() is not None and office.queues()["reports"]["waiting"] == 1)
    assert {each["before"] for each in office.found("cancel", "reporter", ready, delayed)} == {"waiting", "delayed"}


def test_dead_jobs_are_tried_again(office: Office, worker: Worker) -> None:
    dead, other, waits = office.job("rejected"), office.job("rejected"), office.job("fails")
    drained(office, worker)
    assert office.found("requeue", "mailer", dead, "--dry-run")["would_be_requeued"] == 1
    assert office.queues()["mail"]["dead"] == 2
    assert office.found("requeue", "mailer", dead) == {"selected": 1, "requeued": 1, "kept": {}}
    assert office.listed() == [("waiting", waits), ("waiting", dead), ("failed", other)]
    result = office.run(consumer_app, "jobs", "requeue", "mailer", dead, waits, other)
    assert (result.exit_code, result.stdout) == (3, "1 requeued\n")
    assert result.stderr.splitlines() == [f"{job_id}  waiting: is no dead letter" for job_id in (dead, waits)]
    eventually(lambda: worker.run_once() is not None and office.queues()["mail"]["dead"] == 2)


# --- the commands themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "outbox queues",
        "consumer jobs list mail",
        f"consumer jobs show mail {uuid.UUID(int=1)}",
        f"consumer jobs cancel mailer {uuid.UUID(int=1)}",
        f"consumer jobs requeue mailer {uuid.UUID(int=1)}",
    ],
)
@pytest.mark.parametrize("away", ["REDIS_URL", "DATABASE_URL"])
def test_o_95_no_password_is_said_by_the_commands(
    office: Office,
    worker: Worker,
    command: str,
    away: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheme = {"REDIS_URL": "redis", "DATABASE_URL": "postgresql"}[away]
    for name, value in (office.environment | {away: f"{scheme}://somebody:S3cr3t%21%2540@127.0.0.1:1/0"}).items():
        monkeypatch.setenv(name, value)
    package, *rest = command.split()
    monkeypatch.setattr(sys, "argv", [package, *rest])
    with pytest.raises(SystemExit) as ended:
        {"outbox": outbox_main, "consumer": consumer_main}[package]()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (1, "")
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) == 1
    assert "S3cr3t" not in said.err
