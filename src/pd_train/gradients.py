"""Gradients on their way out of a backward pass: bucket by bucket, as soon as each is complete.

This is wait-free backpropagation (the paper, section 3.2). Where an update averages several minibatches of a replica,
their gradients are added up here first, in the minibatches' order, and leave in the backward pass of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_train.arithmetic import TORCH_ARITHMETIC, Arithmetic
from pd_train.buckets import Bucket

__all__ = ["GradientBuckets", "Gradients", "Pieces", "WatchGradients"]

Gradients = tuple[Tensor | None, ...]
"""Of the pieces of a bucket; None where no minibatch gave the parameter one."""

Pieces = Gradients | list[Tensor]
"""What a message has of a bucket: a tuple of its pieces, or a list of a compressor's parts."""

WatchGradients = Callable[[Callable[[int, Tensor], None]], None]
"""Has a function told of each gradient as soon as there is one: see `pd_train.engine.StageEngine.watch_gradients`."""


class GradientBuckets:
    """Collects the gradients of one update after another.

    Args:
        watch: tells of gradients within a backward pass.
        names: of the parameters, for messages to people.
        buckets: how they are cut.
        flat: whether pieces are parts of a flat row, to be sent early; else they are whole parameters.
        leave: takes a complete bucket: its number and its gradients, which are the taker's to change.
        arithmetic: on gradients.
    """

    def __init__(
        self,
        watch: WatchGradients,
        names: Sequence[str],
        buckets: Sequence[Bucket],
        flat: bool,
        leave: Callable[[int, Gradients], None],
        arithmetic: Arithmetic = TORCH_ARITHMETIC,
    ) -> None:
        self._names = names
        self._buckets = buckets
        self._flat = flat
        self._leave = leave
        self._arithmetic = arithmetic
        self._buckets_of: list[list[int]] = [[] for _ in names]
        for index, bucket in enumerate(buckets):
            for parameter in {piece.parameter for piece in bucket.pieces}:
                self._buckets_of[parameter].append(index)
        self._sums: dict[int, Tensor] = {}
        self._lacking: list[int] = []
        self._seen: set[int] = set()
        """Parameters that have had their gradient in this pass."""
        self._weight: int | None = None
        self._last = True
        if flat:
            watch(self._ready)

    def start(self, weight: int | None, last: bool) -> None:
        """A backward pass is about to begin.

        Args:
            weight: samples of the minibatch, where an update's minibatches differ in them; else None.
            last: whether it is the replica's last of its update, after which the gradients leave.
        """
        self._weight = weight
        self._last = last
        self._lacking = [len({piece.parameter for piece in bucket.pieces}) for bucket in self._buckets]
        self._seen.clear()

    def finish(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass is over: what has not left yet leaves now, if it was the last of its update.

        Args:
            gradients: of the parameters, in their order.
        """
        if not self._flat:
            for index, gradient in enumerate(gradients):
                if gradient is not None:
                    self._add(index, gradient)
        if self._last:
            for bucket, lacking in enumerate(self._lacking):
                if lacking:
                    self._let_go(bucket)
            self._sums = {}

    def held(self) -> Iterator[Tensor]:
        """Sums of an update that is not complete."""
        yield from self._sums.values()

    def _ready(self, index: int, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise UserError(
                f"parameter {self._names[index]} has a sparse gradient, which a replicated stage cannot cut into "
                "pieces; build the model with sparse=False."
            )
        if index in self._seen:
            raise UserError(
                f"parameter {self._names[index]} got its gradient in two parts, as it does where a reentrant "
                "checkpoint is around a module that is used twice; the first part has left already. Give "
                "torch.utils.checkpoint use_reentrant=False."
            )
        self._seen.add(index)
        self._add(index, gradient.contiguous().view(-1))
        if self._last:
            for bucket in self._buckets_of[index]:
                self._lacking[bucket] -= 1
                if self._lacking[bucket] == 0:
                    self._let_go(bucket)

    def _add(self, index: int, gradient: Tensor) -> None:
        self._sums[index] = self._arithmetic.gather(self._sums.get(index), gradient, self._weight)

    def _let_go(self, bucket: int) -> None:
        self._lacking[bucket] = 0
        pieces: list[Tensor | None] = []
        for piece in self._buckets[bucket].pieces:
            total = self._sums.get(piece.parameter)
            pieces.append(total[piece.start : piece.stop] if self._flat and total is not None else total)
        self._leave(bucket, tuple(pieces))
