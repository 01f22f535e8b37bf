"""The links that a run of a plan uses, and the sizes of the messages on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pd_format.compression import BUCKET_BYTES, bucket_count, parse_gradients, stage_bytes_after
from pd_format.plan import Plan, Stage

__all__ = ["Link", "links_alone", "links_of"]

_LEAST_BYTES = 64 << 10
"""Of a message: smaller ones measure the programs rather than the network."""
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Link:
    """A way that messages take in a run of a plan."""

    sender: int
    receiver: int
    what: str
    size: int
    """Bytes of a message."""


def links_of(plan: Plan) -> list[Link]:
    """The links of a plan, from the first cut to the last, those of a replicated stage before those to the next one.

    The plan has the sum of all cuts' bytes alone, so each cut counts with the mean.
    """
    found: list[Link] = []
    cut = _cut_bytes(plan)
    for stage, after in zip(plan.stages, [*plan.stages[1:], None], strict=True):
        if stage.replicas > 1:
            whole = stage.predicted.trainable_bytes or BUCKET_BYTES * stage.replicas
            size = _within(_sent(plan, stage, whole) / bucket_count(whole, stage.replicas))
            found += [Link(a, b, "parameters", size) for a in stage.workers for b in stage.workers if a != b]
        if after is not None:
            rounds = range(math.lcm(stage.replicas, after.replicas))
            pairs = dict.fromkeys(
                (stage.workers[b % stage.replicas], after.workers[b % after.replicas]) for b in rounds
            )
            found += [Link(a, b, "activations", cut) for a, b in pairs]
            found += [Link(b, a, "gradients", cut) for a, b in pairs]
    return found


def links_alone(links: Sequence[Link], most: int) -> list[Link]:
    """Those to measure alone, in their order: all, or at most so many, spread evenly over the workers."""
    used = Counter[tuple[str, int]]()
    left, found = list(links), set[Link]()
    while left and len(found) < most:
        link = min(left, key=lambda link: used["sends", link.sender] + used["receives", link.receiver])
        used.update([("sends", link.sender), ("receives", link.receiver)])
        left.remove(link)
        found.add(link)
    return [link for link in links if link in found]


def _cut_bytes(plan: Plan) -> int:
    """Bytes that cross a cut each way, in the mean."""
    synchronised = 0.0
    for stage in plan.stages:
        if stage.replicas > 1:
            if stage.predicted.trainable_bytes is None:  # An older plan does not tell the two apart.
                return _within(BUCKET_BYTES)
            sent = _sent(plan, stage, stage.predicted.trainable_bytes)
            synchronised += 2 * (stage.replicas - 1) / stage.replicas * sent
    cuts = max(1, len(plan.stages) - 1)
    return _within((plan.predicted.bytes_per_minibatch - synchronised) / 2 / cuts)


def _sent(plan: Plan, stage: Stage, trainable_bytes: int) -> int:
    """What all buckets of a stage take on the network."""
    if plan.compress_gradients is None:
        return trainable_bytes
    return stage_bytes_after(parse_gradients(plan.compress_gradients), trainable_bytes, stage.replicas)


def _within(size: float) -> int:
    return max(_LEAST_BYTES, min(_MOST_BYTES, int(size)))
