"""The loss that closes a step, from the design's task field; so far classification only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pd_format.errors import UserError

__all__ = ["classification_loss", "random_labels"]


def random_labels(output: Any, generator: torch.Generator) -> Tensor:
    """A class for each row of the logits, of shape `logits.shape[:-1]`, on the logits' device.

    Raises:
        UserError: the output holds no logits.
    """
    logits = _logits(output)
    labels = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
    return labels.to(logits.device)


def classification_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy, the mean over the labels; auxiliary classifiers count as their models' papers weigh them.

    Inception-v3 has one, weighed 0.4; GoogLeNet two, weighed 0.3 each.

    Args:
        output: logits of shape (minibatch, ..., classes), or what holds them: a tensor, a dict with the key
            "logits", a named tuple with the field `logits` or a tuple whose first entry they are.
        labels: of shape (minibatch, ...).
    """
    loss = _cross_entropy(_logits(output), labels)
    if hasattr(output, "logits"):
        for field, weight in (("aux_logits", 0.4), ("aux_logits1", 0.3), ("aux_logits2", 0.3)):
            auxiliary = getattr(output, field, None)
            if isinstance(auxiliary, Tensor):
                loss = loss + weight * _cross_entropy(auxiliary, labels)
    return loss


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        logits = output
    elif isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        logits = output["logits"]
    elif isinstance(getattr(output, "logits", None), Tensor):
        logits = output.logits
    elif isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        logits = output[0]
    else:
        raise UserError(
            f"The model returns {_described(output)}; classification needs logits: a tensor of shape "
            "(minibatch, classes), or a dict or named tuple with one called logits. Let the model return that."
        )
    if logits.dim() < 2 or not logits.is_floating_point():
        raise UserError(
            f"The model returns a {str(logits.dtype).removeprefix('torch.')} tensor of shape "
            f"{tuple(logits.shape)}; classification needs floating-point logits of shape (minibatch, classes)."
        )
    return logits


def _described(output: Any) -> str:
    if isinstance(output, dict):
        return f"a dict with the keys {', '.join(map(repr, output))}"
    return f"a {type(output).__name__}"
