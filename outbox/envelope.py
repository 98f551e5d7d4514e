"""The published language: `Event` as a producer records it, and `Job`, which is one for a queue; `Envelope` as a consumer receives
it, and the wire between.

On the wire an event is a flat list of fields, named as in CloudEvents 1.0 (https://github.com/cloudevents/spec), so
that other languages can read a stream without this library. What is absent or default is not written:

================  =====================================================  ==============================
field             meaning                                                default when absent
================  =====================================================  ==============================
``data``          payload, bytes as the producer encoded them            (always written)
``id``            event id, a UUID in canonical form                     (always written)
``type``          event type                                             (always written)
``subject``       key: what the event is about, and what is kept in      no key
                  order
``version``       version of the key's entity, a decimal integer         no version
``datacontenttype``  media type of ``data``                              ``application/json``
``time``          when it happened, RFC 3339                             the instant inside a UUIDv7 id
``source``        what produced it, a URI reference                      no source
``batch``         on the last entry of a batch in a stream: the batch's  not the last
                  number and the beginning of its token; everything of
                  the batch stands before it
(other)           headers: CloudEvents extension attributes              no headers
================  =====================================================  ==============================

In what goes to a queue (a topic that begins with ``queue/``) three headers are the `Job`'s own: ``runat``, when it is to run (RFC
3339 in UTC, with microseconds; absent: at once), ``priority`` (``high`` or ``low``; absent: normal) and ``lifo`` (``1``; absent: it
comes after those before it).

No I/O here, and no third party's types beyond msgspec.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Generic, Literal, get_args

import msgspec

from outbox.errors import InvalidEvent, UndecodableEntry

if sys.version_info >= (3, 13):
    from typing import TypeVar
else:
    from typing_extensions import TypeVar
if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    from uuid_utils.compat import uuid7

JSON: Final = "application/json"
MAX_NAME: Final = 200  #: characters in a topic, type, key or source
MAX_HEADERS: Final = 32
MAX_HEADER_BYTES: Final = 1024
DEFAULT_MAX_PAYLOAD_BYTES: Final = 1_048_576
MAX_VERSION: Final = 2**63 - 1

#: One pattern for names that become part of a Redis key: no braces (hash tags), colons (lanes), spaces or controls.
TOPIC_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}"
#: Topics that begin so are queues: what they carry is done by one worker of a pool. The rest is the queue's name.
QUEUE_PREFIX: Final = "queue/"
QUEUE_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
Priority = Literal["high", "normal", "low"]
#: Headers that are a job's own, and in events for streams headers like any other.
RUN_AT, PRIORITY, LIFO = JOB_HEADERS = ("runat", "priority", "lifo")
#: CloudEvents 1.0, "Naming Conventions": lower-case letters and digits.
HEADER_PATTERN: Final = r"[a-z][a-z0-9]{0,39}"
#: Attribute names that are the envelope's own, and so cannot be headers.
RESERVED: Final = frozenset(
    [
        "id",
        "source",
        "specversion",
        "type",
        "subject",
        "time",
        "datacontenttype",
        "dataschema",
        "data",
        "database64",
        "version",
        "batch",
        "topic",
    ]
)
_TOPIC = re.compile(TOPIC_PATTERN)
_QUEUE = re.compile(QUEUE_PATTERN)
_HEADER = re.compile(HEADER_PATTERN)
#: What queue_publish.lua can read as well, which says when a job is due; it takes what it cannot read as due at once.
_RUN_AT = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d(:?\d\d)?)", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_CONTENT_TYPE = re.compile(r"[!-~][ -~]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a producer records: one fact, in the transaction that made it true.

    Args:
        topic: where it is published; letters, digits and ``._/-``, at most 200.
        type: what happened, e.g. ``payment.received``; at most 200 characters, none of them control characters.
        payload: any JSON value, dataclass, msgspec Struct or pydantic model; or bytes together with `content_type`.
            Stored and delivered byte-equal. Integers are exact; Decimals become JSON strings, so they are exact too.
        key: what the event is about (an account, an order). Events of one key are published in commit order.
        version: the entity's version after the change, 0 to 2**63-1; lets a consumer skip what is older than applied.
        id: made once, here (UUIDv7), so that every retry of the producer keeps it. A handler derives it from the event
            that it handles (`Envelope.derived_id`).
        time: when it happened, an aware datetime; default: the instant in a UUIDv7 id, or when it is recorded.
        source: what produced it (CloudEvents ``source``), at most 200 characters.
        headers: at most 32 of up to 1,024 bytes; names are lower-case letters and digits (CloudEvents extension
            attributes), e.g. ``traceparent``. In an event for a queue those of `Job` are refused.
        content_type: media type of a bytes payload.

    Raises:
        InvalidEvent: a field breaks its rule; names both.
    """

    topic: str
    type: str
    payload: Any
    key: str | None = None
    version: int | None = None
    id: uuid.UUID = field(default_factory=uuid7)
    time: datetime | None = None
    source: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str | None = None

    #: The payload as it is stored and published; encoded when the event is made.
    data: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        check_topic(self.topic)
        _check_text("type", self.type)
        if self.key is not None:
            _check_text("key", self.key)
        if self.source is not None:
            _check_text("source", self.source)
        if self.version is not None:
            if type(self.version) is not int:
                raise InvalidEvent("version", f"must be an integer, is {type(self.version).__name__}")
            if not 0 <= self.version <= MAX_VERSION:
                raise InvalidEvent("version", f"must lie between 0 and 2**63-1, is {self.version}")
        if not isinstance(self.id, uuid.UUID):
            raise InvalidEvent("id", f"must be a uuid.UUID, is {type(self.id).__name__}")
        if self.time is not None:
            if not isinstance(self.time, datetime):
                raise InvalidEvent("time", f"must be a datetime, is {type(self.time).__name__}")
            if self.time.tzinfo is None or self.time.utcoffset() is None:
                raise InvalidEvent(
                    "time", "must carry a time zone; a naive datetime means a different instant elsewhere"
                )
        object.__setattr__(self, "headers", _checked_headers(self.headers, for_queue=is_queue(self.topic)))
        if isinstance(self.payload, bytes | bytearray | memoryview):
            if self.content_type is None:
                raise InvalidEvent("content_type", "must be given with a bytes payload, e.g. application/octet-stream")
            _check_content_type(self.content_type)
            data = bytes(self.payload)
            if is_json(self.content_type):
                try:
                    decode_json(data)
                except (ValueError, RecursionError) as error:
                    raise InvalidEvent("payload", f"is not the JSON that content_type says: {error}") from None
        else:
            if self.content_type is not None and not is_json(self.content_type):
                raise InvalidEvent("content_type", "goes with a bytes payload; other payloads are JSON")
            if self.content_type is not None:
                _check_content_type(self.content_type)
            data = encode_json(self.payload)
        object.__setattr__(self, "data", data)

    @property
    def all_headers(self) -> Mapping[str, str]:
        """The headers as they are recorded."""
        return self.headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Event):
    """Work that exactly one worker of a pool is to do, recorded in the transaction that makes it necessary: an `Event` for a queue.

    Args:
        queue: the queue's name; letters, digits and ``._-``, at most 100. Its topic is ``queue/`` and that.
        type: what is to be done, e.g. ``send_receipt``; a consumer of the queue has a `consumer.Consumer.job` for it.
        run_at: not before this, an aware datetime; or a timedelta from now, by this machine's clock. Redis' clock says when it is
            time. Default: at once.
        priority: ``high`` before ``normal`` before ``low``, yet those have a share of the workers' time, too.
        lifo: it comes before those that wait already, not after them.
        id: of two jobs with the same id one is done.

    Raises:
        InvalidEvent: a field breaks its rule; names both.
    """

    topic: str = field(init=False, repr=False, default="")
    queue: str
    run_at: datetime | timedelta | None = None
    priority: Priority = "normal"
    lifo: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "topic", QUEUE_PREFIX + check_queue(self.queue))
        Event.__post_init__(self)
        object.__setattr__(self, "run_at", _checked_run_at(self.run_at))
        if self.priority not in get_args(Priority):
            raise InvalidEvent("priority", f"must be high, normal or low, is {_shown(self.priority)}")
        if not isinstance(self.lifo, bool):
            raise InvalidEvent("lifo", f"must be True or False, is {_shown(self.lifo)}")

    @property
    def all_headers(self) -> Mapping[str, str]:
        own = {}
        if isinstance(self.run_at, datetime):
            own[RUN_AT] = rfc3339(self.run_at)
        if self.priority != "normal":
            own[PRIORITY] = self.priority
        if self.lifo:
            own[LIFO] = "1"
        return {**self.headers, **own}


#: The payload's type; ``Envelope`` alone is ``Envelope[Any]``.
P_co = TypeVar("P_co", covariant=True, default=Any)


@dataclass(frozen=True, slots=True)
class Envelope(Generic[P_co]):
    """An event as a consumer receives it: ``Envelope[Payment]`` has a `Payment` as its payload.

    Attributes:
        id, topic, type, key, version, time, source, headers: as recorded; `time` falls back to the instant in a
            UUIDv7 id.
        data: the payload's bytes, as recorded.
        content_type: their media type.
        payload: the decoded JSON value, for other media types the bytes. Integers are exact. Of the type that the handler's
            annotation gives it, if that does.
        delivery_count: how often it was delivered to this consumer, 1 for the first time.
        run_at: of a job, when it was to run; None: at once.
    """

    id: uuid.UUID
    topic: str
    type: str
    data: bytes
    payload: P_co
    key: str | None = None
    version: int | None = None
    content_type: str = JSON
    time: datetime | None = None
    source: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delivery_count: int = 1
    run_at: datetime | None = None

    def derived_id(self, name: str) -> uuid.UUID:
        """An id for what follows from this event: the same whenever and wherever this event is handled (UUIDv5, RFC 9562,
        section 5.5, of the event's id and the name).

        Args:
            name: what follows (``receipt``, ``line-3``), 1 to 200 characters. Of all that follows from one event, whoever
                records it, each needs another name: consumers take a second event of the same id for the first again.

        Raises:
            InvalidEvent: the name has control characters or lone surrogates, or another length.
        """
        _check_text("name", name)
        return uuid.uuid5(self.id, name)


# --- rules ---------------------------------------------------------------------------------------------------------


def check_topic(topic: str, name: str = "topic") -> str:
    """Return `topic` if it is a valid topic name.

    Raises:
        InvalidEvent: it is not.
    """
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic):
        raise InvalidEvent(name, f"must match {TOPIC_PATTERN}, is {_shown(topic)}")
    if is_queue(topic) and not _QUEUE.fullmatch(topic, len(QUEUE_PREFIX)):
        raise InvalidEvent(
            name, f"of a queue must be {QUEUE_PREFIX} and a name that matches {QUEUE_PATTERN}, is {topic!r}"
        )
    return topic


def check_queue(queue: str) -> str:
    """Return `queue` if it is a valid name of a queue.

    Raises:
        InvalidEvent: it is not.
    """
    if not isinstance(queue, str) or not _QUEUE.fullmatch(queue):
        raise InvalidEvent("queue", f"must match {QUEUE_PATTERN}, is {_shown(queue)}")
    return queue


def is_queue(topic: str) -> bool:
    """Whether a topic (or the stream of that name) is a queue."""
    return topic.startswith(QUEUE_PREFIX)


def rfc3339(instant: datetime) -> str:
    """An aware instant as RFC 3339 in UTC with microseconds, so that the order of the texts is that of the instants."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_json(content_type: str) -> bool:
    """Whether a media type is JSON: ``application/json`` or a ``+json`` suffix (RFC 6839)."""
    base = content_type.split(";", 1)[0].strip().lower()
    return base == JSON or base.endswith("+json")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_text(name: str, value: str) -> None:
    if not isinstance(value, str):
        raise InvalidEvent(name, f"must be a string, is {type(value).__name__}")
    if not 1 <= len(value) <= MAX_NAME:
        raise InvalidEvent(name, f"must have 1 to {MAX_NAME} characters, has {len(value)}")
    if _CONTROL.search(value):
        raise InvalidEvent(name, "must not contain control characters or lone surrogates")


def _check_content_type(value: str) -> None:
    if not isinstance(value, str) or not _CONTENT_TYPE.fullmatch(value):
        raise InvalidEvent("content_type", f"must be a media type of at most 200 ASCII characters, is {_shown(value)}")


def _checked_run_at(run_at: datetime | timedelta | None) -> datetime | None:
    if run_at is None:
        return None
    try:
        if isinstance(run_at, timedelta):
            if run_at < timedelta(0):
                raise InvalidEvent("run_at", "must not lie before now")
            return datetime.now(UTC) + run_at
        if not isinstance(run_at, datetime):
            raise InvalidEvent("run_at", f"must be a datetime or a timedelta, is {type(run_at).__name__}")
        if run_at.tzinfo is None or run_at.utcoffset() is None:
            raise InvalidEvent("run_at", "must carry a time zone; a naive datetime means a different instant elsewhere")
        return run_at.astimezone(UTC)
    except OverflowError:
        raise InvalidEvent("run_at", "must lie between the years 1 and 9999, in UTC") from None


def _checked_headers(headers: Mapping[str, str], *, for_queue: bool) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise InvalidEvent("headers", f"must be a mapping, is {type(headers).__name__}")
    if len(headers) > MAX_HEADERS:
        raise InvalidEvent("headers", f"must be at most {MAX_HEADERS}, are {len(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER.fullmatch(name):
            raise InvalidEvent("headers", f"names must match {HEADER_PATTERN} (CloudEvents), one is {_shown(name)}")
        if name in RESERVED:
            raise InvalidEvent(f"headers.{name}", "is an attribute of the event itself")
        if for_queue and name in JOB_HEADERS:
            raise InvalidEvent(f"headers.{name}", "is a job's own in a queue; outbox.Job has a field for it")
        if not isinstance(value, str):
            raise InvalidEvent(f"headers.{name}", f"must be a string, is {type(value).__name__}")
        if _CONTROL.search(value):
            raise InvalidEvent(f"headers.{name}", "must not contain control characters or lone surrogates")
        if len(value.encode()) > MAX_HEADER_BYTES:
            raise InvalidEvent(f"headers.{name}", f"must be at most {MAX_HEADER_BYTES} bytes")
    return dict(headers)


# --- payloads ------------------------------------------------------------------------------------------------------


def encode_json(payload: Any, name: str = "payload") -> bytes:
    """Encode a payload (or what goes by that name) as compact UTF-8 JSON, exactly or not at all.

    Raises:
        InvalidEvent: something in it has no exact JSON form; names the path (``payload.items[2]``).
    """
    plain = _plain(payload, name, 0)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_json(data: bytes) -> Any:
    """Decode JSON strictly: UTF-8, no NaN or Infinity, nor a number that a float cannot hold (1e400). Integers are exact.

    Raises:
        ValueError: it is not JSON.
    """
    return _JSON.decode(data.decode())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large for a float; write it as a string")
    return number


_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


_MAX_DEPTH = 64
_MAX_INTEGER_BITS = 13_288  #: 4,000 digits; Python's default limit for reading them is 4,300
#: What msgspec leaves to `_plain`, which checks and names the path.
_LEAVES = (Decimal, datetime, date, time, uuid.UUID, bytes, bytearray, memoryview)


def _plain(value: Any, path: str, depth: int) -> Any:
    """The value as JSON's own types, or InvalidEvent naming the path of what has no exact form."""
    kind = type(value)
    if kind is str:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidEvent(path, "has a lone surrogate, which UTF-8 cannot hold") from None
        return value
    if kind is bool or value is None:
        return value
    if isinstance(value, int) and not isinstance(value, enum.Enum):
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise InvalidEvent(path, "has more than 4,000 digits, which Python does not read back")
        return int(value)
    if kind is float:
        if not math.isfinite(value):
            raise InvalidEvent(path, f"is {value}, which JSON cannot hold")
        return value
    if depth > _MAX_DEPTH:
        raise InvalidEvent(path, f"is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidEvent(path, f"has the key {_shown(key)}; keys must be strings")
            name = _plain(str.__str__(key), f"{path}.<key>", depth)
            plain[name] = _plain(item, f"{path}.{key}", depth + 1)
        return plain
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, enum.Enum):
        return _plain(value.value, path, depth + 1)
    if isinstance(value, str):
        return _plain(str.__str__(value), path, depth + 1)
    if isinstance(value, float):
        return _plain(float(value), path, depth + 1)
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise InvalidEvent(path, f"is {value}, which JSON cannot hold")
        return str(value)
    if isinstance(value, datetime):
        if value.tzinfo is None or value.utcoffset() is None:
            raise InvalidEvent(path, "is a naive datetime; give it a time zone")
        return value.isoformat()
    if isinstance(value, time) and value.tzinfo is None:
        raise InvalidEvent(path, "is a naive time; give it a time zone")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidEvent(path, "is bytes, which JSON cannot hold; make the whole payload bytes with a content_type")
    if isinstance(value, msgspec.Struct):
        try:
            fields = msgspec.to_builtins(value, builtin_types=_LEAVES)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidEvent(path, f"has no JSON form: {error}") from None
        return _plain(fields, path, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _plain(fields, path, depth + 1)
    if hasattr(kind, "model_dump") and hasattr(kind, "model_fields"):  # pydantic 2, without depending on it
        return _plain(value.model_dump(by_alias=True), path, depth + 1)
    raise InvalidEvent(path, f"is a {kind.__name__}, which has no JSON form here")


# --- the wire ------------------------------------------------------------------------------------------------------

#: A row of the outbox as the relay reads it, in this order. Versions are text, times RFC 3339, headers JSON text.
ROW: Final = ("data", "event_id", "type", "key", "version", "content_type", "time", "source", "headers")
_KEY, _HEADERS = ROW.index("key"), ROW.index("headers")  #: from the key on, a column may be absent
_COLUMNS: Final = [itemgetter(index) for index in range(len(ROW))]
_WIRE: Final = ("data", "id", "type", "subject", "version", "datacontenttype", "time", "source")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive entries with the same fields, column by column: what travels fast, since most entries are alike.

    Attributes:
        names: the fields' names, ``data`` first.
        columns: for each name the values of all entries: bytes for ``data``, text for the others.
    """

    names: Sequence[str]
    columns: Sequence[Sequence[Any]]

    def __len__(self) -> int:
        return len(self.columns[0])

    def entries(self) -> Iterator[dict[bytes, bytes]]:
        """Each entry as a consumer will receive it."""
        names = [name.encode() for name in self.names]
        for data, *texts in zip(*self.columns, strict=True):
            yield dict(zip(names, (data, *(text.encode() for text in texts)), strict=True))


def wire(rows: Sequence[Sequence[Any]], batch: str | None = None) -> list[Run]:
    """The entries of rows (see `ROW`; further columns do not matter), in their order; the last says that `batch` (see
    `outbox.transport.Marker.label`) ends."""
    if not rows:
        return []
    columns = [list(map(column, rows)) for column in _COLUMNS]
    alike = not any(columns[_HEADERS]) and all(
        column.count(None) in (0, len(rows)) for column in columns[_KEY:_HEADERS]
    )
    runs = (
        [_run(columns, ())]
        if alike
        else [_run(list(zip(*some, strict=True)), shape[-1]) for shape, some in groupby(rows, _shape)]
    )
    if batch is not None:
        run = runs.pop()
        if len(run) > 1:
            runs.append(Run(run.names, [column[:-1] for column in run.columns]))
        runs.append(Run([*run.names, "batch"], [*(column[-1:] for column in run.columns), (batch,)]))
    return runs


def _shape(row: Sequence[Any]) -> tuple[Any, ...]:
    """What two rows of one run have in common: which fields there are, and the names of the headers."""
    return (*(value is None for value in row[_KEY:_HEADERS]), tuple(json.loads(row[_HEADERS])) if row[_HEADERS] else ())


def _run(columns: Sequence[Sequence[Any]], headers: Sequence[str]) -> Run:
    given = [(name, column) for name, column in zip(_WIRE, columns[:_HEADERS], strict=True) if column[0] is not None]
    if headers:
        values = [json.loads(text).values() for text in columns[_HEADERS]]
        given += zip(headers, zip(*values, strict=True), strict=True)
    return Run([name for name, _ in given], [column for _, column in given])


def decode(topic: str, fields: Mapping[bytes, bytes], delivery_count: int = 1) -> Envelope:
    """The event in a stream's entry. Unknown fields are headers; ``batch`` is the relay's own.

    Raises:
        UndecodableEntry: a required field is missing or one is malformed; names it.
    """
    texts = _texts(fields)
    raw_id, kind, data = texts.pop("id", None), texts.pop("type", None), fields.get(b"data")
    if raw_id is None:
        raise UndecodableEntry("id", "is missing")
    if not kind:
        raise UndecodableEntry("type", "is missing")
    if data is None:
        raise UndecodableEntry("data", "is missing")
    try:
        event_id = uuid.UUID(raw_id)
    except ValueError:
        raise UndecodableEntry("id", "is not a UUID") from None
    version = None
    raw_version = texts.pop("version", None)
    if raw_version is not None:
        if not (raw_version.isascii() and raw_version.isdigit()) or len(raw_version) > 19:
            raise UndecodableEntry("version", "is not an integer from 0 to 2**63-1")
        version = int(raw_version)
        if version > MAX_VERSION:
            raise UndecodableEntry("version", "is not an integer from 0 to 2**63-1")
    content_type = texts.pop("datacontenttype", None) or JSON
    payload: Any = data
    if content_type is JSON or is_json(content_type):
        try:
            payload = decode_json(data)
        except (ValueError, RecursionError):
            raise UndecodableEntry("data", f"is not {content_type}") from None
    when = _time(texts, "time") or _instant(event_id)
    run_at = None
    if is_queue(topic):
        written = texts.get(RUN_AT)
        run_at = _time(texts, RUN_AT)
        if written is not None and not _RUN_AT.fullmatch(written):
            raise UndecodableEntry(RUN_AT, "is not an RFC 3339 time")
        for name in JOB_HEADERS:
            texts.pop(name, None)
    key, source = texts.pop("subject", None), texts.pop("source", None)
    return Envelope(
        event_id, topic, kind, data, payload, key, version, content_type, when, source, texts, delivery_count, run_at
    )


def _time(texts: dict[str, str], name: str) -> datetime | None:
    """Take a time out of the fields.

    Raises:
        UndecodableEntry: it is none.
    """
    text = texts.pop(name, None)
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UndecodableEntry(name, "is not an RFC 3339 time") from None
    if found.tzinfo is None:
        raise UndecodableEntry(name, "has no time zone")
    return found


#: Fields that are no headers and have no attribute either.
_UNHEARD: Final = frozenset([b"data", b"batch", b"specversion"])


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """The fields that are text, by name; all at once, since most are in order.

    Raises:
        UndecodableEntry: one is not.
    """
    try:
        texts = {name.decode(): raw.decode() for name, raw in fields.items() if name not in _UNHEARD}
    except UnicodeDecodeError:
        pass
    else:
        together = "".join(texts.values())
        if "\x00" not in together and (len(together) <= MAX_NAME or len(max(texts.values(), key=len)) <= MAX_NAME):
            return texts
    texts = {}
    for name, raw in sorted(fields.items(), key=_attributes_first):
        if name in _UNHEARD:
            continue
        shown = name.decode(errors="replace")
        try:
            text = texts[name.decode()] = raw.decode()
        except UnicodeDecodeError:
            raise UndecodableEntry(shown, "is not UTF-8") from None
        if shown in _WIRE:
            if "\x00" in text:
                raise UndecodableEntry(shown, "has a NUL character, which PostgreSQL cannot hold")
            if len(text) > MAX_NAME:
                raise UndecodableEntry(shown, f"has more than {MAX_NAME} characters")
    return texts


def _attributes_first(field: tuple[bytes, bytes]) -> int:
    name = field[0].decode(errors="replace")
    return _WIRE.index(name) if name in _WIRE else len(_WIRE)


def _instant(event_id: uuid.UUID) -> datetime | None:
    """The millisecond in a UUIDv7 (RFC 9562, section 5.7), or None for other versions."""
    bits = event_id.int
    if bits >> 76 & 15 != 7 or bits >> 62 & 3 != 2:  # as `version` and `variant` tell
        return None
    try:
        return datetime.fromtimestamp((bits >> 80) / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
