"""The ways to use machines that pd-plan knows, each as a partition: by strategy, or with the replicas given."""

from __future__ import annotations

from collections.abc import Callable

from pd_format.errors import UserError
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Partition
from pd_plan.fixed import best_cuts, cheapest_cuts
from pd_plan.partition import best_partition

__all__ = ["STRATEGIES", "data_parallel", "model_parallel", "single", "straight", "with_replicas"]


def single(chain: Chain, cluster: Cluster, model: CostModel = PAPER) -> Partition:
    """The whole model on one machine."""
    return Partition((chain.layers,), (1,))


def data_parallel(chain: Chain, cluster: Cluster, model: CostModel = PAPER) -> Partition:
    """The whole model on each machine."""
    return Partition((chain.layers,), (cluster.machines,))


def model_parallel(chain: Chain, cluster: Cluster, model: CostModel = PAPER) -> Partition:
    """A machine a stage, for one minibatch at a time."""
    return cheapest_cuts(chain, cluster.machines)


def straight(chain: Chain, cluster: Cluster, model: CostModel = PAPER) -> Partition:
    """A machine a stage, as a pipeline."""
    return best_cuts(chain, (1,) * cluster.machines, cluster, model)


STRATEGIES: dict[str, Callable[[Chain, Cluster, CostModel], Partition]] = {
    "auto": best_partition,
    "single": single,
    "data-parallel": data_parallel,
    "model-parallel": model_parallel,
    "straight": straight,
}


def with_replicas(
    chain: Chain, cluster: Cluster, strategy: str, replicas: tuple[int, ...], model: CostModel
) -> Partition:
    """These replicas of each stage, with the best cuts.

    Raises:
        UserError: there are not as many machines, or a strategy was asked for too.
    """
    config = "-".join(map(str, replicas))
    if strategy != "auto":
        raise UserError(f"config {config} and strategy {strategy} exclude each other; give one of them.")
    if not replicas or min(replicas) < 1:
        raise UserError(f"config is {config!r}; expected replicas of 1 or more joined by '-', such as 2-1-1.")
    if sum(replicas) > cluster.machines:
        raise UserError(
            f"config {config} takes {sum(replicas)} machines, there are {cluster.machines}; "
            f"give fewer replicas or {sum(replicas)} machines."
        )
    return best_cuts(chain, replicas, cluster, model)
