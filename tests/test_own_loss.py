"""A loss of the user's own: what it is given, what it may return, and its way from the profile into training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from pd_format.errors import UserError
from pd_format.layers.task import get_task
from pd_format.plan import read_plan
from pd_format.profile import read_profile
from pd_plan.cli import main as pd_plan
from pd_profile.cli import main as pd_profile
from pd_train.cli import main as pd_train

CODE = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Two(nn.Module):
    """Predicts a number and a class."""
    def __init__(self):
        super().__init__()
        self.body, self.number, self.kind = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 3)
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"number": self.number(h), "kind": self.kind(h)}

def two():
    return Two()

def line():
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

def both(output, targets):
    number, kind = targets["number"], targets["kind"]
    return nn.functional.mse_loss(output["number"], number) + nn.functional.cross_entropy(output["kind"], kind)

both.random_targets = lambda output, generator: {
    "number": torch.randn(output["number"].shape, generator=generator),
    "kind": torch.randint(3, output["kind"].shape[:1], generator=generator),
}

def summed(output, targets):
    return (output - targets) ** 2

def ranking(output, targets):
    return output[targets].mean()

def broken(output, targets):
    return output.mean()

broken.random_targets = lambda output, generator: 1 // 0

def counting(output, targets):
    return targets.sum()

class Samples(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 8, generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        x = self.x[index]
        return x, {"number": x[:1] * 2, "kind": int(x[1] > 0)}

def samples():
    return Samples(26, 1), Samples(9, 2)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(program: Any, *arguments: object) -> Result:
    return CliRunner().invoke(program, [str(each) for each in arguments])


def profile(*arguments: object) -> Result:
    return run(pd_profile, *arguments, "--minibatch-size", 4, "--minibatches", 1, "--threads", 1, "--device", "cpu")


OUTPUT = torch.arange(8.0).view(4, 2)


def test_a_function_is_called_as_it_is_and_its_samples_are_counted() -> None:
    task = get_task("torch.nn.functional:mse_loss")
    assert task.loss(OUTPUT, OUTPUT + 2) == 4
    assert task.correct(OUTPUT, OUTPUT) is None
    assert task.samples({"weight": torch.tensor(1.0), "parts": [None, torch.zeros(5, 2)]}) == 5
    with pytest.raises(UserError, match=r"The targets of a minibatch are \['a'\]; expected a tensor"):
        task.samples(["a"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("net.py:summed", r"returned \(4, 2\) float32; expected the mean over the minibatch, a floating-point tensor"),
        ("net.py:counting", r"returned \(\) int64; expected the mean"),
        ("torch.nn:MSELoss", "names a class; expected a function of output and targets"),
    ],
)
def test_what_is_no_mean_is_refused(name: str, message: str) -> None:
    targets = torch.ones(4, 2) if name.endswith("summed") else torch.ones(4, dtype=torch.int64)
    with pytest.raises(UserError, match=message):
        get_task(name).loss(OUTPUT, targets)


@pytest.mark.parametrize("name", ["net.py:gone", "gone.py:loss", "gone.module:loss"])
def test_a_missing_function_is_named_before_anything_starts(name: str) -> None:
    result = profile("net.py:line", "--loss", name)
    assert result.exit_code == 1
    assert "gone" in result.stderr
    assert "Traceback" not in result.output


def test_random_targets_are_like_the_output_or_what_the_function_says() -> None:
    generator = torch.Generator().manual_seed(0)
    like = get_task("torch.nn.functional:mse_loss").random_targets(OUTPUT.double(), generator)
    assert isinstance(like, Tensor)
    assert (like.shape, like.dtype) == (OUTPUT.shape, torch.float64)
    own = get_task("net.py:both").random_targets({"number": OUTPUT[:, :1], "kind": torch.zeros(4, 3)}, generator)
    assert isinstance(own, dict)
    assert {key: tuple(each.shape) for key, each in own.items()} == {"number": (4, 1), "kind": (4,)}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "net.py:ranking",
            r"--loss net\.py:ranking fails: IndexError: .*\(.*net\.py:\d+\)\. It was given the output \(4, 2\) float32 "
            r"and the targets \(4, 2\) float32\. These targets are random, .* ranking\.random_targets = lambda output",
        ),
        ("net.py:summed", r"returned \(4, 2\) float32; expected the mean over the minibatch"),
        ("net.py:broken", r"its random_targets fails: ZeroDivisionError: .*net\.py:\d+\)"),
    ],
)
def test_a_loss_that_fails_in_the_profiler_shows_the_shapes(loss: str, message: str, folder: Path) -> None:
    result = profile("net.py:line", "--loss", loss)
    assert result.exit_code == 1
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert not (folder / "profiles").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "mse"], "'mse' names no function; expected path/file.py:function"),
        (["--loss", "net.py:both", "--task", "classification"], "--loss and --task exclude each other"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    result = profile("net.py:line", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_plan_and_training_follow_the_profiles_loss(folder: Path) -> None:
    assert profile("net.py:two", "--loss", "net.py:both", "--data", "net.py:samples").exit_code == 0
    assert read_profile(folder / "profiles" / "two.json").task == "net.py:both"
    assert run(pd_plan, "--config", "1-1", "--bandwidth", "1gbps").exit_code == 0
    assert read_plan(folder / "plan.json").task == "net.py:both"
    refused = run(pd_train, "--target-accuracy", 0.9)
    assert refused.exit_code == 1
    assert "accuracy is not known: the plan's loss is a function of your own (net.py:both)" in refused.stderr
    command = ["--device", "cpu", "--epochs", 3, "--lr", 0.01]
    result = run(pd_train, *command, "--run-dir", "own")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (folder / "own" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["validation_accuracy"] is None for line in lines)
    assert lines[2]["validation_loss"] < lines[0]["validation_loss"]
    assert "accuracy" not in result.stdout
    assert "best validation loss" in result.stdout
    # Synthetic samples are given what the function says.
    synthetic = run(pd_train, *command, "--run-dir", "synthetic", "--data", "synthetic:10")
    assert synthetic.exit_code == 0, synthetic.output
