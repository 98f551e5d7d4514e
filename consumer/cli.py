"""The command ``consumer``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Annotated, Any

import typer

from consumer.doctor import examine
from consumer.handlers import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.cli import (
    AsJson,
    LogLevel,
    Strict,
    TransactionSeconds,
    configure_logging,
    report,
    run_app,
    run_migrate,
    stop_on_signals,
)
from outbox.doctor import TRANSACTION_SECONDS, Limits
from outbox.errors import SettingsError

app = typer.Typer(
    name="consumer",
    help="Idempotent consumer: every event takes effect exactly once.\n\n"
    "DATABASE_URL and REDIS_URL say where PostgreSQL and Redis (or Valkey) are. Every setting is an environment "
    "variable CONSUMER_…; see the reference in docs/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Schema = Annotated[
    str | None, typer.Option("--schema", help="Schema of the consumer's tables; default: CONSUMER_SCHEMA, else public.")
]

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="The Consumer, e.g. myapp.handlers:wallet.")]


@app.command()
def migrate(
    schema: Schema = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for a DBA instead of running them.")] = False,
) -> None:
    """Make the consumer's tables, or bring them to this version. Safe to run at any time, by any number of processes."""
    run_migrate("consumer", schema or os.environ.get("CONSUMER_SCHEMA") or "public", sql)


@app.command()
def run(
    target: Target,
    schema: Schema = None,
    log_level: LogLevel = "info",
) -> None:
    """Consume until SIGTERM or Ctrl-C; run as many processes as you like."""
    configure_logging(log_level)
    consumer = load(target)
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    settings = ConsumerSettings(**overrides)
    worker = Worker(consumer, settings)
    stop_on_signals(worker.stop)
    log = logging.getLogger("consumer")
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
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    limits = Limits(transaction_seconds=transaction_seconds)
    findings = examine(load(target), ConsumerSettings(**overrides), limits)
    report(findings, as_json=as_json, strict=strict)


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
        raise SettingsError(
            f"{module_name} has no Consumer {name!r}" + (f", it is a {type(found).__name__}" if found else "")
        )
    return found


def main() -> None:
    """Entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
