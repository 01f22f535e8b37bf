"""Which checkpoint a run goes on from, and who hands out which of its parts: pure, from what the workers can read.

No disk is shared: each worker says which parts it has read whole on its host, and what it needs. The newest
checkpoint whose parts together hold all of that is taken, whatever plan wrote them.

    wrote (2-1)              stage-0-replica-0    stage-0-replica-1    stage-1
    layers                   1 2 3                1 2 3                4 5
    optimizer's ranges       1 2a                 2b 3                 4 5
    needed (1-1)             layers 1 2 with all their ranges;  layers 3 4 5 with all theirs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pd_train.checkpoint.part import PartRecord, Position, Range

__all__ = ["Chosen", "Needs", "Source", "choose"]


class Needs(NamedTuple):
    """What one worker must be given."""

    state: frozenset[str]
    """Names of parameters and buffers."""
    ranges: tuple[Range, ...]
    """Of its optimizer's shard."""
    progress: bool
    """The counters and metrics of the run."""


class Source(NamedTuple):
    """A part, and the worker that hands it out."""

    rank: int
    record: PartRecord


class Chosen(NamedTuple):
    """A checkpoint that holds all that is needed."""

    position: Position
    sources: tuple[Source, ...]


def choose(readable: Mapping[int, Sequence[PartRecord]], needs: Sequence[Needs]) -> Chosen | None:
    """The newest checkpoint that gives every worker what it needs.

    Args:
        readable: by rank, the parts that this worker has found whole.
        needs: of all workers.

    Returns:
        None where there is none.
    """
    starts: dict[tuple[Position, str], list[Source]] = {}
    for rank, records in sorted(readable.items()):
        for record in records:
            sources = starts.setdefault((record.position, record.run), [])
            # Hosts that share a disk find the same part several times.
            if all(_place(record) != _place(source.record) for source in sources):
                sources.append(Source(rank, record))

    def age(item: tuple[tuple[Position, str], list[Source]]) -> tuple[Position, float]:
        (position, _), sources = item
        return position, max(source.record.written for source in sources)

    for (position, _), sources in sorted(starts.items(), key=age, reverse=True):
        records = [source.record for source in sources]
        if all(_covers(records, each) for each in needs):
            return Chosen(position, tuple(sources))
    return None


def _place(record: PartRecord) -> tuple[int, int]:
    return record.stage, record.replica


def _covers(records: Sequence[PartRecord], needs: Needs) -> bool:
    if needs.progress and not any(record.has_progress for record in records):
        return False
    if not needs.state <= {name for record in records for name in record.state}:
        return False
    held: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        for parameter, start, stop in record.ranges:
            held.setdefault(parameter, []).append((start, stop))
    return all(_spans(held.get(each.parameter, []), each.start, each.stop) for each in needs.ranges)


def _spans(held: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether the ranges held leave no gap between start and stop."""
    reached = start
    for first, last in sorted(held):
        if first > reached:
            break
        reached = max(reached, last)
    return reached >= stop
