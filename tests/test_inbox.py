"""Waiting for a peer that is alive and silent: what is said when, and when it ends."""

from __future__ import annotations

import pytest

from pd_train.inbox import Inbox, StallError
from pd_train.wire import Message


class SilentTransport:
    """Nothing ever arrives; time passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def receive(self, timeout: float = 0.0) -> None:
        self.now += timeout


@pytest.mark.parametrize(
    ("stall_timeout", "notices", "end"),
    [(1.5, [], 2), (10.0, [], 10), (200.0, [10, 70, 130, 190], 200)],
)
def test_a_wait_speaks_up_and_ends_at_the_stall_timeout(
    stall_timeout: float, notices: list[int], end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SilentTransport()
    monkeypatch.setattr("time.monotonic", lambda: transport.now)
    said: list[str] = []
    inbox = Inbox(transport, "stage 1 replica 0", stall_timeout, said.append)  # type: ignore[arg-type]
    with pytest.raises(StallError, match=rf"stage 1 replica 0 has waited {end} s for an answer; gave up"):
        inbox.wait_until(lambda: False, lambda: "an answer")
    assert said == [f"stage 1 replica 0 has waited {second} s for an answer" for second in notices]


class FullTransport:
    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)

    def receive(self, timeout: float = 0.0) -> Message | None:
        return self._messages.pop(0) if self._messages else None


def test_what_arrives_before_there_is_a_handler_is_not_lost() -> None:
    """A fast peer's gradients come while this worker is still meeting others; several share kind, segment and index."""
    early = [Message("gradient", sender, 0, 0, body=sender) for sender in (1, 2, 3)]
    inbox = Inbox(FullTransport(*early, Message("go", 0, 0, 0)), "stage 0", 60.0, lambda text: None)  # type: ignore[arg-type]
    seen: list[str] = []
    inbox.on_arrival = lambda message: seen.append(message.kind)
    inbox.wait_for("go", 0, 0, "the start")
    taken: list[int] = []
    inbox.handle("gradient", lambda message: taken.append(message.body))
    assert taken == [1, 2, 3]
    assert inbox.kept() == []
    assert seen == ["gradient"] * 3 + ["go"], "each has arrived once"
