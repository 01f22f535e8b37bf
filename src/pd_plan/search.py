"""Finds the least value that some plan reaches, by asking for a plan at or under a threshold.

Every value that a plan can have is one of finitely many stage and cut times. A probe at a threshold answers
with a plan at or under it, whose own value then is the new upper end, or with none, which makes the threshold
the lower end. The search ends when nothing lies right below the best plan found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

__all__ = ["EQUAL", "Found", "least"]

EQUAL = 1e-9
"""Values within this of each other, relatively, are equal (design, section 2)."""

_JUST_BELOW = 4e-11
"""Well under EQUAL, well over the rounding of sums and quotients."""
_REFUSED_UNTIL_CHECK = 3

PlanT = TypeVar("PlanT")


class Found(NamedTuple):
    """The threshold that takes in all plans equal to the best one, and nothing else."""

    value: float
    threshold: float


def least(lower: float, upper: float, probe: Callable[[float], float | None], near: bool = False) -> Found:
    """The least value that the probe reaches.

    Args:
        lower: no plan's value is under this.
        upper: some plan has this value.
        probe: the value of some plan at or under a threshold, None where there is none; it may err in favour of
            a plan by 1e-11 of the threshold.
        near: whether `upper` may well be the answer, so that what is right below it is asked first.
    """
    best = upper
    refused = _REFUSED_UNTIL_CHECK if near else 0
    while best > lower:
        below = best * (1 - _JUST_BELOW)
        middle = lower + (best - lower) / 2
        last = refused >= _REFUSED_UNTIL_CHECK or middle >= below
        found = probe(below if last else middle)
        if found is not None and found < best:
            best = found
            refused = 0
        elif last:
            break
        else:
            lower = middle
            refused += 1
    return Found(best, best * (1 + EQUAL))
