"""What every data set must be able to do."""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

from torch.utils.data import IterableDataset

from pd_format.errors import UserError

__all__ = ["check_dataset"]


def check_dataset(dataset: object) -> None:
    """Refuse what cannot be read by index or does not say how long it is.

    Raises:
        UserError: with the reason.
    """
    kind = type(dataset).__name__
    reason = "every worker must know before an epoch starts how many minibatches it has, and read any of them by index"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"The data set ({kind}) can only be read from front to back; expected __getitem__ and __len__: {reason}."
        )
    try:
        length = len(cast(Sized, dataset))
    except (TypeError, NotImplementedError):
        raise UserError(f"The data set ({kind}) has no length; expected one with __len__: {reason}.") from None
    if length < 0:
        raise UserError(f"The data set ({kind}) says that it holds {length} samples.")
