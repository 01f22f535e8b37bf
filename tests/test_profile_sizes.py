from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_format.layers.chain import build_chain
from pd_format.profile import InputSpec
from pd_profile.sizes import out_of_memory, stash_of

FLOAT, INDEX = 4, 8


def sizes_of(model: nn.Module, *shape: int, training: bool = True) -> list[int]:
    model.train(training)
    chain = build_chain(model, [InputSpec(name="x", shape=shape, dtype="float32")])
    return stash_of(model, chain, [torch.randn(shape)])[0]


def test_linear_saves_its_input_and_relu_its_result() -> None:
    # 0 Linear saves x (5 x 16), which is a model input; 1 ReLU saves its result (5 x 32), which 2 Linear saves again.
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    assert sizes_of(model, 5, 16) == [5 * 16 * FLOAT, 5 * 32 * FLOAT, 0]


def test_relu_in_place_saves_the_storage_that_the_layer_before_made() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 4))
    assert sizes_of(model, 5, 16) == [5 * 16 * FLOAT, 5 * 32 * FLOAT, 0]


def test_convolution_pooling_and_a_view() -> None:
    # 0 Conv2d saves x (2 x 3 x 8 x 8); 1 ReLU its result (2 x 4 x 8 x 8); 2 MaxPool2d saves that too, and its own the
    # indices (2 x 4 x 4 x 4); 3 Flatten, a view, saves nothing; 4 Linear saves the pooled values.
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2))
    assert sizes_of(model, 2, 3, 8, 8) == [
        2 * 3 * 8 * 8 * FLOAT,
        2 * 4 * 8 * 8 * FLOAT,
        2 * 4 * 4 * 4 * INDEX,
        0,
        2 * 64 * FLOAT,
    ]


def test_batch_norm_saves_its_input_and_statistics_but_no_buffer() -> None:
    # BatchNorm saves x (6 x 3) and the minibatch's mean and deviation (3 each); its running statistics are buffers.
    assert sizes_of(nn.Sequential(nn.BatchNorm1d(3)), 6, 3) == [(6 * 3 + 2 * 3) * FLOAT]


def test_a_layer_without_gradient_saves_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    # Tanh has no gradient to make either; the last layer saves its input (5 x 32).
    assert sizes_of(model, 5, 16) == [0, 0, 5 * 32 * FLOAT]


class Skip(nn.Module):
    """A value that jumps over two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(self.b(h)) * h


def test_a_skip_is_counted_at_each_cut_that_it_crosses_and_stashed_once() -> None:
    model = Skip()
    chain = build_chain(model, [InputSpec(name="x", shape=(5, 16), dtype="float32")])
    assert [layer.name for layer in chain.layers] == ["a", "b", "c", "mul"]
    h, narrow = 5 * 16 * FLOAT, 5 * 8 * FLOAT
    assert [chain.crossing_bytes(index) for index in range(4)] == [h, narrow + h, h + h, 0]
    # a saves x, b saves h, c saves the narrow value, mul saves c's result (and h, which b has saved).
    assert stash_of(model, chain, [torch.randn(5, 16)])[0] == [h, h, narrow, h]


def test_under_autocast_copies_count_as_they_are() -> None:
    # 0 Linear saves x (5 x 16) as bfloat16, and no weight, since x wants no gradient; 1 ReLU its result (5 x 32); 2
    # Linear saves that again, and the copy of its own weight (4 x 32), which every minibatch in flight has anew.
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    chain = build_chain(model, [InputSpec(name="x", shape=(5, 16), dtype="float32")])
    sizes, output = stash_of(model, chain, [torch.randn(5, 16)], lambda: torch.autocast("cpu", torch.bfloat16))
    assert output.dtype is torch.bfloat16
    assert sizes == [5 * 16 * 2, 5 * 32 * 2, 4 * 32 * 2]


def test_the_output_comes_back_and_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    chain = build_chain(model, [InputSpec(name="input", shape=(6, 3), dtype="float32")])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    value = torch.randn(6, 3)
    _, output = stash_of(model, chain, [value])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(value), output)
    output.sum().backward()
    assert model[0].weight.grad is not None


def test_a_failing_forward_names_the_layer_and_the_shape() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    chain = build_chain(model, [InputSpec(name="input", shape=(5, 16), dtype="float32")])
    model[2] = nn.Linear(31, 4)
    with pytest.raises(UserError) as caught:
        stash_of(model, chain, [torch.randn(5, 16)])
    text = str(caught.value)
    assert text.startswith("The model fails in layer 2 (2) on input of shape 5x16: mat1 and mat2 shapes cannot be")
    assert text.endswith("Check the shape of a sample (--input-shape) and --minibatch-size.")


def test_too_little_memory_is_told_from_other_failures() -> None:
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
