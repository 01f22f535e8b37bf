"""What both ways of showing a run say in the same words."""

from __future__ import annotations

from collections.abc import Sequence

from pd_train.events import EMULATION, EpochEnded, Progress, RunStarted, StageStatus
from pd_train.terminal import count_text, duration_text, loss_text, percent_text, rate_text, value_text

__all__ = ["busy_text", "epoch_line", "figures", "pace_of", "stages_line", "start_line"]

_EACH_STAGE = 6
"""As many stages are told of one by one."""


def start_line(event: RunStarted) -> str:
    workers = f"{count_text(event.workers, 'worker')} of {count_text(event.threads, 'thread')} each"
    return f"plan {event.config}: starting {workers}; the run's files go to {event.run_dir}"


def pace_of(event: Progress) -> float | None:
    """Samples a second so far."""
    return event.samples / event.seconds if event.seconds > 0 and event.samples else None


def figures(event: Progress, left: float | None) -> str:
    if event.phase == EMULATION:
        return f"{duration_text(left)} left"
    return f"{rate_text(pace_of(event))}   loss {loss_text(event.loss)}   {duration_text(left)} left"


def epoch_line(event: EpochEnded) -> str:
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


def busy_text(share: float | None) -> str:
    """`91 %`."""
    return percent_text(share, 0)


def stages_line(stages: Sequence[StageStatus]) -> str | None:
    """How busy the stages are, in one line; None where it is not known.

    stage 0 91 % busy, stage 1 77 % (waits for activations)
    """
    known = [(stage.busy, index) for index, stage in enumerate(stages) if stage.busy is not None]
    if not known:
        return None
    if len(stages) <= _EACH_STAGE:
        texts = [_stage_text(stages, index, " busy" if not index else "") for index in range(len(stages))]
        return ", ".join(texts)
    mean = sum(busy for busy, _ in known) / len(known)
    least, most = min(known)[1], max(known)[1]
    return (
        f"{len(stages)} stages {busy_text(mean)} busy; most {_stage_text(stages, most)}, "
        f"least {_stage_text(stages, least)}"
    )


def _stage_text(stages: Sequence[StageStatus], index: int, busy: str = "") -> str:
    stage = stages[index]
    waits = f" (waits for {stage.waits_for})" if stage.waits_for and stage.waited >= 0.1 else ""
    return f"stage {index} {busy_text(stage.busy)}{busy}{waits}"
