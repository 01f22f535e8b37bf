"""Notes what a worker's compute thread does with its time: sums always, single passes where a trace is wanted.

What is done within something else counts for itself, not for both: an update that is made while the worker waits for
its input is an update.

    doing(WAIT_GRADIENTS)   |-----------------------|
      doing(UPDATE)           |------|
    sums                 wait   update    wait
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator

from pd_train.pulse import Pulse
from pd_train.timing import CUT_KINDS, SYNC_KINDS, Doing, Phase, Transfers, WorkerTiming
from pd_train.wire import Message

__all__ = ["RECEIVED", "ROW", "Recorder"]

ROW = ("what", "start", "end", "minibatch", "version", "peer", "bytes")
"""Of a trace. `what` is a `Doing`, or for a message received `len(Doing)` and on: forward, backward, gradient,
parameters; times in seconds of the run's clock; -1 where a figure has no meaning."""
RECEIVED = {kind: len(Doing) + n for n, kind in enumerate(("forward", "backward", "gradient", "parameters"))}

_SPANS_KEPT = 512
"""Of computing, to be compared with transfers that end later: more than fit into any transfer but the longest."""
_SHORTEST_UPDATE_S = 20e-6
"""Shorter ones found nothing to do: a trace shows none of them, and they push no pass out of those kept."""


class Recorder:
    """The record of one worker.

    Args:
        now: the run's clock, in seconds.
        traced: minibatches of the run whose passes are kept one by one.
    """

    def __init__(self, now: Callable[[], float], traced: range = range(0)) -> None:
        self._now = now
        self._traced = traced
        self._doing = [Doing.OTHER]
        self._since = now()
        self._spans: deque[tuple[float, float]] = deque(maxlen=_SPANS_KEPT)
        self._sums = WorkerTiming()
        self._rows = array("d")
        self._totals = [0.0] * len(Doing)
        self._phase = Phase.OUTSIDE
        self._first = 0
        self._is_traced = False

    def enter(self, phase: Phase) -> None:
        """Another phase of the segment begins."""
        self._settle()
        self._phase = phase

    def start_segment(self, first: int) -> None:
        """A training segment begins, whose minibatch 0 is this one of the run."""
        self._first = first
        self._is_traced = first in self._traced
        self.enter(Phase.START_UP)

    @contextlib.contextmanager
    def doing(self, doing: Doing, minibatch: int = -1, version: int = -1) -> Iterator[None]:
        """What is done within the context; `minibatch` of the segment."""
        start = self._settle()
        self._doing.append(doing)
        if minibatch >= 0:
            self._is_traced = self._first + minibatch in self._traced and self._phase is not Phase.OUTSIDE
        try:
            yield
        finally:
            end = self._settle()
            self._doing.pop()
            if self._is_traced and (doing is not Doing.UPDATE or end - start >= _SHORTEST_UPDATE_S):
                number = self._first + minibatch if minibatch >= 0 else -1
                self._rows.extend((doing, start, end, number, version, -1, -1))

    def passed(self, steady: bool) -> None:
        """A backward pass of training is over."""
        self._sums.minibatches += 1
        self._sums.steady_minibatches += steady

    def arrived(self, message: Message) -> None:
        """A message has been read; called by the compute thread."""
        kind = message.kind
        if self._phase is Phase.OUTSIDE or not message.size or not (kind in CUT_KINDS or kind in SYNC_KINDS):
            return
        self._settle()
        sent, arrived = message.sent, message.arrived
        covered = 0.0
        for start, end in reversed(self._spans):
            if end <= sent:
                break
            covered += max(0.0, min(end, arrived) - max(start, sent))
        one = Transfers(1, message.size, max(0.0, arrived - sent), covered)
        (self._sums.cut if kind in CUT_KINDS else self._sums.sync).add(one)
        if self._is_traced:
            number = self._first + message.index if kind in CUT_KINDS else message.index
            self._rows.extend((RECEIVED[kind], sent, max(sent, arrived), number, -1, message.sender, message.size))

    def pulse(self, sent_bytes: int, versions: int, awaited: tuple[str, float]) -> Pulse:
        """How it goes now; what is not the recorder's to know is given."""
        now, doing = self._settle(), self._doing[-1]
        return Pulse(now, tuple(self._totals), sent_bytes, versions, int(doing), *awaited)

    def take(self) -> tuple[WorkerTiming, array[float]]:
        """The sums and the rows of the trace since this was last called."""
        self._settle()
        taken = self._sums, self._rows
        self._sums, self._rows = WorkerTiming(), array("d")
        return taken

    def _settle(self) -> float:
        """Count the time since it was last settled for what was done in it."""
        now, doing = self._now(), self._doing[-1]
        self._sums.seconds[self._phase][doing] += now - self._since
        self._totals[doing] += now - self._since
        if doing.computes:
            if self._spans and self._spans[-1][1] == self._since:  # A piece more of the same computing.
                self._spans[-1] = self._spans[-1][0], now
            elif now - self._since >= _SHORTEST_UPDATE_S:
                self._spans.append((self._since, now))
        self._since = now
        return now
