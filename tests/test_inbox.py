"""Waiting for a peer that is alive and silent: what is said when, and when it ends."""

from __future__ import annotations

import pytest

from pd_train.inbox import Inbox, StallError


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
