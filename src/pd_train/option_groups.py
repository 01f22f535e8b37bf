"""The options of pd-train in the groups that its help shows; docs/options.md explains each."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import cloup
from cloup.formatting import HelpSection

from pd_format.interrupts import Program
from pd_format.profile import PRECISIONS
from pd_train.farewell import Farewell
from pd_train.metrics import METRICS
from pd_train.outcome import failures_as_messages

__all__ = ["TwoHelps", "takes_options"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _Option(cloup.Option):
    """An option whose help leaves the range of a number to the message that refuses one."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Default and whether it is required."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class Finite(click.FloatRange):
    """A number as click takes it, but neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isfinite(number := float(click.FLOAT.convert(value, param, ctx))):
            return super().convert(number, param, ctx)
        self.fail(f"{value} is no finite number.", param, ctx)


def _absolute(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """A path as it is kept with the run, which may go on from another folder."""
    return None if path is None else os.path.abspath(path)


def _make_key(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Make a key, and end the program."""
    if path is None or context.resilient_parsing:
        return
    from pd_train.keys import make_key

    with failures_as_messages(Farewell()):
        make_key(path)
    click.echo(f"{path}: a new key. Copy it to every host (scp -p {path} HOST:), and give --key {path} there.")
    context.exit()


_option = partial(cloup.option, cls=_Option)
_FILE = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path, file_okay=False)
_COUNT = click.IntRange(min=1)
_OR_NONE = click.IntRange(min=0)
_POSITIVE = Finite(min=0, min_open=True)


def _one_of(*names: str) -> dict[str, Any]:
    """The choices stand in the help, where a line has room for them."""
    return {"type": click.Choice(names), "metavar": "NAME"}


_GROUPS = (
    cloup.option_group(
        "Run",
        _option(
            "--plan", "plan_path", type=_FILE, metavar="FILE", default=Path("plan.json"), show_default=True,
            help="Plan from pd-plan.",
        ),
        _option("--data", metavar="DATA", help="Data set, as in digits or text:FILE.  [default: the plan's]"),
        _option("--epochs", type=_COUNT, metavar="N", default=1, show_default=True, help="Times through the data."),
        _option("--minibatches", type=_COUNT, metavar="N", help="Stop after so many in the whole run."),
        _option("--metric", **_one_of(*METRICS), help="Judge by accuracy, loss, perplexity or meteor."),
        _option("--target-metric", type=Finite(), metavar="VALUE", help="Stop once validation reaches it."),
        _option(
            "--target-accuracy", type=Finite(min=0, max=1), metavar="PART", help="The same by accuracy, as in 0.97.",
        ),
        _option("--run-dir", type=_FOLDER, metavar="FOLDER", help="For its files.  [default: runs/MODEL-DATE]"),
        _option("--dry-run", is_flag=True, help="Check all of it, say who does what, and stop."),
        _option("--quiet", is_flag=True, help="Print one line, at the end."),
    ),
    cloup.option_group(
        "Learning",
        _option(
            "--optimizer", **_one_of("sgd", "adam", "adamw"), default="sgd", show_default=True,
            help="sgd, adam or adamw.",
        ),
        _option("--lr", type=Finite(min=0), metavar="RATE", help="Learning rate.  [default: sgd 0.01, else 0.001]"),
        _option(
            "--momentum", type=Finite(min=0, max=1, max_open=True), metavar="PART", default=0.9, show_default=True,
            help="Of sgd.",
        ),
        _option(
            "--weight-decay", type=Finite(min=0), metavar="RATE", default=0.0, show_default=True,
            help="Pull of weights to 0.",
        ),
        _option("--init-from", metavar="WEIGHTS", help="Start from weights: a file, or torchvision:NAME."),
        _option("--evaluate-only", is_flag=True, help="No training: validate --init-from's weights."),
    ),
    cloup.option_group(
        "Machines",
        _option("--hosts", metavar="HOSTS", help="Where workers run: node1,node2:29700 or a file."),
        _option(
            "--key", type=click.Path(dir_okay=False), callback=_absolute, metavar="FILE",
            help="Encrypt; admit only who holds this key.",
        ),
        _option(
            "--make-key", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", is_eager=True,
            expose_value=False, callback=_make_key, help="Write a new key for --key, and exit.",
        ),
        _option("--insecure", is_flag=True, help="Trust the network: send in the open."),
        _option(
            "--device", **_one_of("auto", "cpu", "cuda"), default="auto", show_default=True,
            help="auto, cpu or cuda.",
        ),
        _option("--threads", type=_COUNT, metavar="N", help="Of each worker.  [default: cores over workers]"),
    ),
    cloup.option_group(
        "Going on",
        _option("--resume", type=_FOLDER, metavar="FOLDER", help="Go on with the run in it."),
        _option("--checkpoint-every", type=_COUNT, metavar="N", help="Minibatches between.  [default: an epoch's]"),
        _option("--keep", type=_OR_NONE, metavar="N", default=2, show_default=True, help="Old checkpoints kept."),
        _option(
            "--max-restarts", type=_OR_NONE, metavar="N", default=0, show_default=True,
            help="After lost workers.",
        ),
    ),
)  # fmt: skip
"""Those of a first day."""

_MORE_GROUPS = (
    cloup.option_group(
        "Weight versions",
        _option(
            "--weights", **_one_of("stash", "vertical-sync", "none", "2bw"), default="stash", show_default=True,
            help="stash, vertical-sync, none or 2bw.",
        ),
        _option("--group", type=_COUNT, metavar="N", help="Minibatches of an update of 2bw."),
        _option("--flush", type=_COUNT, metavar="N", help="Drain and update every N: exact SGD."),
        _option(
            "--sync", **_one_of("overlap", "bsp", "asp"),
            help="overlap, bsp or asp.  [default: overlap; one stage: bsp]",
        ),
    ),
    cloup.option_group(
        "Numbers",
        _option("--precision", **_one_of(*PRECISIONS), help="fp32, bf16 or fp16.  [default: the plan's]"),
        _option(
            "--lr-schedule", **_one_of("constant", "step", "cosine"), default="constant", show_default=True,
            help="constant, step or cosine.",
        ),
        _option(
            "--lr-scaling", **_one_of("balanced", "linear", "none"), default="balanced", show_default=True,
            help="balanced, linear or none.",
        ),
        _option("--clip-stage-grad-norm", type=_POSITIVE, metavar="NORM", help="Clip each stage by its own norm."),
        _option("--clip-grad-norm", type=_POSITIVE, metavar="NORM", help="Clip the whole; with --flush."),
        _option(
            "--seed", type=click.IntRange(min=0, max=2**63 - 1), metavar="N", default=0, show_default=True,
            help="Of weights and order.",
        ),
    ),
    cloup.option_group(
        "Reading data",
        _option("--drop-last", is_flag=True, help="Leave out a last, short minibatch."),
        _option("--loader-workers", type=_OR_NONE, metavar="N", help="Processes.  [default: 0; image folders up to 4]"),
        _option("--skip-corrupt", is_flag=True, help="Go on after an unreadable image."),
    ),
    cloup.option_group(
        "Network",
        _option("--measure-network", is_flag=True, help="No training: measure the plan's links."),
        _option("--rank", type=int, metavar="N", help="Which worker this is.  [default: found out]"),
        _option(
            "--rendezvous-timeout", type=Finite(min=1), metavar="SEC", default=300.0, show_default=True,
            help="Wait at the start.",
        ),
        _option(
            "--peer-timeout", type=Finite(min=0.1, max=3600), metavar="SEC", default=10.0, show_default=True,
            help="Until silence is death.",
        ),
        _option(
            "--stall-timeout", type=_POSITIVE, metavar="SEC", default=1800.0, show_default=True,
            help="Longest wait for a peer.",
        ),
    ),
    cloup.option_group(
        "Emulation",
        _option("--emulate", type=_FILE, metavar="PROFILE", help="Compute nothing: wait for its times."),
        _option("--time-scale", type=_POSITIVE, metavar="FACTOR", default=1.0, show_default=True, help="Of its times."),
    ),
    cloup.option_group(
        "Looking at runs",
        _option(
            "--report", multiple=True, type=_FOLDER, metavar="FOLDER...",
            help="Print and draw runs; several are compared.",
        ),
        _option("--output", type=_FOLDER, metavar="FOLDER", help="Where pictures go.  [default: the run's folder]"),
        _option(
            "--trace-minibatches", metavar="FIRST:STOP", default="0:100", show_default=True,
            help="Into trace.json.",
        ),
        _option("--tensorboard", is_flag=True, help="Write event files for TensorBoard."),
        _option("--measure-memory", is_flag=True, help="Count what workers hold; slower."),
        _option(
            "--debug-dump/--no-debug-dump", default=True, show_default=True,
            help="On SIGUSR1, logs say where workers stand.",
        ),
    ),
)  # fmt: skip


_ALL = "pd_train.help_all"
"""In the context's `meta`: whether the help is to show all groups."""


class TwoHelps(Program, cloup.Command):
    """A command whose `--help` shows the groups of a first day, and of the others the names of their options."""

    def format_params(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups."""
        if ctx.meta.get(_ALL):
            return super().format_params(ctx, formatter)
        assert isinstance(formatter, cloup.HelpFormatter)
        groups = [*self.option_groups[: len(_GROUPS)], self.get_default_option_group(ctx)]
        formatter.write_many_sections([self.make_option_group_help_section(group, ctx) for group in groups])
        others = self.option_groups[len(_GROUPS) :]
        rows = [(group.title, partial(_names_of, group)) for group in others]
        formatter.write_section(HelpSection(heading="More, explained by --help-all", definitions=rows))


def _names_of(group: cloup.OptionGroup, columns: int) -> str:
    """Its options' names, none of which is broken at a hyphen; the mark keeps these lines as they are."""
    names = " ".join(option.opts[0] for option in group)
    return names if len(names) <= columns else "\b\n" + textwrap.fill(names, columns, break_on_hyphens=False)


def _help_all(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def takes_options(command: CommandT) -> CommandT:
    """Add all options, and the folders that follow the first of `--report`, to a command."""
    more = click.argument("more", nargs=-1, type=_FOLDER, metavar="")
    version = click.version_option(package_name="pipedream", prog_name="pd-train", message="%(prog)s %(version)s")
    help_all = cloup.option(
        "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Explain all options."
    )
    for add in (version, help_all, *reversed((*_GROUPS, *_MORE_GROUPS)), more):
        command = add(command)
    return command
