"""What a worker of a stage needs in memory, for planner and runtime alike (design, sections 4 to 6)."""

from __future__ import annotations

from collections.abc import Sequence

from pd_format.profile import LayerProfile
from pd_format.versions import StageVersions, sets_needed

__all__ = ["OPTIMIZER_STATES", "arrivals_held", "stage_memory_bytes"]

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of a parameter's size that each optimizer keeps a parameter."""


def arrivals_held(previous_in_flight: int, previous_replicas: int, replicas: int) -> int:
    """Activations that may have arrived at a replica and wait: ceil(w_{s-1} r_{s-1} / r_s) + 1."""
    return -(-previous_in_flight * previous_replicas // replicas) + 1


def stage_memory_bytes(
    layers: Sequence[LayerProfile],
    input_bytes: int,
    output_bytes: int,
    versions: StageVersions,
    previous: tuple[int, int] | None,
    optimizer: str = "momentum",
) -> int:
    """Bytes that one worker of a stage holds at its fullest.

    Args:
        layers: of the stage.
        input_bytes: what crosses the cut before it, for one minibatch (the model's inputs at stage 0).
        output_bytes: what crosses the cut after it; 0 at the last stage.
        versions: of the stage, which know its replicas, its depth and how many parameter sets it holds.
        previous: replicas and in_flight of the stage before, None at stage 0.
        optimizer: a key of `OPTIMIZER_STATES`.
    """
    parameters = sum(layer.parameter_bytes for layer in layers)
    trainable = sum(layer.trainable_bytes for layer in layers)
    stash = sum(layer.stash_bytes for layer in layers)
    replicas, in_flight = versions.replicas, versions.in_flight
    sets = parameters - trainable + sets_needed(versions) * trainable
    gradients = trainable + (versions.lag + 1) * (replicas - 1) * trainable // replicas
    state = OPTIMIZER_STATES[optimizer] * trainable // replicas
    arrivals = 0
    if previous is not None:
        arrivals = arrivals_held(previous[1], previous[0], replicas) * input_bytes
    return sets + gradients + state + in_flight * stash + arrivals + in_flight * output_bytes
