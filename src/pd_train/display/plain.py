"""Shows a run as lines with the time of day, for a file, a pipe, or a terminal that cannot move its cursor."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from pd_train.display.sentences import epoch_line, figures, stages_line, start_line
from pd_train.display.time_left import TimeLeft
from pd_train.events import EpochEnded, Event, Note, PipelineStatus, Progress, RunStarted, WorkersStart

__all__ = ["PlainDisplay"]

_INTERVAL_S = 5.0
_STANDSTILL_S = 30.0


class PlainDisplay:
    """A line every few seconds with one of the stages below it, and one an epoch.

    Args:
        stream: takes the lines.
        clock: seconds, for their pace.
        now: the time of day that they start with.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float], now: Callable[[], datetime]) -> None:
        self._time_left = TimeLeft()
        self._stream = stream
        self._clock = clock
        self._now = now
        self._last = self._progressed = clock()
        self._status: PipelineStatus | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, Progress):
            left = self._time_left.update(event)
            self._progressed = self._clock()
            if self._clock() - self._last >= _INTERVAL_S:
                self._print(
                    f"epoch {event.epoch + 1}/{event.epochs}  {event.phase} {event.done}/{event.minibatches}  "
                    + figures(event, left)
                )
                self._print_stages("")
        elif isinstance(event, PipelineStatus):
            self._status = event
            if self._clock() - self._last >= _STANDSTILL_S:
                self._print_stages(f"no minibatch for {self._clock() - self._progressed:.0f} s; ")
        elif isinstance(event, EpochEnded):
            self._print(epoch_line(event))
        elif isinstance(event, Note):
            self._print(event.text)
        elif isinstance(event, RunStarted):
            self._print(start_line(event))
        elif isinstance(event, WorkersStart):
            self._status = None
            self._progressed = self._clock()

    def close(self) -> None:
        self._stream.flush()

    def _print_stages(self, head: str) -> None:
        """Each status is printed once at most: what is no news is not told again."""
        text = None if self._status is None else stages_line(self._status.stages)
        self._status = None
        if text is not None:
            self._print(head + text)

    def _print(self, text: str) -> None:
        print(f"{self._now():%H:%M:%S}  {text}", file=self._stream, flush=True)
        self._last = self._clock()
