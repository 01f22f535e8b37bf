"""Lines, columns and paragraphs of what pd-plan prints: within 80 columns where there is no terminal to ask."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

__all__ = ["CONFIG_WIDTH", "line", "paragraph", "row", "short_config"]

CONFIG_WIDTH = 17
_PARAGRAPH_WIDTH = 100


def line(console: Console, text: str, style: str = "") -> None:
    """Print one line as it is, however long."""
    console.print(Text(text, style=style), soft_wrap=True)


def paragraph(console: Console, text: str, style: str = "") -> None:
    """Print a sentence, wrapped at words."""
    for part in textwrap.wrap(text, min(console.width, _PARAGRAPH_WIDTH) - 1, break_on_hyphens=False):
        line(console, part, style)


def row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in columns: to the right, or to the left where the width is negative."""
    placed = (cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return " ".join(placed).rstrip()


def short_config(config: str, width: int = CONFIG_WIDTH) -> str:
    """A config as it is where it fits the width, else its ends and the number of stages: `1-1-..-1 (1000)`."""
    if len(config) <= width:
        return config
    replicas = config.split("-")
    return f"{'-'.join(replicas[:2])}-..-{replicas[-1]} ({len(replicas)})"
