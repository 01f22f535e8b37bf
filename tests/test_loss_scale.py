"""The shards of all stages apply an update together or leave it out together, whatever order messages arrive in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pd_format.versions import Mode, stage_versions
from pd_train.clipping import Clipping
from pd_train.loss_scale import LossScale
from pd_train.options import LossScaling, OptimizerOptions
from pd_train.server import SegmentSize
from pd_train.sharded import ShardedServer
from pd_train.weights import ParameterSets

MOMENTUM = OptimizerOptions("sgd", lr=1.0, momentum=0.5)


class Stage:
    """A worker's shard, of one parameter of two elements unless frozen; gradients are given as they are unscaled."""

    def __init__(self, rank: int, workers: int, messages: list, scaling: LossScaling, clip: float | None) -> None:
        self.parameters = [nn.Parameter(torch.zeros(2))] if rank != 2 else []
        sets = ParameterSets(self.parameters, 1)
        sets.is_wanted = lambda version: False
        self.scale = LossScale(
            scaling, range(workers), lambda segment, finite: messages.append((rank, segment, finite))
        )
        self.clipping = Clipping(clip, range(workers), lambda *norm: messages.append((rank, *norm))) if clip else None
        versions = stage_versions(Mode(flush=1), [1], [1], 0)
        names = ["p"] * len(self.parameters)
        self.server = ShardedServer(
            sets, versions, lambda ready: None, names, 0, MOMENTUM, lambda *_: None, self.clipping, self.scale
        )

    def backward(self, gradient: float) -> None:
        self.server.start_backward(0)
        self.server.finish_backward([torch.full((2,), gradient * self.scale.value) for _ in self.parameters])
        self.server.advance()

    @property
    def value(self) -> float:
        return self.parameters[0][0].item()


class Pipeline:
    """Three stages of one worker; the last one has no parameters. A segment is one minibatch."""

    def __init__(self, scaling: LossScaling, clip: float | None = None) -> None:
        self.messages: list = []
        self.stages = [Stage(rank, 3, self.messages, scaling, clip) for rank in range(3)]
        self.segments = 0

    def step(self, gradients: Sequence[float]) -> None:
        for stage in self.stages:
            stage.server.start_segment(self.segments, SegmentSize(1, 4, 4), 1.0)
        for stage, gradient in zip(self.stages, gradients, strict=False):
            stage.backward(gradient)
        self.stages[2].server.advance()
        assert not any(stage.server.is_drained() for stage in self.stages)
        while self.messages:
            rank, segment, *said = self.messages.pop()
            for stage in self.stages:
                if len(said) == 1:
                    stage.scale.take(segment, rank, *said)
                else:
                    stage.clipping.take(segment, said[0], rank, said[1])
                stage.server.advance()
        assert all(stage.server.is_drained() for stage in self.stages)
        for stage in self.stages:
            stage.scale.settle(self.segments)
        self.segments += 1

    def values(self) -> list[float]:
        return [stage.value for stage in self.stages[:2]]

    def scales(self) -> list[float]:
        return [stage.scale.value for stage in self.stages]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_at_one_stage_leaves_out_the_update_of_all(bad: float) -> None:
    pipeline = Pipeline(LossScaling(initial=8.0))
    pipeline.step([1.0, 2.0])
    assert pipeline.values() == [-1.0, -2.0]
    pipeline.step([1.0, bad])
    assert pipeline.values() == [-1.0, -2.0]
    assert pipeline.scales() == [4.0] * 3
    assert [stage.scale.overflowed for stage in pipeline.stages] == [(1,)] * 3
    # The momentum is that of the first step too: the update that was left out has not touched it.
    pipeline.step([1.0, 2.0])
    assert pipeline.values() == [-2.5, -5.0]
    assert [stage.scale.overflowed for stage in pipeline.stages] == [()] * 3


def test_the_scale_follows_that_of_torch() -> None:
    pipeline = Pipeline(LossScaling(initial=64.0, growth_interval=3))
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for bad in [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]:
        gradient = math.inf if bad else 0.25
        pipeline.step([gradient, 0.25])
        (scaler.scale(parameter.sum()) * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert pipeline.scales() == [scaler.get_scale()] * 3


def test_gradients_that_are_never_finite_end() -> None:
    """A run in which every update is left out says so, and does not go on for ever."""
    pipeline = Pipeline(LossScaling(initial=4.0, least=1.0))
    for _ in range(3):
        assert not pipeline.stages[0].scale.is_exhausted
        pipeline.step([math.inf, 1.0])
    assert all(stage.scale.is_exhausted for stage in pipeline.stages)


def test_a_norm_is_that_of_the_gradient_without_its_scale() -> None:
    pipeline = Pipeline(LossScaling(initial=1024.0), clip=1.0)
    pipeline.step([3.0, 4.0])
    # Two elements of 3 and two of 4: the norm is 5 times the root of 2.
    assert pipeline.values() == pytest.approx([-3 / 50**0.5, -4 / 50**0.5], rel=1e-6)
    before = pipeline.values()
    pipeline.step([math.inf, 4.0])
    assert pipeline.values() == before


def test_a_sparse_gradient_is_looked_at_too() -> None:
    said: list[bool] = []
    scale = LossScale(LossScaling(initial=2.0), [0], lambda segment, finite: said.append(finite))
    for value in (1.0, math.inf):
        gradient = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([value]), (4,), check_invariants=True)
        scale.unscale([gradient])
        scale.announce(0, [gradient, None])
    assert said == [True, False]
