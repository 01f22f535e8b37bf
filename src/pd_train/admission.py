"""Which messages of the run a worker takes: pure, from what the transport has read.

A connection begins with a greeting. From then on the sender keeps to this one connection and counts its messages, so
what is repeated, made up or sent again by somebody else is told apart; and it sends only what the plan has it send.

Somebody who greets before the true worker does is not told apart: greetings bear a mark that all runs share, and the
mark of a run travels in the open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pd_train.wire import Message, WireError

__all__ = ["GREETING", "Admission", "Refusals"]

GREETING = "hello"
"""The kind of a connection's first message."""

_LOGGED_IN_FULL = 10
_LOG_EVERY_S = 60.0


class Admission:
    """What a worker knows of its senders.

    Args:
        problem: what is wrong with a message, but for who sends it when; None where nothing is.
    """

    def __init__(self, problem: Callable[[Message], str | None]) -> None:
        self._problem = problem
        self._connections: dict[int, bytes] = {}
        self._due: Counter[int] = Counter()

    def check(self, connection: bytes, message: Message) -> None:
        """Note a message that has arrived whole; arguments and errors as for `begin`."""
        self.begin(connection, message)
        self.end(message)

    def begin(self, connection: bytes, message: Message) -> None:
        """Note a message of which the header has arrived.

        Args:
            connection: marks where it came from.
            message: of this run; its body is not looked at.

        Raises:
            WireError: it is not to be taken.
        """
        sender, known = message.sender, self._connections.get(message.sender)
        if message.kind == GREETING:
            self._greet(connection, message)
        elif known is None:
            raise WireError(f"a message of worker {sender}, which has not greeted")
        elif connection != known:
            raise WireError(f"a message of worker {sender} over another connection than its own")
        elif message.sequence != self._due[sender]:
            what = "repeated" if message.sequence < self._due[sender] else "too early"
            raise WireError(f"message {message.sequence} of worker {sender} is {what}: {self._due[sender]} is due")
        self._due[sender] += 1

    def end(self, message: Message) -> None:
        """The whole of it is there.

        Raises:
            WireError: it is not to be taken.
        """
        if (problem := self._problem(message)) is not None:
            raise WireError(problem)

    def _greet(self, connection: bytes, message: Message) -> None:
        if (problem := self._problem(message)) is not None:
            raise WireError(problem)
        if message.sequence or message.sender in self._connections or connection in self._connections.values():
            raise WireError(f"a greeting of worker {message.sender} that is not the first message of both")
        self._connections[message.sender] = connection


class Refusals:
    """Counts what was refused, and keeps a flood of it out of the log: ten lines, then one a minute.

    Args:
        what: was refused, each time.
    """

    def __init__(self, what: str = "message") -> None:
        self._what = what
        self.count = 0
        self._next_line = 0.0

    def note(self, reason: str, now: float) -> str | None:
        """Count one more.

        Args:
            reason: for its refusal.
            now: in seconds, of any clock that only goes forward.

        Returns:
            A line for the log, if there is to be one.
        """
        self.count += 1
        if self.count > _LOGGED_IN_FULL and now < self._next_line:
            return None
        self._next_line = now + _LOG_EVERY_S
        return f"refused {self._what} {self.count} that is of no use here: {reason}"
