"""From a profile to a plan: partition, memory, depths and what to expect (design, sections 1 and 2).

This is the library's door. The command line decides by it, and for `--strategy simulated` by `pd_plan.simulated`,
which compares several decisions of this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from pd_format.compression import NOTHING, Compression
from pd_format.errors import UserError
from pd_format.graph_text import is_original
from pd_format.memory import OPTIMIZER_STATES
from pd_format.plan import Plan
from pd_format.profile import InputSpec, Profile
from pd_plan.cluster import Cluster
from pd_plan.compressed import as_sent, check_compression, loads_sent, sent_chain
from pd_plan.cost import COST_MODELS, INFERENCE, Chain, CostModel, Partition, serial_ms, sync_ms
from pd_plan.depth import Depths, choose_depths, given_depths, rate_depths
from pd_plan.limits import Limit, Sizes, limited_compute_ms, limited_minibatch_ms
from pd_plan.network import LINKS, Wiring
from pd_plan.record import prediction_of, stages_of
from pd_plan.simulator import StageLoad
from pd_plan.strategies import STRATEGIES, data_parallel, with_replicas
from pd_plan.within import Kept, check_depths, keep_within

__all__ = [
    "Decision",
    "chain_of",
    "decide",
    "duplex_rival",
    "forward_only",
    "make_plan",
    "model_of",
    "partition_of",
]

_MOST_BYTES = 2**53
"""Floats, which the solver computes with, hold every whole number up to here."""
_CLEARLY = 0.01
"""A plan is called better from this on, relatively."""


class Decision(NamedTuple):
    """A plan, and what is known of it beyond the file."""

    plan: Plan
    depths: Depths
    """What the simulator says of the plan."""
    kept: Kept | None = None
    """What the memory limit did to it, where there is one."""
    winner: str | None = None
    """Of strategy `simulated`: the one of `pd_plan.strategies.STRATEGIES` whose plan simulates fastest."""


def make_plan(
    profile: Profile,
    machines: int,
    bandwidth_bps: float,
    strategy: str = "auto",
    config: Sequence[int] | None = None,
    **options: Any,
) -> Plan:
    """The plan that `decide` comes to, which takes the same arguments and options."""
    return decide(profile, machines, bandwidth_bps, strategy, config, **options).plan


def decide(
    profile: Profile,
    machines: int,
    bandwidth_bps: float,
    strategy: str = "auto",
    config: Sequence[int] | None = None,
    *,
    cost_model: Literal["paper", "duplex"] = "paper",
    in_flight: str | Sequence[int] = "auto",
    links: str = "card",
    memory_bytes: int | None = None,
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "momentum",
    recompute: bool = False,
    inference: bool = False,
    compression: Compression = NOTHING,
) -> Decision:
    """Decide which layers form which stage, how many workers replicate it, and how many minibatches are in flight.

    Args:
        profile: of the model.
        machines: M, how many there are; a plan may leave some idle.
        bandwidth_bps: of each machine's link, in bits per second.
        strategy: a key of `pd_plan.strategies.STRATEGIES`; `simulated` is `pd_plan.simulated.fastest_simulated`.
        config: replicas of each stage, where they are given rather than chosen; only with strategy `auto`.
        cost_model: a key of `pd_plan.cost.COST_MODELS`.
        in_flight: `auto` simulates to choose, `noam` takes the paper's depths; or the depth of each stage.
        links: of the simulation, one of `pd_plan.network.LINKS`.
        memory_bytes: that no worker may need more than; None for no limit.
        optimizer: a key of `pd_format.memory.OPTIMIZER_STATES`, for its state.
        recompute: whether stages may recompute to keep within the limit.
        inference: plan forward passes alone, of the profile made `forward_only`.
        compression: of what workers send.

    Raises:
        UserError: no such plan exists, or an argument makes no sense; the text says why.
    """
    cluster = Cluster(machines, bandwidth_bps)
    if inference:
        profile = forward_only(profile)
    check_compression(profile, compression, inference)
    chain_of(profile)  # Whose sizes may be too large as they are.
    chain = chain_of(as_sent(profile, compression))
    for name, value, known in (
        ("cost_model", cost_model, COST_MODELS),
        ("links", links, LINKS),
        ("optimizer", optimizer, OPTIMIZER_STATES),
    ):
        if value not in known:
            raise UserError(f"{name} {value!r} is unknown; expected one of {', '.join(known)}.")
    model = INFERENCE if inference else COST_MODELS[cost_model]
    if config is not None:
        partition = with_replicas(chain, cluster, strategy, tuple(config), model)
        strategy = "config"
    elif strategy in STRATEGIES:
        partition = STRATEGIES[strategy](chain, cluster, model)
    else:
        others = f"one of {', '.join(STRATEGIES)}; simulated is asked of pd_plan.simulated"
        raise UserError(f"strategy {strategy!r} is unknown; expected {others}.")
    sizes = Sizes.of(profile.layers, _input_bytes(profile.inputs), optimizer, compression.gradients is not None)
    kept, again = None, (False,) * len(partition.ends)
    if memory_bytes is not None:
        limit = Limit(sizes, memory_bytes, recompute)
        given = None if config is None or in_flight in ("auto", "noam") else given_depths(tuple(config), in_flight)
        samples = None if is_original(profile) else profile.minibatch_size
        kept = keep_within(profile.layers, chain, limit, cluster, model, strategy, partition, given, samples)
        partition, again = kept.partition, kept.recompute
    elif recompute and not inference:
        raise UserError("recompute costs time and saves memory only; give a limit on the memory with it.")

    def fits(depths: Sequence[int]) -> bool:
        return kept is None or kept.limit.fits(partition, depths, again)

    # Model parallelism is one minibatch at a time; all else is a pipeline.
    serial = strategy == "model-parallel"
    wiring = Wiring(cluster.bytes_per_ms, links, gradients=not inference)
    sent = sent_chain(chain, profile, partition, compression)
    pace = limited_minibatch_ms(sent, sizes, partition, again, cluster, model)
    depths = _depths(loads_sent(profile, partition, compression, again), wiring, pace, model, serial, in_flight, fits)
    if kept is not None:
        check_depths(kept.limit, partition, depths.in_flight, again)
    computes = [
        limited_compute_ms(chain, sizes, *layers, flag) for layers, flag in zip(partition.ranges, again, strict=True)
    ]
    memory = sizes.needed(partition, depths.in_flight, again)
    chosen = serial_ms(sent, partition, cluster, model) if serial else pace
    everywhere = sent_chain(chain, profile, data_parallel(chain, cluster), compression)
    plan = Plan(
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
        stages=stages_of(profile, sent, cluster, partition, depths.in_flight, model, again, computes, memory),
        predicted=prediction_of(sent, everywhere, cluster, partition, chosen, model),
        optimizer=optimizer,
        cost_model=cost_model,
        inference=inference,
        compress_gradients=None if compression.gradients is None else str(compression.gradients),
        compress_activations=compression.activations,
    )
    return Decision(plan, depths, kept)


def duplex_rival(profile: Profile, decision: Decision, **options: Any) -> Decision | None:
    """The plan that the duplex model finds on as many machines, where it simulates faster than the paper's.

    Args:
        profile: of the model.
        decision: by the paper's cost model.
        options: that the decision was made with, `cost_model` apart.

    Returns:
        None where there is no better one, or the plan was not for the planner to choose.
    """
    plan = decision.plan
    if plan.strategy != "auto" or plan.cost_model != "paper" or plan.inference or decision.depths.simulated_ms is None:
        return None
    rival = decide(profile, plan.machines, plan.bandwidth_bps, cost_model="duplex", **options)
    if partition_of(rival.plan) == partition_of(plan) or rival.depths.simulated_ms is None:
        return None
    return rival if rival.depths.simulated_ms < decision.depths.simulated_ms * (1 - _CLEARLY) else None


def forward_only(profile: Profile) -> Profile:
    """The profile of inference: nothing is differentiated, saved for that, updated or synchronised."""
    nothing = {"backward_ms": 0.0, "backward_ms_std": 0.0, "trainable_bytes": 0, "stash_bytes": 0}
    layers = tuple(layer.model_copy(update=nothing) for layer in profile.layers)
    return profile.model_copy(update={"layers": layers})


def model_of(plan: Plan) -> CostModel:
    """The cost model that a plan was made with."""
    return INFERENCE if plan.inference else COST_MODELS[plan.cost_model]


def partition_of(plan: Plan) -> Partition:
    """The cuts and replicas of a plan."""
    ends, end = [], 0
    for stage in plan.stages:
        end += stage.layers
        ends.append(end)
    return Partition(tuple(ends), tuple(stage.replicas for stage in plan.stages))


def chain_of(profile: Profile) -> Chain:
    """What the cost model needs of a profile.

    Raises:
        UserError: its sizes are past what can be computed exactly.
    """
    for field in ("activation_bytes", "parameter_bytes", "trainable_bytes", "stash_bytes"):
        total = sum(getattr(layer, field) for layer in profile.layers)
        if total > _MOST_BYTES:
            raise UserError(
                f"layers: their {field} add up to {total:.3g}; expected at most {_MOST_BYTES} (2^53) bytes. "
                "Measure the profile anew."
            )
    return Chain.of(profile.layers)


def _depths(
    loads: Sequence[StageLoad],
    wiring: Wiring,
    pace_ms: float,
    model: CostModel,
    serial: bool,
    in_flight: str | Sequence[int],
    fits: Callable[[Sequence[int]], bool] = lambda depths: True,
) -> Depths:
    """The depths of a partition: chosen, the paper's, or those given."""
    if serial:
        if in_flight not in ("auto", "noam"):
            raise UserError("strategy model-parallel runs one minibatch at a time; leave out its depths (in_flight).")
        return rate_depths(loads, wiring, [1] * len(loads))
    if in_flight == "auto":
        rounds = [
            float(sync_ms(float(load.weight_bytes), float(load.replicas), wiring.bytes_per_ms, model)) for load in loads
        ]
        return choose_depths(loads, wiring, pace_ms, rounds, fits)
    return rate_depths(loads, wiring, given_depths([load.replicas for load in loads], in_flight))


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
