"""The ledger forgets nothing that may come again: what the outbox still has, what a neighbour needs, what was processed
lately under an old id; and nothing while that is not known, or by a consumer that is refused.

Time is set back in the tables; the servers, the relay and the consumers are real.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from consumer import Consumer
from consumer.cli import app
from consumer.ledger import Ledger
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.errors import SettingsError, StreamUnusable
from outbox.replay import Selection, replay
from outbox.store import Store
from outbox.transport import StreamTransport
from outbox.transport.base import StreamState, stream_of, streams_of
from tests.faults.chaos import TOPIC, Bench, drain, ledger
from tests.waiting import eventually

DAY = 86_400


@pytest.fixture
def bench(database_url: str, redis_url: str, prefix: str) -> Iterator[Bench]:
    with Bench(database_url, redis_url, prefix) as made:
        made.make_tables()
        yield made


def consume(bench: Bench, consumer: Consumer = ledger, **options: Any) -> Counter[str]:
    """A process of the consumer reads all there is, and looks after the ledger as it does at its start; the effects."""
    given = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    worker = Worker(consumer, ConsumerSettings(**(given | {"block_seconds": 0.01} | options)))  # type: ignore[arg-type]
    try:
        while worker.run_once():
            pass
    finally:
        worker.close()
    return bench.effects()


def relay(bench: Bench, **options: Any) -> None:
    """A relay that publishes, looks at the groups twice, and drops what is old."""
    made = bench.relay(**({"trim_seconds": 0.001, "check_seconds": 0.001} | options))
    for _ in range(2):
        drain(made)
        time.sleep(0.002)
    made.close()


def aged_id(days: float) -> uuid.UUID:
    """A UUIDv7 of so many days ago."""
    return uuid.UUID(int=int((time.time() - days * DAY) * 1000) << 80 | 7 << 76 | 2 << 62 | uuid.uuid4().int >> 68)


def make_partition(bench: Bench, first: float, last: float) -> str:
    """A partition of the ledger for ids of `first` to `last` days ago, with what there is of them."""
    low, high = (int((time.time() - days * DAY) * 1000) for days in (first, last))
    name, bounds = f"processed_messages_{low}_{high}", [str(uuid.UUID(int=end << 80)) for end in (low, high)]
    with bench.db.transaction():
        bench.db.execute(
            "CREATE TEMPORARY TABLE moved ON COMMIT DROP AS SELECT * FROM public.processed_messages "
            "WHERE event_id >= %s AND event_id < %s",
            bounds,
        )
        bench.db.execute("DELETE FROM public.processed_messages WHERE event_id IN (SELECT event_id FROM moved)")
        bench.db.execute(
            f"CREATE TABLE public.{name} PARTITION OF public.processed_messages "
            f"FOR VALUES FROM ('{bounds[0]}') TO ('{bounds[1]}')"
        )
        bench.db.execute("INSERT INTO public.processed_messages SELECT * FROM moved")
    return name


def age(bench: Bench, days: float) -> None:
    """As if everything had happened so many days earlier."""
    for table, columns in {
        "outbox": ["created_at"], "outbox_batch": ["sealed_at"], "processed_messages": ["processed_at"],
        "entity_versions": ["updated_at"], "consumer_retention": ["seen_at", "outbox_since", "before_since", "begun_at"],
    }.items():  # fmt: skip
        for column in columns:
            bench.db.execute(f"UPDATE public.{table} SET {column} = {column} - interval '{days} days'")  # noqa: S608 - ours


def remembered(bench: Bench) -> int:
    return int(bench.one("SELECT count(*) FROM public.processed_messages"))


def lose(bench: Bench, *streams: str) -> None:
    """Redis loses the streams and what the relay left beside them."""
    for stream in streams or (TOPIC,):
        bench.redis.delete(bench.key(stream), f"{bench.key(stream)}:relay")


def old_and_applied(bench: Bench, days: float, events: int = 3, **options: Any) -> Counter[str]:
    """Events that were recorded and applied so many days ago, in a partition of the ledger of their own."""
    make_partition(bench, days + 5, days - 0.5)
    ids = [str(aged_id(days)) for _ in range(events)]
    for event_id in ids:
        bench.write(id=uuid.UUID(event_id))
    relay(bench)
    assert consume(bench, **options) == Counter(ids)
    age(bench, days)
    return Counter(ids)


def publish_again(bench: Bench) -> None:
    with bench.connect(autocommit=True) as connection:
        list(replay(Store(), connection, bench.transport(), bench.settings(), Selection()))


# --- what the outbox still has -------------------------------------------------------------------------------------------


def test_nothing_is_forgotten_that_the_outbox_keeps_for_a_group_that_lags(bench: Bench) -> None:
    """A group is silent for longer than the ledger remembers; then Redis loses everything."""
    transport = bench.transport()
    transport.open("silent", [TOPIC])
    once = old_and_applied(bench, 40)
    relay(bench)
    assert bench.one("SELECT count(*) FROM public.outbox") == 3, "kept for the silent group"
    consume(bench)
    assert remembered(bench) == 3
    lose(bench)
    relay(bench)
    assert bench.length() == 3, "published again"
    assert consume(bench) == once


def test_a_consumer_starts_while_another_one_lags_and_forgets_when_that_has_caught_up(bench: Bench) -> None:
    transport = bench.transport()
    transport.open("slow", [TOPIC])
    old_and_applied(bench, 40, ledger_retention_days=8)
    relay(bench)
    consume(bench, ledger_retention_days=8)
    assert remembered(bench) == 3
    transport.ack("slow", transport.read("slow", "one", [TOPIC], 10, 0.01))
    bench.db.execute("DELETE FROM public.outbox")  # as the relay drops whole partitions
    relay(bench)
    for left in (3, 3, 0):
        consume(bench, ledger_retention_days=8)
        assert remembered(bench) == left
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")


def test_versions_are_remembered_as_long_as_what_the_outbox_keeps(bench: Bench) -> None:
    bench.transport().open("silent", [TOPIC])
    bench.write(type="limited", version=7)
    relay(bench)
    consume(bench)
    age(bench, 40)
    relay(bench)
    consume(bench)
    assert bench.one("SELECT version FROM public.entity_versions") == 7


def test_what_the_outbox_keeps_is_known_where_nothing_is_published(bench: Bench) -> None:
    """The oldest event is looked at again and again; also for a stream of which no batch is left, and one that is lost."""
    bench.write(1)
    relay(bench)
    consume(bench)
    assert bench.transport().info(TOPIC).oldest is None, "without a group nothing is trimmed"
    relay(bench)
    info = bench.transport().info(TOPIC)
    recorded = int(bench.one("SELECT floor(extract(epoch FROM created_at))::bigint FROM public.outbox"))
    assert (info.keep_seconds, info.stays_seconds, info.oldest) == (7 * DAY, 60, recorded - 60)
    relay(bench)
    age(bench, 8)
    bench.write(1, topic="other")
    lose(bench)
    relay(bench, retention_seconds=6 * DAY)
    relay(bench, retention_seconds=6 * DAY)
    assert bench.one("SELECT count(*) FROM public.outbox_stream WHERE stream = %s", TOPIC) == 0
    kept = int(bench.one("SELECT floor(extract(epoch FROM min(created_at)))::bigint FROM public.outbox"))
    info = bench.transport().info(TOPIC)
    assert (info.keep_seconds, info.oldest) == (6 * DAY, kept - 60)
    bench.db.execute("DELETE FROM public.outbox")
    relay(bench)
    assert abs((bench.transport().info(TOPIC).oldest or 0) + 60 - time.time()) < 60, (
        "there is none: none from before now"
    )


def test_nothing_is_forgotten_while_it_is_not_known_what_the_outbox_keeps(bench: Bench) -> None:
    once = old_and_applied(bench, 40)
    bench.db.execute("DELETE FROM public.outbox")
    relay(bench)
    bench.db.execute("DELETE FROM public.consumer_retention")
    lose(bench)
    assert consume(bench) == once
    assert remembered(bench) == 3
    relay(bench)
    assert consume(bench) == once
    assert remembered(bench) == 0, "now it is known"


def test_the_topics_of_several_outboxes_are_kept_apart(bench: Bench) -> None:
    """One relay is away when Redis loses everything: what its outbox had last counts, also in a new process."""
    both = Consumer("both", topics=[TOPIC, "other"])
    transport, some, now = bench.transport(), Ledger("both"), int(time.time())
    transport.leave([TOPIC], 7 * DAY, now - 60 * DAY)
    transport.leave(["other"], 7 * DAY, now)
    consume(bench, both)
    lose(bench)
    consume(bench, both)
    assert time.time() - some.needed_since(bench.db, DAY).timestamp() == pytest.approx(61 * DAY, abs=60)
    consume(bench, Consumer("both", topics=["other"]))
    assert time.time() - some.needed_since(bench.db, DAY).timestamp() == pytest.approx(61 * DAY, abs=60)
    bench.db.execute(
        "UPDATE public.consumer_retention SET seen_at = seen_at - interval '30 days' WHERE topic = %s", (TOPIC,)
    )
    consume(bench, Consumer("both", topics=["other"]))
    assert time.time() - some.needed_since(bench.db, DAY).timestamp() == pytest.approx(30 * DAY, abs=60)


def test_processes_of_one_consumer_that_read_other_topics_forget_nothing_of_each_other(bench: Bench) -> None:
    """Old and new processes of a deployment, or a deployment for each topic."""
    transport = bench.transport()
    transport.open("silent", [TOPIC])
    once = old_and_applied(bench, 40)
    relay(bench)
    consume(bench)
    transport.leave(["other"], 7 * DAY, int(time.time()))
    consume(bench, Consumer("ledger", topics=["other"]))
    assert remembered(bench) == 3
    lose(bench)
    relay(bench)
    assert bench.length() == 3, "published again for the silent group"
    assert consume(bench) == once


def test_what_the_outbox_had_is_remembered_for_a_day_more(bench: Bench) -> None:
    """There may be entries in the streams of what it has dropped meanwhile, also for one who comes back."""
    some, now, margin = Ledger("ledger"), int(time.time()), DAY

    def days(oldest: int | None, later: float = 0) -> float:
        """For how many days the ledger remembers after a look, `later` hours after the one before."""
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - %s * interval '1 hour'", (later,))
        for _ in range(2):  # two processes
            some.remember(bench.db, 30 * DAY, {TOPIC: (None if oldest is None else now - oldest * DAY, margin)})
        return round((time.time() - some.needed_since(bench.db, DAY).timestamp()) / DAY, 2)

    assert days(None) == 30
    assert days(39) == 40
    assert days(49, later=23) == 50
    assert days(10, later=2) == 50, "the second day begins"
    assert days(10, later=23) == 50
    assert days(None, later=50) == 50, "not known: nothing changes"
    assert days(10) == 30
    assert days(59, later=10) == 60
    assert days(8, later=24 * 50) == 60, "back after 50 days"
    assert days(8, later=25) == 30
    margin = 6 * DAY  # entries stay in the stream for nearly as long
    assert days(59, later=24 * 7) == 60
    assert days(10, later=24 * 7) == 60
    assert days(10, later=24 * 5) == 60, "a copy that was published just before the outbox dropped it is still there"
    assert days(10, later=24 * 2) == 30


def test_copies_in_the_stream_of_what_the_outbox_has_dropped_are_recognised(bench: Bench) -> None:
    """Redis loses everything; what is published again for a group that lags comes to us too, and that group is faster."""
    transport = bench.transport()
    transport.open("slow", [TOPIC])
    once = old_and_applied(bench, 40)
    consume(bench)
    relay(bench)
    lose(bench)
    transport.open("slow", [TOPIC])
    relay(bench)
    assert bench.length() == 3, "published again"
    transport.ack("slow", transport.read("slow", "one", [TOPIC], 10, 0.01))
    relay(bench)
    bench.db.execute("DELETE FROM public.outbox")  # as the relay drops whole partitions
    relay(bench)
    assert consume(bench) == once


# --- what stays in the stream --------------------------------------------------------------------------------------------


def made_anew(bench: Bench, group: str = "ledger") -> None:
    """Somebody destroys the group; its consumer makes it again, at the beginning of the stream."""
    bench.redis.xgroup_destroy(bench.key(), group)


def test_a_group_that_is_made_anew_on_an_idle_topic_gets_nothing_that_was_forgotten(bench: Bench) -> None:
    once = old_and_applied(bench, 40, events=5)
    relay(bench, stream_keep_seconds=0.001)
    assert bench.length() == 0, "not even the last one stays"
    bench.db.execute("DELETE FROM public.outbox")  # as the relay drops whole partitions
    relay(bench, stream_keep_seconds=0.001)
    for _ in range(3):
        consume(bench)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    assert remembered(bench) == 0
    made_anew(bench)
    assert consume(bench) == once


def test_a_stream_of_which_no_batch_is_left_is_trimmed(bench: Bench) -> None:
    """What is in it was replayed, or stays in streams for longer than in the outbox."""
    once = old_and_applied(bench, 40)
    publish_again(bench)
    assert (consume(bench), bench.length()) == (once, 6)
    relay(bench)
    for table in ("outbox", "outbox_stream", "outbox_batch"):
        bench.db.execute(f"DELETE FROM public.{table}")  # noqa: S608 - ours
    relay(bench)
    assert bench.length() == 6, "younger than a minute"
    relay(bench, stream_keep_seconds=0.001)
    assert bench.length() == 0


def test_while_a_stream_is_not_trimmed_its_consumers_remember(bench: Bench) -> None:
    """A group is missing for which everything is acknowledged: entries stay, and the outbox drops their events."""
    transport = bench.transport()
    transport.open("lost", [TOPIC])
    once = old_and_applied(bench, 40)
    transport.ack("lost", transport.read("lost", "one", [TOPIC], 10, 0.01))
    relay(bench)
    consume(bench)
    before = transport.info(TOPIC).oldest
    assert bench.redis.xgroup_destroy(bench.key(), "lost")
    bench.db.execute("DELETE FROM public.outbox")
    relay(bench, stream_keep_seconds=0.001)
    relay(bench, stream_keep_seconds=0.001)
    assert (transport.info(TOPIC).oldest, bench.length()) == (before, 3)
    for _ in range(3):
        consume(bench)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    made_anew(bench)
    assert consume(bench) == once
    transport.open("lost", [TOPIC])
    transport.ack("lost", transport.read("lost", "one", [TOPIC], 10, 0.01))
    relay(bench, stream_keep_seconds=0.001)
    relay(bench, stream_keep_seconds=0.001)
    assert bench.length() == 0
    assert (transport.info(TOPIC).oldest or 0) > (before or 0) + 30 * DAY, "now it goes on"


@pytest.mark.parametrize("kept", [0, 1])
def test_while_one_lane_is_not_trimmed_its_consumers_remember(bench: Bench, kept: int) -> None:
    """A node of a cluster has lost a group that is away: the topic's other lane is trimmed as ever."""
    lanes: dict[str, Any] = {"lanes": {TOPIC: 2}}
    names, transport = streams_of(TOPIC, 2), bench.transport()
    keys = {stream_of(TOPIC, f"k{n}", 2): f"k{n}" for n in range(100)}
    transport.open("lost", names)
    make_partition(bench, 45, 39.5)
    ids = [str(aged_id(40)) for _ in range(4)]
    for n, event_id in enumerate(ids):
        bench.write(id=uuid.UUID(event_id), key=keys[names[n % 2]])
    relay(bench, **lanes)
    once = consume(bench, **lanes)
    assert once == Counter(ids)
    transport.ack("lost", transport.read("lost", "one", names, 10, 0.01))
    age(bench, 40)
    relay(bench, **lanes)
    consume(bench, **lanes)
    assert bench.redis.xgroup_destroy(bench.key(names[kept]), "lost")
    bench.db.execute("DELETE FROM public.outbox")  # as the relay drops whole partitions
    relay(bench, stream_keep_seconds=0.001, **lanes)
    relay(bench, stream_keep_seconds=0.001, **lanes)
    assert [bench.length(name) for name in names] == ([2, 0] if kept == 0 else [0, 2])
    for _ in range(3):
        consume(bench, **lanes)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    bench.redis.xgroup_destroy(bench.key(names[kept]), "ledger")
    assert consume(bench, **lanes) == once


def test_while_a_stream_cannot_be_looked_at_its_consumers_remember(bench: Bench) -> None:
    """As without the right to trim it; a relay had trimmed it before."""

    right = True

    class Refused(StreamTransport):
        def inspect(self, *arguments: Any, **options: Any) -> StreamState:
            if not right:
                raise StreamUnusable("no permissions to run XTRIM", "NOPERM")
            return super().inspect(*arguments, **options)

    made = bench.relay(transport=Refused.from_url(bench.redis_url, prefix=bench.prefix), trim_seconds=0.001)
    bench.transport().open("one", [TOPIC])
    bench.write(1)
    bench.db.execute("UPDATE public.outbox SET created_at = created_at - interval '40 days'")

    def oldest() -> int | None:
        for _ in range(4):
            time.sleep(0.002)
            drain(made)
        return bench.transport().info(TOPIC).oldest

    before = oldest()
    assert before is not None
    right = False
    assert oldest() == before
    bench.db.execute("DELETE FROM public.outbox")
    assert oldest() == before
    right = True
    assert (oldest() or 0) > before + 30 * DAY


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("name", [b"no\ngroup", b"late"])
def test_while_a_group_keeps_what_the_outbox_has_dropped_others_remember_it(
    bench: Bench, name: bytes, busy: bool
) -> None:
    """A stranger's, which is not declared; or one that is made anew, and had acknowledged it all."""
    once = old_and_applied(bench, 40)
    if name == b"late":
        bench.db.execute("INSERT INTO public.outbox_group (stream, name, acked) VALUES (%s, 'late', 1)", (TOPIC,))
    bench.redis.xgroup_create(bench.key(), name, "0")
    if busy:
        once.update(bench.write())
    relay(bench)
    consume(bench)
    for table in ("outbox_stream", "outbox_batch", "outbox"):
        column = "position" if table == "outbox" else "seq"
        some = f"WHERE {column} < (SELECT max({column}) FROM public.{table})" if busy else ""  # noqa: S608
        bench.db.execute(f"DELETE FROM public.{table} {some}")  # noqa: S608 - ours
    for _ in range(2):
        relay(bench, stream_keep_seconds=0.001)
    assert bench.length() == once.total(), "kept for the group"
    for _ in range(3):
        consume(bench)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    made_anew(bench)
    assert consume(bench) == once


def test_a_group_whose_name_is_no_text_is_in_nobodys_way(bench: Bench) -> None:
    old_and_applied(bench, 40)
    bench.redis.xgroup_create(bench.key(), b"\xff", "$")
    relay(bench)
    relay(bench, stream_keep_seconds=0.001)
    assert bench.length() == 0, "it has acknowledged all"


def test_the_ledger_must_remember_for_as_long_as_an_entry_may_stay_after_a_replay(bench: Bench) -> None:
    bench.write(1)
    relay(bench, retention_seconds=7 * DAY, stream_keep_seconds=5 * DAY)
    info = bench.transport().info(TOPIC)
    assert (info.keep_seconds, info.stays_seconds) == (7 * DAY, 5 * DAY)
    with pytest.raises(SettingsError, match=r"OUTBOX_STREAM_KEEP_SECONDS 432000: .* both together: 13 days"):
        consume(bench, ledger_retention_days=12)
    assert remembered(bench) == 0
    assert consume(bench, ledger_retention_days=13).total() == 1


# --- dead letters --------------------------------------------------------------------------------------------------------


def letters(bench: Bench) -> list[str]:
    return [row[0] for row in bench.db.execute("SELECT stream_id FROM public.dead_letters ORDER BY id")]


def put_aside(bench: Bench, receipt: str, days: float, consumer: str = "ledger") -> None:
    bench.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, reason, error, fields, created_at) "
        "VALUES (%s, %s, %s, 'undecodable', '', '{}', now() - %s * interval '1 day')",
        (consumer, TOPIC, receipt, days),
    )


def test_dead_letters_are_kept_for_ever_or_as_long_as_is_set(bench: Bench) -> None:
    relay(bench)
    bench.write(20)
    relay(bench)
    relay(bench)
    for receipt, days, owner in (("old", 101, "ledger"), ("young", 99, "ledger"), ("theirs", 500, "other")):
        put_aside(bench, receipt, days, owner)
    consume(bench)
    assert letters(bench) == ["old", "young", "theirs"]
    bench.write(20)
    relay(bench)
    given: Any = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    worker = Worker(ledger, ConsumerSettings(**given, block_seconds=0.01, batch_size=1, dead_letter_retention_days=100))
    with bench.connect() as person:  # who works with one holds up nobody
        person.execute("SELECT FROM public.dead_letters WHERE stream_id = 'old' FOR UPDATE")
        worker.run_once()
    assert letters(bench) == ["old", "young", "theirs"]
    worker._forget_due = 0.0
    worker.run_once()
    assert letters(bench) == ["young", "theirs"], "with much left to do"
    assert bench.effects().total() < 40
    worker.close()


def test_a_dead_letter_goes_no_sooner_than_its_ledger_row_may(bench: Bench) -> None:
    """A group lags, so that the outbox still has events of then, and the ledger remembers them."""
    bench.transport().open("silent", [TOPIC])
    old_and_applied(bench, 120)
    put_aside(bench, "then", 119)
    put_aside(bench, "before", 130)
    relay(bench)
    consume(bench, dead_letter_retention_days=100)
    assert letters(bench) == ["then"]


# --- a consumer that is gone for good ------------------------------------------------------------------------------------


def test_a_consumer_that_is_gone_for_good_is_forgotten_by_command_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Consumer("gone", topics=[TOPIC])
    gone.ignore("credited")
    relay(bench)
    old_and_applied(bench, 40)
    bench.db.execute("DELETE FROM public.outbox")
    consume(bench, gone, ledger_retention_days=3000)
    relay(bench)
    relay(bench)
    for _ in range(2):
        consume(bench)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    assert remembered(bench) >= 3
    for name, value in {"DATABASE_URL": bench.database_url, "REDIS_URL": bench.redis_url}.items():
        monkeypatch.setenv(name, value)

    def forget(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["forget", *arguments])

    assert forget("gone").exit_code == 1, "nobody said yes"
    assert "was here " in str(forget("gone", "--yes").exception)
    bench.db.execute(
        "UPDATE public.consumer_retention SET seen_at = seen_at - interval '2 hours' WHERE consumer = 'gone'"
    )
    done = forget("gone", "--yes")
    assert (done.exit_code, "consumer gone is forgotten" in done.output) == (0, True)
    assert "remembers nothing for a consumer 'gone'" in str(forget("gone", "--yes").exception)
    assert bench.one("SELECT count(*) FROM public.consumer_retention WHERE consumer = 'ledger'") == 1
    consume(bench)
    assert remembered(bench) == 0


# --- a consumer that is refused, and neighbours --------------------------------------------------------------------------


def test_a_consumer_that_is_refused_has_forgotten_nothing(bench: Bench) -> None:
    once = old_and_applied(bench, 3)
    bench.db.execute("""
        INSERT INTO public.entity_versions (consumer, topic, type, key, version, updated_at)
        VALUES ('ledger', 't', 't', 'old', 1, now() - interval '3 days')
    """)
    bench.db.execute("DELETE FROM public.consumer_retention")
    bench.db.execute("UPDATE public.outbox SET created_at = now()")  # or that would keep them
    relay(bench)
    with pytest.raises(SettingsError, match="CONSUMER_LEDGER_RETENTION_DAYS is 1"):
        consume(bench, ledger_retention_days=1)
    assert remembered(bench) == 3
    assert bench.one("SELECT count(*) FROM public.entity_versions") == 1
    publish_again(bench)
    assert consume(bench) == once


def test_a_consumer_of_several_lanes_is_refused_by_what_any_of_them_says(bench: Bench) -> None:
    """Nothing has been published to the first lane yet."""
    bench.transport().leave([f"{TOPIC}:2"], 7 * DAY, int(time.time()))
    with pytest.raises(SettingsError, match="CONSUMER_LEDGER_RETENTION_DAYS is 1"):
        consume(bench, lanes={TOPIC: 3}, ledger_retention_days=1)
    assert bench.one("SELECT count(*) FROM public.consumer_retention") == 0


@pytest.mark.parametrize("topic", ["unborn", "other"])
def test_a_neighbour_that_remembers_for_less_forgets_nothing_of_ours(bench: Bench, topic: str) -> None:
    """Its own topic is unborn, or of an outbox that keeps less."""
    once = old_and_applied(bench, 20)
    bench.db.execute("UPDATE public.consumer_retention SET outbox_since = NULL, before_since = NULL")
    if topic == "other":
        bench.transport().leave([topic], 3600, int(time.time()))
    consume(bench, Consumer("neighbour", topics=[topic]), ledger_retention_days=2)
    assert remembered(bench) == 3
    publish_again(bench)
    assert consume(bench) == once


def test_a_neighbour_forgets_nothing_that_our_outbox_keeps(bench: Bench) -> None:
    """While we are away, too, whose outbox it knows nothing of."""
    bench.transport().open("silent", [TOPIC])
    once = old_and_applied(bench, 40)
    bench.transport().leave(["other"], 3600, int(time.time()))
    consume(bench, Consumer("neighbour", topics=["other"]))
    assert remembered(bench) == 3
    publish_again(bench)
    assert consume(bench) == once


def test_partitions_are_as_wide_and_as_many_as_the_settings_say(bench: Bench) -> None:
    relay(bench)
    consume(bench, ledger_partition_days=2, ledger_partitions_ahead=3)
    made = [found for found in Ledger("ledger").partitions(bench.db) if not found.default]
    assert [found.high - found.low for found in made] == [2 * DAY * 1000] * 4
    assert 6 * DAY <= Ledger("ledger").seconds_ahead(bench.db) <= 8 * DAY


# --- old ids -------------------------------------------------------------------------------------------------------------


def test_what_was_processed_lately_under_an_old_id_is_remembered(bench: Bench) -> None:
    event_id = aged_id(50)
    bench.write(id=event_id)
    relay(bench)
    assert consume(bench) == {str(event_id): 1}
    make_partition(bench, 60, 40)  # its row is moved there
    relay(bench)
    consume(bench)
    publish_again(bench)
    assert consume(bench) == {str(event_id): 1}
    assert Ledger("ledger").seconds_ahead(bench.db) > 7 * DAY, "and empty ones that are to come stay"


def test_a_partition_that_is_held_holds_no_other(bench: Bench) -> None:
    old = [make_partition(bench, first, first - 9) for first in (80, 70, 60)]
    some, now = Ledger("ledger"), Store().now(bench.db)
    for days, processed in ((75, "now"), (65, "2020-01-01"), (55, "now")):
        bench.db.execute(
            "INSERT INTO public.processed_messages (consumer, event_id, processed_at) VALUES ('ledger', %s, %s)",
            (aged_id(days), processed),
        )
    names = [some.drop_partition(bench.db, now) for _ in range(2)]
    assert names == [old[1], None]
    later = Store().now(bench.db)
    assert [some.drop_partition(bench.db, later) for _ in range(3)] == [old[0], old[2], None]


def test_what_waits_is_not_forgotten_however_old(bench: Bench) -> None:
    """Of a consumer that is away, say, while a neighbour forgets: its row in the ledger is what keeps it from a second effect."""
    held, _ = make_partition(bench, 80, 71), make_partition(bench, 70, 61)
    some, now, old = Ledger("ledger"), Store().now(bench.db), [aged_id(75), uuid.uuid4()]
    for event_id, outcome in (
        (old[0], "waiting"),
        (old[1], "waiting"),
        (aged_id(65), "applied"),
        (uuid.uuid4(), "dead"),
    ):
        bench.db.execute(
            "INSERT INTO public.processed_messages (consumer, event_id, outcome, processed_at) VALUES ('ledger', %s, %s, '2020-01-01')",
            (event_id, outcome),
        )
    bench.db.execute(
        "INSERT INTO public.message_failures (consumer, stream, stream_id, topic, event_id, fields, reason) "
        "SELECT 'ledger', 's', '1-0', 's', unnest(%s::uuid[]), '{}', 'failed'",
        (old,),
    )
    assert some.drop_partition(bench.db, now) != held
    assert some.drop_partition(bench.db, now) is None
    assert some.delete_old(bench.db, now, 10) == 1
    assert {row[0] for row in bench.db.execute("SELECT event_id FROM public.processed_messages")} == set(old)
    bench.db.execute("DELETE FROM public.message_failures")
    assert some.drop_partition(bench.db, now) == held


def test_looking_for_rows_processed_later_reads_pages_not_the_partition(bench: Bench) -> None:
    name = make_partition(bench, 60, 40)
    bench.db.execute(f"""
        INSERT INTO public.{name} (consumer, event_id, processed_at)
        SELECT 'ledger', ('{str(aged_id(50))[:24]}' || lpad(to_hex(n), 12, '0'))::uuid, '2020-01-01'
        FROM generate_series(1, 200000) n
    """)  # noqa: S608 - ours
    bench.db.execute(f"VACUUM ANALYZE public.{name}")
    with bench.connect() as connection:
        connection.execute("SET LOCAL enable_seqscan = off")
        plan = connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS) SELECT processed_at FROM public.{name} WHERE processed_at >= now() LIMIT 1"  # noqa: S608
        ).fetchall()
    shown = "\n".join(line for (line,) in plan)
    (read,) = re.findall(r"Heap Blocks: lossy=(\d+)", shown) or ["0"]
    assert "Bitmap Index Scan on processed_messages" in shown
    assert int(read) < 256, "of some 2,000"
    assert Ledger("ledger").drop_partition(bench.db, Store().now(bench.db)) == name


def test_a_writer_into_an_old_partition_is_not_forgotten(bench: Bench) -> None:
    """His row is not visible yet when the partition is looked at, and is when it could go."""
    busy = make_partition(bench, 60, 50)
    some, now = Ledger("ledger"), Store().now(bench.db)
    with psycopg.connect(bench.database_url) as writer, bench.connect(autocommit=True) as other:
        some.claim(writer, [aged_id(55)])
        dropping = threading.Thread(target=lambda: some.drop_partition(other, now))
        dropping.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pid = %s"
        eventually(lambda: bench.one(waiting, other.info.backend_pid) or not dropping.is_alive())
        writer.commit()
        dropping.join()
    assert remembered(bench) == 1
    assert bench.one("SELECT tableoid::regclass::text FROM public.processed_messages") == busy


def test_while_there_are_more_old_rows_they_are_not_left_for_a_minute(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer.worker._DELETED", 10)
    monkeypatch.setattr("consumer.worker._MORE_SECONDS", 0.0)
    relay(bench)
    old_and_applied(bench, 40)
    bench.db.execute("DELETE FROM public.outbox")
    for _ in range(2):
        relay(bench)
        consume(bench)
        bench.db.execute("UPDATE public.consumer_retention SET begun_at = begun_at - interval '25 hours'")
    bench.db.execute("""
        INSERT INTO public.processed_messages (consumer, event_id, processed_at)
        SELECT 'ledger', gen_random_uuid(), now() - interval '4000 days' FROM generate_series(1, 45)
    """)
    given = {"database_url": bench.database_url, "redis_url": bench.redis_url, "key_prefix": bench.prefix}
    worker = Worker(ledger, ConsumerSettings(**given, block_seconds=0.01))  # type: ignore[arg-type]
    for _ in range(6):
        worker.run_once()
    worker.close()
    assert remembered(bench) == 0
