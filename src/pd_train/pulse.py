"""What each worker tells rank 0 about once a second, and what becomes of it: a row a stage for the person who watches.

A worker tells while it waits, and between passes; within one it cannot, so that a long pass is silence. Whoever waits
for another worker is never silent. Figures are those of the last ten seconds, or of the last pass where it took longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pd_format.plan import Plan
from pd_train.events import PipelineStatus, StageStatus
from pd_train.timing import Doing

__all__ = ["PULSE_EVERY_S", "SILENT_S", "Pulse", "PulseBoard"]

PULSE_EVERY_S = 1.0
SILENT_S = 3.0
"""Who has told nothing for so long does something in which nothing can be told."""
_WINDOW_S = 10.0


class Pulse(NamedTuple):
    """One worker at one moment; sums count from the start of the run."""

    time: float
    """Seconds by the run's clock."""
    seconds: tuple[float, ...]
    """By `Doing`."""
    sent_bytes: int
    versions: int
    """Weight versions that it holds."""
    doing: int
    """A `Doing`."""
    waiting: str
    """What of another worker it waits for, in words; empty where it does not."""
    waited: float
    """Seconds that it has waited for that."""

    @classmethod
    def has_form(cls, row: Any) -> bool:
        """Whether a row that has come is what a pulse sends of itself."""
        if type(row) is not tuple or len(row) != len(cls._fields):
            return False
        pulse = cls(*row)
        numbers = (pulse.time, pulse.waited, *pulse.seconds) if type(pulse.seconds) is tuple else ()
        counts = (pulse.sent_bytes, pulse.versions, pulse.doing)
        return (
            len(numbers) == 2 + len(Doing)
            and all(type(one) is float and math.isfinite(one) for one in numbers)
            and all(type(one) is int and one >= 0 for one in counts)
            and pulse.doing < len(Doing)
            and type(pulse.waiting) is str
        )


class PulseBoard:
    """Rank 0's view of all workers.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pulses: dict[int, deque[Pulse]] = {}

    def take(self, rank: int, pulse: Pulse) -> None:
        """A worker's pulse has come."""
        kept = self._pulses.setdefault(rank, deque())
        kept.append(pulse)
        while len(kept) > 2 and kept[1].time <= pulse.time - _WINDOW_S:
            kept.popleft()

    def status(self, now: float) -> PipelineStatus:
        """How each stage does at a moment of the run's clock; what is not known yet is None."""
        return PipelineStatus(
            tuple(
                _status(
                    stage.replicas, [_view(self._pulses[rank], now) for rank in stage.workers if rank in self._pulses]
                )
                for stage in self._plan.stages
            )
        )


class _View(NamedTuple):
    """Of one worker."""

    elapsed: float
    spent: list[float]
    """Of these seconds, by `Doing`."""
    sent_bytes: int
    versions: int
    now: Literal["computes", "waits", "silent", ""]
    seconds: float
    awaited: tuple[str, str]
    """In a word, and in full."""


def _view(pulses: Sequence[Pulse], now: float) -> _View:
    first, last = pulses[0], pulses[-1]
    doing, age = Doing(last.doing), max(0.0, now - last.time)
    spent = [b - a for a, b in zip(first.seconds, last.seconds, strict=True)]
    elapsed = last.time - first.time
    what: Literal["computes", "waits", "silent", ""] = ""
    seconds, awaited = age, ("", "")
    if last.waiting and age <= SILENT_S:
        what, seconds, awaited = "waits", last.waited + age, (_WORDS.get(doing, ""), last.waiting)
    elif not last.waiting and (doing.computes or doing is Doing.WAIT_DATA):
        what = "computes" if doing.computes else "waits"
        awaited = (_WORDS.get(doing, ""),) * 2
        if age > SILENT_S:  # It is still at it.
            spent[doing] += age
            elapsed += age
    elif age > SILENT_S:
        what = "silent"
    return _View(elapsed, spent, last.sent_bytes - first.sent_bytes, last.versions, what, seconds, awaited)


def _status(replicas: int, views: Sequence[_View]) -> StageStatus:
    told = [view for view in views if view.elapsed > 0]
    shares = [sum(view.spent[doing] / view.elapsed for view in told) / max(1, len(told)) for doing in Doing]
    longest = max(_WORDS, key=lambda doing: shares[doing])
    at = max(views, key=lambda view: (view.now != "", view.seconds), default=None)
    return StageStatus(
        replicas=replicas,
        busy=min(1.0, sum(shares[doing] for doing in Doing if doing.computes)) if told else None,
        waits_for=_WORDS[longest] if shares[longest] > 0 else "",
        waited=min(1.0, shares[longest]),
        now=at.now if at else "",
        now_seconds=at.seconds if at else 0.0,
        now_for=at.awaited[0] if at else "",
        awaited=at.awaited[1] if at else "",
        sent_bytes_per_second=sum(view.sent_bytes / view.elapsed for view in told) if told else None,
        versions=max((view.versions for view in views), default=None),
    )


_WORDS = {
    Doing.WAIT_ACTIVATIONS: "activations",
    Doing.WAIT_GRADIENTS: "gradients",
    Doing.WAIT_SYNC: "replicas",
    Doing.WAIT_DATA: "data",
}
