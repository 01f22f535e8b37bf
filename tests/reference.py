"""What pd-train must compute, in one process and plain PyTorch, by section 4's table and nothing else.

Minibatches are taken in order. Each runs through the whole, uncut model with, for every stage, the parameters of the
version that the table names; after it every stage whose update has all its minibatches makes its next version. A
version that minibatch b uses was made by earlier minibatches only, so this order computes what the pipeline computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
class Rules:
    """The mode, in the words of the command line."""

    weights: str = "stash"
    sync: str = "overlap"
    flush: int | None = None
    group: int | None = None
    clip_stage_norm: float | None = None
    clip_norm: float | None = None
    precision: torch.dtype | None = None
    """Of autocast; what it does to values at a cut is the model's to say."""


@dataclass
class ReferenceStage:
    """A stage: the modules it holds, its replicas, and its depth."""

    modules: Sequence[str]
    replicas: int
    in_flight: int
    versions: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[tuple[int, int, dict[str, Tensor | None]]] = field(default_factory=list)
    """Of the update under way: replica, samples, gradients."""

    def lag(self, rules: Rules) -> int:
        averages_rounds = rules.flush is None and rules.weights != "2bw"
        return 1 if self.replicas > 1 and rules.sync == "overlap" and averages_rounds else 0

    def forward_version(self, b: int, first: ReferenceStage, rules: Rules) -> int:
        if rules.sync == "asp":
            # No table says what asp computes. Among equally fast workers a gradient misses what the others apply.
            return max(0, b - (self.replicas - 1))
        if rules.flush:
            return 0
        if rules.weights == "2bw":
            return max(0, b // rules.group - 1)
        if rules.weights == "vertical-sync":
            r_0, w_0, lag_0 = first.replicas, first.in_flight, first.lag(rules)
            return (r_0 * max(0, b // r_0 - w_0 + 1 - lag_0)) // self.replicas
        return max(0, b // self.replicas - self.in_flight + 1 - self.lag(rules))

    def backward_version(self, b: int, first: ReferenceStage, rules: Rules) -> int:
        if rules.weights == "none":
            return max(0, b // self.replicas - self.lag(rules))
        return self.forward_version(b, first, rules)

    def update_size(self, rules: Rules) -> int:
        if rules.sync == "asp":
            return 1
        return rules.flush or (rules.group if rules.weights == "2bw" else self.replicas)


def train(
    model: nn.Module,
    stages: Sequence[ReferenceStage],
    data: TensorDataset,
    minibatch_size: int,
    epochs: int,
    options: OptimizerOptions,
    seed_of_run: int,
    most_minibatches: int | None = None,
    rules: Rules | None = None,
    watch: Callable[[int, dict[str, Tensor]], bool] = lambda epoch, state: False,
) -> tuple[dict[str, Tensor], list[float]]:
    """The state dict after training, and each epoch's mean loss over the samples.

    `watch` is given the state dict after each epoch, counted from 1, and ends the training by returning True.
    """
    rules = rules or Rules()
    model.train()
    *inputs, labels = data.tensors
    optimizers = []
    seeds: list[int] = []

    def seed(s: int) -> None:
        torch.manual_seed(seeds[s])

    for s, stage in enumerate(stages):
        names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in stage.modules]
        stage.versions = [{name: model.get_parameter(name).detach().clone() for name in names}]
        own = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[0] in stage.modules}
        stage.buffers = [{name: buffer.clone() for name, buffer in own.items()} for _ in range(stage.replicas)]
        master = [stage.versions[0][name].clone() for name in names]
        optimizers.append((names, master, _optimizer(options, master) if master else None))
        model.get_submodule(stage.modules[0]).register_forward_pre_hook(lambda *_, s=s: seed(s))
    losses = []
    for epoch in range(epochs):
        order = epoch_order(len(data), seed_of_run, epoch)
        batches = list(order.split(minibatch_size))
        if most_minibatches is not None:
            batches = batches[:most_minibatches]
            most_minibatches -= len(batches)
        total = 0.0
        length = rules.flush or len(batches)
        for start in range(0, len(batches), length):
            segment = batches[start : start + length]
            for b, indices in enumerate(segment):
                seeds[:] = [minibatch_seed(seed_of_run, epoch, start + b, s) for s in range(len(stages))]
                leaves: dict[str, Tensor] = {}
                buffers: dict[str, Tensor] = {}
                for stage in stages:
                    for name, value in stage.versions[stage.forward_version(b, stages[0], rules)].items():
                        leaves[name] = value.clone().requires_grad_(model.get_parameter(name).requires_grad)
                    buffers |= stage.buffers[b % stage.replicas]
                with torch.autocast("cpu", rules.precision, enabled=rules.precision is not None):
                    output = functional_call(model, {**leaves, **buffers}, tuple(each[indices] for each in inputs))
                    loss = cross_entropy(output["logits"] if isinstance(output, dict) else output, labels[indices])
                for stage in stages:
                    # Naive pipelining: the weights that the backward pass meets are not those of the forward pass.
                    for name, value in stage.versions[stage.backward_version(b, stages[0], rules)].items():
                        leaves[name].data.copy_(value)
                if loss.requires_grad:
                    loss.backward()
                total += loss.item() * len(indices)
                updates = []
                for s, stage in enumerate(stages):
                    gradients = {name: leaves[name].grad for name in stage.versions[0]}
                    stage.gradients.append((b % stage.replicas, len(indices), gradients))
                    if len(stage.gradients) == stage.update_size(rules) or b == len(segment) - 1:
                        updates.append((s, {name: _mean(stage, name) for name in optimizers[s][0]}))
                        stage.gradients = []
                _clip(updates, rules)
                for s, means in updates:
                    names, master, optimizer = optimizers[s]
                    if optimizer is not None:
                        scale = {
                            "balanced": stages[s].replicas / stages[0].replicas,
                            "linear": stages[s].replicas,
                            "none": 1,
                        }[options.lr_scaling if rules.flush is None and rules.weights != "2bw" else "none"]
                        optimizer.param_groups[0]["lr"] = learning_rate(options, epoch, epochs) * scale
                        for name, parameter in zip(names, master, strict=True):
                            parameter.grad = means[name]
                        optimizer.step()
                    stages[s].versions.append({n: p.detach().clone() for n, p in zip(names, master, strict=True)})
            for stage in stages:
                stage.versions = [stage.versions[-1]]
                _average_buffers(stage, len(segment))
        losses.append(total / sum(map(len, batches)))
        state = {name: value for stage in stages for name, value in (stage.versions[0] | stage.buffers[0]).items()}
        if watch(epoch + 1, state) or most_minibatches == 0:
            break
    return state, losses


def _optimizer(options: OptimizerOptions, parameters: list[Tensor]) -> torch.optim.Optimizer:
    if options.name == "sgd":
        return torch.optim.SGD(parameters, options.lr, momentum=options.momentum, weight_decay=options.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.name]
    return kind(parameters, options.lr, weight_decay=options.weight_decay)


def _mean(stage: ReferenceStage, name: str) -> Tensor | None:
    """(g_0 + g_1 + ...) / count for equal minibatches, else (n_0 g_0 + n_1 g_1 + ...) / (n_0 + n_1 + ...).

    Added up in minibatch order within a replica, then in replica order.
    """
    values = [(replica, n, gradients[name]) for replica, n, gradients in stage.gradients]
    there = [value for _, _, value in values if value is not None]
    if not there:
        return None
    equal = len({n for _, n, _ in values}) == 1
    sums: dict[int, Tensor] = {}
    for replica, n, value in values:
        term = torch.zeros_like(there[0]) if value is None else value if equal else n * value
        sums[replica] = sums[replica] + term if replica in sums else term
    total = None
    for _, value in sorted(sums.items()):
        total = value if total is None else total + value
    return total / (len(values) if equal else sum(n for _, n, _ in values))


def _clip(updates: Sequence[tuple[int, dict[str, Tensor | None]]], rules: Rules) -> None:
    """By the norm of each stage's gradient, or of all together."""
    most = rules.clip_stage_norm or rules.clip_norm
    if most is None:
        return
    groups = [[means] for _, means in updates] if rules.clip_stage_norm else [[means for _, means in updates]]
    for group in groups:
        gradients = [gradient for means in group for gradient in means.values() if gradient is not None]
        norm = sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, most / (norm + 1e-6)))


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
