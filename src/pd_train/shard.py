"""A replica's shard as ranges of parameters, by name: what a checkpoint keeps of it, whoever owned it before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pd_train.buckets import Bucket
from pd_train.checkpoint.part import Range, ShardSlice
from pd_train.optimizers import MovingOptimizer

__all__ = ["Shard", "join_slices", "part_of"]


class Shard:
    """The buckets that one replica owns, with their optimizers.

    Args:
        buckets: of the stage.
        optimizers: of the own buckets, by number.
        names: of the stage's parameters.
    """

    def __init__(
        self, buckets: Sequence[Bucket], optimizers: Mapping[int, MovingOptimizer], names: Sequence[str]
    ) -> None:
        self._buckets = buckets
        self._optimizers = optimizers
        self._names = names

    def ranges(self) -> list[Range]:
        """Of the parameters, in the order of the buckets."""
        return [each for number in self._optimizers for each in self._ranges_of(number)]

    def slices(self) -> list[ShardSlice]:
        """What the optimizers keep, in the same order."""
        return [
            ShardSlice(each, state)
            for number, optimizer in self._optimizers.items()
            for each, state in zip(self._ranges_of(number), optimizer.states(), strict=True)
        ]

    def load(self, slices: Sequence[ShardSlice]) -> None:
        """Give the optimizers what they kept when the slices were saved, by this shard or by others."""
        by_parameter: dict[str, list[ShardSlice]] = {}
        for each in slices:
            by_parameter.setdefault(each.range.parameter, []).append(each)
        for number, optimizer in self._optimizers.items():
            wanted = self._ranges_of(number)
            optimizer.load([join_slices(by_parameter.get(each.parameter, []), each) for each in wanted])

    def _ranges_of(self, number: int) -> Iterator[Range]:
        pieces = self._buckets[number].pieces
        return (Range(self._names[piece.parameter], piece.start, piece.stop) for piece in pieces)


def part_of(held: ShardSlice, wanted: Range) -> ShardSlice | None:
    """What a slice says about the wanted range; None where the two share no element."""
    start, stop = max(held.range.start, wanted.start), min(held.range.stop, wanted.stop)
    if held.range.parameter != wanted.parameter or start >= stop:
        return None
    state = {
        key: value[start - held.range.start : stop - held.range.start] if value.dim() else value
        for key, value in held.state.items()
    }
    return ShardSlice(Range(wanted.parameter, start, stop), state)


def join_slices(held: Sequence[ShardSlice], wanted: Range) -> dict[str, Tensor]:
    """The optimizer's state of a range, put together from slices that leave no gap in it."""
    parts: list[ShardSlice] = []
    reached = wanted.start
    for each in sorted(held, key=lambda one: one.range.start):
        part = part_of(each, Range(wanted.parameter, reached, wanted.stop))
        if part is not None:
            parts.append(part)
            reached = part.range.stop
    if not parts:
        return {}
    return {
        key: torch.cat([part.state[key] for part in parts]) if value.dim() else value.clone()
        for key, value in parts[0].state.items()
    }
