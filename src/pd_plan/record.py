"""Writes down what was decided, with what the cost model predicts of it, as a plan has it (design, section 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pd_format.errors import UserError
from pd_format.plan import PlanPrediction, Stage, StagePrediction
from pd_format.profile import Profile
from pd_plan.cluster import Cluster
from pd_plan.cost import Chain, CostModel, Partition, partition_bytes, stage_bytes, stage_ms, sync_ms

__all__ = ["prediction_of", "stages_of"]


def stages_of(
    profile: Profile,
    chain: Chain,
    cluster: Cluster,
    partition: Partition,
    depths: Sequence[int],
    model: CostModel,
    recompute: Sequence[bool],
    compute_ms: Sequence[float],
    memory_bytes: Sequence[int],
) -> tuple[Stage, ...]:
    """The stages of a partition, whose workers are numbered stage by stage.

    Args:
        profile: of the model.
        chain: what is sent.
        cluster, partition, model: of the plan.
        depths, recompute, compute_ms, memory_bytes: of each stage.
    """
    stages: list[Stage] = []
    rank = 0
    for index, ((first, end), replicas) in enumerate(zip(partition.ranges, partition.replicas, strict=True)):
        layers = profile.layers[first:end]
        stages.append(
            Stage(
                index=index,
                first_layer=layers[0].name,
                last_layer=layers[-1].name,
                layers=len(layers),
                replicas=replicas,
                workers=tuple(range(rank, rank + replicas)),
                in_flight=depths[index],
                predicted=StagePrediction(
                    compute_ms=compute_ms[index],
                    sync_ms=sync_ms(float(chain.weights(first, end)), float(replicas), cluster.bytes_per_ms, model),
                    memory_bytes=memory_bytes[index],
                    trainable_bytes=sum(layer.trainable_bytes for layer in layers),
                ),
                recompute=recompute[index],
            )
        )
        rank += replicas
    return tuple(stages)


def prediction_of(
    chain: Chain, everywhere: Chain, cluster: Cluster, partition: Partition, chosen: float, model: CostModel
) -> PlanPrediction:
    """Figures of a partition; the chains are of what is sent, by it and by the whole model on each machine."""
    whole = float(everywhere.weight_bytes[-1])
    every = float(cluster.machines)
    single = chain.compute_ms(0, chain.layers)
    data_parallel = float(stage_ms(single, sync_ms(whole, every, cluster.bytes_per_ms, model), every))
    sent = float(partition_bytes(chain, partition, model))
    data_parallel_sent = float(stage_bytes(everywhere.weight_bytes[-1], cluster.machines))
    return PlanPrediction(
        minibatch_ms=chosen,
        single_machine_ms=single,
        data_parallel_ms=data_parallel,
        speedup=_ratio(single, chosen),
        speedup_over_data_parallel=_ratio(data_parallel, chosen),
        bytes_per_minibatch=sent,
        data_parallel_bytes_per_minibatch=data_parallel_sent,
        communication_reduction=1 - sent / data_parallel_sent if data_parallel_sent else 0.0,
    )


def _ratio(other_ms: float, chosen_ms: float) -> float:
    """How many times faster the chosen plan is; 1 where both take no time."""
    if other_ms == chosen_ms:
        return 1.0
    ratio = other_ms / chosen_ms if chosen_ms else math.inf
    if not math.isfinite(ratio):
        raise UserError(
            f"the profile's layers take {chosen_ms:g} ms in all, so nothing can be compared with the "
            "network's times; measure the profile anew."
        )
    return ratio
