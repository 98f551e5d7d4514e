"""Status and drop-group on real servers, as figures and as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.errors import SettingsError
from outbox.operations import drop_group, status
from tests.faults.chaos import TOPIC, Bench, drain

GROUP = "wallet"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


def command(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    addresses = {
        "DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url, "OUTBOX_KEY_PREFIX": bench.prefix
    }  # fmt: skip
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
    found = status(bench.settings())
    assert found.unsealed[TOPIC][0] == 4
    (stream,) = found.streams
    (group,) = stream.groups
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
    assert [(group.name, group.unacknowledged, group.there) for group in stream.groups] == [(GROUP, 25, False)]


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
    assert dead("elsewhere") == {GROUP: None, "other": None}


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


def test_status_says_what_is_paused_and_why(bench: Bench) -> None:
    bench.write(50)
    look(bench)
    assert status(bench.settings(max_stream_length=10)).streams[0].paused == "length"
    assert status(bench.settings(max_stream_length=50)).streams[0].paused is None


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
    assert "group dead: 5 not acknowledged, ? undelivered" in shown.stdout
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
