"""From the name that `--data` gives to a training and a validation data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from pd_format.data import parse_data
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.datasets.digits import load_digits
from pd_train.datasets.imagefolder import load_imagefolder
from pd_train.datasets.msvd import load_msvd
from pd_train.datasets.own import load_own
from pd_train.datasets.packed import PACKED, load_packed
from pd_train.datasets.synthetic import SyntheticDataset
from pd_train.datasets.text import load_text

__all__ = ["load_datasets"]

SYNTHETIC_MINIBATCHES = 100


def load_datasets(
    name: str,
    inputs: Sequence[InputSpec],
    classes: int | None,
    minibatch_size: int,
    label_shape: tuple[int, ...] = (),
    random_targets: Callable[[], object] | None = None,
    skip_corrupt: bool = False,
) -> tuple[Dataset[Any], Dataset[Any]]:
    """Make the train and the validation data set.

    Args:
        name: `digits` or `digits:32` (scikit-learn's handwritten digits, resized), `synthetic` or `synthetic:1000`
            (random samples; 100 minibatches of them by default), a kind and a path, or a function: see
            `pd_format.data`.
        inputs: of the model.
        classes: that the model tells apart; None where that is not known.
        minibatch_size: samples a minibatch.
        label_shape: of a sample's labels, which synthetic samples are given; empty where it has one.
        random_targets: makes those of a minibatch, for synthetic samples where `classes` is None.
        skip_corrupt: go on after an image file that cannot be read.

    Raises:
        UserError: there is no such data set, it needs something that is not installed, or does not fit the model.
    """
    kind, size, path = parse_data(name)
    if kind == "digits":
        assert size is not None
        return load_digits(size, name, inputs, classes)
    if kind == "function":
        return load_own(name)
    if kind == "text":
        assert path is not None
        return load_text(path, name, inputs, classes, label_shape)
    if kind == "msvd":
        assert path is not None
        return load_msvd(path, name, inputs, classes)
    if kind == "imagefolder":
        return load_imagefolder(name, inputs, classes, skip_corrupt)
    if kind in PACKED:
        return load_packed(name, inputs, classes)
    targets = None
    if classes is None:
        if random_targets is None:
            raise UserError(
                f"--data {name} draws labels from the model's classes, whose number is not known; name your own data."
            )
        targets = random_targets()
    samples = size or SYNTHETIC_MINIBATCHES * minibatch_size
    make = partial(SyntheticDataset, inputs, classes, label_shape=label_shape, targets=targets)
    return make(samples), make(math.ceil(samples / 10), first=samples)
