"""What a run tells the person who watches it: plain values, from the workers to the display.

Rank 0 gathers the figures of the whole run and hands these events to the program that started it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from pd_train.breakdown import Performance
from pd_train.emulation import Pace

__all__ = [
    "EMULATION",
    "OF_LAST_START",
    "REPORT_FORMAT",
    "REPORT_VERSION",
    "Activity",
    "Emulated",
    "EpochEnded",
    "EpochMetrics",
    "Evaluated",
    "Event",
    "LinkFigures",
    "NetworkMeasured",
    "Note",
    "PipelineStatus",
    "Progress",
    "RunEnded",
    "RunStarted",
    "StageStatus",
    "WorkersListen",
    "WorkersMet",
    "WorkersStart",
    "from_plain",
    "to_plain",
]


EMULATION = "emulation"
"""The phase in which nothing is computed: there is no loss, and times are not those of the machines here."""


@dataclass(frozen=True)
class EpochMetrics:
    """One line of metrics.jsonl; None where there is nothing to report, never a made-up number."""

    epoch: int
    """From 0."""
    seconds: float
    """Of training alone; validation is not counted."""
    minibatches: int
    samples_per_second: float
    train_loss: float | None
    """Mean over the epoch's samples."""
    validation_loss: float | None
    validation_accuracy: float | None
    """Between 0 and 1."""
    metric: str = "accuracy"
    """By which the run is judged."""
    validation_metric: float | None = None
    """Its value, where it is neither the loss nor the accuracy."""

    @property
    def judged(self) -> float | None:
        """The value of the metric."""
        known = {"accuracy": self.validation_accuracy, "loss": self.validation_loss}
        return known.get(self.metric, self.validation_metric)

    def line(self) -> dict[str, Any]:
        """As metrics.jsonl has it, with `validation_perplexity` or the like where the run is judged by that."""
        fields = asdict(self)
        metric, value = fields.pop("metric"), fields.pop("validation_metric")
        return fields if metric in ("accuracy", "loss") else {**fields, f"validation_{metric}": value}


@dataclass(frozen=True)
class RunStarted:
    """The plan is checked and the workers are about to start, which takes some seconds."""

    config: str
    """Of the plan."""
    workers: int
    threads: int
    """Of each worker."""
    run_dir: str
    layers: tuple[str, ...] = ()
    """Of each stage, in words."""


@dataclass(frozen=True)
class WorkersStart:
    """Worker processes are started, for the first time or again."""


@dataclass(frozen=True)
class Progress:
    """Minibatches whose loss has reached rank 0 so far."""

    phase: str
    """`training`, `validation` or `EMULATION`."""
    epoch: int
    epochs: int
    done: int
    minibatches: int
    samples: int
    seconds: float
    """Since the phase began."""
    loss: float | None
    """Mean over the samples so far."""


@dataclass(frozen=True)
class StageStatus:
    """One stage at a moment, over all of its replicas; None where nothing is known yet."""

    replicas: int
    busy: float | None
    """The part of the last seconds in which it computed, 0 to 1."""
    waits_for: str
    """What it waited for most in them; empty where it did not."""
    waited: float
    """The part of them in which it waited for that, 0 to 1."""
    now: Literal["computes", "waits", "silent", ""]
    """What that of its workers does which has been at one thing for longest; `silent` where nobody knows, since it has
    told nothing for some time."""
    now_seconds: float
    """For how long."""
    now_for: str
    """What it waits for, in a word as `waits_for` is; empty where there is none for it."""
    awaited: str
    """The same in full."""
    sent_bytes_per_second: float | None
    versions: int | None
    """Weight versions that the fullest of its workers holds."""


@dataclass(frozen=True)
class PipelineStatus:
    """How all stages do, about once a second."""

    stages: tuple[StageStatus, ...]


@dataclass(frozen=True)
class EpochEnded:
    """An epoch is over, its validation included."""

    metrics: EpochMetrics
    epochs: int


@dataclass(frozen=True)
class RunEnded:
    """The run is over and its files are written."""

    reached_target: bool | None
    """None where no target was asked for."""
    seconds: float
    """Training alone, all epochs."""
    epochs: int
    best_accuracy: float | None
    bytes_sent: int | None
    """Payload of all workers, tensors and headers, validation and start-up included; None, as the next one, where
    nobody counted, since the run broke off."""
    training_bytes_sent: int | None
    """Of these, what training alone sent: activations, gradients and parameters."""
    minibatches: int
    """Trained on, over all epochs."""
    mean_staleness: float | None = None
    """Updates between a gradient's being read for and applied, where that has no bound (asp)."""
    most_staleness: int | None = None
    metric: str = "accuracy"
    """By which the run is judged."""
    best_metric: float | None = None
    """The best value of the metric."""
    peak_memory_bytes: tuple[int, ...] | None = None
    """Of the fullest worker of each stage; None where nobody counted."""
    skipped_updates: int | None = None
    """Left out since a gradient was not finite; None without a loss scale."""
    skipped_by_stage: tuple[int, ...] | None = None
    """Of these, those in which the stage's own gradients were not finite, which is often so in several stages."""
    loss_scale: float | None = None
    """At the end."""
    restarts: int = 0
    """How often the run was started again, by hand or by itself."""
    lost_seconds: float = 0.0
    """Between the checkpoints that it went on from, or its beginning, and going on."""
    refused_messages: int = 0
    """Since the last start, that were of no use to any worker: of another run, damaged, or from a stranger."""
    performance: Performance | None = None
    """Where the time went; None where nothing tells."""
    samples_per_second: float | None = None
    """Over all epochs; None where there is none."""


REPORT_FORMAT, REPORT_VERSION = "pipedream-report", 1
"""Of report.json, of whatever kind of run."""
OF_LAST_START = (
    "mean_staleness",
    "most_staleness",
    "peak_memory_bytes",
    "refused_messages",
    "skipped_files",
    "device",
    "torch",
)
"""Figures of report.json that say nothing of the time before the last start; all others are of the whole run."""


@dataclass(frozen=True)
class Evaluated:
    """An evaluation is over and its report is written."""

    validation_loss: float
    """Mean over the samples."""
    validation_accuracy: float | None
    metric: str
    metric_value: float | None
    samples: int
    minibatches: int
    seconds: float
    """From the start of the first forward pass to the last score."""
    samples_per_second: float
    bytes_sent: int
    """Payload of all workers, start-up included."""


@dataclass(frozen=True)
class Emulated:
    """An emulation is over and its report is written."""

    emulated: Pace
    """In model time; all else is as it was here."""
    seconds: float
    minibatches: int
    bytes_sent: int
    """Payload of all workers, start-up included."""
    training_bytes_sent: int
    """Of these, activations, gradients and parameters."""
    refused_messages: int
    performance: Performance | None = None
    """Where the time went, in model time; None where nothing tells."""


@dataclass(frozen=True)
class LinkFigures:
    """One link of a plan, one way."""

    sender: int
    receiver: int
    what: str
    """That it carries in a run."""
    message_bytes: int
    alone_bps: float | None
    """None where there were too many links to measure this one alone too."""
    at_once_bps: float
    """While all other links were in use."""
    latency_ms: float | None
    """Half of the way there and back, while no link was in use; None as `alone_bps`."""


@dataclass(frozen=True)
class NetworkMeasured:
    """All links of the plan have been measured."""

    links: tuple[LinkFigures, ...]


@dataclass(frozen=True)
class WorkersListen:
    """All workers of this program listen; from now on they tell those on other hosts themselves how they end."""


@dataclass(frozen=True)
class WorkersMet:
    """All workers are there and alike; what fails from now on fails while it runs."""


@dataclass(frozen=True)
class Activity:
    """What the run is about where it does no minibatches, as writing a checkpoint; until the next progress."""

    text: str


@dataclass(frozen=True)
class Note:
    """A sentence for the person."""

    text: str
    kind: Literal["warning", "information", "waiting"] = "warning"
    """`waiting`: is true for as long as the workers have not met, and told again from time to time."""


Event = (
    RunStarted
    | WorkersStart
    | WorkersListen
    | WorkersMet
    | Activity
    | Progress
    | PipelineStatus
    | EpochEnded
    | RunEnded
    | Evaluated
    | Emulated
    | NetworkMeasured
    | Note
)

_TOLD = (Activity, Progress, PipelineStatus, EpochEnded, RunEnded, Evaluated, Emulated, NetworkMeasured, Note)
_KINDS = {kind.__name__: kind for kind in _TOLD}


def to_plain(event: Event) -> tuple[str, dict[str, Any]]:
    """An event as plain values, for the wire."""
    return type(event).__name__, asdict(event)


def from_plain(name: str, fields: dict[str, Any]) -> Event:
    """The event that `to_plain` was given."""
    if name == EpochEnded.__name__:
        fields = {**fields, "metrics": EpochMetrics(**fields["metrics"])}
    elif name == PipelineStatus.__name__:
        fields = {"stages": tuple(StageStatus(**each) for each in fields["stages"])}
    elif name == Emulated.__name__:
        fields = {**fields, "emulated": Pace(**fields["emulated"])}
    elif name == NetworkMeasured.__name__:
        fields = {"links": tuple(LinkFigures(**each) for each in fields["links"])}
    if name in (RunEnded.__name__, Emulated.__name__):
        performance = TypeAdapter(Performance | None).validate_python(fields["performance"])
        fields = {**fields, "performance": performance}
    event: Event = _KINDS[name](**fields)
    return event
