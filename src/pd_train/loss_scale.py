"""The dynamic loss scale of float16, as in torch.amp.GradScaler, decided by all workers together once an update.

A gradient that is not finite in one shard of one stage leaves out the whole update, at every stage: else the stages
would drift apart. That takes one agreed moment a step, which a pipeline has only where it is flushed (design,
section 4). Each worker tells all others whether the gradients of its shard are finite; all hear the same, so all keep
the same scale without a word more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pd_train.options import LossScaling

__all__ = ["LossScale"]


class LossScale:
    """What the loss is multiplied with before its backward pass, and the gradients divided by before the update.

    Args:
        settings: how it changes.
        members: ranks that decide together.
        tell: (segment, whether this member's gradients are finite): sends to all members, this one included.
    """

    def __init__(self, settings: LossScaling, members: Sequence[int], tell: Callable[[int, bool], None]) -> None:
        self.value = settings.initial
        self.overflowed: tuple[int, ...] = ()
        """Ranks whose gradients were not finite in the segment before; empty where it was updated."""
        self._settings = settings
        self._members = members
        self._tell = tell
        self._finite: dict[int, dict[int, bool]] = {}
        self._good_updates = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether updates were left out until no smaller scale could help."""
        return self.value < self._settings.least

    def kept(self) -> tuple[float, int]:
        """What a checkpoint keeps: the value, and good updates in a row."""
        return self.value, self._good_updates

    def load(self, kept: tuple[float, int]) -> None:
        """Go on from what `kept` gave."""
        self.value, self._good_updates = kept

    def unscale(self, gradients: Sequence[Tensor | None]) -> None:
        """Divide in place."""
        for gradient in gradients:
            if gradient is not None:
                # The scale is a power of two: this is exact, unless the result is too small for float32.
                gradient.mul_(1.0 / self.value)

    def announce(self, segment: int, gradients: Sequence[Tensor | None]) -> None:
        """This member's gradients of the segment are whole."""
        checks = [_is_finite(gradient) for gradient in gradients if gradient is not None]
        # One look at the device for all.
        self._tell(segment, not checks or bool(torch.stack(checks).all()))

    def take(self, segment: int, rank: int, finite: bool) -> None:
        """What a member has said arrived."""
        self._finite.setdefault(segment, {})[rank] = finite

    def verdict(self, segment: int) -> bool | None:
        """Whether the segment's update is applied; None until every member has spoken."""
        spoken = self._finite.get(segment, {})
        return all(spoken.values()) if len(spoken) == len(self._members) else None

    def settle(self, segment: int) -> None:
        """The segment has been updated, or left alone, everywhere in this worker: the next one has its own scale."""
        spoken = self._finite.pop(segment)
        self.overflowed = tuple(rank for rank in self._members if not spoken[rank])
        if self.overflowed:
            self.value /= 2
            self._good_updates = 0
            return
        self._good_updates += 1
        if self._good_updates == self._settings.growth_interval:
            self.value *= 2
            self._good_updates = 0


def _is_finite(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.isfinite(values).all()
