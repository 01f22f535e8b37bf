"""The parameter sets of one worker: which set holds which weight version, and when a set is free again.

A minibatch's backward pass must meet the weights of its forward pass (the paper, section 3.4). No copy is made at the
forward pass: autograd holds on to the set that it used, and a set is written again only when no minibatch in
flight, and none still to come, uses its version.

    w = 2, lag 0, two sets        F0 F1 B0 F2 B1 F3 B2
    set 0 holds version            0  0  0  0  0  2  2     rewritten after B1, the last to use version 0
    set 1 holds version                  1  1  1  1  3     made by the update after B0

Of replicas in step (bsp) an update lands while the backward pass whose gradients it averages still runs: bucket by
bucket, each after it has left that pass, in the set that the pass itself uses, if that pass is the set's last user. Its
weights are needed there no more: autograd has added up a parameter's gradient only when all uses that it comes from are
behind it. A use without one (`.detach()`) may be still to come; autograd's version check then ends the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["ParameterSets"]


class ParameterSets:
    """All sets of a stage's trainable parameters, allocated once.

    Args:
        parameters: contiguous, in a fixed order; they are set 0. Without any, one empty set stands for every version.
        count: sets in all (`pd_format.versions.sets_needed`).
        copy: makes the other sets' tensors from those of set 0.
        lag: of the stage. A set is sent from without being copied. That another replica has version v is known once an
            update takes in a gradient that it computed no earlier: with lag 1, one version later.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        count: int,
        lag: int = 0,
        copy: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        self.sets: list[list[nn.Parameter]] = [list(parameters)]
        for _ in range(count - 1):
            self.sets.append(
                [nn.Parameter(copy(parameter.detach()), parameter.requires_grad) for parameter in parameters]
            )
        self.is_wanted: Callable[[int], bool] = lambda version: True
        """Whether a pass still to come uses a version; whoever runs the passes says so."""
        self._lag = lag
        self._frozen = not parameters
        self._set_of = {0: 0}
        self._in_use: Counter[int] = Counter()
        self._complete = 0
        self._landing: tuple[int, int] | None = None

    @property
    def complete(self) -> int:
        """The newest version that is there as a whole."""
        return self._complete

    def set_of(self, version: int) -> int:
        """The index of the set that holds a version.

        Raises:
            KeyError: the version has not been opened, or its set was written again.
        """
        return 0 if self._frozen else self._set_of[version]

    def is_ready(self, version: int) -> bool:
        """Whether the version is there as a whole."""
        return self._frozen or self._complete >= version

    @property
    def held(self) -> int:
        """How many versions are held."""
        return len(self._set_of)

    def standing(self) -> str:
        """Where it stands, for people; may be called from any thread."""
        in_use = {version: count for version, count in self._in_use.copy().items() if count}
        return (
            f"weight versions held {sorted(self._set_of.copy())}, the newest that is whole {self._complete}, in use by "
            f"minibatches in flight {in_use}"
        )

    def newest(self) -> list[nn.Parameter]:
        """The parameters of the newest version that is whole."""
        return self.sets[self.set_of(self._complete)]

    def acquire(self, version: int) -> None:
        """Mark a version as used by one more minibatch in flight."""
        self._in_use[version] += 1

    def release(self, version: int) -> None:
        """A minibatch that used the version has had its backward pass."""
        self._in_use[version] -= 1
        self._landing = None

    def let_land(self, version: int, used: int) -> None:
        """A backward pass begins within which an update may land, over what the pass uses if nobody else does.

        Args:
            version: that the update makes: one that this pass's gradients are in, so that it comes after them.
            used: by the pass, which holds it until `release`.
        """
        self._landing = version, used

    def open(self, version: int) -> int | None:
        """The set that a new version is to be written to, or None while every set is still needed.

        Versions are opened in order. Where nobody needs the newest version any more, and no other set is free, the
        update works in place.
        """
        if version in self._set_of:
            return self._set_of[version]
        newest = max(self._set_of)
        if version != newest + 1:
            return None
        unused = [index for index in range(len(self.sets)) if index not in self._set_of.values()]
        if unused:
            self._set_of[version] = unused[0]
            return unused[0]
        for held, index in sorted(self._set_of.items()):
            # The update of a version starts from the one before it, so a version stays until the next one is whole.
            settled = held < self._complete or held == newest == self._complete
            others = self._in_use[held] - ((version, held) == self._landing)
            if settled and held < version - self._lag and others <= 0 and not self.is_wanted(held):
                del self._set_of[held]
                self._set_of[version] = index
                return index
        return None

    def completed(self, version: int) -> None:
        """Every parameter of the version is in its set now."""
        self._complete = version

    def start_segment(self) -> None:
        """After a drain: the newest version of the old segment is version 0 of the new one."""
        self._set_of = {0: self._set_of[self._complete]}
        self._in_use.clear()
        self._landing = None
        self._complete = 0
