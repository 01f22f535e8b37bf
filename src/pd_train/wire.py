"""A message as frames and back: a small msgpack header, then the tensors' raw bytes, never pickle (design, section 6).

A message carries any nesting of tuples, lists and dicts with tensors and plain values at the leaves. The header is a
row of msgpack scalars: the mark of the run, who sends what, then the nesting from the outside in. The frames after it
hold the tensors' bytes, in the same order (`pd_train.packing`):

    mark   "forward" 1 17 2 3 8.25 0   "t" 2  "x" "float32" 2 3 4 False False  5        +  a frame of 48 bytes

No msgpack container is ever in it, so whatever a stranger sends, reading takes memory and time in proportion to what
has really arrived, not to what it announces. What lacks the mark is not looked at any further.

Sending copies nothing: a frame looks into the tensor's memory and keeps it alive.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgpack

from pd_train.packing import Frames, Reader, Region, WireError, aligned, pack

__all__ = ["FRAME_BYTES", "PIECE_BYTES", "Message", "Opened", "Sealed", "WireError", "decode", "encode", "seal"]

PIECE_BYTES = 1 << 20
"""The longest frame with bytes of tensors. Larger tensors go in several."""
TOGETHER_BYTES = 256 << 10
"""Bytes of tensors up to which they go with their header."""
_MOST_HEADER_BYTES = 16 << 20
FRAME_BYTES = _MOST_HEADER_BYTES
"""The longest frame that is taken."""

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


@dataclass(frozen=True)
class Sealed:
    """A message that waits to leave: all of it but its number, which it gets when it does.

    Attributes:
        kind: of the message.
        frames: with the tensors' bytes; each tensor has one or more.
        apart: bytes of all frames, each rounded up to `pd_train.packing.ALIGNMENT`, where they go apart from their
            header; 0 where they go with it.
    """

    kind: str
    frames: list[bytes | memoryview]
    apart: int
    _start: bytes
    _end: bytes

    @property
    def size(self) -> int:
        """Bytes to be sent, within a few."""
        return len(self._start) + len(self._end) + sum(len(frame) for frame in self.frames)

    def header(self, sequence: int) -> bytes:
        """The header, for the message of this number."""
        number: bytes = msgpack.packb(sequence)
        return self._start + number + self._end


def seal(
    message: Message, run: str, frame_bytes: int = PIECE_BYTES, sent: float = 0.0, most_together: int = TOGETHER_BYTES
) -> Sealed:
    """Make a message ready to leave; the caller must not change its tensors until it has.

    Args:
        message: with tensors on the CPU.
        run: what marks all messages of this run (job and plan).
        frame_bytes: the longest frame; a multiple of `pd_train.packing.ALIGNMENT`.
        sent: in the place of the message's own.
        most_together: bytes of frames that go with their header.

    Raises:
        WireError: a value that cannot travel.
    """
    body, frames = pack(message.body, frame_bytes)
    apart = 0
    if sum(len(frame) for frame in frames) > most_together:
        apart = sum(aligned(len(frame)) for frame in frames)
    try:
        start = _row([message.kind, message.sender])
        end = _row([message.segment, message.index, sent, apart, *body])
    except (ValueError, OverflowError) as error:
        raise WireError(f"a value that cannot cross a cut ({error})") from None
    if len(end) > _MOST_HEADER_BYTES - 1000:
        raise WireError(f"plain values of {len(end)} bytes cannot cross a cut; put them into a tensor")
    return Sealed(message.kind, frames, apart, _mark(run) + start, end)


def encode(
    message: Message, run: str, sequence: int = 0, frame_bytes: int = PIECE_BYTES, sent: float = 0.0
) -> list[bytes | memoryview]:
    """Turn a message into its header and frames that go with it; arguments and errors as for `seal`."""
    sealed = seal(message, run, frame_bytes, sent, most_together=sys.maxsize)
    return [sealed.header(sequence), *sealed.frames]


class Opened:
    """A header that has been read, up to the body.

    Args:
        header: a buffer.
        runs: the message must be of one of these.

    Raises:
        WireError: it is no header of these runs.
    """

    def __init__(self, header: Any, runs: Sequence[str]) -> None:
        header = memoryview(header).cast("B")
        mark = next((mark for mark in map(_mark, runs) if header[: len(mark)] == mark), None)
        if mark is None:
            found = bytes(header[: len(_mark(runs[0]))])
            raise WireError(
                f"no message of this run: it begins with {found!r}, expected {b' or '.join(map(_mark, runs))!r}"
            )
        if header.nbytes > _MOST_HEADER_BYTES:
            raise WireError(f"a header of {header.nbytes} bytes, expected at most {_MOST_HEADER_BYTES}")
        self._reader = Reader(_scalars(header[len(mark) :]))
        try:
            kind = self._reader.text()
            sender, sequence, segment, index = (self._reader.whole(_MOST_NUMBER) for _ in range(4))
            self.message = Message(kind, sender, segment, index, None, sequence, self._reader.seconds())
            """Without its body."""
            self.apart = self._reader.whole(_MOST_NUMBER)
            """As for `Sealed`."""
        except IndexError:
            raise WireError("a header that ends too early") from None

    def read(self, source: Frames | Region) -> Message:
        """The message, from the bytes of its tensors; once only.

        Raises:
            WireError: header and bytes do not fit.
        """
        try:
            return replace(self.message, body=self._reader.read(source))
        except IndexError:
            raise WireError("a header that ends too early") from None


def decode(frames: Sequence[Any], *runs: str) -> Message:
    """Turn a header and its frames into a message whose tensors own their memory.

    Args:
        frames: buffers, the header first.
        runs: as for `encode`; any of them.

    Raises:
        WireError: the frames are not a whole message of one of these runs.
    """
    opened = Opened(frames[0] if frames else b"", runs)
    if opened.apart:
        raise WireError(f"a header whose {opened.apart} bytes go apart from it")
    return opened.read(Frames(frames[1:]))


def _row(scalars: list[Any]) -> bytes:
    """Scalars one behind the other."""
    row: bytes = msgpack.packb(scalars)
    # The row's own head says how many there are, which the reader finds out by itself.
    return row[1 if len(scalars) < 16 else 3 if len(scalars) < 65536 else 5 :]


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
