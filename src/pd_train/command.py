"""The command `pd-train`: reads its options, decides what is asked for, and hands over (design, section 1)."""

from __future__ import annotations

from typing import Any

import click
import cloup

from pd_format.interrupts import ending_at_once
from pd_format.jsonfile import write_record
from pd_train.evaluation import check_emulating, check_evaluation
from pd_train.event_files import check_tensorboard
from pd_train.events import Note
from pd_train.farewell import Farewell
from pd_train.option_groups import TwoHelps, takes_options
from pd_train.outcome import failures_as_messages, way_back
from pd_train.run_folder import clear_logs, continue_run, held, make_run_folder, write_options
from pd_train.settling import remarks, settle
from pd_train.usage import typed_options

__all__ = ["main"]

EPILOG = """\b
Examples:
  pd-train --plan plan.json --dry-run
  pd-train --plan plan.json --data digits --epochs 10 --target-accuracy 0.97
  pd-train --plan plan.json --minibatches 100 --optimizer adam --lr 0.0003
  pd-train --make-key job.key; pd-train --plan plan.json --key job.key
  pd-train --resume runs/NAME
  pd-train --report runs/NAME runs/OTHER
  pd-train --plan plan.json --evaluate-only --init-from runs/NAME/model.pt
  pd-train --plan plan.json --emulate profiles/vgg16.json --time-scale 20

\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal when stopped (130 by
Ctrl-C). Every option by task: docs/options.md"""


@cloup.command(
    cls=TwoHelps,
    epilog=EPILOG,
    formatter_settings={"col1_max_width": 27},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@takes_options
def main(**given: Any) -> None:
    """Train a model pipeline-parallel by a plan, one worker process a machine of the plan.

    Writes metrics.jsonl, model.pt (an ordinary state dict), report.json and a log a worker.
    """
    if given["evaluate_only"]:
        check_evaluation(given["init_from"])
    farewell = Farewell()
    reported, output = (*given.pop("report"), *given.pop("more")), given.pop("output")
    reports = bool(reported) or output is not None
    writes = not (reports or given["dry_run"] or given["measure_network"])
    with failures_as_messages(farewell, writes):
        if reports:
            with ending_at_once():
                from pd_train.show_report import report_runs

            return report_runs(reported, output, given, typed_options(click.get_current_context()))
        if given.pop("measure_network"):
            from pd_train.network_run import measure_network

            return measure_network(given, typed_options(click.get_current_context()) - {"measure_network"}, farewell)
        _run(given, farewell)


def _run(given: dict[str, Any], farewell: Farewell) -> None:
    """Train, evaluate or emulate."""
    tensorboard = given.pop("tensorboard")
    if tensorboard:
        check_tensorboard()
    dry_run = given.pop("dry_run")
    emulate, time_scale, quiet = given.pop("emulate"), given.pop("time_scale"), given.pop("quiet")
    if emulate is not None:
        check_emulating(given["sync"])
    elif "time_scale" in typed_options(click.get_current_context()):
        raise click.UsageError("--time-scale belongs to --emulate PROFILE; add that, or leave it out.")
    if given["resume"] is not None:
        given = continue_run(given, click.get_current_context())
    settled = settle({**given, "emulate": emulate, "time_scale": time_scale}, Farewell() if dry_run else farewell)
    options, identity = settled.options, settled.identity
    if given["resume"] is not None and settled.alone:
        from pd_train.finished import finished_run, say_finished

        if (past := finished_run(options)) is not None:
            return say_finished(options, past, quiet)
    if dry_run:
        with ending_at_once():
            from pd_train.dry_run import rehearse

        return rehearse(settled, remarks(options, given), quiet)
    if options.resume == "no":
        make_run_folder(options.run_dir, named=given["run_dir"] is not None, alone=settled.alone)
    with held(options.run_dir, settled.alone):
        if settled.alone and options.resume == "no":
            clear_logs(options.run_dir)
        if not options.evaluate_only and options.emulate is None:
            write_options(options.run_dir, {**given, "data": options.data, "threads": options.threads})
        # A run that goes on may be given other hosts by its launcher.
        write_record(options.run_dir / "plan.json", options.plan.model_copy(update={"hosts": settled.own_hosts}))
        said = [Note(identity.why, "information")] if options.plan.hosts else []
        with way_back(options.run_dir):
            from pd_train.session import train_and_show

            said += remarks(options, given)
            train_and_show(options, identity, said, given["max_restarts"], farewell, quiet, tensorboard)
