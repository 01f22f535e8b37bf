"""Metrics that a validation data set computes itself, from what the model predicts for all of its samples.

last stage                               rank 0
predictions of each minibatch  ------->  in the order of the data set  ->  data set's metric("meteor", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from pd_format.errors import UserError
from pd_format.layers.task import PredictingTask, Task

__all__ = ["Measure", "MeasuredDataset", "measure_of"]

Measure = Callable[[Sequence[Tensor]], float]
"""From the prediction for each sample, in the order of the data set, to a metric."""


@runtime_checkable
class MeasuredDataset(Protocol):
    """A validation data set with metrics of its own."""

    def check_metric(self, name: str) -> None:
        """Called before training.

        Raises:
            UserError: the data set has no such metric, or it needs something that is not installed.
        """

    def metric(self, name: str, predictions: Sequence[Tensor]) -> float:
        """The metric's value; one prediction a sample, in the order of the data set, as the task made them."""


def measure_of(dataset: object, data: str, metric: str, task: Task, task_name: str) -> Measure:
    """How to get from predictions to a metric.

    Args:
        dataset: for validation.
        data, task_name: what they are called, for messages.

    Raises:
        UserError: the task predicts nothing, or the data set cannot judge it.
    """
    if not isinstance(task, PredictingTask):
        raise UserError(
            f"--metric {metric} is made of what the model predicts, and task {task_name!r} makes no predictions; "
            "use --metric accuracy, loss or perplexity."
        )
    if not isinstance(dataset, MeasuredDataset):
        raise UserError(
            f"--metric {metric}: the validation data of --data {data} cannot judge predictions (it has no functions "
            "check_metric and metric); use --metric accuracy, loss or perplexity."
        )
    dataset.check_metric(metric)
    return partial(dataset.metric, metric)
