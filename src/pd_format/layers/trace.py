"""Traces a model's forward pass into a torch.fx graph in which the value of every node is known on stand-ins.

Plain symbolic tracing stops at `if x.shape[1] != self.n`, `len(x.shape)` or `range(x.shape[1])`. Here every node is
also evaluated twice, with two minibatch sizes: a Python value that comes out the same both times may steer the code;
one that does not, or that comes from a tensor's data, makes the innermost submodule one node of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import is_tensor_method_or_property

from pd_format.errors import UserError
from pd_format.layers.graph import Trace, expression, from_size, label, simplify
from pd_format.layers.inputs import identifier, match_inputs, stand_in
from pd_format.layers.proxies import Mode, Proxy, is_proxy, recorded_functions
from pd_format.layers.refusals import place_of, reason, refusal
from pd_format.layers.state import changed, restore, state_of
from pd_format.layers.values import ModelFails, StandIns, leaves, rebuild
from pd_format.profile import InputSpec

__all__ = ["trace"]

_ENTERED = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


class _FixedBatch(Exception):
    """An operation worked with the minibatch size asked for and failed with the next one."""


def trace(model: nn.Module, inputs: Sequence[InputSpec], stand_ins: StandIns) -> Trace:
    """Trace `model` in the mode that it is in; in eval mode without recording gradients, as it is then run.

    Raises:
        UserError: the inputs do not fit its forward, it fails on them, or its own forward cannot be traced.
    """
    try:
        return _trace(model, inputs, stand_ins, 1)
    except _FixedBatch:
        found = _trace(model, inputs, stand_ins, 0)
        found.facts.append(f"the minibatch size is {inputs[0].shape[0]}")
        return found


def _trace(model: nn.Module, inputs: Sequence[InputSpec], stand_ins: StandIns, more: int) -> Trace:
    tracer = _Tracer(model, inputs, stand_ins, more)
    try:
        before = state_of(model)
        with recorded_functions(tracer, model), Mode(tracer), torch.set_grad_enabled(model.training):
            tracer.trace(model)
    except (UserError, _FixedBatch):
        raise
    except Exception as error:
        raise refusal(model, inputs, stand_ins, error) from error
    found = tracer.result
    found.graph = tracer.graph
    _look_at_assignments(model, before, found)
    simplify(found)
    return found


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module, inputs: Sequence[InputSpec], stand_ins: StandIns, more: int) -> None:
        super().__init__()
        self.result = Trace(fx.Graph())
        self.busy = False  # while a node is being evaluated, torch functions and modules run as ever
        self._inputs = inputs
        self._stand_ins = stand_ins
        self._more = more
        self._order: list[fx.Node] = []
        self._path: list[str] = [""]
        self._attributes: dict[str, fx.Node] = {}
        self._constant_ids: dict[int, str] = {}
        self._asked: list[tuple[fx.Node, str]] = []
        named = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in named}
        self._tensors = dict(named)
        self._autocast = _autocast_on()

    # What torch.fx calls.

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        positional, named = match_inputs(root_fn, self._inputs)
        proxies = {spec.name: self.create_proxy("placeholder", identifier(spec.name), (), {}) for spec in self._inputs}
        args = [proxies[name] for name in positional]
        kwargs = {parameter: proxies[name] for parameter, name in named.items()}

        def call(*values: object) -> object:
            return root_fn(*values, **kwargs)

        return call, [self.root, *args]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and type(m) not in _ENTERED

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.busy:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        mark, facts, notes = len(self._order), len(self.result.facts), len(self.result.notes)
        before = state_of(m)
        self._path.append(path)
        try:
            value = forward(*args, **kwargs)
            _refuse_assignments(m, before)
            return value
        except (UserError, _FixedBatch):
            raise
        except Exception as error:
            self._forget(mark)
            del self.result.facts[facts:], self.result.notes[notes:]
            restore(m, before)
            self._path.pop()
            try:
                value = self.create_proxy("call_module", path, args, kwargs)
            except ModelFails:
                if isinstance(error, ModelFails):
                    raise error from None  # It names the operation inside.
                raise
            finally:
                self._path.append(path)
            self.result.notes.append(
                f"{path} ({type(m).__name__}) stays one layer: {reason(error)}{place_of(error, m)}."
            )
            return value
        finally:
            self._path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if self.busy or not isinstance(attr_val, Tensor) or is_proxy(attr_val):
            return attr_val
        name = self._names.get(id(attr_val))
        return attr_val if name is None else Proxy(self._attribute(name), self)

    def create_arg(self, a: Any) -> Any:
        kind = type(a)
        if is_proxy(a):
            if a.node not in self.result.values:
                raise fx.proxy.TraceError("a value of an untraceable submodule was kept outside of it")
            return a.node
        if isinstance(a, Tensor):
            return self._attribute(self._names.get(id(a)) or self._constant(a))
        if kind is torch.Size or a is None or kind in (bool, int, float, str, complex, torch.device, torch.dtype):
            return a
        try:
            return super().create_arg(a)
        except NotImplementedError:
            if callable(a) and not isinstance(a, nn.Module):
                return a
            if isinstance(a, (torch.Generator, torch.finfo, torch.iinfo)):
                return a
            raise fx.proxy.TraceError(f"an argument of type {kind.__name__} cannot be recorded") from None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Any:
        self._commit(None)
        if _autocast_on() != self._autocast:
            raise fx.proxy.TraceError("its forward switches autocast on or off")
        if torch.is_inference_mode_enabled():
            raise fx.proxy.TraceError("its forward uses inference mode")
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        self._order.append(node)
        result = self.result
        result.paths[node] = self._path[-1]
        if kind == "output":
            return node
        if self.root.training and not torch.is_grad_enabled():
            result.quiet.add(node)
        self.busy = True
        try:
            self._evaluate(node)
        finally:
            self.busy = False
        return node

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.known(obj.node, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        first = self.result.values[obj.node][0]
        if isinstance(first, dict):
            return iter(list(first))
        return iter([obj[index] for index in range(int(self.known(obj.node, len)))])  # type: ignore[index]

    def keys(self, obj: fx.Proxy) -> Any:
        first = self.result.values[obj.node][0]
        if isinstance(first, dict):
            return list(first)
        return self.create_proxy("call_method", "keys", (obj,), {})

    # What the proxies and the mode call.

    def record(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make the node of a call of a torch function."""
        self._commit((args, kwargs))
        if is_tensor_method_or_property(function):
            name = function.__name__
            if name == "__get__":
                return self.create_proxy("call_function", getattr, (args[0], function.__self__.__name__), {})
            return self.create_proxy("call_method", name, tuple(args), kwargs)
        return self.create_proxy("call_function", function, tuple(args), kwargs)

    def concerns(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call must become a node, as a traced value or a parameter takes part in it."""
        return any(is_proxy(leaf) or id(leaf) in self._names for leaf in leaves((args, kwargs)))

    def value_of(self, node: fx.Node) -> object:
        """What a node evaluates to for the minibatch size asked for."""
        return self.result.values[node][0]

    def alive(self, node: fx.Node) -> bool:
        """Whether a node is still in the graph."""
        return node in self.result.values

    def known(self, node: fx.Node, ask: Callable[[Any], Any], tentative: bool = False) -> Any:
        """The answer of `ask` to a node's value, where it holds for every minibatch.

        Raises:
            TraceError: it depends on data or on the minibatch size.
        """
        result = self.result
        first, second = result.values[node]
        text = expression(node, result)
        if isinstance(first, Tensor) and ask is not len:
            raise fx.proxy.TraceError(f"it needs the value of the tensor {text}, which depends on the data")
        if node not in result.trusted:
            raise fx.proxy.TraceError(f"it needs the value of {text}, which depends on the data")
        answer, other = ask(first), ask(second)
        if type(first) is not type(second) or answer != other:
            raise fx.proxy.TraceError(f"it needs the value of {text}, which depends on the minibatch size")
        if from_size(node, result) and not (ask is len and not isinstance(first, Tensor)):
            fact = f"{text} is {first!r}" if not isinstance(first, Tensor) else f"len({text}) is {answer}"
            if tentative:
                self._asked.append((node, fact))
            elif fact not in result.facts:
                result.facts.append(fact)
        return answer

    # Helpers.

    def _commit(self, call: object) -> None:
        """Keep the facts asked for by `__index__`, but not where torch only looked at the arguments of a call."""
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        passed = {leaf.node for leaf in leaves(call) if is_proxy(leaf)}  # type: ignore[attr-defined]
        for node, fact in asked:
            if node not in passed and fact not in self.result.facts:
                self.result.facts.append(fact)

    def _evaluate(self, node: fx.Node) -> None:
        result = self.result
        if node.op == "placeholder":
            spec = self._inputs[sum(each.op == "placeholder" for each in self._order) - 1]
            made = [stand_in(spec, self._more * which) for which in (0, 1)]
            result.values[node] = (made[0], made[1])
            result.trusted.add(node)
            return
        if node.op == "get_attr":
            tensor = self._tensors.get(str(node.target))
            shadow = self._stand_ins.of(result.constants[str(node.target)] if tensor is None else tensor)
            result.values[node] = (shadow, shadow)
            result.trusted.add(node)
            return
        values: list[object] = []
        writes: frozenset[int] = frozenset()
        trusted = all(each in result.trusted for each in node.all_input_nodes)
        for which in (0, 1):
            args = rebuild(node.args, lambda leaf, which=which: self._value(leaf, which))  # type: ignore[misc]
            kwargs = rebuild(node.kwargs, lambda leaf, which=which: self._value(leaf, which))  # type: ignore[misc]
            try:
                outcome = self._stand_ins.evaluate(node.op, node.target, args, kwargs)  # type: ignore[arg-type]
            except ModelFails as error:
                if which:
                    raise _FixedBatch from error
                raise ModelFails(f"in layer {label(node, result)}: {error}") from error
            values.append(outcome.value)
            writes |= outcome.writes
            trusted = trusted and outcome.trusted
            if not self._more:
                values.append(outcome.value)
                break
        result.values[node] = (values[0], values[1])
        if trusted:
            result.trusted.add(node)
        if writes:
            result.writes[node] = writes

    def _value(self, leaf: object, which: int) -> object:
        return self.result.values[leaf][which] if isinstance(leaf, fx.Node) else leaf

    def _attribute(self, name: str) -> fx.Node:
        node = self._attributes.get(name)
        if node is None or node not in self.result.values:
            node = self.create_node("get_attr", name, (), {})
            self._attributes[name] = node
        return node

    def _constant(self, tensor: Tensor) -> str:
        name = self._constant_ids.get(id(tensor))
        if name is None:
            name = f"_constant_{len(self._constant_ids)}"
            self._constant_ids[id(tensor)] = name
            self.result.constants[name] = tensor
        return name

    def _forget(self, mark: int) -> None:
        for node in reversed(self._order[mark:]):
            self.graph.erase_node(node)
            for table in (self.result.values, self.result.writes, self.result.paths):
                table.pop(node, None)
            self.result.trusted.discard(node)
            self.result.quiet.discard(node)
        del self._order[mark:]
        self._asked.clear()


def _refuse_assignments(module: nn.Module, before: dict[str, Any]) -> None:
    names = changed(module, before)
    if names:
        raise fx.proxy.TraceError(f"its forward assigns self.{names[0]}")


def _look_at_assignments(model: nn.Module, before: dict[str, Any], found: Trace) -> None:
    """What the model's own forward keeps on `self` is not kept by a stage: harmless for a count, not for a tensor.

    Raises:
        UserError: it keeps a tensor or a buffer.
    """
    now = state_of(model)
    for name in changed(model, before):
        place = f"the forward of {type(model).__name__} assigns self.{name}"
        if name in now["_buffers"] or any(is_proxy(each) for each in leaves(now.get(name))):
            raise UserError(
                f"{place}, a tensor that would have to live on from one minibatch to the next. Move that code into a "
                "submodule (a class of its own with its own forward): the submodule then stays one layer."
            )
        found.notes.append(f"{place}: the stages do not do so, and use the value that it has now.")


def _autocast_on() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
