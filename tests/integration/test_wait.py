"""OUTBOX_WAIT_…: a batch is at replicas, or on disk, before the next is published; on a real primary with a replica."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from outbox.embedded import ValkeyServer
from outbox.errors import NotYetSafe, SettingsError, TransportUnavailable
from outbox.telemetry import WaitedInVain
from outbox.transport import StreamTransport, Wait
from tests.faults.chaos import ROOT, Bench, drain
from tests.faults.proxy import port_of
from tests.waiting import eventually

pytestmark = pytest.mark.long

ALL = ["valkey9", "redis8", "redis7"]
KNOWS_WAITAOF = ["valkey9", "redis8"]
Start = Callable[..., ValkeyServer]


@pytest.fixture(params=ALL)
def pair(request: pytest.FixtureRequest, own_valkey: Start) -> tuple[ValkeyServer, ValkeyServer]:
    """A primary and a replica that has caught up."""
    return _pair(own_valkey, request.param)


def _pair(own_valkey: Start, name: str, primary: Any = None, replica: Any = None) -> tuple[ValkeyServer, ValkeyServer]:
    quick = {"repl-diskless-sync-delay": "0"}
    first = own_valkey(name, settings=quick | (primary or {}))
    second = own_valkey(name, settings=quick | {"replicaof": f"127.0.0.1 {port_of(first.url)}"} | (replica or {}))
    with redis.Redis.from_url(second.url) as client:
        eventually(lambda: client.info("replication")["master_link_status"] == "up", 30)
    with redis.Redis.from_url(first.url) as client:
        eventually(lambda: client.info("replication")["slave0"]["state"] == "online", 30)
    return first, second


@pytest.fixture
def bench(database_url: str, pair: tuple[ValkeyServer, ValkeyServer]) -> Iterator[Bench]:
    with Bench(database_url, pair[0].url) as made:
        yield made


def test_a_batch_goes_out_when_the_one_before_is_at_the_replica(
    bench: Bench, pair: tuple[ValkeyServer, ValkeyServer]
) -> None:
    _, replica = pair
    seen: list[Any] = []
    relay = bench.relay(wait_replicas=1, wait_timeout_seconds=0.3, check_seconds=0.001, observer=seen.append)
    ids = bench.write(2)
    eventually(lambda: drain(relay), ignoring=(NotYetSafe,))  # the replica may only just be there
    seen.clear()
    replica.pause()
    ids += bench.write(2)
    with pytest.raises(NotYetSafe, match=r"nothing more is before: replicas: 0 of 1 within 0\.3 s"):
        relay.run_once()
    assert bench.ids() == ids, "it is in the stream all the same"
    later = bench.write(2)
    for _ in range(2):
        with pytest.raises(NotYetSafe):
            relay.run_once()
    another = bench.relay(wait_replicas=1, wait_timeout_seconds=0.3)
    with pytest.raises(NotYetSafe):  # a new connection has written nothing that it could wait for
        another.run_once()
    assert bench.ids() == ids, "nothing more is published, nor the same again"
    assert [found.code for found in seen if isinstance(found, WaitedInVain)] == ["WAIT"] * 3
    replica.resume()
    eventually(lambda: drain(relay), ignoring=(TransportUnavailable,))
    assert bench.ids() == ids + later
    with redis.Redis.from_url(replica.url) as client:
        assert client.xlen(bench.key()) == len(ids + later)


def test_without_it_nobody_waits(bench: Bench, pair: tuple[ValkeyServer, ValkeyServer]) -> None:
    pair[1].pause()
    bench.write(2)
    drain(bench.relay())
    assert bench.length() == 2


def test_the_relay_says_so_and_goes_on_within_seconds(
    bench: Bench, pair: tuple[ValkeyServer, ValkeyServer], tmp_path: Path
) -> None:
    _, replica = pair
    path = tmp_path / "log"
    environment = {"OUTBOX_WAIT_REPLICAS": "1", "OUTBOX_WAIT_TIMEOUT_SECONDS": "0.5"}
    ids = bench.write(1)
    eventually(lambda: drain(bench.relay(wait_replicas=1)), ignoring=(NotYetSafe,))
    process = _relay(bench, path, **environment)
    eventually(lambda: "relay started" in path.read_text())
    ids += bench.write(1)
    eventually(lambda: bench.ids() == ids, 20)
    time.sleep(0.5)  # the wait for that one is over
    told, before = (
        "relay waits, try 1: Redis: what was published is not safe yet",
        path.read_text().count("not safe yet"),
    )
    replica.pause()
    ids += bench.write(1)
    eventually(lambda: path.read_text().count(told) > before)
    later = bench.write(1)
    time.sleep(2)  # the length of the outage: several tries
    assert bench.ids() == ids
    replica.resume()
    begun = time.monotonic()
    eventually(lambda: bench.ids() == ids + later, 20)
    assert time.monotonic() - begun < 5
    eventually(lambda: "relay goes on after" in path.read_text())
    process.terminate()
    assert process.wait(10) == 0
    assert path.read_text().count("not safe yet") == before + 1, "one line an outage"


def _relay(bench: Bench, path: Path, **environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox", "relay"], cwd=ROOT,
        env=os.environ | {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url} | environment,
        stdout=path.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    bench.processes.append(process)
    return process


# --- disks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KNOWS_WAITAOF)
def test_a_batch_goes_out_when_the_one_before_is_on_disk(database_url: str, own_valkey: Start, name: str) -> None:
    server = own_valkey(name, settings={"appendonly": "yes", "appendfsync": "everysec"})
    with Bench(database_url, server.url) as bench:
        ids = bench.write(3)
        relay = bench.relay(wait_aof="local", wait_timeout_seconds=5)
        drain(relay)
        server.kill()
        server.start()
        assert bench.ids() == ids, "the server had it on its disk"
        bench.redis.config_set("appendonly", "no")
        bench.write(1)
        for _ in range(2):
            with pytest.raises(NotYetSafe, match="WAITAOF is refused: .*appendonly"):
                eventually(relay.run_once, ignoring=(ConnectionError,))
            # The connection of before the kill is found dead first; and then the appending.
        bench.redis.config_set("appendonly", "yes")
        eventually(lambda: drain(relay), ignoring=(TransportUnavailable,))
        assert bench.length() == 4


@pytest.mark.parametrize("name", KNOWS_WAITAOF)
def test_disks_of_replicas_count_where_they_are_asked_for(database_url: str, own_valkey: Start, name: str) -> None:
    durable = {"appendonly": "yes", "appendfsync": "always"}
    for replica, safe in ((durable, True), ({"appendonly": "no"}, False)):
        with Bench(database_url, _pair(own_valkey, name, primary=durable, replica=replica)[0].url) as bench:
            bench.write(1)
            drain(bench.relay(wait_aof="local", wait_replicas=1, wait_timeout_seconds=5))
            relay = bench.relay(wait_aof="all", wait_replicas=1, wait_timeout_seconds=5 if safe else 0.3)
            if safe:
                drain(relay)
                continue
            with pytest.raises(NotYetSafe, match=r"server's disk: 1 of 1, replicas' disks: 0 of 1 within 0\.3 s"):
                relay.run_once()


def test_a_server_that_knows_no_waitaof_is_refused_at_the_start(
    database_url: str, own_valkey: Start, tmp_path: Path
) -> None:
    server = own_valkey("redis7")
    with Bench(database_url, server.url) as bench:
        if not str(bench.redis.info("server")["redis_version"]).startswith("7.0"):
            pytest.skip("this Redis 7 knows WAITAOF")
        with pytest.raises(SettingsError, match=r"OUTBOX_WAIT_AOF: is local, but this server does not know WAITAOF"):
            bench.relay(wait_aof="local").run_once()
        bench.write(1)
        path = tmp_path / "log"
        assert _relay(bench, path, OUTBOX_WAIT_AOF="local").wait(20) == 1
        assert "error: OUTBOX_WAIT_AOF: is local, but this server does not know WAITAOF" in path.read_text()
        assert bench.length() == 0


def test_a_server_that_takes_no_writes_is_not_waited_for(bench: Bench, pair: tuple[ValkeyServer, ValkeyServer]) -> None:
    """The relay must be able to trim at full memory, and nothing is published then."""
    bench.write(1)
    drain(bench.relay())
    pair[1].pause()
    bench.redis.config_set("maxmemory", 1)
    with closing(StreamTransport.from_url(bench.redis_url, wait=Wait(replicas=1, timeout_seconds=0.1))) as transport:
        transport.confirm(["accounts"])
        bench.redis.config_set("maxmemory", 0)
        with pytest.raises(NotYetSafe):
            transport.confirm(["accounts"])
