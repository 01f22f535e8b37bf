"""What workers hold at their fullest, beside what the plan says that they need (design, section 1: `memory_bytes`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pd_plan.cli import main as pd_plan
from pd_profile.cli import main as pd_profile
from pd_train.cli import main as pd_train
from pd_train.memory import MemoryMeter

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits_cnn.py"


def call(program: Any, *arguments: object) -> str:
    result = CliRunner().invoke(program, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the digits' network, with times that cut it alike on every machine."""
    path = tmp_path_factory.mktemp("profile") / "digits.json"
    call(pd_profile, f"{EXAMPLE}:digits_cnn", "--data", "digits", "--minibatches", 1, "--output", path)
    value = json.loads(path.read_text())
    for layer in value["layers"]:
        layer["forward_ms"], layer["backward_ms"] = 1.0, 2.0
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("config", "planning", "training"),
    [
        ("1-1", ["--optimizer", "adam"], ["--optimizer", "adam"]),
        ("2-1", [], []),
        ("1-1", ["--memory", "9MB", "--recompute"], []),
    ],
    ids=["adam", "replicated", "recomputing"],
)
def test_the_most_held_is_what_the_plan_says(
    profile: Path, tmp_path: Path, config: str, planning: list[str], training: list[str]
) -> None:
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    options = ["--config", config, "--in-flight", "noam", "--bandwidth", "1gbps", "--output", plan, *planning]
    call(pd_plan, "--profile", profile, *options)
    output = call(pd_train, "--plan", plan, "--run-dir", run, "--minibatches", 12, "--measure-memory", *training)
    stages = json.loads(plan.read_text())["stages"]
    assert any(stage.get("recompute") for stage in stages) == ("--recompute" in planning)
    planned = [stage["predicted"]["memory_bytes"] for stage in stages]
    held = json.loads((run / "report.json").read_text())["peak_memory_bytes"]
    assert held == pytest.approx(planned, rel=0.15)
    assert "most memory, by stage" in output


def test_a_meter_counts_what_autograd_keeps_once_and_until_it_is_used() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    meter = MemoryMeter(lambda: [x])
    with meter.saving():
        y = torch.tanh(torch.tanh(x))
    meter.look()
    # x by itself, and the results of both functions, each of which is saved.
    assert meter.peak_bytes == 3 * x.nbytes
    y.sum().backward()
    meter.peak_bytes = 0
    meter.look()
    assert meter.peak_bytes == x.nbytes
