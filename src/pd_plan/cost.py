"""What a plan costs, one equation a function (the paper, section 3.2; design, section 2).

Letters: T_l forward and backward time of layer l in ms, a_l bytes that cross a cut right after it, w_l bytes
of its trainable parameters, B bytes a link carries in a ms, m (or r) replicas of a stage. Layers are numbered
from 0 here and a stage is a half-open range [i, j) of them. Every equation takes plain numbers or numpy
arrays of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pd_format.profile import LayerProfile
from pd_plan.cluster import Cluster

__all__ = [
    "COST_MODELS",
    "DUPLEX",
    "INFERENCE",
    "PAPER",
    "Chain",
    "CostModel",
    "Floats",
    "Partition",
    "cut_bytes",
    "cut_ms",
    "minibatch_ms",
    "partition_bytes",
    "serial_ms",
    "stage_bytes",
    "stage_ms",
    "sync_ms",
    "transfer_ms",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)


@dataclass(frozen=True)
class CostModel:
    """How often a byte counts on a link.

    In the paper's model a link is half-duplex: what goes out and what comes in wait for each other. Real links carry
    both directions at once, so that only half as much of it counts.
    """

    cut: int
    """Times that a_l passes the link of a worker beside the cut: activations one way, gradients the other."""
    sync: int
    """Times that (m-1)/m w passes the link of a worker: gradients out and parameters in as a worker, gradients
    in and parameters out as a shard."""
    sent: int = 2
    """Times that a_l is sent over a cut, whatever the link: activations, and gradients back."""


PAPER = CostModel(cut=2, sync=4)
DUPLEX = CostModel(cut=1, sync=2)
INFERENCE = CostModel(cut=1, sync=2, sent=1)
"""Forward passes alone: nothing comes back, whatever a link could do; there are no trainable bytes to synchronise."""
COST_MODELS = {"paper": PAPER, "duplex": DUPLEX}


class Partition(NamedTuple):
    """Consecutive stages: stage s holds the layers from `ends[s - 1]` (or 0) up to `ends[s]`."""

    ends: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The half-open range of layers of each stage."""
        return list(pairwise((0, *self.ends)))

    @property
    def machines(self) -> int:
        """Machines that the stages use together."""
        return sum(self.replicas)

    @property
    def config(self) -> str:
        """Replicas a stage, as in `2-1-1`."""
        return "-".join(map(str, self.replicas))


@dataclass(frozen=True)
class Chain:
    """The layers as the solver wants them: sums over any range [i, j) are differences of two prefixes."""

    times_ms: tuple[float, ...]
    """T_l."""
    activation_bytes: tuple[int, ...]
    """a_l."""
    weight_bytes: tuple[int, ...]
    """Prefix sums of w_l, exact; N + 1 of them."""
    prefix_ms: Floats
    """Prefix sums of T_l, each correctly rounded; N + 1 of them."""
    boundaries: tuple[int, ...]
    """0, then every j with a legal cut between layers j - 1 and j, then N: where a stage may begin or end."""

    @classmethod
    def of(cls, layers: Sequence[LayerProfile]) -> Chain:
        """Take what the cost model needs from a profile's layers."""
        times = tuple(layer.compute_ms for layer in layers)
        # A running float sum may be off by N roundings; beside a stage a thousandth of the whole that shows.
        prefix = [float(total) for total in accumulate(map(Fraction, times), initial=Fraction(0))]
        legal = (index + 1 for index, layer in enumerate(layers[:-1]) if layer.cut)
        return cls(
            times_ms=times,
            activation_bytes=tuple(layer.activation_bytes for layer in layers),
            weight_bytes=tuple(accumulate((layer.trainable_bytes for layer in layers), initial=0)),
            prefix_ms=np.array(prefix),
            boundaries=(0, *legal, len(layers)),
        )

    @property
    def layers(self) -> int:
        """N."""
        return len(self.times_ms)

    @property
    def most_stages(self) -> int:
        """K: 1 + the number of legal cuts."""
        return len(self.boundaries) - 1

    def compute_ms(self, first: int, end: int) -> float:
        """Sum of T_l over layers [first, end)."""
        return math.fsum(self.times_ms[first:end])

    def weights(self, first: int, end: int) -> int:
        """Sum of w_l over layers [first, end)."""
        return self.weight_bytes[end] - self.weight_bytes[first]


def transfer_ms(activation_bytes: Number, bytes_per_ms: float) -> Number:
    """C_l = a_l / B: one way over a cut, in ms."""
    return activation_bytes / bytes_per_ms


def cut_ms(activation_bytes: Number, bytes_per_ms: float, model: CostModel = PAPER) -> Number:
    """2 C_l: the activations and, later, as many gradients over the same half-duplex link, in ms."""
    return model.cut * transfer_ms(activation_bytes, bytes_per_ms)


def sync_ms(weight_bytes: Number, replicas: Number, bytes_per_ms: float, model: CostModel = PAPER) -> Number:
    """W^m = 4 (m-1) w / (m B): one round of a replicated stage's synchronisation, in ms.

    Each of m machines is worker and shard of 1/m of the parameters at once. As a worker it sends (m-1)/m w of
    gradients and receives as many parameters; as a shard it receives w/m from each of m-1 workers and sends
    as much back. That is four times (m-1)/m w over its link; nothing where m = 1.
    """
    return model.sync * (replicas - 1) * weight_bytes / (replicas * bytes_per_ms)


def stage_ms(compute_ms: Number, sync_ms: Number, replicas: Number) -> Number:
    """T(i->j, m) = max(sum T_l, sum W_l^m) / m: time a minibatch of a stage, in ms.

    In a round each of m replicas computes one minibatch while one synchronisation runs beside it: m
    minibatches in the longer of the two.
    """
    return np.maximum(compute_ms, sync_ms) / replicas  # type: ignore[no-any-return]


def cut_bytes(activation_bytes: int, model: CostModel = PAPER) -> int:
    """2 a: what both sides of a cut send for one minibatch, in bytes, each counted at its sender."""
    return model.sent * activation_bytes


def stage_bytes(weight_bytes: int, replicas: int) -> Fraction:
    """2 (r-1)/r w: what a stage's replicas send to synchronise, in bytes a minibatch.

    In a round of r minibatches each of r workers sends (r-1)/r w of gradients and each of r shards as many
    parameters.
    """
    return Fraction(2 * (replicas - 1) * weight_bytes, replicas)


def minibatch_ms(chain: Chain, partition: Partition, cluster: Cluster, model: CostModel = PAPER) -> float:
    """A of a partition: the longest of its stages' T(i->j, m) and its cuts' 2 C_i, in ms a minibatch."""
    rate = cluster.bytes_per_ms
    longest = 0.0
    for (first, end), replicas in zip(partition.ranges, partition.replicas, strict=True):
        sync = sync_ms(float(chain.weights(first, end)), float(replicas), rate, model)
        longest = max(longest, float(stage_ms(chain.compute_ms(first, end), sync, float(replicas))))
    cuts = (cut_ms(float(chain.activation_bytes[end - 1]), rate, model) for end in partition.ends[:-1])
    return max(longest, *cuts, 0.0)


def serial_ms(chain: Chain, partition: Partition, cluster: Cluster, model: CostModel = PAPER) -> float:
    """Time a minibatch where only one is under way: the sum of all T_l and of 2 C_i of the cuts, in ms.

    Whether a link carries both directions at once makes no difference: activations and gradients pass one after the
    other.
    """
    rate = cluster.bytes_per_ms
    cuts = [model.sent * transfer_ms(float(chain.activation_bytes[end - 1]), rate) for end in partition.ends[:-1]]
    return math.fsum([*chain.times_ms, *cuts])


def partition_bytes(chain: Chain, partition: Partition, model: CostModel = PAPER) -> Fraction:
    """Bytes that all workers send for one minibatch: 2 a for each cut and 2 (r-1)/r w for each stage."""
    cuts = sum(cut_bytes(chain.activation_bytes[end - 1], model) for end in partition.ends[:-1])
    stages = zip(partition.ranges, partition.replicas, strict=True)
    return cuts + sum((stage_bytes(chain.weights(*layers), replicas) for layers, replicas in stages), Fraction(0))
