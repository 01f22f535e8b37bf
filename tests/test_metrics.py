"""By what a run is judged: which way is better, how targets are given, what reaches the files and the person."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import plans
from pd_format.errors import UserError
from pd_format.jsonfile import write_record
from pd_format.layers.task import get_task
from pd_format.profile import InputSpec
from pd_train.cli import main
from pd_train.display.opening import open_display
from pd_train.events import EpochEnded, EpochMetrics
from pd_train.measured import measure_of
from pd_train.metrics import METRICS, default_metric, perplexity_of

MODELS = str(plans.HERE / "runtime_models.py")


@pytest.mark.parametrize(
    ("metric", "value", "target", "reached"),
    [
        ("accuracy", 0.97, 0.97, True),
        ("accuracy", 0.96, 0.97, False),
        ("meteor", 0.3, 0.294, True),
        ("loss", 0.2, 0.3, True),
        ("loss", 0.31, 0.3, False),
        ("perplexity", 3.9, 4.0, True),
        ("perplexity", 4.1, 4.0, False),
        ("perplexity", None, 4.0, False),
        ("accuracy", None, 0.0, False),
    ],
)
def test_a_target_is_reached_from_the_right_side(
    metric: str, value: float | None, target: float, reached: bool
) -> None:
    assert METRICS[metric].is_reached(value, target) is reached


def test_the_best_value_is_the_largest_or_the_smallest() -> None:
    assert METRICS["accuracy"].best([0.2, None, 0.9, 0.5]) == 0.9
    assert METRICS["perplexity"].best([20.0, None, 9.0, 11.0]) == 9.0
    assert METRICS["loss"].best([None]) is None


def test_language_models_are_judged_by_perplexity_and_others_by_accuracy() -> None:
    tasks = ("classification", "language-modeling", "captioning")
    assert [default_metric(task) for task in tasks] == ["accuracy", "perplexity", "accuracy"]


def test_perplexity_is_the_exponential_of_the_loss_if_that_is_a_number() -> None:
    assert perplexity_of(math.log(256)) == pytest.approx(256)
    assert perplexity_of(None) is None
    assert perplexity_of(1e6) is None


def pd_train(folder: Path, data: str, config: str, *arguments: object, **changes: Any) -> Result:
    inputs = (InputSpec(name="x", shape=(4, 16), dtype="float32"),)
    cuts = ["1"] if "-" in config else []
    plan = plans.plan_of(f"{MODELS}:perceptron", inputs, config, cuts, data=f"{MODELS}:{data}", **changes)
    write_record(folder / "plan.json", plan)
    options = ["--plan", folder / "plan.json", "--run-dir", folder / "run", *arguments]
    return CliRunner().invoke(main, [str(each) for each in options])


def files(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "run" / "report.json").read_text())


def test_a_data_set_judges_the_predictions_of_its_samples_in_order(tmp_path: Path) -> None:
    result = pd_train(tmp_path, "judged", "1-2", "--metric", "meteor", "--epochs", 2, "--target-metric", 1)
    assert result.exit_code == 0, result.output
    lines, report = files(tmp_path)
    # Right at its own sample only, so the order of two replicas' minibatches matters.
    values = [line["validation_meteor"] for line in lines]
    assert values == [pytest.approx(line["validation_accuracy"]) for line in lines]
    assert values[-1] > 0
    assert (report["metric"], report["best_metric"]) == ("meteor", max(values))
    assert re.search(rf"best validation meteor +│ {max(values):.4f}", result.stdout)
    assert re.search(r"target 1.0000 +│ (not )?reached", result.stdout)
    assert re.search(r"accuracy \d.*, meteor 0\.\d{4}  ", result.stdout)


def test_a_run_stops_once_the_perplexity_has_fallen_enough(tmp_path: Path) -> None:
    result = pd_train(tmp_path, "numbers_40", "1", "--metric", "perplexity", "--target-metric", 100, "--epochs", 3)
    assert result.exit_code == 0, result.output
    (line,), report = files(tmp_path)
    assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
    assert list(line)[-3:] == ["validation_loss", "validation_accuracy", "validation_perplexity"]
    assert (report["reached_target"], report["best_metric"]) == (True, line["validation_perplexity"])
    assert report["options"]["target_metric"] == 100
    assert re.search(r"target 100.00 +│ reached in", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--metric", "meteor"],
            "--metric meteor: the validation data of --data .*:numbers_40 cannot judge predictions",
        ),
        (["--metric", "meteor", "--target-metric", 29.4], "found 29.4; a validation's meteor is between 0 and 1"),
        (["--target-metric", 97], "found 97; a validation's accuracy is between 0 and 1"),
        (["--metric", "perplexity", "--target-metric", 0.5], "found 0.5; a validation's perplexity is from 1 on"),
        (["--metric", "loss", "--target-metric", "nan"], "nan is no finite number"),
        (["--target-accuracy", 0.9, "--metric", "loss"], "--target-accuracy and --metric loss exclude each other"),
        (
            ["--target-accuracy", 0.9, "--target-metric", 0.9],
            "--target-accuracy and --target-metric exclude each other",
        ),
    ],
)
def test_what_a_run_cannot_be_judged_by_is_refused(arguments: list[object], message: str, tmp_path: Path) -> None:
    result = pd_train(tmp_path, "numbers_40", "1", *arguments)
    assert result.exit_code in (1, 2)
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert "Traceback" not in result.output


def test_a_data_set_may_refuse_a_metric_before_training() -> None:
    class Picky:
        def check_metric(self, name: str) -> None:
            raise UserError(f"{name} needs Java")

        def metric(self, name: str, predictions: object) -> float:
            raise AssertionError

    with pytest.raises(UserError, match="meteor needs Java"):
        measure_of(Picky(), "msvd:clips", "meteor", get_task("classification"), "classification")


def test_predictions_are_the_likeliest_classes() -> None:
    logits = torch.tensor([[[0.0, 1.0], [2.0, 1.0]], [[0.0, 3.0], [0.0, 1.0]]])
    assert get_task("classification").predictions(logits).tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("perplexity", 7.389, "validation 2.0000, accuracy 30.00 %, perplexity 7.39"),
        ("perplexity", None, "validation 2.0000, accuracy 30.00 %, perplexity -"),
        ("perplexity", 123456.0, "validation 2.0000, accuracy 30.00 %, perplexity 1.23e+05"),
        ("loss", None, "validation 2.0000, accuracy 30.00 %"),
    ],
)
def test_the_line_of_an_epoch_shows_the_metric(metric: str, value: float | None, text: str) -> None:
    stream = io.StringIO()
    open_display(stream=stream).handle(EpochEnded(EpochMetrics(0, 4.0, 40, 320.0, 0.5, 2.0, 0.3, metric, value), 1))
    assert f"  {text}  320 samples/s" in stream.getvalue()
