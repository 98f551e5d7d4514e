"""Reliable queues in Redis and Valkey: lists of jobs, each of which one worker of a pool does.

Invariants:
* Every transition of a job is one script, by the server's clock; queue.lua lists the keys. What drains a queue works where memory
  is full; what adds to it is refused whole.
* A claim has a token, which is part of the receipt (``id:token``). Who does not know it any more, since others took the job over,
  changes nothing.
* A queue has one group: two ledgers would do a job twice.
* Nothing waits in the server: who has nothing to do subscribes to the queue's channel ``:wake``, and looks once a second besides, so
  that a lost message delays a job by a second at most.
* What a queue lost (a key, a job's data) shows as missing, and the relay publishes again what is outstanding by PostgreSQL.
* See `outbox.transport.relayed`, too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final

import redis

from outbox.envelope import Event, wire
from outbox.errors import StreamUnusable, TransportError, TransportUnavailable
from outbox.transport.base import (
    QUEUE_PREFIX,
    Claim,
    Delivery,
    GroupState,
    JobState,
    Marker,
    QueueState,
    Settled,
    StreamState,
    Wait,
    is_queue,
    queue_of,
)
from outbox.transport.cluster import Cluster
from outbox.transport.relayed import RelayedTransport, Script, packed, settle
from outbox.transport.servers import Listener, Server, answer

_log = logging.getLogger(__name__)

#: So many ids of completed jobs, and of others that have left, each queue remembers.
KEPT: Final = 1000
_CLAIM = Script.of("queue", "queue_claim", flags="allow-oom")
_HOLD = Script.of("queue", "queue_hold", flags="allow-oom")
_SETTLE = Script.of("queue", "queue_settle", flags="allow-oom")
_INSPECT = Script.of("queue", "queue_inspect")
_GROUP = Script.of("queue", "queue_group", flags="allow-oom")  # without a consumer nothing would be drained
#: Jobs that become ready again in one round of `ListTransport.reclaim`, of each queue.
_RECLAIMED = 128
#: Longest wait for a message: it may be lost.
_LONGEST_WAIT_SECONDS = 1.0
#: After how long whoever adds jobs says again that there is such a queue.
_REMEMBERED_SECONDS = 10.0
_COMPLETED = Settled("completed")


class ListTransport(RelayedTransport):
    """Queues on Redis 7.0 or newer, or Valkey; on one server, or on a cluster.

    Args:
        claim_seconds: how long a process has a job if it does not renew its claim.
        kept: how many ids of completed jobs, and of others that have left, each queue remembers.
    """

    _PUBLISH = Script.of("queue", "queue_publish")

    def __init__(
        self,
        client: redis.Redis | Server | Cluster,
        prefix: str = "",
        wait: Wait | None = None,
        *,
        claim_seconds: float = 60.0,
        kept: int = KEPT,
    ) -> None:
        super().__init__(client, prefix, wait)
        self._claim_seconds, self._claim_ms, self._kept = claim_seconds, round(claim_seconds * 1000), kept
        self._reclaim_due = 0.0
        self._remembered: dict[str, float] = {}
        self._listeners: list[Listener] = []
        self._process_id = os.getpid()
        self._deaf = False
        #: By group and stream: errors beside which jobs of others were found.
        self._untold: dict[tuple[str, str], TransportError] = {}

    def close(self) -> None:
        while self._listeners:
            self._listeners.pop().close()
        super().close()

    # --- the relay's side ---

    def leave(self, streams: Sequence[str], keep_seconds: int, oldest: int | None, stays_seconds: int = 0) -> None:
        self._remember(streams)
        super().leave(streams, keep_seconds, oldest, stays_seconds)

    def inspect(self, stream: str, *, groups: Sequence[str] = (), keep_seconds: float | None = None) -> StreamState:
        """Nothing stays in a queue that is acknowledged, so that nothing is trimmed. Jobs start out of turn, so that
        `GroupState.delivered` is the newest batch, and `undelivered` counts all jobs that have not begun."""
        outstanding, missing, text, group, running, oldest, lowest, undelivered, idle_ms, *more = self._one(
            stream, _INSPECT, "state"
        )
        marker = Marker.parse(text.decode())
        newest = marker.seq if marker else 0
        acked = min(newest, int(float(lowest)) - 1) if lowest else newest
        return StreamState(
            outstanding, missing, 0,
            [GroupState(
                group.decode(errors="backslashreplace"), running, oldest.decode() or None, acked if not missing else None, newest,
                undelivered, float(idle_ms) / 1000 if idle_ms != b"-1" else None, marker.label if marker else "", more[4],
            )] if group else [],
            marker,
        )  # fmt: skip

    def ids_after(self, stream: str, batch: int, limit: int) -> list[uuid.UUID]:
        """Of those only that are outstanding."""
        ids = []
        for each in self._one(stream, _INSPECT, "after", batch, limit):
            with suppress(ValueError):  # not of ours
                ids.append(uuid.UUID(each.decode(errors="replace")))
        return ids

    def forget_consumers(self, group: str, stream: str, idle_seconds: float, names: Sequence[str] = ()) -> list[str]:
        return []  # a name is nowhere but in its claims

    def drop_group(self, group: str, stream: str) -> bool:
        """What workers of the group have at the moment, others take over when their claims have ended."""
        try:
            return bool(self._one(stream, _GROUP, "drop", group) == 1)
        except StreamUnusable:  # there is no such queue
            return False

    # --- the consumer's side ---

    def open(self, group: str, streams: Sequence[str]) -> dict[str, TransportError]:
        self._remember(streams)
        unusable: dict[str, TransportError] = {}
        replies = self._script(_GROUP, [(stream, ("open", group)) for stream in streams])
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, TransportUnavailable):
                raise reply
            if isinstance(reply, TransportError):
                unusable[stream] = reply
        return unusable

    def read(
        self, group: str, consumer: str, streams: Sequence[str], count: int, block_seconds: float
    ) -> list[Delivery]:
        end = time.monotonic() + block_seconds
        found, pause = self._read(group, consumer, streams, count)
        if found or block_seconds <= 0:
            return found
        listener = self._listener()
        try:
            while not found and (left := end - time.monotonic()) > 0:
                if not self._listens_anew(listener, streams):  # else something may have come before
                    self._hear(listener, min(left, pause, _LONGEST_WAIT_SECONDS))
                found, pause = self._read(group, consumer, streams, count)
        finally:
            if found:
                listener.hear_nothing()  # what is said while we are busy would pile up
            self._listeners.append(listener)
        return found

    def _read(self, group: str, consumer: str, streams: Sequence[str], count: int) -> tuple[list[Delivery], float]:
        """Up to `count` jobs of each queue, and seconds until one is due. Where only some cannot be used, those of the others come
        first, and the error with the next call: or nobody would open them anew while the others have jobs."""
        for error in [self._untold.pop((group, stream), None) for stream in streams]:
            if error is not None:
                raise error
        token = secrets.token_hex(8)
        arguments = ("ready", self._claim_ms, count, self._kept, group, consumer, token)
        replies = self._script(_CLAIM, [(stream, arguments) for stream in streams])
        found: list[Delivery] = []
        failed: dict[str, TransportError] = {}
        pause = float("inf")
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, TransportError):
                failed[stream] = reply
                continue
            jobs, lost, due_ms = reply
            self._tell_lost(stream, lost)
            found += _deliveries(stream, jobs)
            if due_ms >= 0:
                pause = min(pause, due_ms / 1000)
        if failed and not found:
            raise next(iter(failed.values()))
        for stream, error in failed.items():
            if not isinstance(error, TransportUnavailable):
                self._untold[group, stream] = error
        return found, pause

    def ack(self, group: str, deliveries: Sequence[Delivery], settled: Sequence[Settled] | None = None) -> None:
        """What others have claimed meanwhile stays theirs."""
        pairs = zip(deliveries, settled or [_COMPLETED] * len(deliveries), strict=True)
        calls: dict[str, list[Any]] = {}
        for delivery, what in pairs:
            arguments = calls.setdefault(delivery.stream, ["ack", self._kept])
            arguments += [*_split(delivery.receipt), *_outcome(what)]
        replies = self._script(_SETTLE, [(stream, tuple(arguments)) for stream, arguments in calls.items()])
        settle(replies)
        for stream, reply in zip(calls, replies, strict=True):
            if not isinstance(reply, TransportError) and reply:
                _log.warning(
                    "lost claim: %d jobs of %s were done here, but not acknowledged: others have claimed them meanwhile, since "
                    "this process did not renew its claims in time; the first is %s",
                    len(reply), stream, reply[0].decode(errors="replace"),
                    extra={"action": "claim_lost", "stream": stream, "lost": len(reply)},
                )  # fmt: skip

    def settle(self, stream: str, ended: Mapping[uuid.UUID, Settled]) -> None:
        arguments = [part for event_id, what in ended.items() for part in (event_id, "", *_outcome(what))]
        if arguments:
            self._one(stream, _SETTLE, "settle", self._kept, *arguments)

    def claim(
        self, group: str, consumer: str, stream: str, idle_seconds: float, count: int, cursor: str | None = None
    ) -> Claim:
        jobs, lost, began = self._one(
            stream, _CLAIM, "overdue", self._claim_ms, count, self._kept, group, consumer, secrets.token_hex(8),
            round(idle_seconds * 1000), cursor or "",
        )  # fmt: skip
        return Claim(
            _deliveries(stream, jobs), [each.decode(errors="replace") for each in lost], began.decode() or None
        )

    def reclaim(self) -> int:
        """Let jobs of every queue of this installation be ready again that nobody has renewed for one and a half claims, nor
        taken over, 128 of each at most; also those of other consumers, whose workers are gone. Returns how many.

        Raises:
            TransportError: no queue can be used.
        """
        arguments = ("reclaim", self._claim_ms, _RECLAIMED, self._kept, "", "", "")
        again = 0
        for stream, (_, lost, ready) in self._of_each(self._known(), _CLAIM, arguments, logging.DEBUG):
            self._tell_lost(stream, lost)
            again += ready
            if ready:
                _log.info(
                    "%d jobs of %s are ready again: nobody has renewed their claims", ready, stream,
                    extra={"action": "reclaimed", "stream": stream, "jobs": ready},
                )  # fmt: skip
        return again

    def reclaim_when_due(self) -> None:
        """`reclaim`, four times in a claim, so that what nobody renews is ready within two.

        Raises:
            TransportError: it could not be done; there is a next time.
        """
        if time.monotonic() >= self._reclaim_due:
            pause = self._claim_seconds / 4
            try:
                if self.reclaim() >= _RECLAIMED:
                    pause = 0
            except StreamUnusable:  # not allowed to: servers write down who tries, so not again and again
                pass
            except TransportError:
                pause = _LONGEST_WAIT_SECONDS
                raise
            finally:
                self._reclaim_due = time.monotonic() + pause

    def hand_back(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> None:
        self._hold("back", consumer, consumer, [(d, d.count - 1) for d in deliveries])

    def recount(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._hold("keep", consumer, consumer, [(d, d.count) for d in deliveries], absent=False)

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._hold("keep", consumer, consumer, [(d, "") for d in deliveries])

    def left(self, group: str, consumer: str, stream: str, count: int) -> list[Delivery]:
        jobs, _, _ = self._one(stream, _CLAIM, "left", self._claim_ms, count, self._kept, group, consumer, "")
        return _deliveries(stream, jobs)

    def inherit(self, group: str, consumer: str, late: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return self._hold("keep", consumer, late, [(d, d.count) for d in deliveries], absent=False)

    def _hold(
        self, what: str, consumer: str, late: str, counts: Sequence[tuple[Delivery, int | str]], absent: bool = True
    ) -> list[Delivery]:
        """Those of these that were `late`'s, so that it was done to them; with `absent`, and of queues that cannot be asked now."""
        calls: dict[str, list[Any]] = {}
        for delivery, count in counts:
            arguments = calls.setdefault(delivery.stream, [what, self._claim_ms, consumer, late])
            arguments += [*_split(delivery.receipt), count]
        replies = self._script(_HOLD, [(stream, tuple(arguments)) for stream, arguments in calls.items()])
        settle(replies)
        ours: dict[str, set[str] | None] = {
            stream: None if isinstance(reply, TransportError) else set(map(_text, reply))
            for stream, reply in zip(calls, replies, strict=True)
        }
        return [d for d, _ in counts if (absent if (those := ours[d.stream]) is None else d.receipt in those)]

    # --- for those who add jobs, and ask what became of them ---

    def enqueue(self, jobs: Sequence[Event]) -> list[bool]:
        """Add jobs that need no transaction of a database; the server may lose them, and nobody knows.

        Args:
            jobs: events whose topics are queues; what is to be on the wire is among their headers.

        Returns:
            For each whether it was added: a queue that knows its id leaves it alone.

        Raises:
            TransportError: a queue did not take its jobs, while others may have taken theirs; trying again adds none twice.
        """
        order = sorted(range(len(jobs)), key=lambda number: jobs[number].topic)
        streams = [(stream, list(numbers)) for stream, numbers in groupby(order, key=lambda number: jobs[number].topic)]
        self._remember([stream for stream, _ in streams if time.monotonic() >= self._remembered.get(stream, 0.0)])
        replies = self._script(self._PUBLISH, [
            (stream, ("", "", 1, packed(wire([_row(jobs[number]) for number in numbers])), 0, "enqueue"))
            for stream, numbers in streams
        ])  # fmt: skip
        added = [False] * len(jobs)
        for (_, numbers), reply in zip(streams, replies, strict=True):
            if isinstance(reply, TransportError):
                raise reply
            for number, one in zip(numbers, reply, strict=True):
                added[number] = one == 1
        return added

    def job(self, queue: str, job_id: uuid.UUID) -> JobState | None:
        """A job; None: the queue does not know it (any more).

        Raises:
            TransportError: the queue cannot be looked at.
        """
        found = self._one(QUEUE_PREFIX + queue, _INSPECT, "job", job_id)
        return _job_state(queue, *found) if found else None

    def jobs(self, queue: str, status: str, limit: int = 100, after: int = 0) -> list[JobState]:
        """Jobs with that status: the next ones first of those that have not begun, the last ones first of those that have left.

        Args:
            after: how many to skip.

        Raises:
            TransportError: the queue cannot be looked at.
        """
        states = []
        for each in self._one(QUEUE_PREFIX + queue, _INSPECT, "jobs", status, limit, after):
            with suppress(ValueError):  # not of ours
                states.append(_job_state(queue, *each))
        return states

    def cancel(self, queue: str, job_id: uuid.UUID) -> str | None:
        """Take a job out of its queue that has not begun, or waits for its next try. Returns its status until now; None: the
        queue does not know it. One that runs, or has ended, stays as it is.

        Raises:
            TransportError: the queue cannot be used.
        """
        was = self._one(QUEUE_PREFIX + queue, _SETTLE, "cancel", self._kept, job_id, "", "", "", "")
        return was.decode() or None

    def queues(self, also: Iterable[str] = ()) -> list[QueueState]:
        """Every queue of this installation that can be looked at, by name; the log names the others.

        Args:
            also: names of queues that it may not have heard of yet.

        Raises:
            TransportError: none can.
        """
        streams = sorted({*self._known(), *(QUEUE_PREFIX + name for name in also)})
        return [
            _queue_state(queue_of(stream), state)
            for stream, state in self._of_each(streams, _INSPECT, ("state", "ended"), logging.WARNING)
        ]

    # --- plumbing ---

    def _one(self, stream: str, script: Script, *arguments: Any) -> Any:
        """A script for one queue.

        Raises:
            TransportError: the reply is an error.
        """
        (reply,) = self._script(script, [(stream, arguments)])
        if isinstance(reply, TransportError):
            raise reply
        return reply

    def _of_each(
        self, streams: Sequence[str], script: Script, arguments: tuple[Any, ...], level: int
    ) -> list[tuple[str, Any]]:
        """The replies to a script for each queue; those that cannot be used are named in the log and left out.

        Raises:
            TransportError: none can be used.
        """
        found, failed = [], []
        replies = self._script(script, [(stream, arguments) for stream in streams])
        for stream, reply in zip(streams, replies, strict=True):
            if isinstance(reply, TransportError):
                _log.log(
                    level, "queue %s is left out: %s", queue_of(stream), reply,
                    extra={"action": "queue_failed", "stream": stream},
                )  # fmt: skip
                failed.append(reply)
            else:
                found.append((stream, reply))
        if failed and not found:
            raise failed[0]
        return found

    @property
    def _queues_key(self) -> str:
        return f"{self._prefix}queues"

    def _remember(self, streams: Sequence[str]) -> None:
        """Have the installation know these queues; where it cannot be written down now, that is done again before long."""
        if streams:
            self._servers.run([(self._queues_key, (b"SADD", self._queues_key, *streams))])
            self._remembered |= dict.fromkeys(streams, time.monotonic() + _REMEMBERED_SECONDS)

    def _known(self) -> list[str]:
        names = answer(self._servers, self._queues_key, (b"SMEMBERS", self._queues_key))
        return sorted(filter(is_queue, map(_text, names)))  # others may use such a key, too

    def _tell_lost(self, stream: str, lost: Sequence[bytes]) -> None:
        if lost:
            _log.error(
                "%d jobs of %s have lost their data (DEL, eviction); the relay publishes again what it has; the first is %s",
                len(lost), stream, lost[0].decode(errors="replace"),
                extra={"action": "jobs_lost", "stream": stream, "lost": len(lost)},
            )  # fmt: skip

    def _listener(self) -> Listener:
        if self._process_id != os.getpid():  # in a child of a fork: they are the parent's
            self._listeners, self._process_id = [], os.getpid()
        try:
            return self._listeners.pop()
        except IndexError:
            return Listener(self._servers)

    def _listens_anew(self, listener: Listener, streams: Sequence[str]) -> bool:
        try:
            return listener.hear([f"{self._key(stream)}:wake" for stream in streams])
        except TransportError as error:
            if not self._deaf:
                self._deaf = True
                _log.warning("cannot hear of new jobs, looks for them instead: %s", error, extra={"action": "deaf"})
            return False

    @staticmethod
    def _hear(listener: Listener, seconds: float) -> None:
        started = time.monotonic()
        try:
            listener.wait(seconds)
        except TransportError:  # the next look says more
            time.sleep(max(0.0, seconds - (time.monotonic() - started)))


def _split(receipt: str) -> tuple[str, str]:
    """Id and token."""
    job_id, _, token = receipt.rpartition(":")
    return job_id, token


def _outcome(settled: Settled) -> tuple[str, bytes, str]:
    return settled.status, settled.result or b"", settled.error or ""


def _deliveries(stream: str, jobs: Iterable[Any]) -> list[Delivery]:
    return [
        Delivery(stream, f"{_text(job_id)}:{_text(token)}", _wire_fields(fields), count)
        for job_id, token, count, fields in jobs
    ]


def _wire_fields(fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Those that are not the queue's own."""
    return {
        name: value for name, value in zip(fields[::2], fields[1::2], strict=True) if not name.startswith(b":")
    }  # fmt: skip


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def _instant(value: bytes | None) -> datetime | None:
    """Milliseconds of Unix time; None for nothing, or nonsense."""
    try:
        return datetime.fromtimestamp(float(value or 0) / 1000, UTC) if value and float(value) > 0 else None
    except (ValueError, OverflowError, OSError):
        return None


def _job_state(queue: str, job_id: bytes, deadline: bytes, fields: Sequence[bytes]) -> JobState:
    own = {name: value for name, value in zip(fields[::2], fields[1::2], strict=True) if name.startswith(b":")}
    wired = _wire_fields(fields)
    priority = wired.get(b"priority", b"normal").decode(errors="replace")
    error = own.get(b":error")
    return JobState(
        queue, uuid.UUID(_text(job_id)), _text(own[b":status"]), _instant(own.get(b":since")), _instant(own.get(b":added")),
        _instant(own.get(b":due")), priority if priority in ("high", "low") else "normal", int(own.get(b":count", 0)),
        _text(own[b":by"]) if b":by" in own else None, _instant(deadline), own.get(b":result"),
        None if error is None else _text(error), wired,
    )  # fmt: skip


def _queue_state(queue: str, state: Sequence[Any]) -> QueueState:
    group, running = state[3:5]
    high, normal, low, delayed, orphaned, oldest, due, ended, now = state[9:]
    counts = {"ready": high + normal + low, "delayed": delayed, "running": running}
    counts |= {_text(status): number for status, number in zip(ended[::2], ended[1::2], strict=True)}
    waits = max(0.0, (float(now) - float(oldest)) / 1000) if oldest else None
    ready = {"high": high, "normal": normal, "low": low}
    return QueueState(queue, counts, orphaned, waits, _instant(due), _text(group) or None, ready)


def _row(job: Event) -> tuple[Any, ...]:
    """As the relay reads it from the outbox (`outbox.envelope.ROW`)."""
    headers = dict(getattr(job, "all_headers", job.headers))
    return (
        job.data, str(job.id), job.type, job.key, None if job.version is None else str(job.version), job.content_type,
        None if job.time is None else job.time.isoformat(), job.source, json.dumps(headers) if headers else None,
    )  # fmt: skip
