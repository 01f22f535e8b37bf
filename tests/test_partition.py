"""The solver against the design's recurrence and against brute force, ties included."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from original_profiles import original_profile
from pd_format.errors import UserError
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, Partition, minibatch_ms, partition_bytes, serial_ms, stage_ms, sync_ms
from pd_plan.fixed import best_cuts, cheapest_cuts
from pd_plan.partition import best_partition, fewest_replicas
from pd_plan.planner import make_plan
from pd_plan.search import least
from plan_oracles import Layer, Option, brute_force, brute_force_cuts, layer_profiles, recurrence

# Few distinct figures, so that plans tie; B of 1, 3 and 10^9 bytes a ms make the network slow, middling and free.
FIGURES = st.sampled_from([0, 1, 2, 3, 6])
TIES = st.builds(Layer, FIGURES, FIGURES, FIGURES, st.sampled_from([True, True, True, False]))
ROUGH = st.builds(
    Layer,
    st.one_of(st.just(0.0), st.floats(1e-3, 1e3)),
    st.integers(0, 10**7),
    st.one_of(st.just(0), st.integers(0, 10**8)),
    st.booleans(),
)
BANDWIDTHS = st.sampled_from([1, 3, 10**9])
ROUGH_BANDWIDTHS = st.sampled_from([10**4, 125 * 10**4, 10**12])


def cluster(machines: int, bytes_per_ms: int) -> Cluster:
    return Cluster(machines, bytes_per_ms * 8000.0)


def as_partition(option: Option) -> Partition:
    return Partition(option.ends, option.replicas)


def chain_of(layers: list[Layer]) -> Chain:
    return Chain.of(layer_profiles(layers))


@settings(max_examples=400, deadline=None)
@given(st.lists(TIES, min_size=1, max_size=6), st.integers(1, 5), BANDWIDTHS)
@example([Layer(0, 0, 6), Layer(0, 0, 6)], 3, 1)
@example([Layer(1), Layer(1), Layer(1), Layer(1)], 4, 1)
@example([Layer(1, 0, 1), Layer(1, 0, 1), Layer(1, 0, 1), Layer(1, 0, 1)], 4, 1)
def test_the_plan_is_the_one_that_brute_force_prefers(layers: list[Layer], machines: int, bytes_per_ms: int) -> None:
    chain, machine_park = chain_of(layers), cluster(machines, bytes_per_ms)
    expected = brute_force(layers, machines, Fraction(bytes_per_ms))

    found = best_partition(chain, machine_park)

    assert found == as_partition(expected)
    assert minibatch_ms(chain, found, machine_park) == pytest.approx(float(expected.value), rel=1e-12)
    assert partition_bytes(chain, found) == expected.sent


@settings(max_examples=60, deadline=None)
@given(st.lists(TIES, min_size=1, max_size=4), st.integers(6, 9), BANDWIDTHS)
def test_more_machines_than_layers_agree_with_brute_force_too(
    layers: list[Layer], machines: int, bytes_per_ms: int
) -> None:
    found = best_partition(chain_of(layers), cluster(machines, bytes_per_ms))

    assert found == as_partition(brute_force(layers, machines, Fraction(bytes_per_ms)))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROUGH, min_size=1, max_size=9), st.integers(1, 7), ROUGH_BANDWIDTHS)
def test_the_value_is_the_recurrences(layers: list[Layer], machines: int, bytes_per_ms: int) -> None:
    chain, machine_park = chain_of(layers), cluster(machines, bytes_per_ms)

    found = best_partition(chain, machine_park)

    assert found.machines <= machines
    value = minibatch_ms(chain, found, machine_park)
    assert value == pytest.approx(float(recurrence(layers, machines, Fraction(bytes_per_ms))), rel=1.001e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(TIES, min_size=1, max_size=7),
    st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    BANDWIDTHS,
)
def test_given_replicas_get_the_cuts_that_brute_force_prefers(
    layers: list[Layer], replicas: tuple[int, ...], bytes_per_ms: int
) -> None:
    chain = chain_of(layers)
    replicas = replicas[: chain.most_stages]
    park = cluster(sum(replicas), bytes_per_ms)

    found = best_cuts(chain, replicas, park)

    assert found == as_partition(brute_force_cuts(layers, replicas, Fraction(bytes_per_ms)))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROUGH, min_size=1, max_size=9), st.lists(st.integers(1, 9), min_size=1).map(tuple), ROUGH_BANDWIDTHS)
def test_given_replicas_of_rough_chains_get_the_least_value(
    layers: list[Layer], replicas: tuple[int, ...], bytes_per_ms: int
) -> None:
    chain = chain_of(layers)
    replicas = replicas[: chain.most_stages]
    park = cluster(sum(replicas), bytes_per_ms)

    value = minibatch_ms(chain, best_cuts(chain, replicas, park), park)

    expected = brute_force_cuts(layers, replicas, Fraction(bytes_per_ms)).value
    assert value == pytest.approx(float(expected), rel=1.001e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(TIES, min_size=1, max_size=7), st.integers(1, 7), BANDWIDTHS)
def test_model_parallelism_has_the_least_sum(layers: list[Layer], stages: int, bytes_per_ms: int) -> None:
    chain = chain_of(layers)
    stages = min(stages, chain.most_stages)
    expected = brute_force_cuts(layers, (1,) * stages, Fraction(bytes_per_ms), serial=True)

    found = cheapest_cuts(chain, stages)

    assert found == as_partition(expected)
    assert serial_ms(chain, found, cluster(stages, bytes_per_ms)) == pytest.approx(float(expected.value), rel=1e-12)


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(0, 1e6), st.integers(1, 40), st.integers(1, 40))
def test_a_threshold_that_some_replicas_meet_exactly_takes_the_fewest_that_do(
    compute: float, weights: float, exact: int, machines: int
) -> None:
    park = cluster(machines, 1000)

    def time(m: int) -> float:
        return float(stage_ms(compute, sync_ms(weights, float(m), park.bytes_per_ms), float(m)))

    threshold = time(exact)
    expected = next((m for m in range(1, machines + 1) if time(m) <= threshold), machines + 1)

    assert fewest_replicas(np.array([compute]), np.array([weights]), park, PAPER, threshold).tolist() == [expected]


def test_bytes_past_64_bits_are_compared_exactly() -> None:
    # lcm(5, 7, 8, 9, 11) = 27720 times these sizes leaves 64 bits; the two cuts differ by one byte in 2^50.
    layers = [Layer(0, 2**50 + 1), Layer(0, 2**50), *(Layer(0, 0) for _ in range(4))]

    found = best_cuts(chain_of(layers), (5, 7, 8, 9, 11), Cluster(40, 1e18))

    assert found.ends == brute_force_cuts(layers, (5, 7, 8, 9, 11), Fraction(125 * 10**12)).ends
    assert found.ends[0] == 2


def test_one_byte_in_a_petabyte_decides_before_the_later_cut() -> None:
    layers = [Layer(20, 2**50, 2**52), Layer(0, 2**50 + 1), Layer(20)]

    found = best_partition(chain_of(layers), Cluster(2, 1e18))

    assert found == as_partition(brute_force(layers, 2, Fraction(125 * 10**12))) == Partition((1, 3), (1, 1))


def test_a_thousand_machines_and_many_layers() -> None:
    # Alone a layer takes 1 ms, its cut 1.6 ms, and sharing it pays from 7 machines on: pairs of layers, 2 ms.
    chain = chain_of([Layer(1, 10**6, 4 * 10**6)] * 1500)
    park = Cluster(1024, 10e9)

    found = best_partition(chain, park)

    assert found == Partition(tuple(range(2, 1501, 2)), (1,) * 750)
    assert minibatch_ms(chain, found, park) == 2.0
    assert best_cuts(chain, (1,) * 750, park) == found


def test_a_free_network_and_a_thousand_machines_give_data_parallelism() -> None:
    chain = chain_of([Layer(0.1 + index % 7, 10**6, 4 * 10**6) for index in range(1500)])

    assert best_partition(chain, Cluster(1024, 1e18)) == Partition((1500,), (1024,))


def test_a_small_stage_beside_a_large_one_is_not_lost_in_rounding() -> None:
    layers = [Layer(1e9, 0, 0), Layer(1e-3, 0, 0)]
    found = best_partition(chain_of(layers), Cluster(2, 8e9))

    assert found == as_partition(brute_force(layers, 2, Fraction(10**6)))


def test_layers_that_take_no_time_need_one_machine() -> None:
    assert best_partition(chain_of([Layer(0, 5, 5)] * 4), cluster(8, 1)) == Partition((4,), (1,))


def test_no_cut_is_made_where_none_is_legal() -> None:
    found = best_partition(chain_of([Layer(6, 0, 10**9, cut=False), Layer(6, 0, 10**9)]), cluster(2, 1))

    assert found == Partition((2,), (1,))


@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages_than_cuts_allow_are_refused_with_the_number(stages: int) -> None:
    chain = chain_of([Layer(1), Layer(1, cut=False), Layer(1)])
    expected = rf"{stages} stages were asked for, but the profile's 3 layers can be cut into at most 2 \(1 \+ its 1"

    with pytest.raises(UserError, match=expected):
        best_cuts(chain, (1,) * stages, cluster(8, 1))
    with pytest.raises(UserError, match=expected):
        cheapest_cuts(chain, stages)


def test_the_search_ends_at_the_least_value_of_any_plan() -> None:
    values = [3.0, 3.0 * (1 + 1e-10), 3.5, 7.0, 80.0]

    found = least(0.5, 80.0, lambda limit: max((value for value in values if value <= limit), default=None))

    assert found.value == 3.0
    assert found.threshold == 3.0 * (1 + 1e-9)


def test_the_search_trusts_no_probe_that_overshoots() -> None:
    assert least(0.0, 5.0, lambda limit: 6.0).value == 5.0


@pytest.mark.parametrize(
    ("name", "machines", "gbit", "config", "over_data_parallel"),
    [
        ("vgg16", 4, 10, "3-1", None),
        ("vgg16", 8, 10, "7-1", 2.18),
        ("vgg16", 16, 10, "15-1", None),
        ("vgg16", 4, 25, "4", 1.0),
        ("vgg16", 8, 25, "8", 1.0),
        ("vgg16", 16, 25, "16", 1.0),
        ("alexnet", 4, 10, "3-1", None),
        ("alexnet", 8, 10, "6-1", 5.67),
        ("alexnet", 4, 25, "3-1", None),
        ("alexnet", 8, 25, "7-1", None),
        ("resnet50", 4, 10, "4", 1.0),
        ("resnet50", 16, 10, "16", 1.0),
        ("resnet50", 8, 25, "8", 1.0),
        ("inception_v3", 8, 10, "8", 1.0),
        ("inception_v3", 16, 25, "16", 1.0),
        ("inception_v3", 8, 25, "8", 1.0),
    ],
)
def test_known_plans_from_measured_profiles(
    name: str, machines: int, gbit: int, config: str, over_data_parallel: float | None
) -> None:
    plan = make_plan(original_profile(name), machines, gbit * 1e9)

    assert plan.config == config
    if over_data_parallel is not None:
        assert plan.predicted.speedup_over_data_parallel == pytest.approx(over_data_parallel, abs=0.005)
