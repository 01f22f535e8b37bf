"""Where the run's time goes, gathered at rank 0 and written while it runs, so that a broken run can be told of too.

every worker   pulse    about once a second            -->  rank 0: a row a stage, for the display
every worker   timing   after each training segment    -->  rank 0: timing.jsonl, a line an epoch, and trace.json
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy
import torch
from torch import Tensor

from pd_format.jsonfile import write_text
from pd_train.bottleneck import Setting
from pd_train.breakdown import Performance
from pd_train.compute import StageRunner
from pd_train.events import EpochMetrics, Event
from pd_train.inbox import Inbox
from pd_train.links import Links
from pd_train.options import RunOptions
from pd_train.pulse import Pulse, PulseBoard
from pd_train.recorder import ROW
from pd_train.report import performance_of
from pd_train.timing import WorkerTiming
from pd_train.timing_file import TIMING, lines_before, timing_line, timings_of
from pd_train.trace import trace_of
from pd_train.wire import Message

__all__ = ["Watch", "report_to_rank_0"]


class Watch:
    """Rank 0's side.

    Args:
        options: of the run.
        runner: of this worker.
        inbox: of this worker.
        clock_errors: seconds by which each worker's clock may be off.
        tell: takes events for the display.
        device: kind that workers compute on; None where compute is emulated.
    """

    def __init__(
        self,
        options: RunOptions,
        runner: StageRunner,
        inbox: Inbox,
        clock_errors: Mapping[int, float],
        tell: Callable[[Event], None],
        device: str | None,
    ) -> None:
        self._options = options
        self._plan = options.plan
        machines = len({host.address for host in options.plan.hosts}) or 1
        self._share_cores = device == "cpu" and machines < options.plan.workers
        self._run_dir = options.run_dir
        self._inbox = inbox
        self._clock_errors = clock_errors
        self._tell = tell
        self._board = PulseBoard(options.plan)
        self._segments = 0
        self._told = [0] * options.plan.workers
        self._sums = [WorkerTiming() for _ in range(options.plan.workers)]
        self._rows = [numpy.empty((0, len(ROW))) for _ in range(options.plan.workers)]
        self._traced_more = False
        self._lines: list[str] = []
        runner.tell_pulse = self._tell_status
        runner.tell_timing = lambda timing, rows: self._take_timing(0, timing, torch.tensor(rows, dtype=torch.float64))
        inbox.handle("pulse", lambda message: self._board.take(message.sender, Pulse(*message.body)))
        inbox.handle("timing", self._take_message)

    def go_on(self, epoch: int) -> None:
        """The run begins with this epoch: of earlier ones the file knows."""
        file = self._run_dir / TIMING
        kept = file.read_text().splitlines() if epoch and file.exists() else []
        self._lines = lines_before(kept, epoch)

    def count_segment(self) -> None:
        """Another training segment has been run."""
        self._segments += 1

    def finish_epoch(self, epoch: int) -> None:
        """Write what is known of an epoch, once all have told of it."""
        self._inbox.wait_until(
            lambda: min(self._told) == self._segments,
            lambda: f"worker {self._told.index(min(self._told))} to tell where its time went",
        )
        self._lines.append(timing_line(self._plan, epoch, self._sums, self._share_cores))
        self._sums = [WorkerTiming() for _ in self._sums]
        write_text(self._run_dir / TIMING, "".join(line + "\n" for line in self._lines), make_folder=False)
        if self._traced_more:
            self._traced_more = False
            trace = trace_of(self._plan, self._rows, self._clock_errors)
            write_text(self._run_dir / "trace.json", json.dumps(trace), make_folder=False)

    def performance(self, epochs: Sequence[EpochMetrics], peaks: Sequence[int] | None) -> Performance:
        """What the epochs so far say of the run; `peaks` are bytes of each stage's fullest worker, where counted."""
        options = self._options
        return performance_of(
            self._plan,
            epochs,
            timings_of(self._lines, self._plan).epochs,
            Setting.of(options, self._share_cores),
            options.metric,
            options.target_metric,
            peaks,
            1.0 if options.emulate is None else options.emulate.time_scale,
        )

    def _tell_status(self, pulse: Pulse) -> None:
        """At this worker's own pulse: it has sorted by then what the others sent while it computed."""
        self._board.take(0, pulse)
        self._tell(self._board.status(pulse.time))

    def _take_message(self, message: Message) -> None:
        plain, rows = message.body
        self._take_timing(message.sender, WorkerTiming.from_plain(plain), rows)

    def _take_timing(self, rank: int, timing: WorkerTiming, rows: Tensor) -> None:
        self._told[rank] += 1
        self._sums[rank].add(timing)
        if len(rows):
            self._traced_more = True
            self._rows[rank] = numpy.concatenate([self._rows[rank], rows.numpy().reshape(-1, len(ROW))])


def report_to_rank_0(runner: StageRunner, links: Links) -> None:
    """Have a worker other than rank 0 tell that one where its time goes."""

    def tell_pulse(pulse: Pulse) -> None:
        links.to_rank(0, "pulse", 0, 0, tuple(pulse))

    def tell_timing(timing: WorkerTiming, rows: array[float]) -> None:
        links.to_rank(0, "timing", 0, 0, (timing.plain(), torch.tensor(rows, dtype=torch.float64)))

    runner.tell_pulse = tell_pulse
    runner.tell_timing = tell_timing
