"""The attributes of modules: noticing that a forward pass assigns them, and putting them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["changed", "restore", "state_of", "untouched"]


_TABLES = ("_parameters", "_buffers", "_modules")


def state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with copies of its tables of parameters, buffers and children."""
    parts = dict(module.__dict__)
    for name in _TABLES:
        parts[name] = dict(parts[name])
    return parts


def changed(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """The attributes that are another object than in `before`."""
    now = state_of(module)
    missing = object()
    names = [
        key for key in {**before, **now} if key not in _TABLES and now.get(key, missing) is not before.get(key, missing)
    ]
    for table in _TABLES:
        old, new = before[table], now[table]
        names += [key for key in {**old, **new} if old.get(key, missing) is not new.get(key, missing)]
    return names


def restore(module: nn.Module, before: dict[str, Any]) -> None:
    """Put a module's attributes back."""
    for name in _TABLES:
        table = module.__dict__[name]
        table.clear()
        table.update(before[name])
    for key in [key for key in module.__dict__ if key not in before]:
        del module.__dict__[key]
    for key, value in before.items():
        if key not in _TABLES:
            module.__dict__[key] = value


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give every module of the model back exactly as it was: attributes, parameters, mode."""
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        attributes = dict(module.__dict__)
        contents = {key: type(value)(value) for key, value in attributes.items() if type(value) in (dict, list)}
        kept.append((module, attributes, contents))
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            for key in [key for key in module.__dict__ if key not in attributes]:
                del module.__dict__[key]
            module.__dict__.update(attributes)
            for key, content in contents.items():
                held = attributes[key]
                if isinstance(held, dict):
                    held.clear()
                    held.update(content)
                else:
                    held[:] = content
