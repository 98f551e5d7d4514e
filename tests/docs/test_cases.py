"""`tests/cases.md` lists every acceptance case; what it calls tested has a test that bears the number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def _numbers_in_tests() -> set[str]:
    text = "\n".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    names = re.findall(r"def test((?:_o_\d\d)+)", text)
    return {f"O-{number}" for name in names for number in re.findall(r"\d\d", name)}


def test_every_case_is_listed_once_and_tested_where_it_says_so() -> None:
    rows = re.findall(r"^\| (O-\d\d) \| (\w+) \|", (TESTS / "cases.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == [f"O-{n:02}" for n in range(1, 99)]
    tested = {number for number, state in rows if state == "tested"}
    assert tested - _numbers_in_tests() == set(), "said to be tested, but no test bears the number"
    assert _numbers_in_tests() - tested == set(), "tested, but not listed so"
