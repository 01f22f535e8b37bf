"""A loss of the user's own as a task: `loss = function(output, targets)` (`--loss path/file.py:function`).

What the model returns and what the data set gives as label are passed on as they are, so both may be nested. Nobody
knows what counts as right, so there is no accuracy.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pd_format.errors import UserError
from pd_format.layers.factory import load_function
from pd_format.layers.values import map_tensors, tensors_in

__all__ = ["OwnLoss", "form_of"]


class OwnLoss:
    """Wraps a function that takes output and targets and returns the mean over the minibatch.

    Random targets, for profiling and for synthetic data, are what the function's attribute `random_targets(output,
    generator)` returns; without one they are normal numbers of the form of the output's first floating-point tensor,
    as regression has them.

    Args:
        name: `package.module:function` or `path/file.py:function`.

    Raises:
        UserError: there is no such function, or it is a class.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[..., object] = load_function(name)
        if isinstance(inspect.unwrap(self._function), type):
            raise UserError(f"--loss {name} names a class; expected a function of output and targets.")

    def loss(self, output: object, targets: object) -> Tensor:
        """What the function returns.

        Raises:
            UserError: it fails, or returns anything but one floating-point number as a tensor.
        """
        try:
            value = self._function(output, targets)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"--loss {self._name} fails: {type(error).__name__}: {str(error).strip()}{_place(error)}. It was given "
                f"the output {form_of(output)} and the targets {form_of(targets)}."
            ) from error
        if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
            raise UserError(
                f"--loss {self._name} returned {form_of(value)}; expected the mean over the minibatch, a "
                "floating-point tensor of shape (), as loss.mean() is."
            )
        return value

    def correct(self, output: object, targets: object) -> None:
        """Not known."""

    def samples(self, targets: object) -> int:
        """The batch dimension of the first tensor among the targets.

        Raises:
            UserError: there is none.
        """
        first = next((tensor for tensor in tensors_in(targets) if tensor.dim() > 0), None)
        if first is None:
            raise UserError(
                f"The targets of a minibatch are {form_of(targets)}; expected a tensor with the batch dimension first, "
                "alone or in tuples, lists or dicts."
            )
        return first.shape[0]

    def random_targets(self, output: object, generator: torch.Generator) -> object:
        """Targets that the function takes together with an output, on the output's device.

        Raises:
            UserError: it does not take them; the text says how to make others.
        """
        make = getattr(self._function, "random_targets", _like_the_output)
        device = next((tensor.device for tensor in tensors_in(output)), torch.device("cpu"))
        with torch.no_grad():
            try:
                targets = map_tensors(lambda tensor: tensor.to(device), make(output, generator))
                self.loss(output, targets)
            except UserError as error:
                function = self._name.rpartition(":")[2]
                raise UserError(
                    f"{error} These targets are random, for profiling and --data synthetic. Where targets have another "
                    f"form than the output, say how to make some: {function}.random_targets = lambda output, "
                    "generator: torch.randint(10, (len(output),), generator=generator)"
                ) from None
            except Exception as error:
                raise UserError(
                    f"--loss {self._name}: its random_targets fails: {type(error).__name__}: {error}{_place(error)}. "
                    f"It was given the output {form_of(output)} and a generator."
                ) from error
        return targets


def form_of(value: object) -> str:
    """A nested value in a few words: `{'logits': (3, 4) float32, 'mask': None}`."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {form_of(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(form_of(part) for part in value) + "]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def _like_the_output(output: object, generator: torch.Generator) -> Tensor:
    first = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
    if first is None:
        raise UserError(f"The output {form_of(output)} holds no floating-point tensor that targets could be like.")
    return torch.randn(first.shape, generator=generator).to(first.dtype)


def _place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}:{frame.lineno})"
