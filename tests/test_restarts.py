"""Workers that are killed, stopped or cut off at any moment: the run goes on, and ends with the same bits."""

from __future__ import annotations

import dataclasses
import multiprocessing.forkserver
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import training_models
from pd_format.errors import UserError
from pd_train.events import EpochEnded, Event, Note, Progress, RunEnded
from pd_train.launch import WorkerLost
from pd_train.options import RunOptions
from pd_train.restarts import train
from test_checkpoint import assert_same, options_of

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


def workers_now() -> list[int]:
    """Process numbers of the workers that are running."""
    server: int | None = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    try:
        return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    except OSError:
        return []


def train_watched(options: RunOptions, most: int, watch: Callable[[Event], None] = lambda event: None) -> list[Event]:
    events: list[Event] = []

    def show(event: Event) -> None:
        events.append(event)
        watch(event)

    options.run_dir.mkdir(exist_ok=True)
    train(options, most, show)
    return events


class Killer:
    """Sends one worker a signal when an event comes for the n-th time."""

    def __init__(self, kind: type[Event], count: int, number: int, seed: int = 0) -> None:
        self._kind = kind
        self._left = count
        self._number = number
        self._random = random.Random(seed)

    def __call__(self, event: Event) -> None:
        if isinstance(event, self._kind) and self._left:
            self._left -= 1
            if not self._left:
                os.kill(self._random.choice(workers_now()), self._number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train_watched(options_of(run_dir, "2-1"), 0)
    return run_dir


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_run_that_loses_a_worker_starts_again_and_ends_with_the_same_bits(
    number: int, undisturbed: Path, tmp_path: Path
) -> None:
    options = options_of(tmp_path / "run", "2-1", peer_timeout=1.0)
    events = train_watched(options, 1, Killer(EpochEnded, 1, number))
    said = [event.text for event in events if isinstance(event, Note)]
    assert "Starting again, for the 1. of at most 1 times." in said[0]
    assert "stage " in said[0]
    assert "worker-" in said[0]
    # A checkpoint that was being written is not whole, and says so.
    assert said[-1].startswith("going on from checkpoint epoch-000")
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.restarts == 1
    assert ended.lost_seconds > 0
    assert_same(tmp_path / "run", undisturbed)


@needs_proc
def test_a_worker_lost_before_the_first_checkpoint_costs_no_more_than_the_beginning(tmp_path: Path) -> None:
    """The weights to start from included."""
    weights = tmp_path / "weights.pt"
    torch.manual_seed(1)
    torch.save(training_models.bn_dropout().state_dict(), weights)
    changes: dict[str, Any] = {"checkpoint_every": None, "init_from": str(weights)}
    train_watched(options_of(tmp_path / "alone", "2-1", **changes), 0)
    events = train_watched(options_of(tmp_path / "run", "2-1", **changes), 1, Killer(Progress, 1, signal.SIGKILL))
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.restarts == 1
    assert_same(tmp_path / "run", tmp_path / "alone")


@needs_proc
def test_losses_beyond_the_limit_end_the_run_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerLost, match=r"worker \d \(stage \d replica \d\): the process \(pid \d+\) was killed by SIGKI"
    ):
        train_watched(options_of(tmp_path / "run", "2-1"), 0, Killer(Progress, 1, signal.SIGKILL))


def test_what_would_only_happen_again_is_not_tried_again(tmp_path: Path) -> None:
    options = options_of(tmp_path / "run", "1-1")
    options = dataclasses.replace(options, optimizer=dataclasses.replace(options.optimizer, lr=1e30))
    with pytest.raises(UserError, match=r"training stopped\. Try a smaller --lr"):
        train_watched(options, 5)
    assert not (tmp_path / "run" / "restarts.jsonl").exists()


@needs_proc
@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make chaos`."""
    kills, seed = int(os.environ.get("KILLS", "50")), int(os.environ.get("SEED", "0"))
    changes: dict[str, Any] = {"epochs": 24 * kills, "peer_timeout": 2.0, "keep": 2}
    train_watched(options_of(tmp_path / "alone", "2-1-1", **changes), 0)
    draw = random.Random(seed)
    over = threading.Event()
    sent: list[int] = []

    def kill() -> None:
        before: set[int] = set()
        while len(sent) < kills:
            # Of a new start only, whose processes may have been there for no time at all.
            while not (workers := set(workers_now())) or workers & before:
                if over.wait(0.01):
                    return
            if over.wait(draw.uniform(0.0, 3.0)):
                return
            before = set(workers_now())
            if before:
                sent.append(draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
                os.kill(draw.choice(sorted(before)), sent[-1])

    killer = threading.Thread(target=kill)
    killer.start()
    start = time.monotonic()
    try:
        events = train_watched(options_of(tmp_path / "run", "2-1-1", **changes), kills)
    finally:
        over.set()
        killer.join()
    assert_same(tmp_path / "run", tmp_path / "alone")
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.restarts == len(sent) == kills
    with capsys.disabled():
        print(
            f"\n{kills} signals ({sent.count(signal.SIGSTOP)} of them SIGSTOP), {ended.restarts} restarts, "
            f"{time.monotonic() - start:.0f} s in all, {ended.lost_seconds:.0f} s lost; the same bits as alone"
        )
