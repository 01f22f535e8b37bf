"""What the planner must agree with: the design's definitions, written as plainly as possible, in exact fractions.

Nothing here knows how the solver works. Layers are (T in ms, a in bytes, w in bytes, cut); B is in bytes a ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile

EQUAL = Fraction(1, 10**9)


class Layer(NamedTuple):
    """One layer of a test's chain."""

    ms: float
    activation: int = 0
    weight: int = 0
    cut: bool = True


class Option(NamedTuple):
    """A plan and all that the tie rule looks at."""

    value: Fraction
    machines: int
    stages: int
    sent: Fraction
    ends: tuple[int, ...]
    replicas: tuple[int, ...]

    def rank(self) -> tuple[object, ...]:
        """Smaller is better among plans of equal value."""
        later_cuts = tuple(-end for end in self.ends)
        more_replicas_earlier = tuple(-replicas for replicas in self.replicas)
        return (self.machines, self.stages, self.sent, later_cuts, more_replicas_earlier)


def layer_profiles(chain: Sequence[Layer]) -> list[LayerProfile]:
    """The chain as a profile's layers; all of a layer's time is forward."""
    return [
        LayerProfile(
            name=f"layer{index}",
            op="Test",
            forward_ms=float(layer.ms),
            backward_ms=0.0,
            activation_bytes=layer.activation,
            parameter_bytes=layer.weight,
            trainable_bytes=layer.weight,
            cut=layer.cut,
        )
        for index, layer in enumerate(chain)
    ]


def profile_of(chain: Sequence[Layer], name: str = "tiny") -> Profile:
    """The chain as a whole profile."""
    return Profile(
        model=ModelSpec(name=name, factory="tests.models:tiny", fingerprint="0"),
        minibatch_size=4,
        inputs=(InputSpec(name="x", shape=(4, 8), dtype="float32"),),
        device=Device(kind="cpu", name="test"),
        minibatches=10,
        layers=tuple(layer_profiles(chain)),
    )


def stage_time(layers: Sequence[Layer], m: int, bandwidth: Fraction) -> Fraction:
    """T(i->j, m) = (1/m) max(sum T_l, sum 4 (m-1) w_l / (m B))."""
    compute = sum((Fraction(layer.ms) for layer in layers), Fraction(0))
    sync = sum((Fraction(4 * (m - 1) * layer.weight, m) / bandwidth for layer in layers), Fraction(0))
    return max(compute, sync) / m


def cut_time(layer: Layer, bandwidth: Fraction) -> Fraction:
    """2 C_l."""
    return 2 * layer.activation / bandwidth


def partitions(chain: Sequence[Layer], stages: int | None = None) -> Iterator[tuple[int, ...]]:
    """The ends of the stages of every partition at legal cuts."""
    legal = [index + 1 for index, layer in enumerate(chain[:-1]) if layer.cut]
    for count in range(len(legal) + 1) if stages is None else [stages - 1]:
        for cuts in combinations(legal, count):
            yield (*cuts, len(chain))


def replica_counts(stages: int, machines: int) -> Iterator[tuple[int, ...]]:
    """Every way to give so many stages 1 or more machines each, out of so many."""
    if stages == 0:
        yield ()
        return
    for first in range(1, machines - stages + 2):
        for rest in replica_counts(stages - 1, machines - first):
            yield (first, *rest)


def option(
    chain: Sequence[Layer], ends: tuple[int, ...], replicas: tuple[int, ...], bandwidth: Fraction, serial: bool = False
) -> Option:
    """A plan's value: the longest stage or cut, or with `serial` the sum of all T_l and 2 C_i; and what it sends."""
    starts = (0, *ends[:-1])
    stages = [chain[start:end] for start, end in zip(starts, ends, strict=True)]
    cuts = [cut_time(chain[end - 1], bandwidth) for end in ends[:-1]]
    times = [stage_time(layers, m, bandwidth) for layers, m in zip(stages, replicas, strict=True)]
    sent = sum((2 * Fraction(chain[end - 1].activation) for end in ends[:-1]), Fraction(0))
    for layers, m in zip(stages, replicas, strict=True):
        sent += Fraction(2 * (m - 1), m) * sum(layer.weight for layer in layers)
    value = sum([*times, *cuts], Fraction(0)) if serial else max([*times, *cuts])
    return Option(value, sum(replicas), len(ends), sent, ends, replicas)


def preferred(options: Sequence[Option]) -> Option:
    """The tie rule: of the values within 1e-9 of the least, relatively, the best rank."""
    least = min(candidate.value for candidate in options)
    return min((o for o in options if o.value <= least * (1 + EQUAL)), key=Option.rank)


def brute_force(chain: Sequence[Layer], machines: int, bandwidth: Fraction) -> Option:
    """The preferred one of all partitions with all replica counts."""
    return preferred(
        [
            option(chain, ends, replicas, bandwidth)
            for ends in partitions(chain)
            for replicas in replica_counts(len(ends), machines)
        ]
    )


def brute_force_cuts(
    chain: Sequence[Layer], replicas: tuple[int, ...], bandwidth: Fraction, serial: bool = False
) -> Option:
    """The preferred one of all partitions with these replicas."""
    return preferred(
        [option(chain, ends, replicas, bandwidth, serial) for ends in partitions(chain, stages=len(replicas))]
    )


def recurrence(chain: Sequence[Layer], machines: int, bandwidth: Fraction) -> Fraction:
    """The least A(N, m) over m <= M, with A(j, m) as the design writes it."""
    table: dict[tuple[int, int], Fraction] = {}
    for j in range(1, len(chain) + 1):
        for m in range(1, machines + 1):
            best = stage_time(chain[:j], m, bandwidth)
            for i in range(1, j):
                if chain[i - 1].cut:
                    for last in range(1, m):
                        split = max(
                            table[i, m - last],
                            cut_time(chain[i - 1], bandwidth),
                            stage_time(chain[i:j], last, bandwidth),
                        )
                        best = min(best, split)
            table[j, m] = best
    return min(table[len(chain), m] for m in range(1, machines + 1))
