"""The result for people: a line a layer, the check against the plain step, and what to do next.

    layer            op      forward  backward   ±  activation   params
    ───────────────────────────────────────────────────────────────────
    features.0       Conv2d    1.234     2.345  2%     12.8 MB   7.2 kB

The table is as narrow as its names allow and never wider than the terminal; a name that is too long loses its
beginning, since the end tells layers apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pd_format.profile import LayerProfile, Profile
from pd_format.units import format_bytes, format_ms
from pd_profile.samples import Summary

__all__ = ["BOUND", "check_lines", "estimate_lines", "readable_op", "table_lines"]

#: The sum over the layers should lie this close to the plain step, as a share of it.
BOUND = 0.10

_HEADINGS = ("layer", "op", "forward", "backward", "±", "activation", "params")
_WIDEST_OP = 18
_GAPS = 2 * (len(_HEADINGS) - 1)


def table_lines(profile: Profile, width: int = 80) -> list[str]:
    """The table, a line a layer, then the totals, then what the columns mean.

    Times are milliseconds for one minibatch. ± is the standard deviation of a layer's forward and backward time
    together, from minibatch to minibatch, as a share of it; activation is what crosses a cut placed right after the
    layer.

    Args:
        width: of the terminal, in characters; the table keeps within it from 80 on.
    """
    layers = profile.layers
    forward = sum(layer.forward_ms for layer in layers)
    backward = sum(layer.backward_ms for layer in layers)
    # The same number of decimals in every row, so that the eye finds the large ones.
    decimals = 3 if forward + backward < 100 else 2 if forward + backward < 10_000 else 0
    rows: list[Sequence[str]] = [_HEADINGS]
    rows += [
        (layer.name, readable_op(layer.op), *_figures(layer, decimals, profile.device.estimated)) for layer in layers
    ]
    rows.append(
        (
            f"{len(layers)} layers",
            "",
            f"{forward:.{decimals}f}",
            f"{backward:.{decimals}f}",
            "",
            "",
            format_bytes(sum(layer.parameter_bytes for layer in layers)),
        )
    )
    figures = [max(len(row[column]) for row in rows) for column in range(2, len(_HEADINGS))]
    room = max(20, width - sum(figures) - _GAPS)
    op = min(_WIDEST_OP, max(len(row[1]) for row in rows), 2 * room // 5)
    name = min(room - op, max(len(row[0]) for row in rows))
    lines = []
    for row in rows:
        cells = [f"{_tail(row[0], name):<{name}}", f"{_head(row[1], op):<{op}}"]
        cells += [f"{cell:>{wide}}" for cell, wide in zip(row[2:], figures, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "─" * max(map(len, lines))
    legend = "Times are ms a minibatch; activation is all that crosses a cut after the layer."
    return [lines[0], rule, *lines[1:-1], rule, lines[-1], legend]


def check_lines(summary: Summary) -> list[str]:
    """How the sum over the layers compares with the plain step, and a warning where it lies too far off."""
    difference = summary.difference
    lines = [
        f"The layers add up to {format_ms(summary.layers_ms)}, an un-instrumented step takes "
        f"{format_ms(summary.plain_ms)} ({difference:+.1%})."
    ]
    if not abs(difference) <= BOUND:
        lines.append(
            f"Warning: they differ by more than {BOUND:.0%}, so the layers' times are doubtful. "
            "Measure on an idle machine, with more --minibatches, or with a larger --minibatch-size."
        )
    return lines


def estimate_lines(profile: Profile) -> list[str]:
    """That these figures were computed, what they add up to, and for which machine."""
    total = sum(layer.compute_ms for layer in profile.layers)
    return [
        f"Estimated, not measured: {format_ms(total)} a minibatch on {profile.device.name}, by operations and bytes. "
        "docs/estimates.md says how far off that was where it could be compared; measure where you can."
    ]


def readable_op(op: str) -> str:
    """What a layer does, without its arguments: `Conv2d(3, 64, kernel_size=(3, 3))` is `Conv2d`."""
    return re.split(r"[(\s]", op, maxsplit=1)[0].rpartition(".")[2]


def _figures(layer: LayerProfile, decimals: int, estimated: bool) -> Sequence[str]:
    time = layer.compute_ms
    spread = math.hypot(layer.forward_ms_std, layer.backward_ms_std)
    return (
        f"{layer.forward_ms:.{decimals}f}",
        f"{layer.backward_ms:.{decimals}f}",
        f"{spread / time:.0%}" if time > 0 and not estimated else "",
        format_bytes(layer.activation_bytes),
        format_bytes(layer.parameter_bytes),
    )


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _head(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
