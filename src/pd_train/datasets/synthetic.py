"""Random samples of the right form, for speed and for trying things out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from pd_format.layers.inputs import dtype_of
from pd_format.layers.values import map_tensors
from pd_format.profile import InputSpec

__all__ = ["SyntheticDataset"]


class SyntheticDataset(Dataset[Any]):
    """Random samples for a model's inputs and labels, each made when it is asked for.

    Sample i is drawn from a generator seeded by i: floats normal, integers (and booleans) 0 or 1, then its labels, or
    those of its place in a minibatch of targets that is given.
    """

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        classes: int | None,
        samples: int,
        first: int = 0,
        label_shape: tuple[int, ...] = (),
        targets: object = None,
    ) -> None:
        """Hold `samples` samples, the ones from number `first` on.

        Args:
            classes: of the labels; None where `targets`, of one minibatch, stand in for them.
        """
        self._specs = [(tuple(spec.shape[1:]), dtype_of(spec)) for spec in inputs]
        self._classes = classes
        self._samples = samples
        self._first = first
        self._label_shape = label_shape
        self._targets = targets
        self._minibatch_size = inputs[0].shape[0]

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        generator = torch.Generator().manual_seed(self._first + index)
        values = [
            torch.randn(shape, generator=generator).to(dtype)
            if dtype.is_floating_point or dtype.is_complex
            else torch.randint(0, 2, shape, generator=generator, dtype=dtype)
            for shape, dtype in self._specs
        ]
        if self._classes is None:
            row = index % self._minibatch_size
            return (*values, map_tensors(lambda tensor: tensor[row] if tensor.dim() else tensor, self._targets))
        return (*values, torch.randint(0, self._classes, self._label_shape, generator=generator))

    def rows(self, indices: torch.Tensor) -> tuple[Any, ...]:
        """Many samples, stacked."""
        return tuple(
            default_collate(list(column)) for column in zip(*map(self.__getitem__, indices.tolist()), strict=True)
        )
