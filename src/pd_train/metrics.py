"""By which figure of the validation a run is judged, and when a target is reached (design, section 7)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["METRICS", "Metric", "default_metric", "perplexity_of"]


@dataclass(frozen=True)
class Metric:
    """A figure of a validation."""

    name: str
    lower_is_better: bool = False
    most: float | None = 1.0
    """The largest value that it can have."""
    least: float = 0.0
    from_predictions: bool = False
    """The validation data set computes it from what the model predicts, rather than rank 0 from the losses."""

    def is_reached(self, value: float | None, target: float) -> bool:
        """Whether a value, None where there is none, is as good as the target."""
        if value is None:
            return False
        return value <= target if self.lower_is_better else value >= target

    def best(self, values: Iterable[float | None]) -> float | None:
        """The best of the values that there are."""
        known = [value for value in values if value is not None]
        return (min if self.lower_is_better else max)(known, default=None)


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy"),
        Metric("loss", lower_is_better=True, most=None),
        Metric("perplexity", lower_is_better=True, most=None, least=1.0),
        Metric("meteor", from_predictions=True),
    )
}

_DEFAULTS = {"language-modeling": "perplexity"}


def default_metric(task: str) -> str:
    """What a task is judged by where nobody says; accuracy is that of tokens where a sample has many."""
    return _DEFAULTS.get(task, "accuracy")


def perplexity_of(loss: float | None) -> float | None:
    """exp of a mean cross entropy in nats a token; None where that is no finite number."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return None
