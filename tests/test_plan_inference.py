"""pd-plan --inference: forward passes alone, one transfer a cut, replicas that have nothing to agree on."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pd_format.jsonfile import write_record
from pd_format.plan import read_plan
from pd_format.profile import LayerProfile, Profile
from pd_format.versions import Mode
from pd_plan.alternatives import alternatives
from pd_plan.cli import main
from pd_plan.cluster import Cluster
from pd_plan.network import LINKS, Wiring
from pd_plan.planner import decide, duplex_rival, forward_only, model_of
from pd_plan.simulator import StageLoad, record, steady_ms
from pd_plan.timeline import film
from plan_oracles import Layer, partitions, profile_of, replica_counts

OVERLAP = Mode(sync="overlap")
# One byte a millisecond.
SLOW = 8e3


def trained(*layers: tuple[float, int]) -> Profile:
    """A profile of layers (forward in ms, activation in bytes): backward takes three times as long, 100 bytes train."""
    profile = profile_of([Layer(1, size, 100) for _, size in layers])

    def measured(layer: LayerProfile, forward: float) -> LayerProfile:
        changes = {"forward_ms": forward, "backward_ms": 3 * forward, "parameter_bytes": 150, "stash_bytes": 70}
        return layer.model_copy(update=changes)

    both = zip(profile.layers, layers, strict=True)
    return profile.model_copy(update={"layers": tuple(measured(layer, forward) for layer, (forward, _) in both)})


FOUR = trained((2, 8), (3, 4), (1, 6), (4, 0))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(2, 4),
)
def test_the_pace_is_the_longest_forward_pass_over_replicas_or_transfer(
    layers: list[tuple[int, int]], stages: int, machines: int
) -> None:
    stages = min(stages, len(layers), machines)
    profile = trained(*((float(ms), size) for ms, size in layers))
    chain = [Layer(ms, size) for ms, size in layers]

    def pace(ends: tuple[int, ...], replicas: tuple[int, ...]) -> Fraction:
        starts = (0, *ends[:-1])
        parts = zip(starts, ends, replicas, strict=True)
        times = [Fraction(sum(ms for ms, _ in layers[start:end]), r) for start, end, r in parts]
        return max([*times, *(Fraction(layers[end - 1][1]) for end in ends[:-1])])

    for replicas in replica_counts(stages, machines):
        best = min(pace(ends, replicas) for ends in partitions(chain, stages))
        plan = decide(profile, machines, SLOW, config=replicas, inference=True).plan
        assert plan.predicted.minibatch_ms == pytest.approx(float(best))
    every = itertools.product(range(1, len(layers) + 1), range(1, machines + 1))
    least = min(
        pace(ends, replicas)
        for count, used in every
        if count <= used
        for ends in partitions(chain, count)
        for replicas in replica_counts(count, used)
    )
    assert decide(profile, machines, SLOW, inference=True).plan.predicted.minibatch_ms == pytest.approx(float(least))


def test_a_cut_is_crossed_once_and_nothing_is_synchronised() -> None:
    plan = decide(FOUR, 4, SLOW, config=(2, 1), in_flight="noam", inference=True).plan
    assert plan.inference
    assert [stage.layers for stage in plan.stages] == [2, 2]
    assert [stage.predicted.compute_ms for stage in plan.stages] == [5, 5]
    assert [stage.predicted.sync_ms for stage in plan.stages] == [0, 0]
    assert plan.predicted.minibatch_ms == 5
    assert plan.predicted.single_machine_ms == 10
    assert (plan.predicted.bytes_per_minibatch, plan.predicted.data_parallel_bytes_per_minibatch) == (4, 0)


def test_a_worker_holds_its_parameters_once_and_what_is_on_its_way() -> None:
    plan = decide(FOUR, 4, SLOW, config=(2, 1), in_flight="3-2", inference=True).plan
    assert [stage.predicted.memory_bytes for stage in plan.stages] == [
        2 * 150 + 3 * 4,
        # Arrivals: ceil(3 * 2 / 1) + 1 minibatches of 4 bytes.
        2 * 150 + 7 * 4,
    ]


def test_a_model_that_fits_no_machine_is_cut() -> None:
    alone = decide(FOUR, 4, SLOW, inference=True)
    assert (alone.plan.config, alone.plan.predicted.minibatch_ms) == ("4", 2.5)
    kept = decide(FOUR, 4, SLOW, memory_bytes=500, inference=True)
    assert len(kept.plan.stages) > 1
    assert all(stage.predicted.memory_bytes <= 500 for stage in kept.plan.stages)


def test_the_alternatives_are_costed_alike() -> None:
    plan = decide(FOUR, 4, SLOW, inference=True).plan
    found = {
        each.name: (each.minibatch_ms, each.bytes_per_minibatch)
        for each in alternatives(forward_only(FOUR), Cluster(4, SLOW), model_of(plan))
    }
    assert found == {
        "single machine": (10, 0),
        "whole model each": (2.5, 0),
        "model parallelism": (10 + 8 + 4 + 6, 18),
        "straight pipeline": (8, 18),
    }
    assert duplex_rival(FOUR, decide(FOUR, 4, SLOW, inference=True), inference=True) is None


@pytest.mark.parametrize("links", LINKS)
def test_answers_take_no_time_and_cross_no_network(links: str) -> None:
    loads = [StageLoad(2, 0, 2 if s < 3 else 0, 0, 1) for s in range(4)]
    wiring = Wiring(1.0, links, gradients=False)
    assert steady_ms(loads, [7, 5, 3, 1], wiring, OVERLAP) == pytest.approx(2.0)
    run = record(loads, [7, 5, 3, 1], wiring, OVERLAP, 12)
    assert {transfer.kind for transfer in run.transfers} == {"activations"}
    # Replicas of one stage do not wait for each other: the pace is that of both together.
    shared = [StageLoad(4, 0, 1, 0, 2), StageLoad(1, 0, 0, 0, 1)]
    assert steady_ms(shared, [2, 1], wiring, OVERLAP) == pytest.approx(2.0)


def test_depths_are_chosen_that_hide_the_transfers() -> None:
    profile = trained(*((4.0, 4 if index < 3 else 0) for index in range(4)))
    decision = decide(profile, 4, SLOW, "straight", inference=True)
    assert decision.depths.simulated_ms == pytest.approx(4.0, rel=0.01)
    assert all(one.item.forward for one in film(forward_only(profile), decision.plan).passes)


def test_the_command_says_what_the_plan_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "profiles" / "tiny.json", FOUR)
    arguments = ["--machines", "4", "--bandwidth", "8kbps", "--config", "2-1", "--inference"]
    result = CliRunner().invoke(main, [*arguments, "--timeline"])
    assert result.exit_code == 0, result.output
    assert "Strategy  config, for inference: forward passes alone" in result.stdout
    assert "-- cut: 4 B one way" in result.stdout
    assert "data parallelism" not in result.stdout
    assert "next: pd-train --plan plan.json --evaluate-only --init-from weights.pt" in result.stdout
    assert read_plan(tmp_path / "plan.json").inference
    refused = CliRunner().invoke(main, [*arguments, "--recompute", "--memory", "1GB"])
    assert refused.exit_code == 2
    assert "--recompute saves what a backward pass needs, which --inference does without." in refused.stderr
