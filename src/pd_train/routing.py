"""Who a worker talks to: pure arithmetic on the plan (the paper, section 3.2, deterministic round robin).

Minibatch b goes to replica b mod r of every stage, forward and backward, so that no worker has to ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_format.plan import Plan, Stage

__all__ = ["Place", "describe", "may_send", "on_the_host_of", "place_of"]


@dataclass(frozen=True)
class Place:
    """A worker's place in the plan: its stage, its replica, and the stages before and after."""

    rank: int
    stage: Stage
    replica: int
    before: Stage | None
    after: Stage | None

    def source(self, minibatch: int) -> int:
        """The rank that sends this minibatch's activations, and takes its gradients."""
        if self.before is None:
            raise ValueError("stage 0 reads its minibatches from the data set")
        return self.before.workers[minibatch % self.before.replicas]

    def target(self, minibatch: int) -> int:
        """The rank that this minibatch's activations go to, and its gradients come from."""
        if self.after is None:
            raise ValueError("the last stage sends no activations")
        return self.after.workers[minibatch % self.after.replicas]

    def __str__(self) -> str:
        return describe(self.stage, self.replica)


def describe(stage: Stage, replica: int) -> str:
    """A worker as messages to people name it."""
    return f"stage {stage.index} replica {replica}"


def place_of(plan: Plan, rank: int) -> Place:
    """The place of a worker."""
    stage, replica = plan.stage_of(rank)
    s = stage.index
    return Place(
        rank=rank,
        stage=stage,
        replica=replica,
        before=plan.stages[s - 1] if s > 0 else None,
        after=plan.stages[s + 1] if s + 1 < len(plan.stages) else None,
    )


_TO_RANK_0 = frozenset(
    {"about", "joined", "what time", "aligned", "saved", "part", "bye", "kept", "readable", "pulse", "timing"}
)
_FROM_RANK_0 = frozenset({"missing", "refused", "welcome", "go", "time", "event", "segment", "goodbye", "order"})
_OF_STAGE = frozenset({"gradient", "parameters", "buffers"})
_OF_ALL = frozenset({"hello", "failed", "norm", "finite", "want", "restored"})


def may_send(plan: Plan, place: Place, kind: str, sender: int, index: int) -> bool:
    """Whether a worker of the plan is to send a message of this kind and index to the worker at `place`.

    Args:
        plan: of the run.
        place: of the receiver.
        kind, sender, index: of the message; see `pd_train.wire.Message`.
    """
    if not 0 <= sender < plan.workers or sender == place.rank:
        return False
    if kind == "forward":
        return place.before is not None and sender == place.source(index)
    if kind == "backward":
        return place.after is not None and sender == place.target(index)
    if kind == "score":
        last = plan.stages[-1]
        return place.rank == 0 and sender == last.workers[index % last.replicas]
    if kind in _OF_STAGE:
        return sender in place.stage.workers
    if kind in _TO_RANK_0:
        return place.rank == 0
    return kind in _OF_ALL or (kind in _FROM_RANK_0 and sender == 0)


def on_the_host_of(plan: Plan, rank: int) -> list[int]:
    """The ranks that share a host, its cores, GPUs and run folder."""
    if not plan.hosts:
        return list(range(plan.workers))
    return [other for other, host in enumerate(plan.hosts) if host.address == plan.hosts[rank].address]
