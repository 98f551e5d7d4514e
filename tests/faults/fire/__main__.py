"""The program; see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import redis

from outbox import schema as schemas
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from tests.faults import fire
from tests.faults.cluster import Cluster
from tests.faults.fire.run import Fire


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fire", description=fire.__doc__)
    parser.add_argument("seconds", nargs="?", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the kills' order")
    parser.add_argument("--server", default="valkey9", help="a name of outbox.embedded.redis_servers()")
    parser.add_argument("--cluster", action="store_true", help="of three")
    parser.add_argument("--flush", action="store_true", help="Redis is emptied, too; all producers record then")
    parser.add_argument("--log", type=Path, help="file for what the processes say")
    given = parser.parse_args()
    with ExitStack() as stack:
        database = stack.enter_context(PostgresServer(settings={"fsync": "off"}))
        for branch in ("outbox", "consumer"):
            schemas.upgrade(database.url, branch)  # type: ignore[arg-type]
        program = redis_servers()[given.server]
        if given.cluster:
            cluster = stack.enter_context(Cluster(replicas=False, program=program))
            url, urls = cluster.url, [node.url for node in cluster.nodes]
        else:
            url = stack.enter_context(ValkeyServer(program=program)).url
            urls = [url]
        clients = [stack.enter_context(redis.Redis.from_url(each)) for each in urls]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = given.log.resolve() if given.log else None
        fired = stack.enter_context(
            Fire(database.url, url, clients, folder, flush=given.flush, seed=given.seed, log=log)
        )
        violations = ""
        try:
            fired.run(given.seconds)
        except AssertionError as error:
            violations = str(error)
    print(f"seed {given.seed}, {given.server}{' cluster' if given.cluster else ''}")
    for name, number in fired.tally.most_common():
        print(f"{number:12,} {name}")
    print(violations or "every accepted job is done, each effect once, none before its time, nothing left over")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
