from __future__ import annotations

import pytest
import torch
from torch import nn

from pd_format.schedule import work_order
from pd_format.versions import sets_needed, stash_version
from pd_train.weights import ParameterSets


def make(count: int) -> ParameterSets:
    return ParameterSets([nn.Parameter(torch.zeros(2))], count)


def test_the_timetable_of_two_sets() -> None:
    """F0 F1 B0 F2 B1 F3 B2: the drawing in the module's docstring."""
    sets = make(2)
    held: list[tuple[int, int]] = []
    for item in work_order(0, 1, 2, 6):
        version = stash_version(item.round, 2, 0)
        if item.forward:
            sets.acquire(version)
            sets.want_from(stash_version(item.round + 1, 2, 0))
        else:
            sets.release(version)
            at = sets.open(item.round + 1)
            assert at is not None
            sets.completed(item.round + 1)
            held.append((item.round + 1, at))
    assert held == [(1, 1), (2, 0), (3, 1), (4, 0), (5, 1), (6, 0)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 5])
def test_the_sets_needed_are_enough_and_one_fewer_is_not(in_flight: int, lag: int) -> None:
    def never_waits(count: int) -> bool:
        """Whether every version finds a set as soon as its round is over."""
        sets, newest = make(count), 0
        for item in work_order(0, 1, in_flight, 20):
            version = stash_version(item.round, in_flight, lag)
            if item.forward:
                sets.acquire(version)
                sets.want_from(stash_version(item.round + 1, in_flight, lag))
            else:
                sets.release(version)
                newest = item.round + 1
            while sets.complete < newest and sets.open(sets.complete + 1) is not None:
                sets.completed(sets.complete + 1)
            if sets.complete < newest:
                return False
        return True

    needed = sets_needed(in_flight, lag)
    assert never_waits(needed)
    assert needed == 1 or not never_waits(needed - 1)


def test_a_set_in_use_is_never_written() -> None:
    sets = make(2)
    sets.acquire(0)
    sets.want_from(1)
    assert sets.open(1) == 1
    sets.completed(1)
    assert sets.open(2) is None
    sets.release(0)
    assert sets.open(2) == 0


def test_the_set_that_an_update_starts_from_stays_until_the_update_is_whole() -> None:
    sets = make(2)
    sets.want_from(5)
    assert sets.open(1) == 1
    assert sets.open(2) is None
    sets.completed(1)
    assert sets.open(2) == 0


def test_versions_start_anew_with_a_segment() -> None:
    sets = make(2)
    sets.want_from(1)
    at = sets.open(1)
    sets.completed(1)
    sets.start_segment()
    assert sets.set_of(0) == at
    assert sets.complete == 0


def test_without_parameters_every_version_is_ready() -> None:
    sets = ParameterSets([], 3)
    assert sets.is_ready(7)
    assert sets.acquire(7) == 0
