"""Shows a run to the person who watches it: a live view on a terminal, plain lines anywhere else (design, section 7).

epoch 1/10  loss 0.8124  validation 0.3012, accuracy 91.27 %  2140 samples/s
epoch 2/10  training    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                   23/45
            2140 samples/s   loss 0.3127   0:14 left
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, TextIO

from pd_train.events import EMULATION, EpochEnded, Event, Note, Progress, RunStarted
from pd_train.terminal import count_text, duration_text, loss_text, open_console, percent_text, rate_text, value_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Display", "open_display"]

PLAIN_INTERVAL_S = 5.0


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
        self._console = open_console(stream, terminal=True)
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
    if event.phase == EMULATION:
        return f"{duration_text(left)} left"
    rate = event.samples / event.seconds if event.seconds > 0 and event.samples else None
    return f"{rate_text(rate)}   loss {loss_text(event.loss)}   {duration_text(left)} left"


def _start_line(event: RunStarted) -> str:
    workers = f"{count_text(event.workers, 'worker')} of {count_text(event.threads, 'thread')} each"
    return f"plan {event.config}: starting {workers}; the run's files go to {event.run_dir}"


def _epoch_line(event: EpochEnded) -> str:
    metrics = event.metrics
    parts = [f"epoch {metrics.epoch + 1}/{event.epochs}", f"loss {loss_text(metrics.train_loss)}"]
    if metrics.validation_loss is not None or metrics.validation_accuracy is not None:
        text = f"validation {loss_text(metrics.validation_loss)}"
        if metrics.metric == "accuracy" or metrics.validation_accuracy is not None:
            text += f", accuracy {percent_text(metrics.validation_accuracy)}"
        if metrics.metric not in ("accuracy", "loss"):
            text += f", {metrics.metric} {value_text(metrics.metric, metrics.judged)}"
        parts.append(text)
    parts.append(rate_text(metrics.samples_per_second if metrics.samples_per_second > 0 else None))
    return "  ".join(parts)
