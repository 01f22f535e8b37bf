from __future__ import annotations

import pytest
import torch
from torch import nn

from pd_format.schedule import work_order
from pd_format.versions import Mode, StageVersions, sets_needed, stage_versions
from pd_train.weights import ParameterSets


def make(count: int, lag: int = 0) -> ParameterSets:
    return ParameterSets([nn.Parameter(torch.zeros(2))], count, lag)


def walk(versions: StageVersions, replica: int, minibatches: int, count: int) -> list[tuple[int, int]] | None:
    """Run a replica's order; every version lands as soon as its own passes are over. Versions and their sets.

    None where a version found no set then.
    """
    sets = make(count, versions.lag)
    r = versions.replicas
    forwards = backwards = range(replica, minibatches, r)
    sets.is_wanted = lambda version: versions.is_wanted(version, forwards, backwards)
    landed: list[tuple[int, int]] = []
    for item in work_order(replica, r, versions.in_flight, minibatches):
        version = versions.forward(item.minibatch)
        if item.forward:
            assert sets.is_ready(version)
            forwards = forwards[1:]
            sets.acquire(version)
        else:
            backwards = backwards[1:]
            sets.release(version)
        newest = (backwards[0] if backwards else minibatches) // versions.update_size(minibatches)
        while sets.complete < newest:
            at = sets.open(sets.complete + 1)
            if at is None:
                return None
            sets.completed(sets.complete + 1)
            landed.append((sets.complete, at))
    return landed


def test_the_timetable_of_two_sets() -> None:
    """F0 F1 B0 F2 B1 F3 B2: the drawing in the module's docstring."""
    versions = stage_versions(Mode(), [1], [2], 0)
    assert walk(versions, 0, 6, 2) == [(1, 1), (2, 0), (3, 1), (4, 0), (5, 1), (6, 0)]


@pytest.mark.parametrize("weights", ["stash", "vertical-sync", "2bw"])
@pytest.mark.parametrize(
    ("replicas", "depths"), [((1,), (1,)), ((2,), (3,)), ((1, 1, 1), (3, 2, 1)), ((2, 1), (5, 3)), ((1, 3), (4, 1))]
)
def test_the_sets_needed_are_enough_and_one_fewer_is_not(
    weights: str, replicas: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    for s, r in enumerate(replicas):
        versions = stage_versions(Mode(weights, group=12), replicas, depths, s)
        needed = sets_needed(versions)
        assert all(walk(versions, k, 48, needed) is not None for k in range(r))
        assert needed == 1 or any(walk(versions, k, 48, needed - 1) is None for k in range(r))


def test_a_set_in_use_is_never_written() -> None:
    sets = make(2)
    sets.is_wanted = lambda version: False
    sets.acquire(0)
    assert sets.open(1) == 1
    sets.completed(1)
    sets.acquire(1)
    assert sets.open(2) is None
    sets.release(0)
    assert sets.open(2) == 0


def test_within_a_pass_only_its_own_update_lands_in_its_set_and_only_if_nobody_else_uses_it() -> None:
    sets = make(1)
    sets.is_wanted = lambda version: False
    sets.acquire(0)
    sets.let_land(2, 0)
    assert sets.open(1) is None
    sets.acquire(0)
    sets.let_land(1, 0)
    assert sets.open(1) is None
    sets.release(0)
    assert sets.open(1) is None
    sets.let_land(1, 0)
    assert sets.open(1) == 0
    sets.release(0)
    sets.completed(1)
    sets.acquire(1)
    assert sets.open(2) is None


def test_a_version_that_a_pass_to_come_uses_is_never_written() -> None:
    sets = make(1)
    assert sets.open(1) is None
    sets.is_wanted = lambda version: version > 0
    assert sets.open(1) == 0


def test_the_set_that_an_update_starts_from_stays_until_the_update_is_whole() -> None:
    sets = make(2)
    sets.is_wanted = lambda version: False
    assert sets.open(1) == 1
    assert sets.open(2) is None
    sets.completed(1)
    assert sets.open(2) == 0


def test_with_lag_a_version_that_may_still_be_on_its_way_is_never_written() -> None:
    """Version 1 leaves this set without a copy; only update 3 takes in gradients of replicas that have all got it."""
    sets = make(2, lag=1)
    sets.is_wanted = lambda version: False
    for version in (1, 2):
        at = sets.open(version)
        assert at is not None
        sets.completed(version)
    held = sets.set_of(1)
    assert sets.open(3) == held
    assert make(1, lag=1).open(1) is None


def test_versions_start_anew_with_a_segment() -> None:
    sets = make(2)
    at = sets.open(1)
    sets.completed(1)
    sets.start_segment()
    assert sets.set_of(0) == at
    assert sets.complete == 0


def test_without_parameters_every_version_is_ready() -> None:
    sets = ParameterSets([], 3)
    assert sets.is_ready(7)
    assert sets.set_of(7) == 0
