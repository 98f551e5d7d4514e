"""Values from the producer's hands to the consumer's: through the writer, PostgreSQL, the wire and Redis' fields."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from outbox import Envelope, Event, record
from outbox.envelope import MAX_VERSION, decode, wire
from outbox.schema import connect
from outbox.store import BEGINNING, TOPIC, Store, Window
from outbox.transport import Marker, MemoryTransport, Part

KOLKATA = timezone(timedelta(hours=5, minutes=30))


def delivered(url: str, events: list[Event], time_zone: str = "UTC") -> list[Envelope]:
    """Record the events, read them as the relay does, publish them, and decode what a group receives."""
    with psycopg.connect(url, options=f"-c TimeZone={time_zone}") as connection:
        record(connection, *events)
    store = Store()
    with connect(url, "test", autocommit=True, options=f"-c TimeZone={time_zone}") as connection:
        window = store.advance(connection, Window(BEGINNING, BEGINNING, 0, open=False))
        rows, done = store.page(connection, window, 1000, 1 << 30)
    assert done
    transport = MemoryTransport()
    for n, row in enumerate(rows):
        expected = Marker(1, n, "t") if n else None
        transport.publish([Part("all", expected, Marker(1, n + 1, "t"), wire([row]))])
    transport.open("group", ["all"])
    topics = [row[TOPIC] for row in rows]
    found = transport.read("group", "one", ["all"], 1000, 0)
    return [decode(topic, delivery.fields) for topic, delivery in zip(topics, found, strict=True)]


def event(payload: Any, **fields: Any) -> Event:
    return Event(**{"topic": "payments", "type": "t", "payload": payload, **fields})


def test_all_fields_arrive_as_recorded(database_url: str) -> None:
    whole = event(
        {"a": 1}, key="ключ 😀", version=MAX_VERSION, time=datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), source="/bank",
        headers={"traceparent": "00-ab-cd-01", "note": "é😀\u2028"},
    )  # fmt: skip
    (got,) = delivered(database_url, [whole])
    assert got == Envelope(
        id=whole.id, topic=whole.topic, type=whole.type, data=whole.data, payload={"a": 1}, key=whole.key,
        version=MAX_VERSION, time=whole.time, source="/bank", headers=whole.headers,
    )  # fmt: skip


def test_o_66_text_is_equal_to_the_byte(database_url: str) -> None:
    """What is refused (a NUL in a key, a lone surrogate) is in `test_writer.py`; bytes on real streams are in O-69."""
    texts = ["a\x00b", "😀", "שלום", "e\u0301", "𠜎", "\u2028", "\\u0000", "%s %(a)s :name {x}"]
    events = [event({"t": text}) for text in texts]
    got = delivered(database_url, events)
    assert [one.payload["t"] for one in got] == texts
    assert [hashlib.sha256(one.data).digest() for one in got] == [hashlib.sha256(e.data).digest() for e in events]


def test_o_68_numbers_are_exact(database_url: str) -> None:
    integers = [9007199254740993, 9223372036854775807, -1, 2**80]
    decimals = ["1234567890.123456789", "1E+3", "0.10", "0.1234567890123456789"]
    raw = b'{"n": 0.1234567890123456789, "m":1.10 }'
    got = delivered(
        database_url,
        [event(integers), event([Decimal(text) for text in decimals]), event(raw, content_type="application/json")],
    )
    assert got[0].payload == integers
    assert got[1].payload == decimals
    assert got[2].data == raw


def test_o_69_bytes_are_equal(database_url: str) -> None:
    (got,) = delivered(database_url, [event(bytes(range(256)), content_type="application/octet-stream")])
    assert (got.payload, got.content_type) == (bytes(range(256)), "application/octet-stream")


@pytest.fixture(params=["Asia/Kolkata", "America/New_York"])
def process_time_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The time zone of this process meanwhile."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize("time_zone", ["Asia/Kolkata", "America/New_York"])
def test_o_71_instants_depend_on_no_time_zone(database_url: str, time_zone: str, process_time_zone: str) -> None:
    """Neither on the sessions', nor on the process's. Nothing here delays, so that the case's delays are not tested."""
    assert time.tzname[0] in {"Asia/Kolkata": ("IST",), "America/New_York": ("EST",)}[process_time_zone]
    instants = [
        datetime(2026, 7, 1, 12, tzinfo=UTC),
        datetime(2026, 7, 1, 12, 0, 0, 1, tzinfo=KOLKATA),
        datetime(2026, 11, 1, 5, 30, tzinfo=UTC),  # 01:30 in New York, for the first time that night
        datetime(2026, 11, 1, 6, 30, tzinfo=UTC),  # and for the second
        datetime(1, 1, 2, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ]
    got = delivered(database_url, [event({"at": at}, time=at) for at in instants], time_zone)
    assert [one.time for one in got] == instants
    assert [datetime.fromisoformat(one.payload["at"]) for one in got] == instants


def test_o_72_empty_payloads_arrive_as_what_they_are(database_url: str) -> None:
    values: list[Any] = [None, {}, [], "", 0, False]
    got = [one.payload for one in delivered(database_url, [event(value) for value in values])]
    assert got == values
    assert [type(value) for value in got] == [type(value) for value in values]
