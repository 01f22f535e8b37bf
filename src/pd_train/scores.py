"""What the replicas of the last stage report of each minibatch, added up at rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pd_train.engine import Score
from pd_train.events import Event, Progress
from pd_train.inbox import Inbox
from pd_train.segment import Segment
from pd_train.wire import Message

__all__ = ["Result", "ScoreBoard"]

_PROGRESS_EVERY_S = 0.1


class Result(NamedTuple):
    """What an epoch's training or validation came to."""

    loss: float | None
    """Mean over the samples; None where nothing was computed."""
    accuracy: float | None
    """None in training, where nobody counts."""
    samples: int
    seconds: float
    predictions: list[Tensor]
    """Of each sample, in the order of the data set; empty where nobody asked for them."""


class _Running:
    """The mean loss so far, for the display: the result itself is added up once, in order."""

    def __init__(self, scores: Sequence[Score]) -> None:
        self._sum: float | None = 0.0
        self.samples = 0
        for score in scores:
            self.add(score)

    def add(self, score: Score) -> None:
        self._sum = None if self._sum is None or score.loss is None else self._sum + score.loss * score.samples
        self.samples += score.samples

    @property
    def mean(self) -> float | None:
        return self._sum / self.samples if self.samples and self._sum is not None else None


class ScoreBoard:
    """The scores of one phase after another: an epoch's training, in one or more segments, or its validation.

    Args:
        inbox: where scores arrive.
        epochs: that the run will have, for the display.
        tell: takes events for the display.
        training: what the display calls a phase that is no validation.
    """

    def __init__(self, inbox: Inbox, epochs: int, tell: Callable[[Event], None], training: str = "training") -> None:
        self._inbox = inbox
        self._epochs = epochs
        self._tell = tell
        self._training = training
        self._arrived: dict[int, dict[int, Score]] = {}
        self._finished: list[Score] = []
        self._running = _Running(())
        self._segment: Segment | None = None
        self._minibatches = 0
        self._start = self._last_told = 0.0
        inbox.handle("score", self._take)

    def start_phase(self, minibatches: int, finished: Sequence[Score] = (), seconds: float = 0.0) -> None:
        """A phase of so many minibatches begins, or goes on after those that took so many seconds."""
        self._finished = list(finished)
        self._running = _Running(finished)
        self._minibatches = minibatches
        self._start = time.monotonic() - seconds
        self._last_told = 0.0

    def start(self, segment: Segment) -> None:
        """A segment of the phase begins."""
        self._segment = segment
        for score in self._arrived.get(segment.number, {}).values():
            self._running.add(score)
        self._tell_progress(segment)

    def finish(self, segment: Segment) -> None:
        """Wait for the last score of a segment."""
        self._inbox.wait_until(
            lambda: len(self._arrived.get(segment.number, ())) == segment.minibatches,
            lambda: "the losses of the last stage",
        )
        # In order of the minibatches, so that no figure depends on the network.
        self._finished += [score for _, score in sorted(self._arrived.pop(segment.number).items())]

    def so_far(self) -> tuple[tuple[Score, ...], float]:
        """The scores of the phase, whose segments so far are finished, and the seconds that it has taken."""
        return tuple(self._finished), time.monotonic() - self._start

    def result(self) -> Result:
        """Of the phase, whose segments are finished."""
        seconds = time.monotonic() - self._start
        correct = [score.correct for score in self._finished if score.correct is not None]
        loss, samples = _mean_loss(self._finished)
        predictions = [each for score in self._finished if score.predictions is not None for each in score.predictions]
        return Result(loss, sum(correct) / samples if correct else None, samples, seconds, predictions)

    def _take(self, message: Message) -> None:
        arrived = self._arrived.setdefault(message.segment, {})
        score = Score(*message.body)
        arrived[message.index] = score
        segment = self._segment
        if segment is None or segment.number != message.segment:
            return
        self._running.add(score)
        self._tell_progress(segment)

    def _tell_progress(self, segment: Segment) -> None:
        now = time.monotonic()
        done = len(self._finished) + len(self._arrived.get(segment.number, ()))
        if now - self._last_told < _PROGRESS_EVERY_S and done < self._minibatches:
            return
        self._last_told = now
        self._tell(
            Progress(
                phase=self._training if segment.training else "validation",
                epoch=segment.epoch,
                epochs=self._epochs,
                done=done,
                minibatches=self._minibatches,
                samples=self._running.samples,
                seconds=now - self._start,
                loss=self._running.mean,
            )
        )


def _mean_loss(scores: Sequence[Score]) -> tuple[float | None, int]:
    """The mean over the samples, and how many there are."""
    samples = sum(score.samples for score in scores)
    sums = [score.loss * score.samples for score in scores if score.loss is not None]
    return math.fsum(sums) / samples if len(sums) == len(scores) else None, samples
