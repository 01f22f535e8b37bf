"""Models and data sets that worker processes build by file name: what is awkward for a runtime."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pd_format.errors import UserError

CLASSES = 4


def perceptron(frozen: str = "", dtype: str = "float32", classes: int = CLASSES) -> nn.Module:
    """16 numbers in; `frozen` names the modules that do not train, `all but the last bias` what it says."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, classes))
    for name, parameter in model.named_parameters():
        if frozen == "all but the last bias":
            parameter.requires_grad_(name == "4.bias")
        elif name.rpartition(".")[0] in frozen.split():
            parameter.requires_grad_(False)
    return model.to(getattr(torch, dtype))


class Sum(nn.Module):
    """Takes what `Odd` returns."""

    def forward(self, values: tuple[Tensor, None, int, bool, tuple[Tensor, Tensor]]) -> Tensor:
        h, nothing, three, yes, (a, b) = values
        assert nothing is None
        assert yes is True
        assert type(three) is int
        return h * three + a + b


class Odd(nn.Module):
    """Returns more than tensors, and branches on data, so that it stays whole."""

    def forward(self, h: Tensor) -> tuple[Tensor, None, int, bool, tuple[Tensor, Tensor]]:
        h = torch.tanh(h) if h.sum() > 0 else torch.sigmoid(h)
        return h, None, 3, True, (h * 2, h.detach())


class OddValues(nn.Module):
    """None, a number, a truth value and a nested tuple between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.odd, self.sum, self.c = nn.Linear(16, 16), Odd(), Sum(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.sum(self.odd(self.a(x))))


def odd_values() -> nn.Module:
    return OddValues()


class LateMask(nn.Module):
    """The second input is used by the last layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))) * mask)


def late_mask() -> nn.Module:
    return LateMask()


class Words(nn.Module):
    """Sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.m, self.o = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.o(torch.tanh(self.m(self.e(ids))).mean(1))


def words() -> nn.Module:
    return Words()


class TiedWords(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.m, self.o = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.o.weight = self.e.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.o(torch.tanh(self.m(self.e(ids))).mean(1))


def tied_words() -> nn.Module:
    return TiedWords()


class Tuned(nn.Module):
    """A frozen body with BatchNorm, which `train()` leaves in evaluation mode if it is kept, and a head that trains."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
        self.mid, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.kept = kept
        self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self.kept:
            self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mid(self.body(x))))


def tuned(kept: bool) -> nn.Module:
    return Tuned(kept)


def numbers(samples: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset((torch.randn(samples, 16, generator=generator) + labels[:, None]).to(dtype), labels)


def numbers_17() -> tuple[Dataset, Dataset]:
    return numbers(17), numbers(11, 2)


def numbers_40() -> tuple[Dataset, Dataset]:
    return numbers(40), numbers(8, 2)


def numbers_3() -> tuple[Dataset, Dataset]:
    return numbers(3), numbers(1, 2)


def numbers_1() -> tuple[Dataset, Dataset]:
    return numbers(1), numbers(1, 2)


def numbers_0() -> tuple[Dataset, Dataset]:
    return numbers(0), numbers(8, 2)


def no_validation() -> tuple[Dataset, Dataset]:
    return numbers(8), numbers(0)


def bfloats() -> tuple[Dataset, Dataset]:
    return numbers(18, 1, torch.bfloat16), numbers(5, 2, torch.bfloat16)


def halves() -> tuple[Dataset, Dataset]:
    return numbers(18, 1, torch.float16), numbers(5, 2, torch.float16)


def with_choice(samples: int, seed: int = 1) -> TensorDataset:
    """A second input of 0 or 1; the first expert is chosen for half of the minibatches only."""
    x, labels = numbers(samples, seed).tensors
    return TensorDataset(x, (torch.arange(samples) // 2) % 2, labels)


def choices() -> tuple[Dataset, Dataset]:
    return with_choice(26), with_choice(9, 2)


def with_mask(samples: int, seed: int = 1) -> TensorDataset:
    x, labels = numbers(samples, seed).tensors
    return TensorDataset(x, (x > 0).float(), labels)


def masks() -> tuple[Dataset, Dataset]:
    return with_mask(18), with_mask(5, 2)


class AsDict(Dataset):
    """The samples of another data set as a dict, the label first."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, object]:
        x, which, label = self._dataset[index]
        return {"label": label, "idx": which, "x": x}


def dicts() -> tuple[Dataset, Dataset]:
    return AsDict(with_choice(18)), AsDict(with_choice(5, 2))


class Sequences(Dataset):
    """Sequences of 10, 7, 13 and 1 words in turn; those of one minibatch are filled up to its longest."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.ids = [torch.randint(1, 50, ((10, 7, 13, 1)[i % 4],), generator=generator) for i in range(samples)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.ids[index][0] % CLASSES

    def rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Many samples, stacked."""
        samples = [self[index] for index in indices.tolist()]
        ids = nn.utils.rnn.pad_sequence([each for each, _ in samples], batch_first=True)
        return ids, torch.stack([label for _, label in samples])


def sequences() -> tuple[Dataset, Dataset]:
    return Sequences(14), Sequences(5)


class Judged(TensorDataset):
    """Judges the predictions for its samples itself: the share of those that are right."""

    def check_metric(self, name: str) -> None:
        if name != "meteor":
            raise UserError(f"there is no {name} here")

    def metric(self, name: str, predictions: Sequence[Tensor]) -> float:
        labels = self.tensors[1].tolist()
        return sum(int(one) == label for one, label in zip(predictions, labels, strict=True)) / len(labels)


def judged() -> tuple[Dataset, Dataset]:
    """At minibatch 4 the validation has three minibatches, the last one of 3 samples."""
    return numbers(40), Judged(*numbers(11, 2).tensors)


class Noting(Dataset):
    """Writes the index of each sample that is read into a file of the working directory, one a process."""

    def __init__(self, samples: int) -> None:
        self._dataset = numbers(samples)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Path(f"seen-{os.getpid()}.txt").open("a") as file:
            print(index, file=file)
        return self._dataset[index]


def noting() -> tuple[Dataset, Dataset]:
    return Noting(50), numbers(4, 2)


class _Stuck(Dataset[tuple[Tensor, Tensor]]):
    """Samples of which one is never read to its end."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        _get_stuck()
        raise AssertionError


def _get_stuck() -> None:
    with open(os.environ["STUCK"], "w") as fifo:
        fifo.write("here")
    threading.Event().wait()


def stuck_at_the_start() -> tuple[TensorDataset, TensorDataset]:
    """Says so in the FIFO `STUCK`, and never returns."""
    _get_stuck()
    raise AssertionError


def stuck_in_validation() -> tuple[TensorDataset, _Stuck]:
    return numbers_40()[0], _Stuck()
