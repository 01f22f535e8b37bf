"""Writes one worker's parts of a run's checkpoints, and removes those that are too old."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from pd_train.checkpoint.part import FOLDER, Position, position_of, write_part
from pd_train.routing import Place
from pd_train.shard import Shard

__all__ = ["Keeper"]

log = logging.getLogger(__name__)


class Keeper:
    """One worker's side.

    Args:
        run_dir: of the run, on this host.
        run: marks this start of the run.
        place: of the worker.
        state: gives the stage's parameters and buffers by name.
        shard: what the worker's optimizer keeps.
        sent: gives bytes sent since the start of the run, in all and while training.
        keep: old checkpoints to keep besides the newest; None on the workers of a host that leave it to another one.
    """

    def __init__(
        self,
        run_dir: Path,
        run: str,
        place: Place,
        state: Callable[[], Mapping[str, Tensor]],
        shard: Shard,
        sent: Callable[[], tuple[int, int]],
        keep: int | None,
    ) -> None:
        self._run_dir = run_dir
        self._run = run
        self._place = place
        self._state = state
        self._shard = shard
        self._sent = sent
        self._keep = keep

    def save(self, position: Position, progress: object) -> None:
        """Write this worker's part.

        Raises:
            UserError: it cannot be written.
        """
        place = self._place
        sent, training = self._sent()
        record = {
            "run": self._run,
            "epoch": position.epoch,
            "minibatch": position.minibatch,
            "stage": place.stage.index,
            "replica": place.replica,
            "rank": place.rank,
            "written": time.time(),
            "sent_bytes": sent,
            "training_bytes": training,
        }
        replica = f"-replica-{place.replica}" if place.stage.replicas > 1 else ""
        name = f"stage-{place.stage.index}{replica}"
        path = write_part(self._run_dir, record, name, self._state(), self._shard.slices(), progress)
        log.info("wrote %s", path)

    def prune(self, whole: Sequence[Position]) -> None:
        """Remove what is older than the old checkpoints to keep.

        Args:
            whole: positions of the checkpoints that all workers have written.
        """
        if self._keep is None:
            return
        # Without any old one to keep, the newest whole one stays until the one that is being written is whole.
        count = max(1, self._keep)
        kept = sorted(whole, reverse=True)[:count]
        if len(kept) < count:
            return
        for folder in (self._run_dir / FOLDER).glob("epoch-*"):
            position = position_of(folder.name)
            if position is not None and position < kept[-1]:
                # What cannot be removed takes room and does no harm.
                shutil.rmtree(folder, ignore_errors=True)
