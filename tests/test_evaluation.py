"""pd-train --evaluate-only: the forward-only pipeline over the validation data, of weights that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.functional import cross_entropy

import kit
import plans
import runtime_models
from pd_format.jsonfile import write_record
from pd_format.profile import InputSpec
from pd_train.cli import main

MODELS = str(plans.HERE / "runtime_models.py")
INPUTS = (InputSpec(name="x", shape=(4, 16), dtype="float32"),)


def evaluate(folder: Path, *arguments: object, config: str = "1-1", **changes: Any) -> Result:
    cuts = {1: [], 2: ["1"], 3: ["1", "3"]}[len(config.split("-"))]
    data = f"{MODELS}:{changes.pop('data', 'numbers_17')}"
    plan = plans.plan_of(f"{MODELS}:perceptron", INPUTS, config, cuts, data=data).model_copy(update=changes)
    write_record(folder / "plan.json", plan)
    command = ["--plan", folder / "plan.json", "--run-dir", folder / "run", "--device", "cpu", "--evaluate-only"]
    return CliRunner().invoke(main, [str(each) for each in [*command, *arguments]])


@pytest.mark.parametrize(
    ("config", "changes"),
    [("2-1-1", {"inference": True}), ("1-2", {}), ("2", {})],
    ids=["a plan for inference", "replicas at the end", "one stage"],
)
def test_every_plan_computes_what_plain_torch_computes(config: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(11)
    model = kit.K1()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    result = evaluate(tmp_path, "--init-from", tmp_path / "w.pt", config=config, **changes)
    assert result.exit_code == 0, result.output
    images, labels = runtime_models.numbers_17()[1].tensors
    with torch.no_grad():
        output = model(images)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["validation_loss"] == pytest.approx(cross_entropy(output, labels).item(), rel=1e-5)
    assert report["validation_accuracy"] == (output.argmax(1) == labels).sum().item() / 11
    assert (report["samples"], report["minibatches"], report["config"]) == (11, 3, config)
    assert report["samples_per_second"] == pytest.approx(11 / report["seconds"])
    assert report["options"]["init_from"] == str(tmp_path / "w.pt")
    names = {each.name for each in (tmp_path / "run").iterdir() if not each.name.endswith(".log")}
    assert names == {"plan.json", "report.json"}
    table = result.stdout.partition("Evaluation")[2]
    assert f"{report['validation_accuracy']:.2%}".replace("%", " %") in table
    assert "11 in " in table


def test_another_metric_and_an_empty_training_set(tmp_path: Path) -> None:
    torch.save(kit.K1().state_dict(), tmp_path / "w.pt")
    arguments = ["--init-from", tmp_path / "w.pt", "--metric", "perplexity"]
    result = evaluate(tmp_path, *arguments, config="1", data="numbers_0")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["metric_value"] == pytest.approx(2.718281828459045 ** report["validation_loss"])
    assert "validation perplexity" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "random ones would be evaluated; say which with --init-from weights.pt"),
        (
            ["--init-from", "w.pt", "--lr", "0.1"],
            "--lr means nothing with --evaluate-only, which trains nothing; leave it out.",
        ),
        (["--init-from", "w.pt", "--target-accuracy", "0.9"], "--target-accuracy means nothing with --evaluate-only"),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = evaluate(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_are_noticed(tmp_path: Path) -> None:
    model = kit.K1()
    model[4].bias.data.fill_(torch.nan)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    result = evaluate(tmp_path, "--init-from", tmp_path / "w.pt", config="1")
    assert result.exit_code == 1
    assert "the loss of validation minibatch 0 of epoch 1 is nan; stopped." in " ".join(result.stderr.split())
