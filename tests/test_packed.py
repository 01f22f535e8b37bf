"""CIFAR and MNIST files: the samples are those of a plain torchvision loop, and what is missing or damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch.utils.data import Subset
from torchvision import transforms

import image_sets
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.data import MinibatchLoader
from pd_train.datasets.loading import load_datasets
from pd_train.seeding import sample_seed, seed_host_generators


def inputs(*shape: int, dtype: str = "float32") -> tuple[InputSpec, ...]:
    return (InputSpec(name="x", shape=(4, *shape), dtype=dtype),)


def refusal(name: str, *shape: int, classes: int = 100) -> str:
    with pytest.raises(UserError) as caught:
        load_datasets(name, inputs(*shape), classes, 4)
    return str(caught.value)


@pytest.mark.parametrize(
    ("classes", "mean", "std"),
    [
        (10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        (100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ],
)
def test_cifar_is_what_a_plain_torchvision_loop_sees(
    classes: int, mean: tuple[float, ...], std: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_sets.write_cifar(tmp_path, classes)
    plain_class = torchvision.datasets.CIFAR10 if classes == 10 else torchvision.datasets.CIFAR100
    # It knows the digests of the real files.
    monkeypatch.setattr(plain_class, "train_list", [[file, None] for file, _ in plain_class.train_list])
    monkeypatch.setattr(plain_class, "test_list", [[file, None] for file, _ in plain_class.test_list])
    monkeypatch.setattr(plain_class, "meta", {**plain_class.meta, "md5": None})
    finish = [transforms.ToTensor(), transforms.Normalize(mean, std)]
    augmented = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *finish])
    pair = load_datasets(f"cifar{classes}:{tmp_path}", inputs(3, 32, 32), classes, 4)
    for training, transform, dataset in ((True, augmented, pair[0]), (False, transforms.Compose(finish), pair[1])):
        plain = plain_class(tmp_path, train=training, transform=transform)
        assert len(plain) == len(dataset) == (40 if training else 10)
        loader = MinibatchLoader(dataset, inputs(3, 32, 32), len(plain), seed=3, shuffle=False)
        minibatch = loader.load(2, 0)
        for index in range(len(plain)):
            seed_host_generators(sample_seed(3, 2, index))
            image, label = plain[index]
            assert torch.equal(minibatch.inputs[0][index], image)
            assert int(minibatch.targets[index]) == label


@pytest.mark.parametrize(
    ("kind", "folder", "mean", "std"), [("mnist", "MNIST", 0.1307, 0.3081), ("fashion-mnist", "FashionMNIST", 0.2860, 0.3530)]
)  # fmt: skip
def test_mnist_is_what_a_plain_torchvision_loop_sees(
    kind: str, folder: str, mean: float, std: float, tmp_path: Path
) -> None:
    image_sets.write_mnist(tmp_path, folder)
    plain_class = torchvision.datasets.MNIST if kind == "mnist" else torchvision.datasets.FashionMNIST
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])
    pair = load_datasets(f"{kind}:{tmp_path}", inputs(1, 28, 28), 10, 4)
    for training, dataset in zip((True, False), pair, strict=True):
        plain = plain_class(tmp_path, train=training, transform=transform)
        assert len(plain) == len(dataset) == (20 if training else 6)
        minibatch = MinibatchLoader(dataset, inputs(1, 28, 28), 20, seed=3, shuffle=False).load(2, 0)
        for index in range(len(plain)):
            image, label = plain[index]
            assert torch.equal(minibatch.inputs[0][index], image)
            assert torch.equal(dataset[index][0], image)
            assert int(minibatch.targets[index]) == label


def test_grey_images_follow_the_models_channels_and_size(tmp_path: Path) -> None:
    image_sets.write_mnist(tmp_path)

    def first(*shape: int, dtype: str = "float32") -> torch.Tensor:
        return load_datasets(f"mnist:{tmp_path}", inputs(*shape, dtype=dtype), 10, 4)[0][0][0]

    grey = first(1, 28, 28)
    assert torch.equal(first(784), grey.flatten())
    assert torch.equal(first(3, 28, 28), grey.expand(3, 28, 28))
    big, small = first(3, 56, 56), first(1, 14, 14, dtype="bfloat16")
    assert (big.shape, small.shape, small.dtype) == ((3, 56, 56), (1, 14, 14), torch.bfloat16)
    assert float(big.mean()) == pytest.approx(float(grey.mean()), abs=0.02)
    assert float(small.float().mean()) == pytest.approx(float(grey.mean()), abs=0.02)


def test_cifar_is_resized_after_its_augmentation(tmp_path: Path) -> None:
    image_sets.write_cifar(tmp_path)
    train, test = load_datasets(f"cifar10:{tmp_path}", inputs(3, 64, 64), 10, 4)
    torch.manual_seed(1)
    assert train[0][0].shape == test[0][0].shape == (3, 64, 64)


def test_a_subset_of_images_in_memory_is_read_at_once(tmp_path: Path) -> None:
    image_sets.write_mnist(tmp_path)
    train, _ = load_datasets(f"mnist:{tmp_path}", inputs(1, 28, 28), 10, 4)
    chosen = MinibatchLoader(Subset(train, [5, 2]), inputs(1, 28, 28), 4, seed=0, shuffle=False).load(0, 0)
    assert torch.equal(chosen.inputs[0], torch.stack([train[5][0], train[2][0]]))


def test_a_missing_file_is_named_with_where_it_is_expected(tmp_path: Path) -> None:
    root = image_sets.write_cifar(tmp_path / "cifar")
    folder = root / "cifar-10-batches-py"
    (folder / "data_batch_3").unlink()
    text = refusal(f"cifar10:{root}", 3, 32, 32)
    assert f"there is no file {folder}/data_batch_3; expected CIFAR-10 (python version) as torchvision keeps it" in text
    assert "data_batch_5, test_batch, batches.meta." in text
    assert refusal(f"cifar10:{folder}", 3, 32, 32).endswith(
        f"Name the folder that holds cifar-10-batches-py: cifar10:{root}"
    )
    assert refusal(f"cifar100:{tmp_path}/no", 3, 32, 32).endswith(f"There is no folder {tmp_path}/no.")
    raw = image_sets.write_mnist(tmp_path / "mnist") / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte").rename(raw / "t10k-labels-idx1-ubyte.gz")
    assert refusal(f"mnist:{tmp_path}/mnist", 1, 28, 28).endswith(f"gunzip {raw}/t10k-labels-idx1-ubyte.gz")
    assert refusal(f"mnist:{raw}", 1, 28, 28).endswith(f"Name the folder that holds MNIST/raw: mnist:{tmp_path}/mnist")


@pytest.mark.parametrize("damage", [b"", b"\x00\x00\x08\x03 and no more", b"\x80\x04 no pickle"])
def test_a_damaged_file_is_refused_with_its_folder(damage: bytes, tmp_path: Path) -> None:
    image_sets.write_cifar(tmp_path)
    image_sets.write_mnist(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(damage)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(damage)
    text = refusal(f"cifar10:{tmp_path}", 3, 32, 32)
    assert f"the files in {tmp_path}/cifar-10-batches-py cannot be read as those of CIFAR-10" in text
    assert f"the files in {tmp_path}/MNIST/raw cannot be read as those of MNIST" in refusal(
        f"mnist:{tmp_path}", 1, 28, 28
    )


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    image_sets.write_cifar(tmp_path)
    image_sets.write_mnist(tmp_path)
    assert "takes samples of 1x32x32; --data cifar10" in refusal(f"cifar10:{tmp_path}", 1, 32, 32)
    assert "--input-shape 1,28,28" in refusal(f"mnist:{tmp_path}", 1, 28, 20)
    assert "tells 9 classes apart; --data mnist" in refusal(f"mnist:{tmp_path}", 1, 28, 28, classes=9)
    assert "num_classes=10" in refusal(f"mnist:{tmp_path}", 1, 28, 28, classes=9)
