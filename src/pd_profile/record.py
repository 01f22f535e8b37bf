"""Puts times, sizes and the chain together into the profile record (design, section 1)."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from pd_format.layers.chain import Chain
from pd_format.layers.precision import get_precision
from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, PrecisionName, Profile
from pd_profile.machines import Machine
from pd_profile.options import Scalar
from pd_profile.samples import Summary

__all__ = ["build_record", "describe_device", "describe_machine"]


def describe_device(device: torch.device) -> Device:
    """What the figures are measured on; a CPU's name says with how many threads, since the figures depend on it."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        return Device(kind="cuda", name=torch.cuda.get_device_name(device), versions=versions)
    threads = torch.get_num_threads()
    return Device(
        kind=device.type,
        name=f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}",
        versions=versions,
    )


def describe_machine(machine: Machine) -> Device:
    """What the figures are estimated for."""
    return Device(kind="cuda", name=machine.description, versions={"torch": torch.__version__}, estimated=True)


def build_record(
    *,
    name: str,
    factory: str,
    kwargs: dict[str, Scalar],
    chain: Chain,
    inputs: Sequence[InputSpec],
    data: str,
    task: str,
    precision: PrecisionName = "fp32",
    device: Device,
    summary: Summary,
    stash_bytes: Sequence[int],
) -> Profile:
    """The profile of a model whose layers took what `summary` says, and save `stash_bytes` each."""
    layers = tuple(
        LayerProfile(
            name=layer.name,
            op=layer.op,
            forward_ms=summary.forward_ms[index],
            backward_ms=summary.backward_ms[index],
            forward_ms_std=summary.forward_ms_std[index],
            backward_ms_std=summary.backward_ms_std[index],
            activation_bytes=chain.crossing_bytes(index, get_precision(precision)),
            parameter_bytes=chain.parameter_bytes(index),
            trainable_bytes=chain.trainable_bytes(index),
            stash_bytes=stash_bytes[index],
            cut=chain.cuts[index],
        )
        for index, layer in enumerate(chain.layers)
    )
    return Profile(
        model=ModelSpec(name=name, factory=factory, kwargs=kwargs, fingerprint=chain.fingerprint),
        minibatch_size=inputs[0].shape[0],
        inputs=tuple(inputs),
        data=data,
        task=task,
        precision=precision,
        device=device,
        minibatches=summary.minibatches,
        layers=layers,
    )


def _processor() -> str:
    """The CPU's name as the system tells it; its architecture where it does not."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
