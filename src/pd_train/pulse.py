"""What each worker tells rank 0 about once a second, and what becomes of it: a row a stage for the person who watches.

Rates are taken between a worker's two latest pulses, so that they say how it goes now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pd_format.plan import Plan
from pd_train.events import PipelineStatus, StageStatus
from pd_train.timing import Doing

__all__ = ["PULSE_EVERY_S", "Pulse", "PulseBoard"]

PULSE_EVERY_S = 1.0


class Pulse(NamedTuple):
    """One worker at one moment; sums count from the start of the run."""

    time: float
    """Seconds by the run's clock."""
    seconds: tuple[float, ...]
    """By `Doing`."""
    received_bytes: int
    sent_bytes: int
    versions: int
    """Weight versions that it holds."""
    waiting: str
    """For what; empty while it computes."""

    @classmethod
    def from_plain(cls, row: Any) -> Pulse:
        """Raises ValueError for anything but what a pulse is."""
        if type(row) is not tuple or len(row) != len(cls._fields):
            raise ValueError("no pulse")
        pulse = cls(*row)
        numbers = (pulse.time, *pulse.seconds) if type(pulse.seconds) is tuple else ()
        counts = (pulse.received_bytes, pulse.sent_bytes, pulse.versions)
        if (
            len(numbers) != 1 + len(Doing)
            or not all(type(one) is float and math.isfinite(one) for one in numbers)
            or not all(type(one) is int and one >= 0 for one in counts)
            or type(pulse.waiting) is not str
        ):
            raise ValueError("no pulse")
        return pulse


class PulseBoard:
    """Rank 0's view of all workers.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._latest: dict[int, tuple[Pulse, Pulse]] = {}

    def take(self, rank: int, pulse: Pulse) -> None:
        """A worker's pulse has come."""
        before = self._latest.get(rank)
        self._latest[rank] = (pulse if before is None else before[1], pulse)

    def status(self) -> PipelineStatus:
        """How each stage does; what is not known yet is None."""
        return PipelineStatus(
            tuple(
                _status(stage.replicas, [self._latest[rank] for rank in stage.workers if rank in self._latest])
                for stage in self._plan.stages
            )
        )


def _status(replicas: int, pairs: Sequence[tuple[Pulse, Pulse]]) -> StageStatus:
    busy: list[float] = []
    rate = 0.0
    waits = [0.0] * len(Doing)
    for before, now in pairs:
        elapsed = now.time - before.time
        if elapsed <= 0:
            continue
        spent = [b - a for a, b in zip(before.seconds, now.seconds, strict=True)]
        busy.append(min(1.0, sum(spent[doing] for doing in Doing if doing.computes) / elapsed))
        rate += (now.sent_bytes - before.sent_bytes) / elapsed
        waits = [a + b for a, b in zip(waits, spent, strict=True)]
    longest = max((doing for doing in Doing if not doing.computes), key=lambda doing: waits[doing])
    waiting = [now.waiting for _, now in pairs if now.waiting]
    return StageStatus(
        replicas=replicas,
        busy=sum(busy) / len(busy) if busy else None,
        waits_for=_WORDS[longest] if waits[longest] > 0 else "",
        waiting=waiting[0] if waiting else "",
        sent_bytes_per_second=rate if busy else None,
        versions=max((now.versions for _, now in pairs), default=None),
    )


_WORDS = {
    Doing.WAIT_ACTIVATIONS: "activations",
    Doing.WAIT_GRADIENTS: "gradients",
    Doing.WAIT_SYNC: "replicas",
    Doing.WAIT_DATA: "data",
    Doing.OTHER: "",
}
