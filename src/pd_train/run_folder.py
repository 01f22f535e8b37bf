"""The folder of a run: made for a new one, and read by one that goes on (`--resume`).

runs/NAME/options.json    what the command line said, so that --resume need not be told again
runs/NAME/plan.json       the plan
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from pd_format.errors import UserError
from pd_format.jsonfile import Record, read_record, write_record
from pd_format.plan import read_plan

__all__ = ["continue_run", "make_run_folder", "write_options"]

_MAY_CHANGE = frozenset(
    {"device", "threads", "metric", "target_metric", "target_accuracy", "measure_memory", "keep", "max_restarts",
     "loader_workers", "peer_timeout", "stall_timeout", "debug_dump"}
)  # fmt: skip
"""Options that a run may go on with others of: none of its numbers depends on them, or no more than on the machine."""
_OF_ONE_START = frozenset({"plan_path", "run_dir", "resume", "evaluate_only"})


class RunOptionsRecord(Record):
    """The options of a run by their names on the command line, without dashes."""

    format: Literal["pipedream-run"] = "pipedream-run"
    version: Literal[1] = 1
    options: dict[str, str | int | float | bool | None]


def make_run_folder(wanted: Path | None, model: str) -> Path:
    """Make the folder of a new run.

    Raises:
        UserError: it holds something already, or cannot be made.
    """
    path = wanted or Path("runs") / f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = {each.name for each in path.iterdir()}
        # A run that failed before its first checkpoint left nothing to lose: the same command works again.
        logs = {name for name in found if name.startswith("worker-") and name.endswith(".log")}
        if found - logs - {"plan.json", "options.json"}:
            hint = f" To go on with the run in it: --resume {path}." if "checkpoints" in found else ""
            raise UserError(f"--run-dir {path}: is not empty; name a new folder, so that no earlier run is lost.{hint}")
        for name in logs:
            (path / name).unlink()
    except OSError as error:
        raise UserError(f"--run-dir {path}: cannot be made ({error.strerror}); name another place.") from None
    return path


def write_options(path: Path, options: Mapping[str, Any]) -> None:
    """Write a run's options into its folder.

    Raises:
        UserError: the folder cannot be written to.
    """
    kept = {name: value for name, value in options.items() if name not in _OF_ONE_START}
    write_record(path / "options.json", RunOptionsRecord(options=kept))


def continue_run(given: dict[str, Any], context: click.Context) -> dict[str, Any]:
    """The options of a run that goes on: as they were, but for those that are given anew and may change.

    Args:
        given: the command's options, `resume` among them.
        context: of the command, which tells what was typed.

    Raises:
        UserError: there is no such run, the plan is for another model, or an option would change its numbers.
    """
    folder: Path = given["resume"]
    typed = {name for name in given if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    for other in ("run_dir", "evaluate_only", "init_from"):
        if other in typed:
            raise UserError(f"--resume goes on with the run in {folder}; leave out --{other.replace('_', '-')}.")
    if not (folder / "options.json").exists():
        raise UserError(
            f"--resume {folder}: holds no run (there is no options.json in it); name the folder of a run, as in "
            "runs/NAME."
        )
    earlier = read_record(folder / "options.json", RunOptionsRecord, "pipedream-run", 1).options
    options = {**given, **earlier}
    for name in typed - _OF_ONE_START:
        if given[name] != earlier.get(name) and not _may_change(name, earlier):
            option = next(each for each in context.command.params if each.name == name).opts[0]
            raise UserError(
                f"{option} {given[name]}: the run in {folder} was started with {earlier.get(name)}, and its numbers "
                "depend on it; leave the option out, or start a new run."
            )
        options[name] = given[name]
    if "plan_path" not in typed:
        options["plan_path"] = folder / "plan.json"
    elif (folder / "plan.json").exists() and given["plan_path"].exists():
        before, now = read_plan(folder / "plan.json").model, read_plan(given["plan_path"]).model
        if before.fingerprint != now.fingerprint:
            raise UserError(
                f"--plan {given['plan_path']}: is for model {now.name}, and the run in {folder} trains "
                f"{before.name} or another version of it; plan that one anew, for fewer machines or more."
            )
    return options


def _may_change(name: str, earlier: Mapping[str, Any]) -> bool:
    # A rate that follows the number of epochs would have been another one from the start.
    return name in _MAY_CHANGE or (name == "epochs" and earlier.get("lr_schedule") == "constant")
