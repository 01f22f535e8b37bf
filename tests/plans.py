"""Plans made by hand, with the cuts that a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.factory import build_model
from pd_format.plan import Plan, PlanPrediction, Stage, StagePrediction
from pd_format.profile import InputSpec, ModelSpec
from pd_format.schedule import paper_depths

HERE = Path(__file__).parent


def chain_of(factory: str, inputs: Sequence[InputSpec], kwargs: Mapping[str, object] | None = None) -> Chain:
    return build_chain(build_model(factory, kwargs or {}), inputs)


def plan_of(
    factory: str,
    inputs: Sequence[InputSpec],
    config: str,
    cuts: Sequence[str],
    *,
    data: str = "synthetic",
    kwargs: Mapping[str, object] | None = None,
    in_flight: Sequence[int] | None = None,
    chain: Chain | None = None,
) -> Plan:
    """A plan whose stages end at the named layers; the last one ends the model."""
    chain = chain or chain_of(factory, inputs, kwargs)
    replicas = [int(part) for part in config.split("-")]
    names = [layer.name for layer in chain.layers]
    ends = [names.index(cut) for cut in cuts] + [len(names) - 1]
    depths = list(in_flight or paper_depths(replicas))
    stages, first, rank = [], 0, 0
    for index, (end, count, depth) in enumerate(zip(ends, replicas, depths, strict=True)):
        stages.append(
            Stage(
                index=index,
                first_layer=names[first],
                last_layer=names[end],
                layers=end - first + 1,
                replicas=count,
                workers=tuple(range(rank, rank + count)),
                in_flight=depth,
                predicted=StagePrediction(compute_ms=1.0, sync_ms=0.0, memory_bytes=1_000_000),
            )
        )
        first, rank = end + 1, rank + count
    return Plan(
        model=ModelSpec(name="test", factory=factory, kwargs=dict(kwargs or {}), fingerprint=chain.fingerprint),
        minibatch_size=inputs[0].shape[0],
        inputs=tuple(inputs),
        data=data,
        machines=rank,
        bandwidth_bps=1e9,
        strategy="config",
        config=config,
        noam=-(-rank // replicas[0]),
        stages=tuple(stages),
        predicted=PlanPrediction(
            minibatch_ms=1.0,
            single_machine_ms=1.0,
            data_parallel_ms=1.0,
            speedup=1.0,
            speedup_over_data_parallel=1.0,
            bytes_per_minibatch=0.0,
            data_parallel_bytes_per_minibatch=0.0,
            communication_reduction=0.0,
        ),
    )
