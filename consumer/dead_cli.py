"""The commands ``consumer dead …``, ``consumer waiting`` and ``consumer status``: what operators need when handlers fail.

They know a consumer by its name, for an operator's shell may not have its handlers. Nobody's text reaches the terminal raw, and
no payload does unasked.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import IO, Annotated, Any

import typer

from consumer.dead_letters import Chosen, Kept, Progress, choose
from consumer.dead_letters import discard as discarded
from consumer.dead_letters import requeue as requeued
from consumer.ledger import Aside, Connection, Ledger, Operations, Selection
from consumer.settings import ConsumerSettings
from outbox import schema as schemas
from outbox.cli import confirmed, stop_on_signals
from outbox.doctor import lasting
from outbox.errors import SettingsError
from outbox.retry import Stop
from outbox.settings import check_schema, database_url_from_environment
from outbox.transport.base import CONSUMER_NAME

app = typer.Typer(
    name="dead",
    help="Dead letters: what a consumer has put aside, for a person to look into.\n\n"
    "requeue and discard want to know which (--id, --reason, …, or --all), and ask; --yes is for scripts.",
    no_args_is_help=True,
    add_completion=False,
)

Schema = Annotated[
    str | None, typer.Option("--schema", help="Schema of the consumer's tables; default: CONSUMER_SCHEMA, else public.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The consumer's name (not MODULE:NAME).")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this number or event id (may be repeated).")]
Reason = Annotated[
    str | None, typer.Option(help="Only those of this reason, as `consumer status` names it, e.g. attempts.")
]
Type = Annotated[str | None, typer.Option(help="Only events of this type.")]
Topic = Annotated[str | None, typer.Option(help="Only events of this topic.")]
Key = Annotated[str | None, typer.Option(help="Only events of this key.")]
Since = Annotated[
    str | None,
    typer.Option(help="Put aside (or failed last) at or after: 2026-01-31T12:00:00+03:00, or 2h for 2 h ago."),
]
Until = Annotated[str | None, typer.Option(help="Put aside (or failed last) before.")]
Limit = Annotated[int | None, typer.Option(min=1, help="The first so many, by number.")]
ShownLimit = Annotated[
    int | None, typer.Option(min=1, help="The first so many, by number; default: 100, with --json all.")
]
All = Annotated[bool, typer.Option("--all", help="Really all of them, where nothing else says which.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_SHOWN = 100
#: Between two lines of progress.
_LINE_SECONDS = 2.0
_AGO = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s?(s|min|m|h|d)", re.ASCII)
_AGO_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
#: Why letters stay, and what to do.
_STAY = {
    Kept.CUT: "only the beginning of them was kept",
    Kept.DONE: "their events were applied after all, or newer ones were: discard them",
    Kept.WAITING: "their events wait for another try already",
    Kept.BUSY: "other transactions hold their ledger rows: run it again",
    Kept.GONE: "somebody else has requeued, discarded or deleted them, or is at it",
}


@app.command("list")
def list_letters(
    name: Name, id: Ids = None, reason: Reason = None, type: Type = None, topic: Topic = None, key: Key = None,
    since: Since = None, until: Until = None, limit: ShownLimit = None, as_json: Json = False, schema: Schema = None,
) -> None:  # fmt: skip
    """Say which dead letters there are, oldest number first. Shows no payloads. Changes nothing."""
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id, reason, type, topic, key, since, until, limit)
        _print(connection, operations, operations.letters, selection, "dead letter", as_json)


@app.command()
def show(
    name: Name,
    id: Annotated[list[str], typer.Argument(metavar="ID...", help="Number of a letter, or event id.")],
    payload: Annotated[bool, typer.Option("--payload", help="Print what is in the fields, too.")] = False,
    as_json: Json = False,
    schema: Schema = None,
) -> None:
    """Tell all about dead letters; what is in their fields only with --payload. Changes nothing."""
    found = False
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id)
        with connection.transaction():
            letters = operations.letters_whole(connection, selection)
            if as_json:
                found = print_list(
                    record(letter) | {"fields": fields_shown(pairs_of(parts), payload)} for letter, parts in letters
                )
            else:
                for letter, parts in letters:
                    typer.echo(("\n" if found else "") + "\n".join(_told(name, letter, parts, payload)))
                    found = True
    if not found:
        raise SettingsError(f"consumer {name!r} has no such dead letter")


@app.command()
def requeue(
    name: Name, id: Ids = None, reason: Reason = None, type: Type = None, topic: Topic = None, key: Key = None,
    since: Since = None, until: Until = None, limit: Limit = None, all: All = False,
    past_gap: Annotated[
        bool, typer.Option("--past-gap", help="Let the first of each key go ahead although versions before it are missing.")
    ] = False,
    dry_run: DryRun = False, yes: Yes = False, as_json: Json = False, schema: Schema = None,
) -> None:  # fmt: skip
    """Have dead letters tried again: at once, in order of their numbers, with all attempts, and with their event ids.

    Safe to interrupt, and to run again or twice at a time. What was applied after all is not applied again, and stays.

    Exit code 0: done, if there was anything to do; 1: it did not get to the end, or none of those ids is there; 3: some
    stay, and it says why.
    """
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id, reason, type, topic, key, since, until, limit, all)
        _refuse_to_ask(as_json and not yes and not dry_run)
        chosen = choose(connection, operations, selection, by_version=past_gap)
        _survey(connection, operations, selection, chosen, as_json)
        if chosen and not dry_run and not yes and not confirmed("Have them tried again?"):
            raise typer.Exit(1)
        stopping = Stop()
        steps = requeued(connection, operations, chosen, past_gap=past_gap, dry_run=dry_run, stopping=stopping)
        run_steps(steps, stopping, chosen, "would be requeued" if dry_run else "requeued", as_json)


@app.command()
def discard(
    name: Name, id: Ids = None, reason: Reason = None, type: Type = None, topic: Topic = None, key: Key = None,
    since: Since = None, until: Until = None, limit: Limit = None, all: All = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Let their events be applied should they come again, as by outbox replay.")
    ] = False,
    dry_run: DryRun = False, yes: Yes = False, as_json: Json = False, schema: Schema = None,
) -> None:  # fmt: skip
    """Throw dead letters away. Their events are never applied, also if they come again (but see --forget).

    Exit code 0: done, if there was anything to do; 1: it did not get to the end, or none of those ids is there; 3: some
    stay, and it says why.
    """
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id, reason, type, topic, key, since, until, limit, all)
        _refuse_to_ask(as_json and not yes and not dry_run)
        chosen = choose(connection, operations, selection)
        _survey(connection, operations, selection, chosen, as_json)
        if chosen.held_back:
            typer.echo(
                f"{chosen.held_back:,} later events of their keys wait for them (Order.NEXT), until they are put aside as 'gap'; "
                f"then: consumer dead requeue {name} --reason gap --past-gap",
                err=True,
            )
        if chosen and not dry_run and not yes and not confirmed("Throw them away?"):
            raise typer.Exit(1)
        stopping = Stop()
        steps: Iterable[Progress] = (
            [Progress(len(chosen), len(chosen))]
            if dry_run
            else discarded(connection, operations, chosen, forget=forget, stopping=stopping)
        )
        run_steps(steps, stopping, chosen, "would be discarded" if dry_run else "discarded", as_json)


@app.command()
def export(
    name: Name, id: Ids = None, reason: Reason = None, type: Type = None, topic: Topic = None, key: Key = None,
    since: Since = None, until: Until = None, limit: Limit = None,
    output: Annotated[
        str | None, typer.Option("--output", help="A new file, for its owner alone; default: standard output.")
    ] = None,
    schema: Schema = None,
) -> None:  # fmt: skip
    """Write dead letters as JSON lines, WITH THEIR PAYLOADS: raw fields in base64, and as text where they are UTF-8."""
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id, reason, type, topic, key, since, until, limit)
        written = 0
        with _written(output) as file, connection.transaction():
            for letter, parts in operations.letters_whole(connection, selection):
                file.write(json.dumps(record(letter) | {"fields": fields_shown(pairs_of(parts), True)}) + "\n")
                written += 1
        _say_unknown(connection, operations, written, selection)
    typer.echo(f"{written:,} dead letters exported", err=True)


def waiting(
    name: Name, id: Ids = None, reason: Reason = None, type: Type = None, topic: Topic = None, key: Key = None,
    since: Since = None, until: Until = None, limit: ShownLimit = None, as_json: Json = False, schema: Schema = None,
) -> None:  # fmt: skip
    """Say which events wait for another try, for a handler, or for versions before theirs. Changes nothing."""
    with _opened(name, schema) as (connection, operations):
        selection = _selection(connection, operations, id, reason, type, topic, key, since, until, limit)
        _print(connection, operations, operations.waiting, selection, "waiting event", as_json)


def status(name: Name, as_json: Json = False, schema: Schema = None) -> None:
    """Sum up what a consumer has not applied: waiting events and dead letters, by reason. Changes nothing.

    Also says whether so many are dead that it is paused: give it CONSUMER_DEAD_LETTER_LIMIT and
    CONSUMER_DEAD_LETTER_WINDOW_SECONDS as the consumer has them.

    What it has not read or acknowledged yet, and how far behind it is, `outbox status` shows.
    """
    with _opened(name, schema) as (connection, operations):
        found = operations.sums(connection)
        _say_unknown(connection, operations, len(found))
        without_redis: dict[str, Any] = {"redis_url": "redis://unused"}
        settings = ConsumerSettings(**without_redis)
        limit, seconds = settings.dead_letter_limit, settings.dead_letter_window_seconds
        paused = 0 < limit <= Ledger(name, operations.schema).lately_dead(connection, seconds, limit)
    if as_json:
        kinds = ("count", "oldest_seconds", "due_seconds")
        sums: dict[str, Any] = {"waiting": {}, "dead": {}, "paused": None}
        if paused:
            sums["paused"] = {"dead_letters": limit, "within_seconds": seconds}
        for what, reason, *values in found:
            sums[what][reason] = {kind: value for kind, value in zip(kinds, values, strict=True) if value is not None}
        typer.echo(json.dumps(sums, indent=2))
        return
    if paused:
        typer.echo(
            f"paused: {limit:,} dead letters within {seconds:g} s (CONSUMER_DEAD_LETTER_LIMIT); nothing is tried until "
            "they are requeued, discarded or older"
        )
    for what, reason, count, oldest, due in found:
        line = (
            f"{what:7}  {plain(reason)}: {count:,}, the oldest {'failed first' if what == 'waiting' else 'put aside'} "
        )
        typer.echo(line + f"{lasting(oldest)} ago" + (f", due for {lasting(due)}" if due else ""))
    if not found:
        typer.echo(f"nothing waits, and there are no dead letters of consumer {name}")


# --- what they share -----------------------------------------------------------------------------------------------------


@contextmanager
def _opened(name: str, schema: str | None) -> Iterator[tuple[Connection, Operations]]:
    if not CONSUMER_NAME.fullmatch(name):
        hint = ": this is MODULE:NAME, the name in Consumer(…) is wanted" if ":" in name else ""
        raise SettingsError(f"consumer name: must match {CONSUMER_NAME.pattern}, is {name!r}{hint}")
    schema = check_schema(schema or os.environ.get("CONSUMER_SCHEMA") or "public")
    with schemas.connect(database_url_from_environment(), "consumer dead", autocommit=True) as connection:
        schemas.check_revision(connection, "consumer", schema)
        yield connection, Operations(name, schema)


def _selection(
    connection: Connection, operations: Operations, ids: Sequence[str] | None = None, reason: str | None = None,
    type: str | None = None, topic: str | None = None, key: str | None = None, since: str | None = None,
    until: str | None = None, limit: int | None = None, all_of_them: bool = True,
) -> Selection:  # fmt: skip
    """What the options say.

    Raises:
        SettingsError: they cannot be read, or say nothing where that is dangerous.
    """
    if not all_of_them and all(option is None for option in (ids, reason, type, topic, key, since, until, limit)):
        raise SettingsError("say which (--id, --reason, --type, …), or --all")
    numbers, events = [], []
    for text in ids or ():
        try:
            if text.isdecimal() and len(text) < 20:
                numbers.append(int(text))
            else:
                events.append(uuid.UUID(text))
        except ValueError:
            raise SettingsError(f"--id: {text!r} is neither the number of a letter nor an event id") from None
    now = operations.now(connection) if since or until else datetime.now(UTC)
    return Selection(
        numbers=tuple(numbers), events=tuple(events), reason=reason, type=type, topic=topic, key=key, limit=limit,
        since=_instant("--since", since, now), until=_instant("--until", until, now),
    )  # fmt: skip


def _refuse_to_ask(would: bool) -> None:
    if would:
        raise SettingsError("--json: asks nothing, so it wants --yes or --dry-run")


def _instant(option: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    try:
        if ago := _AGO.fullmatch(text):
            return now - timedelta(seconds=float(ago[1]) * _AGO_SECONDS[ago[2]])
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise SettingsError(f"{option}: is neither a time like 2026-01-31T12:00:00+03:00 nor a span like 2h") from None


def _say_unknown(
    connection: Connection,
    operations: Operations,
    found: int,
    selection: Selection | None = None,
    what: str = "dead letter",
) -> None:
    """Say that nothing was found, and where a word may be misspelled: the consumer's name, or what selects."""
    if found:
        return
    if not operations.is_known(connection):
        typer.echo(f"no consumer {operations.consumer} has been seen in this schema", err=True)
    elif selection and replace(selection, limit=None) != Selection():
        typer.echo(f"no {what} of consumer {operations.consumer} fits", err=True)
    elif selection:
        typer.echo(f"there are no {what}s of consumer {operations.consumer}", err=True)


def _print(
    connection: Connection,
    operations: Operations,
    rows: Callable[[Connection, Selection], Iterator[Aside]],
    selection: Selection,
    what: str,
    as_json: bool,
) -> None:
    """List what is found, as it comes."""
    with connection.transaction():
        if as_json:
            print_list(record(one) for one in rows(connection, selection))
            return
        limit, number = selection.limit or _SHOWN, 0
        for number, one in enumerate(rows(connection, replace(selection, limit=limit + 1)), 1):
            if number <= limit:
                typer.echo(line(one))
    if number > limit:
        typer.echo(f"these are the first {limit:,}, there are more: see --limit", err=True)
    _say_unknown(connection, operations, number, selection, what)


def print_list(records: Iterable[dict[str, Any]]) -> bool:
    """A JSON list, an element a line; returns whether there was one."""
    opening = "["
    for one in records:
        sys.stdout.write(f"{opening}\n{json.dumps(one)}")  # there may be a million: no flush for each
        opening = ","
    typer.echo("[]" if opening == "[" else "\n]")
    return opening == ","


def _survey(
    connection: Connection, operations: Operations, selection: Selection, chosen: Chosen, as_json: bool
) -> None:
    if not chosen and (selection.numbers or selection.events):
        raise SettingsError(f"consumer {operations.consumer!r} has no such dead letter")
    if as_json:
        return
    for reason, type, count in chosen.kinds:
        typer.echo(f"{count:>8,}  {plain(reason)}  {plain(type)}")
    if (told := sum(count for _, _, count in chosen.kinds)) < len(chosen):
        typer.echo(f"{len(chosen) - told:>8,}  of other kinds")
    _say_unknown(connection, operations, len(chosen), selection)


def run_steps(steps: Iterable[Progress], stopping: Stop, chosen: Chosen, what: str, as_json: bool) -> None:
    """Take the steps, and say what came of it."""
    stop_on_signals(stopping.set)
    progress, due = Progress(), time.monotonic() + _LINE_SECONDS
    try:
        for progress in steps:
            if time.monotonic() >= due:
                due = time.monotonic() + _LINE_SECONDS
                typer.echo(f"{progress.seen:,} of {len(chosen):,}", err=True)
    finally:
        _sum_up(progress, chosen, what, as_json)
    if progress.seen < len(chosen):
        raise typer.Exit(1)
    if progress.kept:
        raise typer.Exit(3)


def _sum_up(progress: Progress, chosen: Chosen, what: str, as_json: bool) -> None:
    if as_json:
        kept = {str(why): {"count": count, "numbers": progress.examples[why]} for why, count in progress.kept.items()}
        typer.echo(json.dumps({"selected": len(chosen), what.replace(" ", "_"): progress.done, "kept": kept}, indent=2))
        return
    typer.echo(f"{progress.done:,} {what}")
    for why, count in progress.kept.items():
        numbers = ", ".join(map(str, progress.examples[why])) + (", …" if count > len(progress.examples[why]) else "")
        typer.echo(f"{count:,} stay ({numbers}): {_STAY[why]}")
    if progress.seen < len(chosen):
        typer.echo(f"stopped after {progress.seen:,} of {len(chosen):,}; run it again for the rest", err=True)


@contextmanager
def _written(output: str | None) -> Iterator[IO[str]]:
    """The file, which is gone again if it cannot be written to its end; or standard output."""
    if output is None:
        yield typer.get_text_stream("stdout")
        return
    try:
        file = os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--output: cannot make {output!r}: {error.strerror}") from None
    try:
        with file:
            yield file
    except BaseException:
        os.unlink(output)
        raise


# --- how a letter looks ---------------------------------------------------------------------------------------------------


def plain(text: str | None) -> str:
    """A stranger's text for a terminal, where control characters are commands: they are shown as escapes."""
    if text is None:
        return "-"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def instant_shown(instant: datetime) -> str:
    """In UTC, to the second."""
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def line(one: Aside) -> str:
    """A dead letter or waiting event in one line."""
    words = [
        f"{one.number:>6}", plain(one.reason), f"{plain(one.topic)} {plain(one.type)}", f"key {plain(one.key)}",
        f"version {'-' if one.version is None else one.version}", str(one.event_id or "-"), f"{one.attempts} attempts",
        plain(one.error_class), f"{instant_shown(one.first_failed_at)} to {instant_shown(one.last_failed_at)}",
    ]  # fmt: skip
    if one.cut:
        words.append("cut")
    if one.next_attempt_at is not None:
        words.append(f"next {instant_shown(one.next_attempt_at)}")
    if one.give_up_at is not None:
        words.append(f"until {instant_shown(one.give_up_at)}")
    return "  ".join(words)


def record(one: Aside) -> dict[str, Any]:
    """A dead letter or waiting event for JSON."""
    found = {
        name: value.astimezone(UTC).isoformat()
        if isinstance(value, datetime)
        else str(value)
        if name == "event_id" and value
        else value
        for name, value in asdict(one).items()
    }
    for name in ("cut",) if one.next_attempt_at else ("next_attempt_at", "give_up_at"):
        del found[name]
    return found


def pairs_of(parts: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Names and values."""
    return zip(parts[::2], parts[1::2], strict=False)  # one that was cut, or a person's, may lack the last


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def fields_shown(pairs: Iterable[tuple[bytes, bytes]], payload: bool) -> list[dict[str, Any]]:
    """The raw fields for JSON: names and sizes, and what is in them where it is asked for."""
    fields = []
    for name, value in pairs:
        field: dict[str, Any] = {"name": name.decode(errors="backslashreplace"), "size": len(value)}
        if _text(name) is None:
            field["name_base64"] = base64.b64encode(name).decode()
        if payload:
            field["base64"] = base64.b64encode(value).decode()
            if (text := _text(value)) is not None:
                field["text"] = text
        fields.append(field)
    return fields


def _told(name: str, letter: Aside, parts: Sequence[bytes], payload: bool) -> Iterator[str]:
    """All about a letter, for people."""
    yield f"dead letter {letter.number} of consumer {name}"
    yield f"  event     {letter.event_id or 'could not be read as one'}"
    yield f"  type      {plain(letter.type)}, key {plain(letter.key)}, version {'-' if letter.version is None else letter.version}"
    yield f"  topic     {plain(letter.topic)}, entry {plain(letter.stream_id)} of stream {plain(letter.stream)}"
    yield f"  reason    {plain(letter.reason)}, {letter.attempts} attempts"
    yield f"  error     {plain(letter.error)}"
    yield f"  class     {plain(letter.error_class)}"
    yield f"  failed    first {instant_shown(letter.first_failed_at)}, put aside {instant_shown(letter.last_failed_at)}"
    if letter.cut:
        yield "  cut       only the beginning of its fields was kept: it cannot be requeued"
    yield from field_lines(pairs_of(parts), payload)


def field_lines(fields: Iterable[tuple[bytes, bytes]], payload: bool) -> Iterator[str]:
    """A line for each raw field; what is in it only where it is asked for."""
    for key, value in fields:
        shown = ""
        if payload:
            text = _text(value)
            shown = f": {text}" if text is not None and text.isprintable() else f", hex: {value.hex()}"
        yield f"  field     {plain(key.decode(errors='backslashreplace'))}, {len(value):,} bytes{shown}"
