"""dramatiq."""

import os
import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers import wallet

dramatiq.set_broker(RedisBroker(url=os.environ["REDIS_URL"]))
credit = dramatiq.actor(wallet.credit)

if __name__ == "__main__":
    for arguments in wallet.jobs(int(sys.argv[1])):
        credit.send(*arguments)
