"""The soak's producers: they change accounts and record what they did, whatever happens to their connections."""

from __future__ import annotations

import random
import threading
import time

import psycopg

from outbox import Event, record
from tests.faults.chaos import TOPIC

KEYS = 20


class Writers:
    """Threads that write until they are told to stop.

    Attributes:
        tried: ids of events whose COMMIT was sent, and so may be committed.
        committed: ids of those whose COMMIT was answered, and from when to when that was (`time.monotonic`).
        connections_lost: how often.
    """

    def __init__(self, database_url: str, threads: int) -> None:
        self.tried: set[str] = set()
        self.committed: dict[str, tuple[float, float]] = {}
        self.connections_lost = 0
        self._url, self._stop = database_url, threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them; raises what one of them failed with, other than by PostgreSQL's doing."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            try:
                # Never prepares statements, for a pooler's sake.
                with psycopg.connect(self._url, connect_timeout=2, prepare_threshold=None) as connection:
                    while not self._stop.is_set():
                        self._one(connection, chance)
            except psycopg.Error:
                self.connections_lost += 1
                self._stop.wait(0.1)
            except BaseException as error:
                self._failures.append(error)
                return

    def _one(self, connection: psycopg.Connection[tuple[int]], chance: random.Random) -> None:
        key, kind = f"k{chance.randrange(KEYS)}", chance.choice(("credited", "credited", "limited"))
        amount = chance.randrange(1, 1000) if kind == "credited" else 0
        row = connection.execute(
            "UPDATE public.accounts SET version = version + 1, balance = balance + %s WHERE key = %s RETURNING version",
            (amount, key),
        ).fetchone()
        assert row is not None
        event = Event(topic=TOPIC, type=kind, key=key, version=row[0], payload={"amount": amount})
        record(connection, event)
        time.sleep(chance.random() * 0.03)  # its pace, so that consumers are not always behind
        if chance.random() < 0.1:
            connection.rollback()
            return
        self.tried.add(str(event.id))
        begin = time.monotonic()
        connection.commit()
        self.committed[str(event.id)] = begin, time.monotonic()
