"""Everything that events can do wrong, at once and under load: see `benchmarks.poison`, which checks what became of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.poison import Load, turn
from outbox import schema
from outbox.embedded import PostgresServer, ValkeyServer
from tests.waiting import lasting

#: `python -m benchmarks poison` has the figure. This is what even a busy machine shows, and none where a process is long in coming.
SHARE = 0.3
TRIES = 3


@pytest.mark.long
def test_o_62_a_load_with_poison_in_it(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer]
) -> None:
    """1 % fail for ever, 0.1 % end their process, 5 % come twice, 5 % late; processes are killed -9 meanwhile. Each good event is
    applied once, each bad one put aside once, and the good ones hardly wait for it."""
    postgres, valkey = own_postgres().url, own_valkey().url
    schema.upgrade(postgres, "consumer")
    events, share = int(lasting(6000, 20_000)), 0.0
    for _ in range(TRIES):
        without, with_poison = Load(events, False), Load(events, True, raw=True, kills_seconds=1.0)
        plain, _ = turn(postgres, valkey, without)
        seconds, counts = turn(postgres, valkey, with_poison)
        assert counts["put_aside"] > events / 200
        assert counts["killed"], "at random, besides what ends its process"
        assert counts["ended"] >= 5 * events / 2000
        good = len(with_poison.good) + len(with_poison.maybe)
        share = max(share, good / seconds / ((len(without.good) + len(without.maybe)) / plain))
        if share >= SHARE:
            break
    assert share >= SHARE
