"""How every start begins, whatever it is for: which plan it follows, where its workers are, and who may join them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pd_format.errors import UserError
from pd_format.plan import Plan, read_plan
from pd_train.check import check_network
from pd_train.farewell import Farewell
from pd_train.host import is_here
from pd_train.whoami import Identity, find_identity

__all__ = ["Placed", "find_plan", "find_workers"]


class Placed(NamedTuple):
    """A plan and its workers."""

    plan: Plan
    """With the hosts of this start, whether they are its own, or from `--hosts` or a launcher."""
    identity: Identity
    """Which workers are here, and why."""
    key: Path | None
    """That all workers hold."""


def find_plan(path: Path) -> Plan:
    """Read the plan of `--plan`.

    Raises:
        UserError: there is none, or not one that can be read.
    """
    if not os.path.exists(path):  # Unlike `Path.exists` it says no to a name that is too long.
        raise UserError(f"--plan {path}: there is no such file; make one with pd-plan, or name another.")
    return read_plan(path)


def find_workers(plan: Plan, given: Mapping[str, Any], farewell: Farewell) -> Placed:
    """Find out where the workers of a plan are, and look at the key.

    Args:
        plan: as it was read.
        given: the command's options by their names.
        farewell: is told who the others are as soon as that is known.

    Raises:
        UserError: nothing tells where they are, the network is not to be trusted, or the key is none.
    """
    identity = find_identity(plan, given["rank"], given["hosts"], os.environ, is_here)
    plan = plan.model_copy(update={"hosts": identity.hosts})
    key = None if given["key"] is None else Path(given["key"])
    check_network(plan, given["insecure"], has_key=key is not None)
    if key is not None:
        from pd_train.keys import read_key

        read_key(key)  # Each worker reads it for itself: what is wrong with it is said before they start.
    farewell.prepare(plan, identity.ranks, identity.job is not None, key)
    return Placed(plan, identity, key)
