"""A model as a chain of layers: what crosses each cut, where a cut may be, the stages between cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pd_format.errors import UserError
from pd_format.layers.code import bind, write
from pd_format.layers.cuts import find_bars, find_uses
from pd_format.layers.describe import call_text
from pd_format.layers.fingerprint import describe_layer, fingerprint_of
from pd_format.layers.passes import Pass, lay_out
from pd_format.layers.precision import FP32, Precision
from pd_format.layers.stage import Program, StageModule
from pd_format.layers.state import untouched
from pd_format.layers.trace import trace
from pd_format.layers.values import StandIns, rebuild, storage_key, tensors_in
from pd_format.profile import InputSpec

__all__ = ["Chain", "Layer", "build_chain"]


@dataclass(frozen=True)
class Layer:
    """One layer. `parameters` and `buffers` are the names of those that are used here first."""

    name: str
    op: str
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def build_chain(model: nn.Module, inputs: Sequence[InputSpec]) -> Chain:
    """Turn a model into a chain of layers, without running it on data and without copying it.

    The model is left as it was, the modes of its modules included.

    Args:
        inputs: the model's inputs with the minibatch size as their first dimension; matched to the parameters of its
            forward by name if all names are there, else by position.

    Raises:
        UserError: the model fails on such inputs, or its own forward cannot be traced.
    """
    if not inputs:
        raise UserError("the model has no input; give at least one.")
    stand_ins = StandIns(model)
    passes: dict[bool, Pass] = {}
    with untouched(model), _generators_kept(stand_ins.device):
        for mode in (True, False):
            model.train(mode)
            exceptions = {name for name, module in model.named_modules() if module.training is not mode}
            passes[mode] = Pass(trace(model, inputs, stand_ins), exceptions)
    return Chain(model, passes, stand_ins)


class Chain:
    """The layers of a model, as `build_chain` finds them."""

    #: In the order in which they run.
    layers: tuple[Layer, ...]
    #: Whether a stage may end right after each layer.
    cuts: tuple[bool, ...]
    #: Sentences for the user: what stays whole, where no cut may be, and why.
    notes: tuple[str, ...]
    #: See `pd_format.layers.fingerprint`.
    fingerprint: str
    #: Every tensor's key in the model's state dict -> the first name of that tensor.
    state_names: dict[str, str]
    #: What tracing took for granted about sizes other than the minibatch size.
    specialised: tuple[str, ...]
    #: The structure of what the model returns in training, with tensors without data.
    output: object

    def __init__(self, model: nn.Module, passes: dict[bool, Pass], stand_ins: StandIns) -> None:
        """Assemble a chain; use `build_chain`."""
        self._model = model
        self._passes = passes
        self._walkers: dict[bool, Callable[..., Generator[tuple[int, list[object]], None, object]]] = {}
        training = passes[True]
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        names = lay_out(training, passes[False])
        if not names:
            raise UserError(
                f"{type(model).__name__} has no layer: its forward makes no tensor. Give a model that computes."
            )
        uses = find_uses(model, passes.values())
        first = self._place_tensors(uses)
        nodes = [training.head_of(index) for index in range(len(names))]
        self.layers = tuple(
            Layer(
                name,
                call_text(node, model),
                tuple(each for each in self._parameters if first[each] == index),
                tuple(each for each in self._buffers if first[each] == index),
            )
            for index, (name, node) in enumerate(zip(names, nodes, strict=True))
        )
        self._bars, barred = find_bars(model, passes.values(), names, uses, stand_ins)
        notes = [note for mode in (True, False) for note in passes[mode].traced.notes]
        self.notes = tuple(dict.fromkeys([*notes, *barred]))
        self.cuts = tuple(index not in self._bars or index == len(self.layers) - 1 for index in range(len(self.layers)))
        self.specialised = tuple(dict.fromkeys(fact for mode in (True, False) for fact in passes[mode].traced.facts))
        self.fingerprint = fingerprint_of([describe_layer(model, training, *each) for each in enumerate(names)])
        canonical = {id(tensor): name for name, tensor in [*self._parameters.items(), *self._buffers.items()]}
        state = model.state_dict(keep_vars=True)
        self.state_names = {key: canonical[id(value)] for key, value in state.items() if id(value) in canonical}
        values = training.traced.values
        self.output = rebuild(
            training.output.args[0], lambda leaf: values[leaf][0] if isinstance(leaf, fx.Node) else leaf
        )

    def crossing(self, layer: int) -> tuple[str, ...]:
        """Names of the values that cross a cut after `layer` in training: inputs or made before it, and used later."""
        return tuple(node.name for node in self._passes[True].crossing(layer))

    def crossing_bytes(self, layer: int, precision: Precision = FP32) -> int:
        """Bytes of the tensors that cross a cut right after `layer` in training, for the traced minibatch size."""
        step = self._passes[True]
        return sum(
            precision.crossing_bytes(tensor)
            for node in step.crossing(layer)
            for tensor in tensors_in(step.traced.values[node][0])
        )

    def parameter_bytes(self, layer: int) -> int:
        """Bytes of the parameters used first in `layer`."""
        return sum(_size(self._parameters[name]) for name in self.layers[layer].parameters)

    def trainable_bytes(self, layer: int) -> int:
        """Bytes of those parameters of `layer` that require a gradient."""
        named = (self._parameters[name] for name in self.layers[layer].parameters)
        return sum(_size(parameter) for parameter in named if parameter.requires_grad)

    def stage(self, first: int, last: int) -> StageModule:
        """The layers `first` to `last`, both included and counted from 0, as a module.

        Raises:
            UserError: there are no such layers, or no cut may be at one of its ends.
        """
        count = len(self.layers)
        if not 0 <= first <= last < count:
            raise UserError(f"a stage of the layers {first} to {last} was asked for; the model has 0 to {count - 1}.")
        for cut in (first - 1, last):
            if 0 <= cut < count - 1 and not self.cuts[cut]:
                raise UserError(
                    f"no stage may end after layer {cut}, {self.layers[cut].name!r}: {self._bars[cut]} "
                    "Plan again, so that this span stays in one stage."
                )
        programs = {mode: self._program(mode, first, last) for mode in (True, False)}
        inside = range(first, last + 1)
        modules = {
            str(node.target)
            for step in self._passes.values()
            for node in step.nodes
            if node.op == "call_module" and step.layer[node] in inside
        }
        direct = {
            str(source.target)
            for step in self._passes.values()
            for node in (*step.nodes, step.output)
            if step.layer[node] in inside
            for source in node.all_input_nodes
            if source.op == "get_attr"
        }
        for layer in self.layers[first : last + 1]:
            direct.update(layer.parameters, layer.buffers)
        return StageModule(
            programs,
            [(name, module) for name, module in self._model.named_modules() if name in modules],
            [(name, parameter) for name, parameter in self._parameters.items() if name in direct],
            [(name, buffer, self._persistent(name)) for name, buffer in self._buffers.items() if name in direct],
            self._model.training,
        )

    def walk(self, inputs: Sequence[object]) -> Iterator[tuple[int, list[object]]]:
        """Run the whole model on its own modules, yielding (layer, values that it made) after each layer.

        The model's mode decides what runs. The generator's return value (`StopIteration.value`) is the model's output.
        Values are dropped as soon as no later layer and no caller needs them.
        """
        mode = self._model.training
        if mode not in self._walkers:
            step = self._passes[mode]
            recipe = write(step.traced, step.nodes, step.placeholders, None, "all layers", step.layer, len(self.layers))
            self._walkers[mode] = bind(recipe, self._model)
        return self._walkers[mode](*inputs)

    def _place_tensors(self, uses: dict[str, set[int]]) -> dict[str, int]:
        """The first layer of each parameter and buffer; one that is never used goes with the one before it."""
        first: dict[str, int] = {}
        idle: list[str] = []
        for table in (self._parameters, self._buffers):
            before = 0
            for name in table:
                before = min(uses[name]) if uses.get(name) else before
                first[name] = before
                if not uses.get(name) and table is self._parameters:
                    idle.append(name)
        if idle:
            shown = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            self._passes[True].traced.notes.append(f"no layer uses {shown}: such parameters stay as they are.")
        return first

    def _program(self, mode: bool, first: int, last: int) -> Program:
        step = self._passes[mode]
        traced = step.traced
        final = last == len(self.layers) - 1
        nodes = [node for node in step.nodes if first <= step.layer[node] <= last]
        received = step.placeholders if first == 0 else step.crossing(first - 1)
        results = None if final else step.crossing(last)
        changed = {key for node in nodes for key in traced.writes.get(node, ())}
        own = [
            node
            for node in received
            if any(storage_key(each) in changed for each in tensors_in(traced.values[node][0]))
        ]
        title = f"layers {first} to {last}, {'training' if mode else 'evaluation'}"
        recipe = write(traced, nodes, received, results, title, own=own)
        inside = {str(node.target) for node in nodes if node.op == "call_module"}
        exceptions = [
            name for name in step.exceptions if any(name == path or name.startswith(f"{path}.") for path in inside)
        ]
        return Program(
            recipe,
            tuple(node.name for node in received),
            ("output",) if results is None else tuple(node.name for node in results),
            tuple(exceptions),
        )

    def _persistent(self, name: str) -> bool:
        path, _, attribute = name.rpartition(".")
        return attribute not in self._model.get_submodule(path)._non_persistent_buffers_set


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Operations that run for real draw random numbers; afterwards the generators are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
