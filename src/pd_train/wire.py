"""A message as frames and back: a small msgpack header, then the tensors' raw bytes, never pickle (design, section 6).

A message carries any nesting of tuples, lists and dicts with tensors and plain values at the leaves. The header
holds that nesting with a number in each tensor's place, and a record of each tensor; the frames after it hold
their bytes. Sending copies nothing: a frame looks into the tensor's memory and keeps it alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy
import torch
from torch import Tensor

__all__ = ["FRAME_BYTES", "Message", "WireError", "decode", "encode"]

FRAME_BYTES = 1 << 30
"""The longest frame. Larger tensors go in several, since libzmq fails on frames above 2 GiB."""

_MOST_HEADER_BYTES = 16 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class WireError(Exception):
    """Frames that are no message of this run; the text says what was found and what was expected."""


@dataclass(frozen=True)
class Message:
    """What one worker tells another.

    Attributes:
        kind: what it is about: `forward`, `backward`, `gradient`, `parameters`, ...
        sender: rank.
        segment: number of the segment within the run, from 0.
        index: minibatch of the segment, or round, or version, as the kind needs.
        body: tensors and plain values, nested; a tensor that wants a gradient has `requires_grad` set.
    """

    kind: str
    sender: int
    segment: int
    index: int
    body: Any = None


def encode(message: Message, run: str, frame_bytes: int = FRAME_BYTES) -> list[bytes | memoryview]:
    """Turn a message into frames; the caller must not change its tensors until they are sent.

    Args:
        message: with tensors on the CPU.
        run: what marks all messages of this run (job and plan).
        frame_bytes: the longest frame.

    Raises:
        WireError: a value that cannot travel.
    """
    tensors: list[Tensor] = []
    nesting = _pack(message.body, tensors)
    records, frames = [], []
    for tensor in tensors:
        order = _memory_order(tensor)
        dense = tensor.detach() if order is None else tensor.detach().permute(order)
        records.append([_DTYPE_NAMES[tensor.dtype], list(tensor.shape), order, tensor.requires_grad])
        if dense.numel():
            raw = dense.contiguous().view(-1).view(torch.uint8).numpy().data
            frames += [raw[start : start + frame_bytes] for start in range(0, len(raw), frame_bytes)]
    header = [run, message.kind, message.sender, message.segment, message.index, nesting, records]
    return [msgpack.packb(header), *frames]


def decode(frames: Sequence[Any], run: str) -> Message:
    """Turn frames into a message whose tensors own their memory.

    Args:
        frames: buffers, the header first.
        run: as for `encode`.

    Raises:
        WireError: the frames are not a whole message of this run.
    """
    if not frames or memoryview(frames[0]).nbytes > _MOST_HEADER_BYTES:
        raise WireError(f"no header of at most {_MOST_HEADER_BYTES} bytes")
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        found, kind, sender, segment, index, nesting, records = header
        numbers = (sender, segment, index)
        if not isinstance(kind, str) or any(type(number) is not int or number < 0 for number in numbers):
            raise WireError("a header with other types")
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header that cannot be read ({type(error).__name__})") from None
    if found != run:
        raise WireError(f"a message of another run or plan ({str(found)[:80]!r}, expected {run!r})")
    rest = iter(frames[1:])
    tensors = [_read_tensor(record, rest) for record in _records(records)]
    if next(rest, None) is not None:
        raise WireError("more frames than the header announces")
    try:
        body = _unpack(nesting, tensors)
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"a body that cannot be read ({type(error).__name__})") from None
    return Message(kind, sender, segment, index, body)


def _memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory inwards, for a dense tensor in another order than its shape.

    A receiver that restores it gives kernels the layout, and so the bits, that they would have met without a cut.
    """
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.dim()), key=lambda dimension: (-tensor.stride()[dimension], dimension))
    return order if tensor.permute(order).is_contiguous() else None


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else ["i", str(value)]
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.dtype not in _DTYPE_NAMES or value.is_quantized:
            raise WireError(f"a {value.layout} tensor of {value.dtype} cannot cross a cut; keep it inside one stage")
        tensors.append(value)
        return ["x", len(tensors) - 1]
    if isinstance(value, tuple):
        return ["t", [_pack(item, tensors) for item in value]]
    if isinstance(value, list):
        return ["l", [_pack(item, tensors) for item in value]]
    if isinstance(value, dict):
        return ["d", [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]]
    raise WireError(f"a {type(value).__name__} cannot cross a cut; tensors, tuples, lists, dicts and plain values can")


def _unpack(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    tag, content = value
    if tag == "x":
        return tensors[content]
    if tag == "t":
        return tuple(_unpack(item, tensors) for item in content)
    if tag == "l":
        return [_unpack(item, tensors) for item in content]
    if tag == "d":
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    if tag == "i":
        return int(content)
    raise ValueError(tag)


def _records(records: Any) -> Iterator[tuple[torch.dtype, list[int], list[int] | None, bool]]:
    if not isinstance(records, list):
        raise WireError("a header without tensor records")
    for record in records:
        if not isinstance(record, list) or len(record) != 4:
            raise WireError("a tensor record of another form")
        name, shape, order, wants_gradient = record
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise WireError(f"a tensor of unknown dtype {str(name)[:40]!r}")
        if not isinstance(shape, list) or any(type(size) is not int or not 0 <= size < 2**48 for size in shape):
            raise WireError("a tensor with an impossible shape")
        if order is not None and (not isinstance(order, list) or sorted(order) != list(range(len(shape)))):
            raise WireError("a tensor with an impossible memory order")
        yield dtype, shape, order, bool(wants_gradient)


def _read_tensor(record: tuple[torch.dtype, list[int], list[int] | None, bool], frames: Iterator[Any]) -> Tensor:
    dtype, shape, order, wants_gradient = record
    expected = math.prod(shape) * dtype.itemsize
    parts: list[memoryview] = []
    found = 0
    while found < expected:
        part = next(frames, None)
        if part is None:
            raise WireError(f"{found} bytes of a tensor of {expected}")
        parts.append(memoryview(part).cast("B"))
        found += parts[-1].nbytes
        if parts[-1].nbytes == 0 or found > expected:
            raise WireError(f"frames that do not add up to a tensor of {expected} bytes")
    # Memory is taken only now that as many bytes are really here as the header announced.
    raw = torch.empty(expected, dtype=torch.uint8)
    memory = raw.numpy()
    start = 0
    for part in parts:
        # numpy, since torch warns of buffers that may only be read; it lets other threads run meanwhile.
        memory[start : start + part.nbytes] = numpy.frombuffer(part, numpy.uint8)
        start += part.nbytes
    if order is None:
        tensor = raw.view(dtype).view(shape)
    else:
        inverse = [order.index(dimension) for dimension in range(len(order))]
        tensor = raw.view(dtype).view([shape[dimension] for dimension in order]).permute(inverse)
    if wants_gradient:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise WireError(f"a gradient asked for {dtype}")
        tensor.requires_grad_()
    return tensor
