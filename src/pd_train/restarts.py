"""Starts a run again when a worker was lost (`--max-restarts`), and keeps a list of that in the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pd_train.events import Event, Note
from pd_train.launch import WorkerLost, launch
from pd_train.options import RESTARTS, RunOptions

__all__ = ["train"]


def train(options: RunOptions, most_restarts: int, show: Callable[[Event], None]) -> None:
    """Run to the end, from the newest whole checkpoint again after each loss of a worker.

    Where no checkpoint is whole yet, that is the beginning. Failures that would only happen again, such as a loss that
    is no number or a full disk, end the run at once.

    Args:
        options: of the run.
        most_restarts: losses after which it is given up.
        show: takes the events that the display shows.

    Raises:
        UserError, Stopped: see `pd_train.launch.launch`.
    """
    options = replace(options, first_start=time.time())
    if options.resume == "yes":
        _note_restart(options.run_dir, "--resume")
    for restart in range(1, most_restarts + 2):
        try:
            return launch(options, show)
        except WorkerLost as error:
            if restart > most_restarts:
                raise
            show(Note(f"{error} Starting again, for the {restart}. of at most {most_restarts} times."))
            _note_restart(options.run_dir, str(error))
            options = replace(options, resume="yes" if options.resume == "yes" else "if possible")


def _note_restart(run_dir: Path, reason: str) -> None:
    with (run_dir / RESTARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "reason": reason}) + "\n")
