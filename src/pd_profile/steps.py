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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pd_format.layers.chain import Chain
from pd_format.layers.values import tensors_in
from pd_profile.clocks import Clock, StampT

__all__ = [
    "Loss",
    "Marks",
    "Overhead",
    "Scope",
    "StepTimes",
    "drop_gradients",
    "marked_step",
    "plain_step",
    "timed_step",
    "untouched",
]

#: From the model's output to a number.
Loss = Callable[[Any], Tensor]
#: What surrounds a forward pass and its loss: autocast, or nothing.
Scope = Callable[[], AbstractContextManager[Any]]


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
    drop_gradients(model)
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


def drop_gradients(model: nn.Module) -> None:
    """Leave no gradient in any parameter."""
    for parameter in model.parameters():
        parameter.grad = None
