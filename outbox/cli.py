"""The command ``outbox``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import psycopg
import sqlalchemy.exc
import typer

from outbox import schema as schemas
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


# --- what both commands share --------------------------------------------------------------------------------------


def run_migrate(branch: schemas.Branch, schema: str, sql: bool) -> None:
    """The command ``migrate`` of either side."""
    check_schema(schema)
    if sql:
        sys.stdout.write(schemas.upgrade_sql(branch, schema=schema))
        return
    revision = schemas.upgrade(database_url_from_environment(), branch, schema=schema)
    typer.echo(f"{branch} tables in schema {schema} are at revision {revision}")


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
