"""How the workers of a starting run agree on a checkpoint and give each other what it holds.

    every worker   positions in my folder, what I need    ->  rank 0
    rank 0         read this position                     ->  every worker      newest first, until one is complete
    every worker   the parts that I have found whole      ->  rank 0
    rank 0         take it, from these                    ->  every worker
    every worker   these names, these ranges              ->  the worker that can read the part, which sends them

Workers of one host share its folder and the work of reading it. A damaged part is left out with a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pd_train.checkpoint.choice import Chosen, Needs, Source, choose
from pd_train.checkpoint.part import (
    DamagedPart,
    Part,
    PartRecord,
    Position,
    Range,
    ShardSlice,
    find_parts,
    load_part,
    position_of,
)
from pd_train.links import Links
from pd_train.shard import part_of
from pd_train.wire import Message, WireError

__all__ = ["Exchange", "Restored", "Share"]


class Share(NamedTuple):
    """Which of a host's parts this worker reads."""

    number: int
    """Of the worker on its host."""
    workers: int
    """Of the host's workers."""


@dataclass(frozen=True)
class Restored:
    """What one worker goes on with."""

    position: Position
    state: dict[str, Tensor]
    slices: list[ShardSlice]
    progress: Any
    """See `pd_train.checkpoint.progress.RunProgress.plain`."""
    records: tuple[PartRecord, ...]
    """Of all parts of the checkpoint."""


class Exchange:
    """One worker's side.

    Args:
        links: to all workers.
        workers: of the plan.
        run_dir: that holds the checkpoints, on this host.
        share: of the host's parts.
        needs: of this worker.
        notice: is told of damaged parts.
    """

    def __init__(
        self,
        links: Links,
        workers: int,
        run_dir: Path,
        share: Share,
        needs: Needs,
        notice: Callable[[str], None],
    ) -> None:
        self._links = links
        self._inbox = links.inbox
        self._rank = links.place.rank
        self._workers = workers
        self._needs = needs
        self._notice = notice
        self._paths: dict[Position, list[Path]] = {}
        self._parts: dict[tuple[Position, int, int], Part] = {}
        paths = find_parts(run_dir)
        names = sorted({path.stem for path in paths})
        for path in paths:
            position = position_of(path.parent.name)
            if position is not None and names.index(path.stem) % share.workers == share.number:
                self._paths.setdefault(position, []).append(path)
        self._inbox.handle("want", self._hand_out)

    def run(self) -> Restored | None:
        """Agree and exchange; None where no checkpoint is complete.

        Returns once this worker has all it needs. Others are served from then on whenever it reads its messages.
        """
        needs = (tuple(self._needs.state), self._needs.ranges, self._needs.progress)
        self._links.to_rank(0, "kept", 0, self._rank, (tuple(self._paths), needs))
        chosen = self._lead() if self._rank == 0 else self._follow()
        return None if chosen is None else self._take(chosen)

    def _lead(self) -> Chosen | None:
        kept = [self._inbox.wait_for("kept", 0, rank, _of(rank)) for rank in range(self._workers)]
        needs = [
            Needs(frozenset(state), tuple(Range(*each) for each in ranges), progress)
            for _, (state, ranges, progress) in kept
        ]
        positions = {Position(*position) for held, _ in kept for position in held}
        turn = 0
        for turn, position in enumerate(sorted(positions, reverse=True)):
            self._tell_others(turn, ("read", tuple(position)))
            readable = {0: self._read(position)}
            for rank in range(1, self._workers):
                found = self._inbox.wait_for("readable", turn, rank, _of(rank))
                readable[rank] = [PartRecord.model_validate(record) for record in found]
            chosen = choose(readable, needs)
            if chosen is not None:
                sources = tuple((source.rank, source.record.model_dump()) for source in chosen.sources)
                self._tell_others(turn + 1, ("take", sources))
                return chosen
            self._notice(f"checkpoint {position.folder} is not whole, so an older one is looked for")
        self._tell_others(turn + 1 if positions else 0, None)
        return None

    def _follow(self) -> Chosen | None:
        turn = 0
        while True:
            order = self._inbox.wait_for("order", turn, 0, "worker 0 to choose a checkpoint")
            if order is None:
                return None
            what, content = order
            if what == "take":
                sources = tuple(Source(rank, PartRecord.model_validate(record)) for rank, record in content)
                return Chosen(sources[0].record.position, sources)
            records = self._read(Position(*content))
            self._links.to_rank(0, "readable", turn, self._rank, [record.model_dump() for record in records])
            turn += 1

    def _tell_others(self, turn: int, order: object) -> None:
        for rank in range(1, self._workers):
            self._links.to_rank(rank, "order", turn, 0, order)

    def _read(self, position: Position) -> list[PartRecord]:
        """Check this worker's share of the parts of a position."""
        for path in self._paths.get(position, ()):
            try:
                part = load_part(path)
            except DamagedPart as error:
                self._notice(f"checkpoint {position.folder} has a damaged part: {error}")
            else:
                self._parts[position, part.record.stage, part.record.replica] = part
        return [part.record for (found, _, _), part in self._parts.items() if found == position]

    def _take(self, chosen: Chosen) -> Restored:
        """Ask for all that this worker needs, of itself too, and wait for it."""
        # What this worker can read itself is not sent to it by another.
        sources = sorted(enumerate(chosen.sources), key=lambda item: item[1].rank != self._rank)
        missing = set(self._needs.state)
        asked: list[int] = []
        for number, source in sources:
            record = source.record
            names = tuple(name for name in record.state if name in missing)
            missing -= set(names)
            held = [ShardSlice(Range(*each), {}) for each in record.ranges]
            ranges = tuple(
                tuple(part.range)
                for wanted in self._needs.ranges
                for each in held
                if (part := part_of(each, wanted)) is not None
            )
            progress = self._needs.progress and record.has_progress
            if names or ranges or progress:
                place = (tuple(chosen.position), record.stage, record.replica)
                self._links.to_rank(source.rank, "want", 0, number, (place, names, ranges, progress))
                asked.append(number)
        restored = Restored(chosen.position, {}, [], None, tuple(source.record for source in chosen.sources))
        progress_found: Any = None
        for number in asked:
            what = f"a part of checkpoint {chosen.position.folder} from worker {chosen.sources[number].rank}"
            state, slices, progress = self._inbox.wait_for("restored", 0, number, what)
            restored.state.update(state)
            restored.slices.extend(ShardSlice(Range(*each), kept) for each, kept in slices)
            progress_found = progress if progress is not None else progress_found
        return Restored(restored.position, restored.state, restored.slices, progress_found, restored.records)

    def _hand_out(self, message: Message) -> None:
        (position, stage, replica), names, ranges, progress = message.body
        part = self._parts.get((Position(*position), stage, replica))
        if part is None or not part.state.keys() >= set(names):
            raise WireError("asks for something that was not found here")
        slices = tuple(
            (tuple(found.range), found.state)
            for wanted in ranges
            for held in part.shard
            if (found := part_of(held, Range(*wanted))) is not None
        )
        body = ({name: part.state[name] for name in names}, slices, part.progress if progress else None)
        self._links.to_rank(message.sender, "restored", 0, message.index, body)


def _of(rank: int) -> str:
    return f"worker {rank} to say which checkpoints it can read"
