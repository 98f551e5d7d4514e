"""The thread that renews claims: when it is there, what it survives, what it says."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from consumer.claims import Claims
from outbox.errors import TransportUnavailable
from outbox.transport import Delivery, MemoryTransport
from tests.waiting import eventually

GROUP, NAME = "ledger", "me"


class Redis(MemoryTransport):
    """One that may be away, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: Exception | None = None
        self.asked = 0

    def renew(self, group: str, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        self.asked += 1
        if self.failure:
            raise self.failure
        return super().renew(group, consumer, deliveries)


class Process:
    """What holds three deliveries, and its claims, which are renewed every few milliseconds."""

    def __init__(self) -> None:
        self.transport = Redis()
        for _ in range(3):
            self.transport.add("a", {b"data": b""})
        self.transport.open(GROUP, ["a"])
        self.held = self.transport.read(GROUP, NAME, ["a"], 10, 0)
        self.claims = Claims(self.transport, GROUP, NAME, 0.03, lambda: self.held)

    def renewed(self) -> bool:
        """Whether what is held was renewed after this was called."""
        before = self.transport.asked
        eventually(lambda: self.transport.asked > before + 1)
        return True


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.claims.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "renew-claims"]


def test_the_thread_is_there_only_while_something_is_held(process: Process) -> None:
    assert threads() == []
    for _ in range(3):
        process.claims.keep()
        process.claims.keep()
        assert process.renewed()
        (thread,) = threads()
        assert thread.daemon, "it keeps no process alive"
        held, process.held = process.held, []
        eventually(lambda: threads() == [])
        process.held = held
    process.claims.keep()
    process.claims.close()
    eventually(lambda: threads() == [])


def test_it_goes_on_after_an_outage(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.claims.keep()
    process.transport.failure = TransportUnavailable("away", "ConnectionError")
    assert process.renewed()
    process.transport.failure = RuntimeError("whatever it may be")
    assert process.renewed()
    process.transport.hand_back(GROUP, NAME, process.held)  # as old as can be
    process.transport.failure = None
    assert process.renewed()
    assert process.transport.claim(GROUP, "other", "a", 3600, 10).deliveries == []
    assert "lost claim" not in caplog.text


def test_what_others_took_over_is_said_once_and_left_to_them(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[int]:
        return [record.__dict__["lost"] for record in caplog.records if record.__dict__.get("action") == "claim_lost"]

    caplog.set_level(logging.WARNING)
    process.transport.ack(GROUP, process.held[2:])
    process.held = process.held[:2]  # acknowledged is not lost
    process.transport.claim(GROUP, "other", "a", 0, 1)
    process.claims.keep()
    eventually(told)
    assert process.renewed()
    assert told() == [1]
    assert [d.receipt for d in process.transport.renew(GROUP, "other", process.held)] == [process.held[0].receipt]
    process.transport.claim(GROUP, "other", "a", 0, 10)
    eventually(lambda: told() == [1, 1])
    process.transport.claim(GROUP, NAME, "a", 0, 1)  # ours once more
    assert process.renewed()
    process.transport.claim(GROUP, "other", "a", 0, 1)
    eventually(lambda: told() == [1, 1, 1])


def test_what_is_handed_back_is_not_renewed(process: Process) -> None:
    process.claims.keep()
    assert process.renewed()
    back, process.held = process.held, process.held[:1]
    process.claims.hand_back(back[1:])
    assert process.renewed()
    assert process.transport.claim(GROUP, "other", "a", 3600, 10).deliveries != []
    assert process.transport.renew(GROUP, NAME, back) == back[:1]


def test_a_child_of_a_fork_has_no_such_thread(process: Process) -> None:
    process.claims.keep()
    assert process.renewed()
    child = os.fork()
    if not child:
        os._exit(0 if threads() == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.renewed()
