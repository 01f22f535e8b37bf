"""A message as frames and back: a small msgpack header, then the tensors' raw bytes, never pickle (design, section 6).

A message carries any nesting of tuples, lists and dicts with tensors and plain values at the leaves. The header is a
row of msgpack scalars: the mark of the run, who sends what, then the nesting from the outside in. The frames after it
hold the tensors' bytes, in the same order (`pd_train.packing`):

    mark   "forward" 1 17 2 3 8.25   "t" 2  "x" "float32" 2 3 4 False False  5        +  a frame of 48 bytes

No msgpack container is ever in it, so whatever a stranger sends, reading takes memory and time in proportion to what
has really arrived, not to what it announces. What lacks the mark is not looked at any further.

Sending copies nothing: a frame looks into the tensor's memory and keeps it alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack

from pd_train.packing import Reader, WireError, pack

__all__ = ["FRAME_BYTES", "Message", "WireError", "decode", "encode"]

FRAME_BYTES = 1 << 30
"""The longest frame. Larger tensors go in several, since libzmq fails on frames above 2 GiB."""

_MOST_HEADER_BYTES = 16 << 20
_MOST_NUMBER = 2**48


@dataclass(frozen=True)
class Message:
    """What one worker tells another.

    Attributes:
        kind: what it is about: `forward`, `backward`, `gradient`, `parameters`, ...
        sender: rank.
        segment: number of the segment within the run, from 0.
        index: minibatch of the segment, or round, or version, as the kind needs.
        body: tensors and plain values, nested; a tensor that wants a gradient has `requires_grad` set.
        sequence: number among the messages of this sender to this receiver, from 0; the transport counts.
        sent, arrived: seconds by the run's clock (`pd_train.clock`), as the sender's and the receiver's transport noted
            them; 0 for a message that crosses no network.
        size: bytes of all its frames; 0 likewise.
    """

    kind: str
    sender: int
    segment: int
    index: int
    body: Any = None
    sequence: int = 0
    sent: float = 0.0
    arrived: float = 0.0
    size: int = 0


def encode(
    message: Message, run: str, sequence: int = 0, frame_bytes: int = FRAME_BYTES, sent: float = 0.0
) -> list[bytes | memoryview]:
    """Turn a message into frames; the caller must not change its tensors until they are sent.

    Args:
        message: with tensors on the CPU.
        run: what marks all messages of this run (job and plan).
        sequence, sent: of the message, in the place of its own.
        frame_bytes: the longest frame.

    Raises:
        WireError: a value that cannot travel.
    """
    body, frames = pack(message.body, frame_bytes)
    scalars = [message.kind, message.sender, sequence, message.segment, message.index, sent, *body]
    try:
        row: bytes = msgpack.packb(scalars)
    except (ValueError, OverflowError) as error:
        raise WireError(f"a value that cannot cross a cut ({error})") from None
    # The row's own head says how many there are, which the reader finds out by itself.
    header = _mark(run) + row[1 if len(scalars) < 16 else 3 if len(scalars) < 65536 else 5 :]
    if len(header) > _MOST_HEADER_BYTES:
        raise WireError(f"plain values of {len(header)} bytes cannot cross a cut; put them into a tensor")
    return [header, *frames]


def decode(frames: Sequence[Any], *runs: str) -> Message:
    """Turn frames into a message whose tensors own their memory.

    Args:
        frames: buffers, the header first.
        runs: as for `encode`; any of them.

    Raises:
        WireError: the frames are not a whole message of one of these runs.
    """
    header = memoryview(frames[0]).cast("B") if frames else memoryview(b"")
    mark = next((mark for mark in map(_mark, runs) if header[: len(mark)] == mark), None)
    if mark is None:
        found = bytes(header[: len(_mark(runs[0]))])
        raise WireError(
            f"no message of this run: it begins with {found!r}, expected {b' or '.join(map(_mark, runs))!r}"
        )
    if header.nbytes > _MOST_HEADER_BYTES:
        raise WireError(f"a header of {header.nbytes} bytes, expected at most {_MOST_HEADER_BYTES}")
    reader = Reader(_scalars(header[len(mark) :]), frames[1:])
    try:
        kind = reader.text()
        sender, sequence, segment, index = (reader.whole(_MOST_NUMBER) for _ in range(4))
        sent = reader.seconds()
        body = reader.value()
    except IndexError:
        raise WireError("a header that ends too early") from None
    reader.finish()
    return Message(kind, sender, segment, index, body, sequence, sent)


@lru_cache(maxsize=16)
def _mark(run: str) -> bytes:
    packed: bytes = msgpack.packb(run)
    return packed


def _scalars(header: memoryview) -> list[Any]:
    unpacker = msgpack.Unpacker(
        read_size=max(1, header.nbytes),
        max_buffer_size=_MOST_HEADER_BYTES,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    try:
        unpacker.feed(header)
        scalars = list(unpacker)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"a header that cannot be read ({type(error).__name__})") from None
    if unpacker.tell() != header.nbytes:
        raise WireError("a header that ends too early")
    return scalars
