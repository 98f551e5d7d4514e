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

from consumer import Consumer, Order
from consumer.cli import load
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
    """Calling it does nothing."""


def generator(event: Any, session: Any) -> Iterator[None]:
    yield


async def asynchronous_generator(event: Any, session: Any) -> Any:
    yield


class Asynchronous:
    async def __call__(self, event: Any, session: Any) -> None:
        """As a method."""

    async def method(self, event: Any, session: Any) -> None:
        """As another."""


@pytest.mark.parametrize(
    "handler",
    [
        asynchronous, generator, asynchronous_generator, Asynchronous(), Asynchronous().method,
        functools.partial(asynchronous, None),
    ],
)  # fmt: skip
def test_handlers_whose_body_would_never_run_are_refused(wallet: Consumer, handler: Any) -> None:
    with pytest.raises(SettingsError, match="'paid' is async or a generator"):
        wallet.on("paid")(handler)
    assert wallet.handler("paid") is None


@pytest.mark.parametrize("order", ["latest", "LATEST", None, True])
def test_order_is_an_order(wallet: Consumer, order: Any) -> None:
    with pytest.raises(SettingsError, match=r"must be Order\.ANY or Order\.LATEST, is "):
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
