"""The fire: who is killed when, and what must hold afterwards."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from outbox.transport import ListTransport
from tests.faults.fire.nursery import Nursery
from tests.faults.fire.work import OTHER, QUEUE, TABLES, Book, sender
from tests.waiting import eventually

PREFIX = "fire:"
#: How long nothing may happen while something is left to do.
PATIENCE_SECONDS = 60.0
#: Pause between two kills, at least and at most.
_PAUSE_SECONDS = (0.05, 0.4)
_FLUSH_SECONDS = 2.0
_COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "worker": (4, ("consumer", "run", "tests.faults.fire.work:clerk")),
    "scheduler": (4, ("consumer", "run", "tests.faults.fire.work:runner")),
    "relay": (2, ("outbox", "relay")),
}
#: The keys that the head of queue.lua names, and the set of queues; without the prefix.
_DOCUMENTED = re.compile(
    r"queues|\{queue/(mail|errands)\}:(relay|ready:(high|normal|low)|processing|claims|delayed|batches|completed|failed"
    r"|job:[0-9a-f-]{36})"
)


class Fire:
    """Servers that others have started, our processes, and what was done to them. As a context manager.

    Args:
        clients: of each of Redis' nodes that has keys.
        folder: for what producers note.
        flush: Redis is emptied again and again, too. All producers record then: what was enqueued would be gone.
        log: where processes write to.

    Attributes:
        tally: what was done, and what there was.
        db: looks for what must hold, on the same server.
    """

    def __init__(
        self, database_url: str, redis_url: str, clients: Sequence[Any], folder: Path, *, flush: bool = False, seed: int = 1,
        log: Path | None = None,
    ) -> None:  # fmt: skip
        self.tally: Counter[str] = Counter()
        self._database_url, self._clients, self._flush, self._random = database_url, clients, flush, random.Random(seed)
        self._violations: list[str] = []
        self._patience_seconds = PATIENCE_SECONDS
        kinds = ("record",) * 4 if flush else ("record", "record", "enqueue", "enqueue")
        self._books = {folder / f"book{number}": kind for number, kind in enumerate(kinds)}
        self._producers = {path.name: ("produce", kind, str(path)) for path, kind in self._books.items()}
        self._others = {
            f"{role}{number}": command for role, (count, command) in _COMMANDS.items() for number in range(count)
        }
        with ExitStack() as stack:
            self.db = stack.enter_context(psycopg.connect(database_url, autocommit=True))
            self.db.execute(TABLES)
            self._lists = ListTransport.from_url(redis_url, prefix=PREFIX)
            stack.callback(self._lists.close)
            self._nursery = stack.enter_context(
                Nursery(
                    {
                        "DATABASE_URL": database_url, "REDIS_URL": redis_url, "OUTBOX_KEY_PREFIX": PREFIX,
                        "OUTBOX_CHECK_SECONDS": "0.2", "OUTBOX_BACKOFF_MAX_SECONDS": "0.2", "OUTBOX_BATCH_ROWS": "50",
                        "CONSUMER_CLAIM_SECONDS": "1", "CONSUMER_CHECK_SECONDS": "0.2", "CONSUMER_BLOCK_SECONDS": "0.5",
                        "CONSUMER_BACKOFF_MAX_SECONDS": "0.5", "CONSUMER_MAX_DELIVERIES": "1000",
                    },
                    log,
                )
            )  # fmt: skip
            self._stack = stack.pop_all()

    def __enter__(self) -> Fire:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, seconds: float) -> Counter[str]:
        """Kill for so long, then leave everybody in peace until nothing is left to do, and look.

        Raises:
            AssertionError: something does not hold; names all that does not.
        """
        for name, command in self._others.items():
            self._nursery.start(name, *command)
        eventually(lambda: {q.queue: q.group for q in self._lists.queues()} == {QUEUE: "clerk", OTHER: "runner"}, 60)
        everybody = self._producers | self._others
        for name, command in self._producers.items():
            self._nursery.start(name, *command)
        end, flush_at = time.monotonic() + seconds, time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < end:
            time.sleep(self._random.uniform(*_PAUSE_SECONDS))  # the pace of the kills, not a wait for anything
            name = self._random.choice(list(everybody))
            self._end(name)
            self._nursery.start(name, *everybody[name])
            self.tally[f"{'producer' if name in self._producers else name[:-1]}s killed"] += 1
            if self._random.random() < 0.1:
                self._look_at_keys()
                self._look_at_queue()
            if self._flush and time.monotonic() >= flush_at:
                flush_at += _FLUSH_SECONDS
                for client in self._clients:
                    client.flushall()
                self.tally["times emptied"] += 1
        for name in self._producers:
            self._end(name)
        self._check()
        for name in self._others:
            self._end(name)
        violations = self._told()
        assert not violations, "\n".join(violations)
        return self.tally

    def look_again(self) -> list[str]:
        """What does not hold any more after `run`; nobody is left who would mend it."""
        self._patience_seconds = 0.2
        self._check()
        return self._told()

    def _told(self) -> list[str]:
        told, self._violations = self._violations, []
        return told

    def _end(self, name: str) -> None:
        if (code := self._nursery.kill(name)) is not None:
            self._violations.append(f"{name} had ended by itself with {code}")

    def _check(self) -> None:
        accepted: set[uuid.UUID] = set()
        for path, kind in self._books.items():
            send = sender(kind, self._database_url, lambda: self._lists)  # type: ignore[arg-type]
            found = set(Book(path).settle(send))
            self.tally["recorded" if kind == "record" else "enqueued"] += len(found)
            accepted |= found
        self.tally["accepted"] = len(accepted)
        with self._violation():
            self._comes_to_rest(len(accepted))
        with self._violation():
            eventually(self._is_empty, self._patience_seconds, "nothing is left in the queue")
        with self._violation():
            done = {row[0] for row in self._rows("SELECT event_id FROM processed_messages WHERE outcome = 'applied'")}
            assert done == accepted, (
                f"accepted, not done: {_some(accepted - done)}; done, never accepted: {_some(done - accepted)}"
            )
        with self._violation():
            effects = Counter(row[0] for row in self._rows("SELECT id FROM letters"))
            wrong = {job_id: effects[job_id] for job_id in accepted | effects.keys() if effects[job_id] != 1}
            assert not wrong, f"not every effect once: {_some(wrong.items())}"
        with self._violation():
            early = self._rows("SELECT id, due, claimed, begun FROM letters WHERE least(claimed, begun) < due")
            assert not early, f"before their time: {_some(early)}"
        with self._violation():
            left = self._rows(
                "SELECT 'dead', reason, error FROM dead_letters UNION ALL SELECT 'waits', reason, error FROM message_failures"
            )
            assert not left, f"not done: {_some(left)}"
        self._look_at_keys()
        with self._violation():
            self._only_history_is_left()
        ((delayed, looked, again),) = self._rows(
            "SELECT count(due), count(claimed), count(*) FILTER (WHERE delivery_count > 1) FROM letters"
        )
        self.tally.update({"with a delay": delayed, "looked up when they ran": looked, "done at a later start": again})
        late = self._rows(
            "SELECT delivery_count > 1, round(1000 * extract(epoch FROM max(begun - due)))::int FROM letters WHERE due IS NOT NULL GROUP BY 1"
        )
        for later, most_ms in late:
            self.tally[f"milliseconds late at most, done at {'a later' if later else 'the first'} start"] = most_ms

    @contextmanager
    def _violation(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self._violations.append(str(error))

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.db.execute(query).fetchall()  # type: ignore[arg-type]  # of literals

    def _done(self) -> int:
        return int(self._rows("SELECT count(*) FROM processed_messages WHERE outcome = 'applied'")[0][0])

    def _comes_to_rest(self, number: int) -> None:
        done, last = self._done(), -1
        while last < done < number:  # slow is not stuck: it goes on for as long as more are done
            last = done
            message = f"the last {number - last} of {number} jobs are done"
            eventually(lambda before=last: self._done() > before, self._patience_seconds, message)
            done = self._done()

    def _is_empty(self) -> bool:
        for queue in self._lists.queues():
            counts = dict(queue.counts)
            if counts.get("ready") or counts.get("delayed") or counts.get("running") or queue.orphaned:
                return False
            state = self._lists.inspect(f"queue/{queue.queue}")
            if state.missing or state.length:
                return False
        return True

    def _look_at_keys(self) -> None:
        """Names and TTLs of all keys there are."""
        for client in self._clients:
            keys = [key.decode() for key in client.scan_iter(count=1000)]
            strange = [key for key in keys if not _DOCUMENTED.fullmatch(key.removeprefix(PREFIX))]
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.ttl(key)
            ends = [key for key, ttl in zip(keys, pipeline.execute(), strict=True) if ttl >= 0]
            if strange or ends:
                self._violations.append(f"keys that nobody knows: {_some(strange)}; keys with a TTL: {_some(ends)}")
            self.tally["keys looked at"] += len(keys)

    def _look_at_queue(self) -> None:
        for queue in self._lists.queues():
            for name, number in {
                "ready at once, at most": queue.counts["ready"],
                "orphaned at once, at most": queue.orphaned,
                "milliseconds ready, at most": round(1000 * (queue.oldest_ready_seconds or 0)),
            }.items():
                self.tally[name] = max(self.tally[name], number)

    def _only_history_is_left(self) -> None:
        base = f"{PREFIX}{{queue/{QUEUE}}}"
        kept = {
            job.id for status in ("completed", "waiting", "failed") for job in self._lists.jobs(QUEUE, status, 10_000)
        }
        expected = {f"{base}:job:{job_id}" for job_id in kept}
        expected |= {
            f"{PREFIX}queues",
            f"{base}:relay",
            f"{PREFIX}{{queue/{OTHER}}}:relay",
            f"{base}:completed",
            f"{base}:failed",
        }
        there = {key.decode() for client in self._clients for key in client.scan_iter(count=1000)}
        there.add(f"{base}:failed")  # where none has failed it is not there
        assert there == expected, f"left over: {_some(there - expected)}; not there: {_some(expected - there)}"


def _some(things: Any) -> str:
    listed = [str(each) for each in things]
    return f"{len(listed)} {listed[:5]}"
