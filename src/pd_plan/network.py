"""Which transfer goes over a link, and when: the network of the simulator (design, section 3).

Links are full duplex. Where they are network cards (`card`), a worker sends one transfer at a time and receives one at
a time, and a transfer takes the sender's way out and the receiver's way in together. Of those that could start at a
moment the one that became ready first does, so that one to a busy receiver does not hold up those behind it. Where
links are `pairwise`, each ordered pair of workers has one of its own, first come, first served.

Where cards are `shared`, transfers go over them at once, as TCP connections do: each ordered pair of workers has a
connection, first come, first served, and the connections that are busy share every card evenly; what one of them
cannot use, since its other card is fuller, the rest share (max-min fairness, Bertsekas and Gallager, Data Networks,
section 6.5.2). That is what an ordinary network does with a run, and what `benchmarks/paper.py` measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LINKS", "Network", "Parcel", "SharedCards", "Wiring"]

LINKS = ("card", "pairwise", "shared")
_ROUNDING_MS = 1e-9


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


@dataclass
class _Flow:
    parcel: Parcel
    left_ms: float
    """That it would still take with both cards to itself."""
    start_ms: float | None = None


class SharedCards:
    """Cards that all connections share evenly.

    Args:
        at: (ms, function, argument): calls the function with the argument at that time.
        ended: is told of each transfer that is over, and when it had started.
    """

    def __init__(
        self, at: Callable[[float, Callable[[int], None], int], None], ended: Callable[[Parcel, float], None]
    ) -> None:
        self._at = at
        self._ended = ended
        self._flows: dict[tuple[int, int], deque[_Flow]] = {}
        self._speeds: dict[tuple[int, int], float] = {}
        self._now = 0.0
        self._next_end = 0.0
        self._stamp = 0
        self._has_changed = False

    def add(self, now: float, parcel: Parcel) -> None:
        """A transfer has become ready."""
        self._flows.setdefault((parcel.source, parcel.target), deque()).append(_Flow(parcel, parcel.takes_ms))
        self._has_changed = True

    def end(self, parcel: Parcel) -> None:
        """Nothing is left to do: whatever ends does so by itself."""

    def settle(self, now: float) -> None:
        """Share the cards anew among what goes over them now."""
        if not self._has_changed:
            return
        self._has_changed = False
        self._go_on(now)
        busy = [pair for pair, flows in self._flows.items() if flows]
        self._speeds = _fair_speeds(busy)
        self._stamp += 1
        if not busy:
            return
        for pair in busy:
            first = self._flows[pair][0]
            first.start_ms = now if first.start_ms is None else first.start_ms
        self._next_end = now + min(self._flows[pair][0].left_ms / self._speeds[pair] for pair in busy)
        self._at(self._next_end, self._finish, self._stamp)

    def _go_on(self, now: float) -> None:
        for pair, speed in self._speeds.items():
            self._flows[pair][0].left_ms -= speed * (now - self._now)
        self._now = now

    def _finish(self, stamp: int) -> None:
        """The next transfers are over, unless others have started since that was foreseen."""
        if stamp != self._stamp:
            return
        self._go_on(self._next_end)
        over = [pair for pair in self._speeds if self._flows[pair][0].left_ms <= _ROUNDING_MS]
        self._speeds = {}
        self._has_changed = True
        for flow in [self._flows[pair].popleft() for pair in over]:
            assert flow.start_ms is not None
            self._ended(flow.parcel, flow.start_ms)


def _fair_speeds(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """The part of a card's speed that each connection (sender, receiver) gets: the fullest card is shared first."""
    speeds: dict[tuple[int, int], float] = {}
    through: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for pair in pairs:
        through.setdefault(("out", pair[0]), set()).add(pair)
        through.setdefault(("in", pair[1]), set()).add(pair)
    room = dict.fromkeys(through, 1.0)
    while through:
        fullest = min(through, key=lambda card: room[card] / len(through[card]))
        share = room[fullest] / len(through[fullest])
        for pair in through[fullest].copy():
            speeds[pair] = share
            for card in (("out", pair[0]), ("in", pair[1])):
                room[card] -= share
                through[card].discard(pair)
        through = {card: others for card, others in through.items() if others}
    return speeds
