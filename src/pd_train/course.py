"""Which minibatches a replica of stage 0 will load: known ahead, so that they can be read ahead.

epoch 0, segments of 3 minibatches     0 1 2 | 3 4 5 | 6      validation  0 1 2      epoch 1 ...
replica 0 of 2                         0   2 | 3   5 | 6                  0   2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Course", "MinibatchKey"]


class MinibatchKey(NamedTuple):
    """One minibatch of a run."""

    training: bool
    """Otherwise of the validation."""
    epoch: int
    minibatch: int
    """Of the epoch."""


@dataclass(frozen=True)
class Course:
    """What a run will do if nothing ends it early.

    It is a forecast: whatever comes instead is loaded all the same, only later.
    """

    epochs: int
    training: int
    """Minibatches of an epoch; 0 in a run that only validates."""
    validation: int
    flush: int | None
    """Minibatches of a segment; None where an epoch is one."""
    most: int | None
    """Training minibatches of the whole run."""
    replica: int
    replicas: int
    """Of stage 0."""

    def of_segment(self, training: bool, epoch: int, first: int, minibatches: int) -> Iterator[MinibatchKey]:
        """This replica's minibatches of a segment."""
        return (MinibatchKey(training, epoch, first + b) for b in range(self.replica, minibatches, self.replicas))

    def after(self, training: bool, epoch: int, first: int) -> Iterator[MinibatchKey]:
        """This replica's minibatches from a segment on that begins at minibatch `first`, to the end of the run."""
        while epoch < self.epochs:
            if training and self.training:
                whole = self.training if self.most is None else min(self.training, self.most - epoch * self.training)
                if whole <= 0:
                    return
                size = self.flush or whole
                for start in range(first, whole, size):
                    yield from self.of_segment(True, epoch, start, min(size, whole - start))
                first = 0
            yield from self.of_segment(False, epoch, first, self.validation - first)
            training, first, epoch = True, 0, epoch + 1
