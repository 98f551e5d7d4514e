"""A short soak, and that it complains about what is broken on purpose. Longer ones: ``make soak SECONDS=600``."""

from __future__ import annotations

import subprocess
from typing import Any

import psycopg
import pytest

from tests.faults.soak import Soak

pytestmark = pytest.mark.long


class Sabotaged(Soak):
    """One kind of process is replaced by a broken one."""

    what = ""

    def _broken(self) -> subprocess.Popen[bytes]:
        return self.bench.start(
            "tests.faults.sabotage", self.what, CONSUMER_CLAIM_SECONDS="1", CONSUMER_BLOCK_SECONDS="0.2",
            CONSUMER_CHECK_SECONDS="0.2", CONSUMER_BACKOFF_MAX_SECONDS="0.5", OUTBOX_BATCH_ROWS="50",
        )  # fmt: skip

    def faults(self) -> dict[str, Any]:
        return {name: fault for name, fault in super().faults().items() if name in ("flushes", "streams deleted")}


class BrokenConsumer(Sabotaged):
    def _consumer(self) -> subprocess.Popen[bytes]:
        return self._broken()


class BrokenRelay(Sabotaged):
    def _relay(self) -> subprocess.Popen[bytes]:
        return self._broken()


def test_every_invariant_holds_under_every_fault() -> None:
    with Soak(seed=1) as soak:
        tally = soak.run(30)
        assert tally["events"] > 1000
        assert [name for name in soak.faults() if not tally[name]] == [], "each fault came once at least"


@pytest.mark.parametrize(
    ("kind", "what", "complaint", "patience_seconds"),
    [
        (BrokenConsumer, "acknowledges-first", "events are in the ledger", 6),
        (BrokenConsumer, "forgets-duplicates", "every event once", 60),
        (BrokenRelay, "polls-by-last-position", "events are in the ledger", 6),
    ],
)
def test_the_soak_complains_about_sabotage(
    kind: type[Sabotaged], what: str, complaint: str, patience_seconds: float
) -> None:
    broken = type(kind.__name__, (kind,), {"what": what})
    with broken(seed=5) as soak:
        soak.patience_seconds = patience_seconds  # what is lost never comes; what is late does
        with pytest.raises(AssertionError, match=complaint):
            soak.run(8)
        assert [process.poll() for process in (*soak.relays, *soak.consumers)] == [None] * 4, "nobody just stopped"
        with psycopg.connect(soak.postgres.url) as db:
            row = db.execute("SELECT count(*) FROM public.processed_messages").fetchone()
        assert row is not None
        assert row[0] > 100, "the broken ones did their work"
