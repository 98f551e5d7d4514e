"""What NOT to do: consumers without a ledger, written plainly with redis-py and psycopg. Each is wrong in its own way.

``python -m examples.wallet.naive simple|dedup-valkey|natural c1|c2`` reads the stream until SIGTERM. The process named
c1 dies half-way, by os._exit, as a process dies that is killed or loses its machine; c2 takes over what c1 left.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import redis

TAKE_OVER_MS = 1000  #: how long a delivery may stay with one process before another takes it over
KILLED = 137  #: exit status of a process that died of SIGKILL, as a shell shows it

Die = Callable[[], None]
Handler = Callable[[str, Any, psycopg.Connection[Any], "redis.Redis", Die], None]


def simple(event_id: str, payment: Any, database: psycopg.Connection[Any], valkey: redis.Redis, die: Die) -> None:
    """WRONG: adds whatever comes. What comes twice is added twice."""
    with database.transaction():
        database.execute(
            "UPDATE wallet SET balance_halala = balance_halala + %s WHERE id = %s",
            (payment["amount_halala"], payment["wallet"]),
        )
    if payment["number"] == 3:
        die()  # committed, not acknowledged: it will come again


def dedup_valkey(event_id: str, payment: Any, database: psycopg.Connection[Any], valkey: redis.Redis, die: Die) -> None:
    """WRONG: marks the event in Valkey, then adds. Two systems, and a gap between them."""
    if not valkey.set(f"{_prefix()}seen:{event_id}", 1, nx=True, ex=86_400):
        return  # seen before; but was it done?
    if payment["number"] == 3:
        die()  # marked, not added: nobody will ever add it
    with database.transaction():
        database.execute(
            "UPDATE wallet SET balance_halala = balance_halala + %s WHERE id = %s",
            (payment["amount_halala"], payment["wallet"]),
        )


def natural(event_id: str, order: Any, database: psycopg.Connection[Any], valkey: redis.Redis, die: Die) -> None:
    """HALF RIGHT: the first statement does no harm when it is repeated; the second one does."""
    with database.transaction():
        shipped = database.execute(
            "UPDATE orders SET status = 'shipped' WHERE id = %s AND status = 'paid'", (order["order"],)
        )
        stock = database.execute(
            "UPDATE stock SET quantity = quantity - 1 WHERE item = %s RETURNING quantity", (order["item"],)
        ).fetchone()
    assert stock is not None
    print(json.dumps({"shipped_rows": shipped.rowcount, "stock": stock[0]}), flush=True)
    die()  # committed, not acknowledged


#: The tables of `natural`.
ORDERS = """
CREATE TABLE orders (id text PRIMARY KEY, status text NOT NULL);
CREATE TABLE stock (item text PRIMARY KEY, quantity integer NOT NULL);
INSERT INTO orders VALUES ('o1', 'paid');
INSERT INTO stock VALUES ('book', 10);
"""

HANDLERS: dict[str, Handler] = {"simple": simple, "dedup-valkey": dedup_valkey, "natural": natural}


def consume(group: str, name: str) -> None:
    """Handle, then acknowledge: first what a dead process left, then what is new."""
    valkey = redis.Redis.from_url(os.environ["REDIS_URL"])
    stream = _prefix() + "{payments}"
    with suppress(redis.ResponseError):  # the group is there already
        valkey.xgroup_create(stream, group, id="0", mkstream=True)

    def die() -> None:
        if name == "c1":
            os._exit(KILLED)

    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as database:
        for receipt, fields in _deliveries(valkey, stream, group, name):
            HANDLERS[group](fields[b"id"].decode(), json.loads(fields[b"data"]), database, valkey, die)
            valkey.xack(stream, group, receipt)


def _deliveries(valkey: Any, stream: str, group: str, name: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    while True:
        left = valkey.xautoclaim(stream, group, name, min_idle_time=TAKE_OVER_MS, count=1)[1]
        if left:
            yield left[0]
            continue
        for _, entries in valkey.xreadgroup(group, name, {stream: ">"}, count=1, block=100):
            yield from entries


def _prefix() -> str:
    return os.environ["OUTBOX_KEY_PREFIX"]


if __name__ == "__main__":
    consume(sys.argv[1], sys.argv[2])
