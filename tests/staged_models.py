"""Models as in `training_models`, whose workers have them on a device that does all copies as late as it may."""

from __future__ import annotations

import multiprocessing

import torch

import pd_train.duties
from late_device import LateStaging
from training_models import bn_dropout, samples_26, skip

__all__ = ["bn_dropout", "samples_26", "skip"]


def _open_staging(device: torch.device) -> LateStaging:
    staging = LateStaging()

    def enter_thread() -> None:
        print("the sender begins", flush=True)

    staging.enter_thread = enter_thread  # type: ignore[method-assign]
    return staging


if multiprocessing.parent_process() is not None:  # A worker, not the test.
    pd_train.duties.open_staging = _open_staging
