"""The simulator: paces worked by hand, and what must hold of every pass and every transfer of a run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pd_format.schedule
from pd_format.schedule import find_deadlock, paper_depths, work_order
from pd_format.versions import Mode, stage_versions
from pd_plan.depth import default_mode
from pd_plan.network import LINKS, Parcel, SharedCards, Wiring
from pd_plan.simulator import (
    Pass,
    Recording,
    StageLoad,
    Transfer,
    parts_of,
    record,
    steady_ms,
)

OVERLAP = Mode(sync="overlap")

# One byte a ms: bytes are transfer times.
CARD, PAIRWISE, SHARED = (Wiring(1.0, links) for links in LINKS)


def straight(stages: int, transfer: int, forward: float = 1.0, backward: float = 2.0) -> list[StageLoad]:
    """Equal stages of one machine each."""
    return [StageLoad(forward, backward, transfer if s < stages - 1 else 0, 0, 1) for s in range(stages)]


# In halves of a ms: 1 ms forward, 2 ms backward, 1.5 ms each way over a cut.
FOUR_EQUAL_STAGES = straight(4, 3, forward=2, backward=4)


@pytest.mark.parametrize(
    ("wiring", "depths", "pace"),
    [
        (CARD, [4, 3, 2, 1], 5.25),
        (PAIRWISE, [4, 3, 2, 1], 5.25),
        (PAIRWISE, [7, 5, 3, 1], 3.0),
        (CARD, [7, 5, 3, 1], 10 / 3),
        (CARD, [9, 7, 4, 1], 3.0),
        (CARD, [7, 7, 7, 7], 21.0),
        (PAIRWISE, [7, 7, 7, 7], 21.0),
    ],
)
def test_four_equal_stages_whose_transfers_take_as_long_as_a_stage(
    wiring: Wiring, depths: Sequence[int], pace: float
) -> None:
    assert steady_ms(FOUR_EQUAL_STAGES, depths, wiring, OVERLAP) / 2 == pytest.approx(pace, rel=1e-3)


def test_the_run_is_the_timetable_drawn_with_the_schedule() -> None:
    pictures = re.findall(r"^    stage (\d)   (.*?)(?: +\.\.\.)$", pd_format.schedule.__doc__ or "", re.MULTILINE)

    run = record(straight(4, 0, forward=1, backward=1), [4, 3, 2, 1], CARD, OVERLAP, 12)

    assert len(pictures) == 4
    for stage, picture in pictures:
        cells = {int(one.start_ms): str(one.item) for one in run.passes if one.stage == int(stage)}
        drawn = "".join(cells.get(slot, "").ljust(3) for slot in range(-(-len(picture) // 3)))
        assert drawn.rstrip() == picture.rstrip()


def test_two_stages_by_hand() -> None:
    """F 1, B 2, 3 ms over the cut each way, depths 2-1.

    worker 0   F0 0-1  F1 1-2                     B0 10-12 F2 12-13
    card       a0 1-4  a1 4-7                     a2 13-16
    worker 1   F0 4-5  B0 5-7  F1 7-8 B1 8-10
    card       g0 7-10         g1 10-13
    """
    run = record(straight(2, 3), [2, 1], CARD, OVERLAP, 2)

    assert [f"{one.worker} {one.item} {one.start_ms:g}-{one.end_ms:g}" for one in run.passes] == [
        "0 F0 0-1",
        "0 F1 1-2",
        "1 F0 4-5",
        "1 B0 5-7",
        "1 F1 7-8",
        "1 B1 8-10",
        "0 B0 10-12",
        "0 F2 12-13",
        "0 B1 13-15",
    ]
    assert run.transfers == [
        Transfer("activations", 0, 0, 0, 1, 1, 4),
        Transfer("activations", 1, 0, 0, 1, 4, 7),
        Transfer("gradients", 0, 0, 1, 0, 7, 10),
        Transfer("gradients", 1, 0, 1, 0, 10, 13),
    ]


def test_one_minibatch_at_a_time_takes_all_times_and_both_transfers_of_each_cut() -> None:
    assert steady_ms(straight(3, 5), [1, 1, 1], CARD, OVERLAP) == pytest.approx(3 * 3 + 2 * 2 * 5)


def test_replicas_in_step_wait_for_the_last_part_of_a_round() -> None:
    """Two replicas, F 1, B 8: a part of 1/16 of w every half ms; half of 1.6 bytes each way, so 0.05 ms a part.

    The last part's gradients leave at 9 and are there at 9.05, its parameters at 9.1: a round of two takes 9.1 ms.
    """
    assert parts_of(2) == 16
    load = StageLoad(1, 8, 0, 2, 2)
    assert steady_ms([load._replace(weight_bytes=0)], [1], CARD, default_mode(1)) == pytest.approx(9 / 2)
    wiring = Wiring(1.25)  # 0.5 * 2 / 16 / 1.25 = 0.05 ms
    assert steady_ms([load], [1], wiring, default_mode(1)) == pytest.approx(9.1 / 2)


def test_parameters_that_are_ready_early_synchronise_within_the_backward_pass() -> None:
    late = StageLoad(1, 8, 0, 6, 2, ready=(1.0,) * 16)
    early = late._replace(ready=(0.125,) * 16)

    # Half of 6 bytes of gradients and then of parameters: from 9 to 15 or, early, from 2 to 8.
    assert steady_ms([late], [1], CARD, default_mode(1)) == pytest.approx(15 / 2)
    assert steady_ms([early], [1], CARD, default_mode(1)) == pytest.approx(9 / 2)


def test_a_synchronisation_longer_than_its_round_sets_the_pace() -> None:
    """Each of 4 replicas sends and receives 2 * 3/4 of 40 bytes a round: 60 ms for four minibatches, not 3 * 4."""
    loads = [StageLoad(4, 8, 0, 40, 4), StageLoad(1, 1, 0, 0, 1)]

    pace = steady_ms(loads, [4, 1], CARD, OVERLAP)

    assert 15 <= pace <= 15 * 1.15


def test_overlap_hides_what_being_in_step_does_not() -> None:
    loads = [StageLoad(4, 4, 0, 8, 2), StageLoad(1, 1, 0, 0, 1)]

    assert steady_ms(loads, [3, 1], CARD, OVERLAP) == pytest.approx(4)
    assert steady_ms(loads, [3, 1], CARD, Mode(sync="bsp")) > 4.2


STAGES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(0, 6), st.integers(0, 5), st.integers(0, 12)),
    min_size=1,
    max_size=4,
)
LINK = st.sampled_from(LINKS)


def loads_of_tuples(stages: Sequence[tuple[int, int, int, int, int]]) -> list[StageLoad]:
    last = len(stages) - 1
    return [StageLoad(f, b, cut if s < last else 0, w, r) for s, (r, f, b, cut, w) in enumerate(stages)]


def replicas_of(loads: Sequence[StageLoad]) -> list[int]:
    return [load.replicas for load in loads]


def deepened(loads: Sequence[StageLoad], more: int) -> list[int]:
    """The paper's depths as if there were more replicas behind each stage; they deadlock as little."""
    replicas = replicas_of(loads)
    behind = [sum(replicas[s:]) + more * (len(loads) - 1 - s) for s in range(len(loads))]
    return [-(-minibatches // r) for minibatches, r in zip(behind, replicas, strict=True)]


def by_worker(passes: Sequence[Pass]) -> dict[int, list[Pass]]:
    result = defaultdict(list)
    for one in passes:
        result[one.worker].append(one)
    return result


def simulated(loads: Sequence[StageLoad], depths: Sequence[int], links: str, minibatches: int = 24) -> Recording:
    return record(loads, depths, Wiring(1.0, links), default_mode(len(loads)), minibatches)


@settings(deadline=None, max_examples=60)
@given(STAGES, LINK, st.integers(0, 3))
def test_every_worker_runs_the_order_of_the_schedule_one_pass_at_a_time(
    stages: list[tuple[int, int, int, int, int]], links: str, deeper: int
) -> None:
    loads = loads_of_tuples(stages)
    depths = deepened(loads, deeper)

    for passes in by_worker(simulated(loads, depths, links).passes).values():
        first = passes[0]
        load = loads[first.stage]
        order = work_order(first.replica, load.replicas, depths[first.stage], 10_000)
        now = 0.0
        for one in passes:
            assert one.item == next(order)
            assert one.start_ms >= now
            assert one.end_ms - one.start_ms == pytest.approx(load.forward_ms if one.item.forward else load.backward_ms)
            now = one.end_ms


@settings(deadline=None, max_examples=60)
@given(STAGES, LINK)
def test_no_pass_starts_before_what_it_needs_is_there(stages: list[tuple[int, int, int, int, int]], links: str) -> None:
    loads = loads_of_tuples(stages)
    depths = paper_depths(replicas_of(loads))
    run = simulated(loads, depths, links)
    arrived = {(one.kind, one.number, one.target): one.end_ms for one in run.transfers}
    # A version is complete with the last of its parts.
    parts: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in run.transfers:
        if one.kind == "parameters":
            parts[one.target, one.number].append(one.end_ms)
    mode = default_mode(len(loads))
    for one in run.passes:
        b, at_end = one.item.minibatch, one.stage == (0 if one.item.forward else len(loads) - 1)
        if not at_end:
            kind = "activations" if one.item.forward else "gradients"
            assert arrived[kind, b, one.worker] <= one.start_ms
        versions = stage_versions(mode, replicas_of(loads), depths, one.stage)
        needed = versions.forward(b)
        if not one.item.forward:
            needed = max(versions.backward(b), versions.complete_before_backward(b))
        # Replicas that train nothing wait for no version.
        if loads[one.stage].replicas > 1 and loads[one.stage].weight_bytes and needed:
            there = parts[one.worker, needed]
            assert len(there) == parts_of(loads[one.stage].replicas)
            assert max(there) <= one.start_ms


@settings(deadline=None, max_examples=60)
@given(STAGES, LINK)
def test_a_link_carries_all_bytes_and_no_more_at_a_time_than_it_may(
    stages: list[tuple[int, int, int, int, int]], links: str
) -> None:
    loads = loads_of_tuples(stages)
    run = simulated(loads, paper_depths(replicas_of(loads)), links)
    stage_of = [s for s, load in enumerate(loads) for _ in range(load.replicas)]
    lanes: dict[object, list[Transfer]] = defaultdict(list)
    for one in run.transfers:
        assert one.source != one.target
        if links == "card":
            lanes["out", one.source].append(one)
            lanes["in", one.target].append(one)
        else:
            lanes[one.source, one.target].append(one)
        sender, receiver = stage_of[one.source], stage_of[one.target]
        if one.kind in ("activations", "gradients"):
            assert receiver - sender == (1 if one.kind == "activations" else -1)
            size: float = loads[min(sender, receiver)].output_bytes
        else:
            load = loads[sender]
            assert sender == receiver
            size = (load.replicas - 1) * load.weight_bytes / load.replicas / parts_of(load.replicas)
        if links == "shared":
            assert one.end_ms - one.start_ms >= size - 1e-6
        else:
            assert one.end_ms - one.start_ms == pytest.approx(size)
    for transfers in lanes.values():
        transfers.sort(key=lambda one: (one.start_ms, one.end_ms))
        for one, following in pairwise(transfers):
            assert one.end_ms <= following.start_ms + 1e-6


def test_connections_share_a_card_evenly_and_what_one_cannot_use_goes_to_the_others() -> None:
    agenda: list[tuple[float, int, Callable[[int], None], int]] = []
    ends: dict[tuple[int, int], float] = {}
    now = 0.0
    cards = SharedCards(
        lambda ms, happen, stamp: heappush(agenda, (ms, len(agenda), happen, stamp)),
        lambda parcel, start_ms: ends.update({(parcel.source, parcel.target): now}),
    )
    # Worker 0's card out is shared by three, so the one to worker 1 leaves two thirds of that card's way in to 4.
    for age, (source, target, takes) in enumerate([(0, 1, 10), (0, 2, 10), (0, 3, 20), (4, 1, 20), (4, 1, 5)]):
        cards.add(0.0, Parcel(age, "activations", age, 0, source, target, takes))
    cards.settle(0.0)
    first: list[tuple[int, int]] = []
    while agenda:
        now, _, happen, stamp = heappop(agenda)
        happen(stamp)
        first = first or list(ends)
        cards.settle(now)
    # At 30 ms both short ones of worker 0 are over, and 4 has sent its 20. Then each has its cards to itself.
    assert sorted(first) == [(0, 1), (0, 2), (4, 1)]
    assert ends == pytest.approx({(0, 1): 30, (0, 2): 30, (0, 3): 40, (4, 1): 35})


def test_shared_cards_make_a_straight_pipeline_slower_than_one_transfer_after_the_other() -> None:
    loads = straight(4, 2)
    card, shared = (steady_ms(loads, [4, 3, 2, 1], wiring, OVERLAP) for wiring in (CARD, SHARED))
    assert card < shared < 1.5 * card


@settings(deadline=None, max_examples=40)
@given(STAGES, LINK)
def test_no_pace_is_faster_than_compute_and_full_duplex_links_allow(
    stages: list[tuple[int, int, int, int, int]], links: str
) -> None:
    loads = loads_of_tuples(stages)
    depths = deepened(loads, 2)

    pace = steady_ms(loads, depths, Wiring(1.0, links), default_mode(len(loads)))

    bounds = [(load.forward_ms + load.backward_ms) / load.replicas for load in loads]
    if links == "card":
        bounds += [load.output_bytes / min(load.replicas, following.replicas) for load, following in pairwise(loads)]
        bounds += [2 * (load.replicas - 1) * load.weight_bytes / load.replicas**2 for load in loads]
    assert pace >= max(bounds) * (1 - 0.05)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=2, max_size=3))
def test_it_deadlocks_exactly_where_the_rule_says(stages: list[tuple[int, int]]) -> None:
    loads = [StageLoad(1, 1, 1, 1, r) for r, _ in stages]
    depths = [w for _, w in stages]
    lags = [stage_versions(OVERLAP, replicas_of(loads), depths, s).lag for s in range(len(loads))]

    if find_deadlock(replicas_of(loads), depths, lags) is None:
        assert len(record(loads, depths, CARD, OVERLAP, 40).passes) > 40
    else:
        with pytest.raises(RuntimeError, match="these depths deadlock"):
            record(loads, depths, CARD, OVERLAP, 40)


def test_a_transfer_to_a_busy_receiver_holds_up_none_behind_it() -> None:
    """Worker 1 sends both ways; while worker 2 receives nothing yet, gradients to worker 0 need not queue."""
    loads = [StageLoad(1, 1, 4, 0, 1), StageLoad(1, 1, 4, 0, 2), StageLoad(9, 9, 0, 0, 1)]
    run = record(loads, paper_depths([1, 2, 1]), CARD, OVERLAP, 6)

    waits = [one for one in run.transfers if one.kind == "gradients" and one.target == 0]
    assert waits
    for one in waits:
        ready = next(p.end_ms for p in run.passes if p.worker == one.source and str(p.item) == f"B{one.number}")
        busy = [t for t in run.transfers if t is not one and (t.source == one.source or t.target == 0)]
        # It left at once, or when the transfer that was on one of its own two cards ended.
        assert one.start_ms == ready or any(t.end_ms == one.start_ms for t in busy)


def test_many_replicas_synchronise_in_fewer_parts_but_no_fewer_bytes() -> None:
    assert [parts_of(replicas) for replicas in (1, 2, 32, 64, 1000)] == [0, 16, 8, 4, 2]

    run = record([StageLoad(64, 64, 0, 64, 64)], [1], CARD, default_mode(1), 128)

    first = [one for one in run.transfers if one.kind == "parameter gradients" and one.number == 0 and one.source == 5]
    assert sum(one.end_ms - one.start_ms for one in first) == pytest.approx(63)


def test_the_same_run_twice_is_the_same() -> None:
    loads = [StageLoad(3, 5, 4, 7, 3), StageLoad(1, 2, 5, 3, 2), StageLoad(1, 1, 0, 0, 1)]
    assert record(loads, [3, 2, 1], CARD, OVERLAP, 30) == record(loads, [3, 2, 1], CARD, OVERLAP, 30)


def test_a_pipeline_in_which_nothing_takes_time_comes_to_an_end() -> None:
    assert steady_ms(straight(3, 0, 0, 0), [3, 2, 1], CARD, OVERLAP) == 0
