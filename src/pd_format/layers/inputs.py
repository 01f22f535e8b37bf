"""The model's inputs: their stand-ins, and which parameter of its forward each one is for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_format.profile import InputSpec

__all__ = ["dtype_of", "identifier", "match_inputs", "stand_in"]


def dtype_of(spec: InputSpec) -> torch.dtype:
    """The dtype that an input names.

    Raises:
        UserError: torch has none of this name.
    """
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(
            f"input {spec.name!r} has dtype {spec.dtype!r}; expected a torch dtype such as float32 or int64."
        )
    return dtype


def stand_in(spec: InputSpec, more: int) -> Tensor:
    return torch.empty((spec.shape[0] + more, *spec.shape[1:]), dtype=dtype_of(spec), device="meta")


def identifier(name: str) -> str:
    cleaned = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name)
    return cleaned if cleaned[:1].isalpha() else f"input_{cleaned}"


def match_inputs(forward: Any, inputs: Sequence[InputSpec]) -> tuple[list[str], dict[str, str]]:
    """Which inputs go by position, and which parameter takes which input by name.

    Raises:
        UserError: an input has no place, or a parameter without default has no input.
    """
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [spec.name for spec in inputs]
    by_keyword = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if set(names) <= {each.name for each in by_keyword}:
        positional, named = [], {name: name for name in names}
    else:
        room = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if len(names) > len(room) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            raise UserError(
                f"the model gets {len(names)} inputs ({', '.join(names)}), but its forward takes "
                f"{len(room)}: {', '.join(each.name for each in room) or 'none'}. Leave out what it does not take."
            )
        positional, named = names, {}
        by_keyword = [each for each in by_keyword if each not in room[: len(names)]]
    missing = [each.name for each in by_keyword if each.default is each.empty and each.name not in named]
    if missing:
        raise UserError(
            f"the model's forward needs {', '.join(missing)}, which has no default value and no input; the inputs are "
            f"{', '.join(names)}. Give one input for each, or a default value in forward."
        )
    return positional, named
