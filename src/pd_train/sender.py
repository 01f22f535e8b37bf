"""Lets a worker's messages go once their bytes have come from its device, in the order in which they were sent.

    compute thread  --hold()-->  (event, message)  --a thread, which waits for the event-->  the transport's queue

Only workers whose device is not the host itself have one. News of a failure does not come through here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pd_train.staging import Event, Staging

__all__ = ["Sender"]


class Sender:
    """Owned by the worker, which closes it before the transport.

    Args:
        staging: the way from the device.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._held: queue.SimpleQueue[tuple[Event | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._leaving = threading.Lock()
        self._is_closed = False
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(target=self._serve, name="sender", daemon=True)

    def start(self, fail: Callable[[BaseException], None]) -> None:
        """Begin to let go of what is held; `fail` is told what ended the thread."""
        self._fail = fail
        self._thread.start()

    def hold(self, leave: Callable[[], None]) -> None:
        """Have `leave` called once all is there that was asked for so far, and after those held before."""
        self._held.put((self._staging.mark(), leave))

    def close(self, linger: float = 0.0) -> None:
        """Stop the thread; nothing leaves afterwards.

        Args:
            linger: seconds that what is held may still take.
        """
        self._held.put(None)
        if self._thread.ident is not None:
            self._thread.join(linger)
        with self._leaving:
            self._is_closed = True

    def _serve(self) -> None:
        try:
            self._staging.enter_thread()
            while self._let_one_go():
                pass
        except BaseException as error:
            self._fail(error)

    def _let_one_go(self) -> bool:
        """The next one; False at the end. What it holds on to is gone when the thread waits for another."""
        held = self._held.get()
        if held is None:
            return False
        event, leave = held
        if event is not None:
            event.synchronize()
        with self._leaving:
            if not self._is_closed:
                leave()
        return True
