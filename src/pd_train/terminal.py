"""Text for a terminal: figures as people read them, and the console that they go to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from pd_format.plan import Plan, Stage

__all__ = [
    "UNKNOWN",
    "count_text",
    "difference_text",
    "duration_text",
    "figure_text",
    "layers_text",
    "loss_text",
    "ms_text",
    "open_console",
    "percent_text",
    "plan_text",
    "rate_text",
    "seconds_text",
    "share_text",
    "signed_text",
    "value_text",
]

UNKNOWN = "-"
"""Stands where a figure is not known."""


def open_console(stream: TextIO, terminal: bool | None) -> Console:
    from rich.console import Console

    return Console(file=stream, force_terminal=terminal, highlight=False, markup=False, emoji=False)


def rate_text(samples_per_second: float | None) -> str:
    if samples_per_second is None:
        return f"{UNKNOWN} samples/s"
    return (
        f"{samples_per_second:.{0 if samples_per_second >= 100 else 1 if samples_per_second >= 10 else 2}f} samples/s"
    )


def loss_text(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4f}" if not math.isfinite(loss) or 1e-3 <= abs(loss) < 1e4 or loss == 0 else f"{loss:.2e}"


def value_text(metric: str, value: float | None) -> str:
    """A metric's value as people of the field write it: 97.00 %, 0.2940 of METEOR, perplexity 23.41."""
    if metric == "accuracy":
        return percent_text(value)
    if metric == "perplexity" and value is not None and value < 1e4:
        return f"{value:.2f}"
    return loss_text(value)


def percent_text(share: float | None, digits: int = 2) -> str:
    return UNKNOWN if share is None else f"{share:.{digits}%}".replace("%", " %")


def share_text(share: float | None) -> str:
    """`12 %`."""
    return percent_text(share, 0)


def signed_text(difference: float | None) -> str:
    """`+12 %`: of one figure over another, less 1."""
    return UNKNOWN if difference is None else f"{100 * difference:+.0f} %"


def figure_text(figure: float | None) -> str:
    """Three digits, for a table whose head names the unit."""
    if figure is None:
        return UNKNOWN
    return f"{figure:.2f}" if figure < 9.995 else f"{figure:.1f}" if figure < 99.95 else f"{figure:,.0f}"


def ms_text(ms: float | None) -> str:
    """`4 ms`, `31.2 ms`, `1,234 ms`: in a sentence."""
    return UNKNOWN if ms is None else f"{ms:.3g} ms" if ms < 1000 else f"{ms:,.0f} ms"


def difference_text(difference: float | None) -> str:
    """`12 % more`, `3 % less`, `equal`, `2.5 times as much`: of one figure over another, less 1."""
    if difference is None:
        return UNKNOWN
    if difference >= 1:
        return f"{1 + difference:.1f} times as much"
    per_cent = round(100 * difference)
    return f"{abs(per_cent)} % {'more' if per_cent > 0 else 'less'}" if per_cent else "equal"


def duration_text(seconds: float | None) -> str:
    """`0:09`, `12:34`, `1:02:03`."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds:.0f} s ({duration_text(seconds)})"


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plan_text(plan: Plan) -> str:
    """`2-1 (2 stages, 3 workers)`."""
    return f"{plan.config} ({count_text(len(plan.stages), 'stage')}, {count_text(plan.workers, 'worker')})"


def layers_text(stage: Stage) -> str:
    """`conv1 to pool2 (10 layers)`."""
    if stage.layers == 1:
        return stage.first_layer
    return f"{stage.first_layer} to {stage.last_layer} ({stage.layers} layers)"
