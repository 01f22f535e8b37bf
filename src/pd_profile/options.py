"""What the user typed, as values: the model's name, its arguments and shapes (design, section 1).

Pure text handling: nothing here imports torch, so that a mistake is reported at once.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "DTYPES",
    "InputShape",
    "ModelName",
    "Scalar",
    "parse_input_shape",
    "parse_model",
    "parse_model_args",
]

Scalar = str | int | float | bool | None

#: The dtypes that an input may have, as torch names them.
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


@dataclass(frozen=True)
class ModelName:
    """The model as it was named on the command line.

    Attributes:
        name: what the profile is called.
        factory: "package.module:function" or "path/file.py:function"; None for a bare name.
    """

    name: str
    factory: str | None


class InputShape(NamedTuple):
    """One `--input-shape`: the shape of a sample, without the batch dimension; no name means "the next input"."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str


def parse_model(text: str) -> ModelName:
    """Read MODEL: a bare name is torchvision's, one with a colon names a function.

    Raises:
        ValueError: it is neither.
    """
    place, colon, function = text.rpartition(":")
    if not colon:
        if text.endswith(".py") or "/" in text:
            raise ValueError(f"{text!r} names a file; name its function too, as in {text}:build.")
        if "." in text:
            raise ValueError(f"{text!r} names a module; name its function too, as in {text}:build.")
        if not text:
            raise ValueError("the name is empty; expected a torchvision model such as resnet18.")
        return ModelName(text, None)
    if not place or not function.isidentifier():
        raise ValueError(f"{text!r} is no factory; expected path/file.py:function or package.module:function.")
    return ModelName(function, text)


def parse_model_args(texts: tuple[str, ...]) -> dict[str, Scalar]:
    """Read every `--model-arg NAME=VALUE`; a value that is a JSON scalar becomes one, anything else stays text.

    Raises:
        ValueError: no `=`, a name that is no Python name, a name given twice, or a list or object as value.
    """
    arguments: dict[str, Scalar] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"found {text!r}; expected NAME=VALUE, as in num_classes=10.")
        if name in arguments:
            raise ValueError(f"{name} is given twice; keep one of them.")
        arguments[name] = _scalar(name, value)
    return arguments


def _scalar(name: str, text: str) -> Scalar:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, (list, dict)):
        raise ValueError(
            f"{name} is {text!r}; a profile keeps numbers, true, false, null and text only. "
            "Write a function without arguments that builds the model, and name it as path/file.py:function."
        )
    if isinstance(value, float) and not math.isfinite(value):
        return text
    scalar: Scalar = value
    return scalar


def parse_input_shape(text: str) -> InputShape:
    """Read `3,32,32`, `image=3,32,32`, `tokens=128:int64` or `idx=:int64` (one number a sample).

    Raises:
        ValueError: a dimension is no whole number of at least 1, or the dtype is unknown.
    """
    name, equals, rest = text.rpartition("=")
    if equals and not name.isidentifier():
        raise ValueError(f"found the name {name!r} in {text!r}; expected one of the model's inputs, as in x=3,32,32.")
    dimensions, colon, dtype = rest.partition(":")
    if colon and dtype not in DTYPES:
        raise ValueError(f"found the dtype {dtype!r} in {text!r}; expected one of {', '.join(DTYPES)}.")
    if not dimensions and not (equals or colon):
        raise ValueError("found nothing; expected the shape of a sample, as in 3,32,32.")
    shape = []
    for part in dimensions.split(",") if dimensions else []:
        if not re.fullmatch(r"\s*[0-9]+\s*", part) or int(part) < 1:
            raise ValueError(
                f"found {part.strip()!r} as a dimension in {text!r}; "
                "expected whole numbers from 1 on with commas between, without the batch, as in 3,32,32."
            )
        shape.append(int(part))
    return InputShape(name or None, tuple(shape), dtype or "float32")
