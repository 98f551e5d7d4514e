"""Whatever a consumer is made of, another one takes over what it had when it was killed (case O-40)."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from outbox.embedded import ValkeyServer
from tests.faults.cluster import Cluster
from tests.faults.sentinels import Watched
from tests.faults.test_consumer_faults import QueueSite, Site
from tests.faults.test_width import children, effects, send
from tests.waiting import eventually

KINDS = {
    "raw": """
import time
@register("credited", raw=True)
def credit(given, connection):
    for event in given if isinstance(given, list) else [given]:
        started(event)
        while not Path("go").exists():
            time.sleep(0.01)
        connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
""",
    "sync": """
import time
@register("credited")
def credit(given, session):
    for event in given if isinstance(given, list) else [given]:
        started(event)
        while not Path("go").exists():
            time.sleep(0.01)
        session.execute(EFFECT, {"id": event.id})
""",
    "async": """
import asyncio
@register("credited")
async def credit(given, session):
    for event in given if isinstance(given, list) else [given]:
        started(event)
        while not Path("go").exists():
            await asyncio.sleep(0.01)
        await session.execute(EFFECT, {"id": event.id})
""",
}
HEAD = """
import os
from pathlib import Path
from sqlalchemy import text
from consumer import Consumer, Order

EFFECT = text("INSERT INTO public.effects VALUES (:id, 1)")
WAY = os.environ["WAY"]
wallet = Consumer("ledger", **{"queues" if WAY == "jobs" else "topics": ["accounts"]})
register = {"batch": wallet.on_batch, "jobs": wallet.job, "single": wallet.on}[WAY]

def started(event):
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(f"{event.id} {os.getpid()}\\n")
"""
WIDTHS = {"alone": (), "threads": ("--threads", "2"), "processes": ("--processes", "2")}
MODES = [
    *itertools.product(("sync", "async"), WIDTHS, ("single",), ("one server",)),
    *itertools.product(("sync", "async"), ("alone",), ("batch",), ("one server",)),
    ("sync", "processes", "batch", "one server"),
    ("raw", "alone", "single", "one server"),
    ("raw", "threads", "batch", "one server"),
    *itertools.product(("sync",), WIDTHS, ("jobs",), ("one server",)),
    *itertools.product(("async", "raw"), ("alone",), ("jobs",), ("one server",)),
    *itertools.product(("sync",), ("alone",), ("single",), ("cluster", "sentinel")),
    ("async", "threads", "batch", "cluster"),
]


@pytest.fixture
def places(database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:

        def place(where: str, kind: type[Site] = Site) -> Site:
            if where == "one server":
                return kind(database_url, own_valkey().url, tmp_path, stack)
            there = stack.enter_context(Cluster(3, replicas=False) if where == "cluster" else Watched())
            site = Site(
                database_url, there.nodes[0].url if isinstance(there, Cluster) else there.primary().url, tmp_path, stack
            )
            site.redis_url = there.url
            if isinstance(there, Cluster):
                site.redis = stack.enter_context(there.raw())
            return site

        yield place


@pytest.mark.long
@pytest.mark.parametrize(("kind", "width", "way", "where"), MODES, ids=["-".join(mode) for mode in MODES])
def test_o_40_what_a_killed_one_had_is_taken_over(
    places: Callable[..., Site], kind: str, width: str, way: str, where: str
) -> None:
    site = places(where, QueueSite if way == "jobs" else Site)
    (site.folder / "shop.py").write_text(HEAD + KINDS[kind])
    ids = send(site, *["credited"] * 5)
    options = ("consumer", "run", "shop:wallet", *WIDTHS[width])
    first = site.run(*options, WAY=way)
    # Of jobs, of which nothing is known yet, each worker takes one.
    held = 5 if way != "jobs" else 1 if width == "alone" else 2
    eventually(lambda: site.pending() == held and site.starts.read_text(), 60, site.output()[-2000:])
    pids = [first.pid, *children(first)]
    for pid in pids:  # the parent first: it would know what its children died of
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    first.wait()
    assert (effects(site), site.pending()) == (Counter(), held)
    (site.folder / "go").touch()
    site.run(*options, WAY=way)
    eventually(lambda: effects(site) == Counter(ids), 60, site.output()[-2000:])
    eventually(lambda: site.pending() == 0)
