"""Where a run's time went, and whether the plan was right: arithmetic on what the run noted, and nothing else.

    timing.jsonl   sums of each worker, an epoch a line  --.
    metrics.jsonl  what came out, an epoch a line        ---+-->  Breakdown: per stage and of the whole run
    plan.json      what was predicted                    --'

A figure that nothing tells is None. Times are by the wall clock, but for an emulated run: there by the model's, which
is the wall clock's over the time scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pd_format.plan import Plan, Stage
from pd_train.bottleneck import Setting, find_bottleneck
from pd_train.breakdown import Breakdown, Performance, StageBreakdown, TimeToTarget, TransferBreakdown
from pd_train.events import EpochMetrics
from pd_train.metrics import METRICS
from pd_train.timing import Doing, Phase, Transfers, WorkerTiming

__all__ = ["break_down", "performance_of", "rate_of", "time_to_target"]


def performance_of(
    plan: Plan,
    epochs: Sequence[EpochMetrics],
    timings: Iterable[Sequence[WorkerTiming]],
    setting: Setting,
    metric: str,
    target: float | None,
    peaks: Sequence[int] | None = None,
    time_scale: float = 1.0,
) -> Performance:
    """What a run, finished or not, says of itself.

    Args:
        plan: that the run followed last.
        epochs: metrics of those that are over.
        timings: of each epoch that the plan was followed in, each worker's by rank.
        setting: what the advice depends on.
        metric, target: by which the run is judged, and its value that was asked for.
        peaks: bytes that the fullest worker of each stage held, where they were counted.
        time_scale: of an emulated run.
    """
    sums = [WorkerTiming() for _ in range(plan.workers)]
    for workers in timings:
        for mine, theirs in zip(sums, workers, strict=True):
            mine.add(theirs)
    breakdown = break_down(plan, epochs, sums, peaks, time_scale)
    reached = None if target is None else time_to_target(epochs, metric, target)
    return Performance(breakdown, find_bottleneck(plan, breakdown, setting), reached)


def break_down(
    plan: Plan,
    epochs: Sequence[EpochMetrics],
    workers: Sequence[WorkerTiming],
    peaks: Sequence[int] | None = None,
    time_scale: float = 1.0,
) -> Breakdown:
    """Each worker's sums as figures of stages and of the run; arguments as for `performance_of`."""
    stages = tuple(
        _stage(
            stage,
            [workers[rank] for rank in stage.workers],
            None if peaks is None else peaks[stage.index],
            time_scale,
        )
        for stage in plan.stages
    )
    timed = sum(workers[rank].minibatches for rank in plan.stages[0].workers)
    minibatches = sum(one.minibatches for one in epochs) or timed
    steady = sum(stage.steady_minibatches for stage in stages)
    length = sum(stage.steady_seconds or 0.0 for stage in stages)
    measured = 1e3 * length / steady if steady else None
    predicted = plan.predicted.minibatch_ms or None
    seconds = sum(one.seconds for one in epochs)
    cut = sum(stage.cut.bytes for stage in stages) / timed if timed else None
    sync = sum(stage.sync.bytes for stage in stages) / timed if timed else None
    baseline = plan.predicted.data_parallel_bytes_per_minibatch
    training = sum(one.of_phase(phase) for one in workers for phase in Phase if phase is not Phase.OUTSIDE)
    idle = sum(_idle(one, phase) for one in workers for phase in (Phase.START_UP, Phase.DRAIN))
    return Breakdown(
        minibatches=minibatches,
        timed_minibatches=timed,
        steady_minibatches=max(stage.steady_minibatches for stage in stages),
        minibatch_ms=measured,
        predicted_minibatch_ms=predicted,
        difference=_difference(measured, predicted),
        overall_minibatch_ms=1e3 * seconds / minibatches / time_scale if minibatches and seconds else None,
        start_up_and_drain_idle=idle / training if training > 0 else None,
        cut_bytes_per_minibatch=cut,
        sync_bytes_per_minibatch=sync,
        predicted_bytes_per_minibatch=plan.predicted.bytes_per_minibatch,
        data_parallel_bytes_per_minibatch=baseline,
        reduction=None if cut is None or sync is None or not baseline else 1 - (cut + sync) / baseline,
        stages=stages,
    )


def time_to_target(epochs: Sequence[EpochMetrics], metric: str, target: float) -> TimeToTarget:
    """How long a run took until a validation met a target, from epochs in their order."""
    passed: list[EpochMetrics] = []
    for epoch in epochs:
        passed.append(epoch)
        if epoch.metric == metric and METRICS[metric].is_reached(epoch.judged, target):
            seconds = sum(one.seconds for one in passed)
            rate = rate_of(passed)
            return TimeToTarget(metric, target, len(passed), seconds, (rate or 0.0) * seconds / len(passed), rate)
    return TimeToTarget(metric, target, None, None, None, None)


def rate_of(epochs: Sequence[EpochMetrics]) -> float | None:
    """Samples a second of training, over all of the epochs."""
    seconds = sum(one.seconds for one in epochs)
    return sum(one.seconds * one.samples_per_second for one in epochs) / seconds if seconds > 0 else None


def _stage(stage: Stage, workers: Sequence[WorkerTiming], peak: int | None, time_scale: float) -> StageBreakdown:
    total = WorkerTiming()
    for one in workers:
        total.add(one)
    replicas = stage.replicas
    steady = total.steady_minibatches
    doing = {
        each.name.lower(): 1e3 * total.seconds[Phase.STEADY][each] / steady / time_scale for each in Doing if steady
    }
    length = total.of_phase(Phase.STEADY)
    own = [_compute_ms(one, time_scale) for one in workers]
    compute, predicted = _compute_ms(total, time_scale), stage.predicted.compute_ms or None
    return StageBreakdown(
        index=stage.index,
        replicas=replicas,
        minibatches=total.minibatches,
        steady_minibatches=steady,
        steady_ms=doing or None,
        utilisation=1 - _idle(total, Phase.STEADY) / length if length > 0 else None,
        compute_ms=compute,
        predicted_compute_ms=predicted,
        compute_difference=_difference(compute, predicted),
        worker_compute_ms=tuple(own),
        start_up_seconds=total.of_phase(Phase.START_UP) / replicas / time_scale if total.minibatches else None,
        steady_seconds=length / replicas / time_scale if total.minibatches else None,
        drain_seconds=total.of_phase(Phase.DRAIN) / replicas / time_scale if total.minibatches else None,
        cut=_transfers(total.cut, time_scale),
        sync=_transfers(total.sync, time_scale),
        peak_memory_bytes=peak,
        predicted_memory_bytes=stage.predicted.memory_bytes,
    )


def _compute_ms(timing: WorkerTiming, time_scale: float) -> float | None:
    """Forward and backward pass of a minibatch, in the steady phase, where there are as many of both."""
    seconds, steady = timing.seconds[Phase.STEADY], timing.steady_minibatches
    return 1e3 * (seconds[Doing.FORWARD] + seconds[Doing.BACKWARD]) / steady / time_scale if steady else None


def _idle(timing: WorkerTiming, phase: Phase) -> float:
    return sum(timing.seconds[phase][doing] for doing in Doing if not doing.computes)


def _transfers(transfers: Transfers, time_scale: float) -> TransferBreakdown:
    hidden = min(transfers.covered_seconds, transfers.seconds)
    return TransferBreakdown(
        count=transfers.count,
        bytes=transfers.bytes,
        seconds=transfers.seconds / time_scale,
        hidden_seconds=hidden / time_scale,
        exposed_seconds=(transfers.seconds - hidden) / time_scale,
    )


def _difference(measured: float | None, predicted: float | None) -> float | None:
    return None if measured is None or predicted is None else measured / predicted - 1
