"""A run as its folder tells it: at its end, broken off, or still going on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pd_format.errors import UserError
from pd_format.jsonfile import header_problem
from pd_format.plan import Plan, read_plan
from pd_format.versions import default_sync
from pd_train.bottleneck import Setting
from pd_train.events import REPORT_FORMAT, REPORT_VERSION, EpochMetrics, RunEnded
from pd_train.metrics import METRICS, default_metric
from pd_train.options import RESTARTS
from pd_train.report import performance_of, rate_of
from pd_train.timing_file import TIMING, timings_of

__all__ = ["PastRun", "read_run"]


@dataclass(frozen=True)
class PastRun:
    """What is known of a run."""

    folder: Path
    plan: Plan
    epochs: tuple[EpochMetrics, ...]
    """Those that are over; none of an emulated run, which learns nothing."""
    ended: RunEnded
    """As the last event of the run had it; of a run without an end, what its epochs tell."""
    state: str | None
    """Of a run that is not at its end."""
    metric: str
    target: float | None
    time_scale: float | None = None
    """Of an emulated run."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name


def read_run(folder: Path, target: float | None = None) -> PastRun:
    """Read a run's folder.

    Args:
        folder: that pd-train wrote to.
        target: value of the run's metric to look for, instead of the one that it was to reach.

    Raises:
        UserError: the folder holds no run, or a file in it is damaged or of another version.
    """
    if not os.path.exists(folder / "plan.json"):  # Unlike `Path.exists` it says no to a name that is too long.
        raise UserError(f"{folder}: holds no run (there is no plan.json in it); name a run's folder, as runs/NAME.")
    plan = read_plan(folder / "plan.json")
    report = _object(folder / "report.json")
    if report is not None:
        problem = header_problem(report, REPORT_FORMAT, REPORT_VERSION)
        if problem is not None:
            raise _damaged(folder / "report.json", ValueError(problem))
    if report is not None and "validation_loss" in report:
        raise UserError(f"{folder}: holds an evaluation, which trained nothing; its report.json has all figures.")
    options = _options(folder, report)
    metric = options.get("metric")
    if options.get("target_accuracy") is not None:
        metric = "accuracy"
    metric = metric if metric in METRICS else default_metric(plan.task)
    if target is None:
        asked = options.get("target_accuracy"), options.get("target_metric")
        target = next((float(one) for one in asked if isinstance(one, int | float)), None)
    epochs = tuple(_epochs(folder / "metrics.jsonl", metric))
    emulated = (report or {}).get("emulated")
    time_scale = _figure(emulated.get("time_scale")) if isinstance(emulated, dict) else None
    ended = _ended(folder, report, epochs, metric, target)
    timing = folder / TIMING
    if timing.exists():
        try:
            timings = timings_of(_lines(timing), plan)
        except ValueError as error:
            raise _damaged(timing, error) from None
        setting = _setting(plan, options, time_scale is not None, timings.share_cores)
        peaks = ended.peak_memory_bytes
        if peaks is not None and len(peaks) != len(plan.stages):
            peaks = None
        performance = performance_of(plan, epochs, timings.epochs, setting, metric, target, peaks, time_scale or 1.0)
        ended = replace(ended, performance=performance)
    return PastRun(
        folder=folder,
        plan=plan,
        epochs=epochs,
        ended=ended,
        state=None if report is not None else _state(folder, len(epochs), options),
        metric=metric,
        target=target,
        time_scale=time_scale,
    )


def _options(folder: Path, report: Mapping[str, Any] | None) -> dict[str, Any]:
    """The run's options; an emulated run keeps none but those of report.json."""
    kept = (_object(folder / "options.json") or {}).get("options")
    if isinstance(kept, dict):
        return kept
    told = (report or {}).get("options")
    told = told if isinstance(told, dict) else {}
    mode = told.get("mode")
    return {**told, **(mode if isinstance(mode, dict) else {})}


def _ended(
    folder: Path, report: Mapping[str, Any] | None, epochs: Sequence[EpochMetrics], metric: str, target: float | None
) -> RunEnded:
    """The run's last event, as report.json kept it; without one, what the epochs tell."""
    judge, judged = METRICS[metric], [one.judged for one in epochs]
    told = {
        "reached_target": None if target is None else any(judge.is_reached(one, target) for one in judged),
        "seconds": sum(one.seconds for one in epochs),
        "epochs": len(epochs),
        "best_accuracy": METRICS["accuracy"].best(one.validation_accuracy for one in epochs),
        "bytes_sent": None,
        "training_bytes_sent": None,
        "minibatches": sum(one.minibatches for one in epochs),
        "metric": metric,
        "best_metric": judge.best(judged),
        "restarts": len(_lines(folder / RESTARTS)),
        "samples_per_second": rate_of(epochs),
    }
    known = {**told, **(report or {}), "reached_target": told["reached_target"], "performance": None}
    try:
        return TypeAdapter(RunEnded).validate_python(known)
    except ValidationError as error:
        raise _damaged(folder / "report.json", error) from None


def _state(folder: Path, over: int, options: Mapping[str, Any]) -> str:
    how = "is still running" if _is_held(folder) else "broke off"
    epochs = options.get("epochs")
    if not isinstance(epochs, int):
        return f"{how}; figures are of the {over} epochs that are over"
    if over >= epochs:
        return f"{how} after its last epoch, before its end was written"
    return f"{how} in epoch {over + 1} of {epochs}; figures are of the {over} that are over"


def _is_held(folder: Path) -> bool:
    """Whether a pd-train on this machine runs in the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # A file system without locks.
    finally:
        os.close(descriptor)
    return False


def _setting(plan: Plan, options: Mapping[str, Any], emulated: bool, share_cores: bool) -> Setting:
    def whole(name: str) -> int | None:
        value = options.get(name)
        return value if type(value) is int else None

    sync = options.get("sync") or default_sync(len(plan.stages))
    return Setting(str(sync), whole("flush"), whole("checkpoint_every"), whole("threads"), emulated, share_cores)


def _epochs(path: Path, metric: str) -> Iterator[EpochMetrics]:
    for line in _lines(path):
        try:
            one = TypeAdapter(dict[str, Any]).validate_json(line)
            value = None if metric in ("accuracy", "loss") else one.get(f"validation_{metric}")
            yield TypeAdapter(EpochMetrics).validate_python({**one, "metric": metric, "validation_metric": value})
        except ValidationError as error:
            raise _damaged(path, error) from None


def _object(path: Path) -> dict[str, Any] | None:
    """A file's object; None where there is no such file."""
    if not path.exists():
        return None
    try:
        return TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
    except ValidationError as error:
        raise _damaged(path, error) from None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _damaged(path: Path, error: ValueError) -> UserError:
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
    return UserError(f"{path}: is not as this program writes it ({text}); leave that run out.")
