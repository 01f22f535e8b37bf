"""One profile from the request to the file: build the model, trace it, weigh it, time it, write it, show it."""

from __future__ import annotations

import difflib
import os
import textwrap
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import Tensor, nn

from pd_format.data import Images
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.factory import build_model
from pd_format.layers.precision import get_precision
from pd_format.layers.task import get_task
from pd_format.profile import Device, InputSpec, PrecisionName, Profile
from pd_profile.clocks import Clock, clock_for
from pd_profile.estimating import count_work, estimated_summary
from pd_profile.inputs import choose_inputs, random_inputs
from pd_profile.machines import Machine
from pd_profile.measuring import measure, measure_overhead
from pd_profile.options import InputShape, ModelName, Scalar
from pd_profile.progress import show_progress
from pd_profile.record import build_record, describe_device, describe_machine
from pd_profile.samples import Summary
from pd_profile.shipped import SHIPPED
from pd_profile.sizes import out_of_memory, stash_of
from pd_profile.steps import Loss, Overhead, Scope, plain_step, untouched
from pd_profile.table import check_lines, estimate_lines, table_lines

__all__ = ["Request", "UnknownModel", "profile_model"]

_TORCHVISION = "torchvision.models"


class UnknownModel(UserError):
    """A bare name that neither this project nor torchvision has."""


@dataclass(frozen=True)
class Request:
    """What the user asked for; None where the program decides.

    Attributes:
        images: of `data`, None where it says nothing of shapes.
        device: "auto", "cpu" or "cuda".
        machine: what to estimate for; None to measure on `device`.
    """

    model: ModelName
    model_args: dict[str, Scalar]
    minibatches: int | None
    minibatch_size: int
    shapes: tuple[InputShape, ...]
    data: str
    task: str
    precision: PrecisionName
    images: Images | None
    device: str
    machine: Machine | None
    threads: int | None
    seed: int
    output: Path


def profile_model(request: Request) -> None:
    """Measure the model, or estimate it, write its profile and print the table.

    Raises:
        UserError: anything that the user can mend, from an unknown name to too little memory.
    """
    _check_output(request.output)
    get_task(request.task)  # A wrong name is refused before the long part.
    device = _device(request.device if request.machine is None else "cpu")
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    shipped = None if request.model.factory else SHIPPED.get(request.model.name)
    factory = shipped.factory if shipped else request.model.factory or _torchvision_factory(request.model.name)
    torch.manual_seed(request.seed)
    with warnings.catch_warnings():
        # Torchvision announces changes of its own defaults, about which nobody can do anything here.
        warnings.simplefilter("ignore", FutureWarning)
        model = build_model(factory, request.model_args)
    model.train()
    inputs = choose_inputs(
        model,
        request.minibatch_size,
        request.shapes,
        data=request.data,
        images=request.images,
        torchvision_name=request.model.name if factory.startswith(f"{_TORCHVISION}:") else None,
    )
    try:
        model.to(device)
        chain = build_chain(model, inputs)
        described = describe_device(device) if request.machine is None else describe_machine(request.machine)
        _say(_opening(request.model.name, inputs, chain, described, request.precision))
        if request.machine is None:
            summary, stash_bytes = _measured(request, model, chain, inputs, device)
        else:
            works, stash_bytes = count_work(model, chain, inputs, get_task(request.task))
            summary = estimated_summary(works, request.machine)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"There is too little memory on {device.type} for a minibatch of {request.minibatch_size}: "
            f"{str(error).splitlines()[0]}\n"
            f"Try a smaller one, as in --minibatch-size {max(1, request.minibatch_size // 2)}."
        ) from None
    profile = build_record(
        name=request.model.name,
        factory=factory,
        kwargs=request.model_args,
        chain=chain,
        inputs=inputs,
        data=request.data,
        task=request.task,
        precision=request.precision,
        device=described,
        summary=summary,
        stash_bytes=stash_bytes,
    )
    write_record(request.output, profile)
    _show_result(profile, summary, chain, request.output)


def _measured(
    request: Request, model: nn.Module, chain: Chain, inputs: tuple[InputSpec, ...], device: torch.device
) -> tuple[Summary, list[int]]:
    generator = torch.Generator().manual_seed(request.seed)
    values = random_inputs(inputs, model, generator, device)
    scope = partial(get_precision(request.precision).computing, device)
    try:
        stash_bytes, output = stash_of(model, chain, values, scope)
    except UserError as error:
        raise UserError(f"{error}{_autocast_hint(request.precision)}") from error
    task = get_task(request.task)
    targets = task.random_targets(output, generator)
    del output
    clock = clock_for(device)
    # A GPU works through the host's orders later; what the host does between them costs it nothing as a rule.
    overhead = measure_overhead(clock, len(chain.layers)) if device.type == "cpu" else Overhead()
    loss = partial(task.loss, targets=targets)
    try:
        with show_progress(Console(stderr=True)) as report:
            summary = measure(
                model,
                chain,
                values,
                loss,
                clock=clock,
                minibatches=request.minibatches,
                overhead=overhead,
                scope=scope,
                report=report,
            )
    except RuntimeError as error:
        if not out_of_memory(error):
            _refuse_a_failing_model(model, values, loss, clock, scope, request.precision)
        raise
    return summary, stash_bytes


def _refuse_a_failing_model(
    model: nn.Module, values: list[Tensor], loss: Loss, clock: Clock[Any], scope: Scope, precision: PrecisionName
) -> None:
    """Tell a model that cannot be trained from a fault of this program: the former fails in plain torch too.

    Raises:
        UserError: it does.
    """
    try:
        with untouched(model):
            plain_step(model, values, loss, clock, scope)
    except RuntimeError as error:
        raise UserError(
            f"A plain training step of the model (forward, loss, backward) fails: {error}\n"
            f"Mend the model so that it trains in plain torch.{_autocast_hint(precision)}"
        ) from error


def _autocast_hint(precision: PrecisionName) -> str:
    """A further line for a model that fails, where autocast may be why."""
    if precision == "fp32":
        return ""
    return f"\nAutocast computes in {precision} here: see whether the model runs with --precision fp32."


def _check_output(path: Path) -> None:
    """Refuse a place that cannot be written to before the long part, not after it."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path}: cannot be written, since {folder} is no folder of yours; name another --output.")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device cuda: torch {torch.__version__} finds no GPU on this machine. "
            "Use --device cpu, or check the driver (nvidia-smi) and that torch is a build for CUDA."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _torchvision_factory(name: str) -> str:
    # Torchvision is imported for its own models only: a model of the user's may do without.
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        close = difflib.get_close_matches(name.lower(), [*SHIPPED, *known], n=3, cutoff=0.5)
        closest = f"the closest are {', '.join(close)}" if close else f"it has {', '.join(known[:3])} and others"
        raise UnknownModel(
            f"there is no model {name!r} here or among torchvision's classification models; {closest}. "
            "A model of your own is named as path/file.py:function or package.module:function."
        )
    return f"{_TORCHVISION}:{name}"


def _opening(name: str, inputs: tuple[InputSpec, ...], chain: Chain, device: Device, precision: PrecisionName) -> str:
    shapes = ", ".join(f"{spec.name} {'x'.join(map(str, spec.shape))} {spec.dtype}" for spec in inputs)
    where = f"on {device.kind} ({device.name}){'' if precision == 'fp32' else f', in {precision}'}"
    doing = f"Profiling {name}"
    if device.estimated:
        doing, where = f"Estimating {name}", f"for {device.name}"
    return f"{doing}, {len(chain.layers)} layers, {where}.\nInput: {shapes}."


def _say(text: str) -> None:
    click.echo(text, err=True)


def _show_result(profile: Profile, summary: Summary, chain: Chain, output: Path) -> None:
    width = Console().width
    for line in table_lines(profile, width):
        click.echo(line)
    click.echo()
    checks = estimate_lines(profile) if profile.device.estimated else check_lines(summary)
    for text in (*checks, *chain.notes):
        click.echo(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))
    found_by_default = output.parent == Path("profiles")
    option = "" if found_by_default else f" --profile {output}"
    click.echo(f"Wrote {output}. Next: pd-plan{option} --machines 4 --bandwidth 10gbps")
