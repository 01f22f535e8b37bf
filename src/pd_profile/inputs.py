"""The model's inputs: which shapes they have where the user did not say, and random values for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pd_format.data import Images
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_profile.options import InputShape

__all__ = ["choose_inputs", "random_inputs"]

#: Of most image models, and of torchvision's that were designed for others.
_USUAL_PIXELS = 224
_TORCHVISION_PIXELS = {"inception_v3": 299}


def choose_inputs(
    model: nn.Module,
    minibatch_size: int,
    given: Sequence[InputShape],
    *,
    data: str,
    images: Images | None,
    torchvision_name: str | None,
) -> tuple[InputSpec, ...]:
    """Decide on the inputs, in the order in which the model's forward takes them.

    In this order: what the user gave; what the model says itself (`sample_inputs`: the shape of a sample and its dtype
    for each input); the samples of the data set; torchvision's usual images; the width of a
    model whose first layer is linear.

    Args:
        given: the `--input-shape` options.
        data, images: the data set and what images it holds, None where it says nothing of shapes.
        torchvision_name: the model's name there, None for other models.

    Raises:
        UserError: the shape is not known, or what was given fits neither the forward nor the data.
    """
    arguments, required = _arguments(model)
    own: dict[str, tuple[tuple[int, ...], str]] | None = getattr(model, "sample_inputs", None)
    if given:
        if images is not None:
            _check_given(model, given[0].shape, data, images)
        named = _in_order(given, arguments, required)
    elif own is not None:
        named = [(name, InputShape(name, shape, dtype)) for name, (shape, dtype) in own.items()]
    else:
        shape = _known_shape(model, required, data, images, torchvision_name)
        named = [(arguments[0], InputShape(None, shape, "float32"))]
    return tuple(InputSpec(name=name, shape=(minibatch_size, *one.shape), dtype=one.dtype) for name, one in named)


def random_inputs(
    specs: Sequence[InputSpec], model: nn.Module, generator: torch.Generator, device: torch.device
) -> list[Tensor]:
    """Values for the inputs: normal for floating point; whole numbers that the model's smallest embedding knows.

    A model without an embedding gets whole numbers 0 and 1, as a flag or the index of one of two would be.
    """
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    values = []
    for spec in specs:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            value = torch.randn(spec.shape, generator=generator).to(dtype)
        else:
            bound = 2 if dtype == torch.bool else min([*sizes, torch.iinfo(dtype).max] if sizes else [2])
            value = torch.randint(bound, spec.shape, generator=generator).to(dtype)
        values.append(value.to(device))
    return values


def _arguments(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of what forward takes by position, and those of them that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [one for one in inspect.signature(model.forward).parameters.values() if one.kind in kinds]
    names = [one.name for one in parameters]
    # `nn.Sequential` calls it "input"; a forward of `*inputs` has no name to offer.
    return names or ["input"], [one.name for one in parameters if one.default is inspect.Parameter.empty]


def _in_order(
    given: Sequence[InputShape], arguments: Sequence[str], required: Sequence[str]
) -> list[tuple[str, InputShape]]:
    """Match shapes to arguments: by name where there is one, the others to those left over, from the left."""
    takes = f"the model's forward takes {', '.join(arguments)}"
    found: dict[str, InputShape] = {}
    for one in given:
        if one.name is None:
            continue
        if one.name not in arguments:
            raise UserError(f"--input-shape names {one.name!r}, but {takes}; use one of these names.")
        if one.name in found:
            raise UserError(f"--input-shape gives {one.name!r} twice; keep one of them.")
        found[one.name] = one
    free = [name for name in arguments if name not in found]
    for one in given:
        if one.name is None:
            if not free:
                raise UserError(f"--input-shape is given {len(given)} times, but {takes}; leave out the rest.")
            found[free.pop(0)] = one
    used = arguments[: len(found)]
    missing = [name for name in (*required, *used) if name not in found]
    if missing:
        raise UserError(
            f"The input {missing[0]!r} has no shape; {takes}. "
            f"Say it too, as in --input-shape {missing[0]}=3,32,32 or --input-shape {missing[0]}=128:int64."
        )
    return [(name, found[name]) for name in used]


def _known_shape(
    model: nn.Module, required: Sequence[str], data: str, images: Images | None, torchvision_name: str | None
) -> tuple[int, ...]:
    if len(required) > 1:
        example = " ".join(f"--input-shape {name}=16" for name in required)
        raise UserError(
            f"The model takes {len(required)} inputs ({', '.join(required)}) and their shapes are not known; "
            f"say them, without the batch, as in {example} (add :int64 for whole numbers)."
        )
    usual = _TORCHVISION_PIXELS.get(torchvision_name or "", _USUAL_PIXELS)
    if images is not None:
        pixels = images.pixels or usual
        return (_channels(model, data, images), pixels, pixels)
    if torchvision_name is not None:
        return (3, usual, usual)
    with_parameters = (module for module in model.modules() if list(module.parameters(recurse=False)))
    first = next(with_parameters, None)
    if isinstance(first, nn.Linear):
        return (first.in_features,)
    if isinstance(first, nn.Conv2d):
        raise UserError(
            f"The model starts with a convolution of {first.in_channels} channels and takes images of any size; "
            f"say which, as in --input-shape {first.in_channels},32,32."
        )
    if isinstance(first, nn.Embedding):
        raise UserError(
            "The model starts with an embedding and takes sequences of any length; "
            "say which, as in --input-shape 128:int64."
        )
    start = f"starts with {type(first).__name__}" if first is not None else "has no parameters"
    raise UserError(
        f"The model {start}, which does not tell the shape of a sample; "
        "say it, without the batch, as in --input-shape 3,32,32."
    )


def _channels(model: nn.Module, data: str, images: Images) -> int:
    """Of the model's first convolution, where the data set's images can have as many; their own without one."""
    wanted = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), images.channels)
    if images.channels == 3 != wanted:
        raise UserError(
            f"The model's first convolution takes {wanted} channels, but the images of --data {data} have 3; "
            "give the model a first layer for 3 channels."
        )
    return wanted


def _check_given(model: nn.Module, shape: tuple[int, ...], data: str, images: Images) -> None:
    """Refuse a shape that the data set's images cannot be brought to."""
    channels = _channels(model, data, images)
    side = shape[-1] if images.resized and shape else images.pixels
    fits = shape == (channels, side, side) or (images.pixels and images.channels == 1 and shape == (images.pixels**2,))
    if not fits:
        expected = f"{channels},{images.pixels},{images.pixels}" if images.pixels else f"{channels},224,224"
        other = ", or squares of another size" if images.resized else ""
        raise UserError(
            f"--input-shape says {','.join(map(str, shape)) or 'one number'}, but the samples of "
            f"--data {data} are {expected}{other}; leave one of the two options out."
        )
