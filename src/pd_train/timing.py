"""Where a worker's time went, as plain sums that add up over segments and epochs.

A segment has three phases at each worker: the pipeline fills, runs steadily, and drains. They are told apart by the
static order alone:

    F F F F | B F B F B F B F | B B B B
    start-up      steady         drain

The wait for the first answer, which comes once the pipeline is full, belongs to the start-up. In the steady one there
are as many forward as backward passes, so its length over their number is the time that the pipeline takes for a
minibatch of the worker.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

__all__ = ["CUT_KINDS", "SYNC_KINDS", "Doing", "Phase", "Transfers", "WorkerTiming"]

CUT_KINDS = frozenset({"forward", "backward"})
"""Messages over a cut: activations and their gradients."""
SYNC_KINDS = frozenset({"gradient", "parameters"})
"""Messages of a replicated stage's synchronisation."""


class Doing(IntEnum):
    """What the compute thread does at a moment."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2
    WAIT_ACTIVATIONS = 3
    """Of the stage before."""
    WAIT_GRADIENTS = 4
    """Of the stage after: of what was sent there."""
    WAIT_SYNC = 5
    """For a weight version that takes other replicas' gradients."""
    WAIT_DATA = 6
    """For a minibatch of the data set."""
    OTHER = 7
    """Between these: packing messages, sorting them."""

    @property
    def computes(self) -> bool:
        return self <= Doing.UPDATE


class Phase(IntEnum):
    """Of a segment."""

    START_UP = 0
    STEADY = 1
    DRAIN = 2
    OUTSIDE = 3
    """Of training: validation, checkpoints, between segments."""


@dataclass
class Transfers:
    """Messages that a worker has received, added up."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """From the moment at which the sender handed each over to that at which it was here."""
    covered_seconds: float = 0.0
    """Of these, those in which this worker computed."""

    def add(self, other: Transfers) -> None:
        self.count += other.count
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.covered_seconds += other.covered_seconds


@dataclass
class WorkerTiming:
    """One worker's sums."""

    seconds: list[list[float]] = field(default_factory=lambda: [[0.0] * len(Doing) for _ in Phase])
    """By phase of a segment, then by what was done."""
    minibatches: int = 0
    """Trained on by this worker."""
    steady_minibatches: int = 0
    """Of these, those whose backward pass was in a steady phase."""
    cut: Transfers = field(default_factory=Transfers)
    sync: Transfers = field(default_factory=Transfers)

    def add(self, other: WorkerTiming) -> None:
        """Add another one's sums to these."""
        for mine, theirs in zip(self.seconds, other.seconds, strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        self.minibatches += other.minibatches
        self.steady_minibatches += other.steady_minibatches
        self.cut.add(other.cut)
        self.sync.add(other.sync)

    def of_phase(self, phase: Phase) -> float:
        """Seconds of a phase, whatever was done."""
        return sum(self.seconds[phase])

    def plain(self) -> dict[str, Any]:
        """For the wire and for files: figures by their names."""
        return {
            "seconds": {
                phase.name.lower(): {doing.name.lower(): self.seconds[phase][doing] for doing in Doing}
                for phase in Phase
            },
            "minibatches": self.minibatches,
            "steady_minibatches": self.steady_minibatches,
            "cut": asdict(self.cut),
            "sync": asdict(self.sync),
        }

    @classmethod
    def from_plain(cls, plain: Any) -> WorkerTiming:
        """What `plain` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            seconds = [
                [_seconds(plain["seconds"][phase.name.lower()][doing.name.lower()]) for doing in Doing]
                for phase in Phase
            ]
            counts = _whole(plain["minibatches"]), _whole(plain["steady_minibatches"])
            return cls(seconds, *counts, _transfers(plain["cut"]), _transfers(plain["sync"]))
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"no timing of a worker: {error!r}") from None


def _transfers(plain: Any) -> Transfers:
    return Transfers(
        _whole(plain["count"]),
        _whole(plain["bytes"]),
        _seconds(plain["seconds"]),
        _seconds(plain["covered_seconds"]),
    )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} where a count is expected")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]} where seconds are expected")
    return float(value)
