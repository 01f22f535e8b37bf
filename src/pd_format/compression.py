"""Compression of what workers send: its schemes by name, and the bytes that each leaves. Pure, for planner and runtime.

    --compress-gradients       topk:0.01     the largest hundredth: an index and a value each     8 n / 100 bytes
                               powersgd:4    a matrix of n elements as a product of rank 4        16 (rows + columns)
                               onebit        signs, and a magnitude for every 512 elements        n / 8 + n / 128
    --compress-activations     bf16          half of float32                                      2 n
                               int8          a byte each, and a magnitude for every sample        n + 4 samples

Gradients are compressed a bucket at a time, whose float32 elements make one row; so are the parameters that come back.
What a scheme does to the numbers is in `pd_train.compressors` and `pd_train.crossing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pd_format.errors import UserError

__all__ = [
    "BUCKET_BYTES",
    "FLOAT_BYTES",
    "NOTHING",
    "SIGN_GROUP",
    "Compression",
    "GradientScheme",
    "bucket_count",
    "crossing_bytes",
    "linear_bytes",
    "matrix_of",
    "parse_activations",
    "parse_gradients",
    "stage_bytes_after",
]

BUCKET_BYTES = 4 << 20
"""The size that buckets aim at: large enough to amortise a message, small enough to overlap with the backward pass."""
FLOAT_BYTES = 4
SIGN_GROUP = 512
"""Elements that share a magnitude under `onebit`."""
_INDEX_BYTES = 4
_MOST_FRACTION = 0.5
"""From here on indices and values together are no shorter than all values."""
_MOST_RANK = 1024
_ACTIVATIONS = ("bf16", "int8")


@dataclass(frozen=True)
class GradientScheme:
    """What becomes of a bucket; `size` is the fraction of `topk`, the rank of `powersgd`, and means nothing else."""

    name: Literal["topk", "powersgd", "onebit"]
    size: float = 0.0

    def __str__(self) -> str:
        return self.name if self.name == "onebit" else f"{self.name}:{self.size:g}"

    def bytes_after(self, elements: int) -> int:
        """What a row of so many float32 elements takes; as it is where compressing would not make it shorter."""
        return min(self._bytes(elements), FLOAT_BYTES * elements)

    def kept(self, elements: int) -> int:
        """How many elements `topk` sends of a row."""
        return max(1, math.ceil(self.size * elements))

    def rank(self, elements: int) -> int:
        """Of the product that `powersgd` sends for a row."""
        return min(int(self.size), matrix_of(elements)[1])

    def _bytes(self, elements: int) -> int:
        if self.name == "topk":
            return (_INDEX_BYTES + FLOAT_BYTES) * self.kept(elements)
        if self.name == "powersgd":
            return FLOAT_BYTES * self.rank(elements) * sum(matrix_of(elements))
        return -(-elements // 8) + FLOAT_BYTES * -(-elements // SIGN_GROUP)


class Compression(NamedTuple):
    """What a plan compresses; None where it does not."""

    gradients: GradientScheme | None = None
    activations: Literal["bf16", "int8"] | None = None

    @classmethod
    def of(cls, gradients: str | None, activations: str | None) -> Compression:
        """From names.

        Raises:
            UserError: one of them is unknown.
        """
        return cls(
            None if gradients is None else parse_gradients(gradients),
            None if activations is None else parse_activations(activations),
        )


NOTHING = Compression()


def parse_gradients(text: str) -> GradientScheme:
    """`topk:0.01`, `powersgd:4` or `onebit`.

    Raises:
        UserError: it is none of them.
    """
    name, colon, number = text.partition(":")
    if name == "onebit" and not colon:
        return GradientScheme("onebit")
    if name == "topk":
        try:
            fraction = float(number)
        except ValueError:
            fraction = math.nan
        if 0 < fraction < _MOST_FRACTION:
            return GradientScheme("topk", fraction)
        raise UserError(
            f"{text!r} does not say what part to send; expected a number above 0 and below {_MOST_FRACTION}, such as "
            "topk:0.01."
        )
    if name == "powersgd":
        if number.isascii() and number.isdecimal() and len(number) < 5 and 1 <= int(number) <= _MOST_RANK:
            return GradientScheme("powersgd", int(number))
        raise UserError(f"{text!r} has no rank from 1 to {_MOST_RANK}; expected one, such as powersgd:4.")
    raise UserError(f"{text!r} is no way to compress gradients; expected topk:0.01, powersgd:4 or onebit.")


def parse_activations(text: str) -> Literal["bf16", "int8"]:
    """The name itself.

    Raises:
        UserError: it is unknown.
    """
    for name in _ACTIVATIONS:
        if text == name:
            return name  # type: ignore[return-value]
    raise UserError(f"{text!r} is no way to compress activations; expected {' or '.join(_ACTIVATIONS)}.")


def matrix_of(elements: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a row of elements is laid out in, as near to a square as can be."""
    rows = math.isqrt(max(elements, 1) - 1) + 1
    return rows, -(-elements // rows)


def bucket_count(total_bytes: int, shards: int, bucket_bytes: int = BUCKET_BYTES) -> int:
    """How many buckets the parameters of a replicated stage are cut into: a multiple of its replicas."""
    return shards * max(1, round(total_bytes / (shards * bucket_bytes)))


def stage_bytes_after(scheme: GradientScheme, trainable_bytes: int, replicas: int) -> int:
    """What all buckets of a replicated stage take, in bytes; parameters are taken to be float32."""
    elements = trainable_bytes // FLOAT_BYTES
    count = bucket_count(trainable_bytes, replicas)
    less, more = divmod(elements, count)
    return more * scheme.bytes_after(less + 1) + (count - more) * scheme.bytes_after(less)


def linear_bytes(scheme: GradientScheme, trainable_bytes: int) -> int:
    """What some parameters add to a large stage: their share of buckets that are full.

    A planner that compares stages needs sizes that add up. Under `powersgd` a small stage takes more than this.
    """
    full = scheme.bytes_after(BUCKET_BYTES // FLOAT_BYTES)
    return -(-trainable_bytes * full // BUCKET_BYTES)


def crossing_bytes(scheme: Literal["bf16", "int8"], activation_bytes: int, samples: int) -> int:
    """What crosses a cut each way, in bytes, taken to be one float32 tensor with a row a sample."""
    if scheme == "bf16":
        return -(-activation_bytes // 2)
    elements = -(-activation_bytes // FLOAT_BYTES)
    return min(elements + FLOAT_BYTES * samples, activation_bytes)
