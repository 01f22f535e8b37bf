"""Folders of image files: the samples are those of a plain torchvision loop, and what is missing or broken is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

import image_sets
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.data import Minibatch, MinibatchLoader
from pd_train.datasets.imagefolder import ImageFiles
from pd_train.datasets.loading import load_datasets
from pd_train.seeding import sample_seed, seed_host_generators

SIDE = 24
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def inputs(*shape: int, dtype: str = "float32") -> tuple[InputSpec, ...]:
    return (InputSpec(name="x", shape=(4, *shape), dtype=dtype),)


def load(root: Path, classes: int | None = 3, skip_corrupt: bool = False) -> tuple[ImageFiles, ImageFiles]:
    pair = load_datasets(f"imagefolder:{root}", inputs(3, SIDE, SIDE), classes, 4, skip_corrupt=skip_corrupt)
    assert isinstance(pair[0], ImageFiles)
    assert isinstance(pair[1], ImageFiles)
    return pair[0], pair[1]


def refusal(root: Path, classes: int = 3) -> str:
    with pytest.raises(UserError) as caught:
        load(root, classes)
    return str(caught.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return image_sets.write_imagefolder(tmp_path / "set")


def test_a_plain_torchvision_loop_sees_the_same_samples(root: Path) -> None:
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    training = transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), *finish])
    evaluation = transforms.Compose([transforms.Resize(27), transforms.CenterCrop(SIDE), *finish])
    for part, transform, dataset in zip(("train", "val"), (training, evaluation), load(root), strict=True):
        plain = ImageFolder(root / part, transform)
        assert [str(dataset.path(i)) for i in range(len(dataset))] == [path for path, _ in plain.samples]
        loader = MinibatchLoader(dataset, inputs(3, SIDE, SIDE), 4, seed=3, shuffle=False)
        for b in range(loader.minibatches):
            minibatch = loader.load(1, b)
            for place in range(minibatch.samples):
                seed_host_generators(sample_seed(3, 1, 4 * b + place))
                image, label = plain[4 * b + place]
                assert torch.equal(minibatch.inputs[0][place], image)
                assert int(minibatch.targets[place]) == label


def test_inception_is_evaluated_as_torchvision_does_it(root: Path) -> None:
    _, val = load_datasets(f"imagefolder:{root}", inputs(3, 299, 299), 3, 4)
    plain = transforms.Compose(
        [transforms.Resize(342), transforms.CenterCrop(299), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    )
    with Image.open(root / "val" / "ant" / "00.jpg") as image:
        assert torch.equal(val[0][0], plain(image.convert("RGB")))


def test_grey_and_transparent_images_become_colour_of_the_models_dtype(tmp_path: Path) -> None:
    root = image_sets.write_imagefolder(tmp_path, train=1, val=1)
    for name, mode in (("ant", "L"), ("bee", "RGBA"), ("cat", "P")):
        (path,) = (root / "train" / name).iterdir()
        path.unlink()
        Image.new(mode, (30, 30), 100).save(path.with_suffix(".png"))
    train, _ = load_datasets(f"imagefolder:{root}", inputs(3, SIDE, SIDE, dtype="bfloat16"), 3, 4)
    for i in range(3):
        image, label = train[i]
        assert (image.shape, image.dtype, label) == ((3, SIDE, SIDE), torch.bfloat16, i)


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:400])
    else:
        path.write_bytes(b"" if how == "empty" else b"no image at all")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("truncated", "[Tt]runcated"), ("empty", "the file is empty"), ("text", "no image format that is known")],
)
def test_an_image_that_cannot_be_read_is_named(how: str, reason: str, root: Path) -> None:
    victim = root / "train" / "bee" / "03.jpg"
    damage(victim, how)
    train, _ = load(root)
    with pytest.raises(UserError, match=rf"bee/03\.jpg cannot be read as an image \(.*{reason}.*--skip-corrupt"):
        MinibatchLoader(train, inputs(3, SIDE, SIDE), 18, seed=0, shuffle=True).load(0, 0)


def test_a_file_that_the_disk_does_not_give_is_named_and_never_replaced(root: Path) -> None:
    train, _ = load(root, skip_corrupt=True)
    (root / "train" / "bee" / "00.jpg").unlink()
    with pytest.raises(UserError, match=r"bee/00\.jpg cannot be read: No such file or directory\."):
        train[6]


def all_samples(dataset: ImageFiles, size: int) -> tuple[dict[int, torch.Tensor], set[str]]:
    """Each sample of epoch 1, and the files that were skipped."""
    loader = MinibatchLoader(dataset, inputs(3, SIDE, SIDE), size, seed=0, shuffle=False)
    minibatches: list[Minibatch] = [loader.load(1, b) for b in range(loader.minibatches)]
    assert [one.samples for one in minibatches] == [loader.samples_of(b) for b in range(loader.minibatches)]
    images = torch.cat([one.inputs[0] for one in minibatches])
    return dict(enumerate(images)), {path for one in minibatches for path in one.skipped}


def test_the_next_good_image_of_the_class_stands_in_for_a_corrupt_one(root: Path) -> None:
    before, skipped = all_samples(load(root)[0], 4)
    assert not skipped
    folder = root / "train" / "cat"
    victims = [folder / "00.jpg", folder / "03.jpg", folder / "05.png"]
    for victim in victims:
        damage(victim, "truncated")
    train, _ = load(root, skip_corrupt=True)
    # In order of paths: 00, 02, 03, 04, 05 and more/01. The last of them stands in for 05.
    names = [train.path(i).name for i in range(12, 18)]
    assert names == ["00.jpg", "02.png", "03.jpg", "04.JPEG", "05.png", "01.JPEG"]
    expected = {12: 13, 14: 15, 16: 17}
    for size in (4, 7):
        after, skipped = all_samples(train, size)
        assert skipped == set(map(str, victims))
        for i in before:
            if i not in expected:
                assert torch.equal(after[i], before[i])
                continue
            seed_host_generators(sample_seed(0, 1, i))
            assert torch.equal(after[i], train[expected[i]][0])
    damage(folder / "more" / "01.JPEG", "text")
    after, _ = all_samples(load(root, skip_corrupt=True)[0], 4)
    seed_host_generators(sample_seed(0, 1, 17))
    assert torch.equal(after[17], train[13][0]), "after the last image of a class comes its first"


def test_a_class_without_one_good_image_is_refused(root: Path) -> None:
    for path in (root / "train" / "bee").rglob("*.*"):
        damage(path, "text")
    with pytest.raises(UserError, match=r"None of the 6 files like .*bee.* can be read as an image"):
        load(root, skip_corrupt=True)[0][6]


def test_folders_that_are_missing_or_empty_are_named_with_what_is_expected(root: Path) -> None:
    assert refusal(root / "no") == (
        f"--data imagefolder:{root}/no: there is no folder {root}/no; expected {root}/no/train/CLASS/*.jpg to train on "
        f"and {root}/no/val/CLASS/*.jpg for validation."
    )
    assert f"Name the folder that holds it: imagefolder:{root}" in refusal(root / "train")
    (root / "val" / "cat").rename(root / "val" / "cow")
    assert "train and val differ: only train has 'cat'; only val has 'cow'" in refusal(root)
    shutil.rmtree(root / "val" / "cow")
    assert "train and val differ: only train has 'cat'." in refusal(root)
    (root / "val" / "cat").mkdir()
    (root / "val" / "cat" / "readme.txt").touch()
    assert "val has no images of 'cat'; expected files that end in .jpg" in refusal(root)
    shutil.rmtree(root / "val")
    assert f"there is no folder {root}/val; expected" in refusal(root)
    (root / "val").mkdir()
    assert f"{root}/val is empty; expected" in refusal(root)
    image_sets.write_image(root / "val" / "n1.JPEG", 1)
    assert f"{root}/val holds 1 images and no folders; sort them into one folder a class" in refusal(root)


def test_hidden_folders_are_no_classes(root: Path) -> None:
    (root / "train" / ".ipynb_checkpoints").mkdir()
    assert len(load(root)[0]) == 18


def test_a_model_that_does_not_fit_the_images_is_refused(root: Path) -> None:
    assert "The model tells 2 classes apart; --data imagefolder" in refusal(root, classes=2)
    for shape in ((1, 24, 24), (3, 24, 20), (5,)):
        with pytest.raises(UserError, match=f"takes samples of {'x'.join(map(str, shape))}; .* colour images of 3x224"):
            load_datasets(f"imagefolder:{root}", inputs(*shape), 3, 4)
    with pytest.raises(UserError, match=r"takes uint8; .* floating-point"):
        load_datasets(f"imagefolder:{root}", inputs(3, 24, 24, dtype="uint8"), 3, 4)


@pytest.mark.skipif(os.name != "posix", reason="names are bytes only there")
def test_names_that_are_no_text_are_read_too(root: Path) -> None:
    odd = os.fsencode(root / "train" / "ant") + b"/00\xff.jpg"
    os.rename(root / "train" / "ant" / "00.jpg", odd)
    train, _ = load(root)
    assert os.fsencode(train.path(0)) == odd
    assert train[0][1] == 0
