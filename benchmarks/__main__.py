"""``python -m benchmarks`` (``make bench``): relay and consumer beside their baselines, as a table and as JSON.

PostgreSQL (fsync on) and Valkey (no persistence) are started here, on loopback. Ours and the baseline take turns; what counts is the
median of the ratios, since figures of one machine at one time say little about another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import consume, drain
from benchmarks.measure import Measurement
from outbox.embedded import PostgresServer, ValkeyServer

SUITES: dict[str, Callable[[str, str, int], list[Measurement]]] = {"relay": drain.run, "consumer": consume.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help="relay, consumer; default: both")
    parser.add_argument("--events", type=int, default=100_000, help="events the relay drains (default 100,000)")
    parser.add_argument("--rounds", type=int, default=3, help="turns that each side takes (default 3)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"), help="where the figures go")
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    print("Starting PostgreSQL (fsync on) and Valkey (no persistence) ...", file=sys.stderr, flush=True)
    for name in arguments.suites or SUITES:
        rounds = []
        for number in range(arguments.rounds):
            print(f"{name}: round {number + 1} of {arguments.rounds} ...", file=sys.stderr, flush=True)
            with (
                PostgresServer(settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as pg,
                ValkeyServer() as kv,
            ):
                rounds.append(SUITES[name](pg.url, kv.url, arguments.events))
        for turns in zip(*rounds, strict=True):
            rates = [turn.events / turn.seconds for turn in turns]
            base = [next(turn.events / turn.seconds for turn in turns if turn.baseline) for turns in rounds]
            ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
            results.append({
                "suite": name, "what": turns[0].what, "baseline": turns[0].baseline, "events": turns[0].events,
                "events_per_second": round(statistics.median(rates)), "ratio": round(statistics.median(ratios), 2),
                "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2), **turns[-1].details,
            })  # fmt: skip
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'':9}{'what':62}{'events/s':>10}{'ratio':>8}")
    for row in results:
        details = "  ".join(f"{k} {v}" for k, v in row.items() if k.endswith(("_bytes_per_event", "_min", "_max")))
        print(f"{row['suite']:9}{row['what']:62}{row['events_per_second']:>10,}{row['ratio']:>8}  {details}")
    print(f"figures in {arguments.json}")


main()
