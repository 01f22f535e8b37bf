"""The fingerprint of a chain: whether a model is the one that a profile or plan was made for (design, section 1)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, fx, nn

from pd_format.layers.describe import constant_text, function_name
from pd_format.layers.passes import Pass
from pd_format.layers.values import rebuild

__all__ = ["compare_fingerprints", "describe_layer", "fingerprint_of"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


def describe_layer(model: nn.Module, step: Pass, layer: int, name: str) -> str:
    """Everything that the fingerprint takes from a layer of the training pass, wiring included."""
    parts = [name]
    for node in step.nodes:
        if step.layer[node] != layer:
            continue
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            parts.append(repr(module))
            named = [*module.named_parameters(), *module.named_buffers()]
            parts += [f"{key}:{tuple(tensor.shape)}:{tensor.dtype}" for key, tensor in named]
        else:
            parts.append(function_name(node))
        parts += [_wiring(arg, step) for arg in node.args]
        parts += [f"{key}={_wiring(arg, step)}" for key, arg in node.kwargs.items()]
    return "\n".join(parts)


def _wiring(value: object, step: Pass) -> str:
    """An argument with the layer that made it in place of a node, whose own name may differ between torch versions."""

    def leaf(each: object) -> object:
        if not isinstance(each, fx.Node):
            return constant_text(each)
        if each.op == "get_attr":
            tensor = step.traced.values[each][0]
            assert isinstance(tensor, Tensor)
            return f"{each.target}:{tuple(tensor.shape)}:{tensor.dtype}"
        return f"input {each.target}" if each.op == "placeholder" else f"layer {step.layer[each]}"

    return repr(rebuild(value, leaf))


def fingerprint_of(descriptions: Sequence[str]) -> str:
    """16 hex digits of the whole, a colon, then 4 hex digits a layer."""
    # Where Python prints an address, it is another one in each process.
    plain = [re.sub(r" at 0x[0-9a-f]+", "", each) for each in descriptions]
    whole = hashlib.sha256("\0".join(plain).encode()).hexdigest()[:16]
    return f"{whole}:{''.join(hashlib.sha256(each.encode()).hexdigest()[:4] for each in plain)}"


def compare_fingerprints(expected: str, found: str, layers: Sequence[_Named]) -> str:
    """Where two fingerprints first differ, as a sentence; empty if they are equal.

    Args:
        expected: from the profile or plan.
        found: of the model that was built.
        layers: the layers of the model that was built.
    """
    if expected == found:
        return ""
    old, new = (_digests(text) for text in (expected, found))
    if not old or len(new) != len(layers):
        return "the file's fingerprint has another form, so the place of the difference is not known."
    counts = f" The file's model has {len(old)} layers, this one {len(new)}." if len(old) != len(new) else ""
    for index, (before, now) in enumerate(zip(old, new, strict=False)):
        if before != now:
            layer = layers[index]
            return f"the first layer that differs is number {index + 1}, {layer.name!r}, here {layer.op}.{counts}"
    if len(new) > len(old):
        return f"layer {len(old) + 1}, {layers[len(old)].name!r}, is new here.{counts}"
    if len(old) > len(new):
        return f"the layers after number {len(new)}, {layers[-1].name!r}, are missing here.{counts}"
    return "no single layer differs in what its 4 digits tell; the whole does."


def _digests(fingerprint: str) -> list[str]:
    match = re.fullmatch(r"[0-9a-f]{16}:((?:[0-9a-f]{4})+)", fingerprint)
    return re.findall("....", match[1]) if match else []
