"""What is wrong, or will be, with a consumer's servers and tables; see `outbox.doctor`, which looks at the servers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

from consumer.handlers import Consumer
from consumer.ledger import Connection, Keeper, Ledger, Operations
from consumer.settings import ConsumerSettings
from consumer.worker import MARGIN_SECONDS  # one rule, and the worker refuses to start by it
from outbox import schema as schemas
from outbox.doctor import (
    Examination,
    Finding,
    Limits,
    clocks,
    connect,
    database,
    error,
    every_redis,
    facts_of,
    lasting,
    ok,
    partition_rights,
    partitions,
    redis_rights,
    stream_unusable,
    tables,
    transactions,
    transport,
    upkeep_rights,
    warning,
)
from outbox.errors import StreamUnusable
from outbox.store import DatabaseFacts, reading
from outbox.transport import Router
from outbox.transport.base import StreamInfo, side_stream, streams_of

#: What the consumer's role needs, by table; what the handlers write is theirs to know.
CONSUMING: Final = {
    "consumer_schema_version": "SELECT",
    "processed_messages": "SELECT, INSERT, UPDATE, DELETE",
    "entity_versions": "SELECT, INSERT, UPDATE",
    "message_failures": "SELECT, INSERT, UPDATE, DELETE",
    "dead_letters": "SELECT, INSERT",
    "consumer_retention": "SELECT, INSERT, UPDATE, DELETE",
}
#: What it needs besides to forget what is old.
UPKEEP: Final = {"processed_messages_default": "SELECT, UPDATE, DELETE", "entity_versions": "DELETE"}
DEAD_LETTERS: Final = {"dead_letters": "UPDATE, DELETE"}  # where they are not kept for ever
#: From how many on, for how long since its first failure, and how long overdue an event may wait until it is worth a warning.
_MANY_WAITING, _LONG_WAITING_SECONDS, _OVERDUE_SECONDS = 1000, 3600.0, 300.0
#: The relay's default: consumers do not know what it is set to.
_PAUSE_SHARE = 0.8


def examine(consumer: Consumer, settings: ConsumerSettings, limits: Limits | None = None) -> list[Finding]:
    """Look at everything that a consumer needs. Changes nothing, and raises nothing for a server that is down."""
    seen, limits, facts = Examination(), limits or Limits(), None
    connection = seen.ask(lambda: connect(settings, "consumer doctor"))
    if connection is not None:
        with closing(connection):
            facts = seen.facts(connection, settings)
            if facts is not None:
                seen.add(database(facts))
                seen.add(_settings(facts, settings))
            if facts is not None and facts.transactions:
                seen.add(transactions(connection, facts, limits))
                seen.add(_prepared(connection, settings))
                if seen.add(tables(connection, "consumer", settings.schema_name, CONSUMING)):
                    seen.add(_ledger(connection, Ledger(consumer.name, settings.schema_name), settings))
    streams = [stream for topic in consumer.topics for stream in streams_of(topic, settings.lanes.get(topic, 1))]
    side_streams = [] if consumer.has_queues else [side_stream(topic, consumer.name) for topic in consumer.topics]
    with closing(transport(settings)) as there:
        servers = facts_of(seen, there)
        if servers:
            seen.add(every_redis(servers, limits, _PAUSE_SHARE))
            seen.add(redis_rights(there, [*streams, *side_streams], "consumer"))
            seen.add(_streams(there, consumer, streams))
            seen.add(_relay(there, consumer, settings))
    seen.add(clocks(facts, servers, limits))
    return seen.findings


def _settings(facts: DatabaseFacts, settings: ConsumerSettings) -> Iterator[Finding]:
    limit = facts.idle_limit_seconds
    if 0 < limit < settings.claim_seconds:
        yield warning(
            "idle-limit", f"PostgreSQL ends a session after {lasting(limit)} without a statement in a transaction: a handler "
            "that is busy with something else for so long is rolled back and runs again",
            "Keep slow work out of handlers (record a job instead), or raise idle_in_transaction_session_timeout for "
            "this role.",
        )  # fmt: skip
    else:
        yield ok(
            "idle-limit", "PostgreSQL ends no session within CONSUMER_CLAIM_SECONDS for being idle in a transaction"
        )


def _prepared(connection: Connection, settings: ConsumerSettings) -> Iterator[Finding]:
    if isinstance(settings.prepare_threshold, int) and schemas.shares_prepared(connection):
        yield error(
            "prepared-statements", "CONSUMER_PREPARE_THRESHOLD is set, and a pooler mixes up prepared statements of its clients: "
            "the consumer does not start",
            "Unset it, or let the pooler keep prepared statements (PgBouncer 1.22 or newer with max_prepared_statements).",
        )  # fmt: skip
    else:
        yield ok("prepared-statements", "prepared statements cannot meet the wrong session")


def _ledger(connection: Connection, ledger: Ledger, settings: ConsumerSettings) -> Iterator[Finding]:
    for_ever = settings.dead_letter_retention_days is None
    yield upkeep_rights(connection, ledger.schema, UPKEEP if for_ever else UPKEEP | DEAD_LETTERS)
    yield partition_rights(connection, ledger.schema, "processed_messages")
    with reading(connection):
        ahead = ledger.seconds_ahead(connection)
        sums = Operations(ledger.consumer, ledger.schema).sums(connection)
        keeper = ledger.keeper(connection, MARGIN_SECONDS)
        present = ledger.partitions(connection)
        lately = ledger.lately_dead(connection, settings.dead_letter_window_seconds, settings.dead_letter_limit)
    yield from partitions(present, ledger.schema, "processed_messages")
    if ahead < settings.ledger_partition_days * 86_400:
        yield warning(
            "ledger-partitions", f"partitions of the ledger reach {lasting(max(ahead, 0))} ahead",
            "Start the consumer, which makes them every minute; if one runs, see its log and partition-rights.",
        )  # fmt: skip
    else:
        yield ok("ledger-partitions", f"partitions of the ledger reach {lasting(ahead)} ahead")
    if keeper is None:
        yield ok("ledger-keeps", "the ledger forgets nothing yet: no consumer has said what it needs")
    else:
        yield _keeps(keeper, ledger.schema)
    yield from _put_aside(ledger, sums)
    yield _paused(ledger, settings, lately)


def _put_aside(ledger: Ledger, sums: Sequence[tuple[str, str, int, float, float | None]]) -> Iterator[Finding]:
    """What was delivered and is not applied."""
    schema = "" if ledger.schema == "public" else f" --schema {ledger.schema}"
    counts = {what: sum(number for kind, _, number, *_ in sums if kind == what) for what in ("waiting", "dead")}
    told = {
        what: ", ".join(f"{number:,} {reason}" for kind, reason, number, *_ in sums if kind == what) for what in counts
    }
    oldest = max((seconds for kind, _, _, seconds, _ in sums if kind == "waiting"), default=0.0)
    due = max((seconds or 0.0 for *_, seconds in sums), default=0.0)
    what = (
        f"{counts['waiting']:,} events wait ({told['waiting']})"
        if counts["waiting"]
        else "no event waits for another try"
    )
    if due >= _OVERDUE_SECONDS:
        yield warning(
            "waiting-events", f"{what}, one has been due for {lasting(due)}, and nobody has come to it",
            "Start the consumer, or more processes of it.",
        )  # fmt: skip
    elif counts["waiting"] >= _MANY_WAITING or oldest >= _LONG_WAITING_SECONDS:
        yield warning(
            "waiting-events", f"{what}, the oldest has failed first {lasting(oldest)} ago",
            f"See what they fail with: consumer waiting {ledger.consumer}{schema}.",
        )  # fmt: skip
    else:
        yield ok("waiting-events", what)
    if counts["dead"]:
        yield warning(
            "dead-letters", f"{counts['dead']:,} deliveries are put aside as dead letters ({told['dead']})",
            f"What is there was not applied. Look into it: consumer dead list {ledger.consumer}{schema}.",
        )  # fmt: skip
    else:
        yield ok("dead-letters", "no dead letters")


def _paused(ledger: Ledger, settings: ConsumerSettings, lately: int) -> Finding:
    """Whether the worker tries nothing, as it finds out itself."""
    limit, seconds = settings.dead_letter_limit, settings.dead_letter_window_seconds
    if 0 < limit <= lately:
        schema = "" if ledger.schema == "public" else f" --schema {ledger.schema}"
        return warning(
            "paused", f"the consumer is paused: {limit:,} dead letters within {seconds:g} s "
            "(CONSUMER_DEAD_LETTER_LIMIT), so nothing is tried",
            f"Find what they have in common: consumer dead list {ledger.consumer}{schema}. Mend it, and requeue or "
            "discard them; or it goes on when they are older.",
        )  # fmt: skip
    return ok("paused", "not so many dead letters of late that the consumer pauses")


def _keeps(keeper: Keeper, schema: str) -> Finding:
    what = f"the ledger remembers what was processed in the last {lasting(keeper.seconds)}"
    if keeper.seconds < keeper.retention_seconds + 1:
        return ok("ledger-keeps", what)
    what += (
        f", longer than for the {lasting(keeper.retention_seconds)} that consumer {keeper.consumer} is set to: the outbox of "
        f"topic {keeper.topic} still has older events and may publish them again"
    )
    if keeper.unseen_seconds >= MARGIN_SECONDS:
        return warning(
            "ledger-keeps", f"{what}, or did when the consumer was last seen, {lasting(keeper.unseen_seconds)} ago",
            f"Start it. If it is gone for good: outbox drop-group {keeper.consumer}, then consumer forget {keeper.consumer}"
            f"{'' if schema == 'public' else f' --schema {schema}'}. If only the topic is read no longer, this ends by itself.",
        )  # fmt: skip
    return ok("ledger-keeps", f"{what} (a group lags, see outbox doctor; or a partition is not full yet)")


def _streams(there: Router, consumer: Consumer, streams: Sequence[str]) -> Iterator[Finding]:
    fine = 0
    for stream in streams:
        try:
            found = there.has_group(consumer.name, stream)
        except StreamUnusable as failure:
            yield stream_unusable(stream, failure)
            continue
        if found:
            fine += 1
        else:
            yield warning(
                "group-missing", f"group {consumer.name} of stream {stream} is not in Redis",
                "Start the consumer, which makes it; the relay publishes again what was lost.",
            )  # fmt: skip
    if fine == len(streams):
        yield ok("groups", f"the group is there in all {fine} streams")


def _relay(there: Router, consumer: Consumer, settings: ConsumerSettings) -> Iterator[Finding]:
    """What the relay left beside the streams: lanes, and how long it keeps what it may publish again."""
    for topic in consumer.topics:
        ours = settings.lanes.get(topic, 1)
        others = [] if consumer.has_queues else [topic, f"{topic}:0"]  # any other number has one of the two
        looked_at = dict.fromkeys([*streams_of(topic, ours), *others])
        found = [(stream, there.info(stream)) for stream in looked_at]
        theirs = next((i for stream, i in found if i.lanes is not None and stream in streams_of(topic, i.lanes)), None)
        if theirs is None:
            yield warning(
                "relay-missing", f"no relay has published topic {topic} here",
                "See that a relay runs with the same REDIS_URL and OUTBOX_KEY_PREFIX, and that events of the topic are "
                "recorded.",
            )  # fmt: skip
            continue
        if theirs.lanes != ours:
            yield error(
                "lanes", f"the relay spreads topic {topic} over {theirs.lanes} lanes, OUTBOX_LANES says {ours}",
                "Set OUTBOX_LANES alike for relay and consumers.",
            )  # fmt: skip
        else:
            yield ok("lanes", f"OUTBOX_LANES agrees with the relay about topic {topic}")
        if theirs.remember_seconds is not None:
            yield _retention(topic, theirs, settings.ledger_retention_days)


def _retention(topic: str, theirs: StreamInfo, days: int) -> Finding:
    """The ledger must remember for longer than an event can come again."""
    needed = theirs.remember_seconds or 0
    stays = "a time not known yet" if theirs.stays_seconds is None else lasting(theirs.stays_seconds)
    what = (
        f"the outbox keeps events of topic {topic} for {lasting(theirs.keep_seconds or 0)} (OUTBOX_RETENTION_SECONDS), they stay "
        f"in the stream for {stays} (OUTBOX_STREAM_KEEP_SECONDS), the ledger remembers for {days} days "
        "(CONSUMER_LEDGER_RETENTION_DAYS)"
    )
    if days * 86_400 < needed:
        return error(
            "retention", f"{what}: an event that comes again could be applied again, and the consumer does not start",
            f"Let the ledger remember for {math.ceil(needed / 86_400)} days at least, or the other two for less.",
        )  # fmt: skip
    return ok("retention", what)
