"""Publishing again what the outbox keeps: to everybody or to one consumer, with a new ledger or the old one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.errors import SettingsError
from outbox.operations import opened
from outbox.replay import Selection, Step, count, replay
from outbox.transport.base import side_stream
from tests.faults.chaos import TOPIC, Bench, drain

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def again(bench: Bench, consumer: str | None = None, rate: float | None = None, **selected: object) -> list[Step]:
    with opened(bench.settings()) as (store, connection, transport):
        selection = Selection(**selected)  # type: ignore[arg-type]
        steps = list(
            replay(store, connection, transport, bench.settings(), selection, consumer=consumer, events_per_second=rate)
        )
        assert count(store, connection, selection) == (steps[-1].events if steps else 0)
        return steps


def command(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "outbox", "replay", *arguments],
        cwd=ROOT, env=os.environ | addresses, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_who_has_processed_them_recognises_them(bench: Bench) -> None:
    ids = bench.write(1000) + bench.write(200)
    drain(bench.relay())
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))
    assert [step.events for step in again(bench)] == [500, 1000, 1200]
    assert bench.ids() == ids * 2
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))
    new = bench.write(3)
    assert drain(bench.relay()).published == 3, "the marker was left alone"
    assert bench.consume() == Counter(dict.fromkeys([*ids, *new], 1))


def test_a_ledger_that_was_lost_is_filled_again(bench: Bench) -> None:
    ids = bench.write(20)
    drain(bench.relay())
    bench.consume()
    bench.db.execute("TRUNCATE public.effects, public.processed_messages")
    again(bench)
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def test_one_consumer_alone_is_given_them(bench: Bench) -> None:
    ids = bench.write(30)
    drain(bench.relay())
    bench.consume()
    bench.db.execute("TRUNCATE public.effects, public.processed_messages")
    again(bench, consumer="ledger")
    assert bench.length() == 30, "nobody else is bothered"
    assert bench.length(side_stream(TOPIC, "ledger")) == 30
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def test_a_new_consumer_gets_what_the_streams_no_longer_have(bench: Bench) -> None:
    ids = bench.write(10)
    drain(bench.relay())
    bench.redis.xtrim(bench.key(), maxlen=0, approximate=False)
    again(bench, consumer="ledger", topic=TOPIC)
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def test_events_are_selected(bench: Bench) -> None:
    first = bench.write(3, key="A")
    other = bench.write(2, key="B", type="limited")
    later = bench.write(1, topic="other", key="A")
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '1 day' WHERE key = 'A'")
    drain(bench.relay())
    length = bench.length()
    yesterday = datetime.now(UTC) - timedelta(hours=12)
    for selected, wanted in (
        ({"topic": TOPIC, "key": "A"}, first), ({"type": "limited"}, other), ({"since": yesterday}, other),
        ({"until": yesterday, "topic": TOPIC}, first), ({"ids": (uuid.UUID(first[1]),)}, first[1:2]),
        ({"after_position": 3, "topic": TOPIC}, other), ({"topic": "none"}, []),
    ):  # fmt: skip
        again(bench, **selected)
        assert bench.ids()[length:] == wanted, selected
        length = bench.length()
    again(bench, topic="other")
    assert bench.ids("other") == later * 2
    with pytest.raises(SettingsError, match="since: must carry a time zone"):
        Selection(since=datetime(2026, 1, 1))


def test_a_replay_beside_a_busy_relay_loses_nothing(bench: Bench) -> None:
    ids = bench.write(1000) + bench.write(500)
    relay = bench.relay(batch_rows=5, poll_min_seconds=0.001)
    drain(relay)
    running = threading.Thread(target=relay.run)
    running.start()
    stop = threading.Event()

    def write() -> None:
        with bench.connect(autocommit=True) as connection:
            while not stop.is_set():
                with connection.transaction():
                    ids.extend(bench.write(1, connection))

    writer = threading.Thread(target=write)
    writer.start()
    steps = again_while(bench)
    stop.set()
    writer.join()
    relay.stop()
    running.join()
    drain(bench.relay())
    assert steps >= 1500
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def again_while(bench: Bench) -> int:
    with opened(bench.settings()) as (store, connection, transport):
        last = Step(0, 0)
        for last in replay(store, connection, transport, bench.settings(), Selection()):
            if last.events >= 1500:
                break
        return last.events


def test_not_faster_than_asked(bench: Bench) -> None:
    bench.write(1000)
    drain(bench.relay())
    begun = time.monotonic()
    again(bench, rate=2000)
    assert 0.45 < time.monotonic() - begun < 5


def test_the_command_says_first_and_does_it_when_told(bench: Bench) -> None:
    ids = bench.write(5)
    drain(bench.relay())
    said = command(bench, "--topic", TOPIC)
    assert (said.returncode, said.stdout) == (0, "5 events are published again, for every consumer; add --yes\n")
    assert bench.length() == 5
    done = command(bench, "--topic", TOPIC, "--after", "2", "--group", "wallet", "--yes")
    assert done.returncode == 0, done.stderr
    assert "3 events published again" in done.stdout
    assert bench.ids(side_stream(TOPIC, "wallet")) == ids[2:]
    wrong = command(bench, "--since", "yesterday")
    assert (wrong.returncode, bool(re.search(r"error: --since: is not a time like", wrong.stderr))) == (1, True)
