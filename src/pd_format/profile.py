"""The profile: what pd-profile measured of a model's layers, and all that pd-plan knows of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from pd_format.jsonfile import Record, Rows, read_record

__all__ = [
    "ORIGINAL_FACTORY",
    "PRECISIONS",
    "Count",
    "Device",
    "InputSpec",
    "LayerProfile",
    "Milliseconds",
    "ModelSpec",
    "PrecisionName",
    "Profile",
    "SizeBytes",
    "Workload",
    "read_profile",
]

Milliseconds = Annotated[float, Field(ge=0)]
SizeBytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
PrecisionName = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)


class ModelSpec(Record):
    """How to build the model, and how to know that it is the same one."""

    name: Text
    factory: Text
    kwargs: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    fingerprint: Text

    @model_validator(mode="after")
    def _factory_names_a_function(self) -> ModelSpec:
        place, _, function = self.factory.rpartition(":")
        if not place or not function.isidentifier():
            raise ValueError(
                f"factory is {self.factory!r}; expected 'package.module:function' or 'path/file.py:function'."
            )
        return self


ORIGINAL_FACTORY = "no.factory:in_a_text_profile"
"""Of a model known from a text profile of the original release only, which nobody can build."""


class InputSpec(Record):
    """One input of the model: its shape with the batch dimension first, and its dtype as torch names it."""

    name: Text
    shape: Annotated[Rows[SizeBytes], Field(min_length=1)]
    dtype: Text


class Device(Record):
    """What the figures were measured on, or estimated for."""

    kind: Text
    name: str
    versions: dict[str, str] = Field(default_factory=dict)
    estimated: bool = False


class LayerProfile(Record):
    """One layer of the chain; times for one minibatch, sizes as section 1 of the design defines them."""

    name: Text
    op: str
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    forward_ms_std: Milliseconds = 0.0
    backward_ms_std: Milliseconds = 0.0
    activation_bytes: SizeBytes
    parameter_bytes: SizeBytes
    trainable_bytes: SizeBytes
    stash_bytes: SizeBytes = 0
    cut: bool = True

    @model_validator(mode="before")
    @classmethod
    def _all_parameters_train_by_default(cls, value: Any) -> Any:
        if isinstance(value, dict) and "trainable_bytes" not in value and "parameter_bytes" in value:
            return {**value, "trainable_bytes": value["parameter_bytes"]}
        return value

    @property
    def compute_ms(self) -> float:
        """T_l of the paper: forward and backward time together."""
        return self.forward_ms + self.backward_ms


class Workload(Record):
    """What is trained, and on what: the fields that a profile and a plan share, and their place in the files."""

    format: str
    version: int
    model: ModelSpec
    minibatch_size: Count
    inputs: Annotated[Rows[InputSpec], Field(min_length=1)]
    data: Text = "synthetic"
    task: Text = "classification"
    precision: PrecisionName = "fp32"
    """What autocast computes in, and what float32 tensors are while they cross a cut."""


class Profile(Workload):
    """A whole profile file."""

    format: Literal["pipedream-profile"] = "pipedream-profile"
    version: Literal[1] = 1
    device: Device
    minibatches: Annotated[int, Field(ge=0)]
    layers: Annotated[Rows[LayerProfile], Field(min_length=1)]

    @model_validator(mode="after")
    def _layers_are_consistent(self) -> Profile:
        seen: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            if layer.name in seen:
                raise ValueError(
                    f"layers[{index}].name: {layer.name!r} is also layers[{seen[layer.name]}]; a name stands once."
                )
            seen[layer.name] = index
        total = sum(layer.compute_ms for layer in self.layers)
        if not math.isfinite(total):
            raise ValueError("layers: the sum of their times is not a finite number.")
        return self


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        FormatError: see `pd_format.jsonfile.read_record`.
    """
    return read_record(path, Profile, "pipedream-profile", 1)
