"""Pictures of runs: their metric over time and over epochs, and a stage timeline; as SVG and as PNG (extra `plots`).

matplotlib draws; whoever calls this has made sure that it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pd_format.errors import UserError
from pd_train.comparison import labels_of
from pd_train.past_run import PastRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_metric", "draw_timeline"]

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pd-train",
}
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people with any colour vision tell apart."""
_DASHES = ("-", "--", ":", "-.")
_DOINGS = {
    "forward": ("#56b4e9", "forward"),
    "backward": ("#0072b2", "backward"),
    "update": ("#009e73", "update"),
    "wait_activations": ("#eeeeee", "waits for input"),
    "wait_gradients": ("#eeeeee", "waits for input"),
    "wait_sync": ("#e69f00", "waits for replicas"),
    "wait_data": ("#cc79a7", "waits for data"),
}
"""The colour of each thing that a worker does, and what it is called; what is left white is messages."""
_SHOWN = 12
"""Minibatches in the steady state that a timeline shows."""


def draw_metric(runs: Sequence[PastRun], folder: Path, target: float | None = None) -> list[Path]:
    """Draw the metric of one or more runs over training time and over epochs.

    Args:
        runs: judged by the same metric.
        folder: where the pictures go.
        target: drawn as a line.

    Returns:
        the files; none where no validation has told anything.
    """
    if not any(one.judged is not None for run in runs for one in run.epochs):
        return []
    from matplotlib.ticker import MaxNLocator

    metric = runs[0].metric
    scale, unit = (100.0, ", %") if metric == "accuracy" else (1.0, "")
    written = []
    for what, label in (("time", "training time, s"), ("epochs", "epochs")):
        with _styled_figure((6.0, 3.6)) as figure:
            axes = figure.subplots()
            for number, (run, name) in enumerate(zip(runs, labels_of(runs), strict=True)):
                x, y = _curve(run, over_time=what == "time")
                if not y:
                    continue
                axes.plot(
                    x,
                    [scale * value for value in y],
                    marker="o",
                    markersize=3,
                    color=_LINES[number % len(_LINES)],
                    linestyle=_DASHES[number // len(_LINES) % len(_DASHES)],
                    label=f"{name} ({run.plan.config})",
                )
            if target is not None:
                axes.axhline(scale * target, color="#666666", linewidth=0.8, linestyle=(0, (4, 3)))
                axes.annotate(
                    " target", (0, scale * target), xycoords=("axes fraction", "data"), ha="left", va="bottom",
                    color="#666666", fontsize=8,
                )  # fmt: skip
            axes.set_xlabel(label)
            axes.set_ylabel(f"validation {metric}{unit}")
            axes.set_xlim(left=0)
            if what == "epochs":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len(runs) > 1:
                axes.legend(loc="best", fontsize=8)
            else:
                axes.set_title(
                    f"{runs[0].name}: {runs[0].plan.model.name}, plan {runs[0].plan.config}", loc="left", fontsize=9
                )
            written += _save(figure, folder, f"{metric}-over-{what}")
    return written


def _curve(run: PastRun, over_time: bool) -> tuple[list[float], list[float]]:
    x, y, seconds = [], [], 0.0
    for number, one in enumerate(run.epochs, 1):
        seconds += one.seconds
        if one.judged is not None:
            x.append(seconds if over_time else float(number))
            y.append(one.judged)
    return x, y


class _Span(NamedTuple):
    doing: str
    start: float
    """In ms, as its length."""
    length: float
    minibatch: int | None


def draw_timeline(run: PastRun, folder: Path) -> list[Path]:
    """Draw what the workers did, by trace.json: start-up and some minibatches of the steady state after it.

    Returns:
        the files; none where the run kept no trace.

    Raises:
        UserError: the trace is damaged.
    """
    path = run.folder / "trace.json"
    if not path.exists():
        return []
    try:
        rows = _rows(json.loads(path.read_text()), run)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: is damaged ({error!r}); remove it for pictures without.") from None
    if not any(rows.values()):
        return []
    begin, end = _window(run, rows)
    from matplotlib.patches import Patch

    with _styled_figure((10.0, 1.3 + 0.42 * len(rows))) as figure:
        axes = figure.subplots()
        axes.grid(False, axis="y")
        used: dict[str, str] = {}
        for place, spans in enumerate(rows.values()):
            for span in spans:
                if span.start + span.length <= begin or span.start >= end or span.doing not in _DOINGS:
                    continue
                colour, word = _DOINGS[span.doing]
                used[word] = colour
                left = max(span.start, begin)
                width = min(span.start + span.length, end) - left
                axes.broken_barh([(left - begin, width)], (place - 0.4, 0.8), facecolor=colour, linewidth=0)
                if span.minibatch is not None and width > (end - begin) * (0.004 + 0.005 * len(str(span.minibatch))):
                    axes.text(
                        left - begin + width / 2, place, str(span.minibatch), ha="center", va="center", fontsize=7,
                        color="white" if span.doing == "backward" else "black", clip_on=True,
                    )  # fmt: skip
        axes.set_yticks(range(len(rows)), list(rows))
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, end - begin)
        axes.set_xlabel("time, ms" if run.time_scale is None else f"time, ms ({run.time_scale:g} times the model's)")
        words = [word for word in dict.fromkeys(word for _, word in _DOINGS.values()) if word in used]
        axes.legend(
            handles=[Patch(color=used[word], label=word) for word in words], loc="lower left", bbox_to_anchor=(0, 1),
            ncols=len(words), fontsize=8, handlelength=1.2, borderaxespad=0.2,
        )  # fmt: skip
        return _save(figure, folder, "timeline")


def _rows(trace: Mapping[str, Any], run: PastRun) -> dict[str, list[_Span]]:
    """The compute thread's spans of each worker, in order of ranks."""
    ranks = {f"worker {rank}": rank for stage in run.plan.stages for rank in stage.workers}
    workers: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name" and event["args"]["name"] in ranks:
            workers[event["pid"], event["tid"]] = ranks[event["args"]["name"]]
    rows: dict[str, list[_Span]] = {}
    for place, rank in sorted(workers.items(), key=lambda item: item[1]):
        stage, replica = run.plan.stage_of(rank)
        name = f"stage {stage.index}" + (f", replica {replica}" if stage.replicas > 1 else "")
        rows[name] = sorted(_spans(trace, place), key=lambda span: span.start)
    return rows


def _spans(trace: Mapping[str, Any], place: tuple[int, int]) -> Iterator[_Span]:
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and (event["pid"], event["tid"]) == place:
            is_pass = event["cat"] in ("forward", "backward")
            yield _Span(
                event["cat"], event["ts"] / 1e3, event["dur"] / 1e3, event["args"].get("minibatch") if is_pass else None
            )


def _window(run: PastRun, rows: Mapping[str, Sequence[_Span]]) -> tuple[float, float]:
    """Which part of the trace to show, in ms: from its first pass on, until some minibatches have come back."""
    passes = [span for spans in rows.values() for span in spans if span.minibatch is not None]
    first = min(span.minibatch or 0 for span in passes)
    last = first + _SHOWN + run.plan.noam * run.plan.stages[0].replicas
    shown = [span for span in passes if (span.minibatch or 0) <= last]
    return min(span.start for span in shown), max(span.start + span.length for span in shown)


@contextmanager
def _styled_figure(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure of that size in inches, in the house's style while it is drawn and saved."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    for path in paths:
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); name another place with --output."
            ) from None
    return paths
