"""What tracing a model's forward pass gives: a torch.fx graph, and what is known of each of its nodes."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from pd_format.layers.values import rebuild, tensors_in

__all__ = ["Trace", "expression", "from_size", "label", "simplify"]


@dataclass
class Trace:
    """A traced forward pass in one mode.

    `values` holds what each node evaluates to at the two minibatch sizes; `writes` the storages that it changes in
    place; `trusted` the nodes whose value does not depend on data; `paths` the module in whose forward the node arose;
    `quiet` the nodes that ran without recording gradients; `constants` the tensors that are no part of the model's
    state; `notes` what the user should know; `facts` what the code took for granted about sizes.
    """

    graph: fx.Graph
    values: dict[fx.Node, tuple[object, object]] = field(default_factory=dict)
    trusted: set[fx.Node] = field(default_factory=set)
    writes: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    paths: dict[fx.Node, str] = field(default_factory=dict)
    quiet: set[fx.Node] = field(default_factory=set)
    constants: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


def simplify(found: Trace) -> None:
    """Drop what has no effect and give a changed tensor one name.

    After `h.relu_()` both names mean one tensor: later uses of `h` are made uses of the result, so that a cut carries
    it once.
    """
    graph, values = found.graph, found.values
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node not in found.writes or not isinstance(values[node][0], Tensor):
            continue
        for source in node.all_input_nodes:
            same = all(values[source][which] is values[node][which] for which in (0, 1))
            if same and source.op != "get_attr":
                for user in list(source.users):
                    if order[user] > order[node]:
                        user.replace_input_with(source, node)
    for node in list(graph.nodes):
        # What a parameter's dtype or shape is, is no use of the parameter: it need not be in that stage.
        if node.op == "call_function" and node.target is getattr and node.args[0].op == "get_attr":
            value = values[node][0]
            if isinstance(value, (torch.dtype, bool, int)) or type(value) is torch.Size:
                for user in list(node.users):
                    _replace_argument(user, node, value)
        elif node.op == "call_function" and isinstance(values[node][0], torch.dtype):
            for user in list(node.users):
                _replace_argument(user, node, values[node][0])
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users or node in found.writes:
            continue
        if node.op == "get_attr" or _is_pure(node, found):
            graph.erase_node(node)
    # A size is read, and a part of a tuple picked, right where the tensor or the tuple is made: then the number or the
    # part crosses a cut, and not the whole. An attribute is recorded only when used, which may be far down.
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if _is_pure(node, found) and node.all_input_nodes:
            source = max(node.all_input_nodes, key=order.__getitem__)
            if source.next is not node:
                source.append(node)
            order[node] = order[source]


def _replace_argument(user: fx.Node, node: fx.Node, value: object) -> None:
    def leaf(each: object) -> object:
        return value if each is node else each

    user.args = rebuild(user.args, leaf)  # type: ignore[assignment]
    user.kwargs = rebuild(user.kwargs, leaf)  # type: ignore[assignment]


#: What may be asked of a tensor at any time after it is made, as no later operation changes it.
_FIXED = {
    "shape",
    "size",
    "dtype",
    "device",
    "ndim",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "layout",
}
_FIXED |= {"is_cuda", "is_cpu", "is_sparse", "itemsize", "is_floating_point", "is_complex", "get_device"}


def _is_pure(node: fx.Node, found: Trace) -> bool:
    """Whether a node only picks a part or does arithmetic on plain values, so that it may run earlier or not at all."""
    if node.op not in ("call_function", "call_method") or next(iter(node.args), None) is None:
        return False
    value = found.values[node][0]
    subject = found.values[node.args[0]][0] if isinstance(node.args[0], fx.Node) else None
    if isinstance(subject, Tensor):
        name = node.args[1] if node.target is getattr else node.target
        return name in _FIXED and next(tensors_in(value), None) is None
    if node.target in (getattr, operator.getitem):
        return True
    plain = all(next(tensors_in(found.values[each][0]), None) is None for each in node.all_input_nodes)
    module = getattr(node.target, "__module__", None)
    return plain and value is not None and (node.op == "call_method" or module in ("_operator", "builtins", "math"))


def expression(node: fx.Node, found: Trace, depth: int = 6) -> str:
    """A node as the Python code that it stands for, as far as that helps a reader."""

    def text(value: object) -> str:
        if isinstance(value, fx.Node):
            return expression(value, found, depth - 1)
        if isinstance(value, tuple):
            return f"({', '.join(text(each) for each in value)}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(text(each) for each in value)}]"
        if isinstance(value, slice):
            return ":".join("" if each is None else text(each) for each in (value.start, value.stop))
        return repr(value)

    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    if depth <= 0 or node.op == "call_module":
        return str(node.target) if node.op == "call_module" else node.name
    args = node.args
    if node.op == "call_method":
        return f"{text(args[0])}.{node.target}({', '.join(text(arg) for arg in args[1:])})"
    if node.target is getattr:
        return f"{text(args[0])}.{args[1]}"
    if node.target is operator.getitem:
        return f"{text(args[0])}[{text(args[1])}]"
    name = getattr(node.target, "__name__", str(node.target))
    sign = _SIGNS.get(name)
    if sign and len(args) == 2:
        return f"{text(args[0])} {sign} {text(args[1])}"
    return f"{name}({', '.join(text(arg) for arg in args)})"


_SIGNS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "sub": "-", "mul": "*",
    "floordiv": "//", "truediv": "/", "mod": "%", "pow": "**",
}  # fmt: skip


def from_size(node: fx.Node, found: Trace) -> bool:
    """Whether a Python value comes from the size of an activation."""
    if isinstance(found.values[node][0], Tensor):
        return node.op != "get_attr"
    attribute = node.args[1] if node.op == "call_function" and node.target is getattr else None
    method = node.target if node.op == "call_method" else None
    if attribute not in (None, "shape") or method in ("dim", "ndimension", "get_device", "is_floating_point"):
        return False
    return any(from_size(each, found) for each in node.all_input_nodes)


def label(node: fx.Node, found: Trace) -> str:
    if node.op == "call_module":
        return str(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    path = found.paths.get(node, "")
    return f"{path}.{name}" if path else str(name)
