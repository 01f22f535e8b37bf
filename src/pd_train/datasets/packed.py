"""Data sets that come as a few files of many small images: CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST.

torchvision reads the files; the images stay in memory as bytes. What a sample is, is what torchvision's transforms
would make of it: CIFAR is trained on after a random crop of the image with 4 black pixels around it and a random flip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset

from pd_format.data import images_of, parse_data
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.datasets.images import ImageInput, check_classes, image_input

__all__ = ["PACKED", "load_packed"]

_PADDING = 4
"""Pixels around a CIFAR image that a random crop is taken from."""


class _Kind(NamedTuple):
    title: str
    folder: str
    """Where torchvision looks for the files, below the folder that the user names."""
    files: tuple[str, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the training pixels, black 0 and white 1, a figure a channel."""
    augmented: bool


_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")

PACKED = {
    "cifar10": _Kind(
        "CIFAR-10 (python version)",
        "cifar-10-batches-py",
        _CIFAR10_FILES,
        10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        True,
    ),
    "cifar100": _Kind(
        "CIFAR-100 (python version)",
        "cifar-100-python",
        ("train", "test", "meta"),
        100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        True,
    ),
    "mnist": _Kind("MNIST", "MNIST/raw", _IDX_FILES, 10, (0.1307,), (0.3081,), False),
    "fashion-mnist": _Kind("Fashion-MNIST", "FashionMNIST/raw", _IDX_FILES, 10, (0.2860,), (0.3530,), False),
}


class PlainImages(Dataset[Any]):
    """Images in memory as they are; many are made into samples at once.

    Args:
        pixels: uint8 (samples, channels, side, side).
        labels: int64 (samples,).
        mean, std: of a channel.
        wanted: what a sample is brought to.
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor, mean: Sequence[float], std: Sequence[float], wanted: ImageInput
    ) -> None:
        self._pixels = pixels
        self._labels = labels
        self._mean = torch.tensor(mean).reshape(1, -1, 1, 1)
        self._std = torch.tensor(std).reshape(1, -1, 1, 1)
        self._wanted = wanted

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.rows(torch.tensor([index]))
        return images[0], labels[0]

    def rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Many samples, stacked."""
        return self._finish(self._pixels[indices]), self._labels[indices]

    def _finish(self, pixels: Tensor) -> Tensor:
        """From bytes to what the model takes."""
        images = pixels.to(torch.float32).div(255)
        side = self._wanted.pixels
        if side != images.shape[-1]:
            images = interpolate(
                images, (side, side), mode="bilinear", align_corners=False, antialias=side < images.shape[-1]
            )
        images = images.sub(self._mean).div(self._std).to(self._wanted.dtype)
        if self._wanted.flat:
            return images.flatten(1)
        return images.expand(-1, self._wanted.channels, -1, -1)


class AugmentedImages(Dataset[Any]):
    """Samples of a `PlainImages`, each after a crop and a flip drawn from torch's generator.

    They draw what torchvision's `RandomCrop(side, padding=4)` and `RandomHorizontalFlip` would.
    """

    def __init__(self, plain: PlainImages) -> None:
        self._plain = plain

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = self._plain._pixels[index]
        side = pixels.shape[-1]
        top = int(torch.randint(0, 2 * _PADDING + 1, (1,)))
        left = int(torch.randint(0, 2 * _PADDING + 1, (1,)))
        pixels = pad(pixels, [_PADDING] * 4)[:, top : top + side, left : left + side]
        if torch.rand(1) < 0.5:
            pixels = pixels.flip(-1)
        return self._plain._finish(pixels[None])[0], self._plain._labels[index]


def load_packed(name: str, inputs: Sequence[InputSpec], classes: int | None) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training and the test images of one of `PACKED`, in the size and with the channels that the model takes.

    Args:
        name: as `--data` gives it.
        inputs: of the model.
        classes: that it tells apart; None where that is not known.

    Raises:
        UserError: a file is missing or damaged, or the model takes something else.
    """
    parsed = parse_data(name)
    images = images_of(parsed)
    assert images is not None
    assert parsed.path is not None
    kind = PACKED[parsed.kind]
    wanted = image_input(name, inputs, images)
    check_classes(name, classes, kind.classes)
    path = Path(parsed.path).expanduser()
    _check_files(name, path, kind)
    read = _readers()[parsed.kind]
    try:
        train, validation = (
            PlainImages(*_tensors(read(path, training)), kind.mean, kind.std, wanted) for training in (True, False)
        )
    except Exception as error:  # torchvision trusts the files: what a damaged one raises is anything.
        raise UserError(
            f"--data {name}: the files in {path / kind.folder} cannot be read as those of {kind.title} "
            f"({type(error).__name__}: {error}). Fetch them again."
        ) from error
    return AugmentedImages(train) if kind.augmented else train, validation


def _readers() -> dict[str, Callable[[Path, bool], Any]]:
    """torchvision's data sets, which is imported only here."""
    from torchvision.datasets import CIFAR10, CIFAR100, MNIST, FashionMNIST

    class Cifar10(CIFAR10):  # type: ignore[misc]
        """Whatever files of the format lie there, not only the ones whose digests torchvision knows."""

        train_list = [[file, None] for file, _ in CIFAR10.train_list]  # noqa: RUF012
        test_list = [[file, None] for file, _ in CIFAR10.test_list]  # noqa: RUF012
        meta = {**CIFAR10.meta, "md5": None}  # noqa: RUF012

    class Cifar100(CIFAR100):  # type: ignore[misc]
        train_list = [[file, None] for file, _ in CIFAR100.train_list]  # noqa: RUF012
        test_list = [[file, None] for file, _ in CIFAR100.test_list]  # noqa: RUF012
        meta = {**CIFAR100.meta, "md5": None}  # noqa: RUF012

    sets = {"cifar10": Cifar10, "cifar100": Cifar100, "mnist": MNIST, "fashion-mnist": FashionMNIST}

    def reader(kind: str) -> Callable[[Path, bool], Any]:
        return lambda path, training: sets[kind](path, train=training, download=False)

    return {kind: reader(kind) for kind in sets}


def _tensors(dataset: Any) -> tuple[Tensor, Tensor]:
    """Pixels (samples, channels, side, side) and labels of one of torchvision's data sets."""
    pixels, labels = torch.as_tensor(dataset.data), torch.as_tensor(dataset.targets, dtype=torch.int64)
    # CIFAR has its channels last, MNIST has none.
    pixels = pixels.permute(0, 3, 1, 2).contiguous() if pixels.dim() == 4 else pixels[:, None]
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels of {pixels.dtype}")
    return pixels, labels


def _check_files(name: str, path: Path, kind: _Kind) -> None:
    folder = path / kind.folder
    missing = [file for file in kind.files if not (folder / file).is_file()]
    if not missing:
        return
    parent = Path(*path.parts[: len(path.parts) - len(Path(kind.folder).parts)])
    hint = ""
    if (path / missing[0]).is_file() and parent / kind.folder == path:
        hint = f" Name the folder that holds {kind.folder}: {name.partition(':')[0]}:{parent}"
    elif (folder / f"{missing[0]}.gz").is_file():
        hint = f" It is there packed: gunzip {folder / missing[0]}.gz"
    elif not path.is_dir():
        hint = f" There is no folder {path}."
    raise UserError(
        f"--data {name}: there is no file {folder / missing[0]}; expected {kind.title} as torchvision keeps it, in "
        f"{folder}: {', '.join(kind.files)}.{hint}"
    )
