"""What a worker of a stage needs in memory, for planner and runtime alike (design, sections 4 to 6).

Held at the fullest moment:

    parameter sets     sets x trainable parameters, frozen ones once
    gradients          one set, and of r > 1 replicas lag + 1 rounds of the shard: (lag + 1) (r - 1) / r
    optimizer state    0, 1 or 2 tensors a trainable parameter, of the shard only: / r
    compression        of r > 1 replicas: the shard's exact parameters, and what is left out of gradients for others
    activations        in_flight x stash; where the stage recomputes, in_flight x its input and one stash
    buffers            activations that have arrived and wait, gradients of in_flight minibatches
"""

from __future__ import annotations

from typing import Any

__all__ = ["OPTIMIZER_STATES", "arrivals_held", "held_bytes"]

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of a parameter's size that each optimizer keeps a parameter."""


def arrivals_held(previous_in_flight: int, previous_replicas: int, replicas: int) -> int:
    """Activations that may have arrived at a replica and wait: ceil(w_{s-1} r_{s-1} / r_s) + 1."""
    return -(-previous_in_flight * previous_replicas // replicas) + 1


def held_bytes(
    *,
    parameters: Any,
    trainable: Any,
    stash: Any,
    input_bytes: Any,
    output_bytes: Any,
    replicas: Any,
    in_flight: Any,
    lag: Any,
    sets: Any,
    states: int,
    recompute: bool,
    compressed: bool = False,
) -> Any:
    """All but the arrivals, in bytes a worker: the formula itself, on whole numbers or numpy arrays of them.

    Args:
        parameters: of the stage's layers, frozen ones included.
        trainable: those that are trained.
        stash: what autograd saves for one minibatch.
        input_bytes: what crosses the cut before the stage, for one minibatch.
        output_bytes: what crosses the cut after it.
        replicas: r of the stage.
        in_flight: w of the stage.
        lag: 1 where a round's synchronisation overlaps the next work item, else 0.
        sets: of trainable parameters that are held at once.
        states: tensors of optimizer state a parameter.
        recompute: whether the stage keeps its inputs only, and one stash while it recomputes.
        compressed: whether gradients and parameters are compressed on their way between replicas.
    """
    weights = parameters - trainable + sets * trainable
    gradients = trainable + (lag + 1) * (replicas - 1) * trainable // replicas
    state = states * trainable // replicas
    activations = in_flight * input_bytes + stash if recompute else in_flight * stash
    left_out = (replicas > 1) * trainable if compressed else 0
    return weights + gradients + left_out + state + activations + in_flight * output_bytes
