"""Says why a forward pass cannot be traced, and where in the user's code the reason stands."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx, nn

from pd_format.errors import UserError
from pd_format.layers.inputs import match_inputs, stand_in
from pd_format.layers.values import ModelFails, StandIns
from pd_format.profile import InputSpec

__all__ = ["place_of", "reason", "refusal"]

_QUIET_FILES = (os.path.dirname(__file__), os.path.join(os.path.dirname(torch.__file__), "fx"))
_TORCH = os.path.dirname(torch.__file__)


def reason(error: BaseException) -> str:
    """What stopped a trace, in the words of the error."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    if isinstance(error, (fx.proxy.TraceError, ModelFails)):
        return text
    return f"tracing it raised {type(error).__name__}: {text}"


def place_of(error: BaseException, module: nn.Module) -> str:
    """` (file:line)`: where in the module's own source it happened, or else in the user's code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_QUIET_FILES, "<"))
    ]
    try:
        source = inspect.getsourcefile(type(module))
    except TypeError:
        source = None
    own = [frame for frame in frames if source and Path(frame.filename) == Path(source)]
    users = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    chosen = (own or users or frames)[-1:]
    return f" ({chosen[0].filename}:{chosen[0].lineno})" if chosen else ""


def refusal(model: nn.Module, inputs: Sequence[InputSpec], stand_ins: StandIns, error: Exception) -> UserError:
    """Why the model's own forward could not be traced, told from a model that simply fails on such inputs."""
    shapes = ", ".join(f"{spec.name} {spec.shape} {spec.dtype}" for spec in inputs)
    name = type(model).__name__
    if isinstance(error, ModelFails):
        return UserError(
            f"{name} fails on the inputs {shapes}, {error}. Give a shape, a dtype and a minibatch size that it "
            "takes (--input-shape, --minibatch-size)."
        )
    positional, named = match_inputs(type(model).forward, inputs)
    made = {spec.name: stand_in(spec, 0) for spec in inputs}
    try:
        stand_ins.evaluate(
            "call_module", "", [made[each] for each in positional], {key: made[each] for key, each in named.items()}
        )
    except Exception as failure:
        return UserError(
            f"{name} fails on the inputs {shapes}: {reason(failure)}{place_of(error, model)}. "
            "Give a shape, a dtype and a minibatch size that it takes (--input-shape, --minibatch-size)."
        )
    return UserError(
        f"{name} cannot be split into layers, because the code of its own forward cannot be traced"
        f"{place_of(error, model)}: {reason(error)}. Move that code into a submodule (a class of its own "
        "with its own forward): the submodule then stays one layer, and the rest can be split."
    )
