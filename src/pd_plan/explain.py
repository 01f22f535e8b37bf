"""Says in words what holds a plan back, and why machines stay idle (by the paper's cost model, section 3.2)."""

from __future__ import annotations

from typing import NamedTuple

from pd_format.plan import Plan
from pd_format.profile import Profile
from pd_format.units import format_bytes, format_ms
from pd_plan.cluster import Cluster
from pd_plan.compressed import as_sent, compression_of
from pd_plan.cost import cut_ms
from pd_plan.planner import model_of, partition_of
from pd_plan.search import EQUAL
from pd_plan.text import short_config

__all__ = ["Bound", "bounds_of", "explain", "kept_together"]

_SPANS_NAMED = 3
_CONFIG_WIDTH = 40


class Bound(NamedTuple):
    """One of the times that bound a pipeline's pace."""

    what: str
    """`compute` or `synchronisation` of a stage, or the `cut` after it."""
    stage: int
    ms: float
    """A minibatch."""


def bounds_of(profile: Profile, plan: Plan) -> list[Bound]:
    """Every bound of a plan; the longest is what a minibatch takes in a pipeline."""
    cluster = Cluster(plan.machines, plan.bandwidth_bps)
    layers = as_sent(profile, compression_of(plan)).layers
    bounds: list[Bound] = []
    for stage, end in zip(plan.stages, partition_of(plan).ends, strict=True):
        bounds.append(Bound("compute", stage.index, stage.predicted.compute_ms / stage.replicas))
        bounds.append(Bound("synchronisation", stage.index, stage.predicted.sync_ms / stage.replicas))
        if end < len(layers):
            size = float(layers[end - 1].activation_bytes)
            bounds.append(Bound("cut", stage.index, cut_ms(size, cluster.bytes_per_ms, model_of(plan))))
    return bounds


def explain(profile: Profile, plan: Plan) -> list[str]:
    """Sentences for someone who sees a plan for the first time: what was chosen, what is slowest, what idles."""
    sentences = [_what(plan), _why(profile, plan)]
    if plan.workers < plan.machines:
        sentences.append(_idle(profile, plan))
    spans = kept_together(profile)
    if spans:
        named = ", ".join(f"{first} to {last}" for first, last in spans[:_SPANS_NAMED])
        more = len(spans) - _SPANS_NAMED
        named += f" and {more} more" if more > 0 else ""
        sentences.append(
            "Kept in one stage each, since the profile allows no cut inside (as where layers share "
            f"parameters): {named}."
        )
    return sentences


def kept_together(profile: Profile) -> list[tuple[str, str]]:
    """First and last layer of each span that the profile forbids to cut."""
    spans: list[tuple[str, str]] = []
    first = 0
    for index, layer in enumerate(profile.layers):
        if layer.cut or index == len(profile.layers) - 1:
            if index > first:
                spans.append((profile.layers[first].name, layer.name))
            first = index + 1
    return spans


def _what(plan: Plan) -> str:
    predicted = plan.predicted
    text = f"Config {short_config(plan.config, _CONFIG_WIDTH)}: "
    text += f"{_count(len(plan.stages), 'stage')} on {_count(plan.workers, 'machine')}"
    if len(plan.stages) == 1 < plan.workers:
        text += ", the whole model on each" if plan.inference else ", which is data parallelism"
    text += f", {format_ms(predicted.minibatch_ms)} a minibatch, {predicted.speedup:.2f} times as fast as one machine"
    if plan.machines > 1 and not plan.inference and (len(plan.stages) > 1 or plan.workers != plan.machines):
        text += f" and {predicted.speedup_over_data_parallel:.2f} times as fast as data parallelism"
        text += f" on {plan.machines}"
    return text + "."


def _why(profile: Profile, plan: Plan) -> str:
    if plan.strategy == "model-parallel":
        return "One minibatch at a time passes all stages, so their times and those of the cuts add up."
    bound = _slowest(profile, plan)
    stage = plan.stages[bound.stage]
    shared = f", shared by {stage.replicas} replicas" if stage.replicas > 1 else ""
    if bound.what == "cut":
        layers = as_sent(profile, compression_of(plan)).layers
        size = layers[partition_of(plan).ends[bound.stage] - 1].activation_bytes
        back = "and as much back" if plan.cost_model == "paper" else "while as much comes back"
        detail = f"{format_bytes(size)} one way" + (f" {back}" if not plan.inference else "")
    elif bound.what == "compute":
        detail = f"{format_ms(stage.predicted.compute_ms)} a minibatch{shared}"
    else:
        detail = f"{format_ms(stage.predicted.sync_ms)} a round of {stage.replicas} minibatches"
    return f"The bottleneck is {_name(bound, plan)} ({detail}): {format_ms(bound.ms)}."


def _idle(profile: Profile, plan: Plan) -> str:
    used = f"{plan.workers} of {plan.machines} machines are used"
    if plan.strategy == "config":
        return f"{used}: the replicas that were given."
    rest = plan.machines - plan.workers
    others = "one more would idle" if rest == 1 else f"the other {rest} would idle"
    if plan.strategy == "simulated":
        return f"{used}: of the plans that were tried none simulates clearly faster, so {others}."
    if plan.strategy != "auto":
        return f"{used}: strategy {plan.strategy} takes no more."
    bound = _slowest(profile, plan)
    if bound.what == "compute":
        costs = "cutting" if plan.inference else "synchronising or cutting"
        return f"{used}: {costs} for more would cost as much as they save, so {others}."
    return f"{used}: {_name(bound, plan)} is the bottleneck, no plan on more is faster, so {others}."


def _slowest(profile: Profile, plan: Plan) -> Bound:
    bounds = bounds_of(profile, plan)
    longest = max(bound.ms for bound in bounds)
    return next(bound for bound in bounds if bound.ms >= longest * (1 - EQUAL))


def _name(bound: Bound, plan: Plan) -> str:
    stage = plan.stages[bound.stage]
    if bound.what == "cut":
        return f"the cut after {stage.last_layer}"
    return f"stage {bound.stage}'s {bound.what}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
