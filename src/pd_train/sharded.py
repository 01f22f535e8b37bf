"""The sharded parameter server of a stage (the paper, section 3.2; design, section 5).

Each replica owns a shard: every r-th bucket of the trainable parameters. In the backward pass a bucket of gradients
leaves for its shard as soon as it is complete; the shard adds up what belongs to an update in replica order,
applies the optimizer to its own pieces and sends the new parameters to every replica:

    replica 0   B(j) [bucket 1 ----> replica 1] [bucket 0, own]               update bucket 0 --> all
    replica 1   B(j) [bucket 1, own]  update bucket 1 --> all  [bucket 0 ----> replica 0]

A stage with a single worker is the case of one shard, one bucket and no message. The class does no I/O of its own: it
is told what arrived and is given a function that sends. It runs in the compute thread: between work items, while
that thread waits, and within a backward pass after each parameter's gradient, so that most of a synchronous round
is over when the pass is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pd_format.compression import GradientScheme
from pd_format.layers.values import tensors_in
from pd_format.schedule import rounds_of
from pd_format.versions import StageVersions
from pd_train.arithmetic import TORCH_ARITHMETIC, Arithmetic
from pd_train.clipping import Clipping
from pd_train.compressed import CompressedTraffic, check_message, unpacked
from pd_train.gradients import GradientBuckets, Gradients, Pieces, WatchGradients
from pd_train.loss_scale import LossScale
from pd_train.optimizers import MovingOptimizer
from pd_train.options import OptimizerOptions
from pd_train.server import SegmentSize, Send, cut_stage, piece_view
from pd_train.shard import Shard
from pd_train.weights import ParameterSets

__all__ = ["ShardedServer"]


class ShardedServer:
    """One replica's part of its stage's parameter server.

    Args:
        sets: the stage's parameter sets.
        versions: of the stage.
        watch, names: see `GradientBuckets`.
        replica: this one.
        options: of the optimizer.
        send: how a message reaches another replica of the stage.
        clipping: of the gradient's norm, if asked for.
        loss_scale: what gradients are to be divided by, where the loss was scaled; each segment then has one update.
        arithmetic: on gradients and parameters.
        compression: of what replicas send each other, if any.
        traffic: what does it.
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
        clipping: Clipping | None = None,
        loss_scale: LossScale | None = None,
        arithmetic: Arithmetic = TORCH_ARITHMETIC,
        compression: GradientScheme | None = None,
        traffic: type[CompressedTraffic] = CompressedTraffic,
    ) -> None:
        self._sets = sets
        self._versions = versions
        self._replica = replica
        self._replicas = versions.replicas
        self._names = names
        self._send = send
        self._clipping = clipping
        self._loss_scale = loss_scale
        self._arithmetic = arithmetic
        # A plan counts compressed bytes by buckets of one size.
        self._buckets = cut_stage(sets.sets[0], self._replicas, even=compression is not None)
        self._outgoing = GradientBuckets(watch, names, self._buckets, self._replicas > 1, self._leave, arithmetic)
        # Detached: they share the parameters' memory and version counters, so autograd still notices a write to a
        # set that a backward pass needs.
        self._pieces = [
            [
                [piece_view(held[p.parameter].detach(), p, self._replicas) for p in bucket.pieces]
                for bucket in self._buckets
            ]
            for held in sets.sets
        ]
        self._own = [index for index, bucket in enumerate(self._buckets) if bucket.shard == replica]
        self._of_own = {index: self._pieces[0][index] for index in self._own}
        self._of_others = {index: p for index, p in enumerate(self._pieces[0]) if index not in self._of_own}
        self._traffic = None
        if compression is not None and self._replicas > 1:
            self._traffic = traffic(compression, self._pieces[0], self._own)
        masters = {} if self._traffic is None else self._traffic.masters
        self._optimizers = {
            index: MovingOptimizer(options, masters.get(index, pieces)) for index, pieces in self._of_own.items()
        }
        self.staleness: Counter[int] = Counter()
        self.updates = 0
        """Of the segment: what its last version is."""
        self._segment = -1  # None yet.
        self._size = SegmentSize(0, 1, 1)
        self._update_size = 1
        self._rate = options.lr
        self._running = 0
        self._is_last = False
        """Whether the backward pass that runs is this replica's last of the segment."""
        self._contributions: dict[tuple[int, int, int], dict[int, Pieces]] = {}
        self._arrived: dict[tuple[int, int, int], Pieces] = {}
        self._means: dict[int, dict[int, list[Tensor | None]]] = {}
        self._announced = 0
        self._previous_set: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._next_update = [0] * len(self._buckets)

    def start_segment(self, number: int, size: SegmentSize, rate: float) -> None:
        self._segment, self._size, self._rate = number, size, rate
        self._update_size = self._versions.update_size(size.minibatches)
        self.updates = -(-size.minibatches // self._update_size)
        self._sets.start_segment()
        if self._traffic is not None:
            with torch.no_grad():
                self._traffic.start_segment(self._pieces[self._sets.set_of(0)])
        self._next_update = [0] * len(self._buckets)
        self._announced = 0
        self._previous_set.clear()
        self._missing.clear()

    def before_forward(self) -> None:
        """Nothing to do: the versions say what a forward pass uses."""

    def start_backward(self, minibatch: int) -> None:
        self._running = minibatch // self._update_size
        samples = self._size.samples_of(minibatch)
        following = minibatch + self._replicas
        self._is_last = following >= self._size.minibatches
        last = self._is_last or following // self._update_size != self._running
        self._outgoing.start(samples if self._is_uneven(self._running) else None, last)
        mode = self._versions.mode
        # With lag there is a set to spare, and an update of many minibatches has time.
        if self._replicas > 1 and mode.by_round and not mode.is_naive and not self._versions.lag:
            self._sets.let_land(self._running + 1, self._versions.backward(minibatch))

    def finish_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self._outgoing.finish(gradients)

    def take_gradients(self, segment: int, update: int, replica: int, body: tuple[int, Pieces, int]) -> None:
        bucket, gradients, _ = body
        if replica != self._replica:
            check_message(self._traffic, bucket, gradients, self._of_own, is_gradient=True)
        self._contributions.setdefault((segment, bucket, update), {})[replica] = gradients

    def take_parameters(self, segment: int, version: int, body: tuple[int, Pieces]) -> None:
        bucket, tensors = body
        check_message(self._traffic, bucket, tensors, self._of_others, is_gradient=False)
        self._arrived[segment, version, bucket] = tensors

    def is_drained(self) -> bool:
        decided = self._loss_scale is None or self._loss_scale.verdict(self._segment) is not None
        return decided and self._sets.is_ready(self.updates)

    def advance(self) -> None:
        progress = True
        while progress:
            progress = False
            if self._announced < self.updates:
                self._announce()
            for bucket, update in enumerate(self._next_update):
                if update < self.updates and self._advance_bucket(bucket, update):
                    self._next_update[bucket] += 1
                    progress = True

    def shard(self) -> Shard:
        return Shard(self._buckets, self._optimizers, self._names)

    def held(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers.values():
            yield from optimizer.held()
        waiting = (self._contributions, self._arrived, self._means)
        yield from tensors_in(tuple(value for held in waiting for value in held.values()))
        yield from self._outgoing.held()
        if self._traffic is not None:
            yield from self._traffic.held()

    def _is_uneven(self, update: int) -> bool:
        """Whether the update's minibatches differ in their samples."""
        first = update * self._update_size
        return first + 1 < self._size.minibatches <= first + self._update_size and (
            self._size.last_samples != self._size.samples
        )

    def _leave(self, bucket: int, gradients: Gradients) -> None:
        shard = self._buckets[bucket].shard
        if shard == self._replica:
            self.take_gradients(self._segment, self._running, self._replica, (bucket, gradients, 0))
            return
        pieces: Pieces = gradients
        if self._traffic is not None:
            # Where minibatches differ in their samples, gradients are weighed by them; what was left out was not yet.
            weight = self._size.samples if self._is_uneven(self._running) else None
            with torch.no_grad():
                pieces = self._traffic.pack_gradients(bucket, gradients, weight, self._is_last)
        self._send(self._segment, shard, "gradient", self._running, (bucket, pieces, 0))

    def _advance_bucket(self, bucket: int, update: int) -> bool:
        """Update an own bucket, or write one that has arrived; False while that must wait."""
        own = self._buckets[bucket].shard == self._replica
        version = update + 1
        factor: float | None = 1.0
        if own:
            if self._mean(bucket, update) is None:
                return False
            if self._clipping is not None:
                factor = self._clipping.factor(self._segment, update)
            if self._loss_scale is not None and self._loss_scale.verdict(self._segment) is None:
                return False
        elif (self._segment, version, bucket) not in self._arrived:
            return False
        if factor is None or not self._open(version):
            return False
        pieces = self._pieces[self._sets.set_of(version)][bucket]
        with torch.no_grad():
            if own:
                self._update(bucket, version, pieces, factor)
            else:
                self._take_over(bucket, version, pieces, self._arrived.pop((self._segment, version, bucket)))
        self._missing[version] -= 1
        if self._missing[version] == 0:
            self._sets.completed(version)
            self._means.pop(update, None)
        return True

    def _open(self, version: int) -> bool:
        if version not in self._missing:
            previous = self._sets.set_of(version - 1)
            if self._sets.open(version) is None:
                return False
            self._missing[version] = len(self._buckets)
            self._previous_set[version] = previous
        return True

    def _mean(self, bucket: int, update: int) -> list[Tensor | None] | None:
        """The mean gradient of an own bucket; None until all contributions are there."""
        means = self._means.setdefault(update, {})
        if bucket not in means:
            there = self._contributions.get((self._segment, bucket, update))
            if there is None:  # Asked for at every message: the usual answer comes first.
                return None
            first = update * self._update_size
            last = min(first + self._update_size, self._size.minibatches)
            # Replicas with a minibatch in the update: they have more of those before `last` than before `first`.
            members = [
                k
                for k in range(self._replicas)
                if rounds_of(k, self._replicas, last) > rounds_of(k, self._replicas, first)
            ]
            if len(there) < len(members):
                return None
            del self._contributions[self._segment, bucket, update]
            uneven = self._is_uneven(update)
            weight = sum(self._size.samples_of(b) for b in range(first, last)) if uneven else last - first
            with torch.no_grad():
                contributions = [unpacked(self._traffic, bucket, there[k]) for k in members]
                means[bucket] = self._arithmetic.mean(contributions, weight)
            if self._loss_scale is not None:
                self._loss_scale.unscale(means[bucket])
        return means[bucket]

    def _announce(self) -> None:
        """Tell what others must know of this shard's part of the next update, once that is whole."""
        if self._clipping is None and self._loss_scale is None:
            return
        update = self._announced
        parts = [self._mean(bucket, update) for bucket in self._own]
        if all(part is not None for part in parts):
            gradients = [gradient for part in parts if part is not None for gradient in part]
            if self._clipping is not None:
                self._clipping.announce(self._segment, update, gradients)
            if self._loss_scale is not None:
                self._loss_scale.announce(self._segment, gradients)
            self._announced += 1

    def _bring_forward(self, bucket: int, version: int, pieces: list[Tensor]) -> None:
        """Give the pieces of a version's set the numbers of the version before."""
        previous = self._pieces[self._previous_set[version]][bucket]
        if previous is not pieces:
            self._arithmetic.copy(pieces, previous)

    def _take_over(self, bucket: int, version: int, pieces: list[Tensor], found: Pieces) -> None:
        """Write what another shard has sent."""
        if isinstance(found, tuple):
            self._arithmetic.copy(pieces, [piece for piece in found if piece is not None])
        else:
            assert self._traffic is not None
            self._bring_forward(bucket, version, pieces)
            self._traffic.add_step(bucket, found, pieces)

    def _update(self, bucket: int, version: int, pieces: list[Tensor], factor: float) -> None:
        gradients = self._means[version - 1][bucket]
        if self._loss_scale is not None and not self._loss_scale.verdict(self._segment):
            # Without gradients the optimizer leaves parameters and state alone.
            gradients = [None] * len(gradients)
        elif factor < 1.0:
            gradients = [None if gradient is None else gradient.mul_(factor) for gradient in gradients]
        message: Pieces = tuple(pieces)
        if self._traffic is not None and self._traffic.compresses(bucket):
            masters = self._traffic.masters.get(bucket, pieces)
            self._arithmetic.step(self._optimizers[bucket], masters, masters, gradients, self._rate)
            if version == self.updates:
                self._arithmetic.copy(pieces, masters)
            else:
                self._bring_forward(bucket, version, pieces)
                message = self._traffic.pack_step(bucket, pieces)
        else:
            previous = self._pieces[self._previous_set[version]][bucket]
            self._arithmetic.step(self._optimizers[bucket], pieces, previous, gradients, self._rate)
        # Not kept until the last bucket of the version: a gradient is needed once.
        self._means[version - 1][bucket] = []
        body = (bucket, message)
        for replica in range(self._replicas):
            if replica != self._replica:
                self._send(self._segment, replica, "parameters", version, body)
