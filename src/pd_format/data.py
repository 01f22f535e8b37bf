"""How the command lines, the profile and the plan name a data set (the `data` field; design, section 1)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pd_format.errors import UserError

__all__ = ["DIGITS_PIXELS", "DataName", "parse_data"]

DIGITS_PIXELS = 8
"""The side length of scikit-learn's digits as they are."""


class DataName(NamedTuple):
    """What the name of a data set says."""

    kind: Literal["digits", "synthetic", "function"]
    size: int | None = None
    """The side length of digits in pixels; the number of synthetic samples, None where it is left open."""


def parse_data(text: str) -> DataName:
    """Read `digits`, `digits:32`, `synthetic`, `synthetic:1000`, or a function as `path/file.py:function`.

    Raises:
        UserError: it is none of these.
    """
    kind, colon, size = text.partition(":")
    whole = size.isascii() and size.isdigit() and int(size) > 0
    if kind == "digits" and (whole or not colon):
        return DataName("digits", int(size) if colon else DIGITS_PIXELS)
    if kind == "synthetic" and (whole or not colon):
        return DataName("synthetic", int(size) if colon else None)
    place, _, function = text.rpartition(":")
    if kind not in ("digits", "synthetic") and place and function.isidentifier():
        return DataName("function")
    raise UserError(
        f"Data set {text!r} is unknown; expected digits, digits:SIZE (as in digits:32), synthetic, synthetic:SAMPLES, "
        "path/file.py:function or package.module:function."
    )
