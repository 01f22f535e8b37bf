"""What a worker process and the launcher on its host tell each other, over a pipe between the two."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from pd_train.events import Event
from pd_train.options import RunOptions

__all__ = ["Bound", "Done", "Failed", "FromWorker", "Happened", "Launcher", "Peers", "WorkerSetup", "log_path"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSetup:
    """One worker of a run."""

    options: RunOptions
    rank: int
    address: str
    """To listen on."""
    port: int
    """To listen on; 0 lets the system choose."""
    local_index: int
    """Of this worker among those of its host: its GPU."""
    local_workers: int
    """Of its host."""


def log_path(setup: WorkerSetup, rank: int | None = None) -> Path:
    """Where a worker's own words go, or those of another one of the run on its own host."""
    return setup.options.run_dir / f"worker-{setup.rank if rank is None else rank}.log"


@dataclass(frozen=True)
class Bound:
    """The worker listens here, and its stage is built and checked."""

    address: str
    port: int


@dataclass(frozen=True)
class Peers:
    """Where each worker of the plan listens, by rank; the launcher's only message."""

    addresses: dict[int, tuple[str, int]]


@dataclass(frozen=True)
class Happened:
    """Something that the display shows."""

    event: Event


@dataclass(frozen=True)
class Failed:
    """The worker has given up."""

    text: str
    """For the person."""
    consequence: bool = False
    """It only lost a peer, or was told of a failure: the text names that one."""
    lost: bool = False
    """A worker went away: whatever ended it may not happen again."""


@dataclass(frozen=True)
class Done:
    """The worker has finished its run."""


FromWorker = Bound | Happened | Failed | Done


class Launcher:
    """The program that started this process, as seen from here; the process ends as soon as that program is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._peers: queue.SimpleQueue[Peers] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="launcher-watch", daemon=True).start()

    def tell(self, what: FromWorker) -> None:
        """Nobody may be there to hear it any more."""
        with contextlib.suppress(OSError):
            self._connection.send(what)

    def tell_event(self, event: Event) -> None:
        """Something for the display."""
        self.tell(Happened(event))

    def await_peers(self) -> dict[int, tuple[str, int]]:
        """Where all workers listen, once all of them do."""
        return self._peers.get().addresses

    def _watch(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._peers.put(self._connection.recv())
        log.error("the program that started this worker has gone")
        os._exit(1)
