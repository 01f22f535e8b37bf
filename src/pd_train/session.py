"""One run as the person sees it who started it: its events go to the display, its figures to the table at its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import click

from pd_train.display.opening import open_display
from pd_train.display.quiet import result_line
from pd_train.emulation_table import print_emulation_table
from pd_train.event_files import EventFiles
from pd_train.events import (
    Emulated,
    EpochEnded,
    EpochMetrics,
    Evaluated,
    Event,
    Note,
    RunEnded,
    RunStarted,
    WorkersListen,
)
from pd_train.farewell import Farewell
from pd_train.options import RunOptions
from pd_train.restarts import train
from pd_train.run_table import print_evaluation_table, print_run_table
from pd_train.terminal import layers_text
from pd_train.whoami import Identity

__all__ = ["train_and_show"]


def train_and_show(
    options: RunOptions,
    identity: Identity,
    remarks: Iterable[Note],
    most_restarts: int,
    farewell: Farewell,
    quiet: bool,
    tensorboard: bool = False,
) -> None:
    """Run to the end, and show how it goes and what came out.

    Args:
        options: of the run.
        identity: which of its workers are here.
        remarks: to be shown before it starts.
        most_restarts: see `pd_train.restarts.train`.
        farewell: of this program to those on other hosts.
        quiet: whether to print one line instead of all that.
        tensorboard: whether to write event files.

    Raises:
        UserError, Stopped: see `pd_train.launch.launch`.
    """
    ended: list[RunEnded | Evaluated | Emulated] = []
    metrics: dict[int, EpochMetrics] = {}
    # A launcher brings what all its programs print to one place, where one of them is enough. Some call it a terminal.
    display = open_display(None if identity.job is None else False, quiet=quiet)
    files = EventFiles(options.run_dir) if tensorboard else None
    is_heard = identity.job is None or 0 in options.ranks

    def show(event: Event) -> None:
        if isinstance(event, WorkersListen):
            return farewell.forget()
        if isinstance(event, RunEnded | Evaluated | Emulated):
            ended.append(event)
        elif isinstance(event, EpochEnded):
            # An epoch is trained again where a worker was lost before its checkpoint was whole.
            metrics[event.metrics.epoch] = event.metrics
        if is_heard or isinstance(event, RunStarted | Note):
            display.handle(event)
        if files is not None:
            files.handle(event)

    before = signal.getsignal(signal.SIGUSR1)
    if options.debug_dump:  # Not to be ended by it between two starts of the run.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        layers = tuple(layers_text(stage) for stage in options.plan.stages)
        show(RunStarted(options.plan.config, len(options.ranks), options.threads, str(options.run_dir), layers))
        for remark in remarks:
            show(remark)
        farewell.leave_naming()
        train(options, most_restarts, show)
    finally:
        signal.signal(signal.SIGUSR1, before)
        display.close()
        if files is not None:
            files.close()
    if not is_heard:
        return
    end = ended[-1]
    if quiet:
        click.echo(result_line(end, list(metrics.values()), options.run_dir, options.target_metric))
    elif isinstance(end, Emulated):
        assert options.emulate is not None
        print_emulation_table(options.plan, options.emulate, end, options.run_dir)
    elif isinstance(end, Evaluated):
        print_evaluation_table(options.plan, end, str(options.init_from), options.run_dir)
    else:
        print_run_table(options.plan, end, list(metrics.values()), options.run_dir, options.target_metric)
