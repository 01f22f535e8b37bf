"""One clock for all workers of a run: rank 0's.

A worker's own clock counts from an arbitrary moment. How far it is off is measured over a message and its answer, as
NTP does it (RFC 5905, section 8), with the times at which both left and arrived:

    worker    t0 ------.                 .----> t3       offset = ((t1 - t0) + (t2 - t3)) / 2
    rank 0              `----> t1   t2 -'                the way out and back took (t3 - t0) - (t2 - t1)

The offset is wrong by at most half of the way out and back, which happens where one way takes all of it; so the
quickest of several round trips counts. Clocks that run at different speeds part again over hours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pd_train.links import Links
from pd_train.wire import Message

__all__ = ["Clock", "RoundTrip", "align", "answer_others", "best_of"]

_ROUND_TRIPS = 5


class RoundTrip(NamedTuple):
    """The four times of a message and its answer, in seconds; t0 and t3 by the worker's clock."""

    t0: float
    t1: float
    t2: float
    t3: float

    @property
    def offset(self) -> float:
        """What to add to the worker's clock."""
        return ((self.t1 - self.t0) + (self.t2 - self.t3)) / 2

    @property
    def error(self) -> float:
        """By how much the offset may be wrong at most."""
        return max(0.0, (self.t3 - self.t0) - (self.t2 - self.t1)) / 2


def best_of(round_trips: list[RoundTrip]) -> RoundTrip:
    """The one that tells the offset best."""
    return min(round_trips, key=lambda one: one.error)


class Clock:
    """Seconds by rank 0's clock, once `align` has set the offset; only differences mean something."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self.offset = 0.0
        self.error = 0.0
        """Seconds by which `now` may be off from rank 0's clock."""

    def now(self) -> float:
        return self._read() + self.offset


def align(clock: Clock, links: Links) -> dict[int, float]:
    """Set a worker's clock by rank 0's, which runs `answer_others` meanwhile; by how much it may be off, by its rank.

    Raises:
        PeerLostError: rank 0 went away.
    """
    found: list[RoundTrip] = []

    def take(message: Message) -> None:
        sent, arrived = message.body
        found.append(RoundTrip(sent, arrived, message.sent, message.arrived))

    links.inbox.handle("time", take)
    for number in range(_ROUND_TRIPS):
        links.to_rank(0, "what time", 0, number, None)
        is_answered = partial(lambda number: len(found) > number, number)
        links.inbox.wait_until(is_answered, lambda: "worker 0 to say what time it is")
    best = best_of(found)
    clock.offset, clock.error = best.offset, best.error
    links.to_rank(0, "aligned", 0, 0, best.error)
    return {links.place.rank: best.error}


def answer_others(links: Links, workers: int) -> dict[int, float]:
    """Rank 0: say what time it is until all others know; the largest error of each worker's clock, by rank.

    Raises:
        PeerLostError: a worker went away.
    """
    errors: dict[int, float] = {0: 0.0}

    def answer(message: Message) -> None:
        links.to_rank(message.sender, "time", 0, message.index, (message.sent, message.arrived))

    def note(message: Message) -> None:
        errors[message.sender] = message.body

    handlers: dict[str, Any] = {"what time": answer, "aligned": note}
    for kind, handler in handlers.items():
        links.inbox.handle(kind, handler)
    links.inbox.wait_until(lambda: len(errors) == workers, lambda: "all workers to set their clocks")
    return errors
