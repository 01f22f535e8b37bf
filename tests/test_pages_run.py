"""Runs the commands of the pages as they stand there, but for what their marks add (see pages.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import PAGES, REPOSITORY, blocks

WITH_RUNS = [page for page in PAGES if any(block.runs for block in blocks(page))]
LONGEST_S = 300
"""Of a block, on a machine that is busy with other things."""


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder that has what a clone has and commands name, and nothing that they could spoil."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    for name in ("examples", "profiles", "plans"):
        shutil.copytree(REPOSITORY / name, folder / name)
    (folder / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    (folder / "notes.txt").write_text("To be, or not to be, that is the question. " * 500)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which the three programs are those of this source tree."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("profile", "plan", "train"):
        file = programs / f"pd-{name}"
        file.write_text(
            f"#!{sys.executable}\nfrom pd_{name}.cli import main\n\nif __name__ == '__main__':\n    main()\n"
        )
        file.chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "80"}


def case_of(page: Path) -> object:
    """A page that only plans is quick; the others are left out unless asked for."""
    commands = [command for block in blocks(page) if block.runs for command in block.script.splitlines()]
    quick = all(command.startswith("pd-plan") for command in commands)
    return pytest.param(page, id=str(page.relative_to(REPOSITORY)), marks=() if quick else pytest.mark.pages)


@pytest.mark.parametrize("page", [case_of(page) for page in WITH_RUNS])
def test_commands_of_a_page_run(page: Path, scratch: Path, environment: dict[str, str]) -> None:
    for block in blocks(page):
        if not block.runs:
            continue
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.script],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        assert run.returncode == 0, f"{block.place}\n{block.script}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
        printed = iter([line.rstrip() for line in run.stdout.splitlines()])
        for line in block.shown if block.same_output else ():
            if line and line != "...":
                assert line in printed, f"{block.place}: {line!r} is not printed there\n{run.stdout}"
