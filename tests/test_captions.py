"""Captioned videos on disk: what a sample holds, who is trained on which, and what a broken folder is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch

from clips import write_folder
from pd_format.captions import BEGIN, END, PADDING, UNKNOWN
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.data import MinibatchLoader, TensorRows
from pd_train.datasets.captions import Vocabulary, read_split, words_of
from pd_train.datasets.loading import load_datasets
from pd_train.datasets.msvd import CaptionedVideos, load_msvd


def inputs(frames: int = 4, width: int = 2, words: int = 5, dtype: str = "float32") -> list[InputSpec]:
    return [
        InputSpec(name="features", shape=(2, frames, width), dtype=dtype),
        InputSpec(name="words", shape=(2, words), dtype="int64"),
    ]


def clip(frames: int = 4, width: int = 2, dtype: str = "float32") -> numpy.ndarray:
    """Frame i holds i + 1."""
    return numpy.repeat(numpy.arange(1, frames + 1, dtype=dtype)[:, None], width, axis=1)


CAPTIONS = "v1,A man cuts\nv1,the man cuts it\nv2,A dog eats\nv3,a cat eats a dog now\n"


def folder_of(tmp_path: Path, captions: str = CAPTIONS, split: Sequence[str] = ("v1\nv2\n", "v3\n")) -> Path:
    folder = write_folder(tmp_path / "set", {f"v{number}": clip() for number in (1, 2, 3)}, captions)
    for part, text in zip(("train", "val", "test"), split, strict=False):
        (folder / f"{part}.txt").write_text(text)
    return folder


def load(folder: Path, classes: int | None = 50, **shape: object) -> tuple[CaptionedVideos, CaptionedVideos]:
    return load_msvd(str(folder), f"msvd:{folder}", inputs(**shape), classes)  # type: ignore[arg-type]


# Samples


def test_every_caption_of_a_training_video_is_a_sample_and_validation_has_one_a_video(tmp_path: Path) -> None:
    train, validation = load(folder_of(tmp_path))
    assert (len(train), len(validation)) == (3, 1)
    # Most frequent first, then by name: man, cuts and a twice; dog, eats, it and the once.
    a, cuts, man = 4, 5, 6
    it, the = 9, 10
    assert [train[index][1].tolist() for index in range(2)] == [
        [BEGIN, a, man, cuts, PADDING],
        [BEGIN, the, man, cuts, it],
    ]
    assert [train[index][2].tolist() for index in range(2)] == [[a, man, cuts, END, PADDING], [the, man, cuts, it, END]]


def test_a_long_caption_is_cut_short_and_an_unknown_word_is_one_token(tmp_path: Path) -> None:
    _, validation = load(folder_of(tmp_path))
    _, words, targets = validation[0]
    a, dog, eats = 4, 7, 8
    assert words.tolist() == [BEGIN, a, UNKNOWN, eats, a]
    assert targets.tolist() == [a, UNKNOWN, eats, a, END]
    assert dog not in targets


def test_a_small_vocabulary_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    train, _ = load(folder_of(tmp_path), classes=6)
    assert train[0][2].tolist() == [4, UNKNOWN, 5, END, PADDING]


@pytest.mark.parametrize(
    ("stored", "frames", "expected"),
    [(4, 4, [1, 2, 3, 4]), (8, 4, [2, 4, 6, 8]), (9, 3, [2, 5, 8]), (2, 4, [1, 2, 0, 0]), (5, 1, [3])],
)
def test_frames_are_taken_at_equal_distances_or_followed_by_zeros(
    stored: int, frames: int, expected: list[float], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "set", {name: clip(stored, dtype="float16") for name in "ab"}, "a,x\nb,y\n")
    train, _ = load(folder, frames=frames)
    assert train[0][0].dtype == torch.float32
    assert train[0][0][:, 1].tolist() == expected


def test_minibatches_hold_the_samples(tmp_path: Path) -> None:
    train, _ = load_datasets(f"msvd:{folder_of(tmp_path)}", inputs(), 50, 2, (5,))
    assert isinstance(train, TensorRows)
    loader = MinibatchLoader(train, inputs(), 2, seed=0, shuffle=False)
    features, words = loader.load(0, 0).inputs
    assert torch.equal(features, torch.stack([train[0][0], train[1][0]]))
    assert torch.equal(words, torch.stack([train[0][1], train[1][1]]))
    assert torch.equal(loader.load(0, 0).targets, torch.stack([train[0][2], train[1][2]]))


def test_words_are_in_lower_case_without_punctuation() -> None:
    assert words_of("A man's dog--it (quickly) JUMPS, o\u2019er 2 caf\u00e9s!") == [
        "a", "man's", "dog", "it", "quickly", "jumps", "o'er", "2", "caf\u00e9s",
    ]  # fmt: skip


def test_tokens_become_words_again() -> None:
    vocabulary = Vocabulary([["a", "man"]], 50)
    assert vocabulary.decode([4, UNKNOWN, BEGIN, 5, 49, END, 4]) == ["a", "<unk>", "man"]
    assert vocabulary.decode([4, 4]) == ["a", "a"]


def test_lines_may_have_a_heading_quotes_and_gaps(tmp_path: Path) -> None:
    captions = '\ufeffVideo_ID,Sentence\r\n\r\nv1,"a man, slowly, cuts"\r\nv2,eats\r\nv3,eats\r\n'
    train, _ = load(folder_of(tmp_path, captions), words=6)
    assert (train[0][2] == END).nonzero().item() == 4


# Splits


def test_without_files_a_split_is_the_same_for_any_order_of_captions(tmp_path: Path) -> None:
    names = [f"video{number}" for number in range(40)]
    split = read_split(tmp_path, dict.fromkeys(names))
    assert split == read_split(tmp_path, dict.fromkeys(reversed(names)))
    assert [len(part) for part in split] == [32, 4, 4]
    assert sorted([*split.train, *split.validation, *split.test]) == sorted(names)
    assert list(split.train) != sorted(split.train)


def test_msvd_is_split_as_in_the_paper(tmp_path: Path) -> None:
    split = read_split(tmp_path, dict.fromkeys(f"vid{number}" for number in range(1970, 0, -1)))
    assert (split.train[0], split.train[-1]) == ("vid1", "vid1200")
    assert (split.validation[0], split.validation[-1]) == ("vid1201", "vid1300")
    assert (split.test[0], split.test[-1]) == ("vid1301", "vid1970")


def test_two_videos_are_enough(tmp_path: Path) -> None:
    assert [len(part) for part in read_split(tmp_path, {"a": 0, "b": 0})] == [1, 1, 0]


def test_a_test_video_is_neither_trained_nor_validated_on(tmp_path: Path) -> None:
    train, validation = load(folder_of(tmp_path, split=("v2\n", "v3", "v1\n\n")))
    assert (len(train), len(validation)) == (1, 1)
    assert train[0][2].tolist() == [4, 5, 6, END, PADDING]


# Mistakes


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ("v1,a man\nv9,a dog\n", r"captions\.csv, line 2: there are no features of video 'v9'; .*features/v9\.npy"),
        ("", r"captions\.csv: holds no captions"),
        ("video,sentence\n", r"captions\.csv: holds no captions"),
        ("v1,a man\n\nv1,a man, slowly\n", r"captions\.csv, line 3: found 3 columns; .*stands in quotes"),
        ("v1\n", r"captions\.csv, line 1: found 1 columns"),
        ("v1,a man\nv2, ...\n", r"captions\.csv, line 2: the sentence ' \.\.\.' has no words"),
        ('v1,"a man\n', r"captions\.csv, line 1: unexpected end of data"),
    ],
)
def test_a_broken_line_of_captions_is_named(captions: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(folder_of(tmp_path, captions))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (("v1\n",), r"val\.txt: is missing"),
        (("v1\nv2\n", "v2\n"), r"val\.txt, line 1: video 'v2' stands in train\.txt, line 2 too"),
        (("v1\n", "v3\nv4\n"), r"val\.txt, line 2: there are no captions of video 'v4'"),
        (("v1\n", "\n"), r"val\.txt: names no video"),
    ],
)
def test_a_broken_split_is_named(split: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load(folder_of(tmp_path, split=split))


def test_one_video_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"captions of 1 video; expected at least 2"):
        read_split(tmp_path, {"a": 0})


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (clip(width=3), r"has 3 numbers a frame; the model takes 2\. .*--model-arg features=3"),
        (clip(dtype="int64"), r"holds 4x2 int64; expected frames x 2 floating-point"),
        (clip(frames=0), r"holds 0x2 float32"),
        (clip()[0], r"holds 2 float32"),
    ],
)
def test_features_of_another_form_are_named(array: numpy.ndarray, message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    numpy.save(folder / "features" / "v3.npy", array)
    with pytest.raises(UserError, match=rf"features/v3\.npy: {message}"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00v\x00{'descr'"])
def test_a_corrupt_file_of_features_is_named(content: bytes, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "features" / "v2.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"features/v2\.npy: is no array of numpy"):
        load(folder)


def test_features_that_are_no_numbers_are_named_when_they_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    broken = clip()
    broken[2, 1] = numpy.nan
    numpy.save(folder / "features" / "v1.npy", broken)
    train, _ = load(folder)
    with pytest.raises(UserError, match=r"features/v1\.npy: holds numbers that are not finite"):
        train[0]


def test_captions_in_another_encoding_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "captions.csv").write_bytes("v1,a man\nv2,a caf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"captions\.csv, line 2: is no UTF-8 text"):
        load(folder)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*nowhere/features; .*captions\.csv"):
        load(tmp_path / "nowhere")
    folder = folder_of(tmp_path)
    (folder / "captions.csv").unlink()
    with pytest.raises(UserError, match=r"captions\.csv: there is no such file"):
        load(folder)


def test_a_model_that_does_not_fit_is_told_what_the_data_has(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    image = [InputSpec(name="x", shape=(2, 3, 8, 8), dtype="float32")]
    with pytest.raises(UserError, match=r"The model takes x 3x8x8 float32; .*as the model s2vt takes them"):
        load_msvd(str(folder), f"msvd:{folder}", image, 50)
    with pytest.raises(UserError, match=re.escape("The model's vocabulary has 4 tokens")):
        load(folder, classes=4)
