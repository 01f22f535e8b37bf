"""How fast a plan simulates, beside what the cost model says of it: rows for the table, and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pd_format.units import format_ms
from pd_plan.planner import Decision

__all__ = ["Rate", "rate_rows", "rate_sentences"]

_NEAR = 0.01
"""Times that differ by less, relatively, are told as equal."""


class Rate(NamedTuple):
    """What a minibatch takes by one account of the plan."""

    name: str
    in_flight: tuple[int, ...]
    """Empty for the cost model, which knows of no depths."""
    ms: float | None
    """None where the pipeline is too large to be simulated."""
    difference: float | None
    """To the cost model, as a part of it."""


def rate_rows(decision: Decision) -> list[Rate]:
    """By the cost model, simulated at the plan's depths, and simulated at the paper's where they differ."""
    plan, depths = decision.plan, decision.depths
    pace = plan.predicted.minibatch_ms
    rows = [Rate(f"cost model, {plan.cost_model}", (), pace, None)]
    rows.append(Rate("simulated", depths.in_flight, depths.simulated_ms, _difference(depths.simulated_ms, pace)))
    if depths.paper != depths.in_flight and plan.strategy != "model-parallel":
        rows.append(Rate("paper's depths", depths.paper, depths.paper_ms, _difference(depths.paper_ms, pace)))
    return rows


def rate_sentences(decision: Decision, rival: Decision | None = None) -> Iterator[str]:
    """What the differences mean, where there are any.

    Args:
        decision: the plan that was made.
        rival: a faster one that the duplex model finds.
    """
    plan, depths = decision.plan, decision.depths
    pace, simulated = plan.predicted.minibatch_ms, depths.simulated_ms
    if simulated is None:
        yield "The pipeline is too large to be simulated, so it has the paper's depths or those that were given."
        return
    difference = _difference(simulated, pace)
    if difference is not None and difference > _NEAR:
        yield f"Simulated, a minibatch takes {difference:.0%} longer than by the cost model: " + _why_longer(decision)
    elif difference is not None and difference < -_NEAR and plan.cost_model == "paper" and not plan.inference:
        yield (
            f"Simulated, a minibatch takes {-difference:.0%} less than by the cost model: "
            "links carry both directions at once, which the paper's cost model does not count."
        )
    if depths.paper_ms is not None and depths.paper_ms > simulated * (1 + _NEAR) and plan.strategy != "model-parallel":
        yield (
            f"At the paper's depths ({_joined(depths.paper)}) a minibatch would take {format_ms(depths.paper_ms)}"
            f"{'' if plan.inference else ': they leave no time for transfers'}."
        )
    if rival is not None and rival.depths.simulated_ms is not None:
        faster = simulated / rival.depths.simulated_ms - 1
        yield (
            f"A better plan: --cost-model duplex finds config {rival.plan.config} on {rival.plan.workers} machines, "
            f"which simulates at {format_ms(rival.depths.simulated_ms)} a minibatch, {faster:.0%} faster."
        )


def _why_longer(decision: Decision) -> str:
    if len(decision.plan.stages) == 1:
        return "a round's last parameters arrive after its last backward pass, and all wait for them."
    if not decision.depths.searched:
        return "these depths leave too little time for transfers; --in-flight auto looks for others."
    return "transfers wait for each other, and no depths that were tried hide them all."


def _difference(ms: float | None, pace_ms: float) -> float | None:
    return None if ms is None or not pace_ms else ms / pace_ms - 1


def _joined(depths: tuple[int, ...]) -> str:
    return "-".join(map(str, depths)) if len(depths) <= 12 else f"{depths[0]}-{depths[1]}-...-{depths[-1]}"
