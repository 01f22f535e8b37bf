"""How long a run still takes, by the pace that it has had so far."""

from __future__ import annotations

from pd_train.events import Progress

__all__ = ["TimeLeft"]


class TimeLeft:
    """Estimates what is left of a run from the pace of its phases."""

    def __init__(self) -> None:
        self._epoch_s: dict[str, float] = {}

    def update(self, event: Progress) -> float | None:
        """Seconds left in all epochs, or None while nothing is known.

        Validation counts from the first one on that has been seen.
        """
        if not event.done or event.seconds <= 0:
            return None
        whole = event.seconds / event.done * event.minibatches
        self._epoch_s[event.phase] = whole
        left = whole - event.seconds
        if event.phase == "training":
            left += self._epoch_s.get("validation", 0.0)
        return max(0.0, left) + (event.epochs - event.epoch - 1) * sum(self._epoch_s.values())
