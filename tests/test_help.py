"""What the three programs say of their options: short enough to read, complete, and alike where they are named alike."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from pd_plan.cli import main as plan
from pd_profile.cli import main as profile
from pd_train.cli import main as train

PROGRAMS: dict[str, click.Command] = {"pd-profile": profile, "pd-plan": plan, "pd-train": train}
ROOT = Path(__file__).parent.parent
by_program = pytest.mark.parametrize("name", PROGRAMS)


def help_of(name: str, columns: int, option: str = "--help") -> str:
    # As on a terminal, whose last column stays free.
    result = CliRunner().invoke(PROGRAMS[name], [option], prog_name=name, terminal_width=columns - 1)
    assert result.exit_code == 0, result.output
    return result.output


def all_help(name: str, columns: int) -> str:
    return help_of(name, columns, "--help-all" if name == "pd-train" else "--help")


def options_of(name: str) -> dict[str, click.Option]:
    return {each.opts[0]: each for each in PROGRAMS[name].params if isinstance(each, click.Option)}


@by_program
@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_is_wider_than_the_terminal(name: str, columns: int) -> None:
    for text in (help_of(name, columns), all_help(name, columns)):
        assert [line for line in text.splitlines() if len(line) > columns] == []


@by_program
def test_every_option_is_explained_once(name: str) -> None:
    shown = re.findall(r"^  (?:-h, )?(--[a-z-]+)", all_help(name, 100), re.MULTILINE)
    assert Counter(shown) == Counter([*options_of(name), "--help"])


@pytest.mark.parametrize(("name", "lines"), [("pd-profile", 50), ("pd-plan", 50), ("pd-train", 68)])
def test_a_help_fits_a_screen(name: str, lines: int) -> None:
    assert help_of(name, 100).count("\n") <= lines


def test_the_help_of_a_first_day_names_every_option() -> None:
    assert set(options_of("pd-train")) <= set(re.findall(r"--[a-z-]+", help_of("pd-train", 80)))


@by_program
def test_an_option_is_said_in_one_short_line(name: str) -> None:
    for option in PROGRAMS[name].params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert len(re.sub(r"\s*\[default.*", "", option.help)) <= 60, option.name


SHARED = [
    (option, one, other)
    for one, other in (("pd-profile", "pd-plan"), ("pd-profile", "pd-train"), ("pd-plan", "pd-train"))
    for option in sorted(options_of(one).keys() & options_of(other))
]


@pytest.mark.parametrize(("option", "one", "other"), SHARED)
def test_options_of_one_name_take_the_same(option: str, one: str, other: str) -> None:
    first, second = options_of(one)[option], options_of(other)[option]
    if option != "--output":  # A file, or in pd-train the folder of pictures.
        assert first.metavar == second.metavar
        assert type(first.type) is type(second.type)
        assert first.is_flag == second.is_flag
    if option not in ("--optimizer", "--output") and isinstance(first.type, click.Choice):
        assert isinstance(second.type, click.Choice)
        assert first.type.choices == second.type.choices


def test_there_are_options_of_one_name() -> None:
    assert {option for option, _, _ in SHARED} >= {
        "--device",
        "--threads",
        "--seed",
        "--precision",
        "--hosts",
        "--data",
    }


@by_program
def test_metavars_are_in_capitals(name: str) -> None:
    for option in options_of(name).values():
        assert option.is_flag or (option.metavar and option.metavar == option.metavar.upper()), option.name


@by_program
def test_version_and_both_names_of_help(name: str) -> None:
    version = CliRunner().invoke(PROGRAMS[name], ["--version"], prog_name=name)
    assert re.fullmatch(rf"{name} \d+\.\d+\.\d+\n", version.output)
    assert help_of(name, 80, "-h") == help_of(name, 80)


@by_program
def test_choices_and_options_are_completed(name: str) -> None:
    complete = BashComplete(PROGRAMS[name], {}, name, "_COMPLETE")
    model = ["resnet18"] if name == "pd-profile" else []
    assert {"--seed", "--output"} <= {each.value for each in complete.get_completions(model, "--")}
    (choice,) = [each for each in options_of(name).values() if isinstance(each.type, click.Choice)][:1]
    assert isinstance(choice.type, click.Choice)
    found = complete.get_completions([*model, choice.opts[0]], "")
    assert [each.value for each in found] == list(choice.type.choices)
    kinds = {
        option: {each.type for each in complete.get_completions([*model, option], "")}
        for option in options_of(name)
        if isinstance(options_of(name)[option].type, click.Path)
    }
    folders = {"--run-dir", "--resume", "--report", "--output"} if name == "pd-train" else set()
    assert kinds == {option: {"dir" if option in folders else "file"} for option in kinds}
    assert kinds


@by_program
def test_every_option_is_in_the_page_of_options(name: str) -> None:
    page = (ROOT / "docs/options.md").read_text()
    section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)
    assert Counter(rows) == Counter(options_of(name).keys() - {"--version", "--help-all"})


def test_exit_codes_are_those_of_the_pages(tmp_path: Path) -> None:
    """0 and 1 and 2 of each; 130 and 143 of one that has no handler of its own."""
    assert [CliRunner().invoke(each, ["--version"]).exit_code for each in PROGRAMS.values()] == [0, 0, 0]
    assert [CliRunner().invoke(each, ["--gone"]).exit_code for each in PROGRAMS.values()] == [2, 2, 2]
    assert CliRunner().invoke(plan, ["--machines", "2", "--bandwidth", "1gbps", "--profile", "gone"]).exit_code == 1
    # A shell's background jobs, and all that they start, are given SIGINT as ignored.
    code = (
        "import signal, time, pd_plan.command as c; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "c._plan = lambda *a: (print('there', flush=True), time.sleep(60)); c.main()"
    )
    for signum, expected in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
        command = [sys.executable, "-c", code, "--machines", "2", "--bandwidth", "1gbps"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as program:
            assert program.stdout is not None
            assert program.stdout.readline() == b"there\n"
            os.kill(program.pid, signum)
            _, errors = program.communicate(timeout=30)
            assert program.returncode == expected
            assert b"Traceback" not in errors
