"""Runs beside each other: how long each took to the target, against the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_train.past_run import PastRun
from pd_train.report import rate_of, time_to_target
from pd_train.terminal import UNKNOWN, seconds_text, value_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["comparison_table", "labels_of"]


def labels_of(runs: Sequence[PastRun]) -> list[str]:
    """A short name for each, which no other has: its folder's, with as many of those above as it takes."""
    places = [run.folder.resolve().parts for run in runs]
    length = 1
    while len({place[-length:] for place in places}) < len(set(places)) and length < max(map(len, places)):
        length += 1
    return ["/".join(place[-length:]) for place in places]


def comparison_table(runs: Sequence[PastRun], target: float | None) -> Table:
    """A row a run.

    Args:
        runs: judged by the same metric; the first is what the others are held against.
        target: value of their metric; None compares whole runs.
    """
    from rich.table import Table

    first = runs[0]
    title = "Whole runs; --target-metric compares the time to a value of the metric"
    if target is not None:
        title = f"To validation {first.metric} {value_text(first.metric, target)}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="none")
    table.add_column("run", overflow="fold")
    for head in ("plan", "best", "epochs", "seconds", "samples/s", "speed-up"):
        table.add_column(head, justify="right", no_wrap=True)
    figures = [_figures(run, target) for run in runs]
    base = figures[0]
    for label, run, each in zip(labels_of(runs), runs, figures, strict=True):
        best = run.ended.best_accuracy if run.metric == "accuracy" else run.ended.best_metric
        known = [label, run.plan.config, value_text(run.metric, best)]
        if each is None:
            table.add_row(*known, "never reached", *[UNKNOWN] * 3) if run.epochs else table.add_row(
                *known, *[UNKNOWN] * 4
            )
            continue
        epochs, seconds, rate = each
        # Whole runs may have trained for longer or shorter, so that their rates are what can be compared.
        ratio = None
        if base is not None:
            ratio = base[1] / seconds if target is not None else (rate or 0.0) / base[2] if base[2] else None
        table.add_row(
            *known,
            str(epochs),
            seconds_text(seconds),
            UNKNOWN if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}",
            UNKNOWN if ratio is None else f"{ratio:.2f} x",
        )
    return table


def _figures(run: PastRun, target: float | None) -> tuple[int, float, float | None] | None:
    """Epochs, seconds of training, samples a second; None where the target was never reached or nothing is known."""
    if target is not None:
        there = time_to_target(run.epochs, run.metric, target)
        if there.epochs is None or there.seconds is None:
            return None
        return there.epochs, there.seconds, there.samples_per_second
    if not run.epochs:
        return None
    return len(run.epochs), sum(one.seconds for one in run.epochs), rate_of(run.epochs)
