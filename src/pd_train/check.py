"""Checks a plan before anything starts: against the schedule, the host's memory and the model (design, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pd_format.data import parse_data
from pd_format.errors import UserError
from pd_format.memory import OPTIMIZER_STATES
from pd_format.plan import Plan
from pd_format.profile import ORIGINAL_FACTORY
from pd_format.schedule import find_deadlock
from pd_format.units import format_bytes
from pd_format.versions import Mode, default_sync, lag_of, least_group, sets_needed, stage_versions
from pd_train.host import is_loopback

if TYPE_CHECKING:
    from pd_format.profile import PrecisionName
    from pd_train.options import RunOptions

__all__ = [
    "check_clipping",
    "check_compression",
    "check_data",
    "check_memory",
    "check_network",
    "check_origin",
    "check_precision",
    "check_purpose",
    "check_schedule",
    "checkpoint_interval",
    "optimizer_warning",
    "precision_warning",
    "settle_mode",
    "worker_memory_bytes",
]


def check_schedule(plan: Plan, mode: Mode) -> None:
    """Refuse depths that deadlock.

    Raises:
        UserError: naming the two stages.
    """
    replicas = [stage.replicas for stage in plan.stages]
    # Only an update by rounds makes a replica wait for the others within the pipeline.
    lags = [lag_of(count, mode.sync) if mode.by_round else 1 for count in replicas]
    reason = find_deadlock(replicas, [stage.in_flight for stage in plan.stages], lags)
    if reason is not None:
        raise UserError(f"the plan would never finish: {reason}. Make the plan anew with pd-plan.")


def check_origin(plan: Plan) -> None:
    """Refuse a plan that does not say how to build its model, or contradicts itself in what the model is given.

    Raises:
        UserError: with the way forward.
    """
    if plan.model.factory == ORIGINAL_FACTORY:
        raise UserError(
            "the plan was made from a text profile of the original release, which does not say how to build "
            f"{plan.model.name}; profile the model with pd-profile and plan anew."
        )
    for position, spec in enumerate(plan.inputs):
        if spec.shape[:1] != (plan.minibatch_size,):
            raise UserError(
                f"inputs[{position}].shape: found {list(spec.shape)}; the first is minibatch_size, "
                f"{plan.minibatch_size}. Another size needs a new profile: pd-profile --minibatch-size, then pd-plan."
            )


def check_purpose(plan: Plan) -> None:
    """Refuse to train by a plan for inference: its stages are balanced, and its memory counted, for forward passes.

    Raises:
        UserError: saying what to do instead.
    """
    if plan.inference:
        raise UserError(
            "inference: found true; the plan is for forward passes alone (pd-plan --inference), so that neither its "
            "stages nor its memory figures suit training. Plan anew without --inference."
        )


def check_precision(precision: PrecisionName, mode: Mode) -> None:
    """Refuse a precision that the mode cannot compute in.

    Raises:
        UserError: with the reason and the nearest thing that works.
    """
    if precision == "fp16" and mode.flush is None:
        raise UserError(
            "precision fp16 needs a loss scale, and a gradient that overflows in one stage must leave out the update "
            "of all; an asynchronous pipeline has no moment a step at which its stages could agree. Add --flush N, "
            "with which they do, or use bf16, which needs no scale."
        )
    if precision != "fp32" and mode.is_naive:
        raise UserError(
            f"--weights none lets new weights reach the graphs of earlier forward passes, which under {precision} "
            f"hold copies of the old ones in that type; use another mode, or --precision fp32."
        )


def check_compression(plan: Plan, mode: Mode) -> None:
    """Refuse to compress gradients where nothing would be saved, or nobody could say what was left out.

    Raises:
        UserError: with the reason and the nearest thing that works.
    """
    scheme = plan.compress_gradients
    if scheme is None or all(stage.replicas == 1 for stage in plan.stages):
        return
    if mode.sync == "asp":
        raise UserError(
            f"the plan compresses gradients ({scheme}), and with --sync asp replicas skip parameters that newer ones "
            "have overtaken, so that differences do not add up. Use --sync overlap or bsp, or plan without "
            "--compress-gradients."
        )
    if mode.flush is not None:
        raise UserError(
            f"the plan compresses gradients ({scheme}), and the last update before a drain always travels whole: with "
            "--flush that is every update, and nothing would be saved. Leave out --flush, or plan without "
            "--compress-gradients."
        )


def precision_warning(options: RunOptions) -> str | None:
    """A sentence where the run computes in another precision than the one that the plan was made for."""
    used, planned = options.precision, options.plan.precision
    if used == planned:
        return None
    return (
        f"the plan's times and bytes are for {planned}, and the run computes in {used}: neither its cuts nor its "
        f"memory figures hold. Profile with --precision {used} and plan anew to be sure."
    )


def check_data(task: str, data: str) -> None:
    """Refuse a data set whose samples the plan's task would misread.

    Raises:
        UserError: it is none that there is, or it is for another task.
    """
    if parse_data(data).kind == "msvd" and task != "captioning":
        raise UserError(
            f"--data {data} holds captions, and the plan's task is {task!r}, which would learn their padding too. "
            "Profile with --task captioning, and plan again."
        )


def settle_mode(plan: Plan, mode: Mode) -> Mode:
    """The mode with the group size filled in, if it fits the plan.

    Raises:
        UserError: it does not; with the reason and the nearest thing that works.
    """
    replicas = [stage.replicas for stage in plan.stages]
    depths = [stage.in_flight for stage in plan.stages]
    if mode.sync == "asp":
        if len(replicas) > 1:
            raise UserError(
                f"--sync asp needs a plan of one stage, config {plan.config} has {len(replicas)}: between stages every "
                "minibatch meets the versions of its schedule. Use --sync overlap, or pd-plan --strategy data-parallel."
            )
        if mode.weights != "stash" or mode.flush is not None:
            raise UserError("--sync asp applies every gradient on its own; leave out --weights and --flush.")
        if depths[0] > 1:
            raise UserError(
                f"--sync asp runs one minibatch at a time; stage 0 of the plan has in_flight {depths[0]}. Plan "
                "anew with --in-flight 1."
            )
    if mode.is_naive and any(stage.recompute for stage in plan.stages):
        raise UserError(
            "--weights none keeps no version for a forward pass to be run again with, and the plan has stages that "
            "recompute; use another mode, or a plan without --recompute."
        )
    if mode.flush is not None and mode.weights != "stash":
        raise UserError(
            f"--flush uses one version throughout, so --weights {mode.weights} means nothing with it; leave one out."
        )
    if mode.group is not None and mode.weights != "2bw":
        raise UserError("--group belongs to --weights 2bw; leave it out or add that.")
    if mode.weights == "2bw":
        least = max((w - 1) * r for w, r in zip(depths, replicas, strict=True))
        default = least_group(replicas, depths)
        if mode.group is not None and mode.group < least:
            raise UserError(
                f"--group {mode.group} deadlocks: the plan's depths have {least} minibatches wait for the update that "
                f"they belong to; use {default} or at least {least}."
            )
        return replace(mode, group=mode.group or default)
    return mode


def checkpoint_interval(plan: Plan, mode: Mode, minibatches: int) -> int:
    """Minibatches between checkpoints, rounded up so that no update is cut in two by the drain.

    That is a multiple of all replica counts, and of the minibatches of an update.
    """
    update = mode.flush or mode.group or 1
    whole = math.lcm(update, *(stage.replicas for stage in plan.stages))
    return -(-minibatches // whole) * whole


def check_clipping(mode: Mode, by_stage: float | None, whole: float | None) -> None:
    """Refuse a norm that no moment of the run could know.

    Raises:
        UserError: with the reason and the nearest thing that works.
    """
    if by_stage is not None and whole is not None:
        raise UserError("--clip-grad-norm and --clip-stage-grad-norm exclude each other; give one of them.")
    if whole is not None and mode.flush is None:
        raise UserError(
            "--clip-grad-norm needs the gradient of the whole model at one moment, which a pipeline does not have: its "
            "stages update at different times. Clip each stage by its own norm with --clip-stage-grad-norm, or add "
            "--flush N, with which the norm is exact."
        )
    if by_stage is not None and mode.sync == "asp":
        raise UserError(
            "--clip-stage-grad-norm needs all gradients of a round, which --sync asp does not wait for; leave one of "
            "them out."
        )


def check_network(plan: Plan, insecure: bool, has_key: bool) -> None:
    """Refuse to train in the open over a network that nobody has called trusted.

    Raises:
        UserError: naming a host.
    """
    for rank, host in enumerate(plan.hosts):
        if not insecure and not has_key and not is_loopback(host.address):
            raise UserError(
                f"worker {rank} is on {host.address}, so activations, gradients and weights would cross a network in "
                "the open, and anyone on it could disturb the run. Make a key (pd-train --make-key job.key), copy it "
                "to every host and give --key job.key on each; or say with --insecure that you trust the network."
            )


def check_memory(plan: Plan, mode: Mode, ranks: Sequence[int], available_bytes: int | None) -> None:
    """Refuse a plan whose workers on this host need more memory than it has free.

    Args:
        plan: with its predicted memory a worker.
        mode: of the run.
        ranks: the workers on this host.
        available_bytes: None where it cannot be found out.

    Raises:
        UserError: giving both figures.
    """
    needed = sum(worker_memory_bytes(plan, mode, rank) for rank in ranks)
    if available_bytes is not None and needed > available_bytes:
        raise UserError(
            f"the plan's {len(ranks)} workers on this host need {format_bytes(needed)} of memory and "
            f"{format_bytes(available_bytes)} are free; use fewer machines, a smaller minibatch, or more hosts."
        )


def worker_memory_bytes(plan: Plan, mode: Mode, rank: int) -> int:
    """What a worker needs by the plan, whose figures are for weight stashing; another mode may hold more sets."""
    replicas = [stage.replicas for stage in plan.stages]
    depths = [stage.in_flight for stage in plan.stages]
    default = Mode(sync=default_sync(len(replicas)))
    stage, _ = plan.stage_of(rank)
    sets = sets_needed(stage_versions(mode, replicas, depths, stage.index))
    planned = sets_needed(stage_versions(default, replicas, depths, stage.index))
    return stage.predicted.memory_bytes + max(0, sets - planned) * (stage.predicted.trainable_bytes or 0)


def optimizer_warning(options: RunOptions) -> str | None:
    """A sentence where the run's optimizer keeps more than the one that the plan's memory figures count."""
    used, planned = options.optimizer.name, options.plan.optimizer
    if used == "sgd" and options.optimizer.momentum > 0:
        used = "momentum"
    if OPTIMIZER_STATES[used] <= OPTIMIZER_STATES[planned]:
        return None
    return (
        f"the plan's memory figures are for {planned}, and {used} keeps more: a worker needs more than the plan says. "
        f"Plan with --optimizer {used} to be sure that it fits."
    )
