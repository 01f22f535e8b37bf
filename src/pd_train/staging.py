"""Copies between a device and the host's memory: on streams of their own, while the device goes on computing.

    host      forward(b) asked for          waits . . . . . . . . . .|  sends it, asks for the next pass
    in        [b: host -> device]>                  [b+1: host -> device]>
    compute                      [    forward(b)    ]                     [    forward(b+1)    ]
    out            [b-1: device -> host]>            [b: device -> host]>
    sender                               b-1 leaves                      b leaves

Each `>` is an event. The compute stream waits for those of `in`, `out` for the compute stream's, and a thread of its
own (`pd_train.sender`) for those of `out`, before it lets a message go. So the host asks for a whole pass without
waiting, and waits once at its end, for the compute stream alone: the pass's time, which the host takes, is then true.
What has arrived is brought when the host looks at what has arrived, not when it is due: between passes, and before it
waits.

Everything here is called by one thread at a time: the compute thread, and within a backward pass autograd's thread of
the device, for which the compute thread waits. On the CPU there is nothing to copy, and none of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Event", "Staging", "open_staging"]


class Event(Protocol):
    """A point in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


class Staging:
    """The way to a device and back.

    Args:
        device: that computes; where there are several of its kind, the current one.
        streams: what makes streams and events, as `torch.cuda` does; by default what torch has for the device.
    """

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self.device = device
        self.pins = device.type == "cuda"
        """Whether memory of the host is to be page-locked, which a GPU copies from and to by itself."""
        self._streams = torch.get_device_module(device) if streams is None else streams
        self._in = self._streams.Stream()
        self._out = self._streams.Stream()
        self._awaited: deque[tuple[Event, Tensor]] = deque()
        """Memory of the host that is being copied from; the oldest copy first."""
        self._is_marked = True
        self.meanwhile: Callable[[], None] = lambda: None
        """What the host may do while the device computes: bring what has arrived."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the host as one of the device, for all that the compute stream is asked for from now on.

        The host's memory is kept until it has been copied: messages land in buffers that are used again once nobody
        refers to them, and torch, which waits by itself where it owns page-locked memory, does not know them.
        """
        self._let_go()
        if tensor.layout is not torch.strided:  # From a data set: nothing else crosses a cut.
            return tensor.to(self.device)
        with self._streams.stream(self._in):
            there = torch.empty_like(tensor, device=self.device)
            self._copy(there, tensor.detach())
            arrived = self._event(self._in)
        self._awaited.append((arrived, tensor))
        computing = self._streams.current_stream(self.device)
        computing.wait_event(arrived)
        self._used_by(there, computing)
        return there.requires_grad_(tensor.requires_grad)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A tensor of the device as one of the host, whose bytes are there after the next `mark`; it is dense.

        Nothing may write to the tensor before that but what is sure to come after. One of the host, and one that is
        not strided and so cannot be sent, stays what it is.
        """
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return tensor
        self._let_go()
        self._out.wait_event(self._event(self._streams.current_stream(self.device)))
        with self._streams.stream(self._out):
            here = self._empty_here(tensor)
            self._copy(here, tensor.detach())
        self._used_by(tensor, self._out)
        self._is_marked = False
        return here.requires_grad_(tensor.requires_grad)

    def mark(self) -> Event | None:
        """After this event all is there that `to_host` was asked for; None if nothing was since the last one."""
        if self._is_marked:
            return None
        self._is_marked = True
        # A thread that waits for it is to sleep: beside it others compute.
        event: Event = self._event(self._out, **({"blocking": True} if self.pins else {}))
        return event

    def finish(self, *values: Tensor) -> list[Tensor]:
        """Wait, once, until the device has done all it was asked to compute; its small values, on the host."""
        here = [self._empty_here(value) for value in values]
        for each, value in zip(here, values, strict=True):
            self._copy(each, value.detach())  # On the compute stream: not behind large tensors that leave.
        done = self._event(self._streams.current_stream(self.device))
        self.meanwhile()
        done.synchronize()
        return here

    def enter_thread(self) -> None:
        """To be called first in a thread that waits for events: each begins with the first device of the kind."""
        self._streams.set_device(self.device)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        """On the current stream."""
        target.copy_(source, non_blocking=True)

    def _used_by(self, tensor: Tensor, stream: Any) -> None:
        """Its memory, which belongs to another stream, is not to be given away before this one has got so far."""
        if self.pins:
            tensor.record_stream(stream)

    def _event(self, stream: Any, **kind: bool) -> Any:
        event = self._streams.Event(**kind)
        event.record(stream)
        return event

    def _empty_here(self, tensor: Tensor) -> Tensor:
        # torch keeps page-locked memory that is free, and knows which of its own is still being copied to.
        return torch.empty_like(tensor, device="cpu", pin_memory=self.pins)

    def _let_go(self) -> None:
        while self._awaited and self._awaited[0][0].query():
            self._awaited.popleft()


def open_staging(device: torch.device) -> Staging | None:
    """The way to a device; None where that is the host itself."""
    return None if device.type == "cpu" else Staging(device)
