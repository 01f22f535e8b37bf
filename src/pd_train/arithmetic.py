"""What is done to gradients and parameters between a backward pass and the next weight version.

The parameter server decides which tensors meet when; here is what becomes of their numbers. An emulated stage moves
tensors without looking into them, and has another arithmetic (`pd_train.emulated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pd_train.optimizers import MovingOptimizer

__all__ = ["TORCH_ARITHMETIC", "Arithmetic", "TorchArithmetic"]


class Arithmetic(Protocol):
    """Called under `torch.no_grad`, but for `gather`, which runs within a backward pass."""

    def gather(self, total: Tensor | None, gradient: Tensor, weight: int | None) -> Tensor:
        """A replica's sum over an update's minibatches so far (None before the first), with one more gradient in it.

        The gradient's memory, or the sum's, is written over; a weight multiplies the gradient first.
        """
        ...

    def mean(self, contributions: Sequence[Sequence[Tensor | None]], weight: int) -> list[Tensor | None]:
        """The sum of the contributions, in their order, over the weight; the first one's memory is written over.

        Args:
            contributions: of the replicas that had a minibatch in the update, each a sum over its minibatches, weighed
                by samples where minibatches differ in them. None counts as zero; where all are None the result is None.
            weight: minibatches of the update, or samples where they differ.
        """
        ...

    def copy(self, pieces: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Write the values over the pieces."""
        ...

    def step(
        self,
        optimizer: MovingOptimizer,
        pieces: Sequence[Tensor],
        previous: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        rate: float,
    ) -> None:
        """Make the pieces' next version from the previous one's values, which may be in the pieces themselves."""
        ...


class TorchArithmetic:
    """The real one."""

    def gather(self, total: Tensor | None, gradient: Tensor, weight: int | None) -> Tensor:
        if weight is not None:
            gradient = gradient.mul_(weight)
        return gradient if total is None else total.add_(gradient)

    def mean(self, contributions: Sequence[Sequence[Tensor | None]], weight: int) -> list[Tensor | None]:
        result: list[Tensor | None] = []
        for column in zip(*contributions, strict=True):
            total: Tensor | None = None
            for gradient in column:
                if gradient is not None:
                    total = gradient if total is None else total.add_(gradient)
            result.append(total if total is None or weight == 1 else total.div_(weight))
        return result

    def copy(self, pieces: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            piece.copy_(value)

    def step(
        self,
        optimizer: MovingOptimizer,
        pieces: Sequence[Tensor],
        previous: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        rate: float,
    ) -> None:
        optimizer.step(pieces, gradients, rate, None if previous is pieces else previous)


TORCH_ARITHMETIC = TorchArithmetic()
