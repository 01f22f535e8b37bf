"""What each stage did in the steady state: a row a stage, with as many columns as the terminal is wide enough for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pd_format.units import format_bytes
from pd_train.breakdown import Breakdown, Performance, StageBreakdown, TransferBreakdown
from pd_train.narrow import fitted
from pd_train.terminal import UNKNOWN, figure_text, share_text, signed_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_stages", "stage_table"]

_WIDE = 150
"""Columns of a terminal that takes all figures."""


class _Column(NamedTuple):
    head: str
    cell: Callable[[StageBreakdown], str]
    narrow: bool = True
    """Whether a narrow terminal shows it."""
    wide: bool = True


_COLUMNS = (
    _Column("stage", lambda one: f"{one.index} x{one.replicas}" if one.replicas > 1 else str(one.index)),
    _Column("busy", lambda one: share_text(one.utilisation)),
    _Column("compute", lambda one: figure_text(one.compute_ms)),
    _Column("planned", lambda one: figure_text(one.predicted_compute_ms)),
    _Column("", lambda one: signed_text(one.compute_difference)),
    _Column("forward", lambda one: _steady(one, "forward"), narrow=False),
    _Column("backward", lambda one: _steady(one, "backward"), narrow=False),
    _Column("update", lambda one: _steady(one, "update")),
    _Column("packing", lambda one: _steady(one, "other")),
    _Column("waits:\ninput", lambda one: _steady(one, "wait_activations", "wait_gradients"), wide=False),
    _Column("waits:\nactiv.", lambda one: _steady(one, "wait_activations"), narrow=False),
    _Column("\ngradients", lambda one: _steady(one, "wait_gradients"), narrow=False),
    _Column("\nsync", lambda one: _steady(one, "wait_sync")),
    _Column("\ndata", lambda one: _steady(one, "wait_data")),
    _Column("hidden:\ncuts", lambda one: share_text(one.cut.hidden)),
    _Column("\nsync", lambda one: share_text(one.sync.hidden)),
    _Column("a transfer:\ncuts", lambda one: _mean(one.cut), narrow=False),
    _Column("\nsync", lambda one: _mean(one.sync), narrow=False),
    _Column("start-up,\ns", lambda one: figure_text(one.start_up_seconds), narrow=False),
    _Column("drain,\ns", lambda one: figure_text(one.drain_seconds), narrow=False),
    _Column("memory", lambda one: _bytes(one.peak_memory_bytes), narrow=False),
    _Column("planned", lambda one: _bytes(one.predicted_memory_bytes), narrow=False),
)


def stage_table(figures: Breakdown, width: int) -> Table:
    """The figures of the stages.

    Args:
        figures: of the run.
        width: of the terminal, in columns.
    """
    from rich.table import Table

    table = Table(
        title="Stages, in ms a minibatch on a worker in the steady state",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 0 if width < _WIDE else 1, 0, 1),
        header_style="none",
    )
    columns = [each for each in _COLUMNS if (each.wide if width >= _WIDE else each.narrow)]
    for each in columns:
        table.add_column(each.head, justify="left" if each.head == "stage" else "right", no_wrap=True)
    for stage in figures.stages:
        table.add_row(*(each.cell(stage) for each in columns))
    return table


def print_stages(performance: Performance | None, console: Console) -> None:
    """Print `stage_table` and the sentence about the bottleneck, where anything is known."""
    if performance is not None:
        table = stage_table(performance.breakdown, console.width)
        console.print(fitted(table, console, headless="difference"))
        console.print(f"\n{performance.bottleneck.sentence}")


def _steady(stage: StageBreakdown, *doings: str) -> str:
    return UNKNOWN if stage.steady_ms is None else figure_text(sum(stage.steady_ms[doing] for doing in doings))


def _mean(transfers: TransferBreakdown) -> str:
    return figure_text(1e3 * transfers.seconds / transfers.count) if transfers.count else UNKNOWN


def _bytes(size: int | None) -> str:
    return UNKNOWN if size is None else format_bytes(size)
