"""Tells workers on other hosts why this program ends before its own workers listen: they would wait for it in vain.

Once its workers listen, they tell the others themselves, and connections that end tell of those that have gone.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pd_format.errors import UserError
from pd_format.plan import Plan

if TYPE_CHECKING:
    from pd_train.transport import Transport

__all__ = ["Farewell", "patience_s"]


def patience_s(launched: bool) -> float:
    """Seconds in which those who do not listen yet may begin to, and be told.

    A launcher starts all programs at once, and each is to hear why the run ends. A person who starts them one by one
    sees the message and starts this one again, while the others wait.
    """
    return 30.0 if launched else 15.0


_LAST_WORDS_S = 1.0


class Farewell:
    """What may be said to others at the end; nothing as long as it is not known who they are."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._ranks: tuple[int, ...] = ()
        self._key: Path | None = None
        self._patience_s = 0.0
        self._name: str | None = None

    def prepare(self, plan: Plan, ranks: tuple[int, ...], launched: bool, key: Path | None) -> None:
        """From now on there are others who would wait.

        Args:
            plan: with the hosts.
            ranks: of the workers that this program starts.
            launched: whether a launcher starts the other programs as well.
            key: file of the job's key, already looked at.
        """
        if plan.hosts and len(ranks) < plan.workers:
            self._plan, self._ranks, self._key = plan, ranks, key
            self._patience_s = patience_s(launched)
            self._name = f"worker {ranks[0]} on {plan.hosts[ranks[0]].address}"

    def leave_naming(self) -> None:
        """What ends this program from now on names its worker by itself."""
        self._name = None

    def forget(self) -> None:
        """The workers themselves tell the others from now on."""
        self._plan = None

    def say(self, text: str) -> None:
        """Tell the others, in some seconds at most: who does not listen yet has that long to begin."""
        plan = self._plan
        if plan is None:
            return
        from pd_train.keys import read_key
        from pd_train.meeting import COMMON_MARK
        from pd_train.transport import Transport
        from pd_train.wire import Message

        rank = self._ranks[0]
        host = plan.hosts[rank]
        key = None if self._key is None else read_key(self._key)
        others = [other for other in range(plan.workers) if other not in self._ranks]
        # Where the port is free, the others answer that they end too; else it is enough that they have been told.
        for port in (host.port, 0):
            with contextlib.suppress(UserError):
                transport = Transport(rank, COMMON_MARK, host.listen or host.address, port, key=key)
                break
        else:
            return
        transport.connect({other: (plan.hosts[other].address, plan.hosts[other].port) for other in others})
        for other in others:
            cause = text if self._name is None else f"{self._name}: {text}"
            transport.send(other, Message("failed", rank, 0, 0, (cause, False)))
        answers = transport.port == host.port
        if answers:
            _await_answers(transport, set(others), self._patience_s)
        transport.close(_LAST_WORDS_S if answers else self._patience_s)


def _await_answers(transport: Transport, others: set[int], seconds: float) -> None:
    """Until all say why they end; those who fail as this one did say so by themselves."""
    from pd_train.wire import Message

    end = time.monotonic() + seconds
    while others and (left := end - time.monotonic()) > 0:
        item = transport.receive(left)
        if isinstance(item, Message) and item.kind == "failed":
            others.discard(item.sender)
