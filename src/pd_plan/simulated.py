"""The plan that simulates fastest, of those that the cost models and the usual strategies come to.

The cost models take a transfer, or a synchronisation, as hidden wherever it is shorter than the compute beside it. The
simulator knows what the order of the passes leaves exposed: the parameters that come back after a synchronous round,
or a transfer that lengthens the way round. It is too slow to search with, so it judges what others have found.

It leaves out what moving bytes costs the processors, which for AlexNet in step on two hosts without a limit is 5 to 8 %
of the time (benchmarks/peers.py), and profiles are known to some per cent only: of plans that are as fast within that,
the one that sends the least is chosen.
"""

from __future__ import annotations

from typing import Any, Literal

from pd_format.errors import UserError
from pd_format.profile import Profile
from pd_plan.planner import Decision, decide

__all__ = ["fastest_simulated"]

_CANDIDATES: tuple[tuple[str, Literal["paper", "duplex"]], ...] = (
    ("auto", "paper"),
    ("auto", "duplex"),
    ("straight", "duplex"),
    ("data-parallel", "duplex"),
    ("single", "duplex"),
)
"""Strategy and cost model; among equals the first counts."""
_AS_FAST = 1.1
"""Times the fastest."""


def fastest_simulated(profile: Profile, machines: int, bandwidth_bps: float, **options: Any) -> Decision:
    """Decide as `pd_plan.planner.decide` does, but by the simulator.

    Args:
        profile, machines, bandwidth_bps, options: as there, without a strategy, replicas or a cost model.

    Raises:
        UserError: no plan can be made, or none is small enough to be simulated.
    """
    found: list[Decision] = []
    reason = "no plan is small enough to be simulated; leave the choice to --strategy auto."
    for strategy, cost_model in _CANDIDATES:
        try:
            one = decide(profile, machines, bandwidth_bps, strategy, cost_model=cost_model, **options)
        except UserError as error:  # A straight pipeline of more stages than there are cuts, or too much memory.
            reason = str(error) if strategy == "auto" else reason
            continue
        if one.depths.simulated_ms is not None:
            found.append(one._replace(winner=strategy))
    if not found:
        raise UserError(reason)
    most_ms = min(map(_pace, found)) * _AS_FAST
    best = min((one for one in found if _pace(one) <= most_ms), key=lambda one: one.plan.predicted.bytes_per_minibatch)
    return best._replace(plan=best.plan.model_copy(update={"strategy": "simulated"}))


def _pace(decision: Decision) -> float:
    assert decision.depths.simulated_ms is not None
    return decision.depths.simulated_ms
