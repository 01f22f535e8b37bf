"""A stage that is emulated: the second implementation of the stage engine's protocol.

A pass waits for as long as a profile says instead of computing. The tensors are real, of the real sizes, and move
through the real runtime; nobody looks into them. They are allocated once and never written to, so that the system
gives them no memory: what a worker holds are the messages that have arrived.

    forward    |-------- sum of forward_ms --------|  activation_bytes leave
    backward   |-- last layer --|-- ... --|-- first layer --|  as many bytes leave
                                g                           g   the gradient of a layer, as soon as it has had its time

A pass's time runs from its beginning, so that handing out gradients within it is part of it, as it is on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pd_format.compression import crossing_bytes
from pd_format.profile import LayerProfile
from pd_train.compressed import CompressedTraffic
from pd_train.course import MinibatchKey
from pd_train.data import Minibatch
from pd_train.engine import Score
from pd_train.gradients import Gradients, Pieces
from pd_train.optimizers import MovingOptimizer

__all__ = [
    "EmulatedEngine",
    "EmulatedMinibatches",
    "EmulatedSource",
    "EmulatedTraffic",
    "NoArithmetic",
    "parameters_of",
]


def wait_until(due: float) -> None:
    """Sleep until a time of `time.monotonic`; at once where it has passed."""
    left = due - time.monotonic()
    if left > 0:
        time.sleep(left)


def parameters_of(layers: Sequence[LayerProfile]) -> list[nn.Parameter]:
    """One parameter for each layer that trains any, of as many bytes, in the layers' order."""
    return [
        nn.Parameter(_untouched(layer.trainable_bytes), requires_grad=False)
        for layer in layers
        if layer.trainable_bytes
    ]


class EmulatedEngine:
    """Waits instead of computing.

    Args:
        layers: of the stage.
        time_scale: what their times are multiplied with.
        samples: of a minibatch.
        is_last: whether it is the last stage, which sends nothing on.
        recompute: whether a backward pass runs the forward pass again first.
        crossing: the scheme that compresses activations at cuts, if any: it decides how many bytes cross.
        clock, wait: in seconds; `wait` returns at a time of the clock, or at once if it has passed.
    """

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        time_scale: float,
        samples: int,
        is_last: bool,
        recompute: bool = False,
        crossing: Literal["bf16", "int8"] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = wait_until,
    ) -> None:
        self._samples = samples
        self._clock = clock
        self._wait = wait
        scale = time_scale / 1000
        self._forward_s = scale * sum(layer.forward_ms for layer in layers)
        self._gradients = [torch.empty_like(parameter) for parameter in parameters_of(layers)]
        self._due: list[tuple[float, int]] = []
        """When in the backward pass each parameter has its gradient, the last one's first."""
        now, number = self._forward_s if recompute else 0.0, len(self._gradients)
        for layer in reversed(layers):
            now += scale * layer.backward_ms
            if layer.trainable_bytes:
                number -= 1
                self._due.append((now, number))
        self._backward_s = now
        self._frozen = [_untouched(layer.parameter_bytes - layer.trainable_bytes) for layer in layers]
        size = layers[-1].activation_bytes
        self._sent = () if is_last else _activations(crossing_bytes(crossing, size, samples) if crossing else size)
        self._answers: dict[int, list[Tensor]] = {}
        self._gradients_of: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._watching: list[Callable[[int, Tensor], None]] = []
        self.ends: list[float] = []
        """When each backward pass ended."""

    def forward(self, key: int, index: int, values: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        self._run_forward(key, values)
        return self._sent

    def forward_loss(self, key: int, index: int, values: tuple[Any, ...], targets: Any, seed: int) -> Score:
        self._run_forward(key, values)
        return Score(None, None, self._samples)

    def backward(
        self, key: int, index: int, gradients: Sequence[Tensor | None] | None, loss_scale: float = 1.0
    ) -> list[Tensor | None]:
        start = self._clock()
        if gradients is not None:
            wanted = [tensor.shape for tensor in self._sent if tensor.requires_grad]
            found = [None if gradient is None else gradient.shape for gradient in gradients]
            if found != wanted:
                raise RuntimeError(f"gradients of {found} arrived for values of {wanted}")
        for due, number in self._due if self._watching else ():
            self._wait(start + due)
            for ready in self._watching:
                ready(number, self._gradients[number])
        answers: list[Tensor | None] = [*self._answers.pop(key)]
        self._wait(start + self._backward_s)
        self.ends.append(self._clock())
        return answers

    def take_parameter_gradients(self, index: int) -> list[Tensor | None]:
        return list(self._gradients)

    def watch_gradients(self, ready: Callable[[int, Tensor], None]) -> None:
        self._watching.append(ready)

    def evaluate(self, index: int, values: tuple[Any, ...], targets: Any | None) -> tuple[Any, ...] | Score:
        raise NotImplementedError("an emulated run validates nothing")

    def _run_forward(self, key: int, values: tuple[Any, ...]) -> None:
        start = self._clock()
        # What arrived is not kept: a GPU has copied it to its own memory.
        self._answers[key] = [self._like(value) for value in values if value.requires_grad]
        self._wait(start + self._forward_s)

    def _like(self, value: Tensor) -> Tensor:
        """The gradient of a received tensor, which every minibatch has the same one of."""
        form = value.shape, value.dtype
        if form not in self._gradients_of:
            self._gradients_of[form] = torch.empty(form[0], dtype=form[1])
        return self._gradients_of[form]


class NoArithmetic:
    """An update that takes no time: its tensors move between the replicas, and their numbers are left alone."""

    def gather(self, total: Tensor | None, gradient: Tensor, weight: int | None) -> Tensor:
        return gradient

    def mean(self, contributions: Sequence[Sequence[Tensor | None]], weight: int) -> list[Tensor | None]:
        return list(contributions[0])

    def copy(self, pieces: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        pass

    def step(
        self,
        optimizer: MovingOptimizer,
        pieces: Sequence[Tensor],
        previous: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        rate: float,
    ) -> None:
        pass


class EmulatedTraffic(CompressedTraffic):
    """Instead of compressing: messages of the same sizes, whose numbers nobody looks at, and which take no time."""

    def pack_gradients(self, bucket: int, gradients: Gradients, weight: int | None, last: bool) -> Pieces:
        if last or bucket not in self._elements:
            return gradients
        return [torch.ones(len(gradients), dtype=torch.bool), *self._parts(bucket)]

    def unpack_gradients(self, bucket: int, found: list[Tensor]) -> Gradients:
        return tuple(found)

    def pack_step(self, bucket: int, pieces: Sequence[Tensor]) -> Pieces:
        return self._parts(bucket)

    def add_step(self, bucket: int, parts: list[Tensor], pieces: Sequence[Tensor]) -> None:
        pass

    def _reserve(self, own: set[int]) -> None:
        pass

    def _parts(self, bucket: int) -> list[Tensor]:
        forms = self._compressor.forms(self._elements[bucket])
        return [torch.zeros(shape, dtype=dtype) for dtype, shape in forms]


class EmulatedMinibatches:
    """Instead of a data set's loader: so many whole minibatches."""

    def __init__(self, minibatches: int, samples: int) -> None:
        self.minibatches = minibatches
        self._samples = samples

    def samples_of(self, minibatch: int) -> int:
        """Of any minibatch."""
        return self._samples


class EmulatedSource:
    """Where stage 0 gets minibatches from that nobody looks into; `samples` is what each has."""

    def __init__(self, samples: int) -> None:
        self.skipped: list[str] = []
        self._minibatch = Minibatch((), None, samples)

    def expect(self, training: bool, epoch: int, first: int, minibatches: int) -> None:
        pass

    def load(self, key: MinibatchKey) -> Minibatch:
        return self._minibatch

    def close(self) -> None:
        pass


def _untouched(size: int) -> Tensor:
    """So many bytes, of float32 if they can be."""
    return torch.empty(size // 4) if size % 4 == 0 else torch.empty(size, dtype=torch.uint8)


def _activations(size: int) -> tuple[Tensor, ...]:
    """So many bytes, which want a gradient but for the last few where float32 leaves a rest."""
    whole = (torch.empty(size // 4, requires_grad=True),) if size >= 4 else ()
    return (*whole, torch.empty(size % 4, dtype=torch.uint8)) if size % 4 else whole
