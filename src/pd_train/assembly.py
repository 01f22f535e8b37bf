"""Puts a stage's computation, its weight versions and its parameter server together, as the run's mode asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from pd_format.compression import parse_gradients
from pd_format.errors import UserError
from pd_format.layers.precision import get_precision
from pd_format.layers.task import Task
from pd_format.layers.values import map_tensors, tensors_in
from pd_format.versions import StageVersions, sets_needed
from pd_train.asynchronous import AsynchronousServer
from pd_train.built import BuiltStage
from pd_train.clipping import Clipping
from pd_train.compute import StageRunner
from pd_train.crossing import Crossing
from pd_train.gradients import WatchGradients
from pd_train.inbox import Inbox
from pd_train.links import Links
from pd_train.loss_scale import LossScale
from pd_train.memory import MemoryMeter
from pd_train.metrics import METRICS
from pd_train.optimizers import stage_scale
from pd_train.options import RunOptions
from pd_train.reading import Source
from pd_train.recorder import Recorder
from pd_train.server import Send, Server
from pd_train.sharded import ShardedServer
from pd_train.staging import Staging
from pd_train.torch_engine import TorchEngine
from pd_train.weights import ParameterSets

__all__ = ["Assembled", "assemble", "choose_device"]


class Assembled(NamedTuple):
    """What one worker runs."""

    runner: StageRunner
    sets: ParameterSets
    server: Server
    loss_scale: LossScale | None
    """Of float16."""


def choose_device(wanted: str, local_index: int) -> torch.device:
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


def assemble(
    options: RunOptions,
    built: BuiltStage,
    links: Links,
    source: Source | None,
    device: torch.device,
    task: Task,
    recorder: Recorder,
    staging: Staging | None = None,
) -> Assembled:
    """Put a stage's computation, its weight versions and its parameter server together, as the mode asks.

    `staging` is the way to the device, where that is not the host itself.
    """
    place = links.place
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
        crossing=None if options.plan.compress_activations is None else Crossing(options.plan.compress_activations),
        staging=staging,
    )
    loss_scale = _loss_scale(options, links)
    if staging is not None:
        staging.meanwhile = links.inbox.sort
    server = _server(options, built, versions, sets, links, loss_scale, engine.watch_gradients, staging)
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
        recorder=recorder,
        peak_bytes=_peak_bytes(options, engine, server, links.inbox, device),
        loss_scale=loss_scale,
        to_device=_bringing(staging),
    )
    return Assembled(runner, sets, server, loss_scale)


def _to_replicas(links: Links, staging: Staging | None) -> Send:
    """How a stage sends to its replicas: messages look into the host's memory.

    Copies run beside the computation, so nothing may write to what is sent before it has been copied. Pieces of a
    gradient are the message's own. A piece of a parameter set is written again only by an update that takes in
    gradients of all replicas, each computed with this version or a later one (`ParameterSets`): they have received the
    piece, so it has been copied. Where no gradient proves that (asp), what is sent is a copy that the device has made.
    """
    if staging is None:
        return links.to_replica
    parameters: tuple[object, object] = None, None
    """What was sent last, and the same on the host: all replicas are sent the same."""

    def send(segment: int, replica: int, kind: str, index: int, body: object) -> None:
        nonlocal parameters
        if kind != "parameters":
            here = map_tensors(staging.to_host, body)
        elif body is parameters[0]:
            here = parameters[1]
        else:
            here = map_tensors(staging.to_host, body)
            parameters = body, here
        links.to_replica(segment, replica, kind, index, here)

    return send


def _bringing(staging: Staging | None) -> Callable[[Any], Any] | None:
    """Brings what has arrived to the device."""
    return None if staging is None else partial(map_tensors, staging.to_device)


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
    watch: WatchGradients,
    staging: Staging | None,
) -> Server:
    send = _to_replicas(links, staging)
    names = [built.names[id(parameter)] for parameter in built.parameters]
    replica, optimizer = links.place.replica, options.optimizer
    if options.mode.sync == "asp":
        return AsynchronousServer(sets, versions, watch, names, replica, optimizer, send)
    clipping = _clipping(options, links)
    scheme = options.plan.compress_gradients
    return ShardedServer(
        sets,
        versions,
        watch,
        names,
        replica,
        optimizer,
        send,
        clipping,
        loss_scale,
        compression=None if scheme is None else parse_gradients(scheme),
    )


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
