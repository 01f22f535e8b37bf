"""What a plan would be with fewer machines, and with figures that are somewhat off: the paper never asked.

A profile is measured for some minutes on one machine, and a network is rarely as fast as its name. So: how often
would another plan have been best if every figure were off by up to a part of itself, and what is lost by the plan
that was made from the figures as they are?
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Partition, cut_ms, minibatch_ms, partition_bytes
from pd_plan.limited import Limited, best_limited
from pd_plan.limits import Limit, limited_minibatch_ms
from pd_plan.partition import best_partition
from pd_plan.search import EQUAL

__all__ = ["ENOUGH", "Spread", "Sweep", "SweepRow", "shaken_bandwidth", "shaken_profile", "sweep"]

ENOUGH = 0.05
"""A number of machines is enough where its plan is within this of the best, relatively."""
_ROWS = 32
"""A longer table leaves numbers out."""
_DRAWS = 200
_FEWEST_DRAWS = 50
_QUICK = 150
"""Places to cut, at the pace of the plan, up to which all draws are made; beyond them fewer, to stay interactive."""
_KEPT_NEAR = 8


class SweepRow(NamedTuple):
    """The best plan on at most so many machines."""

    machines: int
    partition: Partition | None
    """None where no plan keeps within the memory limit."""
    minibatch_ms: float
    speedup: float
    """Over one machine without a limit."""
    efficiency: float
    """The speed-up over the number of machines."""
    bytes_per_minibatch: float


class Sweep(NamedTuple):
    """The plans over a number of machines."""

    rows: tuple[SweepRow, ...]
    enough: int | None
    """The fewest machines whose plan is within `ENOUGH` of the best; None where no plan keeps within the limit."""


class Spread(NamedTuple):
    """What came of planning anew, many times, with figures that are off."""

    draws: int
    part: float
    """The most that a figure was off, as a part of itself."""
    changed: float
    """Part of the draws in which another config is best."""
    configs: tuple[tuple[str, int], ...]
    """How often each config was best, the most frequent first."""
    median_slower: float
    """How much longer a minibatch takes by the plan that was made than by the best one, as a part."""
    worst_slower: float


def sweep(
    chain: Chain, machines: int, bandwidth_bps: float, model: CostModel = PAPER, limit: Limit | None = None
) -> Sweep:
    """The best plans on 1 to M machines; beyond 32 only some of them.

    Args:
        chain: of the model.
        machines: M.
        bandwidth_bps: of each machine's link.
        model: of the costs.
        limit: on the memory of a worker.
    """
    single = chain.compute_ms(0, chain.layers)
    rows: dict[int, SweepRow] = {}
    plans: dict[int, Limited] = {}

    def row(count: int) -> SweepRow:
        if count not in rows:
            cluster = Cluster(count, bandwidth_bps)
            # What fewer machines can do, more can.
            near = plans.get(max((other for other in plans if other < count), default=0))
            if limit is None:
                partition = best_partition(chain, cluster, model, [] if near is None else [near.partition])
                plan: Limited | None = Limited(partition, (), True)
            else:
                plan = best_limited(chain, limit, cluster, model, near)
            if plan is not None:
                plans[count] = plan
            rows[count] = _row(chain, cluster, model, limit, single, plan)
        return rows[count]

    counts = _counts(machines)
    for count in counts:
        row(count)
    best = row(machines).minibatch_ms
    fitting = [count for count in counts if rows[count].partition is not None]
    if not fitting:
        return Sweep(tuple(rows[count] for count in counts), None)
    enough = next(count for count in counts if rows[count].minibatch_ms <= best * (1 + ENOUGH))
    # More machines are never slower, so what lies between two rows is found by halving.
    fewer = max((count for count in counts if count < enough), default=0)
    while enough - fewer > 1:
        middle = (enough + fewer) // 2
        if row(middle).minibatch_ms <= best * (1 + ENOUGH):
            enough = middle
        else:
            fewer = middle
    shown = sorted({*counts, enough})
    return Sweep(tuple(rows[count] for count in shown), enough)


def _counts(machines: int) -> list[int]:
    if machines <= _ROWS:
        return list(range(1, machines + 1))
    # As evenly on a scale of ratios as whole numbers can be.
    scale = np.geomspace(1, machines, _ROWS)
    return sorted({*(round(count) for count in scale.tolist()), 1, machines})


def _row(
    chain: Chain, cluster: Cluster, model: CostModel, limit: Limit | None, single_ms: float, plan: Limited | None
) -> SweepRow:
    if plan is None:
        return SweepRow(cluster.machines, None, np.inf, 0.0, 0.0, 0.0)
    if limit is None:
        ms = minibatch_ms(chain, plan.partition, cluster, model)
    else:
        ms = limited_minibatch_ms(chain, limit.sizes, plan.partition, plan.recompute, cluster, model)
    speedup = single_ms / ms if ms else 1.0
    sent = float(partition_bytes(chain, plan.partition, model))
    return SweepRow(cluster.machines, plan.partition, ms, speedup, speedup / cluster.machines, sent)


def shaken_profile(
    chain: Chain, chosen: Partition, cluster: Cluster, part: float, seed: int, model: CostModel = PAPER
) -> Spread:
    """How a plan fares where each time and each size of the profile is off by up to a part, on its own.

    Args:
        chain: as profiled.
        chosen: the plan that was made of it.
        cluster: of the machines.
        part: above 0, below 1.
        seed: of the random numbers; the same seed gives the same answer.
        model: of the costs.
    """
    draws = _draws(chain, chosen, cluster, model)
    return _spread(((other, cluster) for other in _shaken(chain, part, seed, draws)), chosen, part, model)


def shaken_bandwidth(
    chain: Chain, chosen: Partition, cluster: Cluster, part: float, seed: int, model: CostModel = PAPER
) -> Spread:
    """How a plan fares where the bandwidth is off by up to a part; as `shaken_profile`."""
    draws = _draws(chain, chosen, cluster, model)
    factors = np.random.default_rng(seed).uniform(1 - part, 1 + part, draws).tolist()
    clusters = (replace(cluster, bandwidth_bps=cluster.bandwidth_bps * factor) for factor in factors)
    return _spread(((chain, other) for other in clusters), chosen, part, model)


def _draws(chain: Chain, chosen: Partition, cluster: Cluster, model: CostModel) -> int:
    pace = minibatch_ms(chain, chosen, cluster, model)
    sizes = np.array([chain.activation_bytes[place - 1] for place in chain.boundaries[1:-1]], dtype=np.float64)
    places = int((cut_ms(sizes, cluster.bytes_per_ms, model) <= pace).sum())
    return max(_FEWEST_DRAWS, min(_DRAWS, _DRAWS * _QUICK // max(places, 1)))


def _shaken(chain: Chain, part: float, seed: int, draws: int) -> Iterator[Chain]:
    random = np.random.default_rng(seed)
    times = np.array(chain.times_ms)
    activations = np.array(chain.activation_bytes, dtype=np.float64)
    weights = np.diff(np.array(chain.weight_bytes, dtype=np.float64))
    for _ in range(draws):
        factors = random.uniform(1 - part, 1 + part, (3, chain.layers))
        new = times * factors[0]
        yield replace(
            chain,
            times_ms=tuple(new.tolist()),
            activation_bytes=_whole(activations * factors[1]),
            weight_bytes=tuple(accumulate(_whole(weights * factors[2]), initial=0)),
            prefix_ms=np.concatenate(([0.0], np.cumsum(new, dtype=np.longdouble))).astype(np.float64),
        )


def _whole(sizes: NDArray[np.float64]) -> tuple[int, ...]:
    return tuple(np.rint(sizes).astype(np.int64).tolist())


def _spread(worlds: Iterator[tuple[Chain, Cluster]], chosen: Partition, part: float, model: CostModel) -> Spread:
    slower: list[float] = []
    configs: dict[str, int] = {}
    # The plans found so far, the latest first: the next best plan is often one of them.
    near = [chosen]
    for chain, cluster in worlds:
        best = best_partition(chain, cluster, model, near)
        if best in near:
            near.remove(best)
        near.insert(0, best)
        del near[_KEPT_NEAR:]
        configs[best.config] = configs.get(best.config, 0) + 1
        ours, least = (minibatch_ms(chain, plan, cluster, model) for plan in (chosen, best))
        # Equal values are equal, whichever of them the tie rule took.
        slower.append(ours / least - 1 if ours > least * (1 + EQUAL) else 0.0)
    ranked = sorted(configs.items(), key=lambda item: (-item[1], item[0]))
    return Spread(
        draws=len(slower),
        part=part,
        changed=1 - configs.get(chosen.config, 0) / len(slower),
        configs=tuple(ranked),
        median_slower=median(slower),
        worst_slower=max(slower),
    )
