"""The command ``outbox``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import psycopg
import sqlalchemy.exc
import typer

from outbox import schema as schemas
from outbox.doctor import TRANSACTION_SECONDS, Finding, Limits, examine
from outbox.errors import OutboxError
from outbox.relay import Relay
from outbox.settings import RelaySettings, check_schema, database_url_from_environment

app = typer.Typer(
    name="outbox",
    help="Transactional outbox: the producer's side.\n\n"
    "DATABASE_URL and REDIS_URL say where PostgreSQL and Redis (or Valkey) are. Every setting of the relay is an "
    "environment variable OUTBOX_…; see the reference in docs/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Schema = Annotated[
    str | None, typer.Option("--schema", help="Schema of the outbox tables; default: OUTBOX_SCHEMA, else public.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list instead.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit code 2 when there are warnings and no errors.")]
TransactionSeconds = Annotated[
    float, typer.Option("--transaction-seconds", min=0, help="Warn of transactions that are open for longer.")
]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]


@app.command()
def migrate(
    schema: Schema = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for a DBA instead of running them.")] = False,
) -> None:
    """Make the outbox tables, or bring them to this version. Safe to run at any time, by any number of processes."""
    run_migrate("outbox", schema or os.environ.get("OUTBOX_SCHEMA") or "public", sql)


@app.command()
def relay(schema: Schema = None, log_level: LogLevel = "info") -> None:
    """Publish the outbox to Redis streams until SIGTERM or Ctrl-C; run as many as you like, one works at a time."""
    configure_logging(log_level)
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    settings = RelaySettings(**overrides)
    running = Relay(settings)
    stop_on_signals(running.stop)
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
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    findings = examine(RelaySettings(**overrides), Limits(transaction_seconds=transaction_seconds))
    report(findings, as_json=as_json, strict=strict)


# --- what both commands share --------------------------------------------------------------------------------------


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


def configure_logging(level: str) -> None:
    """Log to standard error, one line a record."""
    numeric = logging.getLevelNamesMapping().get(level.upper())
    if numeric is None:
        raise typer.BadParameter("must be debug, info, warning or error", param_hint="--log-level")
    logging.basicConfig(level=max(numeric, logging.INFO), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("outbox", "consumer"):
        logging.getLogger(name).setLevel(numeric)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """SIGTERM or SIGINT finishes the work at hand; a second one ends the process at once."""

    def first(_signum: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)


def run_app(application: typer.Typer) -> None:
    """Run a command; our errors and the databases' are one line on standard error and exit code 1."""
    try:
        application()
    except (OutboxError, psycopg.Error, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig else error
        typer.echo(f"error: {' '.join(str(cause).split())}", err=True)
        raise SystemExit(1) from None


def main() -> None:
    """Entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
