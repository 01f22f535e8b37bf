"""A worker's memory, open files and queues stay as they are, however long it trains."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest

import plans
from pd_format.profile import InputSpec
from pd_train.events import EpochEnded, Event
from pd_train.launch import launch
from test_checkpoint import MODELS, options_of

PAGE = os.sysconf("SC_PAGE_SIZE")
INPUTS = (InputSpec(name="x", shape=(256, 64), dtype="float32"),)
CUTS = {"1-1": ("2",), "2-1": ("2",), "2": ()}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("config", "epochs"),
    [("2-1", 30), *(pytest.param(config, 100, marks=pytest.mark.slow) for config in CUTS)],
)
def test_memory_and_files_stay_as_they_are(tmp_path: Path, config: str, epochs: int) -> None:
    """Twenty minibatches an epoch, each of which moves half a megabyte across a cut or between replicas."""
    seen: list[dict[str, tuple[int, int]]] = []

    def look(event: Event) -> None:
        if isinstance(event, EpochEnded):
            workers = [each for each in multiprocessing.active_children() if each.name.startswith("pd-worker")]
            seen.append(
                {
                    each.name: (resident_bytes(each.pid or 0), len(os.listdir(f"/proc/{each.pid}/fd")))
                    for each in workers
                }
            )

    options = options_of(tmp_path, config, epochs=epochs, checkpoint_every=None)
    plan = plans.plan_of(f"{MODELS}:wide", INPUTS, config, CUTS[config], data=f"{MODELS}:few_wide_samples")
    launch(dataclasses.replace(options, plan=plan, data=plan.data, threads=1), look)
    assert len(seen) == epochs
    warm, last = seen[epochs // 5], seen[-2]
    assert len(warm) == plan.workers
    for worker, (resident, files) in warm.items():
        assert last[worker][0] < 1.02 * resident, [each[worker][0] for each in seen]
        assert last[worker][1] <= files + 2
