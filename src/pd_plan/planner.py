"""From a profile to a plan: strategies, depths and predictions (design, sections 1 and 2).

This is the library's door; the command line calls nothing else to decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_format.errors import UserError
from pd_format.memory import stage_memory_bytes
from pd_format.plan import Plan, PlanPrediction, Stage, StagePrediction
from pd_format.profile import InputSpec, Profile
from pd_format.schedule import paper_depths
from pd_format.versions import Mode, stage_versions
from pd_plan.cluster import Cluster
from pd_plan.cost import (
    Chain,
    Partition,
    minibatch_ms,
    partition_bytes,
    serial_ms,
    stage_bytes,
    stage_ms,
    sync_ms,
)
from pd_plan.fixed import best_cuts, cheapest_cuts
from pd_plan.partition import best_partition

__all__ = ["STRATEGIES", "Alternative", "alternatives", "make_plan", "partition_of"]

_MOST_BYTES = 2**53
"""Floats, which the solver computes with, hold every whole number up to here."""


def _auto(chain: Chain, cluster: Cluster) -> Partition:
    return best_partition(chain, cluster)


def _single(chain: Chain, cluster: Cluster) -> Partition:
    return Partition((chain.layers,), (1,))


def _data_parallel(chain: Chain, cluster: Cluster) -> Partition:
    return Partition((chain.layers,), (cluster.machines,))


def _model_parallel(chain: Chain, cluster: Cluster) -> Partition:
    return cheapest_cuts(chain, cluster.machines)


def _straight(chain: Chain, cluster: Cluster) -> Partition:
    return best_cuts(chain, (1,) * cluster.machines, cluster)


STRATEGIES: dict[str, Callable[[Chain, Cluster], Partition]] = {
    "auto": _auto,
    "single": _single,
    "data-parallel": _data_parallel,
    "model-parallel": _model_parallel,
    "straight": _straight,
}


class Alternative(NamedTuple):
    """What another way to use the machines would cost by the same model."""

    name: str
    partition: Partition
    minibatch_ms: float
    bytes_per_minibatch: float


def make_plan(
    profile: Profile,
    machines: int,
    bandwidth_bps: float,
    strategy: str = "auto",
    config: Sequence[int] | None = None,
) -> Plan:
    """Decide which layers form which stage, and how many workers replicate it.

    Args:
        profile: of the model.
        machines: M, how many there are; a plan may leave some idle.
        bandwidth_bps: of each machine's link, in bits per second.
        strategy: a key of `STRATEGIES`.
        config: replicas of each stage, where they are given rather than chosen; only with strategy `auto`.

    Raises:
        UserError: no such plan exists, or an argument makes no sense; the text says why.
    """
    cluster = Cluster(machines, bandwidth_bps)
    chain = _chain_of(profile)
    if config is not None:
        partition = _given(chain, cluster, strategy, tuple(config))
        strategy = "config"
    elif strategy in STRATEGIES:
        partition = STRATEGIES[strategy](chain, cluster)
    else:
        raise UserError(f"strategy {strategy!r} is unknown; expected one of {', '.join(STRATEGIES)}.")
    # Model parallelism is one minibatch at a time; all else is a pipeline.
    serial = strategy == "model-parallel"
    depths = [1] * len(partition.replicas) if serial else paper_depths(partition.replicas)
    return Plan(
        model=profile.model,
        minibatch_size=profile.minibatch_size,
        inputs=profile.inputs,
        data=profile.data,
        task=profile.task,
        precision=profile.precision,
        machines=machines,
        bandwidth_bps=bandwidth_bps,
        strategy=strategy,
        config=partition.config,
        noam=-(-partition.machines // partition.replicas[0]),
        stages=_stages(profile, chain, cluster, partition, depths),
        predicted=_prediction(chain, cluster, partition, serial),
    )


def partition_of(plan: Plan) -> Partition:
    """The cuts and replicas of a plan."""
    ends, end = [], 0
    for stage in plan.stages:
        end += stage.layers
        ends.append(end)
    return Partition(tuple(ends), tuple(stage.replicas for stage in plan.stages))


def alternatives(profile: Profile, cluster: Cluster) -> list[Alternative]:
    """Single machine, data parallelism, model parallelism and a straight pipeline, on at most M machines.

    The latter two have one machine a stage, so they cannot use more machines than there are stages to be cut.
    """
    chain = _chain_of(profile)
    deepest = Cluster(min(cluster.machines, chain.most_stages), cluster.bandwidth_bps)
    found = [
        ("single machine", _single(chain, cluster), minibatch_ms),
        ("data parallelism", _data_parallel(chain, cluster), minibatch_ms),
        ("model parallelism", _model_parallel(chain, deepest), serial_ms),
        ("straight pipeline", _straight(chain, deepest), minibatch_ms),
    ]
    return [
        Alternative(name, partition, cost(chain, partition, cluster), float(partition_bytes(chain, partition)))
        for name, partition, cost in found
    ]


def _chain_of(profile: Profile) -> Chain:
    for field in ("activation_bytes", "parameter_bytes", "trainable_bytes", "stash_bytes"):
        total = sum(getattr(layer, field) for layer in profile.layers)
        if total > _MOST_BYTES:
            raise UserError(
                f"layers: their {field} add up to {total:.3g}; expected at most {_MOST_BYTES} (2^53) bytes. "
                "Measure the profile anew."
            )
    return Chain.of(profile.layers)


def _given(chain: Chain, cluster: Cluster, strategy: str, replicas: tuple[int, ...]) -> Partition:
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
    return best_cuts(chain, replicas, cluster)


def _stages(
    profile: Profile, chain: Chain, cluster: Cluster, partition: Partition, depths: Sequence[int]
) -> tuple[Stage, ...]:
    # What pd-train does by default.
    mode = Mode(sync="bsp" if len(partition.ends) == 1 else "overlap")
    stages: list[Stage] = []
    rank = 0
    for index, ((first, end), replicas) in enumerate(zip(partition.ranges, partition.replicas, strict=True)):
        layers = profile.layers[first:end]
        previous = (stages[-1].replicas, stages[-1].in_flight) if stages else None
        memory = stage_memory_bytes(
            layers,
            input_bytes=profile.layers[first - 1].activation_bytes if first else _input_bytes(profile.inputs),
            output_bytes=layers[-1].activation_bytes if end < chain.layers else 0,
            versions=stage_versions(mode, partition.replicas, depths, index),
            previous=previous,
        )
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
                    compute_ms=chain.compute_ms(first, end),
                    sync_ms=sync_ms(float(chain.weights(first, end)), float(replicas), cluster.bytes_per_ms),
                    memory_bytes=memory,
                    trainable_bytes=sum(layer.trainable_bytes for layer in layers),
                ),
            )
        )
        rank += replicas
    return tuple(stages)


def _prediction(chain: Chain, cluster: Cluster, partition: Partition, serial: bool) -> PlanPrediction:
    whole = float(chain.weight_bytes[-1])
    every = float(cluster.machines)
    single = chain.compute_ms(0, chain.layers)
    data_parallel = float(stage_ms(single, sync_ms(whole, every, cluster.bytes_per_ms), every))
    chosen = (serial_ms if serial else minibatch_ms)(chain, partition, cluster)
    sent = float(partition_bytes(chain, partition))
    data_parallel_sent = float(stage_bytes(chain.weight_bytes[-1], cluster.machines))
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


def _input_bytes(inputs: Sequence[InputSpec]) -> int:
    """Bytes of one minibatch of the model's inputs."""
    return sum(math.prod(spec.shape) * _element_bytes(spec) for spec in inputs)


def _element_bytes(spec: InputSpec) -> int:
    """Bytes of an element of a dtype as torch names it: float32, int64, bool, bfloat16, float8_e4m3fn."""
    name = spec.dtype.removeprefix("torch.")
    if name == "bool":
        return 1
    match = re.match(r"[a-z]+(\d+)", name)
    if match is None or int(match[1]) % 8:
        raise UserError(f"inputs: {spec.name} has dtype {spec.dtype!r}; expected a torch dtype such as 'float32'.")
    return int(match[1]) // 8
