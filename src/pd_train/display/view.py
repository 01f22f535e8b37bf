"""What a live view knows of a run at a moment, gathered from its events."""

from __future__ import annotations

from collections.abc import Callable

from pd_train.display.time_left import TimeLeft
from pd_train.events import (
    Activity,
    EpochEnded,
    EpochMetrics,
    Event,
    Note,
    PipelineStatus,
    Progress,
    RunStarted,
    StageStatus,
    WorkersMet,
    WorkersStart,
)
from pd_train.metrics import METRICS
from pd_train.terminal import count_text

__all__ = ["View"]


class View:
    """The newest of everything.

    Args:
        clock: seconds, for how long ago that was.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._time_left = TimeLeft()
        self._workers = 0
        self.layers: tuple[str, ...] = ()
        """Of each stage, in words; empty where nobody told."""
        self.activity: str | None = None
        """What the run is about instead of minibatches."""
        self._activity_since = clock()
        self.progress: Progress | None = None
        self.left: float | None = None
        """Seconds of the whole run, when the progress was made."""
        self._progressed = clock()
        self.stages: tuple[StageStatus, ...] = ()
        self._told = clock()
        self._epochs: dict[int, EpochMetrics] = {}

    @property
    def activity_s(self) -> float:
        """For how long the run has been about it."""
        return self._clock() - self._activity_since

    @property
    def progress_age_s(self) -> float:
        return self._clock() - self._progressed

    @property
    def stages_age_s(self) -> float:
        return self._clock() - self._told

    @property
    def latest(self) -> EpochMetrics | None:
        """Of the epoch that ended last."""
        return self._epochs[max(self._epochs)] if self._epochs else None

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value so far of the metric that the run is judged by, and its epoch."""
        if self.latest is None:
            return None
        values = {epoch: one.judged for epoch, one in self._epochs.items()}
        best = METRICS[self.latest.metric].best(values.values())
        return None if best is None else (best, min(epoch for epoch, value in values.items() if value == best))

    def take(self, event: Event) -> None:
        """Something has happened."""
        if isinstance(event, RunStarted):
            self._workers, self.layers = event.workers, event.layers
        elif isinstance(event, WorkersStart):
            self.progress, self.left, self.activity, self.stages = None, None, None, ()
            self._be_about(f"starting {count_text(self._workers, 'worker')}")
        elif isinstance(event, WorkersMet):
            self._be_about("preparing to run")
        elif isinstance(event, Activity) or (isinstance(event, Note) and event.kind == "waiting"):
            self._be_about(event.text)
        elif isinstance(event, Progress):
            self.progress, self.activity = event, None
            self.left = self._time_left.update(event)
            self._progressed = self._clock()
        elif isinstance(event, PipelineStatus):
            self.stages = event.stages
            self._told = self._clock()
        elif isinstance(event, EpochEnded):
            self._epochs[event.metrics.epoch] = event.metrics

    def _be_about(self, activity: str) -> None:
        """Several workers may tell of the same; it is as old as when the first did."""
        if activity != self.activity:
            self.activity = activity
            self._activity_since = self._clock()
