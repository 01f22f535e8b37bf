"""1F1B as a value: what each replica runs, in order (the paper, sections 3.2 and 4; design, section 3).

What runs is what is printed, simulated, checked and drawn: nothing else holds a copy of this order.

    four stages, one worker each, depths 4-3-2-1 (numbers are minibatches; F above, B below):

    stage 0   F0 F1 F2 F3          B0 F4 B1 F5 ...
    stage 1      F0 F1 F2       B0 F3 B1 F4    ...
    stage 2         F0 F1    B0 F2 B1 F3       ...
    stage 3            F0 B0 F1 B1 F2 B2       ...

Letters: r_s replicas of stage s, w_s its `in_flight`, b a minibatch of the segment, j the round of a replica
(b = j r + k on replica k).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["WorkItem", "find_deadlock", "paper_depths", "rounds_of", "work_order"]


class WorkItem(NamedTuple):
    """One forward or backward pass of a replica."""

    forward: bool
    round: int
    minibatch: int

    def __str__(self) -> str:
        return f"{'F' if self.forward else 'B'}{self.minibatch}"


def rounds_of(replica: int, replicas: int, minibatches: int) -> int:
    """How many of a segment's minibatches this replica gets: those with b mod r = k."""
    return (minibatches - replica + replicas - 1) // replicas


def work_order(replica: int, replicas: int, in_flight: int, minibatches: int) -> Iterator[WorkItem]:
    """F(0) .. F(w-1), then B(0) F(w) B(1) F(w+1) ..., then the remaining B.

    Args:
        replica: k, from 0.
        replicas: r, of the stage.
        in_flight: w, of the stage.
        minibatches: of the whole segment, over all replicas.
    """
    rounds = rounds_of(replica, replicas, minibatches)
    for j in range(min(in_flight, rounds)):
        yield WorkItem(True, j, j * replicas + replica)
    for j in range(rounds):
        yield WorkItem(False, j, j * replicas + replica)
        if j + in_flight < rounds:
            yield WorkItem(True, j + in_flight, (j + in_flight) * replicas + replica)


def paper_depths(replicas: Sequence[int]) -> list[int]:
    """The paper's `in_flight` of each stage: ceil((r_s + r_{s+1} + ...) / r_s); NOAM at stage 0, 1 at the last."""
    return [-(-sum(replicas[s:]) // replicas[s]) for s in range(len(replicas))]


def find_deadlock(replicas: Sequence[int], in_flight: Sequence[int], lags: Sequence[int]) -> str | None:
    """Say why these depths deadlock, or None where they do not (design, section 3).

    A stage t behind stage s asks for (w_t - 1) r_t minibatches ahead of the first backward pass that it answers;
    stage s must be able to send that many before it waits for an answer.

    Args:
        replicas: r_s.
        in_flight: w_s.
        lags: 1 where a round's synchronisation overlaps the next work item, else 0 (design, section 4).
    """
    for s in range(len(replicas)):
        for t in range(s + 1, len(replicas)):
            ahead = (in_flight[t] - 1) * replicas[t]
            depths = " and ".join(
                f"in_flight {in_flight[x]} of stage {x} ({replicas[x]} replica{'s' if replicas[x] > 1 else ''})"
                for x in (s, t)
            )
            if ahead >= in_flight[s] * replicas[s]:
                return (
                    f"{depths} deadlock: stage {t} waits for more than {ahead} minibatches, "
                    f"stage {s} sends {in_flight[s] * replicas[s]} before it waits for an answer"
                )
            if replicas[s] > 1 and lags[s] == 0 and ahead > (in_flight[s] - 1) * replicas[s]:
                return (
                    f"{depths} deadlock without overlap of the synchronisation: stage {s} "
                    f"completes a round only after its replicas' next backward passes, stage {t} waits for more "
                    f"than {ahead} minibatches"
                )
    return None
