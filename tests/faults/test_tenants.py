"""Two installations on the same servers, in two schemas or two databases, and under two prefixes: what one does or suffers is not
the other's."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql

from consumer.doctor import examine as examine_consumer
from consumer.settings import ConsumerSettings
from outbox import Writer
from outbox import schema as schemas
from outbox.doctor import Finding, examine
from outbox.operations import drop_group, status
from outbox.settings import RelaySettings
from tests.faults.chaos import Bench, ledger
from tests.waiting import eventually

pytestmark = pytest.mark.long


class Tenant:
    """One installation: a schema, a prefix, a relay and a consumer of its own."""

    def __init__(self, name: str, bench: Bench, prefix: str) -> None:
        self.schema, self.prefix, self._bench = name, f"{prefix}{name}:", bench
        for branch in ("outbox", "consumer"):
            schemas.upgrade(bench.database_url, branch, schema=name)  # type: ignore[arg-type]
        environment = {
            "OUTBOX_SCHEMA": name, "CONSUMER_SCHEMA": name, "OUTBOX_KEY_PREFIX": self.prefix,
            "OUTBOX_TRIM_SECONDS": "0.2", "OUTBOX_STREAM_KEEP_SECONDS": "0",
            "CONSUMER_BLOCK_SECONDS": "0.2", "CONSUMER_BACKOFF_MAX_SECONDS": "0.2",
        }  # fmt: skip
        self.relay = bench.start(**environment)
        self.consumer = bench.start("consumer", "run", "tests.faults.chaos:ledger", **environment)

    def settings(self) -> RelaySettings:
        return RelaySettings(**self._addresses())

    def consumer_settings(self) -> ConsumerSettings:
        return ConsumerSettings(**self._addresses())

    def _addresses(self) -> dict[str, Any]:
        bench = self._bench
        return {
            "database_url": bench.database_url, "redis_url": bench.redis_url, "schema_name": self.schema,
            "key_prefix": self.prefix,
        }  # fmt: skip

    @property
    def key(self) -> str:
        return f"{self.prefix}{{accounts}}"

    def write(self, number: int) -> list[str]:
        """Both tenants use the same topic and keys."""
        events = [self._bench.event() for _ in range(number)]
        with self._bench.db.transaction():
            Writer(schema=self.schema).record(self._bench.db, *events)
        return [str(event.id) for event in events]

    def done(self) -> set[str]:
        """What its ledger holds."""
        query = sql.SQL("SELECT event_id::text FROM {}").format(sql.Identifier(self.schema, "processed_messages"))
        return {row[0] for row in self._bench.db.execute(query)}


@pytest.fixture(params=["two schemas", "two databases"])
def benches(
    request: pytest.FixtureRequest, empty_databases: Callable[[], str], redis_url: str
) -> Iterator[tuple[Bench, Bench]]:
    """Each tenant's; one for both where they share a database."""
    with ExitStack() as stack:
        number = 1 if request.param == "two schemas" else 2
        made = [stack.enter_context(Bench(empty_databases(), redis_url)) for _ in range(number)]
        for each in made:
            each.make_tables()
        yield made[0], made[-1]


def levels(findings: list[Finding], code: str) -> set[str]:
    return {finding.level for finding in findings if finding.code == code}


def test_o_92_what_happens_to_one_tenant_is_not_the_others(
    benches: tuple[Bench, Bench], prefix: str, stack: ExitStack
) -> None:
    """The first one's relay is stopped, and its tables and the lock of its maintenance are held by somebody else."""
    bench = benches[0]
    one, two = Tenant("one", bench, prefix), Tenant("two", benches[1], prefix)

    def effects() -> Counter[str]:
        return sum((each.effects() for each in set(benches)), Counter())

    first, second = one.write(20), two.write(30)
    eventually(lambda: effects() == Counter(first + second))
    assert (one.done(), two.done()) == (set(first), set(second))

    one.consumer.send_signal(signal.SIGTERM)
    assert one.consumer.wait(10) == 0
    late = one.write(5)
    eventually(lambda: bench.redis.xinfo_groups(one.key)[0]["lag"] == 5, message="published to the first tenant")
    eventually(lambda: bench.redis.xlen(two.key) == 0, message="the second tenant's stream is trimmed")
    assert bench.redis.xlen(one.key) == 5, "and what the first one's consumer has not seen is not"

    one.relay.send_signal(signal.SIGSTOP)
    held = stack.enter_context(psycopg.connect(bench.database_url))
    held.execute("LOCK TABLE one.outbox, one.outbox_batch, one.processed_messages IN ACCESS EXCLUSIVE MODE")
    held.execute("SELECT pg_advisory_xact_lock(hashtextextended('partitions one outbox', 0))")
    begun, more = time.monotonic(), two.write(5)
    eventually(lambda: effects() == Counter(first + second + more), 20)
    assert time.monotonic() - begun < 5
    eventually(lambda: bench.redis.xlen(two.key) == 0)
    held.rollback()

    bench.redis.xgroup_destroy(one.key, ledger.name)
    assert levels(examine(one.settings()), "group-missing") == {"warning"}
    assert levels(examine(two.settings()), "group-missing") == set()
    assert levels(examine_consumer(ledger, one.consumer_settings()), "group-missing") == {"warning"}
    assert levels(examine_consumer(ledger, two.consumer_settings()), "group-missing") == set()
    bench.redis.xgroup_create(one.key, ledger.name, id="0")

    assert (status(one.settings()).relays, status(two.settings()).relays) == (1, 1)
    drop_group(two.settings(), ledger.name, force=True)
    assert [group.name for stream in status(one.settings()).streams for group in stream.groups] == [ledger.name]

    one.relay.send_signal(signal.SIGCONT)
    one.consumer = bench.start(
        "consumer", "run", "tests.faults.chaos:ledger", CONSUMER_SCHEMA="one", OUTBOX_KEY_PREFIX=one.prefix
    )
    eventually(lambda: effects() == Counter(first + second + more + late), 20)
    eventually(lambda: one.done() == set(first + late))
    assert two.done() == set(second + more)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found
