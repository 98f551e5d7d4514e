"""Producers whose tasks are cancelled at any moment, and connections that nobody used for long."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import event as hooks
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, record_async
from tests.faults.chaos import Bench
from tests.faults.proxy import Proxy, port_of, through
from tests.integration.test_consumer import TABLES, TOPIC, wallet
from tests.waiting import eventually


@pytest.mark.long
def test_o_49_cancelled_producers(database_url: str, redis_url: str, prefix: str) -> None:
    """Every third of 300 tasks is cancelled at a random time, with replies that take 100 ms: what is committed is the business
    row and its event, or neither; no connection is lost, left in a transaction, or answers somebody else's question."""
    chance = random.Random(49)
    with Proxy(port_of(database_url)) as proxy, Bench(database_url, redis_url, prefix) as bench:
        bench.db.execute(TABLES + "; CREATE TABLE public.orders (event_id uuid PRIMARY KEY, n int)")
        proxy.delay_seconds = 0.1
        url = through(proxy, database_url).replace("postgresql://", "postgresql+psycopg://")
        committed: set[str] = set()

        async def order(engine: Any, n: int) -> None:
            async with AsyncSession(engine) as session:
                event = Event(topic=TOPIC, type="credited", key=f"k{n}", payload={"amount": "1.00"})
                await session.execute(text("INSERT INTO public.orders VALUES (:id, :n)"), {"id": event.id, "n": n})
                await record_async(session, event)
                assert (await session.execute(text("SELECT :n"), {"n": str(n)})).scalar_one() == str(n)
                await session.commit()
            committed.add(str(event.id))

        async def main() -> None:
            engine = create_async_engine(url, pool_size=20, max_overflow=0)
            checked_out = []
            hooks.listen(engine.sync_engine, "checkout", lambda *_: checked_out.append(1))
            for start in range(0, 300, 60):
                tasks = [asyncio.create_task(order(engine, n)) for n in range(start, start + 60)]

                async def cancel(task: asyncio.Task[None]) -> None:
                    await asyncio.sleep(chance.uniform(0, 1.5))
                    task.cancel()

                cancelling = [asyncio.create_task(cancel(task)) for task in tasks[::3]]
                found = await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*cancelling)
                assert {type(error) for error in found} <= {type(None), asyncio.CancelledError}
            proxy.delay_seconds = 0.0
            await asyncio.gather(*(order(engine, n) for n in range(300, 320)))  # every connection is good
            assert engine.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            assert len(checked_out) >= 320 - 100
            await engine.dispose()

        asyncio.run(main())
        open_ones = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%' AND datname = current_database()"
        eventually(lambda: bench.one(open_ones) == 0)
        recorded = {str(row[0]) for row in bench.db.execute("SELECT event_id FROM public.outbox")}
        assert recorded == {str(row[0]) for row in bench.db.execute("SELECT event_id FROM public.orders")}
        assert committed <= recorded
        assert 200 <= len(committed) < 320
        relay = bench.relay()
        settings = ConsumerSettings(
            database_url=database_url, redis_url=redis_url, key_prefix=prefix, block_seconds=0.05  # type: ignore[arg-type]
        )  # fmt: skip
        worker = Worker(wallet(), settings)

        def applied() -> bool:
            relay.run_once()
            worker.run_once()
            return bench.one("SELECT count(*) FROM public.processed_messages") == len(recorded)

        eventually(applied)
        worker.close()
        assert bench.one("SELECT count(*), count(DISTINCT event_id) FROM public.effects") == (len(recorded),) * 2


def test_o_81_no_pool_has_threads_that_can_die(database_url: str, redis_url: str, prefix: str) -> None:
    """We do not use psycopg-pool; and connections that went away while nobody used them are replaced."""
    program = "import sys, outbox.cli, consumer.cli, consumer.testing; sys.exit('psycopg_pool' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    with Bench(database_url, redis_url, prefix) as bench:
        bench.db.execute(TABLES)
        relay = bench.relay()
        settings = ConsumerSettings(
            database_url=database_url, redis_url=redis_url, key_prefix=prefix, block_seconds=0.05  # type: ignore[arg-type]
        )  # fmt: skip
        worker = Worker(wallet(), settings)
        for number in (5, 10):  # F5, and again after all of them are gone
            bench.write(5, payload={"amount": "50.00"})

            def applied(number: int = number) -> bool:
                for run_once in (relay.run_once, worker.run_once):
                    with suppress(Exception):
                        run_once()
                return bench.one("SELECT count(*) FROM public.effects") == number

            eventually(applied)
            with psycopg.connect(database_url, autocommit=True) as outside:
                outside.execute("""
                    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name ~ '^(consumer|outbox)'
                """)
        worker.close()
        assert bench.one("SELECT balance FROM public.accounts") == 500
