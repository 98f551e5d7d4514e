"""Dead letters and waiting events in operators' hands: `consumer dead …`, `consumer waiting`, `consumer status`."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner, Result

from consumer.cli import app
from consumer.dead_letters import Kept, Progress, choose, discard, requeue
from consumer.ledger import Operations, Selection
from outbox.errors import OutboxError
from tests.waiting import eventually

NAME = "wallet"


class Office:
    """Somebody with the commands, and a consumer's tables."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.db = psycopg.connect(url, autocommit=True)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, arguments, env={"DATABASE_URL": self.url, "CONSUMER_SCHEMA": None})

    def done(self, *arguments: str, code: int = 0) -> str:
        """What a command prints that ends with the exit code."""
        result = self.run(*arguments)
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    def found(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        return json.loads(self.done(*arguments, "--json"))

    def numbers(self, *arguments: str) -> list[int]:
        return [letter["number"] for letter in self.found("dead", "list", NAME, *arguments)]

    def letter(self, event: uuid.UUID | None = None, *, outcome: str | None = "dead", **columns: Any) -> int:
        """A dead letter, and the ledger row of its event; returns its number."""
        given: dict[str, Any] = {
            "consumer": NAME, "stream": "payments:1", "stream_id": f"{uuid.uuid4().int % 10**12}-0", "event_id": event,
            "reason": "failed", "error": "ValueError: no", "error_class": "ValueError", "fields": [b"data", b'{"n":1}'],
            "attempts": 8, "topic": "payments", "type": "credited", "key": "A", "version": 1,
        }  # fmt: skip
        given |= columns
        number = self._insert("dead_letters", given)
        if event is not None and outcome is not None:
            self.db.execute(
                "INSERT INTO public.processed_messages (consumer, event_id, outcome, processed_at) "
                "VALUES (%s, %s, %s, now() - interval '1 day') ON CONFLICT DO NOTHING",
                (given["consumer"], event, outcome),
            )
        return number

    def wait(self, event: uuid.UUID | None = None, **columns: Any) -> None:
        """A waiting event."""
        given: dict[str, Any] = {
            "consumer": NAME, "stream": "payments", "stream_id": "1-0", "topic": "payments", "event_id": event or uuid.uuid4(),
            "type": "credited", "key": "A", "version": 1, "fields": [b"data", b"1"], "reason": "failed",
        } | columns  # fmt: skip
        if given["reason"] != "failed":
            given["give_up_at"] = "2030-01-01T00:00:00Z"
        self._insert("message_failures", given)

    def _insert(self, table: str, given: dict[str, Any]) -> int:
        statement = sql.SQL("INSERT INTO {} ({}) VALUES ({}) RETURNING id").format(
            sql.Identifier("public", table),
            sql.SQL(", ").join(map(sql.Identifier, given)),
            sql.SQL(", ").join([sql.Placeholder()] * len(given)),
        )
        row = self.db.execute(statement, list(given.values())).fetchone()
        assert row is not None
        return int(row[0])

    def all(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(query, parameters).fetchall()

    def waiting(self) -> list[tuple[Any, ...]]:
        """Event ids of what waits, in the order in which it is run."""
        return [row[0] for row in self.all("SELECT event_id FROM public.message_failures ORDER BY next_attempt_at, id")]

    def outcome(self, event: uuid.UUID) -> str | None:
        rows = self.all(
            "SELECT outcome FROM public.processed_messages WHERE consumer = %s AND event_id = %s", NAME, event
        )
        return rows[0][0] if rows else None

    @contextmanager
    def holding(self, query: str, *parameters: Any) -> Iterator[None]:
        """Another transaction that has done something, and does not end."""
        with psycopg.connect(self.url) as other:
            other.execute(query, parameters)
            yield
            other.rollback()


@pytest.fixture
def office(database_url: str) -> Iterator[Office]:
    made = Office(database_url)
    yield made
    made.db.close()


def ids(number: int) -> list[uuid.UUID]:
    """Not in the order of their making."""
    return [uuid.uuid4() for _ in range(number)]


# --- looking ---------------------------------------------------------------------------------------------------------------


def test_letters_are_listed_by_what_they_are(office: Office) -> None:
    event = uuid.uuid4()
    first = office.letter(event, version=7)
    second = office.letter(
        None, reason="undecodable", topic=None, type=None, key=None, version=None, stream="refunds:0", error_class=None
    )
    third = office.letter(uuid.uuid4(), type="moved", topic="refunds", key="B", created_at="2026-01-31T12:00:00+03:00")
    office.letter(uuid.uuid4(), consumer="other")
    assert office.numbers() == [first, second, third]
    for options, wanted in {
        ("--reason", "undecodable"): [second],
        ("--type", "moved"): [third],
        ("--topic", "refunds"): [second, third],
        ("--topic", "payments"): [first],
        ("--key", "B"): [third],
        ("--id", str(event)): [first],
        ("--id", str(event), "--id", str(third)): [first, third],
        ("--id", str(event), "--key", "B"): [],
        ("--since", "2h"): [first, second],
        ("--until", "2h"): [third],
        ("--since", "2026-01-31T12:00:00+03:00", "--until", "2026-01-31T09:00:00.000001+00:00"): [third],
        ("--until", "2026-01-31T12:00:00+03:00"): [],
        ("--limit", "2"): [first, second],
        ("--key", "x'); DROP TABLE public.dead_letters--"): [],
    }.items():
        assert office.numbers(*options) == wanted, options
    (one, *_), lines = office.found("dead", "list", NAME), office.done("dead", "list", NAME).splitlines()
    assert one | {"first_failed_at": "", "last_failed_at": "", "stream_id": ""} == {
        "number": first, "event_id": str(event), "topic": "payments", "type": "credited", "key": "A", "version": 7,
        "reason": "failed", "error_class": "ValueError", "error": "ValueError: no", "attempts": 8, "first_failed_at": "",
        "last_failed_at": "", "stream": "payments:1", "stream_id": "", "cut": False,
    }  # fmt: skip
    assert f"{first}  failed  payments credited  key A  version 7  {event}  8 attempts  ValueError  " in lines[0]
    assert lines[2].split("  ")[-1].endswith("to 2026-01-31T09:00:00Z")
    assert '"n"' not in office.done("dead", "list", NAME)
    assert len(office.done("dead", "list", NAME, "--limit", "2").splitlines()) == 2
    assert "these are the first 2, there are more" in office.run("dead", "list", NAME, "--limit", "2").stderr
    assert office.run("dead", "list", NAME, "--limit", "3").stderr == ""


def test_a_list_is_as_long_as_asked_and_of_unknown_consumers_it_is_said(office: Office) -> None:
    assert office.found("dead", "list", "walet") == []
    assert "no consumer walet has been seen in this schema" in office.run("dead", "list", "walet").stderr
    office.db.execute(
        "INSERT INTO public.consumer_retention (consumer, topic, retention_seconds) VALUES ('wallet', 't', 1)"
    )
    for command, what in ((("dead", "list"), "dead letters"), (("waiting",), "waiting events")):
        nothing = office.run(*command, NAME)
        assert (nothing.stdout, nothing.stderr) == ("", f"there are no {what} of consumer wallet\n")
        assert office.run(*command, NAME, "--json").output == "[]\n"
    for command in (("list",), ("requeue", "--yes"), ("discard", "--yes"), ("export",)):
        told = office.run("dead", command[0], NAME, "--reason", "atempts", *command[1:]).stderr
        assert "no dead letter of consumer wallet fits" in told, "a misspelled reason looks as if all were well"
    assert "no waiting event of consumer wallet fits" in office.run("waiting", NAME, "--id", "7").stderr
    office.db.execute(
        "INSERT INTO public.dead_letters (consumer, stream, stream_id, reason, error, fields) "
        "SELECT 'wallet', 't', i || '-0', 'undecodable', '', '{}' FROM generate_series(1, 2500) i"
    )
    assert len(office.done("dead", "list", NAME).splitlines()) == 100
    assert len(office.numbers()) == 2500
    assert len(office.done("dead", "list", NAME, "--limit", "2400").splitlines()) == 2400


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("list", NAME, "--since", "2026-01-31T12:00:00"), "since: must carry a time zone"),
        (("list", NAME, "--since", "yesterday"), "--since: is neither a time"),
        (("list", NAME, "--until", "999999999d"), "--until: is neither a time"),
        (("list", NAME, "--id", "12x"), "--id: '12x' is neither the number of a letter nor an event id"),
        (("list", NAME, "--id", "9223372036854775808"), "id: the number"),
        (("list", NAME, "--key", "\udcff"), "key: must be Unicode text"),
        (("list", 'x"; DROP TABLE accounts; --'), "consumer name: must match"),
        (("list", "shop:wallet"), "MODULE:NAME, the name in Consumer(…) is wanted"),
        (("list", "x'); SELECT pg_sleep(5)--"), "consumer name: must match"),
        (("list", NAME, "--schema", "nowhere"), "has no consumer tables"),
        (("show", NAME, "1"), "has no such dead letter"),
        (("requeue", NAME, "--id", "1"), "has no such dead letter"),
        (("discard", NAME, "--id", "1", "--yes", "--json"), "has no such dead letter"),
        (("requeue", NAME, "--yes"), "or --all"),
        (("discard", NAME, "--yes"), "or --all"),
        (("discard", NAME, "--all", "--json"), "wants --yes or --dry-run"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(office: Office, arguments: tuple[str, ...], what: str) -> None:
    result = office.run("dead", *arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, OutboxError)
    assert what in str(result.exception)


def test_show_tells_all_but_the_payload(office: Office) -> None:
    fields = [b"id", b"x", b"data", b'{"card": "xyzw"}', b"raw", b"\xff\x00", b"\xfe", b"1", b"lines", b"a\nb"]
    number = office.letter(uuid.uuid4(), fields=fields, error="ValueError: of\nlines")
    told = office.done("dead", "show", NAME, str(number))
    assert "  field     data, 16 bytes\n" in told
    assert "  error     ValueError: of\\nlines\n" in told
    assert "xyzw" not in told
    assert "xyzw" not in office.done("dead", "show", NAME, str(number), "--json")
    told = office.done("dead", "show", NAME, str(number), "--payload")
    assert '  field     data, 16 bytes: {"card": "xyzw"}\n' in told
    assert "  field     raw, 2 bytes, hex: ff00\n" in told
    assert "  field     \\xfe, 1 bytes: 1\n" in told
    assert "  field     lines, 3 bytes, hex: 610a62\n" in told
    (shown,) = office.found("dead", "show", NAME, str(number), "--payload")
    assert [base64.b64decode(field["base64"]) for field in shown["fields"]] == fields[1::2]
    assert shown["fields"][1]["text"] == '{"card": "xyzw"}'
    assert "text" not in shown["fields"][2]
    assert base64.b64decode(shown["fields"][3]["name_base64"]) == b"\xfe"


def test_what_strangers_wrote_never_reaches_the_terminal_raw(office: Office) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\u2028\x9b31m"
    number = office.letter(
        uuid.uuid4(), topic=evil, type=evil, key=evil, error=evil, error_class=evil, reason=evil, stream=evil, stream_id=evil,
        fields=[evil.encode(), evil.encode()],
    )  # fmt: skip
    office.wait(type=evil, key=evil, topic=evil, error=evil, error_class=evil)
    for command in (
        ("dead", "list", NAME), ("dead", "show", NAME, str(number), "--payload"), ("waiting", NAME), ("status", NAME),
        ("dead", "requeue", NAME, "--all", "--dry-run"), ("dead", "export", NAME),
    ):  # fmt: skip
        for options in ((), ("--json",)) if command[1] != "export" else ((),):
            if "--payload" in command and options:
                continue
            output = office.run(*command, *options).output
            assert output
            assert [c for c in output if not c.isprintable() and c != "\n"] == [], (command, options)
    assert "\\x1b]0;owned\\x07" in office.done("dead", "list", NAME)


def test_what_waits_is_listed_and_summed_up(office: Office) -> None:
    event = uuid.uuid4()
    office.wait(
        event, attempts=3, error_class="ValueError", error="ValueError: no", next_attempt_at="2030-01-01T00:00:00Z"
    )
    office.wait(reason="gap", version=5, first_failed_at="2026-01-01T00:00:00Z")
    office.wait(consumer="other")
    office.letter(uuid.uuid4())
    first, second = office.found("waiting", NAME)
    assert (first["event_id"], first["attempts"], first["error"]) == (str(event), 3, "ValueError: no")
    assert first["next_attempt_at"] == "2030-01-01T00:00:00+00:00"
    assert (second["reason"], second["give_up_at"]) == ("gap", "2030-01-01T00:00:00+00:00")
    assert [found["number"] for found in office.found("waiting", NAME, "--reason", "gap")] == [second["number"]]
    lines = office.done("waiting", NAME).splitlines()
    assert f"{event}  3 attempts  ValueError" in lines[0]
    assert lines[0].endswith("  next 2030-01-01T00:00:00Z")
    sums = office.found("status", NAME)
    assert sums.pop("paused") is None
    assert {what: {reason: found["count"] for reason, found in by.items()} for what, by in sums.items()} == {
        "waiting": {"failed": 1, "gap": 1}, "dead": {"failed": 1},
    }  # fmt: skip
    assert sums["waiting"]["gap"]["oldest_seconds"] > 86_400
    assert sums["waiting"]["failed"]["due_seconds"] == 0
    assert "dead     failed: 1, the oldest put aside " in office.done("status", NAME)
    assert "nothing waits" in office.done("status", "third")


def test_the_status_says_that_a_flood_of_dead_letters_pauses_the_consumer(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSUMER_DEAD_LETTER_LIMIT", "3")
    monkeypatch.setenv("CONSUMER_DEAD_LETTER_WINDOW_SECONDS", "60")
    for age in (0, 1, 61):
        office.letter(uuid.uuid4(), created_at=datetime.now(UTC) - timedelta(seconds=age))
    office.letter(uuid.uuid4(), consumer="other")
    assert "paused" not in office.done("status", NAME)
    office.letter(uuid.uuid4())
    assert office.found("status", NAME)["paused"] == {"dead_letters": 3, "within_seconds": 60}
    assert office.done("status", NAME).startswith("paused: 3 dead letters within 60 s (CONSUMER_DEAD_LETTER_LIMIT)")
    monkeypatch.setenv("CONSUMER_DEAD_LETTER_LIMIT", "0")
    assert office.found("status", NAME)["paused"] is None


# --- requeue ---------------------------------------------------------------------------------------------------------------


def test_a_requeued_letter_is_a_waiting_event_with_all_that_it_was(office: Office) -> None:
    event = uuid.uuid4()
    fields = [b"data", bytes(range(256)), b"", b""]
    number = office.letter(
        event, version=7, fields=fields, first_failed_at="2026-01-01T00:00:00Z", created_at="2026-01-02T00:00:00Z"
    )
    other = office.letter(uuid.uuid4())
    assert office.done("dead", "requeue", NAME, "--id", str(number), "--yes").splitlines()[-1] == "1 requeued"
    row = office.db.execute("SELECT *, next_attempt_at <= clock_timestamp() AS due FROM public.message_failures")
    assert row.description is not None
    (values,) = row.fetchall()
    found = dict(zip([column.name for column in row.description], values, strict=True))
    assert (found["event_id"], found["fields"], found["topic"], found["stream"]) == (
        event,
        fields,
        "payments",
        "payments:1",
    )
    assert (found["type"], found["key"], found["version"]) == ("credited", "A", 7)
    assert (found["reason"], found["attempts"], found["tries"], found["starts"]) == ("failed", 0, 0, 0)
    assert (found["due"], found["lease"], found["give_up_at"], found["past_gap"]) == (True, None, None, False)
    assert (found["error_class"], found["error"]) == ("ValueError", "ValueError: no")
    assert [found[name].isoformat()[:10] for name in ("first_failed_at", "last_failed_at")] == [
        "2026-01-01",
        "2026-01-02",
    ]
    assert office.outcome(event) == "waiting"
    assert office.all(
        "SELECT now() - processed_at < interval '1 hour' FROM public.processed_messages WHERE event_id = %s", event
    ) == [(True,)]
    assert office.numbers() == [other]


def test_all_are_requeued_in_order_and_the_second_time_there_are_none(office: Office) -> None:
    events = ids(450)
    for event in events:
        office.letter(event)
    office.letter(uuid.uuid4(), consumer="other")
    asked = office.run("dead", "requeue", NAME, "--all")
    assert asked.exit_code == 1
    assert asked.stdout.splitlines() == ["     450  failed  credited", "add --yes to have it done"]
    assert office.waiting() == []
    assert office.done("dead", "requeue", NAME, "--all", "--dry-run").splitlines()[-1] == "450 would be requeued"
    assert office.waiting() == []
    assert office.done("dead", "requeue", NAME, "--all", "--yes").splitlines()[-1] == "450 requeued"
    assert office.waiting() == events
    assert office.numbers() == []
    assert office.done("dead", "requeue", NAME, "--all", "--yes") == "0 requeued\n"
    assert office.found("dead", "requeue", NAME, "--all", "--yes") == {"selected": 0, "requeued": 0, "kept": {}}
    assert len(office.waiting()) == 450


def test_nothing_is_requeued_that_could_have_a_second_effect(office: Office) -> None:
    applied, stale, waits, forgotten, twice, held = ids(6)
    letters = {
        "applied": office.letter(applied, outcome="applied"),
        "stale": office.letter(stale, outcome="stale"),
        "waits": office.letter(waits, outcome="waiting"),
        "forgotten": office.letter(forgotten, outcome=None),
        "twice": office.letter(twice),
        "again": office.letter(twice),
        "cut": office.letter(uuid.uuid4(), cut=True),
        "no event": office.letter(None, topic=None, stream="refunds:0"),
        "held": office.letter(held, outcome=None),
    }
    office.wait(waits)
    office.wait(held)  # of which the ledger has forgotten that it waits
    wanted = {
        "done": {"count": 2, "numbers": [letters["applied"], letters["stale"]]},
        "waiting": {"count": 3, "numbers": [letters[name] for name in ("waits", "again", "held")]},
        "cut": {"count": 1, "numbers": [letters["cut"]]},
    }
    would = office.done("dead", "requeue", NAME, "--all", "--dry-run", "--json", code=3)
    assert json.loads(would)["would_be_requeued"] == 4, "what is only in the unlikely last case is not looked at"
    result = office.done("dead", "requeue", NAME, "--all", "--yes", "--json", code=3)
    assert json.loads(result) == {"selected": 9, "requeued": 3, "kept": wanted}
    assert office.waiting() == [waits, held, forgotten, twice, None]
    assert office.all("SELECT topic FROM public.message_failures WHERE event_id IS NULL") == [("refunds",)]
    outcomes = [office.outcome(event) for event in (applied, stale, waits, forgotten, twice, held)]
    assert outcomes == ["applied", "stale", "waiting", "waiting", "waiting", "waiting"]
    told = office.done("dead", "requeue", NAME, "--all", "--yes", code=3).splitlines()
    assert told[-4] == "0 requeued"
    assert f"1 stay ({letters['cut']}): only the beginning of them was kept" in "\n".join(told[-3:])


def test_what_others_hold_is_passed_over_and_done_the_next_time(office: Office) -> None:
    operator, consumer, free = ids(3)
    office.letter(operator)
    office.letter(consumer)
    office.letter(free)
    with (
        office.holding("SELECT FROM public.dead_letters WHERE event_id = %s FOR UPDATE", operator),
        office.holding("UPDATE public.processed_messages SET processed_at = now() WHERE event_id = %s", consumer),
    ):
        told = json.loads(office.done("dead", "requeue", NAME, "--all", "--yes", "--json", code=3))
        assert {why: found["count"] for why, found in told["kept"].items()} == {"gone": 1, "busy": 1}
        assert office.waiting() == [free]
    assert office.done("dead", "requeue", NAME, "--all", "--yes").splitlines()[-1] == "2 requeued"


def test_who_processes_a_forgotten_event_just_then_is_waited_for(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ledger row is being inserted: it is done by then, or its transaction hangs, and only this letter stays."""
    monkeypatch.setattr("consumer.dead_letters._PATIENCE_SECONDS", 0.2)
    events = sorted(ids(3))
    numbers = [office.letter(event, outcome=None) for event in events]
    claim = "INSERT INTO public.processed_messages (consumer, event_id) VALUES ('wallet', %s)"
    with office.holding(claim, events[1]):
        told = json.loads(office.done("dead", "requeue", NAME, "--all", "--yes", "--json", code=3))
        assert told["kept"] == {"busy": {"count": 1, "numbers": [numbers[1]]}}
        assert office.waiting() == [events[0], events[2]]
    monkeypatch.setattr("consumer.dead_letters._PATIENCE_SECONDS", 30.0)
    with psycopg.connect(office.url) as other, psycopg.connect(office.url, autocommit=True) as ours:
        other.execute(claim, (events[1],))
        operations, seen = Operations(NAME), list[Progress]()
        chosen = choose(ours, operations, Selection())
        thread = threading.Thread(target=lambda: seen.extend(requeue(ours, operations, chosen)))
        thread.start()
        eventually(lambda: office.all("SELECT FROM pg_locks WHERE NOT granted AND pid = %s", ours.info.backend_pid))
        other.commit()
        thread.join(60)
        assert seen[-1].kept == {Kept.DONE: 1}
    assert office.outcome(events[1]) == "applied"
    assert office.waiting() == [events[0], events[2]]


def test_operators_and_consumers_at_once_leave_each_event_in_one_place(office: Office) -> None:
    """Some requeue, one throws away, and a consumer kills what waits again; ids are not in the order of the letters."""
    for event in ids(600):
        office.letter(event)
    over, thrown, failures = threading.Event(), [0], list[BaseException]()

    def at_work(work: Callable[[psycopg.Connection[Any]], bool]) -> threading.Thread:
        def run() -> None:
            try:
                with psycopg.connect(office.url, autocommit=True) as connection:
                    while not over.is_set():
                        if work(connection):
                            return
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def kill(connection: psycopg.Connection[Any]) -> bool:
        connection.execute("""
            WITH due AS (
                SELECT id FROM public.message_failures ORDER BY next_attempt_at, id LIMIT 50 FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM public.message_failures f USING due WHERE f.id = due.id RETURNING f.*
            ), dead AS (
                UPDATE public.processed_messages p SET outcome = 'dead' FROM gone WHERE p.event_id = gone.event_id
            )
            INSERT INTO public.dead_letters (consumer, stream, stream_id, event_id, reason, error, fields)
            SELECT consumer, stream, stream_id, event_id, 'failed', '', fields FROM gone
        """)
        return False

    def throw_away(connection: psycopg.Connection[Any]) -> bool:
        chosen = choose(connection, Operations(NAME), Selection(limit=50))
        thrown[0] += sum(progress.done for progress in discard(connection, Operations(NAME), chosen))
        return thrown[0] > 100

    def again(connection: psycopg.Connection[Any]) -> bool:
        for progress in requeue(connection, Operations(NAME), choose(connection, Operations(NAME), Selection())):
            assert progress.kept.keys() <= {Kept.GONE, Kept.BUSY}
        return False

    thrower, *others = [at_work(work) for work in (throw_away, kill, again, again)]
    thrower.join(60)
    over.set()
    for thread in others:
        thread.join(60)
    assert failures == []
    places = Counter(
        office.all("""
        SELECT outcome, (SELECT count(*) FROM public.dead_letters d WHERE d.event_id = p.event_id),
               (SELECT count(*) FROM public.message_failures f WHERE f.event_id = p.event_id)
        FROM public.processed_messages p
        """)
    )
    assert places.pop(("dead", 0, 0)) == thrown[0] > 100
    assert places.total() == 600 - thrown[0]
    assert places.keys() <= {("dead", 1, 0), ("waiting", 0, 1)}


@pytest.mark.long
def test_a_requeue_that_is_killed_or_interrupted_is_run_again_for_the_rest(office: Office) -> None:
    office.db.execute(
        "WITH l AS (INSERT INTO public.dead_letters (consumer, stream, stream_id, event_id, reason, error, fields, topic) "
        "SELECT 'wallet', 't', i || '-0', gen_random_uuid(), 'failed', '', '{}', 't' FROM generate_series(1, 20000) i "
        "RETURNING event_id) "
        "INSERT INTO public.processed_messages (consumer, event_id, outcome) SELECT 'wallet', event_id, 'dead' FROM l"
    )

    def waiting() -> int:
        return int(office.all("SELECT count(*) FROM public.message_failures")[0][0])

    environment = os.environ | {"DATABASE_URL": office.url}
    command = [sys.executable, "-m", "consumer", "dead", "requeue", NAME, "--all", "--yes"]
    for end in ("kill", "terminate"):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        before = waiting()
        eventually(lambda: waiting() > before)  # noqa: B023 - called here
        getattr(process, end)()
        said, complained = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "; run it again for the rest" in complained
    assert "requeued" in said
    assert 0 < waiting() < 20_000
    places = "SELECT count(*) FROM public.processed_messages p WHERE outcome = 'waiting' AND event_id IN (SELECT event_id FROM public.message_failures)"
    assert office.all(places) == [(waiting(),)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert waiting() == 20_000
    assert office.numbers() == []


def test_past_a_gap_goes_the_first_version_of_each_key_alone(office: Office) -> None:
    """The others follow it; one that went before it would make it stale."""
    numbers = {
        (key, version): office.letter(uuid.uuid4(), reason="gap", key=key, version=version)
        for key, version in (("A", 6), ("A", 5), ("B", 9), ("B", 8), ("C", 3), (None, None))
    }
    office.wait(key="C", version=2, reason="gap")
    assert len(numbers) == 6
    assert (
        office.done("dead", "requeue", NAME, "--reason", "gap", "--past-gap", "--yes").splitlines()[-1] == "6 requeued"
    )
    order = office.all(
        "SELECT key, version, past_gap FROM public.message_failures WHERE reason = 'failed' ORDER BY next_attempt_at, id"
    )
    assert order == [
        ("A", 5, True), ("A", 6, False), ("B", 8, True), ("B", 9, False), ("C", 3, False), (None, None, True),
    ]  # fmt: skip


# --- discard and export ------------------------------------------------------------------------------------------------------


def test_a_discarded_letters_event_is_never_applied_unless_the_ledger_is_to_forget_it(office: Office) -> None:
    kept, forgotten, applied = ids(3)
    first, second = office.letter(kept, version=3), office.letter(forgotten)
    office.letter(applied, outcome="applied")
    office.wait(reason="gap", version=4)
    office.wait(reason="gap", version=5)
    office.wait(reason="gap", version=4, key="B")
    asked = office.run("dead", "discard", NAME, "--id", str(first))
    assert (asked.exit_code, "add --yes" in asked.stdout) == (1, True)
    dry = office.run("dead", "discard", NAME, "--id", str(first), "--dry-run")
    assert dry.stdout.splitlines()[-1] == "1 would be discarded"
    assert "2 later events of their keys wait for them" in dry.stderr
    assert first in office.numbers()
    assert office.done("dead", "discard", NAME, "--id", str(first), "--yes").splitlines()[-1] == "1 discarded"
    assert office.outcome(kept) == "dead"
    with office.holding("SELECT FROM public.processed_messages WHERE event_id = %s FOR UPDATE", forgotten):
        told = office.done("dead", "discard", NAME, "--id", str(second), "--forget", "--yes", "--json", code=3)
        assert json.loads(told)["kept"] == {"busy": {"count": 1, "numbers": [second]}}
    assert office.done("dead", "discard", NAME, "--all", "--forget", "--yes").splitlines()[-1] == "2 discarded"
    assert (office.outcome(forgotten), office.outcome(applied)) == (None, "applied")
    assert office.numbers() == []
    assert office.done("dead", "discard", NAME, "--all", "--yes") == "0 discarded\n"


def test_an_export_has_everything_in_a_file_for_its_owner(office: Office, tmp_path: Path) -> None:
    fields = [b"data", b"\xff\x00", b"subject", "ключ 😀".encode()]
    office.letter(uuid.uuid4(), fields=fields)
    office.letter(None, fields=[], reason="undecodable", cut=True)
    path = tmp_path / "letters.jsonl"
    assert office.run("dead", "export", NAME, "--output", str(path)).stderr == "2 dead letters exported\n"
    assert path.stat().st_mode & 0o777 == 0o600
    first, second = map(json.loads, path.read_text().splitlines())
    assert [base64.b64decode(field["base64"]) for field in first["fields"]] == fields[1::2]
    assert [field["name"] for field in first["fields"]] == ["data", "subject"]
    assert [field.get("text") for field in first["fields"]] == [None, "ключ 😀"]
    assert (first["reason"], first["error_class"], first["cut"]) == ("failed", "ValueError", False)
    assert (second["fields"], second["cut"]) == ([], True)
    assert office.done("dead", "export", NAME) == path.read_text()
    assert json.loads(office.done("dead", "export", NAME, "--reason", "undecodable"))["number"] == second["number"]
    refused = office.run("dead", "export", NAME, "--output", str(path))
    assert "File exists" in str(refused.exception)
    assert len(path.read_text().splitlines()) == 2
    office.letter(None, fields=[b"data", None])  # what nobody but a person can have made
    failed = office.run("dead", "export", NAME, "--output", str(tmp_path / "half.jsonl"))
    assert isinstance(failed.exception, TypeError)
    assert not (tmp_path / "half.jsonl").exists()
