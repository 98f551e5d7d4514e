"""docs/operations/dead-letters.md explains every reason for which an event is put aside, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: A letter that is written, an event that failed for good, and one that waits for something else; all by name, but for two.
REASONS = re.compile(r'_letter\(item, "(\w+)"|\breason = "(\w+)"|_park\(item, "(\w+)"')
COMPOSED = {"no_key", "no_version"}


def test_every_reason_is_explained() -> None:
    sources = "".join((ROOT / "consumer" / name).read_text() for name in ("process.py", "work.py"))
    made = {next(filter(None, found)) for found in REASONS.findall(sources)} | COMPOSED
    page = (ROOT / "docs/operations/dead-letters.md").read_text()
    table = page.partition("| reason | what has happened |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row]
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert {"attempts", "payload", "gap", "undecodable"} <= made, "the check sees them"
    assert sorted(explained) == sorted(made), "each once"
