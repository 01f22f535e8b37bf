"""The compute loop of one worker: runs its stage's part of a segment in the order of 1F1B.

    for each work item of pd_format.schedule.work_order:
        F: wait for the weight version and for the activations; run; send what crosses the cut
        B: wait for the gradients, and for the rounds that must be complete; run; answer upstream; hand the parameters'
           gradients to the shards

Every B is answered upstream by one message, also without a gradient in it: that keeps `in_flight` a bound. Validation
runs the same order with empty backward passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pd_format.schedule import WorkItem, rounds_of, work_order
from pd_format.versions import lag_of, stash_version
from pd_train.data import Minibatch
from pd_train.engine import Score, StageEngine
from pd_train.inbox import Inbox
from pd_train.options import RunOptions
from pd_train.routing import Place, describe
from pd_train.seeding import minibatch_seed
from pd_train.server import Contribution, Send, ShardedServer
from pd_train.transport import Transport
from pd_train.weights import ParameterSets
from pd_train.wire import Message

__all__ = ["DivergedError", "Segment", "StageRunner", "replica_sender"]


class DivergedError(Exception):
    """The loss of a minibatch is not a finite number."""


class Loader(Protocol):
    """Where stage 0 takes its minibatches from."""

    def load(self, epoch: int, minibatch: int) -> Minibatch: ...


@dataclass(frozen=True)
class Segment:
    """What runs between two drains of the pipeline; rank 0 announces it to every worker."""

    number: int
    """Of the run, from 0."""
    training: bool
    epoch: int
    first: int
    """The segment's minibatch 0 is this one of the epoch."""
    minibatches: int
    rate: float
    """The epoch's learning rate, before the scaling of a stage."""


def replica_sender(transport: Transport, place: Place) -> Send:
    """How a worker's messages reach the other replicas of its stage, and itself."""

    def send(segment: int, replica: int, kind: str, index: int, body: object) -> None:
        transport.send(place.stage.workers[replica], Message(kind, place.rank, segment, index, body))

    return send


class StageRunner:
    """One worker's stage.

    Args:
        place: of the worker.
        options: of the run.
        engine, sets, server: the stage's computation, its weight versions, its parameter server.
        buffers: the stage's buffers, in a fixed order.
        transport, inbox: the way to other workers.
        loaders: training and validation minibatches; None on workers of later stages.
        rate_scale: what the segment's learning rate is multiplied with at this stage.
    """

    def __init__(
        self,
        place: Place,
        options: RunOptions,
        engine: StageEngine,
        sets: ParameterSets,
        server: ShardedServer,
        buffers: list[Tensor],
        transport: Transport,
        inbox: Inbox,
        loaders: tuple[Loader, Loader] | None,
        rate_scale: float,
    ) -> None:
        self._place = place
        self._options = options
        self._engine = engine
        self._sets = sets
        self._server = server
        self._buffers = buffers
        self._transport = transport
        self._inbox = inbox
        self._loaders = loaders
        self._rate_scale = rate_scale
        self._replicas = place.stage.replicas
        self._in_flight = place.stage.in_flight
        self._lag = lag_of(self._replicas, options.sync)
        self._samples: dict[int, int] = {}
        self._send_to_replica = replica_sender(transport, place)
        self.training_bytes = 0
        """Payload that this worker sent while it trained."""
        inbox.on_idle = server.advance
        inbox.handle("gradient", self._take_gradients)
        inbox.handle("parameters", self._take_parameters)

    def run(self, segment: Segment) -> None:
        """Run this worker's part of a segment and drain.

        Raises:
            DivergedError: the loss became NaN or infinite.
        """
        sent_before = sum(self._transport.sent_bytes.values())
        if segment.training:
            self._sets.start_segment()
            self._server.start_segment(segment.number, segment.minibatches, segment.rate * self._rate_scale)
            self._want_from_round(0, segment)
        forward = self._train_forward if segment.training else self._validate_forward
        backward = self._train_backward if segment.training else self._acknowledge
        for item in work_order(self._place.replica, self._replicas, self._in_flight, segment.minibatches):
            (forward if item.forward else backward)(segment, item)
        if segment.training:
            self._drain(segment)
            self.training_bytes += sum(self._transport.sent_bytes.values()) - sent_before

    def _train_forward(self, segment: Segment, item: WorkItem) -> None:
        version = stash_version(item.round, self._in_flight, self._lag)
        values, targets, samples = self._next_input(segment, item)
        self._await_version(version)
        seed = minibatch_seed(
            self._options.seed, segment.epoch, segment.first + item.minibatch, self._place.stage.index
        )
        index = self._sets.acquire(version)
        self._want_from_round(item.round + 1, segment)
        self._samples[item.minibatch] = samples
        if self._place.after is None:
            score = self._engine.forward_loss(item.minibatch, index, values, targets, seed)
            self._report(segment, item.minibatch, score)
        else:
            sent = self._engine.forward(item.minibatch, index, values, seed)
            self._send_on(segment, item, (sent, targets, samples))

    def _train_backward(self, segment: Segment, item: WorkItem) -> None:
        gradients = self._answer(segment, item)
        self._await_version(item.round - self._lag)
        version = stash_version(item.round, self._in_flight, self._lag)
        self._server.start_backward(item.round, self._samples.pop(item.minibatch))
        received = self._engine.backward(item.minibatch, gradients)
        self._send_back(segment, item, received)
        self._server.finish_backward(self._engine.take_parameter_gradients(self._sets.set_of(version)))
        self._sets.release(version)
        self._inbox.poll()

    def _want_from_round(self, round: int, segment: Segment) -> None:
        """This round's forward pass is the next one, if there is one."""
        more = round < rounds_of(self._place.replica, self._replicas, segment.minibatches)
        self._sets.want_from(stash_version(round, self._in_flight, self._lag) if more else self._server.rounds)

    def _validate_forward(self, segment: Segment, item: WorkItem) -> None:
        values, targets, samples = self._next_input(segment, item)
        index = self._sets.set_of(self._sets.complete)
        last = self._place.after is None
        result = self._engine.evaluate(index, values, targets if last else None)
        if isinstance(result, Score):
            self._report(segment, item.minibatch, result)
        else:
            self._send_on(segment, item, (result, targets, samples))

    def _acknowledge(self, segment: Segment, item: WorkItem) -> None:
        self._answer(segment, item)
        self._send_back(segment, item, None)

    def _next_input(self, segment: Segment, item: WorkItem) -> tuple[tuple[Any, ...], Any, int]:
        if self._loaders is not None:
            loader = self._loaders[0 if segment.training else 1]
            minibatch = loader.load(segment.epoch, segment.first + item.minibatch)
            return minibatch.inputs, minibatch.targets, minibatch.samples
        before = self._place.before
        assert before is not None
        what = f"minibatch {item.minibatch} from {describe(before, item.minibatch % before.replicas)}"
        values, targets, samples = self._inbox.wait_for("forward", segment.number, item.minibatch, what)
        return values, targets, samples

    def _answer(self, segment: Segment, item: WorkItem) -> list[Tensor | None] | None:
        """The gradients that the next stage sends back; None at the last stage."""
        after = self._place.after
        if after is None:
            return None
        what = f"the answer to minibatch {item.minibatch} from {describe(after, item.minibatch % after.replicas)}"
        gradients: list[Tensor | None] | None
        gradients = self._inbox.wait_for("backward", segment.number, item.minibatch, what)
        return gradients

    def _send_on(self, segment: Segment, item: WorkItem, body: object) -> None:
        rank = self._place.target(item.minibatch)
        self._transport.send(rank, Message("forward", self._place.rank, segment.number, item.minibatch, body))

    def _send_back(self, segment: Segment, item: WorkItem, body: object) -> None:
        if self._place.before is not None:
            rank = self._place.source(item.minibatch)
            self._transport.send(rank, Message("backward", self._place.rank, segment.number, item.minibatch, body))

    def _report(self, segment: Segment, minibatch: int, score: Score) -> None:
        if not math.isfinite(score.loss):
            which = "" if segment.training else "validation "
            raise DivergedError(
                f"the loss of {which}minibatch {segment.first + minibatch} of epoch {segment.epoch} is {score.loss}; "
                "training stopped. Try a smaller --lr."
            )
        self._transport.send(0, Message("score", self._place.rank, segment.number, minibatch, tuple(score)))

    def _await_version(self, version: int) -> None:
        self._inbox.wait_until(
            lambda: self._sets.is_ready(version),
            lambda: f"the synchronisation of round {version - 1} with the other replicas of its stage",
        )

    def _replica_name(self, replica: int) -> str:
        return describe(self._place.stage, replica)

    def _take_gradients(self, message: Message) -> None:
        bucket, samples, gradients = message.body
        replica = message.sender - self._place.stage.workers[0]
        self._server.take_gradients(message.segment, message.index, bucket, replica, Contribution(samples, gradients))

    def _take_parameters(self, message: Message) -> None:
        bucket, tensors = message.body
        self._server.take_parameters(message.segment, message.index, bucket, tensors)

    def _drain(self, segment: Segment) -> None:
        """All updates of the segment arrive; then the replicas agree on their buffers (design, section 4)."""
        self._await_version(self._server.rounds)
        if self._replicas == 1 or not self._buffers:
            return
        own = [buffer.detach().cpu().clone() for buffer in self._buffers]
        for replica in range(self._replicas):
            self._send_to_replica(segment.number, replica, "buffers", self._place.replica, own)
        everyone = [
            self._inbox.wait_for("buffers", segment.number, replica, f"buffers of {self._replica_name(replica)}")
            for replica in range(self._replicas)
        ]
        trained = [k for k in range(self._replicas) if rounds_of(k, self._replicas, segment.minibatches)]
        for position, buffer in enumerate(self._buffers):
            value = everyone[0][position]
            if buffer.is_floating_point():
                for replica in trained[1:]:
                    value = value + everyone[replica][position]
                value = value / len(trained)
            buffer.copy_(value)
