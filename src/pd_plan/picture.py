"""A simulated run as a picture in SVG: one row a worker, below it what its card sends."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from pd_plan.timeline import Film

__all__ = ["svg"]

_LEFT, _TOP, _RIGHT, _BOTTOM = 116, 74, 16, 30
_PASS, _SENT, _ROW = 20, 5, 32
"""Heights of a pass, of a transfer, and of a row with both, in pixels."""
_WIDTH, _MOST_WIDTH = 1500, 6000
_NARROWEST = 14
"""Pixels that the shortest pass gets where that leaves the picture within `_MOST_WIDTH`."""
_DIGIT = 7
_TICK = 60
"""Pixels at least between two marks of the time axis."""
_COLOURS = {
    "forward": "#7fb2e5",
    "backward": "#8ccf8c",
    "activations": "#2f6db3",
    "gradients": "#3d8f3d",
    "parameter gradients": "#c77b30",
    "parameters": "#8e5bb5",
}


def svg(film: Film) -> str:
    """The picture as text, from the start until the simulation ended."""
    durations = [one.end_ms - one.start_ms for one in film.passes if one.end_ms > one.start_ms]
    if not durations:
        scale = 1.0
    else:
        scale = max(_WIDTH / film.end_ms, min(_NARROWEST / min(durations), _MOST_WIDTH / film.end_ms))
    width = _LEFT + film.end_ms * scale + _RIGHT
    bottom = _TOP + len(film.workers) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + _BOTTOM}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(film.title)}, simulated</text>',
        *_legend(film),
        *_axis(film, scale, bottom),
        *_transfers(film, scale),
        *_passes(film, scale),
        *_labels(film),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(film: Film) -> Iterator[str]:
    kinds = {one.kind for one in film.transfers}
    x = _LEFT
    for kind, colour in _COLOURS.items():
        is_pass = kind in ("forward", "backward")
        if not is_pass and kind not in kinds:
            continue
        name = f"{kind} pass of a minibatch" if is_pass else f"sends {kind}"
        height = 12 if is_pass else _SENT
        yield f'<rect x="{x}" y="{42 - height}" width="18" height="{height}" fill="{colour}"/>'
        yield f'<text x="{x + 23}" y="41">{name}</text>'
        x += 46 + 6 * len(name)


def _axis(film: Film, scale: float, bottom: int) -> Iterator[str]:
    power, step = next(
        (power, first * 10.0**power)
        for power in range(-9, 16)
        for first in (1, 2, 5)
        if first * 10.0**power * scale >= _TICK
    )
    count = int(film.end_ms / step)
    digits = max(0, -power)
    for tick in range(count + 1):
        x = _LEFT + tick * step * scale
        yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 8}" fill="#666" text-anchor="middle">{tick * step:.{digits}f}</text>'
    yield f'<text x="{_LEFT - 34}" y="{_TOP - 8}" fill="#666" text-anchor="end">ms</text>'
    x = _LEFT + film.steady_ms * scale
    yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom + 6}" stroke="#b33" stroke-dasharray="4 3"/>'
    yield f'<text x="{x:.1f}" y="{bottom + 18}" fill="#b33" text-anchor="middle">start-up | steady state</text>'


def _labels(film: Film) -> Iterator[str]:
    for worker, (stage, replica) in enumerate(film.workers):
        y = _TOP + worker * _ROW + _PASS - 6
        tip = f"worker {worker}, replica {replica} of {film.stages[stage]}"
        yield f'<text x="8" y="{y}">stage {stage}, worker {worker}<title>{escape(tip)}</title></text>'


def _passes(film: Film, scale: float) -> Iterator[str]:
    for one in film.passes:
        kind = "forward" if one.item.forward else "backward"
        x, width = _LEFT + one.start_ms * scale, (one.end_ms - one.start_ms) * scale
        y = _TOP + one.worker * _ROW
        tip = f"{kind} pass of minibatch {one.item.minibatch}, {one.start_ms:.3f} to {one.end_ms:.3f} ms"
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_PASS}" fill="{_COLOURS[kind]}" stroke="white" '
            f'stroke-width="0.8"><title>{tip}</title></rect>'
        )
        number = str(one.item.minibatch)
        if width >= _DIGIT * len(number) + 2:
            place = f'x="{x + width / 2:.2f}" y="{y + _PASS - 6}" text-anchor="middle"'
            yield f'<text {place} pointer-events="none">{number}</text>'


def _transfers(film: Film, scale: float) -> Iterator[str]:
    for one in film.transfers:
        x, width = _LEFT + one.start_ms * scale, (one.end_ms - one.start_ms) * scale
        y = _TOP + one.source * _ROW + _PASS + 2
        tip = f"{one.kind} {one.number} to worker {one.target}, {one.start_ms:.3f} to {one.end_ms:.3f} ms"
        # Links of their own may carry several transfers of a worker at once, which then shine through each other.
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_SENT}" fill="{_COLOURS[one.kind]}" '
            f'fill-opacity="{1 if film.links == "card" else 0.6}"><title>{tip}</title></rect>'
        )
