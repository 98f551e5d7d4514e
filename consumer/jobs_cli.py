"""The commands ``consumer jobs …``: what operators need of single jobs.

Redis knows what has not begun, what runs, and the last ones that have ended; PostgreSQL knows what waits for another try and what
is dead, and is right where the two differ. Names and ids are exact: one that is unknown changes nothing.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Any

import typer

from consumer.dead_cli import (
    DryRun,
    Json,
    Schema,
    field_lines,
    fields_shown,
    instant_shown,
    pairs_of,
    plain,
    print_list,
    record,
    run_steps,
)
from consumer.dead_letters import choose
from consumer.dead_letters import requeue as requeued
from consumer.jobs import ENDED, Cancelled
from consumer.jobs import cancel as cancelled
from consumer.ledger import Aside, Connection, Operations, Selection, queues_read
from consumer.settings import ConsumerSettings
from outbox import schema as schemas
from outbox.cli import warn_of_unknown_variables
from outbox.errors import SettingsError, TransportError
from outbox.retry import Stop
from outbox.settings import RelaySettings
from outbox.transport import ListTransport
from outbox.transport.base import QUEUE_PREFIX, JobState, queue_of

app = typer.Typer(
    name="jobs",
    help="Jobs in queues: look at them, call them off, have dead ones tried again.\n\n"
    "`outbox queues` says which queues there are, and whose they are: list and show take the queue's name, cancel and "
    "requeue the consumer's, in whose ledger they write.",
    no_args_is_help=True,
    add_completion=False,
)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name, as `outbox queues` has it.")]
Name = Annotated[str, typer.Argument(metavar="CONSUMER", help="The consumer's name (not MODULE:NAME).")]
Ids = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of jobs, whole.")]

#: What is to be done still, in the order in which it is listed, and what is dead; then what has ended.
_OPEN, _ENDED = ("running", "ready", "delayed", "waiting", "failed"), ("completed", "cancelled")
_SHOWN, _PAGE = 100, 100


@app.command("list")
def list_jobs(
    queue: Queue,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only {', '.join(_OPEN)}, {' or '.join(_ENDED)} ones (may be repeated); default: the first five of these."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The first so many of each status; default: 100, with --json all.")
    ] = None,
    as_json: Json = False,
    schema: Schema = None,
) -> None:
    """Say which jobs a queue has: those that begin next first, those that have ended last first. Shows no payloads. Changes nothing.

    Waiting ones (for another try) and failed ones (dead letters) are those in the consumer's tables; of completed and cancelled ones
    Redis remembers the last thousand.

    Example: what is being done now, and by which process: consumer jobs list mail --status running
    """
    for each in status or ():
        if each not in _OPEN + _ENDED:
            raise SettingsError(f"--status: must be one of {', '.join(_OPEN + _ENDED)}, is {each!r}")
    chosen = list(dict.fromkeys(status or _OPEN))
    with _opened(schema) as desk:
        desk.check_queue(queue)
        if as_json:
            print_list(_summary(one) for each in chosen for one in islice(desk.jobs(queue, each), limit))
            return
        number = 0
        for each in chosen:
            for number_of_it, one in enumerate(desk.jobs(queue, each), 1):
                if number_of_it > (limit or _SHOWN):
                    typer.echo(f"these are the first {limit or _SHOWN:,} {each} ones: see --limit", err=True)
                    break
                typer.echo(_line(one))
                number += 1
        if not number:
            typer.echo(
                f"queue {queue} has no {', '.join(chosen[:-1])}{' or ' * (len(chosen) > 1)}{chosen[-1]} jobs", err=True
            )


@app.command()
def show(
    queue: Queue,
    id: Ids,
    payload: Annotated[
        bool, typer.Option("--payload", help="Print what is in the fields, and the result, too.")
    ] = False,
    as_json: Json = False,
    schema: Schema = None,
) -> None:
    """Tell all about jobs: what Redis knows, and what PostgreSQL knows (the ledger, the next try, the dead letter and its reason).

    What is in the fields, and the result, is shown only with --payload; of a job that was completed or cancelled the
    result, and not the payload, which Redis does not keep then. Changes nothing. Works without Redis, too.

    Example: consumer jobs show mail 0197c9a4-5b1e-7d1c-9f0a-3c1f2f0e8a11 --payload
    """
    with _opened(schema) as desk:
        desk.check_queue(queue)
        consumers = sorted(desk.owners[queue])
        found = desk.all_known(id, consumers, [queue])
        if as_json:
            print_list(_record(desk, queue, one, payload) for one in found)
            return
        for number, one in enumerate(found):
            typer.echo("\n" * (number > 0) + "\n".join(_told(desk, queue, one, payload)))


@app.command()
def cancel(
    consumer: Name, id: Ids,
    unseen: Annotated[
        bool, typer.Option("--unseen", help="Also ids that nothing is known of: jobs that are on their way here.")
    ] = False,
    dry_run: DryRun = False, as_json: Json = False, schema: Schema = None,
) -> None:  # fmt: skip
    """See that jobs are not run, where it is not too late. Cannot be undone.

    The consumer's ledger says so from then on, so that nobody runs them, whatever Redis forgets and the relay publishes again. One
    that runs already goes on. Asks nothing; an unknown name or id changes nothing. Safe to interrupt, and to run again.

    A queue that no consumer has opened yet (`-` in `outbox queues`) has no ledger to write this in: run a consumer of it
    without any handler first, and end it.

    Exit code 0: they are cancelled; 1: it did not get to the end, or not begin; 3: some are not, since they run or have ended.

    Example: consumer jobs cancel mailer 0197c9a4-5b1e-7d1c-9f0a-3c1f2f0e8a11 --dry-run
    """
    with _opened(schema) as desk:
        desk.check_consumer(consumer)
        queues = desk.queues_of(consumer)
        found = desk.all_known(id, [consumer], queues, unseen=unseen)
        operations, stayed, ends = Operations(consumer, desk.schema), False, []
        for one in found:
            end = (
                _foreseen(one, consumer)
                if dry_run
                else cancelled(desk.connection, operations, desk.lists, one.queue or queues[0], one.id)
            )
            stayed |= end.status != "cancelled"
            ends.append({"id": str(one.id), "status": end.status, "before": end.before})
            if not as_json:
                typer.echo(f"{one.id}  {_ended(end, one, consumer, dry_run)}")
        if as_json:
            print_list(ends)
    if stayed:
        raise typer.Exit(3)


@app.command()
def requeue(consumer: Name, id: Ids, dry_run: DryRun = False, as_json: Json = False, schema: Schema = None) -> None:
    """Have jobs tried again that are dead letters: at once, with all attempts, and with their ids.

    The same as `consumer dead requeue CONSUMER --id ID`, which can also select by reason, type or time. Asks nothing; an unknown
    name or id changes nothing. Safe to interrupt, and to run again or twice at a time.

    Exit code 0: done; 1: it did not get to the end, or not begin; 3: some stay, and it says why.

    Example: consumer jobs requeue mailer 0197c9a4-5b1e-7d1c-9f0a-3c1f2f0e8a11
    """
    with _opened(schema) as desk:
        desk.check_consumer(consumer)
        found = desk.all_known(id, [consumer], desk.queues_of(consumer))
        others = [one for one in found if not one.dead]
        for one in others:
            typer.echo(f"{one.id}  {_status(one)}: is no dead letter", err=True)
        operations, stopping = Operations(consumer, desk.schema), Stop()
        selection = Selection(events=tuple(one.id for one in found if one.dead))
        if selection.events:
            chosen = choose(desk.connection, operations, selection)
            steps = requeued(desk.connection, operations, chosen, dry_run=dry_run, stopping=stopping)
            run_steps(steps, stopping, chosen, "would be requeued" if dry_run else "requeued", as_json)
    if others:
        raise typer.Exit(3)


# --- what is known ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """What is known of a job; nothing of one that is `_Desk.all_known` only by its id.

    Attributes:
        queue: where Redis or the consumer's tables have it.
        state: in Redis.
        outcomes: what the ledger says, by consumer.
        waiting, dead: with the raw fields, and the consumer.
    """

    id: uuid.UUID
    queue: str | None
    state: JobState | None
    outcomes: dict[str, str]
    waiting: list[tuple[str, Aside, list[bytes]]]
    dead: list[tuple[str, Aside, list[bytes]]]

    def __bool__(self) -> bool:
        return bool(self.state or self.outcomes or self.waiting or self.dead)


class _Desk:
    """Whom operators ask.

    Attributes:
        owners: consumers of each queue that Redis or the consumers' tables know: one, but for some that are gone.
        away: how Redis failed to answer; it is not asked again.
    """

    def __init__(self, connection: Connection, schema: str, lists: ListTransport) -> None:
        self.connection, self.schema, self.lists = connection, schema, lists
        self.owners: dict[str, set[str]] = {}
        self.away: TransportError | None = None
        for consumer, topic in queues_read(connection, schema):
            self.owners.setdefault(queue_of(topic), set()).add(consumer)
        try:
            for state in lists.queues():
                self.owners.setdefault(state.queue, set()).update([state.group] if state.group else [])
        except TransportError as error:
            self.away = error

    def queues_of(self, consumer: str) -> list[str]:
        return sorted(queue for queue, consumers in self.owners.items() if consumer in consumers)

    def check_queue(self, name: str) -> None:
        self._check("queue", name, self.owners)

    def check_consumer(self, name: str) -> None:
        hint = ", this is MODULE:NAME, the name in Consumer(…) is wanted" if ":" in name else ""
        self._check("consumer of queues", name, set().union(*self.owners.values()), hint)

    def _check(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        if name in (names := sorted(known)):
            return
        if self.away:
            raise SettingsError(f"PostgreSQL knows no {what} {name!r}, and Redis does not answer: {self.away}")
        raise SettingsError(f"there is no {what} {name!r}{hint}{_near(queue_of(name), names)}; see: outbox queues")

    def jobs(self, queue: str, status: str) -> Iterator[JobState | tuple[str, str, Aside]]:
        """Jobs of that status; those of the consumers' tables with their status and consumer.

        Raises:
            TransportError: Redis is needed, and does not answer.
        """
        if status in ("waiting", "failed"):
            for consumer in sorted(self.owners[queue]):
                operations, selection = Operations(consumer, self.schema), Selection(topic=QUEUE_PREFIX + queue)
                with self.connection.transaction():
                    look = operations.waiting if status == "waiting" else operations.letters
                    yield from ((status, consumer, one) for one in look(self.connection, selection))
            return
        seen, after = set[uuid.UUID](), 0
        while page := self.lists.jobs(queue, status, _PAGE, after):
            yield from (one for one in page if one.id not in seen)  # what was put before them moves them on
            seen.update(one.id for one in page)
            after += _PAGE

    def all_known(
        self, texts: Sequence[str], consumers: Sequence[str], queues: Sequence[str], *, unseen: bool = False
    ) -> list[_Job]:
        """What is known of each id, once.

        Raises:
            SettingsError: nothing, of one of them, if not `unseen`; or it is none.
        """
        found = []
        for text in dict.fromkeys(texts):
            try:
                job_id = uuid.UUID(text)
            except ValueError:
                raise SettingsError(
                    f"ID: {text!r} is no id of a job, a whole UUID{self._near_ids(text, queues)}"
                ) from None
            found.append(one := self._find(job_id, consumers, queues))
            if not one and not unseen:
                if self.away:
                    raise SettingsError(f"PostgreSQL knows no job {job_id}, and Redis does not answer: {self.away}")
                raise SettingsError(
                    f"there is no job {job_id} in {', '.join(queues)}{self._near_ids(str(job_id), queues)}: it is on its way, or "
                    "ended long ago, or there never was such a one"
                )
        return list({one.id: one for one in found}.values())

    def _find(self, job_id: uuid.UUID, consumers: Sequence[str], queues: Sequence[str]) -> _Job:
        state = next(filter(None, (self._in_redis(queue, job_id) for queue in queues)), None)
        topics = {QUEUE_PREFIX + queue for queue in queues}
        outcomes: dict[str, str] = {}
        waiting: list[tuple[str, Aside, list[bytes]]] = []
        dead: list[tuple[str, Aside, list[bytes]]] = []
        for consumer in consumers:
            operations, selection = Operations(consumer, self.schema), Selection(events=(job_id,))
            with self.connection.transaction():  # all of one moment
                self.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                for outcome in operations.outcomes(self.connection, [job_id], lock=False).values():
                    outcomes[consumer] = outcome
                for look, into in ((operations.waiting_whole, waiting), (operations.letters_whole, dead)):
                    for one, parts in look(self.connection, selection):
                        if one.topic in topics:
                            into.append((consumer, one, parts))
        topic = next((one.topic for _, one, _ in waiting + dead), None)
        return _Job(job_id, state.queue if state else topic and queue_of(topic), state, outcomes, waiting, dead)

    def _in_redis(self, queue: str, job_id: uuid.UUID) -> JobState | None:
        if self.away is None:
            try:
                return self.lists.job(queue, job_id)
            except TransportError as error:
                self.away = error
        return None

    def _near_ids(self, text: str, queues: Sequence[str]) -> str:
        """Those of the first hundred of each status that look like it."""
        ids: list[str] = []
        for queue in queues if self.away is None else ():
            for status in _OPEN + _ENDED:
                for one in islice(self.jobs(queue, status), _PAGE):
                    ids.append(str(one.id if isinstance(one, JobState) else one[2].event_id))
        return _near(text, ids)


@contextmanager
def _opened(schema: str | None) -> Iterator[_Desk]:
    warn_of_unknown_variables(ConsumerSettings, RelaySettings)
    overrides: dict[str, Any] = {"schema_name": schema} if schema else {}
    settings = ConsumerSettings(**overrides)
    lists = ListTransport.from_url(
        settings.redis_url.get_secret_value(),
        prefix=settings.key_prefix,
        timeout_seconds=settings.redis_timeout_seconds,
    )
    try:
        address = settings.database_url.get_secret_value()
        with schemas.connect(address, "consumer jobs", autocommit=True) as connection:
            schemas.check_revision(connection, "consumer", settings.schema_name)
            yield _Desk(connection, settings.schema_name, lists)
    finally:
        lists.close()


def _near(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 3, cutoff=0.6)
    return f" (near it: {', '.join(near)})" if near else ""


def _status(one: _Job) -> str:
    """PostgreSQL's word goes before Redis'."""
    if one.waiting or one.dead:
        return "waiting" if one.waiting else "failed"
    ended = next((ENDED.get(outcome, "completed") for outcome in one.outcomes.values() if outcome != "waiting"), None)
    return ended or (one.state.status if one.state else "unknown")


def _foreseen(one: _Job, consumer: str) -> Cancelled:
    outcome = one.outcomes.get(consumer)
    if outcome not in (None, "waiting"):
        return Cancelled(ENDED.get(outcome, "completed"))
    return Cancelled("cancelled", outcome or (one.state.status if one.state else None))


def _ended(end: Cancelled, one: _Job, consumer: str, dry_run: bool) -> str:
    if end.status == "running":
        return "is being run just now, and could not be cancelled: see what becomes of it"
    if end.status == "failed":
        return f"has failed before, and is a dead letter: consumer dead discard {consumer} --id {one.id}"
    if end.status == "completed" or one.outcomes.get(consumer) == "cancelled":
        return f"is {end.status} already"
    before = f", {'is' if dry_run else 'was'} {end.before}" if end.before else ", Redis has not said what it was"
    if end.before == "running":
        before += " (claimed, and not begun)" if not dry_run else ": if its handler has not begun by then"
    return ("would be cancelled" if dry_run else "cancelled") + before


# --- how a job looks -------------------------------------------------------------------------------------------------------


def _wire(state: JobState, name: str) -> str | None:
    value = state.fields.get(name.encode())
    return None if value is None else value.decode(errors="backslashreplace")


def _instant(instant: datetime | None) -> str:
    return "-" if instant is None else instant_shown(instant)


def _words(state: JobState) -> Iterator[str]:
    """What Redis knows, but for whose job it is."""
    yield f"since {_instant(state.since)}"
    yield f"priority {state.priority}"
    if state.count:
        yield (f"begun {state.count} times" if state.count > 1 else "begun once") + " since it was last queued"
    if state.status == "delayed":
        yield f"due {_instant(state.due_at)}"
    if state.status == "running":
        claimed = f"claimed until {_instant(state.deadline)}" if state.deadline else "without a claim"
        yield f"by {plain(state.by)}, {claimed}"
    if state.error is not None:
        yield plain(state.error)


def _line(one: JobState | tuple[str, str, Aside]) -> str:
    if isinstance(one, JobState):
        words = [str(one.id), plain(_wire(one, "type")), f"key {plain(_wire(one, 'subject'))}", *_words(one)]
        return f"{one.status:9}  {'  '.join(words)}"
    status, _, aside = one
    words = [
        str(aside.event_id or "-"), plain(aside.type), f"key {plain(aside.key)}", f"since {_instant(aside.last_failed_at)}",
        plain(aside.reason), f"{aside.attempts} attempts", plain(aside.error_class),
        f"letter {aside.number}" if status == "failed" else f"next try {_instant(aside.next_attempt_at)}",
    ]  # fmt: skip
    return f"{status:9}  {'  '.join(words)}"


def _redis(state: JobState) -> dict[str, Any]:
    """For JSON; without fields and result."""
    instants = {
        name: value.isoformat() if (value := getattr(state, name)) else None
        for name in ("since", "added_at", "due_at", "deadline")
    }
    return {
        "queue": state.queue, "id": str(state.id), "status": state.status, "type": _wire(state, "type"),
        "key": _wire(state, "subject"), "priority": state.priority, "count": state.count, "by": state.by, "error": state.error, **instants,
    }  # fmt: skip


def _summary(one: JobState | tuple[str, str, Aside]) -> dict[str, Any]:
    if isinstance(one, JobState):
        return _redis(one)
    status, consumer, aside = one
    return {
        "queue": queue_of(aside.topic), "id": aside.event_id and str(aside.event_id), "status": status, "consumer": consumer,
        **record(aside),
    }  # fmt: skip


def _pairs(one: _Job) -> list[tuple[bytes, bytes]]:
    """The raw fields. Redis keeps no payload of what has left the queue, the consumer's tables do."""
    for _, _, parts in one.waiting + one.dead:
        return list(pairs_of(parts))
    return list(one.state.fields.items()) if one.state else []


def _record(desk: _Desk, queue: str, one: _Job, payload: bool) -> dict[str, Any]:
    known = _redis(one.state) if one.state else None
    if known is not None and one.state is not None and one.state.result is not None:
        known["result_size"] = len(one.state.result)
        if payload:
            known["result"] = json.loads(one.state.result)
    return {
        "queue": queue, "id": str(one.id), "status": _status(one), "redis": known,
        "redis_error": str(desk.away) if desk.away else None, "ledger": one.outcomes,
        "waiting": [{"consumer": consumer, **record(aside)} for consumer, aside, _ in one.waiting],
        "dead": [{"consumer": consumer, **record(aside)} for consumer, aside, _ in one.dead],
        "fields": fields_shown(_pairs(one), payload),
    }  # fmt: skip


def _told(desk: _Desk, queue: str, one: _Job, payload: bool) -> Iterator[str]:
    """All about a job, for people."""
    state = one.state
    yield f"job {one.id} of queue {queue}: {_status(one)}"
    if desk.away:
        yield f"  Redis     does not answer: {desk.away}"
    elif state is None:
        yield "  Redis     does not know it (any more)"
    else:
        yield f"  Redis     {plain(state.status)}, {', '.join(_words(state))}"
        yield f"  added     {_instant(state.added_at)}" + (
            f", to run at {_instant(state.due_at)}" if state.due_at else ""
        )
        if state.result is not None:
            yield f"  result    {len(state.result):,} bytes" + (f": {plain(state.result.decode())}" if payload else "")
    for consumer in sorted(desk.owners[queue]):
        yield f"  ledger    consumer {consumer}: {one.outcomes.get(consumer, 'has not done it')}"
    for _, aside, _ in one.waiting:
        next_try = "-" if aside.next_attempt_at is None else instant_shown(aside.next_attempt_at)
        yield f"  waits     {plain(aside.reason)}, {aside.attempts} attempts, next try {next_try}"
        yield f"  error     {plain(aside.error)}"
    for _, aside, _ in one.dead:
        put_aside = instant_shown(aside.last_failed_at)
        yield f"  dead      letter {aside.number}, {plain(aside.reason)}, {aside.attempts} attempts, put aside {put_aside}"
        yield f"  error     {plain(aside.error)}"
    pairs = _pairs(one)
    yield from field_lines(pairs, payload)
    if payload and one.state and all(name != b"data" for name, _ in pairs):
        yield "  payload   is not kept in Redis of what has left its queue; the outbox has it until its retention ends"
