"""Puts an emulated stage together, as `pd_train.assembly` does a real one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pd_format.compression import parse_gradients
from pd_format.versions import sets_needed
from pd_train.compute import StageRunner
from pd_train.emulated import EmulatedEngine, EmulatedSource, EmulatedTraffic, NoArithmetic, parameters_of
from pd_train.emulation import Emulation, layers_of
from pd_train.links import Links
from pd_train.options import RunOptions
from pd_train.recorder import Recorder
from pd_train.sharded import ShardedServer
from pd_train.weights import ParameterSets

__all__ = ["EmulatedStage", "assemble_emulated"]


class EmulatedStage(NamedTuple):
    """What one worker runs."""

    runner: StageRunner
    engine: EmulatedEngine


def assemble_emulated(options: RunOptions, emulation: Emulation, links: Links, recorder: Recorder) -> EmulatedStage:
    """Put a stage together whose passes wait; the mode's versions and messages are the real ones."""
    plan, place = options.plan, links.place
    layers = layers_of(plan, emulation.profile, place.stage.index)
    versions = options.versions(place.stage.index)
    sets = ParameterSets(parameters_of(layers), sets_needed(versions), versions.lag, copy=torch.empty_like)
    engine = EmulatedEngine(
        layers,
        emulation.time_scale,
        samples=plan.minibatch_size,
        is_last=place.after is None,
        recompute=place.stage.recompute,
        crossing=plan.compress_activations,
    )
    server = ShardedServer(
        sets,
        versions,
        engine.watch_gradients,
        [layer.name for layer in layers if layer.trainable_bytes],
        place.replica,
        options.optimizer,
        links.to_replica,
        arithmetic=NoArithmetic(),
        compression=None if plan.compress_gradients is None else parse_gradients(plan.compress_gradients),
        traffic=EmulatedTraffic,
    )
    runner = StageRunner(
        links=links,
        versions=versions,
        engine=engine,
        sets=sets,
        server=server,
        buffers=[],
        source=EmulatedSource(plan.minibatch_size) if place.before is None else None,
        rate_scale=1.0,
        seed=options.seed,
        recorder=recorder,
    )
    return EmulatedStage(runner, engine)
