"""The best partition into replicated stages, exactly (the paper, section 3.2; design, section 2).

The paper's recurrence over (layer, machines) costs O(N^2 M^2). This one asks instead: which machines does it
take to stay at or under t milliseconds a minibatch? At a threshold t the fewest machines that cover the
layers from a boundary i to the end are

    f(i) = min over boundaries j > i, the cut at j at or under t, of  need(i, j, t) + f(j),        f(N) = 0

where need is the fewest replicas that bring stage [i, j) to t, a closed form. It costs O(N^2) whatever M is.
The least t with f(0) <= M is the answer; `search` finds it. A plan of the fewest machines gives every stage
its need and no more, so among the plans equal to the best one the tie rule is a recurrence over the
boundaries too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_plan import search
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Floats, Ints, Partition, cut_ms, minibatch_ms, stage_ms, sync_ms
from pd_plan.ties import Edges, fewest_bytes

__all__ = ["SLACK", "best_partition", "fewest_replicas"]


SLACK = 1e-11
"""What a probe adds to its threshold, so that rounding never hides a plan that is exactly at it."""


class _Boundaries(NamedTuple):
    """The boundaries of a chain whose cuts are at or under a threshold, and the prefix sums there."""

    at: Ints
    compute_ms: Floats
    weight_bytes: Floats


def best_partition(
    chain: Chain, cluster: Cluster, model: CostModel = PAPER, near: Sequence[Partition] = ()
) -> Partition:
    """The partition of the least A(N, m) over m <= M.

    Among values within 1e-9 of each other: fewer machines, then fewer stages, then fewer bytes a minibatch,
    then later cuts, compared from the first. (More replicas in the earlier stage comes last and never
    decides: with the fewest machines the cuts fix the replicas.)

    Args:
        chain: of the model.
        cluster: of the machines.
        model: of the costs.
        near: plans on at most M machines that may be among the best, as those of a similar chain. They change
            nothing but how long it takes.
    """
    total = chain.compute_ms(0, chain.layers)
    one_stage = [Partition((chain.layers,), (replicas,)) for replicas in {1, cluster.machines}]
    upper = min(minibatch_ms(chain, plan, cluster, model) for plan in [*one_stage, *near])

    def probe(threshold: float) -> float | None:
        plan = _plan_under(chain, cluster, model, threshold)
        return None if plan is None else minibatch_ms(chain, plan, cluster, model)

    # M machines that do nothing but compute need at least total / M, and rounding may make it a little less.
    found = search.least(total / cluster.machines * (1 - search.EQUAL), upper, probe, near=bool(near))
    return _best_of_equals(chain, cluster, model, found.threshold)


def _boundaries(chain: Chain, cluster: Cluster, model: CostModel, threshold: float) -> _Boundaries:
    inner = np.array(chain.boundaries[1:-1], dtype=np.int64)
    sizes = np.array(chain.activation_bytes, dtype=np.float64)[inner - 1]
    inner = inner[cut_ms(sizes, cluster.bytes_per_ms, model) <= threshold]
    at = np.concatenate(([0], inner, [chain.layers]))
    return _Boundaries(at, chain.prefix_ms[at], np.array(chain.weight_bytes, dtype=np.float64)[at])


def _plan_under(chain: Chain, cluster: Cluster, model: CostModel, threshold: float) -> Partition | None:
    """Some plan on at most M machines at or under the threshold (give or take `SLACK`), or None."""
    limit = threshold * (1 + SLACK)
    at, compute, weights = _boundaries(chain, cluster, model, limit)
    with np.errstate(over="ignore"):
        # In units of the threshold, and as if m were infinite: x and y of `_need` are differences of these.
        computes = compute / limit
        syncs = model.sync * weights / cluster.bytes_per_ms / limit
    alone = np.searchsorted(computes, computes + 1, side="right")
    last = len(at) - 1
    fewest = np.zeros(last + 1)
    chosen = np.zeros(last, dtype=np.int64)
    for i in range(last - 1, -1, -1):
        # f falls towards the end, so of all stages that need no second machine the longest is best.
        nearest = max(int(alone[i]) - 1, i + 1)
        need = _need(computes[nearest:] - computes[i], syncs[nearest:] - syncs[i])
        need += fewest[nearest:]
        best = int(need.argmin())
        fewest[i] = need[best]
        chosen[i] = nearest + best
        # f only grows towards the front: the whole takes no fewer machines than this suffix.
        if fewest[i] > cluster.machines:
            return None
    ends, replicas, i = [], [], 0
    while i < last:
        j = int(chosen[i])
        ends.append(int(at[j]))
        replicas.append(int(fewest[i] - fewest[j]))
        i = j
    return Partition(tuple(ends), tuple(replicas))


def _need(compute: Floats, sync: Floats) -> Floats:
    """The fewest replicas m with T(i->j, m) <= t, as whole floats.

    Args:
        compute: x = sum T_l / t.
        sync: y = 4 w / (B t).

    m = 1 will do where x <= 1, since one machine synchronises nothing. Otherwise x / m <= 1, so m >= x, and
    y (m-1) / m^2 <= 1, that is m^2 - y m + y >= 0. For y <= 4 it always holds, (m-1) / m^2 being largest, 1/4,
    at m = 2; for y > 4 it holds from the larger root, m = (y + sqrt(y^2 - 4 y)) / 2, on (the smaller one lies
    between 1 and 2). At y = 4 the root is 2, which x > 1 asks for anyway.
    """
    y = np.maximum(sync, 4.0)
    root = y * (0.5 + 0.5 * np.sqrt(1.0 - 4.0 / y))
    need = np.ceil(np.maximum(compute, root, out=root), out=root)
    need[compute <= 1] = 1
    return need


def fewest_replicas(compute: Floats, weights: Floats, cluster: Cluster, model: CostModel, threshold: float) -> Ints:
    """The fewest replicas, at most M + 1, that the cost equation itself puts at or under the threshold.

    The closed form gives the candidate; the equation, asked at the candidate and its neighbours, has the last
    word, so that no rounding of a root can add or lose a machine.
    """
    most = cluster.machines + 1
    rate = cluster.bytes_per_ms

    def fits(replicas: Floats) -> NDArray[np.bool_]:
        return stage_ms(compute, sync_ms(weights, replicas, rate, model), replicas) <= threshold

    # A threshold of zero, or next to it, divides to what is no number; then the equation alone decides, from one on.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        candidate = _need(compute / threshold, model.sync * weights / rate / threshold)
    need = np.nan_to_num(np.minimum(candidate, most), nan=1.0)
    while True:
        up = ~fits(need) & (need < most)
        if not up.any():
            break
        need += up
    while True:
        down = (need > 1) & fits(np.maximum(need - 1, 1.0))
        if not down.any():
            break
        need -= down
    return need.astype(np.int64)


def _best_of_equals(chain: Chain, cluster: Cluster, model: CostModel, threshold: float) -> Partition:
    """Of all plans at or under the threshold, the one that the tie rule prefers; there is at least one."""
    if threshold == 0:
        return Partition((chain.layers,), (1,))
    at, compute, weights = _boundaries(chain, cluster, model, threshold)
    last = len(at) - 1
    # One key orders by machines, then by stages, of which there are at most `last`.
    machine = last + 1
    key = np.zeros(last + 1, dtype=np.int64)
    edges = Edges(last)
    for i in range(last - 1, -1, -1):
        need = fewest_replicas(compute[i + 1 :] - compute[i], weights[i + 1 :] - weights[i], cluster, model, threshold)
        keys = need * machine + 1 + key[i + 1 :]
        key[i] = keys.min()
        tied = np.flatnonzero(keys == key[i])
        edges.add(i, tied + i + 1, need[tied])
    return fewest_bytes(chain, [int(boundary) for boundary in at], edges)
