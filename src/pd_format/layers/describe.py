"""The names of layers and operations, as users of torch know them."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from pd_format.layers.graph import Trace
from pd_format.layers.values import leaves

__all__ = ["call_text", "constant_text", "function_name", "layer_name"]


def layer_name(node: fx.Node, traced: Trace) -> str:
    """The module's path, or for a function the path of the module in whose forward it is called and its own name."""
    if node.op == "call_module":
        return str(node.target)
    path = traced.paths[node]
    name = function_name(node)
    return f"{path}.{name}" if path else name


def call_text(node: fx.Node, model: nn.Module) -> str:
    """A layer's operation for a reader: a module with its settings, a function with its constants."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        # An empty class of the same name prints the settings without the children.
        return f"{type(module).__name__}({module.extra_repr()})"
    constants = [constant_text(arg) for arg in node.args if not _has_node(arg)]
    constants += [f"{key}={constant_text(arg)}" for key, arg in node.kwargs.items() if not _has_node(arg)]
    return f"{function_name(node)}({', '.join(constants)})"


def function_name(node: fx.Node) -> str:
    """The name of a function or method as users of torch write it."""
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


def constant_text(value: object) -> str:
    """A constant argument, spelled alike in every process."""
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return repr(value)


def _has_node(value: object) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in leaves(value))
