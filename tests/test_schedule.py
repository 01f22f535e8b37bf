"""The order of work, depths, deadlocks, weight versions and memory: the drawings in the code are what is expected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pd_format.schedule
import pd_format.versions
from memory_oracle import stage_memory_bytes
from pd_format.memory import arrivals_held
from pd_format.profile import LayerProfile
from pd_format.schedule import WorkItem, find_deadlock, paper_depths, rounds_of, work_order
from pd_format.versions import Mode, StageVersions, lag_of, least_group, sets_needed, stage_versions
from plan_oracles import Layer, layer_profiles


def one_stage(replicas: int, in_flight: int, sync: str = "overlap") -> StageVersions:
    """The versions of a stage on its own, under weight stashing."""
    return stage_versions(Mode(sync=sync), [replicas], [in_flight], 0)


def stash_version(round: int, in_flight: int, lag: int) -> int:
    return max(0, round - in_flight + 1 - lag)


Timetable = dict[tuple[int, int], list[tuple[int, WorkItem]]]


def simulate(replicas: Sequence[int], depths: Sequence[int], lags: Sequence[int], minibatches: int) -> Timetable | None:
    """Run every worker's static order, one slot an item, waiting for real messages; None where all wait for ever.

    F(b) waits for F(b) of the stage before, B(b) for B(b) of the stage behind. B(j) of a replicated stage waits until
    the rounds up to j - 1 - lag are complete, that is until all replicas with a minibatch in them ran their B; F(j)
    waits for the version that it uses, max(0, j - w + 1 - lag). What is sent or synchronised in a slot is there in
    the next. Queues hold any number.
    """
    workers = [(s, k) for s, r in enumerate(replicas) for k in range(r)]
    todo = {(s, k): list(work_order(k, replicas[s], depths[s], minibatches)) for s, k in workers}
    done: set[tuple[int, bool, int]] = set()
    table: Timetable = {worker: [] for worker in workers}

    def complete(s: int, rounds: int) -> bool:
        return all((s, False, b) in done for b in range(min(rounds * replicas[s], minibatches)))

    def may_start(s: int, item: WorkItem) -> bool:
        neighbour = s - 1 if item.forward else s + 1
        if 0 <= neighbour < len(replicas) and (neighbour, item.forward, item.minibatch) not in done:
            return False
        needed = stash_version(item.round, depths[s], lags[s]) if item.forward else item.round - lags[s]
        return complete(s, needed)

    slot = 0
    while any(todo.values()):
        starting = [(s, k) for s, k in workers if todo[s, k] and may_start(s, todo[s, k][0])]
        if not starting:
            return None
        for worker in starting:
            table[worker].append((slot, todo[worker].pop(0)))
        done |= {(s, item.forward, item.minibatch) for (s, k) in starting for _, item in table[s, k][-1:]}
        slot += 1
    return table


def drawn(row: list[tuple[int, WorkItem]], length: int) -> str:
    """A row of the timetable: three characters a slot."""
    cells = {slot: str(item) for slot, item in row}
    return "".join(cells.get(slot, "").ljust(3) for slot in range(length)).rstrip()


def test_the_timetable_is_the_one_drawn_in_the_docstring() -> None:
    pictures = re.findall(r"^    stage (\d)   (.*?)(?: +\.\.\.)$", pd_format.schedule.__doc__ or "", re.MULTILINE)
    assert [stage for stage, _ in pictures] == ["0", "1", "2", "3"]

    table = simulate([1, 1, 1, 1], [4, 3, 2, 1], [0, 0, 0, 0], 12)

    assert table is not None
    for stage, picture in pictures:
        assert drawn(table[int(stage), 0], -(-len(picture) // 3)) == picture.rstrip()


def test_a_replica_runs_its_own_minibatches_forward_then_alternates() -> None:
    orders = [" ".join(map(str, work_order(k, 2, 2, 7))) for k in range(2)]

    assert orders == ["F0 F2 B0 F4 B2 F6 B4 B6", "F1 F3 B1 F5 B3 B5"]


def test_fewer_minibatches_than_the_depth_all_go_forward_first() -> None:
    assert " ".join(map(str, work_order(0, 1, 4, 2))) == "F0 F1 B0 B1"
    assert list(work_order(2, 3, 4, 2)) == []


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 30))
def test_every_minibatch_passes_once_each_way_and_never_more_than_w_are_under_way(
    replicas: int, in_flight: int, minibatches: int
) -> None:
    seen: list[int] = []
    for k in range(replicas):
        under_way = 0
        order = list(work_order(k, replicas, in_flight, minibatches))
        for item in order:
            assert item.minibatch == item.round * replicas + k
            under_way += 1 if item.forward else -1
            assert 0 <= under_way <= in_flight
        forward = [item.minibatch for item in order if item.forward]
        assert forward == [item.minibatch for item in order if not item.forward]
        assert len(forward) == rounds_of(k, replicas, minibatches)
        seen += forward
    assert sorted(seen) == list(range(minibatches))


@pytest.mark.parametrize(
    ("replicas", "depths"),
    [([1], [1]), ([4], [1]), ([1, 1, 1, 1], [4, 3, 2, 1]), ([2, 1, 1], [2, 2, 1]), ([1, 2], [3, 1]), ([7, 1], [2, 1])],
)
def test_the_papers_depths(replicas: list[int], depths: list[int]) -> None:
    assert paper_depths(replicas) == depths


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from(["bsp", "overlap"]))
def test_the_papers_depths_never_deadlock(replicas: list[int], sync: str) -> None:
    depths, lags = paper_depths(replicas), [lag_of(r, sync) for r in replicas]

    assert find_deadlock(replicas, depths, lags) is None
    assert simulate(replicas, depths, lags, 4 * sum(replicas)) is not None


def enough(replicas: Sequence[int], depths: Sequence[int]) -> int:
    """Minibatches after which a deadlock must have shown: all pipelines filled, and some rounds more."""
    return 3 * max(r * w for r, w in zip(replicas, depths, strict=True)) + 2 * max(replicas)


@pytest.mark.parametrize("sync", ["bsp", "overlap"])
def test_two_stages_deadlock_exactly_where_the_rule_says(sync: str) -> None:
    outcomes = set()
    for *replicas, first, second in product(range(1, 4), range(1, 4), range(1, 5), range(1, 5)):
        lags = [lag_of(r, sync) for r in replicas]
        depths = [first, second]
        stuck = simulate(replicas, depths, lags, enough(replicas, depths)) is None
        assert (find_deadlock(replicas, depths, lags) is not None) == stuck, (replicas, depths, lags)
        outcomes.add(stuck)
    assert outcomes == {True, False}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=3, max_size=4),
)
def test_longer_pipelines_deadlock_exactly_where_the_rule_says(stages: list[tuple[int, int, bool]]) -> None:
    replicas = [r for r, _, _ in stages]
    depths = [w for _, w, _ in stages]
    lags = [lag_of(r, "overlap" if overlap else "bsp") for r, _, overlap in stages]

    stuck = simulate(replicas, depths, lags, enough(replicas, depths)) is None

    assert (find_deadlock(replicas, depths, lags) is not None) == stuck


def test_a_deadlock_is_told_with_its_stages_and_numbers() -> None:
    assert find_deadlock([1, 1], [2, 3], [0, 0]) == (
        "in_flight 2 of stage 0 (1 replica) and in_flight 3 of stage 1 (1 replica) deadlock: stage 1 waits for more "
        "than 2 minibatches, stage 0 sends 2 before it waits for an answer"
    )
    message = find_deadlock([2, 1], [2, 4], [0, 0])
    assert message is not None
    assert "deadlock without overlap of the synchronisation" in message
    assert find_deadlock([2, 1], [2, 4], [1, 0]) is None


def test_versions_are_those_drawn_in_the_docstring() -> None:
    text = pd_format.versions.__doc__ or ""
    items = re.findall(r"[FB]\d", next(line for line in text.splitlines() if "F0 F1" in line))
    used = re.findall(r"\d+", next(line for line in text.splitlines() if "version used" in line))
    made = re.findall(r"\d+", next(line for line in text.splitlines() if "version made" in line))

    order = list(work_order(0, 1, 3, 20))[: len(items)]

    assert [str(item) for item in order] == items
    assert [str(one_stage(1, 3).forward(item.minibatch)) for item in order] == used
    assert [str(item.round + 1) for item in order if not item.forward] == made


@pytest.mark.parametrize(
    ("replicas", "sync", "lag"), [(1, "overlap", 0), (1, "bsp", 0), (3, "overlap", 1), (3, "bsp", 0)]
)
def test_only_a_replicated_stage_that_overlaps_lags(replicas: int, sync: str, lag: int) -> None:
    assert lag_of(replicas, sync) == lag


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 5, 8])
def test_as_many_parameter_sets_as_minibatches_under_way_and_one_for_the_lag(in_flight: int, lag: int) -> None:
    assert sets_needed(one_stage(1 + lag, in_flight)) == in_flight + lag


@pytest.mark.parametrize("sync", ["overlap", "bsp"])
def test_vertical_sync_holds_no_more_sets_than_its_bound(sync: str) -> None:
    for replicas in product(range(1, 4), repeat=3):
        depths = paper_depths(replicas)
        for s, r in enumerate(replicas):
            r_0, behind = replicas[0], depths[0] - 1 + lag_of(replicas[0], sync)
            bound = min(behind + 1, -(-(r_0 * behind + r_0 - 1) // r) + 1) + 1 + (1 if r > 1 else 0)
            assert sets_needed(stage_versions(Mode("vertical-sync", sync), replicas, depths, s)) <= bound


def test_naive_pipelining_needs_one_set_2bw_two_and_a_flush_one() -> None:
    replicas, depths = [1, 1, 1], [3, 2, 1]
    for s in range(3):
        assert sets_needed(stage_versions(Mode("none"), replicas, depths, s)) == 1
        assert sets_needed(stage_versions(Mode("2bw", group=3), replicas, depths, s)) == 2
        assert sets_needed(stage_versions(Mode(flush=8), replicas, depths, s)) == 1


def test_the_default_group_is_a_multiple_of_all_replica_counts() -> None:
    assert least_group([2, 3], [2, 1]) == 6
    assert least_group([1, 1, 1, 1], [4, 3, 2, 1]) == 4


def test_vertical_sync_by_hand() -> None:
    """2-1, w_0 = 2, lag_0 = 1: minibatch b meets version max(0, floor(b / 2) - 2) at stage 0, twice that behind."""
    stages = [stage_versions(Mode("vertical-sync"), [2, 1], [2, 1], s) for s in range(2)]
    assert [stages[0].forward(b) for b in range(8)] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert [stages[1].forward(b) for b in range(8)] == [0, 0, 0, 0, 0, 0, 2, 2]
    assert [stages[1].backward(b) for b in range(8)] == [stages[1].forward(b) for b in range(8)]


def test_what_may_arrive_before_a_replica_takes_it() -> None:
    assert arrivals_held(previous_in_flight=2, previous_replicas=7, replicas=1) == 15
    assert arrivals_held(previous_in_flight=3, previous_replicas=1, replicas=2) == 3


def heavy(trainable: int) -> LayerProfile:
    (layer,) = layer_profiles([Layer(1, 0, 1000)])
    return layer.model_copy(update={"trainable_bytes": trainable, "stash_bytes": 30})


def test_one_worker_on_its_own_holds_everything_once() -> None:
    # 1000 of parameters, gradients and momentum each; one minibatch's stash; nothing arrives or leaves.
    assert stage_memory_bytes([heavy(1000)], 77, 0, one_stage(1, 1, "bsp"), None) == 1000 + 1000 + 1000 + 30


def test_a_worker_of_one_replicated_stage_adds_a_round_of_its_shard() -> None:
    # Of 4 replicas a shard holds the 3 others' gradients of a quarter, and a quarter of the optimizer state.
    assert stage_memory_bytes([heavy(1000)], 0, 0, one_stage(4, 1, "bsp"), None) == 1000 + 1000 + 750 + 250 + 30


def test_a_worker_in_a_pipeline_holds_versions_stashes_and_buffers() -> None:
    # in_flight 2 and lag 1: 3 sets of the 400 that train beside 600 frozen; two rounds of half of the other's 400
    # gradients; Adam's two states for its half; 2 stashes; ceil(3 * 1 / 2) + 1 = 3 arrivals; 2 outputs.
    expected = 600 + 3 * 400 + 400 + 2 * 200 + 400 + 2 * 30 + 3 * 50 + 2 * 20
    assert stage_memory_bytes([heavy(400)], 50, 20, one_stage(2, 2), (1, 3), "adam") == expected


def test_earlier_stages_need_more_for_their_stashes() -> None:
    needs = [stage_memory_bytes([heavy(1000)], 0, 0, one_stage(1, depth), None) for depth in paper_depths([1, 1, 1])]

    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == 3
