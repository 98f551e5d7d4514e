"""What a user may register on a `Consumer`, and how the command line finds it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consumer import Consumer, Order, handlers
from consumer.cli import load
from consumer.handlers import Registered
from outbox.errors import SettingsError


def nothing(event: Any, session: Any) -> None:
    """A handler."""


@pytest.fixture
def wallet() -> Consumer:
    return Consumer("wallet", topics=["payments"])


# --- Consumer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wallet", "a", "9", "team/wallet.v2_x-1", "x" * 100])
def test_names_that_can_be_used(name: str) -> None:
    assert Consumer(name, topics=["payments"]).name == name


@pytest.mark.parametrize("name", ["", "x" * 101, "a b", "a:b", "-a", ".a", "wallet\n", "{a}", "té", 'x"; --', None, 7])
def test_names_that_cannot(name: Any) -> None:
    with pytest.raises(SettingsError, match="consumer name"):
        Consumer(name, topics=["payments"])


def test_topics_keep_their_order_and_are_read_once() -> None:
    assert Consumer("wallet", topics=["b", "a", "b"]).topics == ("b", "a")


def test_one_string_is_not_a_list_of_topics() -> None:
    with pytest.raises(SettingsError, match="not one string"):
        Consumer("wallet", topics="payments")


def test_a_consumer_without_topics_is_refused() -> None:
    with pytest.raises(SettingsError, match="at least one topic"):
        Consumer("wallet", topics=[])


def test_queues_are_topics_of_their_own() -> None:
    mailer = Consumer("mailer", queues=["mail", "sms.v2", "mail"])
    assert mailer.topics == ("queue/mail", "queue/sms.v2")
    assert mailer.has_queues
    assert not Consumer("wallet", topics=["mail"]).has_queues


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"queues": "mail"}, "queues: must be a list of queues, not one string"),
        ({"queues": ["mail"], "topics": ["payments"]}, "topics or queues, not both"),
        ({"queues": []}, "at least one topic or queue"),
        ({"topics": ["queue/mail"]}, "topics: one is a queue's; say queues="),
        *[
            ({"queues": [name]}, "queues: one of a queue must be queue/ and a name that matches")
            for name in ("a/b", "queue/mail", "")
        ],
        *[({"queues": [name]}, "queues: one must match") for name in ("a:processing", "b{x}", " ", "a\n", "x" * 201)],
    ],
)
def test_o_90_queues_that_cannot_be_used(arguments: dict[str, Any], rule: str) -> None:
    """Nothing in a queue's name can make it a part of another queue's keys."""
    with pytest.raises(SettingsError, match=rule):
        Consumer("mailer", **arguments)


def test_jobs_have_handlers_of_their_own() -> None:
    mailer, wallet = Consumer("mailer", queues=["mail"]), Consumer("wallet", topics=["payments"])
    mailer.job("send", timeout_seconds=5)(nothing)
    registered = mailer.handler("send")
    assert registered
    assert (registered.function, registered.order, registered.timeout_seconds) == (nothing, Order.ANY, 5)
    with pytest.raises(SettingsError, match="'send' has a handler already"):
        mailer.job("send")(nothing)
    for register in (mailer.on, mailer.on_batch):
        with pytest.raises(SettingsError, match="is for consumers of topics, job for those of queues"):
            register("send")
    with pytest.raises(SettingsError, match="job is for consumers of queues, on and on_batch for those of topics"):
        wallet.job("send")


@pytest.mark.parametrize("topic", ["", "a b", "a:0", "{a}", 7, None])
def test_topics_that_cannot_be_used(topic: Any) -> None:
    with pytest.raises(SettingsError, match="topics: one must match"):
        Consumer("wallet", topics=["payments", topic])


# --- on and ignore -------------------------------------------------------------------------------------------------


def test_on_registers_and_gives_the_function_back(wallet: Consumer) -> None:
    assert wallet.on("paid", order=Order.LATEST, raw=True)(nothing) is nothing
    found = wallet.handler("paid")
    assert found is not None
    assert (found.function, found.order, found.raw) == (nothing, Order.LATEST, True)


def test_by_default_every_event_counts_and_handlers_get_a_session(wallet: Consumer) -> None:
    wallet.on("paid")(nothing)
    found = wallet.handler("paid")
    assert found is not None
    assert (found.order, found.raw) == (Order.ANY, False)


def test_types_are_matched_exactly(wallet: Consumer) -> None:
    wallet.on("paid")(nothing)
    wallet.ignore("refunded")
    assert [wallet.handler(kind) for kind in ("Paid", "paid ", "pai", "refunded")] == [None] * 4
    assert [wallet.ignores(kind) for kind in ("refunded", "Refunded", "paid")] == [True, False, False]


def test_one_function_may_handle_several_types(wallet: Consumer) -> None:
    wallet.on("paid")(wallet.on("refunded")(nothing))
    assert wallet.handler("paid") == wallet.handler("refunded")


def test_a_type_has_one_handler(wallet: Consumer) -> None:
    wallet.on("paid")(nothing)
    with pytest.raises(SettingsError, match="'paid' has a handler already"):
        wallet.on("paid")(nothing)


def test_a_type_is_not_both_handled_and_ignored(wallet: Consumer) -> None:
    wallet.on("paid")(nothing)
    wallet.ignore("refunded")
    with pytest.raises(SettingsError, match="'paid' has a handler"):
        wallet.ignore("other", "paid")
    with pytest.raises(SettingsError, match="'refunded' has a handler already or is ignored"):
        wallet.on("refunded")(nothing)


def test_ignoring_twice_is_fine(wallet: Consumer) -> None:
    wallet.ignore("paid", "paid")
    wallet.ignore("paid")
    assert wallet.ignores("paid")


@pytest.mark.parametrize("kind", ["", "x" * 201, None, b"paid", nothing])
def test_types_that_cannot_be_used(wallet: Consumer, kind: Any) -> None:
    """`nothing` is what ``@consumer.on`` without parentheses passes."""
    with pytest.raises(SettingsError, match="1 to 200 characters"):
        wallet.on(kind)
    with pytest.raises(SettingsError, match="1 to 200 characters"):
        wallet.ignore(kind)


async def asynchronous(event: Any, session: Any) -> None:
    """Runs on the loop of its thread."""


def generator(event: Any, session: Any) -> Iterator[None]:
    yield


async def asynchronous_generator(event: Any, session: Any) -> Any:
    yield


class Generator:
    def __call__(self, event: Any, session: Any) -> Iterator[None]:
        yield


class Asynchronous:
    async def __call__(self, event: Any, session: Any) -> None:
        """As a method."""

    async def method(self, event: Any, session: Any) -> None:
        """As another."""


@pytest.mark.parametrize(
    "handler", [generator, asynchronous_generator, Generator(), functools.partial(generator, session=None)]
)
def test_handlers_whose_body_would_never_run_are_refused(wallet: Consumer, handler: Any) -> None:
    with pytest.raises(SettingsError, match="consumer wallet: the handler of 'paid', .* is a generator"):
        wallet.on("paid")(handler)
    assert wallet.handler("paid") is None


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (nothing, False), (lambda event, session: asynchronous(event, session), False), (asynchronous, True),
        (Asynchronous(), True), (Asynchronous().method, True), (functools.partial(asynchronous), True),
    ],
)  # fmt: skip
def test_async_handlers_are_recognised(wallet: Consumer, handler: Any, expected: bool) -> None:
    wallet.on("paid")(handler)
    wallet.on_batch("paid.too")(handler)
    assert [registered(wallet, kind).asynchronous for kind in ("paid", "paid.too")] == [expected, expected]


def test_async_handlers_are_not_raw(wallet: Consumer) -> None:
    with pytest.raises(SettingsError, match="asynchronous, is async, and cannot be raw"):
        wallet.on("paid", raw=True)(asynchronous)


def test_async_handlers_need_greenlet(wallet: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "find_spec", lambda name: None)
    wallet.on("paid")(nothing)
    with pytest.raises(SettingsError, match=r"'refunded', asynchronous, is async: that needs greenlet \(pip install"):
        wallet.on("refunded")(asynchronous)


def takes_one(event: Any) -> None: ...
def takes_none() -> None: ...
def takes_three(event: Any, session: Any, more: Any) -> None: ...
def by_keyword(event: Any, *, session: Any) -> None: ...
def takes_any(*arguments: Any) -> None: ...
def takes_more(event: Any, session: Any, more: int = 0, *, further: int = 0) -> None: ...


@pytest.mark.parametrize("handler", [takes_one, takes_none, takes_three, by_keyword, Asynchronous.method])
def test_handlers_take_two_positional_arguments(wallet: Consumer, handler: Any) -> None:
    with pytest.raises(SettingsError, match=r"the handler of 'paid', .*must take two positional arguments, \(event, "):
        wallet.on("paid")(handler)
    with pytest.raises(SettingsError, match=r"must take two positional arguments, \(events, session\)"):
        wallet.on_batch("paid")(handler)


def test_what_cannot_be_called_is_no_handler(wallet: Consumer) -> None:
    with pytest.raises(SettingsError, match="the handler of 'paid', 7, cannot be called"):
        wallet.on("paid")(7)  # type: ignore[type-var]


@pytest.mark.parametrize("handler", [takes_any, takes_more, functools.partial(takes_three, more=1), max, print])
def test_handlers_may_take_more_if_they_need_not(wallet: Consumer, handler: Any) -> None:
    assert wallet.on("paid")(handler) is handler


@pytest.mark.parametrize("seconds", [0, -1, 86_401, float("nan"), float("inf"), "5"])
def test_time_outs_that_cannot_be_used(wallet: Consumer, seconds: Any) -> None:
    for register in (wallet.on, wallet.on_batch):
        with pytest.raises(SettingsError, match=r"timeout_seconds must be more than 0 and at most a day"):
            register("paid", timeout_seconds=seconds)


def test_time_outs_are_kept(wallet: Consumer) -> None:
    wallet.on("paid", timeout_seconds=0.5)(nothing)
    wallet.on("refunded")(nothing)
    assert [registered(wallet, kind).timeout_seconds for kind in ("paid", "refunded")] == [0.5, None]


def registered(consumer: Consumer, kind: str) -> Registered:
    found = consumer.handler(kind)
    assert found is not None
    return found


@pytest.mark.parametrize("order", ["latest", "LATEST", None, True])
def test_order_is_an_order(wallet: Consumer, order: Any) -> None:
    with pytest.raises(SettingsError, match=r"must be Order.ANY, Order.LATEST or Order.NEXT, is "):
        wallet.on("paid", order=order)


# --- module:name ---------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, whose modules are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_load_finds_a_consumer_from_the_current_directory_on(project: Path) -> None:
    (project / "shop_a").mkdir()
    (project / "shop_a" / "handlers.py").write_text(
        "from consumer import Consumer\nwallet = Consumer('wallet', topics=['payments'])\n"
    )
    assert load("shop_a.handlers:wallet").name == "wallet"


@pytest.mark.parametrize("target", ["", "shop", "shop:", ":wallet", "shop.wallet", ":"])
def test_load_wants_module_and_name(project: Path, target: str) -> None:
    with pytest.raises(SettingsError, match="not of the form module:name"):
        load(target)


@pytest.mark.parametrize("target", ["no_such_shop:w", "no_such_shop.handlers:w", "consumer.no_such:w", "a b:w"])
def test_load_says_which_module_is_missing(project: Path, target: str) -> None:
    with pytest.raises(SettingsError, match="there is no module") as caught:
        load(target)
    assert repr(target.partition(":")[0]) in str(caught.value)
    assert str(project) in str(caught.value)


@pytest.mark.parametrize("target", [".shop:w", "..:w", "."])
def test_load_refuses_relative_modules(project: Path, target: str) -> None:
    with pytest.raises(SettingsError):
        load(target)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("", "has no Consumer 'wallet'$"),
        ("import consumer; shop = consumer.Consumer('s', topics=['t'])", "has no Consumer 'wallet'; 'shop' is one$"),
        ("wallet = 'text'", "has no Consumer 'wallet', it is a str"),
        ("from consumer import Consumer as wallet", "has no Consumer 'wallet', it is a type"),
        ("def wallet(): ...", "has no Consumer 'wallet', it is a function"),
    ],
)
def test_load_says_what_it_found_instead(project: Path, code: str, says: str) -> None:
    (project / "shop_b.py").write_text(code)
    with pytest.raises(SettingsError, match=says):
        load("shop_b:wallet")


@pytest.mark.parametrize(
    ("code", "error"), [("import no_such_dependency", ModuleNotFoundError), ("1 / 0", ZeroDivisionError)]
)
def test_load_does_not_hide_an_error_of_the_module_itself(project: Path, code: str, error: type[Exception]) -> None:
    (project / "shop_c.py").write_text(code)
    with pytest.raises(error):
        load("shop_c:wallet")


def test_load_names_the_file_that_it_found(project: Path) -> None:
    """A user's own consumer.py is hidden by this package."""
    (project / "consumer.py").write_text("from consumer import Consumer\nwallet = Consumer('wallet', topics=['a'])\n")
    with pytest.raises(SettingsError, match=r"consumer \(.*/consumer/__init__\.py\) has no Consumer 'wallet'"):
        load("consumer:wallet")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("files", "says", "shows"),
    [
        ({"shop_d.py": "def wallet(:\n"}, "SyntaxError: ", "shop_d.py"),
        ({"shop_d.py": "import no_such_dependency\n"}, "No module named 'no_such_dependency'", "shop_d.py"),
        ({"shop_d.py": "import shop_e\n", "shop_e.py": "1 / 0\n"}, "ZeroDivisionError: ", "shop_e.py"),
    ],
)
def test_the_command_shows_what_is_wrong_with_the_module(
    files: dict[str, str], says: str, shows: str, tmp_path: Path
) -> None:
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "consumer", "run", "shop_d:wallet"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: cannot import 'shop_d': ")
    assert says in last
    assert shows in done.stderr
    for foreign in ("typer", "click", "consumer/cli.py", "importlib"):
        assert foreign not in done.stderr
