"""What the replicas of the last stage report of each minibatch, added up at rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pd_train.compute import Segment
from pd_train.engine import Score
from pd_train.events import Event, Progress
from pd_train.inbox import Inbox
from pd_train.wire import Message

__all__ = ["ScoreBoard"]

_PROGRESS_EVERY_S = 0.1


class ScoreBoard:
    """The scores of one segment after another, from the replicas of the last stage, and what they add up to.

    Args:
        inbox: where scores arrive.
        epochs: that the run will have, for the display.
        tell: takes events for the display.
    """

    def __init__(self, inbox: Inbox, epochs: int, tell: Callable[[Event], None]) -> None:
        self._inbox = inbox
        self._epochs = epochs
        self._tell = tell
        self._scores: dict[int, dict[int, Score]] = {}
        self._segment: Segment | None = None
        self._start = self._last_told = 0.0
        inbox.handle("score", self._take)

    def start(self, segment: Segment) -> None:
        """A segment begins."""
        self._segment = segment
        self._start = time.monotonic()
        self._last_told = 0.0

    def finish(self, segment: Segment) -> tuple[float, float | None, int, float]:
        """Wait for the last score of a segment.

        Returns:
            Mean loss over the samples, share of samples classified rightly (None in training), samples, seconds.
        """
        self._inbox.wait_until(
            lambda: len(self._scores.get(segment.number, ())) == segment.minibatches,
            lambda: "the losses of the last stage",
        )
        seconds = time.monotonic() - self._start
        # In order of the minibatches, so that the figure does not depend on the network.
        scores = [score for _, score in sorted(self._scores.pop(segment.number).items())]
        samples = sum(score.samples for score in scores)
        loss = math.fsum(score.loss * score.samples for score in scores) / samples
        correct = [score.correct for score in scores if score.correct is not None]
        return loss, sum(correct) / samples if correct else None, samples, seconds

    def _take(self, message: Message) -> None:
        scores = self._scores.setdefault(message.segment, {})
        scores[message.index] = Score(*message.body)
        segment = self._segment
        if segment is None or segment.number != message.segment:
            return
        now = time.monotonic()
        if now - self._last_told < _PROGRESS_EVERY_S and len(scores) < segment.minibatches:
            return
        self._last_told = now
        samples = sum(score.samples for score in scores.values())
        self._tell(
            Progress(
                phase="training" if segment.training else "validation",
                epoch=segment.epoch,
                epochs=self._epochs,
                done=len(scores),
                minibatches=segment.minibatches,
                samples=samples,
                seconds=now - self._start,
                loss=sum(score.loss * score.samples for score in scores.values()) / samples,
            )
        )
