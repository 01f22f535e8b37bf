"""`pd-train --dry-run`: does on this host what a run does before its workers meet, and says who would do what.

Nothing is written and nobody is connected to; names of other hosts are looked up.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_format.layers.stage import StageModule
from pd_format.layers.task import get_task
from pd_format.plan import Plan
from pd_format.units import format_bytes
from pd_train.assembly import choose_device
from pd_train.built import build_stage
from pd_train.check import worker_memory_bytes
from pd_train.data import Minibatch
from pd_train.events import Note
from pd_train.feed import open_data
from pd_train.host import available_memory_bytes
from pd_train.keys import read_key
from pd_train.launch import listen_at
from pd_train.meeting import COMMON_MARK
from pd_train.narrow import fitted
from pd_train.options import RunOptions
from pd_train.routing import on_the_host_of, place_of
from pd_train.run_folder import check_run_folder, has_checkpoint, held
from pd_train.settling import Settled
from pd_train.terminal import UNKNOWN, count_text, layers_text, open_console
from pd_train.transport import Transport

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["rehearse"]

_READY = "All checks passed and nothing was started; without --dry-run this is the run."


def rehearse(settled: Settled, said: Iterable[Note], quiet: bool = False, stream: TextIO | None = None) -> None:
    """Check model, weights, data, addresses, memory and folder, and print who does what.

    Args:
        settled: what the command line came to, whose own checks it has passed.
        said: what a person should know of it.
        quiet: whether to print the last line alone.
        stream: standard output by default.

    Raises:
        UserError: as a run would end.
    """
    options, identity = settled.options, settled.identity
    devices = dict(_devices(options))
    found = dict(_checks(settled))
    console = open_console(sys.stdout if stream is None else stream, terminal=None)
    if quiet:
        return console.print(_READY)
    if identity.job is not None and 0 not in identity.ranks:  # A launcher shows what all its programs print.
        return console.print(f"{identity.why}. {_READY}")
    stages = [(f"stage {stage.index}", layers_text(stage)) for stage in options.plan.stages]
    console.print(_facts([("plan", f"{options.plan.config}; {identity.why}"), *stages, *found.items()]))
    for note in said:
        console.print(f"{note.kind}: {note.text}" if note.kind != "information" else note.text)
    console.print(fitted(_workers_table(options, devices), console))
    console.print(_READY)


def _devices(options: RunOptions) -> Iterator[tuple[int, str]]:
    """What each worker here computes on."""
    for rank in options.ranks:
        if options.emulate is not None:
            yield rank, "emulated"
            continue
        with _named(options.plan, rank):
            index = on_the_host_of(options.plan, rank).index(rank)
            yield rank, str(choose_device(options.device, index))


def _checks(settled: Settled) -> Iterator[tuple[str, str]]:
    """What was looked at, and what was found."""
    options = settled.options
    if options.emulate is None:
        yield from _stage_checks(options)
    yield "memory", _memory(options)
    yield "network", _network(options)
    if options.resume == "no":
        check_run_folder(options.run_dir, settled.alone)
    elif not has_checkpoint(options.run_dir):
        raise UserError(
            f"{options.run_dir}: holds no checkpoint; train from the beginning without --resume, in a new folder."
        )
    if options.run_dir.exists():
        with held(options.run_dir, settled.alone):
            pass
    yield "folder", f"{options.run_dir}{'' if options.run_dir.exists() else ', to be made'}"


def _stage_checks(options: RunOptions) -> Iterator[tuple[str, str]]:
    """The model is the plan's, and the data and the weights fit it: what every worker finds alike is done once."""
    plan, first = options.plan, options.ranks[0]
    with _named(plan, first):
        init_from = None if options.resume == "yes" else options.init_from
        built = build_stage(plan, place_of(plan, first).stage.index, options.seed, choose_device("cpu", 0), init_from)
    layers = count_text(sum(stage.layers for stage in plan.stages), "layer")
    yield "model", f"{plan.model.name}, {layers}, built here and the plan's ({built.fingerprint[:12]})"
    if init_from is not None:
        yield "weights", f"{init_from} fits the model"
    if not set(options.ranks) & set(plan.stages[0].workers):
        yield "data", "no worker here reads any"
        return
    with _named(plan, first):
        (training, validation), _ = open_data(options, built, get_task(plan.task))
        texts = []
        for part, loader in (("training", training), ("validation", validation)):
            if part == "validation" or not options.evaluate_only:
                _try(built.module, loader.load(0, 0), options)
                texts.append(f"{loader.samples} {part} samples in minibatches of {plan.minibatch_size}")
    yield "data", f"{options.data}: {', '.join(texts)}"


def _try(module: StageModule, minibatch: Minibatch, options: RunOptions) -> None:
    """Run the first stage on two samples: torch knows whether they fit better than any list of shapes."""
    few = [each[:2] if isinstance(each, Tensor) else each for each in minibatch.inputs]
    try:
        with torch.no_grad():
            module.eval()(*few)
    except (RuntimeError, ValueError, IndexError) as error:
        found = ", ".join(str(tuple(each.shape[1:])) for each in few if isinstance(each, Tensor))
        expected = ", ".join(str(tuple(spec.shape[1:])) for spec in options.plan.inputs)
        raise UserError(
            f"--data {options.data}: samples of shape {found} do not go through the first stage ({error}); the plan is "
            f"for samples of {expected}. Mend the data, or profile with it and plan anew."
        ) from None


def _memory(options: RunOptions) -> str:
    free = available_memory_bytes()
    there = "an unknown amount is free" if free is None else f"{format_bytes(free)} are free"
    if options.emulate is not None:
        return f"{there} here; an emulated worker holds parameters only"
    needed = sum(worker_memory_bytes(options.plan, options.mode, rank) for rank in options.ranks)
    return f"{format_bytes(needed)} needed by {count_text(len(options.ranks), 'worker')} here by the plan, {there}"


def _network(options: RunOptions) -> str:
    """Bind what the workers here would, all at once, and look up where the others are."""
    plan = options.plan
    key = None if options.key is None else read_key(options.key)
    with contextlib.ExitStack() as stack:
        for rank in options.ranks:
            with _named(plan, rank):
                transport = Transport(rank, COMMON_MARK, *listen_at(plan, rank), key=key)
            stack.callback(transport.close)
    if not plan.hosts:
        return "ports of this machine, free to choose"
    ports = ", ".join(str(plan.hosts[rank].port) for rank in options.ranks)
    others = sorted({plan.hosts[rank].address for rank in range(plan.workers) if rank not in options.ranks})
    unknown = [address for address in others if not _is_known(address)]
    text = f"port{'s' if len(options.ranks) > 1 else ''} {ports} can be bound"
    if unknown:
        text += f"; no address is known here for {', '.join(unknown)}, which a run would wait for in vain"
    elif others:
        text += f"; not tried: whether {', '.join(others)} can be reached"
    return text


def _is_known(address: str) -> bool:
    try:
        return bool(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return False


@contextlib.contextmanager
def _named(plan: Plan, rank: int) -> Iterator[None]:
    """A failure names the worker that it would be of, as in a run."""
    try:
        yield
    except UserError as error:
        where = f" on {plan.hosts[rank].address}" if plan.hosts else ""
        raise UserError(f"worker {rank} ({place_of(plan, rank)}{where}): {error}") from error


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _workers_table(options: RunOptions, devices: Mapping[int, str]) -> Table:
    from rich import box
    from rich.table import Table

    plan = options.plan
    elsewhere = "emulated" if options.emulate is not None else options.device
    has_figures = options.emulate is None and (plan.inference or not options.evaluate_only)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("worker", "where", "stage", "layers", "in flight", "device", "memory"):
        right = heading in ("worker", "layers", "in flight", "memory")
        table.add_column(heading, overflow="fold", justify="right" if right else "left", no_wrap=heading != "where")
    for rank in range(plan.workers):
        place = place_of(plan, rank)
        count = place.stage.replicas
        table.add_row(
            str(rank),
            f"{plan.hosts[rank].address}:{plan.hosts[rank].port}" if plan.hosts else "here",
            f"{place.stage.index}" + (f" ({place.replica + 1} of {count})" if count > 1 else ""),
            str(place.stage.layers),
            str(place.stage.in_flight),
            devices.get(rank, elsewhere),
            format_bytes(worker_memory_bytes(plan, options.mode, rank)) if has_figures else UNKNOWN,
        )
    return table
