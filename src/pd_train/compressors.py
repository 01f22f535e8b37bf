"""What compression does to a row of float32 numbers on its way between replicas; a scheme a class.

    topk        the elements of the largest magnitude, with their places (Aji and Heafield 2017)
    powersgd    the row as a matrix M, nearly square: P Q' with P = orthonormal(M Q), Q = M' P (Vogels et al. 2019)
    onebit      signs, and the mean magnitude of every 512 elements (Seide et al. 2014)

What is left out is the caller's to keep and to add to the next row (`pd_train.compressed`). Decoding is elementwise,
one rounding an operation: every replica gets the same bits of the same message, whatever processor it runs on. NaN and
infinity stay in the message, so that a run that diverges still shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pd_format.compression import SIGN_GROUP, GradientScheme, matrix_of
from pd_train.wire import WireError

__all__ = ["Compressor", "check_parts", "get_compressor"]

_BITS = torch.arange(8, dtype=torch.uint8)


class Compressor(Protocol):
    """Called under `torch.no_grad`; parts are tensors on the row's device, or on the CPU where they have arrived."""

    def start(self) -> None:
        """Forget what was learned from earlier rows: bits depend on what follows alone."""
        ...

    def encode(self, key: int, row: Tensor) -> list[Tensor]:
        """The parts of a message; rows of one key follow each other, and the row is left as it is."""
        ...

    def decode(self, parts: Sequence[Tensor], elements: int, device: torch.device) -> Tensor:
        """What is left of the row, in memory of its own."""
        ...

    def forms(self, elements: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each part of a row of so many elements."""
        ...


class TopK:
    """See the module."""

    def __init__(self, scheme: GradientScheme) -> None:
        self._scheme = scheme

    def start(self) -> None:
        pass

    def encode(self, key: int, row: Tensor) -> list[Tensor]:
        # NaN counts as the largest.
        places = torch.topk(row.abs(), self._scheme.kept(row.numel()), sorted=False).indices.sort().values
        return [places.to(torch.int32), row[places]]

    def decode(self, parts: Sequence[Tensor], elements: int, device: torch.device) -> Tensor:
        places, values = (part.to(device) for part in parts)
        row = torch.zeros(elements, device=device)
        row[places.long()] = values
        return row

    def forms(self, elements: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        kept = self._scheme.kept(elements)
        return [(torch.int32, (kept,)), (torch.float32, (kept,))]


class PowerSgd:
    """See the module. Q of a key's last row is where its next one starts from, which makes one iteration enough."""

    def __init__(self, scheme: GradientScheme) -> None:
        self._scheme = scheme
        self._warm: dict[int, Tensor] = {}

    def start(self) -> None:
        self._warm.clear()

    def encode(self, key: int, row: Tensor) -> list[Tensor]:
        rows, columns = matrix_of(row.numel())
        matrix = torch.nn.functional.pad(row, (0, rows * columns - row.numel())).view(rows, columns)
        if key not in self._warm:
            generator = torch.Generator().manual_seed(key)
            start = torch.randn(columns, self._scheme.rank(row.numel()), generator=generator)
            self._warm[key] = start.to(row.device)
        left = torch.linalg.qr(matrix @ self._warm[key]).Q.contiguous()
        self._warm[key] = matrix.T @ left
        return [left, self._warm[key]]

    def decode(self, parts: Sequence[Tensor], elements: int, device: torch.device) -> Tensor:
        left, right = (part.to(device) for part in parts)
        matrix = torch.zeros(left.shape[0], right.shape[0], device=device)
        # Not a matrix product, whose bits depend on the processor and the number of its threads.
        for k in range(left.shape[1]):
            matrix += left[:, k, None] * right[None, :, k]
        return matrix.view(-1)[:elements]

    def forms(self, elements: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        rank = self._scheme.rank(elements)
        return [(torch.float32, (size, rank)) for size in matrix_of(elements)]


class OneBit:
    """See the module."""

    def start(self) -> None:
        pass

    def encode(self, key: int, row: Tensor) -> list[Tensor]:
        groups = -(-row.numel() // SIGN_GROUP)
        sums = _padded(row.abs(), groups * SIGN_GROUP).view(groups, SIGN_GROUP).sum(1)
        counts = torch.full_like(sums, SIGN_GROUP)
        counts[-1] = row.numel() - (groups - 1) * SIGN_GROUP
        bits = _padded(row >= 0, -(-row.numel() // 8) * 8).view(-1, 8).to(torch.uint8)
        return [(bits << _BITS.to(row.device)).sum(1, dtype=torch.uint8), sums / counts]

    def decode(self, parts: Sequence[Tensor], elements: int, device: torch.device) -> Tensor:
        packed, scales = (part.to(device) for part in parts)
        bits = (packed[:, None] >> _BITS.to(device)).bitwise_and_(1).view(-1)[:elements]
        each = scales[:, None].expand(-1, SIGN_GROUP).reshape(-1)[:elements]
        return torch.where(bits.bool(), each, -each)

    def forms(self, elements: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(torch.uint8, (-(-elements // 8),)), (torch.float32, (-(-elements // SIGN_GROUP),))]


def get_compressor(scheme: GradientScheme) -> Compressor:
    """What does as a scheme says."""
    if scheme.name == "onebit":
        return OneBit()
    return TopK(scheme) if scheme.name == "topk" else PowerSgd(scheme)


def check_parts(number: int, parts: Sequence[Tensor], compressor: Compressor, elements: int) -> None:
    """Compare a compressed message about a bucket with the bucket.

    Raises:
        WireError: it cannot be decoded.
    """
    forms = compressor.forms(elements)
    if [(part.dtype, tuple(part.shape)) for part in parts] != forms:
        found = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts[:4])
        raise WireError(f"bucket {number} compressed to {found}, where {forms} is expected")
    for part in parts:
        if part.dtype is torch.int32 and not (int(part.min()) >= 0 and int(part.max()) < elements):
            raise WireError(f"places outside the {elements} elements of bucket {number}")


def _padded(row: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, size - row.numel()))
