"""Compressed activations: what float32 tensors are while they cross a cut, and their gradients on the way back.

    bf16    rounded to bfloat16
    int8    round(x / s) with s = max |x| / 127 for each row of the first dimension, which is a sample; s travels along

Passes themselves compute as without it, in float32. All other tensors, and plain values, cross as they are; so does a
tensor without rows of two elements or more, which would not get shorter. NaN and infinity cross as such, under int8 as
NaN for the whole row, so that a loss that diverges is still found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pd_format.layers.values import map_tensors, tensors_in

__all__ = ["Crossing"]

Packed = tuple[Tensor, ...]
"""What travels of a tensor: itself, or its int8 elements and the magnitude of each row."""


class _Codec(Protocol):
    def pack(self, tensor: Tensor) -> Packed: ...

    def unpack(self, packed: Packed) -> Tensor: ...


class _Bf16:
    def pack(self, tensor: Tensor) -> Packed:
        return (tensor.to(torch.bfloat16),)

    def unpack(self, packed: Packed) -> Tensor:
        return packed[0].float()


class _Int8:
    def pack(self, tensor: Tensor) -> Packed:
        rows = tensor.flatten(1)
        scales = rows.abs().amax(1) / 127
        divisors = torch.where(scales > 0, scales, 1.0)
        # The smallest numbers there are have no exact 127th part. What int8 makes of NaN does not matter: the magnitude
        # of its row is NaN or infinite too.
        steps = (tensor / _as_column(divisors, tensor)).round_().clamp_(-127, 127)
        return steps.to(torch.int8), scales

    def unpack(self, packed: Packed) -> Tensor:
        steps, scales = packed
        return steps * _as_column(scales, steps)


class Crossing:
    """The two ends of a cut. Tensors are detached; whether one wants a gradient is kept.

    Args:
        name: of the scheme.
    """

    def __init__(self, name: Literal["bf16", "int8"]) -> None:
        self._codec: _Codec = _Bf16() if name == "bf16" else _Int8()

    def pack(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Any nesting, as `unpack` takes it: the values, and (number of the tensor, magnitudes, wants a gradient)."""
        packed: list[tuple[int, Tensor | None, bool]] = []
        count = 0

        def shrink(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if not _is_packed(tensor):
                return tensor
            first, *rest = self._codec.pack(tensor.detach())
            packed.append((count - 1, rest[0] if rest else None, tensor.requires_grad))
            return first

        return map_tensors(shrink, values), packed

    def unpack(self, crossed: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values again, but for the rounding."""
        values, packed = crossed
        of = {number: (scales, wanted) for number, scales, wanted in packed}
        count = 0

        def widen(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if count - 1 not in of:
                return tensor
            scales, wanted = of[count - 1]
            whole = self._codec.unpack((tensor,) if scales is None else (tensor, scales))
            return whole.requires_grad_(wanted)

        result: tuple[Any, ...] = map_tensors(widen, values)
        return result

    def pack_gradients(self, gradients: Sequence[Tensor | None]) -> list[Any]:
        """An answer: for each gradient what `unpack_gradients` takes."""
        return [self._codec.pack(each) if each is not None and _is_packed(each) else each for each in gradients]

    def unpack_gradients(self, answer: Sequence[Any]) -> list[Tensor | None]:
        """The gradients again, but for the rounding."""
        return [self._codec.unpack(each) if isinstance(each, tuple) else each for each in answer]

    def has_form(self, crossed: Any) -> bool:
        """Whether `unpack` takes it."""
        if type(crossed) is not tuple or len(crossed) != 2 or type(crossed[1]) is not list:
            return False
        tensors = list(tensors_in(crossed[0]))
        return all(
            type(each) is tuple
            and len(each) == 3
            and type(each[0]) is int
            and 0 <= each[0] < len(tensors)
            and type(each[2]) is bool
            and self._fits((tensors[each[0]],) if each[1] is None else (tensors[each[0]], each[1]))
            for each in crossed[1]
        )

    def has_answer_form(self, answer: Any) -> bool:
        """Whether `unpack_gradients` takes it, or it is an answer without gradients."""
        if answer is None:
            return True
        return type(answer) is list and all(
            each is None or isinstance(each, Tensor) or (type(each) is tuple and self._fits(each)) for each in answer
        )

    def _fits(self, packed: Any) -> bool:
        if isinstance(self._codec, _Bf16):
            return len(packed) == 1 and isinstance(packed[0], Tensor) and packed[0].dtype is torch.bfloat16
        if len(packed) != 2 or not all(isinstance(each, Tensor) for each in packed):
            return False
        steps, scales = packed
        return (
            steps.dtype is torch.int8
            and steps.dim() > 0
            and scales.dtype is torch.float32
            and scales.shape == steps.shape[:1]
        )


def _is_packed(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.dim() > 0 and tensor.numel() > 1 and tensor[0].numel() > 1


def _as_column(scales: Tensor, like: Tensor) -> Tensor:
    return scales.view(-1, *[1] * (like.dim() - 1))
