"""The last words of the tie rule: fewest bytes a minibatch, then later cuts (design, section 2).

What is left to choose from is a graph: boundaries of the chain, and stages as edges from one boundary to a
later one, each with its replicas. Bytes are whole multiples of 1/r, so they are compared as integers, scaled
by the least common multiple of all r; floats only discard what is clearly worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pd_plan.cost import Chain, Partition, cut_bytes, stage_bytes

__all__ = ["Edges", "fewest_bytes"]

_CLEARLY_WORSE = 1e-10
"""Relative; far above the rounding of a float sum of some thousand terms."""


class Edges:
    """Stages that may still be chosen: from each boundary i to boundaries j, with r replicas each."""

    def __init__(self, last: int) -> None:
        empty = np.empty(0, dtype=np.int64)
        self.to: list[NDArray[np.int64]] = [empty] * last
        self.replicas: list[NDArray[np.int64]] = [empty] * last

    def add(self, i: int, to: NDArray[np.int64], replicas: NDArray[np.int64]) -> None:
        """Let stages begin at boundary i; `to` ascends."""
        self.to[i] = to
        self.replicas[i] = replicas


def fewest_bytes(chain: Chain, at: Sequence[int], edges: Edges) -> Partition:
    """The path from the first boundary to the last of fewest bytes; of those the later cuts, from the first.

    Args:
        at: the boundaries' places in the chain, ascending.
        edges: every path along them is allowed; there is at least one.
    """
    last = len(at) - 1
    _keep_the_cheapest(chain, at, edges)
    reached = np.zeros(last + 1, dtype=np.bool_)
    reached[0] = True
    for i in range(last):
        if reached[i]:
            reached[edges.to[i]] = True
    scale = math.lcm(*{int(r) for i in range(last) if reached[i] for r in np.unique(edges.replicas[i])})
    per_weight: dict[int, int] = {}
    total = [0] * (last + 1)
    chosen = [(0, 0)] * last
    for i in range(last - 1, -1, -1):
        if not reached[i]:
            continue
        fewest = None
        for j, r in zip(edges.to[i].tolist(), edges.replicas[i].tolist(), strict=True):
            if r not in per_weight:
                per_weight[r] = int(stage_bytes(1, r) * scale)
            cost = total[j] + per_weight[r] * chain.weights(at[i], at[j])
            if j < last:
                cost += cut_bytes(chain.activation_bytes[at[j] - 1]) * scale
            # Equal bytes: the later cut, and j ascends.
            if fewest is None or cost <= fewest:
                fewest = cost
                chosen[i] = (j, r)
        assert fewest is not None
        total[i] = fewest
    ends, replicas, i = [], [], 0
    while i < last:
        i, r = chosen[i]
        ends.append(at[i])
        replicas.append(r)
    return Partition(tuple(ends), tuple(replicas))


def _keep_the_cheapest(chain: Chain, at: Sequence[int], edges: Edges) -> None:
    """Drop the edges that no path of fewest bytes takes, as far as floats can tell."""
    last = len(at) - 1
    weights = np.array([float(chain.weight_bytes[place]) for place in at])
    cuts = np.array([0.0, *(float(cut_bytes(chain.activation_bytes[place - 1])) for place in at[1:-1]), 0.0])
    total = np.zeros(last + 1)
    for i in range(last - 1, -1, -1):
        to, replicas = edges.to[i], edges.replicas[i]
        costs = total[to] + cuts[to] + 2 * (replicas - 1) / replicas * (weights[to] - weights[i])
        total[i] = costs.min()
        keep = costs <= total[i] * (1 + _CLEARLY_WORSE) + _CLEARLY_WORSE * weights[-1]
        edges.add(i, to[keep], replicas[keep])
