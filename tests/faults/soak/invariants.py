"""What must hold when everything has come to rest, put against what PostgreSQL holds, which is the truth."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from tests.faults.chaos import TOPIC
from tests.faults.soak.database import Database
from tests.faults.soak.servers import Servers
from tests.faults.soak.witness import Witness
from tests.faults.soak.writers import Writers
from tests.waiting import eventually

#: Of the outbox, that this query has none: events that the consumer has not processed.
UNPROCESSED = """
    SELECT count(*) FROM public.outbox o WHERE topic = %s AND NOT EXISTS (
        SELECT FROM public.processed_messages p WHERE p.consumer = 'ledger' AND p.event_id = o.event_id AND p.outcome <> 'waiting')
"""
#: What waits, to see why.
WAITING = """
    SELECT reason, attempts, tries, starts, lease IS NULL, count(*), min(next_attempt_at - now())::text
    FROM public.message_failures GROUP BY 1, 2, 3, 4, 5 ORDER BY 6 DESC LIMIT 10
"""
LEFT = """
    SELECT p.outcome, o.type, count(*), min(p.processed_at)::text, max(p.processed_at)::text, min(o.event_id::text), now()::text
    FROM public.outbox o LEFT JOIN public.processed_messages p ON p.consumer = 'ledger' AND p.event_id = o.event_id
    WHERE o.topic = %s AND p.outcome IS DISTINCT FROM 'applied' AND p.outcome IS DISTINCT FROM 'stale' GROUP BY 1, 2
"""


class Invariants:
    """Collects every violation, so that one does not hide another.

    Args:
        patience_seconds: how long nothing may happen while something is left to do.

    Attributes:
        violations: sentences.
        facts: what there was, for the tally.
    """

    def __init__(
        self, database: Database, servers: Servers, witness: Witness, writers: Writers, patience_seconds: float
    ) -> None:
        self.violations: list[str] = []
        self.facts: Counter[str] = Counter()
        self._servers, self._witness, self._writers = servers, witness, writers
        self._went_back = database.went_back
        with database.connect() as self._db:
            self._comes_to_rest(patience_seconds)
            self._load()
            self._nothing_lost()
            self._once()
            self._money()
            self._order()
            self._versions()

    def _must(self, holds: object, what: str) -> None:
        if not holds:
            self.violations.append(what)

    @contextmanager
    def _violation(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.violations.append(str(error))

    def _rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(query, parameters).fetchall()

    def _comes_to_rest(self, seconds: float) -> None:
        recorded = {row[0] for row in self._rows("SELECT event_id::text FROM public.outbox WHERE topic = %s", TOPIC)}
        with self._violation():
            left, least = self._unprocessed(), 1 << 62
            while 0 < left < least:  # slow is not stuck: it goes on for as long as it gets nearer
                least = left
                try:
                    eventually(
                        lambda before=left: self._unprocessed() < before,
                        seconds,
                        f"the last {left} of {len(recorded)} events are in the ledger",
                    )
                except AssertionError as error:
                    raise AssertionError(
                        f"{error}; waiting: {self._rows(WAITING)}, left: {self._rows(LEFT, TOPIC)}"
                    ) from None
                left = self._unprocessed()
        with self._violation():
            eventually(lambda: recorded <= self._witness.first.keys(), seconds, "all events were in a stream")
        for stream in self._servers.streams:
            with self._violation():
                errors = (redis.RedisError, LookupError, ValueError)
                eventually(lambda s=stream: self._drained(s), seconds, f"no backlog of {stream}", ignoring=errors)
        with self._violation():
            self._witness.check()

    def _unprocessed(self) -> int:
        return int(self._rows(UNPROCESSED, TOPIC)[0][0])

    def _drained(self, stream: str) -> bool:
        """Whether every group has read and acknowledged all of a stream."""
        with self._servers.client(stream) as client:
            groups = client.xinfo_groups(stream)
            return len(groups) == 2 and all(
                group["pending"] == 0 and not client.xrange(stream, b"(" + group["last-delivered-id"], count=1)
                for group in groups
            )

    def _load(self) -> None:
        rows = self._rows("SELECT event_id::text, type, key, version, data FROM public.outbox WHERE topic = %s", TOPIC)
        self._recorded = {event_id: (kind, key, version) for event_id, kind, key, version, _ in rows}
        self._amounts = {
            event_id: json.loads(data)["amount"] for event_id, kind, _, _, data in rows if kind == "credited"
        }
        self._processed = {
            row[0]
            for row in self._rows(
                "SELECT event_id::text FROM public.processed_messages WHERE consumer = 'ledger' AND outcome <> 'waiting'"
            )
        }
        self._effects = self._rows("SELECT event_id::text, key, amount FROM public.effects")
        self._ghosts = {*self._witness.first, *self._processed} - self._recorded.keys()
        self.facts["events"] = len(rows)
        self.facts["entries that were published again"] = self._witness.again
        self.facts["events gone before they were acknowledged"] = len(self._witness.gone)
        self.facts["writers' connections lost"] = self._writers.connections_lost
        self.facts["effects of events that PostgreSQL has lost"] = sum(e[0] in self._ghosts for e in self._effects)

    def _nothing_lost(self) -> None:
        """Committed is committed, rolled back was never there; but for what a stand-by that took over did not have."""
        lost = self._writers.committed.keys() - self._recorded.keys()
        self.facts["events that PostgreSQL has lost"] = len(lost)
        times = [self._writers.committed[one] for one in lost]
        inexplicable = [
            (begin, end)
            for begin, end in times
            if not any(end >= since and begin <= until for since, until in self._went_back)
        ]
        self._must(not inexplicable, f"{len(inexplicable)} committed events are not in the outbox")
        unheard = {*self._recorded, *self._ghosts} - self._writers.tried
        self._must(not unheard, f"{len(unheard)} events were seen that nobody committed")
        self._must(
            not self._ghosts or self._went_back, f"{len(self._ghosts)} events were seen that are not in the outbox"
        )
        missed = (self._witness.gone & self._recorded.keys()) - self._processed
        self._must(
            not missed, f"{len(missed)} of {len(self._witness.gone)} events gone unacknowledged were never applied"
        )
        self._must(self._rows("SELECT count(*) FROM public.dead_letters") == [(0,)], "there are dead letters")
        self._must(self._rows("SELECT count(*) FROM public.message_failures") == [(0,)], "events wait, and are due")

    def _once(self) -> None:
        found = Counter(event_id for event_id, _, _ in self._effects)
        twice = sum(times > 1 for times in found.values())
        missing = self._amounts.keys() - found.keys()
        extra = found.keys() - self._amounts.keys() - self._ghosts
        self._must(
            not (twice or missing or extra),
            f"every event once: {twice} came more often, {len(missing)} never, {len(extra)} should not",
        )

    def _money(self) -> None:
        recorded = _sums((self._recorded[event_id][1], amount) for event_id, amount in self._amounts.items())
        applied = _sums((key, amount) for event_id, key, amount in self._effects if event_id not in self._ghosts)
        lost = _sums((key, amount) for event_id, key, amount in self._effects if event_id in self._ghosts)
        producers, consumers = (
            _sums(self._rows(f"SELECT {column} FROM public.{table}"))  # noqa: S608 - our own names
            for table, column in (("accounts", "key, balance"), ("balances", "key, amount"))
        )
        for whose, sums in (
            ("recorded", recorded),
            ("applied", applied),
            ("on the consumer's accounts", _sums([*consumers.items(), *((key, -sum) for key, sum in lost.items())])),
        ):
            self._must(
                sums == producers,
                f"money: {sum(sums.values())} {whose}, {sum(producers.values())} on the producers' accounts, "
                f"and of {_differ(sums, producers)} keys not the same",
            )
        self.facts["money"] = sum(producers.values())
        self._must(
            self._rows("SELECT sum(version)::bigint FROM public.accounts") == [(len(self._recorded),)],
            "money: as many changes of accounts as events",
        )

    def _order(self) -> None:
        """The versions of a key as they first appeared in its stream, of those events that there are."""
        seen = ((one.key, one.version) for event_id, one in self._witness.first.items() if event_id in self._recorded)
        self._must(not (found := _inversions(seen)), f"order in the stream: {found} versions came behind a later one")

    def _versions(self) -> None:
        applied = self._rows("SELECT key, version FROM public.limits_set ORDER BY number")
        self._must(
            not (found := _inversions(applied)), f"order of what was applied: {found} versions came behind a later one"
        )
        newest: dict[str, int] = {}
        for event_id in (*self._recorded, *(self._ghosts & self._processed)):
            kind, key, version = self._recorded.get(event_id) or self._witness.first[event_id]
            if kind == "limited":
                newest[key] = max(version, newest.get(key, 0))
        reached = dict(self._rows("SELECT key, version FROM public.limits"))
        self._must(
            reached == newest,
            f"order of what was applied: {_differ(reached, newest)} keys are not at their newest version",
        )


def _sums(pairs: Iterable[tuple[Any, ...]]) -> dict[str, int]:
    sums: defaultdict[str, int] = defaultdict(int)
    for key, amount in pairs:
        sums[key] += int(amount)
    return {key: amount for key, amount in sums.items() if amount}


def _inversions(versions: Iterable[Sequence[Any]]) -> int:
    newest: dict[str, int] = {}
    found = 0
    for key, version in versions:
        found += version < newest.get(key, 0)
        newest[key] = max(version, newest.get(key, 0))
    return found


def _differ(one: Mapping[str, int], other: Mapping[str, int]) -> int:
    return sum(one.get(key, 0) != other.get(key, 0) for key in one.keys() | other.keys())
