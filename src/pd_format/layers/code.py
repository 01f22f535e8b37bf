"""Writes a run of traced nodes as one Python function, so that running them costs little more than the operations.

def run(v_x, v_skip):                 # the values that cross in, in order
    v_x = own(v_x)                    # a copy, only where the code below changes it in place
    v_conv1 = m0(v_x)
    del v_x                           # dropped after its last use, as the model's own code would
    v_add = f1(v_conv1, v_skip)
    return (v_add, v_conv1)           # the values that cross out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from pd_format.layers.graph import Trace
from pd_format.layers.values import map_tensors, tensors_in

__all__ = ["Recipe", "bind", "write"]


@dataclass(frozen=True)
class Recipe:
    """A function's source, and what its free names stand for; modules by path, so that it holds on to none."""

    source: str
    title: str
    objects: Mapping[str, object]
    modules: Mapping[str, str]


def bind(recipe: Recipe, root: nn.Module) -> Callable[..., Any]:
    """Make the function, with the modules found under `root`."""
    names = dict(recipe.objects)
    names.update({name: root.get_submodule(path) for name, path in recipe.modules.items()})
    exec(compile(recipe.source, f"<{recipe.title}>", "exec"), names)
    function: Callable[..., Any] = names["run"]  # type: ignore[assignment]
    return function


def write(
    traced: Trace,
    nodes: Sequence[fx.Node],
    received: Sequence[fx.Node],
    results: Sequence[fx.Node] | None,
    title: str,
    layer_of: Mapping[fx.Node, int] | None = None,
    layers: int = 0,
    own: Sequence[fx.Node] = (),
) -> Recipe:
    """Write the code of some nodes.

    Args:
        nodes: what runs, in order; neither placeholders nor attributes.
        received: the values that come in, in the order of the arguments.
        results: the values that go out, or None for the model's own output.
        title: what a traceback shows instead of a file name.
        layer_of, layers: given, the function is a generator that yields (layer, values made) after each layer.
        own: the received values to copy first.
    """
    return _Writer(traced).write(nodes, received, results, title, layer_of, layers, own)


@dataclass
class _Writer:
    traced: Trace
    objects: dict[str, object] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    known: dict[int, str] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)

    def write(
        self,
        nodes: Sequence[fx.Node],
        received: Sequence[fx.Node],
        results: Sequence[fx.Node] | None,
        title: str,
        layer_of: Mapping[fx.Node, int] | None,
        layers: int,
        own: Sequence[fx.Node],
    ) -> Recipe:
        output = next(node for node in reversed(self.traced.graph.nodes) if node.op == "output")
        ends = list(output.all_input_nodes) if results is None else list(results)
        last: dict[fx.Node, fx.Node | None] = {}
        for node in (*received, *nodes):
            last.setdefault(node, None)
            for source in node.all_input_nodes if node not in received else ():
                last[source] = node
        for node in ends:
            last[node] = output
        lines = [f"def run({', '.join(_name(node) for node in received)}):"]
        here = {*received, *nodes}
        for node in received:
            if type(self.traced.values[node][0]) is torch.Size:
                # A size travels as a tuple; its methods must be there again.
                lines.append(f"    {_name(node)} = {self.bound(torch.Size)}({_name(node)})")
            if node in own:
                lines.append(f"    {_name(node)} = {self.bound(copy_tensors)}({_name(node)})")
        devices = {
            source
            for node in nodes
            for source in node.all_input_nodes
            if source not in here and isinstance(self.traced.values[source][0], torch.device)
        }
        for node in devices:
            arguments = ", ".join(_name(each) for each in received)
            lines.append(f"    {_name(node)} = {self.bound(device_of)}({arguments})")
        loaded: set[fx.Node] = set()
        pending: list[fx.Node] = []  # made in the current layer and no longer needed
        made: list[fx.Node] = []
        layer = 0

        def load(user: fx.Node) -> None:
            for source in user.all_input_nodes:
                if source.op == "get_attr" and source not in loaded:
                    loaded.add(source)
                    lines.append(f"    {_name(source)} = {self.attribute(str(source.target))}")

        def drop(dead: Sequence[fx.Node]) -> None:
            if dead:
                lines.append(f"    del {', '.join(_name(each) for each in dead)}")

        def close() -> None:
            nonlocal layer
            lines.append(f"    yield {layer}, [{', '.join(_name(each) for each in made)}]")
            drop(pending)
            made.clear()
            pending.clear()
            layer += 1

        unused = [node for node in received if last[node] is None]
        drop(unused if layer_of is None else [])
        for node in nodes:
            while layer_of is not None and layer < layer_of[node]:
                close()
            load(node)
            line = f"{_name(node)} = {self.call(node)}"
            if node in self.traced.quiet:
                lines += [f"    with {self.bound(torch.no_grad)}():", f"        {line}"]
            else:
                lines.append(f"    {line}")
            made.append(node)
            dead = [each for each in dict.fromkeys(node.all_input_nodes) if last.get(each) is node and each in last]
            dead = [each for each in dead if each.op != "get_attr" and each not in devices]
            if last[node] is None:
                dead.append(node)
            if layer_of is None:
                drop(dead)
            else:
                pending += [each for each in dead if each in made]
                drop([each for each in dead if each not in made])
        while layer_of is not None and layer < layers:
            close()
        if results is None:
            load(output)
            value = self.text(output.args[0])
            lines.append(f"    return {value if layer_of is not None else f'({value},)'}")
        else:
            lines.append(f"    return ({''.join(_name(node) + ', ' for node in results)})")
        return Recipe("\n".join(lines) + "\n", title, self.objects, self.modules)

    def call(self, node: fx.Node) -> str:
        target = node.target
        args = list(node.args)
        if node.op == "call_module":
            head = self.module(str(target))
        elif node.op == "call_method":
            head = f"{self.text(args.pop(0))}.{target}"
        else:
            head = self.bound(target)
        parts = [self.text(arg) for arg in args]
        if all(key.isidentifier() for key in node.kwargs):
            parts += [f"{key}={self.text(arg)}" for key, arg in node.kwargs.items()]
        else:
            parts.append(f"**{self.text(dict(node.kwargs))}")
        return f"{head}({', '.join(parts)})"

    def attribute(self, target: str) -> str:
        if target in self.traced.constants:
            return self.bound(self.traced.constants[target])
        path, _, name = target.rpartition(".")
        owner = self.module(path)
        return f"{owner}.{name}" if name.isidentifier() else f"{self.bound(getattr)}({owner}, {name!r})"

    def module(self, path: str) -> str:
        if path not in self.paths:
            self.paths[path] = f"m{len(self.modules)}"
            self.modules[self.paths[path]] = path
        return self.paths[path]

    def bound(self, value: object) -> str:
        """A free name that stands for an object."""
        if id(value) not in self.known:
            kind = "f" if callable(value) else "c"
            self.known[id(value)] = f"{kind}{len(self.objects)}"
            self.objects[self.known[id(value)]] = value
            self.kept.append(value)
        return self.known[id(value)]

    def text(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return _name(value)
        if type(value) is torch.Size or value is Ellipsis:
            return self.bound(value)
        if isinstance(value, tuple):
            parts = [self.text(each) for each in value]
            if hasattr(value, "_fields"):
                return f"{self.bound(type(value))}({', '.join(parts)})"
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(self.text(each) for each in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.text(key)}: {self.text(each)}' for key, each in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self.bound(value)


def copy_tensors(value: object) -> object:
    """A received value that the stage changes in place: a copy of its own, through which the gradient flows."""
    return map_tensors(Tensor.clone, value)


def device_of(*values: object) -> torch.device:
    """The device that the stage runs on, which need not travel: that of the first tensor it received."""
    return next((tensor.device for tensor in tensors_in(values)), torch.device("cpu"))


def _name(node: fx.Node) -> str:
    return f"v_{node.name}"
