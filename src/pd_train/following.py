"""What every worker but rank 0 does for the run as a whole: it follows what rank 0 announces, and parts with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pd_train.checkpoint.keeper import Keeper
from pd_train.checkpoint.part import Position
from pd_train.compute import StageRunner, WorkerStatistics
from pd_train.inbox import Inbox
from pd_train.segment import Segment
from pd_train.transport import Transport
from pd_train.wire import Message

__all__ = ["follow", "part_with"]


def follow(transport: Transport, inbox: Inbox, runner: StageRunner, keeper: Keeper | None) -> None:
    """Run the segments and write the checkpoints that rank 0 announces, until there are no more."""
    number = 0
    while True:
        body: dict[str, Any] | None = inbox.wait_for("segment", number, 0, "the next segment from worker 0")
        if body is None:
            return
        if "save" in body:
            assert keeper is not None
            keeper.save(Position(*body["save"]), None)
            keeper.prune([Position(*one) for one in body["whole"]])
            transport.send(0, Message("saved", transport.rank, 0, number, body["save"]))
        else:
            runner.run(Segment(**body))
        number += 1


def part_with(transport: Transport, inbox: Inbox, part: dict[str, Tensor], statistics: WorkerStatistics) -> None:
    """Hand rank 0 this worker's part of the trained model, and wait until it has written all of it."""
    # The others may leave as soon as rank 0 has told them; only rank 0 is still needed.
    inbox.needed_peers = {0}
    transport.send(0, Message("part", transport.rank, 0, transport.rank, (part, tuple(statistics))))
    inbox.wait_for("goodbye", 0, 0, "worker 0 to write the trained model")
    transport.send(0, Message("bye", transport.rank, 0, transport.rank))
