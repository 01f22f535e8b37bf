"""Profiles of the original PipeDream release as records, for tests with known answers.

A small reader of its text format: one node a line, then tab-indented edges. The graph becomes a chain in
topological order, by node number among the ready; what crosses a cut is every earlier output still needed later.
"""

from __future__ import annotations

import heapq
import re
from pathlib import Path

import pytest

from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "pipedream-profiles"


def original_profile(name: str) -> Profile:
    """Read one of the profiles, or skip the test where they are not there."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        pytest.skip("the profiles of the original release are not here")
    nodes: dict[int, tuple[str, dict[str, str]]] = {}
    following: dict[int, list[int]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            source, target = (int(node.removeprefix("node")) for node in line.strip().split(" -- "))
            following.setdefault(source, []).append(target)
        elif line.strip():
            name_of_node, op, fields = line.split(" -- ")
            figures = dict(field.split("=", 1) for field in fields.split(", "))
            nodes[int(name_of_node.removeprefix("node"))] = (op, figures)
    order = _topological(list(nodes), following)
    place = {node: index for index, node in enumerate(order)}
    last_use = {node: max((place[target] for target in following.get(node, [])), default=-1) for node in order}
    layers = []
    for index, node in enumerate(order):
        op, figures = nodes[node]
        ours = 0.0 if op.startswith("Input") else 1.0
        needed = (earlier for earlier in order[: index + 1] if last_use[earlier] > index)
        weights = round(_total(figures["parameter_size"]))
        layers.append(
            LayerProfile(
                name=f"node{node}",
                op=op,
                forward_ms=ours * float(figures["forward_compute_time"]),
                backward_ms=ours * float(figures["backward_compute_time"]),
                activation_bytes=round(sum(_total(nodes[earlier][1]["activation_size"]) for earlier in needed)),
                parameter_bytes=weights,
                trainable_bytes=weights,
            )
        )
    return Profile(
        model=ModelSpec(name=name, factory=f"torchvision.models:{name}", fingerprint="0"),
        minibatch_size=128,
        inputs=(InputSpec(name="x", shape=(128, 3, 224, 224), dtype="float32"),),
        device=Device(kind="cuda", name="V100"),
        minibatches=1000,
        layers=tuple(layers),
    )


def _total(figure: str) -> float:
    return sum(float(part) for part in re.findall(r"[\d.]+", figure))


def _topological(nodes: list[int], following: dict[int, list[int]]) -> list[int]:
    waiting = dict.fromkeys(nodes, 0)
    for targets in following.values():
        for target in targets:
            waiting[target] += 1
    ready = [node for node in nodes if not waiting[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in following.get(node, []):
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    return order
