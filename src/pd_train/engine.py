"""The stage engine: computes one stage's passes on a given parameter set, and knows nothing of pipelines.

The runtime talks to the protocol below; PyTorch is one implementation (`pd_train.torch_engine`), emulated compute
another (`pd_train.emulated`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

__all__ = ["Score", "StageEngine"]


class Score(NamedTuple):
    """What the last stage says of a minibatch."""

    loss: float | None
    """Mean over the minibatch's samples; None where nothing is computed."""
    correct: float | None
    """Samples that the model got right; None in training, where nobody counts."""
    samples: int
    predictions: Tensor | None = None
    """What the model predicts for each sample, on the CPU; only in a validation whose metric is made of that."""


class StageEngine(Protocol):
    """Computes forward and backward passes of one stage; one thread calls it.

    `key` names a minibatch between its two passes, `index` a parameter set. Values are nestings of tensors and plain
    values; a tensor that wants a gradient has `requires_grad` set. All that is given is where the engine
    computes; what it hands out is in the host's memory, or on its way there (`pd_train.staging`). What it hands out to
    cross a cut, only the engine of the next stage reads.
    """

    def forward(self, key: int, index: int, values: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
        """What crosses the cut after the stage; keeps what the backward pass needs."""
        ...

    def forward_loss(self, key: int, index: int, values: tuple[Any, ...], targets: Any, seed: int) -> Score:
        """At the last stage: the loss instead of what crosses a cut."""
        ...

    def backward(
        self, key: int, index: int, gradients: Sequence[Tensor | None] | None, loss_scale: float = 1.0
    ) -> list[Tensor | None]:
        """From the gradients of the sent tensors that want one to those of the received ones, in order.

        An answer may have them in another form, which only the engine of the stage before reads.

        The last stage is given None and starts from its loss, times the scale. The parameter set is the one of the
        forward pass, but for naive pipelining.
        """
        ...

    def take_parameter_gradients(self, index: int) -> list[Tensor | None]:
        """The parameters' gradients of the backward pass that has just ended; None where there is none."""
        ...

    def watch_gradients(self, ready: Callable[[int, Tensor], None]) -> None:
        """From now on, tell of each parameter's gradient within the backward pass, as soon as there is one.

        The function is given the parameter's number and its gradient, on the thread of the pass.
        """
        ...

    def evaluate(self, index: int, values: tuple[Any, ...], targets: Any | None) -> tuple[Any, ...] | Score:
        """A forward pass that nothing is kept of; a score at the last stage, which is given targets."""
        ...
