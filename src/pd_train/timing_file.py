"""timing.jsonl: an object an epoch, with what each worker did with its time; it outlives restarts of the run.

    {"format": "pipedream-timing", "version": 1, "epoch": 0, "config": "2-1", "first_layers": ["0", "7"],
     "share_cores": true, "workers": [{...}, {...}, {...}]}

A run may go on by another plan, whose stages are other ones: each line names the plan's. `share_cores` says that
workers which compute on a CPU ran beside others on its machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pd_format.jsonfile import header_problem
from pd_format.plan import Plan
from pd_train.timing import WorkerTiming

__all__ = ["TIMING", "Timings", "lines_before", "timing_line", "timings_of"]

TIMING = "timing.jsonl"
"""In a run's folder."""
_FORMAT, _VERSION = "pipedream-timing", 1
"""Of each line."""


class Timings(NamedTuple):
    """What a file tells of a plan."""

    epochs: list[list[WorkerTiming]]
    """Each worker's, by rank."""
    share_cores: bool
    """In the last of them."""


def timing_line(plan: Plan, epoch: int, workers: Sequence[WorkerTiming], share_cores: bool) -> str:
    """The line of an epoch; one timing a worker, by rank."""
    plain = [timing.plain() for timing in workers]
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "epoch": epoch,
            **_mark(plan),
            "share_cores": share_cores,
            "workers": plain,
        }
    )


def lines_before(lines: Iterable[str], epoch: int) -> list[str]:
    """Those of epochs before this one, without damaged ones and those of another version, which nothing here reads."""
    return [line for line in lines if _is_before(line, epoch)]


def _is_before(line: str, epoch: int) -> bool:
    try:
        one = json.loads(line)
        return header_problem(one, _FORMAT, _VERSION) is None and bool(one["epoch"] < epoch)
    except (ValueError, KeyError, TypeError):
        return False


def timings_of(lines: Iterable[str], plan: Plan) -> Timings:
    """The timings of each epoch that this plan's stages were followed in.

    Raises:
        ValueError: a line is something else.
    """
    found: list[list[WorkerTiming]] = []
    share_cores = False
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            problem = header_problem(one, _FORMAT, _VERSION)
            if problem is not None:
                raise ValueError(problem)
            is_ours = {name: one[name] for name in _mark(plan)} == _mark(plan)
            if is_ours:
                share_cores = one["share_cores"] is True
                found.append([WorkerTiming.from_plain(plain) for plain in one["workers"]])
            if is_ours and len(found[-1]) != plan.workers:
                raise ValueError(f"{len(found[-1])} workers, where the plan has {plan.workers}")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"line {number}: {error}") from None
    return Timings(found, share_cores)


def _mark(plan: Plan) -> dict[str, Any]:
    return {"config": plan.config, "first_layers": [stage.first_layer for stage in plan.stages]}
