"""Draws the live view for a terminal of some size: no line is longer than that, and what does not fit is left out.

epoch 2/10  training    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                   23/45
2140 samples/s   loss 0.3127   validation accuracy 91.27 %   0:14 left

stage  replicas   busy  MB/s sent  versions  waits for
    0         3   91 %       12.3         4  gradients 6 %
    1         1   77 %        1.1         1  activations 22 %
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pd_train.display.sentences import busy_text, pace_of
from pd_train.display.view import View
from pd_train.events import EMULATION, Progress, StageStatus
from pd_train.pulse import SILENT_S
from pd_train.terminal import UNKNOWN, duration_text, loss_text, rate_text, value_text

__all__ = ["draw"]

_WIDE = 100
"""Columns from which on layers are named."""
_LEAST_WORDS = 16
"""Columns that what a stage waits for should have."""
_LEAST_BAR = 4
_GAP = "  "


def draw(view: View, width: int, height: int, plain_characters: bool = False) -> list[Text]:
    """The lines of the view.

    Args:
        view: what is known.
        width, height: of the terminal, in cells; the last two rows are left to what scrolls by above.
        plain_characters: whether the terminal has no others than those of ASCII.
    """
    lines = _head(view, width, plain_characters)
    if view.progress is not None:
        lines.append(_figures(view, view.progress, width))
    room = max(1, height - 2)
    if view.stages and room >= len(lines) + 3:
        lines += [Text(), *_table(view, width, room - len(lines) - 1)]
    lines = lines[:room]
    for line in lines:
        line.truncate(width)
    return lines


def _head(view: View, width: int, plain_characters: bool) -> list[Text]:
    """What the run is about."""
    progress = view.progress
    epoch = "" if progress is None else f"epoch {progress.epoch + 1}/{progress.epochs}{_GAP}"
    if view.activity is not None:
        text = f"{epoch}{view.activity}{_GAP}{duration_text(view.activity_s)}"
        return [Text(line) for line in textwrap.wrap(text, width)[:3]]
    if progress is None:
        return [Text()]
    head = f"{epoch}{progress.phase:<10}{_GAP}"
    tail = f"{_GAP}{progress.done:>{len(str(progress.minibatches))}}/{progress.minibatches}"
    cells = width - len(head) - len(tail)
    if cells < _LEAST_BAR:
        return [Text(f"{epoch}{progress.phase}{tail}")]
    # Each cell has two halves.
    halves = 2 * cells * progress.done // max(1, progress.minibatches)
    whole, half, rest = ("=", ">", " ") if plain_characters else ("━", "╸", "─")
    done = whole * (halves // 2) + half * (halves % 2)
    return [Text.assemble(head, (done, "green"), (rest * (cells - len(done)), "bright_black"), tail)]


def _figures(view: View, progress: Progress, width: int) -> Text:
    """As many figures as fit: what matters least is shortened or left out first."""
    age, end = view.progress_age_s, progress.done == progress.minibatches
    usual = progress.seconds / progress.done if progress.done else 0.0
    whole = None if view.left is None else max(0.0, view.left - age)
    left, style = [f"{duration_text(whole)} left"], ""
    if view.activity is None and age > max(SILENT_S, 3 * usual):
        left, style = [f"{progress.phase} ended {age:.0f} s ago" if end else f"no minibatch for {age:.0f} s"], "yellow"
    elif progress.epochs > 1 and progress.done:
        epoch = max(0.0, usual * (progress.minibatches - progress.done) - age)
        left.insert(0, f"{duration_text(epoch)} left, {duration_text(whole)} in all epochs")
    pieces = [[rate_text(pace_of(progress)), ""], [f"loss {loss_text(progress.loss)}"], _validation(view), left]
    if progress.phase == EMULATION:
        pieces = [left]
    chosen = [0] * len(pieces)
    for piece in (3, 2, 2, 2, 0):  # The first of these is shortened first.
        if piece < len(pieces) and chosen[piece] + 1 < len(pieces[piece]) and _length(pieces, chosen) > width:
            chosen[piece] += 1
    texts = [piece[which] for piece, which in zip(pieces, chosen, strict=True)]
    return Text("   ").join(Text(text, style if texts[-1] is text else "") for text in texts if text)


def _length(pieces: Sequence[Sequence[str]], chosen: Sequence[int]) -> int:
    texts = [piece[which] for piece, which in zip(pieces, chosen, strict=True)]
    return sum(len(text) + 3 for text in texts if text) - 3


def _validation(view: View) -> list[str]:
    """The metric of the newest validation, from long to short."""
    latest, best = view.latest, view.best
    if latest is None:
        return [f"validation {UNKNOWN}", ""]
    value = value_text(latest.metric, latest.judged)
    short = f"{latest.metric} {value}"
    texts = [f"validation {short}", *([] if latest.metric == "loss" else [short]), ""]
    if best is not None and best[1] != latest.epoch:
        texts.insert(0, f"validation {short} (best {value_text(latest.metric, best[0])}, epoch {best[1] + 1})")
    return texts


def _table(view: View, width: int, rows: int) -> list[Text]:
    """A row a stage, or those that matter where there are more than rows, one of which is the heading."""
    shown = _chosen(view.stages, rows - 1)
    cells = {
        "stage": [str(index) for index in shown],
        "layers": [view.layers[index] if index < len(view.layers) else "" for index in shown],
        "replicas": [str(view.stages[index].replicas) for index in shown],
        "busy": [busy_text(view.stages[index].busy) for index in shown],
        "MB/s sent": [_rate(view.stages[index].sent_bytes_per_second) for index in shown],
        "versions": [UNKNOWN if (held := view.stages[index].versions) is None else str(held) for index in shown],
    }
    widths = {name: max(map(len, (name, *column))) for name, column in cells.items()}
    widths["busy"] = len("100 %")
    words = [_waits(view.stages[index]) for index in shown]
    if width < _WIDE or not any(cells["layers"]):
        del widths["layers"]
    else:
        others = sum(widths.values()) + len(_GAP) * len(widths) - widths["layers"]
        widths["layers"] = min(widths["layers"], max(len("layers"), width - others - 40))
    for name in ("versions", "replicas", "MB/s sent"):
        if width - sum(widths.values()) - len(_GAP) * len(widths) < _LEAST_WORDS:
            del widths[name]
    room = width - sum(widths.values()) - len(_GAP) * len(widths)
    age = f" ({view.stages_age_s:.0f} s ago)" if view.stages_age_s > SILENT_S else ""
    heading = _GAP.join(_cell(name, name, widths[name]) for name in widths)
    lines = [Text(f"{heading}{_GAP}waits for{age}" if room >= len("waits for") else heading, "dim")]
    most = max((busy for stage in view.stages if (busy := stage.busy) is not None), default=None)
    for row, index in enumerate(shown):
        stage = view.stages[index]
        line = Text(style="dim" if age else "")
        for name, column_width in widths.items():
            bold = name == "busy" and len(view.stages) > 1 and stage.busy is not None and stage.busy == most
            line.append(_cell(name, cells[name][row], column_width), "bold" if bold else None).append(_GAP)
        long = stage.now_seconds >= SILENT_S and stage.now in ("waits", "silent")
        fitting = [text for text in words[row] if len(text) <= room]
        line.append(fitting[0] if fitting else words[row][-1], "yellow" if long else None)
        line.rstrip()
        lines.append(line)
    if (left_out := [stage for index, stage in enumerate(view.stages) if index not in shown]) and rows > 1:
        known = [stage.busy for stage in left_out if stage.busy is not None]
        span = f", {busy_text(min(known))} to {busy_text(max(known))} busy" if known else ""
        lines.append(Text(f"and {len(left_out)} more stages{span}", "dim"))
    return lines


def _chosen(stages: Sequence[StageStatus], rows: int) -> list[int]:
    """Those that fit into so many rows, in order: the least and the most busy, and one row for how many are not."""
    if len(stages) <= rows:
        return list(range(len(stages)))
    by_busy = sorted(range(len(stages)), key=lambda index: (stages[index].busy is None, stages[index].busy or 0.0))
    rows = max(1, rows - 1)
    most = (rows + 1) // 2
    return sorted({*by_busy[len(stages) - most :], *by_busy[: rows - most]})


def _cell(name: str, text: str, width: int) -> str:
    if name != "layers":
        return text.rjust(width)
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 3)) + "..."
    return set_cell_size(text, width)


def _rate(bytes_per_second: float | None) -> str:
    if bytes_per_second is None:
        return UNKNOWN
    return f"{bytes_per_second / 1e6:.{1 if bytes_per_second < 1e8 else 0}f}"


def _waits(stage: StageStatus) -> list[str]:
    """What keeps a stage from computing, from long to short."""
    seconds = f"{stage.now_seconds:.0f} s"
    if stage.now_seconds >= SILENT_S:
        if stage.now == "waits":
            short = [f"{stage.now_for} for {seconds}"] if stage.now_for else []
            return [f"{stage.awaited}, for {seconds}", *short, f"(for {seconds})"]
        if stage.now == "computes":
            return [f"(computing for {seconds})", "(computing)"]
        if stage.now == "silent":
            return [f"(nothing heard for {seconds})", f"(silent {seconds})"]
    if stage.busy is None:
        return [UNKNOWN]
    if not stage.waits_for or stage.waited < 0.005:
        return [""]
    share = busy_text(stage.waited)
    now = [f"{stage.waits_for} {share}; now {stage.awaited}"] if stage.now == "waits" else []
    return [*now, f"{stage.waits_for} {share}", stage.waits_for]
