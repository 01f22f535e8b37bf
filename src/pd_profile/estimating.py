"""Estimates what each layer would take on a machine that is not there, without doing any of its arithmetic.

The model runs one step on tensors that have shapes and no data (torch's `meta` device), by the very code that times
real steps: only, where that reads a clock, this notes how many operations have run. So forward, backward and loss are
shared out as in a measured profile. What a machine would take for each operation is `pd_profile.roofline`'s answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from pd_format.errors import UserError
from pd_format.layers.chain import Chain
from pd_format.layers.task import Task
from pd_format.profile import InputSpec
from pd_profile.counting import Counter, Work
from pd_profile.fused import Fused
from pd_profile.machines import Machine
from pd_profile.roofline import CALIBRATED, Shares, work_ms
from pd_profile.samples import Summary
from pd_profile.sizes import stash_of
from pd_profile.steps import marked_step, untouched

__all__ = ["LayerWork", "count_work", "estimated_summary"]


@dataclass(frozen=True)
class LayerWork:
    """The operations of one layer in one step; the loss counts to the last layer."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def count_work(
    model: nn.Module, chain: Chain, inputs: Sequence[InputSpec], task: Task
) -> tuple[list[LayerWork], list[int]]:
    """The operations of each layer, and the bytes that autograd saves for it.

    Afterwards the model's parameters and buffers have no data any more; its chain still tells their sizes.

    Raises:
        UserError: the model looks at data in order to run.
    """
    model.to("meta")
    counter = Counter()
    with counter, untouched(model):
        try:
            with torch.device("meta"), Fused(counter):
                values = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in inputs]
                stash_bytes, output = stash_of(model, chain, values)
            loss = partial(task.loss, targets=task.random_targets(output, torch.Generator()))
            del output
            with torch.device("meta"), Fused(counter):
                marks = marked_step(chain, values, loss, lambda: len(counter.works))
        except (RuntimeError, UserError) as error:
            cause = error.__cause__ if isinstance(error, UserError) else error
            if cause is None:
                raise
            raise UserError(
                f"This model cannot be estimated: {cause}\n"
                "An estimate runs it on tensors without data, so nothing in it may look at their values; measuring may "
                "still work: leave --estimate out, on a machine that you have."
            ) from error
    forward = [counter.works[begin:end] for begin, end in marks.forward]
    forward[-1] += counter.works[slice(*marks.loss)]
    backward: list[list[Work]] = [[] for _ in chain.layers]
    for begin, end, layer in marks.backward:
        backward[layer] += counter.works[begin:end]
    return [LayerWork(tuple(f), tuple(b)) for f, b in zip(forward, backward, strict=True)], stash_bytes


def estimated_summary(layers: Sequence[LayerWork], machine: Machine, shares: Shares = CALIBRATED) -> Summary:
    """What the layers would take on a machine, to four digits; no minibatch was timed."""

    def total(works: Sequence[Work]) -> float:
        return float(f"{sum(work_ms(work, machine, shares) for work in works):.4g}")

    forward = tuple(total(layer.forward) for layer in layers)
    backward = tuple(total(layer.backward) for layer in layers)
    none = (0.0,) * len(layers)
    return Summary(0, forward, backward, none, none, plain_ms=sum(forward) + sum(backward))
