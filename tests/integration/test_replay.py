"""Publishing again what the outbox keeps: to everybody or to one consumer, with a new ledger or the old one."""

from __future__ import annotations

import os
import pty
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest

from outbox.embedded import ValkeyServer
from outbox.errors import SettingsError, TransportError
from outbox.operations import opened
from outbox.replay import EVENTS_PER_SECOND, Selection, Step, replay, survey
from outbox.retry import Stop
from outbox.store import Store
from outbox.transport import Marker, Part, StreamTransport
from outbox.transport.base import side_stream
from tests.faults.chaos import TOPIC, Bench, drain
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def again(
    bench: Bench, consumer: str | None = None, rate: float | None = None, batch_bytes: int = 2**22, **selected: Any
) -> list[Step]:
    settings = bench.settings(batch_bytes=batch_bytes)
    with opened(settings) as (store, connection, transport):
        selection = Selection(**selected)
        steps = list(
            replay(store, connection, transport, settings, selection, consumer=consumer, events_per_second=rate)
        )
        chosen = sum(found.events for found in survey(store, connection, selection))
        assert chosen == (steps[-1].events if steps else 0)
        return steps


def addresses(bench: Bench) -> dict[str, str]:
    return {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix}


def command(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outbox", "replay", *arguments],
        cwd=ROOT, env=os.environ | addresses(bench), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def started(bench: Bench, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A replay that goes on by itself; the bench ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", "replay", "--yes", *arguments],
        cwd=ROOT, env=os.environ | addresses(bench) | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    bench.processes.append(process)  # type: ignore[arg-type]
    return process


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


@pytest.mark.parametrize("consumer", [None, "ledger"])
def test_a_look_at_what_is_replayed_ends_with_a_step_and_lowers_nothing(bench: Bench, consumer: str | None) -> None:
    """Or Redis would stand still for seconds while a relay looks at a million of them."""
    bench.write(100, payload={"x": "x" * 200})
    relay = bench.relay(trim_seconds=0.001)
    drain(relay)
    bench.consume()
    drain(relay)
    acked = "SELECT acked FROM public.outbox_group WHERE stream = 'accounts'"
    assert bench.one(acked) == 1
    steps = again(bench, consumer, batch_bytes=1024)
    assert len(steps) > 10
    (group,) = bench.transport().inspect(side_stream(TOPIC, consumer) if consumer else TOPIC).groups
    assert 0 < group.undelivered <= 6
    drain(relay)
    assert bench.one(acked) == 1
    bench.write(1)
    drain(relay)
    bench.consume()
    drain(relay)
    assert bench.one(acked) == 2


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


def test_batches_are_selected_whatever_their_windows(bench: Bench) -> None:
    """What commits late has low positions, and is in a late batch."""
    relay = bench.relay(batch_rows=3)
    for _ in range(3):
        late = bench.connect()
        bench.write(2, connection=late)
        bench.write(7)
        drain(relay)
        late.commit()
        bench.write(1, topic="other")
        drain(relay)
    store = Store()
    newest = store.newest(bench.db)
    assert newest is not None
    batches = [store.batch_up_to(bench.db, seq) for seq in range(1, newest.seq + 1)]
    assert len(batches) >= 12
    inside = [
        {row[1] for topic in (TOPIC, "other") for row in store.read_again(bench.db, batch, topic)} for batch in batches if batch
    ]  # fmt: skip
    with opened(bench.settings()) as (_, connection, transport):
        for first, last in combinations_with_replacement(range(1, newest.seq + 1), 2):
            wanted = set().union(*inside[first - 1 : last])
            chosen = survey(store, connection, Selection(batches=(first, last)))
            assert sum(found.events for found in chosen) == len(wanted), (first, last)
        first, last = 2, newest.seq - 1
        selection = Selection(batches=(first, last))
        list(replay(store, connection, transport, bench.settings(), selection, consumer="x"))
        wanted = set().union(*inside[first - 1 : last])
        for topic in (TOPIC, "other"):
            assert bench.ids(side_stream(topic, "x")) == [one for one in bench.outbox(topic) if one in wanted]
        for wrong in ((0, 1), (1, newest.seq + 1), (3, 2)):
            with pytest.raises(SettingsError, match=f"batches: must be .* there are batches 1 to {newest.seq}"):
                survey(store, connection, Selection(batches=wrong))


def test_steps_are_bounded_in_bytes(bench: Bench) -> None:
    ids = bench.write(5, payload={"x": "x" * 600}) + bench.write(2, payload={"x": "x" * 5000}) + bench.write(1)
    drain(bench.relay())
    assert [step.events for step in again(bench, "x", batch_bytes=1024)] == [2, 4, 6, 7, 8]
    assert bench.ids(side_stream(TOPIC, "x")) == ids


def test_not_faster_than_asked(bench: Bench) -> None:
    bench.write(450)
    drain(bench.relay())
    begun = time.monotonic()
    with opened(bench.settings()) as (store, connection, transport):
        for step in replay(store, connection, transport, bench.settings(), Selection(), events_per_second=200):
            assert step.events <= 200 + 200 * (time.monotonic() - begun)
    assert step.events == 450


def test_a_rate_is_the_default_and_what_a_pause_cost_is_not_made_up_for(bench: Bench) -> None:
    bench.write(1000)
    bench.write(1000)
    drain(bench.relay())
    with opened(bench.settings()) as (store, connection, transport):
        steps = replay(store, connection, transport, bench.settings(), Selection())
        next(steps)
        time.sleep(1)  # longer than what is left would take
        begun = time.monotonic()
        events = [step.events for step in steps]
    assert events[-1] == 2000
    assert time.monotonic() - begun > 1000 / EVENTS_PER_SECOND - 0.05, "two pauses between three steps"


# --- back-pressure -------------------------------------------------------------------------------------------------


class Running(threading.Thread):
    """A replay in a thread."""

    def __init__(self, bench: Bench, consumer: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.bench, self.consumer = bench, consumer
        self.settings = bench.settings(**{"batch_bytes": 1024, **settings})
        self.stopping = Stop()
        self.steps: list[Step] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with opened(self.settings) as (store, connection, transport):
                for step in replay(
                    store, connection, transport, self.settings, Selection(),
                    consumer=self.consumer, events_per_second=None, stopping=self.stopping,
                ):  # fmt: skip
                    self.steps.append(step)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Running:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error


def actions(caplog: pytest.LogCaptureFixture, action: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "action", "") == action]


@pytest.mark.parametrize("consumer", [pytest.param(None, marks=pytest.mark.long), "ledger"])
def test_it_waits_for_a_stream_that_is_long_enough_and_goes_on(
    bench: Bench, consumer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What is acknowledged does not count, though nobody has trimmed it yet."""
    ids = bench.write(200, payload={"x": "x" * 80})
    drain(bench.relay())
    effects = bench.consume()
    drain(bench.relay(trim_seconds=0.001))
    stream = side_stream(TOPIC, consumer) if consumer else TOPIC
    start = bench.length(stream)
    with Running(bench, consumer, max_stream_length=60) as running:
        eventually(lambda: actions(caplog, "replay_waits"), 30)
        said = f"replay waits: stream {stream} has more than OUTBOX_MAX_STREAM_LENGTH unacknowledged entries"
        assert actions(caplog, "replay_waits") == [said]
        held = bench.length(stream)
        assert 60 < held <= 60 + 12
        time.sleep(1.2)  # two looks
        assert bench.length(stream) == held
        assert start == (0 if consumer else 200)
        lengths = []
        eventually(lambda: lengths.append(bench.length(stream)) or (bench.consume() and not running.is_alive()), 60)  # type: ignore[func-returns-value]
        assert max(lengths) <= 60 + 12
    assert running.steps[-1].events == 200
    assert actions(caplog, "replay_goes_on")
    assert bench.consume() == Counter(dict.fromkeys(ids, 1)) == effects


def test_it_waits_while_memory_is_full_says_so_and_can_be_stopped(
    database_url: str, own_valkey: Callable[..., ValkeyServer], caplog: pytest.LogCaptureFixture
) -> None:
    with Bench(database_url, own_valkey().url) as bench:
        ids = bench.write(60, payload={"x": "x" * 80})
        drain(bench.relay())
        used = bench.redis.info("memory")["used_memory"]
        bench.redis.config_set("maxmemory", used)
        with Running(bench, "x") as running:
            eventually(lambda: actions(caplog, "replay_waits"), 30)
        said = "replay waits: Redis uses more than OUTBOX_MAX_MEMORY_SHARE of its memory"
        assert (actions(caplog, "replay_waits"), running.steps) == ([said], [])
        with Running(bench, "x") as running:
            eventually(lambda: len(actions(caplog, "replay_waits")) == 2, 30)
            assert bench.length(side_stream(TOPIC, "x")) == 0
            bench.redis.config_set("maxmemory", used * 100)
            running.join(30)
        assert bench.ids(side_stream(TOPIC, "x")) == ids


# --- ends, and going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_ends_it_between_steps_and_the_command_it_prints_goes_on(bench: Bench, number: signal.Signals) -> None:
    ids = bench.write(500) + bench.write(1, topic="other")
    drain(bench.relay())
    until = "2100-01-01 00:00+00:00"
    process = started(bench, "--topic", TOPIC, "--until", until, "--group", "x", "--rate", "100")
    side = side_stream(TOPIC, "x")
    eventually(lambda: bench.length(side) >= 100, 30)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    found = re.search(r"^stopped after (\d+) events; go on with: (.*)$", said, re.MULTILINE)
    assert found, said
    done = int(found[1])
    assert found[2] == f"outbox replay --topic {TOPIC} --until '{until}' --group x --rate 100.0 --after {done} --yes"
    assert bench.length(side) == done < 500
    words = shlex.split(found[2])
    rest = command(bench, *words[2:])
    assert (rest.returncode, rest.stdout.splitlines()[-1]) == (0, f"{500 - done} events published again"), rest.stderr
    assert bench.ids(side) == ids[:500]


KILLED = """
import sys
from outbox.operations import opened
from outbox.replay import Selection, replay
from outbox.settings import RelaySettings
settings = RelaySettings(batch_bytes=1024)
with opened(settings) as (store, connection, transport):
    selection = Selection(after_position=int(sys.argv[1]))
    for step in replay(store, connection, transport, settings, selection, consumer="x", events_per_second=None):
        print(step.position, flush=True)
"""


@pytest.mark.long
def test_killed_at_any_point_and_continued_leaves_nothing_out(bench: Bench) -> None:
    ids = bench.write(400, payload={"x": "x" * 200})
    drain(bench.relay())
    after, kills = 0, 0
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(after)], cwd=ROOT, env=os.environ | addresses(bench), text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout
        for _ in range(random.randint(15, 35)):
            if line := process.stdout.readline():
                after = int(line)
        process.kill()
        rest = process.stdout.read().split()
        if process.wait() == 0:
            break
        kills += 1
        after = int(rest[0]) if rest else after  # the one that was being made may be known or not
    assert kills >= 2
    came = bench.ids(side_stream(TOPIC, "x"))
    assert sorted(set(came), key=came.index) == ids


@pytest.mark.long
def test_it_waits_for_redis_and_goes_on(database_url: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    """It dies and comes back with everything; what was added twice is known by its id."""
    server = own_valkey(settings={"appendonly": "yes", "appendfsync": "always"})
    with Bench(database_url, server.url) as bench:
        ids = bench.write(1000)
        drain(bench.relay())
        bench.consume()
        bench.db.execute("TRUNCATE public.effects, public.processed_messages")
        process = started(bench, "--group", "ledger", "--rate", "500", OUTBOX_BACKOFF_MAX_SECONDS="0.2")
        side = side_stream(TOPIC, "ledger")
        eventually(lambda: bench.length(side) >= 500, 30)
        server.kill()
        time.sleep(1)
        server.start()
        said, told = process.communicate(timeout=60)
        assert (process.returncode, said.splitlines()[-1]) == (0, "1,000 events published again"), told
        assert told.count("replay waits, try 1") == told.count("replay goes on after") == 1
        came = bench.ids(side)
        assert sorted(set(came), key=came.index) == ids
        assert len(came) <= 1500
        assert bench.consume() == Counter(dict.fromkeys(ids, 1))


@pytest.mark.parametrize(("consumer", "repaired"), [(None, False), (None, True), ("ledger", False)])
def test_what_redis_forgets_meanwhile_is_published_anew(
    database_url: str,
    own_valkey: Callable[..., ValkeyServer],
    consumer: str | None,
    repaired: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also what it forgets after the last step, before the end; and where a relay has been there before us."""
    server = own_valkey()
    with Bench(database_url, server.url) as bench:
        ids = bench.write(100, payload={"x": "x" * 200})
        drain(bench.relay())
        bench.consume()
        bench.db.execute("TRUNCATE public.effects, public.processed_messages")
        settings = bench.settings(batch_bytes=1024)
        forget = iter([2, 7])
        due = next(forget)
        counts: list[int] = []
        more: list[str] = []
        selection = Selection(until=bench.one("SELECT clock_timestamp()"))
        with opened(settings) as (store, connection, transport):
            for step in replay(
                store, connection, transport, settings, selection, consumer=consumer, events_per_second=None
            ):
                counts.append(step.events)
                if len(counts) == due or (step.events == 100 and len(actions(caplog, "replay_lost")) == 2):
                    bench.redis.flushall()
                    if repaired:
                        more += bench.write(1)
                        drain(bench.relay())
                    if due == 7 and consumer:  # another one's steps are no sign that ours are there
                        again(bench, consumer, batch_bytes=1024)
                    due = next(forget, 0)
        assert len(actions(caplog, "replay_lost")) == 3
        assert (counts[-1], counts.count(0)) == (100, 3)
        assert set(bench.ids(side_stream(TOPIC, consumer) if consumer else TOPIC)) == set(ids + more)
        assert bench.consume() == Counter(dict.fromkeys(ids + more, 1))


@pytest.mark.parametrize("consumer", [None, "x"])
def test_what_redis_forgets_of_the_last_steps_is_seen(
    bench: Bench, consumer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a crash with appendfsync everysec, or a failover to a replica that was behind."""
    ids = bench.write(100, payload={"x": "x" * 200})
    drain(bench.relay())
    key = bench.key(side_stream(TOPIC, consumer) if consumer else TOPIC)
    settings = bench.settings(batch_bytes=1024)
    old: list[tuple[str, bytes]] = []
    with opened(settings) as (store, connection, transport):
        steps = replay(
            store, connection, transport, settings, Selection(), consumer=consumer, events_per_second=None
        )  # fmt: skip
        for number, _ in enumerate(steps):
            if number == 3:
                old = [(name, bench.redis.dump(name)) for name in (key, f"{key}:relay")]
            if number == 5:
                for name, value in old:
                    bench.redis.restore(name, 0, value, replace=True)
    assert len(actions(caplog, "replay_lost")) == 1
    assert set(bench.ids(side_stream(TOPIC, consumer) if consumer else TOPIC)) == set(ids)
    assert Counter(bench.ids(side_stream(TOPIC, "x")))[ids[-1]] == (1 if consumer else 0)


@pytest.mark.parametrize("consumer", [None, "x"])
def test_two_at_once(bench: Bench, consumer: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Each adds a step between the other's look at the marker and what it adds."""
    ids = bench.write(100, payload={"x": "x" * 200})
    drain(bench.relay())
    stream = side_stream(TOPIC, consumer) if consumer else TOPIC
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")
    settings = bench.settings(batch_bytes=1024)

    class Interrupted(StreamTransport):
        def publish(self, parts: Sequence[Part]) -> list[Marker | TransportError | None]:
            next(other, None)
            return super().publish(parts)

    with opened(settings) as (store, connection, transport), bench.connect(autocommit=True) as second:
        other = replay(store, second, transport, settings, Selection(), consumer=consumer, events_per_second=None)
        ours = Interrupted.from_url(bench.redis_url, prefix=bench.prefix)
        steps = list(replay(store, connection, ours, settings, Selection(), consumer=consumer, events_per_second=None))
        assert steps[-1].events == 100
        list(other)
    assert Counter(bench.ids(stream)) == Counter(dict.fromkeys(ids, 2))
    assert not actions(caplog, "replay_lost")
    drain(bench.relay())
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def test_a_stream_that_cannot_be_used_ends_it_with_the_command_to_go_on(bench: Bench) -> None:
    bench.write(3)
    drain(bench.relay())
    bench.redis.set(bench.key(side_stream(TOPIC, "x")), "no stream")
    done = command(bench, "--group", "x", "--yes")
    assert done.returncode == 1
    assert "stopped after 0 events; go on with: outbox replay --group x --rate 2000.0 --after 0 --yes" in done.stderr
    assert "error: Redis: WRONGTYPE" in done.stderr


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_says_first_and_does_it_when_told(bench: Bench) -> None:
    ids = bench.write(5)
    bench.write(2, topic="other")
    drain(bench.relay())
    bench.db.execute("UPDATE public.outbox SET created_at = '2026-01-31T12:00:00Z'")
    when = "recorded from 2026-01-31T12:00:00+00:00 to 2026-01-31T12:00:00+00:00"
    said = command(bench)
    assert (said.returncode, re.sub(r"2026-01-31T\S+", "2026-01-31T12:00:00+00:00", said.stdout).splitlines()) == (0, [
        "7 events are published again, for every consumer", f"  {TOPIC}: 5, {when}", f"  other: 2, {when}",
        "add --yes to have it done",
    ])  # fmt: skip
    assert bench.length() == 5
    done = command(bench, "--topic", TOPIC, "--batch", "1", "--after", "2", "--group", "wallet", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"  {TOPIC}:@wallet: 3, " in done.stdout
    assert "3 events published again" in done.stdout
    assert done.stderr == "no consumer wallet has been seen yet: it gets them when it runs, if that is its name\n"
    assert bench.ids(side_stream(TOPIC, "wallet")) == ids[2:]
    for option, value, rule in (
        ("--since", "yesterday", "--since: is not a time like"), ("--batch", "1-2-3", "--batch: is not a batch number"),
        *(("--group", name, "consumer name: must match") for name in ("", 'x"; DROP', "a:b", "{a}")),
        ("--batch", "1-99", "batches: must be the first and the last of a range that is there; there are batches 1 to"),
    ):  # fmt: skip
        wrong = command(bench, option, value)
        assert (wrong.returncode, f"error: {rule}" in wrong.stderr) == (1, True), wrong.stderr


def test_what_is_recorded_meanwhile_is_not_replayed(bench: Bench) -> None:
    """It was not asked about, and where producers are as fast as the rate it would have no end."""
    ids = bench.write(300)
    drain(bench.relay())
    process = started(bench, "--group", "x", "--rate", "200")
    side = side_stream(TOPIC, "x")
    eventually(lambda: bench.length(side) > 0, 30)
    bench.write(300)
    said, _ = process.communicate(timeout=30)
    assert said.splitlines()[-1] == "300 events published again"
    assert bench.ids(side) == ids
    fast = command(bench, "--rate", "inf", "--group", "y", "--yes")
    assert (fast.returncode, bench.length(side_stream(TOPIC, "y"))) == (0, 600), fast.stderr


@pytest.mark.parametrize("answer", ["y", "n"])
def test_at_a_terminal_it_asks_and_shows_a_bar(bench: Bench, answer: str) -> None:
    bench.write(5)
    drain(bench.relay())
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", "replay", "--id", bench.ids()[0]],
        cwd=ROOT, env=os.environ | addresses(bench), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    bench.processes.append(process)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    assert process.wait(60) == (0 if answer == "y" else 1)
    said = ""
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 10_000):
            said += part.decode()
    os.close(ours)
    assert "Publish them? [y/N]" in said
    assert ("100%" in said, bench.length()) == (answer == "y", 6 if answer == "y" else 5), said
