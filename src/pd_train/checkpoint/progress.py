"""How far a run is: what rank 0 knows of it, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pd_train.checkpoint.part import START, Position
from pd_train.engine import Score
from pd_train.events import EpochMetrics

__all__ = ["RunProgress"]


@dataclass(frozen=True)
class RunProgress:
    """What a run has behind it at a position."""

    position: Position = START
    epochs: tuple[EpochMetrics, ...] = ()
    """Of the epochs that are over."""
    scores: tuple[Score, ...] = ()
    """Of the minibatches of the epoch that is not."""
    seconds: float = 0.0
    """That these took."""
    lost_seconds: float = 0.0
    """Between a checkpoint and going on from it."""
    skipped_by_stage: tuple[int, ...] = ()
    """Updates left out under float16, and at which stages gradients were not finite."""
    skipped_updates: int = 0
    loss_scale: tuple[float, int] | None = None
    """Under float16: its value, and good updates in a row."""

    def plain(self) -> dict[str, Any]:
        """As tensors and plain values, which need no code to be loaded."""
        return {
            "position": tuple(self.position),
            "epochs": [asdict(one) for one in self.epochs],
            "losses": torch.tensor([score.loss for score in self.scores], dtype=torch.float64),
            "samples": torch.tensor([score.samples for score in self.scores], dtype=torch.int64),
            "seconds": self.seconds,
            "lost_seconds": self.lost_seconds,
            "skipped_by_stage": self.skipped_by_stage,
            "skipped_updates": self.skipped_updates,
            "loss_scale": self.loss_scale,
        }

    @classmethod
    def of(cls, plain: dict[str, Any], stages: int) -> RunProgress:
        """From what `plain` gave, for a plan of so many stages."""
        scores = zip(plain["losses"].tolist(), plain["samples"].tolist(), strict=True)
        skipped: Sequence[int] = plain["skipped_by_stage"]
        return cls(
            position=Position(*plain["position"]),
            epochs=tuple(EpochMetrics(**one) for one in plain["epochs"]),
            scores=tuple(Score(loss, None, samples) for loss, samples in scores),
            seconds=plain["seconds"],
            lost_seconds=plain["lost_seconds"],
            # Another plan has other stages; what was left out by the old ones belongs to none of them.
            skipped_by_stage=tuple(skipped) if len(skipped) == stages else (0,) * stages,
            skipped_updates=plain["skipped_updates"],
            loss_scale=plain["loss_scale"],
        )
