"""Checkpoints: what is in them, which one is taken, and that a run that goes on ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import plans
import reference
import training_models  # noqa: F401  (workers import it by its file)
from pd_format.profile import InputSpec
from pd_format.versions import Mode
from pd_train.check import checkpoint_interval, settle_mode
from pd_train.events import Event, Note
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions

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
