"""Where a worker's compute thread waits: it sorts what arrives and serves its shard meanwhile.

Two clocks (design, section 6). Liveness is the transport's: a lost connection ends the wait at once. Progress is kept
here: a wait for a peer that is alive says so after 10 s and then every 60 s, and gives up after the stall timeout.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from pd_train.transport import PeerLost, Transport
from pd_train.wire import Message, WireError

__all__ = ["Inbox", "PeerFailedError", "PeerLostError", "StallError"]

_FIRST_NOTICE_S = 10.0
_NOTICE_EVERY_S = 60.0
_TICK_S = 1.0
_CAUSE_GRACE_S = 1.0
"""How long a worker that lost a peer listens for someone who knows why."""


class PeerLostError(Exception):
    """A peer went away while it was still needed."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"lost the connection to worker {rank}")
        self.rank = rank


class PeerFailedError(Exception):
    """A peer said why it gives up, or why another one did; `may_recover` says whether another start may go better."""

    def __init__(self, text: str, may_recover: bool) -> None:
        super().__init__(text)
        self.may_recover = may_recover


class StallError(Exception):
    """A live peer did not send what was awaited within the stall timeout."""


class Inbox:
    """Sorts messages to the handlers of their kinds.

    Args:
        transport: where they come from.
        name: of this worker, for messages to people.
        stall_timeout: seconds that one wait may take.
        notice: is told for whom this worker waits.
    """

    def __init__(self, transport: Transport, name: str, stall_timeout: float, notice: Callable[[str], None]) -> None:
        self._transport = transport
        self._name = name
        self._stall_timeout = stall_timeout
        self.notice = notice
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._kept: dict[tuple[str, int, int], list[Message]] = {}
        self.on_idle: Callable[[], None] = lambda: None
        """Called after messages were sorted: what they made possible is done here."""
        self.on_arrival: Callable[[Message], None] = lambda message: None
        """Is shown every message once, before it is sorted."""
        self.bring: Callable[[Message], Message] = lambda message: message
        """Is given every message that is to be kept until it is due, and gives what is kept in its place."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called about once a second while this worker waits."""
        self.needed_peers: set[int] | None = None
        """Whose loss ends the run; None for anyone's."""
        self.lost_peers: set[int] = set()
        """Peers that went away when they were needed no more."""
        self._waiting: tuple[float, Callable[[], str]] | None = None

    def handle(self, kind: str, handler: Callable[[Message], None]) -> None:
        """Messages of a kind without a handler are kept until `wait_for` takes them, or until there is a handler.

        A handler that raises `WireError` has refused the message and is as it was before.
        """
        self._handlers[kind] = handler
        for key in [key for key in self._kept if key[0] == kind]:
            for message in self._kept.pop(key):
                self._hand_over(message)

    def kept(self) -> list[Any]:
        """The bodies that wait to be taken."""
        return [message.body for kept in self._kept.values() for message in kept]

    def awaited(self) -> tuple[str, float]:
        """What this worker waits for, in words, and for how many seconds; empty and 0 where it does not."""
        return ("", 0.0) if self._waiting is None else (self._waiting[1](), time.monotonic() - self._waiting[0])

    def standing(self) -> list[str]:
        """Where it stands, for people; may be called from any thread."""
        waiting, kept = self._waiting, Counter(kind for kind, _, _ in list(self._kept))
        doing = (
            "computes" if waiting is None else f"has waited {time.monotonic() - waiting[0]:.1f} s for {waiting[1]()}"
        )
        return [doing, f"messages kept until they are due, by kind: {dict(kept)}"]

    def poll(self) -> None:
        """Sort all that has arrived, without waiting."""
        self.sort()
        self.on_idle()

    def sort(self) -> None:
        """As `poll`, but what it makes possible is left for later."""
        while (item := self._transport.receive()) is not None:
            self._sort(item)

    def wait_for(self, kind: str, segment: int, index: int, what: str) -> Any:
        """The body of the one message of this kind, segment and index; `what` names it to people."""
        key = (kind, segment, index)
        self.wait_until(lambda: key in self._kept, lambda: what)
        message, *others = self._kept.pop(key)
        if others:
            self._kept[key] = others
        return message.body

    def wait_at_most(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Sort messages until something holds or the time is over; says whether it holds.

        Raises:
            PeerLostError: a peer went away.
        """
        end = time.monotonic() + seconds
        self.poll()
        while not ready():
            left = end - time.monotonic()
            if left <= 0:
                return False
            item = self._transport.receive(timeout=left)
            if item is not None:
                self._sort(item)
                self.poll()
        return True

    def wait_until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Sort messages until something holds.

        Args:
            ready: whether it does.
            what: names what is awaited and from whom.

        Raises:
            PeerLostError: a peer went away.
            StallError: it took longer than the stall timeout.
        """
        self.poll()
        if ready():
            return
        start = time.monotonic()
        self._waiting = start, what
        next_notice = start + min(_FIRST_NOTICE_S, self._stall_timeout)
        while not ready():
            item = self._transport.receive(timeout=min(_TICK_S, max(0.01, next_notice - time.monotonic())))
            if item is not None:
                self._sort(item)
                self.poll()
            self.on_tick()
            now = time.monotonic()
            if now < next_notice or ready():
                continue
            text = f"{self._name} has waited {now - start:.0f} s for {what()}"
            if now - start >= self._stall_timeout:
                raise StallError(f"{text}; gave up (--stall-timeout)")
            self.notice(text)
            next_notice = min(now + _NOTICE_EVERY_S, max(now + 0.01, start + self._stall_timeout))
        self._waiting = None

    def _listen_for_cause(self) -> None:
        """Peers leave one after another once the first has failed: the first is what people should hear of.

        Raises:
            PeerFailedError: someone says what it was.
        """
        end = time.monotonic() + _CAUSE_GRACE_S
        while (left := end - time.monotonic()) > 0:
            item = self._transport.receive(timeout=left)
            if isinstance(item, Message) and item.kind == "failed":
                raise PeerFailedError(*item.body)

    def _sort(self, item: Message | PeerLost) -> None:
        if isinstance(item, PeerLost):
            if self.needed_peers is None or item.rank in self.needed_peers:
                self._listen_for_cause()
                raise PeerLostError(item.rank)
            self.lost_peers.add(item.rank)
            return
        self.on_arrival(item)
        self._hand_over(item)

    def _hand_over(self, item: Message) -> None:
        if item.kind == "failed":
            raise PeerFailedError(*item.body)
        if item.kind in self._handlers:
            try:
                self._handlers[item.kind](item)
            except WireError as error:
                self._transport.refuse(f"{item.kind} {item.index} of worker {item.sender}: {error}")
        else:
            self._kept.setdefault((item.kind, item.segment, item.index), []).append(self.bring(item))
