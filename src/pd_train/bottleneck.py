"""Which one thing holds a run up, in a sentence that says what would help.

In a pipeline everyone runs at the pace of the slowest. Who that is shows in who waits least for its neighbours: the
stage with the largest share of its steady state spent on its own affairs - computing, updating, its replicas, its data,
its messages - sets the pace. What takes most of its time beyond the planned computing is the bottleneck:

    case                     the share of the pacing stage's time that
    compute                  its passes take beyond what was planned
    slow replica             the same, where one of its workers is far slower than another
    data                     it waits for the data set
    synchronisation          it waits for its replicas
    update                   the optimizer takes, which the cost model leaves out
    messages                 packing and sorting take
    transfers                it waits for its neighbours, while what they send is on the way for as long
    uneven passes            it waits for its neighbours, and little is on the way

Before these, in this order: `unknown` where nothing was timed, `too short` where no steady state came about or one of
too few minibatches to tell, `start-up and drain` where these two leave workers idle for much of the training,
`as planned` and `faster than planned` where the measured time of a minibatch agrees with the predicted one or is less,
and `many small things` where none of the above takes a tenth of the time. Workers that share a machine and compute
slower than planned are `compute` before anything else. Where no prediction can be compared with and nothing stands out,
`computing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_format.plan import Plan
from pd_train.breakdown import Bottleneck, Breakdown, StageBreakdown
from pd_train.options import RunOptions
from pd_train.terminal import ms_text, seconds_text, share_text

__all__ = ["Setting", "find_bottleneck"]

ALIKE = 0.1
"""Times that differ by no more are called equal; shares below it are not worth a sentence."""
MUCH_IDLE = 0.2
"""The share of the training time from which on start-up and drain come first."""
ENOUGH_MINIBATCHES = 20
"""In the steady state: the first passes are slow whatever the plan is, and of fewer they are too large a part."""
ENOUGH_SECONDS = 1.0
"""Of the steady state; in less, what else a machine does now and then is as much as what is looked for."""
_SLOW_REPLICA = 1.2
"""Times the fastest worker of its stage."""


WORDS = {
    "compute": "computing beyond what was planned",
    "slow replica": "one replica's computing beyond what was planned",
    "data": "waiting for data",
    "synchronisation": "waiting for its replicas",
    "update": "updates of its parameters",
    "messages": "packing messages",
    "transfers": "waiting for its neighbours",
    "uneven passes": "waiting for its neighbours",
}


@dataclass(frozen=True)
class Setting:
    """What the advice depends on besides the figures."""

    sync: str = "overlap"
    """`overlap`, `bsp` or `asp`."""
    flush: int | None = None
    checkpoint_every: int | None = None
    threads: int | None = None
    """Of each worker."""
    emulated: bool = False
    share_cores: bool = False
    """Whether workers ran on a CPU beside others."""

    @classmethod
    def of(cls, options: RunOptions, share_cores: bool) -> Setting:
        """That of a run."""
        mode, is_emulated = options.mode, options.emulate is not None
        return cls(mode.sync, mode.flush, options.checkpoint_every, options.threads, is_emulated, share_cores)


def find_bottleneck(plan: Plan, figures: Breakdown, setting: Setting) -> Bottleneck:
    """The bottleneck of a run; see above.

    Args:
        plan: that was followed.
        figures: of the run.
        setting: of the run.
    """
    if not figures.timed_minibatches:
        return Bottleneck("unknown", None, None, "Nothing tells where the time went: no epoch is over.")
    if figures.minibatch_ms is None:
        return Bottleneck(
            "too short",
            None,
            None,
            f"The pipeline never got into its stride: a stage holds {_most_in_flight(plan)} minibatches, and it was "
            "drained before it had more to do; train on more minibatches between drains.",
        )
    if (too_few := _too_few(figures, setting)) is not None:
        return Bottleneck("too short", None, None, too_few)
    idle = figures.start_up_and_drain_idle or 0.0
    pacing = max(figures.stages, key=_own_share)
    if idle >= MUCH_IDLE:
        return Bottleneck("start-up and drain", None, idle, _drain_sentence(idle, setting))
    difference = figures.difference
    if difference is not None and difference <= ALIKE:
        return _good(plan, figures, pacing, difference)
    causes = _causes(figures, pacing)
    case = max(causes, key=lambda each: causes[each])
    if setting.share_cores and causes.get("compute", 0.0) >= ALIKE:
        case = "compute"  # Where workers take each other's cores, all that they do is slower, and this says why.
    share = causes[case]
    if share < ALIKE and difference is None:
        return Bottleneck(
            "computing",
            pacing.index,
            pacing.utilisation,
            f"{_name(pacing)} sets the pace and computes {share_text(pacing.utilisation)} of the time; the plan "
            "predicts nothing to compare it with.",
        )
    if share < ALIKE:
        return Bottleneck(
            "many small things",
            pacing.index,
            share,
            f"A minibatch takes {ms_text(figures.minibatch_ms)}, {share_text(difference)} more than the "
            f"{ms_text(figures.predicted_minibatch_ms)} planned, and no single thing accounts for that: the largest of "
            f"stage {pacing.index}'s time is {WORDS[case]}, {share_text(share)}.",
        )
    return Bottleneck(case, pacing.index, share, _sentence(case, share, plan, figures, pacing, setting))


def _too_few(figures: Breakdown, setting: Setting) -> str | None:
    """What to say where the steady state is too short to tell anything by."""
    minibatches = min(stage.steady_minibatches for stage in figures.stages)
    seconds = min(stage.steady_seconds or 0.0 for stage in figures.stages)
    # Emulated passes take their time to the moment, from the first one on.
    is_long = setting.emulated or seconds >= ENOUGH_SECONDS
    if minibatches >= ENOUGH_MINIBATCHES and is_long:
        return None
    few = "1 minibatch" if minibatches == 1 else f"{minibatches} minibatches"
    return (
        f"The run is too short to tell what holds it up: its figures are of {few} in {seconds_text(seconds)} of steady "
        f"state, and mostly chance below {ENOUGH_MINIBATCHES} minibatches or {ENOUGH_SECONDS:g} s; train on more."
    )


def _own_share(stage: StageBreakdown) -> float:
    """Of the steady state, that in which it did not wait for its neighbours."""
    if stage.steady_ms is None or not stage.steady_minibatch_ms:
        return 0.0
    return 1 - _waiting_ms(stage) / stage.steady_minibatch_ms


def _waiting_ms(stage: StageBreakdown) -> float:
    steady = stage.steady_ms or {}
    return steady.get("wait_activations", 0.0) + steady.get("wait_gradients", 0.0)


def _causes(figures: Breakdown, stage: StageBreakdown) -> dict[str, float]:
    """Shares of the pacing stage's steady state."""
    assert stage.steady_ms is not None
    whole = stage.steady_minibatch_ms or 1.0
    slower = 0.0
    if stage.compute_ms is not None and stage.predicted_compute_ms is not None:
        slower = max(0.0, stage.compute_ms - stage.predicted_compute_ms)
    workers = [ms for ms in stage.worker_compute_ms if ms]
    compute = "slow replica" if workers and max(workers) > _SLOW_REPLICA * min(workers) else "compute"
    on_the_way = sum(each.cut.exposed_seconds for each in figures.stages) / figures.timed_minibatches * 1e3
    between = "transfers" if on_the_way >= _waiting_ms(stage) / 2 else "uneven passes"
    return {
        compute: slower / whole,
        "data": stage.steady_ms["wait_data"] / whole,
        "synchronisation": stage.steady_ms["wait_sync"] / whole,
        "update": stage.steady_ms["update"] / whole,
        "messages": stage.steady_ms["other"] / whole,
        between: _waiting_ms(stage) / whole,
    }


def _good(plan: Plan, figures: Breakdown, pacing: StageBreakdown, difference: float) -> Bottleneck:
    measured, predicted = figures.minibatch_ms, figures.predicted_minibatch_ms
    if difference < -ALIKE:
        sentence = (
            f"A minibatch takes {ms_text(measured)}, {share_text(-difference)} less than the {ms_text(predicted)} "
            "planned; profile on this machine for a plan that fits it."
        )
        return Bottleneck("faster than planned", pacing.index, pacing.utilisation, sentence)
    sets = f"the computing of stage {pacing.index} sets the pace"
    if (limit := _planned_limit(plan)) is not None:
        sets = f"as the plan says, {limit} set the pace, which a faster network would raise"
    return Bottleneck(
        "as planned",
        pacing.index,
        pacing.utilisation,
        f"A minibatch takes {ms_text(measured)}, {ms_text(predicted)} were planned: the plan is as good as it said; "
        f"{sets}.",
    )


def _planned_limit(plan: Plan) -> str | None:
    """What the cost model has set the pace where that is no stage's computing."""
    computing = max(stage.predicted.compute_ms / stage.replicas for stage in plan.stages)
    if plan.predicted.minibatch_ms <= 1.001 * computing:
        return None
    syncing = max(stage.predicted.sync_ms / stage.replicas for stage in plan.stages)
    is_sync = plan.predicted.minibatch_ms <= 1.001 * syncing
    return "synchronisations of replicas" if is_sync else "transfers between stages"


def _sentence(case: str, share: float, plan: Plan, figures: Breakdown, stage: StageBreakdown, setting: Setting) -> str:
    name = _name(stage)
    if case == "compute":
        return (
            f"{name} sets the pace and computes {share_text(stage.compute_difference)} slower than planned "
            f"({ms_text(stage.compute_ms)} a minibatch, {ms_text(stage.predicted_compute_ms)} planned); "
            f"{_compute_advice(plan, figures, setting)}."
        )
    if case == "slow replica":
        times = [(ms, replica) for replica, ms in enumerate(stage.worker_compute_ms) if ms]
        (least, fast), (most, slow) = min(times), max(times)
        first = plan.stages[stage.index].workers[0]
        return (
            f"Worker {first + slow} of stage {stage.index} sets the pace: its passes take {ms_text(most)}, those of "
            f"worker {first + fast} {ms_text(least)}; look for what else runs on its host, or leave that host out."
        )
    if case == "data":
        return (
            f"{name} waits {share_text(share)} of the time for data; raise --loader-workers, or make the data cheaper "
            "to read (smaller images, a local disk)."
        )
    if case == "synchronisation":
        advice = "a larger minibatch, a faster network or fewer replicas of it would help"
        if setting.sync == "bsp" and len(plan.stages) > 1:
            advice = "--sync overlap would hide a part of it"
        return f"{name} waits {share_text(share)} of the time for its replicas; {advice}."
    if case == "update":
        return (
            f"{name} spends {share_text(share)} of the time on updates of its parameters, which the plan does not "
            "count; a larger minibatch makes them rarer."
        )
    if case == "messages":
        return (
            f"{name} spends {share_text(share)} of the time on packing and sorting messages, which the plan does not "
            "count; fewer cuts or cuts with smaller activations would help."
        )
    waits = "activations" if (stage.steady_ms or {})["wait_activations"] >= _waiting_ms(stage) / 2 else "gradients"
    if case == "transfers":
        cuts = [each.cut for each in figures.stages]
        count, seconds = sum(cut.count for cut in cuts), sum(cut.seconds for cut in cuts)
        hidden = 1 - sum(cut.exposed_seconds for cut in cuts) / seconds if seconds > 0 else 0.0
        return (
            f"No stage is busy throughout: {name.lower()}, which waits least, waits {share_text(share)} of the time "
            f"for {waits}, and a transfer between stages takes {ms_text(1e3 * seconds / count if count else None)}, "
            f"{share_text(hidden)} of it behind computing; a faster network, or a plan with its true --bandwidth or "
            "with greater depths (pd-plan --in-flight), would help."
        )
    return (
        f"No stage is busy throughout: {name.lower()}, which waits least, waits {share_text(share)} of the time for "
        f"{waits}, though little is on the way; stages take turns at being slow, which happens where workers share "
        "cores or minibatches differ in size, and greater depths (pd-plan --in-flight) even out."
    )


def _compute_advice(plan: Plan, figures: Breakdown, setting: Setting) -> str:
    if setting.emulated:
        return "raise --time-scale for more exact waits, or plan from the profile that is emulated"
    if setting.share_cores:
        threads = "" if setting.threads is None else f" with --threads {setting.threads}"
        return (
            "its workers share cores with others, which no profile of one alone shows: "
            f"profile{threads}, as they run, or give each a machine"
        )
    advice = f"profile on these machines at this minibatch size ({plan.minibatch_size}) and plan again"
    better = _better_config(figures.stages)
    return advice if better is None else f"{advice}, or try pd-plan --config {better}"


def _better_config(stages: Sequence[StageBreakdown]) -> str | None:
    """Replicas with which the measured passes would run faster: one of them is moved to another stage."""
    paces = [(each.compute_ms or 0.0) / each.replicas for each in stages]
    best, found = (1 - ALIKE) * max(paces), None
    for source in stages:
        for target in stages:
            if source.index == target.index or source.replicas == 1:
                continue
            change = {source.index: -1, target.index: 1}
            replicas = [each.replicas + change.get(each.index, 0) for each in stages]
            pace = max((each.compute_ms or 0.0) / count for each, count in zip(stages, replicas, strict=True))
            if pace < best:
                best, found = pace, "-".join(map(str, replicas))
    return found


def _drain_sentence(idle: float, setting: Setting) -> str:
    text = f"Workers are idle for {share_text(idle)} of the training time while the pipeline fills and drains"
    if setting.flush is not None:
        return f"{text}, which it does every {setting.flush} minibatches; raise --flush, or leave it out."
    if setting.checkpoint_every is not None:
        return f"{text}, which it does every {setting.checkpoint_every} minibatches; raise --checkpoint-every."
    return f"{text}, since an epoch has few minibatches; longer epochs, smaller minibatches or fewer stages would help."


def _most_in_flight(plan: Plan) -> int:
    return max(stage.in_flight * stage.replicas for stage in plan.stages)


def _name(stage: StageBreakdown) -> str:
    return f"Stage {stage.index}"
