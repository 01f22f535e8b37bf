"""Tells time where a model computes: on the host, or on a GPU, which the host runs ahead of."""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "StampT", "clock_for"]

StampT = TypeVar("StampT")
"""A mark on a clock."""


class Clock(Protocol[StampT]):
    """Tells time on the device that computes."""

    def stamp(self) -> StampT:
        """Mark this point of the device's work."""

    def elapsed_ms(self, begin: StampT, end: StampT) -> float:
        """Milliseconds between two marks; only after `synchronize`."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""


class HostClock:
    """The monotonic clock, for a device that computes before the call returns."""

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ms(self, begin: int, end: int) -> float:
        return (end - begin) / 1e6

    def synchronize(self) -> None:
        pass


class CudaClock:
    """Events on the current stream: the host runs ahead of a GPU, so its own clock would tell little."""

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock[Any]:
    """The clock that suits the device."""
    return CudaClock() if device.type == "cuda" else HostClock()
