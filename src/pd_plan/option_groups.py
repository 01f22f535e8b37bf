"""The options of pd-plan in the groups that its help shows; docs/options.md explains each."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup

from pd_format.errors import UserError

__all__ = ["TERMINAL", "takes_options"]

TERMINAL = "-"
"""Of --timeline: draw on the terminal."""

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _Option(cloup.Option):
    """An option whose help leaves the range of a number to the message that refuses one."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Default and whether it is required."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class Figure(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A figure with its unit.

    Args:
        name: what it is, for the help.
        parser: the function of `pd_format.units` that reads it, loaded when one is given.
    """

    def __init__(self, name: str, parser: str) -> None:
        self.name = name
        self._parser = parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the parser."""
        from pd_format import units

        if not isinstance(value, str):
            return value
        try:
            return getattr(units, self._parser)(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


class Scheme(click.ParamType):  # type: ignore[type-arg]
    """A way to compress gradients, by its canonical name."""

    name = "scheme"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See `pd_format.compression.parse_gradients`."""
        from pd_format.compression import parse_gradients

        try:
            return str(parse_gradients(value))
        except UserError as error:
            self.fail(str(error), param, ctx)


class Share(click.FloatRange):
    """A number between 0 and 1, both left out."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True, max_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse NaN too, which compares as if it were in any range."""
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{number} is not in the range 0<x<1.", param, ctx)
        return number


class Timeline(click.ParamType):  # type: ignore[type-arg]
    """Where a timeline goes: the terminal, or a file whose ending says what it is."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Let `TERMINAL` and names that end in .json or .svg pass."""
        if value != TERMINAL and not value.endswith((".json", ".svg")):
            self.fail(f"{value!r} ends in neither .json nor .svg; give no file to draw it here.", param, ctx)
        return str(value)


class Config(click.ParamType):  # type: ignore[type-arg]
    """Replicas a stage: `2-1-1`."""

    name = "replicas"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read whole numbers of 1 or more, joined by `-`."""
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"0*[1-9]\d{0,8}(-0*[1-9]\d{0,8})*", value, re.ASCII):
            self.fail(
                f"{value!r} is not a list of replicas; expected one number of 1 or more for each stage, "
                "joined by '-', such as 2-1-1.",
                param,
                ctx,
            )
        return tuple(int(replicas) for replicas in value.split("-"))


_option = partial(cloup.option, cls=_Option)


def _one_of(*names: str) -> dict[str, Any]:
    """The choices stand in the help, where a line has room for them."""
    return {"type": click.Choice(names), "metavar": "NAME"}


_GROUPS = (
    cloup.option_group(
        "What there is",
        _option(
            "--profile", "profile_path", type=click.Path(path_type=Path), metavar="FILE",
            help="From pd-profile.  [default: newest in profiles/]",
        ),
        _option(
            "--machines", type=click.IntRange(min=1, max=1_000_000), metavar="N",
            help="For one worker each.  [default: --hosts', --config's]",
        ),
        _option(
            "--bandwidth", type=Figure("rate", "parse_bandwidth"), metavar="RATE", required=True,
            help="Of a machine's link: 10gbps, 1.25GB/s.",
        ),
        _option(
            "--memory", type=Figure("size", "parse_size"), metavar="SIZE",
            help="Most that a worker may need: 16GB, 512MB.",
        ),
        _option("--hosts", metavar="HOSTS", help="Where workers run: node1,node2:29700 or a file."),
    ),
    cloup.option_group(
        "What to look for",
        _option(
            "--strategy",
            **_one_of("auto", "simulated", "single", "data-parallel", "model-parallel", "straight"),
            default="auto", show_default=True,
            help="Or simulated, straight, single, data-, model-parallel.",
        ),
        _option("--config", type=Config(), metavar="REPLICAS", help="Of each stage, as in 2-1-1; cuts are chosen."),
        _option("--inference", is_flag=True, help="For pd-train --evaluate-only: forward passes alone."),
    ),
    cloup.option_group(
        "What training will do",
        _option(
            "--optimizer", **_one_of("sgd", "momentum", "adam", "adamw"), default="momentum", show_default=True,
            help="sgd, momentum, adam or adamw.",
        ),
        _option(
            "--in-flight", metavar="DEPTHS", default="auto", show_default=True,
            help="Minibatches: noam, or 7-5-3-1.",
        ),
        _option("--recompute", is_flag=True, help="Stages may run forward passes twice, for --memory."),
        _option(
            "--compress-gradients", type=Scheme(), metavar="SCHEME", help="topk:0.01, powersgd:4 or onebit.",
        ),
        _option("--compress-activations", **_one_of("bf16", "int8"), help="bf16 or int8 across cuts."),
    ),
    cloup.option_group(
        "How to count",
        _option(
            "--cost-model", **_one_of("paper", "duplex"), default="paper", show_default=True,
            help="A link one way at a time, or duplex.",
        ),
        _option(
            "--links", **_one_of("card", "pairwise", "shared"), default="card", show_default=True,
            help="Of the simulation: card, pairwise or shared.",
        ),
    ),
    cloup.option_group(
        "What to show and write",
        _option("--sweep", is_flag=True, help="The best plans on 1 to --machines machines too."),
        _option("--robustness", type=Share(), metavar="PART", help="Loss where figures are off by it, as 0.2."),
        _option(
            "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True, help="Of --robustness.",
        ),
        _option(
            "--timeline", is_flag=False, flag_value=TERMINAL, type=Timeline(), metavar="[FILE]",
            help="Draw the simulation; into FILE.svg or .json.",
        ),
        _option("--json", "as_json", is_flag=True, help="Print all of it as JSON, for programs."),
        _option(
            "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", default=Path("plan.json"),
            show_default=True, help="Where the plan goes.",
        ),
    ),
)  # fmt: skip


def takes_options(command: CommandT) -> CommandT:
    """Add all options to a command."""
    version = click.version_option(package_name="pipedream", prog_name="pd-plan", message="%(prog)s %(version)s")
    for add in (version, *reversed(_GROUPS)):
        command = add(command)
    return command
