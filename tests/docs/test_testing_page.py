"""docs/how-to/testing.md: its files, put into a folder, are a project whose tests pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.user_project import ROOT, run_pytest

PAGE = (ROOT / "docs/how-to/testing.md").read_text()


def test_the_pages_files_are_tests_that_pass(tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    files = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
    assert files.keys() == {"myapp.py", "conftest.py", "test_handlers.py", "test_retries.py", "test_whole.py"}
    assert PAGE.count("```python") == len(files)
    status, said = run_pytest(tmp_path, files=files, DATABASE_URL=postgres_url, REDIS_URL=redis_url)
    assert (status, "7 passed" in said) == (0, True), said


def test_the_page_names_the_fixtures_that_there_are() -> None:
    plugin = (ROOT / "pytest_outbox.py").read_text()
    fixtures = set(re.findall(r"^@pytest\.fixture.*\ndef (outbox_\w+)", plugin, re.MULTILINE))
    table = PAGE[PAGE.index("| fixture |") :]
    assert set(re.findall(r"^\| `(outbox_\w+)` \|", table, re.MULTILINE)) == fixtures


@pytest.mark.parametrize("name", ["seed", "shuffled", "times", "strict"])
def test_the_page_names_the_options_of_deliver(name: str) -> None:
    from inspect import signature

    from consumer.testing import Rehearsal

    assert name in signature(Rehearsal.deliver).parameters
    assert f"{name}=" in PAGE
