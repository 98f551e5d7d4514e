"""Settings of the producer's side, and what both sides' settings are made of: frozen, validated when built.

Values come from keyword arguments, else from the environment: ``DATABASE_URL`` and ``REDIS_URL``, then one variable a
field with the prefix ``OUTBOX_``. The environment is read when a settings object is built, never on import. Addresses
hold passwords: they are secrets here, and no error, repr or log shows them.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outbox.address import RedisAddress
from outbox.envelope import DEFAULT_MAX_PAYLOAD_BYTES, TOPIC_PATTERN, check_topic, is_queue
from outbox.errors import InvalidEvent, SettingsError

_SCHEMA = re.compile(r"[\w-][\w$ .-]*")
_KEY_PREFIX = r"[A-Za-z0-9._/:-]{0,100}"
_SECOND = 1.0


def check_schema(name: str) -> str:
    """Return `name` if it can be a schema of ours: letters, digits and ``_ - . $`` and spaces, at most 63 bytes.

    Raises:
        SettingsError: it cannot.
    """
    if not isinstance(name, str) or not _SCHEMA.fullmatch(name) or len(name.encode()) > 63:
        raise SettingsError(
            f"schema: must be letters, digits, '_', '-', '.', '$' or spaces, at most 63 bytes; is {name!r}"
        )
    if name.lower().startswith("pg_"):
        raise SettingsError(f"schema: names that start with pg_ are PostgreSQL's own; is {name!r}")
    return name


def check_prefix(prefix: str) -> str:
    """Return `prefix` if Redis' keys may begin with it: braces, say, would part a queue's keys on a cluster.

    Raises:
        SettingsError: they may not.
    """
    if not isinstance(prefix, str) or not re.fullmatch(_KEY_PREFIX, prefix):
        raise SettingsError(f"prefix: must match {_KEY_PREFIX}, is {prefix!r}")
    return prefix


def database_address(url: str) -> str:
    """A PostgreSQL address as libpq takes it: a URL (also SQLAlchemy's ``postgresql+psycopg://``) or ``key=value``.

    Raises:
        SettingsError: it is malformed; the address is not shown, since it may hold a password.
    """
    address = re.sub(r"^postgres(ql)?(\+\w+)?://", "postgresql://", url)
    try:
        hosts = str(conninfo_to_dict(address).get("host") or "").split(",")
    except psycopg.Error:
        raise SettingsError("DATABASE_URL: is not a PostgreSQL address (postgresql://user@host:port/name)") from None
    if any("@" in host[1:] and not host.startswith("/") for host in hosts):  # of the password, which errors would show
        raise SettingsError("DATABASE_URL: has an @ in the name of its host; one in a password is written %40")
    return address


def redis_address(url: str) -> str:
    """A Redis or Valkey URL: ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://host:port,host:port``,
    ``redis+sentinel://host:port,host:port/service/0``, both also as ``rediss+…``; or the same with ``valkey``.

    Raises:
        SettingsError: it is malformed; the address is not shown, since it may hold a password.
    """
    address = re.sub(r"^valkey(s?(?:\+\w+)?)://", r"redis\1://", url)
    try:
        RedisAddress.parse(address)
    except ValueError as error:
        raise SettingsError(f"REDIS_URL: {error}") from None
    return address


def _secret(check: Any) -> Any:
    def validate(value: SecretStr) -> SecretStr:
        try:
            return SecretStr(check(value.get_secret_value()))
        except SettingsError as error:
            raise ValueError(str(error).partition(": ")[2]) from None

    return AfterValidator(validate)


def _schema(value: str) -> str:
    try:
        return check_schema(value)
    except SettingsError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


def _lanes(value: object) -> object:
    if isinstance(value, str):
        pairs = [item.partition("=") for item in value.split(",") if item.strip()]
        if not all(sep and count.strip().isascii() and count.strip().isdigit() for _, sep, count in pairs):
            raise ValueError("must look like payments=8,orders=2")
        value = {topic.strip(): int(count) for topic, _, count in pairs}
    if isinstance(value, dict):
        for topic, count in value.items():
            try:
                check_topic(topic)
            except InvalidEvent:
                raise ValueError(f"a topic must match {TOPIC_PATTERN}, one is {topic!r}") from None
            if is_queue(topic):
                raise ValueError(f"a queue has no lanes, {topic} is one")
            if not isinstance(count, int) or not 1 <= count <= 1024:
                raise ValueError(f"a topic has 1 to 1024 lanes, {topic} is set to {count!r}")
    return value


DatabaseUrl = Annotated[SecretStr, _secret(database_address)]
RedisUrl = Annotated[SecretStr, _secret(redis_address)]
SchemaName = Annotated[str, AfterValidator(_schema)]
Lanes = Annotated[dict[str, int], NoDecode, BeforeValidator(_lanes)]


class Settings(BaseSettings):
    """What both sides need to know. Errors name the variable and the rule, and never show a value that may be secret.

    Raises:
        SettingsError: a value is missing, malformed or contradicts another.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, populate_by_name=True, env_ignore_empty=True
    )

    #: PostgreSQL: a URL or libpq's key=value form. No default.
    database_url: DatabaseUrl = Field(default=..., validation_alias="DATABASE_URL")
    #: Redis or Valkey URL: of a server, a cluster or sentinels (see `redis_address`). No default.
    redis_url: RedisUrl = Field(default=..., validation_alias="REDIS_URL")
    #: Put before every Redis key, so that installations can share a server. Default: nothing.
    #: Relay and consumers share ``OUTBOX_KEY_PREFIX``.
    key_prefix: str = Field(
        default="",
        pattern=f"^{_KEY_PREFIX}$",
        validation_alias="OUTBOX_KEY_PREFIX",
    )
    #: Lanes (streams) a topic is spread over by hash of the key: ``payments=8,orders=2``. Relay and consumers
    #: share ``OUTBOX_LANES``, and both see that it is not changed while events are kept. Default: one lane each.
    lanes: Lanes = Field(default_factory=dict, validation_alias="OUTBOX_LANES")
    #: Longest time to wait for Redis' answer, in seconds, beyond what a blocking read waits by itself. Together with
    #: ``backoff_max_seconds`` it is how long work may stand still after Redis is back. Default 3.
    redis_timeout_seconds: float = Field(default=3 * _SECOND, gt=0, le=300)
    #: File touched after every round of work, for health checks of a container. Default: none.
    heartbeat_file: str | None = None
    #: Whether the command refuses to start where the doctor finds danger, and waits for servers that do not answer, instead
    #: of warning in the log. Default: no.
    strict: bool = False

    #: Environment prefix, for error messages.
    prefix: ClassVar[str] = "OUTBOX_"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError("; ".join(self._explain(dict(item)) for item in error.errors())) from None

    @classmethod
    def variable(cls, field: str) -> str:
        """The environment variable of a field."""
        alias = cls.model_fields[field].validation_alias
        return alias if isinstance(alias, str) else cls.prefix + field.upper()

    @classmethod
    def _explain(cls, item: dict[str, Any]) -> str:
        name = str(item["loc"][0]) if item["loc"] else ""
        shown = cls.variable(name) if name in cls.model_fields else name.upper()
        rule = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            rule = "is not set"
        return f"{shown}: {rule}" if name else rule


class RelaySettings(Settings):
    """Settings of `outbox relay`; environment prefix ``OUTBOX_``."""

    model_config = SettingsConfigDict(env_prefix="OUTBOX_")

    #: Schema of the outbox tables. Default ``public``.
    schema_name: SchemaName = Field(default="public", validation_alias="OUTBOX_SCHEMA")
    #: Most events in a batch: one Redis script call for each stream it touches, about 3 µs an event during which Redis
    #: serves nobody else. Default 2000.
    batch_rows: int = Field(default=2000, ge=1, le=10_000)
    #: Payload bytes after which a batch ends (the event that reaches it is still part of it). Default 4 MiB.
    batch_bytes: int = Field(default=4 * DEFAULT_MAX_PAYLOAD_BYTES, ge=1024, le=64 * DEFAULT_MAX_PAYLOAD_BYTES)
    #: Shortest and longest pause between looks at the outbox, in seconds; the pause grows while nothing comes. A look at
    #: an idle outbox costs two index probes a partition. Defaults 0.005 and 0.1.
    poll_min_seconds: float = Field(default=0.005, gt=0, le=10)
    poll_max_seconds: float = Field(default=0.1, gt=0, le=60)
    #: How often the streams' markers are looked at, so that a loss in Redis is repaired without waiting for the next
    #: event; also how often a relay that stands by looks whether it is needed. Default 1.
    check_seconds: float = Field(default=_SECOND, gt=0, le=60)
    #: Longest pause between tries while Redis or PostgreSQL fails, in seconds; pauses grow from 0.05 with jitter. Default 1.
    backoff_max_seconds: float = Field(default=_SECOND, gt=0, le=60)
    #: How long the outbox keeps events that are published and acknowledged, in seconds: for replay, reconciliation and
    #: repair. Default 7 days. Consumers compare it with how long they remember.
    retention_seconds: int = Field(default=7 * 86_400, ge=60, le=10 * 365 * 86_400)
    #: How long streams keep entries that every group has acknowledged, in seconds. Default 60.
    stream_keep_seconds: float = Field(default=60 * _SECOND, ge=0, le=365 * 86_400)
    #: How often the groups' progress is looked at and streams are trimmed, in seconds. Default 5.
    trim_seconds: float = Field(default=5 * _SECOND, gt=0, le=3600)
    #: Unacknowledged entries of one stream beyond which the relay pauses it; the outbox holds the rest. What is on its way
    #: then, three batches at most, still goes out. Default 1,000,000.
    max_stream_length: int = Field(default=1_000_000, ge=1)
    #: Share of Redis' maxmemory in use beyond which the relay pauses all streams. Default 0.8.
    max_memory_share: float = Field(default=0.8, gt=0, le=1)
    #: Replicas that must have a batch before the next is published (WAIT). While fewer have it, nothing is published. It
    #: costs each round trip to Redis the replicas' one besides. Default 0.
    wait_replicas: int = Field(default=0, ge=0, le=100)
    #: Whether a batch must also be on disk (WAITAOF, Redis 7.2 or newer, or Valkey): ``local``: the server's; ``all``: and
    #: that of ``wait_replicas`` replicas; ``no``. With ``appendfsync everysec`` that takes up to a second. Default ``no``.
    wait_aof: Literal["no", "local", "all"] = "no"
    #: How long to wait for either, in seconds, before it is a failure, after which the relay pauses and waits again. Default 2.
    wait_timeout_seconds: float = Field(default=2 * _SECOND, ge=0.001, le=60)
    #: Positions in one partition of the outbox. Whole partitions are dropped, never rows. Default 1,000,000.
    partition_rows: int = Field(default=1_000_000, ge=1000, le=1_000_000_000)
    #: Empty partitions kept ahead of the newest position. Default 3.
    partitions_ahead: int = Field(default=3, ge=1, le=100)

    def model_post_init(self, _context: Any) -> None:
        if self.poll_min_seconds > self.poll_max_seconds:
            raise SettingsError("OUTBOX_POLL_MIN_SECONDS must not be longer than OUTBOX_POLL_MAX_SECONDS")
        if self.wait_aof == "all" and not self.wait_replicas:
            raise SettingsError(
                "OUTBOX_WAIT_AOF is all, but OUTBOX_WAIT_REPLICAS is 0: say of how many, or set it to local"
            )


#: Read by commands, or by tests, and no field of settings.
_OTHERS = frozenset({"OUTBOX_DATABASE_URL", "OUTBOX_TEST_CONTAINERS"})
#: What Kubernetes sets in every container for a service that is called like us.
_KUBERNETES = re.compile(r".*_SERVICE_(HOST|PORT(_\w+)?)|.*_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")


def unknown_variables(*read: type[Settings]) -> dict[str, str | None]:
    """Variables of the environment that begin like those of the settings `read`, and that none of them reads: a setting
    that is misspelled would go without notice. With the name that was most likely meant, if one is near."""
    documented = {settings.variable(field) for settings in read for field in settings.model_fields}
    known = (
        documented | _OTHERS | {settings.prefix + field.upper() for settings in read for field in settings.model_fields}
    )
    ours = tuple(settings.prefix for settings in read)
    names = {name: name.upper() for name in sorted(os.environ)}  # in either case, as the settings read them
    return {
        name: _nearest(upper, sorted(documented))
        for name, upper in names.items()
        if upper.startswith(ours) and upper not in known and not _KUBERNETES.fullmatch(upper)
    }


def _nearest(name: str, documented: list[str]) -> str | None:
    rest = name.partition("_")[2]
    by_rest = {each.partition("_")[2]: each for each in documented}
    if rest in by_rest:  # it is a setting of the other side
        return by_rest[rest]
    if near := get_close_matches(name, documented, 1, cutoff=0.8):
        return near[0]
    return next((by_rest[each] for each in get_close_matches(rest, by_rest, 1, cutoff=0.8)), None)


def database_url_from_environment() -> str:
    """``DATABASE_URL`` for commands that need nothing else.

    Raises:
        SettingsError: it is not set or malformed.
    """
    url = os.environ.get("DATABASE_URL")
    if not url:
        raise SettingsError("DATABASE_URL: is not set")
    return database_address(url)
