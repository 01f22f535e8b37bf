"""A model, a loss, data and weights of your own: the complete example of docs/your-own-model.md.

A shop wants to foresee a product's rating and whether it will be returned, from 16 measurements and a category.

    python examples/own_model.py     # trains the body in plain PyTorch and writes weights.pt
    pd-profile examples/own_model.py:shop_model --loss examples/own_model.py:shop_loss \
        --data examples/own_model.py:shop_data --input-shape x=16 --input-shape category=:int64 --minibatches 100
    pd-plan --config 1-1-1 --bandwidth 1gbps
    pd-train --plan plan.json --init-from weights.pt --optimizer adam --epochs 10 --run-dir runs/shop
    pd-train --plan plan.json --init-from runs/shop/model.pt --evaluate-only
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

__all__ = ["shop_data", "shop_loss", "shop_model"]

MEASUREMENTS, CATEGORIES = 16, 8


class Standardise(nn.Module):
    """Buffers are part of the state dict; they are not trained."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(MEASUREMENTS))
        self.register_buffer("std", torch.ones(MEASUREMENTS))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Gate(nn.Module):
    """Branches on the data, so it stays one layer; what it returns crosses a cut as it is, None and bool included."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.shift = nn.Linear(hidden, hidden)

    def forward(self, h: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, bool, tuple[Tensor, Tensor]]:
        bright = bool(h.mean() > 0)
        if mask is not None:
            h = h * mask
        return h, self.shift(h) if bright else None, bright, (h.mean(1), h.amax(1))


class Merge(nn.Module):
    """Takes what the gate returns."""

    def forward(self, gated: tuple[Tensor, Tensor | None, bool, tuple[Tensor, Tensor]]) -> Tensor:
        h, shift, bright, (mean, most) = gated
        if bright:
            assert shift is not None
            h = h + shift
        return torch.cat([h, mean[:, None], most[:, None]], dim=1)


class ShopModel(nn.Module):
    """Two inputs and an optional one, a frozen body, two heads."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.standardise = Standardise()
        self.body = nn.Sequential(
            nn.Linear(MEASUREMENTS, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.category = nn.Embedding(CATEGORIES, hidden)
        self.gate, self.merge = Gate(hidden), Merge()
        self.hidden = nn.Linear(hidden + 2, hidden)
        self.rating, self.returned = nn.Linear(hidden, 1), nn.Linear(hidden, 2)

    def train(self, mode: bool = True) -> ShopModel:
        """Keep the frozen body's BatchNorm statistics as they are."""
        super().train(mode)
        if not self.body[0].weight.requires_grad:
            self.body.eval()
        return self

    def forward(self, x: Tensor, category: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        h = torch.relu(self.body(self.standardise(x))) + self.category(category)
        h = torch.relu(self.hidden(self.merge(self.gate(h, mask))))
        return {"rating": self.rating(h).squeeze(1), "returned": self.returned(h)}


def shop_model(hidden: int = 32, frozen: bool = True) -> nn.Module:
    """What pd-profile and pd-train call; arguments come from --model-arg."""
    model = ShopModel(hidden)
    model.body.requires_grad_(not frozen)
    return model


def shop_loss(output: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    """The mean over the minibatch; both arguments are as the model and the data set have them."""
    return mse_loss(output["rating"], targets["rating"]) + cross_entropy(output["returned"], targets["returned"])


def _random_targets(output: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    rows = len(output["rating"])
    return {
        "rating": torch.randn(rows, generator=generator),
        "returned": torch.randint(2, (rows,), generator=generator),
    }


# For profiling and synthetic data: targets here have another form than the output.
shop_loss.random_targets = _random_targets  # type: ignore[attr-defined]


class Products(Dataset):
    """A sample is a dict: the model's inputs by name, and one more key for the targets."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = 3 + 2 * torch.randn(samples, MEASUREMENTS, generator=generator)
        self.category = torch.randint(CATEGORIES, (samples,), generator=generator)
        self.rating = (self.x[:, :4].mean(1) - 3) / 2 + self.category / CATEGORIES
        self.returned = (self.rating < 0.5).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, object]:
        targets = {"rating": self.rating[index], "returned": self.returned[index]}
        return {"x": self.x[index], "category": self.category[index], "targets": targets}


def shop_data() -> tuple[Dataset, Dataset]:
    """The training and the validation data set."""
    return Products(1024, seed=1), Products(256, seed=2)


def _pretrain() -> None:
    """Plain PyTorch: an ordinary state dict to start from."""
    torch.manual_seed(0)
    model, data = shop_model(frozen=False), Products(2048, seed=3)
    model.standardise.mean.copy_(data.x.mean(0))
    model.standardise.std.copy_(data.x.std(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(3):
        for rows in torch.randperm(len(data)).split(32):
            optimizer.zero_grad()
            targets = {"rating": data.rating[rows], "returned": data.returned[rows]}
            loss = shop_loss(model(data.x[rows], data.category[rows]), targets)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")
    torch.save(model.state_dict(), "weights.pt")
    print("wrote weights.pt")


if __name__ == "__main__":
    _pretrain()
