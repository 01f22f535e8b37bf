from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pd_format.data import images_of, parse_data
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_profile.inputs import choose_inputs, random_inputs
from pd_profile.options import InputShape, parse_input_shape


class ThreeInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, idx: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.a(x) + idx


def chosen(
    model: nn.Module, *texts: str, data: str = "synthetic", torchvision_name: str | None = None
) -> list[tuple[str, tuple[int, ...], str]]:
    given: list[InputShape] = [parse_input_shape(text) for text in texts]
    images = images_of(parse_data(data))
    specs = choose_inputs(model, 5, given, data=data, images=images, torchvision_name=torchvision_name)
    return [(spec.name, spec.shape, spec.dtype) for spec in specs]


def refusal(model: nn.Module, *texts: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        chosen(model, *texts, **options)
    return str(caught.value)


def test_torchvision_models_take_the_images_they_were_made_for() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert chosen(conv, torchvision_name="resnet18") == [("input", (5, 3, 224, 224), "float32")]
    assert chosen(conv, torchvision_name="inception_v3") == [("input", (5, 3, 299, 299), "float32")]


def test_digits_tell_the_shape_with_the_channels_of_the_first_convolution() -> None:
    gray, colour, none = (
        nn.Sequential(nn.Conv2d(1, 4, 3)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4)),
    )
    assert chosen(gray, data="digits") == [("input", (5, 1, 8, 8), "float32")]
    assert chosen(colour, data="digits:32", torchvision_name="resnet18") == [("input", (5, 3, 32, 32), "float32")]
    assert chosen(none, data="digits") == [("input", (5, 1, 8, 8), "float32")]


def test_a_linear_layer_tells_its_width() -> None:
    assert chosen(nn.Sequential(nn.ReLU(), nn.Linear(16, 4))) == [("input", (5, 16), "float32")]


def test_shapes_are_matched_by_name_then_by_place() -> None:
    expected = [("x", (5, 16), "float32"), ("idx", (5,), "int64")]
    assert chosen(ThreeInputs(), "16", ":int64") == expected
    assert chosen(ThreeInputs(), "idx=:int64", "x=16") == expected
    assert chosen(ThreeInputs(), "idx=:int64", "16") == expected
    assert chosen(ThreeInputs(), "16", "idx=:int64", "mask=4") == [*expected, ("mask", (5, 4), "float32")]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(7, 4, 3)), "as in --input-shape 7,32,32."),
        (nn.Sequential(nn.Embedding(9, 4)), "as in --input-shape 128:int64."),
        (nn.Sequential(nn.LSTM(9, 4)), "The model starts with LSTM, which does not tell the shape of a sample;"),
        (nn.Sequential(nn.ReLU()), "The model has no parameters, which does not tell the shape of a sample;"),
        (ThreeInputs(), "as in --input-shape x=16 --input-shape idx=16 (add :int64 for whole numbers)."),
    ],
)
def test_an_unknown_shape_is_asked_for_with_an_example(model: nn.Module, message: str) -> None:
    assert message in refusal(model)


def test_shapes_that_do_not_match_the_forward_are_refused() -> None:
    takes = "the model's forward takes x, idx, mask"
    assert refusal(ThreeInputs(), "y=16") == f"--input-shape names 'y', but {takes}; use one of these names."
    assert refusal(ThreeInputs(), "x=16", "x=16") == "--input-shape gives 'x' twice; keep one of them."
    assert refusal(ThreeInputs(), *["16"] * 4) == f"--input-shape is given 4 times, but {takes}; leave out the rest."
    assert refusal(ThreeInputs(), "16").startswith(f"The input 'idx' has no shape; {takes}.")
    assert refusal(ThreeInputs(), "x=16", "mask=4").startswith(f"The input 'idx' has no shape; {takes}.")


def test_a_shape_that_contradicts_the_data_is_refused() -> None:
    conv = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert refusal(conv, "3,64,64", data="digits:32") == (
        "--input-shape says 3,64,64, but the samples of --data digits:32 are 3,32,32; leave one of the two options out."
    )
    assert chosen(conv, "3,32,32", data="digits:32") == [("input", (5, 3, 32, 32), "float32")]


def test_data_sets_on_disk_tell_the_shape_of_their_images() -> None:
    colour, grey = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(1, 4, 3))
    assert chosen(grey, data="mnist:x") == [("input", (5, 1, 28, 28), "float32")]
    assert chosen(colour, data="fashion-mnist:x") == [("input", (5, 3, 28, 28), "float32")]
    assert chosen(colour, data="cifar100:x") == [("input", (5, 3, 32, 32), "float32")]
    assert chosen(colour, data="imagefolder:x") == [("input", (5, 3, 224, 224), "float32")]
    for name, pixels in (("inception_v3", 299), ("vgg16", 224)):
        found = chosen(colour, data="imagefolder:x", torchvision_name=name)
        assert found == [("input", (5, 3, pixels, pixels), "float32")]
    assert chosen(colour, "3,64,64", data="cifar10:x") == [("input", (5, 3, 64, 64), "float32")]
    flat = nn.Sequential(nn.Linear(784, 4))
    assert chosen(flat, data="mnist:x") == [("input", (5, 1, 28, 28), "float32")]
    assert chosen(flat, "784", data="mnist:x") == [("input", (5, 784), "float32")]


def test_a_model_that_images_cannot_be_brought_to_is_refused() -> None:
    colour, grey = nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(1, 4, 3))
    assert refusal(grey, data="cifar10:x") == (
        "The model's first convolution takes 1 channels, but the images of --data cifar10:x have 3; "
        "give the model a first layer for 3 channels."
    )
    assert refusal(colour, "3,64,60", data="imagefolder:x") == (
        "--input-shape says 3,64,60, but the samples of --data imagefolder:x are 3,224,224, or squares of another size; "
        "leave one of the two options out."
    )
    assert "are 1,28,28, or squares" in refusal(grey, "3,28,28", data="mnist:x")


def values(model: nn.Module, *specs: tuple[tuple[int, ...], str]) -> list[torch.Tensor]:
    return random_inputs(
        [InputSpec(name=f"x{n}", shape=shape, dtype=dtype) for n, (shape, dtype) in enumerate(specs)],
        model,
        torch.Generator().manual_seed(1),
        torch.device("cpu"),
    )


def test_whole_numbers_stay_below_the_smallest_embedding() -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Embedding(7, 4))
    (ids,) = values(model, ((1000,), "int64"))
    assert ids.dtype == torch.int64
    assert set(ids.tolist()) == set(range(7))


def test_inputs_have_the_shape_and_dtype_asked_for() -> None:
    model = nn.ReLU()
    specs = [((3, 2), "float32"), ((3, 2), "bfloat16"), ((100,), "int32"), ((100,), "bool"), ((3,), "uint8")]
    made = values(model, *specs)
    assert [(tuple(value.shape), str(value.dtype)) for value in made] == [
        (shape, f"torch.{dtype}") for shape, dtype in specs
    ]
    assert set(made[2].tolist()) == {0, 1}
    assert set(made[3].tolist()) == {False, True}


def test_the_same_seed_gives_the_same_inputs() -> None:
    assert torch.equal(values(nn.ReLU(), ((4, 4), "float32"))[0], values(nn.ReLU(), ((4, 4), "float32"))[0])
