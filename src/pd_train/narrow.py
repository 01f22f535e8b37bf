"""A table on a terminal that is too narrow for it: its rows become columns, as many beside each other as there is room.

    worker   stage   memory                worker       0        1
    ───────────────────────   becomes      stage        0        1
         0       0  8.06 MB                memory 8.06 MB  11.4 MB
         1       1  11.4 MB

Cut to the terminal's width, as rich would, columns lose what they are there for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["fitted"]

_FOLDED = 14
"""Characters of a line of a column that may be folded, at least."""
_GAP = 2


def fitted(table: Table, console: Console, headless: str = "") -> RenderableType:
    """The table as it is, where it fits the console, else turned.

    Args:
        table: with a head and rows of text.
        console: that it is for.
        headless: what a column without a head is called where it is a row.
    """
    from rich.console import Group
    from rich.measure import Measurement
    from rich.text import Text

    width = console.width
    wide = console.options.update(width=10_000)
    natural = Measurement.get(console, wide, table).maximum
    for column in table.columns:
        if column.overflow == "fold" and not column.no_wrap:
            natural -= max(0, _longest(list(map(str, column.cells))) - _FOLDED)
    if natural <= width:
        return table
    heads = [label or headless for label in _labels(table)]
    rows = [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]
    parts: list[RenderableType] = []
    for each in _groups(heads, rows, width):
        parts += [""] if parts else []
        parts.append(_turned(heads, each))
    # A table without a title stands among lines of text.
    parts = [Text(str(table.title), style="bold"), *parts] if table.title else ["", *parts, ""]
    if table.caption:
        parts.append(str(table.caption))
    return Group(*parts)


def _labels(table: Table) -> Iterator[str]:
    """Of heads in two lines the upper one holds for all that follow without one."""
    group = ""
    for column in table.columns:
        upper, is_double, lower = str(column.header).partition("\n")
        group = (upper or group) if is_double else ""
        yield f"{group} {lower}" if is_double else upper


def _groups(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Rows that have room beside each other; a row that has none is alone."""
    group: list[Sequence[str]] = []
    used = _longest(heads)
    for row in rows:
        needed = _GAP + _longest(row)
        if group and used + needed > width:
            yield group
            group, used = [], _longest(heads)
        group.append(row)
        used += needed
    if group:
        yield group


def _turned(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 0, 0, _GAP), pad_edge=False)
    table.add_column(no_wrap=True)
    for _ in rows:
        table.add_column(justify="right", overflow="fold")
    for index, head in enumerate(heads):
        table.add_row(head, *(row[index] for row in rows), style="" if index else "bold")
    return table


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)
