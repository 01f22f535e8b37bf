"""Starts one process a worker on this host, watches them, and stops them all on the first failure."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_train.control import Bound, Done, Failed, Happened, Peers, WorkerSetup, log_path
from pd_train.debug_dump import DumpRequests, held_back
from pd_train.events import Event, Note, WorkersListen
from pd_train.options import RunOptions
from pd_train.routing import on_the_host_of, place_of

__all__ = ["MALLOC", "Stopped", "WorkerLost", "launch", "listen_at"]

MALLOC = {
    # Freed memory is kept and used again: page faults are what large messages cost most.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Of the workers' environment: how glibc keeps memory."""
_CAUSE_GRACE_S = 1.0
_STOP_GRACE_S = 3.0


class Stopped(Exception):
    """The person, or the system, asked the run to stop; `signum` says how."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}")
        self.signum = signum


class WorkerLost(UserError):
    """A worker went away, which another start of the run may well survive."""


@dataclass
class _Worker:
    setup: WorkerSetup
    process: Any
    connection: Connection
    done: bool = False
    failure: Failed | None = None
    heard_out: bool = False
    """The connection has ended: nothing more will come."""

    @property
    def name(self) -> str:
        return f"worker {self.setup.rank} ({place_of(self.setup.options.plan, self.setup.rank)})"


def launch(options: RunOptions, show: Callable[[Event], None]) -> None:
    """Run all workers of the plan on this host until they are done.

    Args:
        options: of the run; its folder exists.
        show: takes the events that the display shows.

    Raises:
        WorkerLost: a worker's process ended, or was heard of no more.
        UserError: a worker failed; the text gives the first cause.
        Stopped: SIGINT or SIGTERM arrived. No process is left in either case.
    """
    plan = options.plan
    ranks = options.ranks or tuple(range(plan.workers))
    workers: list[_Worker] = []
    with _signals_as_exception(), DumpRequests(options.debug_dump) as dumps:
        try:
            context = _process_context()
            for rank in ranks:
                address, port = listen_at(plan, rank)
                neighbours = on_the_host_of(plan, rank)
                setup = WorkerSetup(options, rank, address, port, neighbours.index(rank), len(neighbours))
                workers.append(_start(context, setup))
            _watch(workers, plan, show, dumps)
        finally:
            _stop(workers)
            if len(ranks) == plan.workers:  # Else the folder may be shared with programs that still write.
                _clear_temporary(options.run_dir)


def _process_context() -> Any:
    """Workers are forked from a server process that has imported torch once: a start then takes milliseconds."""
    for name, value in MALLOC.items():
        os.environ.setdefault(name, value)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "pd_train.preload"])
    # Ctrl-C reaches every process of the terminal: it must not break these two off with a traceback while they start.
    # SIGUSR1 may be sent to all processes of a job, and would end them.
    # A blocked signal stays blocked in a child, and waits for the parent; the tracker unblocks it, so it goes first.
    with held_back(signal.SIGUSR1):
        with _quiet_tracker():
            multiprocessing.resource_tracker.ensure_running()
        with held_back(signal.SIGINT):
            multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _quiet_tracker() -> Iterator[None]:
    """The tracker started here cleans up without a word after workers that were stopped while they loaded data."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def listen_at(plan: Plan, rank: int) -> tuple[str, int]:
    """The address and port that a worker binds; port 0 is any that is free."""
    if not plan.hosts:
        return "127.0.0.1", 0
    host = plan.hosts[rank]
    return host.listen or host.address, host.port


def _start(context: Any, setup: WorkerSetup) -> _Worker:
    here, there = context.Pipe()
    # No daemon, since these may not start processes, and data is loaded by some. `_stop` leaves none behind.
    process = context.Process(target=_work, args=(setup, there), name=f"pd-worker-{setup.rank}", daemon=False)
    process.start()
    there.close()
    return _Worker(setup, process, here)


def _work(setup: WorkerSetup, connection: Connection) -> None:
    from pd_train.worker import work

    work(setup, connection)


def _watch(workers: Sequence[_Worker], plan: Plan, show: Callable[[Event], None], dumps: DumpRequests) -> None:
    """Hear the workers out until all are done, or raise the first cause of a failure."""
    addresses = {rank: (host.address, host.port) for rank, host in enumerate(plan.hosts)}
    bound: set[int] = set()
    deadline: float | None = None
    while not all(worker.heard_out for worker in workers):
        by_connection = {worker.connection: worker for worker in workers if not worker.heard_out}
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([dumps.descriptor, *by_connection], timeout)
        if deadline is not None and time.monotonic() >= deadline:
            break
        for connection in ready:
            if connection == dumps.descriptor:
                running = [worker.process.pid for worker in workers if not worker.heard_out]
                show(Note(dumps.pass_on(running, workers[0].setup.options.run_dir), "information"))
                continue
            worker = by_connection[connection]  # type: ignore[index]
            try:
                what = worker.connection.recv()
            except (EOFError, OSError):
                worker.heard_out = True
                if not worker.done and worker.failure is None:
                    worker.failure = _death_of(worker)
                what = None
            if isinstance(what, Bound):
                bound.add(worker.setup.rank)
                if not plan.hosts:
                    addresses[worker.setup.rank] = (what.address, what.port)
                if len(bound) == len(workers):
                    show(WorkersListen())
                    for each in workers:
                        with contextlib.suppress(OSError):
                            each.connection.send(Peers(addresses))
            elif isinstance(what, Happened):
                show(what.event)
            elif isinstance(what, Failed):
                worker.failure = what
            elif isinstance(what, Done):
                worker.done = True
        failed = [worker for worker in workers if worker.failure is not None]
        if any(worker.failure and not worker.failure.consequence for worker in failed):
            break
        if failed and deadline is None:
            # Only consequences so far: the cause should be heard of in a moment.
            deadline = time.monotonic() + _CAUSE_GRACE_S
    _raise_first_cause(workers)


def _death_of(worker: _Worker) -> Failed:
    worker.process.join(_STOP_GRACE_S)
    code = worker.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    if code == -signal.SIGKILL:
        how += ", by a person or by the system for lack of memory"
    its_log = log_path(worker.setup)
    return Failed(f"{worker.name}: the process (pid {worker.process.pid}) {how}. Its log: {its_log}", lost=True)


def _raise_first_cause(workers: Sequence[_Worker]) -> None:
    failures = [worker.failure for worker in workers if worker.failure is not None]
    if failures:
        first = min(failures, key=lambda failure: failure.consequence)
        raise (WorkerLost if first.lost else UserError)(first.text)


def _stop(workers: Sequence[_Worker]) -> None:
    """Leave no process behind."""
    for worker in workers:
        if worker.process.is_alive() and not worker.done:
            worker.process.terminate()
    deadline = time.monotonic() + _STOP_GRACE_S
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()) if not worker.done else 2 * _STOP_GRACE_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
        worker.process.close()


def _clear_temporary(run_dir: Path) -> None:
    """Remove what a worker that was stopped had begun to write; nobody writes there any more."""
    for begun in run_dir.rglob(".*.tmp"):
        with contextlib.suppress(OSError):
            begun.unlink()


@contextlib.contextmanager
def _signals_as_exception() -> Iterator[None]:
    """SIGINT and SIGTERM end the run in order; a second one does not interrupt the ending."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
