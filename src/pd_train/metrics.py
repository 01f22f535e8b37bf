"""By which figure of the validation a run is judged, and when a target is reached (design, section 7)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pd_format.errors import UserError

__all__ = ["METRICS", "Metric", "default_metric", "perplexity_of", "settle_metric"]


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
    return "loss" if ":" in task else _DEFAULTS.get(task, "accuracy")


def settle_metric(
    task: str, metric: str | None, target: float | None, target_accuracy: float | None
) -> tuple[str, float | None]:
    """The metric, and its value that ends the run, if one was given.

    Args:
        task: of the plan.
        metric, target, target_accuracy: the options, None where they were left out.

    Raises:
        UserError: the options contradict each other or the task, or the metric never has such a value.
    """
    if ":" in task and (target_accuracy is not None or metric == "accuracy"):
        raise UserError(
            f"accuracy is not known: the plan's loss is a function of your own ({task}), which does not say what is "
            "right. Leave out --target-accuracy and --metric accuracy; --target-metric 0.5 stops at that loss."
        )
    if target_accuracy is not None:
        if target is not None or metric not in (None, "accuracy"):
            other = f"--metric {metric}" if target is None else "--target-metric"
            raise UserError(f"--target-accuracy and {other} exclude each other; leave one of them out.")
        return "accuracy", target_accuracy
    metric = metric or default_metric(task)
    least, most = METRICS[metric].least, METRICS[metric].most
    if metric == "loss" and ":" in task:
        least = -math.inf  # A loss of one's own may be negative.
    if target is not None and not least <= target <= (math.inf if most is None else most):
        expected = f"from {least:g} on" if most is None else f"between {least:g} and {most:g}"
        raise UserError(f"--target-metric: found {target:g}; a validation's {metric} is {expected}.")
    return metric, target


def perplexity_of(loss: float | None) -> float | None:
    """exp of a mean cross entropy in nats a token; None where that is no finite number."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return None
