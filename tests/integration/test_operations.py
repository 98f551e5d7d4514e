"""Status and drop-group on real servers, as figures and as commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox import operations
from outbox.embedded import ValkeyServer
from outbox.errors import SettingsError, TransportError
from outbox.operations import StreamStatus, drop_group, opened, status
from outbox.replay import Selection, replay
from outbox.transport import StreamTransport
from outbox.transport.base import StreamState, side_stream
from tests.faults.chaos import TOPIC, Bench, drain
from tests.waiting import eventually

GROUP = "wallet"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def command(bench: Bench, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    } | environment  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "outbox", *arguments],
        cwd=ROOT,
        env=os.environ | addresses,
        capture_output=True,
        text=True,
    )


def look(bench: Bench) -> None:
    """A relay that publishes and writes down how far the groups are."""
    relay = bench.relay(batch_rows=10, trim_seconds=0.001)
    drain(relay)
    drain(relay)
    relay.run_once()
    relay.close()


def test_status_of_an_outbox_that_no_relay_has_seen(bench: Bench) -> None:
    bench.write(3)
    bench.write(2, topic="other")
    found = status(bench.settings())
    assert (found.relays, found.epoch, found.batch, found.streams) == (0, 1, 0, [])
    assert {topic: count for topic, (count, _) in found.unsealed.items()} == {TOPIC: 3, "other": 2}
    assert all(0 <= age < 60 for _, age in found.unsealed.values())


def test_status_tells_the_truth_about_a_group(bench: Bench) -> None:
    transport = bench.transport()
    transport.open(GROUP, [TOPIC])
    bench.write(35)
    look(bench)
    read = transport.read(GROUP, "one", [TOPIC], 17, 0.01)
    transport.ack(GROUP, read[:12])
    look(bench)
    bench.write(4)
    bench.db.execute("UPDATE public.outbox_batch SET sealed_at = sealed_at - make_interval(hours => (5 - seq)::int)")
    found = status(bench.settings())
    assert found.unsealed[TOPIC][0] == 4
    (stream,) = found.streams
    (group,) = stream.groups
    assert 3 * 3600 <= (group.unacknowledged_seconds or 0) < 3 * 3600 + 60, "of the second batch"
    assert (stream.batch, stream.published_batch, stream.unpublished, stream.paused) == (4, 4, 0, None)
    assert (group.unacknowledged, group.undelivered, group.pending) == (25, 18, 5)
    assert (group.acked_batch, group.there) == (1, True)
    assert 0 <= (group.oldest_pending_seconds or -1) < 60
    assert group.idle_seconds is not None


def test_status_without_redis_says_what_postgresql_knows(bench: Bench) -> None:
    bench.transport().open(GROUP, [TOPIC])
    bench.write(25)
    look(bench)
    bench.write(4)
    found = status(bench.settings(redis_url="redis://127.0.0.1:1/0"))
    (stream,) = found.streams
    assert (found.unsealed[TOPIC][0], found.memory_share, stream.batch) == (4, None, 3)
    assert "127.0.0.1:1" in (stream.error or "")
    assert found.redis_error == stream.error
    assert (stream.published_batch, stream.unpublished) == (None, None), "it is not said that nothing is there"
    assert [(group.name, group.unacknowledged, group.there) for group in stream.groups] == [(GROUP, 25, None)]
    shown = command(bench, "status", REDIS_URL="redis://127.0.0.1:1/0")
    assert shown.returncode == 0, shown.stderr
    assert "REDIS DOES NOT ANSWER (Redis: " in shown.stdout
    assert f"stream {TOPIC}  batch ? of 3" in shown.stdout
    assert re.search(
        rf"group {GROUP}: 25 not acknowledged \(oldest \d+\.\d s\), \? undelivered, \? pending", shown.stdout
    )
    assert "NOT IN REDIS" not in shown.stdout


def test_status_counts_dead_letters_where_the_consumers_tables_are_here(bench: Bench) -> None:
    for name in (GROUP, "other"):
        bench.transport().open(name, [TOPIC])
    bench.write(1)
    look(bench)

    def dead(schema: str = "public") -> dict[str, int | None]:
        ((*groups,),) = (stream.groups for stream in status(bench.settings(), schema).streams)
        return {group.name: group.dead for group in groups}

    assert dead() == {GROUP: 0, "other": 0}
    bench.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, reason, error, fields) "
        "SELECT %s, %s, i || '-0', 'undecodable', '', '{}' FROM generate_series(1, 3) i",
        (GROUP, TOPIC),
    )
    assert dead() == {GROUP: 3, "other": 0}
    bench.db.execute(
        "INSERT INTO public.message_failures (consumer, stream, stream_id, topic, fields, reason) "
        "SELECT 'other', %s, i || '-0', 't', '{}', 'failed' FROM generate_series(1, 2) i",
        (TOPIC,),
    )
    ((*groups,),) = (stream.groups for stream in status(bench.settings()).streams)
    assert {group.name: (group.waiting, group.dead) for group in groups} == {GROUP: (0, 3), "other": (2, 0)}
    shown = command(bench, "status").stdout
    assert re.search(
        r"group other: .* ago, 2 wait for another try  last seen|group other: .* ago, 2 wait for another try$",
        shown,
        re.M,
    )
    assert re.search(rf"group {GROUP}: .* ago, 3 dead letters", shown)
    assert dead("elsewhere") == {GROUP: None, "other": None}


def test_status_shows_what_was_published_again_for_one_group_alone(bench: Bench) -> None:
    transport, side = bench.transport(), side_stream(TOPIC, GROUP)
    transport.open(GROUP, [TOPIC])
    bench.write(25)
    look(bench)
    transport.ack(GROUP, transport.read(GROUP, "one", [TOPIC], 25, 0.01))

    def seen(**options: Any) -> list[tuple[Any, ...]]:
        sides = status(bench.settings(**options)).side_streams
        return [(s.stream, s.group, s.entries, s.undelivered, s.pending, s.dead) for s in sides]

    assert seen() == []
    with opened(bench.settings()) as (store, connection, to):
        steps = replay(store, connection, to, bench.settings(), Selection(), consumer=GROUP, events_per_second=10)
        assert [step.events for step in steps] == [10, 20, 25]
    assert seen() == [(side, GROUP, 25, 25, 0, 0)], "its consumers have not come yet"
    transport.open(GROUP, [side])
    assert seen() == [(side, GROUP, 25, 25, 0, 0)]
    read = transport.read(GROUP, "one", [side], 12, 0.01)
    assert seen() == [(side, GROUP, 25, 13, 12, 0)]
    transport.ack(GROUP, read)
    bench.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, reason, error, fields) VALUES (%s, %s, '1-0', 'x', '', '{}')",
        (GROUP, side),
    )
    assert seen() == [(side, GROUP, 25, 13, 0, 1)]
    assert (
        f"stream {side}  for group {GROUP} alone: 25 entries, 13 undelivered, 0 pending"
        in command(bench, "status").stdout
    )
    assert seen(redis_url="redis://127.0.0.1:1/0") == [(side, GROUP, None, None, 0, 1)]
    transport.ack(GROUP, transport.read(GROUP, "one", [side], 25, 0.01))
    transport.inspect(side, keep_seconds=0)
    assert seen() == [(side, GROUP, 0, 0, 0, 1)], "what was put aside stays"


def test_status_after_a_strangers_deletion_where_the_servers_lag_is_null(bench: Bench) -> None:
    transport = bench.transport()
    transport.open(GROUP, [TOPIC])
    bench.write(30)
    look(bench)
    bench.redis.xdel(bench.key(), bench.redis.xrange(bench.key())[20][0])
    transport.ack(GROUP, transport.read(GROUP, "one", [TOPIC], 10, 0.01))
    assert bench.redis.xinfo_groups(bench.key())[0]["lag"] is None
    ((group,),) = (stream.groups for stream in status(bench.settings()).streams)
    assert group.undelivered == 20, "of which one has to come again"
    look(bench)
    assert len(transport.read(GROUP, "one", [TOPIC], 19, 0.01)) == 19
    ((group,),) = (stream.groups for stream in status(bench.settings()).streams)
    assert group.undelivered == 30, "everything once more, since nothing was written down as acknowledged"


def test_status_of_lost_and_unusable_streams(bench: Bench) -> None:
    bench.write(5)
    bench.write(2, topic="other")
    look(bench)
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")
    bench.redis.delete(bench.key("other"))
    bench.redis.set(bench.key("other"), "x")
    accounts, other = status(bench.settings()).streams
    assert (accounts.published_batch, accounts.unpublished, accounts.entries) == (None, 5, 0)
    assert accounts.unpublished_seconds is not None
    assert other.error
    assert "WRONGTYPE" in other.error


def test_status_takes_as_long_as_there_are_streams(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not take long is one answer of PostgreSQL, not all of them, nor what Redis is asked in between."""
    for n in range(5):
        bench.write(1, topic=f"topic{n}")
    drain(bench.relay())
    inspect = StreamTransport.inspect

    def slow(*arguments: Any, **options: Any) -> StreamState:
        time.sleep(0.25)  # its length, not a wait for anything
        return inspect(*arguments, **options)

    monkeypatch.setattr(StreamTransport, "inspect", slow)
    monkeypatch.setattr(operations, "_DATABASE_SECONDS", 1.0)
    assert [stream.unpublished for stream in status(bench.settings()).streams] == [0] * 5


# --- what is paused ------------------------------------------------------------------------------------------------


def shown(bench: Bench) -> StreamStatus:
    """As a command sees the stream that knows nothing of the relay's settings."""
    return status(bench.settings()).streams[0]


def paused(bench: Bench) -> str | None:
    return shown(bench).paused


def taken(bench: Bench, count: int) -> None:
    """The group reads and acknowledges so many."""
    transport = bench.transport()
    while count:
        found = transport.read(GROUP, "one", [TOPIC], count, 0.01)
        transport.ack(GROUP, found)
        count -= len(found)


def unacknowledged(bench: Bench) -> int:
    """Events that are there and that the group has not acknowledged, as far as it is written down."""
    found = shown(bench)
    return found.groups[0].unacknowledged - (found.unpublished or 0)


def published(bench: Bench) -> int:
    """Entries ever added to the stream."""
    return int(bench.redis.xinfo_stream(bench.key())["entries-added"])


def looked_at(bench: Bench) -> None:
    """A relay has looked at the streams' groups at least twice since."""

    def looks() -> int:
        stats = bench.redis.info("commandstats")
        return int(stats.get("cmdstat_xinfo|groups", {"calls": 0})["calls"])

    before = looks()
    eventually(lambda: looks() >= before + 4, 30)


LONG: dict[str, Any] = {"batch_rows": 5, "max_stream_length": 100, "trim_seconds": 0.001, "check_seconds": 0.001}


@pytest.mark.long
def test_status_says_paused_for_as_long_as_the_relay_is(bench: Bench) -> None:
    """A relay in a process of its own, which is killed meanwhile; the next one goes on from where it was."""
    bench.transport().open(GROUP, [TOPIC])
    bench.write(200)
    limits = {"OUTBOX_MAX_STREAM_LENGTH": "100", "OUTBOX_BATCH_ROWS": "5", "OUTBOX_TRIM_SECONDS": "0.05"}
    first = bench.start(**limits)
    eventually(lambda: bench.length() > 100 and paused(bench) == "length", 30)
    assert shown(bench).unpublished
    taken(bench, bench.length() - 95)
    eventually(lambda: unacknowledged(bench) <= 95, 30)
    written = bench.one("SELECT since FROM public.outbox_pause")
    first.kill()
    first.wait()
    bench.write(1, topic="other")
    bench.start(**limits)
    eventually(lambda: bench.length("other") == 1, 30)
    looked_at(bench)
    assert (paused(bench), unacknowledged(bench)) == ("length", 95), "between nine tenths and all of the limit"
    assert bench.one("SELECT since FROM public.outbox_pause") == written
    assert (shown(bench).paused_seconds or 0) > 0
    assert "PAUSED (length) for " in command(bench, "status").stdout
    for _ in range(6):
        taken(bench, bench.redis.xinfo_groups(bench.key())[0]["lag"] or 0)
        looked_at(bench)
    eventually(lambda: paused(bench) is None, 30)


def test_a_relay_goes_on_from_the_pause_that_another_one_wrote_down(bench: Bench) -> None:
    """Also a stand-by that had looked before; and the first one where the other says that it goes on."""
    bench.transport().open(GROUP, [TOPIC])
    bench.write(5)
    stand_by, relay = bench.relay(**LONG), bench.relay(**LONG)
    drain(stand_by)
    bench.write(195)
    drain(relay)
    relay.run_once()
    assert paused(bench) == "length"
    taken(bench, bench.length() - 95)
    for each in (relay, stand_by, bench.relay(**LONG)):
        before = published(bench)
        for _ in range(3):
            each.run_once()
        assert (published(bench), paused(bench)) == (before, "length"), "at 95 of 100 none goes on"
    taken(bench, 95)
    while paused(bench):
        stand_by.run_once()
    relay.run_once()
    assert relay._streams[TOPIC].paused is None, "it has seen that the other goes on"


def test_a_pause_that_cannot_be_written_down_is_a_pause_all_the_same(bench: Bench) -> None:
    bench.transport().open(GROUP, [TOPIC])
    bench.write(200)
    relay = bench.relay(**LONG)
    bench.db.execute("ALTER TABLE public.outbox_pause ADD CONSTRAINT full_disk CHECK (reason = '')")
    with pytest.raises(psycopg.errors.CheckViolation):
        drain(relay)
    before = published(bench)
    for _ in range(5):
        with pytest.raises(psycopg.errors.CheckViolation):
            drain(relay)
    assert published(bench) == before
    bench.db.execute("ALTER TABLE public.outbox_pause DROP CONSTRAINT full_disk")
    drain(relay)
    assert (paused(bench), published(bench)) == ("length", before)
    taken(bench, before)
    drain(relay)
    drain(relay)
    assert published(bench) > before


def test_status_says_paused_while_memory_is_short(database_url: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey(settings={"maxmemory": "64mb", "maxmemory-policy": "noeviction"})
    with Bench(database_url, server.url) as bench:
        fillers: list[str] = []

        def fill(share: float) -> None:
            """Somebody's keys fill the memory up to so much of it."""
            rest = int(share * (64 << 20)) - int(bench.redis.info("memory")["used_memory"])
            for _ in range(abs(rest) >> 20):
                if rest > 0:
                    bench.redis.setrange(f"filler {len(fillers)}", (1 << 20) - 1, b"x")
                    fillers.append(f"filler {len(fillers)}")
                else:
                    bench.redis.delete(fillers.pop())

        def looked_again() -> None:
            """The relay has looked at the memory since."""
            looks = bench.redis.info("commandstats")["cmdstat_info"]["calls"]
            eventually(lambda: bench.redis.info("commandstats")["cmdstat_info"]["calls"] >= looks + 12, 30)

        bench.write(1)
        bench.start(OUTBOX_MAX_MEMORY_SHARE="0.5", OUTBOX_CHECK_SECONDS="0.05")
        eventually(lambda: bench.length() == 1, 30)
        assert paused(bench) is None
        fill(0.55)
        eventually(lambda: paused(bench) == "memory", 30)
        bench.write(1)
        fill(0.475)
        looked_again()
        assert (paused(bench), bench.length()) == ("memory", 1), "it waits for a twentieth less"
        found = status(bench.settings())
        assert 0.45 < (found.memory_share or 0) < 0.5
        fill(0.3)
        eventually(lambda: (paused(bench), bench.length()) == (None, 2), 30)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_is_one_line(bench: Bench) -> None:
    with Path("/dev/full").open("w") as there:
        full = subprocess.run(
            [sys.executable, "-m", "outbox", "status"],
            cwd=ROOT, env=os.environ | {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url},
            stdout=there, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (full.returncode, full.stderr) == (1, "error: [Errno 28] No space left on device\n")


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_dead_group_is_named_and_goes_by_command_only(bench: Bench) -> None:
    transport = bench.transport()
    for name in (GROUP, "dead"):
        transport.open(name, [TOPIC])
    bench.write(5)
    look(bench)
    transport.ack(GROUP, transport.read(GROUP, "one", [TOPIC], 10, 0.01))
    bench.redis.xgroup_destroy(bench.key(), "dead")
    look(bench)
    shown = command(bench, "status")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"group dead: 5 not acknowledged \(oldest .*\), \? undelivered", shown.stdout)
    assert "NOT IN REDIS" in shown.stdout
    asked = command(bench, "drop-group", "dead")
    assert asked.returncode != 0, "nobody said yes"
    dropped = command(bench, "drop-group", "dead", "--yes")
    assert (dropped.returncode, dropped.stdout) == (0, f"group dead of stream {TOPIC} is forgotten\n")
    figures = json.loads(command(bench, "status", "--json").stdout)
    assert [group["name"] for group in figures["streams"][0]["groups"]] == [GROUP]
    assert command(bench, "drop-group", "dead", "--yes").returncode == 1
    with pytest.raises(SettingsError, match="there is no group 'dead'"):
        drop_group(bench.settings(), "dead")


def test_a_group_that_only_redis_knows_goes_too(bench: Bench) -> None:
    """No relay has seen it yet, or its name is none that a relay writes down: it holds back trimming all the same."""
    bench.write(5)
    look(bench)
    for name in ("new", "odd\nname"):
        bench.transport().open(name, [TOPIC])
        assert f"group {name if name.isprintable() else repr(name)}: 5 not" in command(bench, "status").stdout
        assert drop_group(bench.settings(), name) == [TOPIC]
    assert bench.transport().inspect(TOPIC).groups == []


def test_a_group_of_a_consumer_that_lives_is_not_dropped(bench: Bench) -> None:
    """The wrong name, perhaps: it would be made anew at once, and never get what it had not acknowledged."""
    transport = bench.transport()
    transport.open(GROUP, [TOPIC])
    bench.write(5)
    look(bench)
    transport.read(GROUP, "one", [TOPIC], 2, 0.01)
    with pytest.raises(SettingsError, match="'wallet' asked for events of stream accounts 0 s ago: it is not gone"):
        drop_group(bench.settings(), GROUP)
    refused = command(bench, "drop-group", GROUP, "--yes")
    assert (refused.returncode, refused.stdout) == (1, "")
    bench.db.execute("DELETE FROM public.outbox_stream")  # as retention does where a topic is idle
    with pytest.raises(SettingsError, match="it is not gone"):
        drop_group(bench.settings(), GROUP)
    assert [group.name for group in transport.inspect(TOPIC).groups] == [GROUP]
    assert command(bench, "drop-group", GROUP, "--yes", "--force").returncode == 0
    assert transport.inspect(TOPIC).groups == []


def test_a_group_that_redis_does_not_drop_is_not_said_to_be_forgotten(
    database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    with Bench(database_url, own_valkey().url) as bench:
        bench.transport().open(GROUP, [TOPIC])
        bench.write(5)
        look(bench)
        bench.redis.execute_command("ACL", "SETUSER", "few", "on", ">x", "~*", "+@all", "-xgroup|destroy")
        few = bench.redis_url.replace("redis://", "redis://few:x@")
        with pytest.raises(TransportError, match="no permissions"):
            drop_group(bench.settings(redis_url=few), GROUP)
        assert bench.one("SELECT count(*) FROM public.outbox_group") == 1
        assert drop_group(bench.settings(), GROUP) == [TOPIC]
