"""What the stages of a plan hold in memory, and whether that is within a limit (design, sections 2 and 4).

The formula itself is `pd_format.memory`; here it is asked about whole plans. A stage that recomputes holds less and
takes longer: its forward pass runs once more before each backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

import numpy as np

from pd_format.memory import OPTIMIZER_STATES, arrivals_held, held_bytes
from pd_format.profile import LayerProfile
from pd_format.versions import default_sync, lag_of
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Floats, Partition, cut_ms, stage_ms, sync_ms

__all__ = ["Candidate", "Limit", "Sizes", "limited_compute_ms", "limited_minibatch_ms"]

Candidate = tuple[Partition, tuple[bool, ...]]
"""A partition, and which of its stages recompute."""


@dataclass(frozen=True)
class Sizes:
    """All of a model that memory depends on; prefix sums over the layers, N + 1 of them, in bytes and ms."""

    parameters: tuple[int, ...]
    trainable: tuple[int, ...]
    stash: tuple[int, ...]
    crossing: tuple[int, ...]
    """No prefix sum: what a stage that begins at layer i receives for one minibatch; 0 after the last layer."""
    forward_ms: Floats
    optimizer: str = "momentum"
    compressed: bool = False
    """Whether replicas compress what they send each other."""

    @classmethod
    def of(
        cls, layers: Sequence[LayerProfile], input_bytes: int, optimizer: str = "momentum", compressed: bool = False
    ) -> Sizes:
        """Take them from a profile's layers.

        Args:
            layers: of the model.
            input_bytes: of one minibatch of the model's inputs.
            optimizer: a key of `pd_format.memory.OPTIMIZER_STATES`.
            compressed: whether replicas compress what they send each other.
        """
        forward = accumulate((Fraction(layer.forward_ms) for layer in layers), initial=Fraction(0))
        return cls(
            parameters=tuple(accumulate((layer.parameter_bytes for layer in layers), initial=0)),
            trainable=tuple(accumulate((layer.trainable_bytes for layer in layers), initial=0)),
            stash=tuple(accumulate((layer.stash_bytes for layer in layers), initial=0)),
            crossing=(input_bytes, *(layer.activation_bytes for layer in layers[:-1]), 0),
            forward_ms=np.array([float(total) for total in forward]),
            optimizer=optimizer,
            compressed=compressed,
        )

    @property
    def states(self) -> int:
        """Tensors of optimizer state a parameter."""
        return OPTIMIZER_STATES[self.optimizer]

    def with_minibatch(self, part: Fraction) -> Sizes:
        """The sizes at a minibatch of a part of its size: activations shrink with it, parameters do not."""
        return replace(
            self,
            stash=tuple(math.ceil(size * part) for size in self.stash),
            crossing=tuple(math.ceil(size * part) for size in self.crossing),
        )

    def needed(self, partition: Partition, depths: Sequence[int], recompute: Sequence[bool] = ()) -> list[int]:
        """Bytes that one worker of each stage holds at its fullest.

        Args:
            partition: of the layers.
            depths: `in_flight` of each stage.
            recompute: of each stage; empty where none does.
        """
        sync = default_sync(len(partition.ends))
        result = []
        for index, ((first, end), replicas) in enumerate(zip(partition.ranges, partition.replicas, strict=True)):
            lag = lag_of(replicas, sync)
            held: int = held_bytes(
                parameters=self.parameters[end] - self.parameters[first],
                trainable=self.trainable[end] - self.trainable[first],
                stash=self.stash[end] - self.stash[first],
                input_bytes=self.crossing[first],
                output_bytes=self.crossing[end],
                replicas=replicas,
                in_flight=depths[index],
                lag=lag,
                # What `pd_format.versions.sets_needed` comes to under stashing, without its walk.
                sets=depths[index] + lag,
                states=self.states,
                compressed=self.compressed,
                recompute=bool(recompute) and recompute[index],
            )
            if index:
                arrivals = arrivals_held(depths[index - 1], partition.replicas[index - 1], replicas)
                held += arrivals * self.crossing[first]
            result.append(held)
        return result


@dataclass(frozen=True)
class Limit:
    """So many bytes a worker, and whether stages may recompute to keep within them."""

    sizes: Sizes
    memory_bytes: int
    recompute: bool = False

    def fits(self, partition: Partition, depths: Sequence[int], recompute: Sequence[bool] = ()) -> bool:
        """Whether every stage of a plan keeps within the limit at these depths; see `Sizes.needed`."""
        return max(self.sizes.needed(partition, depths, recompute)) <= self.memory_bytes


def limited_minibatch_ms(
    chain: Chain,
    sizes: Sizes,
    partition: Partition,
    recompute: Sequence[bool],
    cluster: Cluster,
    model: CostModel = PAPER,
) -> float:
    """`cost.minibatch_ms` of a plan some of whose stages recompute."""
    rate = cluster.bytes_per_ms
    longest = 0.0
    for s, ((first, end), replicas) in enumerate(zip(partition.ranges, partition.replicas, strict=True)):
        sync = sync_ms(float(chain.weights(first, end)), float(replicas), rate, model)
        compute = limited_compute_ms(chain, sizes, first, end, bool(recompute) and recompute[s])
        longest = max(longest, float(stage_ms(compute, sync, float(replicas))))
    cuts = (cut_ms(float(chain.activation_bytes[end - 1]), rate, model) for end in partition.ends[:-1])
    return max(longest, *cuts, 0.0)


def limited_compute_ms(chain: Chain, sizes: Sizes, first: int, end: int, recompute: bool) -> float:
    """Sum of T_l over layers [first, end), and of their forward times once more where the stage recomputes."""
    again = float(sizes.forward_ms[end] - sizes.forward_ms[first]) if recompute else 0.0
    return chain.compute_ms(first, end) + again
