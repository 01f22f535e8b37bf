"""The precision of a run: what autocast computes in, and what a float32 tensor is while it crosses a cut.

Parameters, their gradients and the optimizer stay float32. A tensor that is not float32 is nobody's business here: a
model that is bfloat16 itself computes and travels as it is.

    stage s      y float32 --cast--> bfloat16 ~~~ wire ~~~ bfloat16 --cast--> float32 y     stage s + 1
    backward     dy float32 <--cast-- bfloat16 ~~~ wire ~~~ bfloat16 <--cast-- float32 dy

The stage that receives goes on with the type that the model gave the value, so that it computes what autocast computes
on the whole model, but for the rounding at the cut.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pd_format.layers.values import map_tensors
from pd_format.profile import PrecisionName

__all__ = ["FP32", "Precision", "get_precision"]


@dataclass(frozen=True)
class Precision:
    """What autocast computes in; `dtype` is None for fp32, where tensors keep the types that the model gives them."""

    name: PrecisionName
    dtype: torch.dtype | None

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """What surrounds a forward pass and its loss; a backward pass knows its types from the forward pass."""
        return contextlib.nullcontext() if self.dtype is None else torch.autocast(device.type, self.dtype)

    def crossing_bytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor at a cut, which in the model without autocast has this shape and type."""
        dtype = self.dtype if self.dtype is not None and tensor.dtype is torch.float32 else tensor.dtype
        return tensor.numel() * dtype.itemsize

    def narrow(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What crosses a cut in place of these values, any nesting: `widen` undoes it, but for the rounding.

        With autocast the values come with the numbers of the tensors that were float32, since the others, which
        may be of the same type by now, are not to be widened.
        """
        if self.dtype is None:
            return values
        were_wide: list[int] = []
        count = 0

        def cast(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if tensor.dtype is not torch.float32:
                return tensor
            were_wide.append(count - 1)
            return tensor.to(self.dtype)

        return map_tensors(cast, values), were_wide

    def widen(self, crossed: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values again, with the types that they had before `narrow`."""
        if self.dtype is None:
            return crossed
        values, were_wide = crossed
        count = 0

        def cast(tensor: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return tensor.float() if count - 1 in were_wide else tensor

        result: tuple[Any, ...] = map_tensors(cast, values)
        return result


FP32 = Precision("fp32", None)
_PRECISIONS = {each.name: each for each in (FP32, Precision("bf16", torch.bfloat16), Precision("fp16", torch.float16))}


def get_precision(name: PrecisionName) -> Precision:
    """The precision that a profile, a plan or an option names."""
    return _PRECISIONS[name]
