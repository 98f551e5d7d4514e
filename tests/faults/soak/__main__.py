"""The program; see the package."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.faults import soak
from tests.faults.soak.run import KINDS, Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=soak.__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults' order")
    kinds = parser.add_mutually_exclusive_group()
    for kind in KINDS:
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind)
    parser.add_argument("--server", default="valkey9", help="a name of outbox.embedded.redis_servers()")
    parser.add_argument("--postgres", default="", help="a name of postgres_servers(); default: the newest")
    parser.add_argument("--bouncer", action="store_true", help="everything goes to PostgreSQL through PgBouncer")
    parser.add_argument("--log", type=Path, help="file for what relays and consumers say")
    given = parser.parse_args()
    kind, began = given.kind or "single", time.monotonic()
    print(f"seed {given.seed}, {kind} {given.server}", file=sys.stderr)
    log = given.log.resolve() if given.log else None
    with Soak(given.seed, kind, server=given.server, postgres=given.postgres, pooled=given.bouncer, log=log) as running:

        def end_early(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the next one ends everything
            print("\nno more faults; checking (Ctrl-C again to give up)", file=sys.stderr)
            running.ended.set()

        signal.signal(signal.SIGINT, end_early)
        violations = ""
        try:
            running.run(given.seconds)
        except AssertionError as error:
            violations = str(error)
        print(file=sys.stderr)
        faults = sum(running.tally[name] for name in running.faults())
        print(f"{faults:12,} faults, {time.monotonic() - began:.0f} s with what came before and after them")
        for name, number in running.tally.most_common():
            print(f"{number:12,} {name}")
    if violations:
        print(f"seed {given.seed}, violated:\n{violations}")
        return 1
    print("every invariant holds: nothing lost, nothing twice, no order inverted, nobody restarted by hand")
    return 0


if __name__ == "__main__":
    sys.exit(main())
