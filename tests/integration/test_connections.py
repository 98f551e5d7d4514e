"""Unix sockets, TLS, and users with few rights: from the outbox to the effect, on real servers."""

from __future__ import annotations

import re
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from outbox import doctor
from outbox.embedded import EmbeddedServerError, ValkeyServer, redis_servers
from outbox.envelope import Run, uuid7, wire
from outbox.errors import TransportUnavailable
from outbox.transport import Marker, Part, Router, Settled, StreamTransport
from pytest_outbox import missing
from tests.faults.chaos import TOPIC, Bench, drain
from tests.faults.cluster import Cluster
from tests.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs/operations/cluster.md"


def everything_arrives(database_url: str, redis_url: str, client: Any) -> None:
    """Relay and consumer at this address do their work, and doctor sees nothing that keeps them from it."""
    with Bench(database_url, redis_url, client=client) as bench:
        ids = bench.write(20)
        relay = bench.relay(trim_seconds=0.001)
        assert drain(relay).published == 20
        assert bench.consume() == Counter(dict.fromkeys(ids, 1))
        assert [
            found for found in doctor.examine(bench.settings()) if "redis" in found.code and found.level == "error"
        ] == []


# --- Unix sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["unix", "unix with a database"])
def test_a_unix_socket(database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "valkey.sock"
    server = own_valkey(settings={"unixsocket": str(path)})
    url = f"unix://{path}" if scheme == "unix" else f"unix://{path}?db=3"
    everything_arrives(database_url, url, redis.Redis.from_url(url))
    with redis.Redis(port=server.port, db=0 if scheme == "unix" else 3) as there:
        assert there.exists(f"{{{TOPIC}}}")
    server.kill()
    with closing(StreamTransport.from_url(url)) as transport, pytest.raises(TransportUnavailable):
        transport.markers([TOPIC])


# --- sentinels -----------------------------------------------------------------------------------------------------------


def test_o_95_sentinels_that_do_not_answer_are_named_without_their_password() -> None:
    """redis-py 6 and 7.0 show every option of a connection in that error, and later ones all but the password."""
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/main?sentinel_password=S3cr3t"
    transport = StreamTransport.from_url(url)
    with (
        closing(transport),
        pytest.raises(TransportUnavailable, match=r"'main' : sentinel 127\.0\.0\.1:1 - .*:2 - ") as found,
    ):
        transport.markers([TOPIC])
    assert "password" not in str(found.value)
    assert "S3cr3t" not in str(found.value)


# --- TLS -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, ``ca`` and ``other``; ``server`` (127.0.0.1) and ``client``, signed by the first."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    try:
        for authority in ("ca", "other"):
            openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.crt")  # fmt: skip
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        for name in ("server", "client"):
            openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
            openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                    "-days", "2", "-extfile", "names", "-out", f"{name}.crt")  # fmt: skip
    except FileNotFoundError:
        missing("no openssl here")
    return folder


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[Callable[..., str]]:
    """Starts a server that asks for client certificates; returns its address without options."""
    started: list[ValkeyServer] = []

    def start() -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for program in redis_servers().values():
            settings = {
                "tls-port": str(port), "tls-cert-file": str(certificates / "server.crt"), "tls-auth-clients": "yes",
                "tls-key-file": str(certificates / "server.key"), "tls-ca-cert-file": str(certificates / "ca.crt"),
            }  # fmt: skip
            try:
                started.append(ValkeyServer(program=program, settings=settings).start())
            except EmbeddedServerError:
                continue
            return f"rediss://127.0.0.1:{port}/0"
        return missing("no server here is built with TLS (apt-get install redis-server)")

    yield start
    for server in started:
        server.close()


def test_tls(database_url: str, tls_server: Callable[[], str], certificates: Path) -> None:
    address, at = tls_server(), f"{certificates}/"
    ours = f"ssl_certfile={at}client.crt&ssl_keyfile={at}client.key"
    good = f"{address}?ssl_ca_certs={at}ca.crt&{ours}"
    everything_arrives(database_url, good, redis.Redis.from_url(good))
    for url, what in {
        f"{address}?ssl_ca_certs={at}other.crt&{ours}": "certificate verify failed",
        f"{address}?{ours}": "certificate verify failed",
        f"{address}?ssl_ca_certs={at}nowhere.crt&{ours}": "No such file|unknown error|certificate",
        f"{address}?ssl_ca_certs={at}ca.crt": "certificate required|reset|closed|alert|EOF",
        address.replace("rediss", "redis"): "closed|reset|EOF|Error",
        good.replace("127.0.0.1", "127.0.0.2"): "doesn't match|not valid for|IP address mismatch|refused",
    }.items():
        with (
            closing(StreamTransport.from_url(url, timeout_seconds=2)) as there,
            pytest.raises(TransportUnavailable, match=what),
        ):
            there.markers(["a"])


# --- users with few rights ----------------------------------------------------------------------------------------------------


def rules(user: str, *, cluster: bool) -> list[str]:
    """What the page says that the user needs, for topic `accounts`."""
    found = re.findall(rf"^ACL SETUSER {user} (.*)$", PAGE.read_text(), re.MULTILINE)
    words = [
        word
        for line in found
        for word in line.split()
        if cluster or word not in ("+cluster|slots", "+cluster|info", "+asking")
    ]
    return ["reset", *[{"~{payments*": f"~{{{TOPIC}*", ">…": ">pw"}.get(word, word) for word in words]]


def as_users(servers: list[Any], *, cluster: bool) -> None:
    for server in servers:
        for user in ("relay", "consumer"):
            server.execute_command("ACL", "SETUSER", user, *rules(user, cluster=cluster))


def with_user(url: str, user: str) -> str:
    return url.replace("://", f"://{user}:pw@")


def the_rights_suffice(database_url: str, url: str, client: Any, lanes: int) -> None:
    with Bench(database_url, with_user(url, "relay"), client=client) as bench:
        ids = [event for key in range(20) for event in bench.write(1, key=f"k{key}")]
        relay = bench.relay(lanes={TOPIC: lanes}, trim_seconds=0.001)
        assert drain(relay).published == 20
        rights = [
            found for found in doctor.examine(bench.settings(lanes={TOPIC: lanes})) if found.code == "redis-rights"
        ]
        assert [found.level for found in rights] == ["ok"], rights
        consumer = bench.start(
            "consumer", "run", "tests.faults.chaos:ledger", REDIS_URL=with_user(url, "consumer"),
            OUTBOX_LANES=f"{TOPIC}={lanes}", CONSUMER_BLOCK_SECONDS="0.2",
        )  # fmt: skip
        bench.make_tables()
        eventually(lambda: bench.effects() == Counter(dict.fromkeys(ids, 1)))
        consumer.terminate()
        assert consumer.wait(20) == 0
        drain(relay)
        streams = [TOPIC] if lanes == 1 else [f"{TOPIC}:{lane}" for lane in range(lanes)]
        (names,) = {len(client.xinfo_consumers(bench.key(stream), "ledger")) for stream in streams}
        assert names == 0, "it may remove its own name"


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_the_rights_that_the_page_names_suffice(
    name: str, database_url: str, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(name)
    client = redis.Redis.from_url(server.url)
    as_users([client], cluster=False)
    the_rights_suffice(database_url, server.url, client, 1)


def test_the_rights_that_the_page_names_suffice_on_a_cluster(database_url: str) -> None:
    with Cluster(replicas=False) as cluster:
        as_users(cluster.clients, cluster=True)
        the_rights_suffice(database_url, cluster.url, cluster.raw(protocol=2), 4)


def test_without_any_one_of_them_doctor_names_it(own_valkey: Callable[..., ValkeyServer]) -> None:
    """So that the page names none too many."""
    server = own_valkey()
    client = redis.Redis.from_url(server.url)
    as_users([client], cluster=False)
    with closing(StreamTransport.from_url(with_user(server.url, "relay"))) as there:
        for right in [rule for rule in rules("relay", cluster=False) if rule.startswith("+")]:
            client.execute_command("ACL", "SETUSER", "relay", right.replace("+", "-"))
            assert there.refused(TOPIC, "relay") == [right[1:].replace("|", " ").upper()]
            client.execute_command("ACL", "SETUSER", "relay", right)
        assert there.refused(TOPIC, "relay") == []
        assert there.refused("other", "relay") != [], "keys are looked at too"


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_the_rights_that_the_page_names_for_queues_suffice(name: str, own_valkey: Callable[..., ValkeyServer]) -> None:
    server, queue, group = own_valkey(name), "queue/mail", "mailer"
    client: Any = redis.Redis.from_url(server.url)
    client.execute_command("ACL", "SETUSER", "jobs", *rules("jobs", cluster=False))
    with closing(Router.from_url(with_user(server.url, "jobs"), claim_seconds=0.05)) as there:
        lists, first = there.lists, Marker(1, 1, "t")
        lists._kept = 1
        kinds = (None, '{"lifo": "1"}', '{"runat": "2030-01-01T00:00:00Z"}')
        runs = [run for headers in kinds for run in several(headers)]
        there.leave([queue], 10, 5)
        assert there.open(group, [queue]) == {}
        assert there.publish([Part(queue, None, first, runs)]) == [first]
        found = there.read(group, "one", [queue], 2, 0)
        assert there.renew(group, "one", found) == found
        there.hand_back(group, "one", found[1:])
        there.ack(group, found[:1], [Settled("waiting")])
        there.settle(queue, {uuid.UUID(found[0].receipt.partition(":")[0]): Settled("completed", b"1")})
        for status in ("ready", "delayed", "running", "completed"):
            for state in lists.jobs("mail", status, 1):
                assert status in ("running", "completed") or lists.cancel("mail", state.id) == status
        found = there.read(group, "one", [queue], 2, 0)
        client.zrem(f"{{{queue}}}:claims", found[0].receipt.partition(":")[0])
        time.sleep(0.06)
        there.claim(group, "two", queue, 0.05, 1)
        there.left(group, "one", queue, 5)
        assert eventually(lambda: lists.reclaim() or not lists.queues()[0].counts["running"])
        while more := there.read(group, "one", [queue], 5, 0):
            there.ack(group, more)
        there.read(group, "one", [queue], 5, 0.05)
        client.rpush(f"{{{queue}}}:ready:normal", "of a stranger")
        assert there.publish([Part(queue, first, first, runs)]) == [first], "counted anew"
        assert there.inspect(queue).groups
        assert there.drop_group(group, queue)
    asked = {found["object"] for found in client.acl_log()}
    assert asked <= {"client|setinfo"}, "which redis-py does without"


def several(headers: str | None) -> list[Run]:
    return wire([(b"{}", str(uuid7()), "t", None, None, None, None, None, headers) for _ in range(3)], "1:t")
