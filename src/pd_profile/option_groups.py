"""The options of pd-profile in the groups that its help shows; docs/options.md explains each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup

from pd_format.data import DataName, parse_data
from pd_format.errors import UserError
from pd_format.profile import PRECISIONS
from pd_profile.machines import Machine, parse_machine
from pd_profile.options import InputShape, parse_input_shape, parse_model, parse_model_args

__all__ = ["takes_options"]

ParsedT = TypeVar("ParsedT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _Option(cloup.Option):
    """An option whose help leaves the range of a number to the message that refuses one."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Default and whether it is required."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


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


_option = partial(cloup.option, cls=_Option)
_COUNT = click.IntRange(min=1)


def _one_of(*names: str) -> dict[str, Any]:
    """The choices stand in the help, where a line has room for them."""
    return {"type": click.Choice(names), "metavar": "NAME"}


_GROUPS = (
    cloup.option_group(
        "Model",
        _option(
            "--model-arg", "model_args", multiple=True, metavar="NAME=VALUE", callback=_parsed(parse_model_args),
            help="For its function, as num_classes=10. Repeatable.",
        ),
        _option(
            "--input-shape", "shapes", multiple=True, metavar="SHAPE", callback=_parsed(_parse_shapes),
            help="[NAME=]3,32,32[:DTYPE] of a sample. Repeatable.",
        ),
        _option(
            "--list-models", is_flag=True, is_eager=True, expose_value=False, callback=_list_models,
            help="Say which models have a name, and exit.",
        ),
    ),
    cloup.option_group(
        "What training will use",
        _option(
            "--data", default="synthetic", show_default=True, metavar="DATA", callback=_parsed(_parse_data),
            help="As digits; not read here.",
        ),
        _option(
            "--minibatch-size", type=_COUNT, metavar="N", default=32, show_default=True, help="Samples, on one worker.",
        ),
        _option("--task", metavar="TASK", help="As language-modeling.  [default: the model's own]"),
        _option(
            "--loss", metavar="FUNCTION", callback=_parsed(_parse_loss),
            help="Instead of a task: path/file.py:function.",
        ),
        _option(
            "--precision", **_one_of(*PRECISIONS), default="fp32", show_default=True, help="fp32, bf16 or fp16.",
        ),
    ),
    cloup.option_group(
        "How to measure",
        _option("--minibatches", type=_COUNT, metavar="N", help="How many.  [default: until known to 2 %]"),
        _option(
            "--device", **_one_of("auto", "cpu", "cuda"), default="auto", show_default=True,
            help="auto, cpu or cuda.",
        ),
        _option("--threads", type=_COUNT, metavar="N", help="Of the CPU.  [default: torch's choice]"),
        _option(
            "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
            help="Of weights and inputs.",
        ),
        _option(
            "--estimate", "machine", metavar="MACHINE", callback=_parsed(_parse_estimate),
            help="Measure nothing: figures for v100, a100, ...",
        ),
    ),
    cloup.option_group(
        "Result",
        _option(
            "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="Where it goes.  [default: profiles/NAME.json]",
        ),
    ),
)  # fmt: skip


def takes_options(command: CommandT) -> CommandT:
    """Add the model and all options to a command."""
    model = click.argument("model", callback=_parsed(parse_model))
    version = click.version_option(package_name="pipedream", prog_name="pd-profile", message="%(prog)s %(version)s")
    for add in (version, *reversed(_GROUPS), model):
        command = add(command)
    return command
