"""What is to be sent to one peer, in order, and in pieces where it is large. No sockets.

A message leaves as its header with all frames behind it, or, where these are many bytes, as the header alone and then
pieces, which are messages of their own that an empty frame in front marks. A piece has one long frame or some short
ones:

    [header, frame, frame]      or      [header]  [, frame]  [, frame]  [, frame, frame, frame] ...

libzmq hands on a message only when it is whole: in pieces it is copied while it still arrives, and heartbeats, other
peers and what is urgent find their turn in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pd_train.wire import PIECE_BYTES, Sealed

__all__ = ["URGENT", "Departures"]

URGENT = frozenset({"failed"})
"""Kinds that overtake all others, even between two pieces. Whoever gets one does nothing else any more."""


class Departures:
    """Messages to one peer. One thread takes from it."""

    def __init__(self) -> None:
        self.sequence = 0
        """How many have begun to leave."""
        self._urgent: deque[Sealed] = deque()
        self._waiting: deque[Sealed] = deque()
        self._pieces: deque[list[Any]] = deque()
        """Of the message that is leaving."""
        self._next: list[Any] | None = None

    def add(self, message: Sealed) -> None:
        """One more, behind the others."""
        (self._urgent if message.kind in URGENT else self._waiting).append(message)

    def __len__(self) -> int:
        return len(self._urgent) + len(self._waiting) + bool(self._pieces) + (self._next is not None)

    def next(self) -> list[Any] | None:
        """What is to leave next, the same until `sent`; None where nothing is."""
        if self._next is None:
            if self._urgent:
                self._next = self._begin(self._urgent.popleft())
            elif self._pieces:
                self._next = self._pieces.popleft()
            elif self._waiting:
                self._next = self._begin(self._waiting.popleft())
        return self._next

    def sent(self) -> None:
        """It has left."""
        self._next = None

    def _begin(self, message: Sealed) -> list[Any]:
        header = message.header(self.sequence)
        self.sequence += 1
        if not message.apart:
            return [header, *message.frames]
        self._pieces.extend(_grouped(message.frames))
        return [header]


def _grouped(frames: Sequence[bytes | memoryview]) -> Iterator[list[Any]]:
    """Pieces of about the longest frame's size."""
    piece: list[Any] = [b""]
    size = 0
    for frame in frames:
        if size and size + len(frame) > PIECE_BYTES:
            yield piece
            piece, size = [b""], 0
        piece.append(frame)
        size += len(frame)
    yield piece
