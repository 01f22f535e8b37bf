"""The stage engine that PyTorch makes: a module whose parameters are pointers.

Versions need no copy at the forward pass: the module's parameters are set to the tensors of the set that the pass is
to use, and autograd holds on to those tensors until the backward pass (design, section 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_format.layers.precision import FP32, Precision
from pd_format.layers.stage import StageModule
from pd_format.layers.task import PredictingTask, Task
from pd_format.layers.values import map_tensors, tensors_in
from pd_train.crossing import Crossing
from pd_train.engine import Score
from pd_train.memory import MemoryMeter
from pd_train.seeding import seed_generators
from pd_train.staging import Staging

__all__ = ["TorchEngine", "watch_leaves"]

Pointer = Callable[[nn.Parameter], None]


class _Stash(NamedTuple):
    """What a backward pass needs: the ends of the graph, which hold on to all between them."""

    received: list[Tensor]
    sent: list[Tensor]


class _Recipe(NamedTuple):
    """What a recomputing backward pass needs: enough to run the forward pass again."""

    weights: int
    values: tuple[Any, ...]
    targets: Any
    seed: int


class TorchEngine:
    """A `StageModule` on one device.

    Args:
        module: the stage.
        sets: the parameter sets; the first holds the module's own, but for naive pipelining.
        task: gives loss and score at the last stage.
        device: what the module is on.
        naive: for naive pipelining, the module's own parameters, which every graph then shares.
        predict: whether a validation's scores hold the task's predictions; the task must be able to make them.
        recompute: keep a stage's inputs instead of its activations, and run its forward pass again before its
            backward pass.
        precision: what autocast computes in, and what float32 tensors are while they cross a cut.
        first: whether values come from the data set, not across a cut.
        crossing: what compresses activations at cuts, if anything does.
        staging: the way from the device, where that is not the host itself. A pass then ends with one wait for the
            device, and has none within: what it takes is to be a time of the host's clock.
    """

    def __init__(
        self,
        module: StageModule,
        sets: Sequence[Sequence[nn.Parameter]],
        task: Task,
        device: torch.device,
        naive: Sequence[nn.Parameter] | None = None,
        recompute: bool = False,
        predict: bool = False,
        precision: Precision = FP32,
        first: bool = True,
        crossing: Crossing | None = None,
        staging: Staging | None = None,
    ) -> None:
        self._module = module
        self._sets = sets
        self._task = task
        self._device = device
        self._naive = naive
        self._recompute = recompute
        self._predict = predict
        self._precision = precision
        self._first = first
        self._crossing = crossing
        self._staging = staging
        self._pointers = _pointers_to(module, sets[0])
        self._current = 0
        self._stash: dict[int, _Stash | _Recipe] = {}
        self._meter: MemoryMeter | None = None
        # What a stage sends must not share memory with what it goes on writing to: it leaves, or is copied from the
        # device, beside the passes that follow.
        self._owned = {tensor.untyped_storage().data_ptr() for tensor in module.buffers()}
        for held in sets:
            self._owned |= {tensor.untyped_storage().data_ptr() for tensor in held}

    def measure(self, meter: MemoryMeter) -> None:
        """Let a meter see what each pass saves, and look when a pass has ended and at each gradient between."""
        self._meter = meter
        for leaf in {id(leaf): leaf for held in (self._naive or (), *self._sets) for leaf in held}.values():
            leaf.register_post_accumulate_grad_hook(lambda _: meter.look())  # type: ignore[no-untyped-call]

    def held(self) -> Iterator[Tensor]:
        """What is kept between a minibatch's passes besides what autograd saved, the model's own tensors included."""
        yield from self._module.parameters()
        yield from self._module.buffers()
        for held in (self._naive or (), *self._sets):
            for leaf in held:
                yield leaf
                if leaf.grad is not None:
                    yield leaf.grad
        for kept in self._stash.values():
            yield from tensors_in(tuple(kept))

    def forward(self, key: int, index: int, values: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        recipe = _Recipe(index, self._arrived(values), None, seed)
        stash, result = self._run(recipe)
        self._keep(key, recipe, stash)
        sent = self._leaving(result)
        self._end()
        return sent

    def forward_loss(self, key: int, index: int, values: tuple[Any, ...], targets: Any, seed: int) -> Score:
        recipe = _Recipe(index, self._arrived(values), targets, seed)
        stash, (loss,) = self._run(recipe)
        self._keep(key, recipe, stash)
        (loss,) = self._end(loss.detach())
        return Score(loss.item(), None, self._task.samples(recipe.targets))

    def backward(
        self, key: int, index: int, gradients: Sequence[Tensor | None] | None, loss_scale: float = 1.0
    ) -> list[Tensor | None]:
        self._overwrite_graph(index)
        kept = self._stash.pop(key)
        received, sent = self._run_again(kept) if isinstance(kept, _Recipe) else kept
        if gradients is None:
            if sent:
                _differentiate(sent, [torch.full_like(loss, loss_scale) for loss in sent])
        else:
            if self._crossing is not None:
                gradients = self._crossing.unpack_gradients(gradients)
            pairs = [(root, arrived) for root, arrived in zip(sent, gradients, strict=True) if arrived is not None]
            for root, arrived in pairs:
                if root.shape != arrived.shape or root.dtype != arrived.dtype:
                    raise RuntimeError(
                        f"a gradient of {arrived.dtype} {tuple(arrived.shape)} arrived for a value of "
                        f"{root.dtype} {tuple(root.shape)}"
                    )
            if pairs:
                _differentiate([root for root, _ in pairs], [arrived for _, arrived in pairs])
        answer = [tensor.grad for tensor in received]
        if self._crossing is not None and not self._first:
            answer = self._crossing.pack_gradients(answer)
        result: list[Tensor | None] = answer if self._staging is None else map_tensors(self._staging.to_host, answer)
        self._end()
        return result

    def take_parameter_gradients(self, index: int) -> list[Tensor | None]:
        leaves = self._naive or self._sets[index]
        gradients = [parameter.grad for parameter in leaves]
        for parameter in leaves:
            parameter.grad = None
        return gradients

    def watch_gradients(self, ready: Callable[[int, Tensor], None]) -> None:
        watch_leaves([self._naive] if self._naive is not None else self._sets, ready)

    def evaluate(self, index: int, values: tuple[Any, ...], targets: Any | None) -> tuple[Any, ...] | Score:
        self._point_to(index)
        if self._module.training:
            self._module.eval()
        with torch.no_grad(), self._precision.computing(self._device):
            result = self._module(*self._widened(self._arrived(values)))
            if targets is None:
                sent = self._leaving(self._precision.narrow(result))
                self._end()
                return sent
            loss = self._task.loss(result[0], targets)
            made = [loss]
            if self._predict:
                assert isinstance(self._task, PredictingTask)
                made.append(self._task.predictions(result[0]))
            # A task counts by itself, for which it may wait for the device.
            correct, samples = self._task.correct(result[0], targets), self._task.samples(targets)
            loss, *predictions = self._end(*made)
            return Score(loss.item(), correct, samples, predictions[0] if predictions else None)

    def _keep(self, key: int, recipe: _Recipe, stash: _Stash) -> None:
        # Where nothing wants a gradient, in front of all that trains, no backward pass needs the forward pass again.
        self._stash[key] = recipe if self._recompute and stash.sent else stash
        if self._meter is not None:
            self._meter.look()

    def _run(self, recipe: _Recipe) -> tuple[_Stash, tuple[Any, ...]]:
        """A forward pass, up to the loss where there are targets."""
        self._point_to(recipe.weights)
        if not self._module.training:
            self._module.train()
        seed_generators(recipe.seed)
        saving = contextlib.nullcontext() if self._meter is None else self._meter.saving()
        with saving, self._precision.computing(self._device):
            result: tuple[Any, ...] = self._module(*self._widened(recipe.values))
            if recipe.targets is not None:
                loss = self._task.loss(result[0], recipe.targets)
                # A loss in float16 could not be scaled: its gradient would be infinite.
                result = (loss.float() if loss.dtype is torch.float16 else loss,)
        if recipe.targets is None:
            result = self._precision.narrow(result)
        wanted = [tensor for tensor in tensors_in(recipe.values) if tensor.requires_grad]
        return _Stash(wanted, [tensor for tensor in tensors_in(result) if tensor.requires_grad]), result

    def _run_again(self, recipe: _Recipe) -> _Stash:
        """The forward pass of a recomputing stage once more: same seed, and buffers that nobody keeps."""
        own = [(owner, dict(owner._buffers)) for owner in self._module.modules() if owner._buffers]
        for owner, buffers in own:
            owner._buffers.update({name: None if held is None else held.clone() for name, held in buffers.items()})
        try:
            stash, _ = self._run(recipe)
        finally:
            for owner, buffers in own:
                owner._buffers.update(buffers)
        return stash

    def _widened(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values if self._first else self._precision.widen(values)

    def _point_to(self, index: int) -> None:
        if self._naive is not None:
            self._overwrite_graph(index)
        elif index != self._current:
            parameters = self._sets[index]
            for set_pointer, number in self._pointers:
                set_pointer(parameters[number])
            self._current = index

    def _overwrite_graph(self, index: int) -> None:
        """Under naive pipelining: make the parameters of every saved graph those of a set.

        This is what the paper's naive pipelining does and why it is wrong: the gradient is of no function that was
        ever computed. Writing through `.data` gets around autograd's version check; nothing else here may.
        """
        for parameter, held in zip(self._naive or (), self._sets[index], strict=bool(self._naive)):
            if parameter.data_ptr() != held.data_ptr():
                parameter.data.copy_(held.data)

    def _arrived(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """A stage's input as the stage before had it."""
        return values if self._first or self._crossing is None else self._crossing.unpack(values)

    def _leaving(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._crossing is not None:
            values = self._crossing.pack(values)
        sent: tuple[Any, ...] = map_tensors(self._to_send, values)
        return sent

    def _to_send(self, tensor: Tensor) -> Tensor:
        sent = tensor.detach()
        if sent.untyped_storage().data_ptr() in self._owned:
            sent = sent.clone()
        sent.requires_grad_(tensor.requires_grad)
        return sent if self._staging is None else self._staging.to_host(sent)

    def _end(self, *values: Tensor) -> Sequence[Tensor]:
        """Wait until the device has done the pass; its small values, on the host."""
        return values if self._staging is None else self._staging.finish(*values)


def _differentiate(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    try:
        torch.autograd.backward(roots, gradients)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UserError(
            f"The backward pass needs a tensor that has been written to: {error}\nWhere that is a parameter, the model "
            "uses it a second time without its gradient (.detach()), and a replicated stage under --sync bsp writes "
            "its next version as soon as its gradient is complete: train with --sync overlap. Else the model changes a "
            "tensor in place that autograd has saved."
        ) from error


def watch_leaves(leaves: Sequence[Sequence[nn.Parameter]], ready: Callable[[int, Tensor], None]) -> None:
    """Tell of gradients that autograd has added up, by the numbers that their parameters have in any of the sets."""

    def look(number: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        ready(number, parameter.grad)

    for held in leaves:
        for number, leaf in enumerate(held):
            leaf.register_post_accumulate_grad_hook(partial(look, number))  # type: ignore[no-untyped-call]


def _pointers_to(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[Pointer, int]]:
    """Every place in the module that holds one of the parameters, as a function that makes it hold another one."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    pointers: list[tuple[Pointer, int]] = []
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is None or id(parameter) not in numbers:
                continue
            # A recurrent module keeps a second list of its weights, which only assignment keeps in step.
            assign = isinstance(owner, nn.RNNBase)
            pointer = partial(setattr, owner, key) if assign else partial(owner._parameters.__setitem__, key)
            pointers.append((pointer, numbers[id(parameter)]))
    return pointers
