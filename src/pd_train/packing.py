"""A nested value as a row of scalars and frames of raw bytes, and back: what `pd_train.wire` makes messages of.

    ("a", [tensor])      "t" 2   "s" "a"   "l" 1   "x" "float32" 2 3 4 False False      +  a frame of 48 bytes

From the outside in: a letter says what follows, then how many. A tensor has its dtype, its dimensions and their sizes,
whether and how its memory is ordered otherwise, and whether it wants a gradient. Nothing that is read is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "Frames", "Reader", "Region", "WireError", "aligned", "pack"]

ALIGNMENT = 64
"""Bytes: what torch's own tensors are aligned to, and so those within one buffer too."""

_MOST_DEPTH = 100
_MOST_DIMENSIONS = 64
"""As many as torch's own kernels take."""
_MOST_DIGITS = 1000
_MOST_ELEMENTS = 2**48
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(Exception):
    """Frames that are no message of this run, or a value that cannot travel; the text says what was found."""


def aligned(size: int) -> int:
    """A number of bytes, rounded up so that what follows is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack(value: Any, frame_bytes: int) -> tuple[list[Any], list[bytes | memoryview]]:
    """The scalars and the frames of a value.

    Args:
        value: a nesting of tuples, lists and dicts with tensors on the CPU and plain values at the leaves.
        frame_bytes: the longest frame.

    Raises:
        WireError: it holds something else.
    """
    scalars: list[Any] = []
    frames: list[bytes | memoryview] = []
    _pack(value, scalars, frames, frame_bytes, _MOST_DEPTH)
    return scalars, frames


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory inwards, for a dense tensor in another order than its shape.

    A receiver that restores it gives kernels the layout, and so the bits, that they would have met without a cut.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride()[dimension], dimension))
    return order if tensor.permute(order).is_contiguous() else None


def _pack(value: Any, scalars: list[Any], frames: list[bytes | memoryview], frame_bytes: int, depth: int) -> None:
    """Append a value to the header's row, and its tensors' bytes to the frames."""
    if depth == 0:
        raise WireError(f"values nested more than {_MOST_DEPTH} deep cannot cross a cut")
    if value is None or isinstance(value, (bool, float, bytes)):
        scalars.append(value)
    elif isinstance(value, str):
        scalars += "s", value
    elif isinstance(value, int):
        if -(2**63) <= value < 2**63:
            scalars.append(value)
        elif abs(value) < 10**_MOST_DIGITS:
            scalars += "i", str(value)
        else:
            raise WireError(f"a whole number of more than {_MOST_DIGITS} digits cannot cross a cut")
    elif isinstance(value, Tensor):
        _pack_tensor(value, scalars, frames, frame_bytes)
    elif isinstance(value, (tuple, list)):
        scalars += "t" if isinstance(value, tuple) else "l", len(value)
        for item in value:
            _pack(item, scalars, frames, frame_bytes, depth - 1)
    elif isinstance(value, dict):
        scalars += "d", len(value)
        for key, item in value.items():
            if not _is_key(key):
                raise WireError(f"a dict with a {type(key).__name__} as a key cannot cross a cut; numbers and text can")
            _pack(key, scalars, frames, frame_bytes, depth - 1)
            _pack(item, scalars, frames, frame_bytes, depth - 1)
    else:
        raise WireError(
            f"a {type(value).__name__} cannot cross a cut; tensors, tuples, lists, dicts and plain values can"
        )


def _pack_tensor(tensor: Tensor, scalars: list[Any], frames: list[bytes | memoryview], frame_bytes: int) -> None:
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPE_NAMES or tensor.is_quantized:
        raise WireError(f"a {tensor.layout} tensor of {tensor.dtype} cannot cross a cut; keep it inside one stage")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise WireError(f"a tensor of {tensor.dim()} dimensions cannot cross a cut; at most {_MOST_DIMENSIONS} can")
    order = _memory_order(tensor)
    dense = tensor.detach() if order is None else tensor.detach().permute(order)
    scalars += "x", _DTYPE_NAMES[tensor.dtype], tensor.dim(), *tensor.shape
    scalars += (False,) if order is None else (True, *order)
    scalars.append(tensor.requires_grad)
    if dense.numel():
        raw = dense.contiguous().view(-1).view(torch.uint8).numpy().data
        frames += [raw[start : start + frame_bytes] for start in range(0, len(raw), frame_bytes)]


def _is_key(value: Any) -> bool:
    """Whether a dict may have it as a key: of others so many can be made to fall together that a dict is slow."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, (str, float, bytes))


class Reader:
    """Takes values off a row of scalars, and the tensors' bytes off the frames.

    Its methods raise `WireError` where something else is found than expected, and `IndexError` where the row ends.

    Args:
        scalars: whatever msgpack has read.
    """

    def __init__(self, scalars: list[Any]) -> None:
        scalars.reverse()
        self._scalars = scalars
        self._take = scalars.pop
        self._source: Frames | Region = Frames(())

    def read(self, source: Frames | Region) -> Any:
        """The one value that is left, its tensors' bytes from a source; nothing may be left over of either."""
        self._source = source
        value = self.value()
        if self._scalars:
            raise WireError("a header that goes on behind its message")
        source.finish()
        return value

    def text(self) -> str:
        """The next scalar."""
        found = self._take()
        if type(found) is not str:
            raise WireError(f"a {type(found).__name__} in a header where text is expected")
        return found

    def whole(self, most: int) -> int:
        """The next scalar, from 0 to below `most`."""
        found = self._take()
        if type(found) is not int or not 0 <= found < most:
            raise WireError(f"{str(found)[:40]!r} in a header where a number from 0 to below {most} is expected")
        return found

    def seconds(self) -> float:
        """The next scalar, a finite number."""
        found = self._take()
        if type(found) is not float or not math.isfinite(found):
            raise WireError(f"{str(found)[:40]!r} in a header where a time is expected")
        return found

    def truth(self) -> bool:
        """The next scalar."""
        found = self._take()
        if type(found) is not bool:
            raise WireError(f"a {type(found).__name__} in a header where a bool is expected")
        return found

    def value(self, depth: int = _MOST_DEPTH) -> Any:
        """The next value, which takes as many scalars as it needs."""
        found = self._take()
        if type(found) is not str:
            if found is not None and type(found) not in (bool, int, float, bytes):
                raise WireError(f"a {type(found).__name__} in a header, which takes only scalars")
            return found
        if found == "x":
            return self._tensor()
        if found == "s":
            return self.text()
        if found == "i":
            return self._long_number()
        if depth == 1:
            raise WireError(f"values nested more than {_MOST_DEPTH} deep")
        if found == "t":
            return tuple([self.value(depth - 1) for _ in range(self.whole(_MOST_ELEMENTS))])
        if found == "l":
            return [self.value(depth - 1) for _ in range(self.whole(_MOST_ELEMENTS))]
        if found == "d":
            return self._dict(depth - 1)
        raise WireError(f"{found[:40]!r} in a header, which announces nothing")

    def _dict(self, depth: int) -> dict[Any, Any]:
        count = self.whole(_MOST_ELEMENTS)
        result: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(depth)
            if not _is_key(key):
                raise WireError(f"a dict with a {type(key).__name__} as a key")
            result[key] = self.value(depth)
        if len(result) < count:
            raise WireError("a dict with the same key twice")
        return result

    def _long_number(self) -> int:
        digits = self.text()
        unsigned = digits.removeprefix("-")
        if not (unsigned.isascii() and unsigned.isdecimal() and len(unsigned) <= _MOST_DIGITS):
            raise WireError(f"{digits[:40]!r} in a header where a number of at most {_MOST_DIGITS} digits is expected")
        return int(digits)

    def _tensor(self) -> Tensor:
        name = self.text()
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise WireError(f"a tensor of unknown dtype {name[:40]!r}")
        dimensions = self.whole(_MOST_DIMENSIONS + 1)
        shape = [self.whole(_MOST_ELEMENTS) for _ in range(dimensions)]
        order = [self.whole(dimensions) for _ in range(dimensions)] if self.truth() else None
        if order is not None and len(set(order)) < dimensions:
            raise WireError("a tensor with an impossible memory order")
        # With a size of 0 the others still make strides.
        if math.prod(max(size, 1) for size in shape) >= _MOST_ELEMENTS:
            raise WireError(f"a tensor of more than {_MOST_ELEMENTS} elements")
        wants_gradient = self.truth()
        if wants_gradient and not (dtype.is_floating_point or dtype.is_complex):
            raise WireError(f"a gradient asked for {dtype}")
        raw = self._source.take(math.prod(shape) * dtype.itemsize).view(dtype)
        if order is None:
            tensor = raw.view(shape)
        else:
            inverse = [order.index(dimension) for dimension in range(dimensions)]
            tensor = raw.view([shape[dimension] for dimension in order]).permute(inverse)
        return tensor.requires_grad_() if wants_gradient else tensor


class Frames:
    """Bytes of tensors as they come in a message's own frames; a tensor has one or more to itself.

    Args:
        frames: buffers.
        pinned: whether that memory is to be page-locked.
    """

    def __init__(self, frames: Sequence[Any], pinned: bool = False) -> None:
        self._frames = iter(frames)
        self._pinned = pinned

    def take(self, expected: int) -> Tensor:
        """The next bytes, in memory of their own."""
        parts: list[memoryview] = []
        found = 0
        while found < expected:
            part = next(self._frames, None)
            if part is None:
                raise WireError(f"{found} bytes of a tensor of {expected}")
            parts.append(memoryview(part).cast("B"))
            found += parts[-1].nbytes
            if parts[-1].nbytes == 0 or found > expected:
                raise WireError(f"frames that do not add up to a tensor of {expected} bytes")
        # Memory is taken only now that as many bytes are really here as the header announced.
        raw = torch.empty(expected, dtype=torch.uint8, pin_memory=self._pinned)
        memory = raw.numpy()
        start = 0
        for part in parts:
            # numpy, since torch warns of buffers that may only be read; it lets other threads run meanwhile.
            memory[start : start + part.nbytes] = numpy.frombuffer(part, numpy.uint8)
            start += part.nbytes
        return raw

    def finish(self) -> None:
        """Make sure that nothing is left over.

        Raises:
            WireError: something is.
        """
        if next(self._frames, None) is not None:
            raise WireError("more frames than the header announces")


class Region:
    """Bytes of tensors that lie one behind the other in one buffer, each aligned; nothing is copied any more.

    Args:
        buffer: writable; kept alive by each of the tensors.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._start = 0

    def take(self, expected: int) -> Tensor:
        """The next bytes."""
        stop = self._start + expected
        if stop > len(self._buffer):
            raise WireError(f"{len(self._buffer) - self._start} bytes of a tensor of {expected}")
        if not expected:
            return torch.empty(0, dtype=torch.uint8)
        # Each tensor has a storage, and a count of versions, of its own.
        raw = torch.frombuffer(self._buffer[self._start : stop], dtype=torch.uint8)
        self._start = aligned(stop)
        return raw

    def finish(self) -> None:
        """As for `Frames`."""
        if self._start != len(self._buffer):
            raise WireError("more bytes than the header announces")
