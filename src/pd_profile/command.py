"""The command line of pd-profile: reads the options, calls, prints and exits (design, section 1).

Torch is imported only once the options are known to be right, so that help and mistakes are answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import cloup

from pd_format.data import DataName, images_of
from pd_format.errors import UserError
from pd_format.interrupts import Program, ending_at_once
from pd_format.profile import PrecisionName
from pd_profile.machines import Machine
from pd_profile.option_groups import takes_options
from pd_profile.options import (
    InputShape,
    ModelName,
    Scalar,
)
from pd_profile.shipped import SHIPPED

__all__ = ["main"]


_HELP = """Measure each layer of MODEL, so that pd-plan can split it.

MODEL is a model of torchvision (resnet18) or of this project (gpt), or a function that builds one:
path/file.py:function or package.module:function."""

_EPILOG = """\b
Examples:
  pd-profile vgg16 --minibatches 1000
  pd-profile resnet18 --data digits:32 --model-arg num_classes=10
  pd-profile gpt --model-arg layers=6 --data text:notes.txt
  pd-profile examples/digits_cnn.py:digits_cnn --data digits --minibatch-size 32
  pd-profile my_models.text:build --input-shape tokens=128:int64
  pd-profile net.py:build --input-shape 16 --loss torch.nn.functional:mse_loss
  pd-profile vgg16 --minibatch-size 64 --estimate v100

\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal when stopped (130 by
Ctrl-C). Every option by task: docs/options.md"""


class _Stopped(click.ClickException):
    """Ctrl-C: nothing has been written, and the exit code is the one that shells expect."""

    exit_code = 130


class _Command(Program, cloup.Command):
    """A command that takes Ctrl-C as a program does."""


@cloup.command(
    cls=_Command,
    help=_HELP,
    epilog=_EPILOG,
    formatter_settings={"col1_max_width": 27},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@takes_options
def main(model: ModelName, data: tuple[str, DataName], loss: str | None, **options: Any) -> None:
    if loss is not None:
        if options["task"] is not None:
            raise click.UsageError("--loss and --task exclude each other: a loss of your own is the task.")
        options["task"] = loss
    try:
        _run(model, data, **options)
    except UserError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise _Stopped("stopped by Ctrl-C; no profile was written.") from None


def _task_of(model: ModelName) -> str:
    shipped = None if model.factory else SHIPPED.get(model.name)
    return shipped.task if shipped else "classification"


def _run(
    model: ModelName,
    data: tuple[str, DataName],
    *,
    model_args: dict[str, Scalar],
    minibatches: int | None,
    minibatch_size: int,
    shapes: Sequence[InputShape],
    device: str,
    machine: Machine | None,
    threads: int | None,
    seed: int,
    task: str | None,
    precision: PrecisionName,
    output: Path | None,
) -> None:
    if machine is not None:
        _refuse_beside_estimate(precision)
    with ending_at_once():
        from pd_profile.profiling import Request, UnknownModel, profile_model

    request = Request(
        model=model,
        model_args=model_args,
        minibatches=minibatches,
        minibatch_size=minibatch_size,
        shapes=tuple(shapes),
        data=data[0],
        task=task or _task_of(model),
        precision=precision,
        images=images_of(data[1]),
        device=device,
        machine=machine,
        threads=threads,
        seed=seed,
        output=output or Path("profiles") / f"{model.name}.json",
    )
    try:
        profile_model(request)
    except UnknownModel as error:
        raise click.BadParameter(str(error), param_hint="MODEL") from None


def _refuse_beside_estimate(precision: PrecisionName) -> None:
    """Refuse, beside --estimate, what says how to measure, and what there is no estimate of."""
    context = click.get_current_context()
    for name in ("minibatches", "device", "threads"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{name} says how to measure, and --estimate measures nothing; leave out one of the two."
            )
    if precision != "fp32":
        raise click.UsageError(
            f"--precision {precision} can be measured only: --estimate knows what machines do in fp32. "
            "Leave out one of the two."
        )
