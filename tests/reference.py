"""What pd-train must compute, in one process and plain PyTorch, by section 4's table and nothing else.

Minibatches are taken in order. Each runs through the whole, uncut model with, for every stage, the parameters of the
version that the table names; after it every stage whose round is now complete makes its next version. A version
that minibatch b uses was made by earlier minibatches only, so this order computes what the pipeline computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from pd_train.optimizers import learning_rate
from pd_train.options import OptimizerOptions
from pd_train.seeding import epoch_order, minibatch_seed


@dataclass
class ReferenceStage:
    """A stage: the modules it holds, its replicas, and its depth."""

    modules: Sequence[str]
    replicas: int
    in_flight: int
    lag: int
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[tuple[int, dict[str, Tensor | None]]] = field(default_factory=list)


def train(
    model: nn.Module,
    stages: Sequence[ReferenceStage],
    data: TensorDataset,
    minibatch_size: int,
    epochs: int,
    options: OptimizerOptions,
    seed_of_run: int,
    most_minibatches: int | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """The state dict after training, and each epoch's mean loss over the samples."""
    model.train()
    *inputs, labels = data.tensors
    optimizers = []
    for s, stage in enumerate(stages):
        names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in stage.modules]
        stage.versions = [{name: model.get_parameter(name).detach().clone() for name in names}]
        own = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[0] in stage.modules}
        stage.buffers = [{name: buffer.clone() for name, buffer in own.items()} for _ in range(stage.replicas)]
        master = [stage.versions[0][name].clone() for name in names]
        optimizers.append((names, master, _optimizer(options, master) if master else None))
        model.get_submodule(stage.modules[0]).register_forward_pre_hook(lambda *_, s=s: seed(s))
    seeds: list[int] = []

    def seed(s: int) -> None:
        torch.manual_seed(seeds[s])

    losses = []
    for epoch in range(epochs):
        order = epoch_order(len(data), seed_of_run, epoch)
        batches = list(order.split(minibatch_size))
        if most_minibatches is not None:
            batches = batches[:most_minibatches]
            most_minibatches -= len(batches)
        total = 0.0
        for b, indices in enumerate(batches):
            seeds[:] = [minibatch_seed(seed_of_run, epoch, b, s) for s in range(len(stages))]
            leaves: dict[str, Tensor] = {}
            buffers: dict[str, Tensor] = {}
            for stage in stages:
                version = max(0, b // stage.replicas - stage.in_flight + 1 - stage.lag)
                for name, value in stage.versions[version].items():
                    leaves[name] = value.clone().requires_grad_(model.get_parameter(name).requires_grad)
                buffers |= stage.buffers[b % stage.replicas]
            output = functional_call(model, {**leaves, **buffers}, tuple(each[indices] for each in inputs))
            loss = cross_entropy(output["logits"] if isinstance(output, dict) else output, labels[indices])
            if loss.requires_grad:
                loss.backward()
            total += loss.item() * len(indices)
            for s, stage in enumerate(stages):
                stage.gradients.append((len(indices), {name: leaves[name].grad for name in stage.versions[0]}))
                if len(stage.gradients) == stage.replicas or b == len(batches) - 1:
                    names, master, optimizer = optimizers[s]
                    if optimizer is not None:
                        scale = {"balanced": stage.replicas / stages[0].replicas, "linear": stage.replicas, "none": 1}
                        rate = learning_rate(options, epoch, epochs) * scale[options.lr_scaling]
                        optimizer.param_groups[0]["lr"] = rate
                        for name, parameter in zip(names, master, strict=True):
                            parameter.grad = _mean(stage.gradients, name)
                        optimizer.step()
                    stage.versions.append({n: value.detach().clone() for n, value in zip(names, master, strict=True)})
                    stage.gradients = []
        for stage in stages:
            stage.versions = [stage.versions[-1]]
            _average_buffers(stage, len(batches))
        losses.append(total / sum(map(len, batches)))
        if most_minibatches == 0:
            break
    state = {name: value for stage in stages for name, value in stage.versions[0].items()}
    return state | {name: value for stage in stages for name, value in stage.buffers[0].items()}, losses


def _optimizer(options: OptimizerOptions, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(parameters, options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.name]
    return kind(parameters, options.lr, weight_decay=options.weight_decay)


def _mean(gradients: Sequence[tuple[int, dict[str, Tensor | None]]], name: str) -> Tensor | None:
    """(g_0 + g_1 + ...) / r for equal minibatches, else (n_0 g_0 + n_1 g_1 + ...) / (n_0 + n_1 + ...)."""
    values = [(n, each[name]) for n, each in gradients]
    if all(value is None for _, value in values):
        return None
    zero = torch.zeros_like(next(value for _, value in values if value is not None))
    equal = len({n for n, _ in values}) == 1
    total = None
    for n, value in values:
        value = zero if value is None else value
        term = value if equal else n * value
        total = term if total is None else total + term
    return total / (len(values) if equal else sum(n for n, _ in values))


def _average_buffers(stage: ReferenceStage, minibatches: int) -> None:
    trained = stage.buffers[: min(stage.replicas, minibatches)]
    for name, value in stage.buffers[0].items():
        if value.is_floating_point():
            total = trained[0][name]
            for other in trained[1:]:
                total = total + other[name]
            value = total / len(trained)
        for buffers in stage.buffers:
            buffers[name] = value.clone()
