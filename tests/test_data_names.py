"""The names of data sets: one grammar for the command lines, the profile and the plan."""

from __future__ import annotations

import pytest

from pd_format.data import DataName, parse_data
from pd_format.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digits", DataName("digits", 8)),
        ("digits:32", DataName("digits", 32)),
        ("synthetic", DataName("synthetic", None)),
        ("synthetic:101", DataName("synthetic", 101)),
        ("sets/mine.py:load", DataName("function")),
        ("my.package:load", DataName("function")),
        ("imagefolder:/data/imagenet", DataName("imagefolder", path="/data/imagenet")),
        ("text:notes/all.txt", DataName("text", path="notes/all.txt")),
        ("cifar10:C:\\data", DataName("cifar10", path="C:\\data")),
    ],
)
def test_a_data_set_is_read_from_its_name(text: str, expected: DataName) -> None:
    assert parse_data(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", "cifar", "digits:", "digits:0", "digits:big", "digits:\u0663", "synthetic:", "synthetic:-1", "mine.py",
     "mine.py:", ":load", "mine.py:2x", "mine.py:32"],
)  # fmt: skip
def test_an_unknown_data_set_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(
        UserError, match=r"is unknown; expected synthetic, synthetic:SAMPLES, digits.* a function .path/file"
    ):
        parse_data(text)


@pytest.mark.parametrize(("text", "expected"), [("mnist", "mnist:FOLDER"), ("text:", "text:FILE")])
def test_a_data_set_on_disk_must_say_where(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=f"does not say where it is; expected {expected}"):
        parse_data(text)
