"""From the options of the command line and the plan to what the run is, after all checks that need no worker."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pd_format.errors import UserError
from pd_format.graph_text import read_any_profile
from pd_format.plan import Host, Plan
from pd_format.versions import Mode, default_sync
from pd_train.check import (
    check_clipping,
    check_compression,
    check_data,
    check_memory,
    check_origin,
    check_precision,
    check_purpose,
    check_schedule,
    checkpoint_interval,
    optimizer_warning,
    precision_warning,
    settle_mode,
)
from pd_train.emulation import Emulation, check_emulation, default_minibatches
from pd_train.events import Note
from pd_train.farewell import Farewell
from pd_train.host import available_cores, available_memory_bytes
from pd_train.metrics import settle_metric
from pd_train.named_files import check_named_files
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.placing import find_plan, find_workers
from pd_train.routing import on_the_host_of
from pd_train.run_folder import run_folder_of
from pd_train.whoami import Identity, cores_of_task

__all__ = ["Settled", "remarks", "settle"]

_DEFAULT_LR = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001}
_AS_GIVEN = (
    "epochs", "drop_last", "loader_workers", "skip_corrupt", "init_from", "evaluate_only", "seed", "device",
    "measure_memory", "keep", "rendezvous_timeout", "peer_timeout", "stall_timeout", "debug_dump",
)  # fmt: skip
"""Options that need no more than to be handed on under their own names."""


class Settled(NamedTuple):
    """What a command line comes to."""

    options: RunOptions
    """Of the run; its folder is not made yet."""
    identity: Identity
    """Which workers are here, and why."""
    own_hosts: tuple[Host, ...]
    """Of the plan itself, whatever `--hosts` or a launcher said."""

    @property
    def alone(self) -> bool:
        """Whether this program starts all workers."""
        return len(self.options.ranks) == self.options.plan.workers


def settle(given: Mapping[str, Any], farewell: Farewell) -> Settled:
    """What the run is. Nothing is written.

    Args:
        given: the command's options by their names.
        farewell: is told who the others are as soon as that is known.

    Raises:
        UserError: something does not fit.
    """
    plan = find_plan(given["plan_path"])
    own_hosts = plan.hosts
    emulation, minibatches = None, given["minibatches"]
    if given["emulate"] is None:
        check_origin(plan)
    else:
        emulation = Emulation(read_any_profile(given["emulate"]), given["time_scale"])
        check_emulation(plan, emulation.profile, str(given["emulate"]))
        minibatches = minibatches or default_minibatches(plan)
    plan, identity, key = find_workers(plan, given, farewell)
    mode = _settle_mode(plan, given)
    precision = given["precision"] or plan.precision
    if not given["evaluate_only"] and emulation is None:
        check_precision(precision, mode)
    check_clipping(mode, given["clip_stage_grad_norm"], given["clip_grad_norm"])
    if not given["evaluate_only"]:
        check_compression(plan, mode)
    check_schedule(plan, mode)
    # The figures of a plan to train by are for more than an evaluation holds.
    if emulation is None and (plan.inference or not given["evaluate_only"]):
        check_memory(plan, mode, identity.ranks, available_memory_bytes())
    metric, target = settle_metric(plan.task, given["metric"], given["target_metric"], given["target_accuracy"])
    data = given["data"] or plan.data
    if emulation is None:
        check_data(plan.task, data)
    every = given["checkpoint_every"]
    options = RunOptions(
        plan=plan,
        run_dir=given["resume"] or run_folder_of(given["run_dir"], plan, identity),
        data=data,
        minibatches=minibatches,
        optimizer=_settle_optimizer(given),
        mode=mode,
        clip_stage_norm=given["clip_stage_grad_norm"],
        clip_norm=given["clip_grad_norm"],
        precision=precision,
        threads=given["threads"]
        or cores_of_task(identity, os.environ)
        or max(1, available_cores() // len(on_the_host_of(plan, identity.ranks[0]))),
        metric=metric,
        target_metric=target,
        checkpoint_every=None if every is None else checkpoint_interval(plan, mode, every),
        resume="no" if given["resume"] is None else "yes",
        ranks=identity.ranks,
        key=key,
        launched=identity.job is not None,
        traced=_span("--trace-minibatches", given["trace_minibatches"]),
        emulate=emulation,
        **{name: given[name] for name in _AS_GIVEN},
    )
    check_named_files(options)
    return Settled(options, identity, own_hosts)


def _settle_mode(plan: Plan, given: Mapping[str, Any]) -> Mode:
    sync = given["sync"] or default_sync(len(plan.stages))
    if not given["evaluate_only"]:
        check_purpose(plan)
    return settle_mode(plan, Mode(given["weights"], sync, given["flush"], given["group"]))


def _settle_optimizer(given: Mapping[str, Any]) -> OptimizerOptions:
    lr = _DEFAULT_LR[given["optimizer"]] if given["lr"] is None else given["lr"]
    same = {name: given[name] for name in ("momentum", "weight_decay", "lr_schedule", "lr_scaling")}
    return OptimizerOptions(name=given["optimizer"], lr=lr, **same)


def _span(option: str, text: str) -> tuple[int, int]:
    """`20:40` as two numbers.

    Raises:
        UserError: it is something else.
    """
    first, colon, stop = text.partition(":")
    if not (colon and first.isdecimal() and stop.isdecimal() and int(first) <= int(stop)):
        raise UserError(f"{option} {text}: expected two numbers like 20:40, the first minibatch and the one after.")
    return int(first), int(stop)


def remarks(options: RunOptions, given: Mapping[str, Any]) -> Iterator[Note]:
    """What a person should know before the run starts."""
    if options.key is not None and given["insecure"]:
        yield Note(
            "--insecure is of no effect with --key: everything is encrypted, and only holders of the key connect"
        )
    if options.emulate is not None:
        device = options.emulate.profile.device.name or "an unnamed device"
        text = f"emulated: passes wait for the times of {device}, times {options.emulate.time_scale:g}"
        yield Note(text, "information")
        return
    if not options.evaluate_only and (warning := optimizer_warning(options)) is not None:
        yield Note(warning)
    if (warning := precision_warning(options)) is not None:
        yield Note(warning)
    if given["checkpoint_every"] != options.checkpoint_every:
        yield Note(
            f"--checkpoint-every {given['checkpoint_every']} is rounded up to {options.checkpoint_every}, so that "
            "every replica takes part in every update"
        )
