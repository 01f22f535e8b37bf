"""The pages against the code: marks, commands, options, names, links, fields and messages. test_pages_run.py runs them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pages import PAGES, REPOSITORY, Block, anchors, blocks, code_spans, links, prose, tables
from pd_format.jsonfile import Record
from pd_format.plan import Host, Plan, PlanPrediction, Stage, StagePrediction
from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile
from pd_plan.cli import main as plan
from pd_profile.cli import main as profile
from pd_train.checkpoint.part import PartRecord
from pd_train.cli import main as train
from pd_train.run_folder import RunOptionsRecord

PROGRAMS: dict[str, click.Command] = {"pd-profile": profile, "pd-plan": plan, "pd-train": train}
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
WITH_COMMANDS = [block for block in ALL_BLOCKS if block.commands]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@pytest.mark.parametrize("block", WITH_COMMANDS, ids=lambda block: block.place)
def test_a_block_with_commands_says_whether_it_runs(block: Block) -> None:
    assert block.runs is not None, f"{block.place}: no mark above it; see tests/pages.py"
    if block.runs:
        for begin, options in block.additions:
            assert options, f"{block.place}: found {begin!r}; expected `BEGINNING OF A COMMAND + OPTIONS`"
            assert any(command.startswith(begin) for command in block.commands), f"{block.place}: no {begin} there"
        assert (block.same_output or block.other_figures) == bool(block.shown), (
            f"{block.place}: is the output the same?"
        )
    else:
        assert block.mark, f"{block.place}: does not say why it is not run"


def test_no_mark_stands_before_nothing() -> None:
    marks = sum(len(re.findall(r"^\s*<!-- (?:not )?run\b", page.read_text(), re.MULTILINE)) for page in PAGES)

    assert marks == sum(block.runs is not None for block in ALL_BLOCKS)
    assert all(block.commands for block in ALL_BLOCKS if block.runs is not None)


def programs_of(command: str) -> Iterator[tuple[str, list[str]]]:
    """The programs of this project that a command runs, with their arguments."""
    words = shlex.split(command.replace(";", " ; ").replace("&&", " ; ").replace("|", " ; "))
    for place, word in enumerate(words):
        if word in PROGRAMS:
            rest = words[place + 1 :]
            yield word, rest[: rest.index(";")] if ";" in rest else rest


@pytest.mark.parametrize("block", WITH_COMMANDS, ids=lambda block: block.place)
def test_commands_have_the_options_that_they_are_given(block: Block) -> None:
    for command in block.script.splitlines():
        for name, arguments in programs_of(command):
            program = PROGRAMS[name]
            program.make_parser(click.Context(program, **program.context_settings)).parse_args(list(arguments))
        for script in re.findall(r"python (\S+\.py)", command):
            known = (REPOSITORY / script).read_text()
            assert not [option for option in OPTION.findall(command) if f'"{option}"' not in known], command


def options_of(program: click.Command) -> set[str]:
    named = {name for each in program.params for name in (*each.opts, *each.secondary_opts)}
    return named | {"--help"}


@by_page
def test_options_in_the_text_exist(page: Path) -> None:
    known = {name: options_of(program) for name, program in PROGRAMS.items()}
    of_scripts = {
        option for file in (REPOSITORY / "benchmarks").glob("*.py") for option in OPTION.findall(file.read_text())
    }
    for span in code_spans(page):
        first = span.split()[0] if span.split() else ""
        if first in PROGRAMS:
            allowed = known[first]
        elif first.startswith("--"):
            allowed = set.union(*known.values()) | of_scripts | OF_OTHERS
        else:  # A command of another program.
            continue
        assert not set(OPTION.findall(span)) - allowed, f"{page.name}: {span}"


OF_OTHERS = {"--cpus-per-task", "--distribution"}
"""Options of Slurm that pages name by themselves."""


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}; there is {sorted(anchors(found))}"


@by_page
def test_files_and_modules_in_the_text_exist(page: Path) -> None:
    text = prose(page)
    for name in re.findall(r"(?<![\w./-])((?:src|tests|benchmarks|examples|docs|pd_\w+)/[\w./-]*\.[a-z]\w*)", text):
        place = REPOSITORY / ("src" if name.startswith("pd_") else "") / name
        assert place.exists(), f"{page.name}: {name}"
    for package, module in re.findall(r"`(pd_(?:format|profile|plan|train))\.([a-z_]+)", text):
        place = REPOSITORY / "src" / package / module
        assert place.is_dir() or place.with_suffix(".py").exists(), f"{page.name}: {package}.{module}"


@by_page
def test_targets_of_make_exist(page: Path) -> None:
    known = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    commands = [command for block in blocks(page) for command in block.commands]
    for text in (*code_spans(page), *commands):
        if found := re.match(r"make ([a-z-]+)", text):
            assert found[1] in known, f"{page.name}: {text}"


def test_the_list_of_pages_has_all_of_them() -> None:
    listed = set(links(REPOSITORY / "docs" / "README.md"))

    assert listed >= {page.name for page in PAGES} - {"README.md"}


RECORDS: dict[str, type[Record]] = {
    'Profile: `"format": "pipedream-profile"`': Profile,
    "Layer": LayerProfile,
    "Model": ModelSpec,
    "Input": InputSpec,
    "Device": Device,
    'Plan: `"format": "pipedream-plan"`': Plan,
    "Stage": Stage,
    "Prediction of a stage": StagePrediction,
    "Prediction": PlanPrediction,
    "Host": Host,
    "Options of a run": RunOptionsRecord,
    "Checkpoint": PartRecord,
}


@pytest.mark.parametrize("heading", RECORDS)
def test_fields_of_files_are_those_of_the_records(heading: str) -> None:
    record = RECORDS[heading]
    rows = tables(REPOSITORY / "docs" / "files.md")[heading]
    found = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}

    assert sorted(found) == sorted(record.model_fields)
    for name, default in found.items():
        given_by_hand = record is LayerProfile and name == "trainable_bytes"
        of_the_profile = default == "as there"
        if name not in ("format", "version") and not given_by_hand and not of_the_profile:
            assert bool(default) != record.model_fields[name].is_required(), name


def texts_of_source() -> Iterator[str]:
    """Every text of the source, NUL where a value is put in."""
    for file in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_troubleshooting_are_those_of_the_programs() -> None:
    rows = [row for rows in tables(REPOSITORY / "docs" / "troubleshooting.md").values() for row in rows]
    quoted = [span for row in rows for span in re.findall(r"`([^`]+)`", row[0]) if " " in span]
    known = list(texts_of_source())

    assert len(quoted) > 30
    assert not [message for message in quoted if not any(holds(text, message.split("...")) for text in known)]


def holds(text: str, pieces: list[str]) -> bool:
    """Whether a text holds all pieces, in order."""
    end = 0
    for piece in pieces:
        place = text.find(piece, end)
        if place < 0:
            return False
        end = place + len(piece)
    return True
