"""What a worker holds at its fullest, counted by the program itself, to be compared with the plan's figure.

Counted are distinct storages: parameter sets, gradients, optimizer state, what autograd saves, and what has arrived and
waits. Not counted is what an operation needs while it runs, nor the interpreter and its libraries. A look at all of
that takes time, so it is done where a person asks for it (`--measure-memory`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["MemoryMeter"]


class _Saved:
    """Stands for a tensor that autograd saved; gone once the backward pass has used it."""

    def __init__(self, meter: MemoryMeter, tensor: Tensor) -> None:
        self.meter = meter
        self.tensor = tensor
        meter.count(tensor)

    def __del__(self) -> None:
        # May run on any thread and at any moment, also while the meter itself counts.
        self.meter.freed.append(self.tensor.untyped_storage().data_ptr())


class MemoryMeter:
    """Adds up what is held at each look, and keeps the most.

    Args:
        elsewhere: gives the tensors that are held outside of autograd; one storage may be given several times.
    """

    def __init__(self, elsewhere: Callable[[], Iterable[Tensor]]) -> None:
        self._elsewhere = elsewhere
        self._saved: dict[int, tuple[int, int]] = {}
        self.freed: deque[int] = deque()
        """Addresses of storages of which autograd has let go of one tensor."""
        self.peak_bytes = 0

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context: what autograd saves in it is counted until autograd lets go of it."""
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(self, tensor.detach()), _unpack)

    def count(self, tensor: Tensor) -> None:
        """Autograd has saved a tensor."""
        self._forget_freed()  # First: a new storage may stand where an old one was.
        storage = tensor.untyped_storage()
        times, size = self._saved.get(storage.data_ptr(), (0, storage.nbytes()))
        self._saved[storage.data_ptr()] = (times + 1, size)

    def _forget_freed(self) -> None:
        while self.freed:
            address = self.freed.popleft()
            times, size = self._saved.pop(address)
            if times > 1:
                self._saved[address] = (times - 1, size)

    def look(self) -> None:
        """Count what is held now."""
        self._forget_freed()
        sizes = {address: size for address, (_, size) in self._saved.items()}
        for tensor in self._elsewhere():
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(sizes.values()))


def _unpack(saved: Any) -> Tensor:
    tensor: Tensor = saved.tensor
    return tensor
