"""The job: one UPDATE of a wallet, and its commit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import psycopg

WALLETS, AMOUNT = 1000, 5000
#: The database says when the first and the last job were done, so that it does not matter how often somebody looks.
CREDIT = """
    UPDATE wallet
    SET balance = balance + %s, first_at = coalesce(first_at, clock_timestamp()), last_at = clock_timestamp()
    WHERE id = %s
"""
_NOTE = "x" * 160
_kept = threading.local()


def jobs(count: int) -> Iterator[tuple[str, int, str]]:
    """Arguments of so many jobs, about 200 bytes each; the wallets take turns."""
    for number in range(count):
        yield f"wallet-{number % WALLETS}", AMOUNT, _NOTE


def credit(wallet: str, amount_halala: int, note: str) -> None:
    """The peers' way: a connection that the thread keeps, in autocommit, so that statement and commit are one round trip."""
    if not hasattr(_kept, "connection"):
        _kept.connection = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
    _kept.connection.execute(CREDIT, (amount_halala, wallet))
