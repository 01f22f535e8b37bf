"""Which of a model's layers each stage of a plan has, and that they cover the model once and in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pd_format.errors import UserError
from pd_format.plan import Plan

if TYPE_CHECKING:
    from pd_format.layers.chain import Chain

__all__ = ["cover_layers", "stage_ranges"]

_PLAN_ANEW = "Make the plan anew with pd-plan."


def stage_ranges(plan: Plan, chain: Chain) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, from 0, checked against the model that was built.

    Raises:
        UserError: the model is not the plan's, or the stages do not cover its layers once and in order.
    """
    from pd_format.layers.fingerprint import compare_fingerprints

    if chain.fingerprint != plan.model.fingerprint:
        where = compare_fingerprints(plan.model.fingerprint, chain.fingerprint, chain.layers)
        raise UserError(
            f"the plan was made for another version of model {plan.model.name}: {where} "
            "Profile and plan the model anew."
        )
    return cover_layers(plan, [layer.name for layer in chain.layers])


def cover_layers(plan: Plan, names: Sequence[str]) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, from 0.

    Args:
        names: of the model's layers, in order.

    Raises:
        UserError: the stages do not cover them once and in order.
    """
    numbers = {name: number for number, name in enumerate(names)}
    ranges: list[tuple[int, int]] = []
    expected = 0
    for index, stage in enumerate(plan.stages):
        for field, name in (("first_layer", stage.first_layer), ("last_layer", stage.last_layer)):
            if name not in numbers:
                raise UserError(f"stages[{index}].{field}: the model has no layer {name!r}. {_PLAN_ANEW}")
        first, last = numbers[stage.first_layer], numbers[stage.last_layer]
        if first != expected:
            found = "again holds" if first < expected else "leaves out"
            wanted = names[min(expected, len(names) - 1)]
            raise UserError(
                f"stages[{index}].first_layer: {stage.first_layer!r} {found} layers of the model; expected {wanted!r}, "
                f"so that every layer is in one stage. {_PLAN_ANEW}"
            )
        if last - first + 1 != stage.layers:
            raise UserError(
                f"stages[{index}].layers: found {stage.layers}; from {stage.first_layer!r} to {stage.last_layer!r} "
                f"the model has {max(0, last - first + 1)}. {_PLAN_ANEW}"
            )
        ranges.append((first, last))
        expected = last + 1
    if expected != len(names):
        raise UserError(
            f"stages[{len(plan.stages) - 1}].last_layer: the model goes on after {plan.stages[-1].last_layer!r} to "
            f"{names[-1]!r}; every layer must be in a stage. {_PLAN_ANEW}"
        )
    return ranges
