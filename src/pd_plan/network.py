"""Which transfer goes over a link, and when: the network of the simulator (design, section 3).

Links are full duplex. Where they are network cards (`card`), a worker sends one transfer at a time and receives one at
a time, and a transfer takes the sender's way out and the receiver's way in together. Of those that could start at a
moment the one that became ready first does, so that one to a busy receiver does not hold up those behind it. Where
links are `pairwise`, each ordered pair of workers has one of its own, first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["LINKS", "Network", "Parcel", "Wiring"]

LINKS = ("card", "pairwise")


class Wiring(NamedTuple):
    """The network."""

    bytes_per_ms: float
    """B of each link, in each direction."""
    links: str = "card"
    """One of `LINKS`."""
    gradients: bool = True
    """Whether as much comes back over a cut as goes out; in inference answers are empty."""


class Parcel(NamedTuple):
    """A transfer that is under way or waits for its turn."""

    age: int
    kind: str
    number: int
    part: int
    source: int
    target: int
    takes_ms: float


class Network:
    """Starts transfers as soon as their links are free."""

    def __init__(self, workers: int, links: str, starts: Callable[[float, Parcel], None]) -> None:
        self._pairwise = links == "pairwise"
        self._starts = starts
        self._free_at: dict[tuple[int, int], float] = {}
        self._is_sending = [False] * workers
        self._is_receiving = [False] * workers
        self._outgoing: list[list[Parcel]] = [[] for _ in range(workers)]
        self._incoming: list[list[Parcel]] = [[] for _ in range(workers)]
        self._candidates: list[Parcel] = []

    def add(self, now: float, parcel: Parcel) -> None:
        """A transfer has become ready."""
        if self._pairwise:
            link = parcel.source, parcel.target
            start = max(now, self._free_at.get(link, 0.0))
            self._free_at[link] = start + parcel.takes_ms
            self._starts(start, parcel)
        else:
            self._outgoing[parcel.source].append(parcel)
            self._incoming[parcel.target].append(parcel)
            self._candidates.append(parcel)

    def end(self, parcel: Parcel) -> None:
        """A transfer is over, and those that waited for one of its cards may start."""
        if not self._pairwise:
            self._is_sending[parcel.source] = self._is_receiving[parcel.target] = False
            self._candidates += self._outgoing[parcel.source]
            self._candidates += self._incoming[parcel.target]

    def settle(self, now: float) -> None:
        """Start what can start, the oldest first; to be called when all that happens at a moment has happened."""
        if not self._candidates:
            return
        sending, receiving = self._is_sending, self._is_receiving
        free = [p for p in self._candidates if not (sending[p.source] or receiving[p.target])]
        self._candidates.clear()
        for parcel in free if len(free) == 1 else sorted(set(free)):
            source, target = parcel.source, parcel.target
            if not (sending[source] or receiving[target]):
                sending[source] = receiving[target] = True
                self._outgoing[source].remove(parcel)
                self._incoming[target].remove(parcel)
                self._starts(now, parcel)
