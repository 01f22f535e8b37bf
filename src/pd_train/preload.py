"""Imported once by the process that workers are forked from: what every worker needs, loaded before the forks.

The one module whose import does something. The first matrix product on torch's meta device, which tracing a model
needs, makes torch load its compiler, some two seconds that each worker would spend again.
"""

import torch

import pd_train.worker  # noqa: F401

torch.nn.functional.linear(
    torch.empty(1, 1, device="meta"), torch.empty(1, 1, device="meta"), torch.empty(1, device="meta")
)
