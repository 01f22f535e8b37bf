"""The user's own pair of data sets."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

from torch.utils.data import Dataset

from pd_format.errors import UserError
from pd_format.layers.factory import load_function
from pd_train.datasets.indexed import check_dataset

__all__ = ["load_own"]


def load_own(name: str) -> tuple[Dataset[Any], Dataset[Any]]:
    """Call the user's function, which returns (train, validation)."""
    function = cast(Callable[[], object], load_function(name))
    try:
        pair = function()
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"--data {name}: the function stopped with {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno}). Mend it there."
        ) from error
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        found = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise UserError(f"--data {name}: the function returned {found}; expected two data sets, (train, validation).")
    for part, dataset in zip(("train", "validation"), pair, strict=True):
        try:
            check_dataset(dataset)
        except UserError as error:
            raise UserError(f"--data {name}, {part}: {error}") from None
    return pair[0], pair[1]
