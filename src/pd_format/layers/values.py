"""Evaluates one operation on stand-ins without data, so that a trace knows shapes, types, aliases and writes.

A stand-in is a tensor on the `meta` device. An operation that has no meta kernel, or whose Python code looks at data,
runs for real on made-up data instead, and only the shapes of what it returns are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["ModelFails", "Outcome", "StandIns", "leaves", "map_tensors", "rebuild", "storage_key", "tensors_in"]


class ModelFails(Exception):
    """An operation of the model fails on its inputs, with stand-ins and with real tensors alike."""


@dataclass(frozen=True)
class Outcome:
    """What one evaluation gave.

    `trusted` is false where the value may depend on the data in tensors: then only its type means something.
    `writes` are the keys of the storages that the operation changed in place.
    """

    value: object
    trusted: bool
    writes: frozenset[int]


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in any nesting of tuples, lists, dictionaries and slices, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def rebuild(value: object, leaf: Callable[[object], object]) -> object:
    """The same nesting of tuples, lists, dictionaries and slices, in plain ones, with each leaf replaced."""
    kind = type(value)
    if kind is torch.Size:
        return value
    if issubclass(kind, tuple):
        parts: list[Any] = [rebuild(each, leaf) for each in value]  # type: ignore[attr-defined]
        if hasattr(kind, "_fields"):
            return kind(*parts)
        return kind(parts) if kind.__module__ == "torch.return_types" else tuple(parts)
    if issubclass(kind, list):
        return [rebuild(each, leaf) for each in value]  # type: ignore[attr-defined]
    if issubclass(kind, dict):
        return {key: rebuild(each, leaf) for key, each in value.items()}  # type: ignore[attr-defined]
    if kind is slice:
        assert isinstance(value, slice)
        return slice(rebuild(value.start, leaf), rebuild(value.stop, leaf), rebuild(value.step, leaf))
    return leaf(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nesting with every tensor replaced."""
    return rebuild(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def leaves(value: object) -> list[object]:
    """What is not a tuple, list, dictionary or slice, in order."""
    found: list[object] = []
    rebuild(value, found.append)
    return found


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors that share memory, while one of them is alive; stand-ins have no data pointer to compare."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # Sparse tensors have no storage of their own.


class StandIns:
    """The stand-ins of a model's parameters, buffers and constants, and the evaluation of operations on them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._of: dict[int, Tensor] = {}
        self._state: dict[str, dict[str, Tensor]] = {}
        self._kept: list[Tensor] = []  # Ids stay valid only while the tensors live.
        first = next(iter([*model.parameters(), *model.buffers()]), None)
        self.device = first.device if first is not None else torch.device("cpu")

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a real tensor: the same one each time."""
        found = self._of.get(id(tensor))
        if found is None:
            found = torch.empty_like(tensor.detach(), device="meta")
            if isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                found.requires_grad_()
            self._of[id(tensor)] = found
            self._kept.append(tensor)
        return found

    def evaluate(self, kind: str, target: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Outcome:
        """Run one operation on stand-ins.

        Raises:
            ModelFails: it fails on real tensors too.
        """
        state = self._module_state(str(target)) if kind == "call_module" else {}
        watched = [*tensors_in((args, kwargs)), *state.values()]
        before = [(tensor, tensor._version) for tensor in watched]
        try:
            with torch.device("meta"):
                value = self._run(kind, target, state, *_on_meta(target, args, kwargs))
        except Exception as refused:
            return self._for_real(kind, target, args, kwargs, refused)
        if isinstance(value, torch.device):
            value = self.device
        elif target is getattr and tuple(args[1:2]) in (("is_cuda",), ("is_cpu",)):
            value = str(args[1]) == f"is_{self.device.type}"
        writes = frozenset(storage_key(tensor) for tensor, version in before if tensor._version != version)
        return Outcome(value, True, writes)

    def _module_state(self, path: str) -> dict[str, Tensor]:
        if path not in self._state:
            module = self._model.get_submodule(path)
            named = [*module.named_parameters(), *module.named_buffers()]
            self._state[path] = {name: self.of(tensor) for name, tensor in named}
        return self._state[path]

    def _run(
        self, kind: str, target: object, state: dict[str, Tensor], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        if kind == "call_module":
            module = self._model.get_submodule(str(target))
            return functional_call(module, state, tuple(args), dict(kwargs))
        if kind == "call_method":
            if target in ("cpu", "cuda") and isinstance(args[0], Tensor) and args[0].is_meta:
                return args[0]
            return getattr(args[0], str(target))(*args[1:], **kwargs)
        assert callable(target)
        return target(*args, **kwargs)

    def _for_real(
        self, kind: str, target: object, args: Sequence[object], kwargs: Mapping[str, object], refused: Exception
    ) -> Outcome:
        """Run on real tensors, once of zeros and once of other values: what differs between the two depends on data."""
        outcomes: list[tuple[object, frozenset[int]]] = []
        failure: Exception = refused
        for fill in (_zeros, _others):
            try:
                outcomes.append(self._run_real(kind, target, args, kwargs, fill))
            except Exception as error:
                failure = error
        if not outcomes:
            raise ModelFails(f"{type(failure).__name__}: {failure}") from failure
        value, writes = outcomes[-1]
        trusted = len(outcomes) == 2 and _layout(outcomes[0][0]) == _layout(value)
        return Outcome(value, trusted, writes)

    def _run_real(
        self,
        kind: str,
        target: object,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        fill: Callable[[Tensor, torch.device], Tensor],
    ) -> tuple[object, frozenset[int]]:
        real: dict[int, Tensor] = {}
        owner: dict[int, Tensor] = {}  # real storage -> the stand-in whose memory it stands for

        def make(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in real:
                made = fill(leaf, self.device)
                if leaf.requires_grad:
                    # A copy, because torch refuses to change a leaf that requires a gradient in place.
                    made = made.requires_grad_().clone()
                real[id(leaf)] = made
                owner[storage_key(made)] = leaf
            return real[id(leaf)]

        real_args = rebuild(tuple(args), make)
        real_kwargs = rebuild(dict(kwargs), make)
        assert isinstance(real_args, tuple)
        assert isinstance(real_kwargs, dict)
        buffers: dict[str, Tensor] = {}
        if kind == "call_module":
            module = self._model.get_submodule(str(target))
            buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        before = [(tensor, tensor._version) for tensor in real.values()]
        value = self._run(kind, target, buffers, real_args, real_kwargs)
        writes = {storage_key(owner[storage_key(tensor)]) for tensor, version in before if tensor._version != version}
        if kind == "call_module":
            state = self._module_state(str(target))
            writes |= {storage_key(state[name]) for name, buffer in buffers.items() if buffer._version}

        def strip(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            for key, made in real.items():
                if made is leaf:
                    return next(each for each in tensors_in((args, kwargs)) if id(each) == key)
            shadow = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            source = owner.get(storage_key(leaf))
            if source is not None:
                try:
                    return source.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
                except RuntimeError:
                    return shadow
            return shadow.requires_grad_(leaf.requires_grad)

        return rebuild(value, strip), frozenset(writes)


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    return torch.zeros(like.size(), dtype=like.dtype, device=device)


def _others(like: Tensor, device: torch.device) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.size(), device=device).to(like.dtype)
    return torch.ones(like.size(), dtype=like.dtype, device=device)


def _layout(value: object) -> object:
    """Structure, shapes and dtypes; a plain value is compared by itself, but one from data differs from itself."""

    def leaf(each: object) -> object:
        if isinstance(each, Tensor):
            return (tuple(each.size()), each.dtype)
        return each if each is None or isinstance(each, str) else object()

    flat = rebuild(value, leaf)
    return repr(flat) if "object object at" not in repr(flat) else object()


def _on_meta(
    target: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Send what names a device to `meta`, where the stand-ins are, unless Python only looks at the name."""
    if target is getattr or getattr(target, "__module__", None) in ("_operator", "builtins"):
        return tuple(args), dict(kwargs)
    changed = [torch.device("meta") if isinstance(arg, torch.device) else arg for arg in args]
    named = {
        key: torch.device("meta") if isinstance(arg, torch.device) or (key == "device" and arg is not None) else arg
        for key, arg in kwargs.items()
    }
    if target == "to" and len(changed) > 1 and isinstance(changed[1], str):
        changed[1] = torch.device("meta")
    return tuple(changed), named
