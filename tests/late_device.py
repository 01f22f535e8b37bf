"""A device that does everything as late as it may, in the memory of the host: what does not wait for it meets old bytes.

Its streams are rows of what is still to be done. A copy is done when someone waits for an event behind it, and not a
moment before; what two streams do beside each other is done in the order that is worst for who forgot to wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pd_train.staging import Staging


class Stream:
    def __init__(self, device: LateDevice) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.is_eager = False
        self._device = device

    def add(self, step: Callable[[], None]) -> None:
        with self._device.lock:
            if self.is_eager:
                step()
            else:
                self.waiting.append(step)

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)


class Event:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._is_reached = False

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.add(self._reach)

    def _reach(self) -> None:
        self._is_reached = True

    def query(self) -> bool:
        return self._is_reached

    def synchronize(self) -> None:
        with self._device.lock:
            while not self._is_reached:
                assert self._stream is not None
                self._stream.waiting.popleft()()


class LateDevice:
    """What `torch.cuda` is to a GPU.

    Args:
        eager: whether the compute stream does at once what it is asked for, as torch on the CPU does.
    """

    def __init__(self, eager: bool) -> None:
        self.lock = threading.RLock()
        self.compute = Stream(self)
        self.compute.is_eager = eager
        self.copies = 0
        self.threads: set[str] = set()
        self._current = threading.local()

    def Stream(self) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        found: Stream = getattr(self._current, "stream", self.compute)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = self.compute

    def set_device(self, device: torch.device) -> None:
        self.threads.add(threading.current_thread().name)


class LateStaging(Staging):
    """The way to such a device."""

    def __init__(self, eager: bool = True) -> None:
        self.late = LateDevice(eager)
        super().__init__(torch.device("cpu"), self.late)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self.late.copies += 1
        # Whoever looks too early meets no bytes of use.
        target.fill_(float("nan") if target.is_floating_point() else 1)
        if source.numel():
            self.late.current_stream(self.device).add(partial(_copy, target.detach(), *_place(source)))

    def _used_by(self, tensor: Tensor, stream: Any) -> None:
        stream.add(partial(id, tensor))  # Does nothing, and holds it until then.


def _place(source: Tensor) -> tuple[int, torch.dtype, int, tuple[Any, ...]]:
    """Where a tensor is: a device that copies from there does not keep it alive."""
    storage = source.untyped_storage()
    form = source.shape, source.stride(), source.storage_offset()
    return storage.data_ptr(), source.dtype, storage.nbytes() // source.itemsize, form


def _copy(target: Tensor, address: int, dtype: torch.dtype, elements: int, form: tuple[Any, ...]) -> None:
    memory = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    target.copy_(torch.frombuffer(memory, dtype=dtype).as_strided(*form))
