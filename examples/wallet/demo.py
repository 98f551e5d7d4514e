"""The story: what goes wrong without a ledger, and the whole path with everything going wrong on the way.

Every part is a function that says what happens and checks what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import psycopg
import redis
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from examples.wallet import naive
from examples.wallet.models import Customer, create_tables
from examples.wallet.report import Report, riyal
from examples.wallet.service import announce_move, move_customer, receive_payment
from examples.wallet.stage import DemoError, Stage, stage
from outbox import Writer
from outbox import schema as schemas
from outbox.embedded import EmbeddedServer, EmbeddedServerError, PostgresServer, ValkeyServer
from outbox.errors import OutboxError, SettingsError

PAYMENT_HALALA = 5000
BALANCE = "SELECT balance_halala FROM wallet WHERE id = 'w1'"

Part = Callable[[Report, Stage], None]


# --- the same five payments, three consumers -----------------------------------------------------------------------


def simple(report: Report, place: Stage) -> None:
    """Adds whatever comes."""
    report.heading("1. simple: adds what comes, keeps no ledger (do NOT do this)")
    report.step("5 payments, the 2nd sent again, the 3rd done again by c2: 7 x 50.00")
    five_payments(report, place, "simple", "examples.wallet.naive", "simple")
    report.check("balance: 100.00 too much", expected="350.00", actual=riyal(place.value(BALANCE)))


def dedup_valkey(report: Report, place: Stage) -> None:
    """Marks events in Valkey."""
    report.heading("2. dedup-valkey: marks the event in Valkey first (do NOT do this)")
    report.step("c1 dies after SET NX and before its transaction; c2 sees the mark and skips")
    five_payments(report, place, "dedup-valkey", "examples.wallet.naive", "dedup-valkey")
    report.check("balance: a payment is lost", expected="200.00", actual=riyal(place.value(BALANCE)))


def dedup_table(
    report: Report, place: Stage, module: str = "examples.wallet.processes", consumer: str = "ledger"
) -> None:
    """Our consumer: a ledger row in the transaction of the effect.

    Args:
        module, consumer: the process to run. Another one than ours must make the demo fail; the tests see to that.
    """
    report.heading("3. dedup-table: a ledger row in the transaction of the effect (ours)")
    report.step("c1 dies after COMMIT and before XACK; c2 finds the event in the ledger")
    group = "wallet" if consumer == "ledger" else consumer
    five_payments(report, place, group, module, consumer)
    report.check("balance", expected="250.00", actual=riyal(place.value(BALANCE)))
    rows = place.value("SELECT count(*) FROM processed_messages")
    report.check("rows in processed_messages", expected=5, actual=rows)
    report.check("pending deliveries", expected=0, actual=place.pending("payments", group))


def five_payments(report: Report, place: Stage, group: str, module: str, consumer: str) -> None:
    """Send them (the second one twice); c1 dies while it handles the third, c2 takes over after a second."""
    with schema_engine(place) as engine:
        create_tables(engine)
    place.execute("INSERT INTO wallet VALUES ('w1', 0)")
    producer = place.start("the producer", "examples.wallet.processes", "producer")
    if producer.wait() != 0:
        raise DemoError(f"the producer failed\n{producer.end_of_log()}")
    report.check("entries in the stream", expected=6, actual=place.length("payments"))
    c1_dies_c2_takes_over(report, place, group, module, consumer)


def c1_dies_c2_takes_over(report: Report, place: Stage, group: str, module: str, consumer: str) -> str:
    """Run both consumers until nothing is left to do; returns what they printed."""
    c1 = place.start("c1", module, consumer, "c1", CONSUMER_BATCH_SIZE="1")
    report.check("c1 dies (exit status)", expected=naive.KILLED, actual=c1.wait())
    report.check("pending at the dead c1", expected=1, actual=place.pending("payments", group))
    c2 = place.start("c2", module, consumer, "c2", CONSUMER_BATCH_SIZE="1")
    report.step("c2 takes over after 1 s ...")
    place.wait_for("everything handled by c2", lambda: place.settled("payments", group), c2)
    c2.stop()
    return c1.output() + c2.output()


# --- effects that bear repetition, and such that only look so ------------------------------------------------------


def natural(report: Report, place: Stage) -> None:
    """One order, handled twice."""
    report.heading("4. natural: some statements may be repeated, others not")
    report.step("an order is shipped by c1, which dies before XACK, and again by c2")
    place.execute(naive.ORDERS)
    order = json.dumps({"order": "o1", "item": "book"})
    place.valkey.xadd(place.key("payments"), {"id": "o1", "type": "order.paid", "data": order})
    printed = c1_dies_c2_takes_over(report, place, "natural", "examples.wallet.naive", "natural")
    first, second = (json.loads(line) for line in printed.splitlines())
    report.step("UPDATE ... SET status = 'shipped' WHERE status = 'paid' (harmless):")
    report.check("rows changed, 1st time", expected=1, actual=first["shipped_rows"])
    report.check("rows changed, 2nd time", expected=0, actual=second["shipped_rows"])
    report.step("UPDATE ... SET quantity = quantity - 1, of 10 (harmful, needs a ledger):")
    report.check("left in stock, 1st time", expected=9, actual=first["stock"])
    report.check("left in stock, 2nd time", expected=8, actual=second["stock"])


# --- the whole path ------------------------------------------------------------------------------------------------


class GivenUp(Exception):
    """The service changes its mind in the middle of a transaction."""


def whole_path(report: Report, place: Stage) -> None:
    """Service, outbox, relay, stream, consumer, ledger."""
    report.heading("5. the whole path: service, outbox, relay, Valkey, consumer")
    record = Writer(schema=place.name).record  # with the outbox in schema public: outbox.record
    with schema_engine(place) as engine:
        create_tables(engine)

        report.step("five payments: business row and event in one transaction; a sixth is rolled back")
        for _ in range(5):
            with Session(engine) as session, session.begin():
                receive_payment(session, "w1", PAYMENT_HALALA, record)
        try:
            with Session(engine) as session, session.begin():
                receive_payment(session, "w1", PAYMENT_HALALA, record)
                raise GivenUp
        except GivenUp:
            pass
        report.check("payments (business rows)", expected=5, actual=place.value("SELECT count(*) FROM payment"))
        report.check("events in the outbox", expected=5, actual=place.value("SELECT count(*) FROM outbox"))

        report.step("a relay publishes them and is killed -9 before it knows")
        relay = place.start("the first relay", "examples.wallet.processes", "dying-relay")
        report.check("signal that ended the relay", expected=int(signal.SIGKILL), actual=-relay.wait())
        report.check("entries in the stream", expected=5, actual=place.length("payments"))

        report.step("the next relay goes on; customer layla moves (version 4)")
        relay = place.start("the second relay", "outbox", "relay")
        with Session(engine) as session, session.begin():
            session.add(Customer(id="layla", city="Dammam", version=3))
        with Session(engine) as session, session.begin():
            move_customer(session, "layla", "Riyadh", record)
        place.wait_for("version 4 published", lambda: place.length("customers") == 1, relay)
        report.step("her move before that (version 3, to Dammam) is announced late")
        with Session(engine) as session, session.begin():
            announce_move(session, "layla", "Dammam", 3, record)
        place.wait_for("version 3 published", lambda: place.length("customers") == 2, relay)
        report.check("payments in the stream, each once", expected=5, actual=place.length("payments"))

    report.step("the consumer works: consumer run examples.wallet.handlers:wallet")
    consumer = place.start("the consumer", "consumer", "run", "examples.wallet.handlers:wallet")
    for topic in ("payments", "customers"):
        place.wait_for(f"all {topic} handled", partial(place.settled, topic, "wallet"), consumer)
    report.check("balance", expected="250.00", actual=riyal(place.value(BALANCE)))
    report.check("city", expected="Riyadh", actual=place.value("SELECT city FROM address WHERE customer_id = 'layla'"))
    for outcome, expected in (("applied", 6), ("stale", 1)):
        rows = place.value("SELECT count(*) FROM processed_messages WHERE outcome = %s", outcome)
        report.check(f"events {outcome}", expected=expected, actual=rows)
    pending = sum(place.pending(topic, "wallet") for topic in ("payments", "customers"))
    report.check("pending deliveries", expected=0, actual=pending)


@contextmanager
def schema_engine(place: Stage) -> Iterator[Engine]:
    """A SQLAlchemy engine whose connections find the part's tables."""
    engine = schemas.engine(place.database_url, "wallet demo")
    try:
        yield engine
    finally:
        engine.dispose()


# --- running it ----------------------------------------------------------------------------------------------------

PARTS: tuple[Part, ...] = (simple, dedup_valkey, dedup_table, natural, whole_path)


def run(database_url: str, redis_url: str, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, each on a stage of its own; returns the exit status."""
    started, report = time.monotonic(), Report()
    for part in parts:
        with stage(database_url, redis_url) as place:
            part(report, place)
    status = report.summary()
    print(f"Took {time.monotonic() - started:.0f} s.", flush=True)
    return status


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Entry point; returns the exit status: 0 if every value was as expected, 1 if not, 2 if the demo could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.wallet", description="Payments that are repeated, killed half-way and delivered late."
    )
    parser.add_argument(
        "--url-from-environment",
        action="store_true",
        help="use the servers at DATABASE_URL and REDIS_URL (in a schema and under a prefix of our own, gone at the end) "
        "instead of starting some",
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with ExitStack() as stack:
            if given.url_from_environment:
                urls = _from_environment("DATABASE_URL"), _from_environment("REDIS_URL")
            else:
                urls = _start(stack, "PostgreSQL", PostgresServer), _start(stack, "Valkey", ValkeyServer)
            return run(*urls, parts)
    except KeyboardInterrupt:
        print("\nStopped; nothing is left behind.", file=sys.stderr)
        return 130
    except (DemoError, OutboxError, EmbeddedServerError, psycopg.Error, redis.RedisError) as error:
        print(f"\nThe demo could not run: {error}", file=sys.stderr)
        return 2


def _start(stack: ExitStack, name: str, kind: type[PostgresServer] | type[ValkeyServer]) -> str:
    started = time.monotonic()
    print(f"Starting {name} ... ", end="", flush=True)
    server: EmbeddedServer = stack.enter_context(kind())
    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
    return server.url


def _from_environment(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SettingsError(f"{name}: is not set")
    return value


def _terminated(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(143)  # so that everything is cleaned up on the way out
