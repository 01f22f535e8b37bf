"""What runs in a loader process, and how that is started: see `pd_train.reading`, which hands out the work.

Both ends find this module by its name, since what crosses between them is pickled.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from pd_format.data import images_of, parse_data
from pd_format.layers.factory import load_function
from pd_train.course import MinibatchKey
from pd_train.data import Minibatch, MinibatchLoader
from pd_train.debug_dump import held_back

__all__ = [
    "Failure",
    "InLoaderProcess",
    "LoadedByKey",
    "Loaders",
    "as_it_is",
    "load",
    "prepare_processes",
    "start_process",
]

Loaders = tuple[MinibatchLoader, MinibatchLoader]
"""For training and for validation."""


def prepare_processes(data: str) -> None:
    """Begin to start the process that loader processes are forked from, which loads torch meanwhile."""
    modules = ["pd_train.tied", __name__]
    if images_of(parse_data(data)) is not None:
        modules.append("torchvision.transforms")
    if multiprocessing.parent_process() is not None:  # A program that launches workers has such a process already.
        multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with held_back(signal.SIGUSR1):  # For ever: it is for workers.
        multiprocessing.forkserver.ensure_running()


class LoadedByKey(Dataset[Any]):
    """Both loaders as torch wants them: a data set whose items are minibatches."""

    def __init__(self, loaders: Loaders, data: str, threads: int) -> None:
        self.loaders = loaders
        self.data = data
        self.threads = threads

    def __getitem__(self, key: MinibatchKey) -> Minibatch | Failure:
        try:
            return load(self.loaders, key)
        except Exception as error:
            return Failure.of(error)

    def __reduce__(self) -> tuple[Any, ...]:
        # The user's file is imported first. Then what it defines is found by name.
        return _import_user_code, (self.data,), self.__dict__


def _import_user_code(data: str) -> LoadedByKey:
    if parse_data(data).kind == "function":
        load_function(data)
    return LoadedByKey.__new__(LoadedByKey)


def load(loaders: Loaders, key: MinibatchKey) -> Minibatch:
    """A minibatch of the run."""
    return loaders[0 if key.training else 1].load(key.epoch, key.minibatch)


def as_it_is(item: object) -> object:
    """How torch collates what is a minibatch already."""
    return item


def start_process(number: int) -> None:
    """The first thing in a loader process, which ends as soon as the worker does, however that ends."""
    worker = multiprocessing.parent_process()
    assert worker is not None

    def follow() -> None:
        worker.join()
        os._exit(1)

    threading.Thread(target=follow, name="worker-watch", daemon=True).start()
    info = torch.utils.data.get_worker_info()
    assert info is not None
    torch.set_num_threads(info.dataset.threads)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the worker."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, trace)


class InLoaderProcess(Exception):
    """Shows in the log where an exception comes from."""

    def __str__(self) -> str:
        return f"in a loader process:\n{self.args[0]}"
