"""`pd-train --report`: the tables of runs that were, and their pictures where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from pd_format.errors import UserError
from pd_train.comparison import comparison_table
from pd_train.metrics import METRICS
from pd_train.narrow import fitted
from pd_train.past_run import PastRun, read_run
from pd_train.run_table import print_run_table
from pd_train.terminal import open_console
from pd_train.usage import refuse_beside

__all__ = ["report_runs", "show_report"]

_TAKEN = frozenset({"report", "more", "output", "target_metric", "target_accuracy"})


def report_runs(folders: Sequence[Path], output: Path | None, given: Mapping[str, Any], typed: set[str]) -> None:
    """What the command line asks for.

    Args:
        folders: of the runs.
        output: see `show_report`.
        given: the command's options.
        typed: those on the command line.

    Raises:
        click.UsageError: `--report` is missing, or an option means nothing here.
        UserError: see `show_report`.
    """
    if "report" not in typed:
        if not folders:
            raise click.UsageError(f"--output {output} belongs to --report, as in --report runs/a --output pictures.")
        raise click.UsageError(
            f"Got unexpected extra argument ({folders[0]}): a plan follows --plan, folders of runs follow --report."
        )
    for name in sorted(typed - _TAKEN):
        refuse_beside("--report", name, "which trains nothing")
    show_report(folders, output, given["target_metric"], given["target_accuracy"])


def show_report(
    folders: Sequence[Path],
    output: Path | None = None,
    target: float | None = None,
    target_accuracy: float | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print what is known of one run, or compare several, and draw them.

    Args:
        folders: of the runs.
        output: folder for the pictures; None for the run's own, or for several the current one.
        target, target_accuracy: value of the metric instead of the one that the first run with one was to reach.
        stream: standard output by default.

    Raises:
        UserError: a folder holds no run, or runs cannot be compared.
    """
    stream = sys.stdout if stream is None else stream
    target = target if target_accuracy is None else target_accuracy
    runs = [read_run(folder, target) for folder in folders]
    if target_accuracy is not None and runs[0].metric != "accuracy":
        raise UserError(f"--target-accuracy: {runs[0].folder} is judged by {runs[0].metric}; give --target-metric.")
    for run in runs:
        if run.metric != runs[0].metric:
            raise UserError(
                f"{run.folder}: is judged by {run.metric}, {runs[0].folder} by {runs[0].metric}; name runs of one "
                "metric."
            )
    if target is None:
        target = next((run.target for run in runs if run.target is not None), None)
    most = METRICS[runs[0].metric].most
    if target is not None and most is not None and target > most:
        raise UserError(f"--target-metric: found {target:g}; a validation's {runs[0].metric} is at most {most:g}.")
    if len(runs) == 1:
        run = runs[0]
        print_run_table(run.plan, run.ended, run.epochs, run.folder, target, stream, run.state, run.time_scale)
    else:
        _compare(runs, target, stream)
    _draw(runs, output, target, stream)


def _compare(runs: Sequence[PastRun], target: float | None, stream: TextIO) -> None:
    console = open_console(stream, terminal=None)
    console.print(fitted(comparison_table(runs, target), console))
    for run in runs:
        if run.state is not None:
            console.print(f"{run.folder}: {run.state}.")
    for run in runs:
        if run.ended.performance is not None:
            console.print(f"\n{run.folder}: {run.ended.performance.bottleneck.sentence}")


def _draw(runs: Sequence[PastRun], output: Path | None, target: float | None, stream: TextIO) -> None:
    console = open_console(stream, terminal=None)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("\nPictures take matplotlib: pip install matplotlib")
        return
    from pd_train.pictures import draw_metric, draw_timeline

    folder = output or (runs[0].folder if len(runs) == 1 else Path())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error.strerror}); name another place.") from None
    written = draw_metric(runs, folder, target)
    if len(runs) == 1:
        written += draw_timeline(runs[0], folder)
    if written:
        names = sorted({path.with_suffix("").name for path in written})
        console.print(f"\nPictures in {folder}, as .svg and .png: {', '.join(names)}")
    else:
        console.print("\nThere is nothing to draw: no epoch is over.")
