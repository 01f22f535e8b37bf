"""Reads the pages, README.md and those below docs/: their blocks with the marks before them, their links, their names.

A mark is a comment on the line above a block, so that a reader sees the block alone:

    <!-- run -->                                        as it stands, in the order of the page, in a scratch folder
    <!-- run: pd-train --plan + --epochs 1; cat + -n -->    with options added to commands that begin so
    <!-- run: same output -->                           and what the block shows is printed, but for `...`
    <!-- run: other figures -->                         and what the block shows is not compared
    <!-- run: first pd-plan --config 1-1 -->            after a command that the page does not show
    <!-- not run: needs a second machine -->            and why not
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PAGES", "REPOSITORY", "Block", "anchors", "blocks", "code_spans", "links", "prose", "tables"]

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = tuple(sorted((REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"))))

_MARK = re.compile(r"^\s*<!-- (run|not run)(?:: (.*))? -->$")
_FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})\s*(\w*)\s*$")
_COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:pd-profile|pd-plan|pd-train|make|pip|python3?|torchrun|srun|sbatch|salloc|mpirun|mpiexec"
    r"|scp|ssh|kill|git|apt-get|docker|kubectl|tmux|tensorboard|cd|cat|eval|source|curl"
    r"|examples/\w+\.sh)(?= |$)"
)


@dataclass(frozen=True)
class Block:
    """A block of code, and the mark above it."""

    page: Path
    line: int
    """Of its first line, counted from 1."""
    text: str
    language: str = ""
    runs: bool | None = None
    """What the mark says; None where there is none."""
    mark: str = ""
    """What stands in the mark behind the colon."""
    commands: tuple[str, ...] = field(init=False)
    """Whole ones, continued lines joined, without prompts and comments."""
    shown: tuple[str, ...] = field(init=False)
    """The lines of a block with prompts that are no commands."""

    def __post_init__(self) -> None:
        commands, shown = _split(self.text) if self.language in ("", "sh", "bash", "console") else ((), ())
        object.__setattr__(self, "commands", commands)
        object.__setattr__(self, "shown", shown)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"

    @property
    def same_output(self) -> bool:
        return "same output" in self._items

    @property
    def other_figures(self) -> bool:
        return "other figures" in self._items

    @property
    def first(self) -> list[str]:
        """Commands that the page does not show."""
        return [item.removeprefix("first ") for item in self._items if item.startswith("first ")]

    @property
    def additions(self) -> list[tuple[str, str]]:
        """How commands begin, and what such ones are given besides."""
        others = ("same output", "other figures", *(f"first {command}" for command in self.first))
        pairs = [item.partition(" + ")[::2] for item in self._items if item not in others]
        return [(begin.strip(), options.strip()) for begin, options in pairs]

    @property
    def script(self) -> str:
        """The commands as they are run."""
        lines = self.first
        for command in self.commands:
            more = [options for begin, options in self.additions if command.startswith(begin)]
            lines.append(" ".join([command, *more]))
        return "\n".join(lines) + "\n"

    @property
    def _items(self) -> list[str]:
        return [item.strip() for item in self.mark.split(";")] if self.runs and self.mark else []


def _split(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    lines = text.splitlines()
    prompts = any(line.startswith("$ ") for line in lines)
    commands: list[str] = []
    shown: list[str] = []
    going_on = False
    for line in lines:
        if going_on:
            commands[-1] = commands[-1][:-1].rstrip() + " " + line.strip()
        elif line.startswith("$ ") if prompts else _COMMAND.match(line):
            commands.append(line.removeprefix("$ "))
        else:
            shown.append(line.rstrip())
            continue
        going_on = commands[-1].endswith("\\")
    bare = tuple(re.sub(r"\s+#( .*)?$", "", command) for command in commands)
    return bare, tuple(shown) if prompts else ()


def blocks(page: Path) -> Iterator[Block]:
    """All blocks of a page, fenced and indented ones, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    mark: re.Match[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        fence = _FENCE.match(line)
        start, language = number, ""
        if fence:
            start, language = number + 1, fence[3]
            number = start
            while number < len(lines) and not lines[number].strip().startswith(fence[2]):
                number += 1
            inside = lines[start:number]
            number += 1
        elif line.startswith("    ") and (number == 0 or not lines[number - 1].strip() or mark):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            inside = lines[start:number]
        else:
            found = _MARK.match(line)
            if found or line.strip():
                mark = found
            number += 1
            continue
        text = textwrap.dedent("\n".join(inside)).strip("\n")
        if mark:
            yield Block(page, start + 1, text, language, mark[1] == "run", mark[2] or "")
        else:
            yield Block(page, start + 1, text, language)
        mark = None


def prose(page: Path) -> str:
    """A page without its blocks and comments, whose lines keep their numbers."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        for number in range(block.line - 1, block.line - 1 + len(block.text.splitlines())):
            lines[number] = ""
    return re.sub(r"<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)


def code_spans(page: Path) -> list[str]:
    """What stands between backquotes in a page's prose."""
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose(page).replace("```", ""))]


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """What links may name of a page behind `#`, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The cells of all rows of the tables below each heading, headings of columns left out."""
    found: dict[str, list[list[str]]] = {}
    heading, rows = "", 0
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            rows = 0
            continue
        rows += 1
        if rows > 2:
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found
