"""The figures of a report, as report.json has them; docs/report.md defines each. None where nothing tells it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bottleneck", "Breakdown", "Performance", "StageBreakdown", "TimeToTarget", "TransferBreakdown"]


@dataclass(frozen=True)
class TransferBreakdown:
    """The messages of one kind that the workers of a stage received while they trained, added up.

    A transfer lasts from the moment at which its sender hands it over until it has arrived whole, so that waiting in
    the sender's queue counts; transfers that overlap in time count each for itself. What is hidden and what is exposed
    is told at the receiver: nobody has to wait for a transfer that is exposed, but only such a one can be waited for.
    """

    count: int
    bytes: int
    seconds: float
    hidden_seconds: float
    """Of these, those in which the receiver computed: a forward or backward pass, or an update."""
    exposed_seconds: float
    """The others."""

    @property
    def hidden(self) -> float | None:
        """Share of the seconds, 0 to 1."""
        return self.hidden_seconds / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class StageBreakdown:
    """One stage, over all of its replicas."""

    index: int
    replicas: int
    minibatches: int
    """Whose passes are timed."""
    steady_minibatches: int
    """Of these, those whose backward passes were in the steady state."""
    steady_ms: dict[str, float] | None
    """What a worker did in the steady state, by the names of `pd_train.timing.Doing`, over its minibatches there."""
    utilisation: float | None
    """The share of the steady state in which the workers computed, 0 to 1."""
    compute_ms: float | None
    """Forward and backward pass of a minibatch on a worker, in the steady state."""
    predicted_compute_ms: float | None
    compute_difference: float | None
    """Measured over predicted, less 1."""
    worker_compute_ms: tuple[float | None, ...]
    """`compute_ms` of each replica."""
    start_up_seconds: float | None
    """Until the first answer has come, of all segments; this and the next two are means over the replicas."""
    steady_seconds: float | None
    drain_seconds: float | None
    """After the last forward pass."""
    cut: TransferBreakdown
    """Activations and gradients from the stages around it."""
    sync: TransferBreakdown
    """Gradients and parameters from its other replicas."""
    peak_memory_bytes: int | None
    """Of the fullest worker, since the last start of the run."""
    predicted_memory_bytes: int

    @property
    def steady_minibatch_ms(self) -> float | None:
        """All that a worker did in the steady state, over its minibatches there."""
        return None if self.steady_ms is None else sum(self.steady_ms.values())


@dataclass(frozen=True)
class Breakdown:
    """A whole run."""

    minibatches: int
    """Of the epochs that are over; of an emulated run, which has none, all."""
    timed_minibatches: int
    """Of these, those whose passes are timed: all, unless the run was started again."""
    steady_minibatches: int
    """Of these, those in the steady state, at the stage that has most."""
    minibatch_ms: float | None
    """Between minibatches in the steady state: the steady parts' lengths, each stage's a mean over its replicas, added
    up over stages, over the steady minibatches, added up over all workers."""
    predicted_minibatch_ms: float | None
    difference: float | None
    """Measured over predicted, less 1."""
    overall_minibatch_ms: float | None
    """Training time over minibatches: start-up, drain and checkpoints within an epoch included."""
    start_up_and_drain_idle: float | None
    """The share of all workers' training time in which they did not compute while the pipeline filled or drained."""
    cut_bytes_per_minibatch: float | None
    """Received over the cuts, by all workers."""
    sync_bytes_per_minibatch: float | None
    """Received from replicas of the same stage, by all workers."""
    predicted_bytes_per_minibatch: float
    data_parallel_bytes_per_minibatch: float
    """What data parallelism on the plan's machines would send."""
    reduction: float | None
    """1 less the measured bytes over those."""
    stages: tuple[StageBreakdown, ...]


@dataclass(frozen=True)
class TimeToTarget:
    """How long a run took until a validation met a target: `epochs` times `samples_per_epoch` over
    `samples_per_second` is `seconds`. All None where it never did."""

    metric: str
    target: float
    epochs: int | None
    seconds: float | None
    """Of training."""
    samples_per_epoch: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class Bottleneck:
    """What holds a run up most; `pd_train.bottleneck` has the cases."""

    case: str
    stage: int | None
    """That sets the pace; None where none does."""
    share: float | None
    """Of that stage's time in the steady state, or of all workers' training time for `start-up and drain`."""
    sentence: str
    """For a person: what it is, and what would help."""


@dataclass(frozen=True)
class Performance:
    """Where the time went, what held the run up, and how long it took to get there: `performance` in report.json."""

    breakdown: Breakdown
    bottleneck: Bottleneck
    target: TimeToTarget | None = None
    """None where no target was asked for."""
