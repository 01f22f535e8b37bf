"""Machines that a profile can be estimated for, by the figures of their data sheets (design, section 1: `estimated`).

Only fp32 without tensor cores: what the paper's clusters computed in, and the one precision that all of these have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MACHINES", "Machine", "parse_machine"]


@dataclass(frozen=True)
class Machine:
    """One GPU.

    Attributes:
        name: what it is called.
        peak_tflops: floating-point operations in fp32, tensor cores left out, in 10^12 a second.
        memory_gbps: what its memory carries, in 10^9 bytes a second.
    """

    name: str
    peak_tflops: float
    memory_gbps: float

    @property
    def description(self) -> str:
        """Its name with the two figures."""
        return f"{self.name}, {self.peak_tflops:g} TFLOPS, {self.memory_gbps:g} GB/s"


#: Each from NVIDIA's data sheet of the product, boost clock; one GPU, where a board holds two.
MACHINES = {
    # "NVIDIA Tesla V100 GPU Accelerator" (2018), column SXM2: 15.7 TFLOPS single precision, 900 GB/s.
    "v100": Machine("NVIDIA V100 SXM2", 15.7, 900),
    # "NVIDIA TITAN X" (Pascal, 2016): 11 TFLOPS, 480 GB/s.
    "titan-x": Machine("NVIDIA Titan X (Pascal)", 11, 480),
    # "Tesla K80 GPU Accelerator" (2015): 8.74 TFLOPS and 480 GB/s a board, of which a GPU is half.
    "k80": Machine("NVIDIA K80, one of its two GPUs", 4.37, 240),
    # "NVIDIA A100 Tensor Core GPU" (2021), column 80GB SXM: 19.5 TFLOPS FP32, 2,039 GB/s.
    "a100": Machine("NVIDIA A100 SXM 80 GB", 19.5, 2039),
    # "NVIDIA H100 Tensor Core GPU" (2023), column H100 SXM: 67 teraFLOPS FP32, 3.35 TB/s.
    "h100": Machine("NVIDIA H100 SXM", 67, 3350),
    # "NVIDIA H200 Tensor Core GPU" (2024), column H200 SXM: 67 TFLOPS FP32, 4.8 TB/s.
    "h200": Machine("NVIDIA H200 SXM", 67, 4800),
    # "NVIDIA Ada GPU Architecture" (2022), table of the GeForce RTX 4090: 82.6 TFLOPS FP32, 1,008 GB/s.
    "rtx-4090": Machine("NVIDIA GeForce RTX 4090", 82.6, 1008),
}

_FIGURES = ("peak_tflops", "memory_gbps")
_EXAMPLE = "peak_tflops=15.7,memory_gbps=900"


def parse_machine(text: str) -> Machine:
    """Read `v100`, or `peak_tflops=15.7,memory_gbps=900`.

    Raises:
        ValueError: a name that is not in the table, or not these two figures, both above 0.
    """
    if "=" not in text:
        name = text.strip().lower().replace("_", "-")
        if name not in MACHINES:
            raise ValueError(f"found {text!r}; expected {', '.join(MACHINES)}, or figures as in {_EXAMPLE}.")
        return MACHINES[name]
    figures: dict[str, float] = {}
    for part in text.split(","):
        field, _, value = (each.strip() for each in part.partition("="))
        if field not in _FIGURES:
            raise ValueError(
                f"found {field or part!r} in {text!r}; expected {' and '.join(_FIGURES)}, as in {_EXAMPLE}."
            )
        if field in figures:
            raise ValueError(f"{field} is given twice; keep one of them.")
        figures[field] = _positive(field, value)
    missing = [field for field in _FIGURES if field not in figures]
    if missing:
        raise ValueError(f"{missing[0]} is missing in {text!r}; expected both, as in {_EXAMPLE}.")
    return Machine("GPU by its figures", **figures)


def _positive(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{field} is {text!r}; expected a number above 0, as in {_EXAMPLE}.")
    return value
