"""The best partition whose stages keep within a memory limit, exactly (design, sections 2 and 4).

A stage's memory depends on its depth, and at the paper's depths that follows from the machines at and behind it:
w = ceil(R / r), R of them in all and r of its own. The activations that wait at it follow from the stage before,
by q = w_{s-1} r_{s-1} alone. So at a threshold t milliseconds a minibatch, let

    room(i, R) = the largest q that some plan on exactly R machines for the layers from boundary i on can stand
               = max over boundaries j > i and r <= R of the q that stage [i, j) with r replicas has memory for,
                 its time and the cut at j at or under t, and w r <= room(j, R - r)

with room(N, 0) without bound. Some R <= M with room(0, R) >= 0 says that t can be met, and `search` finds the least.
Whether a stage recomputes is a choice of the maximum like j and r. This costs O(N^2 M^2) a threshold, so it is done
only where the plan without a limit does not fit.

Exact means: of the plans at the paper's depths, which are those that the cost model assumes. Where that is too much
work, `rough.rough_partition` looks for a plan in the same manner, with one label a boundary, and may miss the best.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pd_format.memory import held_bytes
from pd_format.schedule import paper_depths
from pd_plan import search
from pd_plan.cluster import Cluster
from pd_plan.cost import PAPER, Chain, CostModel, Floats, Ints, Partition, cut_ms, minibatch_ms, stage_ms, sync_ms
from pd_plan.limits import Candidate, Limit, limited_minibatch_ms
from pd_plan.partition import SLACK, best_partition
from pd_plan.rough import rough_partition
from pd_plan.ties import Edges, fewest_bytes

__all__ = ["Limited", "RoomSearch", "best_limited", "is_small_enough"]

Rooms = NDArray[np.int32]

_MOST_WORK = 2.5e7
"""Stages, each with its depth, that one threshold looks at; some tenths of a second."""


class Limited(NamedTuple):
    """A plan within the limit."""

    partition: Partition
    recompute: tuple[bool, ...]
    """Of each stage."""
    exact: bool
    """Whether no other plan at the paper's depths can be faster."""


def best_limited(
    chain: Chain, limit: Limit, cluster: Cluster, model: CostModel = PAPER, near: Limited | None = None
) -> Limited | None:
    """The plan of the least A within the limit, at the paper's depths; None where there is none.

    Among values within 1e-9 of each other: fewer machines, then fewer stages, then fewer stages that recompute, then
    fewer bytes a minibatch, then later cuts.

    Args:
        chain: of the model.
        limit: on the memory of a worker.
        cluster: of the machines.
        model: of the costs.
        near: a plan within the limit on at most M machines that may be among the best; it changes nothing but how
            long it takes.
    """
    free = best_partition(chain, cluster, model)
    if limit.fits(free, paper_depths(free.replicas)):
        return Limited(free, (False,) * len(free.ends), exact=True)
    if not is_small_enough(chain, cluster):
        rough = rough_partition(chain, limit, cluster, model)
        return None if rough is None else Limited(*rough, exact=False)
    rooms = RoomSearch(chain, limit, cluster, model)
    some = rooms.plan_under(np.inf) if near is None else near[:2]
    if some is None:
        return None

    def value(plan: Candidate) -> float:
        return limited_minibatch_ms(chain, limit.sizes, *plan, cluster, model)

    def probe(threshold: float) -> float | None:
        plan = rooms.plan_under(threshold)
        return None if plan is None else value(plan)

    lower = minibatch_ms(chain, free, cluster, model) * (1 - search.EQUAL)
    found = search.least(lower, value(some), probe, near=near is not None)
    return Limited(*rooms.best_of_equals(found.threshold), exact=True)


def is_small_enough(chain: Chain, cluster: Cluster) -> bool:
    """Whether the exact search takes seconds at most."""
    return (chain.most_stages + 1) ** 2 / 2 * cluster.machines * (cluster.machines + 1) / 2 <= _MOST_WORK


class _Node(NamedTuple):
    """What a plan's rest depends on: where it begins, its machines, and the minibatches that wait at it."""

    boundary: int
    machines: int
    demand: int


class RoomSearch:
    """Answers for thresholds, with tables of what every stage at every depth has room for.

    Args:
        chain: of the model.
        limit: on the memory.
        cluster: of the machines.
        model: of the costs.
        most_in_flight: at a stage, where the paper's depth is more; such plans are slower than the model says.
    """

    def __init__(
        self,
        chain: Chain,
        limit: Limit,
        cluster: Cluster,
        model: CostModel = PAPER,
        most_in_flight: int | None = None,
    ) -> None:
        self._chain, self._limit, self._cluster = chain, limit, cluster
        self._at = np.array(chain.boundaries)
        self._last = len(self._at) - 1
        machines = cluster.machines
        self._most_in_flight = machines if most_in_flight is None else most_in_flight
        # Pairs (R, r), those of one R beside each other, and the table of each: one a (r, w).
        self._total = np.concatenate([np.full(R, R) for R in range(1, machines + 1)])
        self._replicas = np.concatenate([np.arange(1, R + 1) for R in range(1, machines + 1)])
        self._begin = np.array([R * (R - 1) // 2 for R in range(1, machines + 2)])
        self._depth = np.minimum(-(-self._total // self._replicas), self._most_in_flight)
        self._demand = self._depth * self._replicas
        kinds, self._kind = np.unique(np.stack([self._replicas, self._depth], axis=1), axis=0, return_inverse=True)
        self._kind = self._kind.reshape(-1)
        self._kinds = [(int(r), int(w)) for r, w in kinds]
        self._most = 2 * machines + 1
        rate = cluster.bytes_per_ms
        compute = chain.prefix_ms[self._at]
        again = limit.sizes.forward_ms[self._at]
        self._variants: list[tuple[Floats, Rooms]] = [(compute, self._rooms(False))]
        if limit.recompute:
            self._variants.append((compute + again, self._rooms(True)))
        weights = np.array([float(chain.weight_bytes[place]) for place in self._at])
        counts = np.arange(1.0, machines + 1)[:, None]
        self._counts = counts
        self._sync = [sync_ms(weights[i + 1 :] - weights[i], counts, rate, model) for i in range(self._last)]
        self._cuts = np.zeros(self._last + 1)
        self._cuts[1:-1] = [
            cut_ms(float(chain.activation_bytes[place - 1]), rate, model) for place in chain.boundaries[1:-1]
        ]

    def plan_under(self, threshold: float) -> Candidate | None:
        """Some plan on at most M machines at or under the threshold (give or take `SLACK`), or None."""
        limit = threshold * (1 + SLACK)
        room = self._room(limit)
        found = np.flatnonzero(room[0] >= 0)
        if not found.size:
            return None
        ends, replicas, flags = [], [], []
        node = _Node(0, int(found[0]), 0)
        while node.boundary < self._last:
            to, counts, again = self._stages(node, room, limit)
            # The longest stage: what is left then is least.
            best = int(to.argmax())
            ends.append(int(self._at[to[best]]))
            replicas.append(int(counts[best]))
            flags.append(bool(again[best]))
            node = self._next(node, int(to[best]), int(counts[best]))
        return Partition(tuple(ends), tuple(replicas)), tuple(flags)

    def best_of_equals(self, threshold: float) -> Candidate:
        """Of all plans at or under the threshold, the one that the tie rule prefers; there is at least one."""
        room = self._room(threshold)
        start = _Node(0, int(np.flatnonzero(room[0] >= 0)[0]), 0)
        end = _Node(self._last, 0, 0)
        waiting: list[set[_Node]] = [set() for _ in range(self._last)]
        waiting[0].add(start)
        nodes: list[_Node] = []
        stages: list[tuple[list[_Node], Ints, NDArray[np.bool_]]] = []
        for boundary in range(self._last):
            for node in sorted(waiting[boundary]):
                to, counts, again = self._stages(node, room, threshold)
                following = [self._next(node, j, r) for j, r in zip(to.tolist(), counts.tolist(), strict=True)]
                for other in following:
                    if other != end:
                        waiting[other.boundary].add(other)
                nodes.append(node)
                stages.append((following, counts, again))
        nodes.append(end)
        index = {node: place for place, node in enumerate(nodes)}
        last = len(nodes) - 1
        edges = Edges(last)
        # One key orders by stages, then by stages that recompute, of which there are at most `_last`.
        stage = self._last + 1
        key = np.zeros(last + 1, dtype=np.int64)
        recomputes: dict[tuple[int, int], bool] = {}
        for place in range(last - 1, -1, -1):
            following, counts, again = stages[place]
            to = np.array([index[other] for other in following])
            order = np.argsort(to, kind="stable")
            to, counts, again = to[order], counts[order], again[order]
            keys = key[to] + stage + again
            key[place] = keys.min()
            tied = keys == key[place]
            edges.add(place, to[tied], counts[tied])
            recomputes.update({(place, int(j)): bool(flag) for j, flag in zip(to[tied], again[tied], strict=True)})
        partition = fewest_bytes(self._chain, [int(self._at[node.boundary]) for node in nodes], edges)
        flags, node = [], start
        boundary_of = {int(place): boundary for boundary, place in enumerate(self._at)}
        for place, count in zip(partition.ends, partition.replicas, strict=True):
            other = self._next(node, boundary_of[place], count)
            flags.append(recomputes[index[node], index[other]])
            node = other
        return partition, tuple(flags)

    def _next(self, node: _Node, boundary: int, replicas: int) -> _Node:
        """Where a stage from a node to a boundary leads."""
        if boundary == self._last:
            return _Node(boundary, 0, 0)
        depth = min(-(-node.machines // replicas), self._most_in_flight)
        return _Node(boundary, node.machines - replicas, depth * replicas)

    def _rooms(self, recompute: bool) -> Rooms:
        """For each (r, w), the largest q that stage [i, j) has memory for; -1 where it has none for itself."""
        sizes, at, last = self._limit.sizes, self._at, self._last

        # Integers divide faster than floats. What is over the limit by itself counts as just over it, lest sums leave
        # their 64 bits.
        most = min(self._limit.memory_bytes + 1, 2**59 // self._cluster.machines)

        def between(prefix: tuple[int, ...]) -> Ints:
            values = np.array([prefix[place] for place in at], dtype=np.int64)
            sums: Ints = np.clip(values[None, :] - values[:, None], 0, most)
            return sums

        parameters, trainable, stash = map(between, (sizes.parameters, sizes.trainable, sizes.stash))
        crossing = np.array([min(sizes.crossing[place], most) for place in at], dtype=np.int64)
        forward = np.tri(last + 1, k=0, dtype=np.bool_).T ^ np.eye(last + 1, dtype=np.bool_)
        result = np.full((len(self._kinds), last + 1, last + 1), -1, dtype=np.int32)
        for kind, (r, w) in enumerate(self._kinds):
            # Recomputing saves nothing where only one minibatch is in flight.
            if recompute and w == 1:
                continue

            def left(lag: int, r: int = r, w: int = w) -> Ints:
                held: Ints = held_bytes(
                    parameters=parameters,
                    trainable=trainable,
                    stash=stash,
                    input_bytes=crossing[:, None],
                    output_bytes=crossing[None, :],
                    replicas=r,
                    in_flight=w,
                    lag=lag,
                    sets=w + lag,
                    states=sizes.states,
                    compressed=sizes.compressed,
                    recompute=recompute,
                )
                return np.subtract(self._limit.memory_bytes, held)

            over = left(1 if r > 1 else 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                arrivals = np.where(crossing[:, None] > 0, np.floor(over / crossing[:, None]), np.inf)
            room = np.where(forward & (over >= 0), np.clip((arrivals - 1) * r, -1, self._most), -1)
            # Nothing arrives at the first stage, and one that is alone does not overlap its synchronisation.
            room[0] = np.where(forward[0] & (over[0] >= 0), self._most, -1)
            room[0, last] = self._most if w == 1 and left(0)[0, last] >= 0 else -1
            result[kind] = room
        return result

    def _room(self, threshold: float) -> Rooms:
        """room(i, R), a row a boundary."""
        machines, last = self._cluster.machines, self._last
        room = np.full((last + 1, machines + 1), -1, dtype=np.int32)
        room[last, 0] = self._most
        rest = self._total - self._replicas
        compute = self._variants[0][0]
        with np.errstate(invalid="ignore"):
            # So many machines, at least, compute what is before and what is behind.
            before = np.ceil(compute / threshold * (1 - 1e-6)) if threshold > 0 else np.zeros(last + 1)
            behind = np.ceil((compute[-1] - compute) / threshold * (1 - 1e-6)) if threshold > 0 else before
        for i in range(last - 1, -1, -1):
            fewest, most = max(int(behind[i]), 1), machines - int(before[i])
            if fewest > most:
                continue
            pairs = slice(int(self._begin[fewest - 1]), int(self._begin[most]))
            replicas = self._replicas[pairs] - 1
            best = np.full(pairs.stop - pairs.start, -1, dtype=np.int32)
            for variant, (times, rooms) in enumerate(self._variants):
                inside = self._inside(i, times, threshold)
                reach = int(np.flatnonzero(inside.any(axis=0))[-1]) + 1 if inside.any() else 0
                if not reach:
                    continue
                ends = slice(i + 1, i + 1 + reach)
                allowed = inside[replicas, :reach]
                allowed &= room.T[rest[pairs], ends] >= self._demand[pairs][:, None]
                found = np.where(allowed, rooms[self._kind[pairs], i, ends], -1).max(axis=1)
                best = found if variant == 0 else np.maximum(best, found)
            room[i, fewest : most + 1] = np.maximum.reduceat(best, self._begin[fewest - 1 : most] - pairs.start)
        return room

    def _inside(self, i: int, times: Floats, threshold: float) -> NDArray[np.bool_]:
        """Which stages from boundary i on, a row for each r, keep to the threshold, as do their cuts."""
        inside: NDArray[np.bool_] = stage_ms(times[i + 1 :] - times[i], self._sync[i], self._counts) <= threshold
        inside &= self._cuts[i + 1 :] <= threshold
        return inside

    def _stages(self, node: _Node, room: Rooms, threshold: float) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """The stages that a plan may go on with at a node: where they end, their replicas, whether they recompute.

        Where a stage may do without recomputing, that is the only choice.
        """
        i, machines, demand = node
        pairs = slice(int(self._begin[machines - 1]), int(self._begin[machines]))
        rest = machines - self._replicas[pairs]
        follows = room.T[rest, i + 1 :] >= self._demand[pairs][:, None]
        chosen = np.zeros(follows.shape, dtype=np.int64)
        for variant, (times, rooms) in reversed(list(enumerate(self._variants, start=1))):
            inside = self._inside(i, times, threshold)[:machines]
            fits = inside & follows & (rooms[self._kind[pairs], i, i + 1 :] >= demand)
            chosen[fits] = variant
        counts, to = np.nonzero(chosen)
        return to + i + 1, counts + 1, chosen[counts, to] == 2
