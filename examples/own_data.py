"""Your own data: a function without arguments that returns the train and the validation data set.

    pd-train --plan plan.json --data examples/own_data.py:noisy_digits

Any map-style `torch.utils.data.Dataset` will do, one with `__len__` and `__getitem__`; a sample is (input, label).
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, TensorDataset

__all__ = ["noisy_digits"]


class Noisy(Dataset):
    """Adds fresh noise to an image each time it is read; pd-train seeds torch's generator for each sample."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.dataset[index]
        return image + 0.1 * torch.randn_like(image), label


def noisy_digits() -> tuple[Dataset, Dataset]:
    """Handwritten digits of 8x8 pixels, the first 1500 for training."""
    values, classes = load_digits(return_X_y=True)
    images = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(classes)
    return Noisy(TensorDataset(images[:1500], labels[:1500])), TensorDataset(images[1500:], labels[1500:])
