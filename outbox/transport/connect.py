"""Connections by address: to a server, a cluster, or whichever server sentinels name as the primary."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from outbox.address import RedisAddress
from outbox.transport.cluster import Cluster
from outbox.transport.servers import Server


def connect(url: str, *, timeout_seconds: float, block_seconds: float = 0.0) -> Server | Cluster:
    """The servers at an address; nothing is sent yet. Each waits `timeout_seconds` beyond `block_seconds` for a reply.

    What the address itself says about connections goes before. Commands are not sent again by the client: its users look
    first what has become of them.

    Raises:
        ValueError: the address is malformed.
    """
    address = RedisAddress.parse(url)
    ours: dict[str, Any] = {"socket_timeout": timeout_seconds + block_seconds, "retry": Retry(NoBackoff(), 0)}
    if "path" not in address.options:
        ours |= {"socket_connect_timeout": timeout_seconds, "socket_keepalive": True}
    options = ours | address.options
    if address.kind == "cluster":
        return Cluster(address.hosts, options)
    if address.kind == "server":
        return Server(redis.Redis.from_pool(redis.ConnectionPool(**options)))
    to_sentinels = ours | {"socket_timeout": timeout_seconds} | (address.sentinel_options or {})
    for some in (options, to_sentinels):  # Sentinel has classes of its own, and this name for them
        some["ssl"] = some.pop("connection_class", None) is not None
    sentinel = Sentinel(address.hosts, sentinel_kwargs=to_sentinels, **options)  # type: ignore[no-untyped-call]
    sentinel.sentinels = [_Sentinel(host=host, port=port, **to_sentinels) for host, port in address.hosts]
    primary: redis.Redis = sentinel.master_for(address.service)  # type: ignore[no-untyped-call]
    return Server(primary)


class _Sentinel(redis.Redis):
    """One that errors may name: some versions of redis-py show all options of a connection there, its password among them."""

    def __repr__(self) -> str:
        options = self.connection_pool.connection_kwargs
        return f"sentinel {options['host']}:{options['port']}"
