"""What the demo prints: a heading for each part, its steps, and each expected value beside the actual one."""

from __future__ import annotations

import sys
from typing import TextIO


class Report:
    """Prints as it goes, and remembers how many values were right and which were not."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self.checked = 0
        self.differing: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._print(f"\n{text}\n{'-' * len(text)}")

    def step(self, text: str) -> None:
        """Say what happens."""
        self._print(f"  {text}")

    def check(self, what: str, *, expected: object, actual: object) -> bool:
        """Show both values; returns whether they are the same."""
        same = expected == actual
        self.checked += 1
        if not same:
            self.differing.append(what)
        verdict = "ok" if same else "DIFFERS"
        self._print(f"  {what + ' ':.<46} expected {expected!s:<8} actual {actual!s:<8} {verdict}")
        return same

    def summary(self) -> int:
        """Print how it went; returns the exit status: 0 if everything was as expected and something was checked."""
        if self.differing or not self.checked:
            self._print(f"\n{len(self.differing)} of {self.checked} values differ: {', '.join(self.differing)}")
            return 1
        self._print(f"\nAll {self.checked} values are as expected.")
        return 0

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def riyal(halala: int) -> str:
    """An amount as people write it: 25000 is ``250.00``."""
    return f"{halala // 100}.{halala % 100:02}"
