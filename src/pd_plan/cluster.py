"""What the user has: so many equal machines, and a network of one speed between them (design, section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pd_format.errors import UserError

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Equal machines on links of one speed.

    Raises:
        UserError: `machines` is under 1, or the bandwidth is not a finite number above 0.
    """

    machines: int
    """M."""
    bandwidth_bps: float
    """Of each machine's link, in bits per second."""

    def __post_init__(self) -> None:
        if self.machines < 1:
            raise UserError(f"machines is {self.machines}; expected 1 or more.")
        if not (self.bandwidth_bps > 0 and math.isfinite(self.bandwidth_bps)):
            raise UserError(f"the bandwidth is {self.bandwidth_bps} bits a second; expected a finite number above 0.")

    @property
    def bytes_per_ms(self) -> float:
        """B, in the units that the cost equations use: bytes per millisecond."""
        return self.bandwidth_bps / 8 / 1000
