"""What a person asked of a run: plain, frozen values that every worker is given alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pd_format.plan import Plan
from pd_format.profile import PrecisionName
from pd_format.versions import Mode, StageVersions, stage_versions
from pd_train.emulation import Emulation

__all__ = ["RESTARTS", "LossScaling", "OptimizerOptions", "RunOptions", "recorded"]


RESTARTS = "restarts.jsonl"
"""In a run's folder: when and why it was started again, a line each time."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and how its rate changes from epoch to epoch."""

    name: str = "sgd"
    """`sgd`, `adam` or `adamw`."""
    lr: float = 0.01
    momentum: float = 0.9
    """Of sgd."""
    weight_decay: float = 0.0
    lr_schedule: str = "constant"
    """`constant`, `step` or `cosine`."""
    lr_scaling: str = "balanced"
    """`balanced`, `linear` or `none`."""


@dataclass(frozen=True)
class LossScaling:
    """How the loss scale of fp16 changes; the defaults are those of torch.amp.GradScaler."""

    initial: float = 2.0**16
    """This and all later ones are powers of two."""
    growth_interval: int = 2000
    """After so many updates in a row the scale doubles; where one is left out it halves."""
    least: float = 2.0**-16
    """Below it gradients are not too large for float16, but not finite at all."""


@dataclass(frozen=True)
class RunOptions:
    """One run of one plan."""

    plan: Plan
    run_dir: Path
    data: str
    epochs: int
    minibatches: int | None = None
    """At most so many in the whole run."""
    optimizer: OptimizerOptions = OptimizerOptions()
    mode: Mode = field(default_factory=Mode)
    """How weights are versioned."""
    clip_stage_norm: float | None = None
    """The largest norm of a stage's gradient of one update."""
    clip_norm: float | None = None
    """The largest norm of the whole model's gradient; with a flush only."""
    precision: PrecisionName = "fp32"
    """What autocast computes in, and what float32 tensors are while they cross a cut."""
    loss_scaling: LossScaling = LossScaling()
    """Of fp16."""
    drop_last: bool = False
    loader_workers: int | None = None
    """Processes that load data, of each worker of stage 0; None lets the worker decide."""
    skip_corrupt: bool = False
    """Go on after an image file that cannot be read."""
    threads: int = 1
    """Of each worker."""
    metric: str = "accuracy"
    """By which the run is judged: one of `pd_train.metrics.METRICS`."""
    target_metric: float | None = None
    """Its value that ends the run."""
    init_from: str | None = None
    """Weights to start from: a file, or torchvision's by name; see `pd_train.initial`."""
    evaluate_only: bool = False
    """Forward passes over the validation data, and nothing else."""
    seed: int = 0
    measure_memory: bool = False
    """Whether workers count what they hold, which takes time."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    checkpoint_every: int | None = None
    """Minibatches of an epoch between checkpoints; None for one at each epoch's end only."""
    keep: int = 2
    """Old checkpoints that are kept besides the newest."""
    resume: Literal["no", "if possible", "yes"] = "no"
    """Whether to go on from the newest whole checkpoint in the run's folder."""
    first_start: float = 0.0
    """When this program started the run for the first time, in seconds since 1970."""
    peer_timeout: float = 10.0
    """Seconds of silence after which a peer counts as dead."""
    ranks: tuple[int, ...] = ()
    """Of the workers that this program starts; empty for all."""
    key: Path | None = None
    """The file with the key of the job, for connections; None for connections in the open."""
    rendezvous_timeout: float = 300.0
    """Seconds that workers wait for each other at the start."""
    stall_timeout: float = 1800.0
    """Seconds that a wait for a live peer may take."""
    traced: tuple[int, int] = (0, 0)
    """The minibatches of the run, from the first to before the second, whose passes go into trace.json."""
    emulate: Emulation | None = None
    """What passes wait for instead of computing."""
    measure_network: bool = False
    """Nothing is trained: the links of the plan are measured."""
    launched: bool = False
    """Whether a launcher has started the programs of all hosts at once."""
    debug_dump: bool = True
    """Whether SIGUSR1 makes workers write where they stand to their logs."""

    def versions(self, stage: int) -> StageVersions:
        """Which weight versions the passes of a stage use."""
        stages = self.plan.stages
        return stage_versions(self.mode, [one.replicas for one in stages], [one.in_flight for one in stages], stage)


def recorded(options: RunOptions) -> dict[str, object]:
    """What the numbers of a run depend on besides its plan, as report.json keeps it."""
    return {
        "data": options.data,
        "epochs": options.epochs,
        "minibatches": options.minibatches,
        "optimizer": asdict(options.optimizer),
        "mode": asdict(options.mode),
        "clip_stage_norm": options.clip_stage_norm,
        "clip_norm": options.clip_norm,
        "precision": options.precision,
        "loss_scaling": asdict(options.loss_scaling) if options.precision == "fp16" else None,
        "drop_last": options.drop_last,
        "skip_corrupt": options.skip_corrupt,
        "metric": options.metric,
        "target_metric": options.target_metric,
        "init_from": options.init_from,
        "checkpoint_every": options.checkpoint_every,
        "seed": options.seed,
        "threads": options.threads,
        "emulate": None if options.emulate is None else options.emulate.recorded(),
    }
