"""Where the bytes of large messages land: buffers that exist already, filled piece by piece.

    header, 3 MB announced    piece of 1 MiB   piece   piece   ->   one buffer, in which the message's tensors lie
                              |________buffer of 3 MB________|

A buffer is used again once no tensor in it is alive: in a steady run no memory is taken any more, and none is given
back. One that is new grows with what has really arrived, so whatever a stranger announces, memory is taken in
proportion to what it sends.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy
import torch

from pd_train.packing import ALIGNMENT, WireError, aligned

__all__ = ["Arrival", "Buffers"]

_FIRST_BYTES = 16 << 20
"""Of a buffer whose message is longer and whose size has never arrived."""

Memory = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


class Buffers:
    """Memory for messages. One thread takes it; it comes back by itself, whichever thread lets the last tensor go.

    Args:
        pinned: whether it is page-locked, which a GPU copies from by itself.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: list[Memory] = []
        """The longest unused first."""
        self._returned: deque[Memory] = deque()
        self._bytes = self._most_bytes = 0
        """In use, and at the fullest."""

    def new(self, size: int) -> Memory:
        """Memory of this size that has not been used before."""
        # Aligned as torch wants it: kernels would be slower, and may compute other bits, on other memory.
        memory: Memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        assert memory.ctypes.data % ALIGNMENT == 0
        return memory

    def take(self, size: int) -> Memory | None:
        """One of at least this size, though not much longer; None where there is none."""
        self._collect()
        fitting = [memory for memory in self._free if size <= memory.nbytes <= size + size // 4]
        if not fitting:
            return None
        best = min(fitting, key=lambda memory: memory.nbytes)
        self._free = [memory for memory in self._free if memory is not best]
        return best

    def lend(self, memory: Memory, size: int) -> memoryview:
        """The first bytes of a buffer, to be seen by tensors; it comes back when nothing refers to them any more."""
        self._bytes += memory.nbytes
        self._most_bytes = max(self._most_bytes, self._bytes)
        lent = memory[:size]
        # Nobody is to be called at the interpreter's end.
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return lent.data

    def give_back(self, memory: Memory) -> None:
        """One that was taken and not lent."""
        self._free.append(memory)

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._bytes -= memory.nbytes
            self._free.append(memory)
        # Where no two messages are of one size, buffers nobody asks for must not pile up.
        held = self._bytes + sum(memory.nbytes for memory in self._free)
        while self._free and held > 2 * self._most_bytes:
            held -= self._free.pop(0).nbytes


class Arrival:
    """One message's bytes on their way.

    Args:
        buffers: where they are to land.
        size: of all of them, each tensor's rounded up to `ALIGNMENT`.
        header_bytes: of its header.
    """

    def __init__(self, buffers: Buffers, size: int, header_bytes: int) -> None:
        self.received = header_bytes
        """Bytes so far, the header's included."""
        self._buffers = buffers
        self._size = size
        known = buffers.take(size)
        self._memory = buffers.new(min(size, _FIRST_BYTES)) if known is None else known
        self._filled = 0

    @property
    def is_whole(self) -> bool:
        """Whether all has arrived."""
        return self._filled == self._size

    def room(self, most: int) -> memoryview:
        """Where the next piece, of at most so many bytes, is to be written."""
        needed = min(self._filled + most, self._size)
        if needed > self._memory.nbytes:
            longer = self._buffers.new(min(self._size, max(needed, 2 * self._memory.nbytes)))
            longer[: self._filled] = self._memory[: self._filled]
            self._memory = longer
        return self._memory[self._filled : needed].data

    def add(self, size: int, room: int) -> None:
        """A piece has been written.

        Raises:
            WireError: it was empty or did not fit.
        """
        if not 0 < size <= room:
            raise WireError(f"a piece of {size} bytes where 1 to {room} are expected")
        self.received += size
        self._filled = aligned(self._filled + size)

    def end(self) -> memoryview:
        """All bytes, once they are there."""
        return self._buffers.lend(self._memory, self._size)

    def drop(self) -> None:
        """It is of no use."""
        self._buffers.give_back(self._memory)
