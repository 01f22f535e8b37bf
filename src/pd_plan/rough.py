"""A good partition within a memory limit where the exact search would take too long (design, section 2).

The recurrence of `partition` with one label a boundary: of the plans for the layers from a boundary on, only the one
of fewest machines is kept, and of those the one that leaves most memory for what arrives. Fewer machines behind mean
less in flight, so that is the label that fits best most of the time; but a plan may be missed.
"""

from __future__ import annotations

import math

import numpy as np

from pd_format.memory import held_bytes
from pd_format.schedule import paper_depths
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Partition, cut_ms, minibatch_ms
from pd_plan.limits import Candidate, Limit, limited_minibatch_ms
from pd_plan.partition import best_partition, fewest_replicas

__all__ = ["rough_partition", "some_rough_partition"]


_DEPTHS = (2, 3, 5, 9, 17)
"""A stage takes its need in replicas, or more, so that its depth is one of these."""
_PROBES = 12
"""Thresholds tried between the plan without a limit and the slowest within it."""


def rough_partition(chain: Chain, limit: Limit, cluster: Cluster, model: CostModel = PAPER) -> Candidate | None:
    """A plan within the limit, and which of its stages recompute; None where none was found."""

    def value(plan: Candidate) -> float:
        return limited_minibatch_ms(chain, limit.sizes, *plan, cluster, model)

    best = some_rough_partition(chain, limit, cluster, model)
    if best is None:
        return None
    lower = minibatch_ms(chain, best_partition(chain, cluster, model), cluster, model)
    for _ in range(_PROBES):
        middle = math.sqrt(lower * value(best))
        if middle >= value(best):
            break
        found = _plan_under(chain, limit, cluster, model, middle)
        if found is None:
            lower = middle
        elif value(found) < value(best):
            best = found
    return best


def some_rough_partition(chain: Chain, limit: Limit, cluster: Cluster, model: CostModel = PAPER) -> Candidate | None:
    """Any plan within the limit that this way finds, however slow, or None."""
    return _plan_under(chain, limit, cluster, model, np.inf)


def _plan_under(chain: Chain, limit: Limit, cluster: Cluster, model: CostModel, threshold: float) -> Candidate | None:
    sizes, rate, most = limit.sizes, cluster.bytes_per_ms, cluster.machines
    at = np.array(chain.boundaries)
    last = len(at) - 1
    weights = np.array([float(chain.weight_bytes[place]) for place in at])
    crossing = np.array([float(sizes.crossing[place]) for place in at])
    sums = [np.array([float(prefix[place]) for place in at]) for prefix in (sizes.parameters, sizes.stash)]
    cuts = np.zeros(last + 1)
    cuts[1:-1] = [cut_ms(float(chain.activation_bytes[place - 1]), rate, model) for place in chain.boundaries[1:-1]]
    times = [chain.prefix_ms[at]]
    if limit.recompute:
        times.append(times[0] + sizes.forward_ms[at])
    machines = np.full(last + 1, np.inf)
    room = np.full(last + 1, -1.0)
    machines[last], room[last] = 0, np.inf
    chosen = [(last, 1, False)] * last
    shares = np.array([np.inf, *(depth - 1 for depth in _DEPTHS)])[:, None]
    for i in range(last - 1, -1, -1):
        js = i + 1 + np.flatnonzero((cuts[i + 1 :] <= threshold) & np.isfinite(machines[i + 1 :]))
        label = (np.inf, 0.0)
        for again, prefix in enumerate(times):
            if not js.size:
                break
            need = np.ones(len(js))
            if np.isfinite(threshold):
                compute = prefix[js] - prefix[i]
                need = fewest_replicas(compute, weights[js] - weights[i], cluster, model, threshold).astype(float)
            # A row for each depth, the need alone first.
            r = np.maximum(need, np.ceil(machines[js] / shares))
            total = r + machines[js]
            w = np.ceil(total / r)
            alone = (js == last) & (i == 0)
            lag = np.where((r > 1) & ~alone, 1.0, 0.0)
            held = held_bytes(
                parameters=sums[0][js] - sums[0][i],
                trainable=weights[js] - weights[i],
                stash=sums[1][js] - sums[1][i],
                input_bytes=crossing[i],
                output_bytes=crossing[js],
                replicas=r,
                in_flight=w,
                lag=lag,
                sets=w + lag,
                states=sizes.states,
                compressed=sizes.compressed,
                recompute=bool(again),
            )
            left = limit.memory_bytes - held
            own = (left // crossing[i] - 1) * r if i and crossing[i] else np.full(r.shape, np.inf)
            fits = (left >= 0) & (total <= most) & (w * r <= room[js]) & (own >= 1)
            if not fits.any():
                continue
            totals = np.where(fits, total, np.inf)
            fewest = float(totals.min())
            row, best = np.unravel_index(int(np.where(totals == fewest, own, -1.0).argmax()), r.shape)
            if (fewest, -float(own[row, best])) < label:
                label = (fewest, -float(own[row, best]))
                machines[i], room[i] = fewest, own[row, best]
                chosen[i] = (int(js[best]), int(r[row, best]), bool(again))
    if not np.isfinite(machines[0]):
        return None
    ends, replicas, flags, i = [], [], [], 0
    while i < last:
        j, count, flag = chosen[i]
        ends.append(int(at[j]))
        replicas.append(count)
        flags.append(flag)
        i = j
    found = Partition(tuple(ends), tuple(replicas))
    # Only a plan that the formula itself lets through is one.
    return (found, tuple(flags)) if limit.fits(found, paper_depths(replicas), flags) else None
