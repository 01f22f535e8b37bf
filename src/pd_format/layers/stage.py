"""A stage: consecutive layers as a module whose parameters bear the names that they have in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pd_format.layers.code import Recipe, bind

__all__ = ["Program", "StageModule"]


@dataclass(frozen=True)
class Program:
    """What a stage runs in one mode: its code, and the names of the values that come in and go out.

    `exceptions` are the modules that the model's own `train()` or `eval()` leaves in the other mode.
    """

    recipe: Recipe
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    exceptions: tuple[str, ...]


class StageModule(nn.Module):
    """Consecutive layers of a model.

    It shares the model's own leaf modules and parameters, under their original dotted names, and holds nothing else of
    the model. `train()` and `eval()` choose the program as well as the mode of the modules.
    """

    def __init__(
        self,
        programs: Mapping[bool, Program],
        modules: Sequence[tuple[str, nn.Module]],
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: Sequence[tuple[str, Tensor, bool]],
        training: bool,
    ) -> None:
        """Assemble a stage; use `Chain.stage`.

        Args:
            programs: by mode, True for training.
            modules, parameters, buffers: what the programs use, by dotted name, in the model's order; a buffer with
                whether it belongs into a state dict.
            training: the mode to start in.
        """
        super().__init__()
        self._programs = dict(programs)
        for path, module in modules:
            owner, name = self._owner(path)
            if name not in owner._modules:
                owner.add_module(name, module)
        for path, parameter in parameters:
            owner, name = self._owner(path)
            if name not in owner._parameters:
                owner.register_parameter(name, parameter)
        for path, buffer, persistent in buffers:
            owner, name = self._owner(path)
            if name not in owner._buffers:
                owner.register_buffer(name, buffer, persistent=persistent)
        self._bind()
        self.training = training

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that `forward` takes in the current mode."""
        return self._programs[self.training].inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that `forward` returns in the current mode; `("output",)` for the last stage."""
        return self._programs[self.training].outputs

    def forward(self, *values: object) -> tuple[Any, ...]:
        """Run the layers on `values`, in the order of `inputs`; the result is in the order of `outputs`."""
        result: tuple[Any, ...] = self._functions[self.training](*values)
        return result

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode as the whole model's `train(mode)` would, frozen modules included."""
        super().train(mode)
        for path in self._programs[mode].exceptions:
            self.get_submodule(path).training = not mode
        return self

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        *parents, name = path.split(".")
        owner: nn.Module = self
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            child = owner._modules[part]
            assert child is not None
            owner = child
        return owner, name

    def _bind(self) -> None:
        self._functions: dict[bool, Callable[..., Any]] = {
            mode: bind(program.recipe, self) for mode, program in self._programs.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        # The functions hold on to this object's modules; a copy must make its own.
        return {key: value for key, value in self.__dict__.items() if key != "_functions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()
