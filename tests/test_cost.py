"""The cost equations against numbers worked by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from pd_format.errors import UserError
from pd_format.profile import LayerProfile
from pd_plan.cluster import Cluster
from pd_plan.cost import (
    Chain,
    CostModel,
    Partition,
    cut_bytes,
    cut_ms,
    minibatch_ms,
    partition_bytes,
    serial_ms,
    stage_bytes,
    stage_ms,
    sync_ms,
    transfer_ms,
)
from plan_oracles import Layer, layer_profiles

# 10 Gbit/s: 1.25e9 bytes a second, 1.25e6 bytes a millisecond.
TEN_GBIT = Cluster(4, 10e9)


def test_ten_gbit_a_second_are_a_million_and_a_quarter_bytes_a_millisecond() -> None:
    assert TEN_GBIT.bytes_per_ms == 1.25e6


@pytest.mark.parametrize(("machines", "bps"), [(0, 1e9), (-1, 1e9), (1, 0.0), (1, -1.0), (1, float("inf"))])
def test_a_cluster_needs_a_machine_and_a_finite_bandwidth(machines: int, bps: float) -> None:
    with pytest.raises(UserError, match="expected"):
        Cluster(machines, bps)


def test_a_cut_takes_its_bytes_once_each_way() -> None:
    # 10 MB at 1.25 MB a ms: 8 ms there, 8 ms for the gradients back.
    assert transfer_ms(10e6, 1.25e6) == 8.0
    assert cut_ms(10e6, 1.25e6) == 16.0
    assert cut_bytes(10_000_000) == 20_000_000


def test_synchronisation_moves_three_quarters_four_times_with_four_machines() -> None:
    # 100 MB over 4 machines: 4 * 3/4 * 100 MB = 300 MB through each link, 240 ms.
    assert sync_ms(100e6, 4.0, 1.25e6) == 240.0
    # Each of 4 sends 3/4 as a worker and 3/4 as a shard in a round of 4 minibatches.
    assert stage_bytes(100_000_000, 4) == 150_000_000
    assert stage_bytes(1, 3) == Fraction(4, 3)


def test_one_machine_synchronises_nothing() -> None:
    assert sync_ms(100e6, 1.0, 1.25e6) == 0.0
    assert stage_bytes(100_000_000, 1) == 0


def test_a_stage_takes_the_longer_of_computing_and_synchronising_over_its_replicas() -> None:
    assert stage_ms(120.0, 240.0, 4.0) == 60.0
    assert stage_ms(400.0, 240.0, 4.0) == 100.0


def test_equations_take_arrays() -> None:
    times = stage_ms(
        np.array([120.0, 400.0]), sync_ms(np.array([1e8, 1e8]), np.array([4.0, 4.0]), 1.25e6), np.full(2, 4.0)
    )

    assert times.tolist() == [60.0, 100.0]


def test_a_full_duplex_link_halves_cut_and_synchronisation() -> None:
    duplex = CostModel(cut=1, sync=2)

    assert cut_ms(10e6, 1.25e6, duplex) == 8.0
    assert sync_ms(100e6, 4.0, 1.25e6, duplex) == 120.0


@pytest.fixture
def chain() -> Chain:
    return Chain.of(layer_profiles([Layer(90, 10_000_000, 5_000_000), Layer(20, 1_000_000), Layer(30, 0, 100_000_000)]))


def test_a_plans_time_is_its_longest_part(chain: Chain) -> None:
    # Stage 0: 110 ms of compute on 3 machines, 36.67; its synchronisation 4 * 2/3 * 5 MB is 10.67 ms a round.
    # The cut after layer 1: 2 * 0.8 ms. Stage 1: 30 ms.
    assert minibatch_ms(chain, Partition((2, 3), (3, 1)), TEN_GBIT) == pytest.approx(110 / 3)
    # Stage 1 on 3 machines instead: 4 * 2/3 * 100 MB, 213.3 ms a round of 3; stage 0 alone is slower, 110 ms.
    assert minibatch_ms(chain, Partition((2, 3), (1, 3)), TEN_GBIT) == 110.0
    # All on 4 machines: 4 * 3/4 * 105 MB is 252 ms a round of 4.
    assert minibatch_ms(chain, Partition((3,), (4,)), TEN_GBIT) == 63.0
    # The cut after layer 0: 16 ms, shorter than a stage.
    assert minibatch_ms(chain, Partition((1, 3), (1, 1)), TEN_GBIT) == 90.0


def test_a_cut_can_be_the_longest_part(chain: Chain) -> None:
    # At 1 Gbit/s the cut after layer 0 takes 160 ms.
    assert minibatch_ms(chain, Partition((1, 3), (1, 1)), Cluster(2, 1e9)) == 160.0


def test_one_minibatch_at_a_time_takes_all_stages_and_cuts(chain: Chain) -> None:
    assert serial_ms(chain, Partition((1, 2, 3), (1, 1, 1)), TEN_GBIT) == pytest.approx(140 + 16 + 1.6)


def test_a_plan_sends_its_cuts_twice_and_synchronises_each_replicated_stage(chain: Chain) -> None:
    assert partition_bytes(chain, Partition((2, 3), (3, 1))) == 2_000_000 + Fraction(2 * 2 * 5_000_000, 3)
    assert partition_bytes(chain, Partition((3,), (1,))) == 0


def test_stages_end_only_at_legal_cuts_and_the_end() -> None:
    chain = Chain.of(layer_profiles([Layer(1), Layer(1, cut=False), Layer(1), Layer(1, cut=False)]))

    assert chain.boundaries == (0, 1, 3, 4)
    assert chain.most_stages == 3


def test_only_trainable_parameters_are_synchronised() -> None:
    frozen = LayerProfile(
        name="a",
        op="Linear",
        forward_ms=1.0,
        backward_ms=2.0,
        activation_bytes=0,
        parameter_bytes=100,
        trainable_bytes=40,
    )

    chain = Chain.of([frozen])

    assert chain.weights(0, 1) == 40
    assert chain.compute_ms(0, 1) == 3.0


def test_prefix_sums_are_correctly_rounded() -> None:
    chain = Chain.of(layer_profiles([Layer(0.1)] * 10))

    assert chain.prefix_ms[-1] == 1.0
    assert chain.prefix_ms[3] == pytest.approx(0.3, rel=1e-16)


def test_a_partition_knows_its_ranges_and_config() -> None:
    partition = Partition((2, 3), (3, 1))

    assert partition.ranges == [(0, 2), (2, 3)]
    assert partition.machines == 4
    assert partition.config == "3-1"
