"""Shows a run on a terminal: a view that is drawn over itself, below the lines of epochs and notes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from pd_train.debug_dump import held_back
from pd_train.display.frame import draw
from pd_train.display.sentences import epoch_line, start_line
from pd_train.display.view import View
from pd_train.events import Emulated, EpochEnded, Evaluated, Event, Note, RunEnded, RunStarted
from pd_train.terminal import open_console

__all__ = ["LiveDisplay"]

_REDRAW_EVERY_S = 0.25


class LiveDisplay:
    """A thread of its own draws, so that what takes long is seen to take long.

    Args:
        stream: of the terminal.
        clock: seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._view = View(clock)
        self._lock = threading.Lock()
        self._console = open_console(stream, terminal=True)
        self._drawn: list[int] = []
        self._drawn_width = self._console.width
        self._live = Live(self, console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._live.start()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="display", daemon=True)
        # Signals are for the main thread, which holds them back at times.
        with held_back(*signal.valid_signals()):
            self._thread.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            lines = draw(self._view, options.max_width, console.height, options.ascii_only)
            self._drawn, self._drawn_width = [line.cell_len for line in lines], options.max_width
        yield from lines

    def handle(self, event: Event) -> None:
        with self._lock:
            self._view.take(event)
        if isinstance(event, EpochEnded):
            self._print(epoch_line(event))
        elif isinstance(event, Note):
            if event.kind != "waiting":
                self._print(event.text, "yellow" if event.kind == "warning" else None)
        elif isinstance(event, RunStarted):
            self._print(start_line(event))
        elif isinstance(event, RunEnded | Evaluated | Emulated):
            self.close()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._live.stop()

    def _redraw(self) -> None:
        while not self._closing.wait(_REDRAW_EVERY_S):
            self._mind_width()
            self._live.refresh()

    def _print(self, text: str, style: str | None = None) -> None:
        self._mind_width()
        self._console.print(text, style=style, markup=False, highlight=False)

    def _mind_width(self) -> None:
        """A terminal that was made narrower has wrapped what was drawn: go up by so many rows more."""
        width = self._console.width
        with self._lock:  # Both threads come here, and only one of them may go up.
            if width >= self._drawn_width:
                return
            rows = sum(max(1, -(-cells // width)) for cells in self._drawn)
            wrapped, self._drawn_width = rows - len(self._drawn), width
        if wrapped > 0:
            row = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            self._console.control(Control(*(wrapped * row)))
