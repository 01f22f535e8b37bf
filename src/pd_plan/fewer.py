"""Whether fewer minibatches in flight than the paper's depths would make a plan fit (design, sections 2 and 3).

A stage holds activations and weights for each minibatch in flight, so fewer need less memory. The pipeline is no longer
full then and runs slower than the cost model says, which is why such a plan is advised and never chosen. One minibatch
in flight at every stage is legal always; between that and the paper's depths some deadlock.
"""

from __future__ import annotations

from collections.abc import Callable

from pd_format.schedule import paper_depths
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, Partition
from pd_plan.depth import deadlock_of
from pd_plan.limited import RoomSearch
from pd_plan.limited_fixed import some_cuts
from pd_plan.limits import Limit

__all__ = ["Fewer", "fewer_in_flight"]

Fewer = tuple[Partition, tuple[int, ...]]
"""A plan and its depths."""


def fewer_in_flight(
    chain: Chain, limit: Limit, cluster: Cluster, replicas: tuple[int, ...] | None = None
) -> Fewer | None:
    """A plan within the limit with at most so many minibatches in flight at a stage: the most found, or None.

    Args:
        chain: of the model.
        limit: that no plan at the paper's depths keeps within.
        cluster: of the machines.
        replicas: of each stage, where they are given.
    """

    def find(most: int) -> Fewer | None:
        if replicas is None:
            plan = RoomSearch(chain, limit, cluster, PAPER, most).plan_under(float("inf"))
        else:
            plan = some_cuts(chain, replicas, _at_most(replicas, most), limit, cluster)
        if plan is None:
            return None
        depths = _at_most(plan[0].replicas, most)
        return None if deadlock_of(plan[0].replicas, depths) is not None else (plan[0], depths)

    return _largest(find, max(paper_depths(replicas)) if replicas is not None else cluster.machines)


def _largest(find: Callable[[int], Fewer | None], too_many: int) -> Fewer | None:
    best = find(1) if too_many > 1 else None
    fits = 1
    while best is not None and too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = find(middle)
        if found is None:
            too_many = middle
        else:
            best, fits = found, middle
    return best


def _at_most(replicas: tuple[int, ...], most: int) -> tuple[int, ...]:
    return tuple(min(depth, most) for depth in paper_depths(replicas))
