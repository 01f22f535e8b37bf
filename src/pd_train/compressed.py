"""Compressed traffic of a replicated stage, both ways, with error feedback (Tang et al. 2019, "DoubleSqueeze").

    gradients     a replica adds a bucket's gradient to what earlier messages left out, sends that compressed, and keeps
                  what this message leaves out
    parameters    a shard's optimizer works on exact parameters; what travels is their difference from those that the
                  replicas compute with, compressed, and all of them, the shard's owner too, add the same decoded
                  numbers: what is left out stays in the next difference

Nothing is left over at a drain: a replica's last gradients of a segment, and a stage's last parameters, travel whole,
with all that was left out before. So checkpoints, validation and model.pt know exact parameters, which any plan can go
on from, and a run that goes on has the bits of one that was never interrupted. A segment pays for that with one whole
round. A shard's owner counts its own gradients as they are: nothing is sent, so there is nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pd_format.compression import FLOAT_BYTES, GradientScheme
from pd_train.compressors import check_parts, get_compressor
from pd_train.gradients import Gradients, Pieces
from pd_train.server import check_pieces
from pd_train.wire import WireError

__all__ = ["CompressedTraffic", "check_message", "unpacked"]


class CompressedTraffic:
    """One replica's side.

    Args:
        scheme: of the plan.
        pieces: of each bucket, in the first parameter set.
        own: numbers of the buckets of this replica's shard.
    """

    def __init__(self, scheme: GradientScheme, pieces: Sequence[Sequence[Tensor]], own: Sequence[int]) -> None:
        self._compressor = get_compressor(scheme)
        self._pieces = pieces
        # Buckets of another type, or too short to gain, travel whole.
        self._elements = {
            index: elements
            for index, bucket in enumerate(pieces)
            if all(piece.dtype is torch.float32 for piece in bucket)
            and scheme.bytes_after(elements := sum(piece.numel() for piece in bucket)) < FLOAT_BYTES * elements
        }
        self.masters: dict[int, list[Tensor]] = {}
        """The exact parameters of the own buckets that are compressed; their optimizers start from these."""
        self._left_out: dict[int, list[Tensor]] = {}
        """By the messages so far, of each piece of a bucket that others own; one row's parts."""
        self._rows: dict[int, Tensor] = {}
        self._owes: dict[int, list[bool]] = {}
        """Whether a piece has had a gradient since nothing was left out."""
        self._reserve(set(own))

    def compresses(self, bucket: int) -> bool:
        """Whether messages about a bucket may be compressed."""
        return bucket in self._elements

    def held(self) -> Iterator[Tensor]:
        """Memory beyond that of the parameter sets."""
        yield from self._rows.values()
        for masters in self.masters.values():
            yield from masters

    def start_segment(self, newest: Sequence[Sequence[Tensor]]) -> None:
        """After a drain; `newest` has the parameters that every replica holds, of each piece of each bucket."""
        self._compressor.start()
        for bucket, masters in self.masters.items():
            for master, piece in zip(masters, newest[bucket], strict=True):
                master.copy_(piece)

    def check(self, bucket: int, parts: list[Tensor], is_gradient: bool) -> None:
        """Compare a compressed message with the bucket that it is about.

        Raises:
            WireError: it cannot be unpacked.
        """
        if bucket not in self._elements:
            raise WireError(f"bucket {bucket} compressed, which travels whole")
        if is_gradient:
            present = parts[0] if parts else None
            if present is None or present.dtype is not torch.bool or present.shape != (len(self._pieces[bucket]),):
                raise WireError(f"bucket {bucket} compressed, without a word on which of its pieces have a gradient")
            parts = parts[1:]
        check_parts(bucket, parts, self._compressor, self._elements[bucket])

    def pack_gradients(self, bucket: int, gradients: Gradients, weight: int | None, last: bool) -> Pieces:
        """What is sent of a bucket's gradients to the shard that owns it.

        Args:
            bucket: its number.
            gradients: of its pieces; they are written over.
            weight: that they have been multiplied with, if any; only in a replica's last ones of a segment.
            last: whether they are that.
        """
        if bucket not in self._elements:
            return gradients
        owes = self._owes[bucket]
        if last:
            return self._pack_last(bucket, gradients, weight)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self._left_out[bucket][number].add_(gradient)
                owes[number] = True
        if not any(owes):
            return gradients
        row = self._rows[bucket]
        parts = self._compressor.encode(bucket, row)
        row.sub_(self._decode(bucket, parts, row.device))
        return [torch.tensor(owes), *parts]

    def unpack_gradients(self, bucket: int, found: list[Tensor]) -> Gradients:
        """The gradients of a bucket's pieces, in memory of their own."""
        present, *parts = found
        pieces = self._split(bucket, self._decode(bucket, parts, self._pieces[bucket][0].device))
        return tuple(piece if there else None for piece, there in zip(pieces, present.tolist(), strict=True))

    def pack_step(self, bucket: int, pieces: Sequence[Tensor]) -> Pieces:
        """What is sent of an own bucket whose masters have been updated; `pieces` become what all will have."""
        row = torch.cat([master - piece for master, piece in zip(self.masters[bucket], pieces, strict=True)])
        parts = self._compressor.encode(bucket, row)
        self.add_step(bucket, parts, pieces)
        return parts

    def add_step(self, bucket: int, parts: list[Tensor], pieces: Sequence[Tensor]) -> None:
        """Make the pieces, which hold the version before, the next version."""
        for piece, step in zip(pieces, self._split(bucket, self._decode(bucket, parts, pieces[0].device)), strict=True):
            piece.add_(step)

    def _reserve(self, own: set[int]) -> None:
        for bucket, elements in self._elements.items():
            pieces = self._pieces[bucket]
            if bucket in own:
                self.masters[bucket] = [piece.clone() for piece in pieces]
            else:
                self._rows[bucket] = torch.zeros(elements, device=pieces[0].device)
                self._left_out[bucket] = self._split(bucket, self._rows[bucket])
                self._owes[bucket] = [False] * len(pieces)

    def _pack_last(self, bucket: int, gradients: Gradients, weight: int | None) -> Pieces:
        result = list(gradients)
        for number, (left, owed) in enumerate(zip(self._left_out[bucket], self._owes[bucket], strict=True)):
            if owed:
                left = left if weight is None else left * weight
                gradient = gradients[number]
                result[number] = left.clone() if gradient is None else gradient.add_(left)
        self._rows[bucket].zero_()
        self._owes[bucket] = [False] * len(gradients)
        return tuple(result)

    def _decode(self, bucket: int, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        return self._compressor.decode(parts, self._elements[bucket], device)

    def _split(self, bucket: int, row: Tensor) -> list[Tensor]:
        return list(torch.split(row, [piece.numel() for piece in self._pieces[bucket]]))


def check_message(
    traffic: CompressedTraffic | None,
    bucket: int,
    found: Pieces,
    pieces: Mapping[int, Sequence[Tensor]],
    is_gradient: bool,
) -> None:
    """Compare a message about a bucket, compressed or not, with the bucket.

    Args:
        traffic: of the stage, where it compresses.
        bucket: by the message.
        found: what it has of it.
        pieces: of the buckets that such a message may be about, by number.
        is_gradient: or parameters.

    Raises:
        WireError: the two do not fit.
    """
    if isinstance(found, tuple):
        check_pieces(bucket, found, pieces)
    elif traffic is None or bucket not in pieces:
        raise WireError(f"bucket {bucket} compressed, which such a message cannot be about")
    else:
        traffic.check(bucket, found, is_gradient)


def unpacked(traffic: CompressedTraffic | None, bucket: int, found: Pieces) -> Gradients:
    """The gradients of a message, which are the taker's to change."""
    if isinstance(found, tuple):
        return found
    assert traffic is not None
    return traffic.unpack_gradients(bucket, found)
