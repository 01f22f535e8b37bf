"""Says why no plan keeps within a memory limit: which layer is in the way, and what would help (design, section 2).

Every answer is tried, none is guessed: the search for any plan at all is asked again with a higher limit, more
machines, smaller minibatches, recomputation or another optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from pd_format.errors import UserError
from pd_format.memory import held_bytes
from pd_format.profile import LayerProfile
from pd_format.units import format_bytes
from pd_format.versions import default_sync, lag_of
from pd_plan.cost import Partition
from pd_plan.fewer import Fewer
from pd_plan.limits import Limit, Sizes
from pd_plan.text import short_config

__all__ = ["Finder", "Found", "why_none_fits"]

Found = tuple[Partition, tuple[bool, ...], tuple[int, ...]]
"""A plan, which of its stages recompute, and its depths."""
Finder = Callable[[Limit], "Found | None"]
"""Any plan within a limit, however slow."""

_CLOSE = 1.02
"""The least limit that some plan keeps is looked for this closely."""
_MOST_PROBES = 20
_LEAST_PART = Fraction(1, 64)
_NO_LIMIT = 10**17
_NAME = 60


def why_none_fits(
    layers: Sequence[LayerProfile],
    limit: Limit,
    what: str,
    at: str,
    find: Finder,
    minibatch_size: int | None,
    machines_needed: Callable[[], int | None] = lambda: None,
    fewer: Callable[[], Fewer | None] = lambda: None,
) -> UserError:
    """The error to raise where no plan keeps within a limit.

    Args:
        layers: of the profile.
        limit: that nothing keeps within.
        what: the plans that were looked at, as in `no plan on 4 machines`.
        at: how many minibatches they keep in flight, as in `at the paper's depths`.
        find: finds such a plan.
        minibatch_size: in samples, None where it is not known.
        machines_needed: how many machines some plan within the limit takes, where the number may be raised.
        fewer: finds a plan within the limit that keeps fewer minibatches in flight.
    """
    text = f"{what} keeps within {format_bytes(limit.memory_bytes)} a worker {at}."
    least = _least(limit, find)
    if least is not None:
        text += " " + _obstacle(layers, limit.sizes, least)
    helps = _helps(limit, find, minibatch_size)
    more = machines_needed()
    if more is not None:
        helps.insert(0, f"{more} machines")
    few = fewer()
    if few is not None:
        partition, depths = few
        options = f"--config {partition.config} --in-flight {'-'.join(map(str, depths))}"
        recompute = " --recompute" if limit.recompute else ""
        helps.insert(0, f"fewer minibatches in flight, which is slower ({options}{recompute})")
    if helps:
        return UserError(f"{text} What would help: {', or '.join(helps)}.")
    every = replace(limit, recompute=True, sizes=replace(limit.sizes, optimizer="sgd").with_minibatch(_LEAST_PART))
    if find(every) is not None:
        return UserError(
            f"{text} Nothing would help alone; smaller minibatches with --recompute and --optimizer sgd would."
        )
    return UserError(f"{text} Neither smaller minibatches nor recomputation would help: give workers more memory.")


def _least(limit: Limit, find: Finder) -> Found | None:
    """A plan that needs about the least memory there can be."""
    best = find(replace(limit, memory_bytes=_NO_LIMIT))
    if best is None:
        return None
    lower = limit.memory_bytes
    for _ in range(_MOST_PROBES):
        peak = max(limit.sizes.needed(best[0], best[2], best[1]))
        if peak <= lower * _CLOSE:
            break
        middle = math.isqrt(lower * peak)
        found = find(replace(limit, memory_bytes=middle))
        if found is None:
            lower = middle
        else:
            best = found
    return best


def _obstacle(layers: Sequence[LayerProfile], sizes: Sizes, found: Found) -> str:
    partition, recompute, depths = found
    needed = sizes.needed(partition, depths, recompute)
    stage = needed.index(max(needed))
    first, end = partition.ranges[stage]
    replicas = partition.replicas[stage]
    lag = lag_of(replicas, default_sync(len(needed)))

    def own(layer: int) -> int:
        """What the layer alone makes a worker of the stage hold."""
        held: int = held_bytes(
            parameters=layers[layer].parameter_bytes,
            trainable=layers[layer].trainable_bytes,
            stash=layers[layer].stash_bytes,
            input_bytes=0,
            output_bytes=0,
            replicas=replicas,
            in_flight=depths[stage],
            lag=lag,
            sets=depths[stage] + lag,
            states=sizes.states,
            compressed=sizes.compressed,
            recompute=recompute[stage],
        )
        return held

    largest = max(range(first, end), key=own)
    layer = layers[largest]
    op = layer.op if len(layer.op) <= _NAME else layer.op[: _NAME - 3] + "..."
    where = f"stage {stage} (config {short_config(partition.config)}, {depths[stage]} in flight)"
    text = f"The obstacle is layer {layer.name}, {op}: "
    if end - first == 1:
        return text + f"even alone in {where} it needs {format_bytes(needed[stage])}."
    return (
        f"{text}the leanest of these has it in {where}, which needs {format_bytes(needed[stage])}, "
        f"{format_bytes(own(largest))} of it for this layer."
    )


def _helps(limit: Limit, find: Finder, minibatch_size: int | None) -> list[str]:
    helps = []
    if not limit.recompute and find(replace(limit, recompute=True)) is not None:
        helps.append("recomputation (--recompute)")
    part = Fraction(1, 2)
    least = _LEAST_PART if minibatch_size is None else Fraction(1, minibatch_size)
    while part >= least:
        size = None if minibatch_size is None else max(1, math.floor(minibatch_size * part))
        exact = part if size is None or minibatch_size is None else Fraction(size, minibatch_size)
        if find(replace(limit, sizes=limit.sizes.with_minibatch(exact))) is not None:
            of = f"of 1/{part.denominator} of the size" if size is None else f"of {size} instead of {minibatch_size}"
            helps.append(f"minibatches {of}")
            break
        part /= 2
    if limit.sizes.states:
        leaner = replace(limit, sizes=replace(limit.sizes, optimizer="sgd"))
        if find(leaner) is not None:
            helps.append("an optimizer without state (--optimizer sgd)")
    return helps
