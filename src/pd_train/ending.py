"""How a run ends at rank 0: what each worker tells of it comes together, report.json is written, and all leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from pd_format.jsonfile import write_text
from pd_format.plan import Plan
from pd_train.compute import StageRunner, WorkerStatistics
from pd_train.events import OF_LAST_START, REPORT_FORMAT, REPORT_VERSION, Emulated, Evaluated, Event, Note, RunEnded
from pd_train.inbox import Inbox
from pd_train.options import RunOptions, recorded
from pd_train.transport import Transport
from pd_train.wire import Message

__all__ = ["Ending", "leave_last", "peaks_of"]


class Ending:
    """Of whatever kind of run.

    Args:
        options, runner, transport, inbox, device, tell: as for `pd_train.lead.Lead`.
    """

    def __init__(
        self,
        options: RunOptions,
        runner: StageRunner,
        transport: Transport,
        inbox: Inbox,
        device: str | None,
        tell: Callable[[Event], None],
    ) -> None:
        self._options = options
        self._runner = runner
        self._transport = transport
        self._inbox = inbox
        self._device = device
        self._tell = tell

    def gather(self, parts: dict[str, Tensor]) -> list[WorkerStatistics]:
        """Add every worker's part of the model to this one's, and say what each tells of its run."""
        everyone = [self._runner.statistics()]
        for rank in range(1, self._options.plan.workers):
            tensors, numbers = self._inbox.wait_for("part", 0, rank, f"the trained parameters of worker {rank}")
            parts |= tensors
            everyone.append(WorkerStatistics(*numbers))
        return everyone

    def report(self, ended: RunEnded | Evaluated | Emulated, everyone: Sequence[WorkerStatistics]) -> None:
        """Write report.json, tell of the end, and let all workers go."""
        skipped = sorted({path for one in everyone for path in one.skipped_files})
        report = {
            "format": REPORT_FORMAT,
            "version": REPORT_VERSION,
            "config": self._options.plan.config,
            **asdict(ended),
            "skipped_files": skipped,
            "options": recorded(self._options),
            "device": "emulated" if self._device is None else self._device,
            "torch": torch.__version__,
        }
        report["of_last_start"] = [name for name in OF_LAST_START if name in report]
        write_text(self._options.run_dir / "report.json", json.dumps(report, indent=2) + "\n", make_folder=False)
        if skipped:
            self._tell(Note(f"files that others stood in for: {len(skipped)}; report.json lists them"))
        self._tell(ended)
        others = range(1, self._options.plan.workers)
        for rank in others:
            self._transport.send(rank, Message("goodbye", 0, 0, 0))
        leave_last(self._inbox, others)


def leave_last(inbox: Inbox, others: Sequence[int]) -> None:
    """Wait until the others, who know that it is over, have left: none must take this one's leaving for a failure."""
    inbox.needed_peers = set()
    left: set[int] = set()
    inbox.handle("bye", lambda message: left.add(message.sender))
    inbox.wait_until(
        lambda: all(rank in left or rank in inbox.lost_peers for rank in others), lambda: "the other workers to end"
    )


def peaks_of(plan: Plan, everyone: Sequence[WorkerStatistics]) -> tuple[int, ...] | None:
    """What the fullest worker of each stage held, if they all counted."""
    peaks = [[everyone[rank].peak_bytes for rank in stage.workers] for stage in plan.stages]
    counted = [[peak for peak in held if peak is not None] for held in peaks]
    return tuple(map(max, counted)) if counted == peaks else None
