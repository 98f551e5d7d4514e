"""Addresses of Redis and Valkey: one server, the nodes of a cluster, or the sentinels that watch a service."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

Host = tuple[str, int]

_SEVERAL: Final = re.compile(r"(rediss?)\+(cluster|sentinel)://([^/?#]*)([^?#]*)(\?[^#]*)?")
_PORTS: Final = {"cluster": 6379, "sentinel": 26379}
#: What the address may say about the connection to sentinels, where that is not as to the servers.
_TO_SENTINELS: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """An address in its parts.

    Attributes:
        hosts: some nodes of the cluster, or the sentinels; empty for one server.
        service: the name under which sentinels know the servers.
        options: of every connection, as redis-py takes them (for one server, where it is among them).
        sentinel_options: the same for connections to sentinels.
    """

    kind: Literal["server", "cluster", "sentinel"]
    options: dict[str, Any]
    hosts: tuple[Host, ...] = ()
    service: str = ""
    sentinel_options: dict[str, Any] | None = None

    @classmethod
    @lru_cache(maxsize=8)  # redis-py takes milliseconds for what `_checked` asks, and processes are replaced in a hurry
    def parse(cls, url: str) -> RedisAddress:
        """The address that a URL with ``redis``, not ``valkey``, means. Not to be changed.

        Raises:
            ValueError: it is malformed. Says what is wrong, and nothing of the address, which may hold a password.
        """
        from redis.connection import parse_url

        found = _SEVERAL.fullmatch(url)
        scheme, kind, authority, path, query = found.groups(default="") if found else ("", "", "", "", "")
        credentials, at, hosts = authority.rpartition("@")
        if "@" in credentials or "," in credentials:  # one login for all, with %40 and %2C in it
            raise ValueError(_FORMS)
        try:
            one = f"{scheme}://{credentials}{at}host{query}" if found else url
            options = parse_url(one)  # type: ignore[no-untyped-call]  # redis-py has no types for it
        except ValueError:
            raise ValueError(_FORMS) from None
        if not found:
            return cls("server", options)._checked()
        del options["host"]
        members = tuple(_member(host, _PORTS[kind]) for host in hosts.split(","))
        if kind == "cluster":
            if path not in ("", "/", "/0") or options.pop("db", 0):
                raise ValueError("a cluster has no databases but 0 (redis+cluster://host:port,host:port)")
            return cls("cluster", options, members)._checked()
        if not (named := re.fullmatch(r"/([^/]+)(?:/(\d*))?", path)):
            raise ValueError("does not name the service, or not well (redis+sentinel://host:port,host:port/service/0)")
        options.setdefault("db", int(named[2] or 0))
        login = {name.removeprefix("sentinel_"): options.pop(name) for name in _TO_SENTINELS if name in options}
        tls = {name: value for name, value in options.items() if name.startswith("ssl_") or name == "connection_class"}
        return cls("sentinel", options, members, unquote(named[1]), login | tls)._checked()

    def _checked(self) -> RedisAddress:
        """See that redis-py takes the options, which it otherwise says only at the first connection."""
        from redis.connection import ConnectionPool

        for options in (self.options, self.sentinel_options or {}):
            try:
                pool = ConnectionPool(**options)
                pool.connection_class(**pool.connection_kwargs)
            except Exception:  # of many classes, by version
                raise ValueError("has an option that redis-py does not take, or a value that is none of it") from None
        return self


_FORMS = "is not a Redis address (redis://host:port/0; rediss://, unix://, redis+cluster://, redis+sentinel://)"


def _member(text: str, port: int) -> Host:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or port
    except ValueError:
        host = None
    if not host or "@" in text:
        raise ValueError(_FORMS)
    return host, port
