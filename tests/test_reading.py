"""Reading ahead: which minibatches, the same ones as without, and processes that end with their worker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import image_sets
import plans
from pd_format.errors import UserError
from pd_format.layers.factory import load_function
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.course import Course, MinibatchKey
from pd_train.data import Minibatch, MinibatchLoader
from pd_train.events import Event, Note, Progress
from pd_train.feed import loader_workers
from pd_train.host import shared_memory_bytes
from pd_train.launch import launch
from pd_train.loader_process import LoadedByKey
from pd_train.options import RunOptions
from pd_train.reading import Direct, ReadAhead

MODELS = str(plans.HERE / "training_models.py")
GREY = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)
COLOUR = (InputSpec(name="x", shape=(4, 3, 24, 24), dtype="float32"),)

COURSE = Course(epochs=2, training=7, validation=3, flush=None, most=None, replica=0, replicas=1)


def course(**changes: Any) -> Course:
    return dataclasses.replace(COURSE, **changes)


def written(keys: Iterator[MinibatchKey]) -> str:
    """`t0:0 1 2 v0:0 ...`: the phase with its epoch wherever that changes, and minibatches."""
    words, phase = [], ""
    for key in keys:
        now = f"{'t' if key.training else 'v'}{key.epoch}:"
        words.append(f"{now if now != phase else ''}{key.minibatch}")
        phase = now
    return " ".join(words)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "t0:0 1 2 3 4 5 6 v0:0 1 2 t1:0 1 2 3 4 5 6 v1:0 1 2"),
        ({"replicas": 2}, "t0:0 2 4 6 v0:0 2 t1:0 2 4 6 v1:0 2"),
        ({"replicas": 2, "replica": 1}, "t0:1 3 5 v0:1 t1:1 3 5 v1:1"),
        # Each segment starts with replica 0.
        ({"replicas": 2, "flush": 3}, "t0:0 2 3 5 6 v0:0 2 t1:0 2 3 5 6 v1:0 2"),
        ({"replicas": 2, "replica": 1, "flush": 3}, "t0:1 4 v0:1 t1:1 4 v1:1"),
        ({"most": 9}, "t0:0 1 2 3 4 5 6 v0:0 1 2 t1:0 1 v1:0 1 2"),
        ({"most": 7}, "t0:0 1 2 3 4 5 6 v0:0 1 2"),
        ({"replicas": 9, "replica": 8}, ""),
        ({"training": 0, "epochs": 1}, "v0:0 1 2"),
    ],
)
def test_a_replica_knows_its_minibatches_of_the_whole_run(changes: dict[str, Any], expected: str) -> None:
    assert written(course(**changes).after(True, 0, 0)) == expected


def test_the_rest_of_a_run_follows_any_segment() -> None:
    assert written(course(flush=3).after(True, 1, 3)) == "t1:3 4 5 6 v1:0 1 2"
    assert written(course().after(False, 0, 0)) == "v0:0 1 2 t1:0 1 2 3 4 5 6 v1:0 1 2"


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("flush", [None, 1, 3, 4])
def test_together_replicas_load_every_minibatch_once(replicas: int, flush: int | None) -> None:
    parts = [course(replicas=replicas, replica=k, flush=flush).after(True, 0, 0) for k in range(replicas)]
    found = sorted(key for part in parts for key in part)
    assert found == sorted(COURSE.after(True, 0, 0))


MB = 1_000_000


@pytest.mark.parametrize(
    ("wanted", "data", "cores", "shared", "expected"),
    [
        (None, "imagefolder:x", 16, math.inf, 4),
        (None, "imagefolder:x", 3, math.inf, 2),
        (None, "imagefolder:x", 1, math.inf, 0),
        # A minibatch of 10 MB, two of them for each process, in half of the memory.
        (None, "imagefolder:x", 16, 64 * MB, 1),
        (None, "imagefolder:x", 16, 39 * MB, 0),
        (None, "cifar10:x", 16, math.inf, 0),
        (None, "digits", 16, math.inf, 0),
        (None, "mine.py:load", 16, math.inf, 0),
        (3, "mine.py:load", 1, 0, 3),
        (0, "imagefolder:x", 16, math.inf, 0),
    ],
)
def test_files_are_read_by_as_many_processes_as_there_is_room_for(
    wanted: int | None, data: str, cores: int, shared: float, expected: int
) -> None:
    assert loader_workers(wanted, data, cores, 10 * MB, shared) == expected


def test_shared_memory_without_a_limit_is_infinite(tmp_path: Path) -> None:
    assert shared_memory_bytes(tmp_path / "no") == math.inf
    assert 0 < shared_memory_bytes(tmp_path) < math.inf


def loaders_of(data: str, **changes: Any) -> tuple[MinibatchLoader, MinibatchLoader]:
    train, validation = load_function(data)()
    for name, value in changes.items():
        setattr(train, name, value)
    return (
        MinibatchLoader(train, GREY, 4, seed=3, shuffle=True),
        MinibatchLoader(validation, GREY, 4, seed=3, shuffle=False),
    )


@contextlib.contextmanager
def reading(data: str, **changes: Any) -> Iterator[ReadAhead]:
    loaders = loaders_of(data, **changes)
    before = set(threading.enumerate())
    source = ReadAhead(loaders, data, COURSE, 2, lambda text: None, threads=1, pin=False)
    try:
        yield source
    finally:
        source.close()
        assert not multiprocessing.active_children()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)  # Queues end their threads on their own, a moment later.


def same(left: Minibatch, right: Minibatch) -> bool:
    pairs = [*zip(left.inputs, right.inputs, strict=True), (left.targets, right.targets)]
    return left.samples == right.samples and all(torch.equal(a, b) for a, b in pairs)


def test_what_is_read_ahead_is_what_reading_gives() -> None:
    direct = Direct(loaders_of(f"{MODELS}:drawn"), lambda text: None)
    state = torch.get_rng_state()
    with reading(f"{MODELS}:drawn") as source:
        for key in COURSE.after(True, 0, 0):
            if key.minibatch == 0:
                source.expect(key.training, key.epoch, 0, 7 if key.training else 3)
            assert same(source.load(key), direct.load(key)), key
        # A segment that nobody foretold, twice.
        for _ in range(2):
            source.expect(True, 1, 5, 2)
            for b in (5, 6):
                assert same(source.load(MinibatchKey(True, 1, b)), direct.load(MinibatchKey(True, 1, b)))
    assert torch.equal(torch.get_rng_state(), state)


class _TwoPartError(Exception):
    """Cannot be made again from its text, as many exceptions of libraries."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}, {second}")


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (UserError("Sample 5 is bad. Mend it."), UserError, "Sample 5 is bad. Mend it."),
        (KeyError("name"), KeyError, "'name'"),
        (_TwoPartError("one", "two"), RuntimeError, "_TwoPartError: one, two"),
    ],
)
def test_an_exception_arrives_as_what_it_is(failure: Exception, kind: type[Exception], text: str) -> None:
    """On its way here by pickle alone, which is what differs between one process and two."""
    import pickle

    by_key = LoadedByKey(loaders_of(f"{MODELS}:drawn", failure=failure), f"{MODELS}:drawn", 1)
    found = [pickle.loads(pickle.dumps(by_key[MinibatchKey(True, 0, b)])) for b in range(7)]
    (failed,) = [one for one in found if not isinstance(one, Minibatch)]
    assert type(failed.error) is kind
    assert str(failed.error) == text
    assert "training_models.py" in failed.trace


def test_a_minibatch_keeps_its_form_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    # Only a GPU has such memory; what torch's loader does with a minibatch on the way there is seen without one.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    before = Minibatch((torch.zeros(2), {"a": torch.zeros(2)}), torch.zeros(2), 2, ("a.jpg",))
    after = pin_memory(before)
    assert isinstance(after, Minibatch)
    inputs, targets, samples, skipped = after
    assert (type(inputs), samples, skipped) == (tuple, 2, ("a.jpg",))
    assert [value.tolist() for value in (inputs[0], inputs[1]["a"], targets)] == [[1, 1]] * 3


def test_a_data_set_that_no_other_process_can_have_is_refused_with_the_remedy() -> None:
    with (
        pytest.raises(UserError, match=r"cannot be handed to processes.*lambda.*--loader-workers 0"),
        reading(f"{MODELS}:drawn", failure=lambda: 1),
    ):
        pass


def a_run(run_dir: Path, plan: Any, show: Callable[[Event], None] = lambda event: None, **changes: Any) -> None:
    run_dir.mkdir()
    settings = {"epochs": 2, "device": "cpu", "seed": 7, "stall_timeout": 60.0, **changes}
    launch(RunOptions(plan=plan, run_dir=run_dir, data=plan.data, **settings), show)


def test_no_number_of_a_run_depends_on_who_loads_its_images(tmp_path: Path) -> None:
    root = image_sets.write_imagefolder(tmp_path / "set")
    broken = root / "train" / "bee" / "03.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    plan = plans.plan_of(f"{MODELS}:colour", COLOUR, "2-1", ["3"], data=f"imagefolder:{root}")
    states, metrics = [], []
    for workers in (0, 2):
        run_dir = tmp_path / f"run{workers}"
        notes: list[str] = []

        def show(event: Event, notes: list[str] = notes) -> None:
            if isinstance(event, Note):
                notes.append(event.text)

        mode = Mode(sync="overlap", flush=3)
        a_run(run_dir, plan, show, loader_workers=workers, skip_corrupt=True, mode=mode)
        states.append(torch.load(run_dir / "model.pt", weights_only=True))
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        metrics.append([(one["train_loss"], one["validation_loss"]) for one in lines])
        report = json.loads((run_dir / "report.json").read_text())
        assert report["skipped_files"] == [str(broken)]
        assert report["options"]["skip_corrupt"] is True
        assert f"{broken} cannot be read as an image; another one of its class stands in for it" in notes
        assert "files that others stood in for: 1; report.json lists them" in notes
        assert f"{workers} processes load data" in (run_dir / "worker-1.log").read_text()
    assert metrics[0] == metrics[1]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has just ended.
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return found


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_processes_that_load_end_with_a_killed_worker(tmp_path: Path) -> None:
    plan = plans.plan_of(f"{MODELS}:skip", GREY, "1", [], data=f"{MODELS}:drawn_for_long")
    watched: list[int] = []

    def show(event: Event) -> None:
        if isinstance(event, Progress) and not watched:
            (worker,) = (p for p in multiprocessing.active_children() if p.name == "pd-worker-0")
            watched.extend(os.pidfd_open(pid) for pid in descendants(worker.pid or 0))
            os.kill(worker.pid or 0, signal.SIGKILL)

    with pytest.raises(UserError, match=r"worker 0 .* was killed by SIGKILL"):
        a_run(tmp_path / "run", plan, show, loader_workers=2)
    # Two that load, the server that they come from, and its resource tracker.
    assert len(watched) >= 3
    for descriptor in watched:
        ended, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
        assert ended, "a process is left"
