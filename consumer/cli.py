"""The command ``consumer``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from types import TracebackType
from typing import Annotated, Any

import typer

from consumer import dead_cli, jobs_cli
from consumer.crew import Crew
from consumer.dead_cli import Schema
from consumer.doctor import examine
from consumer.drain import draining
from consumer.handlers import Consumer
from consumer.ledger import Ledger
from consumer.notes import notes
from consumer.reconcile import Report
from consumer.reconcile import reconcile as reconciled
from consumer.settings import ConsumerSettings
from consumer.supervisor import Supervisor
from consumer.worker import Worker
from outbox import operations
from outbox import schema as schemas
from outbox.cli import (
    AsJson,
    LogLevel,
    Rate,
    Strict,
    StrictStart,
    TransactionSeconds,
    Version,
    configure_logging,
    confirmed,
    looked,
    report,
    run_app,
    run_migrate,
    shown_steps,
    started,
    stop_on_signals,
    warn_of_unknown_variables,
)
from outbox.doctor import TRANSACTION_SECONDS, Limits, lasting
from outbox.errors import OutboxError, SettingsError
from outbox.replay import EVENTS_PER_SECOND, replay_positions
from outbox.retry import Stop
from outbox.settings import RelaySettings

app = typer.Typer(
    name="consumer",
    help="Idempotent consumer: every event takes effect exactly once.\n\n"
    "DATABASE_URL and REDIS_URL say where PostgreSQL and Redis (or Valkey) are. Every setting is an environment "
    "variable CONSUMER_…; see the reference in docs/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(dead_cli.app)
app.add_typer(jobs_cli.app)
app.command()(dead_cli.waiting)
app.command()(dead_cli.status)

#: A consumer that was seen within this time is not gone.
_GONE_SECONDS = 3600.0
#: What can be taken from today and still is a date.
_LONGEST_DAYS = 365_000

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="The Consumer, e.g. myapp.handlers:wallet.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


@app.command()
def migrate(
    schema: Schema = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for a DBA instead of running them.")] = False,
) -> None:
    """Make the consumer's tables, or bring them to this version. Safe to run at any time, by any number of processes."""
    warn_of_unknown_variables(ConsumerSettings, RelaySettings)
    run_migrate("consumer", schema or os.environ.get("CONSUMER_SCHEMA") or "public", sql)


@app.command()
def run(
    target: Target,
    schema: Schema = None,
    strict: StrictStart = False,
    log_level: LogLevel = "info",
    processes: Annotated[
        int | None,
        typer.Option(help="Processes, watched over by a parent; default: CONSUMER_PROCESSES, else 1, unwatched."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each; default: CONSUMER_THREADS, else 1.")] = None,
) -> None:
    """Consume until SIGTERM or Ctrl-C; run as many as you like, on as many machines.

    What runs at SIGTERM may finish within CONSUMER_DRAIN_SECONDS; a second signal ends it at once.

    Exit code 70: a handler went on after its timeout_seconds. 75: what ran at SIGTERM did not finish, and was handed back.
    78: with --strict, something dangerous was found.
    """
    configure_logging(log_level)
    consumer = _loaded(target)
    width = {"processes": processes, "threads": threads}
    settings = _settings(schema, strict, **{name: number for name, number in width.items() if number is not None})
    if who := _who(settings):
        configure_logging(log_level, who)
    log = logging.getLogger("consumer")
    if settings.processes > 1:
        supervisor = Supervisor(
            consumer, settings, lambda: looked(lambda: examine(consumer, settings), strict=settings.strict)
        )
        if code := supervisor.run():
            raise typer.Exit(code)
        log.info("consumer %s stopped", consumer.name, extra={"action": "consumer_stopped"})
        return
    worker = Worker(consumer, settings) if settings.threads == 1 else Crew(consumer, settings, notes(settings.threads))
    with (
        draining(worker, settings.drain_seconds) as stop,
        started(stop, lambda: examine(consumer, settings), strict=settings.strict),
    ):
        log.info("consumer %s started", consumer.name, extra={"action": "consumer_started"})
        worker.run()
    log.info("consumer %s stopped", consumer.name, extra={"action": "consumer_stopped"})


@app.command()
def doctor(
    target: Target,
    schema: Schema = None,
    as_json: AsJson = False,
    strict: Strict = False,
    transaction_seconds: TransactionSeconds = TRANSACTION_SECONDS,
) -> None:
    """Look at the servers, the tables and the settings, and say what is wrong and what to do. Changes nothing.

    Exit code: 0 no errors, 1 errors, 2 with --strict warnings.
    """
    limits = Limits(transaction_seconds=transaction_seconds)
    findings = examine(_loaded(target), _settings(schema), limits)
    report(findings, as_json=as_json, strict=strict)


@app.command()
def reconcile(
    target: Target,
    days: Annotated[
        float, typer.Option(min=0.001, max=_LONGEST_DAYS, help="Compare what was recorded in the last so many days.")
    ] = 7,
    grace: Annotated[
        float, typer.Option(min=0, max=_LONGEST_DAYS * 86_400, help="Seconds that an event may be on its way.")
    ] = 300,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have the missing ones published again, for us alone.")
    ] = False,
    rate: Rate = EVENTS_PER_SECOND,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all ids, however many.")] = False,
    outbox_schema: Annotated[str | None, typer.Option(help="Default: OUTBOX_SCHEMA, else public.")] = None,
    schema: Schema = None,
) -> None:
    """Compare an outbox (OUTBOX_DATABASE_URL, else DATABASE_URL) with this consumer's ledger (DATABASE_URL).

    A repair that ends before its time is run again: what has come meanwhile is no longer missing. It waits like a replay.

    Exit code 0: nothing is missing and nothing extra; 3: something is (or was, before the repair).
    """
    consumer = _loaded(target)
    settings = _settings(schema)
    theirs: dict[str, Any] = {"schema_name": outbox_schema} if outbox_schema else {}
    if os.environ.get("OUTBOX_DATABASE_URL"):
        theirs["database_url"] = os.environ["OUTBOX_DATABASE_URL"]
    relay_settings = RelaySettings(**theirs)
    with operations.opened(relay_settings) as (store, outbox, transport):
        with (
            outbox.transaction(),
            schemas.connect(settings.database_url.get_secret_value(), "consumer reconcile") as ledger,
        ):
            schemas.check_revision(ledger, "consumer", settings.schema_name)
            now = store.now(outbox)
            report = reconciled(
                consumer, outbox, ledger, since=now - timedelta(days=days), now=now, grace=timedelta(seconds=grace),
                outbox_schema=relay_settings.schema_name, ledger_schema=settings.schema_name,
            )  # fmt: skip
        sys.stdout.writelines(f"{line}\n" for line in (_json(report) if as_json else _lines(report, consumer.name)))
        sys.stdout.flush()
        if repair and report.missing:
            stopping = Stop()
            stop_on_signals(stopping.set)
            steps = replay_positions(
                store, outbox, transport, relay_settings, report.missing.positions,
                consumer=consumer.name, events_per_second=rate, stopping=stopping,
            )  # fmt: skip
            done, published = False, 0
            try:
                for step in shown_steps(steps, "repair", len(report.missing)):
                    published = step.events
                done = not stopping.is_set()
            finally:
                typer.echo(
                    f"{published:,} published again for {consumer.name} alone" + ("" if done else "; run it again"),
                    err=True,
                )
    if report.missing or report.extra:
        raise typer.Exit(3)


@app.command()
def forget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer's name, as `consumer doctor` says it.")],
    schema: Schema = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Keep the ledger no longer for a consumer that is gone for good (see ledger-keeps of `consumer doctor`).

    Its dead letters and waiting events stay, and what others need. First `outbox drop-group`, so that the outbox keeps nothing for it either.
    """
    if not (yes or confirmed(f"Let the ledger forget what consumer {name} alone needs?")):
        raise typer.Abort
    settings = _settings(schema)
    address = settings.database_url.get_secret_value()
    with schemas.connect(address, "consumer forget", autocommit=True) as connection:
        schemas.check_revision(connection, "consumer", settings.schema_name)
        gone, seen = Ledger(name, settings.schema_name).forget_consumer(connection, _GONE_SECONDS)
    if not gone and seen is not None:
        raise SettingsError(
            f"consumer {name!r} was here {lasting(seen)} ago: it is not gone while it was seen within an hour"
        )
    if not gone:
        raise SettingsError(f"schema {settings.schema_name!r} remembers nothing for a consumer {name!r}")
    typer.echo(f"consumer {name} is forgotten: the ledger keeps nothing for it alone any longer")


def _who(settings: ConsumerSettings) -> str:
    """What tells the lines of a log apart."""
    return ("[%(process)d] " if settings.processes > 1 else "") + ("[%(threadName)s] " if settings.threads > 1 else "")


def _settings(schema: str | None, strict: bool = False, **overrides: Any) -> ConsumerSettings:
    warn_of_unknown_variables(ConsumerSettings, RelaySettings)
    overrides |= ({"schema_name": schema} if schema else {}) | ({"strict": True} if strict else {})
    return ConsumerSettings(**overrides)


def _lines(report: Report, name: str) -> Iterator[str]:
    yield f"{report.compared:,} events compared, {report.dead:,} of them put aside as dead letters"
    if report.waiting:
        yield f"{report.waiting:,} of them wait for another try, see: consumer waiting {name}"
    for what, found in (
        ("missing: not in the ledger", report.missing),
        ("late: not in the ledger yet", report.late),
        ("extra: not recorded in this outbox", report.extra),
    ):
        yield f"{len(found):,} {what}" + (":" if found else "")
        yield from (f"  {event_id}" for event_id in islice(found, 20))
        if len(found) > 20:
            yield f"  and {len(found) - 20:,} more"
    if report.older:
        yield f"{report.older:,} applied that are older than all that the outbox still has: not compared"


def _json(report: Report) -> Iterator[str]:
    """The report as one JSON object, a line an id: there may be more than memory holds."""
    kinds = {"missing": report.missing, "late": report.late, "extra": report.extra}
    counts = {"compared": report.compared, "dead": report.dead, "waiting": report.waiting, "older": report.older} | {
        f"{kind}_count": len(kinds[kind]) for kind in kinds
    }
    yield "{"
    yield from (f'  "{name}": {number},' for name, number in counts.items())
    for number, (kind, found) in enumerate(kinds.items(), 1):
        yield f'  "{kind}": ['
        yield from (f'    "{event_id}"{"," * (n < len(found))}' for n, event_id in enumerate(found, 1))
        yield "  ]" + "," * (number < len(kinds))
    yield "}"


def _loaded(target: str) -> Consumer:
    """`load`; what its module raises is shown from the module on, without the command's own lines."""
    try:
        return load(target)
    except OutboxError:
        raise
    except Exception as error:
        shown = error.with_traceback(_from_the_module_on(error.__traceback__))
        typer.echo("".join(traceback.format_exception(shown)).rstrip(), err=True)
        module = target.partition(":")[0]
        raise SettingsError(f"cannot import {module!r}: {type(error).__name__}: {error}") from None


def _from_the_module_on(frames: TracebackType | None) -> TracebackType | None:
    """The frames after our own and the import system's; None where the module was not even compiled."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name not in (__file__, importlib.__file__) and not name.startswith("<frozen importlib"):
            return frames
        frames = frames.tb_next
    return None


def load(target: str) -> Consumer:
    """The Consumer that ``module:name`` names, found from the current directory on.

    Raises:
        SettingsError: there is none; says why.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name or module_name.startswith("."):
        raise SettingsError(f"{target!r} is not of the form module:name")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise SettingsError(f"there is no module {module_name!r} (looked from {os.getcwd()!r} on)") from None
        raise
    found = getattr(module, name, None)
    if not isinstance(found, Consumer):
        # With the file: a module of the user's may be hidden by an installed one of the same name, as by our own.
        raise SettingsError(
            f"{module_name} ({getattr(module, '__file__', None)}) has no Consumer {name!r}"
            + (f", it is a {type(found).__name__}" if found is not None else "")
            + "".join(f"; {other!r} is one" for other, it in vars(module).items() if isinstance(it, Consumer))
        )
    return found


def main() -> None:
    """Entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
