"""What a model learns: the loss of a minibatch and what counts as right (design, sections 1, 4 and 6).

A loss is the mean over the minibatch's labels, so that a mean over an epoch weighs each minibatch by its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pd_format.captions import PADDING
from pd_format.errors import UserError
from pd_format.layers.own_loss import OwnLoss

__all__ = ["Captioning", "Classification", "PredictingTask", "Task", "classes_of", "get_task", "label_shape_of"]

AUXILIARY_WEIGHTS = {"aux_logits": 0.4, "aux_logits1": 0.3, "aux_logits2": 0.3}
"""Weights of the auxiliary classifiers' losses: Inception-v3 has the first, GoogLeNet the other two."""


class Task(Protocol):
    """What closes a training step; `output` is whatever the model returns."""

    def loss(self, output: object, targets: object) -> Tensor:
        """The mean loss over the minibatch, a 0-dim tensor with a gradient."""

    def correct(self, output: object, targets: object) -> float | None:
        """How many of the minibatch's samples the model gets right; one that is partly right counts in part.

        None where that is not known.
        """

    def samples(self, targets: object) -> int:
        """Samples of the minibatch."""

    def random_targets(self, output: object, generator: torch.Generator) -> object:
        """Targets that fit an output, drawn from a generator on the CPU, on the output's device."""


@runtime_checkable
class PredictingTask(Protocol):
    """A task whose predictions a validation data set can judge as a whole (METEOR, for one)."""

    def predictions(self, output: object) -> Tensor:
        """What the model predicts: a small tensor, batch dimension first, as of token ids (B, T)."""


class Classification:
    """One of several classes a label: cross entropy of logits (B, classes) and labels (B,).

    A sample may have several labels, as the tokens of a sequence: logits (B, ..., classes) and labels (B, ...). A model
    may also return a dict with `logits`, or a named tuple with `logits` and what auxiliary classifiers say while
    training.
    """

    def loss(self, output: object, targets: object) -> Tensor:
        """Cross entropy; for auxiliary logits that are there 0.4 (Inception-v3) or 0.3 (GoogLeNet) times theirs.

        Raises:
            UserError: output or labels have another form, or a label is out of range (looked at on the CPU only).
        """
        logits = _logits(output)
        labels = _labels(logits, targets)
        total = _cross_entropy(logits, labels)
        for name, weight in AUXILIARY_WEIGHTS.items():
            auxiliary = None if isinstance(output, Mapping) else getattr(output, name, None)
            if auxiliary is not None:
                total = total + weight * _cross_entropy(auxiliary, labels)
        return total

    def correct(self, output: object, targets: object) -> float:
        """Labels that have the largest logit, over the labels of a sample."""
        logits = _logits(output)
        labels = _labels(logits, targets)
        return int((logits.argmax(dim=-1) == labels).sum()) / max(1, labels.shape[1:].numel())

    def predictions(self, output: object) -> Tensor:
        """The class with the largest logit, for each label that a sample has."""
        return _logits(output).argmax(dim=-1)

    def samples(self, targets: object) -> int:
        """The size of the labels' batch dimension."""
        if not isinstance(targets, Tensor) or targets.dim() == 0:
            raise UserError(_unfit_labels(targets))
        return targets.shape[0]

    def random_targets(self, output: object, generator: torch.Generator) -> Tensor:
        """A class for each row of the logits.

        Raises:
            UserError: the output holds no logits.
        """
        logits = _logits(output)
        return torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator).to(logits.device)


class LanguageModeling(Classification):
    """The next token at each position: cross entropy of logits (B, T, vocabulary) and the tokens that follow (B, T).

    The data set shifts the tokens, so input and targets have the same length.
    """

    def loss(self, output: object, targets: object) -> Tensor:
        """The mean over all tokens, in nats.

        Raises:
            UserError: output or targets have another form, or a token is out of range (looked at on the CPU only).
        """
        _check_sequences(output)
        return super().loss(output, targets)

    def random_targets(self, output: object, generator: torch.Generator) -> Tensor:
        """A token for each position."""
        _check_sequences(output)
        return super().random_targets(output, generator)


class Captioning(Classification):
    """The words of a caption: logits (B, steps, vocabulary) and tokens (B, steps), of which padding is not counted.

    The loss is the mean over all of the minibatch's tokens but padding. A mean over an epoch weighs each minibatch by
    its samples, not by its tokens.
    """

    def loss(self, output: object, targets: object) -> Tensor:
        """Cross entropy of each token, given those before it in the caption.

        Raises:
            UserError: output or tokens have another form, or a token is out of range (looked at on the CPU only).
        """
        logits, tokens = self._matched(output, targets)
        return cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=PADDING)

    def correct(self, output: object, targets: object) -> float:
        """Of each caption the share of tokens that have the largest logit, given those before them; the sum of these.

        The end token counts, padding does not.
        """
        logits, tokens = self._matched(output, targets)
        counted = tokens != PADDING
        right = (logits.argmax(dim=-1) == tokens) & counted
        return float((right.sum(1) / counted.sum(1).clamp(min=1)).sum())

    def predictions(self, output: object) -> Tensor:
        """The captions that the model makes on its own (B, steps), where it does; else the likeliest tokens."""
        captions = output.get("captions") if isinstance(output, Mapping) else None
        return captions if isinstance(captions, Tensor) else super().predictions(output)

    def random_targets(self, output: object, generator: torch.Generator) -> Tensor:
        """Tokens without padding.

        Raises:
            UserError: the output holds no logits.
        """
        logits = _logits(output)
        return torch.randint(PADDING + 1, logits.shape[-1], logits.shape[:-1], generator=generator).to(logits.device)

    def _matched(self, output: object, targets: object) -> tuple[Tensor, Tensor]:
        logits = _logits(output)
        if logits.dim() != 3:
            raise UserError(
                f"The model returns {_tensor_text(logits)}; captioning expects logits of shape (B, steps, vocabulary)."
            )
        return logits, _labels(logits, targets)


TASKS: dict[str, type[Classification]] = {
    "classification": Classification,
    "language-modeling": LanguageModeling,
    "captioning": Captioning,
}


def get_task(name: str) -> Task:
    """The task that a profile or plan names: one of `TASKS`, or the user's own loss as `path/file.py:function`.

    Raises:
        UserError: there is none of this name.
    """
    if ":" in name:
        return OwnLoss(name)
    if name not in TASKS:
        raise UserError(
            f"Task {name!r} is unknown; expected one of: {', '.join(map(repr, TASKS))}, or a loss of your own as "
            "path/file.py:function."
        )
    return TASKS[name]()


def classes_of(output: object) -> int:
    """Classes that a model tells apart, from an output of it; one on the meta device will do.

    Raises:
        UserError: the output holds no logits.
    """
    return _logits(output).shape[-1]


def label_shape_of(output: object) -> tuple[int, ...]:
    """The shape of a sample's labels, without the batch dimension; empty where a sample has one label.

    Raises:
        UserError: the output holds no logits.
    """
    return tuple(_logits(output).shape[1:-1])


def _check_sequences(output: object) -> None:
    logits = _logits(output)
    if logits.dim() != 3:
        raise UserError(
            f"The model returns {_tensor_text(logits)}; language modeling expects logits of shape (B, T, vocabulary), "
            "one row for each token of the input. For one class a sample use --task classification."
        )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def _logits(output: object) -> Tensor:
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif hasattr(output, "logits"):
        logits = output.logits
    if not isinstance(logits, Tensor) or logits.dim() < 2 or not logits.is_floating_point():
        found = _tensor_text(logits) if isinstance(logits, Tensor) else _kind(output)
        raise UserError(
            f"The model returns {found}; classification expects floating-point logits of shape (B, classes) or "
            "(B, ..., classes), alone or as 'logits' of a dict or a named tuple."
        )
    return logits


def _labels(logits: Tensor, targets: object) -> Tensor:
    """The labels as int64, after a look at their form and, on the CPU, at their range."""
    if not isinstance(targets, Tensor) or targets.dim() != logits.dim() - 1 or targets.dtype not in _INTEGERS:
        raise UserError(_unfit_labels(targets))
    if targets.shape != logits.shape[:-1]:
        if logits.dim() == 2:
            found = f"for {logits.shape[0]} samples, the minibatch has {targets.shape[0]} labels"
        else:
            found = f"of shape {tuple(logits.shape)}, the minibatch has labels of shape {tuple(targets.shape)}"
        raise UserError(f"The model returns logits {found}; expected one row of logits a label.")
    if targets.device.type == "cpu" and targets.numel() > 0:
        classes = logits.shape[-1]
        least, most = map(int, torch.aminmax(targets))
        if least < 0 or most >= classes:
            raise UserError(
                f"The data set holds the label {most if most >= classes else least}; the model tells {classes} classes "
                f"apart, so labels run from 0 to {classes - 1}. Renumber the labels, or give the model more classes."
            )
    return targets.long()


_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def _unfit_labels(targets: object) -> str:
    found = _tensor_text(targets) if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
    return (
        f"The labels of a minibatch are {found}; classification expects one whole number for each row of logits: a "
        "tensor of int64 and shape (B,) for logits (B, classes), or (B, ...) for (B, ..., classes)."
    )


def _tensor_text(tensor: Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"


def _kind(output: object) -> str:
    if isinstance(output, Mapping):
        return "a dict with " + (", ".join(map(repr, output)) or "nothing")
    return f"a {type(output).__name__}"
