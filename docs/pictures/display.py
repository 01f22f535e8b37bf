"""Makes display.svg: what `pd-train` shows on a terminal in the midst of a run, taken from a run that this starts.

    python docs/pictures/display.py      # some seconds; writes docs/pictures/display.svg

The run is `examples/digits_cnn.py` on real digits as four stages. It has a terminal of its own, of 80 columns, and of
all that is drawn there one moment is kept: the lines of epochs that have scrolled by, and the view below them.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from io import StringIO
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from pd_train.cli import main
from pd_train.display import live

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 80, 24
EPOCH = 6
"""Counted from 1, in the midst of which the moment is."""

scrolled: list[Text] = []
moments: list[list[Text]] = []


def keep_frame(view: Any, width: int, height: int, plain_characters: bool = False, draw: Any = live.draw) -> list[Text]:
    lines: list[Text] = draw(view, width, height, plain_characters)
    progress = view.progress
    if progress is not None and progress.epoch + 1 == EPOCH and progress.phase == "training" and view.stages:
        moments.append([*(line.copy() for line in scrolled), *(line.copy() for line in lines)])
    return lines


def keep_line(display: Any, text: str, style: str | None = None, show: Any = live.LiveDisplay._print) -> None:
    scrolled.append(Text(text, style=style or ""))
    show(display, text, style)


def program(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", f"from {name}.cli import main; main()", *arguments], check=True)


def run() -> None:
    program("pd_profile", f"{HERE.parents[1] / 'examples' / 'digits_cnn.py'}:digits_cnn", "--data", "digits",
            "--minibatch-size", "16", "--minibatches", "20", "--threads", "1", "--output", "profile.json")  # fmt: skip
    program("pd_plan", "--profile", "profile.json", "--config", "1-1-1-1", "--bandwidth", "1gbps")
    above, below = pty.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    reader = threading.Thread(target=lambda: read_all(above), daemon=True)
    reader.start()
    live.draw, live.LiveDisplay._print = keep_frame, keep_line  # type: ignore[method-assign]
    os.environ["TERM"] = "xterm-256color"
    output = os.dup(1)
    os.dup2(below, 1)
    try:
        sys.argv = ["pd-train", "--plan", "plan.json", "--epochs", "10", "--lr", "0.02", "--run-dir", "runs/digits"]
        main(standalone_mode=False)
    finally:
        os.dup2(output, 1)


def read_all(above: int) -> None:
    while os.read(above, 1 << 16):
        pass


def write_picture(lines: list[Text]) -> None:
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in (Text(f"$ {' '.join(sys.argv)}", style="bold"), *lines):
        console.print(line, highlight=False)
    # The fonts of the template are on another site's server; a picture in a page may not ask for them.
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    # Not all that draw pictures keep spaces at the beginning of a line.
    template = template.replace("<svg ", '<svg xml:space="preserve" ', 1)
    console.save_svg(str(HERE / "display.svg"), title="pd-train", code_format=template, unique_id="display")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run()
        os.chdir(HERE)
    write_picture(moments[len(moments) // 2])
