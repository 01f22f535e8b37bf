"""Says in words what a memory limit did to a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pd_format.schedule import paper_depths
from pd_format.units import format_bytes, format_ms
from pd_plan.alternatives import Alternative
from pd_plan.planner import Decision
from pd_plan.text import short_config

__all__ = ["memory_line", "memory_sentences"]


def memory_line(decision: Decision) -> str | None:
    """What was asked for, for the head of the report; None without a limit."""
    if decision.kept is None:
        return None
    limit = decision.kept.limit
    optimizer = "" if decision.plan.inference else f", optimizer {decision.plan.optimizer}"
    recompute = ", stages may recompute" if limit.recompute else ""
    return f"at most {format_bytes(limit.memory_bytes)} a worker{optimizer}{recompute}"


def memory_sentences(decision: Decision, others: Sequence[Alternative]) -> Iterator[str]:
    """How full the workers are, what the limit costs, and which of the other plans do not keep to it.

    Args:
        decision: with what was kept within a limit, or without one.
        others: that the plan is compared with.
    """
    plan, kept = decision.plan, decision.kept
    if kept is None:
        return
    needed = [stage.predicted.memory_bytes for stage in plan.stages]
    fullest = needed.index(max(needed))
    yield (
        f"Stage {fullest} is the fullest: {format_bytes(needed[fullest])} a worker of at most "
        f"{format_bytes(kept.limit.memory_bytes)}."
    )
    again = [str(stage.index) for stage in plan.stages if stage.recompute]
    if again:
        one = len(again) == 1
        yield (
            f"{'Stage' if one else 'Stages'} {', '.join(again)} recompute{'s' if one else ''}: only inputs are kept, "
            "and the forward pass runs once more before each backward pass, which the times include."
        )
    if kept.free != kept.partition or again:
        slower = plan.predicted.minibatch_ms / kept.free_ms - 1 if kept.free_ms else 0.0
        same = kept.free == kept.partition
        it = "these cuts without recomputation" if same else f"config {short_config(kept.free.config)}"
        it += " with other cuts" if kept.free.config == plan.config and not same else ""
        yield (
            f"Without the limit {it} would take {format_ms(kept.free_ms)} a minibatch"
            f"{f' (this plan: {slower:+.0%})' if slower else ''} and {format_bytes(kept.free_bytes)} a worker."
        )
    if not kept.exact:
        yield (
            "The chain is too long, or the machines too many, to look at every plan under a memory limit: a faster one "
            "may have been missed."
        )
    over = []
    for other in others:
        partition = other.partition
        serial = other.name == "model parallelism"
        depths = [1] * len(partition.ends) if serial else paper_depths(partition.replicas)
        most = max(kept.limit.sizes.needed(partition, depths))
        if most > kept.limit.memory_bytes:
            over.append(f"{other.name} ({format_bytes(most)})")
    if over:
        yield f"Over the limit, of those it is compared with: {', '.join(over)}."
