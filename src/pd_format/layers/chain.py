"""A model as a chain of layers: what crosses each cut, where a cut may be, the stages between cuts (design, section 1).

The layers are the tensor-making operations of one training forward pass, in the order in which they run. The eval pass
is traced too; each of its operations belongs to the layer that it is aligned with.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pd_format.errors import UserError
from pd_format.layers.code import bind, write
from pd_format.layers.describe import call_text, describe, layer_name
from pd_format.layers.fingerprint import compare_fingerprints, fingerprint_of
from pd_format.layers.graph import Trace
from pd_format.layers.stage import Program, StageModule
from pd_format.layers.state import untouched
from pd_format.layers.trace import trace
from pd_format.layers.values import StandIns, rebuild, storage_key, tensors_in
from pd_format.profile import InputSpec

__all__ = ["Chain", "Layer", "build_chain", "compare_fingerprints"]


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
    passes: dict[bool, _Pass] = {}
    with untouched(model), _generators_kept(stand_ins.device):
        for mode in (True, False):
            model.train(mode)
            exceptions = {name for name, module in model.named_modules() if module.training is not mode}
            passes[mode] = _Pass(trace(model, inputs, stand_ins), exceptions)
    return Chain(model, passes, stand_ins)


class _Pass:
    """One traced mode, with the layer of each of its nodes; a placeholder belongs to layer -1."""

    def __init__(self, traced: Trace, exceptions: set[str]) -> None:
        self.traced = traced
        self.exceptions = exceptions
        self.nodes = [n for n in traced.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        self.placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
        self.output = next(n for n in reversed(traced.graph.nodes) if n.op == "output")
        self.layer: dict[fx.Node, int] = {}
        self.last_use: dict[fx.Node, int] = {}

    def settle(self, layers: int) -> None:
        """Work out how far each value travels, once `layer` holds the nodes that run."""
        self.layer.update(dict.fromkeys(self.placeholders, -1))
        self.layer[self.output] = layers - 1
        for node in (*self.placeholders, *self.nodes):
            users = [self.layer[user] for user in node.users]
            # Where the data is need not travel: a stage knows its own device.
            local = isinstance(self.traced.values[node][0], torch.device)
            self.last_use[node] = self.layer[node] if local else max(users, default=self.layer[node])

    def crossing(self, layer: int) -> list[fx.Node]:
        return [node for node, last in self.last_use.items() if self.layer[node] <= layer < last]

    def makes_layer(self, node: fx.Node) -> bool:
        """A module, a tensor-making function, or a write; picking a part of a tuple or dictionary is none."""
        values = self.traced.values
        if node.op == "call_module" or node in self.traced.writes:
            return True
        if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
            picks = getattr(node.target, "__name__", "") in ("getitem", "getattr")
            if picks and not isinstance(values[node.args[0]][0], Tensor):
                return False
        return next(tensors_in(values[node][0]), None) is not None


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

    def __init__(self, model: nn.Module, passes: dict[bool, _Pass], stand_ins: StandIns) -> None:
        """Assemble a chain; use `build_chain`."""
        self._model = model
        self._passes = passes
        self._walkers: dict[bool, Callable[..., Generator[tuple[int, list[object]], None, object]]] = {}
        training = passes[True]
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        self._aliases = _names_by_tensor(model)
        names = self._lay_out()
        uses = self._find_uses()
        first = self._place_tensors(uses)
        nodes = [self._head_of(index) for index in range(len(names))]
        self.layers = tuple(
            Layer(
                name,
                call_text(node, model),
                tuple(each for each in self._parameters if first[each] == index),
                tuple(each for each in self._buffers if first[each] == index),
            )
            for index, (name, node) in enumerate(zip(names, nodes, strict=True))
        )
        self._bars: dict[int, str] = {}
        notes = [note for mode in (True, False) for note in passes[mode].traced.notes]
        self.notes = tuple(dict.fromkeys([*notes, *self._bar_tied(uses, stand_ins), *self._bar_values(stand_ins)]))
        self.cuts = tuple(index not in self._bars or index == len(self.layers) - 1 for index in range(len(self.layers)))
        self.specialised = tuple(dict.fromkeys(fact for mode in (True, False) for fact in passes[mode].traced.facts))
        self.fingerprint = fingerprint_of([describe(self, index) for index in range(len(self.layers))])
        canonical = {id(tensor): name for name, tensor in [*self._parameters.items(), *self._buffers.items()]}
        state = model.state_dict(keep_vars=True)
        self.state_names = {key: canonical[id(value)] for key, value in state.items() if id(value) in canonical}
        values = training.traced.values
        self.output = rebuild(
            training.output.args[0], lambda leaf: values[leaf][0] if isinstance(leaf, fx.Node) else leaf
        )

    def crossing(self, layer: int, training: bool = True) -> tuple[str, ...]:
        """Names of the values that cross a cut right after `layer`: made before it, inputs included, and used after."""
        return tuple(node.name for node in self._passes[training].crossing(layer))

    def crossing_bytes(self, layer: int) -> int:
        """Bytes of the tensors that cross a cut right after `layer` in training, for the traced minibatch size."""
        step = self._passes[True]
        return sum(_size(tensor) for node in step.crossing(layer) for tensor in tensors_in(step.traced.values[node][0]))

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

    def _lay_out(self) -> list[str]:
        """Give each node of both passes its layer; return the layers' names."""
        training, evaluating = self._passes[True], self._passes[False]
        names: list[str] = []
        taken: dict[str, int] = defaultdict(int)
        for node in training.nodes:
            if training.makes_layer(node):
                base = layer_name(node, training.traced)
                taken[base] += 1
                names.append(base if taken[base] == 1 else f"{base}:{taken[base]}")
            # Shape arithmetic runs where it stands, so that a number crosses a cut and not the tensor that it is of.
            training.layer[node] = max(len(names) - 1, 0)
        if not names:
            raise UserError(
                f"{type(self._model).__name__} has no layer: its forward makes no tensor. Give a model that computes."
            )
        keys = [
            [(node.op, _target_key(node), step.traced.paths[node]) for node in step.nodes]
            for step in (training, evaluating)
        ]
        matched: dict[int, int] = {}
        matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
        for block in matcher.get_matching_blocks():
            for offset in range(block.size):
                matched[block.b + offset] = training.layer[training.nodes[block.a + offset]]
        running = 0
        for index, node in enumerate(evaluating.nodes):
            running = max(running, matched.get(index, 0))
            evaluating.layer[node] = running
        for step in (training, evaluating):
            step.settle(len(names))
        return names

    def _head_of(self, layer: int) -> fx.Node:
        step = self._passes[True]
        found: fx.Node = next(n for n in step.nodes if step.layer[n] == layer and step.makes_layer(n))
        return found

    def _find_uses(self) -> dict[str, set[int]]:
        """The layers that use each parameter and buffer, in either mode, by its first name."""
        canonical = {id(tensor): name for name, tensor in [*self._parameters.items(), *self._buffers.items()]}
        uses: dict[str, set[int]] = defaultdict(set)
        for step in self._passes.values():
            for node in (*step.nodes, step.output):
                if node.op == "call_module":
                    module = self._model.get_submodule(str(node.target))
                    for tensor in (*module.parameters(), *module.buffers()):
                        uses[canonical[id(tensor)]].add(step.layer[node])
                for source in node.all_input_nodes:
                    if source.op == "get_attr" and str(source.target) not in step.traced.constants:
                        uses[str(source.target)].add(step.layer[node])
        return uses

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

    def _bar_tied(self, uses: dict[str, set[int]], stand_ins: StandIns) -> list[str]:
        """Forbid the cuts inside the span of a parameter, or of a buffer that is written, used by several layers."""
        written = {key for step in self._passes.values() for keys in step.traced.writes.values() for key in keys}
        spans: dict[tuple[int, int], list[str]] = defaultdict(list)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            writes = name in self._buffers and storage_key(stand_ins.of(tensor)) in written
            if len(uses[name]) > 1 and (name in self._parameters or writes):
                spans[min(uses[name]), max(uses[name])].append(name)
        memory: dict[int, str] = {}
        for name, parameter in self._parameters.items():
            place = parameter.untyped_storage().data_ptr() if parameter.numel() else 0
            other = memory.setdefault(place, name) if place else name
            joint = uses[name] | uses[other]
            if other != name and len(joint) > 1 and uses[name] != uses[other]:
                spans[min(joint), max(joint)] += [other, name]
        notes: list[str] = []
        for (low, high), names in spans.items():
            every = list(dict.fromkeys(alias for name in names for alias in self._aliases[name]))
            shown = ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")
            ends = f"the layers {self.layers[low].name!r} and {self.layers[high].name!r}"
            text = f"{ends} use the same parameters or buffers ({shown}), which must stay in one stage."
            for cut in range(low, high):
                self._bars.setdefault(cut, text)
            notes.append(f"No cut between layer {low} and layer {high}: {text}")
        return notes

    def _bar_values(self, stand_ins: StandIns) -> list[str]:
        """Forbid the cuts that a value of another kind crosses, and those that part a changed tensor from its alias."""
        notes: list[str] = []
        for step in self._passes.values():
            values = step.traced.values
            last_write: dict[int, int] = {}
            for node, keys in step.traced.writes.items():
                for key in keys:
                    last_write[key] = max(last_write.get(key, -1), step.layer[node])
            kinds = {node: _foreign(values[node][0]) for node in step.last_use}
            keys_of = {node: [storage_key(each) for each in tensors_in(values[node][0])] for node in step.last_use}
            suspects = [node for node, keys in keys_of.items() if kinds[node] or any(key in last_write for key in keys)]
            for cut in range(len(self.layers) - 1):
                if cut in self._bars or not any(step.layer[n] <= cut < step.last_use[n] for n in suspects):
                    continue
                seen: dict[int, fx.Node] = {}
                for node in step.crossing(cut):
                    if kinds[node]:
                        text = (
                            f"{node.name} would have to cross, a {kinds[node]}; only tensors, None, bool, int, float, "
                            "str and tuples, lists and dictionaries of these can."
                        )
                        self._bars.setdefault(cut, text)
                        notes.append(f"No cut where {text}")
                    for key in keys_of[node]:
                        if key in seen and last_write.get(key, -1) > cut:
                            text = (
                                f"{seen[key].name} and {node.name} would both cross; they share memory, which a later "
                                "layer changes in place."
                            )
                            self._bars.setdefault(cut, text)
                            notes.append(f"No cut where {text}")
                        seen[key] = node
        return notes

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


def _target_key(node: fx.Node) -> object:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__qualname__", target)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names_by_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter and buffer, under its first one."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def _foreign(value: object) -> str:
    """The type of what cannot cross a cut, empty if all of the value can."""
    if isinstance(value, Tensor):
        return "" if value.layout is torch.strided else f"{value.layout} tensor"
    if value is None or type(value) in (bool, int, float, str, torch.Size, torch.device):
        return ""
    if type(value) in (tuple, list):
        return next(filter(None, map(_foreign, value)), "")  # type: ignore[call-overload]
    if type(value) is dict:
        if not all(type(key) in (str, int) for key in value):
            return "dictionary whose keys are neither str nor int"
        return next(filter(None, map(_foreign, value.values())), "")
    return type(value).__qualname__


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """Operations that run for real draw random numbers; afterwards the generators are as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
