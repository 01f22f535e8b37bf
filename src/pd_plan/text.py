"""Lines, columns and paragraphs of what pd-plan prints: within 80 columns where there is no terminal to ask."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

__all__ = ["CONFIG_WIDTH", "Columns", "line", "paragraph", "short_config"]

CONFIG_WIDTH = 17
_PARAGRAPH_WIDTH = 100


def line(console: Console, text: str, style: str = "") -> None:
    """Print one line as it is, however long."""
    console.print(Text(text, style=style), soft_wrap=True)


def paragraph(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, wrapped at words."""
    for part in textwrap.wrap(text, min(console.width, _PARAGRAPH_WIDTH) - 1, break_on_hyphens=False):
        line(console, part, style)


class Columns:
    """A table, printed line by line; on a terminal that is too narrow for it each line becomes a few, with the heads.

    Args:
        console: to print on.
        heads: of the columns.
        widths: of the columns: to the right, or to the left where negative.
    """

    def __init__(self, console: Console, heads: Sequence[str], widths: Sequence[int]) -> None:
        self._console, self._heads, self._widths = console, heads, widths
        self.fits: Final = sum(map(abs, widths)) + len(widths) - 1 <= console.width
        if self.fits:
            line(console, self._placed(heads), "bold")

    def row(self, cells: Sequence[str], style: str = "") -> None:
        """Print one line of the table."""
        if self.fits:
            return line(self._console, self._placed(cells), style)
        line(self._console, f"{self._heads[0]} {cells[0]}".strip(), style or "bold")
        # A head and its figure stay together.
        named = (f"{head} {cell}" for head, cell in zip(self._heads[1:], cells[1:], strict=True) if cell)
        text = ", ".join(each.replace(" ", "\N{NO-BREAK SPACE}") for each in named)
        for part in textwrap.wrap(text, self._console.width - 3, break_on_hyphens=False):
            line(self._console, f"  {part}".replace("\N{NO-BREAK SPACE}", " "))

    def _placed(self, cells: Sequence[str]) -> str:
        pairs = zip(cells, self._widths, strict=True)
        return " ".join(cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in pairs).rstrip()


def short_config(config: str, width: int = CONFIG_WIDTH) -> str:
    """A config as it is where it fits the width, else its ends and the number of stages: `1-1-..-1 (1000)`."""
    if len(config) <= width:
        return config
    replicas = config.split("-")
    return f"{'-'.join(replicas[:2])}-..-{replicas[-1]} ({len(replicas)})"
