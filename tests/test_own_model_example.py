"""The guide to a model of one's own: its commands, run as they stand, and its example cut where it is most awkward."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import plans
from pd_format.layers.factory import load_function
from pd_format.profile import InputSpec
from pd_plan.cli import main as pd_plan
from pd_profile.cli import main as pd_profile
from pd_train.cli import main as pd_train
from pd_train.launch import launch
from pd_train.options import OptimizerOptions, RunOptions

ROOT = plans.HERE.parent
PROGRAMS = {"pd-profile": pd_profile, "pd-plan": pd_plan, "pd-train": pd_train}
INPUTS = (
    InputSpec(name="x", shape=(32, 16), dtype="float32"),
    InputSpec(name="category", shape=(32,), dtype="int64"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the example in it, and weights to start from."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("examples/own_model.py", run_name="__main__")
    return tmp_path


def commands() -> list[list[str]]:
    """The guide's block of commands, one list of words each."""
    text = (ROOT / "docs" / "your-own-model.md").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    start = lines.index("python examples/own_model.py")
    return [shlex.split(line) for line in lines[start : start + 5]]


def test_the_commands_of_the_guide_work_as_they_stand(folder: Path) -> None:
    text = " ".join((ROOT / "examples" / "own_model.py").read_text(encoding="utf-8").replace("\\\n", "").split())
    outputs = []
    for program, *arguments in commands():
        assert " ".join([program, *arguments]) in text, "the example says something else"
        if program == "python":
            continue
        # Only shorter: the last of two equal options counts.
        shorter = {"pd-profile": ["--minibatches", "2"], "pd-train": ["--device", "cpu"]}.get(program, [])
        if "--epochs" in arguments:
            shorter += ["--epochs", "2"]
        result = CliRunner().invoke(PROGRAMS[program], [*arguments, *shorter])
        assert result.exit_code == 0, result.output
        outputs.append(result.stdout)
    assert "gate (Gate) stays one layer" in outputs[0]
    assert "best validation loss" in outputs[2]
    lines = (folder / "runs" / "shop" / "metrics.jsonl").read_text().splitlines()
    report = json.loads(next((folder / "runs").glob("shop_model-*/report.json")).read_text())
    assert report["validation_loss"] == pytest.approx(json.loads(lines[-1])["validation_loss"])


def test_what_crosses_the_awkward_cuts_trains_as_in_plain_torch(folder: Path) -> None:
    """Cut before the gate, and between gate and merge: a tuple with perhaps None, a bool and a tuple."""
    name = "examples/own_model.py"
    plan = plans.plan_of(f"{name}:shop_model", INPUTS, "2-1-1", ["add", "gate"], data=f"{name}:shop_data")
    plan = plan.model_copy(update={"task": f"{name}:shop_loss"})
    (folder / "run").mkdir()
    adam = OptimizerOptions("adam", lr=0.001)
    launch(
        RunOptions(
            plan, folder / "run", plan.data, 2, optimizer=adam, device="cpu", stall_timeout=60.0, init_from="weights.pt"
        ),
        lambda event: None,
    )
    before = torch.load("weights.pt", weights_only=True)
    after = torch.load("run/model.pt", weights_only=True)
    changed = {key.partition(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"category", "gate", "hidden", "rating", "returned"}
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # It starts from what plain PyTorch has learnt, far below the loss of about 1.4 of random weights.
    assert lines[0]["train_loss"] < 0.4
    model = load_function(f"{name}:shop_model")()
    assert isinstance(model, torch.nn.Module)
    model.load_state_dict(after)
    model.eval()
    _, validation = load_function(f"{name}:shop_data")()  # type: ignore[misc]
    loss = load_function(f"{name}:shop_loss")
    with torch.no_grad():
        # By minibatches, since the gate branches on the mean over one.
        parts = [
            loss(model(validation.x[rows], validation.category[rows]), {
                "rating": validation.rating[rows], "returned": validation.returned[rows]
            })
            for rows in torch.arange(256).split(32)
        ]  # fmt: skip
    assert lines[-1]["validation_loss"] == pytest.approx(sum(map(float, parts)) / 8, rel=1e-5)
