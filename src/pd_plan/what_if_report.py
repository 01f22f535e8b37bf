"""Prints the answers to "what if": the plans over a number of machines, and over figures that are somewhat off."""

from __future__ import annotations

from rich.console import Console

from pd_format.units import format_bytes, format_ms
from pd_plan.text import Columns, paragraph, short_config
from pd_plan.what_if import ENOUGH, Spread, Sweep

__all__ = ["print_spreads", "print_sweep"]

_WIDTHS = (8, -18, 12, 10, 11, 16)
_CONFIGS = 3


def print_sweep(console: Console, sweep: Sweep) -> None:
    """The table over 1..M machines, and how many are enough."""
    heads = ("machines", "config", "a minibatch", "speed-up", "efficiency", "sent a minibatch")
    columns = Columns(console, heads, _WIDTHS)
    for entry in sweep.rows:
        if entry.partition is None:
            columns.row((str(entry.machines), "none fits", "", "", "", ""), "dim")
            continue
        cells = (
            str(entry.machines),
            short_config(entry.partition.config),
            format_ms(entry.minibatch_ms),
            f"{entry.speedup:.2f} x",
            f"{entry.efficiency:.0%}",
            format_bytes(entry.bytes_per_minibatch),
        )
        columns.row(cells, "green" if entry.machines == sweep.enough else "")
    if sweep.enough is None:
        paragraph(console, "No plan on any of these numbers of machines keeps within the memory limit.")
        return
    one = sweep.enough == 1
    paragraph(
        console,
        f"{sweep.enough} machine{' is' if one else 's are'} enough: the fewest whose plan is within {ENOUGH:.0%} of "
        "the best.",
    )


def print_spreads(console: Console, config: str, profile: Spread, bandwidth: Spread, seed: int) -> None:
    """How often another plan would have been best, and what the chosen one loses then.

    Args:
        console: to print on.
        config: of the plan that was made.
        profile: with the profile's figures off.
        bandwidth: with the bandwidth off.
        seed: of both.
    """
    widths = (-22, 13, 13, 13, 14)
    heads = (f"off by up to {profile.part:.0%}", "draws", "other config", "slower, half", "slower, worst")
    columns = Columns(console, heads, widths)
    for name, spread in (("times and sizes", profile), ("bandwidth", bandwidth)):
        cells = (
            name,
            str(spread.draws),
            f"{spread.changed:.0%}",
            f"{spread.median_slower:.1%}",
            f"{spread.worst_slower:.1%}",
        )
        columns.row(cells)
    for name, spread in (("times and sizes", profile), ("the bandwidth", bandwidth)):
        others = [f"{short_config(other)} ({count / spread.draws:.0%})" for other, count in spread.configs[:_CONFIGS]]
        if spread.changed:
            paragraph(console, f"Best with {name} off: {', '.join(others)}.")
    worst = max(profile.worst_slower, bandwidth.worst_slower)
    if worst:
        text = (
            "Slower: than the best plan of the same draw, which may be the same config with other cuts; half of the "
            "draws lose no more than the first figure"
        )
    else:
        text = f"Config {short_config(config)} loses nothing to the best plan in any draw"
    paragraph(console, f"{text} (--seed {seed}).", "dim")
