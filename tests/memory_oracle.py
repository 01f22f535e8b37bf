"""What a worker of a stage holds, asked of one stage: the planner's figures for whole plans are compared with this."""

from __future__ import annotations

from collections.abc import Sequence

from pd_format.memory import OPTIMIZER_STATES, arrivals_held, held_bytes
from pd_format.profile import LayerProfile
from pd_format.versions import StageVersions, sets_needed

__all__ = ["stage_memory_bytes"]


def stage_memory_bytes(
    layers: Sequence[LayerProfile],
    input_bytes: int,
    output_bytes: int,
    versions: StageVersions,
    previous: tuple[int, int] | None,
    optimizer: str = "momentum",
    recompute: bool = False,
) -> int:
    """Bytes that one worker of a stage holds at its fullest.

    Args:
        layers: of the stage.
        input_bytes: what crosses the cut before it, for one minibatch (the model's inputs at stage 0).
        output_bytes: what crosses the cut after it; 0 at the last stage.
        versions: of the stage, which know its replicas, its depth and how many parameter sets it holds.
        previous: replicas and in_flight of the stage before, None at stage 0.
        optimizer: a key of `OPTIMIZER_STATES`.
        recompute: whether the stage runs its forward pass again rather than keep what it saved.
    """
    held: int = held_bytes(
        parameters=sum(layer.parameter_bytes for layer in layers),
        trainable=sum(layer.trainable_bytes for layer in layers),
        stash=sum(layer.stash_bytes for layer in layers),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        replicas=versions.replicas,
        in_flight=versions.in_flight,
        lag=versions.lag,
        sets=sets_needed(versions),
        states=OPTIMIZER_STATES[optimizer],
        recompute=recompute,
    )
    if previous is not None:
        held += arrivals_held(previous[1], previous[0], versions.replicas) * input_bytes
    return held
