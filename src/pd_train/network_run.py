"""`pd-train --measure-network`: starts the workers of a plan to measure the links between them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pd_format.errors import UserError
from pd_train.farewell import Farewell
from pd_train.options import RunOptions
from pd_train.placing import find_plan, find_workers
from pd_train.usage import refuse_beside

__all__ = ["measure_network"]

_TAKEN = frozenset(
    {"plan_path", "hosts", "rank", "key", "insecure", "rendezvous_timeout", "peer_timeout", "stall_timeout",
     "debug_dump"}
)  # fmt: skip


def measure_network(given: Mapping[str, Any], typed: set[str], farewell: Farewell) -> None:
    """Measure the links of a plan.

    Args:
        given: the command's options.
        typed: those on the command line.
        farewell: says goodbye to other hosts.

    Raises:
        click.UsageError: an option means nothing here.
        UserError: the workers cannot be started as for a run.
    """
    for name in sorted(typed - _TAKEN):
        refuse_beside("--measure-network", name, "which trains nothing")
    plan = find_plan(given["plan_path"])
    if plan.workers == 1:
        raise UserError(f"--plan {given['plan_path']}: has one worker, and no link to measure; plan for more machines.")
    plan, identity, key = find_workers(plan, given, farewell)
    folder = Path(tempfile.mkdtemp(prefix="pd-train-network-"))
    _launch(
        RunOptions(
            plan=plan,
            run_dir=folder,
            data=plan.data,
            epochs=1,
            threads=1,
            ranks=identity.ranks,
            key=key,
            measure_network=True,
            launched=identity.job is not None,
            rendezvous_timeout=given["rendezvous_timeout"],
            peer_timeout=given["peer_timeout"],
            stall_timeout=given["stall_timeout"],
            debug_dump=given["debug_dump"],
        ),
        identity.why,
        is_heard=identity.job is None or 0 in identity.ranks,
        farewell=farewell,
    )
    shutil.rmtree(folder, ignore_errors=True)  # A failure's message names the logs in it, so it stays then.


def _launch(options: RunOptions, why: str, is_heard: bool, farewell: Farewell) -> None:
    from pd_train.events import Event, NetworkMeasured, Note, WorkersListen
    from pd_train.launch import launch
    from pd_train.network_table import print_network_table

    def show(event: Event) -> None:
        if isinstance(event, WorkersListen):
            farewell.forget()
        elif isinstance(event, Note):
            click.echo(event.text)
        elif isinstance(event, NetworkMeasured) and is_heard:
            print_network_table(options.plan, event)

    click.echo(why)
    farewell.leave_naming()
    launch(options, show)
