"""The sharded parameter server of a stage (the paper, section 3.2; design, section 5).

Each replica owns a shard: every r-th bucket of the trainable parameters. In the backward pass a bucket of gradients
leaves for its shard as soon as it is complete; the shard adds up the round in replica order, applies the
optimizer to its own pieces and sends the new parameters to every replica:

    replica 0   B(j) [bucket 1 ----> replica 1] [bucket 0, own]      update bucket 0 --> all
    replica 1   B(j) [bucket 1, own] [bucket 0 ----> replica 0]      update bucket 1 --> all

A stage with a single worker is the case of one shard, one bucket and no message. The class does no I/O of its own: it
is told what arrived and is given a function that sends. It runs in the compute thread, between work items and while
that thread waits; only the leaving of gradients happens within a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_format.schedule import rounds_of
from pd_train.buckets import Piece, cut_into_buckets, whole_parameters
from pd_train.optimizers import MovingOptimizer
from pd_train.options import OptimizerOptions
from pd_train.weights import ParameterSets

__all__ = ["Contribution", "ShardedServer"]

Send = Callable[[int, int, str, int, object], None]
"""(segment, replica, kind, round or version, body): sends a message to one replica of the stage."""


class Contribution(NamedTuple):
    """One replica's gradients of a bucket, for one minibatch; None where a parameter got none."""

    samples: int
    gradients: tuple[Tensor | None, ...]


class _Segment(NamedTuple):
    """What must be known of a segment to tell who takes part in a round."""

    number: int
    minibatches: int


class ShardedServer:
    """One replica's part of its stage's parameter server.

    Args:
        sets: the stage's parameter sets.
        names: of the parameters, for messages to people.
        replica: this one.
        replicas: r of the stage.
        options: of the optimizer.
        send: how a message reaches another replica of the stage.
    """

    def __init__(
        self,
        sets: ParameterSets,
        names: Sequence[str],
        replica: int,
        replicas: int,
        options: OptimizerOptions,
        send: Send,
    ) -> None:
        self.rate = options.lr
        self.updates = 0
        self._sets = sets
        self._names = names
        self._replica = replica
        self._replicas = replicas
        self._send = send
        first = sets.sets[0]
        elements = [parameter.numel() for parameter in first]
        if replicas == 1:
            self.buckets = whole_parameters(elements)
        else:
            self.buckets = cut_into_buckets(elements, [p.element_size() for p in first], replicas)
            self._watch_gradients()
        # Detached: they share the parameters' memory and version counters, so autograd still notices a write to a
        # set that a backward pass needs.
        self._pieces = [
            [[self._view(held[piece.parameter].detach(), piece) for piece in bucket.pieces] for bucket in self.buckets]
            for held in sets.sets
        ]
        self._optimizers = {
            index: MovingOptimizer(options, self._pieces[0][index])
            for index, bucket in enumerate(self.buckets)
            if bucket.shard == replica
        }
        self._buckets_of: list[list[int]] = [[] for _ in first]
        for index, bucket in enumerate(self.buckets):
            for parameter in {piece.parameter for piece in bucket.pieces}:
                self._buckets_of[parameter].append(index)
        self._segment = _Segment(0, 0)
        self._round: dict[tuple[int, int, int], dict[int, Contribution]] = {}
        self._arrived: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}
        self._previous_set: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._next_round = [0] * len(self.buckets)
        # The backward pass that is running: its round, samples, gradients so far and what each bucket still lacks.
        self._running: tuple[int, int] | None = None
        self._flat: dict[int, Tensor] = {}
        self._lacking: list[int] = []

    @property
    def rounds(self) -> int:
        """Of the segment: what its last version is."""
        return -(-self._segment.minibatches // self._replicas)

    def start_segment(self, number: int, minibatches: int, rate: float) -> None:
        """After a drain.

        Args:
            number: of the segment; what arrives for another one is kept until that one starts.
            minibatches: of the segment, over all replicas.
            rate: the learning rate of the segment.
        """
        self._segment = _Segment(number, minibatches)
        self.rate = rate
        self._next_round = [0] * len(self.buckets)
        self._previous_set.clear()
        self._missing.clear()

    def start_backward(self, round: int, samples: int) -> None:
        """A backward pass is about to begin."""
        self._running = (round, samples)
        self._flat = {}
        self._lacking = [len({piece.parameter for piece in bucket.pieces}) for bucket in self.buckets]

    def finish_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass is over: what has not left yet leaves now.

        Args:
            gradients: of the parameters, in their order; None where the minibatch gave none.
        """
        if self._replicas == 1:
            for bucket in range(len(self.buckets)):
                self._contribute(bucket, tuple(gradients))
        else:
            for bucket, lacking in enumerate(self._lacking):
                if lacking:
                    self._leave(bucket)
        self._running = None
        self._flat = {}

    def take_gradients(self, segment: int, round: int, bucket: int, replica: int, what: Contribution) -> None:
        """A replica's gradients for one of this shard's buckets have arrived."""
        self._round.setdefault((segment, bucket, round), {})[replica] = what

    def take_parameters(self, segment: int, version: int, bucket: int, tensors: tuple[Tensor, ...]) -> None:
        """New parameters have arrived from the shard that owns the bucket."""
        self._arrived[segment, version, bucket] = tensors

    def advance(self) -> None:
        """Do what can be done: update own buckets whose round is complete, write parameters that have arrived.

        Never called within a backward pass, since a set that it uses may be written.
        """
        progress = True
        while progress:
            progress = False
            for bucket, round in enumerate(self._next_round):
                if round < self.rounds and self._advance_bucket(bucket, round):
                    self._next_round[bucket] += 1
                    progress = True

    def _advance_bucket(self, bucket: int, round: int) -> bool:
        number, minibatches = self._segment
        own = self.buckets[bucket].shard == self._replica
        if own:
            members = [k for k in range(self._replicas) if round < rounds_of(k, self._replicas, minibatches)]
            if len(self._round.get((number, bucket, round), ())) < len(members):
                return False
        elif (number, round + 1, bucket) not in self._arrived:
            return False
        version = round + 1
        if version not in self._missing:
            previous = self._sets.set_of(round)
            if self._sets.open(version) is None:
                return False
            self._missing[version] = len(self.buckets)
            self._previous_set[version] = previous
        pieces = self._pieces[self._sets.set_of(version)][bucket]
        with torch.no_grad():
            if own:
                contributions = self._round.pop((number, bucket, round))
                self._update(bucket, version, pieces, [contributions[k] for k in members])
            else:
                for piece, tensor in zip(pieces, self._arrived.pop((number, version, bucket)), strict=True):
                    piece.copy_(tensor)
        self._missing[version] -= 1
        if self._missing[version] == 0:
            self._sets.completed(version)
            self.updates += 1
        return True

    def _update(self, bucket: int, version: int, pieces: list[Tensor], contributions: list[Contribution]) -> None:
        previous = self._pieces[self._previous_set[version]][bucket]
        if previous is not pieces:
            for piece, old in zip(pieces, previous, strict=True):
                piece.copy_(old)
        self._optimizers[bucket].step(pieces, mean_gradients(contributions), self.rate)
        for replica in range(self._replicas):
            if replica != self._replica:
                self._send(self._segment.number, replica, "parameters", version, (bucket, tuple(pieces)))

    def _view(self, parameter: Tensor, piece: Piece) -> Tensor:
        return parameter if self._replicas == 1 else parameter.view(-1)[piece.start : piece.stop]

    def _watch_gradients(self) -> None:
        for held in self._sets.sets:
            for index, parameter in enumerate(held):
                parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, index))  # type: ignore[no-untyped-call]

    def _gradient_ready(self, index: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UserError(
                f"parameter {self._names[index]} has a sparse gradient, which a replicated stage cannot cut into "
                "pieces; build the model with sparse=False."
            )
        self._flat[index] = gradient.contiguous().view(-1)
        for bucket in self._buckets_of[index]:
            self._lacking[bucket] -= 1
            if self._lacking[bucket] == 0:
                self._leave(bucket)

    def _leave(self, bucket: int) -> None:
        self._lacking[bucket] = 0
        gradients: list[Tensor | None] = []
        for piece in self.buckets[bucket].pieces:
            flat = self._flat.get(piece.parameter)
            gradients.append(None if flat is None else flat[piece.start : piece.stop])
        self._contribute(bucket, tuple(gradients))

    def _contribute(self, bucket: int, gradients: tuple[Tensor | None, ...]) -> None:
        assert self._running is not None
        round, samples = self._running
        shard = self.buckets[bucket].shard
        if shard == self._replica:
            what = Contribution(samples, gradients)
            self.take_gradients(self._segment.number, round, bucket, self._replica, what)
        else:
            self._send(self._segment.number, shard, "gradient", round, (bucket, samples, gradients))


def mean_gradients(contributions: Sequence[Contribution]) -> list[Tensor | None]:
    """The gradient of a round, of each piece, in replica order; the first contribution's memory is written over.

    (g_0 + g_1 + ...) / r where all have the same number of samples, else (n_0 g_0 + ...) / (n_0 + ...). A replica
    without a gradient for a piece counts as zero; where none has one the result is None.
    """
    samples = [contribution.samples for contribution in contributions]
    weighted = len(set(samples)) > 1
    result: list[Tensor | None] = []
    for column in zip(*(contribution.gradients for contribution in contributions), strict=True):
        total: Tensor | None = None
        for count, gradient in zip(samples, column, strict=True):
            if gradient is None:
                continue
            term = gradient.mul_(count) if weighted else gradient
            total = term if total is None else total.add_(term)
        if total is not None and len(samples) > 1:
            total.div_(sum(samples) if weighted else len(samples))
        result.append(total)
    return result
