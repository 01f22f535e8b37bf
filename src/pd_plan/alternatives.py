"""What the usual ways to use the same machines would cost, beside a plan."""

from __future__ import annotations

from typing import NamedTuple

from pd_format.compression import NOTHING, Compression
from pd_format.profile import Profile
from pd_plan.cluster import Cluster
from pd_plan.compressed import as_sent, sent_chain
from pd_plan.cost import INFERENCE, PAPER, CostModel, Partition, minibatch_ms, partition_bytes, serial_ms
from pd_plan.planner import chain_of
from pd_plan.strategies import data_parallel, model_parallel, single, straight

__all__ = ["Alternative", "alternatives"]


class Alternative(NamedTuple):
    """What another way to use the machines would cost by the same model."""

    name: str
    partition: Partition
    minibatch_ms: float
    bytes_per_minibatch: float


def alternatives(
    profile: Profile, cluster: Cluster, model: CostModel = PAPER, compression: Compression = NOTHING
) -> list[Alternative]:
    """Single machine, data parallelism, model parallelism and a straight pipeline, on at most M machines.

    What is data parallelism in training is, in inference, the whole model on each machine.

    The latter two have one machine a stage, so they cannot use more machines than there are stages to be cut.
    """
    chain = chain_of(as_sent(profile, compression))
    deepest = Cluster(min(cluster.machines, chain.most_stages), cluster.bandwidth_bps)
    found = [
        ("single machine", single(chain, cluster), minibatch_ms),
        (
            "whole model each" if model is INFERENCE else "data parallelism",
            data_parallel(chain, cluster),
            minibatch_ms,
        ),
        ("model parallelism", model_parallel(chain, deepest), serial_ms),
        ("straight pipeline", straight(chain, deepest, model), minibatch_ms),
    ]
    result = []
    for name, partition, cost in found:
        sent = sent_chain(chain, profile, partition, compression)
        ms, size = cost(sent, partition, cluster, model), float(partition_bytes(sent, partition, model))
        result.append(Alternative(name, partition, ms, size))
    return result
