"""Typed payloads: which annotations count, what a payload becomes by them, and what is said of one that does not fit."""

from __future__ import annotations

import enum
import functools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar

import msgspec
import pydantic
import pydantic.dataclasses
import pytest

from consumer import Consumer
from consumer.payloads import Payload, payload_of
from outbox import Envelope, Event
from outbox.envelope import decode_json
from outbox.errors import PayloadMismatch, SettingsError

if TYPE_CHECKING:
    from nowhere import Session  # type: ignore[import-not-found]


class Currency(enum.Enum):
    SAR = "SAR"
    USD = "USD"


@dataclass
class Line:
    price: Decimal
    count: int = 1


@dataclass
class Payment:
    amount: Decimal
    id: uuid.UUID | None = None
    at: datetime | None = None
    currency: Currency = Currency.SAR
    lines: list[Line] = field(default_factory=list)
    notes: dict[str, Line] = field(default_factory=dict)


class Deposit(msgspec.Struct, tag="deposit"):
    amount: Decimal


class Refund(msgspec.Struct, tag="refund"):
    amount: Annotated[Decimal, msgspec.Meta(description="halala")]
    reason: Annotated[str, msgspec.Meta(max_length=5)] = ""


class Model(pydantic.BaseModel):
    amount: Decimal
    lines: list[Line] = []
    currency: Currency = Currency.SAR
    at: pydantic.AwareDatetime | None = None

    @pydantic.field_validator("amount")
    @classmethod
    def positive(cls, amount: Decimal) -> Decimal:
        if amount < 0:
            raise ValueError(f"{amount} is negative")
        return amount


@pydantic.dataclasses.dataclass
class Checked:
    amount: Annotated[int, pydantic.Field(gt=0)]


@dataclass
class Strange:
    model: Model


class Named(NamedTuple):
    amount: Decimal


class Typed(TypedDict):
    amount: Decimal


def received(payload: Any, **fields: Any) -> Envelope:
    """The event as a consumer receives what a producer records."""
    event = Event(topic="payments", type="paid", payload=payload, **fields)
    content_type = event.content_type or "application/json"
    decoded = event.data if isinstance(payload, bytes) else decode_json(event.data)
    return Envelope(event.id, "payments", "paid", event.data, decoded, content_type=content_type)


def foreign(data: str | bytes) -> Envelope:
    """What a producer wrote that is not ours."""
    return Envelope(uuid.uuid4(), "payments", "paid", data if isinstance(data, bytes) else data.encode(), None)


def typed(kind: Any, event: Envelope) -> Any:
    return Payload(kind).typed(event).payload


def refusal(kind: Any, event: Envelope) -> str:
    with pytest.raises(PayloadMismatch) as caught:
        typed(kind, event)
    assert str(caught.value) == f"{caught.value.field}: {caught.value.rule}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None  # a traceback would show the value
    return str(caught.value)


# --- annotations ---------------------------------------------------------------------------------------------------


def plain(event: Any, session: Any) -> None: ...
def bare(event, session): ...  # type: ignore[no-untyped-def]
def enveloped(event: Envelope, session: Any) -> None: ...
def anything(event: Envelope[Any], session: Any) -> None: ...
def objects(event: Envelope[object], session: Any) -> None: ...
def many(events: list[Envelope], session: Any) -> None: ...
def payment(event: Envelope[Payment], session: Any) -> None: ...
def only_checked(event: Envelope[Payment], session: Session) -> None: ...
def payments(events: list[Envelope[Payment]], session: Any) -> None: ...
def sequence(events: Sequence[Envelope[Payment]], session: Any) -> None: ...
def iterable(events: Iterable[Envelope[Payment]], session: Any) -> None: ...
def positional(*arguments: Any) -> None: ...
def constrained(event: Envelope[Annotated[int, msgspec.Meta(ge=0)]], session: Any) -> None: ...
async def asynchronous(event: Envelope[Payment], session: Any) -> None: ...


T = TypeVar("T")


def generic(event: Envelope[T], session: Any) -> None: ...


class Service:
    def method(self, event: Envelope[Payment], session: Any) -> None: ...
    def __call__(self, event: Envelope[Payment], session: Any) -> None: ...


def decorated(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> None:
        function(*arguments)

    return wrapper


def later(more: int, event: Envelope[Payment], session: Any) -> None: ...


@pytest.mark.parametrize("handler", [plain, bare, enveloped, anything, objects, generic, positional, print, max])
def test_without_a_type_the_payload_stays_as_it_is(handler: Any) -> None:
    assert payload_of(handler, batch=False) is None
    consumer = Consumer("wallet", topics=["payments"])
    consumer.on("paid")(handler)
    event = received({"amount": "1"})
    assert consumer.handler("paid").typed(event) is event  # type: ignore[union-attr]


def test_a_batch_without_a_type_too() -> None:
    assert payload_of(many, batch=True) is None
    assert payload_of(plain, batch=True) is None


@pytest.mark.parametrize(
    "handler",
    [
        payment, only_checked, asynchronous, Service().method, Service(), decorated(payment), functools.partial(payment),
        functools.partial(later, 1), functools.partial(decorated(later), 1),
    ],
)  # fmt: skip
def test_the_first_parameters_annotation_is_the_type(handler: Any) -> None:
    found = payload_of(handler, batch=False)
    assert found is not None
    assert found.kind is Payment


@pytest.mark.parametrize("handler", [payments, sequence, iterable])
def test_of_a_batch_it_is_that_of_its_items(handler: Any) -> None:
    found = payload_of(handler, batch=True)
    assert found is not None
    assert found.kind is Payment


def test_annotated_types_keep_their_constraints() -> None:
    found = payload_of(constrained, batch=False)
    assert found is not None
    with pytest.raises(PayloadMismatch, match="payload: Expected `int` >= 0"):
        found.typed(received(-1))


def unknown(event: Envelope[Nowhere], session: Any) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def broken(event: "Envelope[", session: Any) -> None: ...  # type: ignore[syntax]  # noqa: F722
def impossible(event: Envelope[Strange], session: Any) -> None: ...
def ambiguous(event: Envelope[Payment | Line], session: Any) -> None: ...
def misled(event: Payment, session: Any) -> None: ...
def misled_too(event: Model, session: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "batch", "says"),
    [
        (
            unknown,
            False,
            r"the annotation of event, Envelope\[Nowhere\], cannot be resolved .*NameError: name 'Nowhere'",
        ),
        (broken, False, "cannot be resolved"),
        (impossible, False, r"Strange cannot be the type of a payload: no JSON is a Model"),
        (ambiguous, False, "cannot be the type of a payload: Type unions may not contain more than one"),
        (misled, False, r"gets envelopes: annotate event with Envelope\[.*Payment\]"),
        (misled_too, False, r"gets envelopes: annotate event with Envelope\[.*Model\]"),
        (payments, False, "gets one event, but events is annotated with list"),
        (payment, True, r"gets many events: annotate event with list\[.*Envelope\[.*Payment\]\]"),
        (enveloped, True, r"gets many events: annotate event with list"),
    ],
)
def test_annotations_that_cannot_be_used(handler: Any, batch: bool, says: str) -> None:
    consumer = Consumer("wallet", topics=["payments"])
    register = consumer.on_batch if batch else consumer.on
    with pytest.raises(SettingsError, match=f"consumer wallet: the handler of 'paid', {handler.__name__}, .*{says}"):
        register("paid")(handler)
    assert consumer.handler("paid") is None


# --- what payloads become ------------------------------------------------------------------------------------------


def test_all_that_an_envelope_has_stays_but_the_payload() -> None:
    event = received({"amount": "1"})
    found = Payload(Payment).typed(event)
    assert found.payload == Payment(Decimal(1))
    assert (found.id, found.data, found.type, event.payload) == (event.id, event.data, "paid", {"amount": "1"})


@pytest.mark.parametrize("kind", [Payment, Model])
def test_what_a_producer_records_comes_back_equal(kind: Any) -> None:
    recorded = kind(
        amount=Decimal("0.10"), at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), currency=Currency.USD,
        lines=[Line(Decimal("1234567890.123456789"), 3)],
    )  # fmt: skip
    assert typed(kind, received(recorded)) == recorded


def test_o_68_numbers_are_exact_and_money_adds_up() -> None:
    """Big integers, and decimals as strings or as numbers of another producer's."""
    for number in (9007199254740993, 9223372036854775807, -1, 10**40, -(10**300)):
        assert typed(int, received(number)) == number
        assert typed(Payment, foreign(f'{{"amount": {number}}}')).amount == number
    for digits in ("0.1234567890123456789", "1234567890.123456789", "1E+3", "0.10", "12345678901234567890.5"):
        as_text = typed(Payment, received({"amount": Decimal(digits)})).amount
        as_number = typed(Payment, foreign(f'{{"amount": {digits}}}')).amount
        assert (str(as_text), str(as_number)) == (digits, digits)
    assert sum(typed(Payment, received({"amount": "0.10"})).amount for _ in range(3)) == Decimal("0.30")
    assert typed(Model, received({"amount": Decimal("0.1234567890123456789")})).amount == Decimal(
        "0.1234567890123456789"
    )


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "sNaN"])
def test_o_67_what_is_no_number_is_no_amount(text: str) -> None:
    assert refusal(Payment, received({"amount": text})).startswith("payload.amount: Expected a finite decimal")
    assert refusal(Deposit, received({"type": "deposit", "amount": text})).startswith("payload.amount: ")
    assert refusal(dict[str, Decimal], received({"a": text})) == "payload[...]: Expected a finite decimal"
    assert refusal(list[Line], received([{"price": "1"}, {"price": text}])).startswith("payload[1].price: ")
    assert refusal(Typed, received({"amount": text})) == "payload[...]: Expected a finite decimal"
    assert refusal(Named, received([text])) == "payload[0]: Expected a finite decimal"
    assert refusal(Model, received({"amount": text})) == "payload.amount: finite_number"


def test_o_71_naive_datetimes_are_refused_and_others_are_the_instant() -> None:
    for there in ("2026-01-02T03:04:05Z", "2026-01-02T08:34:05+05:30"):
        found = typed(Payment, received({"amount": "1", "at": there})).at
        assert found == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    naive = received({"amount": "1", "at": "2026-01-02T03:04:05"})
    assert refusal(Payment, naive) == "payload.at: Expected `datetime` with a timezone component"
    assert refusal(Model, naive) == "payload.at: timezone_aware"
    assert refusal(time, received("03:04:05")) == "payload: Expected `time` with a timezone component"
    assert typed(date, received("2026-01-02")) == date(2026, 1, 2)
    assert refusal(dict[datetime, int], foreign('{"2026-01-02T03:04:05": 1}')).startswith("payload.<key>: ")


@pytest.mark.parametrize("value", [None, {}, [], "", 0, False])
def test_o_72_null_and_empty_payloads_are_what_they_are(value: Any) -> None:
    assert typed(type(value) if value is not None else None, received(value)) == value
    assert refusal(Payment, received(value)).startswith("payload: ")
    assert refusal(Model, received(value)).startswith("payload")
    assert typed(Payment | None, received(None)) is None


@pytest.mark.parametrize("text", ["a\x00b", "😀", "مرحبا", "e\u0301", "\U00020000"])
def test_o_66_texts_are_equal(text: str) -> None:
    assert typed(str, received(text)) == text
    assert typed(dict[str, str], received({text: text})) == {text: text}


def test_o_66_a_lone_surrogate_of_a_strangers_is_no_text() -> None:
    assert "cannot be read" in refusal(str, foreign(b'"\\ud800"'))
    assert refusal(Model, foreign(b'{"amount": "\\ud800"}')) == "payload: json_invalid"


def test_o_69_bytes_are_for_handlers_that_want_bytes() -> None:
    binary = received(b"\xff\xfe\x00\x80", content_type="application/octet-stream")
    assert typed(bytes, binary) == b"\xff\xfe\x00\x80"
    assert refusal(Payment, binary) == "payload: is application/octet-stream, the handler wants JSON"
    assert refusal(Model, binary) == "payload: is application/octet-stream, the handler wants JSON"
    assert refusal(bytes, received({})) == "payload: is application/json, the handler wants bytes"


def test_unions_by_tag() -> None:
    assert typed(Deposit | Refund, received(Refund(Decimal(5), "late"))) == Refund(Decimal(5), "late")
    assert refusal(Deposit | Refund, received({"type": "secret"})) == "payload.type: Invalid value"
    assert typed(Model | list[Model], received([{"amount": "1"}])) == [Model(amount=Decimal(1))]


def test_pydantics_dataclasses_are_checked_by_pydantic() -> None:
    assert typed(Checked, received({"amount": 5})) == Checked(5)
    assert refusal(Checked, received({"amount": 0})) == "payload.amount: greater_than"


def test_nothing_is_taken_for_a_number_because_it_looks_like_one() -> None:
    for value in ("5", 5.0, True, None, [5]):
        assert refusal(Line, received({"price": "1", "count": value})).startswith("payload.count: Expected `int`, got")


# --- what is said --------------------------------------------------------------------------------------------------


class Guarded(msgspec.Struct):
    amount: int

    def __post_init__(self) -> None:
        if self.amount == 1:
            raise ValueError("secret 1 - at `$.secret`")
        if self.amount == 2:
            raise KeyError("secret 2")


class Holder(msgspec.Struct, forbid_unknown_fields=True):
    guarded: Guarded | None = None
    by_id: dict[uuid.UUID, int] | None = None
    kind: Literal["a", 7] | None = None
    level: Annotated[int, msgspec.Meta(ge=0)] = 0
    code: Annotated[str, msgspec.Meta(pattern="^[a-z]$")] = "a"


@pytest.mark.parametrize(
    ("kind", "payload", "says"),
    [
        (Payment, {}, "payload: Object missing required field `amount`"),
        (Payment, {"amount": "secret"}, "payload.amount: Invalid decimal string"),
        (Payment, {"amount": ["secret"]}, "payload.amount: Expected `decimal`, got `array`"),
        (Payment, {"amount": "1", "currency": "secret"}, "payload.currency: Invalid enum value"),
        (Payment, {"amount": "1", "id": "secret"}, "payload.id: Invalid UUID"),
        (Payment, {"amount": "1", "at": "secret"}, "payload.at: Invalid RFC3339 encoded datetime"),
        (Payment, {"amount": "1", "lines": [{"price": "1"}, {"price": None}]}, "payload.lines[1].price: Expected `decimal`, got `null`"),
        (Payment, {"amount": "1", "notes": {"secret": {"price": "x"}}}, "payload.notes[...].price: Invalid decimal string"),
        (Holder, {"guarded": {"amount": 1}}, "payload.guarded: is refused by its type: ValueError"),
        (Holder, {"guarded": {"amount": 2}}, "payload: is refused by its type: KeyError"),
        (Holder, {"by_id": {"secret": 1}}, "payload.by_id.<key>: Invalid UUID"),
        (Holder, {"kind": "secret"}, "payload.kind: Invalid enum value"),
        (Holder, {"kind": 4711}, "payload.kind: Invalid enum value"),
        (Holder, {"level": -4711}, "payload.level: Expected `int` >= 0"),
        (Holder, {"code": "secret"}, "payload.code: Expected `str` matching regex '^[a-z]$'"),
        (Holder, {"odd": "secret"}, "payload: Object contains unknown field `odd`"),
        (Model, {"amount": "secret"}, "payload.amount: decimal_parsing"),
        (Model, {"amount": "-4711"}, "payload.amount: value_error"),
        (Model, {"amount": "x", "currency": "secret", "at": "secret"}, "payload.amount: decimal_parsing, and 2 more"),
        (Model, {"amount": "1", "lines": [{"price": "secret"}]}, "payload.lines[0].price: decimal_parsing"),
    ],
)  # fmt: skip
def test_the_path_and_the_rule_are_named_never_the_value(kind: Any, payload: Any, says: str) -> None:
    said = refusal(kind, received(payload))
    assert said == says
    assert "secret" not in said
    assert "4711" not in said


def test_nesting_without_end_is_no_payload() -> None:
    deep = foreign("[" * 100_000 + "]" * 100_000)
    assert refusal(list[Any], deep).startswith("payload: cannot be read")
    assert refusal(list[Model], deep).startswith("payload")
