"""The plan: what pd-plan decided and all that pd-train needs to start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pd_format.compression import parse_gradients
from pd_format.errors import UserError
from pd_format.jsonfile import Record, Rows, read_record
from pd_format.profile import Count, Milliseconds, SizeBytes, Text, Workload

__all__ = ["Host", "Plan", "PlanPrediction", "Stage", "StagePrediction", "read_plan"]

Port = Annotated[int, Field(ge=1, le=65535)]
_SHOWN = 20
"""Ranks that a message lists."""
Ratio = Annotated[float, Field(ge=0)]


def _known_scheme(text: str) -> str:
    try:
        return str(parse_gradients(text))
    except UserError as error:
        raise ValueError(f"found {error}") from None


class StagePrediction(Record):
    """What the cost model says of one stage."""

    compute_ms: Milliseconds
    sync_ms: Milliseconds
    memory_bytes: SizeBytes
    trainable_bytes: SizeBytes | None = None
    """Of one parameter set: what a mode with more sets than weight stashing adds to the memory for each."""


class Stage(Record):
    """A run of consecutive layers, and the workers that replicate it."""

    index: Annotated[int, Field(ge=0)]
    first_layer: Text
    last_layer: Text
    layers: Count
    replicas: Count
    workers: Annotated[Rows[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    in_flight: Count
    predicted: StagePrediction
    recompute: bool = False
    """Whether only the stage's inputs are kept for the backward pass, which runs the forward pass again."""


class PlanPrediction(Record):
    """What the cost model says of the whole plan; section 1 of the design defines each figure."""

    minibatch_ms: Milliseconds
    single_machine_ms: Milliseconds
    data_parallel_ms: Milliseconds
    speedup: Ratio
    speedup_over_data_parallel: Ratio
    bytes_per_minibatch: Annotated[float, Field(ge=0)]
    data_parallel_bytes_per_minibatch: Annotated[float, Field(ge=0)]
    communication_reduction: Annotated[float, Field(le=1)]


class Host(Record):
    """Where one worker listens; `listen` is the address it binds where that differs from the one others dial."""

    address: Text
    port: Port
    listen: Text | None = None


class Plan(Workload):
    """A whole plan file."""

    format: Literal["pipedream-plan"] = "pipedream-plan"
    version: Literal[1] = 1
    machines: Count
    bandwidth_bps: Annotated[float, Field(gt=0)]
    strategy: Text
    config: Text
    noam: Count
    stages: Annotated[Rows[Stage], Field(min_length=1)]
    predicted: PlanPrediction
    hosts: Rows[Host] = ()
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = "momentum"
    """What the memory figures count the state of."""
    cost_model: Literal["paper", "duplex"] = "paper"
    inference: bool = False
    """Whether it was made for forward passes alone: no backward pass, no gradients, no synchronisation."""
    compress_gradients: Annotated[str, AfterValidator(_known_scheme)] | None = None
    """Of replicated stages, and the parameters that come back: see `pd_format.compression`."""
    compress_activations: Literal["bf16", "int8"] | None = None
    """Of what crosses a cut, both ways."""

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Plan:
        rank = 0
        for index, stage in enumerate(self.stages):
            place = f"stages[{index}]"
            if stage.index != index:
                raise ValueError(f"{place}.index: found {stage.index}; stages are numbered from 0, expected {index}.")
            expected = range(rank, rank + stage.replicas)  # Of which there may be any number, so it is not written out.
            if len(stage.workers) != stage.replicas or stage.workers != tuple(expected):
                raise ValueError(
                    f"{place}.workers: found {_listed(stage.workers)}; with {stage.replicas} replicas and workers "
                    f"numbered stage by stage, expected {_listed(expected)}."
                )
            rank += stage.replicas
        config = "-".join(str(stage.replicas) for stage in self.stages)
        if self.config != config:
            raise ValueError(f"config: found {self.config!r}; the stages' replicas are {config!r}.")
        noam = -(-rank // self.stages[0].replicas)
        if self.noam != noam:
            raise ValueError(f"noam: found {self.noam}; {rank} workers over the first stage's replicas give {noam}.")
        if rank > self.machines:
            raise ValueError(f"machines: found {self.machines}; the stages use {rank} workers.")
        if self.hosts and len(self.hosts) != rank:
            raise ValueError(f"hosts: found {len(self.hosts)}; expected one for each of the {rank} workers, or none.")
        places: dict[tuple[str, int], int] = {}
        for index, host in enumerate(self.hosts):
            other = places.setdefault((host.address, host.port), index)
            if other != index:
                raise ValueError(
                    f"hosts[{index}]: {host.address} port {host.port} is also hosts[{other}]; "
                    "workers on one host need ports of their own."
                )
        return self

    @property
    def workers(self) -> int:
        """How many workers the plan uses."""
        return sum(stage.replicas for stage in self.stages)

    def stage_of(self, rank: int) -> tuple[Stage, int]:
        """The stage of a worker, and which of its replicas the worker is."""
        for stage in self.stages:
            if rank in stage.workers:
                return stage, rank - stage.workers[0]
        raise ValueError(f"worker {rank} of {self.workers}")


def _listed(ranks: Sequence[int]) -> str:
    # Not by the length: that of a range may be more than Python's len can tell.
    more = ", ..." if ranks[_SHOWN:] else ""
    return f"[{', '.join(map(str, ranks[:_SHOWN]))}{more}]"


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        FormatError: see `pd_format.jsonfile.read_record`.
    """
    return read_record(path, Plan, "pipedream-plan", 1)
