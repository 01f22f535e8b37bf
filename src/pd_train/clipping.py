"""Clipping a gradient whose parts lie on several shards by the norm of the whole (design, section 4).

A norm needs one agreed moment. The shards of a stage have one for each update; the stages of a pipeline have one only
where the pipeline is flushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Clipping"]


class Clipping:
    """Clips the mean gradient of each update by its norm over several shards (and over all stages with a flush).

    Each shard tells the others its sum of squares; all add them up in the order of the ranks, in float64.

    Args:
        most: the largest norm.
        members: ranks of the shards that share the norm, in order.
        tell: (segment, update, sum of squares): sends to all members, this one included.
    """

    def __init__(self, most: float, members: Sequence[int], tell: Callable[[int, int, float], None]) -> None:
        self._most = most
        self._members = members
        self._tell = tell
        self._squares: dict[tuple[int, int], dict[int, float]] = {}

    def announce(self, segment: int, update: int, gradients: Sequence[Tensor | None]) -> None:
        """This shard's part of the gradient is whole."""
        squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
        # One look at the device for all.
        self._tell(segment, update, math.fsum(torch.stack(squares).tolist()) if squares else 0.0)

    def take(self, segment: int, update: int, rank: int, squares: float) -> None:
        """A member's sum of squares has arrived."""
        self._squares.setdefault((segment, update), {})[rank] = squares

    def factor(self, segment: int, update: int) -> float | None:
        """What the gradient is multiplied with; None until every member has announced its part."""
        squares = self._squares.get((segment, update), {})
        if len(squares) < len(self._members):
            return None
        total = 0.0
        for rank in self._members:
            total += squares[rank]
        return min(1.0, self._most / (math.sqrt(total) + 1e-6))
