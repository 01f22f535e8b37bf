"""Checkpoints: what is in them, which one is taken, and that a run that goes on ends with the same bits."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import plans
import reference
from pd_format.errors import UserError
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.check import checkpoint_interval, settle_mode
from pd_train.checkpoint.choice import Needs, choose
from pd_train.checkpoint.part import (
    DamagedPart,
    PartRecord,
    Position,
    Range,
    ShardSlice,
    find_parts,
    load_part,
    write_part,
)
from pd_train.control import WorkerSetup
from pd_train.events import EpochEnded, Event, Note
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions
from pd_train.shard import join_slices

MODELS = str(plans.HERE / "training_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 1, 6, 6), dtype="float32"),)
CUTS: dict[int, list[str]] = {1: [], 2: ["7"], 3: ["2", "8"]}
SGD = OptimizerOptions("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3, lr_schedule="cosine")
ADAM = OptimizerOptions("adam", lr=0.01, lr_schedule="step")


def options_of(run_dir: Path, config: str, optimizer: OptimizerOptions = SGD, **changes: Any) -> RunOptions:
    """26 samples in minibatches of 4: seven an epoch."""
    plan = plans.plan_of(
        f"{MODELS}:bn_dropout", INPUTS, config, CUTS[len(config.split("-"))], data=f"{MODELS}:samples_26"
    )
    rules = changes.pop("rules", reference.Rules(sync="overlap" if "-" in config else "bsp"))
    mode = settle_mode(plan, Mode(rules.weights, rules.sync, rules.flush, rules.group))
    options = RunOptions(
        plan=plan, run_dir=run_dir, data=plan.data, epochs=2, optimizer=optimizer, mode=mode, seed=7, device="cpu",
        stall_timeout=60.0, keep=100, checkpoint_every=checkpoint_interval(plan, mode, 3),
    )  # fmt: skip
    return dataclasses.replace(options, **changes)


def run(options: RunOptions) -> list[str]:
    """Train, and return what was said."""
    events: list[Event] = []
    options.run_dir.mkdir(exist_ok=True)
    launch(options, events.append)
    return [event.text for event in events if isinstance(event, Note)]


def result_of(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for each in metrics:
        del each["seconds"], each["samples_per_second"]
    return torch.load(run_dir / "model.pt", weights_only=True), metrics


def go_on_from(run_dir: Path, folder: str, to: Path) -> None:
    """A copy of a run that was broken off after it had written this checkpoint."""
    shutil.copytree(run_dir / "checkpoints", to / "checkpoints")
    for newer in (to / "checkpoints").iterdir():
        if newer.name > folder:
            shutil.rmtree(newer)


def assert_same(found: Path, expected: Path) -> None:
    (state, metrics), (expected_state, expected_metrics) = result_of(found), result_of(expected)
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        assert torch.equal(state[name], value), name
    assert metrics == expected_metrics


@pytest.mark.parametrize(
    ("config", "optimizer", "rules"),
    [
        ("1-1", SGD, reference.Rules()),
        ("2-1-1", ADAM, reference.Rules()),
        ("1-2", SGD, reference.Rules(weights="vertical-sync")),
        ("2", SGD, reference.Rules(sync="bsp")),
    ],
)
def test_a_run_that_goes_on_ends_with_the_same_bits(
    config: str, optimizer: OptimizerOptions, rules: reference.Rules, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    run(options_of(whole, config, optimizer, rules=rules))
    folders = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert folders[0].startswith("epoch-0000-minibatch-")
    assert folders[-1] == "epoch-0002"
    for folder in (folders[0], "epoch-0001"):
        again = tmp_path / folder
        go_on_from(whole, folder, again)
        said = run(options_of(again, config, optimizer, rules=rules, resume="yes"))
        assert said == [f"going on from checkpoint {folder}"]
        assert_same(again, whole)


def test_a_damaged_checkpoint_is_left_out_with_a_message(tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    run(options_of(whole, "1-1"))
    shutil.copytree(whole / "checkpoints", again / "checkpoints")
    newest, before = (again / "checkpoints" / name for name in ("epoch-0002", "epoch-0001-minibatch-000006"))
    (newest / "stage-0.json").unlink()
    content = bytearray((before / "stage-1.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (before / "stage-1.pt").write_bytes(content)
    said = run(options_of(again, "1-1", resume="yes"))
    assert said[0] == "checkpoint epoch-0002 is not whole, so an older one is looked for"
    assert "has a damaged part: " in said[1]
    assert "stage-1.pt: its checksum is not the one that was written with it" in said[1]
    assert said[-1] == "going on from checkpoint epoch-0001-minibatch-000003"
    assert_same(again, whole)


def test_a_run_goes_on_though_no_disk_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker on a host of its own; the last plan's workers find none of what they need on theirs."""
    constant = dataclasses.replace(SGD, lr_schedule="constant")

    def on_hosts(hosts: list[Path]) -> None:
        def setup(options: RunOptions, rank: int, *rest: Any) -> WorkerSetup:
            *address, _, _ = rest
            return WorkerSetup(dataclasses.replace(options, run_dir=hosts[rank]), rank, *address, 0, 1)

        monkeypatch.setattr("pd_train.launch.WorkerSetup", setup)

    hosts = [tmp_path / f"host-{rank}" for rank in range(3)]
    for host in hosts:
        host.mkdir()
    on_hosts(hosts)
    run(options_of(hosts[0], "2-1", epochs=1, optimizer=constant))
    assert [path.stem for path in find_parts(hosts[1])] == ["stage-0-replica-1"] * 2
    on_hosts([hosts[2], hosts[0], hosts[1]])
    run(options_of(hosts[2], "2-1", resume="yes", optimizer=constant))
    monkeypatch.undo()
    straight = tmp_path / "straight"
    run(options_of(straight, "2-1", optimizer=constant))
    assert_same(hosts[2], straight)


@pytest.mark.parametrize(("config", "another"), [("2-1-1", "3-1"), ("1-1", "2-1-1")])
def test_a_checkpoint_goes_on_by_another_plan(config: str, another: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(options_of(run_dir, config, ADAM, epochs=1))
    trained, _ = result_of(run_dir)
    held = optimizer_state(run_dir, "epoch-0001")
    said = run(options_of(run_dir, another, ADAM, epochs=1, resume="yes"))
    assert said[0] == "going on from checkpoint epoch-0001"
    for name, value in result_of(run_dir)[0].items():
        assert torch.equal(value, trained[name]), name
    # A rate of zero leaves the moments' sizes alone, and parameters as they were: what is written is what was read.
    run(options_of(run_dir, another, dataclasses.replace(ADAM, lr=0.0), epochs=2, resume="yes"))
    after = optimizer_state(run_dir, "epoch-0002")
    assert after.keys() == held.keys()
    assert {name: state["step"] for name, state in after.items()} == {
        name: state["step"] + steps_of_an_epoch(name, another, run_dir) for name, state in held.items()
    }


def optimizer_state(run_dir: Path, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """What all shards keep of each parameter, put together again."""
    run_of: dict[str, list[Any]] = {}
    for path in find_parts(run_dir):
        if path.parent.name == folder:
            part = load_part(path)
            run_of.setdefault(part.record.run, []).append(part)
    newest = max(run_of.values(), key=lambda parts: max(part.record.written for part in parts))
    slices = [each for part in newest for each in part.shard]
    ends = {each.range.parameter: 0 for each in slices}
    for each in slices:
        ends[each.range.parameter] = max(ends[each.range.parameter], each.range.stop)
    return {
        name: join_slices([each for each in slices if each.range.parameter == name], Range(name, 0, stop))
        for name, stop in ends.items()
    }


def steps_of_an_epoch(name: str, config: str, run_dir: Path) -> int:
    """Updates of the parameter's stage in seven minibatches, in segments up to the checkpoints between."""
    (record,) = {
        part.record.replica: part.record
        for part in map(load_part, find_parts(run_dir))
        if part.record.position == Position(2, 0) and name in part.record.state and part.record.replica == 0
    }.values()
    replicas = int(config.split("-")[record.stage])
    every = checkpoint_interval(options_of(run_dir, config).plan, Mode(), 3)
    segments = [min(every, 7 - first) for first in range(0, 7, every)]
    return sum(-(-minibatches // replicas) for minibatches in segments)


@pytest.mark.parametrize("keep", [0, 1])
def test_old_checkpoints_are_removed(keep: int, tmp_path: Path) -> None:
    run(options_of(tmp_path / "run", "1-1", epochs=3, keep=keep))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept[-1] == "epoch-0003"
    # What was written last was not yet known to be whole when the newest was begun.
    assert 2 <= len(kept) <= 3


def test_a_run_folder_that_vanishes_ends_the_run(tmp_path: Path) -> None:
    options = options_of(tmp_path / "run", "1-1", epochs=100_000, checkpoint_every=None)

    def move(event: Event) -> None:
        if isinstance(event, EpochEnded) and not (tmp_path / "elsewhere").exists():
            options.run_dir.rename(tmp_path / "elsewhere")

    options.run_dir.mkdir()
    with pytest.raises(UserError, match=r"cannot be written \(No such file or directory\)"):
        launch(options, move)
    assert not options.run_dir.exists()
    assert all(load_part(path) for path in find_parts(tmp_path / "elsewhere"))


W = torch.arange(6.0)


class TestPart:
    def write(self, folder: Path, progress: object = None) -> Path:
        shard = [ShardSlice(Range("w", 0, 6), {"momentum_buffer": torch.ones(6)})]
        record = {
            "run": "a", "epoch": 1, "minibatch": 0, "stage": 0, "replica": 0, "rank": 0, "written": 0.0,
            "sent_bytes": 0, "training_bytes": 0,
        }  # fmt: skip
        return write_part(folder, record, "stage-0", {"w": W}, shard, progress)

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        part = load_part(self.write(tmp_path, {"losses": torch.zeros(2)}))
        assert torch.equal(part.state["w"], W)
        assert part.shard[0].range == Range("w", 0, 6)
        assert torch.equal(part.shard[0].state["momentum_buffer"], torch.ones(6))
        assert torch.equal(part.progress["losses"], torch.zeros(2))
        assert {path.name for path in (tmp_path / "checkpoints" / "epoch-0001").iterdir()} == {
            "stage-0.pt", "stage-0.json"
        }  # fmt: skip

    @pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
    def test_a_full_disk_leaves_the_part_before_whole(
        self, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = self.write(tmp_path)

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        place = "pd_train.checkpoint.part._HashingWriter.write" if failing == "write" else f"os.{failing}"
        monkeypatch.setattr(place, full)
        with pytest.raises(UserError, match=r"No space left on device.*Checkpoints that were whole before still are"):
            self.write(tmp_path)
        monkeypatch.undo()
        assert torch.equal(load_part(path).state["w"], W)
        assert not list(tmp_path.rglob(".*"))

    def test_loading_runs_no_code(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        ran = tmp_path / "ran"

        class Payload:
            def __reduce__(self) -> tuple[Any, ...]:
                return (Path.touch, (ran,))

        file = path.with_suffix(".pt")
        torch.save({"state": Payload(), "optimizer": [], "progress": None}, file)
        record = json.loads(path.read_text())
        record["bytes"] = file.stat().st_size
        record["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        path.write_text(json.dumps(record))
        with pytest.raises(DamagedPart, match="cannot be read"):
            load_part(path)
        assert not ran.exists()

    @pytest.mark.parametrize(
        "change", [{"epoch": 2}, {"bytes": -1}, {"sha256": "0"}, {"state": ["w", "v"]}, {"more": 1}]
    )
    def test_a_record_that_does_not_fit_is_damage(self, change: dict[str, Any], tmp_path: Path) -> None:
        path = self.write(tmp_path)
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        with pytest.raises(DamagedPart):
            load_part(path)


def record_of(
    run: str, position: Position, stage: int, state: str, *ranges: Range, progress: bool = True
) -> PartRecord:
    return PartRecord(
        run=run, epoch=position.epoch, minibatch=position.minibatch, stage=stage, replica=0, rank=stage, written=0.0,
        sent_bytes=0, training_bytes=0, state=tuple(state), ranges=tuple(map(tuple, ranges)), has_progress=progress,
        file="stage-0.pt", bytes=0, sha256="",
    )  # fmt: skip


class TestChoice:
    NEEDS = (Needs(frozenset("ab"), (Range("a", 0, 10),), True), Needs(frozenset("c"), (Range("c", 0, 4),), True))

    def parts(self, run: str, position: Position) -> list[PartRecord]:
        first = record_of(run, position, 0, "a", Range("a", 0, 6))
        return [first, record_of(run, position, 1, "bc", Range("a", 5, 10), Range("c", 0, 4), progress=False)]

    def test_the_newest_whole_one_is_taken(self) -> None:
        old, new = Position(1, 0), Position(1, 5)
        chosen = choose({0: self.parts("x", old), 1: self.parts("x", new)}, self.NEEDS)
        assert chosen is not None
        assert chosen.position == new
        assert [source.rank for source in chosen.sources] == [1, 1]

    @pytest.mark.parametrize("missing", [0, 1])
    def test_one_that_lacks_a_part_is_not(self, missing: int) -> None:
        parts = self.parts("x", Position(2, 0))
        del parts[missing]
        assert choose({0: parts}, self.NEEDS) is None

    def test_parts_of_two_starts_are_not_put_together(self) -> None:
        position = Position(1, 0)
        mixed = [self.parts("x", position)[0], self.parts("y", position)[1]]
        assert choose({0: mixed}, self.NEEDS) is None

    def test_a_gap_in_an_optimizers_ranges_counts(self) -> None:
        needs = (Needs(frozenset(), (Range("a", 0, 11),), False),)
        assert choose({0: self.parts("x", Position(1, 0))}, needs) is None
