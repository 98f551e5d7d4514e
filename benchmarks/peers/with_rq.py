"""RQ. Its worker classes are here, so that a worker imports the job before it forks, as its performance notes advise."""

import os
import sys

from redis import Redis
from rq import Queue, SimpleWorker, Worker

from benchmarks.peers.wallet import credit, jobs

__all__ = ["SimpleWorker", "Worker"]

if __name__ == "__main__":
    queue = Queue("jobs", connection=Redis.from_url(os.environ["REDIS_URL"]))
    waiting = [Queue.prepare_data(credit, arguments) for arguments in jobs(int(sys.argv[1]))]
    for start in range(0, len(waiting), 500):
        queue.enqueue_many(waiting[start : start + 500])
