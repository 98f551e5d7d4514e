"""Celery. Results are not asked for, so there is no result backend."""

import os
import sys

from celery import Celery

from benchmarks.peers import wallet

app = Celery("jobs", broker=os.environ["REDIS_URL"])
app.conf.task_acks_late = bool(os.environ.get("ACKS_LATE"))
credit = app.task(ignore_result=True, name="credit")(wallet.credit)

if __name__ == "__main__":
    with app.producer_pool.acquire(block=True) as producer:
        for arguments in wallet.jobs(int(sys.argv[1])):
            credit.apply_async(arguments, producer=producer)
