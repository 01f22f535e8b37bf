"""A folder of image files, a folder a class, in ImageNet's layout.

    PATH/train/CLASS/any name.jpg        at any depth below CLASS
    PATH/val/CLASS/any name.jpg          the same classes

Classes are numbered in the order of their names and samples in that of classes and paths, as torchvision's
`ImageFolder` does. Training sees a random crop of each image, resized, and flipped every other time; evaluation the
middle of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pd_format.data import images_of, parse_data
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.datasets.images import ImageInput, check_classes, image_input

__all__ = ["EXTENSIONS", "ImageFiles", "load_imagefolder"]

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of files that are images, in small or capital letters."""

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, black 0 and white 1, which models on it are trained with."""

_WHOLE_TO_MIDDLE = 256 / 224
"""Evaluation resizes the shorter side to so many times the model's size before it cuts the middle out."""


def load_imagefolder(
    name: str, inputs: Sequence[InputSpec], classes: int | None, skip_corrupt: bool
) -> tuple[ImageFiles, ImageFiles]:
    """The data sets of `PATH/train` and `PATH/val`, in the size that the model takes.

    Args:
        name: as `--data` gives it.
        inputs: of the model.
        classes: that it tells apart; None where that is not known.
        skip_corrupt: see `ImageFiles`.

    Raises:
        UserError: a folder is missing, empty or without images, the classes of the two differ, or the model takes
            something else.
    """
    parsed = parse_data(name)
    images = images_of(parsed)
    assert images is not None
    assert parsed.path is not None
    wanted = image_input(name, inputs, images)
    root = Path(parsed.path).expanduser()
    if not root.is_dir():
        raise UserError(f"--data {name}: there is no folder {root}; {_expected(root)}.")
    found = {part: _class_folders(name, root, part) for part in ("train", "val")}
    _check_same(name, found["train"], found["val"])
    check_classes(name, classes, len(found["train"]))
    training, evaluation = _transforms(wanted)
    return (
        ImageFiles(root / "train", _list_images(name, root / "train", found["train"]), training, skip_corrupt),
        ImageFiles(root / "val", _list_images(name, root / "val", found["val"]), evaluation, skip_corrupt),
    )


class ImageFiles(Dataset[Any]):
    """Image files, each read when it is asked for.

    A file that cannot be read as an image is an error, which names it; or, with `skip_corrupt`, the next good image of
    its class takes its place, with the augmentation of the sample that it replaces. So every sample has the same
    stand-in whoever reads it, and minibatches keep their sizes.

    Args:
        root: what the paths are relative to.
        paths: of each class, which they are in order of.
        transform: from a PIL image to a tensor; may draw from the host's generators.
        skip_corrupt: whether to go on after a file that is no image.
    """

    def __init__(
        self, root: Path, paths: Sequence[Sequence[str]], transform: Callable[[Any], Tensor], skip_corrupt: bool = False
    ) -> None:
        # In tensors, a million paths take no more than their letters, and processes that load share them.
        encoded = [os.fsencode(path) for one in paths for path in one]
        self._letters = torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8)
        self._ends = torch.tensor([len(path) for path in encoded], dtype=torch.int64).cumsum(0)
        self._class_ends = torch.tensor([len(one) for one in paths], dtype=torch.int64).cumsum(0)
        self._root = root
        self._transform = transform
        self._skip_corrupt = skip_corrupt
        self._skipped: list[str] = []

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        label = self.label(index)
        first = int(self._class_ends[label - 1]) if label else 0
        count = int(self._class_ends[label]) - first
        for step in range(count):
            path = self.path(first + (index - first + step) % count)
            try:
                image = _read_image(path)
            except _CorruptImageError as error:
                if not self._skip_corrupt:
                    raise UserError(
                        f"{path} cannot be read as an image ({error}). Mend or remove it, or go on without such files "
                        "with --skip-corrupt."
                    ) from None
                self._skipped.append(str(path))
            else:
                return self._transform(image), label
        raise UserError(f"None of the {count} files like {path} can be read as an image; the class needs one.")

    def path(self, index: int) -> Path:
        """Of a sample's file."""
        start = int(self._ends[index - 1]) if index else 0
        return self._root / os.fsdecode(self._letters[start : int(self._ends[index])].numpy().tobytes())

    def label(self, index: int) -> int:
        """Of a sample."""
        return int(torch.searchsorted(self._class_ends, index, right=True))

    def take_skipped(self) -> list[str]:
        """The files that another one stood in for since the last call."""
        skipped, self._skipped = self._skipped, []
        return skipped


class _CorruptImageError(Exception):
    """A file is there, and is no image."""


def _read_image(path: Path) -> Any:
    """A PIL image in RGB.

    Raises:
        UserError: the file cannot be read at all.
        _CorruptImageError: what it holds is no image, or not all of one.
    """
    from PIL import Image

    try:
        with path.open("rb") as file:
            return Image.open(file).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # What decoders raise is anything.
        if isinstance(error, OSError) and error.errno is not None:
            # The disk's fault, which another machine need not have: no other file may take its place.
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        text = str(error).replace(str(path), "the file").splitlines()
        if type(error).__name__ == "UnidentifiedImageError":
            text = ["no image format that is known" if path.stat().st_size else "the file is empty"]
        raise _CorruptImageError(text[0] if text else type(error).__name__) from None


def _transforms(wanted: ImageInput) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """The usual ones for training and for evaluation; torchvision is imported only here."""
    from torchvision import transforms

    side = wanted.pixels
    finish = [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    if wanted.dtype != torch.float32:
        finish.append(transforms.ConvertImageDtype(wanted.dtype))
    return (
        transforms.Compose([transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), *finish]),
        transforms.Compose(
            [transforms.Resize(round(side * _WHOLE_TO_MIDDLE)), transforms.CenterCrop(side), *finish],
        ),
    )


def _expected(root: Path) -> str:
    return f"expected {root / 'train'}/CLASS/*.jpg to train on and {root / 'val'}/CLASS/*.jpg for validation"


def _class_folders(name: str, root: Path, part: str) -> list[str]:
    """The classes of `train` or `val`, in order."""
    folder = root / part
    if not folder.is_dir():
        above = f" Name the folder that holds it: imagefolder:{root.parent}" if root.name in ("train", "val") else ""
        raise UserError(f"--data {name}: there is no folder {folder}; {_expected(root)}.{above}")
    classes, images = [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                classes.append(entry.name)
            images += _is_image(entry.name)
    if not classes:
        if images:
            raise UserError(
                f"--data {name}: {folder} holds {images} images and no folders; sort them into one folder a class, "
                "named as the class."
            )
        raise UserError(f"--data {name}: {folder} is empty; {_expected(root)}.")
    return sorted(classes)


def _check_same(name: str, train: Sequence[str], val: Sequence[str]) -> None:
    differences = [
        f"only {part} has {_some(sorted(set(one) - set(other)))}"
        for part, one, other in (("train", train, val), ("val", val, train))
        if set(one) - set(other)
    ]
    if differences:
        raise UserError(
            f"--data {name}: the class folders of train and val differ: {'; '.join(differences)}. "
            "Labels are numbered by these names, so both must have the same."
        )


def _list_images(name: str, folder: Path, classes: Sequence[str]) -> list[list[str]]:
    """The paths of each class's images, relative to the folder and in order."""
    found, empty = [], []
    for one in classes:
        paths = []
        for place, _, files in sorted(os.walk(folder / one, followlinks=True)):
            below = os.path.relpath(place, folder)
            paths += [os.path.join(below, file) for file in sorted(files) if _is_image(file)]
        found.append(paths)
        if not paths:
            empty.append(one)
    if empty:
        raise UserError(
            f"--data {name}: {folder} has no images of {_some(empty)}; expected files that end in "
            f"{', '.join(EXTENSIONS)} in each class folder. Add some, or remove the folder from train and val."
        )
    return found


def _is_image(file: str) -> bool:
    return file.lower().endswith(EXTENSIONS)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
