"""One worker process: builds its stage, meets the others, runs the segments, and owns all of that until it ends."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.layers.precision import get_precision
from pd_format.layers.task import Task, get_task
from pd_format.layers.values import tensors_in
from pd_format.versions import StageVersions, sets_needed
from pd_train.asynchronous import AsynchronousServer
from pd_train.built import BuiltStage, build_stage, made_up
from pd_train.checkpoint.choice import Needs
from pd_train.checkpoint.exchange import Exchange, Share
from pd_train.checkpoint.keeper import Keeper
from pd_train.checkpoint.progress import RunProgress
from pd_train.clipping import Clipping
from pd_train.compute import DivergedError, StageRunner
from pd_train.control import Bound, Done, Failed, Launcher, WorkerSetup, log_path
from pd_train.data import MinibatchLoader
from pd_train.datasets.loading import load_datasets
from pd_train.debug_dump import WorkerDump
from pd_train.engine import TorchEngine
from pd_train.events import Note
from pd_train.forms import plan_problem
from pd_train.host import available_cores, shared_memory_bytes
from pd_train.inbox import Inbox, PeerLostError, StallError
from pd_train.lead import Lead, follow, part_with
from pd_train.links import Links
from pd_train.loss_scale import LossScale
from pd_train.measured import Measure, measure_of
from pd_train.memory import MemoryMeter
from pd_train.metrics import METRICS
from pd_train.optimizers import stage_scale
from pd_train.options import RunOptions
from pd_train.reading import Source, loader_workers, open_source, prepare_processes
from pd_train.routing import Place, place_of
from pd_train.server import Server
from pd_train.sharded import ShardedServer
from pd_train.transport import Transport
from pd_train.weights import ParameterSets

__all__ = ["work"]

log = logging.getLogger(__name__)

_GOODBYE_LINGER_S = 5.0


def work(setup: WorkerSetup, connection: Connection) -> None:
    """Run one worker; tells the launcher over the connection how it ends. Called in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which stops all workers.
    launcher = Launcher(connection)
    place = place_of(setup.options.plan, setup.rank)
    try:
        _log_to_file(setup, place)
        _run(setup, place, launcher, WorkerDump(setup.options.debug_dump))
    except (UserError, DivergedError, StallError) as error:
        log.error("%s", error)
        launcher.tell(Failed(str(error)))
    except PeerLostError as error:
        plan = setup.options.plan
        where = f" on {plan.hosts[error.rank].address}" if plan.hosts else ""
        text = (
            f"{error} ({place_of(plan, error.rank)}{where}): it has ended, or was silent for "
            f"{setup.options.peer_timeout:g} s. Its log{where}: {log_path(setup, error.rank)}"
        )
        log.error("%s", text)
        launcher.tell(Failed(text, consequence=True))
    except BaseException as error:
        log.exception("%s failed", place)
        launcher.tell(Failed(f"{type(error).__name__}: {error}", see_log=True))
    else:
        launcher.tell(Done())
    sys.stdout.flush()
    sys.stderr.flush()


def _run(setup: WorkerSetup, place: Place, launcher: Launcher, dump: WorkerDump) -> None:
    options = setup.options
    torch.set_num_threads(options.threads)
    device = _choose_device(options.device, setup.local_index)
    processes = _loader_workers(options)
    if place.before is None and processes:
        prepare_processes(options.data)
    # A run that goes on takes its weights from the checkpoint; the file that it began with may be gone.
    init_from = options.init_from if options.resume == "no" else None
    dump.phase = "builds its stage"
    built = build_stage(options.plan, place.stage.index, options.seed, device, init_from)
    task = get_task(options.plan.task)
    dump.phase = "opens the data"
    loaders, measure = _open_data(options, built, task) if place.before is None else (None, None)
    source = None
    if loaders is not None:
        pin = device.type == "cuda"
        source = open_source(options, place, loaders, processes, pin, lambda text: launcher.tell_event(Note(text)))
    problem = partial(plan_problem, options.plan, place)
    transport = Transport(setup.rank, setup.run, setup.address, setup.port, options.peer_timeout, problem)
    linger = 0.0
    try:
        launcher.tell(Bound(transport.address, transport.port))
        dump.add(transport.standing)
        dump.phase = "waits until all workers of the plan have started"
        transport.connect(launcher.await_peers())
        inbox = Inbox(transport, str(place), options.stall_timeout, lambda text: launcher.tell_event(Note(text)))
        dump.add(inbox.standing)
        dump.phase = "prepares to train"
        links = Links(place, transport, inbox)
        loss_scale = _loss_scale(options, links)
        runner, sets, server = _assemble(place, options, built, links, source, loss_scale, device, task)

        dump.add(runner.standing)

        def state() -> dict[str, Tensor]:
            return {**(built.unused if setup.rank == 0 else {}), **built.state(sets.newest())}

        keeper = None if options.evaluate_only else _keeper(setup, place, state, server, runner)
        progress = RunProgress()
        if options.resume != "no":
            dump.phase = "agrees with the others on a checkpoint to go on from"
            progress = _resume(setup, built, sets, server, links, runner, loss_scale)
        dump.phase = "runs"
        if loaders is not None and setup.rank == 0:
            tell = launcher.tell_event
            lead = Lead(options, runner, transport, inbox, loaders, loss_scale, device, tell, measure, keeper)
            if options.evaluate_only:
                lead.evaluate()
            else:
                lead.run(state, built.state_names, progress)
        else:
            follow(transport, inbox, runner, keeper)
            is_asked = place.replica == 0 and not options.evaluate_only
            part_with(transport, inbox, state() if is_asked else {}, runner.statistics())
        if transport.refused:
            log.warning("refused %d messages", transport.refused)
        linger = _GOODBYE_LINGER_S
    finally:
        transport.close(linger)
        if source is not None:
            source.close()


def _choose_device(wanted: str, local_index: int) -> torch.device:
    """GPU i for worker i of this host, from the first one on again where there are fewer.

    Raises:
        UserError: a GPU was asked for and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU on this machine; use --device cpu, or install torch for it.")
    device = torch.device("cuda", local_index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _assemble(
    place: Place,
    options: RunOptions,
    built: BuiltStage,
    links: Links,
    source: Source | None,
    loss_scale: LossScale | None,
    device: torch.device,
    task: Task,
) -> tuple[StageRunner, ParameterSets, Server]:
    """Put a stage's computation, its weight versions and its parameter server together, as the mode asks."""
    versions = options.versions(place.stage.index)
    shared = built.parameters if options.mode.is_naive else None
    own = built.parameters if shared is None else built.naive_set(versions)
    sets = ParameterSets(own, 1 if options.evaluate_only else sets_needed(versions), versions.lag)
    # Where an update averages more than a round, no stage advances faster than another.
    averages_rounds = options.mode.by_round or options.mode.sync == "asp"
    scaling = options.optimizer.lr_scaling if averages_rounds else "none"
    engine = TorchEngine(
        built.module,
        sets.sets,
        task,
        device,
        naive=shared,
        recompute=place.stage.recompute,
        predict=METRICS[options.metric].from_predictions,
        precision=get_precision(options.precision),
        first=place.before is None,
    )
    server = _server(options, built, versions, sets, links, loss_scale)
    runner = StageRunner(
        links=links,
        versions=versions,
        engine=engine,
        sets=sets,
        server=server,
        buffers=list(built.module.buffers()),
        source=source,
        rate_scale=stage_scale(scaling, place.stage.replicas, options.plan.stages[0].replicas),
        seed=options.seed,
        peak_bytes=_peak_bytes(options, engine, server, links.inbox, device),
        loss_scale=loss_scale,
    )
    return runner, sets, server


def _keeper(
    setup: WorkerSetup, place: Place, state: Callable[[], dict[str, Tensor]], server: Server, runner: StageRunner
) -> Keeper:
    def sent() -> tuple[int, int]:
        statistics = runner.statistics()
        return statistics.sent_bytes, statistics.training_bytes

    keep = setup.options.keep if setup.local_index == 0 else None
    return Keeper(setup.options.run_dir, setup.run, place, state, server.shard(), sent, keep)


def _resume(
    setup: WorkerSetup,
    built: BuiltStage,
    sets: ParameterSets,
    server: Server,
    links: Links,
    runner: StageRunner,
    loss_scale: LossScale | None,
) -> RunProgress:
    """Take the newest whole checkpoint over, together with all other workers.

    Raises:
        UserError: there is none, and the run must not start from the beginning.
    """
    options = setup.options
    unused = built.unused.keys() if setup.rank == 0 else ()
    needs = Needs(frozenset({*built.held(), *unused}), tuple(server.shard().ranges()), progress=True)
    share = Share(setup.local_index, setup.local_workers)
    notice = links.inbox.notice
    restored = Exchange(links, options.plan.workers, options.run_dir, share, needs, notice).run()
    if restored is None:
        if options.resume == "yes":
            raise UserError(
                f"{options.run_dir}: holds no checkpoint that is whole and fits the plan; train from the beginning "
                "without --resume, in a new folder."
            )
        return RunProgress(lost_seconds=time.time() - options.first_start)
    built.load(restored.state, sets.sets)
    server.shard().load(restored.slices)
    if setup.rank == 0:  # One worker counts for all, since the plan may have had others.
        earlier = restored.records
        runner.count_earlier(sum(one.sent_bytes for one in earlier), sum(one.training_bytes for one in earlier))
        notice(f"going on from checkpoint {restored.position.folder}")
    progress = RunProgress.of(restored.progress, len(options.plan.stages))
    lost = time.time() - max(one.written for one in restored.records)
    progress = dataclasses.replace(progress, lost_seconds=progress.lost_seconds + max(0.0, lost))
    if loss_scale is not None and progress.loss_scale is not None:
        loss_scale.load(progress.loss_scale)
    return progress


def _peak_bytes(
    options: RunOptions, engine: TorchEngine, server: Server, inbox: Inbox, device: torch.device
) -> Callable[[], int | None]:
    """How the most memory held is found out, if at all."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device)
    if not options.measure_memory:
        return lambda: None
    meter = MemoryMeter(lambda: (*engine.held(), *server.held(), *tensors_in(inbox.kept())))
    engine.measure(meter)
    return lambda: meter.peak_bytes


def _server(
    options: RunOptions,
    built: BuiltStage,
    versions: StageVersions,
    sets: ParameterSets,
    links: Links,
    loss_scale: LossScale | None,
) -> Server:
    names = [built.names[id(parameter)] for parameter in built.parameters]
    replica, optimizer = links.place.replica, options.optimizer
    if options.mode.sync == "asp":
        return AsynchronousServer(sets, versions, names, replica, optimizer, links.to_replica)
    leaves = [built.parameters] if options.mode.is_naive else sets.sets
    clipping = _clipping(options, links)
    return ShardedServer(sets, versions, leaves, names, replica, optimizer, links.to_replica, clipping, loss_scale)


def _clipping(options: RunOptions, links: Links) -> Clipping | None:
    members: tuple[int, ...] = links.place.stage.workers
    most = options.clip_stage_norm
    if options.clip_norm is not None:
        members, most = tuple(range(options.plan.workers)), options.clip_norm
    if most is None:
        return None

    def tell(segment: int, update: int, squares: float) -> None:
        for rank in members:
            links.to_rank(rank, "norm", segment, update, squares)

    clipping = Clipping(most, members, tell)
    links.inbox.handle(
        "norm", lambda message: clipping.take(message.segment, message.index, message.sender, message.body)
    )
    return clipping


def _loss_scale(options: RunOptions, links: Links) -> LossScale | None:
    if options.precision != "fp16":
        return None
    members = range(options.plan.workers)

    def tell(segment: int, finite: bool) -> None:
        for rank in members:
            links.to_rank(rank, "finite", segment, 0, finite)

    loss_scale = LossScale(options.loss_scaling, members, tell)
    links.inbox.handle("finite", lambda message: loss_scale.take(message.segment, message.sender, message.body))
    return loss_scale


def _open_data(
    options: RunOptions, built: BuiltStage, task: Task
) -> tuple[tuple[MinibatchLoader, MinibatchLoader], Measure | None]:
    """Training and validation minibatches, and the metric that is made of predictions, where the run has such a one."""
    plan = options.plan
    datasets = load_datasets(
        options.data,
        plan.inputs,
        built.classes,
        plan.minibatch_size,
        built.label_shape,
        lambda: task.random_targets(made_up(built.output), torch.Generator().manual_seed(0)),
        options.skip_corrupt,
    )
    loaders = []
    for training, dataset in zip((True, False), datasets, strict=True):
        if training and options.evaluate_only:
            continue  # Nothing is ever read of it, so it may be empty.
        try:
            loader = MinibatchLoader(
                dataset,
                plan.inputs,
                plan.minibatch_size,
                seed=options.seed,
                shuffle=training,
                drop_last=options.drop_last and training,
            )
        except UserError as error:
            part = "train" if training else "validation"
            raise UserError(f"--data {options.data}, {part}: {error}") from None
        loaders.append(loader)
    measure = None
    if METRICS[options.metric].from_predictions:
        measure = measure_of(datasets[1], options.data, options.metric, task, plan.task)
    return (loaders[0], loaders[-1]), measure


def _loader_workers(options: RunOptions) -> int:
    workers = options.plan.workers
    minibatch_bytes = sum(math.prod(spec.shape) * dtype_of(spec).itemsize for spec in options.plan.inputs)
    cores, shared = available_cores() // workers, shared_memory_bytes() / workers
    return loader_workers(options.loader_workers, options.data, cores, minibatch_bytes, shared)


def _log_to_file(setup: WorkerSetup, place: Place) -> None:
    """All that this process and its libraries print goes to its log."""
    file = os.open(log_path(setup), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {setup.rank} {place} %(levelname)s %(message)s", force=True
    )
