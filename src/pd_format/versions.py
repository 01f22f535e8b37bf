"""Which weight version each pass uses, as numbers (the paper, section 3.3; design, section 4).

Version v of a stage is its parameters after v updates of the segment; round j makes version j + 1.

    w = 3, lag 0        F0 F1 F2 B0 F3 B1 F4 B2 F5 ...
    version used         0  0  0  0  1  0  2  0  3
    version made                  1     2     3
"""

from __future__ import annotations

from pd_format.schedule import work_order

__all__ = ["lag_of", "sets_needed", "stash_version"]


def lag_of(replicas: int, sync: str) -> int:
    """1 where a round's synchronisation overlaps the next work item: in a replicated stage under `overlap`."""
    return 1 if replicas > 1 and sync == "overlap" else 0


def stash_version(round: int, in_flight: int, lag: int) -> int:
    """The version that F(j) and B(j) use under weight stashing: max(0, j - w + 1 - lag)."""
    return max(0, round - in_flight + 1 - lag)


def sets_needed(in_flight: int, lag: int) -> int:
    """How many parameter sets a worker must hold under weight stashing, by walking its order.

    A new version may land as soon as the replica's own backward pass of its round is over; every version from the
    oldest that a minibatch in flight, or the next forward pass, still uses up to the newest must be there. It comes
    to w + lag, and to 1 where w is 1 and there is no lag: the update then works in place.
    """
    most = 1
    newest = 0
    running: list[int] = []
    for item in work_order(0, 1, in_flight, 3 * (in_flight + lag) + 2):
        if item.forward:
            running.append(stash_version(item.round, in_flight, lag))
        else:
            running.remove(stash_version(item.round, in_flight, lag))
            newest = item.round + 1
        most = max(most, newest - min([*running, stash_version(newest + len(running), in_flight, lag)]) + 1)
    return most
