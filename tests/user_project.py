"""A user's project in a folder of its own, with a pytest of its own that finds our plugin as users' do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_pytest(
    folder: Path, *options: str, files: Mapping[str, str], hidden: tuple[str, ...] = (), **env: str
) -> tuple[int, str]:
    """Run pytest in `folder`/project with these files; returns its exit code and what it said.

    The plugin is found by its entry point, as where the distribution is installed. No address of a server is inherited.

    Args:
        hidden: packages that are as good as not installed.
        env: variables of its environment.
    """
    about = folder / "installed" / "outbox_consumer_here-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outbox-consumer-here\nVersion: 0\n")
    declared = (ROOT / "pyproject.toml").read_text()
    points = re.search(r"^\[project\.entry-points\.pytest11\]\n(.+?)\n\n", declared, re.MULTILINE | re.DOTALL)
    assert points
    (about / "entry_points.txt").write_text("[pytest11]\n" + points[1].replace('"', "") + "\n")
    for name in hidden:
        (folder / "hidden" / name).mkdir(parents=True, exist_ok=True)
        for module in ("__init__.py", "pytest_plugin.py"):
            (folder / "hidden" / name / module).touch()
    project = folder / "project"
    project.mkdir(exist_ok=True)
    for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
        (project / name).write_text(text)
    inherited = {
        name: value for name, value in os.environ.items()
        if name not in ("CI", "DATABASE_URL", "REDIS_URL") and not name.startswith(("PYTEST_", "OUTBOX_", "CONSUMER_"))
    }  # fmt: skip
    paths = [folder / "hidden", about.parent, ROOT]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rsf", "--color=no", "-p", "no:cacheprovider", *options],
        cwd=project, env={**inherited, "PYTHONPATH": os.pathsep.join(map(str, paths)), **env},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110,
    )  # fmt: skip
    return done.returncode, done.stdout
