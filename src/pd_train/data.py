"""Minibatches of a data set, any of them at any time, the same ones for the same seed (design, sections 4 and 6).

Replicas of the first stage share no state: each asks for its own minibatches of an order that all of them compute.

    order of epoch 3    17  4  9  |  2 11  0  |  8 ...      epoch_order(samples, seed, epoch=3)
    minibatch               0     |     1     |  2          b mod r is the replica that loads it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from pd_format.errors import UserError
from pd_format.layers.values import map_tensors
from pd_format.profile import InputSpec
from pd_train.datasets.indexed import check_dataset
from pd_train.seeding import epoch_order, preserved_generators, sample_seed, seed_host_generators

__all__ = ["Minibatch", "MinibatchLoader", "SkippingDataset", "TensorRows"]

LABEL_KEYS = frozenset({"y", "label", "labels", "target", "targets"})
"""Keys of a sample that hold its label, where the names of the model's inputs do not settle it."""


class Minibatch(NamedTuple):
    """Some samples, stacked; their count is the batch dimension's size."""

    inputs: tuple[object, ...]
    """One tensor for each input of the model, batch dimension first."""
    targets: object
    samples: int
    skipped: tuple[str, ...] = ()
    """Files that could not be read, for which others stand in."""

    def pin_memory(self) -> Minibatch:
        """The same in memory from where a GPU copies fast; torch's loader calls it, where there is one."""
        inputs: tuple[object, ...] = map_tensors(torch.Tensor.pin_memory, self.inputs)
        return self._replace(inputs=inputs, targets=map_tensors(torch.Tensor.pin_memory, self.targets))


@runtime_checkable
class SkippingDataset(Protocol):
    """A data set in which one sample may stand in for another whose file cannot be read."""

    def take_skipped(self) -> list[str]:
        """The files that were replaced since the last call."""


@runtime_checkable
class TensorRows(Protocol):
    """A data set that hands out many samples at once and draws nothing from the global generators."""

    def rows(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The samples of these indices: inputs, then labels, each with the batch dimension first."""


class MinibatchLoader:
    """Loads any minibatch of any epoch.

    The order depends on (seed, epoch) alone and what a sample draws itself on (seed, epoch, index), so a minibatch is
    the same whoever loads it and whenever. The generators' states are put back after each minibatch. A data set that
    is neither a `TensorDataset` nor a `TensorRows` (nor a `Subset` of one) is read sample by sample with the host's
    generators seeded for each: load such a one on the thread that computes, or in a process that only loads.
    """

    samples: int
    """Seen in one epoch: all of the data set, or without the short last minibatch under `drop_last`."""
    minibatches: int
    """In one epoch."""

    def __init__(
        self,
        dataset: Dataset[Any],
        inputs: Sequence[InputSpec],
        minibatch_size: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
    ) -> None:
        """Look at the data set's length only; nothing is read yet.

        Args:
            dataset: with `__len__` and `__getitem__`.
            inputs: of the model, in order.
            minibatch_size: samples a minibatch, at least 1.
            seed: of the run.
            shuffle: another order each epoch; otherwise the data set's own.
            drop_last: leave a short last minibatch out.

        Raises:
            UserError: the data set has no length, or too few samples for one minibatch.
        """
        check_dataset(dataset)
        length = len(cast(Sized, dataset))
        if length == 0:
            raise UserError(
                f"The data set holds 0 samples; expected at least 1 for minibatches of {minibatch_size}. "
                "Check where its files are read from."
            )
        if drop_last and length < minibatch_size:
            raise UserError(
                f"The data set holds {length} samples, fewer than one minibatch of {minibatch_size}, and --drop-last "
                "leaves out what does not fill one. Train without --drop-last or with smaller minibatches."
            )
        self._length = length
        self._inputs = tuple(inputs)
        self._size = minibatch_size
        self._seed = seed
        self._shuffle = shuffle
        self._rows = _find_rows(dataset)
        self._dataset = dataset
        self._order: tuple[int, torch.Tensor] | None = None
        self._checked = False
        self.minibatches = length // minibatch_size if drop_last else -(-length // minibatch_size)
        self.samples = min(length, self.minibatches * minibatch_size)

    def samples_of(self, minibatch: int) -> int:
        """Samples of a minibatch: fewer in a last, short one."""
        return min(self._size, self.samples - minibatch * self._size)

    def load(self, epoch: int, minibatch: int) -> Minibatch:
        """Read one minibatch, from 0 to `minibatches` - 1.

        Raises:
            UserError: the samples do not fit the model's inputs, hold no label, or cannot be stacked.
            IndexError: there is no such minibatch.
        """
        if not 0 <= minibatch < self.minibatches:
            raise IndexError(f"minibatch {minibatch} of {self.minibatches}")
        indices = self._epoch_order(epoch)[minibatch * self._size : (minibatch + 1) * self._size]
        inputs: tuple[object, ...]
        if self._rows is not None:
            *leaves, label = self._rows(indices)
            inputs, targets = tuple(leaves), cast(object, label)
        else:
            inputs, targets = self._split(self._read(epoch, indices.tolist()))
        if not self._checked:
            self._check(inputs)
            self._checked = True
        skipped = self._dataset.take_skipped() if isinstance(self._dataset, SkippingDataset) else ()
        return Minibatch(inputs, targets, len(indices), tuple(skipped))

    def __getstate__(self) -> dict[str, Any]:
        # How to read is found out again, and the order computed again, where it goes.
        return {**self.__dict__, "_rows": None, "_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _rows=_find_rows(state["_dataset"]))

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        epoch = epoch if self._shuffle else 0
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self._length, self._seed, epoch) if self._shuffle else torch.arange(self._length)
            self._order = (epoch, order)
        return self._order[1]

    def _read(self, epoch: int, indices: list[int]) -> object:
        """Read sample by sample and stack. `__getitems__` reads many under one seed, so it cannot be used."""
        samples = []
        with preserved_generators():
            for index in indices:
                seed_host_generators(sample_seed(self._seed, epoch, index))
                samples.append(self._dataset[index])
        try:
            if isinstance(samples[0], Mapping) and any(sample.keys() != samples[0].keys() for sample in samples):
                # Stacking goes by the first one's keys and would lose what others hold besides.
                raise KeyError("the samples' keys differ")
            return default_collate(samples)
        except (RuntimeError, TypeError, KeyError) as error:
            first = samples[0]
            odd = next((i for i, sample in zip(indices, samples, strict=True) if _form(sample) != _form(first)), None)
            if odd is not None:
                there = _form(samples[indices.index(odd)])
                text = f"sample {indices[0]} holds {_form(first)}, sample {odd} {there}"
            else:
                text = f"sample {indices[0]} holds {_form(first)}: {str(error).splitlines()[0]}"
            raise UserError(
                f"The samples of the data set cannot be stacked to a minibatch: {text}. "
                "Expected tensors, arrays or numbers of one shape in all samples; convert them in the data set."
            ) from None

    def _split(self, batch: object) -> tuple[tuple[object, ...], object]:
        """Tell the model's inputs, in order, from the labels of a stacked minibatch."""
        names = [spec.name for spec in self._inputs]
        if isinstance(batch, Mapping):
            keys = list(batch)
            labels = [key for key in keys if key not in names]
            if len(names) == 1 and len(keys) == 2 and len(labels) == 2:
                labels = [key for key in keys if key in LABEL_KEYS]
                names = [key for key in keys if key not in labels]
            if len(labels) != 1 or sorted([*names, *labels]) != sorted(keys):
                raise UserError(
                    f"A sample of the data set is a dict with the keys {_listed(keys)}; expected one key for each "
                    f"input of the model ({_listed(self._names())}) and one more for the label."
                )
            return tuple(batch[name] for name in names), batch[labels[0]]
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise UserError(
                f"A sample of the data set holds {_form(batch)} after stacking; expected (input, label), with an input "
                f"for each of {_listed(self._names())}, or a dict."
            )
        *inputs, targets = batch
        return tuple(leaf for part in inputs for leaf in _leaves(part, names)), targets

    def _check(self, inputs: tuple[object, ...]) -> None:
        if len(inputs) != len(self._inputs):
            raise UserError(
                f"A sample of the data set holds {len(inputs)} inputs and a label: {_form(list(inputs))} after "
                f"stacking; the model takes {len(self._inputs)}: {_listed(self._names())}."
            )
        for spec, value in zip(self._inputs, inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                raise UserError(
                    f"The data set gives {_form(value)} for input {spec.name!r}; expected a tensor of {spec.dtype}."
                )
            expected = spec.dtype.removeprefix("torch.")
            found = str(value.dtype).removeprefix("torch.")
            if found != expected:
                raise UserError(
                    f"The data set gives {found} for input {spec.name!r}; the model was profiled with {expected}. "
                    f"Convert it in the data set: sample.to(torch.{expected})."
                )
            if value.dim() != len(spec.shape):
                raise UserError(
                    f"The data set gives the shape {_shape(value.shape[1:])} a sample for input {spec.name!r}; the "
                    f"model was profiled with {_shape(spec.shape[1:])}. Give samples of that shape in the data set, or "
                    "profile the model with --input-shape."
                )

    def _names(self) -> list[str]:
        return [spec.name for spec in self._inputs]


def _find_rows(dataset: object) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]] | None:
    """How to read many samples at once, where that gives what reading them one by one would."""
    if type(dataset) is Subset:
        rows = _find_rows(dataset.dataset)
        if rows is None:
            return None
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return lambda indices: rows(chosen[indices])
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1:
        tensors = dataset.tensors
        return lambda indices: tuple(tensor[indices] for tensor in tensors)
    if isinstance(dataset, TensorRows):
        return dataset.rows
    return None


def _leaves(value: object, names: Sequence[str]) -> Iterator[object]:
    """What nested tuples, lists and dicts hold, in order; a dict of the model's inputs in the order of the inputs."""
    if isinstance(value, Mapping):
        ordered = names if sorted(value) == sorted(names) else list(value)
        for key in ordered:
            yield from _leaves(value[key], names)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part, names)
    else:
        yield value


def _form(value: object) -> str:
    """What a value is, in a few words: `(tensor of 3x32x32 float32, int)`."""
    if isinstance(value, torch.Tensor):
        return f"tensor of {_shape(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_form(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_form(part) for part in value[:8]) + (", ..." if len(value) > 8 else "") + ")"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"array of {_shape(value.shape)} {value.dtype}"
    return type(value).__name__


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(repr(name) for name in names)
