"""Whether a model takes the images of a data set, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pd_format.data import Images
from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.profile import InputSpec

__all__ = ["ImageInput", "check_classes", "image_input"]


class ImageInput(NamedTuple):
    """What a sample has to be brought to: (channels, pixels, pixels), or so many numbers where `flat`."""

    channels: int
    pixels: int
    flat: bool
    dtype: torch.dtype


def image_input(name: str, inputs: Sequence[InputSpec], images: Images) -> ImageInput:
    """What the model takes, where the images can be brought to that.

    Args:
        name: of the data set, as `--data` gives it.
        inputs: of the model.
        images: that the data set holds.

    Raises:
        UserError: the model takes something else, with what would fit.
    """
    shape = tuple(inputs[0].shape[1:])
    flat = images.channels == 1 and images.pixels is not None and shape == (images.pixels**2,)
    square = len(shape) == 3 and shape[1] == shape[2] and (images.channels == 1 or shape[0] == 3)
    if len(inputs) != 1 or not (flat or square):
        found = " and ".join("x".join(map(str, spec.shape[1:])) or "one number" for spec in inputs)
        kind, channels = ("grey", "1") if images.channels == 1 else ("colour", "3")
        repeated = ", repeated for as many channels as the model takes" if images.channels == 1 else ""
        size = f"{channels}x{images.pixels}x{images.pixels}" if images.pixels else f"{channels}x224x224"
        raise UserError(
            f"The model takes samples of {found}; --data {name} has {kind} images of {size}, resized to any other "
            f"square{repeated}. Profile the model with this --data, or with --input-shape "
            f"{size.replace('x', ',')}."
        )
    dtype = dtype_of(inputs[0])
    if not dtype.is_floating_point:
        raise UserError(
            f"The model takes {inputs[0].dtype}; --data {name} has floating-point pixels. Name data of that type."
        )
    if flat:
        assert images.pixels is not None
        return ImageInput(1, images.pixels, True, dtype)
    return ImageInput(shape[0], shape[1], False, dtype)


def check_classes(name: str, classes: int | None, found: int) -> None:
    """Refuse a model that tells fewer classes apart than the data set has.

    Raises:
        UserError: with both numbers.
    """
    if classes is not None and classes < found:
        raise UserError(
            f"The model tells {classes} classes apart; --data {name} has {found}. "
            f"Give the model {found} outputs, for many with --model-arg num_classes={found} of pd-profile."
        )
