"""docs/reference/doctor.md explains every finding that the doctors can make, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVELS = {"ok", "warning", "error"}


def findings(source: str) -> set[tuple[str, str]]:
    """Code and level of every finding in a module."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in LEVELS]
    codes = [(call.args[0].value, call.func.id) for call in named if isinstance(call.args[0], ast.Constant)]  # type: ignore[attr-defined]
    assert len(codes) == len(named), "a code is not written out"
    return set(codes)


def test_every_finding_is_explained() -> None:
    made = {pair for package in ("outbox", "consumer") for pair in findings((ROOT / package / "doctor.py").read_text())}
    rows = re.findall(
        r"^\| `([a-z][a-z-]+)` \| ([a-z, ]+) \|", (ROOT / "docs/reference/doctor.md").read_text(), re.MULTILINE
    )
    explained = {(code, level) for code, levels in rows for level in levels.split(", ")}
    assert {code for code, _ in made} == {code for code, _ in explained}
    assert {pair for pair in made if pair[1] != "ok"} == {pair for pair in explained if pair[1] != "ok"}


def test_the_check_sees_a_finding() -> None:
    assert findings("yield warning('a', 'b', 'c')\nreturn ok('d', 'e')") == {("a", "warning"), ("d", "ok")}
