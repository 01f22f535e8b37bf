"""Runs the schedule of a plan on a clock instead of on machines (the paper, sections 3.2 and 3.3; design, section 3).

What a worker runs is `pd_format.schedule.work_order`, and what it waits for are the versions of `pd_format.versions`:
the order and the rules of pd-train itself. Passes take the profile's times; transfers take bytes / bandwidth and run
beside them; nothing else takes time.

* F(b) waits for its activations and for the version that it uses. When it ends, its activations leave.
* B(b) waits for its gradients and for the version that must be whole by then. When it ends, the gradients of its
  input leave.
* Of a stage with r > 1 replicas and w bytes of parameters, every replica sends (r-1)/r w of gradients in a round, each
  part of them as soon as the backward pass has computed it (wait-free backpropagation), and as much of parameters:
  those of its shard, each part as soon as all replicas' gradients of that part are there. It receives as much of both.
  A part, which in truth goes to every other replica, is one transfer to one of them here, in turn. An update takes no
  time; a version is complete at a replica when all its parts are there. A stage without such parameters waits for none.
* In inference B(b) takes no time and its answer, which is empty, none either: it only bounds what is in flight.

Links are full duplex; `network` says which transfer goes first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pd_format.schedule import WorkItem, work_order
from pd_format.versions import Mode, stage_versions
from pd_plan.network import Network, Parcel, SharedCards, Wiring

__all__ = [
    "Pass",
    "Recording",
    "StageLoad",
    "Transfer",
    "effort",
    "parts_of",
    "record",
    "steady_ms",
    "work_of",
]

_MOST_PARTS = 16
"""Of a synchronisation: enough that the last part, which no pass can hide, is small."""
_SAME = 1e-4
"""Windows whose paces differ by less, relatively, show that the pipeline has found its rhythm."""
_WINDOWS = 6
_EVENTS = 40_000
"""Larger pipelines are watched for fewer windows, but at least for two."""
_LONGEST_CYCLE = 1000
"""Minibatches; replica counts with a longer common multiple are measured over windows that do not divide by it."""


class StageLoad(NamedTuple):
    """What one stage has to do for a minibatch."""

    forward_ms: float
    backward_ms: float
    output_bytes: int
    """Over the cut after it, and as much back; 0 at the last stage."""
    weight_bytes: int
    """Of its trainable parameters."""
    replicas: int
    ready: tuple[float, ...] = ()
    """When in the backward pass, from 0 to 1, each of `parts_of(replicas)` equal parts of the parameters has its
    gradients; evenly where empty."""


class Pass(NamedTuple):
    """A forward or backward pass that a worker ran."""

    worker: int
    stage: int
    replica: int
    item: WorkItem
    start_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """Something that crossed the network."""

    kind: str
    """`activations`, `gradients` (of activations), `parameter gradients` or `parameters`."""
    number: int
    """The minibatch; of the latter two the round, and the version that it makes."""
    part: int
    """Of the latter two, else 0."""
    source: int
    """A worker."""
    target: int
    start_ms: float
    end_ms: float


class Recording(NamedTuple):
    """All that happened in a simulated run, in the order in which it ended."""

    passes: list[Pass]
    transfers: list[Transfer]


def parts_of(replicas: int) -> int:
    """In how many parts a stage synchronises: 0 for one replica, fewer for very many, to keep the simulation short."""
    return max(2, min(_MOST_PARTS, 256 // replicas)) if replicas > 1 else 0


def work_of(loads: Sequence[StageLoad]) -> int:
    """Events of a minibatch: two passes and two transfers of each stage; each part is released, sent and answered."""
    return 4 * len(loads) + 3 * sum(parts_of(load.replicas) for load in loads if load.weight_bytes)


def effort(loads: Sequence[StageLoad], depths: Sequence[int]) -> int:
    """About how many events `steady_ms` goes through at most; some two hundred thousand take a second."""
    window = _window(loads, depths)
    return (_windows(loads, window) + 1) * window * work_of(loads)


def steady_ms(loads: Sequence[StageLoad], depths: Sequence[int], wiring: Wiring, mode: Mode) -> float:
    """What a minibatch takes once the pipeline has found its rhythm, in ms.

    Minibatches are counted as they leave, in windows that hold all those in flight; two windows of one pace settle it,
    or else the mean of the later half of the windows.

    Args:
        loads: of the stages.
        depths: w_s, `in_flight` of each stage.
        wiring: the network.
        mode: how weights are versioned in the run.

    Raises:
        RuntimeError: the depths deadlock, which `pd_format.schedule.find_deadlock` foretells.
    """
    run = _Run(loads, depths, wiring, mode)
    window = _window(loads, depths)
    run.until(window)
    end = run.finished_ms[-1]
    paces: list[float] = []
    for _ in range(_windows(loads, window)):
        run.until(len(run.finished_ms) + window)
        paces.append((run.finished_ms[-1] - end) / window)
        end = run.finished_ms[-1]
        if len(paces) > 1 and abs(paces[-1] - paces[-2]) <= _SAME * paces[-1]:
            return paces[-1]
    later = paces[len(paces) // 2 :]
    return math.fsum(later) / len(later)


def record(
    loads: Sequence[StageLoad], depths: Sequence[int], wiring: Wiring, mode: Mode, minibatches: int
) -> Recording:
    """Everything that happens from the start until so many minibatches have left an endless pipeline.

    Args, Raises: as `steady_ms`.
    """
    run = _RecordedRun(loads, depths, wiring, mode)
    run.until(minibatches)
    return Recording(run.passes, run.transfers)


def _window(loads: Sequence[StageLoad], depths: Sequence[int]) -> int:
    """Minibatches of a window: all that are in flight, and whole cycles of the replicas where that is not too long."""
    replicas = [load.replicas for load in loads]
    # A rhythm is often a few minibatches long, of which 12 is a multiple.
    cycles = (math.lcm(12, *replicas), math.lcm(*replicas), max(replicas))
    cycle = next((cycle for cycle in cycles if cycle <= _LONGEST_CYCLE), cycles[-1])
    in_flight = max(depth * load.replicas for depth, load in zip(depths, loads, strict=True))
    return -(-max(in_flight, 2 * len(loads), 24) // cycle) * cycle


def _windows(loads: Sequence[StageLoad], window: int) -> int:
    return max(2, min(_WINDOWS, _EVENTS // (window * work_of(loads)) - 1))


class _Stage:
    """What the replicas of a stage share."""

    def __init__(self, index: int, load: StageLoad, first_worker: int, wiring: Wiring) -> None:
        self.index = index
        self.load = load
        self.first_worker = first_worker
        self.parts = parts_of(load.replicas) if load.weight_bytes else 0
        self.ready = load.ready or tuple((part + 1) / self.parts for part in range(self.parts))
        sent = (load.replicas - 1) * load.weight_bytes / load.replicas
        self.part_ms = sent / self.parts / wiring.bytes_per_ms if self.parts else 0.0
        self.output_ms = load.output_bytes / wiring.bytes_per_ms
        self.gradients: dict[tuple[int, int], int] = {}
        """(round, part): from how many replicas its gradients have arrived; until it is all of them."""

    def partner(self, replica: int, part: int) -> int:
        """The worker that a replica sends a part to."""
        others = self.load.replicas - 1
        return self.first_worker + (replica + 1 + part % others) % self.load.replicas


class _Worker:
    """One replica: what it runs next, and what it has for it."""

    def __init__(self, rank: int, stage: _Stage, replica: int, depth: int) -> None:
        self.rank = rank
        self.stage = stage
        self.replica = replica
        self.order = work_order(replica, stage.load.replicas, depth, sys.maxsize)
        self.item = next(self.order)
        self.version = 0
        """What the next item needs."""
        self.newest = 0
        self.parameters: dict[int, int] = {}
        """Of versions after the newest: how many parts have arrived."""
        self.is_running = False
        self.activations: set[int] = set()
        self.gradients: set[int] = set()


class _Run:
    """A pipeline on a clock, with no end of minibatches."""

    def __init__(self, loads: Sequence[StageLoad], depths: Sequence[int], wiring: Wiring, mode: Mode) -> None:
        replicas = [load.replicas for load in loads]
        self.versions = [stage_versions(mode, replicas, depths, s) for s in range(len(loads))]
        self.stages: list[_Stage] = []
        self.workers: list[_Worker] = []
        for index, (load, depth) in enumerate(zip(loads, depths, strict=True)):
            stage = _Stage(index, load, len(self.workers), wiring)
            self.stages.append(stage)
            for replica in range(load.replicas):
                self.workers.append(_Worker(len(self.workers), stage, replica, depth))
        self.network: Network | SharedCards = Network(len(self.workers), wiring.links, self._transfer_starts)
        if wiring.links == "shared":
            self.network = SharedCards(self._at, self._transfer_ends)
        self.answers_are_empty = not wiring.gradients
        self.finished_ms: list[float] = []
        """When each minibatch left the pipeline, in order of time."""
        self._now = 0.0
        self._age = 0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        for worker in self.workers:
            self._expect(worker)

    def until(self, minibatches: int) -> None:
        """Go on until so many minibatches have left the pipeline.

        Raises:
            RuntimeError: the depths deadlock.
        """
        agenda = self._agenda
        while len(self.finished_ms) < minibatches:
            if not agenda:
                raise RuntimeError(f"these depths deadlock at {self._now} ms")
            self._now, _, happen, arguments = heappop(agenda)
            happen(*arguments)
            if not agenda or agenda[0][0] > self._now:
                self.network.settle(self._now)

    def _at(self, ms: float, happen: Callable[..., None], *arguments: object) -> None:
        self._age += 1
        heappush(self._agenda, (ms, self._age, happen, arguments))

    def _expect(self, worker: _Worker) -> None:
        """Look up what the worker's next item waits for."""
        stage, item = worker.stage, worker.item
        if stage.parts:
            versions, b = self.versions[stage.index], item.minibatch
            if item.forward:
                worker.version = versions.forward(b)
            else:
                worker.version = max(versions.complete_before_backward(b), versions.backward(b))
        self._try(worker)

    def _try(self, worker: _Worker) -> None:
        """Start the worker's next item if all that it waits for is there."""
        item, stage = worker.item, worker.stage
        if worker.is_running or worker.newest < worker.version:
            return
        is_end = stage.index == (0 if item.forward else len(self.stages) - 1)
        if not is_end:
            arrived = worker.activations if item.forward else worker.gradients
            if item.minibatch not in arrived:
                return
            arrived.remove(item.minibatch)
        worker.is_running = True
        takes = stage.load.forward_ms if item.forward else stage.load.backward_ms
        self._at(self._now + takes, self._pass_ends, worker, self._now)
        if not item.forward:
            for part in range(stage.parts):
                self._at(self._now + takes * stage.ready[part], self._synchronise, worker, item.round, part, True)

    def _pass_ends(self, worker: _Worker, start_ms: float) -> None:
        item, stage = worker.item, worker.stage
        self._passed(worker, start_ms)
        worker.is_running = False
        worker.item = next(worker.order)
        neighbour = stage.index + (1 if item.forward else -1)
        if 0 <= neighbour < len(self.stages):
            other = self.stages[neighbour]
            target = other.first_worker + item.minibatch % other.load.replicas
            kind, takes = ("activations", stage.output_ms) if item.forward else ("gradients", other.output_ms)
            if not item.forward and self.answers_are_empty:
                self.workers[target].gradients.add(item.minibatch)
                self._try(self.workers[target])
            else:
                self._send(kind, item.minibatch, 0, worker.rank, target, takes)
        elif not item.forward:
            self.finished_ms.append(self._now)
        self._expect(worker)

    def _synchronise(self, worker: _Worker, number: int, part: int, is_gradient: bool) -> None:
        """A part's gradients of a round leave, or the parameters of a version."""
        stage = worker.stage
        kind = "parameter gradients" if is_gradient else "parameters"
        self._send(kind, number, part, worker.rank, stage.partner(worker.replica, part), stage.part_ms)

    def _send(self, kind: str, number: int, part: int, source: int, target: int, takes_ms: float) -> None:
        self._age += 1
        self.network.add(self._now, Parcel(self._age, kind, number, part, source, target, takes_ms))

    def _transfer_starts(self, start_ms: float, parcel: Parcel) -> None:
        self._at(start_ms + parcel.takes_ms, self._transfer_ends, parcel, start_ms)

    def _transfer_ends(self, parcel: Parcel, start_ms: float) -> None:
        self._transferred(parcel, start_ms)
        self.network.end(parcel)
        worker = self.workers[parcel.target]
        if parcel.kind == "activations":
            worker.activations.add(parcel.number)
            self._try(worker)
        elif parcel.kind == "gradients":
            worker.gradients.add(parcel.number)
            self._try(worker)
        elif parcel.kind == "parameters":
            self._take_parameters(worker, parcel.number)
        else:
            self._take_gradients(worker.stage, parcel.number, parcel.part)

    def _take_gradients(self, stage: _Stage, round: int, part: int) -> None:
        """One more replica's gradients are at the shards; with the last one's the parameters leave."""
        arrived = stage.gradients.get((round, part), 0) + 1
        if arrived < stage.load.replicas:
            stage.gradients[round, part] = arrived
            return
        del stage.gradients[round, part]
        for shard in self.workers[stage.first_worker : stage.first_worker + stage.load.replicas]:
            self._synchronise(shard, round + 1, part, False)

    def _take_parameters(self, worker: _Worker, version: int) -> None:
        arrived = worker.parameters.get(version, 0) + 1
        if arrived < worker.stage.parts:
            worker.parameters[version] = arrived
            return
        del worker.parameters[version]
        worker.newest = version
        self._try(worker)

    def _passed(self, worker: _Worker, start_ms: float) -> None:
        """The worker's item is over: something to remember, where a run is recorded."""

    def _transferred(self, parcel: Parcel, start_ms: float) -> None:
        """A transfer is over: something to remember, where a run is recorded."""


class _RecordedRun(_Run):
    """Remembers every pass and every transfer."""

    def __init__(self, loads: Sequence[StageLoad], depths: Sequence[int], wiring: Wiring, mode: Mode) -> None:
        self.passes: list[Pass] = []
        self.transfers: list[Transfer] = []
        super().__init__(loads, depths, wiring, mode)

    def _passed(self, worker: _Worker, start_ms: float) -> None:
        self.passes.append(Pass(worker.rank, worker.stage.index, worker.replica, worker.item, start_ms, self._now))

    def _transferred(self, parcel: Parcel, start_ms: float) -> None:
        _, kind, number, part, source, target, _ = parcel
        self.transfers.append(Transfer(kind, number, part, source, target, start_ms, self._now))
