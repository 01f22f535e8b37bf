"""The command line of pd-profile: reads the options, calls, prints and exits (design, section 1).

Torch is imported only once the options are known to be right, so that help and mistakes are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from pd_format.data import DATA_HELP, DataName, images_of, parse_data
from pd_format.errors import UserError
from pd_format.profile import PRECISIONS, PrecisionName
from pd_profile.machines import MACHINES, Machine, parse_machine
from pd_profile.options import (
    InputShape,
    ModelName,
    Scalar,
    parse_input_shape,
    parse_model,
    parse_model_args,
)
from pd_profile.shipped import SHIPPED

__all__ = ["main"]

ParsedT = TypeVar("ParsedT")

_HELP = """Measure each layer of MODEL, so that pd-plan can split it.

MODEL is a classification model of torchvision (resnet18), a model of this project (gpt), or a function that builds a
model: path/file.py:function or package.module:function. --list-models lists the first two.

\b
Examples:
  pd-profile vgg16 --minibatches 1000
  pd-profile resnet18 --data digits:32 --model-arg num_classes=10
  pd-profile gpt --model-arg layers=6 --model-arg context=256 --data text:notes.txt
  pd-profile examples/digits_cnn.py:digits_cnn --data digits --minibatch-size 32
  pd-profile my_models.text:build --input-shape tokens=128:int64
  pd-profile net.py:build --input-shape 16 --loss torch.nn.functional:mse_loss
  pd-profile vgg16 --minibatch-size 64 --estimate v100

The time of a layer is that of its forward and its backward pass on one minibatch of random numbers, without the
optimizer: the mean over the faster half of the minibatches measured, since other work on a machine only ever makes a
minibatch slower. The profile goes to profiles/NAME.json, where pd-plan finds it.
"""


class _Stopped(click.ClickException):
    """Ctrl-C: nothing has been written, and the exit code is the one that shells expect."""

    exit_code = 130


def _parsed(parse: Callable[[Any], ParsedT]) -> Callable[[click.Context, click.Parameter, Any], ParsedT]:
    """A click callback that turns what the parser objects to into a usage error that names the option."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> ParsedT:
        try:
            return parse(value)
        except (ValueError, UserError) as error:
            raise click.BadParameter(str(error), ctx=context, param=parameter) from None

    return callback


def _list_models(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the models that have a name and leave."""
    if not wanted:
        return
    import torchvision

    from pd_profile.tried import list_lines

    for line in list_lines(torchvision.models.list_models(module=torchvision.models), torchvision.__version__):
        click.echo(line)
    context.exit()


def _parse_shapes(texts: tuple[str, ...]) -> list[InputShape]:
    return [parse_input_shape(text) for text in texts]


def _parse_loss(text: str | None) -> str | None:
    place, _, function = (text or "").rpartition(":")
    if text is not None and not (place and function.isidentifier()):
        raise ValueError(f"{text!r} names no function; expected path/file.py:function or package.module:function.")
    return text


def _parse_estimate(text: str | None) -> Machine | None:
    return None if text is None else parse_machine(text)


def _parse_data(text: str) -> tuple[str, DataName]:
    return text, parse_data(text)


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", callback=_parsed(parse_model))
@click.option(
    "--model-arg",
    "model_args",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parsed(parse_model_args),
    help="An argument for the function that builds the model, as in num_classes=10. Repeatable.",
)
@click.option(
    "--minibatches",
    type=click.IntRange(min=1),
    help="How many to measure, after a warm-up.  [default: until each layer that takes 1 % of the time or more is "
    "known to 2 %; 10 to 1000]",
)
@click.option(
    "--minibatch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Samples a minibatch, on one worker; training will use the same.",
)
@click.option(
    "--input-shape",
    "shapes",
    multiple=True,
    metavar="[NAME=]SHAPE[:DTYPE]",
    callback=_parsed(_parse_shapes),
    help="The shape of a sample, without the minibatch: 3,32,32 or tokens=128:int64 or flag=:bool (one value a "
    "sample). Repeat it for a model with several inputs.  [default: what the data or the model tell]",
)
@click.option(
    "--data",
    default="synthetic",
    show_default=True,
    metavar="DATA",
    callback=_parsed(_parse_data),
    help=f"What training will use: {DATA_HELP}. It is written into the profile and not read here.",
)
@click.option(
    "--task",
    metavar="TASK",
    help="What the model learns, which decides on loss and metrics: classification, language-modeling or captioning.  "
    "[default: the model's own, else classification]",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="Measure with autocast in this type, and count float32 activations in it, as training will send them; "
    "parameters stay float32. fp16 trains only with pd-train --flush.",
)
@click.option(
    "--loss",
    metavar="FUNCTION",
    callback=_parsed(_parse_loss),
    help="A loss of your own instead of a task: path/file.py:function or package.module:function. It is given what the "
    "model returns and the minibatch's labels, and returns the mean over the minibatch.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes the GPU if there is one.",
)
@click.option(
    "--estimate",
    "machine",
    metavar="MACHINE",
    callback=_parsed(_parse_estimate),
    help="Measure nothing: compute what each layer would take on a machine that you do not have, in fp32. "
    f"{', '.join(MACHINES)}, or its figures, as in peak_tflops=15.7,memory_gbps=900. docs/estimates.md says how far "
    "off that may be.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: torch's own choice, one a core]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For weights and inputs.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write the profile.  [default: profiles/NAME.json]",
)
@click.option(
    "--list-models",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_models,
    help="Say which models have a name, and which of torchvision's were tried with what result; then exit.",
)
@click.version_option(package_name="pipedream", message="%(prog)s %(version)s")
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
