"""The compute loop of one worker: runs its stage's part of a segment in the order of 1F1B.

    for each work item of pd_format.schedule.work_order:
        F: wait for the activations and for the weight version; run; send what crosses the cut
        B: wait for the gradients, and for the version that must be whole; run, and meanwhile hand the parameters'
           gradients to the shards and take over what has become of them; answer upstream

Every B is answered upstream by one message, also without a gradient in it: that keeps `in_flight` a bound. Validation
runs the same order with empty backward passes.
"""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from pd_format.schedule import WorkItem, rounds_of, work_order
from pd_format.versions import StageVersions
from pd_train.course import MinibatchKey
from pd_train.engine import Score, StageEngine
from pd_train.links import Links
from pd_train.loss_scale import LossScale
from pd_train.pulse import PULSE_EVERY_S, Pulse
from pd_train.reading import Source
from pd_train.recorder import Recorder
from pd_train.seeding import minibatch_seed
from pd_train.segment import Segment
from pd_train.server import SegmentSize, Server
from pd_train.timing import Doing, Phase, WorkerTiming
from pd_train.weights import ParameterSets
from pd_train.wire import Message

__all__ = ["DivergedError", "StageRunner", "WorkerStatistics"]


class DivergedError(Exception):
    """The loss of a minibatch is not a finite number."""


class WorkerStatistics(NamedTuple):
    """What each worker tells of its run at the end."""

    sent_bytes: int
    training_bytes: int
    """Of these, while it trained."""
    staleness: dict[int, int]
    """See `pd_train.server.Server`."""
    peak_bytes: int | None
    """Memory held at the fullest; None where nobody counted."""
    refused: int
    """Messages that were of no use."""
    skipped_files: list[str]
    """See `pd_train.reading.Source`."""


class StageRunner:
    """One worker's stage.

    Args:
        links: to the workers around this one.
        versions: which weight version each pass uses.
        engine, sets, server: the stage's computation, its weight versions, its parameter server.
        buffers: the stage's buffers, in a fixed order.
        source: of the minibatches; None on workers of later stages.
        rate_scale: what the segment's learning rate is multiplied with at this stage.
        seed: of the run.
        peak_bytes: tells how much memory the worker has held at its fullest.
        loss_scale: of float16, else None.
        recorder: of this worker's time.
        to_device: brings what has arrived to where the stage computes; None where it is there already.
    """

    def __init__(
        self,
        links: Links,
        versions: StageVersions,
        engine: StageEngine,
        sets: ParameterSets,
        server: Server,
        buffers: list[Tensor],
        source: Source | None,
        rate_scale: float,
        seed: int,
        recorder: Recorder,
        peak_bytes: Callable[[], int | None] = lambda: None,
        loss_scale: LossScale | None = None,
        to_device: Callable[[Any], Any] | None = None,
    ) -> None:
        self._links = links
        self._inbox = links.inbox
        self._versions = versions
        self._engine = engine
        self._sets = sets
        self._server = server
        self._buffers = buffers
        self._source = source
        self._rate_scale = rate_scale
        self._seed = seed
        self._recorder = recorder
        self._to_device = to_device or (lambda body: body)
        if to_device is not None:
            self._inbox.bring = self._brought
        self._next_pulse = 0.0
        self._long = set(Doing)  # As long as nobody knows.
        self.tell_pulse: Callable[[Pulse], None] = lambda pulse: None
        """Is told about once a second how this worker does."""
        self.tell_timing: Callable[[WorkerTiming, array[float]], None] = lambda timing, rows: None
        """Is told after each training segment where its time went."""
        self._peak_bytes = peak_bytes
        self._loss_scale = loss_scale
        self._stage = links.place.stage
        self._is_last = links.place.after is None
        self._forwards = self._backwards = range(0)
        self._sent_before = self._training_bytes = 0
        self._at: tuple[Segment | None, WorkItem | None] = None, None
        sets.is_wanted = lambda version: versions.is_wanted(version, self._forwards, self._backwards)
        self._inbox.on_idle = self._advance
        self._inbox.on_arrival = recorder.arrived
        self._inbox.on_tick = self._tick
        if self._stage.replicas > 1:
            # After the server, which is told of a gradient first.
            engine.watch_gradients(lambda number, gradient: self._inbox.poll())
        self._inbox.handle("gradient", self._take_gradients)
        self._inbox.handle("parameters", self._take_parameters)

    def run(self, segment: Segment) -> None:
        """Run this worker's part of a segment and drain.

        Raises:
            DivergedError: the loss became NaN or infinite, or the gradients did at every loss scale.
        """
        replica, replicas = self._links.place.replica, self._stage.replicas
        sent_before = self._links.sent_bytes
        if self._source is not None:
            self._source.expect(segment.training, segment.epoch, segment.first, segment.minibatches)
        forward, backward = self._validate_forward, self._acknowledge
        if segment.training:
            forward, backward = self._train_forward, self._train_backward
            # Passes still to come: a version that none of them uses need not be kept.
            self._forwards = self._backwards = range(replica, segment.minibatches, replicas)
            size = SegmentSize(segment.minibatches, segment.samples, segment.last_samples)
            self._server.start_segment(segment.number, size, segment.rate * self._rate_scale)
            self._recorder.start_segment(segment.first_of_run)
        self._at = segment, None
        for item in work_order(replica, replicas, self._stage.in_flight, segment.minibatches):
            self._at = segment, item
            (forward if item.forward else backward)(segment, item)
            self._tick()
        self._at = segment, None
        if segment.training:
            self._drain(segment)
            self._recorder.enter(Phase.OUTSIDE)
            self.tell_timing(*self._recorder.take())
            self._training_bytes += self._links.sent_bytes - sent_before

    def count_earlier(self, sent_bytes: int, training_bytes: int) -> None:
        """Add what was sent before this start of the run."""
        self._sent_before += sent_bytes
        self._training_bytes += training_bytes

    def statistics(self) -> WorkerStatistics:
        """Of the run so far."""
        return WorkerStatistics(
            self._sent_before + self._links.sent_bytes,
            self._training_bytes,
            dict(self._server.staleness),
            self._peak_bytes(),
            self._links.refused,
            [] if self._source is None else self._source.skipped,
        )

    def standing(self) -> list[str]:
        """Where it stands, for people; may be called from any thread."""
        segment, item = self._at
        if segment is None:
            return ["schedule: no segment yet", self._sets.standing()]
        what = "training" if segment.training else "validation"
        span = f"minibatches {segment.first} to {segment.first + segment.minibatches - 1}"
        place = "at its end" if item is None else f"{'F' if item.forward else 'B'}({item.minibatch})"
        return [
            f"schedule: segment {segment.number}, {what} of epoch {segment.epoch}, {span}: {place}",
            self._sets.standing(),
        ]

    def _train_forward(self, segment: Segment, item: WorkItem) -> None:
        b = item.minibatch
        version = self._versions.forward(b)
        values, targets, tag = self._next_input(segment, b)
        due = self._versions.first_stage(b)
        if tag is not None and due is not None and tag != due:
            raise RuntimeError(f"minibatch {b} met version {tag} at stage 0, where version {due} was due")
        self._await_version(version)
        self._server.before_forward()
        index = self._sets.set_of(version)
        if not self._versions.mode.is_naive:
            self._sets.acquire(version)
        self._forwards = self._forwards[1:]
        seed = minibatch_seed(self._seed, segment.epoch, segment.first + b, self._stage.index)
        if self._is_last:
            with self._pass(Doing.FORWARD, b, version):
                score = self._engine.forward_loss(b, index, values, targets, seed)
            self._report(segment, b, score)
        else:
            with self._pass(Doing.FORWARD, b, version):
                sent = self._engine.forward(b, index, values, seed)
            self._links.send_forward(segment.number, b, (sent, targets, version if tag is None else tag))
        if not self._forwards:
            self._recorder.enter(Phase.DRAIN)

    def _train_backward(self, segment: Segment, item: WorkItem) -> None:
        b = item.minibatch
        steady = bool(self._forwards)
        with self._recorder.doing(Doing.WAIT_GRADIENTS, b):
            gradients = self._links.receive_answer(segment.number, b)
        if steady and b < self._stage.replicas:
            # Only now: the first answer takes as long as the pipeline takes to fill.
            self._recorder.enter(Phase.STEADY)
        version = self._versions.backward(b)
        self._await_version(max(self._versions.complete_before_backward(b), version))
        index = self._sets.set_of(version)
        self._server.start_backward(b)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        with self._pass(Doing.BACKWARD, b, version):
            received = self._engine.backward(b, index, gradients, scale)
        self._recorder.passed(steady)
        self._links.send_answer(segment.number, b, received)
        self._server.finish_backward(self._engine.take_parameter_gradients(index))
        if not self._versions.mode.is_naive:
            self._sets.release(self._versions.forward(b))
        self._backwards = self._backwards[1:]
        self._inbox.poll()

    def _validate_forward(self, segment: Segment, item: WorkItem) -> None:
        values, targets, _ = self._next_input(segment, item.minibatch)
        index = self._sets.set_of(self._sets.complete)
        with self._pass(Doing.FORWARD, item.minibatch):
            result = self._engine.evaluate(index, values, targets if self._is_last else None)
        if isinstance(result, Score):
            self._report(segment, item.minibatch, result)
        else:
            self._links.send_forward(segment.number, item.minibatch, (result, targets, None))

    def _acknowledge(self, segment: Segment, item: WorkItem) -> None:
        with self._recorder.doing(Doing.WAIT_GRADIENTS, item.minibatch):
            self._links.receive_answer(segment.number, item.minibatch)
        self._links.send_answer(segment.number, item.minibatch, None)

    def _next_input(self, segment: Segment, minibatch: int) -> tuple[tuple[Any, ...], Any, int | None]:
        """A minibatch's values and targets, and the version that it met at stage 0 (None there)."""
        if self._source is not None:
            with self._pass(Doing.WAIT_DATA, minibatch):
                loaded = self._source.load(MinibatchKey(segment.training, segment.epoch, segment.first + minibatch))
                # Of no use on the device but to the last stage, targets go on to it from the host.
                targets = self._to_device(loaded.targets) if self._is_last else loaded.targets
                return self._to_device(loaded.inputs), targets, None
        with self._recorder.doing(Doing.WAIT_ACTIVATIONS, minibatch):
            values, targets, tag = self._links.receive_forward(segment.number, minibatch)
        return values, targets, tag

    def _brought(self, message: Message) -> Message:
        """A message about a minibatch, its tensors on their way to the device before they are due."""
        if message.kind == "forward":
            values, targets, tag = message.body
            targets = self._to_device(targets) if self._is_last else targets
            return replace(message, body=(self._to_device(values), targets, tag))
        return replace(message, body=self._to_device(message.body)) if message.kind == "backward" else message

    def _report(self, segment: Segment, minibatch: int, score: Score) -> None:
        if score.loss is not None and not math.isfinite(score.loss):
            which, advice = "", "training stopped. Try a smaller --lr."
            if segment.training and segment.first_of_run + minibatch == 0:
                advice = "training stopped. No update was made yet: look at data, weights and loss."
            elif not segment.training:
                which = "validation "
                advice = "stopped. Try a smaller --lr if it was trained, else look at the weights and the data."
            raise DivergedError(
                f"the loss of {which}minibatch {segment.first + minibatch} of epoch {segment.epoch + 1} is "
                f"{score.loss}; {advice}"
            )
        self._links.to_rank(0, "score", segment.number, minibatch, tuple(score))

    def _await_version(self, version: int) -> None:
        with self._recorder.doing(Doing.WAIT_SYNC, version=version):
            self._inbox.wait_until(
                lambda: self._sets.is_ready(version),
                lambda: f"update {version} of its stage, which takes gradients of all replicas",
            )

    def _advance(self) -> None:
        with self._recorder.doing(Doing.UPDATE):
            self._server.advance()

    @contextlib.contextmanager
    def _pass(self, doing: Doing, minibatch: int, version: int = -1) -> Iterator[None]:
        """Something in which nothing is told: where such a thing took long before, that it begins is told."""
        with self._recorder.doing(doing, minibatch, version):
            if doing in self._long:
                self._tell_pulse()
            start = time.monotonic()
            yield
            (self._long.add if time.monotonic() - start >= PULSE_EVERY_S else self._long.discard)(doing)

    def _tick(self) -> None:
        """Tell how it goes, if it is time."""
        if time.monotonic() >= self._next_pulse:
            self._tell_pulse()

    def _tell_pulse(self) -> None:
        self._next_pulse = time.monotonic() + PULSE_EVERY_S
        self.tell_pulse(self._recorder.pulse(self._links.sent_bytes, self._sets.held, self._inbox.awaited()))

    def _take_gradients(self, message: Message) -> None:
        replica = message.sender - self._stage.workers[0]
        body = self._to_device(message.body)
        self._server.take_gradients(message.segment, message.index, replica, body)

    def _take_parameters(self, message: Message) -> None:
        self._server.take_parameters(message.segment, message.index, self._to_device(message.body))

    def _drain(self, segment: Segment) -> None:
        """All updates of the segment arrive; then the replicas agree on their buffers (design, section 4)."""
        with self._recorder.doing(Doing.WAIT_SYNC):
            self._inbox.wait_until(self._server.is_drained, lambda: "the segment's last updates of its stage")
        if self._loss_scale is not None:
            self._settle(self._loss_scale, segment)
        replicas = self._stage.replicas
        if replicas == 1 or not self._buffers:
            return
        own = [buffer.detach().cpu().clone() for buffer in self._buffers]
        everyone = self._links.exchange_with_replicas(segment.number, "buffers", own)
        trained = [k for k in range(replicas) if rounds_of(k, replicas, segment.minibatches)]
        for position, buffer in enumerate(self._buffers):
            value = everyone[0][position]
            if buffer.is_floating_point():
                for replica in trained[1:]:
                    value = value + everyone[replica][position]
                value = value / len(trained)
            buffer.copy_(value)

    def _settle(self, loss_scale: LossScale, segment: Segment) -> None:
        loss_scale.settle(segment.number)
        if loss_scale.is_exhausted:
            raise DivergedError(
                f"the gradients of epoch {segment.epoch + 1} are not finite however small the loss scale (it is "
                f"{loss_scale.value:g}); training stopped. Try a smaller --lr, or --precision bf16."
            )
