"""``python -m benchmarks`` (``make bench``): relay and consumer beside their baselines, as a table and as JSON.

PostgreSQL (fsync on) and Valkey (no persistence) are started here, on loopback. Ours and the baseline take turns; what counts is the
median of the ratios, since figures of one machine at one time say little about another. ``jobs`` compares with other libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import consume, drain, jobs, poison
from benchmarks.measure import Measurement
from outbox.embedded import PostgresServer, ValkeyServer

SUITES: dict[str, Callable[[str, str, int], list[Measurement]]] = {
    "relay": drain.run,
    "consumer": consume.run,
    "poison": poison.run,
    "jobs": jobs.run,
}
#: All but what installs other libraries, which is to be asked for.
_DEFAULT = ("relay", "consumer", "poison")
_SHOWN = ("_bytes_per_event", "_ms_per_job", "_min", "_max", "note")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", help="relay, consumer, poison, jobs; default: all but jobs")
    parser.add_argument(
        "--events",
        type=int,
        default=100_000,
        help="events the relay drains (default 100,000); others take less in proportion",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that each side takes (default 3)")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"), help="where the figures go")
    arguments = parser.parse_args()
    results: list[dict[str, object]] = []
    print("Starting PostgreSQL (fsync on) and Valkey (no persistence) ...", file=sys.stderr, flush=True)
    for name in arguments.suites or _DEFAULT:
        rounds = []
        for number in range(arguments.rounds):
            print(f"{name}: round {number + 1} of {arguments.rounds} ...", file=sys.stderr, flush=True)
            with (
                PostgresServer(settings={"shared_buffers": "512MB", "max_wal_size": "4GB"}) as pg,
                ValkeyServer() as kv,
            ):
                rounds.append(SUITES[name](pg.url, kv.url, arguments.events))
        for place, turns in enumerate(zip(*rounds, strict=True)):
            rates = [turn.rate for turn in turns]
            base = [_baseline(each, place) for each in rounds]
            ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
            notes = "; ".join(sorted({turn.note for turn in turns if turn.note}))
            results.append({
                "suite": name, "what": turns[0].what, "baseline": turns[0].baseline, "events": turns[0].events,
                "events_per_second": round(statistics.median(rates)),
                "events_per_second_min": round(min(rates)), "events_per_second_max": round(max(rates)),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2),
                **{key: statistics.median_low([turn.details[key] for turn in turns if key in turn.details]) for key in turns[0].details},
                **({"note": notes} if notes else {}),
            })  # fmt: skip
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'':9}{'what':62}{'events/s':>10}{'ratio':>8}")
    for row in results:
        details = "  ".join(f"{k} {v}" for k, v in row.items() if k.endswith(_SHOWN))
        print(f"{row['suite']:9}{row['what']:62}{row['events_per_second']:>10,}{row['ratio']:>8}  {details}")
    print(f"figures in {arguments.json}")


def _baseline(turns: Sequence[Measurement], place: int) -> float:
    """The rate of the last baseline up to there, or of the first."""
    places = [at for at, turn in enumerate(turns) if turn.baseline]
    return turns[max((at for at in places if at <= place), default=places[0])].rate


main()
