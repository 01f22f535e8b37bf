"""What `pd-plan --json` prints: the plan, what it is compared with and the answers to "what if", for programs.

Units are in the names, as in the files: `*_ms`, `*_bytes`. Fields may be added, none will change its meaning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pd_plan.alternatives import Alternative
from pd_plan.planner import Decision
from pd_plan.what_if import Spread, Sweep

__all__ = ["comparison_json"]


def comparison_json(
    decision: Decision,
    others: Sequence[Alternative],
    sentences: Sequence[str],
    sweep: Sweep | None = None,
    spreads: tuple[Spread, Spread] | None = None,
    seed: int = 0,
) -> str:
    """The whole text, an object that ends with a line break.

    Args:
        decision: with the plan.
        others: that it is compared with.
        sentences: of the report.
        sweep: over numbers of machines, where it was asked for.
        spreads: with profile and bandwidth off, where they were asked for.
        seed: of the spreads.
    """
    plan, depths = decision.plan, decision.depths
    rows = [("this plan", plan.config, plan.predicted.minibatch_ms, plan.predicted.bytes_per_minibatch)]
    rows += [(other.name, other.partition.config, other.minibatch_ms, other.bytes_per_minibatch) for other in others]
    result: dict[str, Any] = {
        "format": "pipedream-comparison",
        "version": 1,
        "plan": plan.model_dump(mode="json"),
        "simulated": {
            "minibatch_ms": depths.simulated_ms,
            "paper_in_flight": list(depths.paper),
            "paper_in_flight_minibatch_ms": depths.paper_ms,
        },
        "comparison": [
            {
                "name": name,
                "config": config,
                "minibatch_ms": ms,
                "speedup": plan.predicted.single_machine_ms / ms if ms else 1.0,
                "bytes_per_minibatch": size,
            }
            for name, config, ms, size in rows
        ],
        "explanation": list(sentences),
    }
    if decision.kept is not None:
        kept = decision.kept
        result["memory"] = {
            "limit_bytes": kept.limit.memory_bytes,
            "recompute_allowed": kept.limit.recompute,
            "exact": kept.exact,
            "without_limit": {
                "config": kept.free.config,
                "minibatch_ms": kept.free_ms,
                "memory_bytes": kept.free_bytes,
            },
        }
    if sweep is not None:
        result["sweep"] = {
            "enough_machines": sweep.enough,
            "rows": [
                {
                    "machines": row.machines,
                    "config": None if row.partition is None else row.partition.config,
                    "minibatch_ms": None if row.partition is None else row.minibatch_ms,
                    "speedup": row.speedup,
                    "efficiency": row.efficiency,
                    "bytes_per_minibatch": row.bytes_per_minibatch,
                }
                for row in sweep.rows
            ],
        }
    if spreads is not None:
        result["robustness"] = {"seed": seed, "profile": _spread(spreads[0]), "bandwidth": _spread(spreads[1])}
    return json.dumps(result, indent=2, allow_nan=False) + "\n"


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "off_by": spread.part,
        "draws": spread.draws,
        "config_changed": spread.changed,
        "configs": dict(spread.configs),
        "median_slower": spread.median_slower,
        "worst_slower": spread.worst_slower,
    }
