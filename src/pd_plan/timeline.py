"""Draws what the simulator saw: one row a worker, time to the right (the paper, Figure 8).

    four equal stages, backward passes twice as long as forward ones:

    0 stage 0 0--1--2--3--                  0=====4--1=====5--2=====6--3=====7--4==
    1 stage 1    0--1--2--            0=====3--1=====4--2=====5--3=====6--4=====7--
    2 stage 2       0--1--      0=====2--1=====3--2=====4--3=====5--4=====6--5=====
    3 stage 3          0--0=====1--1=====2--2=====3--3=====4--4=====5--5=====6--6==

A cell is a pass: its minibatch, then `-` for forward or `=` for backward to its end; colours say the same again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_format.profile import Profile
from pd_format.units import format_ms
from pd_plan.cluster import Cluster
from pd_plan.compressed import compression_of, loads_sent
from pd_plan.depth import default_mode
from pd_plan.network import Wiring
from pd_plan.planner import partition_of
from pd_plan.simulator import Pass, Transfer, record, work_of

__all__ = ["Film", "film", "print_timeline"]

_ROUNDS = 3
"""As many times the minibatches in flight are simulated: start-up takes the first, the rhythm shows in the others."""
_LEAST = 16
_MOST_WORK = 300_000
_MOST_ROWS = 24
_LONGEST_CELL = 24
_ROUNDING = 1e-6
_TICK = 10
"""Columns between two marks of the time axis."""
_STYLES = {True: ("-", "black on bright_blue"), False: ("=", "black on green")}


@dataclass(frozen=True)
class Film:
    """A simulated run from its start into its steady state."""

    title: str
    stages: tuple[str, ...]
    """What each stage is, in words."""
    links: str
    workers: tuple[tuple[int, int], ...]
    """(stage, replica) of each worker."""
    passes: tuple[Pass, ...]
    transfers: tuple[Transfer, ...]
    steady_ms: float
    """The last stage's first forward pass ends: where the paper's start-up phase does."""
    rhythm_ms: float
    """As many minibatches as fit into the pipeline have left it."""
    end_ms: float


def film(profile: Profile, plan: Plan, links: str = "card") -> Film:
    """Simulate a plan and keep what happens.

    Args:
        profile: that the plan was made from.
        plan: of any strategy; its depths are simulated.
        links: one of `pd_plan.network.LINKS`.

    Raises:
        UserError: the pipeline is too large to be drawn.
    """
    again = [stage.recompute for stage in plan.stages]
    loads = loads_sent(profile, partition_of(plan), compression_of(plan), again)
    depths = [stage.in_flight for stage in plan.stages]
    in_flight = max(stage.in_flight * stage.replicas for stage in plan.stages)
    minibatches = max(_LEAST, _ROUNDS * in_flight)
    work = minibatches * work_of(loads)
    if work > _MOST_WORK:
        raise UserError(
            f"a timeline of {plan.workers} workers and {in_flight} minibatches in flight would show about "
            f"{work:,} events; expected at most {_MOST_WORK:,}. Draw a plan for fewer machines."
        )
    wiring = Wiring(Cluster(plan.machines, plan.bandwidth_bps).bytes_per_ms, links, gradients=not plan.inference)
    passes, transfers = record(loads, depths, wiring, default_mode(len(loads)), minibatches)
    last = len(plan.stages) - 1
    finished = [one.end_ms for one in passes if one.stage == 0 and not one.item.forward]
    return Film(
        title=f"{profile.model.name}, config {plan.config}, in flight {'-'.join(map(str, depths))}",
        stages=tuple(
            f"stage {stage.index}: {stage.first_layer} to {stage.last_layer}, {format_ms(load.forward_ms)} forward, "
            f"{format_ms(load.backward_ms)} backward"
            for stage, load in zip(plan.stages, loads, strict=True)
        ),
        links=links,
        workers=tuple((stage.index, replica) for stage in plan.stages for replica in range(stage.replicas)),
        passes=tuple(one for one in passes if one.item.forward or not plan.inference),
        transfers=tuple(transfers),
        steady_ms=min(one.end_ms for one in passes if one.stage == last),
        rhythm_ms=finished[min(in_flight, len(finished) // 2) - 1],
        end_ms=finished[-1],
    )


def print_timeline(console: Console, film: Film) -> None:
    """Draw a film: its start, and its rhythm in a second drawing where the first is too narrow for it."""
    scale = _columns_per_ms(film)
    if not scale:
        console.print("The passes take no time: there is nothing to draw.")
        return
    console.print(Text("Timeline, simulated", style="bold"), soft_wrap=True)
    legend = Text("0", style=_STYLES[True][1]).append("--", _STYLES[True][1]).append(" forward, ", "default on default")
    legend.append("0==", _STYLES[False][1]).append(
        f" backward pass of minibatch 0; a column is {format_ms(1 / scale)}", "default on default"
    )
    console.print(legend, soft_wrap=True)
    rows = _rows(film)
    label = max(len(_label(film, worker)) for worker in rows) + 1
    columns = max(console.width - 1 - label, _TICK)
    starts = [("start-up", 0.0)]
    if film.end_ms * scale > columns and film.rhythm_ms * scale > columns * 2 / 3:
        starts.append(("steady state", _neat_start(film)))
    for name, start in starts:
        console.print(Text(f"{name}, in ms".ljust(label), style="dim"), soft_wrap=True)
        console.print(Text(" " * label + _axis(start, scale, columns), style="dim"), soft_wrap=True)
        for index, worker in enumerate(rows):
            if index and worker != rows[index - 1] + 1:
                console.print(Text(f"... {worker - rows[index - 1] - 1} more workers", style="dim"), soft_wrap=True)
            line = Text(_label(film, worker).ljust(label))
            line.append_text(_row([one for one in film.passes if one.worker == worker], start, scale, columns))
            line.rstrip()
            console.print(line, soft_wrap=True)


def _columns_per_ms(film: Film) -> float:
    """So many that the shortest pass holds its number, but the longest is no more than `_LONGEST_CELL`."""
    durations = [one.end_ms - one.start_ms for one in film.passes if one.end_ms > one.start_ms]
    if not durations:
        return 0.0
    digits = len(str(max(one.item.minibatch for one in film.passes)))
    return min((digits + 1) / min(durations), _LONGEST_CELL / max(durations))


def _rows(film: Film) -> list[int]:
    workers = list(range(len(film.workers)))
    half = _MOST_ROWS // 2
    return workers if len(workers) <= _MOST_ROWS else workers[:half] + workers[-half:]


def _label(film: Film, worker: int) -> str:
    stage, replica = film.workers[worker]
    replicated = sum(other == stage for other, _ in film.workers) > 1
    width = len(str(len(film.workers) - 1))
    return f"{worker:>{width}} stage {stage}" + (f".{replica}" if replicated else "")


def _neat_start(film: Film) -> float:
    """The rhythm from the beginning of a forward pass of the first worker on."""
    starts = (one.start_ms for one in film.passes if one.worker == 0 and one.item.forward)
    return next((start for start in starts if start >= film.rhythm_ms), film.rhythm_ms)


def _axis(start_ms: float, scale: float, columns: int) -> str:
    step = _TICK / scale
    digits = 0 if step >= 5 else 1 if step >= 0.5 else 3
    marks = (f"{start_ms + tick * step:.{digits}f}".ljust(_TICK) for tick in range(columns // _TICK))
    return "".join(marks).rstrip()


def _row(passes: Sequence[Pass], start_ms: float, scale: float, columns: int) -> Text:
    row = Text()
    for first, last, one in _cells(passes, start_ms, scale, columns):
        row.append(" " * (first - len(row)))
        fill, style = _STYLES[one.item.forward]
        number = str(one.item.minibatch)
        # A cell that begins left of the drawing shows no number, nor does one that is too narrow for it.
        shown = number if len(number) <= last - first and one.start_ms * scale > start_ms * scale - 0.5 else ""
        row.append(shown.ljust(last - first, fill), style)
    return row


def _cells(passes: Sequence[Pass], start_ms: float, scale: float, columns: int) -> Iterator[tuple[int, int, Pass]]:
    for one in passes:
        # Down rather than to the nearest: passes of one length then get one width.
        first = max(math.floor((one.start_ms - start_ms) * scale + _ROUNDING), 0)
        last = min(math.floor((one.end_ms - start_ms) * scale + _ROUNDING), columns)
        if first < last:
            yield first, last, one
