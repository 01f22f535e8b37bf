"""Emulating a plan: what a profile says of its stages, whether the two belong together, and the pace that came out.

Passes are waited for instead of computed (`pd_train.emulated`); all else of a run is real. Times of the profile are
multiplied with a scale, and what is measured is divided by it: *model time*.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_format.profile import LayerProfile, Profile
from pd_train.coverage import cover_layers

__all__ = ["Emulation", "Pace", "check_emulation", "default_minibatches", "layers_of", "pace_of"]


@dataclass(frozen=True)
class Emulation:
    """What a run waits for instead of computing."""

    profile: Profile
    time_scale: float = 1.0
    """What the profile's times are multiplied with."""

    def recorded(self) -> dict[str, object]:
        """As report.json has it, and as the hosts of a run compare it."""
        text = self.profile.model_dump_json()
        return {
            "device": self.profile.device.name,
            "profile": hashlib.sha256(text.encode()).hexdigest()[:16],
            "time_scale": self.time_scale,
        }


@dataclass(frozen=True)
class Pace:
    """How fast the pipeline ran, in model time."""

    time_scale: float
    minibatch_ms: float | None
    """In the steady state; None where the run was too short for one."""
    samples_per_second: float | None
    measured_minibatches: int
    """Of the steady state."""
    predicted_minibatch_ms: float
    """By the plan's cost model."""


def check_emulation(plan: Plan, profile: Profile, where: str) -> None:
    """Refuse a profile that the plan cannot have been made from, but for the device and its times.

    Args:
        where: the profile comes from, for messages.

    Raises:
        UserError: naming the difference.
    """
    pairs: tuple[tuple[str, object, object], ...] = (
        ("model", plan.model.name, profile.model.name),
        ("fingerprint", plan.model.fingerprint[:16], profile.model.fingerprint[:16]),
        ("minibatch_size", plan.minibatch_size, profile.minibatch_size),
        ("precision", plan.precision, profile.precision),
        ("layers", sum(stage.layers for stage in plan.stages), len(profile.layers)),
    )
    for name, planned, found in pairs:
        if planned != found:
            raise UserError(
                f"--emulate {where}: the plan's {name} is {planned}, the profile's is {found}; plan from this profile, "
                "or emulate the one that the plan was made from."
            )
    if plan.model.fingerprint != profile.model.fingerprint:
        raise UserError(
            f"--emulate {where}: the plan is for another version of model {plan.model.name} (another fingerprint); "
            "plan from this profile, or emulate the one that the plan was made from."
        )
    cover_layers(plan, [layer.name for layer in profile.layers])


def layers_of(plan: Plan, profile: Profile, stage: int) -> Sequence[LayerProfile]:
    """The layers of a stage."""
    first, last = cover_layers(plan, [layer.name for layer in profile.layers])[stage]
    return profile.layers[first : last + 1]


def default_minibatches(plan: Plan) -> int:
    """Enough for the pipeline to find its rhythm and to be measured in it: eight times what is in flight."""
    return max(32, 8 * _in_flight(plan))


def pace_of(plan: Plan, time_scale: float, ends: Sequence[float], flush: int | None = None) -> Pace:
    """The pace of the steady state, from the times at which backward passes of one replica of stage 0 ended.

    Start-up and drain are left out: the first quarter, or twice what is in flight where that is less, and at the end
    what is in flight, whose backward passes meet no forward passes any more. Where the pipeline drains every so many
    minibatches, all whole segments but the first count.

    Args:
        ends: in seconds of any clock, in order.
        flush: minibatches of a segment.
    """
    replicas = plan.stages[0].replicas
    rounds = -(-_in_flight(plan) // replicas)
    first, last = min(2 * rounds, len(ends) // 4) - 1, len(ends) - 1 - rounds
    if flush is not None:
        size = -(-flush // replicas)
        first, last = size - 1, len(ends) - 1
    first = max(0, first)
    count = (last - first) * replicas
    ms = 1000 * (ends[last] - ends[first]) / count / time_scale if count > 0 else None
    return Pace(
        time_scale=time_scale,
        minibatch_ms=ms,
        samples_per_second=1000 * plan.minibatch_size / ms if ms else None,
        measured_minibatches=max(0, count),
        predicted_minibatch_ms=plan.predicted.minibatch_ms,
    )


def _in_flight(plan: Plan) -> int:
    return max(stage.in_flight * stage.replicas for stage in plan.stages)
