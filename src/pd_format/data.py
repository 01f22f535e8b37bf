"""How the command lines, the profile and the plan name a data set (the `data` field; design, section 1)."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from pd_format.errors import UserError

__all__ = ["DATA_HELP", "DIGITS_PIXELS", "DataName", "Images", "images_of", "parse_data"]

DIGITS_PIXELS = 8
"""The side length of scikit-learn's digits as they are."""


PathKind = Literal["imagefolder", "cifar10", "cifar100", "mnist", "fashion-mnist", "text", "msvd"]
"""Data sets on disk, named with their folder (`text`: their file)."""

DATA_HELP = (
    "synthetic, synthetic:SAMPLES, digits, digits:SIZE, imagefolder:FOLDER, cifar10:FOLDER, cifar100:FOLDER, "
    "mnist:FOLDER, fashion-mnist:FOLDER, text:FILE, msvd:FOLDER, or a function (path/file.py:function or "
    "package.module:function) that returns a training and a validation Dataset"
)


class DataName(NamedTuple):
    """What the name of a data set says."""

    kind: Literal["digits", "synthetic", "function"] | PathKind
    size: int | None = None
    """The side length of digits in pixels; the number of synthetic samples, None where it is left open."""
    path: str | None = None
    """Of a data set on disk."""


def parse_data(text: str) -> DataName:
    """Read a name such as `digits`, `synthetic:1000`, `cifar10:PATH` or `path/file.py:function`.

    Raises:
        UserError: it is none that `DATA_HELP` lists.
    """
    kind, colon, rest = text.partition(":")
    whole = rest.isascii() and rest.isdigit() and int(rest) > 0
    if kind == "digits" and (whole or not colon):
        return DataName("digits", int(rest) if colon else DIGITS_PIXELS)
    if kind == "synthetic" and (whole or not colon):
        return DataName("synthetic", int(rest) if colon else None)
    if kind in get_args(PathKind):
        if not rest:
            what = "file" if kind == "text" else "folder"
            raise UserError(f"Data set {text!r} does not say where it is; expected {kind}:{what.upper()}.")
        return DataName(cast(PathKind, kind), path=rest)
    place, _, function = text.rpartition(":")
    if kind not in ("digits", "synthetic") and place and function.isidentifier():
        return DataName("function")
    raise UserError(f"Data set {text!r} is unknown; expected {DATA_HELP}.")


class Images(NamedTuple):
    """The square images of a data set, as a profile is made for them and training loads them."""

    channels: Literal[1, 3]
    """1 is grey, which is repeated for as many channels as the model takes; 3 is colour, which is not converted."""
    pixels: int | None
    """The side length that they have by themselves; None where each has its own."""
    resized: bool
    """Loaded in whatever size the model was profiled with."""


def images_of(name: DataName) -> Images | None:
    """What images a data set holds; None where its name does not tell, or it holds others."""
    if name.kind == "digits":
        return Images(1, name.size, resized=False)
    return _IMAGES.get(name.kind)


_IMAGES = {
    "mnist": Images(1, 28, resized=True),
    "fashion-mnist": Images(1, 28, resized=True),
    "cifar10": Images(3, 32, resized=True),
    "cifar100": Images(3, 32, resized=True),
    "imagefolder": Images(3, None, resized=True),
}
