"""The parameter server without any agreement between replicas (asp): a baseline, for a stage that is the whole plan.

A shard applies each gradient as it arrives, on its own, and sends the new parameters to all. A forward pass takes
the newest that has arrived, slice by slice, and its backward pass keeps that. How many updates a gradient has missed
between being read for and being applied has no bound; it is counted here and reported (design, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pd_format.layers.values import tensors_in
from pd_format.versions import StageVersions
from pd_train.compressed import check_message, unpacked
from pd_train.gradients import GradientBuckets, Gradients, Pieces, WatchGradients
from pd_train.optimizers import MovingOptimizer
from pd_train.options import OptimizerOptions
from pd_train.server import SegmentSize, Send, cut_stage, piece_view
from pd_train.shard import Shard
from pd_train.weights import ParameterSets

__all__ = ["AsynchronousServer"]


class AsynchronousServer:
    """One replica's part; keeps two sets: what its passes compute with, and what shards have made of it since.

    Args:
        sets: two; the first is what passes use.
        versions, watch, names, replica, options, send: as for `ShardedServer`.
    """

    def __init__(
        self,
        sets: ParameterSets,
        versions: StageVersions,
        watch: WatchGradients,
        names: Sequence[str],
        replica: int,
        options: OptimizerOptions,
        send: Send,
    ) -> None:
        self._replica = replica
        self._replicas = versions.replicas
        self._names = names
        self._send = send
        self._working, self._newest = sets.sets
        self._buckets = cut_stage(self._working, self._replicas)
        self._outgoing = GradientBuckets(watch, names, self._buckets, self._replicas > 1, self._leave)
        self._pieces = [
            [piece_view(self._newest[p.parameter].detach(), p, self._replicas) for p in bucket.pieces]
            for bucket in self._buckets
        ]
        own = [bucket.shard == replica for bucket in self._buckets]
        self._of_own = {index: pieces for index, pieces in enumerate(self._pieces) if own[index]}
        self._of_others = {index: pieces for index, pieces in enumerate(self._pieces) if not own[index]}
        self._optimizers = {index: MovingOptimizer(options, pieces) for index, pieces in self._of_own.items()}
        self._segment = -1  # None yet: what arrives early waits for its segment.
        self._minibatches = 0
        self._rate = options.lr
        self._running = 0
        self._versions = [0] * len(self._buckets)
        self._read = list(self._versions)
        self._gradients: list[tuple[int, int, Gradients, int]] = []
        self._parameters: list[tuple[int, int, int, Gradients]] = []
        self.staleness: Counter[int] = Counter()
        """Of every gradient of a bucket that this shard has applied: updates between its being read for and applied."""

    def start_segment(self, number: int, size: SegmentSize, rate: float) -> None:
        self._segment, self._minibatches, self._rate = number, size.minibatches, rate
        self._versions = [0] * len(self._buckets)

    def before_forward(self) -> None:
        self._read = list(self._versions)
        with torch.no_grad():
            for working, newest in zip(self._working, self._newest, strict=True):
                working.copy_(newest)

    def start_backward(self, minibatch: int) -> None:
        self._running = minibatch
        self._outgoing.start(None, last=True)

    def finish_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._outgoing.finish(gradients)

    def take_gradients(self, segment: int, update: int, replica: int, body: tuple[int, Pieces, int]) -> None:
        bucket, found, read = body
        if replica != self._replica:
            check_message(None, bucket, found, self._of_own, is_gradient=True)
        self._gradients.append((segment, bucket, unpacked(None, bucket, found), read))

    def take_parameters(self, segment: int, version: int, body: tuple[int, Pieces]) -> None:
        bucket, found = body
        check_message(None, bucket, found, self._of_others, is_gradient=False)
        self._parameters.append((segment, bucket, version, unpacked(None, bucket, found)))

    def advance(self) -> None:
        gradients, self._gradients = self._gradients, []
        for segment, bucket, parts, read in gradients:
            if segment == self._segment:
                self._apply(bucket, parts, read)
            else:
                self._gradients.append((segment, bucket, parts, read))
        parameters, self._parameters = self._parameters, []
        for segment, bucket, version, tensors in parameters:
            if segment != self._segment:
                self._parameters.append((segment, bucket, version, tensors))
            elif version > self._versions[bucket]:
                self._versions[bucket] = version
                with torch.no_grad():
                    for piece, tensor in zip(self._pieces[bucket], tensors, strict=True):
                        if tensor is not None:
                            piece.copy_(tensor)

    def is_drained(self) -> bool:
        if any(version < self._minibatches for version in self._versions):
            return False
        self.before_forward()
        return True

    def shard(self) -> Shard:
        return Shard(self._buckets, self._optimizers, self._names)

    def held(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.values():
            yield from optimizer.held()
        yield from tensors_in((*self._gradients, *self._parameters))

    def _leave(self, bucket: int, gradients: Gradients) -> None:
        shard = self._buckets[bucket].shard
        body = (bucket, gradients, self._read[bucket])
        if shard == self._replica:
            self.take_gradients(self._segment, self._running, self._replica, body)
        else:
            self._send(self._segment, shard, "gradient", self._running, body)

    def _apply(self, bucket: int, gradients: Gradients, read: int) -> None:
        self.staleness[self._versions[bucket] - read] += 1
        with torch.no_grad():
            self._optimizers[bucket].step(self._pieces[bucket], gradients, self._rate)
        self._versions[bucket] += 1
        # A copy: the next gradient may be applied before this message has left.
        body = (bucket, tuple(piece.clone() for piece in self._pieces[bucket]))
        for replica in range(self._replicas):
            if replica != self._replica:
                self._send(self._segment, replica, "parameters", self._versions[bucket], body)
