"""What an event may be, and that what is recorded is what is received."""

from __future__ import annotations

import ast
import dataclasses
import enum
import hashlib
import json
import math
import uuid
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.envelope import (
    JSON,
    MAX_VERSION,
    RESERVED,
    Envelope,
    Event,
    Job,
    check_topic,
    decode,
    decode_json,
    encode_json,
    is_json,
    wire,
)
from outbox.errors import InvalidEvent, UndecodableEntry

ROOT = Path(__file__).parents[2]
NAIVE = datetime(2026, 1, 2, 3, 4, 5)


def event(**fields: Any) -> Event:
    return Event(**{"topic": "payments", "type": "payment.received", "payload": {"a": 1}, **fields})


def as_row(recorded: Event) -> tuple[Any, ...]:
    """The event as the relay reads it from the outbox (`outbox.envelope.ROW`)."""
    when = recorded.time and recorded.time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")
    headers = json.dumps(recorded.all_headers) if recorded.all_headers else None
    return (
        recorded.data, str(recorded.id), recorded.type, recorded.key,
        None if recorded.version is None else str(recorded.version), recorded.content_type, when, recorded.source, headers,
    )  # fmt: skip


def entry(recorded: Event) -> dict[bytes, bytes]:
    """The event as an entry of a stream."""
    (run,) = wire([as_row(recorded)])
    (fields,) = run.entries()
    return fields


def received(recorded: Event) -> Envelope:
    return decode(recorded.topic, entry(recorded))


# --- refusals -----------------------------------------------------------------------------------------------

REFUSALS = [
    ("topic", {"topic": ""}, "must match"),
    ("topic", {"topic": "a:b"}, "must match"),
    ("topic", {"topic": "{a}"}, "must match"),
    ("topic", {"topic": "a b"}, "must match"),
    ("topic", {"topic": "a\n"}, "must match"),
    ("topic", {"topic": "t" * 201}, "must match"),
    ("topic", {"topic": None}, "must match"),
    ("type", {"type": ""}, "1 to 200"),
    ("type", {"type": "t" * 201}, "1 to 200"),
    ("type", {"type": "a\x00b"}, "control"),
    ("type", {"type": 7}, "string"),
    ("key", {"key": ""}, "1 to 200"),
    ("key", {"key": "k" * 201}, "1 to 200"),
    ("key", {"key": "a\x00b"}, "control"),
    ("key", {"key": "\ud800"}, "surrogate"),
    ("key", {"key": 12}, "string"),
    ("source", {"source": "a\tb"}, "control"),
    ("source", {"source": ""}, "1 to 200"),
    ("version", {"version": -1}, "between 0 and"),
    ("version", {"version": 2**63}, "between 0 and"),
    ("version", {"version": True}, "integer"),
    ("version", {"version": 1.0}, "integer"),
    ("version", {"version": "1"}, "integer"),
    ("id", {"id": str(uuid.uuid4())}, "uuid.UUID"),
    ("time", {"time": NAIVE}, "time zone"),
    ("time", {"time": "2026-01-01T00:00:00Z"}, "datetime"),
    ("headers", {"headers": [("a", "b")]}, "mapping"),
    ("headers", {"headers": {"A": "b"}}, "names must match"),
    ("headers", {"headers": {"trace-parent": "b"}}, "names must match"),
    ("headers", {"headers": {"1a": "b"}}, "names must match"),
    ("headers", {"headers": {"h" * 41: "b"}}, "names must match"),
    ("headers", {"headers": {1: "b"}}, "names must match"),
    ("headers", {"headers": {f"h{n}": "" for n in range(33)}}, "at most 32"),
    ("headers.a", {"headers": {"a": 1}}, "string"),
    ("headers.a", {"headers": {"a": "x" * 1025}}, "1024 bytes"),
    ("headers.a", {"headers": {"a": "é" * 513}}, "1024 bytes"),
    ("headers.a", {"headers": {"a": "x\ny"}}, "control"),
    ("headers.a", {"headers": {"a": "\udfff"}}, "surrogate"),
    ("content_type", {"payload": b"x"}, "with a bytes payload"),
    ("content_type", {"payload": b"x", "content_type": "a\nb"}, "media type"),
    ("content_type", {"payload": b"x", "content_type": ""}, "media type"),
    ("content_type", {"payload": b"x", "content_type": "é/x"}, "media type"),
    ("content_type", {"payload": {}, "content_type": "text/plain"}, "bytes payload"),
    ("payload", {"payload": b"{", "content_type": JSON}, "not the JSON"),
    ("payload", {"payload": b"\xff", "content_type": "application/vnd.x+json"}, "not the JSON"),
    ("payload", {"payload": b"NaN", "content_type": JSON}, "not the JSON"),
    ("payload", {"payload": b"[-1e400]", "content_type": JSON}, "a number is too large for a float"),
    ("payload", {"payload": b"[" * 100_000 + b"]" * 100_000, "content_type": JSON}, "not the JSON"),
    ("payload", {"payload": object()}, "no JSON form"),
    ("payload.a[1]", {"payload": {"a": [1, {2}]}}, "no JSON form"),
    ("payload.a", {"payload": {"a": b"x"}}, "bytes"),
    ("payload.a", {"payload": {"a": {1: 2}}}, "keys must be strings"),
    ("payload.a", {"payload": {"a": time(1, 2)}}, "naive time"),
    ("payload.a", {"payload": {"a": Decimal("NaN")}}, "JSON cannot hold"),
    ("payload.a", {"payload": {"a": 10**5000}}, "digits"),
]


@pytest.mark.parametrize(("field", "broken", "rule"), REFUSALS)
def test_a_broken_rule_is_refused_and_names_field_and_rule(field: str, broken: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidEvent, match=rf"^{field.replace('[', '.').replace(']', '.')}: ") as refused:
        event(**broken)
    assert refused.value.field == field
    assert rule in refused.value.rule
    assert not refused.value.retryable


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_an_attribute_of_the_event_is_no_header(name: str) -> None:
    with pytest.raises(InvalidEvent, match=f"headers.{name}"):
        event(headers={name: "x"})


def test_limits_themselves_are_allowed() -> None:
    allowed = event(
        topic="T" * 200, type="t" * 200, key="é" * 200, source="s" * 200, version=MAX_VERSION,
        headers={f"h{n}": "x" * 1024 for n in range(32)},
    )  # fmt: skip
    assert received(allowed).key == "é" * 200
    assert event(version=0).version == 0


def test_nesting_is_bounded() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidEvent, match="nested deeper"):
        event(payload=endless)


def test_a_topic_is_checked_under_the_name_given() -> None:
    assert check_topic("a/b-c_d.e") == "a/b-c_d.e"
    with pytest.raises(InvalidEvent, match="topics"):
        check_topic("a b", "topics")


@pytest.mark.parametrize(
    "text", ["a\x00b", "emoji 😀", "שלום", "e\u0301", "𠜎", "\u2028", "\x7f", "\ufeff", "\\u0000", '"\\']
)
def test_o_66_any_text_in_a_payload_comes_back_equal(text: str) -> None:
    got = received(event(payload={"t": [text], text: 1}))
    assert got.payload == {"t": [text], text: 1}
    assert hashlib.sha256(got.data).digest() == hashlib.sha256(encode_json({"t": [text], text: 1})).digest()


@pytest.mark.parametrize(
    ("payload", "field"),
    [({"t": ["\ud800"]}, "payload.t[0]"), ({"t": {"\udfff": 1}}, "payload.t.<key>"), ("\ud83d", "payload")],
)
def test_o_66_a_lone_surrogate_is_refused_with_its_path(payload: Any, field: str) -> None:
    with pytest.raises(InvalidEvent, match="surrogate") as refused:
        event(payload=payload)
    assert refused.value.field == field


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_o_67_numbers_that_json_cannot_hold_are_refused_with_their_path(number: float) -> None:
    with pytest.raises(InvalidEvent, match="JSON cannot hold") as refused:
        event(payload={"a": [1, [number]]})
    assert refused.value.field == "payload.a[1][0]"


def test_o_71_a_naive_datetime_is_refused_and_an_aware_one_keeps_its_instant() -> None:
    with pytest.raises(InvalidEvent, match="naive datetime") as refused:
        event(payload={"at": NAIVE})
    assert refused.value.field == "payload.at"
    kolkata = NAIVE.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))
    got = received(event(payload={"at": kolkata}, time=kolkata))
    assert datetime.fromisoformat(got.payload["at"]) == kolkata
    assert got.time == kolkata


# --- payloads -----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Size(str, enum.Enum):  # noqa: UP042 - the older form, whose str() is not its value
    BIG = "big"


@dataclasses.dataclass
class Money:
    amount: Decimal
    of: Colour = Colour.RED


class Struct(msgspec.Struct):
    amount: Decimal
    at: datetime
    items: list[Money]


class Model(pydantic.BaseModel):
    amount: Decimal
    other: int = pydantic.Field(alias="Other")


AT = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (Money(Decimal("0.10")), {"amount": "0.10", "of": "red"}),
        (
            Struct(Decimal("1E+3"), AT, [Money(Decimal(1))]),
            {"amount": "1E+3", "at": "2026-01-02T00:00:00+00:00", "items": [{"amount": "1", "of": "red"}]},
        ),
        (Model(amount=Decimal("2.50"), Other=1), {"amount": "2.50", "Other": 1}),
        ([Model(amount=Decimal(1), Other=2)], [{"amount": "1", "Other": 2}]),
        ((1, "a", None, True), [1, "a", None, True]),
        ({"day": date(2026, 1, 2), "id": uuid.UUID(int=5)}, {"day": "2026-01-02", "id": str(uuid.UUID(int=5))}),
        ({Size.BIG: Size.BIG}, {"big": "big"}),
        ("text", "text"),
    ],
)
def test_kinds_of_payload(payload: Any, value: Any) -> None:
    got = received(event(payload=payload))
    assert got.payload == value
    assert got.content_type == JSON


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (Money(Decimal("Infinity")), "payload.amount"),
        (Struct(Decimal(1), NAIVE, []), "payload.at"),
        (Struct(Decimal(1), AT, [Money(Decimal("sNaN"))]), "payload.items[0].amount"),
        ([Model.model_construct(amount=math.nan)], "payload[0].amount"),
        (Struct(Decimal(1), AT, [object()]), "payload"),  # type: ignore[list-item]  # what is tested
    ],
)
def test_inside_a_typed_payload_the_path_is_named_too(payload: Any, field: str) -> None:
    with pytest.raises(InvalidEvent) as refused:
        event(payload=payload)
    assert refused.value.field == field


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00\x80", bytes(range(256))])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_received_equal_as_bytes(data: bytes, kind: Any) -> None:
    got = received(event(payload=kind(data), content_type="application/octet-stream"))
    assert (got.data, got.payload, got.content_type) == (data, data, "application/octet-stream")


def test_json_given_as_bytes_is_kept_to_the_byte_and_decoded() -> None:
    data = b'{ "b": 1.10,\n "a": 9007199254740993 }'
    got = received(event(payload=data, content_type="application/vnd.bank+json; charset=utf-8"))
    assert got.data == data
    assert got.payload == {"b": 1.1, "a": 9007199254740993}


@pytest.mark.parametrize("number", [9007199254740993, 9223372036854775807, -1, 2**80, 0])
def test_o_68_integers_are_exact(number: int) -> None:
    got = received(event(payload={"n": number}, version=MAX_VERSION))
    assert (got.payload["n"], type(got.payload["n"])) == (number, int)
    assert got.version == MAX_VERSION


@pytest.mark.parametrize("text", ["1234567890.123456789", "1E+3", "0.10", "0.1234567890123456789", "-0"])
def test_o_68_decimals_are_exact_as_strings(text: str) -> None:
    got = received(event(payload={"d": Decimal(text)}))
    assert got.payload == {"d": text}
    assert str(Decimal(got.payload["d"])) == text
    assert sum(Decimal(received(event(payload=Decimal("0.10"))).payload) for _ in range(3)) == Decimal("0.30")


@pytest.mark.parametrize("payload", [None, {}, [], "", 0, False])
def test_o_72_an_empty_payload_is_that_value(payload: Any) -> None:
    got = received(event(payload=payload))
    assert got.payload == payload
    assert type(got.payload) is type(payload)


@pytest.mark.parametrize(
    ("content_type", "json_"),
    [(JSON, True), ("Application/JSON; charset=utf-8", True), ("application/x+json", True), ("text/json", False)],
)
def test_what_counts_as_json(content_type: str, json_: bool) -> None:
    assert is_json(content_type) is json_


# --- the wire -----------------------------------------------------------------------------------------------


class _Zone(tzinfo):
    """Offsets that no zone has."""

    def utcoffset(self, _when: datetime | None) -> timedelta:
        return timedelta(hours=5, minutes=45, seconds=7)

    def dst(self, _when: datetime | None) -> timedelta:
        return timedelta(0)


_names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=[*map(chr, range(32)), "\x7f"]),
    min_size=1, max_size=50,
)  # fmt: skip
_texts = st.text(st.characters(exclude_categories=["Cs"]))
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=10,
)
_contents = st.fixed_dictionaries({"payload": _json}) | st.fixed_dictionaries(
    {"payload": st.binary(), "content_type": st.just("application/octet-stream")}
)
_events = st.builds(
    lambda content, fields: event(**content, **fields),
    _contents,
    st.fixed_dictionaries(
        {"type": _names, "topic": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,20}", fullmatch=True)},
        optional={
            "key": _names,
            "version": st.integers(0, MAX_VERSION),
            "id": st.uuids(),
            "source": _names,
            "time": st.datetimes(
                min_value=datetime(2, 1, 1),
                timezones=st.sampled_from([UTC, timezone(timedelta(hours=-11)), _Zone()]),
            ),
            "headers": st.dictionaries(
                st.from_regex(r"x[a-z0-9]{0,10}", fullmatch=True),
                st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[*map(chr, range(32)), "\x7f"])),
                max_size=3,
            ),
        },
    ),
)


@settings(max_examples=150, deadline=None)
@given(_events)
def test_what_is_recorded_is_what_is_received(recorded: Event) -> None:
    got = received(recorded)
    assert got.data == recorded.data
    assert got.payload == recorded.payload
    assert (got.id, got.topic, got.type, got.key, got.version, got.source, got.headers) == (
        recorded.id, recorded.topic, recorded.type, recorded.key, recorded.version, recorded.source, recorded.headers,
    )  # fmt: skip
    if recorded.time is not None:
        assert got.time == recorded.time
    assert got.content_type == recorded.content_type or recorded.content_type is None


def test_what_is_absent_is_not_written() -> None:
    recorded = event()
    assert entry(recorded) == {
        b"data": b'{"a":1}', b"id": str(recorded.id).encode(), b"type": b"payment.received"
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(_events, max_size=6), st.integers(1, 3))
def test_events_travel_together_as_they_would_alone(events: list[Event], repeated: int) -> None:
    events = [recorded for recorded in events for _ in range(repeated)]
    runs = wire([(*as_row(recorded), 17, "further") for recorded in events])
    assert [fields for run in runs for fields in run.entries()] == [entry(recorded) for recorded in events]
    marked = [fields for run in wire([as_row(e) for e in events], "41:ab") for fields in run.entries()]
    assert [fields.pop(b"batch", None) for fields in marked] == [None] * (len(events) - 1) + [b"41:ab"] * bool(events)
    assert marked == [entry(recorded) for recorded in events]


def test_entries_with_the_same_fields_are_one_run() -> None:
    rows = [as_row(event(key=str(n), headers={"a": "1"} if n > 5 else {})) for n in range(10)]
    assert [len(run) for run in wire(rows)] == [6, 4]
    assert [len(run) for run in wire(rows, "1:ab")] == [6, 3, 1]


def test_the_time_of_a_version_7_id_stands_in_for_a_missing_one() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    got = received(event())
    assert got.time is not None
    assert before <= got.time <= datetime.now(UTC)
    assert received(event(id=uuid.uuid4())).time is None


def test_a_derived_id_is_the_same_every_time_and_another_for_another_name() -> None:
    one = received(event(id=uuid.UUID("0198f000-0000-7000-8000-000000000001")))
    # An independent implementation: SHA-1 of the id's bytes and the name, with version and variant set.
    digest = bytearray(hashlib.sha1(one.id.bytes + "receipt é".encode()).digest()[:16])
    digest[6], digest[8] = digest[6] & 0x0F | 0x50, digest[8] & 0x3F | 0x80
    assert one.derived_id("receipt é") == uuid.UUID(bytes=bytes(digest))
    assert one.derived_id("receipt é").version == 5
    others = {one.derived_id("receipt"), one.derived_id("Receipt"), received(event()).derived_id("receipt é")}
    assert one.derived_id("receipt é") not in others
    assert len(others) == 3


@pytest.mark.parametrize("name", ["", "a\x00", "\ud800", "x" * 201, 7, None])
def test_a_name_that_nothing_can_be_derived_by_is_refused(name: Any) -> None:
    with pytest.raises(InvalidEvent, match="^name: must ") as refused:
        received(event()).derived_id(name)
    assert refused.value.field == "name"


def test_ids_are_made_once_and_differ() -> None:
    one, two = event(), event()
    assert one.id.version == 7
    assert one.id < two.id
    assert dataclasses.replace(one, key="k").id == one.id


def test_unknown_fields_are_headers_and_the_relays_own_are_not() -> None:
    fields = entry(event()) | {b"tracestate": b"x=1", b"batch": b"7", b"specversion": b"1.0", "ü".encode(): b""}
    assert decode("payments", fields, 3).headers == {"tracestate": "x=1", "ü": ""}
    assert decode("payments", fields, 3).delivery_count == 3


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("id", {b"id": None}),
        ("id", {b"id": b"not-a-uuid"}),
        ("id", {b"id": b"\xff"}),
        ("type", {b"type": None}),
        ("type", {b"type": b""}),
        ("type", {b"type": b"a\x00"}),
        ("type", {b"type": b"t" * 201}),
        ("data", {b"data": None}),
        ("data", {b"data": b"{"}),
        ("data", {b"data": b""}),
        ("data", {b"data": b"\xff\xfe\x00\x80"}),
        ("data", {b"data": b"NaN"}),
        ("data", {b"data": b"1e400"}),
        ("data", {b"data": b"[" * 100_000}),
        ("data", {b"data": b"1" * 5000}),
        ("version", {b"version": b"-1"}),
        ("version", {b"version": b"1.0"}),
        ("version", {b"version": b""}),
        ("version", {b"version": b" 1"}),
        ("version", {b"version": b"9223372036854775808"}),
        ("version", {b"version": "\u0661".encode()}),
        ("subject", {b"subject": b"\xff"}),
        ("subject", {b"subject": b"a\x00b"}),
        ("time", {b"time": b"yesterday"}),
        ("time", {b"time": b"2026-01-01T00:00:00"}),
        ("source", {b"source": b"\x80"}),
        ("x", {b"x": b"\xff"}),
        ("\ufffd", {b"\xff": b"x"}),
    ],
)
def test_o_63_a_malformed_field_is_named(field: str, change: dict[bytes, bytes | None]) -> None:
    fields = {name: value for name, value in (entry(event()) | change).items() if value is not None}
    with pytest.raises(UndecodableEntry) as refused:
        decode("payments", fields)
    assert refused.value.field == field
    assert not refused.value.retryable


def test_o_63_extra_unknown_fields_do_no_harm() -> None:
    assert decode("payments", entry(event()) | {b"whatever": b"1"}).payload == {"a": 1}


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([b"id", b"type", b"data", b"version", b"time", b"subject", b"z"]), st.binary()))
def test_o_63_any_entry_is_decoded_or_refused_and_nothing_else(fields: dict[bytes, bytes]) -> None:
    with suppress(UndecodableEntry):
        assert isinstance(decode("payments", fields), Envelope)


def test_decoding_is_strict() -> None:
    for data in (b"NaN", b"Infinity", b"-Infinity", b"{'a': 1}", b"\xef\xbb\xbf1", b"1 2", b""):
        with pytest.raises(ValueError):  # noqa: PT011 - JSONDecodeError, UnicodeDecodeError and our own: all of them
            decode_json(data)


def test_o_67_no_number_becomes_infinite_on_the_way() -> None:
    """Python's json makes inf of it, which a numeric column takes, and every sum with it."""
    for data in (b"1e400", b'{"a": [-1e309]}', b"1" * 400 + b".5"):
        with pytest.raises(ValueError, match="too large for a float"):
            decode_json(data)
    assert decode_json(b"[1e308, 1e-400, -0.0, 1.5]") == [1e308, 0.0, 0.0, 1.5]


# --- jobs ----------------------------------------------------------------------------------------------------------


def test_a_job_is_an_event_whose_topic_is_its_queue() -> None:
    job = Job(queue="mail.v2", type="send", payload={"a": 1}, key="A", headers={"tenant": "t1"})
    assert isinstance(job, Event)
    assert (job.topic, job.data, job.all_headers) == ("queue/mail.v2", b'{"a":1}', {"tenant": "t1"})
    got = decode(job.topic, entry(job))
    assert (got.payload, got.key, got.headers, got.run_at) == ({"a": 1}, "A", {"tenant": "t1"}, None)


def test_what_a_job_asks_for_is_on_the_wire_and_in_no_header() -> None:
    at = datetime(2026, 7, 1, 14, 30, 0, 7, timezone(timedelta(hours=3)))
    job = Job(queue="mail", type="send", payload=None, run_at=at, priority="high", lifo=True, headers={"tenant": "t1"})
    fields = entry(job)
    assert {name: fields[name] for name in (b"runat", b"priority", b"lifo")} == {
        b"runat": b"2026-07-01T11:30:00.000007Z", b"priority": b"high", b"lifo": b"1",
    }  # fmt: skip
    got = decode("queue/mail", fields)
    assert (got.headers, got.run_at) == ({"tenant": "t1"}, at)
    assert decode("mail", fields).headers == {
        "tenant": "t1",
        **{n.decode(): fields[n].decode() for n in list(fields)[-3:]},
    }
    again = dataclasses.replace(job, priority="normal", lifo=False)
    assert again.all_headers == {"tenant": "t1", "runat": "2026-07-01T11:30:00.000007Z"}


def test_a_pause_counts_from_now() -> None:
    before = datetime.now(UTC)
    job = Job(queue="mail", type="send", payload=None, run_at=timedelta(minutes=5))
    assert isinstance(job.run_at, datetime)
    assert before <= job.run_at - timedelta(minutes=5) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("field", "broken", "rule"),
    [
        ("queue", {"queue": "a/b"}, "must match"),
        ("queue", {"queue": "a:processing"}, "must match"),
        ("queue", {"queue": "x" * 101}, "must match"),
        ("queue", {"queue": None}, "must match"),
        ("run_at", {"run_at": NAIVE}, "time zone"),
        ("run_at", {"run_at": date(2026, 1, 1)}, "must be a datetime or a timedelta, is date"),
        ("run_at", {"run_at": 5}, "must be a datetime or a timedelta, is int"),
        ("run_at", {"run_at": timedelta(seconds=-1)}, "must not lie before now"),
        ("run_at", {"run_at": timedelta.max}, "between the years 1 and 9999"),
        ("run_at", {"run_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))}, "between the years"),
        ("priority", {"priority": "urgent"}, "must be high, normal or low"),
        ("priority", {"priority": ["high"]}, "must be high, normal or low"),
        ("lifo", {"lifo": 1}, "must be True or False"),
        ("headers.runat", {"headers": {"runat": "2026"}}, "outbox.Job has a field"),
        ("payload", {"payload": math.nan}, "nan"),
    ],
)
def test_o_71_a_jobs_broken_rule_is_refused_and_names_field_and_rule(
    field: str, broken: dict[str, Any], rule: str
) -> None:
    with pytest.raises(InvalidEvent, match=rule) as caught:
        Job(**{"queue": "mail", "type": "send", "payload": 1, **broken})
    assert caught.value.field == field


def test_a_jobs_headers_are_reserved_in_queues_only() -> None:
    headers = {"priority": "1", "lifo": "x", "runat": "never"}
    assert decode("mail", entry(event(topic="mail", headers=headers))).headers == headers
    for name in headers:
        with pytest.raises(InvalidEvent, match=rf"headers\.{name}"):
            event(topic="queue/mail", headers={name: "high"})
    with pytest.raises(InvalidEvent, match="of a queue must be queue/ and a name"):
        event(topic="queue/a/b")


@pytest.mark.parametrize(
    "text",
    [
        b"soon", b"2026-01-01T00:00:00", b"\xff",
        # Python reads these, and the queue does not: they would have run at once, however late they are for.
        b"2030-01-31T09:00Z", b"20300131T090000Z", b"2030-W05-4T09:00:00Z", b"2030-01-31T09:00:00,5Z",
        b"2030-01-31_09:00:00Z", b"2030-01-31T09:00:00+05:30:15",
    ],
)  # fmt: skip
def test_o_64_a_job_whose_time_is_none_is_undecodable(text: bytes) -> None:
    fields = entry(Job(queue="mail", type="send", payload=1)) | {b"runat": text}
    with pytest.raises(UndecodableEntry, match="runat"):
        decode("queue/mail", fields)


# --- nothing that runs code ---------------------------------------------------------------------------------

_MODULES_THAT_RUN_CODE = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "yaml",
    "jsonpickle",
}
_CALLS_THAT_RUN_CODE = {"eval", "exec", "compile", "__import__"}


def runs_code(source: str) -> list[str]:
    """What a module uses that could turn data into running code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS_THAT_RUN_CODE:
            found.append(node.func.id)
        found += [name for name in names if name.split(".")[0] in _MODULES_THAT_RUN_CODE]
    return found


def test_o_93_nothing_in_the_packages_unpickles_or_evaluates() -> None:
    files = [file for package in ("outbox", "consumer", "migrations") for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 10
    assert {str(file): found for file in files if (found := runs_code(file.read_text()))} == {}


def test_o_93_the_check_sees_what_it_looks_for() -> None:
    bad = "import pickle\nfrom yaml import load\ndef f(x):\n    import shelve.x\n    return eval(x), re.compile(x)\n"
    assert sorted(runs_code(bad)) == ["eval", "pickle", "shelve.x", "yaml"]


def test_o_93_a_pickle_is_undecodable_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    poison = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for fields in ({b"data": poison}, {b"job": poison}, {b"id": poison}, {poison: poison}):
        with pytest.raises(UndecodableEntry):
            decode("payments", {**entry(event()), **fields} if b"data" in fields else fields)
    assert not marker.exists()
