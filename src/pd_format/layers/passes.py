"""Lays a model's two traces, training and evaluation, over one row of layers (design, section 1).

The layers are the tensor-making operations of the training pass, in the order in which they run. Each operation of the
evaluation pass belongs to the layer that it is aligned with, so that one cut divides both.
"""

from __future__ import annotations

import difflib
from collections import defaultdict

import torch
from torch import Tensor, fx

from pd_format.layers.describe import layer_name
from pd_format.layers.graph import Trace
from pd_format.layers.values import tensors_in

__all__ = ["Pass", "lay_out"]


class Pass:
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
        """The nodes whose values are made at or before a layer and used after it."""
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

    def head_of(self, layer: int) -> fx.Node:
        """The operation that a layer is named after."""
        found: fx.Node = next(n for n in self.nodes if self.layer[n] == layer and self.makes_layer(n))
        return found


def lay_out(training: Pass, evaluating: Pass) -> list[str]:
    """Give each node of both passes its layer; return the layers' names, of which there may be none."""
    names: list[str] = []
    taken: dict[str, int] = defaultdict(int)
    for node in training.nodes:
        if training.makes_layer(node):
            base = layer_name(node, training.traced)
            taken[base] += 1
            names.append(base if taken[base] == 1 else f"{base}:{taken[base]}")
        # Shape arithmetic runs where it stands, so that a number crosses a cut and not the tensor that it is of.
        training.layer[node] = max(len(names) - 1, 0)
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


def _target_key(node: fx.Node) -> object:
    target = node.target
    return target if isinstance(target, str) else getattr(target, "__qualname__", target)
