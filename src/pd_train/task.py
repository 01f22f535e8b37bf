"""What a model learns: the loss of a minibatch and what counts as right (design, sections 4 and 6).

A loss is the mean over the minibatch's samples, so that a mean over an epoch weighs each minibatch by its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn.functional import cross_entropy

from pd_format.errors import UserError

__all__ = ["Classification", "Task", "classes_of", "get_task"]

AUXILIARY_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
"""Weights of the auxiliary classifiers' losses: Inception-v3 has the first, GoogLeNet the other two."""


class Task(Protocol):
    """What the last stage needs to know; `output` is whatever the model returns."""

    def loss(self, output: object, targets: object) -> torch.Tensor:
        """The mean loss over the minibatch's samples, a 0-dim tensor with a gradient."""

    def correct(self, output: object, targets: object) -> int:
        """How many of the minibatch's samples the model gets right."""

    def samples(self, targets: object) -> int:
        """Samples of the minibatch."""


class Classification:
    """One of several classes a sample: cross entropy of logits of shape (B, classes) and labels of shape (B,).

    A model may also return a dict with `logits`, or a named tuple with `logits` and what auxiliary classifiers say
    while training.
    """

    def loss(self, output: object, targets: object) -> torch.Tensor:
        """Cross entropy; for auxiliary logits that are there 0.4 (Inception-v3) or 0.3 (GoogLeNet) times theirs.

        Raises:
            UserError: output or labels have another form, or a label is out of range (looked at on the CPU only).
        """
        logits = _logits(output)
        labels = _labels(logits, targets)
        total = cross_entropy(logits, labels)
        for name, weight in AUXILIARY_WEIGHTS.items():
            auxiliary = None if isinstance(output, Mapping) else getattr(output, name, None)
            if auxiliary is not None:
                total = total + weight * cross_entropy(auxiliary, labels)
        return total

    def correct(self, output: object, targets: object) -> int:
        """Samples whose largest logit is the label's."""
        logits = _logits(output)
        return int((logits.argmax(dim=1) == _labels(logits, targets)).sum())

    def samples(self, targets: object) -> int:
        """The size of the labels' batch dimension."""
        if not isinstance(targets, torch.Tensor) or targets.dim() == 0:
            raise UserError(_unfit_labels(targets))
        return targets.shape[0]


TASKS: dict[str, type[Classification]] = {"classification": Classification}


def get_task(name: str) -> Task:
    """The task that a plan names.

    Raises:
        UserError: there is none of this name.
    """
    if name not in TASKS:
        raise UserError(f"Task {name!r} is unknown; expected one of: {', '.join(map(repr, TASKS))}.")
    return TASKS[name]()


def classes_of(output: object) -> int:
    """Classes that a model tells apart, from an output of it; one on the meta device will do.

    Raises:
        UserError: the output holds no logits.
    """
    return _logits(output).shape[-1]


def _logits(output: object) -> torch.Tensor:
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        found = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else _kind(output)
        raise UserError(
            f"The model returns {found}; classification expects logits of shape (B, classes), alone or as 'logits' "
            "of a dict or a named tuple."
        )
    return logits


def _kind(output: object) -> str:
    if isinstance(output, Mapping):
        return "a dict with " + (", ".join(map(repr, output)) or "nothing")
    return f"a {type(output).__name__}"


def _labels(logits: torch.Tensor, targets: object) -> torch.Tensor:
    """The labels as int64, after a look at their form and, on the CPU, at their range."""
    if not isinstance(targets, torch.Tensor) or targets.dim() != 1 or targets.dtype not in _INTEGERS:
        raise UserError(_unfit_labels(targets))
    if targets.shape[0] != logits.shape[0]:
        raise UserError(
            f"The model returns logits for {logits.shape[0]} samples, the minibatch has {targets.shape[0]} labels; "
            "expected one row of logits a sample."
        )
    if targets.device.type == "cpu" and targets.shape[0] > 0:
        classes = logits.shape[1]
        least, most = map(int, torch.aminmax(targets))
        if least < 0 or most >= classes:
            raise UserError(
                f"The data set holds the label {most if most >= classes else least}; the model tells {classes} classes "
                f"apart, so labels run from 0 to {classes - 1}. Renumber the labels, or give the model more classes."
            )
    return targets.long()


_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _unfit_labels(targets: object) -> str:
    if isinstance(targets, torch.Tensor):
        found = f"a tensor of shape {tuple(targets.shape)} and {str(targets.dtype).removeprefix('torch.')}"
    else:
        found = f"a {type(targets).__name__}"
    return (
        f"The labels of a minibatch are {found}; classification expects one whole number a sample, "
        "a tensor of shape (B,) and int64."
    )
