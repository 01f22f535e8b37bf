"""The table at the end of an emulated run, which says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pd_format.plan import Plan
from pd_format.units import format_bytes
from pd_train.emulation import Emulation
from pd_train.events import Emulated
from pd_train.stage_table import print_stages
from pd_train.terminal import open_console, plan_text, rate_text, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["emulation_table", "print_emulation_table"]


def emulation_table(plan: Plan, emulation: Emulation, ended: Emulated, run_dir: Path) -> Table:
    """The figures of an emulation, which computed nothing.

    Args:
        plan: that was tried.
        emulation: what passes waited for.
        ended: what came out.
        run_dir: where the report is.
    """
    from rich.table import Table

    title = "Emulated: no pass was computed"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    pace = ended.emulated
    device = emulation.profile.device.name or "an unnamed device"
    table.add_row("plan", plan_text(plan))
    table.add_row("passes wait for", f"the times of {device}, times {pace.time_scale:g}")
    table.add_row("a minibatch, planned", f"{pace.predicted_minibatch_ms:.2f} ms")
    ms = "too short a run to tell; raise --minibatches"
    if pace.minibatch_ms is not None:
        ms = f"{pace.minibatch_ms:.2f} ms of model time; mean of {pace.measured_minibatches} in the steady state"
    table.add_row("a minibatch, measured", ms)
    table.add_row("throughput, model time", rate_text(pace.samples_per_second))
    sent = format_bytes(ended.training_bytes_sent / ended.minibatches)
    planned = format_bytes(plan.predicted.bytes_per_minibatch)
    table.add_row("sent a minibatch", f"{sent}, all workers together; planned {planned}")
    table.add_row("took", f"{seconds_text(ended.seconds)} for {ended.minibatches} minibatches")
    if ended.refused_messages:
        table.add_row("refused messages", str(ended.refused_messages))
    table.add_row("files", str(run_dir))
    return table


def print_emulation_table(
    plan: Plan, emulation: Emulation, ended: Emulated, run_dir: Path, stream: TextIO | None = None
) -> None:
    """Print `emulation_table`, on standard output by default."""
    console = open_console(sys.stdout if stream is None else stream, terminal=None)
    console.print(emulation_table(plan, emulation, ended, run_dir))
    print_stages(ended.performance, console)
