"""One worker process: builds its stage, meets the others, runs the segments, and owns all of that until it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch

from pd_format.errors import UserError
from pd_train.clock import Clock, align, answer_others
from pd_train.compute import DivergedError
from pd_train.control import Bound, Done, Failed, Launcher, WorkerSetup, log_path
from pd_train.debug_dump import WorkerDump
from pd_train.duties import Company, Duty, Emulating, Training
from pd_train.events import Event, Note, WorkersMet, from_plain, to_plain
from pd_train.farewell import patience_s
from pd_train.host import allow_open_files
from pd_train.inbox import Inbox, PeerFailedError, PeerLostError, StallError
from pd_train.keys import Key, read_key
from pd_train.links import Links
from pd_train.meeting import COMMON_MARK, meet
from pd_train.network_check import MeasuringNetwork
from pd_train.recorder import Recorder
from pd_train.routing import Place, place_of
from pd_train.sender import Sender
from pd_train.transport import Transport
from pd_train.wire import Message

__all__ = ["work"]

log = logging.getLogger(__name__)

_GOODBYE_LINGER_S = 5.0
_FAILURE_LINGER_S = 1.0


def work(setup: WorkerSetup, connection: Connection) -> None:
    """Run one worker; tells the launcher over the connection how it ends. Called in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which stops all workers.
    launcher = Launcher(connection)
    place = place_of(setup.options.plan, setup.rank)
    try:
        _log_to_file(setup, place)
        allow_open_files()
        _run(setup, place, launcher, WorkerDump(setup.options.debug_dump))
    except _EXPECTED as error:
        failed = _failure_of(setup, error)
        log.error("%s", failed.text)
        launcher.tell(failed)
    except BaseException as error:
        log.exception("%s failed", place)
        launcher.tell(_failure_of(setup, error))
    else:
        launcher.tell(Done())
    sys.stdout.flush()
    sys.stderr.flush()


_EXPECTED = (UserError, DivergedError, StallError, PeerLostError, PeerFailedError)


def _failure_of(setup: WorkerSetup, error: BaseException) -> Failed:
    """How a worker's end is told; the text names the worker that it began with."""
    if isinstance(error, PeerFailedError):
        return Failed(str(error), consequence=True, lost=error.may_recover)
    plan, rank = setup.options.plan, setup.rank
    if isinstance(error, PeerLostError):
        rank = error.rank
    where = f" on {plan.hosts[rank].address}" if plan.hosts else ""
    name = f"worker {rank} ({place_of(plan, rank)}{where})"
    its_log = f" Its log{where}: {log_path(setup, rank)}"
    if isinstance(error, PeerLostError):
        silence = f"it has ended, or was silent for {setup.options.peer_timeout:g} s"
        return Failed(f"lost the connection to {name}: {silence}.{its_log}", consequence=True, lost=True)
    if isinstance(error, _EXPECTED):
        return Failed(f"{name}: {str(error).rstrip('.')}.")
    return Failed(f"{name}: {type(error).__name__}: {str(error).rstrip('.')}.{its_log}")


def _tell_why(setup: WorkerSetup, transport: Transport, error: BaseException) -> None:
    """The first to fail tells the others, so that every host ends with the same words."""
    failed = _failure_of(setup, error)
    for rank in range(setup.options.plan.workers):
        if rank != setup.rank:
            transport.send(rank, Message("failed", setup.rank, 0, 0, (failed.text, failed.lost)))


def _key(setup: WorkerSetup) -> Key | None:
    """Each worker reads it from the file for itself: nothing that is sent or written holds the secret."""
    return None if setup.options.key is None else read_key(setup.options.key)


def _teller(setup: WorkerSetup, launcher: Launcher, links: Links) -> Callable[[Event], None]:
    """Rank 0 tells of the run, to the programs on other hosts too."""
    ranks = setup.options.ranks
    elsewhere = [rank for rank in range(setup.options.plan.workers) if ranks and rank not in ranks]

    def tell(event: Event) -> None:
        launcher.tell_event(event)
        for rank in elsewhere:
            links.to_rank(rank, "event", 0, 0, to_plain(event))

    return tell


def _tell_wait(launcher: Launcher, text: str) -> None:
    launcher.tell_event(Note(text, "waiting"))


def _run(setup: WorkerSetup, place: Place, launcher: Launcher, dump: WorkerDump) -> None:
    options = setup.options
    torch.set_num_threads(options.threads)
    duty: Duty | None = None
    try:
        if options.measure_network:
            duty = MeasuringNetwork(setup, place)
        elif options.emulate is not None:
            duty = Emulating(setup, place, options.emulate, dump)
        else:
            duty = Training(setup, place, launcher, dump)
        clock = Clock()
        sender = None if duty.staging is None else Sender(duty.staging)
        transport = Transport(
            setup.rank,
            COMMON_MARK,
            setup.address,
            setup.port,
            options.peer_timeout,
            duty.problem,
            _key(setup),
            clock.now,
            hold=None if sender is None else sender.hold,
            pinned=duty.staging is not None and duty.staging.pins,
        )
    except Exception:
        if duty is not None:
            duty.close()
        raise
    linger, has_met = 0.0, False
    try:
        if sender is not None:
            sender.start(transport.fail)
        launcher.tell(Bound(transport.address, transport.port))
        dump.add(transport.standing)
        dump.phase = "waits until all workers of this host listen"
        peers = launcher.await_peers()
        transport.connect(peers)
        inbox = Inbox(transport, str(place), options.stall_timeout, lambda text: launcher.tell_event(Note(text)))
        dump.add(inbox.standing)
        dump.phase = "meets the other workers"
        links = Links(place, transport, inbox)
        # Before they meet: whoever hears first that all are there sends at once.
        runner = duty.assemble(links, Recorder(clock.now, range(*options.traced)))
        mark = meet(setup, peers, links, transport, duty.fingerprint, partial(_tell_wait, launcher))
        launcher.tell_event(WorkersMet())
        has_met = True
        errors = answer_others(links, options.plan.workers) if setup.rank == 0 else align(clock, links)
        dump.phase = "prepares to run"
        dump.add(runner.standing)
        if setup.rank == (options.ranks or (0,))[0]:
            inbox.handle("event", lambda message: launcher.tell_event(from_plain(*message.body)))
        else:
            inbox.handle("event", lambda message: None)
        duty.run(Company(transport, inbox, links, mark, errors, _teller(setup, launcher, links)))
        if transport.refused:
            log.warning("refused %d messages", transport.refused)
        linger = _GOODBYE_LINGER_S
    except BaseException as error:
        if transport.is_connected:
            _tell_why(setup, transport, error)
            is_first = not has_met and not isinstance(error, PeerFailedError | PeerLostError)
            linger = patience_s(options.launched) if is_first else _FAILURE_LINGER_S
        raise
    finally:
        if sender is not None:
            sender.close(linger)
        transport.close(linger)
        duty.close()


def _log_to_file(setup: WorkerSetup, place: Place) -> None:
    """All that this process and its libraries print goes to its log."""
    file = os.open(log_path(setup), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {setup.rank} {place} %(levelname)s %(message)s", force=True
    )
