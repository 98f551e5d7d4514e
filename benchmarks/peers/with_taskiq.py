"""taskiq, with the broker of taskiq-redis that acknowledges. Its jobs are coroutines, so a process has a pool of connections."""

import asyncio
import os
import sys

from psycopg_pool import AsyncConnectionPool
from taskiq import TaskiqEvents, TaskiqState
from taskiq_redis import RedisStreamBroker

from benchmarks.peers import wallet

broker = RedisStreamBroker(os.environ["REDIS_URL"])
pool = AsyncConnectionPool(os.environ["DATABASE_URL"], min_size=8, max_size=8, kwargs={"autocommit": True}, open=False)


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def _open(_state: TaskiqState) -> None:
    await pool.open()


@broker.task(task_name="credit")
async def credit(wallet_id: str, amount_halala: int, note: str) -> None:
    async with pool.connection() as connection:
        await connection.execute(wallet.CREDIT, (amount_halala, wallet_id))


async def _enqueue(count: int) -> None:
    await broker.startup()
    for arguments in wallet.jobs(count):
        await credit.kiq(*arguments)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(_enqueue(int(sys.argv[1])))
