"""Jobs: the same one (an UPDATE of a wallet in PostgreSQL and its commit) done by ours and by other libraries on Redis.

Each library runs as its own documentation has it for short jobs, with nothing logged below warnings; where that leaves a choice, with
what was fastest here:

* RQ: ``rq worker-pool``. A worker forks for each job by default; the notes on performance name SimpleWorker for trusted jobs of a few
  milliseconds, where the fork is the bottleneck. Both. A worker does one job at a time and how many there should be is not said: two a core,
  a fifth faster than one.
* Celery: the prefork pool, recommended for most uses, with a process a core, the default. Once acknowledged before the job runs, the
  default, and once afterwards (``task_acks_late``), as all others do. 64 messages fetched ahead, which the guide to optimizing names for
  short jobs, instead of 4 made no difference.
* dramatiq: a process a core with eight threads each, both defaults.
* taskiq: a process a core, ``RedisStreamBroker``, which its documentation names for acknowledgements, jobs as coroutines on uvloop with a
  pool of eight connections: a quarter faster than plain functions in its threads. Acknowledged when the job is done, the default.

Each process or thread keeps its psycopg connection, in autocommit: one round trip a job. (RQ's default worker cannot: a process a job.) Ours
does jobs in batches, a transaction each, and writes a ledger, so that a job is done once though its worker is killed; the others do such a
job again, or lose it (Celery's default).

The clock runs from the first to the last job done, by PostgreSQL's: workers have been started and have done some jobs; while all are
enqueued, those that they take first wait for a lock on the wallets. (A SIGSTOP instead would cost taskiq jobs: what is sent to a worker that
sleeps longer than its client waits is pending for ten minutes.) CPU time is that of the workers and both servers in between. Linux only (/proc).
"""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import redis

from benchmarks.measure import Measurement
from benchmarks.peers.wallet import AMOUNT, WALLETS, jobs
from outbox import schema

ROOT = Path(__file__).parents[1]
_CORES = len(os.sched_getaffinity(0))
_DRIVERS = ("psycopg[binary]==3.3.9", "redis[hiredis]==8.1.0")
_RQ = ("rq==3.0.0", *_DRIVERS)
_CELERY = ("celery[redis]==5.7.0", *_DRIVERS)
_DRAMATIQ = ("dramatiq[redis]==2.2.1", *_DRIVERS)
_TASKIQ = ("taskiq[uv]==0.13.0", "taskiq-redis==1.2.4", "psycopg-pool==3.3.3", *_DRIVERS)
_WARM = 200
#: Nothing more is expected of a library that has done no job for so long.
_STILL_SECONDS = 30.0
_LATE_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Side:
    """Who does jobs.

    `module` is of `benchmarks.peers`, `command` that of its worker, `packages` what is installed for it (nothing for ours), `count` how many jobs
    take 5 to 10 seconds on two cores.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    command: str
    count: int
    environment: dict[str, str] = field(default_factory=dict)


OURS = Side(
    "consumer run, a queue", "with_ours", (),
    f"python3 -m consumer run benchmarks.peers.with_ours:jobs --processes {_CORES} --log-level warning", 60_000,
)  # fmt: skip
_POOL = f"rq worker-pool jobs --num-workers {2 * _CORES} --logging-level WARNING"
_PREFORK = f"celery -A benchmarks.peers.with_celery worker --pool prefork --concurrency {_CORES} --loglevel WARNING"
PEERS = (
    Side("RQ, default worker (fork a job)", "with_rq", _RQ, f"{_POOL} --worker-class benchmarks.peers.with_rq.Worker", 500),
    Side("RQ, SimpleWorker", "with_rq", _RQ, f"{_POOL} --worker-class benchmarks.peers.with_rq.SimpleWorker", 3500),
    Side("Celery, defaults", "with_celery", _CELERY, _PREFORK, 5000),
    Side(
        "Celery, acks late", "with_celery", _CELERY, _PREFORK, 5000, {"ACKS_LATE": "1"},
    ),
    Side(
        "dramatiq", "with_dramatiq", _DRAMATIQ,
        f"dramatiq benchmarks.peers.with_dramatiq --processes {_CORES} --threads 8 --skip-logging", 18_000,
    ),
    Side(
        "taskiq, RedisStreamBroker", "with_taskiq", _TASKIQ,
        f"taskiq worker benchmarks.peers.with_taskiq:broker --workers {_CORES} --log-level WARNING", 17_000,
    ),
)  # fmt: skip


class Unavailable(Exception):
    """A library cannot be installed, or does no jobs."""


def run(postgres: str, valkey: str, events: int, sides: Sequence[Side] = (OURS, *PEERS)) -> list[Measurement]:
    """All sides' turns on one pair of servers, in an order that changes; the fastest peer is the baseline.

    Raises:
        AssertionError: ours lost a job or did one twice.
    """
    schema.upgrade(postgres, "consumer")
    turns: dict[Side, Measurement] = {}
    with psycopg.connect(postgres, autocommit=True) as db, redis.Redis.from_url(valkey) as client:
        for side in random.sample(sides, len(sides)):
            try:
                turns[side] = _turn(
                    side, postgres, valkey, db, client, max(WALLETS // 10, side.count * events // 100_000)
                )
            except Unavailable as error:
                if side is OURS:
                    raise
                turns[side] = Measurement(side.name, 0, 0.0, note=str(error))
        assert not turns[OURS].note, turns[OURS].note
    best = max(sides, key=lambda side: (side is not OURS and not turns[side].note, turns[side].rate))
    return [replace(turns[side], baseline=side is best) for side in sides]


def _turn(
    side: Side, postgres: str, valkey: str, db: psycopg.Connection[Any], client: redis.Redis, count: int
) -> Measurement:
    programs = _programs(side)
    environment = os.environ | side.environment | {
        "DATABASE_URL": postgres, "REDIS_URL": valkey, "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}",
    }  # fmt: skip

    def enqueue(number: int) -> None:
        command = ["python3", "-m", f"benchmarks.peers.{side.module}", str(number)]
        done = subprocess.run(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise Unavailable(f"cannot enqueue: {_last_line(done.stderr)}")

    make_wallets(db)
    servers = _postmaster(db), int(client.info("server")["process_id"])
    with _workers(side, environment) as pid:
        enqueue(_WARM)
        if _done(db, _WARM) < _WARM:
            raise Unavailable("does no jobs")
        with db.transaction():
            make_wallets(db)
            enqueue(count)
            before = [_cpu_seconds(found) for found in (pid, *servers)]
        _done(db, count)
        used = [_cpu_seconds(found) - start for found, start in zip((pid, *servers), before, strict=True)]
        time.sleep(_LATE_SECONDS)  # for what is done twice
    names = ("worker_cpu_ms_per_job", "postgresql_cpu_ms_per_job", "valkey_cpu_ms_per_job")
    details: dict[str, object] = {name: round(1000 * cpu / count, 3) for name, cpu in zip(names, used, strict=True)}
    row = db.execute("SELECT extract(epoch FROM max(last_at) - min(first_at))::float FROM wallet").fetchone()
    assert row is not None
    return Measurement(side.name, count, row[0] or 0.0, False, details, wrong(db, count))


def make_wallets(db: psycopg.Connection[Any]) -> None:
    """All without money. In a transaction nobody else writes to them before its end."""
    with db.transaction():
        db.execute(
            "CREATE TABLE IF NOT EXISTS wallet "
            "(id text PRIMARY KEY, balance bigint NOT NULL, first_at timestamptz, last_at timestamptz)"
        )
        db.execute("LOCK TABLE wallet IN EXCLUSIVE MODE")
        db.execute("DELETE FROM wallet")
        db.execute("INSERT INTO wallet SELECT 'wallet-' || n, 0 FROM generate_series(0, %s) n", (WALLETS - 1,))
        db.execute("ANALYZE wallet")


def _done(db: psycopg.Connection[Any], count: int) -> int:
    """How many jobs are done, when all are, or no more seem to be coming."""
    found, end = -1, 0.0
    while True:
        row = db.execute("SELECT sum(balance) / %s FROM wallet", (AMOUNT,)).fetchone()
        assert row is not None
        if row[0] != found:
            found, end = int(row[0]), time.monotonic() + _STILL_SECONDS
        if found >= count or time.monotonic() > end:
            return found
        time.sleep(0.1)


def wrong(db: psycopg.Connection[Any], count: int) -> str:
    """What the balances say was lost or done twice, wallet by wallet, so that the one does not hide the other."""
    expected = dict.fromkeys((f"wallet-{n}" for n in range(WALLETS)), 0)
    for wallet, amount, _ in jobs(count):
        expected[wallet] += amount
    found = dict(db.execute("SELECT id, balance FROM wallet").fetchall())
    lost = sum(max(0, balance - found[wallet]) for wallet, balance in expected.items()) // AMOUNT
    twice = sum(max(0, found[wallet] - balance) for wallet, balance in expected.items()) // AMOUNT
    return ", ".join([f"{lost} jobs lost"] * bool(lost) + [f"{twice} jobs done twice"] * bool(twice))


@contextmanager
def _workers(side: Side, environment: dict[str, str]) -> Iterator[int]:
    """The worker command, until the end; gives its process."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            shlex.split(side.command), env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            family = [*_family(process.pid)]
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            # What is left, unless the number is another process's by now.
            for pid in family:
                with suppress(ProcessLookupError):
                    if _stat(pid)[3:4] == [str(process.pid)]:
                        os.kill(pid, signal.SIGKILL)
            process.wait()


def _family(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    yield pid
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in listing.read_text().split():
                yield from _family(int(child))


def _stat(pid: int) -> list[str]:
    """What proc(5) has from the state on: 1 is the parent, 3 the session, 11 to 14 are CPU times; nothing when it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _cpu_seconds(pid: int) -> float:
    """What the process, its descendants, and those of them that are gone have used."""
    return sum(int(found) for member in _family(pid) for found in _stat(member)[11:15]) / os.sysconf("SC_CLK_TCK")


def _postmaster(db: psycopg.Connection[Any]) -> int:
    return int(_stat(db.info.backend_pid)[1])


def _programs(side: Side) -> Path:
    """Where the library's programs are; at first use they are installed, in an environment that is kept in the cache folder."""
    if not side.packages:
        return Path(sys.executable).parent
    key = hashlib.sha256(repr((sys.executable, sys.version, side.packages)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "outbox-benchmarks" / f"{side.module.removeprefix('with_')}-{key}"
    if not (folder / "installed").exists():
        print(f"installing {', '.join(side.packages)} in {folder} ...", file=sys.stderr, flush=True)
        for command in (["-m", "venv", "--clear", folder], ["-m", "pip", "install", "--quiet", *side.packages]):
            program = sys.executable if "venv" in command else folder / "bin" / "python"
            done = subprocess.run([program, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise Unavailable(f"cannot be installed: {_last_line(done.stderr)}")
        (folder / "installed").touch()
    return folder / "bin"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word why"])[-1][:120]
