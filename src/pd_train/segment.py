"""What rank 0 announces to every worker before a segment: a stretch of minibatches between two drains."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Segment"]


@dataclass(frozen=True)
class Segment:
    """What runs between two drains of the pipeline; rank 0 announces it to every worker."""

    number: int
    """Of the run, from 0."""
    training: bool
    epoch: int
    first: int
    """The segment's minibatch 0 is this one of the epoch."""
    first_of_run: int
    """The same of all minibatches that the run trains on."""
    minibatches: int
    samples: int
    """Of every minibatch but the last."""
    last_samples: int
    rate: float
    """The epoch's learning rate, before the scaling of a stage."""
