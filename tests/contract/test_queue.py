"""What only queues have (`outbox.transport.list`): claims with tokens, delays, priorities, histories; and what becomes of a job
when processes die, servers are full, or strangers delete keys."""

from __future__ import annotations

import hashlib
import logging
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis

from outbox import Event
from outbox.embedded import ValkeyServer
from outbox.envelope import uuid7, wire
from outbox.errors import GroupLost, StreamUnusable, TransportUnavailable
from outbox.transport import Delivery, ListTransport, Marker, MemoryTransport, Part, Settled
from outbox.transport.base import Transport
from outbox.transport.servers import Server as OneServer
from tests.contract.test_transport import CLIENTS, SERVERS, Queue, label, made, marker
from tests.faults.cluster import Cluster
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually, in_time

GROUP, MAIL = "mailer", "queue/mail"
COMPLETED, WAITING, FAILED = (
    Settled("completed", b'{"n":9007199254740993}'),
    Settled("waiting", None, "no"),
    Settled("failed"),
)
#: What the keys of a queue end with; jobs besides.
KEYS = {
    "ready:high": "list", "ready:normal": "list", "ready:low": "list", "processing": "hash", "claims": "zset", "delayed": "zset",
    "batches": "zset", "completed": "zset", "failed": "zset", "relay": "hash",
}  # fmt: skip


#: Each server, and a cluster; every time only the last one, since these are many tests.
_HERE = [
    pytest.param(("queue", name, *CLIENTS[number % 2]), id=name, marks=() if name == SERVERS[-1] else pytest.mark.long)
    for number, name in enumerate(SERVERS)
]
_HERE.append(pytest.param(("queue-cluster", SERVERS[-1], 3), id=f"{SERVERS[-1]}-cluster", marks=pytest.mark.long))


@pytest.fixture(params=_HERE)
def there(
    request: pytest.FixtureRequest, server_urls: Callable[[str], str], clusters: Callable[[str], Cluster]
) -> Iterator[Queue]:
    found = made(request.param, server_urls, clusters)
    yield found
    found.close()


@pytest.fixture
def own(own_valkey: Callable[..., ValkeyServer]) -> Callable[[str], Queue]:
    """A server of this name that the test may do anything to."""
    return lambda name: Queue(own_valkey(name).url, 3, False)


def job(*, run_at: datetime | None = None, **headers: str) -> Event:
    """A job, with headers as producers in other languages may write them."""
    if run_at is not None:
        headers["runat"] = run_at.isoformat()
    made = Event(topic="mail", type="send", payload={"to": "x"}, headers=headers)
    object.__setattr__(made, "topic", MAIL)
    return made


def batch(jobs: Sequence[Event], seq: int = 1, expected: Marker | None = None, stream: str = MAIL) -> Part:
    """As the relay publishes them."""
    rows = [
        (j.data, str(j.id), j.type, None, None, None, None, None, str(dict(j.headers)).replace("'", '"') if j.headers else None)
        for j in jobs
    ]  # fmt: skip
    return Part(stream, expected, marker(seq), wire(rows, label(seq)), 1, 3600)


def ids(jobs: Sequence[Event | Delivery]) -> list[str]:
    return [str(j.id) if isinstance(j, Event) else j.fields[b"id"].decode() for j in jobs]


def take(there: Queue, count: int = 100, process: str = "one", transport: Transport | None = None) -> list[Delivery]:
    return (transport or there.transport).read(GROUP, process, [MAIL], count, 0)


def add(there: Queue, *jobs: Event) -> list[str]:
    there.transport.open(GROUP, [MAIL])
    assert there.transport.enqueue(jobs) == [True] * len(jobs)
    return ids(jobs)


def keys(there: Queue, stream: str = MAIL) -> dict[str, str]:
    """Ends of the queue's keys."""
    begin = f"{there.key(stream)}:"
    found = sorted(key.decode() for key in there.raw.scan_iter(match=f"{begin}*", count=1000))
    return {key.removeprefix(begin): key for key in found}


def contents(there: Queue) -> dict[str, Any]:
    """All that the queue is, but for what changes by asking."""
    found: dict[str, Any] = {}
    for end, key in keys(there).items():
        kind = there.raw.type(key).decode()
        read = {
            "hash": there.raw.hgetall, "list": lambda k: there.raw.lrange(k, 0, -1),
            "zset": lambda k: there.raw.zrange(k, 0, -1, withscores=True), "string": there.raw.get,
        }[kind]  # fmt: skip
        found[end] = read(key)
    for field in (b"asked", b"turn"):
        if isinstance(relay := found.get("relay"), dict):
            relay.pop(field, None)
    return found


def where(there: Queue) -> dict[str, str]:
    """Where every outstanding job is. Sees that all is as queue.lua says: each in one place, counted, and no key more, nor a TTL."""
    found = contents(there)
    places = [
        (job_id.decode(), "ready") for end in ("high", "normal", "low") for job_id in found.get(f"ready:{end}", [])
    ]
    places += [(job_id.decode(), "delayed") for job_id, _ in found.get("delayed", [])]
    places += [(job_id.decode(), "running") for job_id in found.get("processing", {})]
    assert len(dict(places)) == len(places), "a job is in two places"
    assert {i.decode() for i, _ in found.get("batches", [])} == dict(places).keys()
    relay = found.get("relay", {})
    assert int(relay.get(b"added", 0)) - int(relay.get(b"ended", 0)) == len(places)
    assert {i.decode() for i, _ in found.get("claims", [])} == {i for i, place in places if place == "running"}
    jobs = {end.removeprefix("job:"): fields for end, fields in found.items() if end.startswith("job:")}
    ended = {i.decode() for end in ("completed", "failed") for i, _ in found.get(end, [])}
    assert jobs.keys() == dict(places).keys() | ended
    for job_id, place in places:
        assert jobs[job_id][b":status"].decode() == place
        assert b"data" in jobs[job_id]
    for end, key in keys(there).items():
        assert end.startswith("job:") or there.raw.type(key).decode() == KEYS[end]
        assert there.raw.ttl(key) == -1
    assert there.transport.inspect(MAIL).missing == 0
    return dict(places)


def overdue(there: Queue, *job_ids: str, milliseconds: int = 10**9) -> None:
    """Let claims have ended so long ago."""
    for job_id in job_ids:
        there.raw.zincrby(f"{there.key(MAIL)}:claims", -milliseconds, job_id)


# --- transitions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_after_every_transition_each_job_is_in_one_place(there: Queue, seed: int) -> None:
    """Whatever comes after what: all that a process can do, at random."""
    chance = random.Random(seed)
    transport = there.transport
    transport.open(GROUP, [MAIL])
    held: list[Delivery] = []
    everything: list[Event] = []
    before: Marker | None = None
    number = 0

    def some() -> list[Delivery]:
        found = chance.sample(held, min(len(held), chance.randint(0, 3)))
        return sorted(found, key=lambda d: d.receipt)

    def new() -> list[Event]:
        made = [
            job(**chance.choice([{}, {"priority": "high"}, {"priority": "low"}, {"lifo": "1"}]))
            if chance.random() < 0.8 else job(run_at=datetime.now(UTC) + timedelta(seconds=chance.choice([-1, 0.02, 60])))
            for _ in range(chance.randint(1, 4))
        ]  # fmt: skip
        everything.extend(made)
        return made

    for _ in range(120):
        match chance.randrange(12):
            case 0:
                transport.enqueue([*new(), *everything[:1]])
            case 1:
                number += 1
                (after,) = transport.publish([batch([*new(), *chance.sample(everything, 1)], number, before)])
                before = marker(number)
                assert after == before
            case 2 | 3:
                held += transport.read(GROUP, chance.choice("ab"), [MAIL], chance.randint(1, 5), 0)
            case 4:
                transport.ack(GROUP, mine := some(), [chance.choice([COMPLETED, WAITING, FAILED]) for _ in mine])
            case 5:
                transport.hand_back(GROUP, chance.choice("ab"), some())
            case 6:
                held += transport.claim(GROUP, chance.choice("ab"), MAIL, 0, 3).deliveries
            case 7:
                transport.renew(GROUP, chance.choice("ab"), some())
            case 8:
                transport.inherit(GROUP, "a", "b", transport.left(GROUP, "b", MAIL, 10))
            case 9:
                if everything:
                    transport.cancel("mail", chance.choice(everything).id)
            case 10:
                overdue(there, *(d.receipt.partition(":")[0] for d in some() if transport.renew(GROUP, "a", [d])))
                transport.reclaim()
            case 11:
                ended = chance.sample(everything, min(2, len(everything)))
                transport.settle(MAIL, {each.id: COMPLETED for each in ended})
        where(there)
    while deliveries := [*transport.claim(GROUP, "one", MAIL, 0, 100).deliveries, *take(there)]:
        transport.ack(GROUP, deliveries)
    assert set(where(there).values()) <= {"delayed"}


STEPS: dict[str, Callable[[ListTransport, Delivery], Any]] = {
    "ack": lambda t, d: t.ack(GROUP, [d], [COMPLETED]),
    "fail": lambda t, d: t.ack(GROUP, [d], [FAILED]),
    "renew": lambda t, d: t.renew(GROUP, "late", [d]),
    "recount": lambda t, d: t.recount(GROUP, "late", [d]),
    "hand back": lambda t, d: t.hand_back(GROUP, "late", [d]),
    "inherit": lambda t, d: t.inherit(GROUP, "heir", "late", [d]),
}
OTHERS: dict[str, Callable[[Queue, Delivery], Any]] = {
    "claimed": lambda there, d: there.transport.claim(GROUP, "other", MAIL, 0, 1),
    "claimed by the same process": lambda there, d: there.transport.claim(GROUP, "late", MAIL, 0, 1),
    "handed back": lambda there, d: there.transport.hand_back(GROUP, "late", [d]),
    "handed back and read": lambda there, d: (
        there.transport.hand_back(GROUP, "late", [d]),
        take(there, process="late"),
    ),
    "ready again": lambda there, d: (overdue(there, *ids([d])), there.transport.reclaim()),
    "done by another": lambda there, d: there.transport.ack(
        GROUP, there.transport.claim(GROUP, "other", MAIL, 0, 1).deliveries
    ),
    "published again after it was done": lambda there, d: (
        there.transport.ack(GROUP, [d]),
        there.transport.publish([batch([Event(topic=MAIL, type="send", payload=1, id=uuid.UUID(ids([d])[0]))])]),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("step", STEPS)
def test_o_14_who_has_lost_its_claim_changes_nothing(
    there: Queue, step: str, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    add(there, job())
    (late,) = take(there, process="late")
    OTHERS[other](there, late)
    before = contents(there)
    with caplog.at_level(logging.WARNING):
        assert not STEPS[step](there.transport, late)
    assert contents(there) == before
    where(there)
    lost = step in ("ack", "fail") and other != "done by another"
    assert [getattr(record, "action", None) for record in caplog.records] == ["claim_lost"] * lost
    assert all("lost claim" in record.message for record in caplog.records)


def test_o_14_whose_heir_goes_on_holds_nothing_any_more(there: Queue) -> None:
    """The heir keeps the token, so that it is told by the process, too."""
    add(there, job(), job())
    held = take(there, process="frozen")
    assert there.transport.inherit(GROUP, "heir", "frozen", held) == held
    assert there.transport.renew(GROUP, "frozen", held) == there.transport.recount(GROUP, "frozen", held) == []
    there.transport.hand_back(GROUP, "frozen", held)
    assert there.transport.renew(GROUP, "heir", held) == held
    assert set(where(there).values()) == {"running"}


def test_an_id_that_a_stranger_pushes_twice_is_claimed_once(there: Queue) -> None:
    job_ids = add(there, job(), job())
    (running,) = take(there, 1)
    there.raw.rpush(f"{there.key(MAIL)}:ready:normal", *job_ids, *job_ids)
    assert ids(take(there)) == job_ids[1:]
    there.transport.ack(GROUP, [running])
    there.raw.rpush(f"{there.key(MAIL)}:ready:normal", *job_ids, *job_ids)
    assert take(there) == []
    assert list(where(there)) == job_ids[1:]


def test_o_14_the_successor_goes_on_undisturbed(there: Queue) -> None:
    (job_id,) = add(there, job())
    (late,) = take(there, process="paused")
    (taken,) = there.transport.claim(GROUP, "successor", MAIL, 0, 1).deliveries
    there.transport.ack(GROUP, [late])
    state = there.transport.job("mail", uuid.UUID(job_id))
    assert (state.status, state.by, state.count) == ("running", "successor", 2)
    there.transport.ack(GROUP, [taken], [COMPLETED])
    assert there.transport.job("mail", uuid.UUID(job_id)).status == "completed"
    assert where(there) == {}


class _LosesReplies(OneServer):
    """Has the server do everything, and never hears of it."""

    lost = False

    def run(self, calls: Any, then: Any = ()) -> list[Any]:
        replies = super().run(calls, then)
        sent = not any(getattr(reply, "code", None) == "NOSCRIPT" for reply in replies)  # else with its text, next
        if self.lost and sent and calls[0][1][0] != b"SADD":
            raise TransportUnavailable("Redis: the reply is lost", "ConnectionError")
        return replies


@pytest.mark.parametrize("there", [each for each in _HERE if each.values[0][0] == "queue"], indirect=True)
def test_o_11_o_27_a_step_whose_reply_is_lost_loses_no_job(there: Queue) -> None:
    """As if the process had died after it: nobody knows that it was done. Others go on without it, or it is done again."""
    there.transport.open(GROUP, [MAIL])
    servers = _LosesReplies(there.client())
    deaf = ListTransport(servers, there.prefix)
    jobs = [job() for _ in range(40)]
    part = batch(jobs[:20])
    left = there.transport.left
    for step in (
        lambda: deaf.publish([part]),
        lambda: deaf.read(GROUP, "dead", [MAIL], 5, 0),
        lambda: deaf.claim(GROUP, "dead too", MAIL, 0, 3),
        lambda: deaf.ack(GROUP, left(GROUP, "dead", MAIL, 1)),
        lambda: deaf.hand_back(GROUP, "dead too", left(GROUP, "dead too", MAIL, 1)),
        lambda: deaf.enqueue(jobs[20:]),
    ):
        servers.lost = True
        with pytest.raises(TransportUnavailable):
            step()
        servers.lost = False
        assert len(where(there)) in (19, 20, 39)
    assert deaf.publish([part]) == [marker(1)]
    assert deaf.enqueue(jobs[20:]) == [False] * 20
    done: Counter[str] = Counter()
    while deliveries := [*there.transport.claim(GROUP, "one", MAIL, 0, 100).deliveries, *take(there)]:
        there.transport.ack(GROUP, deliveries)
        done.update(ids(deliveries))
    assert (len(done), set(done.values())) == (39, {1}), "all but the one that was acknowledged"
    assert where(there) == {}


@pytest.mark.parametrize("name", SERVERS)
def test_each_step_is_one_command(name: str, own: Callable[[str], Queue]) -> None:
    """So that there is nothing between two, where a process could die."""
    there = own(name)
    add(there, *[job() for _ in range(4)])
    transport = there.transport
    transport.reclaim_when_due()
    held = take(there, 3)  # the scripts are known from now on
    transport.renew(GROUP, "one", held)
    transport.ack(GROUP, held[:1])
    steps: list[Callable[[], Any]] = [
        lambda: transport.publish([batch([job(), job()])]),
        lambda: transport.read(GROUP, "one", [MAIL], 10, 0),
        lambda: transport.renew(GROUP, "one", held[1:]),
        lambda: transport.hand_back(GROUP, "one", held[1:2]),
        lambda: transport.claim(GROUP, "two", MAIL, 0, 10),
        lambda: transport.ack(GROUP, held[2:], [FAILED]),
        lambda: transport.cancel("mail", uuid.UUID(ids(held[1:2])[0])),
        lambda: transport.settle(MAIL, {uuid.UUID(ids(held[:1])[0]): COMPLETED}),
    ]
    for step in steps:
        with there.raw.monitor() as monitor:
            step()
            there.raw.ping()
            sent = []
            while (command := monitor.next_command())["command"] != "PING":
                if command["client_type"] != "lua" and command["command"].split()[0] not in ("CLIENT", "HELLO"):
                    sent.append(command["command"].split()[0])
        assert sent == ["EVALSHA"]
    there.close()


# --- servers that are full, forget, or are somebody else's ---------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_o_53_a_full_server_takes_no_job_and_all_that_it_has_are_done(name: str, own: Callable[[str], Queue]) -> None:
    there = own(name)
    transport, soon = there.transport, datetime.now(UTC) + timedelta(seconds=0.1)
    ready = [job() for _ in range(500)]
    late = [job(run_at=soon) for _ in range(20)]
    add(there, *ready, *late)
    transport.publish([batch([job()])])
    held = take(there, 100)
    there.limit_memory(1)
    with pytest.raises(TransportUnavailable) as full:
        transport.enqueue([job()])
    assert full.value.code == "OOM"
    (refused,) = transport.publish([batch([job()], 2, marker(1))])
    assert isinstance(refused, TransportUnavailable)
    assert (refused.code, transport.markers([MAIL])) == ("OOM", {MAIL: marker(1)})
    assert len(where(there)) == 521
    assert transport.renew(GROUP, "one", held) == transport.recount(GROUP, "one", held) == held
    transport.hand_back(GROUP, "one", held[:50])
    there.limit_memory(0)
    overdue(there, *ids(held[50:60]))
    there.limit_memory(1)
    assert transport.reclaim() == 10
    assert transport.cancel("mail", ready[400].id) == "ready"
    transport.settle(MAIL, {ready[400].id: COMPLETED})
    done = Counter[str]()

    def drained() -> bool:
        deliveries = [*transport.claim(GROUP, "one", MAIL, 0, 90).deliveries, *take(there, 90)]
        transport.ack(GROUP, deliveries, [COMPLETED] * len(deliveries))
        done.update(ids(deliveries))
        return len(done) == 520

    eventually(drained)
    assert set(done.values()) == {1}
    there.limit_memory(0)
    assert where(there) == {}
    assert transport.publish([batch([job()], 2, marker(1))]) == [marker(2)]
    there.close()


@pytest.mark.parametrize("end", [*KEYS, "job"])
def test_a_key_that_a_stranger_deletes_stops_nothing_and_is_published_again(there: Queue, end: str) -> None:
    """Jobs in every state, and each key deleted alone: whoever works goes on, and after one look of the relay, and what it
    publishes then, every job is done."""
    transport = there.transport
    jobs = [job(priority=p) for p in ("high", "normal", "low") for _ in range(4)]
    jobs += [job(run_at=datetime.now(UTC) + timedelta(seconds=0.05)) for _ in range(3)]
    transport.open(GROUP, [MAIL])
    transport.publish([batch(jobs[:8]), batch(jobs[8:], 2, marker(1))])
    held = take(there, 3)
    transport.ack(GROUP, held[:1], [COMPLETED])
    transport.ack(GROUP, held[1:2], [WAITING])
    done = Counter(ids(held[:1]))
    key = f"{there.key(MAIL)}:{end}" if end != "job" else f"{there.key(MAIL)}:job:{ids(jobs[7:8])[0]}"
    assert there.raw.delete(key) == 1

    def work() -> list[Delivery]:
        try:
            found = [*take(there), *transport.claim(GROUP, "one", MAIL, 60, 100).deliveries]
        except GroupLost:
            transport.open(GROUP, [MAIL])
            return work()
        transport.ack(GROUP, found, [COMPLETED] * len(found))
        done.update(ids(found))
        return found

    def relay_looks() -> bool:
        state = transport.inspect(MAIL)
        if state.marker == marker(2) and not state.missing:
            return False
        first = batch(jobs[:8], 1, state.marker)
        assert first.restart
        assert transport.publish([first, batch(jobs[8:], 2, marker(1))]) == [marker(1), marker(2)]
        return True

    if end in ("completed", "failed"):  # histories; what they have is bounded no more, and nothing else
        assert not relay_looks()
    work()
    repairs = 0
    while relay_looks():
        repairs += 1
        assert repairs < 4, "each look is to mend it, and not for ever"
        eventually(lambda: not work() and transport.queues()[0].counts["delayed"] == 0)
        overdue(there, *where_running(there), milliseconds=10**8)
    eventually(lambda: (work(), overdue(there, *where_running(there), milliseconds=10**8), len(done) >= 14)[2])
    expected = set(ids(jobs)) - set(ids(held[1:2]))
    assert expected <= done.keys()
    assert (repairs > 0) == (end not in ("completed", "failed", "claims"))
    while work():
        pass
    state = transport.inspect(MAIL)
    assert (state.marker, state.missing) == (marker(2), 0)


def where_running(there: Queue) -> list[str]:
    """Those that are claimed."""
    return [job_id.decode() for job_id in there.raw.zrange(f"{there.key(MAIL)}:claims", 0, -1)]


@pytest.mark.parametrize("end", [*KEYS, "job"])
def test_a_key_of_another_type_is_named_and_loses_no_job(there: Queue, end: str) -> None:
    transport = there.transport
    jobs = [job(), job()]
    transport.open(GROUP, [MAIL])
    transport.publish([batch(jobs)])
    key = f"{there.key(MAIL)}:{end}" if end != "job" else f"{there.key(MAIL)}:job:{ids(jobs[:1])[0]}"
    there.raw.delete(key)
    there.raw.set(key, "a stranger's")
    before = contents(there)
    if end != "job":
        for call in (
            lambda: take(there),
            lambda: transport.claim(GROUP, "one", MAIL, 0, 10),
            lambda: transport.enqueue([job()]),
            lambda: transport.inspect(MAIL),
            lambda: transport.cancel("mail", jobs[0].id),
        ):
            with pytest.raises(StreamUnusable, match="WRONGTYPE"):
                call()
        (refused,) = transport.publish([batch([job()], 2, marker(1))])
        assert isinstance(refused, StreamUnusable)
        transport.ack(GROUP, [Delivery(MAIL, f"{jobs[0].id}:x", {})])
        assert contents(there) == before
        assert isinstance(transport.open(GROUP, [MAIL])[MAIL], StreamUnusable)
    else:
        assert ids(take(there)) == ids(jobs[1:]), "the others go on"
        assert transport.inspect(MAIL).missing == 1
    there.raw.delete(key)
    state = transport.inspect(MAIL)
    if state.marker != marker(1) or state.missing:
        assert transport.publish([batch(jobs, 1, state.marker)]) == [marker(1)]
    transport.open(GROUP, [MAIL])
    found = [*take(there), *transport.claim(GROUP, "one", MAIL, 0, 10).deliveries]
    assert set(ids(found)) == set(ids(jobs))
    assert transport.inspect(MAIL).missing == 0


def test_o_64_delayed_jobs_without_data_do_not_hold_up_good_ones(there: Queue) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1)
    broken, good = [job(run_at=due) for _ in range(200)], [job(run_at=due) for _ in range(50)]
    add(there, *broken, *good)
    there.transport.publish([batch(good[:1])])
    for job_id in ids(broken):
        assert there.raw.delete(f"{there.key(MAIL)}:job:{job_id}") == 1
    eventually(lambda: datetime.now(UTC) > due)
    done: list[str] = []
    for _ in range(6):  # looks, the first of which may be by a clock that is a little behind ours
        found = take(there, 10)
        there.transport.ack(GROUP, found)
        done.extend(ids(found))
    assert sorted(done) == sorted(ids(good))
    (state,) = there.transport.queues()
    assert (state.counts["failed"], state.counts["delayed"], state.counts["ready"]) == (200, 0, 0)
    (failed, *_) = there.transport.jobs("mail", "failed", 1)
    assert failed.error == "its data are lost"
    assert there.transport.inspect(MAIL).missing == 200, "so that the relay publishes again what is its own"


@pytest.mark.parametrize("relayed", [False, True])
def test_jobs_without_data_do_not_fill_the_histories(there: Queue, relayed: bool) -> None:
    """However they are found. Where no relay publishes, nobody would repair it: then they are not missing either."""
    small = ListTransport(there.transport._servers, there.prefix, kept=5)
    ready, late, taken = [[job() for _ in range(20)] for _ in range(3)]
    add(there, *taken, *late)
    take(there)
    overdue(there, *ids(late))
    if relayed:
        there.transport.publish([batch([])])
    add(there, *ready)
    for job_id in ids([*ready, *late, *taken]):
        there.raw.delete(f"{there.key(MAIL)}:job:{job_id}")
    small.reclaim()
    overdue(there, *ids(taken))
    small.claim(GROUP, "one", MAIL, 60, 100)
    assert take(there, transport=small) == []
    found = contents(there)
    jobs = [end for end in found if end.startswith("job:")]
    lost = 60 if relayed else 0
    assert (len(found["failed"]), len(jobs), len(found.get("batches", []))) == (5, 5, lost)
    assert there.transport.inspect(MAIL).missing == lost
    if not relayed:
        assert where(there) == {}


# --- who gets what, and when ------------------------------------------------------------------------------------------------


def test_o_13_of_eight_reclaimers_one_makes_each_job_ready(there: Queue) -> None:
    job_ids = add(there, *[job() for _ in range(100)])
    take(there, process="dead")
    transports = [there.another() for _ in range(8)]
    overdue(there, *job_ids, milliseconds=60_000)
    assert there.transport.reclaim() == 0, "its own workers come first: they take over what is overdue for one claim"
    overdue(there, *job_ids, milliseconds=60_000)
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda transport: transport.reclaim(), transports)) == 100
    assert set(where(there).values()) == {"ready"}
    assert ids(again := take(there)) == job_ids, "the first ones first"
    assert {d.count for d in again} == {2}


@pytest.mark.parametrize("claims", ["overdue", "lost"])
def test_o_13_o_39_at_most_128_jobs_of_a_queue_are_ready_again_in_one_round(there: Queue, claims: str) -> None:
    """A server is busy with one script at a time. A worker goes on at once while there are more. Lost claims come again so many
    at a time, too."""
    transport, key = there.transport, f"{there.key(MAIL)}:claims"
    job_ids = add(there, *[job() for _ in range(300)])
    take(there, 300, process="dead")
    assert transport.reclaim() == 0
    if claims == "lost":
        there.raw.delete(key)
        known = []
        for _ in range(4):
            assert transport.reclaim() == 0
            known.append(there.raw.zcard(key))
        assert known == [128, 256, 300, 300]
    there.raw.zadd(key, dict.fromkeys(job_ids, 1))
    other, again = there.another(), []
    for ready in (128, 256, 300):
        other.reclaim_when_due()
        found = Counter(where(there).values())
        assert (found["ready"], found["running"]) == (ready, 300 - ready)
        again.append(other._reclaim_due <= time.monotonic())
    assert again == [True, True, False]


def test_any_worker_of_the_installation_makes_jobs_ready_whose_own_workers_are_gone(there: Queue) -> None:
    job_ids = add(there, *[job() for _ in range(3)])
    take(there, process="dead")
    overdue(there, *job_ids)
    (state,) = there.transport.queues()
    assert (state.orphaned, state.counts["running"], state.counts["ready"]) == (3, 3, 0)
    other = there.another()
    other.open("others", ["queue/other"])
    other.reclaim_when_due()
    states = {state.queue: state for state in there.transport.queues()}
    assert (states["mail"].orphaned, states["mail"].counts["ready"]) == (0, 3)
    assert states["other"].group == "others"


def test_an_id_without_a_claim_is_taken_over_when_nobody_renews_it(there: Queue) -> None:
    job_ids = add(there, *[job() for _ in range(3)])
    held = take(there, process="one")
    there.raw.delete(f"{there.key(MAIL)}:claims")
    (state,) = there.transport.queues()
    assert state.orphaned == 3
    assert there.transport.claim(GROUP, "two", MAIL, 60, 10).deliveries == []
    assert there.transport.renew(GROUP, "one", held[:1]) == held[:1]
    where(there)
    overdue(there, *job_ids[1:], milliseconds=60_001)
    assert ids(there.transport.claim(GROUP, "two", MAIL, 60, 10).deliveries) == job_ids[1:]


def test_what_was_begun_twice_comes_only_to_those_who_take_over(there: Queue) -> None:
    """They run it alone: it may be what ended its process."""
    (job_id,) = add(there, job())
    (first,) = take(there)
    overdue(there, job_id)
    assert there.transport.reclaim() == 1
    (second,) = take(there)
    assert (first.count, second.count) == (1, 2)
    overdue(there, job_id)
    assert (there.transport.reclaim(), take(there)) == (0, [])
    (third,) = there.transport.claim(GROUP, "two", MAIL, 60, 10).deliveries
    assert third.count == 3
    there.transport.hand_back(GROUP, "two", [third])
    assert take(there) == []
    assert there.transport.renew(GROUP, "two", [third]) == []
    there.transport.ack(GROUP, [third])
    (again,) = there.transport.claim(GROUP, "three", MAIL, 60, 10).deliveries
    assert again.count == 3
    where(there)


def test_first_in_first_out_and_last_in_on_request(there: Queue) -> None:
    first, second, third, last, after = [job() for _ in range(3)] + [job(lifo="1"), job(lifo="1")]
    add(there, first, second)
    add(there, last, third)
    there.transport.publish([batch([after])])
    held = take(there)
    assert ids(held) == ids([after, last, first, second, third])
    there.transport.hand_back(GROUP, "one", held[1:4])
    add(there, new := job())
    assert ids(take(there)) == ids([last, first, second, new]), "what is handed back comes first, as it was"


def test_by_priority(there: Queue) -> None:
    low, normal, high = job(priority="low"), job(), job(priority="high")
    add(there, low, normal, high)
    assert ids(take(there)) == ids([high, normal, low])
    odd = job(priority="urgent")
    add(there, low := job(priority="low"), odd)
    assert ids(take(there)) == ids([odd, low]), "what is no priority is the normal one"


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_of_16_jobs_one_is_low_and_four_are_normal_while_there_are_high_ones(there: Queue, at_once: int) -> None:
    kinds = {j_id: p for p in ("high", "normal", "low") for j_id in add(there, *[job(priority=p) for _ in range(64)])}
    order: list[str] = []
    while len(order) < 64:
        order += [kinds[job_id] for job_id in ids(take(there, min(at_once, 64 - len(order))))]
    for first in range(0, 64, 16):
        counted = Counter(order[first : first + 16])
        assert (counted["low"], counted["normal"], counted["high"]) == (1, 4, 11)


def test_o_17_o_32_delayed_jobs_are_claimed_once_and_never_early(there: Queue) -> None:
    """By the server's clock; four producers at once, many jobs due in the same millisecond, and four workers."""
    due = [datetime.now(UTC) + timedelta(seconds=0.3 + 0.1 * n) for n in range(4)]
    there.transport.open(GROUP, [MAIL])
    transports = [there.another() for _ in range(4)]
    everything: list[Event] = []
    done: list[str] = []

    def produce(n: int) -> None:
        for _ in range(5):
            jobs = [job(run_at=due[k % 4]) for k in range(25)]
            everything.extend(jobs)
            transports[n].enqueue(jobs)
            transports[n].enqueue(jobs)  # the reply was lost

    def work(n: int) -> None:
        end = time.monotonic() + 30
        while len(done) < 500 and time.monotonic() < end:
            found = transports[n].read(GROUP, f"w{n}", [MAIL], 7, 0.05 if n else 0)  # one asks all the time
            for delivery in found:
                state = there.transport.job("mail", uuid.UUID(ids([delivery])[0]))
                assert state.since >= state.due_at
            transports[n].ack(GROUP, found)
            done.extend(ids(found))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(what, n) for n in range(4) for what in (produce, work)]:
            future.result(timeout=60)
    assert sorted(done) == sorted(ids(everything))
    assert where(there) == {}


@pytest.mark.parametrize(
    "written", ["{:%Y-%m-%dT%H:%M:%S.%fZ}", "{:%Y-%m-%dT%H:%M:%S.%f}+00:00", "{:%Y-%m-%d %H:%M:%S.%f+00}"]
)
def test_o_71_an_instant_is_the_same_however_it_is_written(there: Queue, written: str) -> None:
    due = datetime.now(UTC).replace(microsecond=123_456) + timedelta(days=3)
    zones = [timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-5)), UTC]
    jobs = [job(runat=written.format(due)), *[job(run_at=due.astimezone(zone)) for zone in zones]]
    add(there, *jobs)
    assert {there.transport.job("mail", j.id).due_at for j in jobs} == {due.replace(microsecond=124_000)}, "never early"
    assert set(where(there).values()) == {"delayed"}


@pytest.mark.parametrize(
    "instant",
    ["2024-02-29T23:59:59Z", "2099-12-31T23:59:59.999999Z", "2100-03-01T00:00:00+14:00", "2000-01-01T00:00:00-00:30"],
)
def test_o_71_every_day_of_the_calendar_is_read_as_it_is(there: Queue, instant: str) -> None:
    there.transport.open(GROUP, [MAIL])
    there.transport.publish([batch([made := job(runat=instant)])])
    expected = datetime.fromisoformat(instant)
    found = there.transport.job("mail", made.id)
    assert timedelta(0) <= found.due_at - expected < timedelta(milliseconds=1)
    assert found.status == ("delayed" if expected > datetime.now(UTC) else "ready")


@pytest.mark.parametrize("nonsense", ["", "tomorrow", "2099-01-01T00:00:00", "2099-01-01", "9" * 40])
def test_o_71_what_is_no_instant_does_not_keep_a_job_back(there: Queue, nonsense: str) -> None:
    """Its consumer sees that it is malformed, and puts it aside."""
    (job_id,) = add(there, job(runat=nonsense))
    (found,) = take(there)
    assert (ids([found]), found.fields[b"runat"]) == ([job_id], nonsense.encode())


def test_o_33_a_job_of_next_month_has_no_ttl_and_is_done_once(there: Queue) -> None:
    (job_id,) = add(there, job(run_at=datetime.now(UTC) + timedelta(days=30)))
    (other,) = add(there, job())
    there.transport.ack(GROUP, take(there), [WAITING])
    where(there)  # sees that no key has one
    assert there.transport.job("mail", uuid.UUID(other)).status == "waiting"
    there.raw.zadd(f"{there.key(MAIL)}:delayed", {job_id: 1}, xx=True)
    assert ids(take(there)) == [job_id]
    assert take(there) == []


def test_o_39_what_nobody_renews_is_ready_again_within_two_claims(there: Queue) -> None:
    """Its own workers have half a claim to come first; somebody looks four times in a claim, see `reclaim_when_due`."""
    (job_id,) = add(there, job())
    take(there, process="dead")
    overdue(there, job_id, milliseconds=89_000)
    assert there.transport.reclaim() == 0
    overdue(there, job_id, milliseconds=1_000)
    assert there.transport.reclaim() == 1
    there.transport.reclaim_when_due()
    assert there.transport._reclaim_due - time.monotonic() <= 15
    assert where(there) == {job_id: "ready"}


# --- what is asked ------------------------------------------------------------------------------------------------------------


def test_the_states_of_a_job(there: Queue) -> None:
    transport = there.transport
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    now, later = job(priority="high"), job(run_at=due)
    assert transport.job("mail", now.id) is None
    add(there, now, later)
    found = transport.job("mail", later.id)
    assert (found.status, found.due_at, found.priority, found.count, found.by) == ("delayed", due, "normal", 0, None)
    found = transport.job("mail", now.id)
    assert (found.queue, found.id, found.status, found.priority, found.deadline) == (
        "mail",
        now.id,
        "ready",
        "high",
        None,
    )
    assert found.fields[b"data"] == now.data
    assert abs(found.added_at - datetime.now(UTC)) < timedelta(seconds=60)
    held = take(there)
    found = transport.job("mail", now.id)
    assert (found.status, found.count, found.by) == ("running", 1, "one")
    assert timedelta(seconds=59) < found.deadline - found.since < timedelta(seconds=61)
    transport.ack(GROUP, held, [WAITING])
    found = transport.job("mail", now.id)
    assert (found.status, found.error, found.result) == ("waiting", "no", None)
    transport.settle(MAIL, {now.id: COMPLETED, uuid7(): COMPLETED})
    found = transport.job("mail", now.id)
    assert (found.status, found.error, found.result) == ("completed", None, COMPLETED.result)
    assert b"data" not in found.fields
    transport.settle(MAIL, {later.id: COMPLETED})
    assert transport.job("mail", later.id).status == "delayed", "what is outstanding is told by those who have it"


def test_unique_jobs_are_known_by_their_ids_as_long_as_the_queue_knows_them(there: Queue) -> None:
    jobs = [job(), job()]
    add(there, *jobs)
    assert there.transport.enqueue([jobs[0], new := job(), jobs[1], new]) == [False, True, False, False]
    there.transport.publish([batch(jobs)])
    assert len(where(there)) == 3
    there.transport.ack(GROUP, take(there))
    assert there.transport.enqueue(jobs) == [False, False]
    barrier, again = threading.Barrier(8), [job() for _ in range(20)]
    transports = [there.another() for _ in range(8)]

    def enqueue(n: int) -> list[bool]:
        barrier.wait()
        return list(transports[n].enqueue(again))

    with ThreadPoolExecutor(8) as pool:
        added = list(pool.map(enqueue, range(8)))
    assert [sum(each) for each in zip(*added, strict=True)] == [1] * 20


def test_what_the_relay_publishes_again_is_added_only_where_it_is_not_outstanding(there: Queue) -> None:
    """PostgreSQL is right: what it says is not done may have been undone with it."""
    transport = there.transport
    transport.open(GROUP, [MAIL])
    jobs = [job(), job(), job(), job(run_at=datetime.now(UTC) + timedelta(hours=1))]
    transport.publish([batch(jobs, 7)])
    done, running = take(there, 2)
    transport.ack(GROUP, [done], [COMPLETED])
    assert transport.publish([batch(jobs, 2, marker(7))]) == [marker(2)], "another epoch"
    assert where(there) == dict(zip(ids(jobs), ("ready", "running", "ready", "delayed"), strict=True))
    found = transport.job("mail", jobs[0].id)
    assert (found.count, found.result) == (0, None)
    assert transport.renew(GROUP, "one", [running]) == [running]
    assert transport.inspect(MAIL).groups[0].acked == 1
    append = Part(MAIL, marker(2), marker(2), batch([*jobs, job()]).runs, append=True)
    assert transport.publish([append, append]) == [marker(2)] * 2
    assert len(where(there)) == 5


def test_a_batch_of_another_count_counts_for_what_is_outstanding(there: Queue) -> None:
    jobs = [job(), job()]
    there.transport.open(GROUP, [MAIL])
    there.transport.publish([batch(jobs, 7)])
    assert there.transport.publish([batch(jobs, 2, marker(7))]) == [marker(2)]
    assert there.transport.inspect(MAIL).groups[0].acked == 1
    assert there.transport.publish([batch([job()], 9, marker(2))]) == [marker(9)]
    there.transport.ack(GROUP, take(there, 2))
    assert there.transport.inspect(MAIL).groups[0].acked == 8


def test_a_lost_job_that_no_outbox_has_is_missing_until_the_relay_has_looked(there: Queue) -> None:
    add(there, job())
    jobs = [job(priority="high")]
    there.transport.publish([batch(jobs)])
    there.raw.delete(f"{there.key(MAIL)}:ready:normal")
    assert there.transport.inspect(MAIL).missing == 1
    assert there.transport.publish([batch(jobs, 1, marker(1))]) == [marker(1)]
    assert there.transport.inspect(MAIL).missing == 0
    assert ids(take(there)) == ids(jobs)


def test_cancelling(there: Queue) -> None:
    transport = there.transport
    ready, later, running, waiting = (
        job(),
        job(run_at=datetime.now(UTC) + timedelta(hours=1)),
        job(priority="high"),
        job(),
    )
    add(there, running, waiting)
    held = take(there)
    transport.ack(GROUP, held[1:], [WAITING])
    add(there, ready, later)
    cancelled = [transport.cancel("mail", each.id) for each in (ready, later, running, waiting, job())]
    assert cancelled == ["ready", "delayed", "running", "waiting", None]
    assert [transport.cancel("mail", each.id) for each in (ready, running)] == ["cancelled", "running"]
    assert where(there) == {str(running.id): "running"}
    transport.ack(GROUP, held[:1])
    assert transport.cancel("mail", running.id) == "completed"
    assert take(there) == []
    assert {state.id for state in transport.jobs("mail", "cancelled")} == {ready.id, later.id, waiting.id}


def test_histories_are_bounded_and_an_id_takes_its_job_along(there: Queue) -> None:
    small = ListTransport(there.transport._servers, there.prefix, kept=5)
    job_ids = add(there, *[job() for _ in range(30)])
    held = take(there)
    small.ack(GROUP, held[:3], [FAILED] * 3)
    for delivery in held[3:]:
        small.ack(GROUP, [delivery])
    where(there)
    assert [str(state.id) for state in small.jobs("mail", "completed")] == job_ids[:24:-1]
    assert [end for end in keys(there) if end.startswith("job:")] == sorted(
        f"job:{i}" for i in [*job_ids[:3], *job_ids[25:]]
    )
    (state,) = small.queues()
    assert (state.counts["completed"], state.counts["failed"]) == (5, 3)


def test_lists_of_jobs_page_by_page(there: Queue) -> None:
    transport = there.transport
    kinds = [job(priority=p) for p in ("high", "normal", "low") for _ in range(4)]
    add(there, *kinds)
    pages = [transport.jobs("mail", "ready", 5, after) for after in (0, 5, 10, 15)]
    assert [str(state.id) for page in pages for state in page] == ids(kinds)
    assert list(map(len, pages)) == [5, 5, 2, 0]
    held = take(there, 3)
    assert {str(state.id) for state in transport.jobs("mail", "running")} == set(ids(held))
    transport.ack(GROUP, held, [COMPLETED, FAILED, WAITING])
    for status, delivery in zip(("completed", "failed", "waiting"), held, strict=True):
        assert [str(state.id) for state in transport.jobs("mail", status)] == ids([delivery])
    assert transport.jobs("none", "ready") == []


def test_a_queue_at_a_glance(there: Queue) -> None:
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    assert there.transport.queues() == []
    add(there, job(), job(), job(run_at=due))
    take(there, 1)
    (state,) = there.transport.queues()
    assert (state.queue, state.counts, state.orphaned, state.next_due, state.group) == (
        "mail", {"ready": 1, "delayed": 1, "running": 1}, 0, due, GROUP
    )  # fmt: skip
    assert 0 <= state.oldest_ready_seconds < 60


def test_completion_events_are_heard_on_a_channel(there: Queue) -> None:
    job_ids = add(there, job(), job())
    ear = there._nodes()[0].pubsub(ignore_subscribe_messages=True)
    ear.subscribe(f"{there.key(MAIL)}:events")
    eventually(lambda: any(client.pubsub_numsub(f"{there.key(MAIL)}:events")[0][1] for client in there._nodes()))
    there.transport.ack(GROUP, take(there), [COMPLETED, FAILED])
    heard: list[str] = []

    def both() -> bool:
        if message := ear.get_message(timeout=1):
            heard.append(message["data"] if isinstance(message["data"], str) else message["data"].decode())
        return len(heard) == 2

    eventually(both)
    assert heard == [f"completed {job_ids[0]}", f"failed {job_ids[1]}"]
    ear.close()


class _OneNodeAway(OneServer):
    """Cannot reach a queue, as if it were at another node of a cluster."""

    def run(self, calls: Any, then: Any = ()) -> list[Any]:
        away = TransportUnavailable("Redis: the node is away", "ConnectionError")
        replies = super().run(calls, then)
        return [away if "{queue/away}" in call[0] else reply for call, reply in zip(calls, replies, strict=True)]


@pytest.mark.parametrize("there", [each for each in _HERE if each.values[0][0] == "queue"], indirect=True)
def test_a_queue_that_cannot_be_used_hides_no_other(there: Queue, caplog: pytest.LogCaptureFixture) -> None:
    add(there, job())
    take(there, process="dead")
    overdue(there, *where_running(there))
    there.transport.open(GROUP, ["queue/away"])
    lists = ListTransport(_OneNodeAway(there.client()), there.prefix)
    assert [state.queue for state in lists.queues()] == ["mail"]
    assert "queue away is left out: Redis: the node is away" in caplog.text
    assert lists.reclaim() == 1
    there.raw.srem(f"{there.prefix}queues", MAIL)
    with pytest.raises(TransportUnavailable, match="the node is away"):
        lists.queues()


def test_ids_that_are_none_of_ours_hide_no_job(there: Queue) -> None:
    (job_id,) = add(there, job())
    there.raw.rpush(f"{there.key(MAIL)}:ready:normal", "a stranger's", b"\xff\xfe")
    there.transport.ack(GROUP, take(there), [FAILED])
    assert there.transport.queues()[0].counts["failed"] == 3
    assert [str(state.id) for state in there.transport.jobs("mail", "failed")] == [job_id]


# --- waiting ---------------------------------------------------------------------------------------------------------------------


def test_an_idle_worker_wakes_within_50_ms_and_asks_for_nothing_meanwhile(there: Queue) -> None:
    there.transport.open(GROUP, [MAIL])
    reader, took = there.another(), []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            reading = pool.submit(lambda: (reader.read(GROUP, "one", [MAIL], 10, 20), time.monotonic()))
            eventually(lambda: there.blocked() == 1)
            began = time.monotonic()
            there.transport.enqueue([job()])
            (found, ended) = reading.result(timeout=10)
            reader.ack(GROUP, found)
            took.append(ended - began)
            eventually(lambda: there.blocked() == 0)
    assert min(took) < 0.05, "and no look once a second does that"
    assert sorted(took)[2] < 0.9


def test_a_worker_wakes_for_what_another_hands_back_or_makes_ready_again(there: Queue) -> None:
    job_ids = add(there, job())
    reader, took = there.another(), []
    with ThreadPoolExecutor(1) as pool:
        for number in range(6):
            (held,) = take(there)
            if number % 2:
                overdue(there, *job_ids)
            reading = pool.submit(lambda: (reader.read(GROUP, "two", [MAIL], 10, 20), time.monotonic()))
            eventually(lambda: there.blocked() == 1)
            began = time.monotonic()
            there.transport.reclaim() if number % 2 else there.transport.hand_back(GROUP, "one", [held])
            (got, ended) = reading.result(timeout=10)
            took.append(ended - began)
            reader.recount(GROUP, "two", got := [replace(each, count=1) for each in got])
            reader.hand_back(GROUP, "two", got)
            eventually(lambda: there.blocked() == 0)
    assert max(min(took[::2]), min(took[1::2])) < 0.05


def test_a_worker_wakes_when_a_delayed_job_is_due(there: Queue) -> None:
    there.transport.open(GROUP, [MAIL])
    late = []
    for _ in range(5):
        due = datetime.now(UTC) + timedelta(seconds=0.2)
        there.transport.enqueue([made := job(run_at=due)])
        (found,) = there.transport.read(GROUP, "one", [MAIL], 10, 20)
        late.append(there.transport.job("mail", made.id).since - due)
        there.transport.ack(GROUP, [found])
    assert min(late) < timedelta(seconds=0.05)


def test_o_27_o_44_a_read_ends_in_time_where_the_connection_that_hears_is_half_open(
    own: Callable[[str], Queue],
) -> None:
    """A router forgot it while the worker was busy; its other connection is new."""
    there = own(SERVERS[-1])
    there.transport.open(GROUP, [MAIL])
    with Proxy(port_of(there._url)) as proxy:
        url = through(proxy, there._url)
        reader = ListTransport(client := redis.Redis.from_url(url, socket_timeout=30), there.prefix)

        def waits() -> float:
            with ThreadPoolExecutor(1) as pool:
                reading = pool.submit(reader.read, GROUP, "one", [MAIL], 10, 20)
                eventually(lambda: there.blocked() == 1)
                there.transport.enqueue([job()])
                reader.ack(GROUP, reading.result(timeout=10))
            assert proxy.forget() == 2
            client.connection_pool.disconnect(inuse_connections=False)
            began = time.monotonic()
            assert reader.read(GROUP, "one", [MAIL], 10, 0.5) == []
            return time.monotonic() - began

        assert in_time(0.5 + 2, waits)
        there.transport.enqueue([job()])
        assert len(reader.read(GROUP, "one", [MAIL], 10, 0)) == 1
        reader.close()
    there.close()


def test_an_idle_worker_does_not_poll(own: Callable[[str], Queue]) -> None:
    there = own(SERVERS[-1])
    there.transport.open(GROUP, [MAIL])
    take(there)
    before = there.raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert there.transport.read(GROUP, "one", [MAIL], 10, 2.5) == []
    assert there.raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 5
    there.close()


@pytest.mark.parametrize("name", SERVERS)
def test_the_rights_that_the_page_on_clusters_names_suffice(name: str, own: Callable[[str], Queue]) -> None:
    there = own(name)
    there.prefix = ""
    page = (Path(__file__).parents[2] / "docs/operations/cluster.md").read_text()
    for rules in re.findall(r"^ACL SETUSER jobs (.*)$", page, re.MULTILINE):
        there.raw.execute_command("ACL", "SETUSER", "jobs", *rules.replace(">…", ">x").split())
    url = there._url.replace("redis://", "redis://jobs:x@")
    transport = there.transport = ListTransport(redis.Redis.from_url(url), claim_seconds=0.01, kept=1)
    with ThreadPoolExecutor(1) as pool:
        transport.open(GROUP, [MAIL])
        reading = pool.submit(transport.read, GROUP, "one", [MAIL], 1, 10)
        eventually(lambda: there.blocked() == 1)
        add(there, job(), job(lifo="1"), job(run_at=datetime.now(UTC) + timedelta(hours=1)), job(priority="low"))
        held = reading.result(timeout=10)
    transport.publish([batch(jobs := [job(), job()])])
    transport.hand_back(GROUP, "one", held)
    held = take(there)
    for step in (
        lambda: transport.renew(GROUP, "one", held),
        lambda: transport.inherit(GROUP, "two", "one", transport.left(GROUP, "one", MAIL, 9)),
        lambda: transport.ack(GROUP, held[:3], [COMPLETED, FAILED, WAITING]),
        lambda: eventually(transport.reclaim),
        lambda: transport.claim(GROUP, "one", MAIL, 0, 9),
        lambda: transport.publish([batch(jobs)]),
        lambda: transport.publish([batch(jobs, 2, marker(1))]),
        lambda: there.raw.delete(f"{there.key(MAIL)}:delayed"),
        lambda: transport.publish([batch(jobs, 1, marker(2))]),
        lambda: [transport.cancel("mail", each.id) for each in jobs],
        lambda: transport.settle(MAIL, {each.id: COMPLETED for each in jobs}),
        lambda: transport.ids_after(MAIL, 0, 9),
        lambda: [transport.jobs("mail", status) for status in ("ready", "running", "delayed", "completed", "failed")],
        lambda: (transport.queues(), transport.inspect(MAIL), transport.memory_share()),
        lambda: transport.leave([MAIL], 60, 1),
        lambda: transport.drop_group(GROUP, MAIL),
    ):
        step()
    refused = {entry["object"] for entry in there.raw.acl_log()} - {"client|setinfo"}  # redis-py's, whatever the answer
    assert refused == set(), "no script was refused anything"
    transport.close()
    there.close()


@pytest.mark.parametrize("name", SERVERS)
def test_without_rights_on_channels_jobs_are_done_all_the_same(name: str, own: Callable[[str], Queue]) -> None:
    there = own(name)
    add(there, job())
    there.raw.execute_command("ACL", "SETUSER", "quiet", "on", ">x", "~*", "+@all", "resetchannels")
    client = redis.Redis.from_url(there._url.replace("redis://", "redis://quiet:x@"))
    quiet = ListTransport(client, there.prefix)
    quiet.ack(GROUP, quiet.read(GROUP, "one", [MAIL], 10, 5), [COMPLETED])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(quiet.read, GROUP, "one", [MAIL], 10, 20)
        quiet.enqueue([job()])
        assert len(reading.result(timeout=15)) == 1
    quiet.close()
    there.close()


# --- names and values --------------------------------------------------------------------------------------------------------------


def test_o_90_names_with_separators_do_not_meet(own: Callable[[str], Queue]) -> None:
    """Names like these are refused where they come from; here they would do no harm. Nor do prefixes, on one server."""
    there, begun = own(SERVERS[-1]), 1
    names = ["a", "a:processing", "a:delayed", "a:failed", "b{x}", " "]
    transports = {prefix: ListTransport(there.client(), prefix) for prefix in ("t1", "t1:a", "")}
    expected: dict[str, dict[str, int]] = {prefix: {} for prefix in transports}
    for prefix, transport in transports.items():
        for name in names:
            assert transport.open(GROUP, [f"queue/{name}"]) == {}
            expected[prefix][name] = begun = begun + 1
            transport.publish([batch([job() for _ in range(begun)], stream=f"queue/{name}")])
            assert len(transport.read(GROUP, "one", [f"queue/{name}"], 1, 0)) == 1
    for prefix, transport in transports.items():
        counted = {state.queue: (state.counts["ready"] + 1, state.counts["running"]) for state in transport.queues()}
        assert counted == {name: (number, 1) for name, number in expected[prefix].items()}
    keys = Counter(re.fullmatch(r"(t1|t1:a|)(?:queues|\{queue/.*)", key.decode())[1] for key in there.raw.scan_iter())
    for prefix, numbers in expected.items():  # its jobs, five keys of each queue, and one
        assert keys[prefix] == sum(numbers.values()) + 5 * len(names) + 1
    there.close()


def test_o_91_all_keys_of_a_queue_are_in_one_slot(there: Queue) -> None:
    add(there, job(), job(run_at=datetime.now(UTC) + timedelta(hours=1)), job(priority="low"), job(priority="high"))
    there.transport.ack(GROUP, take(there, 2), [COMPLETED, FAILED])
    found = list(keys(there).values())
    assert len(found) >= 10
    assert {key.removeprefix(there.prefix)[: len("{queue/mail}:")] for key in found} == {"{queue/mail}:"}


def test_o_68_o_69_payloads_stay_as_they_are_to_the_byte(there: Queue) -> None:
    """Through delay, hand-back, take-over, and being ready again."""
    payloads = [
        b'{"n":9007199254740993,"m":9223372036854775807,"d":0.1234567890123456789,"e":1E+3,"z":0.10}', b"\xff\xfe\x00\x80",
        bytes(range(256)), b"", b"x" * 300_000,
    ]  # fmt: skip
    due = (datetime.now(UTC) + timedelta(seconds=0.1)).isoformat()
    rows = [
        (data, str(uuid7()), "t", None, None, "application/octet-stream", None, None, f'{{"runat":"{due}"}}')
        for data in payloads
    ]
    transport, hashes = there.transport, [hashlib.sha256(data).digest() for data in payloads]
    transport.open(GROUP, [MAIL])
    transport.publish([Part(MAIL, None, marker(1), wire(rows, label(1)))])

    def seen(deliveries: Sequence[Delivery]) -> list[Delivery]:
        by_id = {ids([d])[0]: hashlib.sha256(d.fields[b"data"]).digest() for d in deliveries}
        assert [by_id[row[1]] for row in rows] == hashes
        return list(deliveries)

    held: list[Delivery] = []
    eventually(lambda: held.extend(take(there)) or len(held) == len(rows))
    transport.hand_back(GROUP, "one", seen(held))
    held = seen(take(there))
    overdue(there, *ids(held))
    assert transport.reclaim() == len(rows)
    held = seen(take(there))
    seen(transport.left(GROUP, "one", MAIL, 10))
    seen(transport.claim(GROUP, "two", MAIL, 0, 10).deliveries)


def test_memory_takes_what_became_of_jobs(there: Queue) -> None:
    memory = MemoryTransport()
    memory.open(GROUP, [MAIL])
    memory.publish([batch([job(), job()])])
    found = memory.read(GROUP, "one", [MAIL], 10, 0)
    memory.ack(GROUP, found, [COMPLETED, FAILED])
    memory.settle(MAIL, {uuid7(): COMPLETED})
    assert memory.pending(GROUP, MAIL) == 0
