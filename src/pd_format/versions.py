"""Which weight version each pass uses and when one is made, as numbers (the paper, section 3.4; design, section 4).

Version v of a stage is its parameters after v updates of the segment. An update averages the gradients of a run of
consecutive minibatches: one round of the stage (r minibatches), a group (2bw), or the whole segment (flush).

    stash, w = 3, lag 0     F0 F1 F2 B0 F3 B1 F4 B2 F5 ...
    version used             0  0  0  0  1  0  2  0  3
    version made                      1     2     3

Letters: b a minibatch of the segment, j its round at its replica, r, w and lag of the stage; r_0, w_0 and lag_0 of
stage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from pd_format.schedule import work_order

__all__ = ["Mode", "StageVersions", "default_sync", "lag_of", "least_group", "sets_needed", "stage_versions"]


@dataclass(frozen=True)
class Mode:
    """How weights are versioned in a run."""

    weights: str = "stash"
    """`stash`, `vertical-sync`, `none` (the paper's naive pipelining), or `2bw`."""
    sync: str = "overlap"
    """`overlap`, `bsp` or `asp`; of replicated stages."""
    flush: int | None = None
    """Segments of so many minibatches, with one update each."""
    group: int | None = None
    """G of 2bw: minibatches of one update."""

    @property
    def by_round(self) -> bool:
        """Whether an update averages one round of a stage."""
        return self.flush is None and self.weights != "2bw" and self.sync != "asp"

    @property
    def is_naive(self) -> bool:
        """Whether a backward pass meets the newest weights rather than those of its forward pass."""
        return self.flush is None and self.weights == "none"


def default_sync(stages: int) -> str:
    """How pd-train synchronises replicas unless told otherwise: in step where there is one stage, else overlapped."""
    return "bsp" if stages == 1 else "overlap"


def lag_of(replicas: int, sync: str) -> int:
    """1 where a round's synchronisation overlaps the next work item: in a replicated stage under `overlap`."""
    return 1 if replicas > 1 and sync == "overlap" else 0


def least_group(replicas: Sequence[int], in_flight: Sequence[int]) -> int:
    """The default G of 2bw: the least multiple of the replica counts' LCM that is at least max_s w_s r_s."""
    multiple = math.lcm(*replicas)
    return -(-max(w * r for w, r in zip(in_flight, replicas, strict=True)) // multiple) * multiple


@dataclass(frozen=True)
class StageVersions:
    """The versions of one stage under one mode."""

    mode: Mode
    replicas: int
    in_flight: int
    lag: int
    first_replicas: int
    first_behind: int
    """w_0 - 1 + lag_0: by how many rounds stage 0 computes with weights that are behind."""

    def forward(self, minibatch: int) -> int:
        """The version that F(b) uses."""
        round = minibatch // self.replicas
        if self.mode.flush is not None or self.mode.sync == "asp":
            return 0
        if self.mode.weights == "2bw":
            assert self.mode.group is not None
            return max(0, minibatch // self.mode.group - 1)
        met = self.first_stage(minibatch)
        if met is not None:
            return self.first_replicas * met // self.replicas
        return max(0, round - self.in_flight + 1 - self.lag)

    def backward(self, minibatch: int) -> int:
        """The version that B(b) uses: that of F(b), but for naive pipelining, which takes the newest."""
        if self.mode.is_naive:
            return max(0, minibatch // self.replicas - self.lag)
        return self.forward(minibatch)

    def first_stage(self, minibatch: int) -> int | None:
        """The version that b met at stage 0, where this stage's version follows from it; else None."""
        if self.mode.weights != "vertical-sync":
            return None
        return max(0, minibatch // self.first_replicas - self.first_behind)

    def complete_before_backward(self, minibatch: int) -> int:
        """The version that must be whole before B(b) starts, so that a shard holds at most lag + 1 rounds."""
        return max(0, minibatch // self.replicas - self.lag) if self.mode.by_round else 0

    def update_size(self, minibatches: int) -> int:
        """How many consecutive minibatches one update averages, in a segment of so many."""
        if self.mode.flush is not None:
            return max(1, minibatches)
        if self.mode.weights == "2bw":
            assert self.mode.group is not None
            return self.mode.group
        return self.replicas

    def is_wanted(self, version: int, forwards: range, backwards: range) -> bool:
        """Whether one of a replica's passes still to come uses the version.

        Args:
            version: asked about.
            forwards: the minibatches whose forward pass is to come.
            backwards: those whose backward pass is to come; they count under naive pipelining only, where a backward
                pass does not keep what its forward pass used.
        """
        if any(self.forward(b) == version for b in _until(forwards, self.forward, version)):
            return True
        return self.mode.is_naive and any(
            self.backward(b) == version for b in _until(backwards, self.backward, version)
        )


def _until(minibatches: range, used: Callable[[int], int], version: int) -> Iterator[int]:
    """The minibatches up to the first that uses a later version: versions never fall from one to the next."""
    return takewhile(lambda b: used(b) <= version, minibatches)


def _below(version: int, used: Iterable[int]) -> Iterator[int]:
    """The versions that minibatches to come use, as far as they are older than one."""
    return takewhile(lambda each: each < version, used)


@cache
def sets_needed(versions: StageVersions) -> int:
    """How many parameter sets a worker must hold, by walking the order of each replica.

    A new version may land as soon as the replica's own passes of its update are over. What must be there then: every
    version that a minibatch in flight or a pass to come uses, the newest, and with lag 1 the one before it, which may
    still be on its way to other replicas. Under stashing it comes to w + lag, and to 1 where w is 1 and there is no
    lag: the update then works in place.
    """
    r = versions.replicas
    size = versions.update_size(1)
    # Long enough for every version to have been forgotten and for any pattern of the stages' counts to come round.
    minibatches = 2 * math.lcm(r, versions.first_replicas) + 4 * r * (versions.in_flight + 1)
    minibatches += 4 * max(size, versions.first_replicas * (versions.first_behind + 1))
    if versions.mode.flush is not None:
        return 1
    if versions.mode.sync == "asp":
        return 2  # One to compute with, and one that gathers what arrives meanwhile.
    most = 1
    for replica in range(r):
        running: list[int] = []
        forwards = backwards = range(replica, minibatches, r)
        newest = 0
        for item in work_order(replica, r, versions.in_flight, minibatches):
            if item.forward:
                forwards = forwards[1:]
                running.append(versions.forward(item.minibatch))
            else:
                backwards = backwards[1:]
                running.remove(versions.forward(item.minibatch))
                newest = (backwards[0] if backwards else minibatches) // size
            # Graphs share one set of parameters under naive pipelining; else each keeps the set that it used.
            kept = _below(newest, map(versions.backward, backwards)) if versions.mode.is_naive else running
            wanted = _below(newest, map(versions.forward, forwards))
            sent = range(max(0, newest - versions.lag), newest + 1)
            most = max(most, len({*kept, *wanted, *sent}))
    return most


def stage_versions(mode: Mode, replicas: Sequence[int], in_flight: Sequence[int], stage: int) -> StageVersions:
    """The versions of a stage of a plan.

    Args:
        mode: of the run.
        replicas: r_s of all stages.
        in_flight: w_s of all stages.
        stage: which one.
    """
    sync = mode.sync if mode.by_round else "bsp"
    return StageVersions(
        mode=mode,
        replicas=replicas[stage],
        in_flight=in_flight[stage],
        lag=lag_of(replicas[stage], sync),
        first_replicas=replicas[0],
        first_behind=in_flight[0] - 1 + lag_of(replicas[0], sync),
    )
