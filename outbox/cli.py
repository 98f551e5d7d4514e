"""The command ``outbox``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import json
import logging
import os
import re
import shlex
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any, get_args

import psycopg
import sqlalchemy.exc
import typer

from outbox import operations
from outbox import replay as replays
from outbox import schema as schemas
from outbox.doctor import TRANSACTION_SECONDS, Finding, Limits, examine
from outbox.envelope import Priority, is_queue
from outbox.errors import NotStarted, OutboxError, SettingsError
from outbox.relay import Relay
from outbox.retry import Stop
from outbox.settings import (
    RelaySettings,
    Settings,
    check_schema,
    database_url_from_environment,
    unknown_variables,
)
from outbox.startup import examine as examine_at_start
from outbox.startup import examined
from outbox.transport.base import side_stream, streams_of

app = typer.Typer(
    name="outbox",
    help="Transactional outbox: the producer's side.\n\n"
    "DATABASE_URL and REDIS_URL say where PostgreSQL and Redis (or Valkey) are. Every setting of the relay is an "
    "environment variable OUTBOX_…; see the reference in docs/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_log = logging.getLogger("outbox")
_LINE_SECONDS = 10.0


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"outbox-consumer {importlib.metadata.version('outbox-consumer')}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo("outbox-consumer, not installed")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
]
Schema = Annotated[
    str | None, typer.Option("--schema", help="Schema of the outbox tables; default: OUTBOX_SCHEMA, else public.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list instead.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit code 2 when there are warnings and no errors.")]
StrictStart = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Do not start where `doctor` finds danger, instead of warning. See OUTBOX_STRICT and CONSUMER_STRICT.",
    ),
]
TransactionSeconds = Annotated[
    float, typer.Option("--transaction-seconds", min=0, help="Warn of transactions that are open for longer.")
]
Rate = Annotated[float, typer.Option("--rate", min=0, help="At most so many events a second; 0: as fast as it goes.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


@app.command()
def migrate(
    schema: Schema = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for a DBA instead of running them.")] = False,
) -> None:
    """Make the outbox tables, or bring them to this version. Safe to run at any time, by any number of processes."""
    warn_of_unknown_variables(RelaySettings)
    run_migrate("outbox", schema or os.environ.get("OUTBOX_SCHEMA") or "public", sql)


@app.command()
def relay(schema: Schema = None, strict: StrictStart = False, log_level: LogLevel = "info") -> None:
    """Publish the outbox to Redis streams until SIGTERM or Ctrl-C; run as many as you like, one works at a time.

    Exit code 78: with --strict, something dangerous was found.
    """
    configure_logging(log_level)
    settings = _settings(schema, strict)
    running = Relay(settings)
    with started(running.stop, lambda: examine(settings, None, _consumer_schema()), strict=settings.strict):
        logging.getLogger("outbox").info("relay started", extra={"action": "relay_started"})
        running.run()
    logging.getLogger("outbox").info("relay stopped", extra={"action": "relay_stopped"})


@app.command()
def doctor(
    schema: Schema = None,
    as_json: AsJson = False,
    strict: Strict = False,
    transaction_seconds: TransactionSeconds = TRANSACTION_SECONDS,
) -> None:
    """Look at the servers, the tables and the settings, and say what is wrong and what to do. Changes nothing.

    Exit code: 0 no errors, 1 errors, 2 with --strict warnings.
    """
    findings = examine(_settings(schema), Limits(transaction_seconds=transaction_seconds), _consumer_schema())
    report(findings, as_json=as_json, strict=strict)


@app.command()
def status(
    schema: Schema = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how things stand: backlog, streams, groups, and what is paused and why. Changes nothing."""
    found = operations.status(_settings(schema), _consumer_schema())
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else "\n".join(_lines(found)))


@app.command()
def queues(
    schema: Schema = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every queue of jobs: what is ready, delayed, running and orphaned, and what has failed. Changes nothing.

    The consumer is `-` where none has opened the queue yet. Ready jobs by priority: high/normal/low; INCOMPLETE where
    the relay has jobs to publish that Redis never had, or has lost. Orphaned ones are running, but their process is
    gone: another worker takes them over when their claim (CONSUMER_CLAIM_SECONDS) has ended. Waiting ones and dead
    letters are in the consumer's tables (?: these are in another database or schema). Completed, failed and cancelled:
    of the last ones that Redis remembers, also such as were requeued or discarded since; `dead` is what counts.

    The jobs themselves: consumer jobs list QUEUE
    """
    found = operations.queues(_settings(schema), _consumer_schema())
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2, default=datetime.isoformat))
    elif found:
        typer.echo("\n".join(_table([_QUEUE_COLUMNS, *map(_cells, found)])))
    else:
        typer.echo("there are no queues")


@app.command("drop-group")
def drop_group(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer group, as `outbox status` names it.")],
    schema: Schema = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also one of which a process was there within a minute.")
    ] = False,
) -> None:
    """Forget a consumer group that is gone for good: nothing is kept for it any longer, and what it left is lost to it."""
    if not (yes or confirmed(f"Forget group {name} and everything that it has not acknowledged?")):
        raise typer.Abort
    for stream in operations.drop_group(_settings(schema), name, force=force):
        typer.echo(f"group {name} of stream {stream} is forgotten")


@app.command("new-epoch")
def new_epoch(
    schema: Schema = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make this database the one that publishes, where its relay says that another one does; that one's relays stop.

    For a database that came back without PostgreSQL knowing it, as from a snapshot of its disk. Not after a promotion.
    """
    if not (yes or confirmed("Publish from this database from now on, and from no other?")):
        raise typer.Abort
    typer.echo(f"epoch {operations.new_epoch(_settings(schema))} begins")


@app.command()
def replay(
    context: typer.Context,
    topic: Annotated[str | None, typer.Option(help="Only events of this topic.")] = None,
    key: Annotated[str | None, typer.Option(help="Only events of this key.")] = None,
    type: Annotated[str | None, typer.Option(help="Only events of this type.")] = None,
    id: Annotated[list[uuid.UUID] | None, typer.Option(help="Only these event ids (may be repeated).")] = None,
    since: Annotated[str | None, typer.Option(help="Recorded at or after, e.g. 2026-01-31T12:00:00+03:00.")] = None,
    until: Annotated[str | None, typer.Option(help="Recorded before.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only of this sealed batch, or of a range: 1200-1250.")] = None,
    after: Annotated[int, typer.Option(help="Go on after this position, as an earlier replay said.")] = 0,
    group: Annotated[str | None, typer.Option(help="Only for this consumer; default: for every one.")] = None,
    rate: Rate = replays.EVENTS_PER_SECOND,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    schema: Schema = None,
) -> None:
    """Publish events of the outbox once more, with the same ids. Who has processed them recognises them.

    Says first what is selected, and asks. Waits while Redis is away or full and while a stream has more than
    OUTBOX_MAX_STREAM_LENGTH unacknowledged entries. Whatever ends it before its time, it says how to go on.

    Example: a new consumer gets what the outbox keeps: outbox replay --topic payments --group reports
    """
    settings = _settings(schema)
    if group is not None:
        replays.check_consumer(group)
    selection = replays.Selection(
        topic=topic, key=key, type=type, ids=tuple(id) if id else None, since=_instant("--since", since),
        until=_instant("--until", until), batches=_range("--batch", batch), after_position=after,
    )  # fmt: skip
    with operations.opened(settings) as (store, connection, transport):
        chosen = replays.survey(store, connection, selection)
        total = sum(found.events for found in chosen)
        whom = f"consumer {group} alone" if group else "every consumer"
        typer.echo(f"{total:,} events are published again, for {whom}")
        for found in chosen:
            streams = (
                [side_stream(found.topic, group)]
                if group and not is_queue(found.topic)
                else streams_of(found.topic, settings.lanes.get(found.topic, 1))
            )
            shown = streams[0] if len(streams) == 1 else f"{streams[0]} to {streams[-1]}"
            typer.echo(
                f"  {shown}: {found.events:,}, recorded from {found.oldest.isoformat()} to {found.newest.isoformat()}"
            )
        if group and all(known.name != group for known in store.groups(connection)):
            typer.echo(
                f"no consumer {group} has been seen yet: it gets them when it runs, if that is its name", err=True
            )
        if not total or not (yes or confirmed("Publish them?")):
            return
        # What is recorded from now on was not asked about, and with busy producers would have no end.
        selection = replace(selection, up_to_position=max(found.last for found in chosen))
        stopping, last = Stop(), replays.Step(0, after)
        stop_on_signals(stopping.set)
        steps = replays.replay(
            store, connection, transport, settings, selection, consumer=group, events_per_second=rate, stopping=stopping
        )  # fmt: skip
        done = False
        try:
            for step in shown_steps(steps, "replay", total):
                last = step
            done = not stopping.is_set()
        finally:
            if not done:
                typer.echo(
                    f"stopped after {last.events:,} events; go on with: {_to_go_on(context, last.position)}", err=True
                )
        if not done:
            raise typer.Exit(1)
        typer.echo(f"{last.events:,} events published again")


def _to_go_on(context: typer.Context, position: int) -> str:
    """The command that was given, from this position on."""
    words = ["outbox", "replay"]
    for name, value in context.params.items():
        if name not in ("yes", "after") and value is not None:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [f"--{name}", str(one)]
    return shlex.join([*words, "--after", str(position), "--yes"])


def _range(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text, re.ASCII)
    if not found:
        raise SettingsError(f"{option}: is not a batch number, or a range like 1200-1250")
    return int(found[1]), int(found[2] or found[1])


def _instant(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise SettingsError(f"{option}: is not a time like 2026-01-31T12:00:00+03:00") from None


def _consumer_schema() -> str:
    """Where the consumers' tables are, if they are in the same database."""
    return check_schema(os.environ.get("CONSUMER_SCHEMA") or "public")


def _settings(schema: str | None, strict: bool = False) -> RelaySettings:
    warn_of_unknown_variables(RelaySettings)
    overrides: dict[str, Any] = ({"schema_name": schema} if schema else {}) | ({"strict": True} if strict else {})
    return RelaySettings(**overrides)


def _lines(found: operations.Status) -> Iterator[str]:
    """The status for people."""
    memory = "?" if found.redis_error else "no limit"
    if found.memory_share is not None:
        memory = f"{found.memory_share:.0%} used"
    relays = "?" if found.relays is None else found.relays
    yield f"relays {relays} · epoch {found.epoch} · batch {found.batch} · Redis memory: {memory}"
    if found.redis_error:
        yield f"REDIS DOES NOT ANSWER ({found.redis_error}): what follows is what PostgreSQL knows"
    for topic, (count, age) in sorted(found.unsealed.items()):
        yield f"topic {topic}: {count:,} events not sealed yet, the oldest {_seconds(age)} old"
    for stream in found.streams:
        yield ""
        state = f"PAUSED ({stream.paused}) for {_seconds(stream.paused_seconds)}" if stream.paused else ""
        if found.redis_error and stream.error == found.redis_error:
            yield f"stream {stream.stream}  batch ? of {stream.batch}  {state}"
        else:
            state += f"cannot be used: {stream.error}" if stream.error else ""
            newest = "-" if stream.published_batch is None else stream.published_batch
            yield (f"stream {stream.stream}  {stream.entries:,} entries, batch {newest} of {stream.batch}  {state}")
        if stream.unpublished:
            yield f"  {stream.unpublished:,} events not published, the oldest for {_seconds(stream.unpublished_seconds)}"
        if stream.missing:
            yield f"  {stream.missing:,} entries were deleted by a stranger"
        for group in stream.groups:
            name = group.name if group.name.isprintable() else repr(group.name)
            waiting = "?" if group.undelivered is None else f"{group.undelivered:,}"
            pending = "?" if group.there is None else f"{group.pending:,}"
            since = f" (oldest {_seconds(group.unacknowledged_seconds)})" if group.unacknowledged else ""
            orphaned = f", {group.orphaned:,} of them orphaned" if group.orphaned else ""
            yield (
                f"  group {name}: {group.unacknowledged:,} not acknowledged{since}, {waiting} undelivered, {pending} pending"
                f" (oldest {_seconds(group.oldest_pending_seconds)}){orphaned}, acknowledged to batch {group.acked_batch}"
                f" {_seconds(group.still_seconds)} ago"
                + _aside(group)
                + (
                    ""
                    if group.there is not False
                    else "  NOT IN REDIS: made again when its consumer comes, or see drop-group"
                )
                + (f"  last seen {_seconds(group.idle_seconds)} ago" if group.idle_seconds is not None else "")
            )
    if found.side_streams:
        yield ""
    for side in found.side_streams:
        entries, waiting = ("?" if n is None else f"{n:,}" for n in (side.entries, side.undelivered))
        pending = "?" if side.entries is None else f"{side.pending:,}"
        yield (
            f"stream {side.stream}  for group {side.group} alone: {entries} entries, {waiting} undelivered, {pending} pending"
            f" (oldest {_seconds(side.oldest_pending_seconds)})" + _aside(side)
        )


_QUEUE_COLUMNS = (
    "queue", "consumer", "ready", "oldest", "delayed", "next due", "running", "orphaned", "waiting", "dead", "completed", "failed",
    "cancelled",
)  # fmt: skip


def _cells(found: operations.QueueStatus) -> tuple[str, ...]:
    consumer = "-" if found.consumer is None else found.consumer
    ended = (found.kept.get(status, 0) for status in ("completed", "failed", "cancelled"))
    ready = "/".join(f"{found.ready.get(priority, 0):,}" for priority in get_args(Priority))
    counts = (found.running, found.orphaned, found.waiting, found.dead, *ended)
    return (
        found.queue, consumer if consumer.isprintable() else repr(consumer),
        ready if found.whole else f"{ready} INCOMPLETE",
        _seconds(found.oldest_ready_seconds), f"{found.delayed:,}",
        found.next_due.isoformat(timespec="seconds").replace("+00:00", "Z") if found.next_due else "-",
        *("?" if number is None else f"{number:,}" for number in counts),
    )  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _aside(group: operations.GroupStatus | operations.SideStreamStatus) -> str:
    """What its consumer has in its own tables."""
    dead = ", ? dead letters" if group.dead is None else f", {group.dead:,} dead letters" if group.dead else ""
    return (f", {group.waiting:,} wait for another try" if group.waiting else "") + dead


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


# --- what both commands share --------------------------------------------------------------------------------------


def confirmed(question: str) -> bool:
    """Whether the person at the terminal says yes, who is told how to say it beforehand where there is none.

    Raises:
        typer.Abort: he says no.
    """
    if sys.stdin.isatty():
        return typer.confirm(question, abort=True)
    typer.echo("add --yes to have it done")
    return False


def shown_steps(steps: Iterable[replays.Step], label: str, total: int) -> Iterator[replays.Step]:
    """The steps, with a progress bar on a terminal, else a line every ten seconds, on standard error."""
    if sys.stderr.isatty():
        events = 0
        with typer.progressbar(length=total, label=label, file=sys.stderr) as bar:
            for step in steps:
                bar.update(step.events - events)
                events = step.events
                yield step
        return
    due = time.monotonic() + _LINE_SECONDS
    for step in steps:
        if time.monotonic() >= due:
            due = time.monotonic() + _LINE_SECONDS
            typer.echo(f"{label}: {step.events:,} of {total:,} events, up to position {step.position}", err=True)
        yield step


def warn_of_unknown_variables(*read: type[Settings]) -> None:
    """See `outbox.settings.unknown_variables`; where no logging is set up, the lines go to standard error all the same."""
    for name, meant in unknown_variables(*read).items():
        _log.warning(
            "nothing reads the variable %s%s", name, f"; {meant} is meant, most likely" if meant else "",
            extra={"action": "unknown_variable", "variable": name},
        )  # fmt: skip


def run_migrate(branch: schemas.Branch, schema: str, sql: bool) -> None:
    """The command ``migrate`` of either side."""
    check_schema(schema)
    if sql:
        sys.stdout.write(schemas.upgrade_sql(branch, schema=schema))
        return
    revision = schemas.upgrade(database_url_from_environment(), branch, schema=schema)
    typer.echo(f"{branch} tables in schema {schema} are at revision {revision}")


_SHOWN = {"error": "FAIL", "warning": "warn", "ok": "ok"}


def report(findings: Sequence[Finding], *, as_json: bool, strict: bool) -> None:
    """Print what a doctor found, the worst first, and end the process with the exit code that says so."""
    counts = Counter(finding.level for finding in findings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in sorted(findings, key=lambda finding: list(_SHOWN).index(finding.level)):
            typer.echo(f"{_SHOWN[finding.level]:4}  {finding.code}: {finding.what}")
            if finding.do:
                typer.echo(f"      -> {finding.do}")
        typer.echo(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")
    raise SystemExit(1 if counts["error"] else 2 if strict and counts["warning"] else 0)


class _WithAction(logging.Formatter):
    """Puts the action, where a record has one, at the end of its line: to find it by, whatever the message says."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        action = getattr(record, "action", None)
        return super().formatMessage(record) + (f" action={action}" if action else "")


def configure_logging(level: str, who: str = "") -> None:
    """Log to standard error, one line a record; `who` is put before the message, in logging's own format."""
    numeric = logging.getLevelNamesMapping().get(level.upper())
    if numeric is None:
        raise typer.BadParameter("must be debug, info, warning or error", param_hint="--log-level")
    handler = logging.StreamHandler()
    handler.setFormatter(_WithAction(f"%(asctime)s %(levelname)s %(name)s: {who}%(message)s"))
    logging.basicConfig(level=max(numeric, logging.INFO), handlers=[handler], force=bool(who))
    for name in ("outbox", "consumer"):
        logging.getLogger(name).setLevel(numeric)
    # Of a connection that is lost it shows fifty lines of where it noticed; ours is one, and says what follows.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """SIGTERM or SIGINT finishes the work at hand; a second one ends the process at once."""

    def second(signum: int, _frame: object) -> None:
        os._exit(128 + signum)

    def first(_signum: int, _frame: object) -> None:
        # The kernel ignores what has no handler in the first process of a container.
        then = second if os.getpid() == 1 else signal.SIG_DFL
        signal.signal(signal.SIGTERM, then)
        signal.signal(signal.SIGINT, then)
        stop()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)


def looked(look: Callable[[], list[Finding]], *, strict: bool) -> int:
    """The look of `outbox.startup` in a process that does nothing else; its exit code."""
    try:
        examine_at_start(look, strict=strict, stopping=Stop())
    except NotStarted as error:
        typer.echo(f"error: {error}", err=True)
        return os.EX_CONFIG
    return 0


@contextmanager
def started(stop: Callable[[], None], look: Callable[[], list[Finding]], *, strict: bool) -> Iterator[None]:
    """What is around the work of a command that runs for long: signals, and the look of `outbox.startup`."""
    stopping = Stop()

    def both() -> None:
        stopping.set()
        stop()

    stop_on_signals(both)
    with examined(look, strict=strict, stopping=stopping):
        yield


def run_app(application: typer.Typer) -> None:
    """Run a command; our errors, the databases' and a full disk are one line on standard error and exit code 1 (78: not
    started)."""
    _let_help_flow(application)
    try:
        application()
    except (OutboxError, psycopg.Error, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig else error
        typer.echo(f"error: {' '.join(str(cause).split())}", err=True)
        raise SystemExit(os.EX_CONFIG if isinstance(error, NotStarted) else 1) from None


def _let_help_flow(application: typer.Typer) -> None:
    """Have only empty lines end paragraphs: typer keeps a docstring's line ends, which are where the source is folded."""
    for command in application.registered_commands:
        paragraphs = (command.help or inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for group in application.registered_groups:
        if group.typer_instance:
            _let_help_flow(group.typer_instance)


def main() -> None:
    """Entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
