"""SIGUSR1 (`--debug-dump`): every worker writes to its log where it stands, and goes on.

A thread of its own writes first the stacks of all threads, and then what the parts of the worker say of themselves:
place in the schedule, weight versions, what it waits for, queues. So it works while the compute thread is stuck, unless
that holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["DumpRequests", "WorkerDump", "held_back"]

log = logging.getLogger(__name__)


class WorkerDump:
    """Tells of one worker from its start on.

    Args:
        is_on: whether SIGUSR1 makes it do so; else it is ignored.
    """

    def __init__(self, is_on: bool) -> None:
        self.phase = "starts"
        """What the worker is about, for as long as nothing else tells."""
        self._parts: list[Callable[[], Iterable[str]]] = []
        if not is_on:
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python's own handler does nothing; that it exists makes Python write the signal's number to the pipe at once.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._serve, args=(reader,), name="debug-dump", daemon=True).start()

    def add(self, part: Callable[[], Iterable[str]]) -> None:
        """From now on this is asked too: what it has to say, line by line. It runs in another thread."""
        self._parts.append(part)

    def lines(self) -> list[str]:
        """All that there is to say now."""
        lines = [f"phase: {self.phase}"]
        for part in tuple(self._parts):
            try:
                lines += part()
            except Exception as error:  # Another thread is changing what is looked at.
                lines.append(f"({type(error).__name__} while looking: {error})")
        return lines

    def _serve(self, reader: int) -> None:
        while numbers := os.read(reader, 4096):
            if signal.SIGUSR1 in numbers:
                # From a thread that holds the interpreter's lock: from within a signal handler, as faulthandler offers,
                # other threads' frames change while they are read, which has ended a worker by SIGSEGV.
                faulthandler.dump_traceback(file=2, all_threads=True)
                log.info("where this worker stands:%s", "".join(f"\n    {line}" for line in self.lines()))


class DumpRequests:
    """SIGUSR1 to the launcher, as something that can be waited for; passed on to the workers.

    Args:
        is_on: whether the signal is taken; else it does what it does to any program.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self.descriptor, self._writer = os.pipe()
        """Readable after the signal has come."""
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._before: Any = None

    def __enter__(self) -> DumpRequests:
        if self._is_on:
            self._before = signal.signal(signal.SIGUSR1, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on:
            signal.signal(signal.SIGUSR1, self._before)
        os.close(self.descriptor)
        os.close(self._writer)

    def pass_on(self, pids: Sequence[int], run_dir: Path) -> str:
        """Ask the workers, and say so."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        return f"SIGUSR1: each worker writes where it stands to its log, {run_dir / 'worker-*.log'}"

    def _note(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")


@contextlib.contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """These signals wait: in this process until the end of the block, in one started within until it lets them in.

    A signal that reaches all processes of a job would end one that has not got so far as to handle it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
