"""Consumers, their servers and the network between them are cut, killed and emptied for real."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from consumer import Consumer
from consumer.drain import EXIT_CODE
from consumer.settings import ConsumerSettings
from consumer.worker import Worker
from outbox import Event, Job, record
from outbox.embedded import PostgresServer, ValkeyServer, redis_servers
from outbox.envelope import uuid7
from outbox.transport import ListTransport, StreamTransport
from tests.faults.proxy import Proxy, port_of, through
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
TOPIC, KEY = "accounts", "{accounts}"
TABLES = """
    CREATE TABLE public.effects (event_id uuid, amount numeric(20,2));
    CREATE TABLE public.accounts (id text PRIMARY KEY, balance numeric(20,2) NOT NULL);
    INSERT INTO public.accounts VALUES ('A', 0)
"""
HANDLERS = """
import os, signal, time
from pathlib import Path
from consumer import Consumer

wallet = Consumer("ledger", topics=["accounts"])
if barrier := os.environ.get("BARRIER"):
    Path(barrier, str(os.getpid())).touch()
    while len(os.listdir(barrier)) < 8:
        time.sleep(0.002)

@wallet.on("credited", raw=True)
def credit(event, connection):
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(f"{event.id}\\n")
    if pace := os.environ.get("PACE"):
        time.sleep(float(pace))
    until = time.monotonic() + float(os.environ.get("SPIN", "0"))
    while time.monotonic() < until:
        pass
    if str(event.id) == os.environ.get("DEADLY"):
        os.kill(os.getpid(), signal.SIGKILL)
    gate = os.environ.get("GATE")
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
    connection.execute("UPDATE public.accounts SET balance = balance + 1 WHERE id = 'A'")
    connection.execute("SELECT pg_sleep(%s)", (os.environ.get("SLEEP", "0"),))
"""


def credit() -> Event:
    return Event(topic=TOPIC, type="credited", payload={"amount": "1.00"}, key="A")


def fields(number: int) -> dict[bytes, bytes]:
    return {b"id": str(uuid7()).encode(), b"type": b"credited", b"subject": b"A", b"data": b"{}"}


class Process(subprocess.Popen[bytes]):
    """Knows whether the test has ended it, or waited for its end.

    Attributes:
        may_end: it has.
    """

    may_end = False

    def send_signal(self, sig: int) -> None:  # kill and terminate come by here
        self.may_end = self.may_end or sig not in (signal.SIGSTOP, signal.SIGCONT)
        super().send_signal(sig)

    def wait(self, timeout: float | None = None) -> int:
        self.may_end = True
        return super().wait(timeout)


class Site:
    """A database and a server of the test's own, and processes that work on them.

    Attributes:
        tracebacks: how many they may show, for handlers that fail.
    """

    tracebacks = 0

    def __init__(self, database_url: str, redis_url: str, folder: Path, stack: ExitStack) -> None:
        self.database_url, self.redis_url, self.folder = database_url, redis_url, folder
        self.redis: Any = stack.enter_context(redis.Redis.from_url(redis_url))
        self.starts = folder / "starts"
        self.starts.touch()
        self.hand_out(HANDLERS)
        with self.connect() as connection:
            connection.execute(TABLES)
        self._stack = stack
        self._processes: list[Process] = []

    def hand_out(self, handlers: str) -> None:
        """Have the processes that start from now on run these."""
        (self.folder / "shop.py").write_text(handlers)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.database_url, autocommit=True)

    def run(self, *command: str, before: Sequence[str] = (), **environment: str) -> Process:
        """A process; killed at the end if it still runs. Its output is in `output`. `before`: a command that runs it."""
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("CONSUMER_", "OUTBOX_"))}
        settings = {
            "DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url, "STARTS": str(self.starts),
            "PYTHONPATH": f"{ROOT}:{self.folder}", "CONSUMER_CLAIM_SECONDS": "0.5", "CONSUMER_CHECK_SECONDS": "0.2",
            "CONSUMER_BLOCK_SECONDS": "0.2", "CONSUMER_BACKOFF_MAX_SECONDS": "0.3", "OUTBOX_BACKOFF_MAX_SECONDS": "0.3",
            "OUTBOX_CHECK_SECONDS": "0.2",
        }  # fmt: skip
        with (self.folder / "output").open("ab") as sink:
            process = Process(
                [*before, sys.executable, "-m", *command],
                env=clean | settings | environment,
                cwd=self.folder,
                stdout=sink,
                stderr=sink,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._processes.append(process)
        return process

    def consumer(self, **environment: str) -> Process:
        return self.run("consumer", "run", "shop:wallet", **environment)

    def ready(self, number: int, timeout_seconds: float = 30) -> None:
        """Wait until so many consumers have said that they have started."""
        eventually(lambda: self.output().count("consumer ledger started") >= number, timeout_seconds)

    def blocked(self) -> int:
        """How many consumers wait in Redis for something to do."""
        return int(self.redis.info("clients")["blocked_clients"])

    def add(self, number: int) -> None:
        with self.redis.pipeline(transaction=False) as pipeline:
            for n in range(number):
                pipeline.xadd(KEY, fields(n))
            pipeline.execute()

    def record(self, number: int) -> set[str]:
        """Record so many events in one transaction; returns their ids."""
        events = [credit() for _ in range(number)]
        with psycopg.connect(self.database_url) as connection:
            record(connection, *events)
        return {str(event.id) for event in events}

    def state(self) -> tuple[int, int, int, int]:
        """Effects, different events among them, ledger rows, balance."""
        with self.connect() as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM public.effects), (SELECT count(DISTINCT event_id) FROM public.effects), "
                "(SELECT count(*) FROM public.processed_messages), (SELECT balance FROM public.accounts)"
            ).fetchone()
        assert row is not None
        return row[0], row[1], row[2], int(row[3])

    def pending(self) -> int:
        try:
            return int(self.redis.xpending(KEY, "ledger")["pending"])
        except redis.ResponseError:
            return -1

    def owners(self) -> Counter[bytes]:
        """How much is pending at each consumer."""
        return Counter(entry["consumer"] for entry in self.redis.xpending_range(KEY, "ledger", "-", "+", 1000))

    def unread(self) -> int:
        """Entries that the group has not read."""
        (group,) = self.redis.xinfo_groups(KEY)
        return len(self.redis.xrange(KEY, min=b"(" + group["last-delivered-id"]))

    def at_first(self, most: int) -> int:
        """Of so many, how many a consumer takes that knows nothing yet."""
        return most

    def leave(self, number: int) -> None:
        """Add so many that a process has taken that has been dead for a minute."""
        self.add(number)
        self.redis.xgroup_create(KEY, "ledger", "0")
        self.redis.xreadgroup("ledger", "dead", {KEY: ">"}, count=number)
        self.redis.xclaim(KEY, "ledger", "dead", 0, [i for i, _ in self.redis.xrange(KEY)], idle=60_000, justid=True)

    def delivered(self) -> list[int]:
        """How often what is pending was delivered."""
        return [entry["times_delivered"] for entry in self.redis.xpending_range(KEY, "ledger", "-", "+", 1000)]

    def dead(self) -> int:
        """Dead letters."""
        with self.connect() as connection:
            row = connection.execute("SELECT count(*) FROM public.dead_letters").fetchone()
        assert row is not None
        return int(row[0])

    def waiting(self) -> int:
        """What waits for another try."""
        with self.connect() as connection:
            row = connection.execute("SELECT count(*) FROM public.message_failures").fetchone()
        assert row is not None
        return int(row[0])

    def settled(self, number: int, timeout_seconds: float = 20) -> None:
        """Wait until so many events are applied, each once, and nothing is pending or dead."""
        eventually(lambda: self.state()[1] >= number, timeout_seconds, self.output()[-2000:])
        eventually(lambda: self.pending() == 0)
        assert self.state() == (number,) * 4
        assert self.dead() == 0

    def all_is_well(self) -> None:
        """What every case asks for: no process has ended that the test did not end, and none has shown a traceback
        that the test knows nothing of."""
        ended = [(process.args, process.poll()) for process in self._processes if not process.may_end]
        assert not [found for found in ended if found[1] is not None], (ended, self.output()[-2000:])
        assert self.output().count("Traceback") <= self.tracebacks, self.output()[-5000:]

    def output(self) -> str:
        found = self.folder / "output"
        return found.read_text() if found.exists() else ""


class QueueSite(Site):
    """The same with jobs: what is pending is what runs, what is unread is ready or delayed."""

    base = "{queue/accounts}"

    def __init__(self, database_url: str, redis_url: str, folder: Path, stack: ExitStack) -> None:
        super().__init__(database_url, redis_url, folder, stack)
        self.lists = ListTransport(self.redis)

    def hand_out(self, handlers: str) -> None:
        """Handlers of events, made those of jobs."""
        text = re.sub(r"@wallet\.on(_batch)?\(", "@wallet.job(", handlers.replace("topics=", "queues="))
        (self.folder / "shop.py").write_text(text)

    def add(self, number: int) -> None:
        self.lists.enqueue([job() for _ in range(number)])

    def record(self, number: int) -> set[str]:
        jobs = [job() for _ in range(number)]
        with psycopg.connect(self.database_url) as connection:
            record(connection, *jobs)
        return {str(each.id) for each in jobs}

    def pending(self) -> int:
        return int(self.redis.hlen(f"{self.base}:processing"))

    def owners(self) -> Counter[bytes]:
        return Counter(self.redis.hvals(f"{self.base}:processing"))

    def unread(self) -> int:
        ready = sum(self.redis.llen(f"{self.base}:ready:{name}") for name in ("high", "normal", "low"))
        return int(ready + self.redis.zcard(f"{self.base}:delayed"))

    def blocked(self) -> int:
        return len(self.redis.pubsub_channels("*:wake"))

    def at_first(self, most: int) -> int:
        return 1

    def leave(self, number: int) -> None:
        self.add(number)
        self.lists.open("ledger", ["queue/accounts"])
        taken = self.lists.read("ledger", "dead", ["queue/accounts"], number, 0)
        for delivery in taken:  # they were claimed for a minute
            self.redis.zincrby(f"{self.base}:claims", -60_000, delivery.receipt.partition(":")[0])

    def delivered(self) -> list[int]:
        found = [*self.lists.jobs("accounts", "running", 1000), *self.lists.jobs("accounts", "ready", 1000)]
        return [each.count for each in found]

    def statuses(self) -> Counter[str]:
        (queue,) = self.lists.queues()
        return Counter({status: number for status, number in queue.counts.items() if number})


def job(**fields: Any) -> Job:
    return Job(queue="accounts", type="credited", payload={"amount": "1.00"}, key="A", **fields)


#: Where a case is about events and about jobs.
SITES = {"stream": Site, "queue": QueueSite}
both = pytest.mark.parametrize("site", SITES, indirect=True)


@pytest.fixture
def site(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Site]:
    with ExitStack() as stack:
        found = SITES[getattr(request, "param", "stream")](database_url, own_valkey().url, tmp_path, stack)
        yield found
        found.all_is_well()


# --- the proxy proves itself -------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers ``>`` and what it got, and remembers it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while data := connection.recv(1000):
                    heard.append(data)
                    connection.sendall(b">" + data)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        heard.clear()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


heard: list[bytes] = []


def dial(proxy: Proxy, timeout_seconds: float = 5) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout_seconds)


def test_the_proxy_forwards_and_cuts(echo: int) -> None:
    with Proxy(echo) as proxy, dial(proxy) as client:
        client.sendall(b"a")
        assert client.recv(10) == b">a"
        proxy.cut()
        assert client.recv(10) == b""
        with dial(proxy) as another:
            another.sendall(b"b")
            assert another.recv(10) == b">b"


def test_the_proxy_goes_deaf_or_drops_replies_only(echo: int) -> None:
    with Proxy(echo) as proxy, dial(proxy, 0.3) as client:
        proxy.drop_replies = True
        client.sendall(b"a")
        with pytest.raises(TimeoutError):
            client.recv(10)
        assert heard == [b"a"]
        proxy.drop_replies, proxy.deaf = False, True
        client.sendall(b"b")
        with pytest.raises(TimeoutError):
            client.recv(10)
        assert heard == [b"a"]


@pytest.mark.parametrize("way", ["delay_seconds", "delay_requests_seconds"])
def test_the_proxy_delays(echo: int, way: str) -> None:
    with Proxy(echo) as proxy, dial(proxy, 0.05) as client:
        setattr(proxy, way, 0.2)
        client.sendall(b"a")
        with pytest.raises(TimeoutError):
            client.recv(10)
        client.settimeout(5)
        assert client.recv(10) == b">a"


def test_the_proxy_cuts_before_or_after_a_pattern(echo: int) -> None:
    with Proxy(echo) as proxy:
        proxy.cut_at(b"COMMIT", lambda number: {1: "before", 2: "after"}.get(number))  # type: ignore[return-value]
        got = []
        for _ in range(3):
            with dial(proxy) as client:
                client.sendall(b"x")
                got.append(client.recv(10))
                client.sendall(b"a COMMIT b")
                with suppress(ConnectionError):
                    got.append(client.recv(20))
        assert got == [b">x", b"", b">x", b"", b">x", b">a COMMIT b"]
        assert heard.count(b"a COMMIT b") == 2
        assert proxy.cuts == 2


# --- COMMIT without an answer --------------------------------------------------------------------------------------------


def cut_ten_of_twenty(number: int) -> Any:
    """Commits 2, 6, 10, … are cut before they arrive, 4, 8, 12, … before their answer does; five each."""
    if number > 20 or number % 2:
        return None
    return "before" if number % 4 == 2 else "after"


def test_o_18_commit_without_an_answer(site: Site) -> None:
    """One event a transaction, so that each cut meets an event; what is acknowledged is in the ledger before."""
    site.add(20)
    early: list[int] = []
    consumer = Consumer("ledger", topics=[TOPIC])

    @consumer.on("credited", raw=True)
    def apply(event: Any, connection: Any) -> None:
        connection.execute("INSERT INTO public.effects VALUES (%s, 1)", (event.id,))
        connection.execute("UPDATE public.accounts SET balance = balance + 1 WHERE id = 'A'")

    with Proxy(port_of(site.database_url)) as proxy, site.redis.monitor() as monitor, site.connect() as outside:
        settings = ConsumerSettings(
            database_url=through(proxy, site.database_url), redis_url=site.redis_url, batch_size=1, claim_seconds=0.5,
            check_seconds=0.2, block_seconds=0.2, backoff_max_seconds=0.05,
        )  # fmt: skip
        worker = Worker(consumer, settings)
        worker._prepare()  # its partitions commit too
        proxy.cut_at(b"COMMIT", cut_ten_of_twenty)
        ack = worker._transport.ack

        def watched(group: str, deliveries: Any) -> None:
            ids = [delivery.fields[b"id"].decode() for delivery in deliveries]
            query = "SELECT count(*) FROM public.processed_messages WHERE event_id = ANY (%s::uuid[])"
            row = outside.execute(query, (ids,)).fetchone()
            assert row is not None
            early.append(len(ids) - row[0])
            ack(group, deliveries)

        worker._transport.ack = watched  # type: ignore[method-assign]
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        site.settled(20)
        worker.stop()
        thread.join(5)
        assert not thread.is_alive()
        assert proxy.cuts == 10
        assert len(early) >= 20
        assert not any(early)
        site.redis.echo("end")
        acked: Counter[str] = Counter()
        for command in monitor.listen():
            if "ECHO" in command["command"]:
                break
            if command["command"].startswith("XACK"):
                acked.update(command["command"].split()[3:])
        assert len(acked) == 20


def test_o_18_the_producers_retry(site: Site) -> None:
    """The caller's retry is guarded by its own row's primary key, in the transaction of the event.

    The outbox has no unique key on event_id by design: it is append-only and partitioned by position. A retry without a
    row of the caller's own would record the event twice, and consumers would apply it once.
    """
    with site.connect() as connection:
        connection.execute("CREATE TABLE public.payments (id uuid PRIMARY KEY)")
    with Proxy(port_of(site.database_url)) as proxy:
        proxy.cut_at(b"COMMIT", cut_ten_of_twenty)
        url = through(proxy, site.database_url)
        for _ in range(20):
            event = credit()

            def pay(event: Event = event) -> bool:
                with psycopg.connect(url) as connection:
                    connection.execute("INSERT INTO public.payments VALUES (%s)", (event.id,))
                    record(connection, event)
                return True

            with suppress(psycopg.errors.UniqueViolation):  # the first try was committed after all
                eventually(pay, ignoring=(psycopg.OperationalError,))
        assert proxy.cuts == 10
    with site.connect() as connection:
        row = connection.execute("SELECT count(*), count(DISTINCT event_id) FROM public.outbox").fetchone()
    assert row == (20, 20)


# --- PostgreSQL away, consumers killed -----------------------------------------------------------------------------------


def test_o_20_nothing_is_acknowledged_while_postgresql_is_down(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Down until the consumer has given up and tried again many times, not for a time."""
    from outbox import schema

    postgres = own_postgres()
    schema.upgrade(postgres.url, "consumer")
    with ExitStack() as stack:
        site = Site(postgres.url, own_valkey().url, tmp_path, stack)
        process = site.run("consumer", "run", "shop:wallet", "--log-level", "debug")  # every try is a line there
        site.add(1)
        site.settled(1)
        postgres.kill()
        site.add(10)
        eventually(lambda: "try 10:" in site.output(), 30)
        assert site.pending() + site.unread() == 10
        postgres.start()
        site.settled(11)
        assert process.poll() is None
        assert "Traceback" not in site.output()


@pytest.mark.long
def test_o_20_consumers_killed_at_random(site: Site) -> None:
    """Ten kills instead of fifty, each somewhere in the middle of a batch or just after one."""
    site.add(500)
    chance = random.Random(20)
    for _ in range(10):
        before = len(site.starts.read_bytes())
        process = site.consumer(CONSUMER_BATCH_SIZE="20", CONSUMER_CLAIM_SECONDS="0.2", PACE="0.002")
        # Killed after so many handlers have started, wherever it is then; some twenty fit into a batch.
        wanted = before + 37 * chance.randint(1, 30)
        eventually(lambda: len(site.starts.read_bytes()) >= wanted or site.state()[1] == 500)  # noqa: B023
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert site.state()[1] < 500  # every kill met work
    site.consumer(CONSUMER_CLAIM_SECONDS="0.2")
    site.settled(500)


@pytest.mark.long
@both
def test_o_13_eight_consumers_take_over_a_dead_ones_deliveries(site: Site) -> None:
    site.leave(100)
    barrier = site.folder / "barrier"
    barrier.mkdir()
    for _ in range(8):
        site.consumer(CONSUMER_BATCH_SIZE="10", CONSUMER_CLAIM_SECONDS="30", BARRIER=str(barrier))
    site.settled(100, 40)
    starts = Counter(site.starts.read_text().split())
    assert (len(starts), set(starts.values())) == (100, {1})


# --- processes that freeze or die ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "hung"),
    [("stream", False), ("stream", True), pytest.param("queue", False, marks=pytest.mark.long)],
    indirect=["site"],
    ids=["stopped", "a handler hangs", "stopped with a job"],
)
def test_o_14_a_frozen_consumer_stops_no_other(site: Site, hung: bool) -> None:
    """Frozen within its transaction. When it goes on it takes nothing back, and what it has done counts. Its
    acknowledgement of a job that another one has by then is refused."""
    gate, held = site.folder / "gate", site.at_first(5)
    site.add(5)
    frozen = site.consumer(GATE=str(gate), CONSUMER_PROCESS_NAME="frozen")
    eventually(lambda: site.starts.read_text())
    if not hung:
        frozen.send_signal(signal.SIGSTOP)
    processes = [site.consumer(), site.consumer()]
    for number in range(1, 5):
        site.add(10)
        eventually(lambda expected=number * 10 + 5 - held: site.state()[1] == expected)  # type: ignore[misc]
    assert site.pending() == held
    if not hung:
        eventually(lambda: b"frozen" not in site.owners())
        frozen.send_signal(signal.SIGCONT)
        eventually(lambda: f"lost claim: {held} deliveries" in site.output())
    if isinstance(site, QueueSite):  # whoever has it now does not find it done before that one says so
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        eventually(lambda: all(stopped(process.pid) for process in processes))
        gate.touch()
        eventually(lambda: "lost claim: 1 jobs of queue/accounts were done here, but not acknowledged" in site.output())
        for process in processes:
            process.send_signal(signal.SIGCONT)
        site.settled(45)
        assert site.statuses() == {"completed": 45}
    else:
        gate.touch()
        site.settled(45)
        assert site.output().count("lost claim") == (not hung), "said once"
    assert [process.poll() for process in (frozen, *processes)] == [None] * 3
    assert "Traceback" not in site.output()


FREEZES = """
from consumer.ledger import Ledger

claim = Ledger.claim

def frozen(ledger, connection, ids, *rest):
    wanted = set(ids)
    if wanted and os.environ.get("FREEZES"):
        del os.environ["FREEZES"]
        os.kill(os.getpid(), signal.SIGSTOP)
    return claim(ledger, connection, wanted, *rest)

Ledger.claim = frozen
"""


@pytest.mark.parametrize("site", ["stream", pytest.param("queue", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("where", ["before it inserts", "in a transaction that is ended"])
def test_o_14_a_frozen_consumer_that_comes_too_late_does_nothing(site: Site, where: str) -> None:
    """Another one has taken over what it had, and is done with it before it goes on."""
    early = where == "before it inserts"
    site.hand_out(HANDLERS + FREEZES)
    gate, held = site.folder / "gate", site.at_first(5)
    site.add(5)
    with site.connect() as connection:
        if not early:  # as servers are set that end what blocks others
            name = connection.info.dbname
            connection.execute(f"ALTER DATABASE \"{name}\" SET idle_in_transaction_session_timeout = '500ms'")
        late = site.consumer(CONSUMER_PROCESS_NAME="late", **({"FREEZES": "1"} if early else {"GATE": str(gate)}))
        if not early:
            eventually(lambda: site.starts.read_text())
            late.send_signal(signal.SIGSTOP)
        eventually(lambda: stopped(late.pid) and site.owners() == {b"late": held})
        assert bool(site.starts.read_text()) is not early
        other = site.consumer()
        site.settled(5)
        other.terminate()
        assert other.wait(20) == 0
        gate.touch()
        late.send_signal(signal.SIGCONT)
        site.add(1)
        site.settled(6)  # by the late one, after what it had
        assert site.waiting() == 0
    assert len(site.starts.read_text().split()) == 6 + (not early), "nothing that another one has done is started"
    if isinstance(site, QueueSite):
        assert site.statuses() == {"completed": 6}


def stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_an_event_that_kills_its_consumers_stops_no_other(site: Site) -> None:
    site.add(20)
    ids = [entry[b"id"].decode() for _, entry in site.redis.xrange(KEY)]
    deadly = ids[7]
    rounds = 0

    def others_are_done() -> bool:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            site.add(10)  # these have not died with it
        site.consumer(DEADLY=deadly).wait(20)
        return site.state()[1] == 29 and site.pending() == 1

    eventually(others_are_done, 60)
    assert rounds <= 7
    assert site.starts.read_text().split().count(deadly) <= rounds
    site.consumer()  # a mended one
    site.settled(30)


def test_o_25_names_are_removed_while_one_of_them_comes_back(site: Site) -> None:
    """c1 is killed with ten deliveries; names are cleaned up again and again, while another process and one of its name run."""
    site.add(10)
    first = site.consumer(CONSUMER_PROCESS_NAME="c1", GATE=str(site.folder / "gate"))
    eventually(lambda: site.pending() == 10, 20)
    first.kill()
    removed: list[str] = []
    there = StreamTransport.from_url(site.redis_url)
    for name in ("c2", "c1"):
        site.consumer(CONSUMER_PROCESS_NAME=name)

    def applied(number: int) -> bool:
        removed.extend(there.forget_consumers("ledger", TOPIC, 0))
        return site.state()[0] >= number

    eventually(lambda: applied(10), 30)
    site.add(10)
    eventually(lambda: applied(20), 30)
    eventually(lambda: applied(20) and "c1" in removed, message="when nothing was pending for it")
    there.close()
    site.settled(20)
    assert len(site.redis.xinfo_consumers(KEY, "ledger")) <= 3


# --- Redis loses everything ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(redis_servers()))
def test_o_23_flushed_deleted_destroyed(
    name: str, database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        site = Site(database_url, own_valkey(name).url, tmp_path, stack)
        processes = [site.run("outbox", "relay"), site.consumer(CONSUMER_BLOCK_SECONDS="2")]
        site.record(5)
        site.settled(5)
        faults = [
            lambda: site.redis.flushall(),
            lambda: site.redis.delete(KEY),
            lambda: site.redis.delete(KEY, f"{KEY}:relay"),
            lambda: site.redis.xgroup_destroy(KEY, "ledger"),
        ]
        for number, fault in enumerate(faults, 1):
            fault()
            site.record(5)
            site.settled(5 + 5 * number, 5)

        # The stream is deleted while the consumer is blocked, and there again with new entries before it wakes up.
        relay, consumer = processes
        consumer.send_signal(signal.SIGSTOP)
        site.redis.delete(KEY)
        ids = site.record(5)
        eventually(lambda: ids <= {entry[b"id"].decode() for _, entry in site.redis.xrange(KEY)})
        assert relay.poll() is None
        consumer.send_signal(signal.SIGCONT)
        site.settled(10 + 5 * len(faults), 5)
        assert [process.poll() for process in processes] == [None, None]
        assert "Traceback" not in site.output()


# --- SIGTERM -----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with an acknowledgement to make"])
def test_sigterm_ends_a_consumer_whose_redis_hangs(
    database_url: str, own_valkey: Callable[..., ValkeyServer], tmp_path: Path, busy: bool
) -> None:
    """Within CONSUMER_REDIS_TIMEOUT_SECONDS, CONSUMER_BLOCK_SECONDS and what a process takes to end.

    It waits for the answer at hand, and for no other one, which would take as long again. What it could not acknowledge is
    known to the ledger.
    """
    with ExitStack() as stack:
        server = own_valkey()
        site = Site(database_url, server.url, tmp_path, stack)
        gate = tmp_path / "gate"
        environment = {"GATE": str(gate)} if busy else {}
        process = site.consumer(CONSUMER_REDIS_TIMEOUT_SECONDS="4", CONSUMER_BLOCK_SECONDS="0.2", **environment)
        site.add(1)
        eventually(lambda: site.starts.read_text(), 20)
        if not busy:
            site.settled(1)
        server.pause()
        try:
            gate.touch()
            eventually(lambda: site.state() == (1, 1, 1, 1))
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert time.monotonic() - started < 2 * (4 + 0.2)
        finally:
            server.resume()
        assert site.pending() in (0, int(busy))  # an acknowledgement under way may still arrive
        site.consumer()
        site.settled(1)


@pytest.mark.long
def test_sigterm_ends_a_consumer_whose_postgresql_hangs(
    own_postgres: Callable[..., PostgresServer], own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    """Although nobody hears that the transaction is to be given up; others have its event at once."""
    from outbox import schema

    server = own_postgres()
    schema.upgrade(server.url, "consumer")
    with ExitStack() as stack:
        site = Site(server.url, own_valkey().url, tmp_path, stack)
        gate = tmp_path / "gate"
        process = site.consumer(GATE=str(gate), CONSUMER_DRAIN_SECONDS="0.3", CONSUMER_CLAIM_SECONDS="60")
        site.add(1)
        eventually(lambda: site.starts.read_text())
        server.pause()
        try:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == EXIT_CODE
        finally:
            server.resume()
        assert site.delivered() == [0]
        gate.touch()
        site.consumer(CONSUMER_CLAIM_SECONDS="60")
        site.settled(1)
