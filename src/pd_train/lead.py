"""Rank 0's second job: announces segments and checkpoints, keeps the run's figures, and writes metrics and model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pd_format.jsonfile import write_text
from pd_train.checkpoint.keeper import Keeper
from pd_train.checkpoint.model import join_state, write_model
from pd_train.checkpoint.part import START, Position
from pd_train.checkpoint.progress import RunProgress
from pd_train.compute import StageRunner
from pd_train.emulation import Emulation, pace_of
from pd_train.ending import Ending, peaks_of
from pd_train.events import (
    EMULATION,
    Activity,
    Emulated,
    EpochEnded,
    EpochMetrics,
    Evaluated,
    Event,
    Note,
    RunEnded,
)
from pd_train.inbox import Inbox
from pd_train.loss_scale import LossScale
from pd_train.measured import Measure
from pd_train.metrics import METRICS, perplexity_of
from pd_train.optimizers import learning_rate
from pd_train.options import RESTARTS, RunOptions
from pd_train.report import rate_of
from pd_train.scores import Result, ScoreBoard
from pd_train.segment import Segment
from pd_train.transport import Transport
from pd_train.watch import Watch
from pd_train.wire import Message

__all__ = ["Lead"]


class Counted(Protocol):
    """Minibatches, as far as their numbers go."""

    @property
    def minibatches(self) -> int:
        """Of an epoch."""
        ...

    def samples_of(self, minibatch: int) -> int:
        """Of one of them."""
        ...


class Lead:
    """Drives a run from the first segment to the files.

    Args:
        options: of the run.
        runner: this worker's own stage.
        transport, inbox: the way to the other workers.
        loaders: training and validation minibatches, which say how many there are.
        loss_scale: of float16, else None.
        device: kind that this worker computes on, for the report; None where compute is emulated.
        tell: takes events for the display.
        measure: makes the run's metric of each validation sample's predictions, where it is made of these.
        keeper: writes this worker's parts of checkpoints; None where nothing is trained.
        watch: gathers where all workers' time goes.
    """

    def __init__(
        self,
        options: RunOptions,
        runner: StageRunner,
        transport: Transport,
        inbox: Inbox,
        loaders: tuple[Counted, Counted],
        loss_scale: LossScale | None,
        device: str | None,
        tell: Callable[[Event], None],
        measure: Measure | None,
        keeper: Keeper | None,
        watch: Watch,
    ) -> None:
        self._options = options
        self._metric = METRICS[options.metric]
        self._measure = measure
        self._runner = runner
        self._transport = transport
        self._inbox = inbox
        self._training, self._validation = loaders
        self._loss_scale = loss_scale
        self._keeper = keeper
        self._watch = watch
        self._saved: dict[Position, set[int]] = {}
        self._skipped_updates = 0
        self._skipped_by_stage = [0] * len(options.plan.stages)
        self._ending = Ending(options, runner, transport, inbox, device, tell)
        self._tell = tell
        cap, whole = options.minibatches, self._training.minibatches
        self._expected_epochs = options.epochs if cap is None else min(options.epochs, -(-cap // whole))
        training = "training" if options.emulate is None else EMULATION
        self._scores = ScoreBoard(inbox, self._expected_epochs, tell, training)
        self._segments = 0
        self._lost_seconds = 0.0
        self._epochs: list[EpochMetrics] = []
        inbox.handle("saved", self._note_saved)

    def run(self, part: Callable[[], dict[str, Tensor]], state_names: Mapping[str, str], start: RunProgress) -> None:
        """Train, validate, and write metrics.jsonl, checkpoints, model.pt and report.json.

        Args:
            part: gives this worker's tensors of the trained model by their original names.
            state_names: every key of the model's state dict, and the original name of its tensor.
            start: what the run has behind it.
        """
        self._epochs = list(start.epochs)
        self._lost_seconds = start.lost_seconds
        if start.skipped_by_stage:
            self._skipped_updates, self._skipped_by_stage = start.skipped_updates, list(start.skipped_by_stage)
        if start.position != START:
            self._saved[start.position] = set(range(self._options.plan.workers))
        if start.position.epoch >= self._options.epochs or self._has_reached():
            self._tell(Note(f"nothing is left to train: {len(self._epochs)} of {self._options.epochs} epochs are over"))
        self._watch.go_on(start.position.epoch)
        whole, cap = self._training.minibatches, self._options.minibatches
        epoch = start.position.epoch
        while epoch < self._options.epochs and not self._has_reached():
            left = whole if cap is None else cap - sum(one.minibatches for one in self._epochs)
            if left == 0:
                break
            metrics = self._run_epoch(epoch, min(whole, left), start)
            self._epochs.append(metrics)
            lines = (json.dumps(one.line()) + "\n" for one in self._epochs)
            write_text(self._options.run_dir / "metrics.jsonl", "".join(lines), make_folder=False)
            self._watch.finish_epoch(epoch)
            self._tell(EpochEnded(metrics, self._expected_epochs))
            epoch += 1
            self._save(Position(epoch, 0))
        self._announce(None)
        self._finish(part(), state_names, None if self._options.target_metric is None else self._has_reached())

    def _has_reached(self) -> bool:
        """Whether the latest validation met the target."""
        target = self._options.target_metric
        return target is not None and bool(self._judged) and self._metric.is_reached(self._judged[-1], target)

    @property
    def _judged(self) -> list[float | None]:
        """The metric's value of each epoch; a run that goes on may be judged by another one than before."""
        return [one.judged for one in self._epochs if one.metric == self._metric.name]

    def evaluate(self) -> None:
        """Run the validation data through the pipeline once, and write report.json."""
        validated = self._validate(0)
        assert validated.loss is not None
        self._announce(None)
        everyone = self._ending.gather({})
        known = {"accuracy": validated.accuracy, "loss": validated.loss}
        ended = Evaluated(
            validation_loss=validated.loss,
            validation_accuracy=validated.accuracy,
            metric=self._metric.name,
            metric_value=known.get(self._metric.name, self._judge(validated)),
            samples=validated.samples,
            minibatches=self._validation.minibatches,
            seconds=validated.seconds,
            samples_per_second=validated.samples / validated.seconds,
            bytes_sent=sum(one.sent_bytes for one in everyone),
        )
        self._ending.report(ended, everyone)

    def emulate(self, emulation: Emulation, ends: Sequence[float]) -> None:
        """Run all minibatches through a pipeline that computes nothing, and write report.json.

        Args:
            emulation: what passes wait for.
            ends: when this worker's backward passes ended, in s; grows meanwhile.
        """
        minibatches, flush = self._training.minibatches, self._options.mode.flush
        self._scores.start_phase(minibatches)
        for first in range(0, minibatches, flush or minibatches):
            count = min(flush or minibatches, minibatches - first)
            self._run_segment(self._training, True, 0, first, count)
        seconds = self._scores.result().seconds
        self._watch.finish_epoch(0)
        self._announce(None)
        everyone = self._ending.gather({})
        ended = Emulated(
            emulated=pace_of(self._options.plan, emulation.time_scale, ends, flush),
            seconds=seconds,
            minibatches=minibatches,
            bytes_sent=sum(one.sent_bytes for one in everyone),
            training_bytes_sent=sum(one.training_bytes for one in everyone),
            refused_messages=sum(one.refused for one in everyone),
            performance=self._watch.performance((), None),
        )
        self._ending.report(ended, everyone)

    def _run_epoch(self, epoch: int, minibatches: int, start: RunProgress) -> EpochMetrics:
        trained = self._train(epoch, minibatches, start)
        validated = self._validate(epoch)
        return EpochMetrics(
            epoch=epoch,
            seconds=trained.seconds,
            minibatches=minibatches,
            samples_per_second=trained.samples / trained.seconds,
            train_loss=trained.loss,
            validation_loss=validated.loss,
            validation_accuracy=validated.accuracy,
            metric=self._metric.name,
            validation_metric=self._judge(validated),
        )

    def _judge(self, validated: Result) -> float | None:
        """The value of a metric that is neither loss nor accuracy."""
        if self._metric.from_predictions:
            assert self._measure is not None
            self._tell(Activity(f"computing {self._metric.name}"))
            value = self._measure(validated.predictions)
            return value if math.isfinite(value) else None
        return perplexity_of(validated.loss) if self._metric.name == "perplexity" else None

    def _train(self, epoch: int, minibatches: int, start: RunProgress) -> Result:
        """Train on an epoch's minibatches up to so many, in segments with checkpoints between."""
        first = 0
        if epoch == start.position.epoch:
            first = start.position.minibatch
            self._scores.start_phase(minibatches, start.scores, start.seconds)
        else:
            self._scores.start_phase(minibatches)
        every = self._options.checkpoint_every
        length = self._options.mode.flush or every or minibatches
        saved = first
        while first < minibatches:
            count = min(length, minibatches - first)
            self._run_segment(self._training, True, epoch, first, count)
            first += count
            # Counted from where this start began: by another plan the interval may be another one.
            if every is not None and first - saved >= every and first < minibatches:
                self._save(Position(epoch, first))
                saved = first
        return self._scores.result()

    def _validate(self, epoch: int) -> Result:
        self._scores.start_phase(self._validation.minibatches)
        self._run_segment(self._validation, False, epoch, 0, self._validation.minibatches)
        return self._scores.result()

    def _run_segment(self, loader: Counted, training: bool, epoch: int, first: int, minibatches: int) -> None:
        segment = Segment(
            number=self._segments,
            training=training,
            epoch=epoch,
            first=first,
            first_of_run=first + sum(one.minibatches for one in self._epochs),
            minibatches=minibatches,
            samples=self._options.plan.minibatch_size,
            last_samples=loader.samples_of(first + minibatches - 1),
            rate=learning_rate(self._options.optimizer, epoch, self._options.epochs),
        )
        self._announce(asdict(segment))
        self._scores.start(segment)
        self._runner.run(segment)
        self._scores.finish(segment)
        if training:
            self._watch.count_segment()
        if self._loss_scale is not None and segment.training and self._loss_scale.overflowed:
            self._count_skipped(self._loss_scale, segment)

    def _count_skipped(self, loss_scale: LossScale, segment: Segment) -> None:
        stages = sorted({self._options.plan.stage_of(rank)[0].index for rank in loss_scale.overflowed})
        self._skipped_updates += 1
        for stage in stages:
            self._skipped_by_stage[stage] += 1
        last = segment.first + segment.minibatches - 1
        where = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        self._tell(
            Note(
                f"epoch {segment.epoch + 1}: the update after minibatch {last} is left out, since gradients of {where} "
                f"are not finite; the loss scale is now {loss_scale.value:g}"
            )
        )

    def _save(self, position: Position) -> None:
        """Have every worker write its part; nobody waits for another."""
        assert self._keeper is not None
        whole = [one for one, ranks in self._saved.items() if len(ranks) == self._options.plan.workers]
        scores, seconds = self._scores.so_far() if position.minibatch else ((), 0.0)
        progress = RunProgress(
            position=position,
            epochs=tuple(self._epochs),
            scores=scores,
            seconds=seconds,
            lost_seconds=self._lost_seconds,
            skipped_by_stage=tuple(self._skipped_by_stage),
            skipped_updates=self._skipped_updates,
            loss_scale=None if self._loss_scale is None else self._loss_scale.kept(),
        )
        self._tell(Activity("writing a checkpoint"))
        self._announce({"save": tuple(position), "whole": [tuple(one) for one in whole]})
        self._keeper.save(position, progress.plain())
        self._keeper.prune(whole)
        self._saved.setdefault(position, set()).add(0)

    def _note_saved(self, message: Message) -> None:
        self._saved.setdefault(Position(*message.body), set()).add(message.sender)

    def _announce(self, body: dict[str, Any] | None) -> None:
        for rank in range(1, self._options.plan.workers):
            self._transport.send(rank, Message("segment", 0, self._segments, 0, body))
        self._segments += 1

    def _finish(self, parts: dict[str, Tensor], state_names: Mapping[str, str], reached: bool | None) -> None:
        self._tell(Activity("writing the trained model"))
        everyone = self._ending.gather(parts)
        staleness = sum((Counter(one.staleness) for one in everyone), Counter[int]())
        write_model(self._options.run_dir / "model.pt", join_state(state_names, parts))
        peaks = peaks_of(self._options.plan, everyone)
        ended = RunEnded(
            reached_target=reached,
            seconds=sum(one.seconds for one in self._epochs),
            epochs=len(self._epochs),
            best_accuracy=METRICS["accuracy"].best(one.validation_accuracy for one in self._epochs),
            bytes_sent=sum(one.sent_bytes for one in everyone),
            training_bytes_sent=sum(one.training_bytes for one in everyone),
            minibatches=sum(one.minibatches for one in self._epochs),
            mean_staleness=sum(n * times for n, times in staleness.items()) / staleness.total() if staleness else None,
            most_staleness=max(staleness, default=None),
            metric=self._metric.name,
            best_metric=self._metric.best(self._judged),
            restarts=_lines(self._options.run_dir / RESTARTS),
            lost_seconds=self._lost_seconds,
            refused_messages=sum(one.refused for one in everyone),
            peak_memory_bytes=peaks,
            performance=self._watch.performance(self._epochs, peaks),
            samples_per_second=rate_of(self._epochs),
            skipped_updates=None if self._loss_scale is None else self._skipped_updates,
            skipped_by_stage=None if self._loss_scale is None else tuple(self._skipped_by_stage),
            loss_scale=None if self._loss_scale is None else self._loss_scale.value,
        )
        self._ending.report(ended, everyone)


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
