"""Shows that the measurement is under way: a bar with the time left on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["show_progress"]

_SECONDS_BETWEEN_DRAWINGS = 0.2
_SECONDS_BETWEEN_LINES = 60.0


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that is told how many minibatches are done and how many are expected in all."""
    if not console.is_terminal:
        yield from _plain_lines(console)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("minibatches,"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("left,"),
        TimeElapsedColumn(),
        console=console,
        # What stays on the screen is the table.
        transient=True,
        # Drawn between the steps, by `report`: a thread that draws would disturb the steps themselves.
        auto_refresh=False,
    )
    with progress:
        task = progress.add_task("warming up", total=None)
        progress.refresh()
        drawn = -math.inf

        def report(done: int, expected: int) -> None:
            nonlocal drawn
            if done == 0:
                progress.reset(task, total=expected, description="measuring")
            else:
                progress.update(task, completed=done, total=expected)
            if time.monotonic() - drawn >= _SECONDS_BETWEEN_DRAWINGS:
                progress.refresh()
                drawn = time.monotonic()

        yield report


def _plain_lines(console: Console) -> Iterator[Callable[[int, int], None]]:
    begin = said = time.monotonic()
    measured = 0

    def report(done: int, expected: int) -> None:
        nonlocal measured, said
        measured = done
        if time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            console.print(f"{done} of {expected} minibatches after {said - begin:.0f} s.", highlight=False)

    console.print("Warming up, then measuring ...", highlight=False)
    yield report
    console.print(f"Measured {measured} minibatches in {time.monotonic() - begin:.1f} s.", highlight=False)
