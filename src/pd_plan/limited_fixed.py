"""The best cuts for replicas that are given, within a memory limit (design, section 2: strategies, `--config`).

With all replicas given, so are the depths and what waits at each stage: whether a stage from one boundary to another
fits is a table a stage. Unlike in `fixed`, a longer stage may need less, so nothing is a window here, and a threshold
costs O(S N^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_format.errors import UserError
from pd_format.memory import arrivals_held, held_bytes
from pd_format.versions import default_sync, lag_of
from pd_plan import search
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Floats, cut_ms, stage_ms, sync_ms
from pd_plan.limits import Candidate, Limit, limited_minibatch_ms
from pd_plan.ties import Edges, fewest_bytes

__all__ = ["best_limited_cuts", "cheapest_limited_cuts", "some_cuts"]

Bools = NDArray[np.bool_]

_MOST_WORK = 1.5e8
"""Stages that one threshold looks at; about a second."""


class _Way(NamedTuple):
    """One stage, as it is or where it recomputes, and all the ranges of layers: a row a boundary where it begins."""

    fits: Bools
    ms: Floats
    """T(i->j, r)."""


def best_limited_cuts(
    chain: Chain,
    replicas: tuple[int, ...],
    depths: Sequence[int],
    limit: Limit,
    cluster: Cluster,
    model: CostModel = PAPER,
) -> Candidate | None:
    """The cuts within the limit whose longest stage or cut is shortest, and which stages recompute; or None.

    Among equals: fewer stages that recompute, then fewer bytes, then later cuts.

    Raises:
        UserError: the chain is too long for so many stages.
    """
    stages = _stages(chain, replicas, depths, limit, cluster, model)
    cuts = np.zeros(len(chain.boundaries))
    cuts[1:-1] = [
        cut_ms(float(chain.activation_bytes[place - 1]), cluster.bytes_per_ms, model)
        for place in chain.boundaries[1:-1]
    ]

    def value(plan: Candidate) -> float:
        return limited_minibatch_ms(chain, limit.sizes, *plan, cluster, model)

    def under(threshold: float) -> Candidate | None:
        allowed = [[fits & (ms <= threshold) & (cuts <= threshold) for fits, ms in stage] for stage in stages]
        return _cheapest(chain, replicas, allowed)

    def probe(threshold: float) -> float | None:
        plan = under(threshold)
        return None if plan is None else value(plan)

    some = under(np.inf)
    if some is None:
        return None
    lower = chain.compute_ms(0, chain.layers) / sum(replicas) * (1 - search.EQUAL)
    return under(search.least(lower, value(some), probe).threshold)


def some_cuts(
    chain: Chain, replicas: tuple[int, ...], depths: Sequence[int], limit: Limit, cluster: Cluster
) -> Candidate | None:
    """Any cuts within the limit, however slow; None where there are none.

    Raises:
        UserError: as `best_limited_cuts`.
    """
    stages = _stages(chain, replicas, depths, limit, cluster, PAPER)
    return _cheapest(chain, replicas, [[way.fits for way in stage] for stage in stages])


def cheapest_limited_cuts(chain: Chain, stages: int, limit: Limit, cluster: Cluster) -> Candidate | None:
    """`fixed.cheapest_cuts` within the limit: one minibatch at a time, so that recomputing would save nothing."""
    replicas = (1,) * stages
    tables = _stages(chain, replicas, replicas, limit, cluster, PAPER)
    return _cheapest(chain, replicas, [[stage[0].fits] for stage in tables])


def _stages(
    chain: Chain, replicas: tuple[int, ...], depths: Sequence[int], limit: Limit, cluster: Cluster, model: CostModel
) -> list[list[_Way]]:
    at = chain.boundaries
    if len(at) ** 2 * len(replicas) > _MOST_WORK:
        raise UserError(
            f"{len(replicas)} stages of {chain.layers} layers are too many to cut under a memory limit; leave the "
            "limit out, or plan for fewer stages."
        )

    def between(prefix: Sequence[float] | Floats) -> Floats:
        values = np.array([float(prefix[place]) for place in at], dtype=np.float64)
        return np.subtract(values[None, :], values[:, None])

    sizes = limit.sizes
    parameters, trainable, stash = map(between, (sizes.parameters, sizes.trainable, sizes.stash))
    weights = between(chain.weight_bytes)
    computes = [between(chain.prefix_ms)]
    if limit.recompute:
        computes.append(computes[0] + between(sizes.forward_ms))
    crossing = np.array([float(sizes.crossing[place]) for place in at])
    forward = np.triu(np.ones((len(at), len(at)), dtype=np.bool_), k=1)
    result = []
    for index, (r, w) in enumerate(zip(replicas, depths, strict=True)):
        lag = lag_of(r, default_sync(len(replicas)))
        arrivals = arrivals_held(depths[index - 1], replicas[index - 1], r) if index else 0
        sync = sync_ms(weights, np.array(float(r)), cluster.bytes_per_ms, model)
        ways = []
        for again, compute in enumerate(computes):
            held: Floats = held_bytes(
                parameters=parameters,
                trainable=trainable,
                stash=stash,
                input_bytes=crossing[:, None],
                output_bytes=crossing[None, :],
                replicas=float(r),
                in_flight=float(w),
                lag=lag,
                sets=w + lag,
                states=sizes.states,
                compressed=sizes.compressed,
                recompute=bool(again),
            )
            fits = forward & (held + arrivals * crossing[:, None] <= limit.memory_bytes)
            ways.append(_Way(fits, stage_ms(compute, sync, np.array(float(r)))))
        result.append(ways)
    return result


def _cheapest(chain: Chain, replicas: tuple[int, ...], allowed: Sequence[Sequence[Bools]]) -> Candidate | None:
    """Of the plans whose stages are allowed, the one that recomputes least and then sends fewest bytes; or None.

    Args:
        allowed: of each stage, the ranges that it may hold as it is, and those where it recomputes.
    """
    last = len(chain.boundaries) - 1
    never = 2 * len(replicas)
    # Fewest stages that recompute, from each stage and boundary on.
    fewest = [np.full(last + 1, never) for _ in range(len(replicas) + 1)]
    fewest[-1][last] = 0
    for s in range(len(replicas) - 1, -1, -1):
        for again, ranges in enumerate(allowed[s]):
            reached = np.where(ranges, fewest[s + 1][None, :] + again, never).min(axis=1)
            fewest[s] = np.minimum(fewest[s], reached)
    if fewest[0][0] >= never:
        return None
    # A node is a boundary that a stage may begin at in such a plan; all stages' nodes, one stage after the other.
    nodes: list[tuple[int, int]] = [(0, 0)]
    found: list[tuple[list[tuple[int, int]], list[bool]]] = []
    begin: list[int] = [0]
    for s in range(len(replicas)):
        reached_next: set[tuple[int, int]] = set()
        for i in begin:
            flags = np.full(last + 1, -1)
            for again, ranges in reversed(list(enumerate(allowed[s]))):
                flags[ranges[i] & (fewest[s + 1] < never) & (fewest[s + 1] + again == fewest[s][i])] = again
            js = np.flatnonzero(flags >= 0).tolist()
            found.append(([(s + 1, j) for j in js], [bool(flags[j]) for j in js]))
            reached_next.update(found[-1][0])
        nodes += sorted(reached_next)
        begin = [i for _, i in sorted(reached_next)]
    index = {node: place for place, node in enumerate(nodes)}
    edges = Edges(len(nodes) - 1)
    for place, (following, _) in enumerate(found):
        counts = np.full(len(following), replicas[nodes[place][0]])
        edges.add(place, np.array([index[node] for node in following]), counts)
    partition = fewest_bytes(chain, [chain.boundaries[i] for _, i in nodes], edges)
    recompute, i = [], 0
    for s, end in enumerate(partition.ends):
        j = chain.boundaries.index(end)
        following, flags_of = found[index[s, i]]
        recompute.append(flags_of[following.index((s + 1, j))])
        i = j
    return partition, tuple(recompute)
