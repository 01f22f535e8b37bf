"""What was timed, minibatch by minibatch; what counts of it; and when it is enough.

Noise on a machine is one-sided: other work makes a step slower, never faster. So the slower half of the steps is left
out, and the mean and the standard deviation are those of the faster half. Steps are left out whole, never single
layers, so that the layers' means still add up to the mean of whole steps; plain steps are treated alike.

    n        minibatches timed
    kept     ceil(n / 2), the fastest
    figure   mean over the kept
    error    standard deviation over the kept / sqrt(kept)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEWEST", "MOST", "Samples", "Summary", "kept_of"]

#: Where the number of minibatches is not given: never fewer, never more than these.
FEWEST = 10
MOST = 1000

#: A layer matters if it takes at least this share of the time of all layers.
SHARE_THAT_MATTERS = 0.01

#: The standard error, relative to the mean, below which a figure is good enough.
GOOD_ENOUGH = 0.02

Floats = NDArray[np.float64]


def kept_of(minibatches: int) -> int:
    """How many of so many steps count: the faster half, rounded up."""
    return (minibatches + 1) // 2


@dataclass(frozen=True)
class Summary:
    """Means and standard deviations in milliseconds for one minibatch; one entry a layer, in chain order.

    Attributes:
        minibatches: how many were timed, those left out included.
        plain_ms: the un-instrumented step, forward, loss and backward.
    """

    minibatches: int
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    forward_ms_std: tuple[float, ...]
    backward_ms_std: tuple[float, ...]
    plain_ms: float

    @property
    def layers_ms(self) -> float:
        """The sum over all layers, forward and backward."""
        return sum(self.forward_ms) + sum(self.backward_ms)

    @property
    def difference(self) -> float:
        """How far the sum over the layers lies above the plain step, as a share of it; 0 where both are 0."""
        if self.plain_ms == 0:
            return 0.0 if self.layers_ms == 0 else math.inf
        return self.layers_ms / self.plain_ms - 1


class Samples:
    """Times of single minibatches, in milliseconds."""

    def __init__(self, layers: int) -> None:
        #: [minibatch, forward or backward, layer]; grows by doubling, the first `_count` rows are filled.
        self._times: Floats = np.empty((16, 2, layers))
        self._plain: Floats = np.empty(16)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, forward_ms: Sequence[float], backward_ms: Sequence[float], plain_ms: float) -> None:
        """Add one instrumented step, a figure a layer, and the plain step that ran beside it."""
        if self._count == len(self._plain):
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
            self._plain = np.concatenate([self._plain, np.empty_like(self._plain)])
        self._times[self._count, 0] = forward_ms
        self._times[self._count, 1] = backward_ms
        self._plain[self._count] = plain_ms
        self._count += 1

    def summary(self) -> Summary:
        """The figures so far; at least one minibatch must have been added."""
        times, plain = self._kept()
        mean = times.mean(axis=0)
        spread = _deviation(times)
        return Summary(
            minibatches=self._count,
            forward_ms=tuple(mean[0].tolist()),
            backward_ms=tuple(mean[1].tolist()),
            forward_ms_std=tuple(spread[0].tolist()),
            backward_ms_std=tuple(spread[1].tolist()),
            plain_ms=float(plain.mean()),
        )

    def needed(self) -> int:
        """How many minibatches it takes, as far as one can tell by now.

        The least number whose standard errors would be under 2 % of the mean, for the plain step and for each layer
        that takes at least 1 % of the time, given the spread seen so far; between 10 and 1000. The measurement is
        over once this is no more than the number timed.
        """
        if self._count < 2:
            return FEWEST
        times, plain = self._kept()
        layers = times.sum(axis=1)
        mean, spread = layers.mean(axis=0), _deviation(layers)
        total = mean.sum()
        matters = (mean >= SHARE_THAT_MATTERS * total) & (mean > 0)
        relative = [*(spread[matters] / mean[matters]).tolist()]
        if plain.mean() > 0:
            relative.append(float(_deviation(plain) / plain.mean()))
        kept = max((math.ceil((spread / GOOD_ENOUGH) ** 2) for spread in relative), default=1)
        # Invert `kept_of`: the least n that keeps so many.
        timed = 2 * kept - 1
        return min(MOST, max(FEWEST, timed))

    def _kept(self) -> tuple[Floats, Floats]:
        kept = kept_of(self._count)
        times, plain = self._times[: self._count], self._plain[: self._count]
        fastest = np.argsort(times.sum(axis=(1, 2)), kind="stable")[:kept]
        return times[fastest], np.sort(plain)[:kept]


def _deviation(values: Floats) -> Floats:
    """The sample's standard deviation along the first axis; 0 for one value, which shows no spread."""
    if len(values) < 2:
        return np.zeros(values.shape[1:])
    deviation: Floats = np.asarray(values.std(axis=0, ddof=1))
    return deviation
