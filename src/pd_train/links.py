"""A worker's links within a segment: activations from the stage before, answers from the stage after, its replicas."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pd_train.inbox import Inbox
from pd_train.routing import Place, describe
from pd_train.transport import Transport
from pd_train.wire import Message

__all__ = ["Links"]


class Links:
    """Sends to and waits for the workers that the plan puts around this one.

    Args:
        place: of the worker.
        transport, inbox: the way to other workers.
    """

    def __init__(self, place: Place, transport: Transport, inbox: Inbox) -> None:
        self.place = place
        self.inbox = inbox
        self._transport = transport

    @property
    def sent_bytes(self) -> int:
        """Payload sent so far, of all kinds."""
        return sum(self._transport.sent_bytes.values())

    @property
    def refused(self) -> int:
        """Messages that were of no use."""
        return self._transport.refused

    def receive_forward(self, segment: int, minibatch: int) -> Any:
        """What crossed the cut before this stage."""
        before = self.place.before
        assert before is not None
        what = f"minibatch {minibatch} from {describe(before, minibatch % before.replicas)}"
        return self.inbox.wait_for("forward", segment, minibatch, what)

    def send_forward(self, segment: int, minibatch: int, body: object) -> None:
        """Send what crosses the cut after this stage."""
        self.to_rank(self.place.target(minibatch), "forward", segment, minibatch, body)

    def receive_answer(self, segment: int, minibatch: int) -> list[Tensor | None] | None:
        """The gradients that the next stage sends back; None at the last stage, and in validation."""
        after = self.place.after
        if after is None:
            return None
        what = f"the answer to minibatch {minibatch} from {describe(after, minibatch % after.replicas)}"
        gradients: list[Tensor | None] | None = self.inbox.wait_for("backward", segment, minibatch, what)
        return gradients

    def send_answer(self, segment: int, minibatch: int, gradients: list[Tensor | None] | None) -> None:
        """Answer the stage before, if there is one: once for every minibatch, with or without gradients."""
        if self.place.before is not None:
            self.to_rank(self.place.source(minibatch), "backward", segment, minibatch, gradients)

    def to_replica(self, segment: int, replica: int, kind: str, index: int, body: object) -> None:
        """A message to a replica of the same stage, or to this one."""
        self.to_rank(self.place.stage.workers[replica], kind, segment, index, body)

    def to_rank(self, rank: int, kind: str, segment: int, index: int, body: object) -> None:
        """A message to any worker."""
        self._transport.send(rank, Message(kind, self.place.rank, segment, index, body))

    def exchange_with_replicas(self, segment: int, kind: str, body: object) -> list[Any]:
        """What each replica of the stage says, this one included, in replica order."""
        replicas = range(self.place.stage.replicas)
        for replica in replicas:
            self.to_replica(segment, replica, kind, self.place.replica, body)
        return [
            self.inbox.wait_for(kind, segment, replica, f"{kind} of {describe(self.place.stage, replica)}")
            for replica in replicas
        ]
