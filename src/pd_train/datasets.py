"""The data sets that `--data` names: real digits, synthetic samples, or the user's own (train, validation) pair."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence, Sized
from typing import Any, cast

import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from pd_format.data import DIGITS_PIXELS, parse_data
from pd_format.errors import UserError
from pd_format.layers.factory import load_function
from pd_format.profile import InputSpec

__all__ = ["SyntheticDataset", "check_dataset", "load_datasets"]

SYNTHETIC_MINIBATCHES = 100


def load_datasets(
    name: str,
    inputs: Sequence[InputSpec],
    classes: int | None,
    minibatch_size: int,
    label_shape: tuple[int, ...] = (),
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Make the train and the validation data set.

    Args:
        name: `digits` or `digits:32` (scikit-learn's handwritten digits, resized), `synthetic` or `synthetic:1000`
            (random samples; 100 minibatches of them by default), or a function: see `pd_format.data`.
        inputs: of the model.
        classes: that the model tells apart; None where that is not known.
        minibatch_size: samples a minibatch.
        label_shape: of a sample's labels, which synthetic samples are given; empty where it has one.

    Raises:
        UserError: there is no such data set, it needs something that is not installed, or does not fit the model.
    """
    kind, size = parse_data(name)
    if kind == "digits":
        assert size is not None
        return _digits(size, name, inputs, classes)
    if kind == "function":
        return _own(name)
    if classes is None:
        raise UserError(f"--data {name} draws labels from the model's classes, whose number is not known.")
    samples = size or SYNTHETIC_MINIBATCHES * minibatch_size
    return (
        SyntheticDataset(inputs, classes, samples, label_shape=label_shape),
        SyntheticDataset(inputs, classes, math.ceil(samples / 10), first=samples, label_shape=label_shape),
    )


class SyntheticDataset(Dataset[Any]):
    """Random samples for a model's inputs and labels, each made when it is asked for.

    Sample i is drawn from a generator seeded by i: floats normal, integers (and booleans) 0 or 1, then its labels.
    """

    def __init__(
        self,
        inputs: Sequence[InputSpec],
        classes: int,
        samples: int,
        first: int = 0,
        label_shape: tuple[int, ...] = (),
    ) -> None:
        """Hold `samples` samples, the ones from number `first` on."""
        self._specs = [(tuple(spec.shape[1:]), _dtype(spec)) for spec in inputs]
        self._classes = classes
        self._samples = samples
        self._first = first
        self._label_shape = label_shape

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        generator = torch.Generator().manual_seed(self._first + index)
        values = [
            torch.randn(shape, generator=generator).to(dtype)
            if dtype.is_floating_point or dtype.is_complex
            else torch.randint(0, 2, shape, generator=generator, dtype=dtype)
            for shape, dtype in self._specs
        ]
        return (*values, torch.randint(0, self._classes, self._label_shape, generator=generator))

    def rows(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Many samples, stacked."""
        return tuple(torch.stack(column) for column in zip(*map(self.__getitem__, indices.tolist()), strict=True))


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


def _digits(
    size: int, name: str, inputs: Sequence[InputSpec], classes: int | None
) -> tuple[TensorDataset, TensorDataset]:
    """1797 handwritten digits in grey: of each class every fifth is for validation (356), the rest for training (1441).

    Pixels are normalised with the train split's mean and standard deviation.
    """
    shape = tuple(inputs[0].shape[1:])
    flat = shape == (size * size,)
    square = len(shape) == 3 and shape[1:] == (size, size)
    if len(inputs) != 1 or not (flat or square):
        found = " and ".join("x".join(map(str, spec.shape[1:])) or "one number" for spec in inputs)
        hint = f" --data digits:{shape[1]} has that size." if len(shape) == 3 and shape[1] == shape[2] else ""
        raise UserError(
            f"The model takes samples of {found}; --data {name} has 1x{size}x{size} (grey, repeated for as many "
            f"channels as the model takes) or {size * size} numbers.{hint}"
        )
    dtype = _dtype(inputs[0])
    if not dtype.is_floating_point:
        raise UserError(f"The model takes {inputs[0].dtype}; --data {name} has floating-point pixels.")
    if classes is not None and classes < 10:
        raise UserError(
            f"The model tells {classes} classes apart; --data {name} has 10. "
            "Give the model 10 outputs, for many with --model-arg num_classes=10 of pd-profile."
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            f"--data {name} needs scikit-learn, which is not installed: pip install 'pipedream[digits]'"
        ) from None
    values, classes_of = load_digits(return_X_y=True)
    images = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, DIGITS_PIXELS, DIGITS_PIXELS)
    labels = torch.tensor(classes_of, dtype=torch.int64)
    if size != DIGITS_PIXELS:
        images = interpolate(images, (size, size), mode="bilinear", align_corners=False, antialias=size < DIGITS_PIXELS)
    validation = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        validation[(labels == digit).nonzero()[4::5]] = True
    std, mean = torch.std_mean(images[~validation])
    images = ((images - mean) / std).to(dtype)

    def part(chosen: torch.Tensor) -> TensorDataset:
        grey = images[chosen]
        # Expanding makes a view: grey is held once, whatever the number of channels.
        return TensorDataset(grey.flatten(1) if flat else grey.expand(-1, shape[0], -1, -1), labels[chosen])

    return part(~validation), part(validation)


def _own(name: str) -> tuple[Dataset[Any], Dataset[Any]]:
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
            f"({frame.filename}, line {frame.lineno})."
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


def _dtype(spec: InputSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"Input {spec.name!r} has dtype {spec.dtype!r}; expected one of torch's, such as 'float32'.")
    return dtype
