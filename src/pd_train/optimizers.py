"""The optimizers that pd-train offers, on any list of tensors, and the learning rate of an epoch and of a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pd_train.options import OptimizerOptions

__all__ = ["MovingOptimizer", "learning_rate", "stage_scale"]


def learning_rate(options: OptimizerOptions, epoch: int, epochs: int) -> float:
    """The rate of an epoch before any scaling by stage: a function of the epoch alone, constant within it.

    `step` divides by ten after a third and after two thirds of the epochs; `cosine` falls from the full rate along
    half a cosine and would reach zero after the last epoch.
    """
    if options.lr_schedule == "step":
        return options.lr * 0.1 ** (3 * epoch // epochs)
    if options.lr_schedule == "cosine":
        return options.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
    return options.lr


def stage_scale(lr_scaling: str, replicas: int, first_replicas: int) -> float:
    """What a stage's rate is multiplied with (design, section 4).

    `balanced`: r_s / r_0, so that all stages advance equally a sample; `linear`: r_s (Goyal et al. 2017);
    `none`: 1.
    """
    if lr_scaling == "balanced":
        return replicas / first_replicas
    if lr_scaling == "linear":
        return float(replicas)
    return 1.0


class MovingOptimizer:
    """A torch optimizer whose parameters move to another set at each update.

    There is no master copy: the newest set is what the optimizer works on, its state follows from set to set.

    Args:
        options: which optimizer, and its constants.
        tensors: the first set's pieces; elementwise optimizers do not care how parameters are cut.
    """

    def __init__(self, options: OptimizerOptions, tensors: Sequence[Tensor]) -> None:
        self._optimizer = _build(options, tensors)
        self._writes_through = options.name == "sgd"

    def held(self) -> Iterator[Tensor]:
        """The optimizer's state."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def step(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        rate: float,
        previous: Sequence[Tensor] | None = None,
    ) -> None:
        """Make the next version; gradients are written over.

        A tensor without a gradient keeps its values, and its state is left alone.

        Args:
            tensors: to be written.
            gradients: of the newest version.
            rate: the learning rate.
            previous: where the newest version's values are; None where the tensors themselves hold them.
        """
        group = self._optimizer.param_groups[0]
        state = self._optimizer.state
        for old, new in zip(group["params"], tensors, strict=True):
            if old is not new and old in state:
                state[new] = state.pop(old)
        group["params"] = list(tensors)
        group["lr"] = rate
        if previous is not None:
            if self._writes_through and all(
                each is None or (each.device.type == "cpu" and each.layout is torch.strided) for each in gradients
            ):
                for each in zip(tensors, gradients, previous, strict=True):
                    self._sgd(*each)
                return
            for tensor, values in zip(tensors, previous, strict=True):
                tensor.copy_(values)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        self._optimizer.step()
        for tensor in tensors:
            tensor.grad = None

    def _sgd(self, tensor: Tensor, gradient: Tensor | None, previous: Tensor) -> None:
        """What torch's SGD computes, to the bit, its last operation written to another tensor: a pass less."""
        if gradient is None:
            tensor.copy_(previous)
            return
        group = self._optimizer.param_groups[0]
        if group["weight_decay"]:
            gradient = gradient.add_(previous, alpha=group["weight_decay"])
        if group["momentum"]:
            state = self._optimizer.state[tensor]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = gradient.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            gradient = state["momentum_buffer"]
        torch.add(previous, gradient, alpha=-group["lr"], out=tensor)

    def states(self) -> list[dict[str, Tensor]]:
        """What is kept of each tensor, on the CPU: rows of as many elements, and single numbers."""
        kept = [self._optimizer.state.get(tensor, {}) for tensor in self._optimizer.param_groups[0]["params"]]
        return [
            {key: value.detach().cpu().reshape(-1) if value.dim() else value.cpu() for key, value in one.items()}
            for one in ({key: value for key, value in each.items() if value is not None} for each in kept)
        ]

    def load(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Take over what `states` gave, of tensors of the same sizes."""
        for tensor, state in zip(self._optimizer.param_groups[0]["params"], states, strict=True):
            if state:
                self._optimizer.state[tensor] = {
                    # Single numbers stay on the CPU, where torch keeps its count of steps.
                    key: value.to(tensor.device, copy=True).view_as(tensor) if value.dim() else value.clone()
                    for key, value in state.items()
                }


def _build(options: OptimizerOptions, tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    parameters = list(tensors)
    if options.name == "sgd":
        return torch.optim.SGD(parameters, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=options.lr, weight_decay=options.weight_decay)
