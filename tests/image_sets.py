"""Small data sets on disk in their real formats: image files, CIFAR's pickles, MNIST's IDX files.

Not a test module: tests import it as `image_sets`.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy
from PIL import Image

__all__ = ["CLASSES", "write_cifar", "write_image", "write_imagefolder", "write_mnist"]

CLASSES = ("ant", "bee", "cat")


def write_image(path: Path, number: int, size: tuple[int, int] = (40, 30)) -> None:
    """An image of noise that depends on the number, in the format that the path names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)


def write_imagefolder(root: Path, train: int = 6, val: int = 2) -> Path:
    """So many images of each class, of several formats and sizes, some in a folder below that of the class."""
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                place = Path(part, name, *(["more"] if i == 1 else []), f"{i:02}{('.jpg', '.JPEG', '.png')[i % 3]}")
                write_image(root / place, 1000 * label + i + 500 * (part == "val"), (40 + 3 * i, 30 + 5 * label))
    return root


def write_cifar(root: Path, classes: int = 10, train: int = 40, test: int = 10) -> Path:
    """CIFAR-10 or, with 100 classes, CIFAR-100, of random images."""
    draw = numpy.random.default_rng(5)
    key = "labels" if classes == 10 else "fine_labels"

    def write(file: str, count: int) -> None:
        pixels = draw.integers(0, 256, (count, 3072), dtype=numpy.uint8)
        labels = [int(label) for label in draw.integers(0, classes, count)]
        (folder / file).write_bytes(pickle.dumps({"data": pixels, key: labels}))

    names = [f"class {label}" for label in range(classes)]
    if classes == 10:
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for number in range(1, 6):
            write(f"data_batch_{number}", train // 5)
        write("test_batch", test)
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    else:
        folder = root / "cifar-100-python"
        folder.mkdir(parents=True)
        write("train", train)
        write("test", test)
        (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    return root


def write_mnist(root: Path, folder: str = "MNIST", train: int = 20, test: int = 6) -> Path:
    """MNIST or, with its folder's name, Fashion-MNIST, of random images."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    draw = numpy.random.default_rng(6)
    for part, count in (("train", train), ("t10k", test)):
        pixels = draw.integers(0, 256, (count, 28, 28), dtype=numpy.uint8)
        labels = draw.integers(0, 10, count, dtype=numpy.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, *pixels.shape) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())
    return root
