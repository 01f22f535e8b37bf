from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from pd_train.optimizers import MovingOptimizer
from pd_train.options import OptimizerOptions


@pytest.mark.parametrize(
    "options",
    [
        OptimizerOptions(name, lr=0.1, momentum=momentum, weight_decay=decay)
        for name, momentum in (("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0), ("adamw", 0.0))
        for decay in (0.0, 0.01)
    ],
    ids=lambda options: f"{options.name}-{options.momentum}-{options.weight_decay}",
)
def test_a_moving_set_has_the_bits_of_torchs_own_optimizer(options: OptimizerOptions) -> None:
    """Also where a gradient is missing, at first or later, and where the update works in place in between."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    more = {"momentum": options.momentum} if options.name == "sgd" else {}
    plain = [torch.randn(1000), torch.randn(7, 3), torch.randn(64)]
    optimizer = kinds[options.name](plain, lr=options.lr, weight_decay=options.weight_decay, **more)
    sets = [copy.deepcopy(plain), copy.deepcopy(plain)]
    moving = MovingOptimizer(options, sets[0])
    newest = 0
    for step in range(6):
        gradients: list[Tensor | None] = [torch.randn(tensor.shape) for tensor in plain]
        gradients[1] = None if step in (0, 3) else gradients[1]
        for tensor, gradient in zip(plain, gradients, strict=True):
            tensor.grad = None if gradient is None else gradient.clone()
        rate = optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()
        target = newest if step == 4 else 1 - newest
        before = copy.deepcopy(sets[newest])
        versions = [tensor._version for tensor in sets[target]]
        moving.step(sets[target], gradients, rate, None if target == newest else sets[newest])
        assert all(map(torch.equal, sets[target], plain))
        if target != newest:
            assert all(map(torch.equal, sets[newest], before))  # Passes in flight may need them.
            assert all(tensor._version > old for tensor, old in zip(sets[target], versions, strict=True))
        newest = target
