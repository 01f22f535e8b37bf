"""Measures the links that a plan uses, over the real transport and with messages of the sizes that a run sends.

Rank 0 has each link measured alone, one after the other, and then all of them at once, which is what a run does. Of
many links, it has only so many measured alone as take 20 s:

    rank 0      measure: these links of yours, for so long   -->  sender
    sender      probe: some messages under way all the time  -->  receiver
    receiver    probed: so many bytes in so many seconds     -->  sender, once for every probe
    sender      measured                                     -->  rank 0

The receiver counts from the arrival of the first message to that of the last, so that latency is not in the rate.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from pd_format.plan import Plan
from pd_train.control import WorkerSetup
from pd_train.duties import Company
from pd_train.ending import leave_last
from pd_train.events import LinkFigures, NetworkMeasured, Note
from pd_train.forms import plan_problem
from pd_train.inbox import Inbox
from pd_train.links import Links
from pd_train.plan_links import Link, links_alone, links_of
from pd_train.recorder import Recorder
from pd_train.routing import Place
from pd_train.wire import Message

__all__ = ["MeasuringNetwork", "network_problem"]

_UNDER_WAY_BYTES = 2 << 20
_UNDER_WAY = 4
_PINGS = 11
_ALONE_S = 1.0
_ALONE_IN_ALL_S = 20.0
_LEAST_S = 0.5
_MOST_ALONE = int(_ALONE_IN_ALL_S / _LEAST_S)
_AT_ONCE_S = 3.0


def network_problem(plan: Plan, place: Place, message: Message) -> str | None:
    """What is wrong with a message while the network is measured, for the worker at `place`."""
    form = _FORMS.get(message.kind)
    if form is None:
        return plan_problem(plan, place, message)
    to_or_from_0 = {"measure": message.sender == 0, "measured": place.rank == 0}.get(message.kind, True)
    known = 0 <= message.sender < plan.workers and message.sender != place.rank
    if known and to_or_from_0 and form(message.body):
        return None
    return f"{message.kind!r} {message.index} of worker {message.sender}, which no measurement of the network has"


def _is_probe(body: object) -> bool:
    return body is None or isinstance(body, torch.Tensor)


def _is_count(body: object) -> bool:
    return type(body) is tuple and len(body) == 2 and all(type(value) in (int, float) for value in body)


def _is_order(body: object) -> bool:
    if body is None:
        return True
    if type(body) is not tuple or len(body) != 2 or type(body[0]) is not float or type(body[1]) is not tuple:
        return False
    return all(_is_count(one) and all(type(value) is int for value in one) for one in body[1])


def _is_answer(body: object) -> bool:
    return type(body) is tuple and all(_is_count(one) for one in body)


_FORMS = {"measure": _is_order, "probe": _is_probe, "probed": _is_count, "measured": _is_answer}


class MeasuringNetwork:
    """A worker's duty: nothing is built."""

    staging = None

    def __init__(self, setup: WorkerSetup, place: Place) -> None:
        self._plan = setup.options.plan
        self.problem = partial(network_problem, self._plan, place)
        self._rank = setup.rank
        self.fingerprint = self._plan.model.fingerprint

    def assemble(self, links: Links, recorder: Recorder) -> MeasuringNetwork:
        """There is nothing to put together, but a peer may send as soon as it has met this one."""
        links.inbox.handle("probe", _Counts(links).take)
        return self

    def standing(self) -> list[str]:
        return ["measures the network"]

    def run(self, company: Company) -> None:
        """Measure, or be measured, until rank 0 is through."""
        if self._rank == 0:
            self._lead(company)
            leave_last(company.inbox, range(1, self._plan.workers))
        else:
            self._follow(company)

    def close(self) -> None:
        pass

    def _lead(self, company: Company) -> None:
        links = links_of(self._plan)
        by_themselves = links_alone(links, _MOST_ALONE)
        seconds = min(_ALONE_S, _ALONE_IN_ALL_S / len(by_themselves))
        duration = seconds * len(by_themselves) + _AT_ONCE_S
        which = "alone" if len(by_themselves) == len(links) else f"{len(by_themselves)} of them alone"
        company.tell(Note(f"measuring {len(links)} links, {which} and all at once, in about {duration:.0f} s"))
        conductor = _Conductor(company, self._plan.workers)
        alone = {link: conductor.measure([link], seconds)[0] for link in by_themselves}
        at_once = conductor.measure(links, _AT_ONCE_S)
        figures = []
        for link, (at_once_bps, _) in zip(links, at_once, strict=True):
            alone_bps, latency_s = alone.get(link, (None, None))
            latency_ms = None if latency_s is None else latency_s * 1000
            figures.append(
                LinkFigures(link.sender, link.receiver, link.what, link.size, alone_bps, at_once_bps, latency_ms)
            )
        company.tell(NetworkMeasured(tuple(figures)))
        conductor.end()  # After that the others leave, and would not hear of the figures.

    def _follow(self, company: Company) -> None:
        inbox, links = company.inbox, company.links
        # The others may leave as soon as rank 0 has told them; rank 0 notices who is missing before.
        inbox.needed_peers = {0}
        inbox.notice = lambda text: None  # It is no news that others are measured meanwhile.
        number = 0
        while (order := inbox.wait_for("measure", 0, number, "worker 0 to say what to measure")) is not None:
            seconds, ways = order
            links.to_rank(0, "measured", number, self._rank, tuple(_send(links, ways, seconds)))
            number += 1
        links.to_rank(0, "bye", 0, self._rank, None)


class _Counts:
    """The receiving end: counts and answers."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._begun: dict[int, tuple[float, int]] = {}

    def take(self, message: Message) -> None:
        if message.index == 0:
            self._begun[message.sender] = message.arrived, 0
        since, received = self._begun.get(message.sender, (message.arrived, 0))
        if message.index:
            received += message.size
        self._begun[message.sender] = since, received
        self._links.to_rank(message.sender, "probed", 0, message.index, (received, message.arrived - since))


class _Conductor:
    """Rank 0's part: who measures when."""

    def __init__(self, company: Company, workers: int) -> None:
        self._company = company
        self._orders = [0] * workers

    def measure(self, links: Sequence[Link], seconds: float) -> list[tuple[float, float]]:
        """Measure links at the same time; bits a second and seconds of latency of each."""
        by_sender: dict[int, list[Link]] = {}
        for link in links:
            by_sender.setdefault(link.sender, []).append(link)
        for sender, its in by_sender.items():
            if sender:
                self._order(sender, (seconds, tuple((link.receiver, link.size) for link in its)))
        found: dict[Link, tuple[float, float]] = {}
        for sender, its in sorted(by_sender.items()):
            if sender == 0:
                figures = _send(self._company.links, [(link.receiver, link.size) for link in its], seconds)
            else:
                what = f"worker {sender} to measure its links"
                figures = self._company.inbox.wait_for("measured", self._orders[sender] - 1, sender, what)
            found.update(zip(its, figures, strict=True))
        return [found[link] for link in links]

    def end(self) -> None:
        """Nothing more is to be measured."""
        for rank in range(1, len(self._orders)):
            self._order(rank, None)

    def _order(self, sender: int, body: object) -> None:
        self._company.links.to_rank(sender, "measure", 0, self._orders[sender], body)
        self._orders[sender] += 1


class _Stream:
    """Messages to one receiver, some of them under way all the time."""

    def __init__(self, links: Links, receiver: int, body: torch.Tensor | None, seconds: float, count: int) -> None:
        self._links = links
        self._receiver = receiver
        self._body = body
        self._end = time.monotonic() + seconds
        self._left: list[float] = []
        self.round_trips: list[float] = []
        self.received, self.took = 0, 0.0
        for _ in range(count):
            self._send()

    @property
    def is_over(self) -> bool:
        return len(self.round_trips) == len(self._left)

    def take(self, message: Message) -> None:
        now = time.monotonic()
        self.round_trips.append(now - self._left[message.index])
        self.received, self.took = message.body
        if now < self._end or (self._body is None and len(self._left) < _PINGS):
            self._send()

    def _send(self) -> None:
        self._left.append(time.monotonic())
        self._links.to_rank(self._receiver, "probe", 0, len(self._left) - 1, self._body)


def _send(links: Links, ways: Sequence[tuple[int, int]], seconds: float) -> list[tuple[float, float]]:
    """Send to receivers, in messages of so many bytes; bits a second and seconds of latency of each way."""
    latencies = []
    for receiver, _ in ways:
        (ping,) = _run(links.inbox, [(receiver, _Stream(links, receiver, None, 0.0, 1))])
        latencies.append(statistics.median(ping.round_trips) / 2)
    started = []
    for receiver, size in ways:
        count = max(_UNDER_WAY, math.ceil(_UNDER_WAY_BYTES / size))
        started.append((receiver, _Stream(links, receiver, torch.zeros(size, dtype=torch.uint8), seconds, count)))
    streams = _run(links.inbox, started)
    return [
        (8 * stream.received / stream.took if stream.took > 0 else 0.0, latency)
        for stream, latency in zip(streams, latencies, strict=True)
    ]


def _run(inbox: Inbox, streams: Sequence[tuple[int, _Stream]]) -> list[_Stream]:
    by_receiver = dict(streams)
    inbox.handle("probed", lambda message: by_receiver[message.sender].take(message))
    every = [stream for _, stream in streams]
    inbox.wait_until(lambda: all(stream.is_over for stream in every), partial(_name_slow, streams))
    return every


def _name_slow(streams: Sequence[tuple[int, _Stream]]) -> str:
    slow = ", ".join(str(receiver) for receiver, stream in streams if not stream.is_over)
    return f"workers {slow} to answer"
