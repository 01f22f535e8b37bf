"""Ctrl-C at any moment of a program's life: exit code 130, a short line or nothing, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pd_format.interrupts import Program, ending_at_once

SRC = Path(__file__).parent.parent / "src"

INTERRUPTED = """
import atexit, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # What a shell starts in the background ignores it.
program, moment = sys.argv[1:3]
del sys.argv[1:3]


def interrupt():
    os.write(1, b"interrupted\\n")
    signal.raise_signal(signal.SIGINT)


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            interrupt()


sys.meta_path.insert(0, Finder())
if moment == "the end":
    atexit.register(interrupt)
main = getattr(__import__(program + ".cli", fromlist=["main"]), "main")
if moment == "between":
    interrupt()
main()
"""


@pytest.mark.parametrize(
    ("program", "moment", "arguments"),
    [
        ("pd_plan", "pd_plan.command", []),
        ("pd_plan", "click.core", []),
        ("pd_plan", "pd_format.units", ["--machines", "2", "--bandwidth", "1gbps"]),
        ("pd_plan", "pd_format.hosts", ["--machines", "2", "--bandwidth", "1gbps", "--hosts", "gone"]),
        ("pd_plan", "rich.console", ["--machines", "2", "--bandwidth", "1gbps"]),
        ("pd_plan", "pydantic", ["--machines", "2", "--bandwidth", "1gbps"]),
        ("pd_plan", "the end", ["--version"]),
        ("pd_profile", "cloup", []),
        ("pd_profile", "torch", ["gone.py:f"]),
        ("pd_profile", "the end", ["--help"]),
        ("pd_train", "pydantic", []),
        ("pd_train", "pd_train.settling", []),
        ("pd_train", "pd_train.launch", []),
        ("pd_train", "pd_train.past_run", ["--report", "gone"]),
        ("pd_train", "the end", ["--plan", "gone"]),
    ],
)
def test_ctrl_c_shows_no_traceback(program: str, moment: str, arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, program, moment, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "interrupted" in done.stdout, "no such moment"
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_it_is_in_force_before_anything_slow_is_loaded() -> None:
    code = "import sys; before = set(sys.modules); import pd_format.interrupts; print(*(set(sys.modules) - before))"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()
    assert "pd_format.interrupts" in loaded
    assert not {"typing", "re", "contextlib", "inspect", "threading", "click"} & set(loaded)


def test_what_was_printed_is_not_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "pd_plan", "the end", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.startswith("pd-plan ")


@click.command(cls=type("Command", (Program, click.Command), {}))
def takes() -> None:
    """Say how the body takes Ctrl-C."""
    click.echo(signal.getsignal(signal.SIGINT))
    raise KeyboardInterrupt


@pytest.fixture
def handler() -> Iterator[Callable[[], object]]:
    """Ctrl-C as Python takes it by default, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_within_the_body_it_is_an_exception(handler: Callable[[], object]) -> None:
    with ending_at_once():
        assert handler() is not signal.default_int_handler
        result = CliRunner().invoke(takes)
        assert handler() is not signal.default_int_handler
    assert (result.exit_code, result.output) == (130, f"{signal.default_int_handler}\n")
    assert handler() is signal.default_int_handler


def test_what_somebody_else_chose_stays(handler: Callable[[], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ending_at_once():
        assert handler() is signal.SIG_IGN
        assert CliRunner().invoke(takes).output == f"{signal.SIG_IGN!s}\n"
    assert handler() is signal.SIG_IGN


def test_another_thread_than_the_first_changes_nothing(handler: Callable[[], object]) -> None:
    seen = []

    def look() -> None:
        with ending_at_once():
            seen.append(handler())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
