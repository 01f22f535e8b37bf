"""A run that is at its end: nothing is left to train by the options that it would go on with."""

from __future__ import annotations

import click

from pd_format.errors import UserError
from pd_train.display.quiet import result_line
from pd_train.metrics import METRICS
from pd_train.options import RunOptions
from pd_train.past_run import PastRun, read_run
from pd_train.terminal import value_text

__all__ = ["finished_run", "say_finished"]


def finished_run(options: RunOptions) -> PastRun | None:
    """The run that `--resume` names, where its files are whole and nothing is left to train; else None.

    Only the host of rank 0 has these files. What is damaged is for the run itself to say, as far as it needs it.
    """
    if options.resume == "no" or options.emulate is not None:
        return None
    try:
        run = read_run(options.run_dir, options.target_metric)
    except UserError:
        return None
    # The report may be of an earlier end, after which the run went on.
    is_whole = run.state is None and run.ended.epochs == len(run.epochs) and (options.run_dir / "model.pt").exists()
    return run if is_whole and _reasons(options, run) else None


def say_finished(options: RunOptions, run: PastRun, quiet: bool) -> None:
    """Say so, and how to train longer.

    Args:
        options: of the run that would go on.
        run: as its folder has it.
        quiet: whether standard output takes the line of a run's end alone.
    """
    if quiet:
        click.echo(result_line(run.ended, run.epochs, options.run_dir, options.target_metric))
    folder = options.run_dir
    lines = (
        f"{folder}: this run is finished, and nothing is left to train: {' and '.join(_reasons(options, run))}.",
        f"To train longer: {_way_on(options, run)}",
        f"Its figures: pd-train --report {folder}",
    )
    for line in lines[: 1 if quiet else None]:
        click.echo(line, err=quiet)


def _reasons(options: RunOptions, run: PastRun) -> list[str]:
    """Why nothing is left; none where something is."""
    reasons = []
    if len(run.epochs) >= options.epochs:
        reasons.append(f"{len(run.epochs)} of {options.epochs} epochs are over")
    if _is_at_cap(options, run):
        reasons.append(f"the {options.minibatches} minibatches that were asked for are done")
    if _has_reached(options, run):
        assert options.target_metric is not None
        reasons.append(f"the target, {options.metric} {value_text(options.metric, options.target_metric)}, is reached")
    return reasons


def _is_at_cap(options: RunOptions, run: PastRun) -> bool:
    return options.minibatches is not None and sum(one.minibatches for one in run.epochs) >= options.minibatches


def _has_reached(options: RunOptions, run: PastRun) -> bool:
    """As `Lead` asks it: of the latest validation, judged by the same metric."""
    if options.target_metric is None or run.metric != options.metric or not run.epochs:
        return False
    return METRICS[options.metric].is_reached(run.epochs[-1].judged, options.target_metric)


def _way_on(options: RunOptions, run: PastRun) -> str:
    folder = options.run_dir
    # What the run's numbers depend on cannot be changed under it.
    if _is_at_cap(options, run) or (len(run.epochs) >= options.epochs and options.optimizer.lr_schedule != "constant"):
        return f"start a new run from its weights, pd-train --plan {folder}/plan.json --init-from {folder}/model.pt"
    epochs = f" --epochs {len(run.epochs) + 1}" if len(run.epochs) >= options.epochs else ""
    target = " --target-metric VALUE, a harder one" if _has_reached(options, run) else ""
    return f"pd-train --resume {folder}{epochs}{target}"
