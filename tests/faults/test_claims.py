"""Claims: what a living process holds stays its own, what a dead or ending one had is done by others."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from consumer import Consumer, Retry
from consumer.drain import EXIT_CODE, draining
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import record
from outbox.cli import app
from outbox.embedded import ValkeyServer
from outbox.transport import MemoryTransport
from pytest_outbox import missing
from tests.faults.test_consumer_faults import KEY, SITES, TOPIC, Process, QueueSite, Site, both, fields, job
from tests.waiting import eventually, in_time, lasting, stops_within

#: Long enough for a busy machine to renew in time, three times.
CLAIM_SECONDS = 2.0


@pytest.fixture
def site(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    kind = getattr(request, "param", "stream")
    with ExitStack() as stack:
        found = SITES[kind](database_url, own_valkey().url, tmp_path, stack)
        if kind == "stream":
            found.redis.xgroup_create(KEY, "ledger", "0", mkstream=True)
        yield found
        found.all_is_well()


def started(site: Site) -> Counter[str]:
    """How often the handler of each event was started."""
    return Counter(site.starts.read_text().split())


def seconds_at(site: Site) -> float:
    """The server's clock, which claims end by."""
    seconds, micros = site.redis.time()
    return float(seconds + micros / 1e6)


# --- slow is not dead ------------------------------------------------------------------------------------------------------


ASYNC = """
import os, time
from sqlalchemy import text
from consumer import Consumer

wallet = Consumer("ledger", topics=["accounts"])

@wallet.on("credited")
async def credit(event, session):
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(f"{event.id}\\n")
    time.sleep(float(os.environ["PACE"]))  # blocks the event loop
    await session.execute(text("INSERT INTO public.effects VALUES (:id, 1)"), {"id": event.id})
    await session.execute(text("UPDATE public.accounts SET balance = balance + 1 WHERE id = 'A'"))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("site", "kind", "handlers"),
    [("stream", "PACE", None), ("stream", "SPIN", None), ("stream", "PACE", ASYNC), ("queue", "PACE", None)],
    ids=["waits", "computes", "sleeps in async code", "a job"],
    indirect=["site"],
)
def test_o_12_o_85_a_handler_that_takes_longer_than_a_claim_keeps_it(
    site: Site, kind: str, handlers: str | None
) -> None:
    """Nobody even tries: he would find the ledger row locked, and not call the handler."""
    if handlers:
        (site.folder / "shop.py").write_text(handlers)
    pace = {kind: str(lasting(2.5 * CLAIM_SECONDS, 10)), "CONSUMER_CLAIM_SECONDS": str(CLAIM_SECONDS)}
    for _ in range(2):
        site.consumer(**pace)
    site.add(1)
    seen: set[int] = set()
    eventually(lambda: seen.update(site.delivered()) or site.state()[1])
    site.settled(1)
    assert (max(seen), list(started(site).values())) == (1, [1])
    assert "lost claim" not in site.output()


@pytest.mark.long
@both
def test_o_15_o_16_others_that_start_leave_alone_what_is_in_work(site: Site) -> None:
    """One has three in work; others start beside it, and again. Later one is killed, and nobody starts then."""
    gate = site.folder / "gate"
    claim = {"CONSUMER_CLAIM_SECONDS": str(CLAIM_SECONDS), "GATE": str(gate)}
    first = site.consumer(CONSUMER_PROCESS_NAME="first", **claim)
    if isinstance(site, QueueSite):
        several_at_hand(site, "first", gate, 3)
    else:
        site.add(3)
        eventually(lambda: site.starts.read_text())
    number = site.state()[0] + 3
    begun = seconds_at(site)
    others = [site.consumer(CONSUMER_PROCESS_NAME=f"other{n}", **claim) for n in range(3)]
    for again in range(2):
        eventually(lambda: site.output().count("ledger started") == 4 + again)  # noqa: B023
        others[0].send_signal(signal.SIGTERM)
        assert others[0].wait(20) == 0
        others[0] = site.consumer(CONSUMER_PROCESS_NAME="other0", **claim)
    eventually(lambda: seconds_at(site) > begun + 2 * CLAIM_SECONDS)
    assert site.owners() == {b"first": 3}
    gate.touch()
    site.settled(number)
    assert list(started(site).values()) == [1] * number

    running = {b"first": first} | {f"other{n}".encode(): process for n, process in enumerate(others)}
    numbers = count(1)

    def taken_over() -> float:
        extra = next(numbers)
        gate.unlink()
        site.add(1)
        eventually(lambda: len(started(site)) == number + extra)
        (owner,) = site.owners()
        running[owner].kill()
        killed = seconds_at(site)
        gate.touch()
        site.settled(number + extra)
        took = seconds_at(site) - killed
        assert sorted(started(site).values()) == [*[1] * number, *[2] * extra]
        return took

    assert in_time(2 * CLAIM_SECONDS, taken_over)


def test_what_was_pending_under_a_name_that_is_used_again_is_taken_over_in_time(site: Site) -> None:
    """Not before its time: another living process may wrongly have the same name."""
    settings = {"CONSUMER_PROCESS_NAME": "fixed", "CONSUMER_CLAIM_SECONDS": "1.5"}
    site.add(2)
    first = site.consumer(GATE=str(site.folder / "gate"), **settings)
    eventually(lambda: site.starts.read_text())
    first.kill()
    killed = seconds_at(site)
    site.consumer(**settings)
    site.settled(2)
    assert seconds_at(site) > killed + 1.5 - 1.5 / 3 - 0.1, "a third may have passed since the last renewal"


@pytest.mark.long
def test_o_39_what_the_only_consumer_of_a_topic_left_is_seen_and_done(site: Site) -> None:
    """Consumers of other topics cannot do it; the next one that can does, whenever it comes. Meanwhile `outbox status` says so."""
    site.run("outbox", "relay")
    (site.folder / "other.py").write_text(
        "from consumer import Consumer\nwallet = Consumer('mailer', topics=['letters'])\nwallet.on('sent')(print)\n"
    )
    site.run("consumer", "run", "other:wallet")
    numbers = count(1)
    idle = 2.0  # four times what a claim lasts here

    def done_by_the_next() -> float:
        number = next(numbers)
        process = site.consumer(GATE=str(site.folder / "gate"))
        site.record(1)
        eventually(lambda: len(started(site)) == number)
        process.kill()
        eventually(lambda: site.redis.xpending_range(KEY, "ledger", "-", "+", 1, idle=round(idle * 1000)))
        addresses = {"DATABASE_URL": site.database_url, "REDIS_URL": site.redis_url}
        status = CliRunner().invoke(app, ["status", "--json"], env=addresses)
        (stream,) = json.loads(status.stdout)["streams"]
        (group,) = stream["groups"]
        assert (group["name"], group["pending"], group["unacknowledged"]) == ("ledger", 1, 1)
        assert group["oldest_pending_seconds"] >= idle
        next_one = site.consumer()
        site.ready(2 * number)
        begun = seconds_at(site)
        site.settled(number)
        took = seconds_at(site) - begun
        next_one.terminate()
        assert next_one.wait(20) == 0
        return took

    assert in_time(2 * 0.5, done_by_the_next)


@pytest.mark.long
def test_o_35_consumers_killed_while_they_take_over(site: Site) -> None:
    """Nine kills instead of thirty. What the last one of them leaves is done within two claims of the one who comes then."""
    claim = 1.0
    settings = {"CONSUMER_CLAIM_SECONDS": "0.3", "CONSUMER_MAX_DELIVERIES": "1000"}
    chance, number = random.Random(35), 0

    def done_by_the_next() -> float:
        nonlocal number
        number += 100
        site.add(100)
        site.redis.xreadgroup("ledger", "dead", {KEY: ">"})
        for _ in range(round(lasting(3, 10)) if number == 100 else 1):
            processes = [site.consumer(CONSUMER_BATCH_SIZE="10", PACE="0.05", **settings) for _ in range(3)]
            wanted = sum(started(site).values()) + chance.randint(1, 15)
            eventually(lambda: sum(started(site).values()) >= wanted)  # noqa: B023
            for process in processes:
                time.sleep(chance.uniform(0, 0.05))
                process.kill()
        assert site.state()[1] < number, "every kill met work"
        ready = site.output().count("consumer ledger started")
        next_one = site.consumer(**settings | {"CONSUMER_CLAIM_SECONDS": str(claim)})
        site.ready(ready + 1)
        begun = seconds_at(site)
        site.settled(number, 40)
        took = seconds_at(site) - begun
        next_one.kill()
        return took

    assert in_time(2 * claim, done_by_the_next)
    assert {key for key in site.redis.scan_iter() if site.redis.type(key) != b"stream"} == set(), "no lock is left"


# --- clocks ----------------------------------------------------------------------------------------------------------------


def _faked(offset: str) -> dict[str, str]:
    """The environment in which the clock is wrong by so much; durations are not."""
    program = shutil.which("faketime") or missing("no faketime (apt-get install faketime)")
    shown = subprocess.run(
        [program, "-m", "--exclude-monotonic", "-f", offset, "env"], capture_output=True, text=True, check=True
    ).stdout
    found = dict(line.split("=", 1) for line in shown.splitlines() if line.startswith(("LD_PRELOAD=", "FAKETIME")))
    del found["FAKETIME_SHARED"]
    return found


@pytest.mark.long
@both
def test_o_83_clocks_that_are_ten_minutes_wrong(site: Site) -> None:
    """Of relays and consumers, beside right ones; one of the latter dies with work."""
    ahead, behind = _faked("+10m"), _faked("-10m")
    claim = {"CONSUMER_CLAIM_SECONDS": str(CLAIM_SECONDS)}
    site.run("outbox", "relay", **ahead)
    site.run("outbox", "relay", **behind)
    gate, held = site.folder / "gate", site.at_first(5)
    ids: set[str] = set()
    numbers, others = count(1), list[Process]()

    def taken_over() -> float:
        number = next(numbers)
        while others:
            others[-1].terminate()
            assert others.pop().wait(20) == 0
        dead = site.consumer(GATE=str(gate), CONSUMER_PROCESS_NAME="dead", **claim)
        ids.update(site.record(5))
        eventually(lambda: site.owners() == {b"dead": held} and sum(started(site).values()) == 106 * (number - 1) + 1)
        begun = seconds_at(site)
        # Not asleep: where the clock is faked, time.sleep fails.
        others.extend(
            site.consumer(SPIN="0.01", CONSUMER_BATCH_SIZE="5", **claim, **environment)
            for environment in (ahead, behind, {})
        )
        ids.update(site.record(100))
        eventually(lambda: site.state()[1] == 105 * number - held)
        eventually(lambda: seconds_at(site) > begun + 2 * CLAIM_SECONDS)
        assert site.owners() == {b"dead": held}, "who is ahead does not take over too early"
        dead.kill()
        killed = seconds_at(site)
        site.settled(105 * number)
        took = seconds_at(site) - killed
        starts = started(site)
        assert starts.keys() == ids
        assert Counter(starts.values()) == {1: 104 * number, 2: number}, "only what the dead one had started"
        return took

    assert in_time(2 * CLAIM_SECONDS, taken_over), "and who is behind not too late"


@pytest.mark.long
@pytest.mark.parametrize("site", ["queue"], indirect=True)
def test_o_83_delayed_jobs_start_by_the_servers_clock(site: Site) -> None:
    """Neither those who brought them nor those who do them know what time it is."""
    ahead, behind = _faked("+10m"), _faked("-10m")
    for environment in (ahead, behind):
        site.run("outbox", "relay", **environment)
        site.consumer(**environment)
    site.ready(2)

    def latest() -> float:
        before = site.state()[0]
        due = datetime.now(UTC) + timedelta(seconds=0.8)
        later = [due + timedelta(seconds=number / 10) for number in range(6)]
        with psycopg.connect(site.database_url) as connection:
            given = [job(run_at=run_at) for run_at in later]
            record(connection, *given)
        eventually(lambda: site.state()[0] == before + 6)
        with site.connect() as connection:
            # Rows are as old as the transaction, which begins when the job has been claimed.
            rows = connection.execute("SELECT event_id, processed_at FROM public.processed_messages").fetchall()
        at = dict(rows)
        late = [(at[each.id] - run_at).total_seconds() for each, run_at in zip(given, later, strict=True)]
        assert min(late) >= 0, "never early"
        return max(late)

    assert in_time(1, latest)


FAILS_ONCE = """
import os, psycopg
from consumer import Consumer, Retry

wallet = Consumer(os.environ["GROUP"], topics=["accounts"], retry=Retry(first_seconds=1))

@wallet.on("credited", raw=True)
def credit(event, connection):
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as other:
        other.execute("INSERT INTO public.tries VALUES (%s, %s)", (wallet.name, event.id))
        found = other.execute("SELECT count(*) FROM public.tries WHERE (who, id) = (%s, %s)", (wallet.name, event.id))
    if found.fetchone()[0] == 1:
        raise ValueError
"""


@pytest.mark.long
def test_o_83_what_fails_is_tried_again_by_the_databases_clock(site: Site) -> None:
    """Neither at once nor in ten minutes, although its process thinks that it is as late, or as early, as that."""
    site.hand_out(FAILS_ONCE)
    site.tracebacks = 6
    site.add(3)
    with site.connect() as connection:
        connection.execute(
            "CREATE TABLE public.tries (who text, id uuid, at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        for group in ("ahead", "behind"):
            site.consumer(GROUP=group, **_faked("+10m" if group == "ahead" else "-10m"))
        eventually(lambda: site.state()[2] == 6 and site.waiting() == 0)
        rows = connection.execute(
            "SELECT count(*), extract(epoch FROM max(at) - min(at))::float8 FROM public.tries GROUP BY who, id"
        ).fetchall()
    assert [number for number, _ in rows] == [2] * 6
    assert all(0.75 <= pause < 30 for _, pause in rows), rows


@pytest.mark.long
def test_o_84_a_heartbeat_is_never_older_than_a_read_may_take(site: Site) -> None:
    """While what comes goes to others, too."""
    beats = [site.folder / f"beat{number}" for number in range(2)]
    for beat in beats:
        site.consumer(CONSUMER_HEARTBEAT_FILE=str(beat), CONSUMER_BLOCK_SECONDS="2", CONSUMER_CHECK_SECONDS="0.4")
    eventually(lambda: all(beat.exists() for beat in beats))
    ages, until, added = [0.0], time.monotonic() + lasting(5, 30), count(1)
    while time.monotonic() < until:
        ages += [time.time() - beat.stat().st_mtime for beat in beats]
        if len(ages) % 10 == 1:
            site.add(1)
            total = next(added)
        time.sleep(0.1)
    assert max(ages) < 4
    site.settled(total)


# --- SIGTERM ---------------------------------------------------------------------------------------------------------------


@both
def test_o_86_what_has_not_started_goes_back(site: Site) -> None:
    """Of jobs a worker has several at hand only when those before were done fast. Others have the rest within 5 s, not 60."""
    numbers = count(1)

    def done_by_the_other() -> float:
        number = next(numbers)
        gate, other_gate, name = site.folder / "first", site.folder / "second", f"first{number}"
        first = site.consumer(CONSUMER_CLAIM_SECONDS="60", CONSUMER_PROCESS_NAME=name, GATE=str(gate))
        if isinstance(site, QueueSite):
            several_at_hand(site, name, gate)
        else:
            site.add(16)
            eventually(lambda: site.owners() == {name.encode(): 16} and len(started(site)) == site.state()[0] + 1)
        before = site.state()[0]
        other = site.consumer(CONSUMER_CLAIM_SECONDS="60", GATE=str(other_gate))
        site.ready(2 * number)
        begun = seconds_at(site)
        first.send_signal(signal.SIGTERM)
        gate.touch()
        assert first.wait(20) == 0
        ended = seconds_at(site)
        assert site.state() == (before + 1,) * 4
        assert site.pending() <= 16
        other_gate.touch()
        total = before + (50 if isinstance(site, QueueSite) else 16)
        site.settled(total)  # within a third of a claim
        took = seconds_at(site) - ended
        assert set(started(site).values()) == {1}
        other.terminate()
        assert other.wait(20) == 0
        gate.unlink(), other_gate.unlink()
        return max(took, ended - begun)

    assert in_time(5, done_by_the_other)


def several_at_hand(site: Site, name: str, gate: Path, number: int = 50) -> None:
    """Have a worker begin the first of so many jobs, and hold others: it takes as many as it expects to do in a moment."""

    def held() -> int:
        gate.touch()
        done = site.state()[0] + 200 + site.pending() + site.unread()
        site.add(200)
        eventually(lambda: site.state()[0] == done and site.pending() == site.unread() == 0)
        gate.unlink()
        site.add(number)
        eventually(lambda: len(started(site)) == done + 1)
        return site.owners()[name.encode()]

    eventually(lambda: held() >= min(number, 4), 60, "several jobs at hand")


@pytest.mark.long
def test_o_86_as_the_case_has_it(site: Site) -> None:
    """The machine may be busy just then: what cannot be done in time is not done at any of the tries."""
    pace = {"CONSUMER_CLAIM_SECONDS": "60", "CONSUMER_BATCH_SIZE": "50", "CONSUMER_CHECK_SECONDS": "1"}
    gate = site.folder / "gate"  # of the second one, so that it is known what the first one has done
    for number in range(1, 4):
        before = sum(started(site).values())
        site.add(50)
        first = site.consumer(PACE="0.5", CONSUMER_PROCESS_NAME=f"first{number}", **pace)
        eventually(lambda: sum(started(site).values()) >= before + 3)  # noqa: B023
        second = site.consumer(GATE=str(gate), **pace)
        eventually(lambda: len(site.owners()) == 2)
        begun, at_term = seconds_at(site), sum(started(site).values()) - before - 1
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        ended = seconds_at(site)
        assert 3 <= site.state()[0] - before <= at_term + 1, "that at work at most, besides what was done"
        gate.touch()
        eventually(lambda: site.state()[0] == number * 50)  # noqa: B023
        done = seconds_at(site)
        site.settled(number * 50)
        assert set(started(site).values()) == {1}
        second.terminate()
        assert second.wait(20) == 0
        gate.unlink()
        if ended < begun + 5 and done < ended + 5:
            return
    pytest.fail("in time at none of the tries")


@pytest.mark.long
@both
def test_o_86_what_is_handed_back_counts_as_not_delivered(site: Site) -> None:
    """However often that is, also of what had started."""
    site.add(16)
    gate = site.folder / "gate"
    for number in range(1, 4):
        process = site.consumer(CONSUMER_CLAIM_SECONDS="60", CONSUMER_DRAIN_SECONDS="0", GATE=str(gate))
        eventually(lambda: sum(started(site).values()) == number)  # noqa: B023
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == EXIT_CODE
        assert site.delivered() == [0] * 16
    gate.touch()
    site.consumer(CONSUMER_CLAIM_SECONDS="60")
    site.settled(16)


def test_o_86_what_is_not_in_work_goes_back_at_once(database_url: str) -> None:
    """While a handler is at work, and the drain time has not passed."""
    transport, busy, gate = MemoryTransport(), threading.Event(), threading.Event()
    consumer = Consumer("ledger", topics=["a", "b"])

    @consumer.on("credited", raw=True)
    def wait(_event: Any, _connection: Any) -> None:
        busy.set()
        assert gate.wait(60)

    for stream in "aabb":
        transport.add(stream, fields(0))
    settings = ConsumerSettings(database_url=database_url, redis_url="redis://unused", batch_size=2)
    worker = Worker(consumer, settings, transport=transport)
    with draining(worker, 60) as stop:
        thread = threading.Thread(target=worker.run)
        thread.start()
        assert busy.wait(30)
        stop()
        (first, second) = eventually(lambda: transport.claim("ledger", "other", "b", 3600, 2).deliveries)
        assert first.count == second.count == 1
        assert transport.claim("ledger", "other", "a", 3600, 2).deliveries == []
        gate.set()
        thread.join(30)
    assert [d.count for d in transport.claim("ledger", "other", "a", 3600, 2).deliveries] == [1]
    assert (transport.pending("ledger", "a"), transport.pending("ledger", "b")) == (1, 2)


@both
def test_o_87_what_runs_is_finished_and_acknowledged(site: Site) -> None:
    site.add(1)
    gate = site.folder / "gate"
    process = site.consumer(GATE=str(gate))
    eventually(lambda: site.starts.read_text())
    process.send_signal(signal.SIGTERM)
    site.add(1)  # comes too late
    gate.touch()
    assert process.wait(20) == 0
    assert site.state() == (1, 1, 1, 1)
    assert (site.pending(), site.unread()) == (0, 1)


@pytest.mark.parametrize(
    ("site", "where"),
    [("stream", "in Python"), ("stream", "in PostgreSQL"), pytest.param("queue", "in Python", marks=pytest.mark.long)],
    indirect=["site"],
)
def test_o_87_what_does_not_end_in_time_is_rolled_back_and_handed_back(site: Site, where: str) -> None:
    """A statement under way is ended, too: its locks would stop others for as long as it takes."""
    site.add(2)
    gate = site.folder / "gate"
    busy = {"SLEEP": "600"} if where == "in PostgreSQL" else {"GATE": str(gate)}
    process = site.consumer(CONSUMER_DRAIN_SECONDS="0.3", CONSUMER_CLAIM_SECONDS="60", **busy)
    eventually(lambda: site.starts.read_text())
    if where == "in PostgreSQL":
        eventually(lambda: sleeping(site))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == EXIT_CODE
    eventually(lambda: not sleeping(site), 5)
    assert site.state() == (0, 0, 0, 0)
    assert site.delivered() == [0, 0]
    assert "not done within CONSUMER_DRAIN_SECONDS (0.3)" in site.output()
    assert "handler failed" not in site.output()
    gate.touch()
    site.consumer(CONSUMER_CLAIM_SECONDS="60")
    site.settled(2)


def sleeping(site: Site) -> bool:
    """Whether a handler's statement is at work."""
    with site.connect() as connection:
        query = "SELECT FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active' AND datname = current_database()"
        return connection.execute(query).fetchone() is not None


def test_o_87_what_waited_for_another_try_waits_on(database_url: str) -> None:
    """As if it had not been tried, although its row was locked by the transaction at work."""
    transport, busy, gate = MemoryTransport(), threading.Event(), threading.Event()
    consumer = Consumer("ledger", topics=["a"], retry=Retry(first_seconds=0.01))
    tries = count(1)

    @consumer.on("credited", raw=True)
    def wait(_event: Any, connection: Any) -> None:
        if next(tries) == 1:
            raise RuntimeError("fails at first")
        busy.set()
        assert gate.wait(60)
        connection.execute("SELECT 1")

    transport.add("a", fields(0))
    worker = Worker(
        consumer, ConsumerSettings(database_url=database_url, redis_url="redis://unused"), transport=transport
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert busy.wait(30)
    worker.stop()
    worker.abandon()
    gate.set()
    thread.join(30)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT attempts, tries, starts, lease FROM public.message_failures").fetchall()
        outcomes = connection.execute("SELECT outcome FROM public.processed_messages").fetchall()
    assert (rows, outcomes) == ([(1, 1, 0, None)], [("waiting",)])
    assert transport.pending("ledger", "a") == 0


@pytest.mark.parametrize(("site", "check"), [("stream", "1"), ("stream", "60"), ("queue", "60")], indirect=["site"])
def test_o_88_sigterm_ends_an_idle_consumer_at_once(site: Site, check: str) -> None:
    numbers = count(1)

    def idle() -> subprocess.Popen[bytes]:
        process = site.consumer(CONSUMER_BLOCK_SECONDS="30", CONSUMER_CHECK_SECONDS=check, CONSUMER_CLAIM_SECONDS="60")
        site.add(1)
        site.settled(next(numbers))
        return process

    assert stops_within(2, idle)
    assert "consumer ledger stopped" in site.output().splitlines()[-1]


@pytest.mark.long
@both
def test_o_88_sigterm_as_something_arrives(site: Site) -> None:
    """Just before or just after. Whoever comes next has it; nobody waits until a claim ends."""
    tries, chance = round(lasting(5, 200)), random.Random(88)
    for number in range(1, tries + 1):
        process = site.consumer(CONSUMER_BLOCK_SECONDS="30", CONSUMER_CLAIM_SECONDS="60")
        site.ready(number)
        eventually(lambda: site.blocked() == 1)
        steps = [lambda: site.add(1), lambda: process.send_signal(signal.SIGTERM)]  # noqa: B023
        chance.shuffle(steps)
        steps[0]()
        time.sleep(chance.choice([0, 0.001, 0.003, 0.006]))
        steps[1]()
        assert process.wait(20) == 0
        assert site.state()[0] + site.unread() + site.pending() == number
    site.consumer(CONSUMER_CLAIM_SECONDS="60")
    site.settled(tries)
    assert set(started(site).values()) == {1}


@pytest.mark.long
def test_o_88_asked_to_stop_as_an_event_arrives(site: Site) -> None:
    """Whoever comes next has it; nobody waits until a claim ends."""
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("credited", raw=True)
    def apply(event: Any, connection: Any) -> None:
        connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
        connection.execute("UPDATE public.accounts SET balance = balance + 1 WHERE id = 'A'")

    settings = ConsumerSettings(database_url=site.database_url, redis_url=site.redis_url, claim_seconds=60)
    tries, chance = round(lasting(10, 200)), random.Random(88)
    for number in range(1, tries + 1):
        worker = Worker(consumer, settings)
        thread = threading.Thread(target=worker.run)
        thread.start()
        eventually(lambda: site.redis.info("clients")["blocked_clients"] == 1)
        site.add(1)
        time.sleep(chance.choice([0, 0.001, 0.003, 0.006]))
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()
        assert site.state()[0] + site.unread() + site.pending() == number
    site.consumer(CONSUMER_CLAIM_SECONDS="60")
    site.settled(tries)


@pytest.mark.parametrize("site", ["stream", pytest.param("queue", marks=pytest.mark.long)], indirect=True)
def test_o_88_a_second_signal_ends_it_at_once(site: Site) -> None:
    """Nothing unfinished is acknowledged."""
    site.add(1)
    gate = site.folder / "gate"
    process = site.consumer(GATE=str(gate))
    eventually(lambda: site.starts.read_text())
    process.send_signal(signal.SIGINT)
    eventually(lambda: _ignored(process.pid, signal.SIGINT))
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT
    assert (site.pending(), site.state()) == (1, (0, 0, 0, 0))
    gate.touch()
    site.consumer()
    site.settled(1)


def _ignored(pid: int, number: int) -> bool:
    """Whether a process has no handler for the signal any more."""
    (caught,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return not int(caught.split()[1], 16) >> (number - 1) & 1
