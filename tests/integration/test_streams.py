"""What the relay does about the streams' groups: trimming, back-pressure, and repair no larger than needed."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from consumer import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, InvalidEvent, SettingsError, Writer
from outbox import schema as schemas
from outbox.embedded import ValkeyServer
from outbox.operations import drop_group, opened, status
from outbox.relay import Counts
from outbox.replay import Selection, replay
from outbox.store import Store
from outbox.telemetry import Measurement, StreamPaused, Trimmed
from outbox.transport import StreamTransport
from tests.faults.chaos import TOPIC, Bench, drain
from tests.waiting import eventually

GROUP = "wallet"


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        yield made


class Group:
    """A consumer group that reads and acknowledges as it is told."""

    def __init__(self, bench: Bench, name: str = GROUP) -> None:
        self.name, self.transport = name, bench.transport()
        self.transport.open(name, [TOPIC])

    def take(self, count: int = 1000) -> list[str]:
        """Read and acknowledge; returns the ids."""
        found = self.transport.read(self.name, "one", [TOPIC], count, 0.01)
        self.transport.ack(self.name, found)
        return [delivery.fields[b"id"].decode() for delivery in found]


def acked(bench: Bench, name: str = GROUP) -> int | None:
    found: int | None = bench.one("SELECT acked FROM public.outbox_group WHERE name = %s", name)
    return found


def looked(bench: Bench, **options: object) -> Callable[[], Counts]:
    """A relay that looks after its streams in every round."""
    relay = bench.relay(trim_seconds=0.001, check_seconds=0.001, **options)

    def round_of_it() -> Counts:
        time.sleep(0.002)  # the two looks are due
        return drain(relay)

    return round_of_it


def test_what_a_group_has_acknowledged_is_written_down(bench: Bench) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    bench.write(6)
    relay(), relay()
    assert acked(bench) == 0
    group.take(3)
    relay()
    assert acked(bench) == 1
    group.take()
    relay()
    assert acked(bench) == 3


def test_a_stream_that_was_lost_is_published_again_from_the_slowest_group_on(bench: Bench) -> None:
    relay, group, slow = looked(bench, batch_rows=2), Group(bench), Group(bench, "slow")
    ids = bench.write(10)
    relay()
    assert (group.take(), slow.take(5)) == (ids, ids[:5])
    relay()
    assert (acked(bench), acked(bench, "slow")) == (5, 2)
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")
    assert relay() == Counts(repaired=6)
    assert bench.ids() == ids[4:]
    assert (acked(bench), acked(bench, "slow")) == (5, 2), "what was acknowledged stays so"
    assert relay() == Counts()


def test_a_stream_that_nobody_needs_any_more_is_not_published_again(bench: Bench) -> None:
    relay, group = looked(bench), Group(bench)
    bench.write(5)
    relay()
    group.take()
    relay()
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")
    assert relay() == Counts()
    assert bench.length() == 0
    (new,) = bench.write(1)
    assert relay().published == 1
    assert bench.ids() == [new]
    assert relay() == Counts()


def test_a_new_relay_knows_the_groups_of_the_last_one(bench: Bench) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(6)
    relay()
    group.take(4)
    relay()
    bench.redis.delete(bench.key(), f"{bench.key()}:relay")
    assert drain(bench.relay()).repaired == 2
    assert bench.ids() == ids[4:]


def test_o_26_streams_are_trimmed_of_what_all_groups_have_acknowledged(bench: Bench) -> None:
    seen: list[Measurement] = []
    relay = looked(bench, batch_rows=5, stream_keep_seconds=0, observer=seen.append)
    group, slow = Group(bench), Group(bench, "slow")
    ids = bench.write(100)
    relay()
    group.take()
    slow.take(40)
    relay()
    assert bench.ids()[-60:] == ids[40:]
    assert bench.length() <= 61
    assert sum(m.entries for m in seen if isinstance(m, Trimmed)) == 100 - bench.length()
    slow.take()
    relay()
    assert bench.length() <= 1
    assert bench.redis.xinfo_stream(bench.key())["entries-added"] == 100
    assert relay() == Counts(), "our own trimming is not taken for a loss"


@pytest.mark.long
def test_o_26_a_stopped_consumer_keeps_its_twenty_thousand_entries(bench: Bench) -> None:
    """Everything that others have acknowledged is to go at once; status says who holds it back. MAXLEN is never asked for."""
    relay, group = looked(bench, stream_keep_seconds=0), Group(bench)
    mailer = Consumer("mailer", topics=[TOPIC])
    mailer.on("credited")(lambda event, session: None)

    def work() -> None:
        settings = ConsumerSettings(
            database_url=bench.database_url, redis_url=bench.redis_url, key_prefix=bench.prefix, block_seconds=0.05
        )
        worker = Worker(mailer, settings)
        while worker.run_once():
            pass
        worker.close()

    work()  # its group is there
    with bench.redis.monitor() as monitor:
        for _ in range(20):
            bench.write(1000)
        taken: list[str] = []
        eventually(lambda: (relay(), taken.extend(group.take(5000)), len(taken) >= 20_000)[2], 60)  # type: ignore[func-returns-value]
        relay()
        bench.redis.echo(last := f"{bench.prefix}last")
        commands = []
        for command in monitor.listen():
            commands.append(command["command"])
            if last in commands[-1]:
                break
    added = [command for command in commands if command.startswith("XADD") and bench.key() in command]
    assert len(added) == 20_000
    assert not any("MAXLEN" in command for command in added)
    assert any(command.startswith("XTRIM") and bench.key() in command for command in commands)
    assert bench.length() == 20_000
    held = {found.name: found for found in status(bench.settings()).streams[0].groups}
    assert (held["mailer"].unacknowledged, held["mailer"].undelivered) == (20_000, 20_000)
    assert held[GROUP].unacknowledged == 0
    work()
    assert bench.one("SELECT count(*) FROM public.processed_messages WHERE consumer = 'mailer'") == 20_000
    relay()
    assert bench.length() <= 1


def test_o_26_a_group_that_redis_forgot_keeps_its_entries_untrimmed(bench: Bench) -> None:
    relay, group, lost = looked(bench, stream_keep_seconds=0), Group(bench), Group(bench, "lost")
    ids = bench.write(10)
    relay()
    group.take()
    bench.redis.xgroup_destroy(bench.key(), lost.name)
    relay()
    assert bench.ids() == ids


@pytest.mark.parametrize("how", ["XDEL", "XTRIM"])
def test_entries_that_a_stranger_deletes_before_they_are_delivered_come_again(bench: Bench, how: str) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(10)
    relay()
    assert group.take(4) == ids[:4]
    relay()
    if how == "XDEL":
        bench.redis.xdel(bench.key(), *[entry for entry, _ in bench.redis.xrange(bench.key())][4:7])
    else:
        bench.redis.xtrim(bench.key(), maxlen=2, approximate=False)
    assert relay() == Counts(repaired=6)
    assert set(group.take()) == set(ids[4:])
    relay()
    assert acked(bench) == 5
    assert relay() == Counts(), "repaired once"


def test_deleting_what_everybody_has_acknowledged_publishes_nothing(bench: Bench) -> None:
    relay, group = looked(bench), Group(bench)
    bench.write(5)
    relay()
    group.take()
    relay()
    bench.redis.xtrim(bench.key(), maxlen=0, approximate=False)
    assert relay() == Counts()
    (new,) = bench.write(1)
    relay()
    assert group.take() == [new]
    relay()
    assert acked(bench) == 2


def test_a_long_stream_is_paused_and_goes_on_by_itself(bench: Bench) -> None:
    seen: list[Measurement] = []
    relay = looked(bench, batch_rows=10, max_stream_length=50, observer=seen.append)
    group = Group(bench)
    ids = bench.write(200)
    bench.write(3, topic="other")
    relay()
    assert 50 < bench.length() <= 70, "what is on its way when the limit is passed still goes out"
    assert bench.length("other") == 3, "the others are not held up"
    assert bench.one("SELECT sum(events) FROM public.outbox_batch") == 203
    assert [(m.stream, m.reason) for m in seen if isinstance(m, StreamPaused)] == [(TOPIC, "length")]
    assert relay().behind == 1
    took: list[str] = []
    eventually(lambda: (took.extend(group.take(30)), relay(), len(took) >= 200)[2])
    assert took == ids
    assert [m.reason for m in seen if isinstance(m, StreamPaused)][-1] is None
    assert relay() == Counts()


def test_o_53_full_memory_pauses_everything_and_frees_itself(
    database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(settings={"maxmemory": "30mb", "maxmemory-policy": "noeviction"})
    with Bench(database_url, server.url) as bench:
        seen: list[Measurement] = []
        relay = looked(bench, batch_rows=100, max_memory_share=0.5, stream_keep_seconds=0, observer=seen.append)
        group = Group(bench)
        ids = [event_id for _ in range(60) for event_id in bench.write(100, payload={"x": "x" * 3000})]
        relay()
        share = StreamTransport.from_url(server.url).memory_share()
        assert share is not None
        assert share < 0.8
        assert bench.length() < len(ids)
        assert StreamPaused(TOPIC, "memory") in seen
        took: list[str] = []
        eventually(lambda: (took.extend(group.take(500)), relay(), len(took) >= len(ids))[2], 30)
        assert took == ids
        assert relay() == Counts()


def test_a_stream_made_anew_by_its_consumer_is_published_again(bench: Bench) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(6)
    relay()
    bench.redis.delete(bench.key())
    group.transport.open(GROUP, [TOPIC])
    state = bench.relay(trim_seconds=0.001, check_seconds=60)
    state._load()  # the groups are looked at before the markers
    state._look_after_streams(Counts())
    assert acked(bench) == 0
    relay()
    assert group.take() == ids


def test_a_stream_whose_last_id_is_taken_goes_on_when_it_is_deleted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    relay, ids = looked(bench), bench.write(20)
    relay()
    assert len(bench.consume()) == 20
    relay()
    bench.redis.xadd(bench.key(), {"by": "a stranger"}, id="18446744073709551615-18446744073709551615")
    ids += bench.write(5)
    bench.write(5, topic="other")
    assert relay().behind == 1
    assert bench.length("other") == 5
    assert {r.action for r in caplog.records} == {"stream_failed"}  # type: ignore[attr-defined]
    assert "delete it (DEL)" in caplog.text
    bench.redis.delete(bench.key())
    relay()
    assert bench.consume() == Counter(dict.fromkeys(ids, 1))


def test_a_stand_by_that_finds_entries_missing_does_not_forget_them(bench: Bench) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(4)
    relay()
    behind = bench.relay(trim_seconds=0.001, check_seconds=60)
    behind.run_once()
    ids += bench.write(4)
    relay_alone = bench.relay(batch_rows=2, trim_seconds=3600)
    drain(relay_alone)
    bench.redis.xtrim(bench.key(), maxlen=0, approximate=False)
    behind._look_after_streams(Counts())  # it believes in an older marker
    drain(bench.relay())
    assert set(group.take()) == set(ids)


def test_entries_deleted_while_the_stream_is_paused_come_again_when_it_goes_on(
    database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    """Also where the server is so full that it refuses to count them."""
    server = own_valkey()
    with Bench(database_url, server.url) as bench:
        relay, group = looked(bench, batch_rows=2), Group(bench)
        ids = bench.write(10)
        relay()
        assert group.take(4) == ids[:4]
        bench.redis.config_set("maxmemory", 1)
        bench.redis.xdel(bench.key(), *[entry for entry, _ in bench.redis.xrange(bench.key())][4:7])
        for _ in range(3):
            assert relay().behind == 1
        assert group.take() == ids[7:]
        assert relay().behind == 1
        assert acked(bench) < 5, "three of them nobody has seen"
        bench.redis.config_set("maxmemory", 0)
        eventually(lambda: relay() == Counts())
        assert set(group.take()) >= set(ids[4:7])
        relay()
        assert acked(bench) == 5


# --- names ---------------------------------------------------------------------------------------------------------------

TOPICS = ["a", "a.processing", "a/delayed", "a-dead", "relay", "0", "a/0"]
SEPARATED = ["a:processing", "a:0", "a:@reports", "a:relay", "b{x}", "{a}", " ", "a b", "", "\n", "a\x00"]


@pytest.mark.parametrize("name", SEPARATED)
def test_o_90_names_that_could_be_taken_for_keys_of_ours_are_refused(bench: Bench, name: str) -> None:
    with pytest.raises(InvalidEvent, match="topic: must match"):
        Event(topic=name, type="t", payload=None)
    with pytest.raises(SettingsError, match="consumer name: must match"):
        Consumer(name, topics=["a"])
    with pytest.raises(SettingsError, match="topics: one must match"):
        Consumer("c", topics=[name])
    with pytest.raises(SettingsError, match="OUTBOX_LANES: a topic must match"):
        bench.settings(lanes={name: 2})


def test_o_90_streams_and_prefixes_with_separators_do_not_meet(bench: Bench, prefix: str) -> None:
    """Prefixes that begin alike, topics that look like lanes and markers of others: every count is exact."""
    prefixes, expected = [f"{prefix}t1", f"{prefix}t1:", f"{prefix}t1:a"], {}
    for number, own in enumerate(prefixes):
        schema, events = f"tenant{number}", Counter[str]()
        for branch in ("outbox", "consumer"):
            schemas.upgrade(bench.database_url, branch, schema=schema)  # type: ignore[arg-type]
        for place, topic in enumerate(TOPICS):
            events[topic] = 10 * number + place + 20
            batch = [Event(topic=topic, type="t", key=f"{n}", payload=n) for n in range(events[topic])]
            with bench.db.transaction():
                Writer(schema=schema).record(bench.db, *batch)
        drain(bench.relay(schema_name=schema, key_prefix=own, lanes={"a": 2}))
        expected[own] = events
    for number, (own, events) in enumerate(expected.items()):
        seen, reader = Counter[str](), Consumer("a/0", topics=TOPICS)
        reader.on("t")(lambda event, _session, seen=seen: seen.update([event.topic]))  # type: ignore[misc]
        settings = ConsumerSettings(
            database_url=bench.database_url, redis_url=bench.redis_url, key_prefix=own, lanes={"a": 2},
            schema_name=f"tenant{number}", block_seconds=0.01,
        )  # fmt: skip
        worker = Worker(reader, settings)
        while worker.run_once():
            pass
        worker.close()
        assert seen == events
        streams = ["{a:0}", "{a:1}", *(f"{{{topic}}}" for topic in TOPICS[1:])]
        side = [f"{{{topic}:@a/0}}" for topic in TOPICS]
        keys = {own + key for stream in streams for key in (stream, f"{stream}:relay")} | {own + key for key in side}
        found = {key.decode() for key in bench.redis.scan_iter(match=f"{own}{{*", count=1000)}
        assert found == keys
    everything = [key.decode() for key in bench.redis.scan_iter(match=f"*{prefix[:-1]}*", count=1000)]
    assert {key.count(prefix) for key in everything} == {1}
    assert len(everything) == 3 * (2 * 8 + 7)


@pytest.mark.parametrize(
    "groups", [(), (GROUP,), (GROUP, "new")], ids=["no group", "a new one", "a new one beside one that is done"]
)
def test_entries_trimmed_before_a_group_is_known_come_again(bench: Bench, groups: tuple[str, ...]) -> None:
    relay = looked(bench, batch_rows=2)
    ids = bench.write(6)
    relay()
    if len(groups) > 1:
        Group(bench).take()
        relay()
    relay_of_another_process = looked(bench, batch_rows=2)
    for name in groups[-1:]:
        Group(bench, name)
    bench.redis.xtrim(bench.key(), maxlen=1, approximate=False)
    relay_of_another_process()
    assert set(Group(bench, (groups or (GROUP,))[-1]).take()) == set(ids)


def test_a_replay_does_not_hide_that_entries_are_missing(bench: Bench) -> None:
    """What somebody does who has trimmed too much, before the relay has looked."""
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(10)
    relay()
    assert group.take(2) == ids[:2]
    relay()
    bench.redis.xtrim(bench.key(), maxlen=2, approximate=False)
    settings = bench.settings()
    with opened(settings) as (store, connection, transport):
        list(replay(store, connection, transport, settings, Selection(ids=(uuid.UUID(ids[0]),))))
    relay()
    assert set(group.take()) == {*ids} - {ids[1]}, "what is not acknowledged, and what was replayed"


@pytest.mark.parametrize("batch", ["700", "700:abcdef01", "3", "3:abcdef01"])
def test_an_entry_copied_from_another_installation_acknowledges_nothing(bench: Bench, batch: str) -> None:
    relay, group = looked(bench, batch_rows=2), Group(bench)
    ids = bench.write(2)
    relay()
    bench.redis.xadd(bench.key(), {"data": "1", "id": str(uuid.uuid4()), "type": "t", "batch": batch})
    ids += bench.write(10)
    relay()
    assert group.take(2) == ids[:2]
    relay()
    assert acked(bench) in (0, 1)
    assert group.take()[1:] == ids[2:]
    relay()
    assert acked(bench) == 6


def test_a_group_that_is_dropped_while_a_relay_looks_stays_dropped(bench: Bench) -> None:
    relay = looked(bench, stream_keep_seconds=0)
    gone, stays = Group(bench, "gone"), Group(bench)
    bench.write(5)
    relay()
    stop = threading.Event()
    looking = threading.Thread(target=lambda: [relay() for _ in iter(stop.is_set, True)])
    looking.start()
    assert drop_group(bench.settings(), gone.name) == [TOPIC]
    stop.set()
    looking.join()
    stays.take()
    relay()
    assert bench.length() <= 1
    assert acked(bench, "gone") is None


def test_a_look_at_many_idle_streams_reads_the_groups_no_more_often(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of their batches are dropped, and their groups are declared still: each is trimmed without reading all groups."""
    groups, calls = Store.groups, list[int]()

    def counted(self: Store, connection: Any) -> Any:
        calls.append(1)
        return groups(self, connection)

    def turn(streams: int) -> int:
        bench.db.execute(
            "INSERT INTO public.outbox_group (stream, name, acked) SELECT 'idle' || i, 'a', 0 FROM generate_series(1, %s) i "
            "ON CONFLICT DO NOTHING",
            (streams,),
        )
        relay = bench.relay()
        calls.clear()
        relay.run_once()
        while relay._unseen:
            relay.run_once()
        relay.close()
        return len(calls)

    monkeypatch.setattr(Store, "groups", counted)
    assert turn(2) == turn(40)


def test_many_streams_are_looked_after_in_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns what is new is published."""
    monkeypatch.setattr("outbox.relay._CATCH_UP_SECONDS", 0.0)
    topics = [f"t{n}" for n in range(5)]
    for topic in topics:
        bench.write(1, topic=topic)
        bench.transport().open(GROUP, [topic])
    relay = bench.relay(trim_seconds=0.001)
    seen = []
    for _ in range(7):
        relay.run_once()
        (new,) = bench.write(1, topic="new")
        relay.run_once()
        assert bench.ids("new")[-1] == new
        seen.append(bench.one("SELECT count(*) FROM public.outbox_group"))
    assert seen[0] <= 1
    assert seen[-1] == 5
    assert all(after - before <= 2 for before, after in pairwise(seen)), seen
