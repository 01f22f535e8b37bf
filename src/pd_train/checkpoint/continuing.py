"""How one worker keeps checkpoints, and how it goes on from one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from torch import Tensor

from pd_format.errors import UserError
from pd_train.assembly import Assembled
from pd_train.built import BuiltStage
from pd_train.checkpoint.choice import Needs
from pd_train.checkpoint.exchange import Exchange, Share
from pd_train.checkpoint.keeper import Keeper
from pd_train.checkpoint.progress import RunProgress
from pd_train.control import WorkerSetup
from pd_train.finished import finished_run
from pd_train.links import Links

__all__ = ["go_on", "open_keeper"]


def open_keeper(
    setup: WorkerSetup, mark: str, links: Links, state: Callable[[], dict[str, Tensor]], assembled: Assembled
) -> Keeper:
    """What writes this worker's parts; `mark` is that of this start of the run."""

    def sent() -> tuple[int, int]:
        statistics = assembled.runner.statistics()
        return statistics.sent_bytes, statistics.training_bytes

    keep = setup.options.keep if setup.local_index == 0 else None
    return Keeper(setup.options.run_dir, mark, links.place, state, assembled.server.shard(), sent, keep)


def go_on(setup: WorkerSetup, built: BuiltStage, links: Links, assembled: Assembled) -> RunProgress:
    """Take the newest whole checkpoint over, together with all other workers.

    Raises:
        UserError: there is none, and the run must not start from the beginning.
    """
    options = setup.options
    unused = built.unused.keys() if setup.rank == 0 else ()
    needs = Needs(frozenset({*built.held(), *unused}), tuple(assembled.server.shard().ranges()), progress=True)
    share = Share(setup.local_index, setup.local_workers)
    notice = links.inbox.notice
    restored = Exchange(links, options.plan.workers, options.run_dir, share, needs, notice).run()
    if restored is None:
        if options.resume == "yes":
            raise UserError(
                f"{options.run_dir}: holds no checkpoint that is whole and fits the plan; train from the beginning "
                "without --resume, in a new folder."
            )
        return RunProgress(lost_seconds=time.time() - options.first_start)
    built.load(restored.state, assembled.sets.sets)
    assembled.server.shard().load(restored.slices)
    if setup.rank == 0:  # One worker counts for all, since the plan may have had others.
        earlier = restored.records
        assembled.runner.count_earlier(
            sum(one.sent_bytes for one in earlier), sum(one.training_bytes for one in earlier)
        )
        notice(f"going on from checkpoint {restored.position.folder}")
    progress = RunProgress.of(restored.progress, len(options.plan.stages))
    lost = time.time() - max(one.written for one in restored.records)
    if setup.rank == 0 and finished_run(options) is not None:
        lost = 0.0
    progress = dataclasses.replace(progress, lost_seconds=progress.lost_seconds + max(0.0, lost))
    if assembled.loss_scale is not None and progress.loss_scale is not None:
        assembled.loss_scale.load(progress.loss_scale)
    return progress
