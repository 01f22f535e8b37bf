"""Where no stage may end, and why: what must stay together, and what cannot cross (design, section 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from pd_format.layers.passes import Pass
from pd_format.layers.values import StandIns, storage_key, tensors_in

__all__ = ["Bars", "find_bars", "find_uses"]

Bars = dict[int, str]
"""The layers after which no cut may be, each with the first reason, as a sentence."""


def find_bars(
    model: nn.Module,
    passes: Collection[Pass],
    layers: Sequence[str],
    uses: Mapping[str, set[int]],
    stand_ins: StandIns,
) -> tuple[Bars, list[str]]:
    """The forbidden cuts, and notes on all of them for the user.

    Args:
        passes: of the model, laid out.
        layers: their names.
        uses: see `find_uses`.
    """
    bars: Bars = {}
    notes = _bar_tied(bars, model, passes, layers, uses, stand_ins)
    return bars, notes + _bar_values(bars, passes, len(layers))


def find_uses(model: nn.Module, passes: Collection[Pass]) -> dict[str, set[int]]:
    """The layers that use each parameter and buffer, in either mode, by its first name."""
    canonical = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    uses: dict[str, set[int]] = {name: set() for name in canonical.values()}
    for step in passes:
        for node in (*step.nodes, step.output):
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                for tensor in (*module.parameters(), *module.buffers()):
                    uses[canonical[id(tensor)]].add(step.layer[node])
            for source in node.all_input_nodes:
                if source.op == "get_attr" and str(source.target) not in step.traced.constants:
                    uses[str(source.target)].add(step.layer[node])
    return uses


def _bar_tied(
    bars: Bars,
    model: nn.Module,
    passes: Collection[Pass],
    layers: Sequence[str],
    uses: Mapping[str, set[int]],
    stand_ins: StandIns,
) -> list[str]:
    """Forbid the cuts inside the span of a parameter, or of a buffer that is written, used by several layers."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    aliases = _names_by_tensor(model)
    written = {key for step in passes for keys in step.traced.writes.values() for key in keys}
    spans: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, tensor in [*parameters.items(), *buffers.items()]:
        writes = name in buffers and storage_key(stand_ins.of(tensor)) in written
        if len(uses[name]) > 1 and (name in parameters or writes):
            spans[min(uses[name]), max(uses[name])].append(name)
    memory: dict[int, str] = {}
    for name, parameter in parameters.items():
        place = parameter.untyped_storage().data_ptr() if parameter.numel() else 0
        other = memory.setdefault(place, name) if place else name
        joint = uses[name] | uses[other]
        if other != name and len(joint) > 1 and uses[name] != uses[other]:
            spans[min(joint), max(joint)] += [other, name]
    notes: list[str] = []
    for (low, high), names in spans.items():
        every = list(dict.fromkeys(alias for name in names for alias in aliases[name]))
        shown = ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")
        ends = f"the layers {layers[low]!r} and {layers[high]!r}"
        text = f"{ends} use the same parameters or buffers ({shown}), which must stay in one stage."
        for cut in range(low, high):
            bars.setdefault(cut, text)
        notes.append(f"No cut between layer {low} and layer {high}: {text}")
    return notes


def _bar_values(bars: Bars, passes: Collection[Pass], layers: int) -> list[str]:
    """Forbid the cuts that a value of another kind crosses, and those that part a changed tensor from its alias."""
    notes: list[str] = []
    for step in passes:
        values = step.traced.values
        last_write: dict[int, int] = {}
        for node, keys in step.traced.writes.items():
            for key in keys:
                last_write[key] = max(last_write.get(key, -1), step.layer[node])
        kinds = {node: _foreign(values[node][0]) for node in step.last_use}
        keys_of = {node: [storage_key(each) for each in tensors_in(values[node][0])] for node in step.last_use}
        suspects = [node for node, keys in keys_of.items() if kinds[node] or any(key in last_write for key in keys)]
        for cut in range(layers - 1):
            if cut in bars or not any(step.layer[n] <= cut < step.last_use[n] for n in suspects):
                continue
            seen: dict[int, fx.Node] = {}
            for node in step.crossing(cut):
                if kinds[node]:
                    text = (
                        f"{node.name} would have to cross, a {kinds[node]}; only tensors, None, bool, int, float, "
                        "str and tuples, lists and dictionaries of these can."
                    )
                    bars.setdefault(cut, text)
                    notes.append(f"No cut where {text}")
                for key in keys_of[node]:
                    if key in seen and last_write.get(key, -1) > cut:
                        text = (
                            f"{seen[key].name} and {node.name} would both cross; they share memory, which a later "
                            "layer changes in place."
                        )
                        bars.setdefault(cut, text)
                        notes.append(f"No cut where {text}")
                    seen[key] = node
    return notes


def _names_by_tensor(model: nn.Module) -> dict[str, list[str]]:
    """Every name of each parameter and buffer, under its first one."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def _foreign(value: object) -> str:
    """The type of what cannot cross a cut, empty if all of the value can."""
    if isinstance(value, Tensor):
        return "" if value.layout is torch.strided else f"{value.layout} tensor"
    if value is None or type(value) in (bool, int, float, str, torch.Size, torch.device):
        return ""
    if type(value) in (tuple, list):
        return next(filter(None, map(_foreign, value)), "")  # type: ignore[call-overload]
    if type(value) is dict:
        if not all(type(key) in (str, int) for key in value):
            return "dictionary whose keys are neither str nor int"
        return next(filter(None, map(_foreign, value.values())), "")
    return type(value).__qualname__
