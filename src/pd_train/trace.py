"""A run's passes and transfers in Chrome's trace format, as Perfetto shows it (https://ui.perfetto.dev).

    stage 0
      worker 0              F5 |B3     | wait |U| F6 |B4     |      what its compute thread did
      worker 0 receives       |backward 3|  |backward 4|            from being handed over to having arrived
      worker 0 sends          |forward 5|         |forward 6|

Times are microseconds from the first event on, by rank 0's clock; `metadata` says how far each worker's may be off.
What overlaps, as transfers do, takes further rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from pd_format.plan import Plan
from pd_train.recorder import RECEIVED, ROW
from pd_train.timing import Doing

__all__ = ["trace_of"]

_US = 1e6
_ROWS_A_WORKER = 1000
"""Room for the rows of a worker: its own, then those of what it receives, then of what it sends."""
_SENDS = 500
_SHORT = {Doing.FORWARD: "F", Doing.BACKWARD: "B"}
_KIND = {number: kind for kind, number in RECEIVED.items()}


class _Transfer(NamedTuple):
    kind: str
    start: float
    end: float
    number: int
    source: int
    target: int
    bytes: int


def trace_of(plan: Plan, rows: Sequence[NDArray[Any]], clock_errors: Mapping[int, float]) -> dict[str, Any]:
    """The trace as an object for JSON.

    Args:
        plan: of the run.
        rows: of each worker, by rank; (n, 7), see `pd_train.recorder.ROW`.
        clock_errors: seconds by which each worker's clock may be off from rank 0's.
    """
    start = min((float(each[:, ROW.index("start")].min()) for each in rows if len(each)), default=0.0)
    events: list[dict[str, Any]] = []
    for stage in plan.stages:
        layers = f"{stage.first_layer} to {stage.last_layer}"
        events.append(_name(stage.index, 0, "process_name", f"stage {stage.index}: {layers}"))
        for rank in stage.workers:
            events.append(_name(stage.index, rank * _ROWS_A_WORKER, "thread_name", f"worker {rank}"))
            events += _doings(stage.index, rank, rows[rank], start)
    transfers = sorted((one for rank, each in enumerate(rows) for one in _transfers(rank, each)), key=lambda t: t.start)
    events += _lanes(plan, transfers, start)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "metadata": {"clock_error_us": {str(rank): error * _US for rank, error in sorted(clock_errors.items())}},
    }


def _doings(stage: int, rank: int, rows: NDArray[Any], start: float) -> Iterator[dict[str, Any]]:
    for what, began, ended, number, version, _, _ in rows.tolist():
        if what >= len(Doing):
            continue
        doing = Doing(int(what))
        known = {"minibatch": int(number), "version": int(version)}
        yield {
            "ph": "X",
            "pid": stage,
            "tid": rank * _ROWS_A_WORKER,
            "name": f"{_SHORT[doing]}{int(number)}" if doing in _SHORT else doing.name.lower().replace("_", " "),
            "cat": doing.name.lower(),
            "ts": (began - start) * _US,
            "dur": (ended - began) * _US,
            "args": {name: value for name, value in known.items() if value >= 0},
        }


def _transfers(rank: int, rows: NDArray[Any]) -> Iterator[_Transfer]:
    for what, began, ended, number, _, peer, size in rows.tolist():
        if what >= len(Doing):
            yield _Transfer(_KIND[int(what)], began, ended, int(number), int(peer), rank, int(size))


def _lanes(plan: Plan, transfers: Sequence[_Transfer], start: float) -> Iterator[dict[str, Any]]:
    """Each transfer at both of its ends, in the first row of that worker's that is free."""
    free: dict[tuple[int, bool], list[float]] = {}
    for one in transfers:
        for rank, receives in ((one.target, True), (one.source, False)):
            ends = free.setdefault((rank, receives), [])
            lane = next((lane for lane, end in enumerate(ends) if end <= one.start), len(ends))
            stage = plan.stage_of(rank)[0].index
            row = rank * _ROWS_A_WORKER + (1 if receives else _SENDS) + min(lane, _SENDS - 2)
            if lane == len(ends):
                ends.append(0.0)
                yield _name(stage, row, "thread_name", f"worker {rank} {'receives' if receives else 'sends'}")
            ends[lane] = one.end
            yield {
                "ph": "X",
                "pid": stage,
                "tid": row,
                "name": f"{one.kind} {one.number}",
                "cat": "receive" if receives else "send",
                "ts": (one.start - start) * _US,
                "dur": (one.end - one.start) * _US,
                "args": {
                    "bytes": one.bytes,
                    **({"from worker": one.source} if receives else {"to worker": one.target}),
                },
            }


def _name(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
