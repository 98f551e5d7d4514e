"""Everything that can go wrong, at random, under load, for as long as you like: ``make soak SECONDS=600``.

Writers credit accounts and record events while relays and consumers run as processes of their own behind proxies. Faults
come at random. Afterwards nobody helps: the processes must come to rest by themselves, and then every invariant is checked
against the outbox, which is the truth.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis

from outbox import Event, record
from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from tests.faults.chaos import TOPIC, Bench
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

KEYS = 20
WRITERS = 6


@dataclass
class Soak:
    """The servers, the processes, and what was done to them.

    Args:
        seed: of the faults' order; what they meet is left to chance.
    """

    seed: int = 1
    server: str = "valkey9"
    tally: Counter[str] = field(default_factory=Counter)
    patience_seconds: float = 60

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._random = random.Random(self.seed)
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.postgres = self._stack.enter_context(PostgresServer())
        self.primary, self.replica = self._valkey(), self._valkey()
        for branch in ("outbox", "consumer"):
            schemas.upgrade(self.postgres.url, branch)  # type: ignore[arg-type]
        self.to_redis = self._stack.enter_context(Proxy(port_of(self.primary.url)))
        self.to_postgres = self._stack.enter_context(Proxy(port_of(self.postgres.url)))
        self.bench = self._stack.enter_context(
            Bench(through(self.to_postgres, self.postgres.url), through(self.to_redis, self.primary.url))
        )
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.entities (key text PRIMARY KEY, version bigint NOT NULL)")
            connection.execute("INSERT INTO public.entities SELECT 'k' || i, 0 FROM generate_series(0, 19) i")
        self.bench.make_tables()
        self._replicate()
        self.relays = [self._relay() for _ in range(2)]
        self.consumers = [self._consumer() for _ in range(2)]

    def close(self) -> None:
        self._stop.set()
        self._stack.close()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- processes ---

    def _valkey(self) -> ValkeyServer:
        settings = {"appendonly": "yes", "appendfsync": "everysec", "repl-diskless-sync-delay": "0"}
        return self._stack.enter_context(ValkeyServer(program=redis_servers()[self.server], settings=settings))

    def _relay(self) -> subprocess.Popen[bytes]:
        return self.bench.start(
            OUTBOX_BATCH_ROWS="50",
            OUTBOX_TRIM_SECONDS="1",
            OUTBOX_STREAM_KEEP_SECONDS="1",
            OUTBOX_REDIS_TIMEOUT_SECONDS="2",
        )

    def _consumer(self) -> subprocess.Popen[bytes]:
        return self.bench.start(
            "consumer", "run", "tests.faults.chaos:ledger", CONSUMER_CLAIM_SECONDS="1", CONSUMER_BLOCK_SECONDS="0.2",
            CONSUMER_CHECK_SECONDS="0.2", CONSUMER_BACKOFF_MAX_SECONDS="0.5", CONSUMER_REDIS_TIMEOUT_SECONDS="2",
        )  # fmt: skip

    # --- load ---

    def _write(self, seed: int) -> None:
        """Credit accounts at random until told to stop, whatever happens to the connection."""
        chance = random.Random(seed)
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.bench.database_url, connect_timeout=2) as connection:
                    while not self._stop.is_set():
                        self._one(connection, chance)
            except psycopg.Error:
                self.tally["writers' connections lost"] += 1
                self._stop.wait(0.1)
            except BaseException as error:
                self._failures.append(error)
                return

    def _one(self, connection: psycopg.Connection[tuple[int]], chance: random.Random) -> None:
        key, kind = f"k{chance.randrange(KEYS)}", chance.choice(("credited", "credited", "limited"))
        row = connection.execute(
            "UPDATE public.entities SET version = version + 1 WHERE key = %s RETURNING version", (key,)
        ).fetchone()
        assert row is not None
        record(connection, Event(topic=TOPIC, type=kind, key=key, version=row[0], payload={"n": 1}))
        time.sleep(chance.random() * 0.01)
        if chance.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()

    # --- faults ---

    def faults(self) -> dict[str, Callable[[], None]]:
        return {
            "relays killed": self._kill_relay, "consumers killed": self._kill_consumer,
            "relays paused": lambda: self._paused(self.relays), "consumers paused": lambda: self._paused(self.consumers),
            "flushes": lambda: self._redis("FLUSHALL"), "streams deleted": lambda: self._redis("DEL", self.bench.key()),
            "markers deleted": lambda: self._redis("DEL", f"{self.bench.key()}:relay"),
            "scripts flushed": lambda: self._redis("SCRIPT", "FLUSH"),
            "strangers' trims": lambda: self._redis("XTRIM", self.bench.key(), "MAXLEN", "20"),
            "strangers' deletions": self._delete_entries, "streams of a wrong type": self._wrong_type,
            "groups destroyed": lambda: self._redis("XGROUP", "DESTROY", self.bench.key(), "ledger"),
            "Redis connections cut": self.to_redis.cut, "PostgreSQL connections cut": self.to_postgres.cut,
            "Redis replies dropped": self._dropped, "Redis deaf": self._deaf,
            "Redis killed": self._kill_redis, "Redis killed and empty": lambda: self._kill_redis(shutil.rmtree),
            "Redis restored from an older copy": self._restore, "Redis full": self._full, "evictions": self._evict,
            "Redis without enough replicas": lambda: self._for_a_while("min-replicas-to-write", "5", "0"),
            "Redis read-only": self._read_only, "failovers to a replica behind": self._fail_over,
            "PostgreSQL killed": self._kill_postgres, "backends terminated": self._terminate,
        }  # fmt: skip

    def _redis(self, *command: str) -> None:
        with suppress(redis.RedisError), redis.Redis.from_url(self.primary.url, socket_timeout=2) as client:
            client.execute_command(*command)

    def _kill_relay(self) -> None:
        self.relays = [*self.relays[1:], self._killed(self.relays[0], self._relay)]

    def _kill_consumer(self) -> None:
        self.consumers = [*self.consumers[1:], self._killed(self.consumers[0], self._consumer)]

    def _killed(
        self, process: subprocess.Popen[bytes], another: Callable[[], subprocess.Popen[bytes]]
    ) -> subprocess.Popen[bytes]:
        assert process.poll() is None, f"{process.args!r} had ended by itself with {process.returncode}"
        process.kill()
        process.wait()
        return another()

    def _paused(self, processes: list[subprocess.Popen[bytes]]) -> None:
        victim = self._random.choice(processes)
        victim.send_signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(0.2, 2.5))
        victim.send_signal(signal.SIGCONT)

    def _dropped(self) -> None:
        self.to_redis.drop_replies = True
        time.sleep(0.5)
        self.to_redis.drop_replies = False
        self.to_redis.cut()

    def _deaf(self) -> None:
        self.to_redis.deaf = True
        time.sleep(0.5)
        self.to_redis.deaf = False
        self.to_redis.cut()

    def _kill_redis(self, meanwhile: Callable[[Path], None] = lambda _: None) -> None:
        self.primary.kill()
        meanwhile(self._append_only_files)
        time.sleep(self._random.uniform(0, 1))
        self.primary.start()
        self._replicate()

    def _restore(self) -> None:
        copy = self.primary.data_dir / "copy"
        self.primary.pause()  # so that no rewriting is under way
        shutil.copytree(self._append_only_files, copy)
        self.primary.resume()
        time.sleep(self._random.uniform(0.5, 3))

        def put_back(current: Path) -> None:
            shutil.rmtree(current)
            copy.rename(current)

        self._kill_redis(put_back)

    @property
    def _append_only_files(self) -> Path:
        return self.primary.data_dir / "data" / "appendonlydir"

    def _for_a_while(self, setting: str, value: str, usual: str) -> None:
        self._redis("CONFIG", "SET", setting, value)
        time.sleep(1)
        self._redis("CONFIG", "SET", setting, usual)

    def _full(self) -> None:
        self._for_a_while("maxmemory", "1mb", "0")

    def _evict(self) -> None:
        self._redis("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        self._full()
        self._redis("CONFIG", "SET", "maxmemory-policy", "noeviction")

    def _delete_entries(self) -> None:
        with suppress(redis.RedisError), redis.Redis.from_url(self.primary.url, socket_timeout=2) as client:
            entries = client.xrange(self.bench.key(), count=200)
            if some := self._random.sample([name for name, _ in entries], len(entries) // 3):
                client.xdel(self.bench.key(), *some)

    def _wrong_type(self) -> None:
        self._redis("DEL", self.bench.key())
        self._redis("SET", self.bench.key(), "not a stream")
        time.sleep(1)
        self._redis("DEL", self.bench.key())

    def _read_only(self) -> None:
        self._redis("REPLICAOF", "127.0.0.1", str(port_of(self.replica.url)))
        time.sleep(1)
        self._redis("REPLICAOF", "NO", "ONE")
        self._replicate()

    def _replicate(self) -> None:
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("127.0.0.1", port_of(self.primary.url))

    def _fail_over(self) -> None:
        """The replica stops hearing the primary, becomes one, and the old one becomes its replica."""
        with redis.Redis.from_url(self.replica.url) as client:
            self.replica.pause()
            time.sleep(self._random.uniform(0.2, 1))
            self.primary.pause()
            self.replica.resume()
            client.replicaof("NO", "ONE")
        self.to_redis.redirect(port_of(self.replica.url))
        self.primary.resume()
        self.primary, self.replica = self.replica, self.primary
        self._replicate()

    def _kill_postgres(self) -> None:
        self.postgres.kill()
        time.sleep(self._random.uniform(0, 0.5))
        self.postgres.start()

    def _terminate(self) -> None:
        with suppress(psycopg.Error), psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

    # --- the run ---

    def run(self, seconds: float) -> Counter[str]:
        """Load and faults for so long, each of them once at least, then peace until everything has come to rest.

        Returns:
            The tally: how often each came, and how many events were recorded.

        Raises:
            AssertionError: an invariant does not hold.
        """
        writers = [threading.Thread(target=self._write, args=(seed,)) for seed in range(WRITERS)]
        for writer in writers:
            writer.start()
        end, names = time.monotonic() + seconds, list(self.faults())
        while time.monotonic() < end:
            self._random.shuffle(names)
            for name in names:
                if time.monotonic() >= end and all(self.tally[name] for name in names):
                    break
                self.faults()[name]()
                self.tally[name] += 1
                time.sleep(self._random.uniform(0.1, 1))
                print(
                    f"\r{max(0, end - time.monotonic()):4.0f} s left, {sum(self.tally[name] for name in names)} faults",
                    end="",
                    file=sys.stderr,
                )
        print(file=sys.stderr)
        self._stop.set()
        for writer in writers:
            writer.join()
        assert not self._failures, self._failures
        self.check()
        return self.tally

    def check(self) -> None:
        """Wait until nothing is left to do, and see that every invariant holds."""
        with psycopg.connect(self.postgres.url, autocommit=True) as db:
            rows = db.execute(
                "SELECT event_id::text, type, key, version FROM public.outbox WHERE topic = %s", (TOPIC,)
            ).fetchall()
            credited = Counter(event_id for event_id, kind, _, _ in rows if kind == "credited")
            everything = {event_id for event_id, _, _, _ in rows}
            newest: dict[str, int] = {}
            for _, kind, key, version in rows:
                if kind == "limited":
                    newest[key] = max(version, newest.get(key, 0))

            def one(query: str) -> int:
                row = db.execute(query).fetchone()
                assert row is not None
                return int(row[0])

            eventually(
                lambda: one("SELECT count(*) FROM public.processed_messages") >= len(everything),
                self.patience_seconds,
                f"all {len(everything)} events are in the ledger",
            )  # fmt: skip
            effects = Counter(row[0] for row in db.execute("SELECT event_id::text FROM public.effects"))
            assert effects == credited, "every event once, and nothing that was rolled back"
            assert dict(db.execute("SELECT key, version FROM public.limits").fetchall()) == newest, (
                "no version went back"
            )
            assert one("SELECT sum(version) FROM public.entities") == len(rows), "money is conserved"
            assert one("SELECT count(*) FROM public.dead_letters") == 0
            self.tally["events"] = len(rows)
        with redis.Redis.from_url(self.primary.url) as client:
            eventually(lambda: client.xpending(self.bench.key(), "ledger")["pending"] == 0, 30, "nothing is pending")
        for process in (*self.relays, *self.consumers):
            assert process.poll() is None, f"{process.args!r} had ended by itself with {process.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--server", default="valkey9", help="a name of outbox.embedded.redis_servers()")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr)
    with Soak(arguments.seed, arguments.server) as soak:
        print(json.dumps(dict(soak.run(arguments.seconds).most_common()), indent=2))
    print("every invariant holds: nothing lost, nothing twice, no order inverted, nobody restarted by hand")


if __name__ == "__main__":
    main()
