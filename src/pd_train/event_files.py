"""Event files for TensorBoard (`--tensorboard`), by torch's own writer, from the events that the display shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pd_format.errors import UserError
from pd_train.events import EpochEnded, Event, PipelineStatus, Progress

__all__ = ["EventFiles", "check_tensorboard"]

FOLDER = "tensorboard"
"""In a run's folder."""


def check_tensorboard() -> None:
    """Raises UserError where the package is missing that torch's writer takes."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("--tensorboard takes the package tensorboard: pip install tensorboard")


class EventFiles:
    """Writes a run's figures.

    Losses and rates are those of the minibatches between two events, which come some ten times a second; the step is
    the minibatch of the run, for an epoch's figures the epoch, and for how busy stages are the latest minibatch.
    """

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / FOLDER))
        self._before: Progress | None = None
        self._step = 0
        self._epoch_minibatches: dict[int, int] = {}

    def handle(self, event: Event) -> None:
        """Take an event, as a display does."""
        if isinstance(event, Progress):
            if event.phase != "validation":
                self._take_progress(event)
        elif isinstance(event, EpochEnded):
            metrics = event.metrics
            self._epoch_minibatches[metrics.epoch] = metrics.minibatches
            figures = {
                "epoch/train_loss": metrics.train_loss,
                "epoch/validation_loss": metrics.validation_loss,
                "epoch/validation_accuracy": metrics.validation_accuracy,
                f"epoch/validation_{metrics.metric}": metrics.judged,
                "epoch/samples_per_second": metrics.samples_per_second,
                "epoch/seconds": metrics.seconds,
            }
            for name, value in figures.items():
                self._add(name, value, metrics.epoch + 1)
        elif isinstance(event, PipelineStatus):
            for number, stage in enumerate(event.stages):
                self._add(f"busy/stage_{number}", stage.busy, self._step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _take_progress(self, event: Progress) -> None:
        before = self._before
        if before is None or before.epoch != event.epoch or before.done > event.done:
            before = None
        samples = event.samples - (before.samples if before else 0)
        seconds = event.seconds - (before.seconds if before else 0.0)
        self._before = event
        # An epoch that this program has not seen, before a start from a checkpoint, was as long as this one.
        earlier = sum(self._epoch_minibatches.get(epoch, event.minibatches) for epoch in range(event.epoch))
        self._step = earlier + event.done
        if samples <= 0:
            return
        if event.loss is not None:
            total = event.loss * event.samples
            if before is not None and before.loss is not None:
                total -= before.loss * before.samples
            self._add("minibatch/train_loss", total / samples, self._step)
        if seconds > 0:
            self._add("minibatch/samples_per_second", samples / seconds, self._step)

    def _add(self, name: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(name, value, step)
