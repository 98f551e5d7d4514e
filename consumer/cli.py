"""The command ``consumer``. Addresses come from the environment only, so that no password shows in a process list."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from types import TracebackType
from typing import Annotated, Any

import typer

from consumer.handlers import Consumer
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox.cli import LogLevel, configure_logging, run_app, run_migrate, stop_on_signals
from outbox.errors import OutboxError, SettingsError

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


@app.command()
def migrate(
    schema: Schema = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements for a DBA instead of running them.")] = False,
) -> None:
    """Make the consumer's tables, or bring them to this version. Safe to run at any time, by any number of processes."""
    run_migrate("consumer", schema or os.environ.get("CONSUMER_SCHEMA") or "public", sql)


@app.command()
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="The Consumer, e.g. myapp.handlers:wallet.")],
    schema: Schema = None,
    log_level: LogLevel = "info",
) -> None:
    """Consume until SIGTERM or Ctrl-C; run as many processes as you like."""
    configure_logging(log_level)
    consumer = _loaded(target)
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    settings = ConsumerSettings(**overrides)
    worker = Worker(consumer, settings)
    stop_on_signals(worker.stop)
    log = logging.getLogger("consumer")
    log.info("consumer %s started", consumer.name, extra={"action": "consumer_started"})
    worker.run()
    log.info("consumer %s stopped", consumer.name, extra={"action": "consumer_stopped"})


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
        )
    return found


def main() -> None:
    """Entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
