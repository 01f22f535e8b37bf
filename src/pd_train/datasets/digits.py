"""scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from pd_format.data import DIGITS_PIXELS
from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.profile import InputSpec

__all__ = ["load_digits"]


def load_digits(
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
    dtype = dtype_of(inputs[0])
    if not dtype.is_floating_point:
        raise UserError(
            f"The model takes {inputs[0].dtype}; --data {name} has floating-point pixels. Name data of that type."
        )
    if classes is not None and classes < 10:
        raise UserError(
            f"The model tells {classes} classes apart; --data {name} has 10. "
            "Give the model 10 outputs, for many with --model-arg num_classes=10 of pd-profile."
        )
    try:
        import sklearn.datasets
    except ImportError:
        raise UserError(f"--data {name} needs scikit-learn, which is not installed: pip install scikit-learn") from None
    values, classes_of = sklearn.datasets.load_digits(return_X_y=True)
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
