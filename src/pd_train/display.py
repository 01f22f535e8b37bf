"""Shows a run to the person who watches it: a live view on a terminal, plain lines anywhere else (design, section 7).

epoch 1/10  loss 0.8124  validation 0.3012, accuracy 91.27 %  2140 samples/s
epoch 2/10  training    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                   23/45
            2140 samples/s   loss 0.3127   0:14 left
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from pd_format.plan import Plan
from pd_format.units import format_bytes
from pd_train.events import EpochEnded, EpochMetrics, Evaluated, Event, Note, Progress, RunEnded, RunStarted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["Display", "evaluation_table", "open_display", "print_evaluation_table", "print_run_table", "run_table"]

PLAIN_INTERVAL_S = 5.0
UNKNOWN = "-"


class Display(Protocol):
    """Takes the events of a run as they come; `close` gives the terminal back."""

    def handle(self, event: Event) -> None:
        """Show an event, at once or with the next refresh."""

    def close(self) -> None:
        """Show nothing more. Closing twice does no harm."""


def open_display(
    terminal: bool | None = None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = datetime.now,
) -> Display:
    """Open the display that suits the stream.

    Args:
        terminal: whether to draw a live view; None asks the stream, and `TERM` whether it can move its cursor.
        stream: standard output by default.
        clock: seconds, for the pace of plain lines.
        now: the time of day that plain lines start with.
    """
    stream = sys.stdout if stream is None else stream
    if terminal is None:
        terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if terminal:
        return _LiveDisplay(stream)
    return _PlainDisplay(stream, clock, now)


class _TimeLeft:
    """Estimates what is left of a run from the pace that its phases have had so far."""

    def __init__(self) -> None:
        self._epoch_s: dict[str, float] = {}

    def update(self, event: Progress) -> float | None:
        """Seconds left in all epochs, or None while nothing is known.

        Validation counts from the first one on that has been seen.
        """
        if not event.done or event.seconds <= 0:
            return None
        whole = event.seconds / event.done * event.minibatches
        self._epoch_s[event.phase] = whole
        left = whole - event.seconds
        if event.phase == "training":
            left += self._epoch_s.get("validation", 0.0)
        return max(0.0, left) + (event.epochs - event.epoch - 1) * sum(self._epoch_s.values())


class _PlainDisplay:
    """A line every few seconds, and one an epoch."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        self._time_left = _TimeLeft()
        self._stream = stream
        self._clock = clock
        self._now = now
        self._last = clock()

    def handle(self, event: Event) -> None:
        if isinstance(event, Progress):
            left = self._time_left.update(event)
            if self._clock() - self._last >= PLAIN_INTERVAL_S:
                self._print(
                    f"epoch {event.epoch + 1}/{event.epochs}  {event.phase} {event.done}/{event.minibatches}  "
                    + _figures(event, left)
                )
        elif isinstance(event, EpochEnded):
            self._print(_epoch_line(event))
        elif isinstance(event, Note):
            self._print(event.text)
        elif isinstance(event, RunStarted):
            self._print(_start_line(event))

    def close(self) -> None:
        self._stream.flush()

    def _print(self, text: str) -> None:
        print(f"{self._now():%H:%M:%S}  {text}", file=self._stream, flush=True)
        self._last = self._clock()


class _LiveDisplay:
    """A bar with its figures below it, drawn over itself; the lines of epochs and notes scroll away above."""

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._time_left = _TimeLeft()
        self._console = _console(stream, terminal=True)
        # Events come some ten times a second, so no thread is needed to draw.
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()

    def handle(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._live.update(_bar(event, self._time_left.update(event)), refresh=True)
        elif isinstance(event, EpochEnded):
            self._console.print(_epoch_line(event), markup=False, highlight=False)
        elif isinstance(event, Note):
            self._console.print(event.text, markup=False, highlight=False, style="yellow")
        elif isinstance(event, RunStarted):
            self._console.print(_start_line(event), markup=False, highlight=False)
        else:
            self.close()

    def close(self) -> None:
        self._live.stop()


def _bar(event: Progress, left: float | None) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = f"epoch {event.epoch + 1}/{event.epochs}  "
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(
        Text(f"{head}{event.phase:<10}  "),
        ProgressBar(total=max(1, event.minibatches), completed=event.done),
        Text(f"  {event.done}/{event.minibatches}"),
    )
    return Group(line, Text(" " * len(head) + _figures(event, left), no_wrap=True, overflow="crop"))


def _figures(event: Progress, left: float | None) -> str:
    rate = event.samples / event.seconds if event.seconds > 0 and event.samples else None
    return f"{_rate(rate)}   loss {_loss(event.loss)}   {_duration(left)} left"


def _start_line(event: RunStarted) -> str:
    workers = f"{_count(event.workers, 'worker')} of {_count(event.threads, 'thread')} each"
    return f"plan {event.config}: starting {workers}; the run's files go to {event.run_dir}"


def _epoch_line(event: EpochEnded) -> str:
    metrics = event.metrics
    parts = [f"epoch {metrics.epoch + 1}/{event.epochs}", f"loss {_loss(metrics.train_loss)}"]
    if metrics.validation_loss is not None or metrics.validation_accuracy is not None:
        text = f"validation {_loss(metrics.validation_loss)}"
        if metrics.metric == "accuracy" or metrics.validation_accuracy is not None:
            text += f", accuracy {_percent(metrics.validation_accuracy)}"
        if metrics.metric not in ("accuracy", "loss"):
            text += f", {metrics.metric} {_value(metrics.metric, metrics.judged)}"
        parts.append(text)
    parts.append(_rate(metrics.samples_per_second if metrics.samples_per_second > 0 else None))
    return "  ".join(parts)


def run_table(
    plan: Plan,
    ended: RunEnded,
    epochs: Sequence[EpochMetrics],
    run_dir: Path,
    target: float | None = None,
) -> Table:
    """The figures of a whole run, for its end.

    Args:
        plan: that the run followed.
        ended: the last event.
        epochs: metrics of each epoch.
        run_dir: where the run's files are.
        target: value of the run's metric, or None where none was asked for.
    """
    from rich.table import Table

    table = Table(title="Run", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    stages, workers = len(plan.stages), plan.workers
    table.add_row("plan", f"{plan.config} ({_count(stages, 'stage')}, {_count(workers, 'worker')})")
    best = ended.best_accuracy if ended.metric == "accuracy" else ended.best_metric
    table.add_row(f"best validation {ended.metric}", _value(ended.metric, best))
    if target is not None:
        reached = f"reached in {_seconds(ended.seconds)}, {_count(ended.epochs, 'epoch')}"
        table.add_row(f"target {_value(ended.metric, target)}", reached if ended.reached_target else "not reached")
    table.add_row("training time", f"{_seconds(ended.seconds)}, {_count(ended.epochs, 'epoch')}")
    seconds = sum(metrics.seconds for metrics in epochs)
    samples = sum(metrics.seconds * metrics.samples_per_second for metrics in epochs)
    table.add_row("throughput", _rate(samples / seconds if seconds > 0 else None))
    sent = ended.training_bytes_sent / ended.minibatches if ended.minibatches else None
    table.add_row("sent a minibatch", UNKNOWN if sent is None else f"{format_bytes(sent)}, all workers together")
    baseline = plan.predicted.data_parallel_bytes_per_minibatch
    text = f"{format_bytes(baseline)} on {_count(plan.machines, 'machine')}"
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
        table.add_row("restarts", f"{ended.restarts}, {_seconds(ended.lost_seconds)} lost")
    if ended.refused_messages:
        table.add_row("refused messages", str(ended.refused_messages))
    table.add_row("files", str(run_dir))
    return table


def print_run_table(
    plan: Plan,
    ended: RunEnded,
    epochs: Sequence[EpochMetrics],
    run_dir: Path,
    target: float | None = None,
    stream: TextIO | None = None,
) -> None:
    """Print `run_table`, on standard output by default."""
    console = _console(sys.stdout if stream is None else stream, terminal=None)
    console.print(run_table(plan, ended, epochs, run_dir, target))


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
    table.add_row("plan", f"{plan.config} ({_count(len(plan.stages), 'stage')}, {_count(plan.workers, 'worker')})")
    table.add_row("weights", weights)
    table.add_row("validation loss", _loss(ended.validation_loss))
    if ended.validation_accuracy is not None:
        table.add_row("validation accuracy", _percent(ended.validation_accuracy))
    if ended.metric not in ("accuracy", "loss"):
        table.add_row(f"validation {ended.metric}", _value(ended.metric, ended.metric_value))
    table.add_row("samples", f"{ended.samples} in {_seconds(ended.seconds)}")
    table.add_row("throughput", _rate(ended.samples_per_second))
    table.add_row("files", str(run_dir))
    return table


def print_evaluation_table(
    plan: Plan, ended: Evaluated, weights: str, run_dir: Path, stream: TextIO | None = None
) -> None:
    """Print `evaluation_table`, on standard output by default."""
    console = _console(sys.stdout if stream is None else stream, terminal=None)
    console.print(evaluation_table(plan, ended, weights, run_dir))


def _console(stream: TextIO, terminal: bool | None) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def _rate(samples_per_second: float | None) -> str:
    if samples_per_second is None:
        return f"{UNKNOWN} samples/s"
    return (
        f"{samples_per_second:.{0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2}f} samples/s"
    )


def _loss(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4f}" if not math.isfinite(loss) or 1e-3 <= abs(loss) < 1e4 or loss == 0 else f"{loss:.2e}"


def _value(metric: str, value: float | None) -> str:
    """A metric's value as people of the field write it: 97.00 %, 0.2940 of METEOR, perplexity 23.41."""
    if metric == "accuracy":
        return _percent(value)
    if metric == "perplexity" and value is not None and value < 1e4:
        return f"{value:.2f}"
    return _loss(value)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.2%}".replace("%", " %")


def _duration(seconds: float | None) -> str:
    """`0:09`, `12:34`, `1:02:03`."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds:.0f} s ({_duration(seconds)})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
