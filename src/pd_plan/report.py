"""What pd-plan prints: stages, comparison and a few sentences, in 80 columns, with or without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from pd_format.graph_text import is_original
from pd_format.plan import Plan
from pd_format.profile import Profile
from pd_format.units import format_bandwidth, format_bytes, format_ms
from pd_plan.alternatives import Alternative, alternatives
from pd_plan.cluster import Cluster
from pd_plan.compressed import as_sent, compression_of
from pd_plan.cost import partition_bytes
from pd_plan.explain import bounds_of, explain
from pd_plan.memory_report import memory_line, memory_sentences
from pd_plan.planner import Decision, chain_of, model_of, partition_of
from pd_plan.rates import rate_rows, rate_sentences
from pd_plan.text import CONFIG_WIDTH, Columns, line, paragraph, short_config

__all__ = ["print_report", "sentences_of"]

_NAME_WIDTH = 32
_FIRST_STAGES = 20
_LAST_STAGES = 4
_WINNERS = {
    "auto": "the fastest plan by the {cost_model} cost model",
    "straight": "the straight pipeline",
    "data-parallel": "data parallelism",
    "single": "one machine alone",
}
"""What simulates fastest, by the strategy that found it."""
_NOTE = (
    "compute: one minibatch on one worker, and its share of the model's; sync: one round of the stage's replicas; "
    "pace: the longer of both, divided by the replicas; memory: a worker."
)


def print_report(console: Console, profile: Profile, decision: Decision, rival: Decision | None = None) -> None:
    """Print the whole report of a plan.

    Args:
        console: rich's; where it is no terminal, the text is plain.
        profile: that the plan was made from.
        decision: of `pd_plan.planner.decide`.
        rival: of `pd_plan.planner.duplex_rival`.
    """
    plan = decision.plan
    estimated = ", estimated" if profile.device.estimated else ""
    directions = "one direction" if plan.cost_model == "paper" else "both directions"
    machines = f"{plan.machines} machine{'' if plan.machines == 1 else 's'}"
    size = "unknown size" if is_original(profile) else f"{profile.minibatch_size}"
    precision = "" if profile.precision == "fp32" else f", {profile.precision}"
    line(
        console,
        f"Model     {profile.model.name}: {len(profile.layers)} layers, "
        f"minibatches of {size}{precision} ({profile.device.name or profile.device.kind}{estimated})",
    )
    line(console, f"Cluster   {machines}, {format_bandwidth(plan.bandwidth_bps)}, {directions} at a time")
    won = "" if decision.winner is None else ": " + _WINNERS[decision.winner].format(cost_model=plan.cost_model)
    line(console, f"Strategy  {plan.strategy}{won}{', for inference: forward passes alone' if plan.inference else ''}")
    compressed = _compressed(profile, plan)
    if compressed:
        line(console, f"Compress  {compressed}")
    memory = memory_line(decision)
    if memory is not None:
        line(console, f"Memory    {memory}")
    console.print()
    _print_stages(console, profile, plan)
    console.print()
    cluster, compression = Cluster(plan.machines, plan.bandwidth_bps), compression_of(plan)
    others = alternatives(profile, cluster, model_of(plan), compression)
    _print_comparison(console, plan, others)
    console.print()
    _print_rates(console, decision)
    console.print()
    for sentence in sentences_of(profile, decision, rival, others):
        paragraph(console, sentence)


def sentences_of(
    profile: Profile, decision: Decision, rival: Decision | None, others: Sequence[Alternative]
) -> list[str]:
    """What the report says in words; arguments as of `print_report`, and what the plan is compared with."""
    memory = memory_sentences(decision, others)
    return [*explain(profile, decision.plan), *memory, *rate_sentences(decision, rival)]


def _compressed(profile: Profile, plan: Plan) -> str:
    """What the plan compresses, and what that saves; nothing where it does not."""
    named = (("gradients", plan.compress_gradients), ("activations", plan.compress_activations))
    schemes = ", ".join(f"{what} {scheme}" for what, scheme in named if scheme is not None)
    if not schemes:
        return ""
    plain = float(partition_bytes(chain_of(profile), partition_of(plan), model_of(plan)))
    sent = format_bytes(plan.predicted.bytes_per_minibatch)
    return f"{schemes}: {sent} a minibatch instead of {format_bytes(plain)}"


def _print_stages(console: Console, profile: Profile, plan: Plan) -> None:
    heads = ("stage", "layers", "replicas", "in flight", "compute", "share", "sync", "pace", "memory")
    columns = Columns(console, heads, (5, 6, 8, 9, 9, 6, 9, 9, 8))
    indent = " " * (6 if columns.fits else 2)
    total = plan.predicted.single_machine_ms
    layers = as_sent(profile, compression_of(plan)).layers
    times = {(bound.what, bound.stage): bound.ms for bound in bounds_of(profile, plan)}
    left_out = range(_FIRST_STAGES, len(plan.stages) - _LAST_STAGES)
    for stage, end in zip(plan.stages, partition_of(plan).ends, strict=True):
        # One line in the place of one stage would save nothing.
        if len(left_out) > 1 and stage.index in left_out:
            if stage.index == left_out.start:
                line(console, f"{indent}... {len(left_out)} stages left out here; the plan file has all ...", "dim")
            continue
        predicted = stage.predicted
        share = predicted.compute_ms / total if total else 0.0
        pace = max(times["compute", stage.index], times["synchronisation", stage.index])
        cells = (
            str(stage.index),
            str(stage.layers),
            str(stage.replicas),
            str(stage.in_flight),
            format_ms(predicted.compute_ms),
            f"{share:.1%}",
            format_ms(predicted.sync_ms),
            format_ms(pace),
            format_bytes(predicted.memory_bytes),
        )
        columns.row(cells)
        names = _shortened(stage.first_layer)
        if stage.layers > 1:
            names += f" to {_shortened(stage.last_layer)}"
        names += ", recomputed" if stage.recompute else ""
        line(console, f"{indent}{names}", "cyan")
        if end < len(layers):
            size = format_bytes(layers[end - 1].activation_bytes)
            ways = "one way" if plan.inference else "each way"
            line(console, f"{indent}-- cut: {size} {ways}, {format_ms(times['cut', stage.index])} --", "dim")
    paragraph(console, _NOTE, "dim")


def _print_comparison(console: Console, plan: Plan, others: Sequence[Alternative]) -> None:
    heads = ("", "config", "a minibatch", "speed-up", "sent a minibatch")
    columns = Columns(console, heads, (-19, -CONFIG_WIDTH, 13, 10, 16))
    predicted = plan.predicted
    rows = [("this plan", plan.config, predicted.minibatch_ms, predicted.bytes_per_minibatch)]
    for other in others:
        rows.append((other.name, other.partition.config, other.minibatch_ms, other.bytes_per_minibatch))
    for index, (name, config, ms, size) in enumerate(rows):
        speedup = predicted.single_machine_ms / ms if ms else 1.0
        cells = (name, short_config(config), format_ms(ms), f"{speedup:.2f} x", format_bytes(size))
        columns.row(cells, "green" if index == 0 else "")


def _print_rates(console: Console, decision: Decision) -> None:
    columns = Columns(console, ("", "in flight", "a minibatch", "to the model"), (-19, -CONFIG_WIDTH, 13, 14))
    for rate in rate_rows(decision):
        time = "too large" if rate.ms is None else format_ms(rate.ms)
        difference = "" if rate.difference is None else f"{rate.difference:+.1%}"
        depths = short_config("-".join(map(str, rate.in_flight)))
        columns.row((rate.name, depths, time, difference))


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[:14]}...{name[-15:]}"
