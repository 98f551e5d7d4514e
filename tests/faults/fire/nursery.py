"""Starts processes fast: everything is imported once, and then it forks. One killed -9 is back within milliseconds.

``python -m tests.faults.fire.nursery`` reads a line for each thing to do, and answers each with a line. It and its children end with
who started it.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from consumer.cli import app as consumer_app
from outbox.cli import app as outbox_app
from tests.faults.chaos import ROOT
from tests.faults.fire import work


class Nursery:
    """As a context manager; all processes are killed at its end.

    Args:
        log: where they write to.
    """

    def __init__(self, environment: Mapping[str, str], log: Path | None = None) -> None:
        with (log or Path(os.devnull)).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.fire.nursery"],
                cwd=ROOT, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                text=True, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def start(self, name: str, *command: str) -> None:
        """``outbox …``, ``consumer …``, or ``produce`` and the arguments of `work.produce`."""
        self._ask("start", name, *command)

    def kill(self, name: str) -> int | None:
        """SIGKILL; its exit code where it had ended by itself."""
        answer = self._ask("kill", name)
        return None if answer == "killed" else int(answer)

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, "the nursery has ended"
        return answer


def main() -> None:
    gc.freeze()
    children: dict[str, int] = {}
    try:
        while line := sys.stdin.readline():
            what, name, *command = line.split()
            answer = "started"
            if what == "start":
                pid = os.fork()
                if not pid:
                    _run(command)
                children[name] = pid
            else:
                pid = children.pop(name)
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    answer = str(os.waitstatus_to_exitcode(status))
                else:
                    answer = "killed"
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            print(answer, flush=True)
    finally:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)


def _run(command: list[str]) -> None:
    """Be that process; does not return."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        program, *arguments = command
        if program == "produce":
            work.produce(*arguments)
        else:
            {"outbox": outbox_app, "consumer": consumer_app}[program](arguments, standalone_mode=False)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
