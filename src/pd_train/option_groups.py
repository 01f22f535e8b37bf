"""The options of pd-train: what the command line takes, and how each value is read."""

# ruff: noqa: E501

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pd_format.data import DATA_HELP
from pd_format.profile import PRECISIONS
from pd_train.farewell import Farewell
from pd_train.metrics import METRICS
from pd_train.outcome import failures_as_messages

__all__ = ["takes_options"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


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


_OPTIONS = (
    click.option(
        "--plan",
        "plan_path",
        type=click.Path(path_type=Path),
        default=Path("plan.json"),
        show_default=True,
        help="The plan that pd-plan wrote.",
    ),
    click.option(
        "--emulate",
        type=click.Path(path_type=Path),
        metavar="PROFILE",
        help="Compute nothing: every pass waits for as long as this profile says, and all else is real. Tries a plan on a "
        "network before there are GPUs; needs neither model nor data.",
    ),
    click.option(
        "--time-scale",
        type=Finite(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Of --emulate: what the profile's times are multiplied with, for links of so much less bandwidth.",
    ),
    click.option(
        "--data",
        help=f"One of: {DATA_HELP}.  [default: what the plan says]",
    ),
    click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True),
    click.option("--minibatches", type=click.IntRange(min=1), help="Train on at most so many in the whole run."),
    click.option("--optimizer", type=click.Choice(["sgd", "adam", "adamw"]), default="sgd", show_default=True),
    click.option("--lr", type=Finite(min=0), help="Learning rate.  [default: 0.01 for sgd, else 0.001]"),
    click.option(
        "--momentum", type=Finite(min=0, max=1, max_open=True), default=0.9, show_default=True, help="Of sgd."
    ),
    click.option("--weight-decay", type=Finite(min=0), default=0.0, show_default=True),
    click.option(
        "--lr-schedule",
        type=click.Choice(["constant", "step", "cosine"]),
        default="constant",
        show_default=True,
        help="How the rate changes from epoch to epoch: step divides it by ten after each third of the epochs.",
    ),
    click.option(
        "--lr-scaling",
        type=click.Choice(["balanced", "linear", "none"]),
        default="balanced",
        show_default=True,
        help="A stage's rate times its replicas over the first stage's, times its replicas, or as it is.",
    ),
    click.option(
        "--sync",
        type=click.Choice(["overlap", "bsp", "asp"]),
        help="Let a replicated stage's synchronisation overlap the next pass, wait for it, or (asp, one stage only) do "
        "without.  [default: bsp for a plan of one stage, else overlap]",
    ),
    click.option(
        "--weights",
        type=click.Choice(["stash", "vertical-sync", "none", "2bw"]),
        default="stash",
        show_default=True,
        help="Which weight versions a minibatch meets: those of its forward pass; those that it met at stage 0; whatever "
        "is newest (wrong gradients, for comparison); or two, of groups (PipeDream-2BW).",
    ),
    click.option("--group", type=click.IntRange(min=1), help="Minibatches of one update under --weights 2bw."),
    click.option(
        "--flush",
        type=click.IntRange(min=1),
        help="Drain the pipeline and update once every so many minibatches: exact synchronous SGD.",
    ),
    click.option(
        "--clip-stage-grad-norm",
        type=Finite(min=0, min_open=True),
        help="Clip each stage's gradient of an update by its own norm.",
    ),
    click.option(
        "--clip-grad-norm",
        type=Finite(min=0, min_open=True),
        help="Clip by the norm of the whole model's gradient; only with --flush.",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        help="Compute with autocast in this type, and send float32 activations and their gradients in it; parameters stay "
        "float32. fp16 only with --flush, where all stages share a loss scale.  [default: what the plan says]",
    ),
    click.option("--drop-last", is_flag=True, help="Leave out a last, shorter minibatch of an epoch."),
    click.option(
        "--loader-workers",
        type=click.IntRange(min=0),
        help="Processes that load data ahead of each worker of the first stage; no number depends on it.  [default: up to "
        "4, within the cores of a worker and its shared memory, for image folders; 0 for all else]",
    ),
    click.option(
        "--skip-corrupt",
        is_flag=True,
        help="Go on after an image file that cannot be read; the next good one of its class stands in for it.",
    ),
    click.option(
        "--metric",
        type=click.Choice(list(METRICS)),
        help="What the validation is judged by; meteor takes a data set with captions.  [default: perplexity for language "
        "modeling, else accuracy]",
    ),
    click.option(
        "--target-metric", type=Finite(), help="Stop once validation reaches it, from above for loss and perplexity."
    ),
    click.option(
        "--target-accuracy", type=Finite(min=0, max=1), help="Short for --metric accuracy --target-metric 0.97."
    ),
    click.option(
        "--init-from",
        metavar="WEIGHTS",
        help="Start from a plain state dict (weights.pt, or model.pt of an earlier run), or from weights of torchvision "
        "that are on this machine already (torchvision:DEFAULT, torchvision:IMAGENET1K_V1).  [default: random weights]",
    ),
    click.option(
        "--evaluate-only",
        is_flag=True,
        help="Do not train: run the weights of --init-from over the validation data, forward through the pipeline.",
    ),
    click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True),
    click.option("--threads", type=click.IntRange(min=1), help="Of each worker.  [default: cores over workers here]"),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option(
        "--measure-memory",
        is_flag=True,
        help="Count what each worker holds at its fullest and compare it with the plan; slower. GPUs count by themselves.",
    ),
    click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        help="Where the run's files go, a new folder.  [default: runs/MODEL-DATE]",
    ),
    click.option(
        "--resume",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Go on with the run in this folder from its newest whole checkpoint, with the options that it was started "
        "with. --plan may name another plan of the same model, as for fewer machines.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(min=1),
        help="Drain the pipeline for a checkpoint every so many minibatches of an epoch, rounded up so that all replicas "
        "take part in each; the numbers depend on it.  [default: at each epoch's end only]",
    ),
    click.option("--keep", type=click.IntRange(min=0), default=2, show_default=True, help="Old checkpoints to keep."),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Start again from the newest whole checkpoint when a worker is lost, at most so many times.",
    ),
    click.option(
        "--hosts",
        help="Where the workers run: a host file (lines like 'node1 slots=2'), a list like node1,node2:29700, or a pattern "
        "with {rank}.  [default: the plan's hosts, a launcher's, or all here]",
    ),
    click.option(
        "--key",
        type=click.Path(),
        callback=_absolute,
        metavar="FILE",
        help="Encrypt everything between workers, and let only those connect that hold this key: the same file on every "
        "host.",
    ),
    click.option(
        "--make-key",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_make_key,
        help="Write a new key for --key, which nobody but you may read, and exit.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Send everything over the network in the open, to and from anyone who knows how: only where you trust all "
        "that is on it. Of no effect with --key.",
    ),
    click.option(
        "--measure-network",
        is_flag=True,
        help="Do not train: send over the plan's own links for some seconds, each alone and all at once, and print what "
        "they carry beside the plan's figure. On every host, as a run.",
    ),
    click.option("--rank", type=int, help="Which worker this program is.  [default: a launcher or the addresses tell]"),
    click.option(
        "--rendezvous-timeout",
        type=Finite(min=1),
        default=300.0,
        show_default=True,
        help="Seconds that workers wait for each other at the start.",
    ),
    click.option(
        "--peer-timeout",
        type=Finite(min=0.1, max=3600),
        default=10.0,
        show_default=True,
        help="Seconds of silence on a connection after which the worker at its other end counts as dead.",
    ),
    click.option(
        "--stall-timeout",
        type=Finite(min=0, min_open=True),
        default=1800.0,
        show_default=True,
        help="Seconds that a worker may wait for another one that is alive.",
    ),
    click.option(
        "--quiet",
        is_flag=True,
        help="Say nothing on standard output but one line at the end; warnings and errors still go to standard error.",
    ),
    click.option(
        "--trace-minibatches",
        metavar="FIRST:STOP",
        default="0:100",
        show_default=True,
        help="The minibatches of the run whose passes and transfers go one by one into trace.json, from the first to "
        "before the second; 0:0 for none.",
    ),
    click.option(
        "--debug-dump/--no-debug-dump",
        default=True,
        show_default=True,
        help="On SIGUSR1, to pd-train or to one worker: write to the workers' logs where each stands in its schedule, what "
        "it waits for, its queues and its threads' stacks; training goes on.",
    ),
    click.option(
        "--tensorboard",
        is_flag=True,
        help="Write event files for TensorBoard into the run's folder, tensorboard/.",
    ),
    click.option(
        "--report",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FOLDER...",
        help="Train nothing: print the report of the run in this folder, finished, broken off or running, and draw it; of "
        "several, compare them to the first. --target-metric asks for another target.",
    ),
    click.argument("more", nargs=-1, type=click.Path(path_type=Path), metavar=""),
    click.option(
        "--output",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Where --report puts pictures.  [default: the run's folder; for several runs this one]",
    ),
)


def takes_options(command: CommandT) -> CommandT:
    """Add all options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
