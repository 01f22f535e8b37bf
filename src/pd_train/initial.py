"""Weights to start from: a state dict in a file, of which a worker loads what its stage keeps.

The file is mapped into memory, and every tensor of the model that the stage does not keep stands on the meta device
when the state dict is copied in: only the stage's own part is ever read. The model's own loading hooks run, so that
what `model.load_state_dict` takes is taken.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_train.named_files import weights_file

__all__ = ["find_weights", "load_weights"]

_TORCHVISION = "torchvision:"
_SHOWN = 3
"""Of each kind of key that does not fit."""
_SAVE = "torch.save(model.state_dict(), 'weights.pt')"


def find_weights(name: str, factory: str) -> Path:
    """The file that `--init-from` names, on this host.

    Args:
        name: a path, or `torchvision:IMAGENET1K_V1` for weights of torchvision that have been downloaded before;
            `torchvision:DEFAULT` for the best of them.
        factory: of the plan's model.

    Raises:
        UserError: there is no such file; nothing is ever downloaded.
    """
    if not name.startswith(_TORCHVISION):
        return weights_file(name)
    module, _, function = factory.partition(":")
    if module != "torchvision.models":
        raise UserError(
            f"--init-from {name}: the plan's model comes from {factory}, not from torchvision; name a file instead."
        )
    from torchvision.models import get_model_weights

    entries = get_model_weights(function).__members__
    entry = name.removeprefix(_TORCHVISION)
    if entry not in entries:
        raise UserError(f"--init-from {name}: torchvision has for {function}: {', '.join(entries) or 'no weights'}.")
    url = entries[entry].value.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    if not path.is_file():
        raise UserError(
            f"--init-from {name}: expected {path}, which is not there, and nothing is downloaded here. "
            f"Put the file from {url} there; TORCH_HOME names another folder."
        )
    return path


def load_weights(path: Path, model: nn.Module, state_names: Collection[str], kept: Collection[int]) -> None:
    """Copy a file's state dict into a model, as far as the worker keeps the model.

    The rest of the model is moved to the meta device and is of no use afterwards.

    Args:
        path: a file that `torch.save` wrote, of a plain state dict.
        model: to be filled in.
        state_names: the keys that the file must hold; the model's, but for what is no tensor.
        kept: ids of the parameters and buffers that the worker keeps.

    Raises:
        UserError: the file holds something else, or does not fit the model.
    """
    state = _read(path)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    reshaped = [key for key in shapes if key in state and state[key].shape != shapes[key]]
    texts = [f"{key} {tuple(state[key].shape)} where the model has {tuple(shapes[key])}" for key in reshaped]
    for key in reshaped:
        del state[key]
    _forget(model, kept)
    with warnings.catch_warnings():
        # What stands on the meta device takes nothing in: that is the point.
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            lines = str(error).splitlines()
            raise UserError(f"--init-from {path} does not fit the model: {'; '.join(map(str.strip, lines))}") from None
    found = [
        _listed("missing", [key for key in missing if key in state_names and key not in reshaped]),
        _listed("unexpected", unexpected),
        _listed("of another shape", texts),
    ]
    problems = "; ".join(filter(None, found))
    if problems:
        wrapped = " Its names begin with 'module.', as DistributedDataParallel adds it: save model.module.state_dict()."
        raise UserError(
            f"--init-from {path} does not fit the model. Of its keys {problems}. It must hold every tensor of the "
            f"model and nothing else, as {_SAVE} writes it; to start only some layers from it, load them in the "
            f"function that builds the model.{wrapped if all(key.startswith('module.') for key in state) else ''}"
        )


def _read(path: Path) -> OrderedDict[str, Any]:
    """The file's state dict, on the CPU; its tensors look into the file where torch's format allows that.

    Raises:
        UserError: the file is not one that `torch.save` wrote of a plain state dict.
    """
    # Files in the format of torch before 1.6, as some of torchvision's, cannot be mapped: they are read as a whole.
    mapped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # A broken file may raise anything.
        wants_code = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wants_code:
            raise UserError(
                f"--init-from {path} holds more than tensors: reading it would call {wants_code[1]}, and such a file "
                f"can run any code, so it is refused. Save a plain state dict: {_SAVE}."
            ) from None
        raise UserError(
            f"--init-from {path} cannot be read: it is damaged, or torch.save did not write it "
            f"({type(error).__name__}). Expected a plain state dict: {_SAVE}."
        ) from None
    if not isinstance(state, Mapping):
        raise UserError(f"--init-from {path} holds a {type(state).__name__}; expected a plain state dict: {_SAVE}.")
    odd = [key for key, value in state.items() if not isinstance(value, Tensor) and "_extra_state" not in str(key)]
    if odd:
        parts = [key for key in odd if isinstance(state[key], Mapping)]
        hint = f" If the weights are its {parts[0]!r}, save that part alone." if parts else ""
        raise UserError(
            f"--init-from {path} holds more than tensors: {_some(list(map(repr, odd)))} "
            f"{'is' if len(odd) == 1 else 'are'} none. Expected a plain state dict: {_SAVE}.{hint}"
        )
    # An OrderedDict of torch's also carries the versions of its modules, which their loading hooks look at.
    result: OrderedDict[str, Any] = OrderedDict(state)
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _forget(model: nn.Module, kept: Collection[int]) -> None:
    """Let go of the memory of every parameter and buffer that is not kept, but not of its shape."""
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for name, buffer in owner._buffers.items():
            if buffer is not None and id(buffer) not in kept:
                owner._buffers[name] = buffer.to("meta")


def _listed(what: str, keys: Sequence[str]) -> str:
    return f"{len(keys)} {'is' if len(keys) == 1 else 'are'} {what}: {_some(keys)}" if keys else ""


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
