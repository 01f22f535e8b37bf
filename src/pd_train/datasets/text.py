"""A text file as tokens, one a byte, in windows that follow each other.

bytes    T h e _ c a t _ s a t _ o n          context 4
inputs   T h e _|c a t _|s a t _              sample i is bytes 4 i to 4 i + 3
targets  h e _ c|a t _ s|a t _ o              and what follows each of them
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.profile import InputSpec

__all__ = ["TextWindows", "load_text"]

_SCANNED_BYTES = 1 << 26


class TextWindows(Dataset[Any]):
    """Windows number `first` and on of a file's bytes: tokens (context,) and those that follow, both int64."""

    def __init__(self, tokens: torch.Tensor, context: int, first: int, windows: int) -> None:
        self._tokens = tokens
        self._context = context
        self._first = first
        self._windows = windows

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        inputs, targets = self.rows(torch.tensor([index]))
        return inputs[0], targets[0]

    def rows(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Many windows, stacked."""
        starts = (self._first + indices) * self._context
        chosen = self._tokens[starts[:, None] + torch.arange(self._context + 1)].long()
        return chosen[:, :-1], chosen[:, 1:]


def load_text(
    path: str, name: str, inputs: Sequence[InputSpec], classes: int | None, label_shape: tuple[int, ...]
) -> tuple[TextWindows, TextWindows]:
    """Cut a file into windows as long as the model's input; the last tenth of them, at least one, is for validation.

    Raises:
        UserError: the file cannot be read, is too small for one window of each part, or holds a byte that the model has
            no token for; or the model does not take tokens.
    """
    context = _context_of(name, inputs, label_shape)
    tokens = _read(path, name, 2 * context + 1, context)
    if classes is not None and classes < 256:
        _check_bytes(tokens, name, classes)
    windows = (len(tokens) - 1) // context
    validation = max(1, windows // 10)
    training = windows - validation
    return TextWindows(tokens, context, 0, training), TextWindows(tokens, context, training, validation)


def _context_of(name: str, inputs: Sequence[InputSpec], label_shape: tuple[int, ...]) -> int:
    shapes = ", ".join(f"{'x'.join(map(str, spec.shape[1:])) or 'one number'} {spec.dtype}" for spec in inputs)
    if len(inputs) != 1 or len(inputs[0].shape) != 2 or dtype_of(inputs[0]) != torch.int64:
        raise UserError(
            f"The model takes samples of {shapes}; --data {name} has sequences of tokens. Profile a model with one "
            "input of int64 and shape (B, T), as in pd-profile gpt, or --input-shape 128:int64."
        )
    context = inputs[0].shape[1]
    if label_shape != (context,):
        raise UserError(
            f"The model gives {'x'.join(map(str, label_shape)) or 'one row'} of logits for {context} tokens; --data "
            f"{name} has a next token for each: expected logits of shape (B, {context}, vocabulary)."
        )
    return context


def _read(path: str, name: str, least: int, context: int) -> torch.Tensor:
    """The file's bytes, mapped into memory rather than read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
        if size >= least:
            return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"--data {name}: {path} cannot be read ({reason}); expected a file of text.") from None
    raise UserError(
        f"--data {name}: {path} holds {size} bytes; training and validation take at least {least}, which is a window "
        f"of {context} tokens for each and one byte more. Use a larger file, or a model with a shorter context."
    )


def _check_bytes(tokens: torch.Tensor, name: str, classes: int) -> None:
    """Refuse a byte that the model has no token for."""
    for start in range(0, len(tokens), _SCANNED_BYTES):
        part = tokens[start : start + _SCANNED_BYTES]
        if int(part.max()) >= classes:
            place = int((part >= classes).nonzero()[0])
            raise UserError(
                f"--data {name} holds the byte {int(part[place])} at position {start + place}; the model knows the "
                f"tokens 0 to {classes - 1}. Give it a vocabulary of 256, as with --model-arg vocabulary=256 of gpt."
            )
