"""Poison: events that fail for ever, that end their process, that come twice or late, among good ones, while processes are killed.

Two processes (``consumer run --processes 2``) handle the same number of events with all that and without. What counts is the time
until 99 of 100 good events are applied (one that was at work in a process that was killed waits for a moment, however many there
are). It is checked that each was applied once, and each bad one put aside once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import redis

from benchmarks.measure import Measurement
from outbox import schema
from outbox.envelope import uuid7

ROOT = Path(__file__).parents[1]
HANDLERS = """
import ctypes, os, signal
from sqlalchemy import text
from consumer import Consumer, Order, Retry

RAW = bool(os.environ["RAW"])
load = Consumer("load", topics=["load"], retry=Retry(attempts=3, first_seconds=0.2))

def statement(sql):
    return sql.replace(":id", "%(id)s").replace(":key", "%(key)s").replace(":version", "%(version)s") if RAW else text(sql)

APPLIED = statement("INSERT INTO applied VALUES (:id)")
STATE = statement("INSERT INTO states VALUES (:key, :version) ON CONFLICT (key) DO UPDATE SET version = excluded.version")

@load.on("good", raw=RAW)
def good(event, database):
    database.execute(APPLIED, {"id": event.id})

@load.on("state", raw=RAW, order=Order.LATEST)
def state(event, database):
    database.execute(APPLIED, {"id": event.id})
    database.execute(STATE, {"key": event.key, "version": event.version})

@load.on("bad", raw=RAW)
def bad(event, database):
    database.execute(APPLIED, {"id": event.id})
    raise ValueError("bad")

@load.on("exit", raw=RAW)
def leave(event, database):
    os._exit(137)

@load.on("kill", raw=RAW)
def kill(event, database):
    os.kill(os.getpid(), signal.SIGKILL)

@load.on("crash", raw=RAW)
def crash(event, database):
    ctypes.string_at(0)
"""
PROCESSES = 2
#: What ends a process takes half a batch along on average.
BATCH_SIZE = 500
_STATES = 0.05
_TIMEOUT_SECONDS = 300.0


@dataclass
class Load:
    """What is sent, to handlers that have a connection (`raw`) or a Session: of each thousand events 10 fail and 1 ends its process; 50 come twice, 50 are older than one before."""

    events: int
    poison: bool
    raw: bool = True
    kills_seconds: float = 2.0
    good: set[str] = field(default_factory=set)
    maybe: set[str] = field(default_factory=set)  # of a key of which a newer one is there: applied or stale
    bad: set[str] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)

    def send(self, client: Any) -> None:
        rnd = random.Random(1)
        pipeline, recent = client.pipeline(transaction=False), list[dict[str, str]]()
        for n in range(self.events):
            entry = self._entry(n, rnd)
            pipeline.xadd("{load}", entry)
            recent = [*recent[-500:], entry]
            if self.poison and rnd.random() < 0.05:
                pipeline.xadd("{load}", rnd.choice(recent))
            if n % 1000 == 999:
                pipeline.execute()
        pipeline.execute()

    def _entry(self, n: int, rnd: random.Random) -> dict[str, str]:
        event_id, chance, kind = str(uuid7()), rnd.random(), "good"
        entry = {
            "id": event_id,
            "subject": f"key-{n % 1000}",
            "data": '{"amount_halala":5000,"note":"' + "x" * 160 + '"}',
        }
        if self.poison and chance < 0.01:
            kind = "bad"
        elif self.poison and chance < 0.011:
            kind = ("exit", "kill", "crash")[n % 3]
        elif chance < 0.011 + 2 * _STATES:
            return entry | self._state(entry["id"], rnd)
        (self.good if kind == "good" else self.bad).add(event_id)
        return entry | {"type": kind}

    def _state(self, event_id: str, rnd: random.Random) -> dict[str, str]:
        """A new version of a key, or one that is older than its newest."""
        key = f"state-{rnd.randrange(200)}"
        newest = self.newest.get(key, 0)
        late = newest > 1 and rnd.random() < 0.5
        version = rnd.randrange(1, newest) if late else newest + 1
        self.newest[key] = max(newest, version)
        self.maybe.add(event_id)
        return {"type": "state", "subject": key, "version": str(version)}


def turn(postgres: str, valkey: str, load: Load) -> tuple[float, dict[str, int]]:
    """Seconds until nearly all good events are applied, from the first one on; and what happened meanwhile.

    Raises:
        AssertionError: something was lost, applied twice, or not put aside.
    """
    with psycopg.connect(postgres, autocommit=True) as db, redis.Redis.from_url(valkey) as client:
        tables = "applied, states, processed_messages, message_failures, dead_letters, entity_versions"
        db.execute(
            "CREATE TABLE IF NOT EXISTS applied (event_id uuid); CREATE TABLE IF NOT EXISTS states (key text PRIMARY KEY, version bigint)"
        )
        db.execute(f"TRUNCATE {tables}")
        client.delete("{load}", "{load:@load}")
        load.send(client)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "poisoned.py").write_text(HANDLERS)
            with open(Path(folder, "log"), "wb") as log:
                parent = subprocess.Popen(
                    [sys.executable, "-m", "consumer", "run", "poisoned:load", "--processes", str(PROCESSES), "--log-level", "warning"],
                    cwd=folder, stderr=log, env=os.environ | {
                        "DATABASE_URL": postgres, "REDIS_URL": valkey, "PYTHONPATH": f"{ROOT}:{folder}", "RAW": "1" if load.raw else "",
                        "CONSUMER_DEAD_LETTER_LIMIT": "0", "CONSUMER_BATCH_SIZE": str(BATCH_SIZE),
                    },
                )  # fmt: skip
            try:
                seconds, killed = _wait(db, parent, load)
                _settled(db, client, load)
            except AssertionError:
                sys.stderr.write(Path(folder, "log").read_text()[-5000:])
                raise
            finally:
                parent.terminate()
                parent.wait()
            ended = Path(folder, "log").read_text().count("takes its place")
    return seconds, {"killed": killed, "ended": ended, "put_aside": len(load.bad)}


def _wait(db: psycopg.Connection[Any], parent: subprocess.Popen[bytes], load: Load) -> tuple[float, int]:
    """Until all good events are applied, with the time that 99 of 100 took; a process is killed now and then."""
    begun, next_kill, killed, seconds = 0.0, 0.0, 0, 0.0
    end = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        row = db.execute("SELECT count(*) FROM processed_messages p WHERE outcome IN ('applied', 'stale')").fetchone()
        assert row is not None
        now = time.monotonic()
        if row[0] and not begun:
            begun, next_kill = now, now + load.kills_seconds / 2
        if row[0] >= 0.99 * (len(load.good) + len(load.maybe)):
            seconds = seconds or now - begun
        if row[0] >= len(load.good) + len(load.maybe):
            return seconds, killed
        assert now < end, f"{row[0]} of {len(load.good) + len(load.maybe)}"
        if load.poison and begun and now >= next_kill:
            next_kill = now + load.kills_seconds
            with suppress(OSError, ValueError, IndexError):
                pids = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
                os.kill(int(pids[killed % PROCESSES]), signal.SIGKILL)
                killed += 1
        time.sleep(0.02)


def _settled(db: psycopg.Connection[Any], client: Any, load: Load) -> None:
    end = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        letters = Counter(str(found) for (found,) in db.execute("SELECT event_id FROM dead_letters"))
        if len(letters) >= len(load.bad) and not client.xpending("{load}", "load")["pending"]:
            break
        assert time.monotonic() < end, (
            f"{len(letters)} of {len(load.bad)} put aside, {client.xpending('{load}', 'load')}"
        )
        time.sleep(0.1)
    assert letters == Counter(load.bad), "put aside: other events, or some twice"
    applied = Counter(str(found) for (found,) in db.execute("SELECT event_id FROM applied"))
    assert set(applied.values()) == {1}, "applied twice"
    assert load.good <= set(applied) <= load.good | load.maybe, "lost, or bad ones applied"
    newest = dict(db.execute("SELECT key, version FROM states").fetchall())
    assert newest == load.newest, "an older version was applied over a newer one"


def run(postgres: str, valkey: str, events: int) -> list[Measurement]:
    """All turns, of a fifth of the events."""
    schema.upgrade(postgres, "consumer")
    found = []
    for way in ("Session", "psycopg"):
        for poison in (False, True):
            load = Load(max(2000, events // 5), poison, way == "psycopg")
            seconds, details = turn(postgres, valkey, load)
            name = "1 % fail, 0.1 % end their process, 5 % twice, 5 % late, kills" if poison else "none of that"
            shown: dict[str, object] = dict(details) if poison else {}
            found.append(
                Measurement(f"{PROCESSES} processes, {way}: {name}", len(load.good), seconds, not poison, shown)
            )
    return found
