"""Chooses how a run is shown: a live view on a terminal, plain lines anywhere else, next to nothing if so wished."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol, TextIO

from pd_train.display.plain import PlainDisplay
from pd_train.display.quiet import QuietDisplay
from pd_train.events import Event

__all__ = ["Display", "open_display"]


class Display(Protocol):
    """Takes the events of a run as they come; `close` gives the terminal back."""

    def handle(self, event: Event) -> None:
        """Show an event, at once or with the next refresh."""

    def close(self) -> None:
        """Show nothing more. Closing twice does no harm."""


def open_display(
    terminal: bool | None = None,
    *,
    quiet: bool = False,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = datetime.now,
) -> Display:
    """Open the display that suits the stream.

    Args:
        terminal: whether to draw a live view; None asks the stream, and `TERM` whether it can move its cursor.
        quiet: show warnings alone.
        stream: standard output by default, standard error for warnings alone.
        clock: seconds, for the pace of plain lines.
        now: the time of day that plain lines start with.
    """
    if quiet:
        return QuietDisplay(sys.stderr if stream is None else stream, now)
    stream = sys.stdout if stream is None else stream
    if terminal is None:
        terminal = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if terminal:
        from pd_train.display.live import LiveDisplay

        return LiveDisplay(stream, clock)
    return PlainDisplay(stream, clock, now)
