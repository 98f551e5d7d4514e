"""Ours: a queue, into which jobs are put without an outbox, as the others' are."""

import os
import sys
from typing import Any

import psycopg

from benchmarks.peers import wallet
from consumer import Consumer, Envelope
from outbox import Job
from outbox.jobs import enqueue
from outbox.transport import ListTransport

jobs = Consumer("jobs", queues=["jobs"])


@jobs.job("credit", raw=True)
def credit(job: Envelope, connection: psycopg.Connection[Any]) -> None:
    connection.execute(wallet.CREDIT, (job.payload["amount_halala"], job.key))


if __name__ == "__main__":
    transport = ListTransport.from_url(os.environ["REDIS_URL"])
    made = [
        Job(queue="jobs", type="credit", key=key, payload={"amount_halala": amount, "note": note})
        for key, amount, note in wallet.jobs(int(sys.argv[1]))
    ]
    for start in range(0, len(made), 1000):
        enqueue(transport, *made[start : start + 1000])
    transport.close()
