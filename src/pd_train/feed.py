"""What the workers of the first stage read: the data sets' minibatches, by processes of their own where that pays."""

from __future__ import annotations

import math

import torch

from pd_format.data import parse_data
from pd_format.errors import UserError
from pd_format.layers.inputs import dtype_of
from pd_format.layers.task import Task
from pd_train.built import BuiltStage, made_up
from pd_train.data import MinibatchLoader
from pd_train.datasets.loading import load_datasets
from pd_train.host import available_cores, shared_memory_bytes
from pd_train.measured import Measure, measure_of
from pd_train.metrics import METRICS
from pd_train.options import RunOptions
from pd_train.reading import AHEAD

__all__ = ["loader_processes", "loader_workers", "open_data"]

_MOST_BY_DEFAULT = 4
"""Loader processes of a worker where nobody says how many."""


def open_data(
    options: RunOptions, built: BuiltStage, task: Task
) -> tuple[tuple[MinibatchLoader, MinibatchLoader], Measure | None]:
    """Training and validation minibatches, and the metric that is made of predictions, where the run has such a one."""
    plan = options.plan
    datasets = load_datasets(
        options.data,
        plan.inputs,
        built.classes,
        plan.minibatch_size,
        built.label_shape,
        lambda: task.random_targets(made_up(built.output), torch.Generator().manual_seed(0)),
        options.skip_corrupt,
    )
    loaders = []
    for training, dataset in zip((True, False), datasets, strict=True):
        if training and options.evaluate_only:
            continue  # Nothing is ever read of it, so it may be empty.
        try:
            loader = MinibatchLoader(
                dataset,
                plan.inputs,
                plan.minibatch_size,
                seed=options.seed,
                shuffle=training,
                drop_last=options.drop_last and training,
            )
        except UserError as error:
            part = "train" if training else "validation"
            raise UserError(f"--data {options.data}, {part}: {error}") from None
        loaders.append(loader)
    measure = None
    if METRICS[options.metric].from_predictions:
        measure = measure_of(datasets[1], options.data, options.metric, task, plan.task)
    return (loaders[0], loaders[-1]), measure


def loader_processes(options: RunOptions) -> int:
    """How many loader processes each worker of the first stage gets on this machine."""
    workers = options.plan.workers
    minibatch_bytes = sum(math.prod(spec.shape) * dtype_of(spec).itemsize for spec in options.plan.inputs)
    cores, shared = available_cores() // workers, shared_memory_bytes() / workers
    return loader_workers(options.loader_workers, options.data, cores, minibatch_bytes, shared)


def loader_workers(wanted: int | None, data: str, cores: int, minibatch_bytes: int, shared_bytes: float) -> int:
    """How many loader processes a worker gets.

    Args:
        wanted: what the person asked for; None for a few where samples of `data` are read from files one by one, and
            none where they lie in memory or come from a function, which may hold what no other process can have.
        cores: for each worker of this host; one is left to the worker itself.
        minibatch_bytes: of the model's inputs.
        shared_bytes: free shared memory for each worker of this host; half of it is left alone.
    """
    if wanted is not None:
        return wanted
    if parse_data(data).kind != "imagefolder":
        return 0
    room = shared_bytes / 2 / (AHEAD * max(1, minibatch_bytes))
    return max(0, min(_MOST_BY_DEFAULT, cores - 1, math.floor(min(room, _MOST_BY_DEFAULT))))
