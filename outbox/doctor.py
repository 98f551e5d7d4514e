"""What is wrong, or will be, with the servers and what is set there: found before it hurts, with what to do about it.

`examine` looks and changes nothing; a server that is down is a finding and not an error. Every finding has a code that
stays the same, and docs/reference/doctor.md explains each. What concerns the servers as such is here for both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeVar

import psycopg

from outbox import schema as schemas
from outbox.errors import SchemaError, StreamUnusable, TransportError
from outbox.partitions import MOVED_ROWS, Partition
from outbox.settings import RelaySettings, Settings
from outbox.store import (
    Connection,
    DatabaseFacts,
    GroupProgress,
    OpenTransaction,
    Store,
    StreamHead,
    database_facts,
    keeps_session,
    lacking,
    may_partition,
    open_transactions,
    prepared_transactions,
    reading,
    unused_slots,
)
from outbox.transport.base import ServerFacts, StreamInfo, topic_of
from outbox.transport.router import Router

T = TypeVar("T")
Level = Literal["ok", "warning", "error"]

#: What the relay's role needs to publish at all, by table.
PUBLISHING: Final = {
    "outbox_schema_version": "SELECT",
    "outbox": "SELECT",
    "outbox_batch": "SELECT, INSERT",
    "outbox_stream": "SELECT, INSERT",
    "outbox_epoch": "SELECT, INSERT",
    "outbox_group": "SELECT, INSERT, UPDATE",
    "outbox_pause": "SELECT, INSERT, UPDATE, DELETE",
}
#: What it needs besides for retention, for removing a group, and after a restore into another cluster.
UPKEEP: Final = {
    "outbox": "UPDATE",
    "outbox_default": "SELECT, UPDATE, DELETE",
    "outbox_batch": "DELETE",
    "outbox_stream": "DELETE",
    "outbox_group": "DELETE",
}
_SUPPORTED = (14, 18)  # major versions of PostgreSQL
_REDIS_AT_LEAST = (7, 0)
_WAITAOF_AT_LEAST = (7, 2)
#: How long a transaction in the database may be open before it is worth a warning.
TRANSACTION_SECONDS: Final = 3600.0
#: How long PostgreSQL may take for one thing that it is asked.
_ANSWER_SECONDS: Final = 30.0
#: How long a pooler may take to give us a second session.
_POOLER_SECONDS: Final = 2.0
#: Probed when no stream is known yet.
_SOME_STREAM = "doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        code: what was looked at; stays the same.
        level: ``ok``; ``warning``: works, but something is lost, slow or at risk; ``error``: does not work, or events
            can be lost from the transport again and again.
        what: what was found.
        do: what to do about it; empty if nothing.
    """

    code: str
    level: Level
    what: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is a warning.

    Attributes:
        transaction_seconds: how long a transaction of anybody in the database is open. Default 1 hour.
        idle_seconds: how long one is open without doing anything. Default 1 minute.
        clock_seconds: difference between the clocks of PostgreSQL, Redis and this machine. Default 5.
        silent_seconds: how long a group has not acknowledged anything although there is something. Default 1 day.
        memory_share: share of Redis' memory in use, as a part of what the relay pauses at. Default 0.75.
    """

    transaction_seconds: float = TRANSACTION_SECONDS
    idle_seconds: float = 60
    clock_seconds: float = 5
    silent_seconds: float = 86_400
    memory_share: float = 0.75


def ok(code: str, what: str) -> Finding:
    """A finding that nothing is to be done about."""
    return Finding(code, "ok", what)


def warning(code: str, what: str, do: str) -> Finding:
    """A finding that can wait."""
    return Finding(code, "warning", what, do)


def error(code: str, what: str, do: str) -> Finding:
    """A finding that cannot wait."""
    return Finding(code, "error", what, do)


#: Outages: the look is to be taken again.
_AWAY: Final = frozenset({"database-unavailable", "redis-unavailable"})
#: Errors that pass, which relay and consumers name when they meet them, and wait for.
_PASSING: Final = frozenset({"redis-memory", "redis-aof", "redis-snapshot", "stream-unusable"})
#: Warnings by which events are lost, streams stand still, or the worst cannot be seen.
_GRAVE: Final = frozenset({"database-synchronous-commit", "redis-cluster", "redis-info"})


def dangerous(finding: Finding) -> bool:
    """Whether it means loss or standing still, and does not pass by itself: what is looked for at the start."""
    if finding.level == "error":
        return finding.code not in _AWAY | _PASSING
    return finding.level == "warning" and finding.code in _GRAVE


def away(finding: Finding) -> bool:
    """Whether a server did not answer, so that what it was to be asked is not known."""
    return finding.code in _AWAY


class Examination:
    """Findings as they are made; a server that does not answer is one of them.

    Attributes:
        connection: to PostgreSQL, if there is one; it may take `_ANSWER_SECONDS` for a question.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.connection: Connection | None = None

    def ask(self, question: Callable[[], T]) -> T | None:
        """The answer; None and a finding if the server does not give one."""
        connection = self.connection
        try:
            if connection is None or connection.closed:
                return question()
            with schemas.answering(connection, _ANSWER_SECONDS):
                return question()
        except TransportError as failure:
            self._away(
                error("redis-unavailable", f"Redis does not do what is asked: {_one_line(failure)}",
                      "See that the server runs and that REDIS_URL (host, port, user, password) is right.")
            )  # fmt: skip
        except psycopg.Error as failure:
            self._away(
                error("database-unavailable", f"PostgreSQL does not do what is asked: {_one_line(failure)}",
                      "See that the server runs and that DATABASE_URL (host, port, user, password, name) is right.")
            )  # fmt: skip
        return None

    def facts(self, connection: Connection, settings: Settings) -> DatabaseFacts | None:
        """What PostgreSQL says about itself; from now on it is asked by this connection."""
        self.connection = connection
        facts = self.ask(lambda: database_facts(connection))
        if facts is None or not facts.pooled or not facts.transactions:
            return facts
        try:
            with closing(connect(settings, "doctor")) as other, schemas.answering(other, _POOLER_SECONDS):
                return replace(facts, keeps_session=keeps_session(connection, other))
        except psycopg.Error:  # it has no second session for us
            return facts

    def _away(self, finding: Finding) -> None:
        """Once for each server."""
        if all(before.code != finding.code for before in self.findings):
            self.findings.append(finding)

    def add(self, findings: Iterable[Finding]) -> bool:
        """Add what is found; whether there is no error in it, so that what rests on it can be looked at."""
        before = len(self.findings)
        self.ask(lambda: self.findings.extend(findings))
        return all(finding.level != "error" for finding in self.findings[before:])


def examine(settings: RelaySettings, limits: Limits | None = None, consumer_schema: str = "public") -> list[Finding]:
    """Look at everything that the relay needs. Changes nothing, and raises nothing for a server that is down.

    Args:
        consumer_schema: where the consumers' tables are, if they are in the same database.
    """
    seen, limits = Examination(), limits or Limits()
    known = _Known()
    connection = seen.ask(lambda: connect(settings, "outbox doctor"))
    if connection is not None:
        with closing(connection):
            _look_into_database(seen, connection, settings, limits, known, consumer_schema)
    with closing(transport(settings)) as there:
        servers = facts_of(seen, there)
        if servers:
            seen.add(every_redis(servers, limits, settings.max_memory_share))
            seen.add(_safety(servers, settings))
            seen.add(redis_rights(there, known.streams, "relay"))
            seen.add(_groups(there, known.progress, limits))
    seen.add(clocks(known.facts, servers, limits))
    return seen.findings


@dataclass(slots=True)
class _Known:
    """What PostgreSQL knows that Redis is asked about."""

    facts: DatabaseFacts | None = None
    streams: Sequence[str] = ()
    progress: Sequence[GroupProgress] = ()


def _look_into_database(
    seen: Examination,
    connection: Connection,
    settings: RelaySettings,
    limits: Limits,
    known: _Known,
    consumer_schema: str,
) -> None:
    store = Store(settings.schema_name)
    known.facts = seen.facts(connection, settings)
    if known.facts is None:
        return
    seen.add(database(known.facts))
    if not known.facts.transactions:
        return
    seen.add(transactions(connection, known.facts, limits))
    if not seen.add(tables(connection, "outbox", settings.schema_name, PUBLISHING)):
        return
    seen.add(_outbox(connection, store, settings, known))
    seen.add(_retention(connection, store, settings, {topic_of(stream) for stream in known.streams}, consumer_schema))


def connect(settings: Settings, application: str) -> Connection:
    """A connection to look with."""
    return schemas.connect(settings.database_url.get_secret_value(), application, autocommit=True)


def transport(settings: Settings) -> Router:
    """A transport to look with."""
    return Router.from_url(
        settings.redis_url.get_secret_value(),
        prefix=settings.key_prefix,
        timeout_seconds=settings.redis_timeout_seconds,
    )


# --- PostgreSQL, for both sides ------------------------------------------------------------------------------------------


def database(facts: DatabaseFacts) -> Iterator[Finding]:
    """The server and what is set there."""
    major = facts.version // 10_000
    lowest, highest = _SUPPORTED
    if major < lowest:
        yield error("database-version", f"PostgreSQL is {major}", f"Upgrade it: {lowest} to {highest} are supported.")
    elif major > highest:
        yield warning(
            "database-version", f"PostgreSQL is {major}, newer than this program",
            f"Look for a newer version of this program: it was tested with {lowest} to {highest}.",
        )  # fmt: skip
    else:
        yield ok("database-version", f"PostgreSQL is {major}")
    if facts.in_recovery or facts.read_only:
        why = "a standby" if facts.in_recovery else "read-only (default_transaction_read_only)"
        yield error("database-writable", f"this database is {why}", "Let DATABASE_URL lead to the primary.")
    else:
        yield ok("database-writable", "the database can be written to")
    if facts.fsync:
        yield ok("database-fsync", "fsync is on")
    else:
        yield error(
            "database-fsync", "fsync is off: a crash of the machine can lose or garble everything",
            "Set fsync = on, except where the data is worth nothing.",
        )  # fmt: skip
    if facts.synchronous_commit == "off":
        yield warning(
            "database-synchronous-commit",
            "synchronous_commit is off: a crash can lose commits of the last moments, even those already published",
            "Set it on (the default) for this role and for the producers.",
        )
    else:
        yield ok("database-synchronous-commit", f"synchronous_commit is {facts.synchronous_commit}")
    if facts.transactions:
        mode = {True: "session", False: "transaction", None: "session or transaction"}[facts.keeps_session]
        how = f"through a pooler in {mode} mode, which is fine" if facts.pooled else "directly"
        yield ok("database-pooler", f"the server is reached {how}")
    else:
        do = schemas.CHANGE_POOLING
        yield error("database-pooler", schemas.STATEMENT_POOLING, f"{do[:1].upper()}{do[1:]}.")


def transactions(connection: Connection, facts: DatabaseFacts, limits: Limits) -> Iterator[Finding]:
    """Who holds the oldest snapshot of the database, and what else keeps VACUUM and changes of partitions waiting."""
    with reading(connection):
        found = open_transactions(connection)
        prepared = prepared_transactions(connection)
        slots = unused_slots(connection)
    if not facts.sees_sessions:
        yield warning(
            "sessions-hidden", "this role does not see what other roles' sessions do, so those are not looked at",
            "GRANT pg_read_all_stats to this role.",
        )  # fmt: skip
    else:
        yield ok("sessions-hidden", "this role sees what other roles' sessions do")
    yield _oldest_snapshot([transaction for transaction in found if transaction.holds], limits)
    idle = [t for t in found if t.idle_seconds is not None and t.idle_seconds >= limits.idle_seconds]
    for transaction in idle:
        yield warning(
            "idle-in-transaction",
            f"{_who(transaction)} has been idle in a transaction for {lasting(transaction.idle_seconds or 0)}: its locks "
            "may keep partitions from being made and dropped",
            f"Make it commit; or end it: SELECT pg_terminate_backend({transaction.pid}); set "
            "idle_in_transaction_session_timeout against the next one.",
        )
    if not idle:
        yield ok("idle-in-transaction", f"no session is idle in a transaction for {lasting(limits.idle_seconds)}")
    for gid, owner, seconds in prepared:
        yield warning(
            "prepared-transaction",
            f"transaction {gid!r} of {owner} was prepared {lasting(seconds)} ago and holds its locks and snapshot",
            "Ask its transaction manager; or COMMIT PREPARED or ROLLBACK PREPARED it.",
        )
    if not prepared:
        yield ok("prepared-transaction", "no prepared transactions")
    for slot in slots:
        yield warning(
            "unused-slot", f"nobody reads replication slot {slot!r}, which keeps WAL and perhaps dead rows",
            "Start its reader again, or SELECT pg_drop_replication_slot(…).",
        )  # fmt: skip
    if not slots:
        yield ok("unused-slot", "no replication slot is without a reader")


def _oldest_snapshot(holders: Sequence[OpenTransaction], limits: Limits) -> Finding:
    if not holders:
        return ok("oldest-snapshot", "nobody holds a snapshot")
    oldest = holders[0]
    what = f"the oldest snapshot is {lasting(oldest.seconds)} old, held by {_who(oldest)}"
    if oldest.seconds < limits.transaction_seconds:
        return ok("oldest-snapshot", what)
    return warning(
        "oldest-snapshot", f"{what}; the relay goes on, but VACUUM removes nothing that died since, anywhere in the database",
        f"Make it commit, or end it: SELECT pg_terminate_backend({oldest.pid}).",
    )  # fmt: skip


def _who(transaction: OpenTransaction) -> str:
    state = "active" if transaction.idle_seconds is None else "idle"
    return f"pid {transaction.pid} ({transaction.application or 'no application_name'}, {transaction.role}, {state})"


def tables(connection: Connection, branch: schemas.Branch, schema: str, wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the tables are of this version, and whether we have the rights `wanted` on them."""
    with reading(connection):
        missing = lacking(connection, schema, wanted)
    if missing:
        yield error("database-rights", f"this role lacks {', '.join(missing)}", f"GRANT it, in schema {schema}.")
        return
    try:
        with reading(connection):
            schemas.check_revision(connection, branch, schema)
    except SchemaError as failure:
        what, _, do = str(failure).partition("; ")
        yield error("schema-revision", what, f"{do[:1].upper()}{do[1:]}.")
        return
    yield ok("database-rights", f"this role has its rights on the tables of {branch}")
    yield ok("schema-revision", f"the tables of {branch} in schema {schema} are at revision {schemas.head(branch)}")


def upkeep_rights(connection: Connection, schema: str, wanted: Mapping[str, str]) -> Finding:
    """Whether this role has the rights `wanted`, without which only what is old stays."""
    with reading(connection):
        missing = lacking(connection, schema, wanted)
    if not missing:
        return ok("upkeep-rights", "this role may remove what is old")
    return warning(
        "upkeep-rights", f"this role lacks {', '.join(missing)}: it works, but what is old cannot be removed",
        f"GRANT it, in schema {schema}.",
    )  # fmt: skip


def partition_rights(connection: Connection, schema: str, table: str) -> Finding:
    """Whether this role can make and drop partitions."""
    with reading(connection):
        allowed = may_partition(connection, schema, table)
    if allowed:
        return ok("partition-rights", f"this role can make and drop partitions of {table}")
    return warning(
        "partition-rights", f"this role can neither make nor drop partitions of {table}: rows pile up in {table}_default",
        f"Make it (a member of) the owner of {table} and its partitions, and GRANT CREATE on schema {schema}.",
    )  # fmt: skip


def partitions(present: Sequence[Partition], schema: str, table: str) -> Iterator[Finding]:
    """What persons attached, detached or changed."""
    shown = f"{schema}.{table}"
    if not any(found.default for found in present):
        yield error(
            "default-partition-missing", f"{table} has no default partition: a row that no other one takes is refused, and its "
            "transaction fails",
            f"Attach what was detached (ALTER TABLE {shown} ATTACH PARTITION {shown}_default DEFAULT), or make one (CREATE "
            f"TABLE {shown}_default PARTITION OF {shown} DEFAULT).",
        )  # fmt: skip
    else:
        yield ok("default-partition-missing", f"{table} has its default partition")
    if names := [f"{found.schema}.{found.name}" for found in present if not (found.ours or found.default)]:
        yield warning(
            "foreign-partitions", f"{len(names)} partitions of {table} are not as they were made: {', '.join(names[:5])}",
            "They have a name, schema, kind or owner of their own. They are used like the others, but never dropped for their age: detach or drop them when nobody needs their rows.",
        )  # fmt: skip
    else:
        yield ok("foreign-partitions", f"all partitions of {table} are as they were made")


# --- the outbox ------------------------------------------------------------------------------------------------------------


def _outbox(connection: Connection, store: Store, settings: RelaySettings, known: _Known) -> Iterator[Finding]:
    yield upkeep_rights(connection, settings.schema_name, UPKEEP)
    yield partition_rights(connection, settings.schema_name, "outbox")
    yield from _partitions(connection, store, settings)
    with reading(connection):
        heads, known.progress = store.heads(connection), store.progress(connection)
    known.streams = [head.stream for head in heads]
    yield from _lanes(heads, settings)


def _retention(
    connection: Connection, store: Store, settings: RelaySettings, topics: set[str], consumer_schema: str
) -> Iterator[Finding]:
    """Ledgers must remember for longer than an event can come again."""
    stays = math.ceil(settings.stream_keep_seconds)
    needed = StreamInfo(None, settings.retention_seconds, None, stays).remember_seconds or 0
    with reading(connection):
        ledgers = [found for found in store.ledgers(connection, consumer_schema) or () if found[1] in topics]
    what = (
        f"events are kept for {lasting(settings.retention_seconds)} (OUTBOX_RETENTION_SECONDS) and stay in streams for "
        f"{lasting(stays)} (OUTBOX_STREAM_KEEP_SECONDS): ledgers must remember for {math.ceil(needed / 86_400)} days "
        "(CONSUMER_LEDGER_RETENTION_DAYS)"
    )
    short = [(consumer, seconds) for consumer, _, seconds in ledgers if seconds < needed]
    for consumer, seconds in dict.fromkeys(short):
        yield error(
            "retention", f"{what}, that of consumer {consumer} does for {lasting(seconds)}: an event that comes again could be "
            "applied again, and the consumer stops",
            "Let it remember for longer first, or lower the other two. If it is gone for good: outbox drop-group "
            f"{consumer}, then consumer forget {consumer}.",
        )  # fmt: skip
    if not short:
        seen = len({consumer for consumer, _, _ in ledgers})
        yield ok("retention", f"{what}; those of {seen} consumers in this database do" if seen else what)


def _partitions(connection: Connection, store: Store, settings: RelaySettings) -> Iterator[Finding]:
    most = MOVED_ROWS + 1
    with reading(connection):
        ahead = store.positions_ahead(connection)
        held = store.rows_in_default(connection, most)
        present = store.partitions(connection)
    yield from partitions(present, settings.schema_name, "outbox")
    if ahead < settings.partition_rows:
        yield warning(
            "partitions-ahead", f"partitions of the outbox reach {max(ahead, 0)} events ahead",
            "Start a relay, which makes them every few seconds; if one runs, see its log and partition-rights.",
        )  # fmt: skip
    else:
        yield ok("partitions-ahead", f"partitions of the outbox reach {ahead} events ahead")
    if held:
        shown = f"more than {MOVED_ROWS}" if held == most else str(held)
        yield warning(
            "default-partition", f"{shown} events are in outbox_default",
            "Nothing is lost. The relay moves up to 10,000 of a range when it makes their partition; more are removed row "
            "by row once they are older than OUTBOX_RETENTION_SECONDS. See that partitions are made ahead.",
        )  # fmt: skip
    elif held is not None:
        yield ok("default-partition", "outbox_default is empty")


def _lanes(heads: Sequence[StreamHead], settings: RelaySettings) -> Iterator[Finding]:
    lanes = {topic_of(head.stream): head.lanes for head in sorted(heads, key=lambda head: head.seq)}
    wrong = {topic: count for topic, count in lanes.items() if count != settings.lanes.get(topic, 1)}
    for topic, count in wrong.items():
        yield error(
            "lanes", f"topic {topic} is spread over {count} lanes, OUTBOX_LANES says {settings.lanes.get(topic, 1)}: no "
            "relay starts with that",
            "Set OUTBOX_LANES as it was, for relay and consumers; for other lanes use a new topic.",
        )  # fmt: skip
    if not wrong:
        yield ok("lanes", f"OUTBOX_LANES agrees with the {len(lanes)} topics published so far")


def _groups(there: Router, progress: Sequence[GroupProgress], limits: Limits) -> Iterator[Finding]:
    """Groups that were seen once: nothing is trimmed that one of them has not acknowledged."""
    fine = 0
    for group in progress:
        try:
            found = there.has_group(group.name, group.stream)
        except StreamUnusable as failure:
            yield stream_unusable(group.stream, failure)
            continue
        if not found:
            yield warning(
                "group-missing", f"group {group.name} of stream {group.stream} is not in Redis, and {group.events} events "
                "wait for it; nothing is trimmed meanwhile",
                "Start the consumer, which makes it again; `outbox drop-group` if the consumer is gone for good.",
            )  # fmt: skip
        elif group.events and group.silent_seconds >= limits.silent_seconds:
            yield warning(
                "group-silent", f"group {group.name} has acknowledged nothing of stream {group.stream} for "
                f"{lasting(group.silent_seconds)}, and {group.events} events wait for it; they are not trimmed",
                "See that the consumer runs and look into its log; `outbox drop-group` if it is gone for good.",
            )  # fmt: skip
        else:
            fine += 1
    if fine == len(progress):
        yield ok("groups", f"{fine} groups of streams are there and go on" if fine else "no group has been seen yet")


# --- Redis, for both sides ---------------------------------------------------------------------------------------------------


def facts_of(seen: Examination, there: Router) -> list[ServerFacts]:
    """What the server, or every primary of a cluster, says about itself; one that does not answer is a finding."""
    answers = [seen.ask(partial(there.facts, node)) for node in seen.ask(there.nodes) or ()]
    return [facts for facts in answers if facts is not None]


def every_redis(servers: Sequence[ServerFacts], limits: Limits, pause_share: float) -> Iterator[Finding]:
    """`redis` for each; what is wrong is said of every node of a cluster, what is in order once."""
    if len(servers) == 1:
        yield from redis(servers[0], limits, pause_share)
        return
    found = [(facts.node, finding) for facts in servers for finding in redis(facts, limits, pause_share)]
    for code in dict.fromkeys(finding.code for _, finding in found):
        these = [(node, finding) for node, finding in found if finding.code == code]
        wrong = [(node, finding) for node, finding in these if finding.level != "ok"]
        for node, finding in wrong:
            yield replace(finding, what=f"node {node}: {finding.what}")
        if not wrong:
            node, finding = these[0]
            yield replace(finding, what=f"node {node}: {finding.what}; the others are in order too")


def redis(facts: ServerFacts, limits: Limits, pause_share: float) -> Iterator[Finding]:
    """The server and what is set there.

    Args:
        pause_share: share of its memory in use at which the relay pauses.
    """
    yield _version(facts)
    if facts.unknown:
        yield error(
            "redis-commands", f"the server does not know {', '.join(facts.unknown)}",
            "Use a server and not a proxy that knows only some commands; undo rename-command.",
        )  # fmt: skip
    else:
        yield ok("redis-commands", "the server knows all commands that are needed")
    if facts.protocol is None:
        yield warning(
            "redis-protocol", "HELLO is refused or unknown, so the protocol cannot be told",
            "Allow HELLO to this user; a proxy in between may not know it.",
        )  # fmt: skip
    else:
        yield ok("redis-protocol", f"RESP{facts.protocol} is spoken")
    if not facts.info:
        yield warning(
            "redis-info", "INFO is refused: memory, persistence and replication were not looked at, and the relay does not "
            "see when memory gets full", "Allow INFO to this user (ACL SETUSER … +info).",
        )  # fmt: skip
        return
    yield ok("redis-info", "INFO is allowed")
    yield _eviction(facts)
    yield _memory(facts, limits, pause_share)
    yield from _persistence(facts)
    yield from _replication(facts)


def _version(facts: ServerFacts) -> Finding:
    what = f"{facts.product} is {facts.version or 'of a version that it does not tell'}"
    parts = [int(part) if part.isdigit() else 0 for part in facts.version.split(".")]
    if facts.version and tuple(parts[:2]) < _REDIS_AT_LEAST:
        return error("redis-version", what, "Upgrade it: Redis 7.0 or newer, or Valkey.")
    return ok("redis-version", what)


def _eviction(facts: ServerFacts) -> Finding:
    policy, limited = str(facts.info.get("maxmemory_policy")), bool(int(facts.info.get("maxmemory", 0)))
    do = "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file. Caches go to another server."
    when = "once its memory is full" if limited else "as soon as maxmemory is set"
    if policy.startswith("allkeys"):
        return error("redis-eviction", f"maxmemory-policy is {policy}: {when}, whole streams are thrown away", do)
    if policy.startswith("volatile"):
        return warning(
            "redis-eviction", f"maxmemory-policy is {policy}: no key of ours has a TTL, so none of ours is thrown away, but "
            f"{when} others on the server are", do,
        )  # fmt: skip
    return ok("redis-eviction", f"maxmemory-policy is {policy}")


def _memory(facts: ServerFacts, limits: Limits, pause_share: float) -> Finding:
    used, limit = int(facts.info.get("used_memory", 0)), int(facts.info.get("maxmemory", 0))
    if not limit:
        return warning(
            "redis-memory", f"maxmemory is not set ({used / 2**20:.0f} MiB are used): the operating system may kill the server",
            "Set maxmemory to what the machine can spare; the relay pauses before it is reached, and the outbox holds the rest.",
        )  # fmt: skip
    what = f"{used / limit:.0%} of maxmemory ({limit / 2**20:.0f} MiB) are used; the relay pauses at {pause_share:.0%}"
    do = "See which group or which other key takes the room (group-silent, MEMORY USAGE), or raise maxmemory."
    if used > limit * pause_share:
        return error("redis-memory", what, do)
    if used > limit * pause_share * limits.memory_share:
        return warning("redis-memory", what, do)
    return ok("redis-memory", what)


def _persistence(facts: ServerFacts) -> Iterator[Finding]:
    info, fsync = facts.info, facts.settings.get("appendfsync")
    if not int(info.get("aof_enabled", 0)):
        yield warning(
            "redis-aof", "appendonly is off: what a crash loses is published again, and consumers get some of it twice",
            "CONFIG SET appendonly yes, and the same in its configuration file.",
        )  # fmt: skip
    elif info.get("aof_last_write_status", "ok") != "ok":
        yield error(
            "redis-aof", "the last write of the append-only file failed: the server refuses writes",
            "See its log; most often the disk is full.",
        )  # fmt: skip
    elif info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield warning(
            "redis-aof", "the last rewrite of the append-only file failed: it goes on growing",
            "See the server's log, make room on its disk, then BGREWRITEAOF.",
        )  # fmt: skip
    else:
        yield ok("redis-aof", f"appendonly is on, appendfsync {fsync or 'unknown, CONFIG GET is refused'}")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield error(
            "redis-snapshot", "the last snapshot failed: the server refuses writes until one succeeds, unless "
            "stop-writes-on-bgsave-error is no",
            "See its log, make room on its disk, then BGSAVE.",
        )  # fmt: skip
    else:
        yield ok("redis-snapshot", "the last snapshot was written, or none was due")


def _replication(facts: ServerFacts) -> Iterator[Finding]:
    info, wanted = facts.info, facts.settings.get("min-replicas-to-write")
    replicas, good = int(info.get("connected_slaves", 0)), info.get("min_slaves_good_slaves")
    if info.get("role") == "slave":
        yield error("redis-replication", "this server is a replica", "Let REDIS_URL lead to the primary.")
    elif good is not None and wanted is not None and int(good) < int(wanted):
        yield error(
            "redis-replication", f"{good} replicas are up to date, min-replicas-to-write is {wanted}: writes are refused",
            "Bring the replicas back, or lower min-replicas-to-write.",
        )  # fmt: skip
    else:
        shown = "unknown, CONFIG GET is refused" if wanted is None else wanted
        yield ok("redis-replication", f"{replicas} replicas are connected, min-replicas-to-write is {shown}")
    if facts.node:
        yield ok("redis-cluster", "cluster mode is on, and REDIS_URL says so")
    elif int(info.get("cluster_enabled", 0)):
        yield warning(
            "redis-cluster", "cluster mode is on, and REDIS_URL does not say so: streams of other nodes are refused",
            "Set REDIS_URL to redis+cluster://host:port,… with this and some other nodes.",
        )  # fmt: skip
    else:
        yield ok("redis-cluster", "cluster mode is off")


def _safety(servers: Sequence[ServerFacts], settings: RelaySettings) -> Iterator[Finding]:
    """Whether what is published can be as safe as ``OUTBOX_WAIT_…`` wants it; else the relay stands still."""
    wrong = [(facts, why) for facts in servers for why in _unsafe(facts, settings)]
    for facts, why in wrong:
        yield error(
            "redis-wait", f"{f'node {facts.node}: ' if facts.node else ''}{why}: the relay publishes a batch, and then waits",
            "Bring that about, or lower OUTBOX_WAIT_REPLICAS and OUTBOX_WAIT_AOF.",
        )  # fmt: skip
    if not wrong:
        yield ok("redis-wait", "what is published can be as safe as OUTBOX_WAIT_REPLICAS and OUTBOX_WAIT_AOF want it")


def _unsafe(facts: ServerFacts, settings: RelaySettings) -> Iterator[str]:
    replicas = facts.info.get("connected_slaves")
    if replicas is not None and int(replicas) < settings.wait_replicas:
        yield f"OUTBOX_WAIT_REPLICAS is {settings.wait_replicas}, and {replicas} replicas are connected"
    if settings.wait_aof == "no":
        return
    parts = [int(part) if part.isdigit() else 0 for part in facts.version.split(".")]
    if facts.product == "Redis" and facts.version and tuple(parts[:2]) < _WAITAOF_AT_LEAST:
        yield f"OUTBOX_WAIT_AOF is {settings.wait_aof}, and Redis {facts.version} does not know WAITAOF"
    elif not int(facts.info.get("aof_enabled", 1)):
        yield f"OUTBOX_WAIT_AOF is {settings.wait_aof}, and appendonly is off"


def redis_rights(there: Router, streams: Sequence[str], side: Literal["relay", "consumer"]) -> Iterator[Finding]:
    """Which commands our user may not run on these streams; each is tried without an effect."""
    refused: dict[tuple[str, ...], list[str]] = {}
    for stream in streams or [_SOME_STREAM]:
        if commands := tuple(there.refused(stream, side)):
            refused.setdefault(commands, []).append(stream)
    for commands, some in refused.items():
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        what = f"this user may not run {', '.join(commands)} on stream {', '.join(some[:3])}{more}"
        names = " ".join(f"+{command.lower().replace(' ', '|')}" for command in commands)
        do = f"Allow the commands, and the stream's keys: ACL SETUSER … {names}"
        if streams:
            yield error("redis-rights", what, do)
        else:
            yield warning("redis-rights", f"{what}, which is only a name to try: no stream is known yet", do)
    if not refused:
        yield ok("redis-rights", "this user may run every command that is needed")


def stream_unusable(stream: str, failure: StreamUnusable) -> Finding:
    """A stream that is none, or that we may not look at."""
    return error(
        "stream-unusable", f"stream {stream} cannot be used: {_one_line(failure)}",
        "Remove the key if it is not a stream (the relay publishes it again), or see redis-rights.",
    )  # fmt: skip


def clocks(database: DatabaseFacts | None, servers: Sequence[ServerFacts], limits: Limits) -> Iterator[Finding]:
    """How far the clocks of PostgreSQL, Redis (of a cluster, the worst) and this machine are apart, of those that answer."""
    known = {
        "this machine": 0.0,
        "PostgreSQL": database.ahead_seconds if database else None,
        "Redis": max((each.ahead_seconds for each in servers if each.ahead_seconds is not None), key=abs, default=None),
    }
    ahead = {name: seconds for name, seconds in known.items() if seconds is not None}
    first, last = min(ahead, key=ahead.__getitem__), max(ahead, key=ahead.__getitem__)
    apart = ahead[last] - ahead[first]
    if apart > limits.clock_seconds:
        yield warning(
            "clocks", f"the clock of {last} is {lasting(apart)} ahead of that of {first}",
            "Let all machines keep time by NTP. Events are not lost by it, but ages and margins are wrong.",
        )  # fmt: skip
    elif len(ahead) > 1:
        yield ok("clocks", f"the clocks of {', '.join(ahead)} are {apart:.1f} s apart")


def lasting(seconds: float) -> str:
    """A duration for people."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _one_line(failure: BaseException) -> str:
    return " ".join(str(failure).split())
