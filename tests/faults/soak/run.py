"""The soak: writers, relays and consumers under every fault, at random, and then every invariant."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Self

import redis

from outbox.embedded import redis_servers
from tests.faults.chaos import TOPIC, Bench
from tests.faults.soak.database import Database
from tests.faults.soak.handlers import ledger
from tests.faults.soak.invariants import Invariants
from tests.faults.soak.servers import Clustered, Fault, Sentinels, Servers, Single
from tests.faults.soak.witness import Witness
from tests.faults.soak.writers import KEYS, Writers
from tests.waiting import eventually

WRITERS = 6
#: How often rare faults come at most.
RARELY = 2

KINDS: dict[str, type[Servers]] = {"single": Single, "sentinel": Sentinels, "cluster": Clustered}


class Soak:
    """The servers, the processes, and what was done to them.

    Args:
        seed: of the faults' order; what they meet is left to chance.
        kind: of `KINDS`.
        server: a name of `redis_servers()`.
        postgres: a name of `postgres_servers()`; default: the newest.
        pooled: everything goes to PostgreSQL through PgBouncer, in transaction mode.
        log: where relays and consumers write to.

    Attributes:
        tally: how often each fault came, and what it did.
        ended: when set, there are no more faults.
    """

    def __init__(
        self, seed: int = 1, kind: str = "single", *, server: str = "valkey9", postgres: str = "", pooled: bool = False,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self.tally: Counter[str] = Counter()
        self.ended = threading.Event()
        self.patience_seconds = 60.0
        self._random, self._log = random.Random(seed), log
        with ExitStack() as stack:
            self.database = Database(self._random, KEYS, name=postgres, pooled=pooled)
            stack.callback(self.database.close)
            self.servers = KINDS[kind](redis_servers()[server], self._random)
            stack.callback(self.servers.close)
            self.witness = Witness(self.servers, ledger.name)
            stack.callback(self.witness.close)
            # Its own client is of no use here.
            self.bench = stack.enter_context(Bench(self.database.url, self.servers.url, client=ExitStack()))
            self.relays = [self._relay() for _ in range(2)]
            self.consumers = [self._consumer() for _ in range(2)]
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- processes ---

    def _start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        return self.bench.start(
            *command, log=self._log, OUTBOX_LANES=f"{TOPIC}={self.servers.lanes}",
            OUTBOX_BATCH_ROWS="50", OUTBOX_TRIM_SECONDS="1", OUTBOX_STREAM_KEEP_SECONDS="1",
            OUTBOX_REDIS_TIMEOUT_SECONDS="2", CONSUMER_REDIS_TIMEOUT_SECONDS="2",
            CONSUMER_CLAIM_SECONDS="1", CONSUMER_BATCH_SIZE="100", CONSUMER_BLOCK_SECONDS="0.2", CONSUMER_CHECK_SECONDS="0.2",
            CONSUMER_BACKOFF_MAX_SECONDS="0.5", **environment,
        )  # fmt: skip

    def _relay(self) -> subprocess.Popen[bytes]:
        return self._start("outbox", "relay")

    def _consumer(self) -> subprocess.Popen[bytes]:
        return self._start("consumer", "run", "tests.faults.soak.handlers:ledger")

    # --- faults ---

    def faults(self) -> dict[str, Fault]:
        """By name, in the plural; those of the processes, of PostgreSQL and of Redis."""
        of_servers = self.servers.faults(self.witness)
        return {
            "relays killed": lambda: self._killed(self.relays, self._relay),
            "consumers killed": lambda: self._killed(self.consumers, self._consumer),
            "relays paused": lambda: self._paused(self.relays),
            "consumers paused": lambda: self._paused(self.consumers),
            **self.database.faults(),
            **self.database.rare_faults(),
            **of_servers,
            "entries deleted unread": lambda: self._unread(of_servers["strangers' deletions"]),
        }

    def _killed(self, processes: list[subprocess.Popen[bytes]], another: Callable[[], subprocess.Popen[bytes]]) -> None:
        process = processes.pop(0)
        assert process.poll() is None, f"{process.args!r} had ended by itself with {process.returncode}"
        process.kill()
        process.wait()
        processes.append(another())

    def _paused(self, processes: list[subprocess.Popen[bytes]]) -> None:
        victim = self._random.choice(processes)
        victim.send_signal(SIGSTOP)
        time.sleep(self._random.uniform(0.2, 2.5))
        victim.send_signal(SIGCONT)

    def _unread(self, fault: Fault) -> None:
        """Do it while no consumer reads."""
        for process in self.consumers:
            process.send_signal(SIGSTOP)
        time.sleep(0.5)
        fault()
        for process in self.consumers:
            process.send_signal(SIGCONT)

    # --- the run ---

    def run(self, seconds: float, most_pause_seconds: float = 1) -> Counter[str]:
        """Load and faults for so long, each of them once at least, then peace until everything has come to rest.

        Args:
            most_pause_seconds: between two faults.

        Returns:
            The tally: how often each came, how many events were recorded, and what became of them.

        Raises:
            AssertionError: invariants do not hold; names all of them.
        """
        # A new consumer begins with what the streams hold: what others have acknowledged may be trimmed before it is there.
        eventually(self._groups_are_there, 60, "the groups of every stream", ignoring=(redis.RedisError,))
        writers = Writers(self.database.url, WRITERS)
        try:
            # What a group needs is known of it as soon as a relay has seen it once.
            eventually(self._groups_are_known, 60, "relays know the groups of every stream")
            self._do_harm(writers, seconds, most_pause_seconds)
        finally:
            writers.stop()
        self.check(writers)
        return self.tally

    def _groups_are_there(self) -> bool:
        for stream in self.servers.streams:
            with self.servers.client(stream) as client:
                if len(client.xinfo_groups(stream)) < 2:
                    return False
        return True

    def _groups_are_known(self) -> bool:
        with self.database.connect() as db:
            return db.execute("SELECT count(*) FROM public.outbox_group").fetchone() == (2 * len(self.servers.streams),)

    def _do_harm(self, writers: Writers, seconds: float, most_pause_seconds: float) -> None:
        faults, rare = self.faults(), self.database.rare_faults()
        begin, names = time.monotonic(), list(faults)
        while time.monotonic() < begin + seconds:
            self._random.shuffle(names)
            for name in names:
                enough = time.monotonic() >= begin + seconds and all(self.tally[name] for name in names)
                if enough or self.ended.is_set():
                    return
                if name in rare and self.tally[name] >= RARELY:
                    continue
                try:
                    faults[name]()
                except Exception as error:
                    error.add_note(f"the soak could not do it: {name}")
                    raise
                self.tally[name] += 1
                self._say(
                    f"{time.monotonic() - begin:4.0f} of {seconds:.0f} s, {sum(self.tally.values())} faults, "
                    f"{len(writers.committed)} events, {self.witness.again} entries published again; now: {name}"
                )
                time.sleep(self._random.uniform(0.1, 1) * most_pause_seconds)

    def _say(self, line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif sum(self.tally.values()) % 20 == 1:
            print(line, file=sys.stderr, flush=True)

    def check(self, writers: Writers) -> None:
        """Wait until nothing is left to do, and see that every invariant holds."""
        found = Invariants(self.database, self.servers, self.witness, writers, self.patience_seconds)
        self.tally.update(found.facts)
        for process in (*self.relays, *self.consumers):
            if process.poll() is not None:
                found.violations.append(f"{process.args!r} had ended by itself with {process.returncode}")
        assert not found.violations, "\n".join(found.violations)
