r"""Reads the text profiles of the original PipeDream release (Harlap et al., `profiler/*/profiles/*/graph.txt`).

One node a line, then the edges, each after a tab; times in ms, sizes in bytes, an activation of several tensors as a
bracketed list:

    node4 -- Linear(3, 2) -- forward_compute_time=1.5, backward_compute_time=3, activation_size=8, parameter_size=32
    node5 -- Cell -- forward_compute_time=3, backward_compute_time=5, activation_size=[6.0; 1.0], parameter_size=0
    \tnode4 -- node5

The graph becomes a chain in topological order, by node number among the ready. What crosses a cut are the outputs of
all earlier nodes that a later one still needs. Input nodes cost nothing: their time was that of the data loader.
The format says nothing of the minibatch's size, of how to build the model, nor of what autograd saves; the last is
taken to be each node's output, which an in-place operation shares with the node before it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_format.errors import FormatError
from pd_format.jsonfile import read_text
from pd_format.profile import ORIGINAL_FACTORY, Device, InputSpec, LayerProfile, ModelSpec, Profile, read_profile

__all__ = ["is_original", "parse_graph", "read_any_profile"]

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_TIMES = _FIELDS[:2]
_MOST = 1e15
_FIGURE = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MOST_DIGITS = 100
_NAMED = 5
_EXAMPLE = (
    "'node4 -- Conv2d(3, 64) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=8.0, "
    "parameter_size=7168.0'"
)


class _Node(NamedTuple):
    number: int
    line: int
    op: str
    figures: dict[str, float]

    @property
    def is_input(self) -> bool:
        return self.op.startswith("Input")

    @property
    def is_in_place(self) -> bool:
        return re.search(r"\binplace\b(?!=False)", self.op) is not None


class _Edge(NamedTuple):
    source: int
    target: int
    line: int


def read_any_profile(path: Path) -> Profile:
    """Read a profile of pd-profile, or a text profile of the original release: whatever the file holds.

    Raises:
        FormatError: the file cannot be read, or does not follow the format that it begins with.
    """
    if path.suffix == ".json":
        return read_profile(path)
    text = read_text(path, "a profile", encoding="utf-8-sig")
    if text.lstrip()[:1] in ("{", "["):
        return read_profile(path)
    name = path.parent.name if path.stem == "graph" and path.parent.name else path.stem
    try:
        return parse_graph(text, name or "model")
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def is_original(profile: Profile) -> bool:
    """Whether a profile comes from a text file, which pd-train could not build the model of."""
    return profile.model.factory == ORIGINAL_FACTORY


def parse_graph(text: str, name: str) -> Profile:
    """Make a profile of the text of a graph.

    Args:
        text: of the whole file.
        name: of the model.

    Raises:
        FormatError: the text does not follow the format; its message begins with the line.
    """
    nodes, edges = _nodes_and_edges(text)
    order = _topological(nodes, edges)
    place = {number: index for index, number in enumerate(order)}
    last_use = dict.fromkeys(order, -1)
    for edge in edges:
        last_use[edge.source] = max(last_use[edge.source], place[edge.target])
    outputs = {number: _whole(nodes[number].figures["activation_size"]) for number in order}
    # An output leaves the sum of what is still needed right after the last node that needs it.
    leaves = [0] * (len(order) + 1)
    needed, layers = 0, []
    for index, number in enumerate(order):
        node = nodes[number]
        needed -= leaves[index]
        if last_use[number] > index:
            needed += outputs[number]
            leaves[last_use[number]] += outputs[number]
        costs = 0.0 if node.is_input else 1.0
        weights = _whole(node.figures["parameter_size"])
        layers.append(
            LayerProfile(
                name=f"node{number}",
                op=node.op,
                forward_ms=costs * node.figures["forward_compute_time"],
                backward_ms=costs * node.figures["backward_compute_time"],
                activation_bytes=needed,
                parameter_bytes=weights,
                trainable_bytes=weights,
                stash_bytes=0 if node.is_input or node.is_in_place else outputs[number],
            )
        )
    inputs = [
        InputSpec(name=f"node{number}", shape=(outputs[number],), dtype="uint8")
        for number in order
        if nodes[number].is_input
    ]
    return Profile(
        model=ModelSpec(name=name, factory=ORIGINAL_FACTORY, fingerprint="none"),
        minibatch_size=1,
        inputs=tuple(inputs) or (InputSpec(name="none", shape=(0,), dtype="uint8"),),
        data="unknown",
        device=Device(kind="unknown", name="original text profile"),
        minibatches=0,
        layers=tuple(layers),
    )


def _nodes_and_edges(text: str) -> tuple[dict[int, _Node], list[_Edge]]:
    nodes: dict[int, _Node] = {}
    edges: list[_Edge] = []
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        if content[0].isspace():
            edges.append(_edge(content.strip(), line))
            continue
        node = _node(content.strip(), line)
        if node.number in nodes:
            raise FormatError(
                f"line {line}: node{node.number} is also on line {nodes[node.number].line}; a node stands once."
            )
        nodes[node.number] = node
    if not nodes:
        raise FormatError(f"holds no node; expected lines such as {_EXAMPLE}.")
    touched = set()
    for edge in edges:
        for number in (edge.source, edge.target):
            if number not in nodes:
                raise FormatError(f"line {edge.line}: there is no line for node{number}; the file may not be whole.")
            touched.add(number)
    for node in nodes.values():
        if len(nodes) > 1 and node.number not in touched:
            raise FormatError(
                f"line {node.line}: no edge begins or ends at node{node.number}; the file may not be whole."
            )
    return nodes, edges


def _node(content: str, line: int) -> _Node:
    parts = content.split(" -- ")
    if len(parts) > 3 and parts[-1].startswith("stage_id="):
        raise FormatError(
            f"line {line}: has a {parts[-1].strip()!r}, so this is a plan of the original optimizer; expected the "
            "profile that it was made from."
        )
    if len(parts) < 3:
        raise FormatError(f"line {line}: found {_short(content)}; expected a node such as {_EXAMPLE}.")
    number = _number(parts[0], line)
    figures: dict[str, float] = {}
    for item in _items(parts[-1]):
        field, equals, value = (part.strip() for part in item.partition("="))
        if field not in _FIELDS or not equals:
            raise FormatError(
                f"line {line}: node{number} has the unknown field {_short(item.strip())}; expected "
                f"{', '.join(_FIELDS)}."
            )
        if field in figures:
            raise FormatError(f"line {line}: {field} of node{number} stands twice; keep one of them.")
        figures[field] = _figure(value, field, number, line)
    for field in _FIELDS:
        if field not in figures:
            raise FormatError(f"line {line}: node{number} has no {field}; the line may not be whole.")
    return _Node(number, line, " -- ".join(parts[1:-1]).strip() or "?", figures)


def _items(text: str) -> Iterator[str]:
    """What stands between the commas, but for those in brackets; in time that grows no faster than the text."""
    begun: list[str] = []
    for part in text.split(","):
        begun.append(part)
        if (len(begun) == 1 and "[" not in part) or "]" in part:
            yield ",".join(begun)
            begun = []
    yield from begun  # A bracket that never closes.


def _edge(content: str, line: int) -> _Edge:
    ends = content.split(" -- ")
    if len(ends) != 2:
        raise FormatError(f"line {line}: found {_short(content)}; expected an edge such as 'node1 -- node2'.")
    return _Edge(_number(ends[0], line), _number(ends[1], line), line)


def _number(text: str, line: int) -> int:
    match = re.fullmatch(r"node(\d{1,9})", text.strip(), re.ASCII)
    if match is None:
        raise FormatError(f"line {line}: found {_short(text.strip())}; expected a node's name such as node4.")
    return int(match[1])


def _figure(value: str, field: str, number: int, line: int) -> float:
    """A figure, or the sum of a bracketed list of them where the field may have one."""
    place = f"line {line}: {field} of node{number}"
    parts = [value]
    if value.startswith("["):
        if field != "activation_size":
            raise FormatError(f"{place} is a list, {_short(value)}; expected one number.")
        if not value.endswith("]"):
            raise FormatError(f"{place} is {_short(value)}; expected ']' at the end of the list.")
        parts = re.split("[;,]", value[1:-1]) if value[1:-1].strip() else []
    total = 0.0
    for part in map(str.strip, parts):
        if len(part) > _MOST_DIGITS or not _FIGURE.fullmatch(part):
            raise FormatError(f"{place} is {_short(value)}; expected a number of {_unit(field)}.")
        figure = float(part)
        if not 0 <= figure <= _MOST:
            raise FormatError(f"{place} is {part}; expected 0 to {_MOST:g} {_unit(field)}.")
        total += figure
    return total


def _topological(nodes: dict[int, _Node], edges: Sequence[_Edge]) -> list[int]:
    """The nodes in an order that has every edge forward, by number among the ready."""
    following: dict[int, list[int]] = {number: [] for number in nodes}
    waiting = dict.fromkeys(nodes, 0)
    for edge in edges:
        following[edge.source].append(edge.target)
        waiting[edge.target] += 1
    ready = [number for number in nodes if not waiting[number]]
    heapq.heapify(ready)
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for target in following[number]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    if len(order) < len(nodes):
        cycle = _cycle({number: following[number] for number in nodes if waiting[number]})
        first = next(e for e in edges if (e.source, e.target) == (cycle[0], cycle[1 % len(cycle)]))
        shown = [f"node{number}" for number in cycle[:_NAMED]] + (["..."] if len(cycle) > _NAMED else [])
        raise FormatError(
            f"line {first.line}: the edges go round in a circle, {' -> '.join([*shown, f'node{cycle[0]}'])}; a "
            "profile is a graph without one."
        )
    return order


def _cycle(following: dict[int, list[int]]) -> list[int]:
    """One cycle among nodes of which each lies on one or behind one; it begins with its smallest number."""
    before = {target: number for number in sorted(following, reverse=True) for target in following[number]}
    # Each of the nodes waits for another of them: going back must come round.
    number, seen = min(before), dict[int, int]()
    while number not in seen:
        seen[number] = len(seen)
        number = before[number]
    cycle = list(seen)[seen[number] :][::-1]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


def _whole(size: float) -> int:
    return math.floor(size + 0.5)


def _unit(field: str) -> str:
    return "milliseconds" if field in _TIMES else "bytes"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
