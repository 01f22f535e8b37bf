"""What a parameter server is to the compute loop, whichever way its replicas agree, and how a stage is cut for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from pd_train.buckets import Bucket, Piece, cut_into_buckets, whole_parameters
from pd_train.gradients import Pieces
from pd_train.shard import Shard
from pd_train.wire import WireError

__all__ = ["SegmentSize", "Send", "Server", "check_pieces", "cut_stage", "piece_view"]

Send = Callable[[int, int, str, int, object], None]
"""(segment, replica, kind, update or version, body): sends a message to one replica of the stage."""


@dataclass(frozen=True)
class SegmentSize:
    """What every worker must know of a segment to tell who takes part in an update, and with what weight."""

    minibatches: int
    samples: int
    """Of every minibatch but the last."""
    last_samples: int

    def samples_of(self, minibatch: int) -> int:
        return self.last_samples if minibatch == self.minibatches - 1 else self.samples


class Server(Protocol):
    """What the compute loop asks of a parameter server."""

    def start_segment(self, number: int, size: SegmentSize, rate: float) -> None:
        """After a drain; what arrives for another segment is kept until that one starts."""

    def before_forward(self) -> None:
        """A forward pass is about to begin."""

    def start_backward(self, minibatch: int) -> None:
        """A backward pass is about to begin."""

    def finish_backward(self, gradients: Sequence[Tensor | None]) -> None:
        """The backward pass is over; gradients of the parameters, in their order."""

    def take_gradients(self, segment: int, update: int, replica: int, body: tuple[int, Pieces, int]) -> None:
        """A replica's gradients for one of this shard's buckets have arrived.

        Raises:
            WireError: they are of another size or dtype than the bucket, or compressed otherwise than the plan says,
                or it is another shard's.
        """

    def take_parameters(self, segment: int, version: int, body: tuple[int, Pieces]) -> None:
        """New parameters have arrived from the shard that owns the bucket.

        Raises:
            WireError: as for `take_gradients`.
        """

    def advance(self) -> None:
        """Do what can be done with what has arrived, within a backward pass too."""

    def is_drained(self) -> bool:
        """Whether every update of the segment has reached this worker."""

    def shard(self) -> Shard:
        """What this replica's optimizers keep; to be looked at after a drain only."""

    def held(self) -> Iterator[Tensor]:
        """Optimizer state, and gradients and parameters that wait."""

    staleness: Counter[int]
    """Updates between each gradient's being read for and applied, where they have no bound."""


def cut_stage(parameters: Sequence[nn.Parameter], replicas: int, even: bool = False) -> list[Bucket]:
    """The buckets of a stage: one of whole parameters for a single worker; `even` as for `cut_into_buckets`."""
    elements = [parameter.numel() for parameter in parameters]
    if replicas == 1:
        return whole_parameters(elements)
    return cut_into_buckets(elements, [parameter.element_size() for parameter in parameters], replicas, even=even)


def piece_view(parameter: Tensor, piece: Piece, replicas: int) -> Tensor:
    """A piece of a parameter, sharing its memory: part of a flat row, or all of it for a single worker."""
    return parameter if replicas == 1 else parameter.view(-1)[piece.start : piece.stop]


def check_pieces(number: int, found: Sequence[Tensor | None], pieces: Mapping[int, Sequence[Tensor]]) -> None:
    """Compare what a message says of a bucket with the bucket.

    Args:
        number: of the bucket, by the message.
        found: a tensor, or None, for each of its pieces.
        pieces: of the buckets that such a message may be about, by number.

    Raises:
        WireError: the two do not fit.
    """
    own = pieces.get(number)
    if own is None:
        raise WireError(f"bucket {number}, which such a message cannot be about")
    if len(found) != len(own):
        raise WireError(f"{len(found)} pieces of bucket {number}, which has {len(own)}")
    for tensor, piece in zip(found, own, strict=True):
        if tensor is not None and (tensor.shape != piece.shape or tensor.dtype != piece.dtype):
            raise WireError(
                f"a piece of {tensor.dtype} {tuple(tensor.shape)} of bucket {number}, where {piece.dtype} "
                f"{tuple(piece.shape)} is expected"
            )
