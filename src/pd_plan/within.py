"""Keeps a plan within a memory limit, whichever way its cuts were to be chosen (design, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pd_format.errors import UserError
from pd_format.profile import LayerProfile
from pd_format.schedule import paper_depths
from pd_format.units import format_bytes
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Partition, minibatch_ms
from pd_plan.fewer import Fewer, fewer_in_flight
from pd_plan.limited import RoomSearch, best_limited, is_small_enough
from pd_plan.limited_fixed import best_limited_cuts, cheapest_limited_cuts, some_cuts
from pd_plan.limits import Candidate, Limit
from pd_plan.obstacle import Found, why_none_fits
from pd_plan.rough import some_rough_partition
from pd_plan.text import short_config

__all__ = ["Kept", "check_depths", "keep_within"]


class Kept(NamedTuple):
    """A plan within a limit, and the one that would be made without it."""

    limit: Limit
    partition: Partition
    recompute: tuple[bool, ...]
    exact: bool
    """Whether it is the best at the paper's depths; else a better one may have been missed."""
    free: Partition
    free_ms: float
    free_bytes: int
    """What the fullest worker of the plan without a limit would hold."""


def keep_within(
    layers: Sequence[LayerProfile],
    chain: Chain,
    limit: Limit,
    cluster: Cluster,
    model: CostModel,
    strategy: str,
    free: Partition,
    depths: Sequence[int] | None,
    minibatch_size: int | None,
) -> Kept:
    """The best plan of a strategy within a limit.

    Args:
        layers: of the profile.
        chain: of the same layers.
        limit: on the memory of a worker.
        cluster: of the machines.
        model: of the costs.
        strategy: `config`, or a key of `pd_plan.strategies.STRATEGIES`.
        free: what the strategy comes to without a limit.
        depths: that were given; None for the paper's, or 1 each of model parallelism.
        minibatch_size: in samples, None where it is not known.

    Raises:
        UserError: no plan keeps within the limit; the text says which layer is the obstacle and what would help.
    """
    serial = strategy == "model-parallel"

    def settle(replicas: tuple[int, ...]) -> tuple[int, ...]:
        if depths is not None and len(depths) == len(replicas):
            return tuple(depths)
        return (1,) * len(replicas) if serial else tuple(paper_depths(replicas))

    usual = settle(free.replicas)
    free_ms = minibatch_ms(chain, free, cluster, model)
    free_bytes = max(limit.sizes.needed(free, usual))
    if free_bytes <= limit.memory_bytes:
        return Kept(limit, free, (False,) * len(usual), True, free, free_ms, free_bytes)

    found: Candidate | None = None
    exact = True
    if strategy == "auto":
        best = best_limited(chain, limit, cluster, model)
        if best is not None:
            found, exact = (best.partition, best.recompute), best.exact
    elif serial:
        found = cheapest_limited_cuts(chain, len(free.ends), limit, cluster)
    elif len(free.ends) > 1:
        found = best_limited_cuts(chain, free.replicas, usual, limit, cluster, model)
    if found is not None:
        return Kept(limit, *found, exact, free, free_ms, free_bytes)

    def find(other: Limit) -> Found | None:
        if strategy == "auto":
            plan = _any_plan(chain, other, cluster)
        elif len(free.ends) > 1:
            plan = some_cuts(chain, free.replicas, usual, other, cluster)
        else:
            plan = (free, (False,)) if other.fits(free, usual) else None
        return None if plan is None else (*plan, settle(plan[0].replicas))

    def machines_needed() -> int | None:
        for times in (2, 4):
            more = replace(cluster, machines=cluster.machines * times)
            plan = _any_plan(chain, limit, more) if strategy == "auto" and is_small_enough(chain, more) else None
            if plan is not None:
                return plan[0].machines
        return None

    def fewer() -> Fewer | None:
        if depths is not None or serial or (len(usual) == 1 and strategy != "auto"):
            return None
        if strategy != "auto":
            return fewer_in_flight(chain, limit, cluster, free.replicas)
        return fewer_in_flight(chain, limit, cluster) if is_small_enough(chain, cluster) else None

    count = f"{cluster.machines} machine{'' if cluster.machines == 1 else 's'}"
    what = f"no plan on {count}" if strategy == "auto" else f"no plan of config {short_config(free.config)}"
    if strategy in ("single", "data-parallel"):
        what = f"strategy {strategy} (config {short_config(free.config)}) does not fit: nothing of it"
    at = "at the paper's depths" if depths is None else "at these depths"
    if serial or cluster.machines == 1 or (strategy != "auto" and set(usual) == {1}):
        at = "with one minibatch in flight"
    raise why_none_fits(layers, limit, what, at, find, minibatch_size, machines_needed, fewer)


def check_depths(limit: Limit, partition: Partition, depths: Sequence[int], recompute: Sequence[bool]) -> None:
    """Refuse depths that were given and do not fit.

    Raises:
        UserError: naming the fullest stage.
    """
    needed = limit.sizes.needed(partition, depths, recompute)
    most = max(needed)
    if most > limit.memory_bytes:
        given = "-".join(map(str, depths))
        raise UserError(
            f"in_flight {given} needs {format_bytes(most)} a worker in stage {needed.index(most)} of config "
            f"{short_config(partition.config)}, over the limit of {format_bytes(limit.memory_bytes)}; "
            "give fewer, or auto."
        )


def _any_plan(chain: Chain, limit: Limit, cluster: Cluster) -> Candidate | None:
    if is_small_enough(chain, cluster):
        return RoomSearch(chain, limit, cluster, PAPER).plan_under(float("inf"))
    return some_rough_partition(chain, limit, cluster)
