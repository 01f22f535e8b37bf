"""Chooses how many minibatches each stage keeps in flight, by simulating (design, section 3; the paper, section 3.2).

The paper's depths fill the pipeline as if transfers took no time, but each transfer lengthens a minibatch's round trip.
A stage that must not wait needs as many minibatches in flight as it starts during one round trip. With R_s the round
trip from stage s to the last stage and back and A the time a minibatch, that is

    w_s = R_s / (r_s A),    R_s = sum over stages t >= s of forward + backward, and over the cuts after s of 2 C

and somewhat more where transfers wait for each other. Raising one stage alone can be slower, so all are raised
together, by factors x, until the simulation is as fast as the cost model says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pd_format.errors import UserError
from pd_format.profile import LayerProfile
from pd_format.schedule import find_deadlock, paper_depths
from pd_format.versions import Mode, default_sync, stage_versions
from pd_plan.cost import Partition, transfer_ms
from pd_plan.network import Wiring
from pd_plan.simulator import StageLoad, effort, parts_of, steady_ms

__all__ = [
    "Depths",
    "candidates",
    "choose_depths",
    "deadlock_of",
    "default_mode",
    "given_depths",
    "loads_of",
    "rate_depths",
]

_FACTORS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
"""x, in the order tried."""
_REACHED = 1.01
"""Simulated at no more than this times A, depths do what the cost model promises."""
_SAME = 1.001
"""Simulated times within this are one; what fewer minibatches in flight reach is then preferred."""
_ROUNDING = 1e-9
_MOST_EFFORT = 300_000
"""Events of all simulations of one search, one to two seconds of them; those beyond it are not run."""


class Depths(NamedTuple):
    """The depths of a plan, and what the simulator says of them; times are None where it is too large to simulate."""

    in_flight: tuple[int, ...]
    simulated_ms: float | None
    """A minibatch at these depths."""
    paper: tuple[int, ...]
    paper_ms: float | None
    """A minibatch at the paper's depths."""
    searched: bool = False
    """Whether these depths are the best that a search found."""


def default_mode(stages: int) -> Mode:
    """Of a run by default."""
    return Mode(sync=default_sync(stages))


def loads_of(layers: Sequence[LayerProfile], partition: Partition, recompute: Sequence[bool] = ()) -> list[StageLoad]:
    """What each stage of a partition has to do.

    Args:
        layers: of the whole profile.
        partition: of them.
        recompute: of each stage, whether its backward pass runs the forward pass again; none where empty.
    """
    loads = []
    for index, ((first, end), replicas) in enumerate(zip(partition.ranges, partition.replicas, strict=True)):
        own = layers[first:end]
        forward = math.fsum(layer.forward_ms for layer in own)
        again = forward if recompute and recompute[index] else 0.0
        loads.append(
            StageLoad(
                forward_ms=forward,
                backward_ms=again + math.fsum(layer.backward_ms for layer in own),
                output_bytes=own[-1].activation_bytes if end < len(layers) else 0,
                weight_bytes=sum(layer.trainable_bytes for layer in own),
                replicas=replicas,
                ready=_ready(own, again, parts_of(replicas)),
            )
        )
    return loads


def _ready(layers: Sequence[LayerProfile], again_ms: float, parts: int) -> tuple[float, ...]:
    """When in a backward pass each of so many equal parts of the parameters has its gradients, from 0 to 1.

    A backward pass goes from the last layer to the first, after `again_ms` of recomputation; a layer's gradients are
    there when it is through with the layer.
    """
    whole = sum(layer.trainable_bytes for layer in layers)
    duration = again_ms + math.fsum(layer.backward_ms for layer in layers)
    if not parts or not whole or not duration:
        return ()
    ready: list[float] = []
    done, now = 0, again_ms
    for layer in reversed(layers):
        done += layer.trainable_bytes
        now += layer.backward_ms
        ready += [min(now / duration, 1.0)] * (done * parts // whole - len(ready))
    return tuple(ready)


def candidates(
    loads: Sequence[StageLoad], wiring: Wiring, pace_ms: float, sync_ms: Sequence[float]
) -> Iterator[tuple[int, ...]]:
    """The depths worth trying, from the least to the most.

    Args:
        loads: of the stages.
        wiring: the network.
        pace_ms: A of the plan; above 0.
        sync_ms: one round of each stage's synchronisation, 0 where it is not replicated.
    """
    trips, trip = [], 0.0
    for load in reversed(loads):
        ways = 2 if wiring.gradients else 1
        trip += load.forward_ms + load.backward_ms + ways * transfer_ms(float(load.output_bytes), wiring.bytes_per_ms)
        trips.append(trip)
    trips.reverse()
    seen: set[tuple[int, ...]] = set()
    for x in _FACTORS:
        depths = []
        for load, trip, sync in zip(loads, trips, sync_ms, strict=True):
            share = x / (load.replicas * pace_ms)
            depth = math.ceil(share * trip * (1 - _ROUNDING))
            if load.replicas > 1:
                depth = max(depth, math.ceil(share * (trip + sync) * (1 - _ROUNDING)) - 1)
            depths.append(max(depth, 1))
        if tuple(depths) not in seen:
            seen.add(tuple(depths))
            yield tuple(depths)


def choose_depths(
    loads: Sequence[StageLoad],
    wiring: Wiring,
    pace_ms: float,
    sync_ms: Sequence[float],
    fits: Callable[[Sequence[int]], bool] = lambda depths: True,
) -> Depths:
    """The first candidate that cannot deadlock, fits the memory and simulates at no more than 1.01 A; else the fastest.

    The paper's depths are among the candidates, before the first that keeps more minibatches in flight. One that is
    slower than they are is passed over, which matters where A is far above the truth, since the paper's model lets no
    link carry both directions at once. A single stage keeps the paper's depth of 1: its replicas work in step, where
    more in flight hide nothing.

    Args:
        loads, wiring, pace_ms, sync_ms: as `candidates`.
        fits: whether depths fit the memory that there is.
    """
    replicas = [load.replicas for load in loads]
    paper = tuple(paper_depths(replicas))
    mode = default_mode(len(loads))
    spent = effort(loads, paper)
    if spent > _MOST_EFFORT:
        return Depths(paper, None, paper, None)
    paper_ms = steady_ms(loads, paper, wiring, mode)
    if len(loads) == 1 or pace_ms == 0:
        return Depths(paper, paper_ms, paper, paper_ms, searched=True)
    target = _REACHED * min(pace_ms, paper_ms if fits(paper) else math.inf)

    def in_flight(depths: Sequence[int]) -> int:
        return sum(depth * r for depth, r in zip(depths, replicas, strict=True))

    order = [depths for depths in candidates(loads, wiring, pace_ms, sync_ms) if depths != paper]
    order.insert(sum(in_flight(depths) <= in_flight(paper) for depths in order), paper)
    tried: list[tuple[tuple[int, ...], float]] = []
    for depths in order:
        if deadlock_of(replicas, depths) is not None or not fits(depths):
            continue
        spent += 0 if depths == paper else effort(loads, depths)
        if spent > _MOST_EFFORT:
            break
        ms = paper_ms if depths == paper else steady_ms(loads, depths, wiring, mode)
        if ms <= target:
            return Depths(depths, ms, paper, paper_ms, searched=True)
        tried.append((depths, ms))
    if not tried:
        return Depths(paper, paper_ms, paper, paper_ms, searched=True)
    fastest = min(ms for _, ms in tried)
    depths, ms = min((one for one in tried if one[1] <= fastest * _SAME), key=lambda one: in_flight(one[0]))
    return Depths(depths, ms, paper, paper_ms, searched=True)


def rate_depths(loads: Sequence[StageLoad], wiring: Wiring, in_flight: Sequence[int]) -> Depths:
    """Simulate depths that are given, beside the paper's."""
    mode = default_mode(len(loads))

    def simulate(depths: tuple[int, ...]) -> float | None:
        return None if effort(loads, depths) > _MOST_EFFORT else steady_ms(loads, depths, wiring, mode)

    given, paper = tuple(in_flight), tuple(paper_depths([load.replicas for load in loads]))
    paper_ms = simulate(paper)
    return Depths(given, paper_ms if given == paper else simulate(given), paper, paper_ms)


def given_depths(replicas: Sequence[int], in_flight: str | Sequence[int]) -> tuple[int, ...]:
    """Depths that someone asked for.

    Args:
        replicas: r_s.
        in_flight: `noam` for the paper's, or one depth a stage, as numbers or joined by `-`.

    Raises:
        UserError: they do not fit the stages, or deadlock; the text says what to do.
    """
    if in_flight == "noam":
        return tuple(paper_depths(replicas))
    given = in_flight if isinstance(in_flight, str) else "-".join(map(str, in_flight))
    config = "-".join(map(str, replicas))
    parts = given.split("-")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise UserError(f"in_flight is {given!r}; expected auto, noam, or depths of 1 or more such as 7-5-3-1.")
    depths = tuple(map(int, parts))
    paper = "-".join(map(str, paper_depths(replicas)))
    if len(depths) != len(replicas):
        raise UserError(
            f"in_flight {given} has {len(depths)} depths, config {config} has {len(replicas)} stages; "
            f"give one a stage, such as {paper}."
        )
    reason = deadlock_of(replicas, depths)
    if reason is not None:
        raise UserError(f"{reason}. Give deeper earlier stages, such as {paper}.")
    return depths


def deadlock_of(replicas: Sequence[int], depths: Sequence[int]) -> str | None:
    """Why these depths deadlock as pd-train runs them by default; None where they do not."""
    mode = default_mode(len(replicas))
    lags = [stage_versions(mode, replicas, depths, s).lag for s in range(len(replicas))]
    return find_deadlock(replicas, depths, lags)
