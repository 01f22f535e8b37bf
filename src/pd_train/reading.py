"""Where stage 0 takes its minibatches from: it reads them itself, or processes read them ahead of it.

    worker process                              its loader processes (--loader-workers)
    load(b)  <--  pinned memory  <--  in order  <--  minibatch b, b + r, ...   one process each, in turn

Each process holds the whole loader and is asked for minibatches by number. A minibatch does not depend on who makes it,
so neither does any number of the run. They come from a server process that is started afresh: nothing of the worker is
copied into them, neither sockets nor threads nor a GPU.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from pd_format.data import parse_data
from pd_format.errors import UserError
from pd_format.units import format_bytes
from pd_train.course import Course, MinibatchKey
from pd_train.data import Minibatch
from pd_train.host import shared_memory_bytes
from pd_train.loader_process import Failure, InLoaderProcess, LoadedByKey, Loaders, as_it_is, load, start_process
from pd_train.options import RunOptions
from pd_train.routing import Place

__all__ = ["AHEAD", "Direct", "ReadAhead", "Source", "open_source"]

log = logging.getLogger(__name__)

AHEAD = 2
"""Minibatches that each process reads ahead."""
_NOTES = 3
"""Files that could not be read which the person is told of at once; all of them are in the report."""


class Source(Protocol):
    """Gives a worker of stage 0 its own minibatches, in the order of the run."""

    skipped: list[str]
    """Files that others have stood in for so far, in no order."""

    def expect(self, training: bool, epoch: int, first: int, minibatches: int) -> None:
        """A segment of so many minibatches (of all replicas) begins at minibatch `first` of the epoch."""

    def load(self, key: MinibatchKey) -> Minibatch:
        """The segment's next minibatch.

        Raises:
            UserError: the data cannot be read, or does not fit the model.
        """

    def close(self) -> None:
        """End what was started; closing twice does no harm."""


class _Noting:
    """Remembers the files that could not be read, and tells the person of the first ones."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.skipped: list[str] = []

    def _note(self, minibatch: Minibatch) -> Minibatch:
        for path in minibatch.skipped:
            if path in self.skipped:
                continue
            self.skipped.append(path)
            if len(self.skipped) <= _NOTES:
                self._tell(f"{path} cannot be read as an image; another one of its class stands in for it")
            elif len(self.skipped) == _NOTES + 1:
                self._tell("more files cannot be read as images; report.json will list all of them")
        return minibatch


class Direct(_Noting):
    """Reads when it is asked, on the thread that asks.

    Args:
        loaders: for training and for validation.
        tell: takes sentences for the person.
    """

    def __init__(self, loaders: Loaders, tell: Callable[[str], None]) -> None:
        super().__init__(tell)
        self._loaders = loaders

    def expect(self, training: bool, epoch: int, first: int, minibatches: int) -> None:
        pass

    def load(self, key: MinibatchKey) -> Minibatch:
        return self._note(load(self._loaders, key))

    def close(self) -> None:
        pass


class ReadAhead(_Noting):
    """Has processes read what the run will need next, at most `AHEAD` minibatches each.

    Args:
        loaders: for training and for validation.
        data: what `--data` says, by which a process finds the user's code again.
        course: of the run.
        processes: how many, at least 1.
        tell: takes sentences for the person.
        threads: that each process computes with.
        pin: hand minibatches over in pinned memory, from where a GPU copies them faster.
    """

    def __init__(
        self,
        loaders: Loaders,
        data: str,
        course: Course,
        processes: int,
        tell: Callable[[str], None],
        *,
        threads: int,
        pin: bool,
    ) -> None:
        super().__init__(tell)
        self._course = course
        self._order = _Order()
        self._coming: Iterator[MinibatchKey] = iter(())
        self._next: MinibatchKey | None = None
        self._minibatches: Iterator[Minibatch | Failure] | None = None
        self._processes = processes
        self._loader: DataLoader[Any] | None = DataLoader(
            LoadedByKey(loaders, data, threads),
            batch_size=None,  # An item is a whole minibatch.
            sampler=self._order,
            collate_fn=as_it_is,
            num_workers=processes,
            multiprocessing_context=multiprocessing.get_context("forkserver"),
            worker_init_fn=start_process,
            prefetch_factor=AHEAD,
            persistent_workers=True,
            pin_memory=pin,
            generator=torch.Generator(),  # Otherwise it draws from the global one.
        )
        # Before the first segment, so that the time it takes to start is not taken for training.
        self.expect(course.training > 0, 0, 0, course.training or course.validation)

    def expect(self, training: bool, epoch: int, first: int, minibatches: int) -> None:
        due = next(self._course.of_segment(training, epoch, first, minibatches), None)
        if due is None or due == self._next:
            return
        assert self._loader is not None
        self._order.ahead = lambda: self._course.after(training, epoch, first)
        self._coming = self._order.ahead()
        self._next = next(self._coming, None)
        try:
            with warnings.catch_warnings():
                # torch says of a data set that cannot be pickled what is better said below.
                warnings.simplefilter("ignore", UserWarning)
                self._minibatches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"The data set cannot be handed to processes that load it: {str(error).splitlines()[0]}. Mend what it "
                "holds (functions must have a name in a module, files be opened when a sample is read), or train with "
                "--loader-workers 0."
            ) from error
        except (RuntimeError, OSError) as error:
            raise self._lost(error) from error

    def load(self, key: MinibatchKey) -> Minibatch:
        assert self._minibatches is not None
        if key != self._next:
            raise RuntimeError(f"{key} was asked for, {self._next} expected")
        self._next = next(self._coming, None)
        try:
            found = next(self._minibatches)
        except RuntimeError as error:  # What torch raises when a process has gone.
            raise self._lost(error) from error
        if isinstance(found, Failure):
            raise found.error from InLoaderProcess(found.trace)
        return self._note(found)

    def _lost(self, error: Exception) -> UserError:
        free = shared_memory_bytes()
        shared = "" if math.isinf(free) else f" (/dev/shm has {format_bytes(free)} free)"
        return UserError(
            f"Loading data in processes of their own failed: {str(error).splitlines()[0]}. As a rule memory is "
            f"lacking, or shared memory{shared}; try fewer than {self._processes} with --loader-workers, or 0. "
            "The worker's log may say more."
        )

    def close(self) -> None:
        # The last reference to torch's iterator ends its processes and waits for them.
        self._minibatches = None
        if self._loader is not None:
            self._loader._iterator = None
        self._loader = None


def open_source(
    options: RunOptions, place: Place, loaders: Loaders, processes: int, pin: bool, tell: Callable[[str], None]
) -> Source:
    """The source of a worker of stage 0; the arguments are those of the classes above."""
    log.info("%d processes load data", processes)
    if processes == 0:
        return Direct(loaders, tell)
    course = Course(
        epochs=1 if options.evaluate_only else options.epochs,
        training=0 if options.evaluate_only else loaders[0].minibatches,
        validation=loaders[1].minibatches,
        flush=options.mode.flush,
        most=options.minibatches,
        replica=place.replica,
        replicas=place.stage.replicas,
    )
    # What a user's data set computes may depend on the number of threads in its last bits; what ours do does not.
    threads = options.threads if parse_data(options.data).kind == "function" else 1
    return ReadAhead(loaders, options.data, course, processes, tell, threads=threads, pin=pin)


class _Order:
    """torch's sampler: what is to be read, again from the start whenever it is asked."""

    ahead: Callable[[], Iterator[MinibatchKey]]

    def __iter__(self) -> Iterator[MinibatchKey]:
        return self.ahead()
