"""Times minibatches of a model, layer by layer, until the figures are known well enough (design, section 1).

A minibatch is two steps of `pd_profile.steps`: one with a clock between the layers, and a plain one. Reading the clock
and walking the chain cost a little themselves. `measure_overhead` finds out how much a layer, by the same two kinds of
step on a chain whose layers do nothing worth the name; that much is taken off each layer's time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from pd_format.layers.chain import Chain, build_chain
from pd_format.profile import InputSpec
from pd_profile.clocks import Clock
from pd_profile.samples import FEWEST, Samples, Summary
from pd_profile.steps import Loss, Overhead, Scope, StepTimes, drop_gradients, plain_step, timed_step, untouched

__all__ = ["measure", "measure_overhead"]


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
        drop_gradients(model)
        return times

    def plain() -> float:
        times = sum(plain_step(model, inputs, loss, clock, scope))
        drop_gradients(model)
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


def _warm_up(instrumented: Callable[[], StepTimes], plain: Callable[[], float]) -> None:
    """The first steps choose algorithms and fetch memory: leave out one of each, and up to five within a second."""
    spent = 0.0
    for _ in range(5):
        instrumented()
        spent += plain()
        if spent >= 500:
            break


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
