"""A simulated run as a Chrome trace, for ui.perfetto.dev or chrome://tracing (the Trace Event Format; times in us)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pd_plan.simulator import Transfer
from pd_plan.timeline import Film

__all__ = ["chrome_trace"]

_US_PER_MS = 1000


def chrome_trace(film: Film) -> str:
    """One process a stage; in it a row of passes for each worker, and below it what the worker sends."""
    events = [*_names(film), *_passes(film), *_transfers(film)]
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"title": film.title}, "traceEvents": events}) + "\n"


def _names(film: Film) -> Iterator[dict[str, Any]]:
    for stage, name in enumerate(film.stages):
        yield {"ph": "M", "pid": stage, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": stage, "name": "process_sort_index", "args": {"sort_index": stage}}
    for worker, (stage, replica) in enumerate(film.workers):
        yield _row_name(stage, worker, f"worker {worker} (replica {replica})", 2 * worker)
    for (source, target), row in _rows_of_transfers(film).items():
        to = "" if target is None else f" to worker {target}"
        yield _row_name(film.workers[source][0], row, f"worker {source} sends{to}", 2 * source + 1)


def _row_name(stage: int, row: int, name: str, place: int) -> dict[str, Any]:
    return {"ph": "M", "pid": stage, "tid": row, "name": "thread_name", "args": {"name": name, "sort_index": place}}


def _passes(film: Film) -> Iterator[dict[str, Any]]:
    for one in film.passes:
        yield {
            "ph": "X",
            "pid": one.stage,
            "tid": one.worker,
            "name": str(one.item),
            "cat": "forward" if one.item.forward else "backward",
            "ts": one.start_ms * _US_PER_MS,
            "dur": (one.end_ms - one.start_ms) * _US_PER_MS,
            "args": {"minibatch": one.item.minibatch, "round": one.item.round},
        }


def _transfers(film: Film) -> Iterator[dict[str, Any]]:
    rows = _rows_of_transfers(film)
    for one in film.transfers:
        yield {
            "ph": "X",
            "pid": film.workers[one.source][0],
            "tid": rows[_link(film, one)],
            "name": f"{one.kind} {one.number}",
            "cat": one.kind,
            "ts": one.start_ms * _US_PER_MS,
            "dur": (one.end_ms - one.start_ms) * _US_PER_MS,
            "args": {"number": one.number, "part": one.part, "to worker": one.target},
        }


def _link(film: Film, transfer: Transfer) -> tuple[int, int | None]:
    """What carries one transfer at a time: a worker's card, or its link to another worker."""
    return transfer.source, None if film.links == "card" else transfer.target


def _rows_of_transfers(film: Film) -> dict[tuple[int, int | None], int]:
    links = sorted({_link(film, one) for one in film.transfers}, key=lambda link: (link[0], link[1] or 0))
    return {link: len(film.workers) + index for index, link in enumerate(links)}
