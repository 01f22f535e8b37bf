"""The plan that simulates fastest, of those that the cost models and the usual strategies come to.

The cost models take a transfer, or a synchronisation, as hidden wherever it is shorter than the compute beside it. The
simulator knows what the order of the passes leaves exposed: the parameters that come back after a synchronous round,
or a transfer that lengthens the way round. It is too slow to search with, so it judges what others have found.
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
_CLEARLY = 1e-3


def fastest_simulated(profile: Profile, machines: int, bandwidth_bps: float, **options: Any) -> Decision:
    """Decide as `pd_plan.planner.decide` does, but by the simulator.

    Args:
        profile, machines, bandwidth_bps, options: as there, without a strategy, replicas or a cost model.

    Raises:
        UserError: no plan can be made, or none is small enough to be simulated.
    """
    best: Decision | None = None
    reason = "no plan is small enough to be simulated; leave the choice to --strategy auto."
    for strategy, cost_model in _CANDIDATES:
        try:
            found = decide(profile, machines, bandwidth_bps, strategy, cost_model=cost_model, **options)
        except UserError as error:  # A straight pipeline of more stages than there are cuts, or too much memory.
            reason = str(error) if strategy == "auto" else reason
            continue
        pace = found.depths.simulated_ms
        if pace is not None and (best is None or pace < _pace(best) * (1 - _CLEARLY)):
            best = found._replace(winner=strategy)
    if best is None:
        raise UserError(reason)
    return best._replace(plan=best.plan.model_copy(update={"strategy": "simulated"}))


def _pace(decision: Decision) -> float:
    assert decision.depths.simulated_ms is not None
    return decision.depths.simulated_ms
