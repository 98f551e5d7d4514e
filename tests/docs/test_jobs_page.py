"""docs/how-to/jobs.md: what it shows does what it says, on real servers."""

from __future__ import annotations

import re
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
from sqlalchemy.orm import Session

from consumer import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Job, jobs
from outbox import schema as schemas
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.transport import ListTransport
from outbox.transport.base import JobState
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs/how-to/jobs.md").read_text()


def snippet(name: str) -> str:
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found, name
    return found[1]


def run(name: str, **names: Any) -> dict[str, Any]:
    exec(compile(snippet(name), "jobs.md", "exec"), names)  # noqa: S102  # our own page
    return names


def test_the_page_does_what_it_says(database_url: str, redis_url: str, prefix: str) -> None:
    addresses: dict[str, Any] = {"database_url": database_url, "redis_url": redis_url, "key_prefix": prefix}
    sent: list[tuple[str, str]] = []
    producer = run("record")
    mailer = run("work", deliver=lambda to, idempotency_key: sent.append((to, idempotency_key)) or len(sent))["mailer"]
    assert isinstance(mailer, Consumer)
    engine = schemas.engine(database_url, "shop")
    with Session(engine) as session, session.begin():
        receipt = producer["pay"](session, SimpleNamespace(id="o1", email="a@shop.example"))
    engine.dispose()
    with psycopg.connect(database_url) as connection:
        row = connection.execute(snippet("sql").encode()).fetchone()
    assert row is not None
    later: uuid.UUID = row[0]

    relay, worker = Relay(RelaySettings(**addresses)), Worker(mailer, ConsumerSettings(**addresses, block_seconds=0.05))
    lists = ListTransport.from_url(redis_url, prefix=prefix)
    try:
        relay.run_once()
        eventually(lambda: worker.run_once() and bool(sent))
        assert sent == [("a@shop.example", str(receipt))]
        done = jobs.state(lists, "mail", receipt)
        assert done is not None
        assert (done.status, done.result) == ("completed", b'{"message_id":1}')
        look = run("look")["receipt"]
        if not prefix:
            assert look(redis_url, receipt) == ("completed", {"message_id": 1})
        assert look(redis_url, uuid.uuid4()) == "not in Redis: on its way, or ended long ago"
        added = Job(queue="mail", type="send_receipt", payload={"to": "b@shop.example"})
        assert [jobs.enqueue(lists, added), jobs.enqueue(lists, added)] == [[True], [False]]
        (survey, by_sql) = sorted(lists.jobs("mail", "delayed"), key=lambda job: job.id == later)
        assert (survey.fields[b"type"], survey.priority) == (b"send_survey", "low")
        assert survey.due_at is not None
        assert abs(survey.due_at.timestamp() - time.time() - 3 * 86_400) < 60
        assert (by_sql.id, by_sql.priority, by_sql.due_at and by_sql.due_at.isoformat()) == (
            later, "low", "2030-01-31T09:00:00+00:00",
        )  # fmt: skip
        absent = set(JobState.__dataclass_fields__) - set(re.findall(r"`(\w+)`", PAGE.partition("A `JobState`")[2]))
        assert absent <= {"status", "result"}, "they are in the example"
    finally:
        lists.close()
        worker.close()
        relay.close()
