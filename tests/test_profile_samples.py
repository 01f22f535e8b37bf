from __future__ import annotations

import pytest

from pd_profile.samples import FEWEST, MOST, Samples, kept_of


def samples_of(rows: list[tuple[list[float], list[float], float]]) -> Samples:
    samples = Samples(len(rows[0][0]))
    for forward, backward, plain in rows:
        samples.add(forward, backward, plain)
    return samples


@pytest.mark.parametrize(("timed", "kept"), [(1, 1), (2, 1), (3, 2), (4, 2), (10, 5), (999, 500)])
def test_the_faster_half_counts(timed: int, kept: int) -> None:
    assert kept_of(timed) == kept


def test_mean_and_standard_deviation_of_the_two_faster_minibatches() -> None:
    # Forward 1 and 3: mean 2, deviation sqrt(((1-2)^2 + (3-2)^2) / 1) = sqrt(2).
    rows = [([1.0, 10.0], [0.0, 4.0], 12.0), ([3.0, 10.0], [0.0, 8.0], 20.0), ([9.0, 90.0], [9.0, 90.0], 99.0)]
    summary = samples_of(rows).summary()
    assert summary.minibatches == 3
    assert summary.forward_ms == (2.0, 10.0)
    assert summary.backward_ms == (0.0, 6.0)
    assert summary.forward_ms_std == pytest.approx((2**0.5, 0.0))
    assert summary.backward_ms_std == pytest.approx((0.0, 8**0.5))
    assert summary.plain_ms == 16.0
    assert summary.layers_ms == 18.0
    assert summary.difference == pytest.approx(2 / 16)


def test_one_minibatch_shows_no_spread() -> None:
    summary = samples_of([([1.0], [2.0], 3.0)]).summary()
    assert (summary.forward_ms, summary.forward_ms_std, summary.backward_ms_std) == ((1.0,), (0.0,), (0.0,))


def test_a_slow_step_is_left_out_whole_and_the_sums_still_agree() -> None:
    # The slowest of the three instrumented steps is the second, of the plain ones the last. The second layer of the
    # second step is fast, and yet it does not count.
    rows = [([1.0, 2.0], [1.0, 2.0], 6.0), ([100.0, 0.0], [1.0, 0.0], 6.0), ([1.0, 2.0], [1.0, 2.0], 90.0)]
    summary = samples_of(rows).summary()
    assert summary.forward_ms == (1.0, 2.0)
    assert summary.backward_ms == (1.0, 2.0)
    assert summary.layers_ms == summary.plain_ms == 6.0


def test_many_minibatches_outgrow_the_first_block() -> None:
    summary = samples_of([([float(n)], [0.0], float(n)) for n in range(100)]).summary()
    # 0 .. 49 are kept.
    assert summary.forward_ms == (24.5,)
    assert summary.plain_ms == 24.5


def test_steady_times_need_the_fewest_minibatches() -> None:
    assert samples_of([([1.0], [2.0], 3.0)] * 10).needed() == FEWEST


def test_the_number_needed_follows_from_the_spread() -> None:
    # 20 timed, 10 kept: five of 0.9 and five of 1.1; the slower ten are outliers. Mean 1, deviation
    # sqrt(10 * 0.01 / 9) = 0.1054; 0.1054 / sqrt(k) <= 0.02 needs k = 28 kept, and 28 are kept of 55.
    rows = [([0.9], [0.0], 1.0)] * 5 + [([1.1], [0.0], 1.0)] * 5 + [([9.0], [0.0], 1.0)] * 10
    needed = samples_of(rows).needed()
    assert needed == 55
    assert kept_of(needed) == 28
    assert kept_of(needed - 1) < 28


def test_a_layer_under_one_percent_does_not_matter() -> None:
    # The second layer swings by its whole size, but takes 0.5 % of the time.
    rows = [([100.0, 0.0], [0.0, 0.0], 100.0), ([99.0, 1.0], [0.0, 0.0], 100.0)] * 12
    assert samples_of(rows).needed() == FEWEST


def test_an_unsteady_plain_step_needs_more() -> None:
    assert samples_of([([1.0], [0.0], plain) for plain in (1.0, 1.5, 2.0, 3.0) * 6]).needed() > FEWEST


def test_hopeless_times_stop_at_the_most() -> None:
    assert samples_of([([time], [0.0], 1.0) for time in (1.0, 50.0, 99.0, 99.0) * 6]).needed() == MOST
