"""The tables at the end of a run and of an evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pd_format.plan import Plan
from pd_format.units import format_bytes, format_ms
from pd_train.breakdown import Breakdown, TimeToTarget
from pd_train.events import EpochMetrics, Evaluated, RunEnded
from pd_train.report import rate_of
from pd_train.stage_table import print_stages
from pd_train.terminal import (
    UNKNOWN,
    count_text,
    difference_text,
    loss_text,
    open_console,
    percent_text,
    plan_text,
    rate_text,
    seconds_text,
    value_text,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["evaluation_table", "print_evaluation_table", "print_run_table", "run_table"]


def run_table(
    plan: Plan,
    ended: RunEnded,
    epochs: Sequence[EpochMetrics],
    run_dir: Path,
    target: float | None = None,
    state: str | None = None,
    time_scale: float | None = None,
) -> Table:
    """The figures of a whole run, for its end.

    Args:
        plan: that the run followed.
        ended: the last event.
        epochs: metrics of each epoch.
        run_dir: where the run's files are.
        target: value of the run's metric, or None where none was asked for.
        state: of a run that is not at its end.
        time_scale: of an emulated run, which has learnt nothing.
    """
    from rich.table import Table

    table = Table(title="Run", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("plan", plan_text(plan))
    if state is not None:
        table.add_row("state", state)
    if time_scale is None:
        best = ended.best_accuracy if ended.metric == "accuracy" else ended.best_metric
        table.add_row(f"best validation {ended.metric}", value_text(ended.metric, best))
    else:
        table.add_row("emulated", f"no pass was computed; times are the model's, 1/{time_scale:g} of the clock's")
    performance = ended.performance
    if target is not None:
        there = None if performance is None else performance.target
        table.add_row(f"target {value_text(ended.metric, target)}", _target_text(ended, there))
    if time_scale is None:
        table.add_row("training time", f"{seconds_text(ended.seconds)}, {count_text(ended.epochs, 'epoch')}")
        rate = rate_of(epochs) if ended.samples_per_second is None else ended.samples_per_second
        table.add_row("throughput", rate_text(rate))
    if performance is not None:
        for row in _pace_rows(performance.breakdown):
            table.add_row(*row)
    sent = _sent_per_minibatch(ended)
    table.add_row("sent a minibatch", UNKNOWN if sent is None else f"{format_bytes(sent)}, all workers together")
    baseline = plan.predicted.data_parallel_bytes_per_minibatch
    text = f"{format_bytes(baseline)} on {count_text(plan.machines, 'machine')}"
    if plan.compress_gradients is not None:
        text += ", compressed likewise"
    if sent is not None and baseline > 0:
        per_cent = round(100 * (1 - sent / baseline))
        difference = f"{abs(per_cent)} % {'less' if per_cent > 0 else 'more'}" if per_cent else "as much"
        text += f"; this run sent {difference}"
    table.add_row("data parallelism, computed", text)
    if ended.peak_memory_bytes is not None:
        pairs = zip(ended.peak_memory_bytes, plan.stages, strict=True)
        texts = [f"{format_bytes(p)} (planned {format_bytes(s.predicted.memory_bytes)})" for p, s in pairs]
        table.add_row("most memory, by stage", ", ".join(texts))
    if ended.skipped_updates is not None:
        by_stage = ", ".join(map(str, ended.skipped_by_stage or ()))
        text = f"{ended.skipped_updates}, gradients not finite; by stage {by_stage}"
        table.add_row("updates left out", text if ended.skipped_updates else "none")
    if ended.restarts:
        table.add_row("restarts", f"{ended.restarts}, {seconds_text(ended.lost_seconds)} lost")
    if ended.refused_messages:
        table.add_row("refused messages", str(ended.refused_messages))
    table.add_row("files", str(run_dir))
    return table


def _target_text(ended: RunEnded, there: TimeToTarget | None) -> str:
    if there is None or there.epochs is None or there.seconds is None or there.samples_per_epoch is None:
        reached = f"reached in {seconds_text(ended.seconds)}, {count_text(ended.epochs, 'epoch')}"
        return reached if ended.reached_target else "not reached"
    return (
        f"reached in {seconds_text(there.seconds)}: {count_text(there.epochs, 'epoch')} of "
        f"{there.samples_per_epoch:,.0f} samples at {rate_text(there.samples_per_second)}"
    )


def _pace_rows(figures: Breakdown) -> Iterator[tuple[str, str]]:
    """The time of a minibatch as measured and as planned."""
    text = UNKNOWN
    if figures.minibatch_ms is not None:
        text = f"{format_ms(figures.minibatch_ms)} in the steady state"
    planned = UNKNOWN if figures.predicted_minibatch_ms is None else format_ms(figures.predicted_minibatch_ms)
    yield "a minibatch, measured", text
    difference = ""
    if figures.difference is not None:
        difference = f"; the measured time is {difference_text(figures.difference)}"
    yield "a minibatch, planned", planned + difference
    if figures.overall_minibatch_ms is not None:
        yield "with start-up and drain", format_ms(figures.overall_minibatch_ms)
    if figures.timed_minibatches < figures.minibatches:
        yield "timed", f"{figures.timed_minibatches} of {figures.minibatches} minibatches"


def _sent_per_minibatch(ended: RunEnded) -> float | None:
    """Bytes; of a run that broke off, what its workers received."""
    if ended.training_bytes_sent is not None and ended.minibatches:
        return ended.training_bytes_sent / ended.minibatches
    if ended.performance is None:
        return None
    figures = ended.performance.breakdown
    cut, sync = figures.cut_bytes_per_minibatch, figures.sync_bytes_per_minibatch
    return None if cut is None or sync is None else cut + sync


def print_run_table(
    plan: Plan,
    ended: RunEnded,
    epochs: Sequence[EpochMetrics],
    run_dir: Path,
    target: float | None = None,
    stream: TextIO | None = None,
    state: str | None = None,
    time_scale: float | None = None,
) -> None:
    """Print `run_table`, and what its stages did, on standard output by default."""
    console = open_console(sys.stdout if stream is None else stream, terminal=None)
    console.print(run_table(plan, ended, epochs, run_dir, target, state, time_scale))
    print_stages(ended.performance, console)


def evaluation_table(plan: Plan, ended: Evaluated, weights: str, run_dir: Path) -> Table:
    """The figures of an evaluation.

    Args:
        plan: that the forward passes followed.
        ended: what came out.
        weights: what was evaluated, as it was named.
        run_dir: where the report is.
    """
    from rich.table import Table

    table = Table(title="Evaluation", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("plan", plan_text(plan))
    table.add_row("weights", weights)
    table.add_row("validation loss", loss_text(ended.validation_loss))
    if ended.validation_accuracy is not None:
        table.add_row("validation accuracy", percent_text(ended.validation_accuracy))
    if ended.metric not in ("accuracy", "loss"):
        table.add_row(f"validation {ended.metric}", value_text(ended.metric, ended.metric_value))
    table.add_row("samples", f"{ended.samples} in {seconds_text(ended.seconds)}")
    table.add_row("throughput", rate_text(ended.samples_per_second))
    table.add_row("files", str(run_dir))
    return table


def print_evaluation_table(
    plan: Plan, ended: Evaluated, weights: str, run_dir: Path, stream: TextIO | None = None
) -> None:
    """Print `evaluation_table`, on standard output by default."""
    console = open_console(sys.stdout if stream is None else stream, terminal=None)
    console.print(evaluation_table(plan, ended, weights, run_dir))
