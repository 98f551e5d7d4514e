"""Runs the exhibits on every server there is, and prints one table: what is expected beside what happened."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import psycopg
import redis

from examples.failures import crashes, failover, losses, polling, slow, trims
from examples.failures.place import GalleryError
from examples.failures.stage import Failure, Stage, stage
from outbox.embedded import EmbeddedServerError, redis_servers
from outbox.errors import OutboxError

EXHIBITS: tuple[Failure, ...] = tuple(
    exhibit for theme in (crashes, slow, losses, failover, trims, polling) for exhibit in theme.EXHIBITS
)


@dataclass(frozen=True)
class Row:
    """What came of one exhibit on one server, or on several alike."""

    naive_expected: str
    naive: str
    ours_expected: str
    ours: str

    @property
    def right(self) -> bool:
        """Whether it is as expected."""
        return (self.naive, self.ours) == (self.naive_expected, self.ours_expected)


def show(place: Stage, exhibit: Failure, server: str) -> Row:
    """Run an exhibit, both ways, on one server."""
    with place.scene(server) as scene:
        naive = exhibit.naive(scene)
    with place.scene(server) as scene:
        ours = exhibit.ours(scene)
    return Row(_on(server, exhibit.naive_expected), naive, _on(server, exhibit.ours_expected), ours)


def _on(server: str, expected: str | Mapping[str, str]) -> str:
    return expected if isinstance(expected, str) else expected.get(server, expected["else"])


# --- the table -------------------------------------------------------------------------------------------------------

_LINE = "  {:<14}  {:<19}  {:<19}  {:<14}  {:<14}  {}"


def table(shown: Mapping[str, Mapping[str, Row]], titles: Mapping[str, str]) -> Iterator[str]:
    """The lines of the table; servers with the same figures share one."""
    yield _LINE.format("", "THE NAIVE WAY", "", "OURS", "", "")
    yield _LINE.format("on", "expected", "actual", "expected", "actual", "")
    for name, rows in shown.items():
        yield f"{name}: {titles[name]}"
        for row in dict.fromkeys(rows.values()):
            alike = [server for server, some in rows.items() if some == row]
            servers = " ".join(alike) if len(alike) < 3 else f"all {len(alike)} servers"
            verdict = "ok" if row.right else "DIFFERS"
            yield _LINE.format(servers, row.naive_expected, row.naive, row.ours_expected, row.ours, verdict)


# --- running it ------------------------------------------------------------------------------------------------------


def run(exhibits: Sequence[Failure], servers: Sequence[str] = ()) -> int:
    """Run exhibits on these servers, or on all; returns the exit status: 0 if everything was as expected."""
    started = time.monotonic()
    shown: dict[str, dict[str, Row]] = {exhibit.name: {} for exhibit in exhibits}
    with stage() as place:
        for exhibit in exhibits:
            for server in servers or place.programs:
                began = time.monotonic()
                shown[exhibit.name][server] = show(place, exhibit, server)
                print(f"{exhibit.name} on {server}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print("\n".join(line.rstrip() for line in table(shown, {exhibit.name: exhibit.title for exhibit in exhibits})))
    rows = [row for some in shown.values() for row in some.values()]
    wrong = sum(not row.right for row in rows)
    print(f"\n{wrong} of {len(rows)} differ." if wrong or not rows else f"\nAll {len(rows)} are as expected.")
    print(f"Took {time.monotonic() - started:.0f} s.", flush=True)
    return int(wrong > 0 or not rows)


def main(arguments: Sequence[str] | None = None, exhibits: Sequence[Failure] = EXHIBITS) -> int:
    """Entry point; returns the exit status: 0 if every figure was as expected, 1 if not, 2 if it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.failures", description="The classic ways to lose or repeat work, and ours beside them."
    )
    names = [exhibit.name for exhibit in exhibits]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"of: {', '.join(names)}")
    parser.add_argument("--server", action="append", choices=sorted(redis_servers()), help="default: all there are")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    for name in [name for name in os.environ if name.startswith(("OUTBOX_", "CONSUMER_"))]:
        del os.environ[name]  # settings of another installation, not of ours
    logging.basicConfig(format="  (the product's log) %(message)s")
    try:
        return run([exhibit for exhibit in exhibits if exhibit.name in (given.only or names)], given.server or ())
    except KeyboardInterrupt:
        print("\nStopped; nothing is left behind.", file=sys.stderr)
        return 130
    except (GalleryError, OutboxError, EmbeddedServerError, psycopg.Error, redis.RedisError) as error:
        print(f"\nThe gallery could not run: {error}", file=sys.stderr)
        return 2


def _terminated(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(143)  # so that everything is cleaned up on the way out
