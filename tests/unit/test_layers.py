"""Who may import whom, and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: From the ground up. A module imports only from floors below its own; names on one floor do not know each other.
FLOORS: dict[str, list[set[str]]] = {
    "outbox": [
        {"errors"},
        {"envelope", "address"},
        {"settings", "telemetry", "retry"},
        {"tables", "schema", "partitions", "transport"},
        {"store", "transaction"},
        {"writer", "jobs", "retention", "streams"},
        {"relay", "replay"},
        {"operations", "doctor"},
        {"startup"},
        {"cli"},
    ],
    "consumer": [
        {"settings", "tables", "blame", "payloads", "timeouts", "loops"},
        {"ledger", "handlers"},
        {"calls", "notes"},
        {"work"},
        {"process", "once"},
        {"claims", "inheritance", "testing"},
        {"worker", "dead_letters", "jobs", "reconcile"},
        {"operations", "doctor", "dead_cli", "crew"},
        {"drain", "jobs_cli"},
        {"supervisor"},
        {"cli"},
    ],
}
#: What stands beside the floors: imports nothing of ours.
ALONE = {"outbox.embedded"}
#: What consumer may use of outbox: the published language.
LANGUAGE = {"errors", "envelope", "settings", "telemetry", "retry", "transport", "schema", "partitions", "transaction"}
#: Named exceptions: module, and what it may import besides.
EXCEPTIONS = {
    "consumer.reconcile": {"outbox.store"},
    "consumer.doctor": {"outbox.doctor", "outbox.store"},  # what is true of any server is looked at in one place
    "consumer.dead_cli": {"outbox.cli", "outbox.doctor"},
    "consumer.jobs_cli": {"outbox.cli"},
    # reconcile has the missing published again
    "consumer.cli": {"outbox.cli", "outbox.doctor", "outbox.operations", "outbox.replay"},
}
#: What may import everything of its own package, and is imported by nobody.
ROOFS = {"__init__", "__main__"}


def _modules(package: str) -> dict[str, str]:
    """Source of every module of a package, by dotted name."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
        for file in sorted((ROOT / package).rglob("*.py"))
    }


def imports(module: str, source: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere in its text: ``outbox.store``, ``consumer``, …"""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the floor"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package in FLOORS:
                is_module = rest and (ROOT / package / rest[0]).with_suffix(".py").exists()
                is_package = rest and (ROOT / package / rest[0] / "__init__.py").exists()
                known = rest and any(rest[0] in floor for floor in FLOORS[package])
                yield f"{package}.{rest[0]}" if is_module or is_package or known else package


def _floor(module: str) -> int:
    package, _, name = module.partition(".")
    for number, names in enumerate(FLOORS[package]):
        if name in names:
            return number
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def violations(module: str, source: str) -> list[str]:
    """Imports of a module that the floors do not allow."""
    package, *rest = module.split(".")
    own = f"{package}.{rest[0]}" if rest else package
    found = []
    for wanted in sorted(set(imports(module, source))):
        to_package, _, to_name = wanted.partition(".")
        if wanted == own or wanted in EXCEPTIONS.get(module, set()):
            continue
        if to_package != package:
            allowed = package == "consumer" and to_name in LANGUAGE
        elif not rest or rest[0] in ROOFS:
            allowed = True
        elif own in ALONE:
            allowed = False
        else:
            allowed = bool(to_name) and wanted not in ALONE and _floor(wanted) < _floor(own)
        if not allowed:
            found.append(f"{module} imports {wanted}")
    return found


def _refuse_dynamic(module: str, source: str) -> list[str]:
    found = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return [f"{module} uses {name}" for name in found & {"import_module", "__import__"}]


@pytest.mark.parametrize("package", sorted(FLOORS))
def test_modules_import_only_from_floors_below(package: str) -> None:
    modules = _modules(package)
    assert len(modules) > 5
    for module in modules:
        if module != package and module not in ALONE and module.split(".")[1] not in ROOFS:
            _floor(".".join(module.split(".")[:2]))
    assert [line for module, source in modules.items() for line in violations(module, source)] == []


def test_only_the_command_that_loads_a_users_handlers_imports_by_name() -> None:
    found = [
        line for package in FLOORS for module, source in _modules(package).items()
        for line in _refuse_dynamic(module, source) if module != "consumer.cli"
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "what"),
    [
        ("outbox.relay", "import consumer", "consumer"),
        ("outbox.cli", "from consumer.ledger import x", "consumer.ledger"),
        ("outbox", "from consumer import Consumer", "consumer"),
        ("outbox.errors", "from outbox.envelope import Event", "outbox.envelope"),
        ("outbox.store", "from outbox import relay", "outbox.relay"),
        ("outbox.store", "def f():\n    import outbox.cli", "outbox.cli"),
        ("outbox.store", "if TYPE_CHECKING:\n    from outbox.relay import Relay", "outbox.relay"),
        ("outbox.store", "from outbox import Event", "outbox"),
        ("outbox.writer", "from outbox.relay import Relay", "outbox.relay"),
        ("outbox.transport.stream", "from outbox.store import x", "outbox.store"),
        ("outbox.embedded", "from outbox.errors import x", "outbox.errors"),
        ("outbox.relay", "from outbox import embedded", "outbox.embedded"),
        ("consumer.worker", "from outbox import store", "outbox.store"),
        ("consumer.worker", "from outbox import Event", "outbox"),
        ("consumer.reconcile", "from outbox.writer import Writer", "outbox.writer"),
        ("consumer.ledger", "from consumer.worker import x", "consumer.worker"),
    ],
)
def test_the_check_sees_a_violation(module: str, source: str, what: str) -> None:
    assert violations(module, source) == [f"{module} imports {what}"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outbox.relay", "from outbox import store\nfrom outbox.transport.base import Part\nimport psycopg"),
        ("outbox.transport.stream", "from outbox.transport.base import Part"),
        ("consumer.worker", "from outbox.errors import GroupLost\nfrom outbox import schema"),
        ("consumer.reconcile", "from outbox.store import Store"),
    ],
)
def test_the_check_allows_what_is_below(module: str, source: str) -> None:
    assert violations(module, source) == []


#: Imports every module under watch: no socket, no connection, and no look at the environment from a frame of ours (what
#: a foreign library does when it is imported is its own affair: the walk up the stack ends at the import system).
_WATCH = """
import importlib, os, sys
root, modules = sys.argv[1], sys.argv[2:]
ours = tuple(os.path.join(root, package) + os.sep for package in ("outbox", "consumer"))

def culprit():
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_filename.startswith(ours):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back

def report(what):
    if where := culprit():
        print(where, what)

def audit(event, arguments):
    if event.startswith("socket.") or event in ("subprocess.Popen", "os.system", "os.fork", "os.putenv"):
        report(event)

class Watched(type(os.environ)):
    def __getitem__(self, name):
        if not name.startswith("PYDANTIC_"):  # pydantic looks for its own when a class is made
            report(f"environment {name}")
        return super().__getitem__(name)
    def __iter__(self):
        report("environment")
        return super().__iter__()

os.environ.__class__ = Watched
sys.addaudithook(audit)
for module in modules:
    importlib.import_module(module)
print("imported", len(modules))
"""


def _import_watched(root: Path, modules: list[str]) -> list[str]:
    command = [sys.executable, "-c", _WATCH, str(root), *modules]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_opens_no_socket_and_reads_no_environment() -> None:
    modules = [m for package in FLOORS for m in _modules(package) if not m.endswith("__main__")]
    assert _import_watched(ROOT, modules) == [f"imported {len(modules)}"]


def test_the_watch_sees_a_socket_and_a_look_at_the_environment(tmp_path: Path) -> None:
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / "__init__.py").write_text(
        "import os, socket\nX = os.environ.get('DATABASE_URL')\nY = os.getenv('A', 'b')\n"
        "Z = {**os.environ}\nS = socket.socket()\n"
        "from pydantic_settings import BaseSettings\nclass P(BaseSettings):\n    a: int = 1\nP()\n"
    )
    *found, last = _import_watched(tmp_path, ["outbox"])
    lines = {int(line.split(":")[1].split()[0]) for line in found}
    assert last == "imported 1"
    assert lines >= {2, 3, 4, 5, 9}
