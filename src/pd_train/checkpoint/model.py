"""The trained model as an ordinary state dict: model.pt, which plain torch loads without this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pd_format.errors import UserError
from pd_train.checkpoint.part import write_file

__all__ = ["join_state", "write_model"]


def join_state(names: Mapping[str, str], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole model's state dict from the stages' parts.

    Args:
        names: every key of the model's own state dict, and the name under which a stage holds its tensor.
        parts: the tensors of all stages by these names.

    Raises:
        KeyError: no stage holds one of the tensors.
    """
    return {key: parts[name] for key, name in names.items()}


def write_model(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state dict under a temporary name, flush it to disk, then rename it.

    Raises:
        UserError: the folder cannot be written to, or the disk is full.
    """
    try:
        write_file(path, dict(state))
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path}: cannot be written ({error}); the last checkpoint holds what was trained: make room, then go on "
            "with --resume."
        ) from None
