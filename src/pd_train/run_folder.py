"""The folder of a run: made for a new one, and read by one that goes on (`--resume`).

runs/NAME/options.json    what the command line said, so that --resume need not be told again
runs/NAME/plan.json       the plan
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from pd_format.errors import UserError
from pd_format.jsonfile import Record, read_record, write_record
from pd_format.plan import Plan, read_plan
from pd_train.options import RESTARTS
from pd_train.whoami import Identity

__all__ = [
    "check_run_folder",
    "clear_logs",
    "continue_run",
    "has_checkpoint",
    "held",
    "make_run_folder",
    "run_folder_of",
    "write_options",
]

_MAY_CHANGE = frozenset(
    {"device", "threads", "metric", "target_metric", "target_accuracy", "measure_memory", "keep", "max_restarts",
     "loader_workers", "hosts", "key", "insecure", "rendezvous_timeout", "peer_timeout", "stall_timeout",
     "debug_dump", "trace_minibatches"}
)  # fmt: skip
"""Options that a run may go on with others of: none of its numbers depends on them, or no more than on the machine."""
_TARGETS = frozenset({"metric", "target_metric", "target_accuracy"})
_OF_ONE_START = frozenset({"plan_path", "run_dir", "resume", "evaluate_only", "rank", "quiet"})


class RunOptionsRecord(Record):
    """The options of a run by their names on the command line, without dashes."""

    format: Literal["pipedream-run"] = "pipedream-run"
    version: Literal[1] = 1
    options: dict[str, str | int | float | bool | None]


def run_folder_of(wanted: Path | None, plan: Plan, identity: Identity) -> Path:
    """Where a new run's files go; nothing is made.

    Args:
        wanted: where; None for a folder of runs/.
        plan: of the run.
        identity: which of its workers this program starts. Where others start the rest, they may share the folder, so
            that its name follows from the plan and the job alone.
    """
    mark = time.strftime("%Y%m%d-%H%M%S")
    if len(identity.ranks) < plan.workers:
        mark = identity.job or hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:8]
    return wanted or Path("runs") / f"{plan.model.name}-{mark}"


def check_run_folder(path: Path, alone: bool) -> None:
    """What `make_run_folder` would refuse, as far as that can be told without making it.

    Raises:
        UserError: it holds something already, or could not be made.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    try:
        if there == path:
            _check_empty(path, alone)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _cannot_make(path, error) from None


def make_run_folder(path: Path, named: bool, alone: bool) -> None:
    """Make the folder of a new run.

    Args:
        path: of the folder.
        named: whether a person did; it may be there already, if it is as good as empty.
        alone: whether this program starts all workers. Else nothing in it is removed.

    Raises:
        UserError: it holds something already, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=named or not alone)
        _check_empty(path, alone)
    except FileExistsError:
        raise UserError(f"{path}: another run has just begun there; name a folder with --run-dir.") from None
    except OSError as error:
        raise _cannot_make(path, error) from None


def _cannot_make(path: Path, error: OSError) -> UserError:
    return UserError(f"--run-dir {path}: cannot be made ({error.strerror}); name another place.")


def _check_empty(path: Path, alone: bool) -> None:
    # What begins with a dot, a program that started with this one is just writing.
    found = {each.name for each in path.iterdir() if alone or not each.match(".*.tmp")}
    # A run that failed before its first checkpoint left nothing to lose: the same command works again.
    if found - _logs_of(path) - {"plan.json", "options.json", RESTARTS}:
        hint = f" To go on with the run in it: --resume {path}." if "checkpoints" in found else ""
        raise UserError(f"--run-dir {path}: is not empty; name a new folder, so that no earlier run is lost.{hint}")


@contextlib.contextmanager
def held(path: Path, alone: bool) -> Iterator[None]:
    """Hold a run's folder, so that no other run writes into it at the same time.

    Args:
        path: of the folder.
        alone: whether this program starts all workers; else those that start the others hold it too.

    Raises:
        UserError: another run is going on in it.
    """
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(f"{path}: another pd-train is running in this folder; wait for it, or name another.") from None
    except OSError:
        pass  # A file system without locks.
    try:
        yield
    finally:
        os.close(folder)


def has_checkpoint(path: Path) -> bool:
    """Whether a run's folder holds a part of a checkpoint."""
    return next(path.glob("checkpoints/*/*.json"), None) is not None


def clear_logs(path: Path) -> None:
    """Remove what a run that came to nothing said."""
    for name in (*_logs_of(path), RESTARTS):
        (path / name).unlink(missing_ok=True)


def _logs_of(path: Path) -> set[str]:
    return {each.name for each in path.glob("worker-*.log")}


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
    if not os.path.exists(folder / "options.json"):  # Unlike `Path.exists` it says no to a name that is too long.
        raise UserError(
            f"--resume {folder}: holds no run (there is no options.json in it); name the folder of a run, as in "
            "runs/NAME."
        )
    earlier = read_record(folder / "options.json", RunOptionsRecord, "pipedream-run", 1).options
    options = {**given, **_checked(earlier, folder, context)}
    if typed & _TARGETS:  # One of them typed anew takes the place of all.
        options.update(dict.fromkeys(_TARGETS))
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


def _checked(earlier: Mapping[str, Any], folder: Path, context: click.Context) -> dict[str, Any]:
    """The options of a file that anybody may have edited, as the command line would take them."""
    parameters = {each.name: each for each in context.command.params}
    checked = {}
    for name, value in earlier.items():
        place = f"{folder / 'options.json'}: options.{name}"
        if name not in parameters or name in _OF_ONE_START:
            raise UserError(f"{place}: is no option of a run; was the file written by another version?")
        try:
            checked[name] = None if value is None else parameters[name].type_cast_value(context, value)
        except click.BadParameter as error:
            raise UserError(f"{place}: {error.message}") from None
    return checked


def _may_change(name: str, earlier: Mapping[str, Any]) -> bool:
    # A rate that follows the number of epochs would have been another one from the start.
    return name in _MAY_CHANGE or (name == "epochs" and earlier.get("lr_schedule") == "constant")
