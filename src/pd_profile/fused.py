"""Lets a recurrent layer, or an attention, count as the one operation that it is on a GPU.

Without data torch takes these apart: a long short-term memory of 80 steps becomes a thousand small operations, each of
which would cost its launch, and an attention stores its matrix. GPUs run them fused (cuDNN; the attention kernels of
torch), so here all that such a call does becomes one matrix product, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pd_format.layers.values import rebuild, tensors_in
from pd_profile.counting import Counter, Kind, Work, bytes_of

__all__ = ["Fused"]

#: What is fused, and how many times its operations the backward pass does; attention computes its matrix again.
_BACKWARD = {
    "lstm": 2.0,
    "gru": 2.0,
    "rnn_tanh": 2.0,
    "rnn_relu": 2.0,
    "scaled_dot_product_attention": 2.5,
}


class Fused(TorchFunctionMode):
    """While entered, fused operations add one work each to the counter."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        share = _BACKWARD.get(getattr(function, "__name__", ""))
        given = list(tensors_in((args, kwargs)))
        if share is None or not all(tensor.is_meta for tensor in given):
            return function(*args, **kwargs)

        def run(tensors: tuple[Tensor, ...]) -> Any:
            waiting = iter(tensors)
            parts: Any = rebuild((args, kwargs), lambda leaf: next(waiting) if isinstance(leaf, Tensor) else leaf)
            return function(*parts[0], **parts[1])

        result = _AsOne.apply(self._counter, run, share, *given)
        return result if len(result) > 1 else result[0]


class _AsOne(torch.autograd.Function):
    """Runs a call in pieces, to learn what it returns and how many operations that takes, and counts it as one.

    Saved for the backward pass: what goes in and comes out, and for a recurrent layer what its gates and its cell held
    at each step, which is what cuDNN reserves.
    """

    @staticmethod
    def forward(
        ctx: Any, counter: Counter, run: Callable[[tuple[Tensor, ...]], Any], share: float, *given: Tensor
    ) -> tuple[Tensor, ...]:
        with counter.apart() as works:
            results = tuple(tensors_in(run(given)))
        flops = sum(work.flops for work in works)
        moved = bytes_of(given) + bytes_of(results)
        counter.works.append(Work(Kind.PRODUCT, False, flops, moved))
        ctx.counter, ctx.backward = counter, Work(Kind.PRODUCT, False, round(share * flops), 2 * moved)
        ctx.save_for_backward(*given, *results, *_reserve(given, results))
        ctx.count = len(given)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors[: ctx.count]
        ctx.counter.works.append(ctx.backward)
        needed = zip(given, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(torch.empty_like(tensor) if needs else None for tensor, needs in needed)


def _reserve(given: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> list[Tensor]:
    """What a recurrent layer keeps a step: each matrix of recurrent weights (G H, H) has G values for each of H."""
    if len(results) == 1:
        return []
    output, hidden = results[0], results[1].shape[-1]
    steps = output.numel() // output.shape[-1]
    recurrent = [tensor for tensor in given if tensor.dim() == 2 and tensor.shape[1] == hidden]
    width = max((tensor.shape[0] + hidden for tensor in recurrent), default=0)
    return [output.new_empty(steps, width) for _ in range(results[1].shape[0])]
