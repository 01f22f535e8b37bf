"""Checks a plan before anything starts: against the schedule, the host's memory and the model (design, section 3)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_format.schedule import find_deadlock
from pd_format.versions import lag_of

if TYPE_CHECKING:
    from pd_format.layers.chain import Chain

__all__ = ["available_memory_bytes", "check_memory", "check_precision", "check_schedule", "stage_ranges"]


def check_schedule(plan: Plan, sync: str) -> None:
    """Refuse depths that deadlock.

    Raises:
        UserError: naming the two stages.
    """
    replicas = [stage.replicas for stage in plan.stages]
    reason = find_deadlock(
        replicas, [stage.in_flight for stage in plan.stages], [lag_of(count, sync) for count in replicas]
    )
    if reason is not None:
        raise UserError(f"the plan would never finish: {reason}. Make the plan anew with pd-plan.")


def check_precision(plan: Plan) -> None:
    """Refuse a precision that the runtime does not know, rather than train in another one.

    Raises:
        UserError: naming the field.
    """
    if plan.precision != "fp32":
        raise UserError(
            f"precision: found {plan.precision!r}; pd-train computes in the types that the model itself has, which is "
            "'fp32'. Profile and plan the model anew without another precision."
        )


def check_memory(plan: Plan, ranks: Sequence[int], available_bytes: int | None) -> None:
    """Refuse a plan whose workers on this host need more memory than it has free.

    Args:
        plan: with its predicted memory a worker.
        ranks: the workers on this host.
        available_bytes: None where it cannot be found out.

    Raises:
        UserError: giving both figures.
    """
    needed = sum(plan.stage_of(rank)[0].predicted.memory_bytes for rank in ranks)
    if available_bytes is not None and needed > available_bytes:
        raise UserError(
            f"the plan's {len(ranks)} workers on this host need {needed / 1e9:.1f} GB of memory and "
            f"{available_bytes / 1e9:.1f} GB are free; use fewer machines, a smaller minibatch, or more hosts."
        )


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that programs can still take on this host, or None where the system does not tell.

    A container or a job of a scheduler may be allowed less than the host has.

    Args:
        root: of the file system that the system tells it by.
    """
    figures = [_host_memory_bytes(root), *_cgroup_memory_bytes(root)]
    return min((figure for figure in figures if figure is not None), default=None)


def _host_memory_bytes(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _cgroup_memory_bytes(root: Path) -> Iterator[int]:
    """What each control group (version 2) that this process is in leaves to it."""
    top = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    own = next((top / line[3:].lstrip("/") for line in groups if line.startswith("0::")), top)
    for group in (own, *own.parents):
        if group != top and top not in group.parents:
            return
        try:
            most = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            # Files in the cache give way to programs.
            yield max(0, int(most) - used + int(stat.get("inactive_file", 0)))


def stage_ranges(plan: Plan, chain: Chain) -> list[tuple[int, int]]:
    """The first and the last layer of each stage, from 0, checked against the model that was built.

    Raises:
        UserError: the model is not the plan's, or the stages do not cover its layers once and in order.
    """
    from pd_format.layers.fingerprint import compare_fingerprints

    if chain.fingerprint != plan.model.fingerprint:
        where = compare_fingerprints(plan.model.fingerprint, chain.fingerprint, chain.layers)
        raise UserError(
            f"the plan was made for another version of model {plan.model.name}: {where} "
            "Profile and plan the model anew."
        )
    numbers = {layer.name: number for number, layer in enumerate(chain.layers)}
    ranges: list[tuple[int, int]] = []
    expected = 0
    for index, stage in enumerate(plan.stages):
        for field, name in (("first_layer", stage.first_layer), ("last_layer", stage.last_layer)):
            if name not in numbers:
                raise UserError(f"stages[{index}].{field}: the model has no layer {name!r}.")
        first, last = numbers[stage.first_layer], numbers[stage.last_layer]
        if first != expected:
            found = "again holds" if first < expected else "leaves out"
            wanted = chain.layers[min(expected, len(chain.layers) - 1)].name
            raise UserError(
                f"stages[{index}].first_layer: {stage.first_layer!r} {found} layers of the model; expected {wanted!r}, "
                "so that every layer is in one stage."
            )
        if last - first + 1 != stage.layers:
            raise UserError(
                f"stages[{index}].layers: found {stage.layers}; from {stage.first_layer!r} to {stage.last_layer!r} "
                f"the model has {max(0, last - first + 1)}."
            )
        ranges.append((first, last))
        expected = last + 1
    if expected != len(chain.layers):
        raise UserError(
            f"stages[{len(plan.stages) - 1}].last_layer: the model goes on after {plan.stages[-1].last_layer!r} to "
            f"{chain.layers[-1].name!r}; every layer must be in a stage."
        )
    return ranges
