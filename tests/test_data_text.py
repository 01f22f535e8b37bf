"""A text file as tokens: which windows there are, which of them are for validation, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_train.data import MinibatchLoader
from pd_train.datasets.loading import load_datasets
from pd_train.datasets.text import TextWindows


def tokens(context: int, dtype: str = "int64") -> list[InputSpec]:
    return [InputSpec(name="tokens", shape=(2, context), dtype=dtype)]


def load(path: Path, context: int, classes: int | None = 256) -> tuple[TextWindows, TextWindows]:
    train, validation = load_datasets(f"text:{path}", tokens(context), classes, 2, (context,))
    assert isinstance(train, TextWindows)
    assert isinstance(validation, TextWindows)
    return train, validation


def text(windows: TextWindows, part: int) -> list[str]:
    return [bytes(windows[index][part].tolist()).decode("latin-1") for index in range(len(windows))]


def test_windows_follow_each_other_and_targets_are_what_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "cat.txt"
    path.write_text("The cat sat on the mat")  # 22 bytes: five windows of 4 with what follows, one byte left over
    train, validation = load(path, 4)
    assert text(train, 0) == ["The ", "cat ", "sat ", "on t"]
    assert text(train, 1) == ["he c", "at s", "at o", "n th"]
    assert (text(validation, 0), text(validation, 1)) == (["he m"], ["e ma"])
    assert [part.dtype for part in train[0]] == [torch.int64, torch.int64]
    with pytest.raises(IndexError):
        train[4]


def test_the_last_tenth_is_for_validation_and_every_byte_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 5)
    train, validation = load(path, 8)
    assert (len(train), len(validation)) == (144, 15)
    read = torch.cat([part[index][0] for part in (train, validation) for index in range(len(part))])
    assert bytes(read.tolist()) == (bytes(range(256)) * 5)[: 159 * 8]


def test_a_minibatch_stacks_whole_windows(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    train, _ = load(path, 9)
    loader = MinibatchLoader(train, tokens(9), 2, seed=3, shuffle=True)
    batch = loader.load(0, 1)
    (inputs,) = batch.inputs
    assert isinstance(inputs, torch.Tensor)
    assert isinstance(batch.targets, torch.Tensor)
    assert inputs.shape == (2, 9)
    # The bytes of this file count up.
    assert torch.equal(batch.targets, inputs + 1)


def test_the_smallest_file_has_one_window_for_each_part(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * 9)
    assert [len(part) for part in load(path, 4)] == [1, 1]
    path.write_bytes(b"x" * 8)
    with pytest.raises(UserError, match=r"small holds 8 bytes; .* at least 9, .* a window of 4 tokens"):
        load(path, 4)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="holds 0 bytes"):
        load(path, 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data text:.*gone.txt: .*cannot be read \(No such file or directory\)"):
        load(tmp_path / "gone.txt", 4)
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path, 4)


def test_a_byte_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cafe.txt"
    path.write_text("a small café, and more text after it", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds the byte 195 at position 11; the model knows the tokens 0 to 127\."):
        load(path, 4, classes=128)
    load(path, 4, classes=196)


@pytest.mark.parametrize(
    ("inputs", "label_shape", "message"),
    [
        (tokens(8, "float32"), (8,), r"takes samples of 8 float32; .* one input of int64 and shape \(B, T\)"),
        (tokens(8) * 2, (8,), "takes samples of 8 int64, 8 int64"),
        ([InputSpec(name="x", shape=(2, 3, 4), dtype="int64")], (3, 4), "takes samples of 3x4 int64"),
        (tokens(8), (), r"one row of logits for 8 tokens; .* logits of shape \(B, 8, vocabulary\)"),
        (tokens(8), (7,), "gives 7 of logits for 8 tokens"),
    ],
)
def test_a_model_of_another_form_is_refused(
    inputs: list[InputSpec], label_shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=message):
        load_datasets(f"text:{path}", inputs, 256, 2, label_shape)
