"""A short soak, and that it complains about what is broken on purpose. Longer ones: ``make soak SECONDS=600``."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.faults.soak.run import Soak
from tests.faults.soak.servers import Fault

pytestmark = pytest.mark.long


class OnCluster(Soak):
    """What is special about a cluster, and a little of the rest."""

    def faults(self) -> dict[str, Fault]:
        all_of_them = super().faults()
        some = ("relays killed", "consumers killed", "flushes", "strangers' deletions", "poolers killed")
        return {name: all_of_them[name] for name in some} | self.servers.own_faults()


class Sabotaged(Soak):
    """One kind of process is replaced by a broken one, and few things go wrong."""

    whats: tuple[str, ...] = ()
    with_faults: tuple[str, ...] = ()

    def _broken(self) -> subprocess.Popen[bytes]:
        return self._start("tests.faults.sabotage", *self.whats)

    def faults(self) -> dict[str, Fault]:
        return {name: fault for name, fault in super().faults().items() if name in self.with_faults}


class BrokenConsumer(Sabotaged):
    _consumer = Sabotaged._broken


class BrokenRelay(Sabotaged):
    _relay = Sabotaged._broken


@pytest.mark.xdist_group("soak")  # each has eight processes
@pytest.mark.timeout(300)
def test_every_invariant_holds_under_every_fault() -> None:
    with Soak(seed=1) as soak:
        tally = soak.run(30, most_pause_seconds=0.1)
        assert tally["events"] > 1000
        assert [name for name in soak.faults() if not tally[name]] == [], "each fault came once at least"


@pytest.mark.xdist_group("soak")  # each has eight processes
@pytest.mark.timeout(300)
def test_every_invariant_holds_on_a_cluster() -> None:
    with OnCluster(seed=1, kind="cluster", pooled=True) as soak:
        tally = soak.run(15, most_pause_seconds=0.1)
        assert tally["events"] > 500
        assert [name for name in soak.faults() if not tally[name]] == [], "each fault came once at least"


LOSSES = ("flushes", "streams deleted")


@pytest.mark.parametrize(
    ("kind", "with_faults", "patience_seconds", "complaints"),
    [
        (BrokenConsumer, ("consumers paused",), 6, {"acknowledges-first": "events are in the ledger"}),
        (BrokenConsumer, LOSSES, 60, {"forgets-duplicates": "every event once: [1-9]"}),
        (
            BrokenConsumer, ("consumers paused",), 60,
            {
                "forgets-versions": "order of what was applied: [0-9]+ versions",
                "reads-then-writes": "money: [0-9]+ on the consumer's accounts",
            },
        ),
        (BrokenRelay, LOSSES, 6, {"polls-by-last-position": "events are in the ledger"}),
        (
            BrokenRelay, ("relays paused", "entries deleted unread"), 6,
            {
                "publishes-backwards": "order in the stream: [1-9]",
                "trusts-strangers": "events gone unacknowledged were never applied",
            },
        ),
    ],
)  # fmt: skip
def test_the_soak_complains_about_sabotage(
    kind: type[Sabotaged], with_faults: tuple[str, ...], patience_seconds: float, complaints: dict[str, str]
) -> None:
    broken = type(kind.__name__, (kind,), {"whats": tuple(complaints), "with_faults": with_faults})
    with broken(seed=5) as soak:
        soak.patience_seconds = patience_seconds  # what is lost never comes; what is late does
        with pytest.raises(AssertionError) as raised:
            soak.run(5, most_pause_seconds=0.5)
        for complaint in complaints.values():
            assert re.search(complaint, str(raised.value))
        assert [process.poll() for process in (*soak.relays, *soak.consumers)] == [None] * 4, "nobody just stopped"
        with soak.database.connect() as db:
            row = db.execute("SELECT count(*) FROM public.processed_messages").fetchone()
        assert row is not None
        assert row[0] > 100, "the broken ones did their work"
