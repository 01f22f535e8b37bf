"""Which classification models of torchvision were tried, and what came of it: `pd-profile --list-models`.

The record beside this file is made by `benchmarks/try_models.py`, never by hand.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pd_format.jsonfile import Record, read_record
from pd_profile.shipped import SHIPPED

__all__ = ["FORMAT", "RECORD", "VERSION", "TriedModel", "TriedModels", "list_lines"]

FORMAT, VERSION = "pipedream-tried-models", 1
RECORD = Path(__file__).with_name("tried_models.json")


class TriedModel(Record):
    """One model."""

    name: str
    input_shape: tuple[int, ...]
    """Of a sample: the smallest of some sizes that the model itself takes."""
    layers: int
    """0 where it could not be traced."""
    cut: str | None
    """The last layer of the first of two stages."""
    result: Literal["passes", "traced only", "fails"]
    """`passes`: two stages gave the whole model's outputs, gradients and buffers, to the bit."""
    reason: str | None = None


class TriedModels(Record):
    """All of one version of torchvision."""

    format: Literal["pipedream-tried-models"] = "pipedream-tried-models"
    version: Literal[1] = 1
    torch: str
    torchvision: str
    minibatch_size: int
    models: tuple[TriedModel, ...]


def list_lines(names: Sequence[str], torchvision: str) -> Iterator[str]:
    """What `--list-models` prints.

    Args:
        names: of the installed torchvision's classification models.
        torchvision: its version.
    """
    width = max(map(len, (*names, *SHIPPED)))
    yield "Models of this project:"
    for name, shipped in SHIPPED.items():
        yield f"  {name:<{width}}  {shipped.about}"
    record = read_record(RECORD, TriedModels, FORMAT, VERSION)
    tried = {model.name: model for model in record.models}
    yield ""
    yield f"Classification models of torchvision {torchvision}:"
    for name in names:
        yield f"  {name:<{width}}  {_outcome(tried.get(name))}"
    yield ""
    yield from textwrap.wrap(
        f"Tried with torchvision {record.torchvision} and torch {record.torch} on random weights, minibatches of "
        f"{record.minibatch_size} and small images. passes: cut into two stages in the middle, the model gave the "
        "whole model's outputs, gradients and buffers, to the bit.",
        100,
    )


def _outcome(model: TriedModel | None) -> str:
    if model is None:
        return "not tried"
    text = f"{model.result:<11}  {model.layers:>4} layers  {'x'.join(map(str, model.input_shape))}"
    return text if model.reason is None else f"{text}  {model.reason}"
