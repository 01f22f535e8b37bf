"""The best cuts for replicas that are given, stage by stage (design, section 2: strategies, `--config`).

At a threshold t a stage with r replicas that begins at boundary i may reach any boundary up to the last one
at which sum T_l and sum W_l^r still allow t, for both only grow with the stage. So whether t can be met, and
what the fewest bytes are, is a sweep over the stages from the last to the first, each step one window a
boundary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_format.errors import UserError
from pd_plan import search
from pd_plan.cluster import Cluster
from pd_plan.cost import (
    PAPER,
    Chain,
    CostModel,
    Floats,
    Ints,
    Partition,
    cut_bytes,
    cut_ms,
    minibatch_ms,
    stage_bytes,
    stage_ms,
    sync_ms,
)

__all__ = ["best_cuts", "cheapest_cuts"]


class _Places(NamedTuple):
    """All boundaries of a chain: prefix sums there, and what a cut costs there (0 at both ends)."""

    compute_ms: Floats
    weight_bytes: Floats
    cut_ms: Floats


def best_cuts(chain: Chain, replicas: tuple[int, ...], cluster: Cluster, model: CostModel = PAPER) -> Partition:
    """The cuts whose longest stage or cut is shortest; then fewer bytes, then later cuts, from the first.

    Raises:
        UserError: there are more stages than the legal cuts allow.
    """
    _check(chain, len(replicas))
    places = _places(chain, cluster, model)

    def probe(threshold: float) -> float | None:
        reach = _reach(places, replicas, cluster, model, threshold)
        plan = _plan_under(chain, replicas, reach, places.cut_ms <= threshold)
        return None if plan is None else minibatch_ms(chain, plan, cluster, model)

    total = chain.compute_ms(0, chain.layers)
    some = Partition((*chain.boundaries[1 : len(replicas)], chain.layers), replicas)
    upper = minibatch_ms(chain, some, cluster, model)
    found = search.least(total / sum(replicas) * (1 - search.EQUAL), upper, probe)
    reach = _reach(places, replicas, cluster, model, found.threshold)
    return _fewest_bytes(chain, replicas, reach, places.cut_ms <= found.threshold)


def cheapest_cuts(chain: Chain, stages: int) -> Partition:
    """So many stages of one machine with the least sum of 2 C_i; then later cuts, from the first.

    What one minibatch at a time takes is the sum of all T_l, which no cut changes, and of the cuts.

    Raises:
        UserError: there are more stages than the legal cuts allow.
    """
    _check(chain, stages)
    last = chain.most_stages
    anywhere = np.full(last + 1, last)
    return _fewest_bytes(chain, (1,) * stages, {1: anywhere}, np.ones(last + 1, dtype=np.bool_))


def _check(chain: Chain, stages: int) -> None:
    if stages > chain.most_stages:
        raise UserError(
            f"{stages} stages were asked for, but the profile's {chain.layers} layers can be cut into "
            f"at most {chain.most_stages} (1 + its {chain.most_stages - 1} places where a cut is allowed); "
            f"ask for {chain.most_stages} stages or fewer."
        )


def _places(chain: Chain, cluster: Cluster, model: CostModel) -> _Places:
    at = np.array(chain.boundaries)
    weights = np.array([float(chain.weight_bytes[place]) for place in chain.boundaries])
    sizes = [0.0, *(float(chain.activation_bytes[place - 1]) for place in chain.boundaries[1:-1]), 0.0]
    return _Places(chain.prefix_ms[at], weights, cut_ms(np.array(sizes), cluster.bytes_per_ms, model))


def _reach(
    places: _Places, replicas: tuple[int, ...], cluster: Cluster, model: CostModel, threshold: float
) -> dict[int, Ints]:
    """For each replica count, the last boundary that a stage may end at, for every boundary it may begin at."""
    compute, weights = places.compute_ms, places.weight_bytes
    start = np.arange(len(compute))
    last = len(compute) - 1
    result = {}
    for r in set(replicas):
        reach = np.searchsorted(compute, compute + r * threshold, side="right") - 1
        if r > 1:
            per_byte = sync_ms(1.0, float(r), cluster.bytes_per_ms, model)
            heaviest = np.searchsorted(weights, weights + r * threshold / per_byte, side="right") - 1
            reach = np.minimum(reach, heaviest)
        # The equation has the last word, so that no rounding of a sum can add or lose a layer.
        while True:
            further = np.minimum(reach + 1, last)
            grows = (reach < last) & (_times(places, start, further, r, cluster, model) <= threshold)
            if not grows.any():
                break
            reach = np.where(grows, further, reach)
        while True:
            shrinks = (reach > start) & (_times(places, start, reach, r, cluster, model) > threshold)
            if not shrinks.any():
                break
            reach = reach - shrinks
        result[r] = reach
    return result


def _times(places: _Places, start: Ints, end: Ints, replicas: int, cluster: Cluster, model: CostModel) -> Floats:
    """T(i->j, r) of the stages from each start to each end."""
    count = np.full(len(start), float(replicas))
    sync = sync_ms(places.weight_bytes[end] - places.weight_bytes[start], count, cluster.bytes_per_ms, model)
    return stage_ms(places.compute_ms[end] - places.compute_ms[start], sync, count)


def _plan_under(
    chain: Chain, replicas: tuple[int, ...], reach: dict[int, Ints], allowed: NDArray[np.bool_]
) -> Partition | None:
    """Some plan whose stages keep within reach and whose cuts are allowed, or None."""
    last = chain.most_stages
    following = np.zeros(last + 1, dtype=np.bool_)
    following[last] = True
    possible = [following]
    for r in reversed(replicas):
        before = np.concatenate(([0], np.cumsum(following & allowed)))
        following = before[reach[r] + 1] > before[np.arange(last + 1) + 1]
        possible.append(following)
    possible.reverse()
    if not possible[0][0]:
        return None
    ends, i = [], 0
    for s, r in enumerate(replicas):
        window = slice(i + 1, int(reach[r][i]) + 1)
        i += 1 + int(np.flatnonzero((possible[s + 1] & allowed)[window])[-1])
        ends.append(chain.boundaries[i])
    return Partition(tuple(ends), replicas)


def _fewest_bytes(
    chain: Chain, replicas: tuple[int, ...], reach: dict[int, Ints], allowed: NDArray[np.bool_]
) -> Partition:
    """Of the plans within reach, the one of fewest bytes; of those the one of later cuts, from the first.

    Bytes are counted in whole multiples of 1 / lcm(r), so that they compare exactly.
    """
    last = chain.most_stages
    scale = math.lcm(*replicas)
    most = 2 * scale * (sum(chain.activation_bytes) + chain.weight_bytes[-1]) + 1
    # numpy counts in 64 bits; past that, in Python's own integers.
    kind = np.int64 if most < 2**61 else object
    weights = np.array([chain.weight_bytes[place] for place in chain.boundaries], dtype=kind)
    sizes = [
        0,
        *(scale * cut_bytes(chain.activation_bytes[place - 1]) for place in chain.boundaries[1:-1]),
        0,
    ]
    cuts = np.array(sizes, dtype=kind)
    following = np.full(last + 1, most, dtype=kind)
    following[last] = 0
    totals = [following]
    for r in reversed(replicas):
        per_weight = int(stage_bytes(1, r) * scale)
        costs = _ending(following, cuts, allowed, weights, per_weight, most)
        least = _window_minimum(costs, reach[r], most)
        following = np.where(least < most, least - per_weight * weights, most)
        totals.append(following)
    totals.reverse()
    ends, i = [], 0
    for s, r in enumerate(replicas):
        costs = _ending(totals[s + 1], cuts, allowed, weights, int(stage_bytes(1, r) * scale), most)
        window = costs[i + 1 : int(reach[r][i]) + 1]
        i += 1 + int(np.flatnonzero(window == window.min())[-1])
        ends.append(chain.boundaries[i])
    return Partition(tuple(ends), replicas)


def _ending(following: Ints, cuts: Ints, allowed: NDArray[np.bool_], weights: Ints, per_weight: int, most: int) -> Ints:
    """Bytes of a stage that ends at each boundary, as if it began with the chain, and of all that follows."""
    return np.where(allowed & (following < most), following + cuts + per_weight * weights, most)


def _window_minimum(values: Ints, reach: Ints, most: int) -> Ints:
    """For each boundary i the least of values[i + 1 .. reach[i]], `most` where that is empty.

    A window is covered by two runs of a power of two in length; the minima of all such runs come by doubling.
    """
    size = len(values)
    start = np.arange(size) + 1
    length = reach - start + 1
    result = np.full(size, most, dtype=values.dtype)
    runs, width = values, 1
    while width <= size:
        here = (length >= width) & (length < 2 * width)
        result[here] = np.minimum(runs[start[here]], runs[reach[here] - width + 1])
        if 2 * width <= size:
            runs = np.minimum(runs[: len(runs) - width], runs[width:])
        width *= 2
    return result
