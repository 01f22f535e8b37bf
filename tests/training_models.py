"""Small models and data sets that worker processes build by file name."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 4


def bn_dropout() -> nn.Module:
    """A chain with BatchNorm, in-place ReLU and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(48, CLASSES),
    )


class Skip(nn.Module):
    """A value made by the first layer is used again by the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(36, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 24)
        self.d = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.flatten(1))
        k = self.c(torch.tanh(self.b(torch.tanh(h))))
        return self.d(k + h)


class Stream(nn.Module):
    """A stream of float32, to which layers add what autocast computes; `cross` stands where a cut may be."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(36, 36)
        self.b = nn.Linear(36, 36)
        self.c = nn.Linear(36, 36)
        self.d = nn.Linear(36, CLASSES)
        self.cross: Callable[..., tuple[Tensor, ...]] = _as_they_are

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(1)
        (h,) = self.cross(h + self.a(h))
        k, h = self.cross(self.b(h), h)
        return self.d((h + self.c(torch.tanh(k))) * 3)


def _as_they_are(*values: Tensor) -> tuple[Tensor, ...]:
    return values


def stream() -> nn.Module:
    return Stream()


def skip() -> nn.Module:
    return Skip()


def _samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 1, 6, 6, generator=generator) + labels[:, None, None, None]
    return TensorDataset(images, labels)


def samples_26() -> tuple[TensorDataset, TensorDataset]:
    """At minibatch 4: seven minibatches, which neither 2 nor 3 nor 4 replicas divide, the last of 2 samples."""
    return _samples(26, 1), _samples(9, 2)


def samples_3() -> tuple[TensorDataset, TensorDataset]:
    """At minibatch 4: one minibatch in all."""
    return _samples(3, 1), _samples(3, 2)


def samples_8() -> tuple[TensorDataset, TensorDataset]:
    """At minibatch 4: two minibatches."""
    return _samples(8, 1), _samples(5, 2)


class BrokenDataset(torch.utils.data.Dataset):
    """Fails when a sample is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 6, 6), 1 // 0


def broken_samples() -> tuple[BrokenDataset, TensorDataset]:
    return BrokenDataset(), _samples(4, 2)


def colour(classes: int = 3) -> nn.Module:
    """For small images of three channels."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes)
    )  # fmt: skip


class Drawn(torch.utils.data.Dataset):
    """Each sample draws noise from all three generators of the host; sample 5 can be made to fail."""

    def __init__(self, samples: int, failure: Exception | None = None) -> None:
        self.samples = samples
        self.failure = failure

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.failure is not None and index == 5:
            raise self.failure
        noise = torch.randn(1, 6, 6) + random.random() + float(numpy.random.rand())
        return noise + index % CLASSES, index % CLASSES


def drawn() -> tuple[Drawn, Drawn]:
    return Drawn(26), Drawn(9)


def drawn_for_long() -> tuple[Drawn, Drawn]:
    return Drawn(100_000), Drawn(9)


def wide() -> nn.Module:
    """A minibatch of 256 is 512 KiB at each cut, and the second half has more than 256 KiB of parameters a bucket."""
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64), nn.Linear(64, CLASSES)
    )


def few_wide_samples() -> tuple[TensorDataset, TensorDataset]:
    """Twenty minibatches of 256."""
    generator = torch.Generator().manual_seed(5)
    samples, labels = torch.randn(5120, 64, generator=generator), torch.arange(5120) % CLASSES
    return TensorDataset(samples, labels), TensorDataset(samples[:256], labels[:256])
