"""The command line of pd-train: reads options and plan, checks, launches, shows."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from pd_format.data import DATA_HELP
from pd_format.errors import UserError
from pd_format.graph_text import read_any_profile
from pd_format.jsonfile import write_record
from pd_format.plan import Host, read_plan
from pd_format.profile import PRECISIONS, PrecisionName
from pd_format.versions import Mode
from pd_train.check import (
    check_clipping,
    check_data,
    check_memory,
    check_network,
    check_origin,
    check_precision,
    check_purpose,
    check_schedule,
    checkpoint_interval,
    optimizer_warning,
    precision_warning,
    settle_mode,
)
from pd_train.emulation import Emulation, check_emulation, default_minibatches, refuse_options
from pd_train.evaluation import check_evaluation
from pd_train.event_files import check_tensorboard
from pd_train.events import Note
from pd_train.farewell import Farewell
from pd_train.host import available_cores, available_memory_bytes, is_here
from pd_train.metrics import METRICS, settle_metric
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.routing import on_the_host_of
from pd_train.run_folder import clear_logs, continue_run, has_checkpoint, held, make_run_folder, write_options
from pd_train.whoami import Identity, cores_of_task, find_identity

__all__ = ["main"]

_DEFAULT_LR = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001}


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

    with _failures_as_messages(Farewell()):
        make_key(path)
    click.echo(f"{path}: a new key. Copy it to every host (scp -p {path} HOST:), and give --key {path} there.")
    context.exit()


EPILOG = """\b
Examples:
  pd-train --plan plan.json
  pd-train --plan plan.json --data digits --epochs 10 --target-accuracy 0.97
  pd-train --plan plan.json --metric perplexity --target-metric 4
  pd-train --plan plan.json --minibatches 100 --optimizer adam --lr 0.0003
  pd-train --make-key job.key; pd-train --plan plan.json --key job.key
  pd-train --resume runs/NAME
  pd-train --report runs/NAME runs/OTHER
  pd-train --plan plan.json --emulate profiles/vgg16.json --time-scale 20
  pd-train --plan plan.json --evaluate-only --init-from runs/NAME/model.pt

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C."""


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    default=Path("plan.json"),
    show_default=True,
    help="The plan that pd-plan wrote.",
)
@click.option(
    "--emulate",
    type=click.Path(path_type=Path),
    metavar="PROFILE",
    help="Compute nothing: every pass waits for as long as this profile says, and all else is real. Tries a plan on a "
    "network before there are GPUs; needs neither model nor data.",
)
@click.option(
    "--time-scale",
    type=Finite(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of --emulate: what the profile's times are multiplied with, for links of so much less bandwidth.",
)
@click.option(
    "--data",
    help=f"One of: {DATA_HELP}.  [default: what the plan says]",
)
@click.option("--epochs", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--minibatches", type=click.IntRange(min=1), help="Train on at most so many in the whole run.")
@click.option("--optimizer", type=click.Choice(["sgd", "adam", "adamw"]), default="sgd", show_default=True)
@click.option("--lr", type=Finite(min=0), help="Learning rate.  [default: 0.01 for sgd, else 0.001]")
@click.option("--momentum", type=Finite(min=0, max=1, max_open=True), default=0.9, show_default=True, help="Of sgd.")
@click.option("--weight-decay", type=Finite(min=0), default=0.0, show_default=True)
@click.option(
    "--lr-schedule",
    type=click.Choice(["constant", "step", "cosine"]),
    default="constant",
    show_default=True,
    help="How the rate changes from epoch to epoch: step divides it by ten after each third of the epochs.",
)
@click.option(
    "--lr-scaling",
    type=click.Choice(["balanced", "linear", "none"]),
    default="balanced",
    show_default=True,
    help="A stage's rate times its replicas over the first stage's, times its replicas, or as it is.",
)
@click.option(
    "--sync",
    type=click.Choice(["overlap", "bsp", "asp"]),
    help="Let a replicated stage's synchronisation overlap the next pass, wait for it, or (asp, one stage only) do "
    "without.  [default: bsp for a plan of one stage, else overlap]",
)
@click.option(
    "--weights",
    type=click.Choice(["stash", "vertical-sync", "none", "2bw"]),
    default="stash",
    show_default=True,
    help="Which weight versions a minibatch meets: those of its forward pass; those that it met at stage 0; whatever "
    "is newest (wrong gradients, for comparison); or two, of groups (PipeDream-2BW).",
)
@click.option("--group", type=click.IntRange(min=1), help="Minibatches of one update under --weights 2bw.")
@click.option(
    "--flush",
    type=click.IntRange(min=1),
    help="Drain the pipeline and update once every so many minibatches: exact synchronous SGD.",
)
@click.option(
    "--clip-stage-grad-norm",
    type=Finite(min=0, min_open=True),
    help="Clip each stage's gradient of an update by its own norm.",
)
@click.option(
    "--clip-grad-norm",
    type=Finite(min=0, min_open=True),
    help="Clip by the norm of the whole model's gradient; only with --flush.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Compute with autocast in this type, and send float32 activations and their gradients in it; parameters stay "
    "float32. fp16 only with --flush, where all stages share a loss scale.  [default: what the plan says]",
)
@click.option("--drop-last", is_flag=True, help="Leave out a last, shorter minibatch of an epoch.")
@click.option(
    "--loader-workers",
    type=click.IntRange(min=0),
    help="Processes that load data ahead of each worker of the first stage; no number depends on it.  [default: up to "
    "4, within the cores of a worker and its shared memory, for image folders; 0 for all else]",
)
@click.option(
    "--skip-corrupt",
    is_flag=True,
    help="Go on after an image file that cannot be read; the next good one of its class stands in for it.",
)
@click.option(
    "--metric",
    type=click.Choice(list(METRICS)),
    help="What the validation is judged by; meteor takes a data set with captions.  [default: perplexity for language "
    "modeling, else accuracy]",
)
@click.option(
    "--target-metric", type=Finite(), help="Stop once validation reaches it, from above for loss and perplexity."
)
@click.option("--target-accuracy", type=Finite(min=0, max=1), help="Short for --metric accuracy --target-metric 0.97.")
@click.option(
    "--init-from",
    metavar="WEIGHTS",
    help="Start from a plain state dict (weights.pt, or model.pt of an earlier run), or from weights of torchvision "
    "that are on this machine already (torchvision:DEFAULT, torchvision:IMAGENET1K_V1).  [default: random weights]",
)
@click.option(
    "--evaluate-only",
    is_flag=True,
    help="Do not train: run the weights of --init-from over the validation data, forward through the pipeline.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of each worker.  [default: cores over workers here]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--measure-memory",
    is_flag=True,
    help="Count what each worker holds at its fullest and compare it with the plan; slower. GPUs count by themselves.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where the run's files go, a new folder.  [default: runs/MODEL-DATE]",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Go on with the run in this folder from its newest whole checkpoint, with the options that it was started "
    "with. --plan may name another plan of the same model, as for fewer machines.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    help="Drain the pipeline for a checkpoint every so many minibatches of an epoch, rounded up so that all replicas "
    "take part in each; the numbers depend on it.  [default: at each epoch's end only]",
)
@click.option("--keep", type=click.IntRange(min=0), default=2, show_default=True, help="Old checkpoints to keep.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start again from the newest whole checkpoint when a worker is lost, at most so many times.",
)
@click.option(
    "--hosts",
    help="Where the workers run: a host file (lines like 'node1 slots=2'), a list like node1,node2:29700, or a pattern "
    "with {rank}.  [default: the plan's hosts, a launcher's, or all here]",
)
@click.option(
    "--key",
    type=click.Path(),
    callback=_absolute,
    metavar="FILE",
    help="Encrypt everything between workers, and let only those connect that hold this key: the same file on every "
    "host.",
)
@click.option(
    "--make-key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_make_key,
    help="Write a new key for --key, which nobody but you may read, and exit.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Send everything over the network in the open, to and from anyone who knows how: only where you trust all "
    "that is on it. Of no effect with --key.",
)
@click.option(
    "--measure-network",
    is_flag=True,
    help="Do not train: send over the plan's own links for some seconds, each alone and all at once, and print what "
    "they carry beside the plan's figure. On every host, as a run.",
)
@click.option("--rank", type=int, help="Which worker this program is.  [default: a launcher or the addresses tell]")
@click.option(
    "--rendezvous-timeout",
    type=Finite(min=1),
    default=300.0,
    show_default=True,
    help="Seconds that workers wait for each other at the start.",
)
@click.option(
    "--peer-timeout",
    type=Finite(min=0.1, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds of silence on a connection after which the worker at its other end counts as dead.",
)
@click.option(
    "--stall-timeout",
    type=Finite(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Seconds that a worker may wait for another one that is alive.",
)
@click.option(
    "--quiet",
    is_flag=True,
    help="Say nothing on standard output but one line at the end; warnings and errors still go to standard error.",
)
@click.option(
    "--trace-minibatches",
    metavar="FIRST:STOP",
    default="0:100",
    show_default=True,
    help="The minibatches of the run whose passes and transfers go one by one into trace.json, from the first to "
    "before the second; 0:0 for none.",
)
@click.option(
    "--debug-dump/--no-debug-dump",
    default=True,
    show_default=True,
    help="On SIGUSR1, to pd-train or to one worker: write to the workers' logs where each stands in its schedule, what "
    "it waits for, its queues and its threads' stacks; training goes on.",
)
@click.option(
    "--tensorboard",
    is_flag=True,
    help="Write event files for TensorBoard into the run's folder, tensorboard/.",
)
@click.option(
    "--report",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER...",
    help="Train nothing: print the report of the run in this folder, finished, broken off or running, and draw it; of "
    "several, compare them to the first. --target-metric asks for another target.",
)
@click.argument("more", nargs=-1, type=click.Path(path_type=Path), metavar="")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where --report puts pictures.  [default: the run's folder; for several runs this one]",
)
@click.version_option(package_name="pipedream", prog_name="pd-train")
def main(**given: Any) -> None:
    """Train a model pipeline-parallel by a plan, one worker process a machine of the plan.

    Writes metrics.jsonl, model.pt (an ordinary state dict), report.json and a log a worker.
    """
    if given["evaluate_only"]:
        check_evaluation(given["init_from"])
    farewell = Farewell()
    with _failures_as_messages(farewell):
        reported, output = (*given.pop("report"), *given.pop("more")), given.pop("output")
        if reported or output is not None:
            from pd_train.show_report import report_runs

            return report_runs(reported, output, given, _typed(click.get_current_context()))
        if given.pop("measure_network"):
            from pd_train.network_run import measure_network

            return measure_network(given, _typed(click.get_current_context()) - {"measure_network"}, farewell)
        tensorboard = given.pop("tensorboard")
        if tensorboard:
            check_tensorboard()
        emulate, time_scale, quiet = given.pop("emulate"), given.pop("time_scale"), given.pop("quiet")
        if emulate is not None:
            refuse_options(_typed(click.get_current_context()), given["sync"])
        elif "time_scale" in _typed(click.get_current_context()):
            raise UserError("--time-scale belongs to --emulate; leave it out or add that.")
        if given["resume"] is not None:
            given = continue_run(given, click.get_current_context())
        options, identity, hosts = _settle(farewell, **given, emulate=emulate, time_scale=time_scale)
        alone = len(options.ranks) == options.plan.workers
        with held(options.run_dir, alone):
            if alone and options.resume == "no":
                clear_logs(options.run_dir)
            if not options.evaluate_only and options.emulate is None:
                write_options(options.run_dir, {**given, "data": options.data, "threads": options.threads})
            # A run that goes on may be given other hosts by its launcher.
            write_record(options.run_dir / "plan.json", options.plan.model_copy(update={"hosts": hosts}))
            said = [Note(identity.why, "information")] if options.plan.hosts else []
            with _way_back(options.run_dir):
                from pd_train.session import train_and_show

                said += _remarks(options, given)
                train_and_show(options, identity, said, given["max_restarts"], farewell, quiet, tensorboard)


def _settle(
    farewell: Farewell,
    *,
    plan_path: Path,
    data: str | None,
    epochs: int,
    minibatches: int | None,
    optimizer: str,
    lr: float | None,
    momentum: float,
    weight_decay: float,
    lr_schedule: str,
    lr_scaling: str,
    sync: str | None,
    weights: str,
    group: int | None,
    flush: int | None,
    clip_stage_grad_norm: float | None,
    clip_grad_norm: float | None,
    precision: PrecisionName | None,
    drop_last: bool,
    loader_workers: int | None,
    skip_corrupt: bool,
    metric: str | None,
    target_metric: float | None,
    target_accuracy: float | None,
    init_from: str | None,
    evaluate_only: bool,
    seed: int,
    threads: int | None,
    device: str,
    measure_memory: bool,
    run_dir: Path | None,
    resume: Path | None,
    checkpoint_every: int | None,
    keep: int,
    max_restarts: int,
    hosts: str | None,
    rank: int | None,
    key: str | None,
    insecure: bool,
    rendezvous_timeout: float,
    peer_timeout: float,
    stall_timeout: float,
    trace_minibatches: str,
    debug_dump: bool,
    emulate: Path | None,
    time_scale: float,
) -> tuple[RunOptions, Identity, tuple[Host, ...]]:
    """What the run is, after all checks, which workers are here and why, and the plan's own hosts; makes its folder.

    Raises:
        UserError: something does not fit.
    """
    if not plan_path.exists():
        raise UserError(f"--plan {plan_path}: there is no such file; make one with pd-plan, or name another.")
    plan = read_plan(plan_path)
    emulation = None
    if emulate is None:
        check_origin(plan)
    else:
        emulation = Emulation(read_any_profile(emulate), time_scale)
        check_emulation(plan, emulation.profile, str(emulate))
        minibatches = minibatches or default_minibatches(plan)
    identity = find_identity(plan, rank, hosts, os.environ, is_here)
    own_hosts, plan = plan.hosts, plan.model_copy(update={"hosts": identity.hosts})
    check_network(plan, insecure, has_key=key is not None)
    if key is not None:
        from pd_train.keys import read_key

        read_key(Path(key))  # Each worker reads it for itself: what is wrong with it is said before they start.
    farewell.prepare(plan, identity.ranks, identity.job is not None, None if key is None else Path(key))
    sync = sync or ("bsp" if len(plan.stages) == 1 else "overlap")
    if not evaluate_only:
        check_purpose(plan)
    mode = settle_mode(plan, Mode(weights, sync, flush, group))
    precision = precision or plan.precision
    if not evaluate_only and emulation is None:
        check_precision(precision, mode)
    check_clipping(mode, clip_stage_grad_norm, clip_grad_norm)
    check_schedule(plan, mode)
    if emulation is None and (
        plan.inference or not evaluate_only
    ):  # Else the plan's figures are for more than an evaluation holds.
        check_memory(plan, mode, identity.ranks, available_memory_bytes())
    metric, target_metric = settle_metric(plan.task, metric, target_metric, target_accuracy)
    data = data or plan.data
    if emulation is None:
        check_data(plan.task, data)
    options = RunOptions(
        plan=plan,
        run_dir=resume or make_run_folder(run_dir, plan, len(identity.ranks) == plan.workers, identity.job),
        data=data,
        epochs=epochs,
        minibatches=minibatches,
        optimizer=OptimizerOptions(
            name=optimizer,
            lr=_DEFAULT_LR[optimizer] if lr is None else lr,
            momentum=momentum,
            weight_decay=weight_decay,
            lr_schedule=lr_schedule,
            lr_scaling=lr_scaling,
        ),
        mode=mode,
        clip_stage_norm=clip_stage_grad_norm,
        clip_norm=clip_grad_norm,
        precision=precision,
        drop_last=drop_last,
        loader_workers=loader_workers,
        skip_corrupt=skip_corrupt,
        threads=threads
        or cores_of_task(identity, os.environ)
        or max(1, available_cores() // len(on_the_host_of(plan, identity.ranks[0]))),
        metric=metric,
        target_metric=target_metric,
        init_from=init_from,
        evaluate_only=evaluate_only,
        seed=seed,
        device=device,
        measure_memory=measure_memory,
        checkpoint_every=None if checkpoint_every is None else checkpoint_interval(plan, mode, checkpoint_every),
        keep=keep,
        resume="no" if resume is None else "yes",
        ranks=identity.ranks,
        key=None if key is None else Path(key),
        launched=identity.job is not None,
        rendezvous_timeout=rendezvous_timeout,
        peer_timeout=peer_timeout,
        stall_timeout=stall_timeout,
        traced=_span("--trace-minibatches", trace_minibatches),
        debug_dump=debug_dump,
        emulate=emulation,
    )
    return options, identity, own_hosts


def _span(option: str, text: str) -> tuple[int, int]:
    """`20:40` as two numbers.

    Raises:
        UserError: it is something else.
    """
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) <= int(stop)):
        raise UserError(f"{option} {text}: expected two numbers like 20:40, the first minibatch and the one after.")
    return int(first), int(stop)


def _remarks(options: RunOptions, given: Mapping[str, Any]) -> Iterator[Note]:
    """What a person should know before the run starts."""
    if options.key is not None and given["insecure"]:
        yield Note(
            "--insecure is of no effect with --key: everything is encrypted, and only holders of the key connect"
        )
    if options.emulate is not None:
        device = options.emulate.profile.device.name or "an unnamed device"
        text = f"emulated: passes wait for the times of {device}, times {options.emulate.time_scale:g}"
        yield Note(text, "information")
        return
    if not options.evaluate_only and (warning := optimizer_warning(options)) is not None:
        yield Note(warning)
    if (warning := precision_warning(options)) is not None:
        yield Note(warning)
    if given["checkpoint_every"] != options.checkpoint_every:
        yield Note(
            f"--checkpoint-every {given['checkpoint_every']} is rounded up to {options.checkpoint_every}, so that "
            "every replica takes part in every update"
        )


def _typed(context: click.Context) -> set[str]:
    """The names of the options that are on the command line."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


@contextlib.contextmanager
def _way_back(run_dir: Path) -> Iterator[None]:
    """Say how a run that did not come to its end goes on, where it has a checkpoint."""
    try:
        yield
    except BaseException:
        if has_checkpoint(run_dir):
            click.echo(f"To go on from its newest checkpoint: pd-train --resume {run_dir}", err=True)
        raise


@contextlib.contextmanager
def _failures_as_messages(farewell: Farewell) -> Iterator[None]:
    from pd_train.launch import Stopped

    try:
        yield
    except UserError as error:
        failure = click.ClickException(str(error))
        failure.show()
        farewell.say(str(error))
        sys.exit(failure.exit_code)
    except Stopped as error:
        _say_stopped(str(error), error.signum)
    except KeyboardInterrupt:  # Before the workers started, or after they ended.
        _say_stopped("Stopped by SIGINT", signal.SIGINT)


def _say_stopped(text: str, signum: int) -> NoReturn:
    click.echo(f"{text}; the files written so far are whole.", err=True)
    sys.exit(128 + signum)
