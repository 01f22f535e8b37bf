"""Where every random number of a run comes from, as public functions (design, section 4).

A plain PyTorch loop that calls these draws what a pipeline draws: the order of the samples from (seed, epoch), a
sample's augmentation from (seed, epoch, index), and dropout and the like from (seed, epoch, minibatch, stage).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

__all__ = [
    "epoch_order",
    "minibatch_seed",
    "preserved_generators",
    "sample_seed",
    "seed_generators",
    "seed_host_generators",
]


def epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The order in which an epoch visits the samples: int64 of shape (samples,), each index once.

    It is `torch.randperm(samples, generator=g)` with a generator `g` of its own, seeded by a hash of seed and epoch.
    Minibatch b holds the indices `order[b * size : (b + 1) * size]`, in this order.
    """
    generator = torch.Generator().manual_seed(_hash("order", seed, epoch))
    return torch.randperm(samples, generator=generator)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """What `seed_host_generators` is called with before sample `index` of the data set is read in an epoch."""
    return _hash("sample", seed, epoch, index)


def minibatch_seed(seed: int, epoch: int, minibatch: int, stage: int) -> int:
    """What `seed_generators` is called with before the forward pass of a minibatch on a stage.

    Args:
        seed: of the run.
        epoch: from 0.
        minibatch: of the epoch, from 0.
        stage: of the plan, from 0.
    """
    return _hash("minibatch", seed, epoch, minibatch, stage)


def seed_generators(seed: int) -> None:
    """Seed what a model draws from unless told otherwise: the host's generators and those of CUDA devices in use.

    Args:
        seed: at least 0, below 2**64.
    """
    seed_host_generators(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def seed_host_generators(seed: int) -> None:
    """Seed what a data set draws from unless told otherwise: torch's CPU generator, Python's `random` and numpy's.

    Args:
        seed: at least 0, below 2**64.
    """
    # torch.manual_seed looks for other devices each time, which takes some eighty times as long.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Give the generators that `seed_host_generators` seeds their states back afterwards."""
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _hash(purpose: str, *numbers: int) -> int:
    """63 bits of BLAKE2b over the text `purpose 1 2 3`: the same on every machine and in every version."""
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
