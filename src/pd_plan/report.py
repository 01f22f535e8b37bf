"""What pd-plan prints: stages, comparison and a few sentences, in 80 columns, with or without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from pd_format.plan import Plan
from pd_format.profile import Profile
from pd_format.units import format_bandwidth, format_bytes, format_ms
from pd_plan.cluster import Cluster
from pd_plan.explain import explain, parts_of, short_config
from pd_plan.planner import alternatives, partition_of

__all__ = ["print_report"]

_CONFIG_WIDTH = 17
_NAME_WIDTH = 32
_PARAGRAPH_WIDTH = 100
_FIRST_STAGES = 20
_LAST_STAGES = 4
_NOTE = (
    "compute: one minibatch on one worker, and its share of the model's; sync: one round of the stage's replicas; "
    "pace: the longer of both, divided by the replicas; memory: a worker."
)


def print_report(console: Console, profile: Profile, plan: Plan) -> None:
    """Print the whole report of a plan.

    Args:
        console: rich's; where it is no terminal, the text is plain.
        profile: that the plan was made from.
        plan: made by `pd_plan.planner.make_plan`.
    """
    estimated = ", estimated" if profile.device.estimated else ""
    machines = f"{plan.machines} machine{'' if plan.machines == 1 else 's'}"
    _line(
        console,
        f"Model     {profile.model.name}: {len(profile.layers)} layers, "
        f"minibatches of {profile.minibatch_size} ({profile.device.name or profile.device.kind}{estimated})",
    )
    _line(console, f"Cluster   {machines}, {format_bandwidth(plan.bandwidth_bps)}, one direction at a time")
    _line(console, f"Strategy  {plan.strategy}")
    console.print()
    _print_stages(console, profile, plan)
    console.print()
    _print_comparison(console, profile, plan)
    console.print()
    for sentence in explain(profile, plan):
        _paragraph(console, sentence)


def _print_stages(console: Console, profile: Profile, plan: Plan) -> None:
    columns = ("stage", "layers", "replicas", "in flight", "compute", "share", "sync", "pace", "memory")
    widths = (5, 6, 8, 9, 9, 6, 9, 9, 8)
    _line(console, _row(columns, widths), "bold")
    total = plan.predicted.single_machine_ms
    times = {(part.what, part.stage): part.ms for part in parts_of(profile, plan)}
    left_out = range(_FIRST_STAGES, len(plan.stages) - _LAST_STAGES)
    for stage, end in zip(plan.stages, partition_of(plan).ends, strict=True):
        # One line in the place of one stage would save nothing.
        if len(left_out) > 1 and stage.index in left_out:
            if stage.index == left_out.start:
                _line(console, f"      ... {len(left_out)} stages left out here; the plan file has all ...", "dim")
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
        _line(console, _row(cells, widths))
        names = _shortened(stage.first_layer)
        if stage.layers > 1:
            names += f" to {_shortened(stage.last_layer)}"
        _line(console, f"      {names}", "cyan")
        if end < len(profile.layers):
            size = format_bytes(profile.layers[end - 1].activation_bytes)
            _line(console, f"      -- cut: {size} each way, {format_ms(times['cut', stage.index])} --", "dim")
    _paragraph(console, _NOTE, "dim")


def _print_comparison(console: Console, profile: Profile, plan: Plan) -> None:
    widths = (-19, -_CONFIG_WIDTH, 13, 10, 16)
    _line(console, _row(("", "config", "a minibatch", "speed-up", "sent a minibatch"), widths), "bold")
    predicted = plan.predicted
    rows = [("this plan", plan.config, predicted.minibatch_ms, predicted.bytes_per_minibatch)]
    for other in alternatives(profile, Cluster(plan.machines, plan.bandwidth_bps)):
        rows.append((other.name, other.partition.config, other.minibatch_ms, other.bytes_per_minibatch))
    for index, (name, config, ms, size) in enumerate(rows):
        speedup = predicted.single_machine_ms / ms if ms else 1.0
        cells = (name, short_config(config, _CONFIG_WIDTH), format_ms(ms), f"{speedup:.2f} x", format_bytes(size))
        _line(console, _row(cells, widths), "green" if index == 0 else "")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _paragraph(console: Console, text: str, style: str = "") -> None:
    for line in textwrap.wrap(text, min(console.width, _PARAGRAPH_WIDTH) - 1, break_on_hyphens=False):
        _line(console, line, style)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in columns: to the right, or to the left where the width is negative."""
    placed = (cell.ljust(-width) if width < 0 else cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return " ".join(placed).rstrip()


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[:14]}...{name[-15:]}"
