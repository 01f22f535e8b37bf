"""Starts a run again when a worker was lost (`--max-restarts`), and keeps a list of that in the run's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pd_format.errors import UserError
from pd_train.events import Event, Note, WorkersMet, WorkersStart
from pd_train.finished import finished_run
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
    leads = 0 in (options.ranks or (0,))
    # Workers of several hosts meet even if nothing is left to train: the others' folders do not tell.
    if options.resume == "yes" and leads and finished_run(options) is None:
        _note_restart(options.run_dir, "--resume")
    restarts = 0
    meeting = _Meeting(show)
    while True:
        show(WorkersStart())
        try:
            return launch(options, meeting.show)
        except WorkerLost as error:
            # Hosts notice a loss one after another: the first to start again may meet those that are just ending.
            elsewhere = bool(options.ranks) and len(options.ranks) < options.plan.workers
            counts = not elsewhere or meeting.is_over or meeting.seconds > options.rendezvous_timeout
            if most_restarts == 0 or (counts and restarts == most_restarts):
                raise
            if counts:
                restarts += 1
                show(Note(f"{error} Starting again, for the {restarts}. of at most {most_restarts} times."))
                if leads:  # The folder may be shared, and rank 0 counts what stands there.
                    _note_restart(options.run_dir, str(error))
                meeting = _Meeting(show)
            options = replace(options, resume="yes" if options.resume == "yes" else "if possible")


class _Meeting:
    """Whether the workers have met since the last start that counts."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self.is_over = False
        self._began = time.monotonic()
        self._show = show

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def show(self, event: Event) -> None:
        if isinstance(event, WorkersMet):
            self.is_over = True
        self._show(event)


def _note_restart(run_dir: Path, reason: str) -> None:
    try:
        with (run_dir / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "reason": reason}) + "\n")
    except OSError as error:
        raise UserError(
            f"{reason}\n{run_dir}: cannot be written to ({error.strerror}), so it is not started again."
        ) from None
