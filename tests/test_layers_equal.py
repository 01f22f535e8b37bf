"""Stage modules compute what the whole model computes, to the bit."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import Tensor, nn

import kit
from pd_format.layers.chain import build_chain

_SMALL = {
    "perceptron": (kit.K1, {"x": torch.randn(5, 16)}),
    "long skip": (kit.K2, {"x": torch.randn(5, 16)}),
    "tied": (kit.K3, {"ids": torch.randint(0, 50, (5, 7))}),
    "BatchNorm": (kit.K4, {"x": torch.randn(5, 3, 8, 8)}),
    "in-place on a skip": (kit.K5, {"x": torch.randn(5, 16)}),
    "dictionaries": (kit.K6, {"x": torch.randn(5, 16), "idx": torch.arange(5)}),
    "optional input given": (
        kit.K6,
        {"x": torch.randn(5, 16), "idx": torch.arange(5), "mask": torch.ones(5, dtype=torch.bool)},
    ),
    "dropout": (kit.K7, {"x": torch.randn(5, 16)}),
    "experts": (kit.K9, {"x": torch.randn(5, 16), "which": torch.ones(5, dtype=torch.int64)}),
    "one module twice": (kit.K10, {"x": torch.randn(5, 16)}),
}


@pytest.mark.parametrize("name", _SMALL)
def test_a_small_model_cut_at_every_legal_layer_equals_the_whole(name: str) -> None:
    factory, inputs = _SMALL[name]
    torch.manual_seed(0)
    model = factory()
    chain = build_chain(model, kit.specs(**inputs))
    legal = [layer for layer, cut in enumerate(chain.cuts[:-1]) if cut]
    for cuts in ([], *([layer] for layer in legal), legal):
        kit.assert_split_equals_whole(model, chain, cuts, list(inputs.values()))


@pytest.mark.parametrize(
    ("name", "size", "kwargs"),
    [
        ("alexnet", 63, {}),
        ("vgg16", 32, {}),
        ("resnet50", 32, {}),
        ("inception_v3", 299, {"init_weights": False, "transform_input": False}),
        ("googlenet", 64, {"init_weights": False}),
        ("densenet121", 32, {}),
        ("vit_b_16", 32, {"image_size": 32}),
        ("swin_t", 64, {}),
    ],
)
def test_a_torchvision_model_cut_at_ten_places_equals_the_whole(
    name: str, size: int, kwargs: dict[str, object]
) -> None:
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10, **kwargs)
    if name in ("vgg16", "alexnet"):
        # Layers of 4096 units hold nine tenths of the parameters and none of the difficulty.
        model.classifier = nn.Sequential(*(_shrunk(each) for each in model.classifier))
    x = torch.randn(2, 3, size, size)
    chain = build_chain(model, kit.specs(x=x))
    assert all(chain.cuts)
    assert not chain.notes
    last = len(chain.layers) - 1
    kit.assert_split_equals_whole(model, chain, [round((place + 1) * last / 11) for place in range(10)], [x])


def _shrunk(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Linear):
        return module
    return nn.Linear(
        min(module.in_features, 64) if module.in_features == 4096 else module.in_features, min(module.out_features, 64)
    )


def test_vgg16_is_cut_right_before_each_in_place_activation() -> None:
    torch.manual_seed(0)
    model = torchvision.models.vgg16(num_classes=10).features
    x = torch.randn(2, 3, 32, 32)
    chain = build_chain(model, kit.specs(x=x))
    cuts = [index - 1 for index, layer in enumerate(chain.layers) if layer.op == "ReLU(inplace=True)"]
    assert len(cuts) == 13
    kit.assert_split_equals_whole(model, chain, cuts, [x])


class _Attention(nn.Module):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = 2, nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("bias", torch.tril(torch.ones(limit, limit)).view(1, 1, limit, limit), persistent=False)
        self.dropout = 0.25

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(16, dim=2)
        q, k, v = (each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        scores = nn.functional.dropout(torch.softmax(scores, -1), self.dropout, training=self.training)
        y = (scores @ v).transpose(1, 2).contiguous().view(b, t, c)
        return self.c_proj(y)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(16), _Attention(12), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class _Language(nn.Module):
    """Written the way small language models are: shapes unpacked, asserted and used, positions made from a size."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 12
        self.wte, self.wpe = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.h = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device = idx.device
        _, t = idx.size()
        assert t <= self.limit, f"a sequence of {t} is too long"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def test_a_language_model_splits_anywhere_and_keeps_to_no_length() -> None:
    torch.manual_seed(0)
    model = _Language()
    idx = torch.randint(0, 50, (4, 9))
    chain = build_chain(model, kit.specs(idx=idx))
    assert all(chain.cuts)
    assert not chain.notes
    assert chain.specialised == ("idx.size()[1] <= 12 is True",)
    every = list(range(len(chain.layers) - 1))
    kit.assert_split_equals_whole(model, chain, every, [idx])
    for other in ((1, 9), (3, 12), (5, 1)):
        kit.assert_split_equals_whole(model, chain, every, [torch.randint(0, 50, other)])


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoder_that_torch_ships_is_entered(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    )
    x = torch.randn(4, 5, 8)
    chain = build_chain(model, kit.specs(x=x))
    assert not chain.notes
    assert sum("self_attn" in layer.name for layer in chain.layers) >= 2
    cuts = [index for index, cut in enumerate(chain.cuts[:-1]) if cut]
    assert len(cuts) > 10
    # In eval, without gradients, torch's own fused path gives the whole model other last bits.
    _compare_training_only(model, chain, cuts, x)


def _compare_training_only(model: nn.Module, chain: object, cuts: list[int], x: Tensor) -> None:
    model.train()
    torch.manual_seed(1)
    expected = model(x)
    ends = [*cuts, len(chain.layers) - 1]  # type: ignore[attr-defined]
    stages = [chain.stage(a, b) for a, b in zip([0, *(end + 1 for end in ends)], ends, strict=False)]  # type: ignore[attr-defined]
    torch.manual_seed(1)
    found, _ = kit.run_stages(stages, [x])
    assert isinstance(found, Tensor)
    assert torch.equal(found, expected)
    model.eval()
    with torch.no_grad():
        output, _ = kit.run_stages([stage.eval() for stage in stages], [x])
        torch.testing.assert_close(output, model(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.mix, self.head = (
            nn.LSTM(8, 6, 2, batch_first=True, dropout=0.3),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.lstm(x)
        y = torch.tanh(self.mix(state[0][:, -1]))
        return self.head(y + state[1][0][-1])


def test_an_lstm_stays_whole_and_parts_of_its_output_cross() -> None:
    torch.manual_seed(0)
    model = _Recurrent()
    x = torch.randn(4, 5, 8)
    chain = build_chain(model, kit.specs(x=x))
    assert chain.layers[0].name == "lstm"
    assert len(chain.layers[0].parameters) == 8
    kit.assert_split_equals_whole(model, chain, list(range(len(chain.layers) - 1)), [x])


class _Bundle(nn.Module):
    """Returns nested values, and takes them; its branch on data keeps it whole."""

    def forward(self, h: Tensor, got: object = None) -> object:
        if got is not None:
            assert isinstance(got, dict)
            a, (b, c) = got["pair"]
            assert got["none"] is None
            assert got["three"] == 3
            assert got["yes"] is True
            h = h + a * b + c if h.sum() > 1e30 else h + a
        return {"pair": [h * 2, (h, h + 1)], "none": None, "three": 3, "yes": True, "half": 0.5, "word": "w"}


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.b, self.second, self.c = (
            nn.Linear(4, 4),
            _Bundle(),
            nn.Linear(4, 4),
            _Bundle(),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        got = self.first(self.a(x), {"pair": [x, (x, x)], "none": None, "three": 3, "yes": True})
        out = self.second(torch.tanh(self.b(x)), got)
        return self.c(out["pair"][0])


def test_nested_values_of_every_plain_kind_cross() -> None:
    torch.manual_seed(0)
    model = _Nested()
    x = torch.randn(3, 4)
    chain = build_chain(model, kit.specs(x=x))
    assert [layer.name for layer in chain.layers] == ["a", "first", "b", "tanh", "second", "c"]
    assert all(chain.cuts)
    kit.assert_split_equals_whole(model, chain, [0, 1, 2, 3, 4], [x])


class _Kinds(nn.Module):
    """Integer tensors, tensors without gradient, a late input, and a size that crosses as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor, late: Tensor, index: Tensor) -> Tensor:
        rows = x.size(0)
        h = self.a(x)
        order = h.argsort(1)
        with torch.no_grad():
            quiet = self.b(h) * self.scale
        h = torch.relu(self.b(h)) + quiet + h.detach()
        h = h.gather(1, order) + late
        return self.c(h.view(rows, -1) * index.unsqueeze(1))


def test_integers_tensors_without_gradient_and_late_inputs_cross() -> None:
    torch.manual_seed(0)
    model = _Kinds()
    inputs = {"x": torch.randn(3, 4), "late": torch.randn(3, 4), "index": torch.arange(3)}
    chain = build_chain(model, kit.specs(**inputs))
    legal = [layer for layer, cut in enumerate(chain.cuts[:-1]) if cut]
    assert "late" in chain.crossing(0)
    assert len(legal) >= 7
    for cuts in (legal, *([each] for each in legal)):
        kit.assert_split_equals_whole(model, chain, cuts, list(inputs.values()))


class _Writes(nn.Module):
    """In-place writes through views, slices and operators."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        half = h[:, :3]
        half.mul_(2.0)
        k = torch.sigmoid(self.b(h.clone()))
        k = k * 1.0
        h += k
        h[:, 0] = k[:, 1]
        out = torch.zeros(h.shape[0], 6)
        out[:, :] = h
        return self.c(out + k)


def test_writes_through_views_and_operators_reach_what_crosses() -> None:
    torch.manual_seed(0)
    model = _Writes()
    x = torch.randn(3, 6)
    chain = build_chain(model, kit.specs(x=x))
    legal = [layer for layer, cut in enumerate(chain.cuts[:-1]) if cut]
    assert len(legal) >= 5
    for cuts in (legal, *([each] for each in legal)):
        kit.assert_split_equals_whole(model, chain, cuts, [x])


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -3 * gradient


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Reversed.apply(self.a(x)))


def test_a_custom_backward_is_kept() -> None:
    torch.manual_seed(0)
    model, x = _Custom(), torch.randn(3, 4)
    before = _Reversed.apply
    chain = build_chain(model, kit.specs(x=x))
    assert [layer.name for layer in chain.layers] == ["a", "_Reversed", "b"]
    assert _Reversed.apply == before
    kit.assert_split_equals_whole(model, chain, [0, 1], [x])


def test_a_short_minibatch_runs_through_stages_traced_with_a_full_one() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    chain = build_chain(model, kit.specs(x=torch.randn(8, 3, 32, 32)))
    kit.assert_split_equals_whole(model, chain, [10, 20, 40], [torch.randn(5, 3, 32, 32)])
