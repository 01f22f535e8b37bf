"""The names of layers and the text of what they compute, for people and for the fingerprint (design, section 1)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from pd_format.layers.values import leaves, rebuild

if TYPE_CHECKING:
    from pd_format.layers.chain import Chain
    from pd_format.layers.graph import Trace

__all__ = ["call_text", "describe", "layer_name"]


def layer_name(node: fx.Node, traced: Trace) -> str:
    """The module's path, or for a function the path of the module in whose forward it is called and its own name."""
    if node.op == "call_module":
        return str(node.target)
    path = traced.paths[node]
    name = _function_name(node)
    return f"{path}.{name}" if path else name


def call_text(node: fx.Node, model: nn.Module) -> str:
    """A layer's operation for a reader: a module with its settings, a function with its constants."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        # An empty class of the same name prints the settings without the children.
        return f"{type(module).__name__}({module.extra_repr()})"
    constants = [_constant(arg) for arg in node.args if not _has_node(arg)]
    constants += [f"{key}={_constant(arg)}" for key, arg in node.kwargs.items() if not _has_node(arg)]
    return f"{_function_name(node)}({', '.join(constants)})"


def describe(chain: Chain, layer: int) -> str:
    """Everything that the fingerprint takes from a layer, wiring included."""
    step = chain._passes[True]
    model = chain._model
    parts = [chain.layers[layer].name]
    for node in step.nodes:
        if step.layer[node] != layer:
            continue
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            parts.append(repr(module))
            named = [*module.named_parameters(), *module.named_buffers()]
            parts += [f"{name}:{tuple(tensor.shape)}:{tensor.dtype}" for name, tensor in named]
        else:
            parts.append(_function_name(node))
        parts += [_wiring(arg, chain) for arg in node.args]
        parts += [f"{key}={_wiring(arg, chain)}" for key, arg in node.kwargs.items()]
    return "\n".join(parts)


def _wiring(value: object, chain: Chain) -> str:
    """An argument with the layer that made it in place of a node, whose own name may differ between torch versions."""
    step = chain._passes[True]

    def leaf(each: object) -> object:
        if not isinstance(each, fx.Node):
            return _constant(each)
        if each.op == "get_attr":
            tensor = step.traced.values[each][0]
            assert isinstance(tensor, Tensor)
            return f"{each.target}:{tuple(tensor.shape)}:{tensor.dtype}"
        return f"input {each.target}" if each.op == "placeholder" else f"layer {step.layer[each]}"

    return repr(rebuild(value, leaf))


def _function_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target[2:-2] if target.startswith("__") else target
    name: str = getattr(target, "__name__", type(target).__name__)
    owner = getattr(target, "__self__", None)
    if name == "apply" and isinstance(owner, type):
        return owner.__name__  # A custom autograd function.
    if name.startswith("i") and name[1:] in _SPELLED and target is getattr(operator, name, None):
        return f"{name[1:]}_"  # `x += y` is torch's `x.add_(y)`.
    return name


_SPELLED = {"add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"}


def _constant(value: object) -> str:
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def _has_node(value: object) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in leaves(value))
