"""How the workers of a run meet: in any order, minutes apart, on hosts that nobody has compared before.

    every worker   about: what I shall run              -->  rank 0
    rank 0         who is still missing                 -->  those that wait, and to the person
    rank 0         welcome: the mark of this run        -->  every worker, once all are there and alike
    every worker   joined                               -->  rank 0
    rank 0         go                                   -->  every worker, once all have joined

Until `go` the messages bear a mark that all runs share. From then on they bear this start's own, so that what a worker
of an earlier start still sends is refused. The second round trip makes sure that nobody is sent anything before it
knows the mark. The common mark is taken to the end: a connection between two workers that are slow to find each other
greets with it when the run has begun, and only a connection that greeted first is listened to.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pd_format.errors import UserError
from pd_train.control import WorkerSetup
from pd_train.links import Links
from pd_train.options import recorded
from pd_train.transport import Transport
from pd_train.wire import Message

__all__ = ["COMMON_MARK", "About", "Meeting", "find_difference", "meet", "remark"]

COMMON_MARK = "pipedream"
"""Of the messages of the meeting itself."""
PROTOCOL = 3
"""Of the messages between workers; another one cannot be understood."""
_NOTICE_EVERY_S = 10.0
_GRACE_S = 10.0


@dataclass(frozen=True)
class About:
    """What a worker is about to run."""

    rank: int
    host: str
    """Its name, for people."""
    protocol: int
    product: str
    """The version of this program."""
    torch: str
    plan: str
    """A digest."""
    fingerprint: str
    """Of the model that it has built."""
    options: dict[str, Any]
    """Of the run, those that all must have alike."""


def find_difference(one: About, other: About) -> str | None:
    """Why two workers must not train together, or None: in the order in which one would look for it."""
    both = f"worker {one.rank} on {one.host}", f"worker {other.rank} on {other.host}"
    compared: tuple[tuple[str, object, object, str], ...] = (
        ("protocol version", one.protocol, other.protocol, "Install the same version everywhere."),
        ("version of this program", one.product, other.product, "Install the same version everywhere."),
        ("version of torch", _release(one.torch), _release(other.torch), "Install the same version everywhere."),
        ("plan", one.plan[:16], other.plan[:16], "Copy the same plan file to all hosts."),
        ("model", one.fingerprint[:16], other.fingerprint[:16], "Copy the same model code to all hosts."),
    )
    for what, mine, theirs, hint in compared:
        if mine != theirs:
            return f"another {what}: {both[0]} has {mine}, {both[1]} has {theirs}. {hint}"
    for name in sorted(one.options.keys() | other.options.keys()):
        here, there = one.options.get(name), other.options.get(name)
        if here != there:
            return f"another {name}: {both[0]} has {here}, {both[1]} has {there}. Give all hosts the same options."
    return None


def remark(one: About, other: About) -> str | None:
    """What a person should know of two workers that train together."""
    if one.torch != other.torch:
        return (
            f"worker {one.rank} on {one.host} has torch {one.torch}, worker {other.rank} on {other.host} has "
            f"{other.torch}: the same bits are not promised"
        )
    return None


def _release(version: str) -> str:
    """`2.14` of `2.14.1+cpu`: patch releases may differ."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def meet(
    setup: WorkerSetup,
    peers: Mapping[int, tuple[str, int]],
    links: Links,
    transport: Transport,
    fingerprint: str,
    tell_wait: Callable[[str], None],
) -> str:
    """Meet all other workers of the run; returns the mark of this start, which messages bear from now on.

    Args:
        tell_wait: is told for whom this worker waits.

    Raises:
        UserError: they did not all come in time, or are about to run something else.
    """
    options = setup.options
    plan = options.plan
    compared = {name: value for name, value in recorded(options).items() if name != "threads"}
    about = About(
        rank=setup.rank,
        host=socket.gethostname(),
        protocol=PROTOCOL,
        product=importlib.metadata.version("pipedream"),
        torch=torch.__version__,
        plan=hashlib.sha256(plan.model_dump_json(exclude={"hosts"}).encode()).hexdigest(),
        fingerprint=fingerprint,
        options={
            **compared,
            "going on from a checkpoint": options.resume != "no",
            "measuring the network": options.measure_network,
        },
    )
    addresses = {rank: f"{address}:{port}" for rank, (address, port) in sorted(peers.items())}
    return Meeting(links, about, addresses, options.rendezvous_timeout, tell_wait, transport).run()


class Meeting:
    """One worker's side.

    Args:
        links: to all workers.
        about: this worker.
        addresses: of all workers, for messages.
        timeout: seconds to wait for all.
        tell_wait: is told for whom.
        transport: sets the marks of messages, and knows with whom no handshake succeeds.
    """

    def __init__(
        self,
        links: Links,
        about: About,
        addresses: Mapping[int, str],
        timeout: float,
        tell_wait: Callable[[str], None],
        transport: Transport,
    ) -> None:
        self._links = links
        self._inbox = links.inbox
        self._about = about
        self._addresses = addresses
        self._timeout = timeout
        self._tell_wait = tell_wait
        self._transport = transport
        self._others = [rank for rank in addresses if rank != about.rank]
        self._there: dict[int, About] = {}
        self._joined: set[int] = set()
        self._start = time.monotonic()

    def run(self) -> str:
        """Meet all others, and return the mark of this start.

        Raises:
            UserError: they did not all come in time, or are about to run something else.
        """
        return self._lead() if self._about.rank == 0 else self._follow()

    def _lead(self) -> str:
        self._inbox.handle("about", self._take_about)
        self._inbox.handle("joined", lambda message: self._joined.add(message.sender))
        self._await(lambda: len(self._there) == len(self._others), self._missing)
        mark = f"{secrets.token_hex(8)}-{self._about.plan[:16]}"
        self._tell("welcome", mark)
        self._transport.set_marks(COMMON_MARK, (COMMON_MARK, mark))
        self._await(lambda: len(self._joined) == len(self._others), lambda: "all workers to join")
        self._tell("go", None)
        self._transport.set_marks(mark, (COMMON_MARK, mark))
        return mark

    def _follow(self) -> str:
        found: dict[str, Any] = {}
        self._inbox.handle("missing", lambda message: found.update(missing=message.body))
        self._inbox.handle("refused", lambda message: found.update(refused=message.body))
        self._inbox.handle("welcome", lambda message: found.update(welcome=message.body))
        self._inbox.handle("go", lambda message: found.update(go=True))
        self._links.to_rank(0, "about", 0, self._about.rank, vars(self._about))

        def is_there(what: str) -> bool:
            if "refused" in found:
                raise UserError(found["refused"])
            return what in found

        self._await(lambda: is_there("welcome"), lambda: found.get("missing", self._name(0)))
        mark: str = found["welcome"]
        self._transport.set_marks(COMMON_MARK, (COMMON_MARK, mark))
        self._links.to_rank(0, "joined", 0, self._about.rank, None)
        self._await(lambda: is_there("go"), lambda: "all workers to join")
        self._transport.set_marks(mark, (COMMON_MARK, mark))
        return mark

    def _take_about(self, message: Message) -> None:
        other = About(**message.body)
        difference = find_difference(self._about, other)
        if difference is not None:
            self._there.setdefault(other.rank, other)
            self._tell("refused", difference)
            raise UserError(difference)
        said = remark(self._about, other)
        if said is not None and other.rank not in self._there:
            self._inbox.notice(said)
        self._there[other.rank] = other

    def _missing(self) -> str:
        missing = [rank for rank in self._others if rank not in self._there]
        text = ", ".join(map(self._name, missing))
        self._tell("missing", text)
        return text

    def _name(self, rank: int) -> str:
        """A worker, for people."""
        name = f"worker {rank} at {self._addresses[rank]}"
        if rank not in self._transport.unmet:
            return name
        doubt = "does the key differ there" if self._transport.has_key else "is it pd-train that listens there"
        return f"{name} (it answers, but no handshake succeeds: {doubt}?)"

    def _tell(self, kind: str, body: object) -> None:
        """A message to all that are there."""
        for rank in self._there:
            self._links.to_rank(rank, kind, 0, 0, body)

    def _await(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait, and say for whom every ten seconds."""
        # Worker 0 knows who is missing, so the others leave it the last word.
        and_key = " and the same key file" if self._transport.has_key else ""
        end = self._start + self._timeout + (_GRACE_S if self._about.rank else 0.0)
        while True:
            now = time.monotonic()
            if self._inbox.wait_at_most(ready, min(_NOTICE_EVERY_S, max(0.0, end - now))):
                return
            text = what()
            if time.monotonic() >= end:
                refusal = (
                    f"{text} did not come within {self._timeout:.0f} s (--rendezvous-timeout); start the program there "
                    f"too, with the same plan{and_key}, and see that no firewall closes the port."
                )
                self._tell("refused", refusal)
                raise UserError(refusal)
            self._tell_wait(f"waiting for {text}")
