"""What the examples of effects promise, on real servers: consumers are killed between the call and the COMMIT, and counted is
what happened outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from consumer import Consumer
from consumer.process import Outcome
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from examples.effects import charge, mail, payout
from examples.effects.models import Base
from examples.effects.servers import Held, Mailbox, PaymentApi
from outbox import Event, Job, record
from outbox.relay import Relay
from outbox.settings import RelaySettings
from outbox.transport import ListTransport
from outbox.transport.base import is_queue, queue_of
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


class Place:
    """A database, a key prefix, a relay and consumers of the test's own."""

    def __init__(self, database_url: str, redis_url: str, prefix: str, stack: ExitStack) -> None:
        self.database_url, self.redis_url, self.prefix, self._stack = database_url, redis_url, prefix, stack
        engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
        Base.metadata.create_all(engine)
        self.relay = Relay(RelaySettings(database_url=database_url, redis_url=redis_url, key_prefix=prefix))
        stack.callback(self.relay.close)
        self._workers: dict[str, Worker] = {}

    def publish(self, *events: Event) -> None:
        with psycopg.connect(self.database_url) as connection:
            record(connection, *events)
        self.relay.run_once()

    def worker(self, consumer: Consumer) -> Worker:
        """The consumer, in this process."""
        if consumer.name not in self._workers:
            settings = ConsumerSettings(
                database_url=self.database_url, redis_url=self.redis_url, key_prefix=self.prefix, block_seconds=0.05,
                claim_seconds=1, check_seconds=0.05, batch_size=1,
            )  # fmt: skip
            self._workers[consumer.name] = Worker(consumer, settings)
            self._stack.callback(self._workers[consumer.name].close)
        return self._workers[consumer.name]

    def one(self, query: str, *parameters: object) -> Any:
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute(query.encode(), parameters).fetchone()
        return row[0] if row else None

    def finished(self, consumer: Consumer) -> Counter[str]:
        """What became of the deliveries, once all that is in its streams and queues is done, and nothing waits."""
        counts: Counter[str] = Counter()

        def settled() -> bool:
            counts.update(self.worker(consumer).run_once())
            return self._settled(consumer)

        eventually(settled, 60)
        return Counter({str(outcome): number for outcome, number in counts.items() if number})

    def _settled(self, consumer: Consumer) -> bool:
        if self.one("SELECT count(*) FROM message_failures WHERE consumer = %s", consumer.name):
            return False
        with redis.Redis.from_url(self.redis_url, decode_responses=True) as client:
            for topic in consumer.topics:
                if is_queue(topic):
                    if any(self.jobs(queue_of(topic), status) for status in ("ready", "running", "delayed")):
                        return False
                    continue
                key = f"{self.prefix}{{{topic}}}"
                found: Any = {group["name"]: group for group in client.xinfo_groups(key)}
                group, info = found.get(consumer.name), client.xinfo_stream(key)
                if not group or group["pending"] or group["last-delivered-id"] != info["last-generated-id"]:
                    return False
        return True

    def jobs(self, queue: str, status: str) -> list[Any]:
        lists = ListTransport.from_url(self.redis_url, prefix=self.prefix)
        try:
            return list(lists.jobs(queue, status))
        finally:
            lists.close()

    @contextmanager
    def process(self, consumer: str) -> Iterator[subprocess.Popen[bytes]]:
        """``consumer run`` in a process of its own, as its module says."""
        environment = os.environ | {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "OUTBOX_KEY_PREFIX": self.prefix,
            "CONSUMER_BATCH_SIZE": "1",
            "CONSUMER_BLOCK_SECONDS": "0.1",
            "CONSUMER_CLAIM_SECONDS": "1",
        }
        command = [sys.executable, "-m", "consumer", "run", f"examples.effects.{consumer}"]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def place(database_url: str, redis_url: str, prefix: str) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(database_url, redis_url, prefix, stack)


@pytest.fixture
def payments(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaymentApi]:
    """A payment API; PAYMENTS_URL leads to it."""
    api = PaymentApi()
    monkeypatch.setenv("PAYMENTS_URL", api.url)
    with api.running():
        yield api


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mailbox]:
    """An SMTP server; SMTP_HOST and SMTP_PORT lead to it."""
    box = Mailbox()
    with box.running():
        monkeypatch.setenv("SMTP_HOST", box.host)
        monkeypatch.setenv("SMTP_PORT", str(box.port))
        yield box


def killed_while_held(place: Place, consumer: str, held: Held) -> None:
    """The consumer's process makes the call, and is killed (SIGKILL) before it has an answer."""
    with place.process(consumer) as process:
        assert held.arrived.wait(60), "no call came"
        process.kill()
        assert process.wait(30) == -9


def paid(number: int = 1) -> Event:
    return Event(
        topic="orders", type="order.paid", key=f"o{number}", payload={"amount_halala": 4950, "mail": "ali@example.com"}
    )


def receipt(to: str) -> Job:
    return Job(queue="mail", type="send_receipt", key=to, payload={"to": to, "amount_halala": 1})


def card() -> Job:
    return Job(queue="charges", type="charge_card", key="o1", payload={"amount_halala": 4950})


def payout_wanted() -> Event:
    return Event(topic="payouts", type="payout.wanted", key="a1", payload={"amount_halala": 4950})


# --- what follows from an event -------------------------------------------------------------------------------


def test_an_order_is_kept_and_one_receipt_goes_out_whatever_redis_forgets(place: Place, mailbox: Mailbox) -> None:
    order = paid()
    for _ in range(2):  # everything is published, delivered and handled; then Redis has lost it all, and it comes again
        place.publish(*[order] if not mailbox.messages else [])
        place.finished(mail.shop)
        place.relay.run_once()
        place.finished(mail.mailer)
        with redis.Redis.from_url(place.redis_url) as client:
            for key in client.scan_iter(match=f"{place.prefix}*", count=1000):
                client.delete(key)
        for consumer in (mail.shop, mail.mailer):
            place.worker(consumer).run_once()  # makes its group again
        eventually(lambda: _published_again(place))
    job = uuid.uuid5(order.id, "receipt")
    (message,) = mailbox.messages
    assert message["Message-ID"] == f"<{job}@shop.example>"
    assert (message["To"], message["Subject"]) == ("ali@example.com", "Receipt for order o1")
    assert "49.50 SAR" in str(message.get_payload())
    assert place.one("SELECT count(*) FROM effects_orders") == 1
    assert place.one("SELECT outcome FROM processed_messages WHERE event_id = %s", job) == "applied"


def _published_again(place: Place) -> bool:
    place.relay.run_once()
    with redis.Redis.from_url(place.redis_url) as client:
        return client.xlen(f"{place.prefix}{{orders}}") == 1 and len(place.jobs("mail", "ready")) == 1


def test_a_failed_try_leaves_no_receipt_and_the_next_one_one(place: Place) -> None:
    """Whatever a handler recorded is rolled back with the rest of its try."""
    place.publish(paid())
    worker = place.worker(mail.shop)
    with psycopg.connect(place.database_url) as connection:
        connection.execute("ALTER TABLE effects_orders ADD CONSTRAINT refuses CHECK (amount_halala = 0)")
    assert worker.run_once()[Outcome.APPLIED] == 0
    assert place.one("SELECT count(*) FROM outbox WHERE topic = 'queue/mail'") == 0
    with psycopg.connect(place.database_url) as connection:
        connection.execute("ALTER TABLE effects_orders DROP CONSTRAINT refuses")
    eventually(lambda: worker.run_once()[Outcome.APPLIED] == 1)
    assert place.one("SELECT count(*) FROM outbox WHERE topic = 'queue/mail'") == 1


def test_the_same_event_has_the_same_consequence_in_another_database(
    place: Place, new_database_url: Callable[[], str], redis_url: str, prefix: str
) -> None:
    """Two regions that both handle an order want one receipt: both ask for it by one id, and who sends them takes one."""
    order = paid()
    with ExitStack() as stack:
        other = Place(new_database_url(), redis_url, f"{prefix}other:", stack)
        found = []
        for one in (place, other):
            one.publish(order)
            assert one.finished(mail.shop) == {"applied": 1}
            found.append(one.one("SELECT event_id FROM outbox WHERE topic = 'queue/mail'"))
            assert one.one("SELECT time BETWEEN created_at - interval '1 minute' AND created_at FROM outbox "
                           "WHERE topic = 'queue/mail'")  # fmt: skip
    assert found == [uuid.uuid5(order.id, "receipt")] * 2


# --- calls that are cut short -------------------------------------------------------------------------------


def test_a_mailbox_that_is_not_there_is_a_dead_letter_and_one_that_is_busy_waits(
    place: Place, mailbox: Mailbox
) -> None:
    mailbox.refused = {"no@example.com": "550 no such mailbox", "busy@example.com": "450 later"}
    place.publish(*(receipt(to) for to in ("no@example.com", "busy@example.com", "ali@example.com")))
    worker = place.worker(mail.mailer)
    eventually(lambda: worker.run_once() and place.one("SELECT count(*) FROM dead_letters") and len(mailbox.messages))
    assert place.one("SELECT attempts FROM dead_letters") == 1
    assert place.one("SELECT count(*) FROM message_failures") == 1
    mailbox.refused.clear()
    place.finished(mail.mailer)
    assert [message["To"] for message in mailbox.messages] == ["ali@example.com", "busy@example.com"]


@pytest.mark.long
def test_a_mail_in_doubt_is_sent_again_with_the_same_message_id(place: Place, mailbox: Mailbox) -> None:
    place.publish(paid())
    place.finished(mail.shop)
    place.relay.run_once()
    mailbox.held.at = "after"  # the server has it, and does not say so
    killed_while_held(place, "mail:mailer", mailbox.held)
    assert len(mailbox.messages) == 1
    mailbox.held.release()
    assert place.finished(mail.mailer) == {"applied": 1}
    assert len(mailbox.messages) == 2
    assert len({message["Message-ID"] for message in mailbox.messages}) == 1


def test_with_an_idempotency_key_there_is_one_charge(place: Place, payments: PaymentApi) -> None:
    place.publish(card())
    payments.held.at = "after"
    killed_while_held(place, "charge:billing", payments.held)
    assert (len(payments.charges), place.one("SELECT count(*) FROM effects_charges")) == (1, 0)
    payments.held.release()
    assert place.finished(charge.billing) == {"applied": 1}
    assert (payments.calls, len(payments.charges)) == (2, 1)
    assert place.one("SELECT charge_id FROM effects_charges") == "ch_1"


@pytest.mark.long
def test_while_one_process_is_at_it_no_other_makes_the_call(place: Place, payments: PaymentApi) -> None:
    """Even if it is frozen in the call and others take the delivery over: its transaction holds the ledger row."""
    place.publish(card())
    payments.held.at = "after"
    with place.process("charge:billing") as process:
        assert payments.held.arrived.wait(60)
        process.send_signal(signal.SIGSTOP)
        worker = place.worker(charge.billing)
        eventually(lambda: worker.run_once()[Outcome.HELD], 60)
        assert payments.calls == 1
        process.send_signal(signal.SIGCONT)
        payments.held.release()
        eventually(lambda: place.one("SELECT charge_id FROM effects_charges"))
        assert place.finished(charge.billing)["applied"] == 0
    assert (payments.calls, len(payments.charges)) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("consumer", "moment", "calls", "payouts", "status"),
    [
        ("at_least_once", "after", 2, 2, "paid"),
        ("at_most_once", "after", 1, 1, "unknown"),
        ("asking", "after", 1, 1, "paid"),
        # The first request is still under way when the second try asks; it takes effect later.
        ("at_least_once", "before", 2, 2, "paid"),
        ("at_most_once", "before", 1, 1, "unknown"),
        ("asking", "before", 2, 2, "paid"),
    ],
)
def test_without_a_key_one_thing_or_the_other_remains_possible(
    place: Place, payments: PaymentApi, consumer: str, moment: Any, calls: int, payouts: int, status: str
) -> None:
    place.publish(payout_wanted())
    payments.held.at = moment
    killed_while_held(place, f"payout:{consumer}", payments.held)
    payments.held.at = None  # for whoever comes next; the first one still waits
    assert place.finished(getattr(payout, consumer)) == {"applied": 1}
    payments.held.release()
    eventually(lambda: len(payments.payouts) == payouts)
    assert payments.calls == calls
    assert place.one("SELECT status FROM effects_payouts") == status


def test_at_most_once_is_tried_again_where_nothing_was_sent(
    place: Place, payments: PaymentApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = place.worker(payout.at_most_once)
    place.publish(payout_wanted())
    address = os.environ["PAYMENTS_URL"]
    monkeypatch.setenv("PAYMENTS_URL", "http://127.0.0.1:1")
    assert worker.run_once()[Outcome.APPLIED] == 0
    assert (payments.calls, place.one("SELECT count(*) FROM effects_payouts")) == (0, 0)
    monkeypatch.setenv("PAYMENTS_URL", address)
    place.finished(payout.at_most_once)
    assert (payments.calls, len(payments.payouts)) == (1, 1)
    assert place.one("SELECT status FROM effects_payouts") == "paid"


@pytest.mark.parametrize(
    ("consumer", "payouts", "status"),
    [("at_least_once", 2, "paid"), ("at_most_once", 1, "unknown"), ("asking", 1, "paid")],
)
def test_without_an_answer_it_is_as_after_a_death(
    place: Place, payments: PaymentApi, consumer: str, payouts: int, status: str
) -> None:
    worker = place.worker(getattr(payout, consumer))
    place.publish(payout_wanted())
    payments.silent = True
    assert worker.run_once()[Outcome.APPLIED] == 0
    payments.silent = False
    place.finished(getattr(payout, consumer))
    assert (payments.calls, len(payments.payouts)) == (payouts, payouts)
    assert place.one("SELECT status FROM effects_payouts") == status


def test_with_a_key_a_call_without_an_answer_is_one_charge(place: Place, payments: PaymentApi) -> None:
    worker = place.worker(charge.billing)
    place.publish(card())
    payments.silent = True
    assert worker.run_once()[Outcome.APPLIED] == 0
    payments.silent = False
    place.finished(charge.billing)
    assert (payments.calls, len(payments.charges)) == (2, 1)
