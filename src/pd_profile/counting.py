"""Counts what the operations of a step would do, while the step runs on tensors without data.

Floating-point operations are those of `torch.utils.flop_counter`; bytes are those of the tensors that an operation is
given and returns, each once. It sees what torch itself runs, forward and backward, so nothing is known of models here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from pd_format.layers.values import storage_key, tensors_in

__all__ = ["Counter", "Kind", "Work", "bytes_of"]


class Kind(Enum):
    """What GPUs do at different shares of their peak."""

    WINOGRAD = "convolution of 3x3 or more, stride 1"
    THIN = "convolution of at most 4 channels"
    CONVOLUTION = "other convolution"
    PRODUCT = "matrix product"
    MEMORY = "everything else"


@dataclass(frozen=True)
class Work:
    """One operation.

    Attributes:
        backward: whether it is the backward pass of a convolution; other backward passes are operations as any other.
        flops: its floating-point operations.
        moved_bytes: what it reads and writes.
    """

    kind: Kind
    backward: bool
    flops: int
    moved_bytes: int


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the work of each operation that runs while it is entered.

    Tensors with data that meet such without, as constants of the model do, take part as if they had none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: In the order in which they ran; what only makes a view, or room, does no work.
        self.works: list[Work] = []

    @contextmanager
    def apart(self) -> Iterator[list[Work]]:
        """Record what runs meanwhile in a list of its own."""
        before, self.works = self.works, []
        try:
            yield self.works
        finally:
            self.works = before

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        if any(tensor.is_meta for tensor in given):
            args, kwargs = tree_map(_without_data, (args, kwargs))
        result = function(*args, **kwargs)
        if next(tensors_in(result), None) is not None and not _is_free(function):
            self.works.append(_work(function, args, kwargs, result))
        return result


def _without_data(value: object) -> object:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value


#: These make room or a second name for it.
_ROOM = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}

#: These read as much of their first tensor as they return, and not the whole of it.
_PICK = {"embedding", "index", "index_select", "gather"}


def _is_free(function: Any) -> bool:
    if function.__name__.partition(".")[0] in _ROOM:
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)


def _work(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> Work:
    name = function.__name__.partition(".")[0]
    count = flop_registry.get(function._overloadpacket)
    if name == "convolution_backward":
        flops = _backward_flops(args)
    else:
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
    return Work(_kind(name, args, flops), name == "convolution_backward", flops, _moved(name, args, kwargs, result))


def _backward_flops(args: tuple[Any, ...]) -> int:
    """Of a convolution's backward pass: the forward pass's once for each gradient that is wanted, of input and weight.

    torch's own count is off by the number of groups where there are several.
    """
    gradient, given, weight, wanted = args[0], args[1], args[2], args[10]
    values = given if args[7] else gradient  # A transposed convolution uses the weights once for each input value.
    return int(2 * values.numel() * weight[0].numel() * sum(wanted[:2]))


def _moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:
    """Bytes read and written; what is changed in place counts as both."""
    given, made = list(tensors_in((args, kwargs))), list(tensors_in(result))
    if name in _PICK:
        return bytes_of(given[1:]) + 2 * bytes_of(made)
    # Batch normalisation reads all that it is given for its statistics first, and then again.
    passes = 2 if "batch_norm" in name else 1
    return passes * bytes_of(given) + bytes_of(made)


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors; one that is there twice counts once, and views of one memory never for more than that has."""
    views = {(storage_key(each), each.storage_offset(), each.size(), each.stride()): each for each in tensors}
    sizes: dict[int, int] = defaultdict(int)
    rooms: dict[int, int] = {}
    for (key, *_), tensor in views.items():
        sizes[key] += tensor.numel() * tensor.element_size()
        rooms[key] = tensor.untyped_storage().nbytes()
    return sum(min(size, rooms[key]) for key, size in sizes.items())


def _kind(name: str, args: tuple[Any, ...], flops: int) -> Kind:
    if name == "convolution":
        return _convolution_kind(args[1], stride=args[3], transposed=args[6])
    if name == "convolution_backward":
        return _convolution_kind(args[2], stride=args[4], transposed=args[7])
    return Kind.PRODUCT if flops else Kind.MEMORY


def _convolution_kind(weight: Tensor, stride: Sequence[int], transposed: bool) -> Kind:
    """By the channels that an output is made of (a group's), then by whether cuDNN transforms it."""
    if weight.shape[1] <= 4:
        return Kind.THIN
    sides = weight.shape[2:]
    winograd = len(sides) == 2 and min(sides) >= 3 and set(stride) == {1} and not transposed
    return Kind.WINOGRAD if winograd else Kind.CONVOLUTION
