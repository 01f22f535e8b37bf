"""How the trainable parameters of a replicated stage are cut into buckets and spread over its shards.

A bucket is what one message carries and one shard owns (design, section 5). Buckets follow the backward pass, the
last parameters first, so that the first one is complete early. A parameter is cut at multiples of 64 elements from
its start only: vectorised kernels compute other bits at odd ends.

Shards take turns, so a row of as many buckets as there are shards is what they all do at a time. What is left to do
when the pass ends are the buckets of the first parameters: these are smaller ones, so that all shards, and all network
cards, have a part in it, where a single large one would keep one of them busy and the others waiting.

    two shards, sizes a = 100, b = 300 elements:

    backward order   b[0:192]          b[192:300] a[0:100]
    bucket, shard    0, shard 0        1, shard 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pd_format.compression import BUCKET_BYTES, bucket_count

__all__ = ["Bucket", "Piece", "cut_into_buckets", "whole_parameters"]

_GRAIN = 64
_MOST_HALVINGS = 3
_LEAST_BYTES = 512 << 10
"""Of a bucket made by halving: smaller ones cost more in messages than they save."""


class Piece(NamedTuple):
    """Elements start..stop of a parameter, seen as one flat row."""

    parameter: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """Pieces that travel together, and the replica whose shard owns them."""

    shard: int
    pieces: tuple[Piece, ...]


def cut_into_buckets(
    elements: Sequence[int],
    element_bytes: Sequence[int],
    shards: int,
    bucket_bytes: int = BUCKET_BYTES,
    even: bool = False,
) -> list[Bucket]:
    """Cut parameters into buckets of about equal size, a multiple of the shards in number where there is enough.

    Args:
        elements: of each parameter.
        element_bytes: bytes an element, of each parameter.
        shards: r of the stage.
        bucket_bytes: the size to aim at.
        even: whether those of the last row are of that size too.
    """
    total = sum(n * size for n, size in zip(elements, element_bytes, strict=True))
    count = bucket_count(total, shards, bucket_bytes)
    ends = _ends(count, shards, 0 if even else _halvings(total / count))
    buckets: list[list[Piece]] = [[]]
    filled = 0
    for parameter in reversed(range(len(elements))):
        start, size = 0, element_bytes[parameter]
        while start < elements[parameter]:
            # The end of the current bucket, as bytes from the start of all: exact, so that rounding never adds up.
            room = total * ends[len(buckets) - 1] - filled
            stop = start + _GRAIN * max(0, round(room / (size * _GRAIN)))
            stop = elements[parameter] if len(buckets) == len(ends) else min(stop, elements[parameter])
            if stop > start:
                buckets[-1].append(Piece(parameter, start, stop))
                filled += (stop - start) * size
            if stop < elements[parameter]:
                buckets.append([])
            start = stop
    filled_buckets = [tuple(pieces) for pieces in buckets if pieces]
    return [Bucket(index % shards, pieces) for index, pieces in enumerate(filled_buckets)]


def _halvings(bucket_bytes: float) -> int:
    """How often the last row's buckets may be halved."""
    return max(0, min(_MOST_HALVINGS, int(math.log2(max(bucket_bytes, 1.0) / _LEAST_BYTES))))


def _ends(count: int, shards: int, halvings: int) -> list[float]:
    """Where each bucket ends, from 0 to 1: `count` equal ones, their last row made into rows of 1/2, 1/4, 1/4 of it."""
    rows = [0.5**n for n in range(1, halvings + 1)]
    sizes = [1.0] * (count - shards)
    for row in (*rows, rows[-1] if rows else 1.0):
        sizes += [row] * shards
    return [end / count for end in itertools.accumulate(sizes)]


def whole_parameters(elements: Sequence[int]) -> list[Bucket]:
    """The one bucket of a stage with a single worker: every parameter in one piece."""
    pieces = tuple(Piece(parameter, 0, n) for parameter, n in enumerate(elements))
    return [Bucket(0, pieces)] if pieces else []
