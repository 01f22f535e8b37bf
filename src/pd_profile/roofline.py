"""What an operation would take on a machine: the roofline model, with shares of the peak that were measured once.

    compute   flops / (peak x share of the operation's kind)
    memory    bytes / (bandwidth x share)
    time      max(compute, memory) + LAUNCH_MS;  for Winograd compute + TRANSFORMED x memory + LAUNCH_MS

cuDNN computes convolutions of 3x3 or more with stride 1 by Winograd's algorithm (5x5 by a Fourier transform), in
kernels of their own before and after the product. In its form for tiles of 4x4 outputs, 6x6 values stand for 16, so
that 2.25 times each tensor is written and read again beside the tensor itself: 1 + 2 x 2.25 = 5.5 times its bytes. The
product then has 36 multiplications for 16 x 9, which is why a share of the peak can be above 1, and up to 4.

The shares come from one calibration against the V100 profiles of the original release, all models together, by
`benchmarks/estimates.py`; docs/estimates.md says how, and how far off the estimates are. They are taken to hold for
every other GPU, and nothing here depends on a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pd_profile.counting import Kind, Work
from pd_profile.machines import Machine

__all__ = ["CALIBRATED", "LAUNCH_MS", "TRANSFORMED", "Shares", "work_ms"]

#: An operation takes no less, however small it is: the smallest backward passes of those profiles, less their bytes.
LAUNCH_MS = 0.02

#: How often each byte of a convolution moves under Winograd's algorithm.
TRANSFORMED = 5.5


@dataclass(frozen=True)
class Shares:
    """What of a machine's figures is reached.

    Attributes:
        peak: of its floating-point operations, by kind and by whether it is the backward pass of a convolution.
        bandwidth: of its memory bandwidth.
    """

    peak: Mapping[tuple[Kind, bool], float]
    bandwidth: float


CALIBRATED = Shares(
    peak={
        (Kind.WINOGRAD, False): 3.17,
        (Kind.WINOGRAD, True): 2.00,
        (Kind.THIN, False): 0.086,
        (Kind.THIN, True): 0.158,
        (Kind.CONVOLUTION, False): 0.720,
        (Kind.CONVOLUTION, True): 0.639,
        (Kind.PRODUCT, False): 0.739,
    },
    bandwidth=0.639,
)


def work_ms(work: Work, machine: Machine, shares: Shares = CALIBRATED) -> float:
    """Milliseconds that one operation would take on a machine."""
    memory = work.moved_bytes / (machine.memory_gbps * shares.bandwidth * 1e6)
    if not work.flops:
        return memory + LAUNCH_MS
    compute = work.flops / (machine.peak_tflops * shares.peak[work.kind, work.backward] * 1e9)
    if work.kind is Kind.WINOGRAD:
        return compute + TRANSFORMED * memory + LAUNCH_MS
    return max(compute, memory) + LAUNCH_MS
