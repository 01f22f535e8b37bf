"""`--quiet`: warnings on standard error while a run goes on, one line on standard output at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

from pd_train.events import Emulated, EpochMetrics, Evaluated, Event, Note, RunEnded
from pd_train.report import rate_of
from pd_train.terminal import count_text, loss_text, rate_text, seconds_text, value_text

__all__ = ["QuietDisplay", "result_line"]


class QuietDisplay:
    """Nothing but what the person should know before the end.

    Args:
        stream: takes the lines.
        now: the time of day that they start with.
    """

    def __init__(self, stream: TextIO, now: Callable[[], datetime]) -> None:
        self._stream = stream
        self._now = now

    def handle(self, event: Event) -> None:
        if isinstance(event, Note) and event.kind != "information":
            print(f"{self._now():%H:%M:%S}  {event.text}", file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


def result_line(
    ended: RunEnded | Evaluated | Emulated, epochs: Sequence[EpochMetrics], run_dir: Path, target: float | None = None
) -> str:
    """What came out of a run.

    Args:
        ended: the last event.
        epochs: metrics of each epoch that was trained by this program.
        run_dir: where the run's files are.
        target: value of the run's metric, or None where none was asked for.
    """
    if isinstance(ended, Emulated):
        ms = ended.emulated.minibatch_ms
        pace = "too short to tell its pace" if ms is None else f"{ms:.2f} ms of model time a minibatch"
        parts = [f"emulated {ended.minibatches} minibatches", pace]
    elif isinstance(ended, Evaluated):
        parts = [f"validation loss {loss_text(ended.validation_loss)}"]
        if ended.metric != "loss":
            parts.append(f"{ended.metric} {value_text(ended.metric, ended.metric_value)}")
        parts.append(rate_text(ended.samples_per_second))
    else:
        rate = rate_of(epochs) if ended.samples_per_second is None else ended.samples_per_second
        best = ended.best_accuracy if ended.metric == "accuracy" else ended.best_metric
        parts = [
            f"{count_text(ended.epochs, 'epoch')} in {seconds_text(ended.seconds)}",
            rate_text(rate),
            f"best validation {ended.metric} {value_text(ended.metric, best)}",
        ]
        if target is not None:
            reached = "reached" if ended.reached_target else "not reached"
            parts.append(f"target {value_text(ended.metric, target)} {reached}")
    return f"{run_dir}: {', '.join(parts)}"
