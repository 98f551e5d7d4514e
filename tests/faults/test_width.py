"""Threads and processes of one consumer: events that end their process (case O-62), and how parent and children begin and end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox import Job
from outbox.embedded import ValkeyServer
from outbox.envelope import uuid7
from tests.faults.test_consumer_faults import KEY, SITES, QueueSite, Site, both
from tests.waiting import eventually

HANDLERS = """
import ctypes, os, signal, sys, time
from pathlib import Path
from consumer import Consumer, Retry

wallet = Consumer("ledger", topics=["accounts"], retry=Retry(attempts=3, first_seconds=0.2))

def start(event):
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(f"{event.id} {os.getpid()}\\n")

@wallet.on("credited", raw=True)
def credit(event, connection):
    start(event)
    connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
    connection.execute("UPDATE public.accounts SET balance = balance + 1 WHERE id = 'A'")

@wallet.on_batch("counted", raw=True)
def count(events, connection):
    for event in events:
        connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
    for event in events:
        if event.payload:
            start(event)
            os._exit(137)

@wallet.on("exit", raw=True)
def leave(event, connection):
    start(event)
    os._exit(137)

@wallet.on("kill", raw=True)
def kill(event, connection):
    start(event)
    os.kill(os.getpid(), signal.SIGKILL)

@wallet.on("crash", raw=True)
def crash(event, connection):
    start(event)
    ctypes.string_at(0)

@wallet.on("hang", raw=True)
def hang(event, connection):
    start(event)
    while not Path("go").exists():
        time.sleep(0.01)
    connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
"""
ORPHAN = """
import subprocess
@wallet.on("orphan", raw=True)
def orphan(event, connection):
    subprocess.run(["sh", "-c", "sh -c 'exit 3' & exit 0"], check=True)
    connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
"""
DEADLY = ("exit", "kill", "crash")


@pytest.fixture
def site(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    with ExitStack() as stack:
        found = SITES[getattr(request, "param", "stream")](database_url, own_valkey().url, tmp_path, stack)
        found.hand_out(HANDLERS)
        yield found


def send(site: Site, *types: str, data: str = "{}") -> list[str]:
    ids = [str(uuid7()) for _ in types]
    if isinstance(site, QueueSite):
        site.lists.enqueue(
            [
                Job(queue="accounts", type=kind, key="A", payload={}, id=uuid.UUID(job))
                for job, kind in zip(ids, types, strict=True)
            ]
        )
        return ids
    with site.redis.pipeline(transaction=False) as pipeline:
        for event_id, kind in zip(ids, types, strict=True):
            pipeline.xadd(KEY, {"id": event_id, "type": kind, "subject": "A", "data": data})
        pipeline.execute()
    return ids


def wide(site: Site, *options: str, before: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
    """A consumer whose claims end so late that nothing in a test waits for it."""
    slow = {"CONSUMER_CLAIM_SECONDS": "600"} | environment
    return site.run("consumer", "run", "shop:wallet", *options, before=before, **slow)


def children(parent: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]


def starts(site: Site) -> Counter[str]:
    return Counter(line.split()[0] for line in site.starts.read_text().splitlines())


def effects(site: Site) -> Counter[str]:
    with site.connect() as connection:
        return Counter(str(event_id) for (event_id,) in connection.execute("SELECT event_id FROM public.effects"))


def letters(site: Site) -> dict[str, tuple[str, str]]:
    with site.connect() as connection:
        rows = connection.execute("SELECT event_id::text, reason, error FROM public.dead_letters").fetchall()
    return {event_id: (reason, error) for event_id, reason, error in rows}


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def fresh_are_handled_within(site: Site, seconds: float, while_: Callable[[], bool]) -> None:
    """One event after the other, until something is over, which must be so within two minutes."""
    end = time.monotonic() + 120
    while while_():
        assert time.monotonic() < end, site.output()[-3000:]
        (event,) = send(site, "credited")
        eventually(lambda: effects(site)[event], seconds, site.output()[-3000:])  # noqa: B023 - called here


# --- events that end their process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "options"),
    [
        ("stream", ("--processes", "2")),
        pytest.param("stream", ("--processes", "2", "--threads", "2"), marks=pytest.mark.long),
        pytest.param("queue", ("--processes", "2"), marks=pytest.mark.long),
    ],
    ids=["processes", "and threads", "jobs"],
    indirect=["site"],
)
def test_o_62_what_ends_its_process_is_started_five_times(site: Site, options: tuple[str, ...]) -> None:
    """Claims last for ten minutes, so whatever is done again is handed on by those who know."""
    good = send(site, *["credited"] * 40)
    bad = send(site, *DEADLY)
    good += send(site, *["credited"] * 200)
    wide(site, *options)
    fresh_are_handled_within(site, 5, lambda: len(letters(site)) < len(bad))
    eventually(lambda: site.pending() == 0)
    found = letters(site)
    assert set(found) == set(bad)
    assert {reason for reason, _ in found.values()} == {"process_died"}
    with site.connect() as connection:
        kept = [row[0] for row in connection.execute("SELECT fields FROM public.dead_letters")]
    assert [dict(zip(parts[::2], parts[1::2], strict=True))[b"data"] for parts in kept] == [b"{}"] * 3
    assert {error for _, error in found.values()} == {"ProcessDied: process died while a handler was at this event"}
    assert "handler failed (start 1 of 5), tried again in " in site.output()
    assert "(start 4 of 5)" in site.output()
    assert "not counted" not in site.output()
    assert [starts(site)[event] for event in bad] == [5, 5, 5]
    applied = effects(site)
    assert set(applied.values()) == {1}
    assert set(good) <= set(applied)
    assert site.state()[3] == len(applied)
    if isinstance(site, QueueSite):
        assert {site.lists.job("accounts", uuid.UUID(job)).status for job in bad} == {"failed"}  # type: ignore[union-attr]


@pytest.mark.long
@both
def test_o_62_with_a_supervisor_of_its_own(site: Site) -> None:
    """``while true``: nobody knows what it was but Redis, which counts; those delivered with it twice run alone, too."""
    good, bad = send(site, *["credited"] * 20), send(site, "exit")
    good += send(site, *["credited"] * 20)
    over = threading.Event()

    def forever() -> None:
        while not over.is_set():
            process = wide(site, CONSUMER_CLAIM_SECONDS="0.5")
            while process.poll() is None and not over.wait(0.05):
                pass
            process.terminate()
            process.wait()

    loop = threading.Thread(target=forever)
    loop.start()
    try:
        eventually(lambda: starts(site)[bad[0]] >= 2, 60)
        fresh_are_handled_within(site, 5, lambda: not letters(site))
        eventually(lambda: site.pending() == 0)
    finally:
        over.set()
        loop.join()
    assert {event: reason for event, (reason, _) in letters(site).items()} == {bad[0]: "process_died"}
    assert starts(site)[bad[0]] == 5
    applied = effects(site)
    assert set(applied.values()) == {1}
    assert set(good) <= set(applied)


def test_one_of_a_batch_handler_that_ends_the_process_is_found(site: Site) -> None:
    good = send(site, *["counted"] * 30, data="null")
    (bad,) = send(site, "counted", data='"deadly"')
    good += send(site, *["counted"] * 30, data="null")
    wide(site, "--processes", "2", CONSUMER_MAX_DELIVERIES="2")
    eventually(lambda: set(letters(site)) == {bad}, 60, site.output()[-3000:])
    eventually(lambda: site.pending() == 0)
    assert effects(site) == Counter(good)
    assert starts(site)[bad] <= 3, "with the others, and as often as it may alone"


@pytest.mark.long
def test_whoever_is_killed_from_outside_takes_nobody_along(site: Site) -> None:
    """Children are killed -9 at random while they work: what they were at runs again, and nothing is put aside."""
    parent = wide(site, "--processes", "2")
    good = send(site, *["credited"] * 3000)
    killed = 0
    while killed < 6:
        before = len(effects(site))
        if before < 3000:
            eventually(lambda: len(effects(site)) > before or len(effects(site)) == 3000)  # noqa: B023 - called here
        for pid in children(parent)[killed % 2 :][:1]:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    eventually(lambda: set(good) == set(effects(site)) and site.pending() == 0, 30, site.output()[-3000:])
    assert effects(site) == Counter(good)
    assert letters(site) == {}


# --- parent and children -----------------------------------------------------------------------------------------------------


def working(site: Site, number: int) -> set[int]:
    """The processes that handlers ran in, once there are so many."""

    def found() -> set[int]:
        send(site, *["credited"] * 20)
        return {int(line.split()[1]) for line in site.starts.read_text().splitlines()}

    pids = eventually(lambda: pids if len(pids := found()) >= number else set())
    eventually(lambda: site.pending() == 0 and site.unread() == 0)
    return pids


def test_sigterm_ends_them_all(site: Site) -> None:
    parent = wide(site, "--processes", "3")
    pids = working(site, 3)
    assert set(children(parent)) >= pids
    parent.terminate()
    assert parent.wait(30) == 0
    assert all(map(gone, pids))
    assert "started, 3 processes" in site.output()
    assert " stopped" in site.output()
    assert site.redis.xinfo_consumers(KEY, "ledger") == []


@pytest.mark.long
def test_each_signal_is_heard_whenever_it_comes(site: Site) -> None:
    """While the parent forks, while a child has no ways with signals yet, and later."""
    for number in range(5):
        parent = wide(site, "--processes", "3")
        eventually(lambda: len(children(parent)) >= min(number, 3))  # noqa: B023 - called here
        time.sleep(0.008 * number)
        if number:
            parent.send_signal(signal.SIGINT if number % 2 else signal.SIGTERM)
            assert parent.wait(30) in (0, -signal.SIGTERM, -signal.SIGINT)
        else:
            parent.kill()


def test_a_handler_that_does_not_end_is_the_worst(site: Site) -> None:
    parent = wide(site, "--processes", "2", CONSUMER_DRAIN_SECONDS="0.3")
    working(site, 2)
    (event,) = send(site, "hang")
    eventually(lambda: starts(site)[event])
    parent.terminate()
    assert parent.wait(30) == 75
    assert site.redis.xpending_range(KEY, "ledger", "-", "+", 9)[0]["times_delivered"] == 0


def test_a_second_signal_kills(site: Site) -> None:
    parent = wide(site, "--processes", "2")
    pids = working(site, 2)
    (event,) = send(site, "hang")
    eventually(lambda: starts(site)[event])
    parent.terminate()
    eventually(lambda: len(children(parent)) == 1)
    parent.terminate()
    assert parent.wait(30) == 128 + signal.SIGKILL
    assert all(map(gone, pids))


def test_children_end_when_their_parent_is_killed(site: Site) -> None:
    parent = wide(site, "--processes", "3")
    pids = working(site, 3)
    parent.kill()
    parent.wait()
    eventually(lambda: all(map(gone, pids)), 20)
    assert eventually(lambda: site.redis.xinfo_consumers(KEY, "ledger") == []), "and in good order"


@pytest.mark.parametrize("options", [("--processes", "3"), ("--threads", "3")], ids=lambda options: options[0][2:])
def test_what_none_can_work_with_ends_them_all(site: Site, options: tuple[str, ...]) -> None:
    send(site, "credited")
    site.redis.hset("{accounts:0}:relay", "lanes", "4")
    started = wide(site, *options)
    assert started.wait(30) == 1
    assert "error: OUTBOX_LANES" in site.output()
    assert "takes its place" not in site.output()


def test_a_module_that_does_not_load_is_said_once(site: Site) -> None:
    (site.folder / "shop.py").write_text("import nothing_of_the_kind")
    assert wide(site, "--processes", "3").wait(30) == 1
    assert site.output().count("error:") == 1


def test_strict_starts_nobody_where_there_is_danger(site: Site) -> None:
    site.redis.config_set("maxmemory-policy", "allkeys-lru")
    site.redis.config_set("maxmemory", "100mb")
    send(site, "credited")
    assert wide(site, "--processes", "2", "--strict").wait(60) == 78
    assert site.output().count("error: not started") == 1
    assert site.pending() <= 0


def test_a_process_that_never_gets_on_is_not_replaced_without_pause(site: Site) -> None:
    (site.folder / "shop.py").write_text(
        HANDLERS + "\nwallet.handler = lambda kind: os._exit(9)\n"  # as soon as anything is delivered
    )
    send(site, "credited")
    parent = wide(site, "--processes", "2")
    begun = time.monotonic()
    eventually(lambda: "takes its place in 0.4 s" in site.output(), 60)
    number = site.output().count("takes its place")
    assert number <= 20 + 10 * (time.monotonic() - begun)
    parent.terminate()
    parent.wait(30)


@pytest.mark.long
@pytest.mark.parametrize("options", [("--processes", "2"), ("--threads", "2")], ids=lambda options: options[0][2:])
def test_o_84_the_heartbeat_is_the_slowest_ones(site: Site, options: tuple[str, ...]) -> None:
    beat = site.folder / "beat"
    wide(site, *options, CONSUMER_HEARTBEAT_FILE=str(beat))
    eventually(beat.exists)

    def age() -> float:
        return time.time() - beat.stat().st_mtime

    eventually(lambda: age() < 1.5)
    (event,) = send(site, "hang")
    eventually(lambda: starts(site)[event])
    eventually(lambda: age() > 4, 20)
    Path(site.folder / "go").touch()
    eventually(lambda: age() < 1.5)


@pytest.mark.long
def test_as_process_1_of_a_container_it_reaps_orphans(site: Site) -> None:
    (site.folder / "shop.py").write_text(HANDLERS + ORPHAN)
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespaces of its own here")
    process = wide(site, "--processes", "2", before=alone)
    ids = send(site, *["orphan"] * 5)
    eventually(lambda: effects(site) == Counter(ids), 30, site.output()[-2000:])
    (first,) = children(process)
    eventually(lambda: all(not gone(pid) for pid in _below(first)))
    os.kill(first, signal.SIGTERM)
    assert process.wait(30) == 0


def _below(pid: int) -> list[int]:
    return [int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
