"""Times each layer of a model, forward and backward apart (the paper, section 3.2; design, section 1).

One training step, without an optimizer, runs like this:

    forward    [1] the chain runs layer by layer; the clock is read before and after each, and the layer's
                   results are watched outside of that time
    loss       [2] belongs to the last layer
    backward   [3] autograd calls the watcher of a layer right before the first operation of that layer's backward
                   pass; the time until the next call belongs to the layer that started last

        forward   |- 0 -|w|- 1 -|w|- 2 -|w| loss |          w: watching, in nobody's time
        backward  | loss, 2 |-- 2 --|-- 1 --|-- 0 --|        each bar: a watcher's call, or the end
                  begin     2       1       0       end

Beside each such step runs a plain one: `model(*inputs)`, the loss, `backward()` and nothing else. They alternate in
order, so that a machine that slows down slows both. The sum over the layers should be the plain step's time.

Reading the clock and walking the chain cost a little themselves. `measure_overhead` finds out how much a layer, by the
same two kinds of step on a chain whose layers do nothing worth the name; that much is taken off each layer's time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.values import tensors_in
from pd_format.profile import InputSpec
from pd_profile.samples import FEWEST, Samples, Summary

__all__ = [
    "Clock",
    "CudaClock",
    "HostClock",
    "Loss",
    "Marks",
    "Overhead",
    "Scope",
    "StepTimes",
    "clock_for",
    "marked_step",
    "measure",
    "measure_overhead",
    "plain_step",
    "timed_step",
    "untouched",
]

StampT = TypeVar("StampT")
#: From the model's output to a number.
Loss = Callable[[Any], Tensor]
#: What surrounds a forward pass and its loss: autocast, or nothing.
Scope = Callable[[], AbstractContextManager[Any]]


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


@dataclass(frozen=True)
class Overhead:
    """What the instrumentation itself adds to a layer, in milliseconds, forward and for each start backward."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True)
class Marks(Generic[StampT]):
    """Where the parts of one step begin and end.

    Attributes:
        forward: of each layer, in chain order.
        loss: it belongs to the last layer.
        backward: of the parts of the backward pass, in the order in which they ran, with the layer of each; a layer
            may have several.
    """

    forward: list[tuple[StampT, StampT]]
    loss: tuple[StampT, StampT]
    backward: list[tuple[StampT, StampT, int]]


@dataclass(frozen=True)
class StepTimes:
    """One instrumented step, in milliseconds, an entry a layer in chain order."""

    forward_ms: list[float]
    backward_ms: list[float]


def marked_step(
    chain: Chain, inputs: Sequence[Tensor], loss: Loss, stamp: Callable[[], StampT], scope: Scope = nullcontext
) -> Marks[StampT]:
    """Run forward, loss and backward once, layer by layer, and mark where each layer's part begins and ends.

    Gradients are left in the parameters.

    Args:
        stamp: marks the point that the work has come to.
    """
    last = len(chain.layers) - 1
    forward: list[tuple[StampT, StampT]] = []
    starts: list[tuple[StampT, int]] = []

    def watcher(layer: int) -> Callable[[Sequence[Tensor]], None]:
        def started(_: Sequence[Tensor]) -> None:
            starts.append((stamp(), layer))

        return started

    walk = chain.walk(inputs)
    # A layer that hands on what it was given, as Identity does, must not take over another layer's backward pass.
    watched: set[Node] = set()
    with scope():
        while True:
            begin = stamp()
            try:
                layer, values = next(walk)
            except StopIteration as stop:
                output = stop.value
                break
            forward.append((begin, stamp()))
            for tensor in tensors_in(values):
                node = tensor.grad_fn
                if node is not None and node not in watched:
                    watched.add(node)
                    node.register_prehook(watcher(layer))
            # The step must hold on to no more than a plain one does.
            del values
        total = loss(output)
    turn = stamp()
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    end = stamp()
    bars = [(turn, last), *starts] if total.requires_grad else []
    ends = [*(each for each, _ in starts), end][: len(bars)]
    backward = [(bar, until, layer) for (bar, layer), until in zip(bars, ends, strict=True)]
    return Marks(forward, (begin, turn), backward)


def timed_step(
    chain: Chain,
    inputs: Sequence[Tensor],
    loss: Loss,
    clock: Clock[StampT],
    overhead: Overhead | None = None,
    scope: Scope = nullcontext,
) -> StepTimes:
    """Run forward, loss and backward once, layer by layer, and say what each layer took.

    Gradients are left in the parameters. A layer that no gradient reaches gets 0 backward.
    """
    overhead = overhead or Overhead()
    clock.synchronize()
    marks = marked_step(chain, inputs, loss, clock.stamp, scope)
    clock.synchronize()
    forward_ms = [max(0.0, clock.elapsed_ms(*pair) - overhead.forward_ms) for pair in marks.forward]
    forward_ms[-1] += clock.elapsed_ms(*marks.loss)
    backward_ms = [0.0] * len(chain.layers)
    for begin, end, layer in marks.backward:
        backward_ms[layer] += clock.elapsed_ms(begin, end)
    # The first part begins at the end of the loss, not at a watcher's call.
    for _, _, layer in marks.backward[1:]:
        backward_ms[layer] = max(0.0, backward_ms[layer] - overhead.backward_ms)
    return StepTimes(forward_ms, backward_ms)


def plain_step(
    model: nn.Module, inputs: Sequence[Tensor], loss: Loss, clock: Clock[StampT], scope: Scope = nullcontext
) -> tuple[float, float]:
    """Run forward and loss, then backward, as any training loop does; the milliseconds of each of the two."""
    clock.synchronize()
    begin = clock.stamp()
    with scope():
        total = loss(model(*inputs))
    turn = clock.stamp()
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    end = clock.stamp()
    clock.synchronize()
    return clock.elapsed_ms(begin, turn), clock.elapsed_ms(turn, end)


def measure(
    model: nn.Module,
    chain: Chain,
    inputs: Sequence[Tensor],
    loss: Loss,
    *,
    clock: Clock[Any],
    minibatches: int | None,
    overhead: Overhead | None = None,
    scope: Scope = nullcontext,
    report: Callable[[int, int], None] = lambda done, expected: None,
) -> Summary:
    """Warm up, then time minibatches: an instrumented and a plain step each.

    The model is left as it was: its buffers, its gradients and torch's random state.

    Args:
        minibatches: how many; None for as many as it takes (see `Samples.needed`).
        overhead: what to take off each layer.
        scope: see `Scope`.
        report: told how many are done and how many it will take, as far as known.
    """
    samples = Samples(len(chain.layers))

    def instrumented() -> StepTimes:
        times = timed_step(chain, inputs, loss, clock, overhead, scope)
        _drop_gradients(model)
        return times

    def plain() -> float:
        times = sum(plain_step(model, inputs, loss, clock, scope))
        _drop_gradients(model)
        return times

    with untouched(model), _collector_off():
        _warm_up(instrumented, plain)
        expected = minibatches or FEWEST
        report(0, expected)
        while len(samples) < expected:
            # Whoever comes first finds the caches as the other left them; so they take turns.
            if len(samples) % 2:
                times, whole = instrumented(), plain()
            else:
                whole, times = plain(), instrumented()
            samples.add(times.forward_ms, times.backward_ms, whole)
            done = len(samples)
            if minibatches is None and done >= FEWEST and (done <= 100 or done % 10 == 0):
                expected = max(done, samples.needed())
            report(done, expected)
            gc.collect(0)
    return samples.summary()


def measure_overhead(clock: Clock[Any], layers: int) -> Overhead:
    """What the instrumentation adds to a layer on this machine, by a chain of so many layers of one number each.

    A chain as long as the model's, as far as that matters, since a part of the cost comes once a step and spreads
    over the layers.
    """
    model = nn.Sequential(nn.Linear(1, 1), *(nn.Hardtanh() for _ in range(min(layers, 64) - 1)))
    chain = build_chain(model, [InputSpec(name="input", shape=(1, 1), dtype="float32")])
    inputs = [torch.ones(1, 1)]
    forward, backward = [], []
    with _collector_off():
        for _ in range(60):
            plain = plain_step(model, inputs, torch.sum, clock)
            times = timed_step(chain, inputs, torch.sum, clock)
            forward.append((sum(times.forward_ms) - plain[0]) / len(chain.layers))
            backward.append((sum(times.backward_ms) - plain[1]) / len(chain.layers))
    return Overhead(max(0.0, median(forward)), max(0.0, median(backward)))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Leave the model and torch's random state as they were: a pass in training mode changes BatchNorm's buffers."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    gpus = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    _drop_gradients(model)
    try:
        with torch.random.fork_rng(devices=sorted(gpus)):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(module, name, buffer)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _warm_up(instrumented: Callable[[], StepTimes], plain: Callable[[], float]) -> None:
    """The first steps choose algorithms and fetch memory: leave out one of each, and up to five within a second."""
    spent = 0.0
    for _ in range(5):
        instrumented()
        spent += plain()
        if spent >= 500:
            break


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's garbage collector out of the steps."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
